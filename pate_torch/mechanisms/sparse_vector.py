"""Stability and sparse vector: exact winners where no few votes could change them; only failures are paid for."""

from __future__ import annotations

from dataclasses import dataclass

from pate_torch.mechanisms.sparse_vector_base import (
    NoisyThresholds,
    SparseVectorMechanism,
    compute_instability_distance,
)
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class SparseVector(SparseVectorMechanism):
    """The exact plurality where dist + Lap(2 lambda) > w + Lap(lambda), else "no answer"; stops at the T-th failure.

    dist = max(0, ceil(gap/2) - 1), in moves of one vote, for any number of classes. lambda and w, in votes, follow from
    (epsilon, delta, T, queries). A threshold lasts until its first failure, over all rounds. The answers are those of a
    *prefix* of the queries when it stops early.

    Guarantee: (epsilon, delta) for the whole release, adaptive queries included, under the shards' adjacency (one
    teacher changes its vote: dist has sensitivity 1). Charged: pure 2/lambda for every block started (a threshold, up
    to its first failure), and delta/2 once for an unstable query that passes.
    Source: LZCW21 Algorithm 2; BTT18 Algorithms 3-4 (see ``sparse_vector`` for the errors put right).
    """

    name: str = "sparse_vector"

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Answer until the T-th failure."""
        device = votes.counts_QC.device
        scales = self.compute_scales(context.num_queries)
        noisy_Q = compute_instability_distance(votes.counts_QC) + noise.draw_laplace(
            (len(votes),), 2 * scales.noise_scale, device
        )
        label_Q = votes.compute_plurality()
        blocks = NoisyThresholds(scales, noise, device, context)
        start = 0
        while start < len(votes) and not blocks.is_stopped:
            query = blocks.find_next_failure(noisy_Q, start)
            start = min(query + 1, len(votes))
            if query < len(votes):
                label_Q[query] = NO_ANSWER
                blocks.end_block()
        incurred_events = self._make_events(
            blocks.num_new_blocks, context.num_queries, with_delta=blocks.has_first_threshold
        )
        # A view would carry the exact labels after the stop along with it.
        return Answers(label_Q[:start].clone(), incurred_events)
