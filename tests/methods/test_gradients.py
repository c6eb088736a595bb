"""Gradients: a record moves every sum by at most one, priced as drawn; and what a model makes of the sums."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression

from pate_torch import networks, pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import gdp
from pate_torch.accounting.events import GaussianEvent
from pate_torch.features.contrastive import append_mean_shift, encode
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.gradients import GradientMethod
from pate_torch.privacy.noise import DryRunNoise, NoiseSource
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import Dataset, Evaluation, MechanismContext, PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import (
    GRID_STEPS,
    UNIT_NORM,
    GradientSums,
    _quantize_weights,
    make_vector_sum_sensitivity,
    quantize,
)
from pate_torch.privacy.whitening import Whitening
from pate_torch.students.store import export, load
from pate_torch.students.training import GradientStudent
from tests.mechanisms.vote_laws import Recorder, fit, has_this_scale_alone
from tests.methods.voter_worlds import among_images, ask_records, configured, encoder, gradient_sums
from tests.spies import spy
from tests.tensor_sizes import Largest
from tests.worlds import IMAGES, images

CONTEXT = MechanismContext(num_queries=9)


def weights(seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return size * torch.randn(17, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- the sum of gradients ------------------------------------------------------------------------------------------


def test_the_sum_of_gradients_is_that_of_the_likelihood():
    """Against automatic differentiation, where nothing is cut: a change is longer than 1 only where a model errs."""
    records = gradient_sums()
    weight = weights(size=0.1).requires_grad_()
    z = records.z_ND.double() / GRID_STEPS
    log_p = (z @ weight).log_softmax(1)[torch.arange(40), records.y_N]
    change = torch.nn.functional.one_hot(records.y_N, 3) - (z @ weight).softmax(1)
    assert float(change.detach().norm(dim=1).max()) < 1
    log_p.sum().backward()
    assert torch.allclose(
        records.compute_gradient_sum(weight.detach()).double() / UNIT_NORM, weight.grad, atol=40 * 3 / GRID_STEPS
    )


@pytest.mark.parametrize("longest,some", [(1.0, (3, 40)), (0.25, (10, 40))])
def test_a_change_longer_than_the_cut_is_cut_and_nothing_else(longest, some):
    records, weight = gradient_sums(), weights(size=60.0)
    z = records.z_ND.double() / GRID_STEPS
    expected = torch.zeros(17, 3, dtype=torch.float64)
    cut = 0
    for one, label in zip(z, records.y_N.tolist(), strict=True):
        p = np.exp(one.numpy() @ weight.numpy() - (one.numpy() @ weight.numpy()).max())
        change = np.eye(3)[label] - p / p.sum()
        cut += np.linalg.norm(change) > longest
        expected += torch.outer(one, torch.from_numpy(change / max(1.0, np.linalg.norm(change) / longest)))
    assert some[0] < cut < some[1]
    assert torch.allclose(
        records.compute_gradient_sum(weight, longest).double() / UNIT_NORM, expected, atol=40 * 3 / GRID_STEPS
    )


@pytest.mark.parametrize("size", [0.0, 1.0, 60.0])
@pytest.mark.parametrize("cut", [1.0, 0.3, 1 / 64])
def test_one_record_moves_the_sum_by_its_own_gradient_and_by_no_more_than_the_norm_bit_for_bit(size, cut):
    records, weight = gradient_sums(), weights(seed=1, size=size)
    whole = records.compute_gradient_sum(weight, cut)
    for gone in (0, 17, 39):
        kept = torch.arange(40) != gone
        rest = dataclasses.replace(records, z_ND=records.z_ND[kept], y_N=records.y_N[kept])
        alone = dataclasses.replace(records, z_ND=records.z_ND[[gone]], y_N=records.y_N[[gone]])
        assert torch.equal(whole - rest.compute_gradient_sum(weight, cut), alone.compute_gradient_sum(weight, cut))
        assert (
            0 < int(alone.compute_gradient_sum(weight, cut).square().sum()) <= (cut * UNIT_NORM) ** 2
            and records.sensitivity.l2 == 1
        )
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    shuffled = dataclasses.replace(records, z_ND=records.z_ND[order], y_N=records.y_N[order])
    assert torch.equal(shuffled.compute_gradient_sum(weight, cut), whole)


def test_a_sum_that_float64_cannot_hold_is_clipped_and_moves_no_further(monkeypatch):
    records, weight = gradient_sums(), weights()
    whole = records.compute_gradient_sum(weight)
    most = int(whole.abs().max()) // 3
    monkeypatch.setattr("pate_torch.privacy.sensitive._MAX_GRADIENT_SUM", most)
    clipped = records.compute_gradient_sum(weight)
    assert clipped.tolist() == np.clip(whole.numpy(), -most, most).tolist() and 0 < (clipped != whole).sum() < 51
    for gone in range(40):
        kept = torch.arange(40) != gone
        rest = dataclasses.replace(records, z_ND=records.z_ND[kept], y_N=records.y_N[kept])
        assert int((clipped - rest.compute_gradient_sum(weight)).square().sum()) <= UNIT_NORM**2


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_logits_are_exact_whatever_they_are_added_with(size):
    """Against Python's whole numbers; and a batch is its records, one by one."""
    generator = torch.Generator().manual_seed(0)
    weight, unit = _quantize_weights(size * torch.randn(300, 3, dtype=torch.float64, generator=generator))
    z_ND = quantize(torch.nn.functional.normalize(torch.randn(50, 300, dtype=torch.float64, generator=generator)))
    exact = z_ND.numpy().astype(object) @ weight.numpy().astype(int).astype(object)
    assert (z_ND.double() @ weight).long().tolist() == exact.tolist()
    assert math.log2(unit).is_integer() and max(abs(v) for row in exact for v in row) < 2**52
    off = weight * unit - size * torch.randn(300, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert 0 < float(off.abs().max()) <= 2.0**-36 * float((weight * unit).norm(dim=0).max()) * (1 + 1e-9)
    records = GradientSums(z_ND.int(), torch.arange(50) % 3, *(torch.zeros(1, 300),) * 2, 3, "add_remove", 1.0)
    one_by_one = [
        dataclasses.replace(records, z_ND=records.z_ND[n : n + 1], y_N=records.y_N[n : n + 1]) for n in range(50)
    ]
    assert torch.equal(
        sum(one.compute_gradient_sum(weight * unit) for one in one_by_one), records.compute_gradient_sum(weight * unit)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e300, 2.0**41])
