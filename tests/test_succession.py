"""Successors: teachers who start from a released student, and the students that learn from their answers."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pate_torch import labelling, pipeline
from pate_torch.belief import beliefs
from pate_torch.budget import Budget
from pate_torch.data.glyphs import Glyphs
from pate_torch.data.partition import AddRemove, ReplaceOne
from pate_torch.labelling import Guide
from pate_torch.ledger import Ledger
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.networks import headless
from pate_torch.protocols import QueryState, StudentTask
from pate_torch.queries.prototypes import Prototypes
from pate_torch.queries.prototypes_then_margin import PrototypesThenMargin
from pate_torch.queries.random import Random
from pate_torch.released import write
from pate_torch.releasing import student_task
from pate_torch.students import rounds
from pate_torch.students.ensemble import Ensemble
from pate_torch.students.logistic import Logistic
from pate_torch.students.successive import Successive
from pate_torch.students.supervised import Supervised
from pate_torch.teachers.succession import Succession
from pate_torch.teachers.training import TeacherRecipe
from pate_torch.types import NoisyCounts, PrivateData, PublicPool, Release, Votes

SOURCE = Glyphs(private=320, public=120, test=60, num_classes=3, size=12, shift=0.5, rotate=12, noise=0.1)
STUDENT = Supervised(network="small_cnn", network_options={"channels": [4, 8], "hidden": 16}, steps=40, batch_size=16)
TEACHERS = 8


@pytest.fixture(scope="module")
def data():
    return SOURCE.load()


def taught(data, count=9, **changes):
    """A student of few labels, who errs: with 15, on a quarter of the points."""
    task = StudentTask(data.spec, data.pool.x, torch.arange(count), data.evaluation.pool_y[:count])
    return dataclasses.replace(STUDENT, **changes).fit(task, seed=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def student(data):
    return taught(data, 15, steps=100)


def succeed(data, student, partition, private=None, **changes):
    data = dataclasses.replace(data, private=private or data.private)
    shards = partition.shards(data.private, TEACHERS, seed=0)
    ensemble, row_PD = Succession(**changes).succeed(student, data, shards, encoder=None, seed=3)
    return ensemble, row_PD, shards


def differing(first, second):
    same_K = torch.stack([(first.params[n] == second.params[n]).flatten(1).all(1) for n in first.params]).all(0)
    return (~same_K).nonzero().squeeze(1).tolist()


def test_a_record_replaced_reaches_one_successor(data, student):
    before, rows, shards = succeed(data, student, ReplaceOne())
    x, y = data.private.x.clone(), data.private.y.clone()
    x[7], y[7] = 255 - x[7], (y[7] + 1) % 3
    after, same_rows, _ = succeed(data, student, ReplaceOne(), dataclasses.replace(data.private, x=x, y=y))
    assert differing(before, after) == [k for k in range(TEACHERS) if 7 in shards.of(k).tolist()]
    assert torch.equal(rows, same_rows)  # what they vote on is public
    moved = (before.votes(rows).counts_QC - after.votes(rows).counts_QC).abs().sum(1)
    assert moved.max() <= 2


def test_a_record_removed_reaches_one_successor_although_it_shifts_all_positions(data, student):
    before, _, shards = succeed(data, student, AddRemove())
    keep = [i for i in range(len(data.private)) if i != 3]
    fewer = PrivateData(
        data.private.x[keep], data.private.y[keep], data.private.unit_id[np.array(keep)], data.private.unit
    )
    after, _, _ = succeed(data, student, AddRemove(), fewer)
    assert differing(before, after) == [k for k in range(TEACHERS) if 3 in shards.of(k).tolist()]


def test_a_successor_corrects_the_student_it_starts_from(data, student):
    truth = data.evaluation.pool_y
    barely, rows, _ = succeed(data, student, AddRemove(), steps=1, learning_rate=1e-12)
    assert torch.equal(rows[:, :3], student.logits(data.pool.x))
    assert torch.equal(barely.predictions(rows).long(), student.predict(data.pool.x).expand(TEACHERS, -1))
    learnt, _, _ = succeed(data, student, AddRemove())
    errors = [int((said != truth).sum()) for said in (student.predict(data.pool.x), learnt.votes(rows).plurality())]
    assert errors[0] > 2 * errors[1]


def test_features_learnt_without_labels_stand_in_for_the_students_own(data, student):
    own, rows, shards = succeed(data, student, AddRemove())
    encoder = headless(taught(data, count=3).module)
    ensemble, there = Succession().succeed(student, data, shards, encoder=encoder, seed=3)
    assert torch.equal(there[:, :3], rows[:, :3]) and not torch.equal(there[:, 3:], rows[:, 3:])
    assert differing(own, ensemble) == list(range(TEACHERS))


class Alone(torch.nn.Module):
    """Without a layer that could be taken off."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 144))

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


