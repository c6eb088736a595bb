"""torchrun over gloo: any number of ranks gives the teachers and the votes of one process; a dead rank is an error."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from pate_torch.core import ranks
from pate_torch.features.neighbors import compute_coordinates
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.teachers.training import split_groups, train
from tests import ROOT
from tests.teachers.teacher_world import differing, even_shards, processes, recipe, records, spec

PROGRAM = str(ROOT / "tests" / "teachers" / "rank_program.py")


def torchrun(num_ranks, folder, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", PROGRAM]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run([*command, str(folder), *arguments], **options)


@pytest.fixture(scope="module")
def alone():
    private = records(138)
    ensemble = train(private, spec(), even_shards(46, 3), recipe(), seed=0, executor=processes(chunk=2))
    method = TransductiveTeacherVotes(num_teachers=1, mechanism=GNMax(sigma=1.0))
    jointly = method.build_vote(compute_coordinates(private.x, spec()))
    return ensemble.params, ensemble.count_votes(private.x).counts_QC, ensemble.tally(private.x, vote=jointly)


def check_ranks(folder, num_ranks, alone):
    """Every rank has the sum of the votes, rank 0 all teachers, and another rank its own alone."""
    params, counts, joint = alone
    groups = split_groups(46, num_ranks, 16)  # even sizes: launches are of two, and their size decides the last bits
    for rank in range(num_ranks):
        found = load_file(folder / f"rank{rank}.safetensors")
        assert torch.equal(found.pop("votes").long(), counts.long())
        assert torch.equal(found.pop("joint").long(), joint.long())
        own_groups = groups[rank::num_ranks] if rank else groups
        own = [teacher for group in own_groups for teacher in group]
        assert differing(found, {name: p[own] for name, p in params.items()}) == set()
        assert len(list((folder / f"machine{rank}").glob("teachers_*"))) == len(own_groups)


@pytest.mark.slow(reason="torchrun: every rank imports torch")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_give_the_teachers_and_votes_of_one_process(num_ranks, tmp_path, alone):
    done = torchrun(num_ranks, tmp_path)
    assert done.returncode == 0, done.stderr
    check_ranks(tmp_path, num_ranks, alone)


@pytest.mark.slow(reason="kill run under torchrun")
def test_a_dead_rank_fails_the_run_and_its_finished_groups_are_kept(tmp_path, alone):
    failed = torchrun(2, tmp_path, "1")
    assert failed.returncode != 0
    assert "another rank has stopped" in failed.stderr or "exitcode  : 7" in failed.stderr
    assert not list(tmp_path.glob("rank*.safetensors"))
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("machine*/teachers_*.safetensors")}
    assert kept
    again = torchrun(2, tmp_path)
    assert again.returncode == 0, again.stderr
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    check_ranks(tmp_path, 2, alone)


def test_ranks_of_different_kinds_refuse_to_mix(monkeypatch):
    """Launches are of other sizes on a GPU, so that one rank's teachers would have other bits than another's."""
    monkeypatch.setattr(ranks, "get_world", lambda: ranks.World(rank=1, size=3, local_rank=1, local_size=3))
    kinds = ["cpu", "cuda", "cuda"]
    monkeypatch.setattr(ranks.dist, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), kinds))
    with pytest.raises(ValueError, match=r"device='cuda': must be of one kind on all ranks \(rank 0 cpu, rank 1 cuda"):
        ranks.get_local_device(torch.device("cuda"))
    kinds[0] = "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.get_local_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert ranks.get_local_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
