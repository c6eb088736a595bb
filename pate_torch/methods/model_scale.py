"""Rescaling of the linear model of noisy gradients, so that its probabilities are calibrated.

After a few noisy steps the logits of the model are too large where noise outweighs the records, and too small where the
steps have not yet fitted the records. The rule repeats the mechanism on simulated records: public points with labels
that are drawn from a known model. The logits of the known model deviate from the log class frequencies by a multiple,
the strength, of the deviation of the released logits. The rule takes the strength at which the repeated models have the
spread of the released model. There it finds the multiple of the logits, plus the multiple of the log class frequencies,
that predicts the simulated labels best.

Everything here is computed from released values and public points, so it costs no privacy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from pate_torch.core.rng import make_torch_generator
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext, Release
from pate_torch.privacy.sensitive import GradientSums, quantize
from pate_torch.students.linear import match_frequencies

_STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0, 7.0)
"""Multiples of the released logits that are tried as the true logits."""
_REPETITIONS, _MAX_POINTS, _MAX_RECORDS = 3, 1000, 3000
_NUM_MATCHINGS = 20
"""Number of steps towards the class frequencies."""
_MULTIPLES = (0.05, 3.0)
"""Smallest and largest multiple of the logits. With a multiple of 0, the model could not order points by class."""


def rescale_release(
    release: Release, mechanism: GradientDescent, public: GradientSums, frequency_C: Tensor, num_units: int, seed: int
) -> Release:
    """Releasable. Return the release of one round with rescaled logits, and the labels that follow from these.

    ``public`` are gradient sums without records, ``frequency_C`` the noisy class frequencies, and ``num_units`` the
    estimated number of units. ``seed`` seeds the simulated records and the noise of the repetitions.
    """
    model, score_RPC = release.model, release.score_RPC
    if model is None or score_RPC is None or len(score_RPC) != 1:
        return release
    base_C = frequency_C.log() - frequency_C.log().mean()
    generator = make_torch_generator(seed, "model scale")
    sample = torch.randperm(len(public.z_PD), generator=generator)[:_MAX_POINTS]
    public = replace(public, z_PD=public.z_PD[sample], feature_PD=public.feature_PD[sample])
    logit_PC = _center(score_RPC[0, sample].double())
    weight, multiple = _fit_multiples(logit_PC, base_C, mechanism, public, num_units, generator)
    shift_C = (weight * base_C).float()
    score_PC = multiple * score_RPC[0] + shift_C
    model = replace(model, weight_DC=multiple * model.weight_DC, bias_C=multiple * model.bias_C + shift_C)
    return replace(release, model=model, score_RPC=score_PC[None], label_Q=score_PC.argmax(1)[release.query_Q])


def _fit_multiples(
    logit_PC: Tensor,
    base_C: Tensor,
    mechanism: GradientDescent,
    public: GradientSums,
    num_units: int,
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return the multiples of the log class frequencies and of the logits that predict simulated records best."""
    z_PD = quantize(public.z_PD).double()  # converted once, for many sums
    size = min(num_units, _MAX_RECORDS)
    # Fewer simulated records than units: the noise and the steps keep their sizes relative to the sum.
    mechanism = replace(mechanism, sigma=mechanism.sigma * size / num_units)
    noise = DryRunNoise(insecure_seed=int(torch.randint(1 << 31, (1,), generator=generator)))

    def repeat(strength: float) -> tuple[Tensor, Tensor]:
        """Return the true class probabilities of the public points and the logits of the repetitions, [R P, C]."""
        true_logit_PC = base_C + strength * (logit_PC - base_C)
        offset_C = match_frequencies(true_logit_PC, base_C.softmax(0), _NUM_MATCHINGS)
        probability_PC = (true_logit_PC + offset_C).softmax(1)
        repeated_logits = []
        for _ in range(_REPETITIONS):
            index_N = torch.randint(len(z_PD), (size,), generator=generator)
            y_N = torch.multinomial(probability_PC[index_N], 1, generator=generator)[:, 0]
            sums = replace(public, z_ND=z_PD[index_N], y_N=y_N, scale=public.scale * num_units / size)
            score_PC = mechanism.release(sums, noise, MechanismContext(num_queries=1)).score_PC
            assert score_PC is not None
            repeated_logits.append(_center(score_PC.double()))
        return probability_PC.repeat(_REPETITIONS, 1), torch.cat(repeated_logits)

    target, spreads = _spread(logit_PC, base_C), []
    for strength in _STRENGTHS:
        spreads.append(_spread(repeat(strength)[1], base_C))
        if spreads[-1] > target and strength > 0:
            break
    strength = float(np.interp(target, np.maximum.accumulate(spreads), _STRENGTHS[: len(spreads)]))
    probability_RC, logit_RC = repeat(strength)

    def compute_loss(multiples: np.ndarray) -> tuple[float, np.ndarray]:
        log_probability_RC = (multiples[0] * base_C + multiples[1] * logit_RC).log_softmax(1)
        residual_RC = log_probability_RC.exp() - probability_RC
        gradient = [float((residual_RC * value).sum()) for value in (base_C, logit_RC)]
        return -float((probability_RC * log_probability_RC).sum()) / len(logit_RC), np.array(gradient) / len(logit_RC)

    bounds = [(0.0, 1.0), _MULTIPLES]
    weight, multiple = minimize(compute_loss, [0.5, 0.5], jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(weight), float(multiple)


def _center(logit_PC: Tensor) -> Tensor:
    return logit_PC - logit_PC.mean(1, keepdim=True)


def _spread(logit_PC: Tensor, base_C: Tensor) -> float:
    return float((logit_PC - base_C).square().mean())