@pytest.mark.parametrize("algorithm", [Ensemble(member=STUDENT, members=2), Logistic(), None], ids=lambda a: str(a)[:8])
def test_every_student_can_be_succeeded(data, student, algorithm):
    """The answers it learnt from are paid for: too late to refuse."""
    if algorithm is None:
        student = dataclasses.replace(student, module=Alone())
    else:
        task = StudentTask(data.spec, data.pool.x, torch.arange(15), data.evaluation.pool_y[:15])
        student = algorithm.fit(task, seed=0, device=torch.device("cpu"))
    ensemble, rows, _ = succeed(data, student, AddRemove())
    truth = data.evaluation.pool_y
    before, after = student.predict(data.pool.x) == truth, ensemble.votes(rows).plurality() == truth
    assert torch.equal(rows[:, :3], student.logits(data.pool.x)) and after.sum() >= before.sum()


# ---- rounds answered by other teachers -----------------------------------------------------------------------------


def ask(tmp_path, votes, refit, *, seen, **changes):
    pool = PublicPool(torch.zeros(10, 2))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account(
            "made", budget_epsilon=900, delta=1e-5, adjacency="add_remove", unit="record", planned_events=()
        )
        given = {
            "mechanism": Gaussian(sigma=0.2),
            "strategy": Random(rounds=2),
            "budget": Budget.of(ledger, "made"),
            "num_queries": 8,
            "seed": 0,
        }
        spec = dataclasses.replace(SOURCE.load().spec, input_shape=(2,), mean=(0.0,) * 2, std=(1.0,) * 2)
        release = labelling.label(
            votes=votes, pool=pool, spec=spec, refit=refit, witness=seen.append, **(given | changes)
        )
        return release, ledger.entries("made")


def unanimous(label, teachers=30):
    counts = torch.zeros(10, 3, dtype=torch.int32)
    counts[:, label] = teachers
    return Votes(counts, teachers)


def test_successors_answer_from_the_next_round_on_at_the_same_price(tmp_path):
    seen, told = [], []

    def refit(so_far):
        told.append((len(so_far.query_Q), so_far.rounds))
        return Guide(torch.full((10, 3), 1 / 3), unanimous(2))

    release, entries = ask(tmp_path, unanimous(1), refit, seen=seen)
    assert release.label_Q.tolist() == [1] * 4 + [2] * 4
    assert release.rounds == (4, 4) and release.round_Q.tolist() == [0] * 4 + [1] * 4 and told == [(4, (4,))]
    (behind,) = seen
    assert behind.counts_QC.argmax(1).tolist() == release.label_Q.tolist() and behind.num_teachers == 30
    (tmp_path / "same").mkdir()
    same, _ = ask(tmp_path / "same", unanimous(1), lambda _: Guide(None), seen=[])
    assert same.label_Q.tolist() == [1] * 8 and release.events == same.events and release.planned == same.planned
    assert [entry.kind for entry in entries][-2:] == ["reserve", "commit"]


