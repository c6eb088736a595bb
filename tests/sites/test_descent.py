"""Gradients over several rounds: exact sums, costs, sensitivities, and the order of steps."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.features.contrastive import encode
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.privacy.noise import NoiseSource
from pate_torch.sites import rounds, training
from pate_torch.sites.keys import load_joiner_key
from pate_torch.sites.mailbox import load_outgoing
from pate_torch.sites.points import make_spec
from pate_torch.sites.rounds import read_round
from pate_torch.sites.site import check_public_file
from pate_torch.sites.tables import Descent
from pate_torch.sites.training import ask_step
from tests.sites.site_tables import (
    CLASSES,
    PUBLIC,
    add_weights,
    compute_squared_change,
    get_charges,
    make_consortium,
    make_descent,
    make_kind,
    make_rows,
    select_rows,
)

UNIT = 1 << 30


def take_round(consortium, kind: Descent, epsilon: float = 0.5, **options) -> int:
    slot, raw, public = ask_step(consortium.joiner, kind, epsilon, **options)
    consortium.run_round(raw, public)
    return slot


def get_events(site):
    return [charge.reserved_events for charge in get_charges(site)]


def draw_zeros(self, shape, sigma, device):
    self._check_draw_allowed()
    return torch.zeros(shape, dtype=torch.int64)


def test_without_noise_three_steps_are_those_of_one_curator(tmp_path, monkeypatch):
    """One curator holds all records and takes the same steps with gradient descent's own sums."""
    monkeypatch.setattr(NoiseSource, "draw_gaussian", draw_zeros)
    clip_norm = 0.328125
    consortium, kind = make_consortium(tmp_path), make_descent(clip_norm=clip_norm)
    columns = {name: pa.concat_arrays([rows[name] for rows in consortium.data]) for name in consortium.data[0]}
    records = kind.read_records(columns, "record")
    sums, joiner = kind._make_sums(records, "add_remove"), consortium.joiner
    spec, x_PD = make_spec(PUBLIC, "y", CLASSES)
    feature_PD, weight_DC = encode(torch.nn.Flatten(), x_PD, spec), None
    for step in range(3):
        assert take_round(consortium, kind) == step
        noisy = joiner.load_sum()
        if weight_DC is None:
            expected = sums.compute_class_sums().double() * clip_norm
            numbers, sigma = (sums.compute_class_sums().double() / UNIT).numpy(), noisy.sigma / clip_norm
            first = replace(noisy, kind=make_kind("class_sums"), numbers=numbers, sigma=sigma)
            model = training.fit_model(first, feature_PD)
            weight_DC = training.take_step(noisy).weight_DC
            torch.testing.assert_close(weight_DC.float(), model.weight_DC)
            step_length = training.take_step(noisy).step_length
        else:
            assert torch.equal(noisy.kind.weight_DC, weight_DC) and noisy.kind.step_length == step_length
            expected = sums.compute_gradient_sum(weight_DC, clip_norm).double()
            weight_DC = weight_DC + step_length * (expected / UNIT / clip_norm)
        assert np.array_equal(noisy.numbers * UNIT, expected.numpy())
    model = training.fit_model(joiner.load_sum(), feature_PD)
    assert torch.equal(model.weight_DC, weight_DC.float())
    student = training.train_student(joiner.load_sum(), PUBLIC)
    x = torch.from_numpy(kind.spec.schema.encode({name: PUBLIC[name] for name in PUBLIC if name != "y"}))
    names = np.array(student.class_names)[student.predict(x).numpy()]
    assert np.mean(names == np.array(PUBLIC["y"].to_pylist())) > 0.85


def test_each_round_is_charged_and_all_rounds_cost_epsilon(tmp_path):
    consortium, kind = make_consortium(tmp_path), make_descent()
    sigmas = []
    for step in range(3):
        slot = take_round(consortium, kind)
        noisy = consortium.joiner.load_sum()
        sigmas.append(noisy.sigma)
        events = get_events(consortium.sites[0])
        assert len(events) == step + 1 and events[0] == events[-1]
    epsilon = compute_guarantee([event for each in events for event in each], 1e-5).epsilon
    assert 0.4999 < epsilon <= 0.5 and compute_guarantee(events[0], 1e-5).epsilon < 0.3
    assert len(set(sigmas)) == 1
    mechanism = GradientDescent(
        sigma=sigmas[0] * math.sqrt(2 / 3) / 0.5, adjacency="add_remove", steps=3, clip_norm=0.5, noise="discrete"
    )  # two of the three shares are priced
    one_curator = compute_guarantee(mechanism.privacy_events(1), 1e-5).epsilon
    assert epsilon == pytest.approx(one_curator, rel=1e-4)
    joiner = consortium.joiner
    assert joiner.compute_guarantees(joiner.list_slots(slot))[1].epsilon == epsilon


