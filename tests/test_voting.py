"""Counting votes: against a loop, in every chunking, one vote each."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pate_torch import networks
from pate_torch.teachers import compiled, voting
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.voting import count, label_dtype
from pate_torch.types import DataSpec, Votes


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
    votes = count(predictions, classes)
    assert votes.num_teachers == teachers
    assert torch.equal(votes.counts_QC.long(), by_loop(predictions.long(), classes))


@pytest.mark.parametrize("width", [1, 8, 13, 1000])
@pytest.mark.parametrize("few", [2, 64])
def test_chunking_changes_nothing(monkeypatch, width, few):
    predictions = torch.randint(5, (13, 101), generator=torch.Generator().manual_seed(1))
    whole = by_loop(predictions, 5).int()
    monkeypatch.setattr(voting, "FEW_CLASSES", few)
    monkeypatch.setattr(voting, "WIDTH", width)
    assert torch.equal(count(predictions, 5).counts_QC, whole)


def test_unanimous_teachers_overflow_no_byte():
    for teachers in (255, 256, 511, 1000):
        counts = count(torch.full((teachers, 9), 2, dtype=torch.uint8), 4).counts_QC
        assert torch.equal(counts, torch.tensor([0, 0, teachers, 0], dtype=torch.int32).expand(9, 4))


def test_one_moved_vote_moves_two_counts_by_one():
    predictions = torch.randint(4, (9, 30), generator=torch.Generator().manual_seed(2))
    moved = predictions.clone()
    moved[3] = (moved[3] + 1) % 4
    difference = count(moved, 4).counts_QC.long() - count(predictions, 4).counts_QC.long()
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
        count(predictions, 4)


EDGES = [255, 256, 257, 2**15 - 1, 2**15, 2**15 + 1]
"""Where the type of a prediction becomes too narrow for the number of classes, or for the last class."""


@pytest.mark.parametrize("classes", EDGES)
def test_the_last_class_is_counted_and_the_next_refused_where_types_widen(classes):
    last = torch.tensor([[classes - 1, 0], [classes - 1, classes - 2]])
    for dtype in {label_dtype(classes), torch.int32, torch.int64}:
        counts = count(last.to(dtype), classes).counts_QC
        assert counts[0, classes - 1] == 2 and counts[1, 0] == counts[1, classes - 2] == 1
        assert int(counts.sum()) == 4
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        if classes <= torch.iinfo(dtype).max:
            with pytest.raises(ValueError, match=f"0..{classes - 1}"):
                count((last + 1).to(dtype), classes)


@pytest.mark.parametrize("classes", EDGES)
def test_an_ensemble_votes_for_its_last_class(classes):
    names = tuple(map(str, range(classes)))
    spec = DataSpec(name="two", num_classes=classes, input_shape=(2,), class_names=names, mean=(0.0,), std=(1.0,))
    network = networks.describe("logistic", spec.input_shape, classes)
    params = {name: torch.zeros(3, *p.shape) for name, p in networks.rebuild(network).named_parameters()}
    next(p for p in params.values() if p.dim() == 2)[:, -1] = 1.0
    ensemble = Ensemble(network, params, torch.ones(3, dtype=torch.bool), spec)
    votes = ensemble.votes(torch.ones(4, 2))
    assert votes.plurality().tolist() == [classes - 1] * 4
    assert votes.counts_QC[:, -1].tolist() == [3] * 4


@pytest.mark.parametrize("teachers", [127, 128, 255, 256, 2**15])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_counts_are_whole_votes_of_many_teachers(teachers, dtype):
    half = teachers // 4
    row = torch.tensor([[half, half, half, teachers - 3 * half]])
    if int(row.max()) <= torch.iinfo(dtype).max:
        assert Votes(row.to(dtype), teachers).top().tolist() == [int(row.max())]


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(voting, "MANY", 1)
    compiled.kernel.cache_clear()
    yield tmp_path / "pate_torch"
    compiled.kernel.cache_clear()


def compiles() -> bool:
    command = [shutil.which("cc") or "false", "-shared", "-fPIC", "-x", "c", "-", "-o", os.devnull]
    return subprocess.run(command, input=b"#include <string.h>\n", capture_output=True).returncode == 0


needs_compiler = pytest.mark.skipif(not compiles(), reason="no C compiler with its headers")


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_counting_is_its_slow_twin(cache_folder, monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiled, "_STRETCH", 384)  # less than a block, no divisor of one
    kernel = compiled.kernel()
    assert kernel is not None and [f.suffix for f in cache_folder.iterdir()] == [".so"]
    draw = torch.Generator().manual_seed(3)
    for teachers, queries, classes in [
        (1, 1, 2),
        (3, 127, 64),
        (255, 128, 10),
        (256, 129, 10),
        (600, 1000, 3),
        (9, 0, 4),
    ]:
        wide = torch.randint(classes + 1, (teachers, queries + 5), generator=draw).to(torch.uint8)
        for predictions in (wide[:, 2 : queries + 2], wide[:, :queries].T.contiguous().T):  # rows, columns apart
            counts = compiled.tally(kernel, predictions, classes)
            assert torch.equal(counts, voting._count_bytes(predictions, classes))
            assert not queries or torch.equal(counts.long(), by_loop(predictions.long(), classes + 1)[:, :classes])


def never(*_):
    raise AssertionError("not to be called")


@needs_compiler
def test_many_votes_are_counted_by_the_kernel(cache_folder, monkeypatch):
    monkeypatch.setattr(voting, "_count_bytes", never)
    assert count(torch.ones(5, 7, dtype=torch.uint8), 3).counts_QC.tolist() == [[0, 5, 0]] * 7


def no_compiler(folder, monkeypatch):
    monkeypatch.setenv("PATH", "")


def broken_compiler(folder, monkeypatch):
    folder.parent.joinpath("cc").write_text("#!/bin/sh\nexit 1\n")
    folder.parent.joinpath("cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder.parent))


def damaged_library(folder, monkeypatch):
    monkeypatch.setattr(compiled, "_built", lambda folder: folder / "damaged.so")
    folder.mkdir(mode=0o700)
    folder.joinpath("damaged.so").write_bytes(b"\x7fELF")


def shared_folder(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o777)


@pytest.mark.parametrize("trouble", [no_compiler, broken_compiler, damaged_library, shared_folder])
def test_without_a_kernel_torch_counts(cache_folder, monkeypatch, trouble):
    trouble(cache_folder, monkeypatch)
    assert compiled.kernel() is None
    monkeypatch.setattr(compiled, "tally", never)
    assert count(torch.ones(5, 7, dtype=torch.uint8), 3).counts_QC.tolist() == [[0, 5, 0]] * 7
    assert not list(cache_folder.glob("tally-*"))


@needs_compiler
def test_those_who_compile_at_once_find_one_whole_library(cache_folder):
    folder = compiled._folder()
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(compiled._built, [folder] * 4))
    assert libraries == set(folder.iterdir()) and len(libraries) == 1
    compiled._load(libraries.pop())