def test_as_many_successors_as_teachers(tmp_path):
    with pytest.raises(ValueError, match="as many teachers"):
        ask(tmp_path, unanimous(1), lambda _: Guide(None, unanimous(1, teachers=31)), seen=[])


# ---- questions -----------------------------------------------------------------------------------------------------


def state(data, **changes):
    none = torch.zeros(0, dtype=torch.int64)
    given = {"asked_Q": none, "label_Q": none, "remaining": 20, "rounds_left": 2, "seed": 5}
    return QueryState(spec=data.spec, pool_x=data.pool.x, **(given | changes))


def test_first_prototypes_then_the_smallest_margins(data):
    strategy = PrototypesThenMargin(first=6)
    first = strategy.select(state(data))
    assert (
        first.tolist()
        == dataclasses.replace(Prototypes(), name=strategy.name)
        .select(state(data, remaining=6, rounds_left=1))
        .tolist()
    )
    lead_P = torch.rand(len(data.pool.x), generator=torch.Generator().manual_seed(0))
    student_PC = torch.stack([(1 + lead_P) / 2, (1 - lead_P) / 2, torch.zeros_like(lead_P)], 1)
    asked = {"asked_Q": first, "label_Q": torch.zeros(6, dtype=torch.int64), "remaining": 14, "rounds_left": 1}
    then = strategy.select(state(data, **asked, student_PC=student_PC))
    open_P = torch.ones_like(lead_P, dtype=torch.bool)
    open_P[first] = False
    assert sorted(then.tolist()) == sorted(lead_P.masked_fill(~open_P, 9).argsort()[:14].tolist())
    again = strategy.select(state(data, **asked))  # nothing was answered: no student to waver
    assert len(again) == 14 and not set(again.tolist()) & set(first.tolist())
    with pytest.raises(ValueError, match="rounds"):
        PrototypesThenMargin(rounds=1)


# ---- students ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spy:
    """Keeps the tasks it is given."""

    tasks: list
    by: Supervised = STUDENT
    name: str = "spy"

    def fit(self, task, **given):
        self.tasks.append(task)
        return self.by.fit(task, **given)

    def __repr__(self):
        return "Spy()"


def test_a_student_per_round_put_right_where_teachers_were_asked(data):
    rounds._FITTED.clear()
    first, then = [], []
    algorithm, device = Successive(first=Spy(first), then=Spy(then)), torch.device("cpu")
    truth, query_Q, round_Q = data.evaluation.pool_y, torch.arange(14), torch.tensor([0] * 9 + [1] * 5)
    task = StudentTask(data.spec, data.pool.x, query_Q[:9], truth[:9])
    guide = algorithm.fit(task, seed=4, device=device)
    alone = STUDENT.fit(task, seed=4, device=device)
    assert torch.equal(guide.logits(data.pool.x), alone.logits(data.pool.x)) and not then
    both = dataclasses.replace(task, query_Q=query_Q, label_Q=(truth[:14] + 1) % 3, round_Q=round_Q)
    both.label_Q[:9] = truth[:9]
    algorithm.fit(both, seed=4, device=device)
    assert len(first) == 1  # the guide is the first student: it is not trained again
    (corrected,) = then
    expected = guide.predict(data.pool.x)
    expected[:14] = both.label_Q
    assert torch.equal(corrected.query_Q, torch.arange(len(data.pool))) and torch.equal(corrected.label_Q, expected)
    algorithm.fit(both, seed=5, device=device)
    assert len(first) == 2
    with pytest.raises(ValueError, match=r"student\.then"):
        Successive(first=STUDENT, then="vat")


