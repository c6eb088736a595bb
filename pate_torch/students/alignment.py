"""Distribution alignment: guesses scaled so that each class gets its expected share (ReMixMatch, section 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from pate_torch.students.training import StudentProblem


def expected_shares(problem: StudentProblem, kind: str) -> Tensor:
    """The share that each class should get, [C]: ``uniform`` over the classes with labels, else the labels' own."""
    counts_C = torch.bincount(problem.label_Q, minlength=problem.spec.num_classes).float()
    if kind == "uniform":
        # A class without labels cannot be recognized; asking for its share would hand it a neighbor's points.
        return (counts_C > 0).float() / (counts_C > 0).sum()
    # One extra label a class: an unseen class is rare, not impossible.
    return (counts_C + 1) / (counts_C + 1).sum()


class Alignment:
    """Scales guesses by expected share over recent mean guess.

    Args:
        problem: Gives the expected shares.
        kind: See ``expected_shares``.
        decay: Decay of the mean guess.
    """

    def __init__(self, problem: StudentProblem, kind: str, decay: float = 0.97) -> None:
        self.target_C = expected_shares(problem, kind)
        self.active = kind != "none"
        self.mean_C = self.target_C.clone()
        self.decay = decay

    def __call__(self, guess_BC: Tensor) -> Tensor:
        """Scale class probabilities [B, C] and normalize each row."""
        if not self.active:
            return guess_BC
        self.mean_C = self.decay * self.mean_C + (1 - self.decay) * guess_BC.mean(0)
        scaled_BC = guess_BC * (self.target_C / self.mean_C.clamp(min=1e-4))
        return scaled_BC / scaled_BC.sum(1, keepdim=True).clamp(min=1e-12)
