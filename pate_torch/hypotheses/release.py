"""The private method that learns a hypothesis, and the students that predict by a released hypothesis."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from pate_torch import networks
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core.progress import Stages
from pate_torch.hypotheses.algorithms import (
    ALGORITHMS,
    Algorithm,
    LearnOptions,
    Problem,
    compute_max_norm,
    make_problems,
    plan_events,
)
from pate_torch.hypotheses.classes import HalfPlane, Stump
from pate_torch.hypotheses.sample import BelowGuaranteeWarning
from pate_torch.methods.base import MethodInputs, ModelRelease, PreparedMethod, PrivateMethod
from pate_torch.privacy.accounts import PURPOSE_HYPOTHESIS
from pate_torch.privacy.budget import Spending
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.records import LABEL_UNIT, PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import Sensitivity
from pate_torch.privacy.unit_ids import make_position_ids
from pate_torch.students.base import Student


@dataclass(frozen=True, kw_only=True)
class HypothesisMethod(PrivateMethod):
    """A method that releases the hypothesis of one of ``algorithms.ALGORITHMS``. Neighbors replace one record.

    ``seed`` determines the order of the records. If ``below_guarantee`` is set, fewer records than the theorem needs
    are enough. ``complete`` sets ``planned_events`` and ``certificate``, which is empty if candidates may depend on the
    records.
    """

    purpose: ClassVar[str] = PURPOSE_HYPOTHESIS
    cost_advice: ClassVar[str] = "Take a smaller --epsilon"
    releases_model: ClassVar[bool] = True
    name: str = "hypothesis"
    algorithm_name: str
    options: LearnOptions
    delta: float
    seed: int = 0
    below_guarantee: bool = False
    planned_events: tuple[PrivacyEvent, ...] | None = None
    certificate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.algorithm_name]

    @property
    def mechanism_name(self) -> str:
        return self.algorithm_name

    @property
    def student_name(self) -> str:
        return "linear" if self.algorithm.is_linear else self.options.hypotheses

    @property
    def noise(self) -> str:
        return "torch"

    def complete(self, facts: DatasetFacts, stages: Stages) -> HypothesisMethod:
        """Add the cost to the method. The cost depends on the public number of records, and not on their values."""
        facts.check_adjacency()
        events: list[PrivacyEvent] = []
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            # Under replace_one, the number of records is public. The cost depends only on this number and public facts.
            assert facts.num_units is not None
            x, ids = torch.zeros(facts.num_units, *facts.spec.input_shape), make_position_ids(facts.num_units)
            placeholders = PrivateRecords(x, torch.zeros(len(x), dtype=torch.int64), ids, facts.unit)
            parts = make_problems(placeholders, facts, self.options, self.seed, self.delta)
            for part in parts:
                events += plan_events(self.algorithm, part, self.noise)
        certificate = {} if facts.unit == LABEL_UNIT else self.algorithm.certify(parts[0])
        messages = [str(w.message) for w in caught_warnings if issubclass(w.category, BelowGuaranteeWarning)]
        shortfalls = list(dict.fromkeys(messages))
        if shortfalls and not self.below_guarantee:
            fix = "Use more records, raise --alpha or --beta, or continue without the theorem by --below-guarantee."
            raise ValueError(" ".join([*shortfalls, certificate.get("certificate", ""), fix]))
        for message in shortfalls:
            stages.print_message(message)
        return replace(self, planned_events=tuple(events), certificate=certificate)

    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError if a change of one unit could move other records. ``complete`` checks everything else."""
        facts.check_adjacency()

    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        assert self.planned_events is not None, "call complete first"
        return self.planned_events

    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        kind, classes = self.student_name, facts.spec.num_classes
        return {
            "num_teachers": 0,
            "mechanism": self.algorithm_name,
            "parameters": {"hypotheses": kind, "classes": classes, "alpha": self.options.alpha},
        }

    def prepare(self, inputs: MethodInputs) -> PreparedHypothesis:
        problems = make_problems(inputs.records, inputs.facts, self.options, self.seed, self.delta)
        return PreparedHypothesis(self, inputs, problems)

    def describe_model(self, student: Student) -> dict[str, Any]:
        model = {} if self.algorithm.is_linear else {"hypothesis": describe_rules(student)}
        return {**model, **self.certificate}


@dataclass(eq=False, repr=False)
class PreparedHypothesis(PreparedMethod):
    """PRIVATE. The problem of two classes, or the problems of each class against the rest."""

    method: HypothesisMethod
    inputs: MethodInputs
    parts: list[Problem]

    def release(self, pool: PublicPool, spending: Spending) -> ModelRelease:
        algorithm, hypotheses = self.method.algorithm, []
        noise = _SharedReservation(self.method.noise, spending)
        progress = self.inputs.stages(f"Learning by {self.method.algorithm_name}")
        with self.inputs.clock("learning"), warnings.catch_warnings():
            warnings.simplefilter("ignore", BelowGuaranteeWarning)
            for num_done, part in enumerate(self.parts, start=1):
                hypotheses.append(algorithm.learn(part, noise))
                progress(num_done, len(self.parts))
        make_student = make_logistic_student if algorithm.is_linear else make_rule_student
        return ModelRelease(spending.id, make_student(self.inputs.facts, hypotheses))


