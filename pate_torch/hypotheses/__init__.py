"""Private learning over hypothesis classes that are small enough to enumerate (NB20, DF20, WLF16).

Labels are binary. Neighbors differ in one replaced record, and the number of records is public. Every algorithm charges
the account before it draws noise, and returns the hypothesis or the predictions with the charged events.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pate_torch.core import checks

HYPOTHESIS_CLASSES = ("stumps", "thresholds", "intervals", "half-planes")
DESCRIPTIONS = {
    "sspp": "NB20 Algorithm 7: labelings of public points",
    "exponential": "WLF16 Algorithm 1: finite classes",
    "convex": "WLF16 Proposition 19: logistic regression",
    "private-prediction": "DF20 Corollary 1: noisy predictions",
}
"""Source and method of each algorithm."""


def _option(default: Any, description: str, choices: tuple[str, ...] | None = None) -> Any:
    kind, text = (int, "") if default is None else (type(default), f" (default: {default})")
    return field(default=default, metadata={"help": description + text, "type": kind, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """Options of ``pate learn``. Each algorithm uses some of the options."""

    hypotheses: str = _option("stumps", "hypothesis class", HYPOTHESIS_CLASSES)
    epsilon: float = _option(1.0, "epsilon of the whole release")
    alpha: float = _option(0.1, "excess error of the theorem; private-prediction: a quarter of the promised error")
    beta: float = _option(0.1, "sspp and exponential: probability that a promise fails")
    points: int | None = _option(None, "number of public points (default: sspp 1000, private-prediction 20)")
    constants: str = _option("paper", "private-prediction: constants of the paper or sharp ones", ("paper", "sharp"))
    cuts: int = _option(20, "exponential: number of thresholds for each feature")
    radius: float = _option(3.0, "convex: radius of the ball of parameters")
    ridge: float = _option(0.05, "convex: weight of the penalty on the parameters")

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.metadata["choices"]:
                checks.one_of(option.name, getattr(self, option.name), option.metadata["choices"])
        for key in ("epsilon", "radius", "ridge"):
            checks.positive(key, getattr(self, key))
        for key in ("alpha", "beta"):
            checks.between(key, getattr(self, key), 0, 1, exclusive=True)
        for key, value in (("cuts", self.cuts), ("points", 1 if self.points is None else self.points)):
            checks.integer(key, value, low=1)
