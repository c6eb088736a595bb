"""The contract of methods, with two methods of a user: one whose teachers are class means, one with a first stage."""

import contextlib
import hashlib
import html
import inspect
import io
import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import get_class

from pate_torch import PATE, pipeline
from pate_torch.cli import plan as plan_command
from pate_torch.cli.main import main as pate
from pate_torch.mechanisms.base import RecordMechanism, VoteMechanism
from pate_torch.mechanisms.class_counts import ClassCounts
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.base import MethodDescription, PrivateMethod
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.methods.voting import VotesFile, VotingMethod
from pate_torch.privacy.budget import Spending
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import DatasetFacts, assign_shards
from pate_torch.privacy.records import Answers
from pate_torch.release import membership
from pate_torch.teachers.voting import count_votes
from tests.command_runs import train
from tests.configurations import list_options, load_option
from tests.killed_runs import blobs, plan
from tests.mechanisms.mechanism_forms import ALL, made
from tests.privacy import neighbor_cases as cases
from tests.privacy import neighbor_choices as choices

NAMED = {name: get_class(load_option("method", name)["_target_"]) for name in list_options("method")}
"""The class behind every choice of ``method``."""
TAKES = {
    "gradients": ("gradient_descent",),
    "reverse_knn": ("histogram",),
    "teachers": tuple(name for name in ALL if name not in ("gradient_descent", "histogram")),
}
MAKE = {
    "gradients": partial(GradientMethod, size=100),
    "reverse_knn": ReverseKnn,
    "teachers": partial(TeacherVotes, num_teachers=20),
    "teachers_transductive": partial(TransductiveTeacherVotes, num_teachers=20),
    "votes_file": VotesFile,
}


def test_what_a_method_leaves_unsaid_keeps_it_from_being_built():
    said = {"mechanism_name", "noise", "validate", "privacy_events", "to_record", "prepare"}
    assert PrivateMethod.__abstractmethods__ == said
    assert LabelingMethod.__abstractmethods__ == VotingMethod.__abstractmethods__ == {"describe", "prepare"}


def test_every_method_is_one_of_these():
    assert set(NAMED) | {"votes_file"} == set(MAKE) | {"dpsgd"} and NAMED["dpsgd"] is DPSGD
    assert all(issubclass(kind, PrivateMethod) and not inspect.isabstract(kind) for kind in NAMED.values())
    assert all(name == kind.name for name, kind in NAMED.items())


@pytest.mark.parametrize("mechanism", ALL)
@pytest.mark.parametrize("method", MAKE)
def test_a_pair_is_built_where_the_mechanism_opens_what_the_method_gives_and_refused_elsewhere(method, mechanism):
    opens = made(mechanism, "torch")
    with pytest.raises(TypeError, match="mechanism"):
        MAKE[method]()  # the cost is a choice: nobody's noise is filled in
    if mechanism in TAKES.get(method, TAKES["teachers"]):
        pair = MAKE[method](mechanism=opens)
        assert pair.mechanism == opens and pair.noise == opens.noise == "torch" and pair.mechanism_name == mechanism
        assert isinstance(opens, VoteMechanism if isinstance(pair, VotingMethod) else RecordMechanism)
        return
    with pytest.raises(ValueError, match=rf"method='?{method}"):
        MAKE[method](mechanism=opens)


# ---- a method of the user in which teachers vote --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NearestMean(VotingMethod):
    """Sages without a network, each of which knows the mean of every class of its shard."""

    name: str = "nearest_mean"
    num_teachers: int

    @property
    def ensemble_size(self):
        return self.num_teachers

    def describe(self, facts):
        return MethodDescription(
            subject="sages",
            procedure="sages were asked about {asked} places, each by the class means it had seen. "
            "{mechanism} hid them.",
            query_sentence="{answered} of {asked} places, by sages",
            examples="Places as the sages named them.",
            assumptions=(f"The {facts.unit} was seen by one sage.",),
        )

    def validate(self, facts):
        super().validate(facts)
        facts.partition.check(facts.unit, facts.num_units, self.num_teachers)

    @staticmethod
    def select_rows(shards, teacher):
        return shards.get_indices(teacher)

    def prepare(self, inputs):
        records, spec = inputs.records, inputs.facts.spec
        shards = assign_shards(inputs.facts.partition, records, self.num_teachers, inputs.seed)
        pool_PD = spec.normalize(inputs.facts.pool.x).flatten(1)
        predictions = []
        for teacher in range(self.num_teachers):
            rows = self.select_rows(shards, teacher)
            x_ND, y_N = spec.normalize(records.x[rows]).flatten(1).clamp(-1e3, 1e3), records.y[rows]
            mean_CD = torch.full((spec.num_classes, pool_PD.shape[1]), 1e6)
            for c in y_N.unique().tolist():
                mean_CD[c] = x_ND[y_N == c].mean(0)
            predictions.append(torch.cdist(pool_PD, mean_CD).argmin(1))
        return self.from_votes(inputs, count_votes(torch.stack(predictions), spec.num_classes))


