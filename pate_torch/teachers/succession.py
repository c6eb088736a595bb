"""Successors: teachers who start from a student that was released to them.

Between two rounds of questions a student is fitted on the answers so far. It is public, so new teachers may start from
it at no cost in privacy. A successor's opinion of a point is the student's, plus a correction that it learns from its
own shard, linear in features of the public points. Where the student is right the records confirm it; where it is
wrong what most shards say against it outvotes it.

Guarantee: given the answers so far, a successor is a function of its own shard and of public values. So one record
moves one successor, with one vote on each question, and rounds compose adaptively, each at the mechanism's price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pate_torch import checks, rng
from pate_torch.networks import beneath
from pate_torch.protocols import Progress, Student, silent
from pate_torch.representation import encode
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train
from pate_torch.teachers.trunk import centred, encode_shards
from pate_torch.types import Dataset, Shards


@dataclass(frozen=True, kw_only=True)
class Succession:
    """How a successor learns its correction: ``steps`` of ``batch_size`` records of its own shard.

    (On hard glyphs features learnt without labels brought more than the student's own, or than both.)
    """

    steps: int = 150
    batch_size: int = 32
    learning_rate: float = 1e-2

    def __post_init__(self) -> None:
        checks.integer("succession.steps", self.steps, low=1)
        checks.integer("succession.batch_size", self.batch_size, low=1)
        checks.positive("succession.learning_rate", self.learning_rate)

    @property
    def recipe(self) -> TeacherRecipe:
        """Of the corrections."""
        return TeacherRecipe(
            network="correction",
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            label_smoothing=0.0,
        )

    def succeed(
        self,
        student: Student,
        data: Dataset,
        shards: Shards,
        *,
        encoder: nn.Module | None,
        seed: int,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
    ) -> tuple[Ensemble, Tensor]:
        """PRIVATE. One successor for each shard, and the rows of the public pool that they vote on, float32 [P, C + D].

        encoder: normalised points -> features learnt from the public points; None: those beneath the student's last
        layer, of an ensemble's first member; the points themselves where there is no such layer. (Nothing is refused
        here: the answers that the student learnt from are paid for.)
        """
        encoder = (beneath(student.module) if encoder is None else encoder).to(device)

        def rows(x: Tensor) -> Tensor:
            return torch.cat([student.logits(x).cpu(), encode(encoder, x, data.spec)], 1)

        def parts(_: int) -> Callable[[Tensor], list[Tensor]]:
            return lambda x: [rows(x)]

        row_PD = rows(data.pool.x)
        spec = centred(data.spec, row_PD, opinions=data.spec.num_classes)
        private, own = encode_shards(data.private, shards, parts, progress)
        with distributed.alone():  # heads take seconds, and the other ranks of a torchrun have no student
            ensemble = train(private, spec, own, self.recipe, seed=rng.derive(seed, "succession"), device=device)
        return ensemble, row_PD
