"""Suggest per-record gradients at the same price for runs in which noise outweighs the votes of teachers."""

from __future__ import annotations

from pate_torch.accounting import calibration
from pate_torch.config import RunConfig
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.feasibility import NOISE_ADVICE
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.planning.gradient_budget import CalibratedDescent, calibrate_gradients
from pate_torch.privacy.partition import DatasetFacts


def suggest_settings(config: RunConfig, facts: DatasetFacts) -> str:
    """Suggest settings of train.py for a run whose votes the noise outweighs."""
    spec, num_public = facts.spec, len(facts.pool)
    gradients = match_label_price(config, spec.nominal_size, num_public)
    if gradients is None or not facts.has_records:
        return NOISE_ADVICE
    is_encoded = spec.encoder is not None
    return suggest_gradients(gradients, gradient_overrides(config, gradients, spec.is_image, is_encoded))


def match_label_price(config: RunConfig, num_records: int | None, num_public: int | None) -> CalibratedDescent | None:
    """Calibrate noisy descent to the price of the run's labels; None if its kind of noise has no descent.

    Args:
        config: Configuration of a run with teachers.
        num_records: Approximate number of records. None if that is not public.
        num_public: Number of public points. None if it is not known.
    """
    method = config.method
    if method.noise not in GradientDescent.noise_kinds or not isinstance(method, LabelingMethod):
        return None
    return calibrate_gradients(
        epsilon=calibration.compute_epsilon(method.privacy_events(), config.privacy.delta),
        delta=config.privacy.delta,
        adjacency=config.partition.adjacency,
        num_records=num_records,
        num_public=num_public,
    )


def suggest_gradients(gradients: CalibratedDescent, alternative: str) -> str:
    """Advise to use gradients as ``alternative`` says, unless noise outweighs them, too."""
    if gradients.is_noise_dominated:
        return NOISE_ADVICE
    size, noise = gradients.num_records, f"{gradients.mechanism.sigma:.3g}"
    records = "all records (for thousands of them, about how many is public)" if size is None else f"{size:,} records"
    return f"The same epsilon buys noise of {noise} on the sum of the clipped gradients of {records}: {alternative}"


def gradient_overrides(plan: RunConfig, gradients: CalibratedDescent, is_image: bool | None, is_encoded: bool) -> str:
    """Format the settings of train.py that replace this plan's teachers by gradients.

    Args:
        plan: Configuration of the run with teachers. Its target epsilon, if any, determines the noise.
        gradients: Noisy descent at the same price.
        is_image: Whether points are images. None if that is not known.
        is_encoded: Whether points are an encoder's features.
    """
    mechanism, trains_on_answers = gradients.mechanism, gradients.needs_self_training(is_encoded)
    words = ["method=gradients", "mechanism=gradient_descent", "query=random"]
    words += [] if plan.privacy.target_epsilon is not None else [f"mechanism.sigma={mechanism.sigma:.4g}"]
    if gradients.effective_dim is None:
        words += ["method.size=<about how many>"]
    else:
        words += [f"method.effective_dim={gradients.effective_dim:.3g}", f"mechanism.steps={mechanism.steps}"]
        words += [f"mechanism.clip_norm={mechanism.clip_norm:g}", f"mechanism.step_size={mechanism.step_size:.3g}"]
        words += [f"mechanism.first_step_size={mechanism.first_step_size:.3g}"]
    words += [] if gradients.num_public is None else [f"num_queries={gradients.num_public}"]
    if is_image and isinstance(plan.method, LabelingMethod) and plan.method.features is None:
        words += ["features=contrastive"]
    if is_image is False and not trains_on_answers:
        words += ["student=released_model"]
    else:
        words += ["student=self_training", f"student.alpha={'.5' if trains_on_answers else '.3'}"]
    words += [] if plan.private_epsilon is None else ["private_epsilon=none"]
    words += [] if plan.partition.max_shard_size is None else ["partition.capacity=null"]
    return " ".join(words)
