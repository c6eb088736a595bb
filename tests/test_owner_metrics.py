"""The owner's side: folders others cannot open, figures that stay there, and what the private board shows."""

import dataclasses
import json
import math
import os
import stat
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pate_torch import owner_metrics
from pate_torch.accounting.costs import GaussianNoisyMaxCost, LaplaceNoisyMaxCost
from pate_torch.core.files import create_private_folder
from pate_torch.owner_metrics import PrivateMetrics, PrivateWriter, compute_vote_metrics
from pate_torch.privacy.records import Dataset, DataSpec, Evaluation, PrivateRecords, PublicPool, Release
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.membership import AttackResult, MembershipResult

VOTES = Votes(torch.tensor([[8, 1, 1], [5, 5, 0], [4, 3, 3], [0, 0, 10]]), 10)
ATTACK = AttackResult(
    members=900, others=200, advantage=0.012, advantage_interval=(-0.031, 0.054), auc=0.507, auc_interval=(0.463, 0.551)
)
MEMBERSHIP = MembershipResult(student=ATTACK, nonprivate=ATTACK, bound=0.8, bound_by_plan=0.3, held_out=False)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_private_folders_are_closed_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        assert mode(create_private_folder(tmp_path / "a")) == 0o700
        (tmp_path / "b").mkdir(mode=0o777)
        assert mode(create_private_folder(tmp_path / "b")) == 0o700
    finally:
        os.umask(old)
    assert "PRIVATE" in (tmp_path / "a" / "README").read_text()
    assert "no privacy guarantee" in (tmp_path / "b" / "README").read_text()


def test_owner_summary_has_its_keys_and_refuses_nan(tmp_path):
    summary = PrivateMetrics(ensemble_accuracy=0.98, epsilon_pate2018=1.9, gap_quantiles={"0.5": 4.0})
    summary.write(tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert set(read) >= {"ensemble_accuracy", "teacher_accuracy_mean", "epsilon_pate2018", "gap_quantiles"}
    assert list(summary.format_rows().values()) == ["98.0 %"], "an epsilon beside accuracies would look like a cost"
    assert mode(tmp_path / "summary.json") == 0o600
    for broken in ({"ensemble_accuracy": math.nan}, {"epsilon_pate2018": math.inf}, {"gap_quantiles": {"0": math.nan}}):
        with pytest.raises(ValueError, match="JSON"):
            PrivateMetrics(**broken).write(tmp_path / "summary.json")


SPEC = DataSpec(name="d", num_classes=3, input_shape=(2,), class_names=("a", "b", "c"), mean=(0.0,), std=(1.0,))


def looked_at(counts, model, model_of_all=None):
    """The owner's figures of votes on a pool, of which every point is asked."""
    votes = Votes(torch.as_tensor(counts), int(counts[0].sum()))
    nothing, no_labels, query_Q = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), torch.arange(len(votes))
    unseen = PrivateRecords.from_rows(nothing, no_labels, np.zeros(0, dtype=str))
    data = Dataset(SPEC, unseen, PublicPool(torch.zeros(len(votes), 2)), Evaluation(torch.zeros(1, 2), torch.zeros(1)))
    release = Release("r", query_Q, torch.zeros(len(votes), dtype=torch.int64), (), ())
    prepared = SimpleNamespace(votes=votes, ensemble=model_of_all)
    return compute_vote_metrics(data, release, prepared, model_of_all, model, 1e-5, torch.device("cpu"))


