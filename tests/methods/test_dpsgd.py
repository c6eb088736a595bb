"""The DP-SGD baseline: the cost it charges, the noise it draws, one record's reach, and whose account pays."""

import math
from dataclasses import replace

import pytest
import torch
from opacus import GradSampleModule
from scipy import stats

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import gdp, pld
from pate_torch.accounting.calibration import calibrate_sampled_gaussian, calibrate_sigma
from pate_torch.accounting.domination import compute_dominating_gaussian
from pate_torch.accounting.events import SampledGaussianEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.dpsgd_optimizer import NoiseSourceOptimizer
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import AddRemove, DatasetFacts, ReplaceOne
from pate_torch.queries.base import Random
from pate_torch.students.store import load
from pate_torch.teachers.training import TeacherRecipe
from pate_verify.command import verify_release
from tests.run_configs import changed, run_config
from tests.tiny_runs import summary
from tests.worlds import benchmark_clouds

COMPARED = {"mechanism": GNMax(sigma=4.0), "query": Random(), "num_queries": 20}
METHOD_EVENTS = (SampledGaussianEvent(rate=0.2, noise_multiplier=4.0, steps=20),)
METHOD = DPSGD(network="logistic", steps=20, batch_size=60, learning_rate=0.5, **COMPARED)
FIXED = replace(METHOD, noise_multiplier=4.0)  # calibrations take seconds


@pytest.fixture
def plan(tmp_path):
    recipe = TeacherRecipe(network="logistic", steps=5, batch_size=8)
    parts = {"dataset": benchmark_clouds(), "partition": AddRemove(), "teacher": recipe, "method": METHOD}
    folder = tmp_path / "runs" / "clouds" / "dpsgd" / "one"
    return run_config(**parts, root=tmp_path, folder=folder, seed=0, delta=1e-4, quiet=True)


def test_it_costs_what_the_pate_release_would_and_a_second_one_adds_to_the_account(plan):
    pipeline.run(plan)
    found = summary(plan)
    target = accounting.compute_guarantee(GNMax(sigma=4.0).privacy_events(20), 1e-4).epsilon
    assert found["epsilon"] == pytest.approx(target, rel=2e-6) and found["epsilon"] <= target
    assert (found["num_teachers"], found["queries_asked"], found["mechanism"]) == (0, 0, "dpsgd")
    assert (found["adjacency"], found["accountant"], found["private"]) == ("add_remove", "pld", True)
    assert found["epsilon_charged"] == pytest.approx(found["epsilon"], rel=1e-9)
    assert found["student_accuracy"] > 0.9  # chance: 1/2
    account = Ledger(plan.root / "ledger.sqlite").get_account("clouds")
    assert account.filter.kind == "gdp" and account.num_releases == 1
    student = load(plan.folder / "release" / "student.safetensors")
    data = plan.dataset.load()
    right = (student.compute_probabilities(data.evaluation.x).argmax(1) == data.evaluation.y).double().mean()
    assert float(right) == pytest.approx(found["student_accuracy"])
    second = changed(plan, folder=plan.folder.parent / "two", method=FIXED)
    pipeline.run(second)
    assert summary(second)["epsilon_charged"] > max(summary(second)["epsilon"], found["epsilon"])


def gaussian_account(plan, **terms):
    """Open the account for Gaussian answers, by default with a reserve of a tenth of delta, and charge them."""
    ledger = Ledger(plan.root / "ledger.sqlite")
    terms = {"budget_epsilon": 20.0, "delta": 1e-4, "adjacency": "add_remove", "unit": "record"} | terms
    answers = GNMax(sigma=4.0).privacy_events(20)
    ledger.open_account(plan.dataset.name, **terms, planned_events=answers)
    reservation = ledger.reserve("clouds", answers, fingerprint="", mechanism="gaussian", run="answers", noise="torch")
    ledger.commit(reservation, answers)
    return ledger


