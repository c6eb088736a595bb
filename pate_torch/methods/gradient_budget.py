"""What a price buys of noisy gradients (``method=gradients``), and the steps that this noise bears.

The rule, for a declared number of records: eight short steps, in as many directions of the public points as there are
records for eight units of noise, and no more than the public points tell apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pate_torch.accounting import calibration
from pate_torch.mechanisms.gradient_descent import GradientDescent

_NUM_STEPS, _CLIP_NORM = 8, 0.5
_SIGNAL_TO_NOISE_PER_DIM = 8
"""The more noise, the fewer directions of the public points are worth a step: one for every so many records for each
unit of noise. Then the noise of a logit is the same whatever the epsilon, the features or the number of records. Chosen
on magic, spambase, satimage, package descriptions, phrases of SST-2 and PneumoniaMNIST at epsilon .1 to 2
(docs/experiments/gradient-settings.md)."""
_POINTS_PER_DIM = 4
"""Public points for each direction, at least: of fewer, directions that hardly vary among them are taken to be as long
as the others, and are not among the records (magic, spambase and satimage with 100 and 300 public points;
docs/experiments/gradient-settings.md)."""
_STEP_SIZE = 2.0
"""Size of a step where a whitened point is of length 1 (docs/experiments/gradient-settings.md, likewise)."""
_MIN_SIGNAL_TO_NOISE_FOR_MODEL = 200
"""Records for each unit of noise: with fewer, a student by self-training on the model's answers (label propagation over
the public points) is better than the model itself on an encoder's features (chosen on package descriptions, phrases of
SST-2 and PneumoniaMNIST; docs/experiments/frozen-features.md)."""
_MIN_SIGNAL_TO_NOISE = 25
"""Records for each unit of noise: with fewer, models on these data were seldom better than the commonest class."""


@dataclass(frozen=True, kw_only=True)
class CalibratedDescent:
    """Noisy gradient descent at a price.

    Attributes:
        mechanism: With calibrated noise.
        num_records: About how many private records there are, as declared; None: nobody says.
        num_public: Public points; None: their number is not known yet.
    """

    mechanism: GradientDescent
    num_records: int | None
    num_public: int | None = None

    @property
    def signal_to_noise(self) -> float | None:
        """Records for each unit of noise on a sum; None: nobody says how many there are."""
        return None if self.num_records is None else self.num_records / self.mechanism.sigma

    @property
    def effective_dim(self) -> float | None:
        """``method.effective_dim``; None: its ridge, which needs no number of records."""
        if self.signal_to_noise is None:
            return None
        max_dim = math.inf if self.num_public is None else self.num_public / _POINTS_PER_DIM
        return min(self.signal_to_noise / _SIGNAL_TO_NOISE_PER_DIM, max_dim)

    @property
    def is_noise_dominated(self) -> bool:
        """Whether noise outweighs the gradients, too."""
        return self.signal_to_noise is not None and self.signal_to_noise < _MIN_SIGNAL_TO_NOISE

    def needs_self_training(self, is_encoded: bool) -> bool:
        """Whether a student of the model's answers is better than the model, which ``is_encoded`` features allow."""
        return is_encoded and self.signal_to_noise is not None and self.signal_to_noise < _MIN_SIGNAL_TO_NOISE_FOR_MODEL


def calibrate_gradients(
    *, epsilon: float, delta: float, adjacency: str, num_records: int | None, num_public: int | None = None
) -> CalibratedDescent:
    """The descent that costs ``epsilon``: by the rule where ``num_records`` is declared, else two usual steps."""
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
    step_size = _STEP_SIZE * math.sqrt(1 + gradients.effective_dim)  # a whitened point is about so long
    return replace(gradients, mechanism=replace(gradients.mechanism, first_step_size=step_size, step_size=step_size))
