"""Stability and sparse vector: exact winners where no few votes could change them; only failures are paid for."""

from __future__ import annotations

from dataclasses import dataclass

from pate_torch.mechanisms.sparse_vector_base import Blocks, SparseVector, distance
from pate_torch.noise.source import NoiseSource
from pate_torch.sensitive import Votes
from pate_torch.types import NO_ANSWER, Answers, Context


@dataclass(frozen=True, kw_only=True)
class Stability(SparseVector):
    """The exact plurality where dist + Lap(2 lambda) > w + Lap(lambda), else "no answer"; stops at the T-th failure.

    dist = max(0, ceil(gap/2) - 1), in moves of one vote, for any number of classes. lambda and w, in votes, follow from
    (epsilon, delta, T, queries). A threshold lasts until its first failure, over all rounds. The answers are those of a
    *prefix* of the queries when it stops early.

    Guarantee: (epsilon, delta) for the whole release, adaptive queries included, under the shards' adjacency (one
    teacher changes its vote: dist has sensitivity 1). Charged: pure 2/lambda for every block started (a threshold, up
    to its first failure), and delta/2 once for an unstable query that passes.
    Source: LZCW21 Algorithm 2; BTT18 Algorithms 3-4 (see ``sparse_vector`` for the errors put right).
    """

    name: str = "stability"

    def draw(self, votes: Votes, noise: NoiseSource, context: Context) -> Answers:
        """Answer until the T-th failure."""
        device = votes.counts_QC.device
        calibration = self.calibration(context.num_queries)
        noisy_Q = distance(votes.counts_QC) + noise.laplace((len(votes),), 2 * calibration.scale, device)
        label_Q = votes.plurality()
        blocks = Blocks(calibration, noise, device, context)
        start = 0
        while start < len(votes) and not blocks.stopped:
            query = blocks.next_failure(noisy_Q, start)
            start = min(query + 1, len(votes))
            if query < len(votes):
                label_Q[query] = NO_ANSWER
                blocks.fail()
        incurred = self._events(blocks.started, context.num_queries, first=blocks.first)
        # A view would carry the exact labels after the stop along with it.
        return Answers(label_Q[:start].clone(), incurred)