def test_an_account_of_gaussian_answers_charges_the_gaussian_that_dominates_it(plan):
    ledger = gaussian_account(plan)
    pipeline.run(changed(plan, method=FIXED))
    account = ledger.get_account("clouds")
    charge = list(account.charges.values())[1]
    (event,) = charge.reserved_events
    assert account.filter.kind == "gdp" and event == charge.incurred_events[0]
    assert event.failure_delta == 2.5e-6 == charge.charged_cost.delta  # a quarter of the reserve of 1e-5
    mu = compute_dominating_gaussian(event, 2.5e-6)
    assert charge.charged_cost.scalar == mu**2
    total = gdp.compute_epsilon(math.sqrt(20 * 2 / 4.0**2 + mu**2), 1e-4 - 2.5e-6)
    assert (account.guarantee.route, account.guarantee.epsilon) == ("gdp", pytest.approx(total, rel=1e-12))
    found = summary(plan)
    assert (found["accountant"], found["epsilon"]) == ("pld", pytest.approx(pld.compute_epsilon(METHOD_EVENTS, 1e-4)))
    ledger.verify()
    with pytest.raises(ValueError, match="filter=rdp"):  # the noise would have to be much larger for any Gaussian
        ledger.check_events("clouds", [replace(event, noise_multiplier=0.05, failure_delta=0.0)])
    second = ledger.reserve("clouds", METHOD_EVENTS, fingerprint="", mechanism="dpsgd", run="x", noise="torch")
    assert second.reserved_events[0].failure_delta == 1.87e-6  # a quarter of what is left


@pytest.mark.slow(reason="loss distributions on a fine grid")
def test_the_verifier_accepts_the_release_and_what_the_account_charged(plan):
    gaussian_account(plan)
    pipeline.run(changed(plan, target_epsilon=1.0))
    found = {check.name: check for check in verify_release(plan.folder, plan.root / "ledger.sqlite")}
    assert all(check.is_ok and not check.is_loose for check in found.values()), found
    assert {"mechanism", "guarantee", "account", "charges", "cap"} <= found.keys()


def test_an_account_opened_for_mu_squared_admits_dp_sgd_as_its_first_release(plan):
    chosen = PrivacyFilter.from_planned_events(METHOD_EVENTS, epsilon=5.0, delta=1e-4, kind="gdp")
    assert chosen.delta_reserve == pytest.approx(1e-5) and chosen.admits_release(METHOD_EVENTS)
    small = PrivacyFilter.from_planned_events(METHOD_EVENTS, epsilon=0.1, delta=1e-4, kind="gdp")
    assert small.delta_reserve == pytest.approx(1e-5) and not small.admits_release(METHOD_EVENTS)
    pipeline.run(changed(plan, method=FIXED, filter="gdp"))
    account = Ledger(plan.root / "ledger.sqlite").get_account("clouds")
    assert account.filter.kind == "gdp" and account.total_cost.delta == 2.5e-6


def test_an_account_without_a_reserve_refuses_and_names_the_kind_of_account(plan):
    ledger = gaussian_account(plan, delta_reserve=0.0)
    with pytest.raises(ValueError, match=r"filter=rdp.*delta is left in reserve.*DP-SGD"):
        pipeline.run(plan)
    assert ledger.get_account("clouds").num_releases == 1 and not (plan.root / "dpsgd").exists()


def test_the_noise_is_the_smallest_by_loss_distributions():
    multiplier = calibrate_sampled_gaussian(0.2, 20, epsilon=1.5, delta=1e-5)
    by_renyi = calibrate_sigma(
        lambda sigma: (SampledGaussianEvent(rate=0.2, noise_multiplier=sigma, steps=20),),
        epsilon=1.5,
        delta=1e-5,
        accountant="rdp",
    )
    costs = [
        pld.compute_epsilon([SampledGaussianEvent(rate=0.2, noise_multiplier=m, steps=20)], 1e-5)
        for m in (multiplier, multiplier * (1 - 1e-5))
    ]
    assert costs[0] <= 1.5 < costs[1] and 0.88 < multiplier / by_renyi < 0.97


def prepared(data):
    """The method on these records; no file is read."""
    facts, none = DatasetFacts.from_dataset(data, AddRemove()), dict.fromkeys(("store", "stages", "clock"))
    inputs = MethodInputs(records=data.private, facts=facts, seed=0, device=torch.device("cpu"), **none)
    return replace(METHOD, noise_multiplier=1.0).prepare(inputs)


def optimizer_of(module, noise_multiplier=1.0, clip=1.0):
    given = {"noise_multiplier": noise_multiplier, "max_grad_norm": clip, "expected_batch_size": 1}
    return NoiseSourceOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), DryRunNoise("torch", 1), **given)