def test_numbers_that_no_clipping_bounds_are_refused_before_they_are_squared(value):
    """NaN as an integer is -2^63, whose square wraps around to 0 and would pass as short."""
    records, weight = gradient_sums(), weights(seed=1)
    weight[0, 0] = value
    with pytest.raises(ValueError, match="weights of the model must be finite"):
        records.compute_gradient_sum(weight)
    with pytest.raises(ValueError, match="not finite or above 2"):
        quantize(torch.tensor([[0.5, value]]))
    with pytest.raises(ValueError, match="longer than 1"):
        z_ND = torch.full((1, records.z_ND.shape[1]), -(2**63))
        dataclasses.replace(records, z_ND=z_ND, y_N=records.y_N[:1])


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_record_whose_features_are_not_finite_says_nothing_and_changes_no_other(value):
    feature_PD = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    whitening = Whitening.from_features(feature_PD, 0.1)
    plain, odd = whitening.whiten_and_clip(feature_PD), feature_PD.clone()
    odd[3] = torch.tensor([value, -value, value, value])
    found = quantize(whitening.whiten_and_clip(odd))
    assert found[3].tolist() == [0] * 5 or (value == 3e38 and int(found[3].square().sum()) <= UNIT_NORM)
    assert torch.equal(found[torch.arange(50) != 3], quantize(plain)[torch.arange(50) != 3])