@pytest.mark.parametrize("model", [GaussianNoisyMaxCost(sigma=40.0), LaplaceNoisyMaxCost(scale=40.0)], ids=str)
def test_a_thousand_classes_are_looked_at_in_megabytes(model):
    draw = np.random.default_rng(0)
    counts = np.array([draw.multinomial(100, draw.dirichlet(np.full(1000, 0.03))) for _ in range(5)])
    tracemalloc.start()
    try:
        summary = looked_at(counts, model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**28
    assert summary.epsilon_pate2018 > 0
    assert not summary.not_computed


class Broken:
    """A model, and an ensemble, of which nothing can be learnt; what it says must not be repeated."""

    def __init__(self, error):
        self.error = error

    @property
    def sigma(self):
        raise self.error("secret 17")

    def predict(self, *_, **__):
        raise self.error("secret 17")


class BrokenGnmax(Broken, GaussianNoisyMaxCost):
    pass


@pytest.mark.parametrize("error", [MemoryError, AssertionError, StopIteration])
def test_no_figure_for_the_owner_ends_a_run(tmp_path, error):
    broken = Broken(error)
    summary = looked_at(VOTES.counts_QC.numpy(), BrokenGnmax(error), broken)
    assert summary.epsilon_pate2018 is summary.ensemble_accuracy is None
    gaps = [7, 0, 1, 10]
    assert summary.gap_quantiles == {f"{q:g}": np.quantile(gaps, q) for q in owner_metrics.QUANTILES}
    assert len(summary.not_computed) == len(summary.format_rows()) == 3
    assert all(error.__name__ in value and "secret" not in value for value in summary.format_rows().values())
    summary.write(tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["not_computed"] == summary.not_computed


def test_a_figure_that_is_no_number_is_missing(monkeypatch):
    monkeypatch.setattr(owner_metrics, "compute_data_dependent_epsilon", lambda *_, **__: math.inf)
    summary = looked_at(VOTES.counts_QC.numpy(), GaussianNoisyMaxCost(sigma=2.0))
    assert summary.epsilon_pate2018 is None
    assert len(summary.not_computed) == 1


def test_owner_lines_show_an_attack_beside_its_bound(tmp_path):
    def format_rows(**changes):
        result = dataclasses.replace(MEMBERSHIP, student=dataclasses.replace(ATTACK, **changes))
        return list(PrivateMetrics(membership=result).format_rows().values())

    student, nonprivate = format_rows()
    assert nonprivate == "advantage 1.2 % (-3.1 to 5.4), AUC 0.507 (0.463 to 0.551)"
    assert student == f"{nonprivate}; any attack's advantage is at most 30.0 % by the guarantee"
    assert format_rows(advantage=-0.012)[0].startswith("no signal found: advantage -1.2 %")
    assert "ABOVE ITS BOUND" in format_rows(advantage_interval=(0.31, 0.4))[0]
    PrivateMetrics(membership=MEMBERSHIP).write(tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text())["membership"]
    assert read["student"]["auc_interval"] == [0.463, 0.551] and read["bound_by_plan"] == 0.3


def test_the_private_board_shows_training_and_votes(tmp_path):
    board = PrivateWriter(tmp_path / "tensorboard")
    board.log("teachers/loss_mean", 1.5, 3)
    board.log("student/loss", 0.5, 4)
    board.log_losses(3, torch.tensor([1.0, 2.0, math.nan]))
    board.log_votes(VOTES, torch.tensor([True, False, True, True]))
    board.log_metrics(PrivateMetrics(ensemble_accuracy=0.98, membership=MEMBERSHIP))
    board.close()
    assert mode(tmp_path / "tensorboard") == 0o700
    assert all(mode(file) == 0o600 for file in tmp_path.rglob("*tfevents*"))
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    expected = {"teachers/loss_mean", "student/loss", "votes/answered_share", "owner/ensemble_accuracy"}
    assert set(read.Tags()["scalars"]) == expected
    shown = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0] for tag in read.Tags()["tensors"]}
    assert b"advantage 1.2 %" in shown["owner/text_summary"] and b"do not publish" in shown["PRIVATE/text_summary"]
    assert set(read.Tags()["histograms"]) == {"teachers/loss", "votes/gap", "votes/top"}
    assert [e.value for e in read.Scalars("votes/answered_share")] == pytest.approx([1, 1 / 2, 2 / 3, 3 / 4])
    assert read.Histograms("teachers/loss")[0].histogram_value.num == 2
