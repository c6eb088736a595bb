"""Reverse k-NN: one unit, one vote, one number of one table; priced as drawn; and what students make of the answers."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import gdp
from pate_torch.accounting.events import GaussianEvent, ZCDPEvent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.mechanisms.neighboring_values import make_count_pair
from pate_torch.methods.reverse_knn import CellCounter, ReverseKnn, assign_cells
from pate_torch.privacy.records import (
    MechanismContext,
    NoisyCounts,
)
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram
from pate_torch.students.labels import compute_class_proportions
from tests.mechanisms.vote_laws import Recorder, fit, has_this_scale_alone
from tests.methods.voter_worlds import PARTITIONS, among_images, ask_records, configured, encoder
from tests.tensor_sizes import Largest
from tests.worlds import IMAGES, images

CONTEXT = MechanismContext(num_queries=9)


def table(queries: int = 3, classes: int = 4, adjacency: str = "add_remove") -> CellHistogram:
    counts_QC = torch.arange(queries * classes).view(queries, classes)
    return CellHistogram(counts_QC, COUNT_SENSITIVITY[adjacency], torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("bad", [math.nan, 0, "many", True])
def test_a_wrong_sigma_is_refused(bad):
    with pytest.raises(ValueError, match="sigma"):
        Histogram(sigma=bad, adjacency="add_remove")
    with pytest.raises(ValueError, match="adjacency"):
        Histogram(sigma=1.0, adjacency="swap")


@pytest.mark.parametrize("adjacency,moved", [("add_remove", 1.0), ("replace_one", math.sqrt(2))])
def test_a_round_costs_the_same_however_much_it_asks(adjacency, moved):
    mechanism = Histogram(sigma=5.0, adjacency=adjacency)
    assert mechanism.privacy_events(1) == mechanism.privacy_events(10_000) == (GaussianEvent(mu=moved / 5, count=1),)
    assert mechanism.privacy_events(50, rounds=3) == (GaussianEvent(mu=moved / 5, count=3),)
    discrete = dataclasses.replace(mechanism, noise="discrete")
    (event,) = discrete.privacy_events(7, 2)
    assert isinstance(event, ZCDPEvent) and event.count == 2 and event.rho == pytest.approx(moved**2 / 50, rel=1e-12)
    assert table(adjacency=adjacency).sensitivity.l2 == mechanism.max_sensitivity.l2 == moved
    cost = accounting.compute_guarantee(mechanism.privacy_events(400, 2), 1e-5)
    assert cost.epsilon == pytest.approx(gdp.compute_epsilon(math.sqrt(2) * moved / 5, 1e-5), rel=1e-9)


@pytest.mark.parametrize("noise", ["torch", "discrete"])
def test_executed_noise_has_the_accounted_scale_and_no_other(noise):
    mechanism, source = Histogram(sigma=3.0, adjacency="add_remove", noise=noise), Recorder(noise)
    histogram = table(3000, 4)
    answers = mechanism.release(histogram, source, CONTEXT)
    assert answers.events == mechanism.privacy_events(3000)
    ((kind, drawn),) = source.drawn
    assert kind == "gaussian" and drawn.shape == (3000, 4)
    exact = histogram.counts_QC + drawn
    assert (
        torch.equal(answers.noisy_counts.counts_QC, exact.round().to(torch.int64)) and answers.noisy_counts.sigma == 3.0
    )
    assert torch.equal(answers.label_Q, answers.noisy_counts.counts_QC.argmax(1))
    x = drawn.double().flatten().numpy()
    assert has_this_scale_alone(lambda factor: fit(x, "gaussian", 3 * factor, noise == "discrete"))


@pytest.mark.parametrize("counts", [[[1, -1]], [[0.5, 1.0]], [[True, False]]])
def test_cell_counts_are_whole_and_never_negative(counts):
    with pytest.raises(ValueError, match="cells"):
        CellHistogram(torch.tensor(counts), "add_remove", torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("adjacency", "change", "fits"),
    [
        ("add_remove", [[1, 0], [0, 0]], True),
        ("add_remove", [[1, -1], [0, 0]], False),
        ("replace_one", [[1, 0], [-1, 0]], True),
        ("replace_one", [[1, 0], [0, 0]], False),
        ("replace_one", [[1, 0], [1, 0]], False),
    ],
)
def test_pairs_of_histograms_must_be_neighbors(adjacency, change, fits):
    left = torch.full((2, 2), 5)
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="neighbors"):
        make_count_pair("one", left, left + torch.tensor(change), adjacency)


def records(x, y, unit_id=None, unit="record", adjacency="add_remove", encoder=None) -> CellCounter:
    method = ReverseKnn(mechanism=Histogram(sigma=1.0, adjacency=adjacency))
    return ask_records(method, among_images(x, y, unit_id, unit), PARTITIONS[adjacency], encoder)


@pytest.mark.parametrize("learnt", [True, False])
def test_every_record_counts_at_the_nearest_question_as_a_plain_loop_says(learnt):
    x, y = images(80, seed=1)
    asked = torch.tensor([3, 50, 7, 21])
    body = encoder() if learnt else torch.nn.Flatten()
    voters = records(x, y, encoder=body if learnt else None)
    histogram = voters.select(asked)
    expected = torch.zeros(4, 3, dtype=torch.int64)
    with torch.no_grad():
        place = lambda one: torch.nn.functional.normalize(body(IMAGES.normalize(one[None])).flatten(), dim=0)  # noqa: E731
        pool, _ = images(60, seed=5)
        asked_places = [place(pool[q]) for q in asked]
        nearest = lambda one: min(range(4), key=lambda q: float((place(one) - asked_places[q]).norm()))  # noqa: E731
        for one, label in zip(x, y.tolist(), strict=True):
            expected[nearest(one), label] += 1
        assert torch.equal(histogram.counts_QC, expected) and int(expected.sum()) == 80
        assert histogram.cell_P.tolist() == [nearest(one) for one in pool]
    assert (len(voters), voters.num_classes) == (60, 3)
    assert "tensor" not in repr(voters) + repr(histogram)


def test_one_record_moves_one_cell_and_nothing_else_bit_for_bit():
    x, y = images(40, seed=1)
    asked, body = torch.arange(0, 60, 6), encoder()
    whole = records(x, y, encoder=body).select(asked).counts_QC
    for gone in (0, 17, 39):
        kept = torch.arange(40) != gone
        change = whole - records(x[kept], y[kept], encoder=body).select(asked).counts_QC
        assert sorted(change.flatten().tolist())[-2:] == [0, 1] and int(change.sum()) == 1
    other_x, other_y = x.clone(), y.clone()
    other_x[5], other_y[5] = 255 - x[5], (y[5] + 1) % 3
    assert records(x, y, encoder=body).select(asked).sensitivity.adjacency == "add_remove"
    replaced = records(other_x, other_y, encoder=body, adjacency="replace_one").select(asked)
    assert replaced.sensitivity.adjacency == "replace_one"
    change = whole - replaced.counts_QC
    assert int(change.sum()) == 0 and int(change.abs().sum()) == 2


def test_a_replaced_record_moves_one_vote_though_its_id_is_anothers():
    """The unit is the position: records with an id in common are several units, whatever is put in place of one."""
    x, y = images(40, seed=1)
    draw = np.random.default_rng(0)

    def histogram(x, y, names):
        return records(x, y, names, adjacency="replace_one").select(torch.arange(0, 60, 6))

    names = np.array(["a", "b", "c", "d", "e"])[draw.integers(5, size=12)]
    before = histogram(x[:12], y[:12], names)
    assert int(before.counts_QC.sum()) == 12
    moved = []
    for trial in range(40):
        position, other = draw.integers(12), 12 + draw.integers(28)
        other_x, other_y, other_names = x[:12].clone(), y[:12].clone(), names.copy()
        other_x[position], other_y[position], other_names[position] = x[other], y[other], names[trial % 12]
        change = histogram(other_x, other_y, other_names).counts_QC - before.counts_QC
        moved.append(int(change.square().sum()))
    assert max(moved) == 2 == round(before.sensitivity.l2**2)


def test_progress_is_in_per_cent_and_not_in_records():
    shown, voters = [], records(images(41, seed=1)[0], torch.zeros(41, dtype=torch.int64), encoder=torch.nn.Flatten())
    dataclasses.replace(voters, progress=lambda *step: shown.append(step)).select(torch.tensor([1, 2]))
    assert {total for _, total in shown} == {100} and shown[-1][0] == 100


def test_a_group_votes_once_where_most_of_its_records_lie():
    pool, _ = images(60, seed=5)
    x = torch.stack([pool[1], pool[1], pool[2], pool[2], pool[3], pool[3]])
    y = torch.tensor([0, 0, 1, 1, 2, 0])
    counts = records(x, y, list("aaabbb"), "group:who").select(torch.tensor([3, 2, 1])).counts_QC
    # a: twice (query 1, class 0). b: three places once each, of which the first by row and class.
    assert counts.tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_ties_go_to_the_first_question_and_blocks_do_not_matter():
    place = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    asked = torch.cat([place[:300], place[:300]])
    assert torch.equal(assign_cells(place[:300], asked), torch.arange(300))
    slow = [int((asked - one).square().sum(1).argmin()) for one in place]
    assert assign_cells(place, asked).tolist() == slow


@pytest.mark.parametrize("far", [0.0, 3.0, 1000.0])
@pytest.mark.parametrize("width", [2, 64, 784])
def test_questions_that_a_product_cannot_tell_apart_are_told_apart_by_differences(far, width):
    draw = torch.Generator().manual_seed(width)
    asked = torch.randn(50, width, generator=draw) + far
    asked = torch.cat([asked + shift * 1e-7 * torch.randn(50, width, generator=draw) for shift in range(6)])
    place = torch.cat([asked[::7], torch.randn(40, width, generator=draw) + far])
    found = assign_cells(place, asked)
    for one, row in zip(place, found.tolist(), strict=True):
        assert row == int((asked - one).square().sum(1).argmin()) == int(assign_cells(one[None], asked))
    by_product = (asked.square().sum(1) - 2 * place @ asked.T).argmin(1)
    assert far < 1000 or not torch.equal(by_product, found)


def test_records_are_not_compared_with_questions_one_feature_at_a_time():
    draw = torch.Generator().manual_seed(0)
    place, asked = torch.randn(8, 100, generator=draw), torch.randn(2000, 100, generator=draw)
    with Largest() as made:
        assign_cells(place, asked)
    assert made.entries == asked.numel()


def test_shares_are_the_proportions_and_noise_alone_says_nothing():
    clear = compute_class_proportions(NoisyCounts(torch.tensor([[110, 60, 10], [5, -3, 2], [0, 0, 0]]), sigma=10.0))
    torch.testing.assert_close(clear, torch.tensor([[2 / 3, 1 / 3, 0.0], [1 / 3] * 3, [1 / 3] * 3]))


REVERSE_KNN = ["method=reverse_knn", "mechanism.sigma=3", "query=medoids"]


def test_a_replaced_record_costs_more_and_target_epsilon_finds_the_noise(tmp_path):
    settings = [*REVERSE_KNN, "query.rounds=2", "num_queries=20", "student=none", "student@guide_student=logistic"]
    report = pipeline.run(configured(tmp_path, *settings, "partition=replace_one", "privacy.target_epsilon=2"))
    mu = math.sqrt(2) * math.sqrt(2) / report.record.parameters["sigma"]
    assert report.claim.adjacency == "replace_one" and report.record.rounds == 2
    assert 2 * (1 - 1e-3) <= report.claim.epsilon <= 2
    assert report.claim.epsilon == pytest.approx(gdp.compute_epsilon(mu, 1e-4), rel=1e-9)