def test_many_records_of_many_classes_take_no_table_of_both():
    z_ND = quantize(torch.nn.functional.normalize(torch.randn(20_000, 3, dtype=torch.float64)))
    y_N = torch.randint(60, (20_000,))
    with Largest() as made:
        records = GradientSums(
            z_ND.short(), y_N, *(torch.zeros(1, 3),) * 2, 60, make_vector_sum_sensitivity("add_remove", 180), 1.0
        )
        records.compute_gradient_sum(torch.zeros(3, 60))
    assert made.entries < 20_000 * 60 / 4


def test_a_replaced_record_moves_the_sum_by_two_gradients_though_its_id_is_anothers():
    """The unit is the position: records with an id in common are several units, whatever is put in place of one."""
    x, y = images(41, seed=1)
    names = np.array(["a", "b", "c"])[np.arange(40) % 3]

    def sums(x, y, names):
        method = GradientMethod(size=50, mechanism=GradientDescent(sigma=1.0, adjacency="replace_one"))
        records = ask_records(method, among_images(x, y, names), ReplaceOne(), encoder())
        return records.compute_gradient_sum(weights(size=60.0)), records.sensitivity.l2 * UNIT_NORM

    before, l2 = sums(x[:40], y[:40], names)
    new = sums(x[40:], y[40:], names[:1])[0]
    for position in range(0, 40, 4):
        other_x, other_y, other_names = x[:40].clone(), y[:40].clone(), names.copy()
        other_x[position], other_y[position], other_names[position] = x[40], y[40], names[(position + 1) % 40]
        old = sums(x[[position]], y[[position]], names[:1])[0]
        moved = sums(other_x, other_y, other_names)[0] - before
        assert torch.equal(moved, new - old) and float(moved.double().norm()) <= l2 == 2 * UNIT_NORM


def test_no_gradient_is_longer_than_one_even_where_features_are_as_long_as_can_be():
    """One class against a model that is sure of another: the longest change, in whole numbers."""
    whitening = Whitening.from_features(torch.randn(60, 7, generator=torch.Generator().manual_seed(0)), 0.1)
    far = whitening.whiten_and_clip(1e6 * torch.randn(100, 7, generator=torch.Generator().manual_seed(1)))
    z_ND = (far * GRID_STEPS * (1 - 2.0**-30)).trunc().int()
    lengths = z_ND.long().square().sum(1).double().sqrt() / GRID_STEPS
    assert float(lengths.max()) <= 1 and float(lengths.min()) > 0.999
    for y in range(3):
        for one in z_ND:
            alone = GradientSums(one[None], torch.tensor([y]), *(torch.zeros(1, 8),) * 2, 3, "add_remove", 1.0)
            sure = torch.zeros(8, 3, dtype=torch.float64)
            sure[:, (y + 1) % 3] = 1e4 * one.double() / GRID_STEPS
            for cut in (1.0, 0.25):
                length = float(alone.compute_gradient_sum(sure, cut).double().square().sum().sqrt()) / UNIT_NORM
                assert 0.999 * cut < length <= cut
    with pytest.raises(ValueError, match="longer than 1"):  # each number is in range, but their length is sqrt(2)
        dataclasses.replace(alone, z_ND=torch.full((1, 2), GRID_STEPS))


def test_a_unit_of_several_records_answers_by_the_first():
    several, alone = gradient_sums(unit_id=tuple(f"u{n // 2:02d}" for n in range(40))), gradient_sums()
    assert torch.equal(several.z_ND, alone.z_ND[::2]) and torch.equal(several.y_N, alone.y_N[::2])


def test_public_points_spread_alike_in_every_direction():
    place = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.arange(1.0, 7.0)) + 3
    at = Whitening.from_features(place, 1e-9)(place)
    # The 1 that follows the coordinates spreads as they do, too: about the origin, and apart from them.
    assert torch.equal(at[:, 6], torch.ones(500))
    assert torch.allclose(at.T @ at / 500, torch.eye(7), atol=1e-3)
    whitening = Whitening.from_features(place, 0.1)
    assert float(whitening(place).norm(dim=1).median()) == pytest.approx(whitening.radius)
    bounded = whitening.whiten_and_clip(place)
    inside = whitening(place).norm(dim=1) <= whitening.radius
    assert torch.allclose(bounded[inside].float(), whitening(place)[inside] / whitening.radius, atol=1e-6)
    assert float((bounded[~inside].norm(dim=1) - 1).abs().max()) < 1e-12


