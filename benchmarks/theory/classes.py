"""A class of listed predictors, for examples that no class of the package has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pate_torch.core import checks
from pate_torch.hypotheses.classes import HypothesisClass, find_distinct
from pate_torch.hypotheses.sample import Bools, Floats


@dataclass(frozen=True, eq=False)
class Listed(HypothesisClass):
    """A listed class of predictors: callables x [n, D] -> 0/1 labels [n].

    A hypothesis is an index into the list. The predictors must not have been trained on the sample they are then
    compared on. VC dimension: at most floor(log2 M).
    """

    predictors: Sequence[Callable[[Any], Any]]
    name: str = "list"

    def __post_init__(self) -> None:
        if len(self.predictors) == 0:
            raise checks.error("predictors", [], "must hold at least one predictor")

    @property
    def vc_dimension(self) -> int:  # type: ignore[override]
        """Upper bound on the VC dimension."""
        return len(self.predictors).bit_length() - 1

    def enumerate_representatives(self, x: Floats) -> Sequence[int]:
        return find_distinct(self.compute_labelings(range(len(self.predictors)), x)).tolist()

    def predict(self, hypothesis: int, x: Floats) -> Bools:
        label = np.asarray(self.predictors[hypothesis](x))
        if label.shape != (len(x),) or not np.isin(label, (0, 1)).all():
            raise checks.error(f"predictors[{hypothesis}]", label.shape, f"must return {len(x)} labels, each 0 or 1")
        return label.astype(bool)
