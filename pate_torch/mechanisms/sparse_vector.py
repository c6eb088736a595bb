"""Stability with the sparse vector technique: exact winners of stable votes; only failed tests are paid for."""

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
    """The exact plurality if dist + Lap(2 lambda) > w + Lap(lambda), else no answer. It stops after the T-th failure.

    dist = max(0, ceil(gap/2) - 1) is the number of moved votes that cannot change the winner, for any number of
    classes. lambda and w, in votes, follow from (epsilon, delta, T, number of questions). A noisy threshold is used
    until its first failure, over all rounds. If the mechanism stops early, the answers are those of a *prefix*.

    Guarantee: (epsilon, delta) for the whole release, with adaptive questions, under the adjacency of the shards (one
    teacher changes its vote, so dist has sensitivity 1). The price is pure 2/lambda for each noisy threshold that is
    drawn, and delta/2 once for the event that an unstable question passes.
    Source: LZCW21 Algorithm 2; BTT18 Algorithms 3-4 (``sparse_vector_base`` lists the corrected errors).
    """

    name: str = "sparse_vector"

    def draw(self, votes: Votes, noise: NoiseSource, context: MechanismContext) -> Answers:
        """Answer questions until the T-th failure."""
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
        # The clone is needed, because a view would share memory with the exact labels after the stop.
        return Answers(label_Q[:start].clone(), incurred_events)
