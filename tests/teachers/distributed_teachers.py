"""Run by torchrun in test_distributed.py: train, vote, and let rank 0 write what it has."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from pate_torch.features.neighbors import compute_coordinates
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import tally_over_ranks
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import even_shards, execution, recipe, records, spec


def main() -> None:
    torch.set_num_threads(1)
    folder, victim = Path(sys.argv[1]), sys.argv[2:] and int(sys.argv[2])
    me = distributed.get_world()
    run_id = distributed.broadcast_object(f"run-of-rank-{me.rank}")
    assert run_id == "run-of-rank-0"
    assert distributed.is_main() == (me.rank == 0)

    def die(done: int, _: int) -> None:
        if victim and me.rank == victim and done > 16:
            os._exit(7)

    private = records(150)
    shards = even_shards(50, 3)
    options = {"execution": execution(), "checkpoint_dir": folder / "checkpoints", "progress": die}
    ensemble = train(private, spec(), shards, recipe(), seed=0, **options)
    votes = tally_over_ranks(ensemble, lambda some: some.tally(private.x), len(private.x))
    feature_PD = distributed.broadcast_object(compute_coordinates(private.x, spec()) if distributed.is_main() else None)
    jointly = TransductiveTeacherVotes(num_teachers=1, mechanism=GNMax(sigma=1.0)).build_vote(feature_PD)
    joint = tally_over_ranks(ensemble, lambda some: some.tally(private.x, vote=jointly), len(private.x))
    found = ensemble.params | {"votes": votes.counts_QC, "joint": joint.counts_QC}
    save_file(found, folder / f"rank{me.rank}.safetensors")


if __name__ == "__main__":
    main()
