"""Would a plan's labels be any better than guesses? Foretold from public values alone, before anything is charged."""

from __future__ import annotations

import torch

from pate_torch import checks
from pate_torch.noise import Rehearsal
from pate_torch.protocols import Mechanism
from pate_torch.types import Context, Votes

QUESTIONS = 20_000
LEAST_SKILL = 0.05
"""Of the way from guessing to certainty: less is not told from chance by the few hundred labels of a release."""


def refuse(
    mechanism: Mechanism, *, num_teachers: int, num_classes: int, forced: bool, force: str = "privacy.allow_chance=true"
) -> None:
    """Raise ValueError where labels would be no better than chance even if all teachers agreed on the truth."""
    if forced:
        return
    right, guess = best_case(mechanism, num_teachers, num_classes), 1 / num_classes
    if right is not None and right < guess + LEAST_SKILL * (1 - guess):
        noise = getattr(mechanism, "sigma", None)
        what = (
            f"with {num_teachers} teachers labels would be no better than chance: right {100 * right:.1f} % of the time"
            f" even if all teachers agreed on the truth, where guessing is right {100 * guess:.1f} %"
        )
        fix = f"Take more teachers, less noise or a larger target_epsilon; or say {force}."
        raise checks.fail("mechanism" if noise is None else "mechanism.sigma", noise or mechanism.name, what, fix)


def best_case(mechanism: Mechanism, num_teachers: int, num_classes: int) -> float | None:
    """The share of answers that are right where all teachers agree on the truth, rehearsed; None: none is given."""
    asked = max(QUESTIONS // 10, min(QUESTIONS, 2_000_000 // num_classes))
    truth_Q = torch.arange(asked) % num_classes
    counts_QC = num_teachers * torch.nn.functional.one_hot(truth_Q, num_classes)
    kind = getattr(mechanism, "noise", "torch")
    answers = mechanism.release(
        Votes(counts_QC, num_teachers), Rehearsal(kind, 0 if kind == "torch" else None), Context(num_queries=asked)
    )
    answered_Q = answers.label_Q >= 0
    if not bool(answered_Q.any()):
        return None
    return float((answers.label_Q == truth_Q[: len(answered_Q)])[answered_Q].double().mean())