class _SharedReservation:
    """A noise provider for several parts of a release that share one reservation."""

    def __init__(self, kind: str, spending: Spending) -> None:
        self.kind, self.spending = kind, spending
        self._remaining_events = list(spending.reserved_events)

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        self.spending.check_adjacency(sensitivity)

    @contextmanager
    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = PURPOSE_HYPOTHESIS
    ) -> Iterator[Spending]:
        """Yield the spending of the reservation. If the part records no cost, all its events are recorded."""
        for event in events:  # raises ValueError for an event that was not reserved, before anything is drawn
            self._remaining_events.remove(event)
        previous_events = self.spending.incurred_events
        yield self.spending
        if self.spending.incurred_events is previous_events:
            self.spending.record_cost(events)


# ---- Students --------------------------------------------------------------------------------------------------------


def make_rule_student(facts: DatasetFacts, hypotheses: Sequence[Any]) -> Student:
    """Make the student of one hypothesis for the second of two classes, or of one hypothesis for each class.

    If several hypotheses are positive on a point, the one that is positive on the fewest public points decides. If none
    is positive, the one that is positive on the most public points decides.
    """
    spec = facts.spec
    # Thresholds apply to raw features, because normalized features would be rounded.
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
    match hypothesis:
        case Stump(feature, low, is_inside):
            high = math.inf
        case (low, high):  # an interval
            feature, is_inside = 0, True
        case low:  # a threshold
            feature, high, is_inside = 0, math.inf, True
    return {"feature_R": np.int64(feature), "low_R": float(low), "high_R": float(high), "inside_R": bool(is_inside)}


def _make_half_plane(hypothesis: bool | HalfPlane) -> dict[str, Any]:
    if isinstance(hypothesis, HalfPlane):
        return {"tail_RD": hypothesis.tail, "head_RD": hypothesis.head, "always_R": False}
    return {"tail_RD": (0.0, 0.0), "head_RD": (0.0, 0.0), "always_R": bool(hypothesis)}


def describe_rules(student: Student) -> str:
    """Describe released rules in words, as in "odor = n -> edible, otherwise poisonous", with numbers of six digits."""
    names, conditions = student.spec.class_names, _list_conditions(student)
    if len(conditions) > 1:
        rules = "; ".join(f"{condition} -> {name}" for condition, name in zip(conditions, names, strict=True))
        return f"{rules}; if several apply, the one that applies to the fewest public points; if none, to the most"
    rule = f"{conditions[0]} -> {names[1]}, otherwise {names[0]}"
    return {"always": f"always {names[1]}", "never": f"always {names[0]}"}.get(conditions[0], rule)


def _list_conditions(student: Student) -> list[str]:
    """List the condition of each rule. "always" and "never" are the conditions of constant rules."""
    module, schema = student.module, student.spec.schema
    columns: list[tuple[str, str | None]] = [(f"x[{j}]", None) for j in range(student.spec.input_shape[0])]
    if schema is not None:
        columns = [(column.name, value) for column in schema.columns for value in column.categories or (None,)]
    if isinstance(module, networks.HalfPlaneRules):
        names, tensors = [name for name, _ in columns], (module.tail_RD, module.head_RD, module.always_R)
        return [_format_half_plane(names, *rule) for rule in zip(*(t.tolist() for t in tensors), strict=True)]
    assert isinstance(module, networks.AxisRules)
    rules = zip(*(t.tolist() for t in (module.feature_R, module.low_R, module.high_R, module.inside_R)), strict=True)
    return [_format_bounds(*columns[j], *bounds) for j, *bounds in rules]


def _format_half_plane(names: Sequence[str], tail: list[float], head: list[float], is_always: bool) -> str:
    if tail == head:
        return "always" if is_always else "never"
    weights = np.array([tail[1] - head[1], head[0] - tail[0]]) / math.dist(tail, head)
    return f"{weights[0]:.6g} * {names[0]} {weights[1]:+.6g} * {names[1]} >= {weights @ tail:.6g}"


def _format_bounds(column: str, category: str | None, low: float, high: float, is_inside: bool) -> str:
    """Format low <= value < high, or its complement. The value of a category is 0 or 1."""
    first, last = ((low <= value < high) == is_inside for value in (0.0, 1.0))
    if first == last if category is not None else math.isinf(low) and high == math.inf:
        return "always" if first else "never"
    if category is not None:
        return f"{column} {'=' if last else 'is not'} {category or '(missing)'}"
    if high == math.inf:
        return f"{column} {'>=' if is_inside else '<'} {low:.6g}"
    return f"{column} < {high:.6g}" if low == -math.inf else f"{low:.6g} <= {column} < {high:.6g}"


def make_logistic_student(facts: DatasetFacts, parameters: Sequence[Any]) -> Student:
    """Make the linear model with the parameters of each problem, which apply to scaled features and the intercept."""
    spec = facts.spec
    network = networks.describe("logistic", spec.input_shape, spec.num_classes)
    module = networks.rebuild(network)
    theta_CD = torch.tensor(np.stack(parameters) / compute_max_norm(facts), dtype=torch.float32)
    if spec.num_classes == 2:
        theta_CD = torch.cat([torch.zeros_like(theta_CD), theta_CD])
    module.load_state_dict({"1.weight": theta_CD[:, :-1].contiguous(), "1.bias": theta_CD[:, -1].contiguous()})
    return Student(network, module.eval(), spec)
