"""What a price buys of noisy gradients (``voters=gradients``), and the steps that this noise bears.

The rule, for a declared number of records: eight short steps, in as many directions of the public points as there are
records for eight units of noise, and no more than the public points tell apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pate_torch.accounting import calibration
from pate_torch.mechanisms.gradient_descent import GradientDescent

_STEPS, _CLIP_NORM = 8, 0.5
_RECORDS_A_DIRECTION = 8
"""The more noise, the fewer directions of the public points are worth a step: one for every so many records for each
unit of noise. Then the noise of a logit is the same whatever the epsilon, the features or the number of records. Chosen
on magic, spambase, satimage, package descriptions, phrases of SST-2 and PneumoniaMNIST at epsilon .1 to 2
(docs/experiments/gradient-settings.md)."""
_POINTS_A_DIRECTION = 4
"""Public points for each direction, at least: of fewer, directions that hardly vary among them are taken to be as long
as the others, and are not among the records (magic, spambase and satimage with 100 and 300 public points;
docs/experiments/gradient-settings.md)."""
_STEP = 2.0
"""Size of a step where a whitened point is of length 1 (docs/experiments/gradient-settings.md, likewise)."""
_FOR_THE_MODEL = 200
"""Records for each unit of noise: with fewer, a student by self-training on the model's answers (label propagation over
the public points) is better than the model itself on an encoder's features (chosen on package descriptions, phrases of
SST-2 and PneumoniaMNIST; docs/experiments/frozen-features.md)."""
_FEW = 25
"""Records for each unit of noise: with fewer, models on these data were seldom better than the commonest class."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Noisy gradient descent at a price.

    Attributes:
        mechanism: With calibrated noise.
        records: About how many private records there are, as declared; None: nobody says.
        public: Public points; None: their number is not known yet.
    """

    mechanism: GradientDescent
    records: int | None
    public: int | None = None

    @property
    def records_a_unit(self) -> float | None:
        """Records for each unit of noise on a sum; None: nobody says how many there are."""
        return None if self.records is None else self.records / self.mechanism.sigma

    @property
    def directions(self) -> float | None:
        """``voters.directions``; None: its ridge, which needs no number of records."""
        if self.records_a_unit is None:
            return None
        told = math.inf if self.public is None else self.public / _POINTS_A_DIRECTION
        return min(self.records_a_unit / _RECORDS_A_DIRECTION, told)

    @property
    def drowned(self) -> bool:
        """Whether noise drowns the gradients, too."""
        return self.records_a_unit is not None and self.records_a_unit < _FEW

    def self_training(self, encoded: bool) -> bool:
        """Whether a student of the model's answers is better than the model, which ``encoded`` features allow."""
        return encoded and self.records_a_unit is not None and self.records_a_unit < _FOR_THE_MODEL


def calibrated(
    *, epsilon: float, delta: float, adjacency: str, records: int | None, public: int | None = None
) -> Descent:
    """The descent that costs ``epsilon``: by the rule where ``records`` are declared, else two of the usual steps."""
    mechanism = GradientDescent(sigma=1.0, adjacency=adjacency)
    if records is not None:
        mechanism = replace(mechanism, steps=_STEPS, clip_norm=_CLIP_NORM)
    sigma = calibration.calibrate_sigma(
        lambda sigma: replace(mechanism, sigma=sigma).privacy_events(1), epsilon=epsilon, delta=delta
    )
    found = Descent(mechanism=replace(mechanism, sigma=sigma), records=records, public=public)
    if found.directions is None:
        return found
    step = _STEP * math.sqrt(1 + found.directions)  # a whitened point is about so long
    return replace(found, mechanism=replace(found.mechanism, first_step_size=step, step_size=step))