def gradients(drop=None, clip=1.0):
    """The summed, clipped gradient of 40 records, with or without one of them; no noise."""
    data = benchmark_clouds().load()
    module = GradSampleModule(METHOD._build_module(data.spec, 0))
    optimizer = optimizer_of(module, clip=clip)
    chosen = torch.tensor([i for i in range(40) if i != drop], dtype=torch.int64)
    prepared(data)._compute_gradients(module, chosen)
    optimizer.clip_and_accumulate()
    return torch.cat([p.summed_grad.flatten() for p in module.parameters()])


def test_one_record_moves_the_sum_by_the_clip_at_most():
    moves = [float((gradients() - gradients(drop=i)).norm()) for i in range(5)]
    assert max(moves) <= 1 + 1e-5 and max(moves) > 0.5
    loose = [float((gradients(clip=100.0) - gradients(drop=i, clip=100.0)).norm()) for i in range(5)]
    assert max(loose) > 1  # so that it is the clip that holds them


def test_a_record_whose_gradient_is_no_number_moves_nothing():
    """NaN cannot be cut to a length: one vast record would show in every weight."""
    data = benchmark_clouds().load()
    vast = data.private.x.clone()
    vast[3] = 3e38
    data = replace(data, private=replace(data.private, x=vast))
    module = METHOD._build_module(data.spec, 0)
    prepared(data).train(module, DryRunNoise("torch", 0))
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_the_noise_is_the_one_accounted_for_and_not_a_scale_beside_it():
    module = GradSampleModule(torch.nn.Linear(100, 50))
    optimizer = optimizer_of(module, noise_multiplier=3.0, clip=0.5)
    for p in module.parameters():
        p.summed_grad = torch.zeros_like(p)
    optimizer.add_noise()
    drawn = torch.cat([p.grad.flatten() for p in module.parameters()]).numpy()
    assert stats.kstest(drawn, "norm", args=(0, 1.5)).pvalue > 1e-3
    for wrong in (1.0, 2.25):
        assert stats.kstest(drawn, "norm", args=(0, wrong)).pvalue < 1e-6


def test_nobody_sampled_is_a_step_of_noise_alone(monkeypatch):
    data = benchmark_clouds().load()
    module = METHOD._build_module(data.spec, 0)
    before = [p.clone() for p in module.parameters()]
    monkeypatch.setattr(DPSGD, "compute_sampling_rate", lambda self, facts: 0.0)
    prepared(data).train(module, DryRunNoise("torch", 0))
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.slow(reason="three whole runs")
def test_two_runs_draw_different_noise_unless_seeded(plan, tmp_path):
    weights = []
    for name, seed in (("a", None), ("b", None), ("c", 3), ("d", 3)):
        home = tmp_path / name
        one = changed(plan, root=home, folder=home / "runs/clouds/dpsgd/1", method=FIXED, insecure_noise_seed=seed)
        pipeline.run(one)
        weights.append(load(one.folder / "release" / "student.safetensors").module.state_dict()["1.weight"])
        assert summary(one)["private"] is (seed is None)
        assert (summary(one)["epsilon"] is None) is (seed is not None)
    assert not torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])


def test_what_cannot_be_accounted_for_is_refused(plan):
    refused = (
        ({"partition": ReplaceOne()}, "add_remove"),
        ({"dataset": benchmark_clouds(nominal_size=None)}, "nominal_size"),
        ({"dataset": benchmark_clouds(unit="group:patient")}, "group:patient"),
        ({"dataset": benchmark_clouds(nominal_size=50)}, "nominal_size"),
    )
    for change, message in refused:
        with pytest.raises(ValueError, match=message):
            pipeline.run(changed(plan, **change))
    assert not (plan.root / "ledger.sqlite").exists()


def test_a_norm_over_the_batch_is_refused():
    sizes = {"x": 300, "pool_x": 100, "test_x": 100}
    images = benchmark_clouds(**{part: torch.zeros(n, 1, 8, 8, dtype=torch.uint8) for part, n in sizes.items()})
    with pytest.raises(ValueError, match="batch normalization"):
        DPSGD(network="small_cnn")._build_module(images.load().spec, 0)