NEAREST_MEAN_YAML = """_target_: tests.methods.test_base.NearestMean
name: nearest_mean
num_teachers: ${num_teachers}
"""
SMALL = ("dataset.private=200", "dataset.public=60", "dataset.test=100", "num_teachers=8", "num_queries=6",
         "mechanism.sigma=2", "privacy.opening_budget=500", "method=nearest_mean")  # fmt: skip


@pytest.fixture
def search_path(tmp_path, monkeypatch):
    """The setting that ``--config-dir`` makes, for a folder with the user's file."""
    folder = tmp_path / "myconf" / "method"
    folder.mkdir(parents=True)
    (folder / "nearest_mean.yaml").write_text(NEAREST_MEAN_YAML)
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    return f"hydra.searchpath=[file://{folder.parent}]"


def read_records(home: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(home.glob("runs/*/*/*/release/release.json"))]


BRIEF = ("guide_student.steps=3", "student=supervised", "student.steps=3", "membership.records=40", "baseline=false")


def test_train_with_its_statement_and_the_owners_attack(tmp_path, search_path, monkeypatch):
    home = tmp_path / "home"

    def run(*more: str) -> str:
        outcome = train(home, *SMALL, *BRIEF, *more, search_path, monkeypatch=monkeypatch, base=[])
        assert outcome.code == 0, outcome.error
        return outcome.out

    printed, (record,) = run(), read_records(home)
    assert (record["voters"], record["num_teachers"]) == ("nearest_mean", 8)
    (folder,) = home.glob("runs/*/*/*/release")
    said = json.loads((folder / "privacy.json").read_text())
    statement = " ".join([*said["guarantee"]["plain_words"], *said["assumptions"]])
    page, card = (folder / "report.html").read_text(), (folder / "README.md").read_text()
    for text in (page, card, statement):
        assert "sages were asked about 6 places" in text and "The record was seen by one sage." in text
    assert "6 of 6 places, by sages" in page and "Places as the sages named them." in page
    for text in (page, card, statement, printed):
        words = html.unescape(text).replace("votes, teachers' accuracies or data-dependent costs", "")  # of any owner
        assert not re.search(r"teacher\b|teachers\b|gradient|\bcell|reverse|nearest to", words)
    run(f"labels={record['release_id']}")
    cards = [file.read_text() for file in home.glob("runs/*/*/*/release/README.md")]
    assert len(cards) == 2 and all("sages were asked about 6 places" in card for card in cards)
    assert json.loads((folder.parent / "private" / "summary.json").read_text())["membership"] is not None


def test_label_answers_by_them_and_trains_nothing(tmp_path, search_path):
    assert pate(["label", *SMALL, "dataset=digits", "quiet=true", search_path]) == 0
    (record,) = read_records(tmp_path / "home")
    assert record["queries_answered"] == 6 and record["voters"] == "nearest_mean"
    assert not list((tmp_path / "home").rglob("student.safetensors"))


def test_a_plan_foretells_them(tmp_path, search_path):
    report = plan_command.plan([*SMALL, "dataset=digits", search_path])
    (choice,) = report.choices
    assert choice.num_teachers == 8 and choice.epsilon is not None and choice.problem is None


def test_python_takes_them(tmp_path):
    method = NearestMean(num_teachers=8, mechanism=GNMax(sigma=2.0))
    assert isinstance(method, PrivateMethod)
    drawn = np.random.default_rng(0)
    y = drawn.integers(0, 3, 120)
    x = torch.tensor(drawn.normal(size=(120, 4)) + 3 * np.eye(4)[y], dtype=torch.float32)
    pate = PATE("mine", classes=3, teacher=method, delta=1e-5,
                budget_epsilon=500, home=tmp_path / "home")  # fmt: skip
    answers = pate.fit_teachers(x, torch.tensor(y)).label(x[:60], num_queries=30)
    assert float((answers.label_Q == torch.tensor(y)[answers.query_Q]).double().mean()) > 0.8
    pate.fit_student("supervised", network="logistic", steps=3)
    found = pate.membership(x + 10, torch.tensor(y), records=40)
    assert isinstance(found, membership.MembershipResult)


# ---- a method of the user with a first stage ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CountedReverseKnn(ReverseKnn):
    """Reverse k-NN labeling that asks at most one query for each unit that there seems to be."""

    name: str = "counted_reverse_knn"

    def prepare(self, inputs):
        prepared = super().prepare(inputs)
        prepared.num_queries = max(1, min(self.num_queries, round(float(inputs.first_answers.counts_C.sum()))))
        return prepared