def test_counts_are_believed_round_by_round(data):
    draw = torch.Generator().manual_seed(0)
    noise = (5 * torch.randn(12, 3, generator=draw)).round().long()
    leads = torch.tensor([80] * 6 + [4] * 6)
    counts = torch.nn.functional.one_hot(torch.arange(12) % 3, 3) * leads[:, None] + noise
    noisy = NoisyCounts(counts, 5.0)
    release = Release("r", torch.arange(12), counts.argmax(1), (), (), noisy, rounds=(6, 6))
    first, second = (beliefs(NoisyCounts(part, 5.0)) for part in counts.split(6))
    assert torch.equal(student_task(data, release).belief_QC, torch.cat([first, second]))
    assert not torch.allclose(student_task(data, release).belief_QC, beliefs(noisy))


# ---- whole runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path):
    algorithm = Successive(first=STUDENT, then=dataclasses.replace(STUDENT, batch_size=32))
    return pipeline.Plan(
        source=SOURCE,
        partition=AddRemove(),
        recipe=TeacherRecipe(network="logistic", steps=40, batch_size=8, learning_rate=0.02, backend="vectorised"),
        mechanism=Gaussian(sigma=1.0, counts=True),
        strategy=PrototypesThenMargin(first=10),
        student=algorithm,
        refit=algorithm,
        root=tmp_path,
        folder=tmp_path / "runs/glyphs/gaussian/first",
        seed=0,
        num_teachers=TEACHERS,
        num_queries=30,
        delta=1e-4,
        opening_budget=200.0,
        succession=Succession(steps=60),
        quiet=True,
    )


def test_a_run_with_successors_is_recorded_and_learnt_from_again(plan):
    rounds._FITTED.clear()
    report = pipeline.run(plan)
    record = json.loads((plan.folder / "release/release.json").read_text())
    assert record["succession"] is True and record["queries_by_round"] == [10, 20] and record["rounds"] == 2
    statement = " ".join((plan.folder / "release/README.md").read_text().split())
    assert "successors of each later round" in statement and "8 teachers (after the first round" in statement
    private = load_file(plan.folder / "private/votes.safetensors")
    assert private["counts_QC"].shape == (30, 3) and (private["counts_QC"].sum(1) == TEACHERS).all()
    rounds._FITTED.clear()
    again = dataclasses.replace(plan, labels=record["release_id"], folder=plan.folder.with_name("again"))
    assert pipeline.run(again).epsilon == report.epsilon
    students = [(p.folder / "release/student.safetensors").read_bytes() for p in (plan, again)]
    assert students[0] == students[1]
    same = pipeline.run(dataclasses.replace(plan, folder=plan.folder.with_name("same")))
    assert same.epsilon_charged == report.epsilon_charged  # found again, not paid again
    other = dataclasses.replace(plan, succession=None, folder=plan.folder.with_name("other"))
    assert pipeline.run(other).epsilon_charged > report.epsilon_charged


def test_rounds_that_do_not_add_up_are_refused(plan):
    pipeline.run(plan)
    file = plan.folder / "release/release.json"
    record = json.loads(file.read_text())
    for wrong in ([10, 19], [31, -1]):
        file.write_text(json.dumps(record | {"queries_by_round": wrong}))
        with pytest.raises(ValueError, match="edited"):
            pipeline.run(dataclasses.replace(plan, labels=record["release_id"], folder=plan.folder.with_name("again")))


def test_releases_of_before_had_one_round(plan, tmp_path):
    release = Release("r", torch.arange(4), torch.zeros(4, dtype=torch.int64), (), ())
    assert release.round_Q.tolist() == [0] * 4
    assert write(tmp_path / "old", release, {}, SOURCE.load().spec)["queries_by_round"] == [4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": Random()}, "two rounds"),
        ({"num_queries": 1}, "two rounds"),
        ({"votes": "somewhere.npy"}, "votes"),
    ],
)
def test_refuses(plan, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, **changes)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}])
def test_a_recipe_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError, match=f"succession.{next(iter(wrong))}"):
        Succession(**wrong)
