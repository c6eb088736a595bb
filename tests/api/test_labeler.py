"""The labeler: what a call costs, that it is charged before noise, and what an interruption or a restart leaves."""

import errno
import json
import math
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pate_torch import load_student
from pate_torch.accounting import gdp
from pate_torch.api.labeler import PrivateLabeler
from pate_torch.hypotheses.classes import Intervals, Thresholds
from pate_torch.hypotheses.sample import Sample
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.sensitive import Votes
from pate_torch.students.training import Supervised

DELTA = 1e-5
SPEC = DataSpec(name="line", num_classes=2, input_shape=(1,), class_names=("low", "high"), mean=(0.0,), std=(1.0,))
PLANE = DataSpec(name="plane", num_classes=2, input_shape=(2,), class_names=("a", "b"), mean=(), std=())
SPARSE = SparseVector(epsilon=2.0, delta=1e-6, max_failures=2)


def make_vote_function(teachers):
    """All teachers agree: a point is high above zero."""

    def count_votes(x):
        high_Q = (x[:, 0] > 0).long()
        return Votes(torch.stack([(1 - high_Q) * teachers, high_Q * teachers], 1), teachers)

    return count_votes


def cost(sigma, questions):
    return pytest.approx(gdp.compute_epsilon(math.sqrt(2 * questions) / sigma, DELTA), abs=1e-9)


def points(*values):
    return torch.tensor([[float(v)] for v in values])


def open_account(ledger, name, budget_epsilon, planned_events):
    ledger.open_account(name, budget_epsilon=budget_epsilon, delta=DELTA, adjacency="replace_one", unit="record",
                        planned_events=planned_events)  # fmt: skip


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        open_account(ledger, "line", 20.0, GNMax(sigma=10.0).privacy_events(10))
        open_account(ledger, "svt", 50.0, SPARSE.privacy_events(30))
        yield ledger


@pytest.fixture
def used(ledger):
    """What came out, of all that was reserved."""
    return lambda: ledger.get_account("line").ex_post_guarantee.epsilon


@pytest.fixture
def make(tmp_path, ledger):
    labelers = []

    def make_labeler(*, teachers=100, account="line", seed=None, **changes):
        settings = {"mechanism": GNMax(sigma=10.0), "num_queries": 8, "spec": SPEC} | changes
        budget = Budget.from_account(ledger, account, insecure_seed=seed)
        count_votes, journal = make_vote_function(teachers), tmp_path / "answers.jsonl"
        labelers.append(PrivateLabeler(count_votes, budget=budget, journal=journal, **settings))
        return labelers[-1]

    yield make_labeler
    for labeler in labelers:
        labeler._journal.close()


def kill(labeler):
    """End the labeler as a killed process does: the block is not settled."""
    labeler._journal.close()


def test_one_question_or_a_batch(make):
    labeler = make()
    assert labeler.answer(torch.tensor([3.0])).item() == 1
    assert labeler.answer(points(-1, 2, -3)).tolist() == [0, 1, 0]
    assert labeler.history.x[:, 0].tolist() == [3, -1, 2, -3]
    assert labeler.history.label.tolist() == [1, 0, 1, 0]


def test_a_block_is_reserved_whole_and_settled_at_what_was_asked(make, used):
    labeler = make()
    assert labeler.epsilon == 0
    labeler.answer(points(1, 2, 3))
    assert labeler.epsilon == cost(10, 8)
    labeler.close()
    assert used() == cost(10, 3)
    assert labeler.epsilon == cost(10, 8)  # what it asked may follow from what it was told


def test_blocks_follow_one_another_and_compose(make, ledger, used):
    labeler = make(num_queries=4)
    for value in range(10):
        labeler.answer(points(value))
    labeler.close()
    assert used() == cost(10, 10) and labeler.epsilon == cost(10, 12)
    assert ledger.get_account("line").num_releases == 3


def test_a_question_asked_before_is_free(make, ledger):
    labeler = make()
    first = labeler.answer(points(1, 2, 1))
    entries = len(ledger.read_entries())
    assert labeler.answer(points(2, 1)).tolist() == first[[1, 0]].tolist()
    assert len(ledger.read_entries()) == entries and len(labeler.history) == 2