@pytest.mark.parametrize("rare", [0.15, 0.5])
def test_classes_need_not_be_equally_common(rare):
    """Two clouds that overlap: as good as a linear model without privacy."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(6000, generator=generator) < rare).long()
    x = torch.randn(6000, 20, generator=generator)
    x[:, 0] += 2.0 * y
    spec = dataclasses.replace(
        IMAGES, num_classes=2, class_names=("a", "b"), input_shape=(20,), mean=(0.0,), std=(1.0,)
    )
    private = PrivateRecords.from_rows(x[:4000], y[:4000], np.arange(4000).astype(str))
    data = Dataset(spec, private, PublicPool(x[4000:]), Evaluation(x[:0], y[:0]))
    encoder = torch.nn.Flatten()
    descent = GradientDescent(sigma=10.0, adjacency="add_remove")
    records = ask_records(GradientMethod(size=4000, mechanism=descent), data, AddRemove(), encoder)
    answers = descent.draw(records, DryRunNoise(insecure_seed=0), CONTEXT)
    known, asked = (encode(encoder, part, spec).numpy() for part in (x[:4000], x[4000:]))
    linear = LogisticRegression(C=100.0).fit(known, y[:4000]).score(asked, y[4000:])
    right = float((answers.label_Q == y[4000:]).double().mean())
    assert right > linear - 0.02 and linear > float((y[4000:] == 0).double().mean()) + 0.02


# -- the mechanism --------------------------------------------------------------------------------------------------


WRONG = {"sigma": (0, math.nan), "clip_norm": (0, 1.5), "noise": ("quantum",), "adjacency": ("swap",)}
WRONG |= {"early_noise_multiplier": (0,), "steps": (0,), "step_size": (-1,), "first_step_size": (0,)}


@pytest.mark.parametrize("key,bad", [(key, bad) for key, values in WRONG.items() for bad in values])
def test_wrong_values_are_refused(key, bad):
    with pytest.raises(ValueError, match=key):
        GradientDescent(**{"sigma": 1.0, "adjacency": "add_remove", key: bad})


@pytest.mark.parametrize("adjacency,moved", [("add_remove", 1.0), ("replace_one", 2.0)])
def test_a_step_costs_the_same_however_much_is_asked(adjacency, moved):
    mechanism = GradientDescent(sigma=5.0, adjacency=adjacency, steps=3)
    assert mechanism.privacy_events(1) == mechanism.privacy_events(10_000) == (GaussianEvent(mu=moved / 5, count=3),)
    assert mechanism.privacy_events(50, rounds=2) == (GaussianEvent(mu=moved / 5, count=3),) * 2
    assert gradient_sums(adjacency=adjacency).sensitivity.l2 == mechanism.max_sensitivity.l2 == moved
    cost = accounting.compute_guarantee(mechanism.privacy_events(400, 2), 1e-5)
    assert cost.epsilon == pytest.approx(gdp.compute_epsilon(math.sqrt(6) * moved / 5, 1e-5), rel=1e-9)


@pytest.mark.parametrize("cut", [1.0, 0.25])
def test_the_model_moves_by_the_noisy_sums_and_by_nothing_else(cut):
    """The slow twin: steps written out, with the noise that was drawn; which has the accounted scale and no other."""
    records, source = gradient_sums(), Recorder("torch")
    mechanism = GradientDescent(sigma=2.0, adjacency="add_remove", steps=100, clip_norm=cut)
    asked = torch.tensor([3, 50, 7])
    answers = mechanism.release(records.select(asked), source, CONTEXT)
    assert answers.events == mechanism.privacy_events(3) and answers.noisy_counts is None
    assert [kind for kind, _ in source.drawn] == ["gaussian"] * mechanism.steps
    weight = torch.zeros(17, 3, dtype=torch.float64)
    for step, (_, drawn) in enumerate(source.drawn):
        noisy = (records.compute_gradient_sum(weight, cut) + drawn).round() / (cut * UNIT_NORM)
        weight = weight + (16.0 if step else 8.0) * records.scale * noisy
    score = records.z_PD @ weight.float()
    assert torch.equal(answers.score_PC, score) and torch.equal(answers.label_Q, score[asked].argmax(1))
    nothing = mechanism.release(records.select(asked[:0]), untouched := Recorder("torch"), CONTEXT)
    assert nothing.events == (GaussianEvent(mu=1 / 2, count=0),) and untouched.drawn == []
    x = torch.cat([drawn.flatten() for _, drawn in source.drawn]).numpy() / (cut * UNIT_NORM)
    assert has_this_scale_alone(lambda factor: fit(x, "gaussian", 2 * factor, False))


def test_every_round_but_the_last_has_more_noise_and_the_cost_of_it():
    records = gradient_sums()
    mechanism = GradientDescent(sigma=2.0, adjacency="add_remove", steps=50, early_noise_multiplier=3.0)
    early, last = GaussianEvent(mu=1 / 6, count=50), GaussianEvent(mu=1 / 2, count=50)
    assert mechanism.privacy_events(9) == (last,)
    assert mechanism.privacy_events(9, rounds=3) == (dataclasses.replace(early, count=100), last)
    for turn, (scale, event) in enumerate([(6, early), (6, early), (2, last)]):
        source = Recorder("torch")
        answers = mechanism.release(records, source, MechanismContext(num_queries=9, rounds=3, round_index=turn))
        assert answers.events == (event,)
        x = torch.cat([drawn.flatten() for _, drawn in source.drawn]).numpy() / UNIT_NORM
        assert has_this_scale_alone(lambda factor, x=x, scale=scale: fit(x, "gaussian", factor * scale, False))


@pytest.mark.parametrize("adjacency,apart", [("add_remove", 0.98), ("replace_one", math.sqrt(2))])
def test_the_audit_looks_at_records_that_show(adjacency, apart):
    """At the start of a descent a change has length sqrt(1 - 1/C), and two lie sqrt 2 apart."""
    mechanism = GradientDescent(sigma=3.0, adjacency=adjacency, steps=1)
    (pair,) = mechanism.worst_case_neighbors(1)
    start = torch.zeros(pair.left.shape, dtype=torch.float64)
    moved = (pair.right.compute_gradient_sum(start) - pair.left.compute_gradient_sum(start)).double() / UNIT_NORM
    assert float(moved.norm()) == pytest.approx(apart, abs=0.02)


# -- whole runs -----------------------------------------------------------------------------------------------------

GRADIENTS = ["method=gradients", "mechanism.sigma=1.5", "query=random", "student=self_training"]
TWO_ROUNDS = [*GRADIENTS, "student@guide_student=same", "query.rounds=2", "num_queries=80", "baseline=false",
              "recommended.student_steps=40", "student.alpha=0.3"]  # fmt: skip


def test_a_run_draws_in_each_round_the_noise_that_it_pays_for(tmp_path, monkeypatch):
    drawn = spy(monkeypatch, NoiseSource, "draw_gaussian", lambda self, shape, sigma, device: sigma / UNIT_NORM)
    short = ["dataset.private=200", "dataset.public=80", "dataset.test=50", "recommended.student_steps=2"]
    report = pipeline.run(configured(tmp_path, *TWO_ROUNDS, *short, "mechanism.early_noise_multiplier=2"))
    assert drawn == [3.0, 3.0, 1.5, 1.5]
    paid = math.sqrt(sum(1 / sigma**2 for sigma in drawn))
    assert report.claim.epsilon == pytest.approx(gdp.compute_epsilon(paid, 1e-4), rel=1e-9)


BRIEF = ["recommended.features_steps=4", "recommended.student_steps=4"]


MODEL = ["features=contrastive", *BRIEF, "student.publish=released_model"]


@pytest.mark.slow(reason="two whole runs a case")
@pytest.mark.parametrize("rounds,members,neighbors", [(1, 2, 0), (2, 2, 5)])
def test_the_model_that_gave_the_last_answers_is_published_itself(rounds, members, neighbors, tmp_path, monkeypatch):
    """It says of any point what the mechanism's model would have said."""
    encoders = spy(monkeypatch, GradientMethod, "build_sensitive", lambda *_, encoder, **__: encoder)
    asked = spy(monkeypatch, GradientMethod, "build_sensitive")
    fitted = spy(monkeypatch, GradientStudent, "fit", lambda *_, seed, **__: seed)
    settings = [f"features.encoders={members}", f"student.members={members}", f"query.rounds={rounds}",
                f"method.neighbors={neighbors}"]  # fmt: skip
    plan = configured(tmp_path, *TWO_ROUNDS, *MODEL, *settings)
    report = pipeline.run(plan)
    assert len(fitted) == (0 if rounds == 1 else 2 * members), "two generations of the first round, none of the last"
    student = load(plan.folder / "release" / "student.safetensors")
    data = plan.dataset.load()
    encoder = append_mean_shift(encoders[-1], data.pool.x, data.spec, neighbors)
    whitening = Whitening.from_features(encode(encoder, data.pool.x, data.spec), plan.method.ridge)
    score_PC = load_file(plan.folder / "release" / "scores.safetensors")["score_RPC"][-1].double()
    weight_DC = torch.linalg.lstsq(asked[-1].z_PD.double(), score_PC, driver="gelsd").solution
    for x in (data.pool.x, data.evaluation.x):
        said = whitening.whiten_and_clip(encode(encoder, x, data.spec)) @ weight_DC
        ours = student.compute_logits(x).double()
        assert float((centered(ours) - centered(said)).abs().max()) < 0.05 * float(centered(said).std())
    exact = student.compute_logits(data.pool.x).double()
    assert float((exact - score_PC).abs().max()) < 1e-3 * float(score_PC.std())
    assert report.evaluation.student_accuracy == pytest.approx(
        float((student.predict(data.evaluation.x) == data.evaluation.y).double().mean())
    )
    labels = f"labels={report.record.release_id}"
    again = pipeline.run(configured(tmp_path, *TWO_ROUNDS, *MODEL, *settings, labels))
    assert again.record.reuses_labels and again.evaluation.student_accuracy == report.evaluation.student_accuracy
    assert export(student, tmp_path / "model.pt2").is_file()


