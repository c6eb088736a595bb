"""A first stage is paid for by the whole plan's reservation, and its answer is on disk and in the ledger beforehand."""

import contextlib
import hashlib
import io
import json
import shutil
from functools import partial

import pytest
import torch

from pate_torch import pipeline
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.privacy.budget import Spending
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Answers
from pate_torch.verify import command as verify_command
from tests.killed_runs import blobs, plan
from tests.methods.first_stage import CountedReverseKnn
from tests.privacy import neighbor_cases as cases
from tests.privacy import neighbor_choices as choices

HISTOGRAM = Histogram(sigma=3.0, adjacency="add_remove")
YAML = """defaults:
  - override /mechanism@_global_.mechanism: histogram

_target_: tests.methods.first_stage.CountedReverseKnn
name: counted_reverse_knn
"""


def counted(home, name="one", **changes):
    return plan(home, name, method=partial(CountedReverseKnn), mechanism=HISTOGRAM, **changes)


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
    first, prepare = CountedReverseKnn.first_answers, CountedReverseKnn.prepare
    planned = one.method.privacy_events(DatasetFacts.from_dataset(one.dataset.load(), one.partition))
    release = one.folder / "release"

    def first_watched(self, records, spending):
        order.append("first")
        assert [entry.kind for entry in entries(tmp_path)] == ["reserve"]
        (charge,) = charges(tmp_path)
        assert charge.reserved_events == spending.reserved_events == planned
        assert planned[0] == self.first_mechanism.privacy_events(1)[0] and len(planned) == 2
        assert not release.exists()
        answers = first(self, records, spending)
        assert answers.counts_C.shape == (3,) and answers.counts_C.dtype == torch.float64
        return answers

    def prepare_watched(self, inputs):
        order.append("prepare")
        written = json.loads((release / "first_answers.json").read_text())
        assert written == {"counts": inputs.first_answers.counts_C.tolist(), "sigma": self.first_sigma}
        reserved, recorded = entries(tmp_path)
        assert (reserved.kind, recorded.kind) == ("reserve", "record")
        assert recorded.facts["first_answers_sha256"] == digest(release)
        assert recorded.facts["reservation"] == reserved.facts["reservation"]
        assert not charges(tmp_path)[0].is_suspended and not (release / "labels.csv").exists()
        return prepare(self, inputs)

    monkeypatch.setattr(CountedReverseKnn, "first_answers", first_watched)
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
    monkeypatch.setattr(Histogram, "_draw_noisy_counts", lambda self, votes, noise, sigma: votes.counts_QC.double())
    monkeypatch.setattr(Spending, "accept", lambda self, answers: answers)
    one = counted(tmp_path)
    pipeline.run(one)
    counts = json.loads((one.folder / "release" / "first_answers.json").read_text())["counts"]
    assert counts == torch.bincount(blobs().y, minlength=3).tolist()


def test_an_error_after_the_first_answer_leaves_the_whole_reservation_spent(tmp_path, monkeypatch):
    def fail(self, inputs):
        raise RuntimeError("no room")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no room"):
        patch.setattr(CountedReverseKnn, "prepare", fail)
        pipeline.run(counted(tmp_path))
    (charge,) = charges(tmp_path)
    assert not charge.is_committed and charge.incurred_events == charge.reserved_events
    assert charge.charged_cost == charge.reserved_cost and len(charge.reserved_events) == 2
    pipeline.run(one := counted(tmp_path, "two"))  # of its own reservation
    assert [one.is_committed for one in charges(tmp_path)] == [False, True]
    assert (one.folder / "release" / "labels.csv").exists()


@pytest.mark.parametrize("part", ["first_answers", "the draw"])
def test_an_error_in_the_first_stage_leaves_the_whole_reservation_spent(tmp_path, monkeypatch, part):
    target = (CountedReverseKnn, "first_answers") if part == "first_answers" else (Histogram, "draw")
    monkeypatch.setattr(*target, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(counted(tmp_path))
    (charge,) = charges(tmp_path)
    assert not charge.is_committed and charge.charged_cost == charge.reserved_cost


def test_a_plan_that_the_cap_does_not_admit_asks_nothing(tmp_path, monkeypatch):
    """The first answer alone would be admitted."""
    monkeypatch.setattr(CountedReverseKnn, "first_answers", lambda *_: pytest.fail("was asked"))
    with pytest.raises(ValueError, match="cap"):
        pipeline.run(counted(tmp_path, opening_budget=1.0))


def test_a_first_stage_says_what_it_cost(tmp_path, monkeypatch):
    """Otherwise the cost of the rounds would be taken for that of the whole."""
    first = CountedReverseKnn.first_answers

    def silent(self, records, spending):
        said = spending.record_cost
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spending, "record_cost", lambda events: None)
            answers = first(self, records, spending)
        assert spending.record_cost == said
        return answers

    monkeypatch.setattr(CountedReverseKnn, "first_answers", silent)
    with pytest.raises(ValueError, match="did not record the cost of its answers"):
        pipeline.run(counted(tmp_path))
    (charge,) = charges(tmp_path)
    assert not charge.is_committed and charge.charged_cost == charge.reserved_cost