def test_the_charge_stands_before_the_first_noise(make, ledger, monkeypatch):
    states, draw = [], NoiseSource.draw_gaussian

    def draw_watched(self, *args):
        states.append((ledger.get_account("line").guarantee.epsilon, ledger.read_entries()[-1].kind))
        return draw(self, *args)

    monkeypatch.setattr(NoiseSource, "draw_gaussian", draw_watched)
    labeler = make()
    labeler.answer(points(1, 2))
    labeler.answer(points(3))
    assert states == [(cost(10, 8), kind) for kind in ("reserve", "resume")]


def test_past_the_cap_nothing_is_drawn(make, ledger, monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: pytest.fail("noise was drawn"))
    labeler = make(mechanism=GNMax(sigma=0.1))
    with pytest.raises(BudgetExceeded):
        labeler.answer(points(1))
    assert ledger.get_account("line").guarantee.epsilon == 0 and len(labeler.history) == 0


def test_an_interrupted_call_stays_charged_at_its_worst(make, used, monkeypatch):
    labeler = make()
    labeler.answer(points(1))
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "draw_gaussian", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            labeler.answer(points(2))
    labeler.close()
    again = make()
    assert used() == cost(10, 8)
    again.answer(points(2))
    assert used() == cost(10, 16)  # another block
    again.close()
    assert used() == cost(10, 9) and again.history.x[:, 0].tolist() == [1, 2]


def test_a_block_goes_on_after_a_restart(make, ledger, used):
    labeler = make()
    answers = labeler.answer(points(1, -2))
    kill(labeler)
    again = make()
    entries = len(ledger.read_entries())
    assert again.answer(points(1, -2)).tolist() == answers.tolist()
    assert len(ledger.read_entries()) == entries
    again.answer(points(3))
    assert again.epsilon == cost(10, 8)  # one block, reserved once
    again.close()
    assert used() == cost(10, 3)


def test_a_block_of_another_mechanism_is_settled_at_what_it_answered(make, ledger, used):
    labeler = make()
    labeler.answer(points(1, -2))
    labeler.close(settle=False)
    assert used() == cost(10, 8)
    again = make(mechanism=GNMax(sigma=20.0))
    assert used() == cost(10, 2)
    again.answer(points(3))
    assert ledger.get_account("line").num_releases == 1 and ledger.get_account("line").num_open == 1


@pytest.mark.parametrize("cut", [1, 40, "line"])
def test_answers_that_are_not_whole_on_disk_are_charged_at_their_worst(make, used, tmp_path, cut):
    """Torn, or an older copy of the journal: either way the ledger has noted a call that the journal has not."""
    labeler = make()
    labeler.answer(points(1))
    labeler.answer(points(2))
    kill(labeler)
    path = tmp_path / "answers.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content[:-1].rfind(b"\n") + 1] if cut == "line" else content[:-cut])
    assert make().history.x[:, 0].tolist() == [1]
    assert used() == cost(10, 8)


def test_a_crash_between_commit_and_its_line_is_not_settled_twice(make, used, tmp_path):
    labeler = make()
    labeler.answer(points(1))
    labeler.close()
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    make()
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "close"
    assert used() == cost(10, 1)


def test_threads_get_right_answers_and_are_charged_each_question_once(make, ledger, used):
    """As a web server asks: made in one thread, asked by others, the same points among them."""
    labeler = make()
    questions = [float(v) for v in range(-10, 11) if v] * 3
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda value: labeler.answer(torch.tensor([value])).item(), questions))
    assert answers == [int(value > 0) for value in questions] and len(labeler.history) == 20
    labeler.close()
    assert used() == cost(10, 20)
    ledger.verify()
    assert len(make().history) == 20


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_a_journal_without_its_ledger_is_refused(make, tmp_path):
    labeler = make()
    labeler.answer(points(1))
    labeler.close()
    with Ledger(tmp_path / "new.sqlite") as new:
        open_account(new, "line", 20.0, ())
        with pytest.raises(ValueError, match="another ledger"):
            PrivateLabeler(
                make_vote_function(100),
                mechanism=GNMax(sigma=10.0),
                budget=Budget.from_account(new, "line"),
                journal=tmp_path / "answers.jsonl",
                spec=SPEC,
            )


