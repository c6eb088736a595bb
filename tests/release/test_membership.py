"""The owner's membership test: it finds a model that remembers, clears one that does not, and stays with the owner."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu, norm

from pate_torch import pipeline
from pate_torch.config import DataSplits
from pate_torch.core.progress import Stages
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import PrivateRecords
from pate_torch.release.membership import (
    MembershipRecords,
    MembershipTest,
    attack,
    compare_scores,
    compute_auc_interval,
    compute_difference_interval,
    compute_margins,
)
from pate_torch.release.report import Share
from pate_torch.release.statement import compute_advantage_bound
from pate_torch.students.selection import Selection
from pate_torch.teachers.training import train
from tests.run_configs import changed
from tests.teachers import public_start_world
from tests.tensor_data import Tensors
from tests.tiny_runs import again, summary, tiny
from tests.worlds import blobs


@pytest.fixture
def plan(tmp_path):
    return tiny(tmp_path)


@pytest.mark.parametrize(
    "first,second,low,high",
    [((56, 70), (48, 80), 0.0524, 0.3339), ((5, 56), (0, 29), -0.0381, 0.1926), ((10, 10), (0, 20), 0.6791, 1.0)],
)
def test_the_interval_of_a_difference_is_newcombes(first, second, low, high):
    """Newcombe 1998, table II, method 10."""
    found = compute_difference_interval(*(Share(value=n / size, size=size) for n, size in (first, second)))
    assert found == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_an_area_covers_it_and_is_not_too_wide():
    """Two normal laws: the area is Phi(d / sqrt 2). 150 samples: 95 % within 4 deviations, and a wrong area is not."""
    draw = np.random.default_rng(0)
    for d in (0.0, 0.5, 1.5):
        true = norm.cdf(d / math.sqrt(2))
        samples = ((draw.normal(d, 1, 120), draw.normal(0, 1, 80)) for _ in range(150))
        ends = np.array([compare_scores(*sample).auc_interval for sample in samples])
        covered, wrong = (((ends[:, 0] <= area) & (area <= ends[:, 1])).mean() for area in (true, true + 0.1))
        assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 150) and wrong < 0.7, d
    assert compute_auc_interval(1.0, 50, 50)[0] < 0.98 and compute_auc_interval(1.0, 50, 50)[1] == 1.0
    mirrored = [1 - end for end in reversed(compute_auc_interval(1.0, 50, 50))]
    assert compute_auc_interval(0.0, 50, 50) == pytest.approx(mirrored, abs=1e-9)


def records(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three classes that have nothing to do with them."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=draw), torch.randint(3, (count,), generator=draw)


def sides(members: int = 600, others: int = 400) -> MembershipRecords:
    return MembershipRecords(*records(members, 1), *records(others, 2))


class Rememberer:
    """Knows the labels of some records by heart, and guesses all others at random, by a function of the point."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.known = {point.numpy().tobytes(): int(label) for point, label in zip(x, y, strict=True)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.stack([(7919 * x).sin().sum(1), (104729 * x).sin().sum(1), (1299709 * x).sin().sum(1)], dim=1)
        for row, point in enumerate(x):
            if (label := self.known.get(point.numpy().tobytes())) is not None:
                logits[row, label] = 60.0  # p rounds to 1 even in double precision
        return logits


def test_the_auc_is_the_mann_whitney_statistic_where_scores_are_equal_too():
    draw = np.random.default_rng(0)
    members, others = draw.integers(0, 5, 40).astype(float), draw.integers(1, 6, 30).astype(float)
    exact = mannwhitneyu(members, others).statistic / 1200
    assert compare_scores(members, others).auc == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_a_model_that_remembers_is_found(share):
    both = sides()
    known = int(share * len(both.member_x))
    found = attack(Rememberer(both.member_x[:known], both.member_y[:known]), both)
    low, high = found.advantage_interval
    assert 0 < low <= share <= high < share + 0.15 and low > share - 0.15
    below, above = found.auc_interval
    assert 0.5 < below <= share + (1 - share) / 2 <= above


def test_a_model_independent_of_its_records_is_not_found():
    """Chance lies in 95 % of the intervals; it would not, were the cut chosen on the records that it judges."""
    draw, results, naive = np.random.default_rng(3), [], []
    for seed in range(150):
        members, others = draw.normal(size=300), draw.normal(size=200)
        results.append(compare_scores(members, others, seed))
        cuts = np.concatenate([members, others])[::5]
        naive.append(max((members >= cut).mean() - (others >= cut).mean() for cut in cuts))
    advantages = [result.advantage for result in results]
    covered = np.mean([low <= 0 <= high for low, high in (result.advantage_interval for result in results)])
    assert covered > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 150)
    assert abs(np.mean(advantages)) < 4 * np.std(advantages) / math.sqrt(150)
    assert np.mean(naive) > 0.05
    assert attack(Rememberer(*records(600, 9)), sides()).auc_interval[0] < 0.5  # it knows other records by heart


