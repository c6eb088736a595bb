"""Counting votes: against a loop, in every chunking, one vote each."""

import dataclasses

import numpy as np
import pytest
import torch

from pate_torch import networks
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers import voting
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.voting import count_votes, get_label_dtype
from tests.teachers.teacher_world import spec


def by_loop(predictions, classes):
    return torch.tensor(np.stack([np.bincount(column, minlength=classes) for column in predictions.T.numpy()]))


@pytest.mark.parametrize(
    ("teachers", "queries", "classes"), [(1, 1, 2), (7, 50, 3), (250, 33, 10), (40, 20, 1000), (600, 17, 3)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_counts_as_a_loop_does(teachers, queries, classes, dtype):
    dtype = torch.int16 if classes > 256 else dtype
    draw = torch.Generator().manual_seed(teachers)
    predictions = torch.randint(classes, (teachers, queries), generator=draw).to(dtype)
    votes = count_votes(predictions, classes)
    assert votes.num_teachers == teachers
    assert torch.equal(votes.counts_QC.long(), by_loop(predictions.long(), classes))


@pytest.mark.parametrize("width", [1, 8, 13, 1000])
@pytest.mark.parametrize("max_compared", [2, 64])
def test_chunking_changes_nothing(monkeypatch, width, max_compared):
    predictions = torch.randint(5, (13, 101), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(voting, "MAX_COMPARED_CLASSES", max_compared)
    monkeypatch.setattr(voting, "BLOCK_QUERIES", width)
    assert torch.equal(count_votes(predictions, 5).counts_QC, by_loop(predictions, 5).int())


@pytest.mark.parametrize("teachers", [255, 256, 511, 1000])
def test_unanimous_teachers_overflow_no_byte(teachers):
    counts = count_votes(torch.full((teachers, 9), 2, dtype=torch.uint8), 4).counts_QC
    assert torch.equal(counts, torch.tensor([0, 0, teachers, 0], dtype=torch.int32).expand(9, 4))


def test_one_moved_vote_moves_two_counts_by_one():
    predictions = torch.randint(4, (9, 30), generator=torch.Generator().manual_seed(2))
    moved = predictions.clone()
    moved[3] = (moved[3] + 1) % 4
    difference = count_votes(moved, 4).counts_QC.long() - count_votes(predictions, 4).counts_QC.long()
    assert torch.equal(difference.abs().sum(1), torch.full((30,), 2))
    assert not difference.sum(1).any()


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        (torch.tensor([[0, 4]]), "0..3"),
        (torch.tensor([[-1, 0]]), "0..3"),
        (torch.tensor([[256, 0]]), "0..3"),
        (torch.tensor([[1, 9]], dtype=torch.uint8), "one teacher, one vote"),
        (torch.zeros(2, 3), "integers"),
        (torch.zeros(3, dtype=torch.int64), "teachers, queries"),
    ],
)
def test_refuses(predictions, message):
    with pytest.raises(ValueError, match=message):
        count_votes(predictions, 4)


# Where the type of a prediction becomes too narrow for the number of classes, or for the last class.
@pytest.mark.parametrize("classes", [255, 256, 257, 2**15 - 1, 2**15, 2**15 + 1])
def test_the_last_class_is_counted_and_the_next_refused_where_types_widen(classes):
    last = torch.tensor([[classes - 1, 0], [classes - 1, classes - 2]])
    for dtype in {get_label_dtype(classes), torch.int32, torch.int64}:
        counts = count_votes(last.to(dtype), classes).counts_QC
        assert counts[0, classes - 1] == 2 and counts[1, 0] == counts[1, classes - 2] == 1
        assert int(counts.sum()) == 4
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        if classes <= torch.iinfo(dtype).max:
            with pytest.raises(ValueError, match=f"0..{classes - 1}"):
                count_votes((last + 1).to(dtype), classes)
    points = dataclasses.replace(spec(classes), input_shape=(2,))
    network = networks.describe("logistic", (2,), classes)
    params = {name: torch.zeros(3, *p.shape) for name, p in networks.rebuild(network).named_parameters()}
    next(p for p in params.values() if p.dim() == 2)[:, -1] = 1.0
    ensemble = TeacherEnsemble(network, [params], torch.ones(3, dtype=torch.bool), points)
    assert ensemble.count_votes(torch.ones(4, 2)).counts_QC[:, -1].tolist() == [3] * 4


@pytest.mark.parametrize("teachers", [127, 128, 255, 256, 2**15])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_counts_are_whole_votes_of_many_teachers(teachers, dtype):
    half = teachers // 4
    row = torch.tensor([[half, half, half, teachers - 3 * half]])
    if int(row.max()) <= torch.iinfo(dtype).max:
        assert Votes(row.to(dtype), teachers).compute_top_counts().tolist() == [int(row.max())]