def test_one_journal_has_one_writer_one_account_and_is_never_another_file(make, tmp_path):
    labeler, path = make(), tmp_path / "answers.jsonl"
    with pytest.raises(ValueError, match="held by another"):
        make()
    labeler.answer(points(1))
    labeler.close()
    with pytest.raises(ValueError, match="shape"):
        make(spec=PLANE)
    with pytest.raises(ValueError, match="account 'line', not 'svt'"):
        make(account="svt")
    path.write_text(path.read_text().replace('"labels"', '"lables"'))
    with pytest.raises(ValueError, match="damaged"):
        make()
    path.write_text("my notes, without a newline")
    with pytest.raises(ValueError, match="not a journal"):
        make()
    assert path.read_text() == "my notes, without a newline"


def test_a_journal_where_files_cannot_be_locked_is_refused(make, ledger, monkeypatch):
    def flock(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=r"journal=.*cannot be locked \(Operation not supported\).*local disk"):
        make()
    assert ledger.get_account("line").num_open == 0


@pytest.mark.parametrize(
    "x", [torch.zeros(3, 2), torch.zeros(2), torch.tensor(1.0), points(math.nan)], ids=["wide", "row", "scalar", "nan"]
)
def test_points_of_another_shape_are_refused(make, x):
    with pytest.raises(ValueError, match="x="):
        make().answer(x)


def test_votes_on_other_points_are_refused_before_any_charge(make, ledger):
    labeler = make()
    labeler._count_votes = lambda x: make_vote_function(100)(x[:1])
    with pytest.raises(ValueError, match="teachers"):
        labeler.answer(points(1, 2))
    assert ledger.get_account("line").guarantee.epsilon == 0


# ---- mechanisms that stop ------------------------------------------------------------------------------------------


@pytest.fixture
def make_sparse(make):
    return lambda: make(mechanism=SPARSE, num_queries=30, teachers=4000, account="svt")


def count_events(ledger):
    return {type(event).__name__: event.count for event in ledger.get_account("svt").incurred_events}


def test_the_sparse_vector_pays_for_a_block_once_and_its_sealed_threshold_goes_on(make_sparse, ledger, tmp_path):
    """Unanimous teachers: no failure, so all turns pay for one threshold, and share one delta."""
    labeler = make_sparse()
    assert labeler.answer(points(1, 2, 3)).tolist() == [1, 1, 1]
    (sealed,) = (tmp_path / "suspended").glob("*.json")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (sealed, sealed.parent)] == [0o600, 0o700]
    state = json.loads(sealed.read_text())["kept"]
    kill(labeler)
    again = make_sparse()
    for value in range(4, 8):
        assert again.answer(points(value)).tolist() == [1]
    assert json.loads(sealed.read_text())["kept"] == state and state["blocks"] == 1
    again.close()
    assert not sealed.exists()
    assert count_events(ledger) == {"DeltaEvent": 1, "PureDPEvent": 1} and ledger.get_account("svt").num_open == 0
    (pure,) = (e.epsilon for e in ledger.get_account("svt").incurred_events if type(e).__name__ == "PureDPEvent")
    assert pure == pytest.approx(2 / SPARSE.make_cost(30).noise_scale)
    for written in (tmp_path / "answers.jsonl", tmp_path / "ledger.sqlite"):
        assert repr(state["threshold"]).encode() not in written.read_bytes()


@pytest.mark.parametrize("fault", ["lost", "edited", "older", "damaged"])
def test_a_threshold_that_the_ledger_does_not_know_is_refused_and_its_block_spent(make_sparse, ledger, tmp_path, fault):
    labeler = make_sparse()
    labeler.answer(points(1))
    (sealed,) = (tmp_path / "suspended").glob("*.json")
    older = sealed.read_bytes()
    labeler.answer(points(2))
    kill(labeler)
    edited = sealed.read_bytes().replace(b'"blocks": 1', b'"blocks": 0')
    sealed.write_bytes({"lost": b"", "edited": edited, "older": older, "damaged": older[:20]}[fault])
    if fault == "lost":
        sealed.unlink()
    again = make_sparse()
    again.answer(points(3))
    account = ledger.get_account("svt")
    assert account.num_open == 2  # the first stays as it was reserved, two blocks at worst; the answer opened another
    again.close()
    assert count_events(ledger) == {"PureDPEvent": 3, "DeltaEvent": 2}