def test_noise_of_the_first_stage_is_no_noise_of_the_labels(tmp_path, monkeypatch):
    draw = Histogram.draw

    def without_noise(self, votes, noise, context):
        if self.sigma == CountedReverseKnn(mechanism=HISTOGRAM).first_sigma:
            return draw(self, votes, noise, context)
        return Answers(votes.counts_QC.argmax(1), self.privacy_events(len(votes)))

    monkeypatch.setattr(Histogram, "draw", without_noise)
    with pytest.raises(ValueError, match="no noise was drawn"):
        pipeline.run(one := counted(tmp_path))
    assert not (one.folder / "release" / "labels.csv").exists()


def test_a_run_in_the_folder_of_one_that_was_killed_does_not_claim_its_first_answers(tmp_path):
    one = plan(tmp_path, "one")
    (one.folder / "release").mkdir(parents=True)
    (one.folder / "release" / "first_answers.json").write_text("charged, and in no claim")
    pipeline.run(one)
    assert not (one.folder / "release" / "first_answers.json").exists()


def test_first_answers_that_were_edited_are_found(tmp_path):
    pipeline.run(one := counted(tmp_path))
    file = one.folder / "release" / "first_answers.json"
    file.write_text(file.read_text().replace("5.0", "6.0"))
    release_id = json.loads((one.folder / "release" / "release.json").read_text())["release_id"]
    with pytest.raises(ValueError, match="edited"):
        pipeline.run(plan(tmp_path, "two", labels=release_id))
    with contextlib.redirect_stdout(io.StringIO()) as told:
        verify_command.main([str(one.folder / "release")])
    assert "first_answers.json" in told.getvalue()


# ---- the neighbor harness -------------------------------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """The neighbor harness on a copy of the configuration with one file more."""
    conf = tmp_path / "conf"
    shutil.copytree(choices.CONF, conf)
    (conf / "method").mkdir()
    (conf / "method" / "counted_reverse_knn.yaml").write_text(YAML)
    cached = (choices.groups, choices.composed, choices._made, choices.values)
    monkeypatch.setattr(choices, "CONF", conf)
    for one in cached:
        one.cache_clear()
    yield cases.PLAIN | {"form": "tensors", "unit": "group", "noise": "torch", "partition": "add_remove",
                         "features": "none", "mechanism": "histogram", "method": "counted_reverse_knn"}  # fmt: skip
    for one in cached:
        one.cache_clear()


@pytest.mark.parametrize("changes", [{}, {"unit": "record", "partition": "replace_one", "noise": "discrete"}],
                         ids=["groups", "replaced records"])  # fmt: skip
def test_the_neighbor_harness_reaches_it(harness, changes):
    assert "counted_reverse_knn" in cases.space()["method"]
    assert cases.attempt(harness | changes, tally := cases.Tally(), most=4), tally.reasons
    assert tally.values == 2 and not tally.faults, tally.faults


def test_the_neighbor_harness_finds_a_unit_that_is_counted_more_than_once(harness, monkeypatch):
    monkeypatch.setattr(CountedReverseKnn, "select_labels", staticmethod(lambda records, adjacency: records.y))
    assert cases.attempt(harness, tally := cases.Tally())
    assert "where it says" in str(tally.faults)


def test_the_neighbor_harness_finds_a_first_answer_without_noise(harness, monkeypatch):
    first = CountedReverseKnn.first_answers

    def telling(self, records, spending):
        answers = first(self, records, spending)
        answers.counts_C[0] = len(records)
        return answers

    monkeypatch.setattr(CountedReverseKnn, "first_answers", telling)
    assert cases.attempt(harness, tally := cases.Tally())
    assert "first_answers.json differs" in str(tally.faults)