def moved(place: torch.Tensor, neighbors: int) -> networks.MeanShift:
    module = networks.MeanShift(*place.shape, neighbors)
    module.place_PD.copy_(place)
    return module


def test_a_point_among_its_neighbors_lies_in_their_midst():
    """Against every distance written out; the last neighbor has no weight, so that none comes in by a jump."""
    drawn = torch.Generator().manual_seed(0)
    place, x = (torch.nn.functional.normalize(torch.randn(n, 6, generator=drawn), dim=1) for n in (40, 25))
    for point, ours in zip(x.double(), moved(place, 7)(x), strict=True):
        squared = (place.double() - point).square().sum(1)
        near = squared.argsort()[:7]
        weight = squared[near[-1]] - squared[near]
        slow = (weight[:, None] * place[near].double()).sum(0) / weight.sum()
        torch.testing.assert_close(ours.double(), slow, rtol=0, atol=1e-5)
    third = x[:1] + torch.linspace(0, 1, 2001)[:, None] * (x[1:2] - x[:1])  # on the way some give way to others
    steps = moved(place, 7)(third).diff(dim=0).norm(dim=1)
    assert float(steps.max()) < 0.02 < float(steps.sum())
    same = torch.nn.functional.normalize(torch.ones(9, 6), dim=1)
    torch.testing.assert_close(moved(same, 4)(x[:3]), same[:3])  # equal ones weigh alike


def centered(logit_PC: torch.Tensor) -> torch.Tensor:
    return logit_PC - logit_PC.mean(1, keepdim=True)


@pytest.mark.parametrize("bad", [{"ridge": 0}, {"size": 0}, {"effective_dim": 0}, {"neighbors": -1}], ids=str)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=f"method.{next(iter(bad))}"):
        GradientMethod(mechanism=GradientDescent(sigma=1.0, adjacency="add_remove"), **bad)