HISTOGRAM = Histogram(sigma=3.0, adjacency="add_remove")
COUNTED_YAML = """defaults:
  - override /mechanism@_global_.mechanism: histogram

_target_: tests.methods.test_base.CountedReverseKnn
name: counted_reverse_knn
"""


def counted(home, name="one", **changes):
    counts = ClassCounts(sigma=5.0, adjacency="add_remove")
    return plan(home, name, method=partial(CountedReverseKnn, class_counts=counts), mechanism=HISTOGRAM, **changes)


def entries(home) -> list:
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        ledger.verify()
        return [entry for entry in ledger.read_entries() if "reservation" in entry.facts]


def charges(home) -> list:
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        return list(ledger.get_charges("blobs").values())


def digest(folder) -> str:
    return hashlib.sha256((folder / "first_answers.json").read_bytes()).hexdigest()


def test_the_whole_plan_is_reserved_before_the_first_answer_and_prepare_sees_what_is_written(tmp_path, monkeypatch):
    one, order = counted(tmp_path), []
    first, prepare = CountedReverseKnn.draw_first_answers, CountedReverseKnn.prepare
    planned = one.method.privacy_events(DatasetFacts.from_dataset(one.dataset.load(), one.partition))
    release = one.folder / "release"

    def first_watched(self, records, facts, spending):
        order.append("first")
        assert [entry.kind for entry in entries(tmp_path)] == ["reserve"]
        (charge,) = charges(tmp_path)
        assert charge.reserved_events == spending.reserved_events == planned
        assert planned[0] == self.class_counts.privacy_events()[0] and len(planned) == 2
        assert not release.exists()
        answers = first(self, records, facts, spending)
        assert answers.counts_C.shape == (3,) and answers.counts_C.dtype == torch.float64
        return answers

    def prepare_watched(self, inputs):
        order.append("prepare")
        written = json.loads((release / "first_answers.json").read_text())
        answers = inputs.first_answers
        assert written == {"counts": answers.counts_C.tolist(), "sigma": 5.0, "outside": answers.outside}
        reserved, recorded = entries(tmp_path)
        assert (reserved.kind, recorded.kind) == ("reserve", "record")
        assert recorded.facts["first_answers_sha256"] == digest(release)
        assert recorded.facts["reservation"] == reserved.facts["reservation"]
        assert not charges(tmp_path)[0].is_suspended and not (release / "labels.csv").exists()
        return prepare(self, inputs)

    monkeypatch.setattr(CountedReverseKnn, "draw_first_answers", first_watched)
    monkeypatch.setattr(CountedReverseKnn, "prepare", prepare_watched)
    pipeline.run(one)
    assert order == ["first", "prepare"]
    (charge,) = charges(tmp_path)
    assert charge.is_committed and charge.incurred_events == planned  # of the first stage, too
    record = json.loads((release / "release.json").read_text())
    assert record["first_answers_sha256"] == digest(release) == entries(tmp_path)[-1].facts["first_answers_sha256"]
    assert "first_answers.json" in (release / "SHA256SUMS").read_text()
    assert "labels" not in json.loads((release / "summary.json").read_text())["seconds"]  # it grows with the records


def test_the_counts_are_those_of_units(tmp_path, monkeypatch):
    one = counted(tmp_path)
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda self, shape, *_: torch.zeros(shape, dtype=torch.float64))
    monkeypatch.setattr(Spending, "accept", lambda self, answers: answers)
    pipeline.run(one)
    counts = json.loads((one.folder / "release" / "first_answers.json").read_text())["counts"]
    assert counts == torch.bincount(blobs().y, minlength=3).tolist()


FAILING = {
    "first_answers": (CountedReverseKnn, "draw_first_answers"),
    "the first draw": (ClassCounts, "draw"),
    "prepare": (CountedReverseKnn, "prepare"),
}


@pytest.mark.parametrize("part", FAILING)
def test_an_error_leaves_the_whole_reservation_spent(tmp_path, monkeypatch, part):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*FAILING[part], lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        pipeline.run(counted(tmp_path))
    (charge,) = charges(tmp_path)
    assert not charge.is_committed and charge.incurred_events == charge.reserved_events
    assert charge.charged_cost == charge.reserved_cost and len(charge.reserved_events) == 2
    pipeline.run(one := counted(tmp_path, "two"))  # of its own reservation
    assert [one.is_committed for one in charges(tmp_path)] == [False, True]
    assert (one.folder / "release" / "labels.csv").exists()


def test_a_plan_that_the_cap_does_not_admit_asks_nothing(tmp_path, monkeypatch):
    """The first answer alone would be admitted."""
    monkeypatch.setattr(CountedReverseKnn, "draw_first_answers", lambda *_: pytest.fail("was asked"))
    with pytest.raises(ValueError, match="cap"):
        pipeline.run(counted(tmp_path, opening_budget=1.0))