def test_the_order_of_steps(tmp_path):
    consortium, kind = make_consortium(tmp_path, num_rows=40, cap=3.0), make_descent()
    joiner = consortium.joiner
    take_round(consortium, kind)
    slot, raw, public = ask_step(joiner, kind, 0.5)
    assert slot == 1 and read_round(raw, joiner.charter).files.keys() == {"round-0.public"}
    assert public == (joiner.folder / "round-0.public").read_bytes()
    assert {"round-0.public", "round-1.json", "sum-0.json"} <= load_outgoing(joiner).keys()
    with pytest.raises(ValueError, match="has no sum, which the next step needs"):
        ask_step(joiner, kind, 0.5)
    with pytest.raises(ValueError, match=r"epsilon=0\.4: differs from the one of the first round"):
        ask_step(joiner, kind, 0.4, again=True)
    consortium.answer_all(raw, public)  # the answers are lost
    failed = read_round(raw, joiner.charter)
    assert take_round(consortium, kind, again=True) == 2
    assert joiner.list_slots(2) == [0, 1, 2]
    again = joiner.load_sum()
    assert np.array_equal(again.kind.weight_DC.numpy().ravel(), failed.body)
    assert take_round(consortium, kind) == 3
    with pytest.raises(ValueError, match="were all taken"):
        ask_step(joiner, kind, 0.5)
    assert len(get_events(consortium.sites[0])) == 4  # the failed round is charged in full
    three = compute_guarantee([event for each in get_events(consortium.sites[0])[:3] for event in each], 1e-5).epsilon
    assert joiner.compute_guarantees()[1].epsilon > 1.1 * three
    with pytest.raises(ValueError, match="has only 4 slots"):
        ask_step(joiner, make_descent(steps=4), 0.5)


@pytest.mark.parametrize("bad", [1e308, math.nan])
def test_weights_that_are_too_large_are_refused(tmp_path, monkeypatch, bad):
    consortium, kind = make_consortium(tmp_path, num_rows=20), make_descent()
    joiner, site = consortium.joiner, consortium.sites[0]
    weight_DC = add_weights(kind).weight_DC
    weight_DC[0, 0] = bad
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "MAX_INPUT", math.inf)
        if math.isnan(bad):
            patch.setattr(rounds.np, "abs", np.zeros_like)
        _, raw, public = joiner.ask(replace(kind, weight_DC=weight_DC), 0.5)
    with pytest.raises(ValueError, match="not finite or exceed 2"):
        site.answer(raw, public, consortium.data[0])
    assert not get_events(site)


def test_weights_of_another_shape_or_for_another_kind_are_refused(tmp_path):
    consortium, kind = make_consortium(tmp_path, num_sites=2), make_descent()
    joiner = consortium.joiner
    key, charter = load_joiner_key(joiner.folder / "joiner.key"), joiner.charter
    _, raw, _ = joiner.ask(kind, 0.5)
    asked = read_round(raw, charter)
    fields = {"slot": 1, "bound": asked.bound, "files": asked.files, "shape": kind.shape}
    public = kind.to_file(charter, key)
    raw = rounds.make_round(charter, key, sigma=asked.sigma, kind="gradients", body=np.zeros(5), **fields)
    with pytest.raises(ValueError, match=r"must hold weights of the shape \(7, 3\)"):
        check_public_file(charter, read_round(raw, charter), public)
    sums = training.make_class_sums(PUBLIC, "y", CLASSES)
    raw = joiner.ask(sums, 0.5)[1]
    asked = read_round(raw, charter)
    fields = {"slot": 2, "bound": asked.bound, "files": asked.files, "shape": kind.shape}
    raw = rounds.make_round(charter, key, sigma=asked.sigma, kind="class_sums", body=np.zeros(9), **fields)
    with pytest.raises(ValueError, match="does not read"):
        check_public_file(charter, read_round(raw, charter), sums.to_file(charter, key))
    for wrong in ({"clip_norm": 0.3}, {"clip_norm": 0.0}, {"clip_norm": 2.0}, {"clip_norm": "1"}, {"steps": 0}):
        with pytest.raises(ValueError, match=r"clip|steps"):
            replace(kind, **wrong)


@pytest.mark.parametrize("has_weights", [False, True])
def test_all_rows_of_a_group_count_as_one_record(has_weights):
    kind, rows = make_descent(), make_rows(24, 1)
    kind = add_weights(kind) if has_weights else kind
    rows["patient"] = pa.array([f"p{i // 4}" for i in range(24)])
    full = kind.count(kind.read_records(rows, "group:patient"), "add_remove")
    assert len(full.records) == 6
    for patient in range(6):
        neighbor = select_rows(rows, [i for i in range(24) if i // 4 != patient])
        table = kind.count(kind.read_records(neighbor, "group:patient"), "add_remove")
        assert 0 < compute_squared_change(kind, table.numbers, full.numbers) <= 1
        repeated = select_rows(rows, [*range(24), *(4 * patient for _ in range(5))])  # the same row again
        again = kind.count(kind.read_records(repeated, "group:patient"), "add_remove")
        assert np.array_equal(again.numbers, full.numbers)
