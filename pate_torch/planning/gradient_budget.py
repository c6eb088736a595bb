"""Settings of noisy gradients (``method=gradients``) at a given cost, and advice to use them instead of teachers.

For a declared number of records, the rule takes eight steps. The effective dimension of the public points is the number
of records per unit of noise divided by eight, but at most a tenth of the number of public points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pate_torch.accounting import calibration
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.config import RunConfig
from pate_torch.mechanisms.class_counts import COUNT_COST_SHARE, ClassCounts
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.feasibility import NOISE_ADVICE
from pate_torch.methods.gradients import plan_descent
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.privacy.partition import DatasetFacts

_NUM_STEPS, _CLIP_NORM = 8, 0.5
_MIN_SIGNAL_TO_NOISE_FOR_MODEL = 200
"""Number of records per unit of noise below which self-training on the model's answers improves the model of an
encoder's features (package descriptions, phrases of SST-2, PneumoniaMNIST; docs/experiments/frozen-features.md)."""
_MIN_SIGNAL_TO_NOISE = 25  # below it, models on these data were seldom better than the most frequent class


@dataclass(frozen=True, kw_only=True)
class CalibratedDescent:
    """Noisy gradient descent that is calibrated to a cost, and public numbers of records and points, None if unknown.

    Attributes:
        effective_dim: Value of ``method.effective_dim``. None if the number of records is unknown; the ridge then
            applies, or noisy class counts decide.
        class_counts: Mechanism of the class counts that the cost includes. None if it includes none.
    """

    mechanism: GradientDescent
    num_records: int | None
    num_public: int | None = None
    effective_dim: float | None = None
    class_counts: ClassCounts | None = None

    @property
    def is_noise_dominated(self) -> bool:
        """Whether noise outweighs the gradients. False if the number of records is not declared."""
        return self.num_records is not None and self.num_records / self.mechanism.sigma < _MIN_SIGNAL_TO_NOISE

    def needs_self_training(self, is_encoded: bool) -> bool:
        """Return whether self-training on the model's answers is expected to improve the model."""
        if not is_encoded or self.num_records is None:
            return False
        return self.num_records / self.mechanism.sigma < _MIN_SIGNAL_TO_NOISE_FOR_MODEL


def calibrate_gradients(
    *,
    epsilon: float,
    delta: float,
    adjacency: str,
    num_records: int | None,
    num_public: int | None = None,
    buys_counts: bool = False,
    noise: str = "torch",
) -> CalibratedDescent:
    """Calibrate noise to the cost ``epsilon``, which pays for noisy class counts as well if ``buys_counts``."""
    mechanism = GradientDescent(sigma=1.0, adjacency=adjacency, noise=noise)
    if num_records is not None or buys_counts:
        mechanism = replace(mechanism, steps=_NUM_STEPS, clip_norm=_CLIP_NORM)

    def make_events(sigma: float) -> tuple[PrivacyEvent, ...]:
        return replace(mechanism, sigma=sigma).privacy_events(1)

    effective_dim = class_counts = None
    if buys_counts:
        sigma, class_counts = calibrate_with_counts(make_events, adjacency, epsilon=epsilon, delta=delta)
    else:
        sigma = calibration.calibrate_sigma(make_events, epsilon=epsilon, delta=delta)
    mechanism = replace(mechanism, sigma=sigma)
    if num_records is not None:
        mechanism, effective_dim = plan_descent(mechanism, num_records, num_public)
    return CalibratedDescent(
        mechanism=mechanism,
        num_records=num_records,
        num_public=num_public,
        effective_dim=effective_dim,
        class_counts=class_counts,
    )