def test_a_first_stage_says_what_it_cost(tmp_path, monkeypatch):
    """Otherwise the cost of the rounds would be taken for that of the whole."""
    first = CountedReverseKnn.draw_first_answers

    def silent(self, records, facts, spending):
        said = spending.record_cost
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spending, "record_cost", lambda events: None)
            answers = first(self, records, facts, spending)
        assert spending.record_cost == said
        return answers

    monkeypatch.setattr(CountedReverseKnn, "draw_first_answers", silent)
    with pytest.raises(ValueError, match="did not record the cost of its answers"):
        pipeline.run(counted(tmp_path))
    (charge,) = charges(tmp_path)
    assert not charge.is_committed and charge.charged_cost == charge.reserved_cost


def test_noise_of_the_first_stage_is_no_noise_of_the_labels(tmp_path, monkeypatch):
    def without_noise(self, votes, noise, context):
        return Answers(votes.counts_QC.argmax(1), self.privacy_events(len(votes)))

    monkeypatch.setattr(Histogram, "draw", without_noise)
    with pytest.raises(ValueError, match="no noise was drawn"):
        pipeline.run(one := counted(tmp_path))
    assert not (one.folder / "release" / "labels.csv").exists()


def test_first_answers_that_were_edited_are_found(tmp_path):
    pipeline.run(one := counted(tmp_path))
    file = one.folder / "release" / "first_answers.json"
    file.write_text(file.read_text().replace("5.0", "6.0"))
    release_id = json.loads((one.folder / "release" / "release.json").read_text())["release_id"]
    with pytest.raises(ValueError, match="edited"):
        pipeline.run(plan(tmp_path, "two", labels=release_id))
    with contextlib.redirect_stdout(io.StringIO()) as told:
        pate(["verify", str(one.folder / "release")])
    assert "first_answers.json" in told.getvalue()


# ---- the neighbor harness on both -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """The neighbor harness on a copy of the configuration with two files more; it yields a case of the first stage."""
    conf = tmp_path_factory.mktemp("harness") / "conf"
    shutil.copytree(choices.CONF, conf)
    (conf / "method").mkdir()
    (conf / "method" / "nearest_mean.yaml").write_text(NEAREST_MEAN_YAML)
    (conf / "method" / "counted_reverse_knn.yaml").write_text(COUNTED_YAML)
    caches = (choices.groups, choices.composed, choices._made, choices.methods, choices.slots, choices.values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "CONF", conf)
        for cache in caches:
            cache.cache_clear()
        assert {"nearest_mean", "counted_reverse_knn"} <= set(cases.space()["method"])
        yield cases.PLAIN | {"form": "tensors", "unit": "group", "noise": "torch", "partition": "add_remove",
                             "features": "none", "mechanism": "histogram", "method": "counted_reverse_knn",
                             "class_counts": "class_counts"}  # fmt: skip
    for cache in caches:
        cache.cache_clear()


NEAREST_MEAN = {"unit": "record", "mechanism": "gaussian", "method": "nearest_mean", "class_counts": "none"}


@pytest.mark.parametrize(
    ("changes", "num_values"),
    [({}, 2), ({"unit": "record", "partition": "replace_one"}, 2), (NEAREST_MEAN, 1)],
    ids=["groups", "replaced records", "nearest mean"],
)
def test_the_neighbor_harness_reaches_it(harness, changes, num_values):
    assert cases.attempt(harness | changes, tally := cases.Tally(), most=2), tally.reasons
    assert tally.values == num_values and not tally.faults, tally.faults


def test_the_neighbor_harness_finds_a_unit_that_is_counted_more_than_once(harness, monkeypatch):
    monkeypatch.setattr("pate_torch.methods.labeling.select_one_per_unit", lambda records, adjacency: records)
    assert cases.attempt(harness, tally := cases.Tally())
    assert "where it says" in str(tally.faults)


def test_the_neighbor_harness_finds_a_first_answer_without_noise(harness, monkeypatch):
    first = CountedReverseKnn.draw_first_answers

    def telling(self, records, facts, spending):
        answers = first(self, records, facts, spending)
        answers.counts_C[0] = len(records)
        return answers

    monkeypatch.setattr(CountedReverseKnn, "draw_first_answers", telling)
    assert cases.attempt(harness, tally := cases.Tally())
    assert "first_answers.json differs" in str(tally.faults)


@pytest.mark.slow(reason="a process that runs the neighbor harness")
def test_the_neighbor_harness_finds_that_a_record_sits_in_every_shard(harness, monkeypatch):
    monkeypatch.setattr(NearestMean, "select_rows", staticmethod(lambda shards, teacher: slice(None)))
    assert cases.attempt(harness | NEAREST_MEAN, tally := cases.Tally(), most=None)
    assert "where it says" in str(tally.faults)