def test_a_mechanism_that_stops_ends_its_block(make, ledger):
    """Confident stops after two answers: the third query of the batch was not asked, and may be asked again."""
    labeler = make(mechanism=ConfidentGNMax(screen_sigma=5.0, threshold=60.0, sigma=10.0, max_answers=2))
    assert labeler.answer(points(1, 2, 3)).tolist() == [1, 1, -1]
    assert ledger.get_account("line").num_releases == 1 and len(labeler.history) == 2
    assert labeler.answer(points(3)).tolist() == [1]


# ---- publishing ----------------------------------------------------------------------------------------------------


def test_a_published_student_answers_for_free_after_a_restart_too(make, ledger):
    labeler = make(num_queries=40)
    labeler.answer(points(*[v / 4 for v in range(-20, 20)]))
    with pytest.raises(ValueError, match="min_answers"):
        labeler.publish(Supervised(network="logistic", steps=2, augment=None), min_answers=41)
    student = Supervised(network="logistic", steps=150, learning_rate=0.05, augment=None)
    labeler.publish(student, pool_x=points(7), min_answers=40)
    spent = ledger.get_account("line").guarantee.epsilon
    assert spent == cost(10, 40)
    assert labeler.answer(points(-9, 9)).tolist() == [0, 1]
    assert labeler.answer(torch.tensor([7.5])).item() == 1
    labeler.close()
    again = make()
    assert again.answer(points(-9, 9)).tolist() == [0, 1]
    assert ledger.get_account("line").guarantee.epsilon == spent and len(again.history) == 40


@pytest.mark.filterwarnings("ignore::pate_torch.hypotheses.sample.BelowGuaranteeWarning")
def test_a_hypothesis_is_chosen_and_charged_once(make, ledger):
    labeler = make(num_queries=20)
    labeler.answer(points(*[v - 9.5 for v in range(20)]))
    x = np.linspace(-9, 9, 2000)
    sample, before = Sample(x, x > 0), ledger.get_account("line").guarantee.epsilon
    cut = labeler.publish_hypothesis(Thresholds(), sample, epsilon=1.0)
    assert abs(cut) < 2  # 2000 records at epsilon 1: a wrong cut costs a hundred errors
    charged = ledger.get_account("line").guarantee.epsilon
    assert charged > before and labeler.answer(points(-30, 30)).tolist() == [0, 1]
    labeler.close()
    again = make()
    assert again.publish_hypothesis(Thresholds(), sample, epsilon=1.0) == cut
    assert ledger.get_account("line").guarantee.epsilon == charged
    with pytest.raises(ValueError, match="thresholds"):
        again.publish_hypothesis(Intervals(), sample, epsilon=1.0)


def test_seeded_noise_is_marked_for_good(make, ledger):
    with pytest.warns(UserWarning, match="^NOT PRIVATE. The noise of this run was seeded"):
        labeler = make(seed=0)
    labeler.answer(points(-1, 1))
    labeler.publish(Supervised(network="logistic", steps=2))
    labeler.close()
    with pytest.warns(UserWarning, match="^NOT PRIVATE"):
        again = make()
    assert labeler.epsilon == math.inf and not again.private and not ledger.get_account("line").is_private
    marked = [line.kind for line in again._journal.lines if "NOT PRIVATE" in line.facts.get("note", "")]
    assert marked == ["block", "student"] and b"NOT PRIVATE" in again.student_path.read_bytes()
    assert load_student(again.student_path).spec == SPEC


@pytest.mark.filterwarnings("ignore::pate_torch.hypotheses.sample.BelowGuaranteeWarning")
def test_a_hypothesis_chosen_with_seeded_noise_is_marked(make, tmp_path):
    with make(num_queries=20) as secret:
        secret.answer(points(*[v - 9.5 for v in range(20)]))
        assert secret.private
    with pytest.warns(UserWarning, match="^NOT PRIVATE"):
        labeler = make(seed=0)
    x = np.linspace(-9, 9, 2000)
    labeler.publish_hypothesis(Thresholds(), Sample(x, x > 0), epsilon=1.0)
    assert not labeler.private and "NOT PRIVATE" in (tmp_path / "answers.jsonl").read_text()
