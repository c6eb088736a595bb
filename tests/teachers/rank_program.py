"""Run by torchrun in test_ranks.py: train and vote in a folder of each rank, and write what a rank has."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from pate_torch.core import ranks
from pate_torch.features.neighbors import compute_coordinates
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.teachers.groups import VoteRequest
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import even_shards, processes, recipe, records, spec


def main() -> None:
    torch.set_num_threads(1)
    folder, victim = Path(sys.argv[1]), sys.argv[2:] and int(sys.argv[2])
    rank = ranks.get_world().rank
    assert ranks.broadcast_object(f"run-of-rank-{rank}") == "run-of-rank-0"
    assert ranks.is_main() == (rank == 0)

    def die(done: int, _: int) -> None:
        if victim and rank == victim and done > 12:
            os._exit(7)

    private, votes = records(138), []
    feature_PD = ranks.broadcast_object(compute_coordinates(private.x, spec()) if ranks.is_main() else None)
    jointly = TransductiveTeacherVotes(num_teachers=1, mechanism=GNMax(sigma=1.0)).build_vote(feature_PD)
    options = {"executor": processes(chunk=2), "folder": folder / f"machine{rank}", "on_votes": votes.append}
    for request in (VoteRequest(private.x), VoteRequest(private.x, jointly, variant="jointly")):
        ensemble = train(
            private, spec(), even_shards(46, 3), recipe(), seed=0, request=request, progress=die, **options
        )
    found = ensemble.params | {"votes": votes[0].counts_QC, "joint": votes[1].counts_QC}
    save_file(found, folder / f"rank{rank}.safetensors")


if __name__ == "__main__":
    main()
