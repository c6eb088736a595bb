"""A hypothesis as a student: one file that ``pate predict`` applies, exactly as the class does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pate_torch import networks
from pate_torch.learn.problem import compute_max_norm
from pate_torch.pac.classes import HalfPlane, Stump
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.students.base import Student


def make_rule_student(facts: DatasetFacts, hypotheses: Sequence[Any]) -> Student:
    """The student that says what the hypotheses say: of two classes the second's, else one for each class.

    Of several that say yes the one counts that says so of the fewest public points, of none the one of the most.
    """
    spec = facts.spec
    # Cuts are of raw features: normalized ones would be rounded.
    spec = replace(spec, mean=(0.0,) * len(spec.mean), std=(1.0,) * len(spec.std))
    half_planes = any(isinstance(hypothesis, bool | HalfPlane) for hypothesis in hypotheses)
    network = networks.describe("half_plane_rules" if half_planes else "axis_rules", spec.input_shape, spec.num_classes)
    module = networks.rebuild(network)
    states = [_make_half_plane(hypothesis) if half_planes else _make_axis_rule(hypothesis) for hypothesis in hypotheses]
    state = {name: torch.tensor(np.array([state[name] for state in states])) for name in states[0]}
    module.load_state_dict({**state, "share_R": torch.zeros(len(hypotheses))})
    if len(hypotheses) > 1:
        with torch.no_grad():
            module.get_buffer("share_R").copy_(module.evaluate(facts.pool.x).double().mean(0))  # type: ignore[operator]
    return Student(network, module.eval(), spec)


def _make_axis_rule(hypothesis: Any) -> dict[str, Any]:
    """A stump, a threshold (a number) or an interval (two)."""
    if isinstance(hypothesis, Stump):
        feature, low, high, is_inside = hypothesis.feature, hypothesis.threshold, math.inf, hypothesis.is_above
    elif isinstance(hypothesis, tuple):
        feature, (low, high), is_inside = 0, hypothesis, True
    else:
        feature, low, high, is_inside = 0, float(hypothesis), math.inf, True
    return {"feature_R": np.int64(feature), "low_R": float(low), "high_R": float(high), "inside_R": bool(is_inside)}


def _make_half_plane(hypothesis: bool | HalfPlane) -> dict[str, Any]:
    if isinstance(hypothesis, HalfPlane):
        return {"tail_RD": hypothesis.tail, "head_RD": hypothesis.head, "always_R": False}
    return {"tail_RD": (0.0, 0.0), "head_RD": (0.0, 0.0), "always_R": bool(hypothesis)}


def make_logistic_student(facts: DatasetFacts, parameters: Sequence[Any]) -> Student:
    """The linear model with these parameters of the scaled features and the intercept."""
    spec = facts.spec
    network = networks.describe("logistic", spec.input_shape, spec.num_classes)
    module = networks.rebuild(network)
    theta_CD = torch.tensor(np.stack(parameters) / compute_max_norm(facts), dtype=torch.float32)
    if spec.num_classes == 2:
        theta_CD = torch.cat([torch.zeros_like(theta_CD), theta_CD])
    module.load_state_dict({"1.weight": theta_CD[:, :-1].contiguous(), "1.bias": theta_CD[:, -1].contiguous()})
    return Student(network, module.eval(), spec)