def calibrate_with_counts(
    make_events: Callable[[float], tuple[PrivacyEvent, ...]], adjacency: str, *, epsilon: float, delta: float
) -> tuple[float, ClassCounts | None]:
    """Calibrate the noise scale of ``make_events`` and the noise of class counts to the cost ``epsilon`` together."""

    def make_all_events(sigma: float) -> tuple[PrivacyEvent, ...]:
        counts = ClassCounts.from_share(make_events(sigma), adjacency, COUNT_COST_SHARE)
        return make_events(sigma) + (() if counts is None else counts.privacy_events())

    sigma = calibration.calibrate_sigma(make_all_events, epsilon=epsilon, delta=delta)
    return sigma, ClassCounts.from_share(make_events(sigma), adjacency, COUNT_COST_SHARE)


def suggest_settings(config: RunConfig, facts: DatasetFacts) -> str:
    """Suggest settings of train.py for a run in which noise outweighs the votes."""
    spec, num_public = facts.spec, len(facts.pool)
    gradients = match_label_cost(config, spec.nominal_size, num_public)
    if gradients is None or not facts.has_records:
        return NOISE_ADVICE
    is_encoded = spec.encoder is not None
    return suggest_gradients(gradients, format_gradient_settings(config, gradients, spec.is_image, is_encoded))


def match_label_cost(config: RunConfig, num_records: int | None, num_public: int | None) -> CalibratedDescent | None:
    """Calibrate noisy gradient descent to the cost of the run's labels. Return None if the run labels no points."""
    method = config.method
    if not isinstance(method, LabelingMethod):
        return None
    return calibrate_gradients(
        epsilon=compute_guarantee(method.privacy_events(), config.privacy.delta).epsilon,
        delta=config.privacy.delta,
        adjacency=config.partition.adjacency,
        num_records=num_records,
        num_public=num_public,
        noise=method.noise,
    )


def suggest_gradients(gradients: CalibratedDescent, alternative: str) -> str:
    """Format advice to use ``alternative``, a call or settings for gradients, unless noise outweighs gradients, too."""
    if gradients.is_noise_dominated:
        return NOISE_ADVICE
    size, noise = gradients.num_records, f"{gradients.mechanism.sigma:.3g} clipping norms"
    records = f"{size:,} records" if size is not None else "all records (if their approximate number is public)"
    effect = f"At the same epsilon, the sum of the clipped gradients of {records} has noise of {noise}"
    return f"Consider per-record gradients. {effect}. Use: {alternative}"


def format_gradient_settings(
    plan: RunConfig, gradients: CalibratedDescent, is_image: bool | None, is_encoded: bool
) -> str:
    """Format the settings of train.py that replace this plan's teachers by gradients.

    ``is_image`` is None if it is unknown whether points are images. ``is_encoded`` states whether points are features
    of an encoder. If the plan has a target epsilon, the settings contain no noise scale.
    """
    mechanism, trains_on_answers = gradients.mechanism, gradients.needs_self_training(is_encoded)
    words = ["method=gradients mechanism=gradient_descent query=random"]
    if plan.privacy.target_epsilon is None:
        words.append(f"mechanism.sigma={mechanism.sigma:.4g}")
    if gradients.effective_dim is None:
        words.append("method.size=<approximate number>")
    else:
        words.append(f"method.effective_dim={gradients.effective_dim:.3g} mechanism.steps={mechanism.steps}")
        words.append(f"mechanism.clip_norm={mechanism.clip_norm:g} mechanism.step_size={mechanism.step_size:.3g}")
        words.append(f"mechanism.first_step_size={mechanism.first_step_size:.3g}")
    if gradients.num_public is not None:
        words.append(f"num_queries={gradients.num_public}")
    if is_image and isinstance(plan.method, LabelingMethod) and plan.method.features is None:
        words.append("features=contrastive")
    if is_image is False and not trains_on_answers:
        words.append("student=released_model")
    else:
        words.append(f"student=self_training student.alpha={'.5' if trains_on_answers else '.3'}")
    words += [] if plan.partition.max_shard_size is None else ["partition.capacity=null"]
    return " ".join(words)
