"""Settings of noisy gradients (``method=gradients``) at a given price.

The rule, for a declared number of records: eight short steps, in as many directions of the public points as there are
eights of records per unit of noise, and no more directions than the public points distinguish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pate_torch.accounting import calibration
from pate_torch.mechanisms.gradient_descent import GradientDescent

_NUM_STEPS, _CLIP_NORM = 8, 0.5
_SIGNAL_TO_NOISE_PER_DIM = 8
"""Records per unit of noise for each direction of the public points.

With more noise, fewer directions improve accuracy. By this ratio the noise of a logit does not depend on epsilon, the
features or the number of records. It was chosen on magic, spambase, satimage, package descriptions, phrases of SST-2
and PneumoniaMNIST at epsilon 0.1 to 2 (docs/experiments/gradient-settings.md)."""
_POINTS_PER_DIM = 4
"""Smallest number of public points for each direction. With fewer points, whitening enlarges directions that hardly
vary among the records (magic, spambase, satimage with 100 and 300 points; docs/experiments/gradient-settings.md)."""
_STEP_SIZE = 2.0
"""Size of a step for whitened points of length 1 (docs/experiments/gradient-settings.md)."""
_MIN_SIGNAL_TO_NOISE_FOR_MODEL = 200
"""Records per unit of noise below which, on an encoder's features, a student by self-training on the answers of the
model is better than the model (chosen on package descriptions, phrases of SST-2 and PneumoniaMNIST;
docs/experiments/frozen-features.md)."""
_MIN_SIGNAL_TO_NOISE = 25
"""Records per unit of noise below which models on these data were seldom better than the most frequent class."""


@dataclass(frozen=True, kw_only=True)
class CalibratedDescent:
    """Noisy gradient descent at a price.

    Attributes:
        mechanism: Mechanism with calibrated noise.
        num_records: Approximate number of private records, as declared. None if it is not declared.
        num_public: Number of public points. None if it is not known yet.
    """

    mechanism: GradientDescent
    num_records: int | None
    num_public: int | None = None

    @property
    def signal_to_noise(self) -> float | None:
        """Records per unit of noise on a sum; None if their number is not declared."""
        return None if self.num_records is None else self.num_records / self.mechanism.sigma

    @property
    def effective_dim(self) -> float | None:
        """Value for ``method.effective_dim``; None to use its ridge, which needs no number of records."""
        if self.signal_to_noise is None:
            return None
        max_dim = math.inf if self.num_public is None else self.num_public / _POINTS_PER_DIM
        return min(self.signal_to_noise / _SIGNAL_TO_NOISE_PER_DIM, max_dim)

    @property
    def is_noise_dominated(self) -> bool:
        """Whether noise outweighs the gradients."""
        return self.signal_to_noise is not None and self.signal_to_noise < _MIN_SIGNAL_TO_NOISE

    def needs_self_training(self, is_encoded: bool) -> bool:
        """Return whether a student of the model's answers is better than the model, given an encoder's features."""
        return is_encoded and self.signal_to_noise is not None and self.signal_to_noise < _MIN_SIGNAL_TO_NOISE_FOR_MODEL


def calibrate_gradients(
    *, epsilon: float, delta: float, adjacency: str, num_records: int | None, num_public: int | None = None
) -> CalibratedDescent:
    """Calibrate the descent that costs ``epsilon``: by the rule if ``num_records`` is declared, else by defaults."""
    mechanism = GradientDescent(sigma=1.0, adjacency=adjacency)
    if num_records is not None:
        mechanism = replace(mechanism, steps=_NUM_STEPS, clip_norm=_CLIP_NORM)
    sigma = calibration.calibrate_sigma(
        lambda sigma: replace(mechanism, sigma=sigma).privacy_events(1), epsilon=epsilon, delta=delta
    )
    gradients = CalibratedDescent(
        mechanism=replace(mechanism, sigma=sigma), num_records=num_records, num_public=num_public
    )
    if gradients.effective_dim is None:
        return gradients
    step_size = _STEP_SIZE * math.sqrt(1 + gradients.effective_dim)  # about the length of a whitened point
    return replace(gradients, mechanism=replace(gradients.mechanism, first_step_size=step_size, step_size=step_size))