def test_a_leak_of_known_size_is_not_taken_for_chance():
    """Scores one unit apart: the best cut has an advantage of 2 Phi(1/2) - 1 = 0.383, and is nearly found."""
    draw = np.random.default_rng(4)
    results = [compare_scores(draw.normal(1, 1, 300), draw.normal(0, 1, 200), seed) for seed in range(80)]
    assert np.mean([result.advantage for result in results]) == pytest.approx(2 * norm.cdf(0.5) - 1, abs=0.03)
    assert all(result.advantage_interval[0] > 0 for result in results)


def test_margins_order_records_as_the_loss_does_and_do_not_saturate():
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)) * 4
    y = torch.arange(50) % 5
    loss = torch.nn.functional.cross_entropy(logits.double(), y, reduction="none")
    assert np.allclose(compute_margins(logits, y), -torch.expm1(loss).log().numpy())
    sure = torch.tensor([[60.0, 0.0], [90.0, 0.0]])
    first, second = compute_margins(sure, torch.tensor([0, 0]))
    assert first < second
    assert np.isfinite(compute_margins(torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0]]), torch.tensor([0, 0]))).all()


def rows(x: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


def test_members_are_the_records_of_shards_and_others_are_none_of_them():
    """A record dropped by the shards' capacity taught nobody; a copy of a member on the other side is one, too."""
    whole = blobs(n=400).load()
    x = torch.cat([whole.evaluation.x, whole.private.x[:7]])
    y = torch.cat([whole.evaluation.y, whole.private.y[:7]])
    mixed = dataclasses.replace(whole, evaluation=dataclasses.replace(whole.evaluation, x=x, y=y))
    shards = AddRemove(capacity=8).make_shards(whole.private, 12, seed=0)
    used = whole.private.x[shards.index_KS[shards.mask_KS]]
    assert len(used) < len(whole.private)
    found = MembershipTest().select_records(mixed, shards, None, seed=0)
    assert rows(found.member_x) == rows(used)
    assert rows(found.nonmember_x) >= rows(whole.evaluation.x) and not rows(found.nonmember_x) & rows(used)
    few = MembershipTest(records=30).select_records(mixed, shards, None, seed=0)
    assert (len(few.member_x), len(few.nonmember_x)) == (30, 30) and "tensor" not in repr(few)
    none = dataclasses.replace(whole, evaluation=dataclasses.replace(whole.evaluation, x=x[:19], y=y[:19]))
    assert MembershipTest().select_records(none, shards, None, seed=0) is None


def test_a_unit_is_counted_once():
    whole = blobs(n=400).load()
    unit = np.array([f"patient{i // 4}" for i in range(len(whole.private))])
    private = PrivateRecords.from_rows(whole.private.x, whole.private.y, unit, "group:patient")
    shards = AddRemove().make_shards(private, 5, seed=0)
    found = MembershipTest().select_records(dataclasses.replace(whole, private=private), shards, None, seed=0)
    assert len(found.member_x) == len(set(unit.tolist())) == 50


@pytest.mark.parametrize("partition", [AddRemove(), ReplaceOne()], ids=lambda p: p.name)
def test_records_held_out_reach_no_teacher_and_no_student_is_chosen_by_them(plan, partition):
    test = MembershipTest(held_out=0.3)
    chosen = Selection(candidates={"a": plan.student, "b": plan.student}, validation=0.2)
    with Stages(quiet=True) as stages:
        loaded = DataSplits.from_config(changed(plan, partition=partition, membership=test, selection=chosen), stages)
    parts = [set(part.unit_id) for part in (loaded.data.private, loaded.validation, loaded.membership_holdout)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 150
    assert 0.15 * 150 < len(parts[2]) < 0.35 * 150
    shards = partition.make_shards(loaded.data.private, 12, seed=0)
    found = test.select_records(loaded.data, shards, loaded.membership_holdout, seed=0)
    assert rows(found.nonmember_x) == rows(loaded.membership_holdout.x)


def test_where_features_are_public_there_are_no_members_to_find(plan):
    source = LabelPrivacyDataset(source=blobs())
    data = source.load()
    shards = ReplaceOne().make_shards(data.private, 5, seed=0)
    assert MembershipTest().select_records(data, shards, None, seed=0) is None
    with pytest.raises(ValueError, match="features are public"):
        MembershipTest(held_out=0.1).hold_out(data, "replace_one", 0)
    with pytest.raises(ValueError, match=r"membership.held_out"):
        MembershipTest(held_out=1.0)
    with pytest.raises(ValueError, match=r"membership.records"):
        MembershipTest(records=3)


def owners(plan) -> dict:
    return json.loads((plan.folder / "private" / "summary.json").read_text())


def memorable(n: int = 300) -> Tensors:
    """Labels drawn by lot: whatever is right about them was remembered."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 20, generator=draw), torch.randint(3, (n,), generator=draw)
    return Tensors(name="blobs", class_names=3, x=x[:150], y=y[:150], pool_x=x[150:200], test_x=x[200:], test_y=y[200:])


def test_a_run_clears_its_student_and_catches_the_model_without_privacy(plan, capsys):
    recipe = dataclasses.replace(plan.method.teacher, network="mlp", steps=200, learning_rate=0.01)
    one = changed(plan, dataset=memorable(), teacher=recipe, membership=MembershipTest(), baseline=True)
    report = pipeline.run(one)
    found = owners(one)["membership"]
    student, alone = found["student"], found["nonprivate"]
    assert student["members"] == alone["members"] == 150 and student["others"] == 100
    assert student["advantage_interval"][0] < 0.3  # near seven deviations: the noise is new in every run
    assert student["advantage"] < found["bound_by_plan"] <= found["bound"]
    assert found["bound"] == compute_advantage_bound(report.claim.epsilon, 1e-4)
    mu = math.sqrt(2 * 20) / 2  # the distance between two normal distributions is 2 Phi(mu / 2) - 1
    assert found["bound_by_plan"] == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-9) and found["held_out"] is False
    assert alone["advantage_interval"][0] > 0.6 and alone["auc_interval"][0] > 0.7
    printed = " ".join(capsys.readouterr().out.replace("|", " ").split())
    assert "Attack on the student" in printed and "private, for the owner" in printed.split("without privacy")[1]
    files = (file for file in (one.folder / "release").rglob("*") if file.is_file())
    text = "".join(file.read_bytes().decode("latin1") for file in files)
    assert "membership" not in text and "Attack on the student" not in text
    for end in student["auc_interval"] + alone["auc_interval"]:
        assert len(repr(end)) > 12 and repr(end) not in text


def test_without_a_guarantee_there_is_no_bound(plan):
    changes = {"membership": MembershipTest(held_out=0.2), "insecure_noise_seed": 0, "baseline": False}
    pipeline.run(one := changed(plan, **changes))
    found = owners(one)["membership"]
    assert found["bound"] is found["bound_by_plan"] is found["nonprivate"] is None and found["held_out"] is True


def test_a_student_from_old_labels_is_tested_on_the_records_behind_them_alone(plan):
    pipeline.run(plan)
    old = {"labels": summary(plan)["release_id"], "membership": MembershipTest()}
    pipeline.run(same := again(plan, "same", **old))
    assert owners(same)["membership"]["student"]["members"] == 150
    source = blobs()
    other = dataclasses.replace(source, x=source.x + 1)
    pipeline.run(strange := again(plan, "strange", dataset=other, **old))
    assert owners(strange)["membership"] is None


def test_votes_that_were_brought_have_no_members_here(plan, tmp_path):
    np.save(tmp_path / "v.npy", np.random.default_rng(0).integers(0, 3, (12, 75)))
    pipeline.run(one := changed(plan, votes=tmp_path / "v.npy", membership=MembershipTest()))
    assert owners(one)["membership"] is None


def test_a_network_of_one_teacher_answers_as_the_ensemble_does():
    data, recipe, trunk = public_start_world.glyphs(), public_start_world.RECIPE, public_start_world.public_trunk()
    shards = ReplaceOne().make_shards(data.private, 1, seed=0)
    for one_trunk, changes in ((trunk, {"steps": 5}), (None, {"steps": 5, "start": None, "network": "lean_cnn"})):
        given = dataclasses.replace(recipe, **changes)
        ensemble = train(data.private, data.spec, shards, given, seed=0, trunk=one_trunk)
        logits = ensemble.compute_logits(data.evaluation.x)[0]
        assert torch.equal(logits.argmax(1), ensemble.predict(data.evaluation.x)[0].long())
