"""The computations of the joiner: kinds of tables from public rows, and a student or a synthetic table from noisy sums.

Everything here is computed from public values and noisy sums, so it has no privacy cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch.accounting import gdp
from pate_torch.core import checks
from pate_torch.features.contrastive import encode
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.base import FirstAnswers
from pate_torch.methods.gradients import plan_descent
from pate_torch.methods.reverse_knn import assign_cells
from pate_torch.methods.synthetic import SyntheticTable
from pate_torch.privacy.domain import TableDomain
from pate_torch.privacy.records import DataSpec, LinearModel, NoisyCounts, PublicPool, Release
from pate_torch.privacy.whitening import Whitening
from pate_torch.queries.base import QueryState
from pate_torch.queries.clusters import Medoids
from pate_torch.sites import points
from pate_torch.sites.charter import Charter
from pate_torch.sites.joiner import Joiner, NoisySum
from pate_torch.sites.points import EncoderFiles, make_spec
from pate_torch.sites.tables import NUM_VECTORS, CellCounts, ClassSums, Descent, MarginalCounts, PointTable
from pate_torch.sites.votes import VoteCounts, make_recipe
from pate_torch.students.base import Student
from pate_torch.students.labels import make_student_task
from pate_torch.students.linear import Logistic, ReleasedModel
from pate_torch.synthesis.mixture import NoisyTables, estimate_independent, fit_mixture
from pate_torch.synthesis.model import TableModel, split_counts

_RIDGE = 0.1  # if all directions are kept; in units of the mean variance


def plan_directions(charter: Charter, epsilon: float, num_public: int, num_records: int, steps: int = 1) -> float:
    """Plan the effective number of directions of the public features, as ``plan_descent`` does for one curator.

    Args:
        charter: The charter, which decides how much noise the sum has.
        epsilon: Largest cost of all steps.
        num_public: Number of public points.
        num_records: Approximate number of records at all sites together, which must be public.
        steps: Number of steps.
    """
    terms, num_sites = charter.terms, len(charter.sites)
    length = terms.max_sites_per_unit * NUM_VECTORS[terms.adjacency]
    excess = num_sites / (num_sites - terms.colluding)
    sigma = length * math.sqrt(steps * excess) / gdp.compute_mu(epsilon, float(Fraction(terms.delta)))
    mechanism = GradientDescent(sigma=sigma, adjacency=terms.adjacency, steps=steps)
    return plan_descent(mechanism, num_records, num_public, num_classes=terms.classes)[1]


def make_class_sums(
    public: Mapping[str, Any], label: str, classes: Sequence[str], *, effective_dim: float | None = None, **options: Any
) -> ClassSums:
    """Make the class sums of records, whitened as the PUBLIC rows are.

    Args:
        public: PUBLIC rows, {column: cells}.
        label: Name of the column of the private rows that holds the class.
        classes: Name of each class.
        effective_dim: Effective number of directions (``plan_directions``). None to keep all directions.
        **options: Further arguments of ``points.make_spec``.
    """
    return _make_class_sums(public, label, classes, effective_dim, options)[0]


def make_descent(
    public: Mapping[str, Any],
    label: str,
    classes: Sequence[str],
    steps: int,
    clip_norm: float,
    *,
    effective_dim: float | None = None,
    **options: Any,
) -> Descent:
    """Make a descent of ``steps`` rounds. For the other arguments see ``make_class_sums``."""
    sums, feature_PD = _make_class_sums(public, label, classes, effective_dim, options)
    constant = _compute_constant(sums.whitening, feature_PD)
    return Descent(**vars(sums), steps=steps, clip_norm=clip_norm, num_public=len(feature_PD), constant=constant)


def _make_class_sums(
    public: Mapping[str, Any],
    label: str,
    classes: Sequence[str],
    effective_dim: float | None,
    options: Mapping[str, Any],
) -> tuple[ClassSums, Tensor]:
    """Make class sums, and the features of the public points."""
    spec, _, feature_PD = _encode_public(public, label, classes, options)
    whitening = Whitening.from_features(feature_PD, _RIDGE, effective_dim)
    return ClassSums(label=label, spec=spec, whitening=whitening), feature_PD


def make_cell_counts(
    public: Mapping[str, Any], label: str, classes: Sequence[str], num_questions: int, **options: Any
) -> CellCounts:
    """Make a histogram over the cells of central PUBLIC points. For the arguments see ``make_class_sums``."""
    spec, x_PD, feature_PD = _encode_public(public, label, classes, options)
    query_Q = _select_medoids(spec, x_PD, feature_PD, num_questions)
    return CellCounts(label=label, spec=spec, query_QD=feature_PD[query_Q])


def make_vote_counts(
    public: Mapping[str, Any], label: str, classes: Sequence[str], num_questions: int, teacher: Any, **options: Any
) -> VoteCounts:
    """Make votes on central PUBLIC points. ``teacher`` maps fields of ``TeacherRecipe`` to their values.

    For the other arguments see ``make_class_sums``.
    """
    spec, x_PD, feature_PD = _encode_public(public, label, classes, options)
    query_x = x_PD[_select_medoids(spec, x_PD, feature_PD, num_questions)]
    return VoteCounts(label=label, spec=spec, query_x=query_x, teacher=make_recipe(teacher))


def _encode_public(
    public: Mapping[str, Any], label: str, classes: Sequence[str], options: Mapping[str, Any]
) -> tuple[DataSpec, Tensor, Tensor]:
    """Make the facts of the records, the public points [P, ...], and their features, float32 [P, D]."""
    spec, x_PD = make_spec(public, label, classes, **options)
    return spec, x_PD, encode(nn.Flatten(), x_PD, spec)


def _select_medoids(spec: DataSpec, x_PD: Tensor, feature_PD: Tensor, count: int) -> Tensor:
    """Select the medoids of ``count`` clusters of the public points, int64 [count]."""
    checks.integer("questions", count, 1, len(x_PD))
    empty_Q = torch.zeros(0, dtype=torch.int64)
    state = QueryState(
        spec=spec,
        pool_x=x_PD,
        query_Q=empty_Q,
        label_Q=empty_Q,
        num_remaining=count,
        num_rounds_left=1,
        seed=0,
        feature_PD=feature_PD,
    )
    return Medoids().select(state)


def make_marginal_counts(domain: TableDomain, order: int) -> MarginalCounts:
    """Make the marginal tables of a declared domain, of the target with up to ``order`` other columns each."""
    checks.integer("order", order, 1, min(3, len(domain.columns) - 1))
    return MarginalCounts(method=SyntheticTable(domain=domain, order=order))


def train_student(noisy: NoisySum, public: Mapping[str, Any], encoder: EncoderFiles = None) -> Student:
    """Train a student from a noisy sum and PUBLIC rows (``answer_public_points``)."""
    pool, release = answer_public_points(noisy, public, encoder)
    assert isinstance(noisy.kind, ClassSums | CellCounts | VoteCounts)
    return train_on_answers(noisy.kind, pool, release)[0]


def train_on_answers(kind: PointTable, pool: PublicPool, release: Release) -> tuple[Student, str]:
    """Train a student from the answers of ``answer_public_points``, and return it with the name of its algorithm."""
    algorithm = Logistic() if release.model is None else ReleasedModel()
    task = make_student_task(kind.spec, pool, release)
    return algorithm.fit(task, seed=0, device=torch.device("cpu")), algorithm.name


def answer_public_points(
    noisy: NoisySum, public: Mapping[str, Any], encoder: EncoderFiles = None
) -> tuple[PublicPool, Release]:
    """Answer PUBLIC points by a noisy sum: by the class of their cell, by votes, or by a linear model.

    Args:
        noisy: Noisy sum of any kind but marginal tables.
        public: PUBLIC rows, {column: cells}. Those of histograms and votes include the questions.
        encoder: Encoder that the public file describes, or the paths of its files. None if it describes none.

    Returns:
        The public points, and the released answers, whose privacy events are empty.
    """
    kind = noisy.kind
    if isinstance(kind, MarginalCounts):
        raise checks.error("round", kind.name, "has no classes", "Use fit_table.")
    assert isinstance(kind, ClassSums | CellCounts | VoteCounts)
    encode_points = points.open_encoder(kind.encoder, encoder)
    x_PD, _ = points.convert_columns(points.get_raw_spec(kind.spec), public, is_private=False)
    x_PD = x_PD if encode_points is None else encode_points(x_PD)
    feature_PD, pool = encode(nn.Flatten(), x_PD, kind.spec), PublicPool(x_PD)
    fields: dict[str, Any]
    if isinstance(kind, CellCounts | VoteCounts):
        counts = NoisyCounts(torch.from_numpy(noisy.numbers).round().long(), noisy.sigma)
        label_Q, fields = counts.counts_QC.argmax(1), {"noisy_counts": counts}
        # Each question was a public point, which is found again as the nearest one.
        if isinstance(kind, CellCounts):
            query_Q = assign_cells(kind.query_QD, feature_PD)
            fields["cell_RP"] = assign_cells(feature_PD, kind.query_QD)[None]
        else:
            query_QD, exact = kind.query_x.flatten(1).double(), "donot_use_mm_for_euclid_dist"
            query_Q = torch.cdist(query_QD, x_PD.flatten(1).double(), compute_mode=exact).argmin(1)
    else:
        model = fit_model(noisy, feature_PD)
        score_PC = kind.whitening.whiten_and_clip(feature_PD).float() @ model.weight_DC
        query_Q, label_Q = torch.arange(len(x_PD)), score_PC.argmax(1)
        fields = {"score_RPC": score_PC[None], "model": model}
    return pool, Release(noisy.id, query_Q, label_Q, (), (), queries_per_round=(len(query_Q),), **fields)


# ---- descent ---------------------------------------------------------------------------------------------------------
# The noise of all steps is fixed before the first round. The steps are post-processing of the noisy sums: the sum of
# the first round decides the length of all steps, and the sum of each round decides the weights of the next round.


def take_step(noisy: NoisySum) -> Descent:
    """Take the step of gradient descent that a noisy sum decides, and return the descent of the next round."""
    kind = noisy.kind
    assert isinstance(kind, Descent)
    gradient_DC = torch.from_numpy(noisy.numbers) / kind.clip_norm
    if kind.weight_DC is not None:
        return replace(kind, weight_DC=kind.weight_DC + kind.step_length * gradient_DC)
    sigma = noisy.sigma / kind.clip_norm
    weight_DC, step_length = _take_first_step(gradient_DC, sigma, kind.whitening.radius, kind.constant, kind.num_public)
    return replace(kind, weight_DC=weight_DC, step_length=step_length)


def ask_step(joiner: Joiner, kind: Descent, epsilon: float, *, again: bool = False) -> tuple[int, bytes, bytes]:
    """Ask for the first step, or for the next step of the newest descent if it has the same settings.

    Args:
        joiner: The joiner.
        kind: Settings of the descent. A descent that has begun keeps its own public file.
        epsilon: Largest cost of all steps together.
        again: Whether to ask for the newest step in a new slot because its sum is missing. Every site charges it again.

    Returns:
        Slot, round file and public file.
    """
    rounds = joiner.load_rounds()
    slots = [slot for slot, each in enumerate(rounds) if isinstance(each.kind, Descent)]
    current = rounds[slots[-1]].kind if slots else None
    if not isinstance(current, Descent) or current.settings != kind.settings:
        return joiner.ask(kind, epsilon)
    slot = slots[-1]
    if not rounds[slot].has_sum and not again:
        fix = "Run `pate join sum`, or add --again: a new slot, which every site charges in full."
        raise checks.error("round", slot, "has no sum, which the next step needs", fix)
    slots = joiner.list_slots(slot)
    finished = [other for other in slots if rounds[other].has_sum]
    if len(finished) >= kind.steps:
        problem = f"were all taken ({kind.steps})"
        raise checks.error("steps", kind.steps, problem, "Run `pate join train`; for another descent change a setting.")
    if finished:
        current = take_step(joiner.load_sum(finished[-1]))
    return joiner.ask(current, epsilon, slots[0])


def fit_model(noisy: NoisySum, feature_PD: Tensor) -> LinearModel:
    """Make the linear model after the step of gradient descent that a noisy sum decides."""
    kind = noisy.kind
    assert isinstance(kind, ClassSums)
    if isinstance(kind, Descent):
        weight_DC = take_step(noisy).weight_DC
        assert weight_DC is not None
    else:
        sums_DC, constant = torch.from_numpy(noisy.numbers), _compute_constant(kind.whitening, feature_PD)
        weight_DC, _ = _take_first_step(sums_DC, noisy.sigma, kind.whitening.radius, constant, len(feature_PD))
    return LinearModel(weight_DC.float(), torch.zeros(kind.spec.num_classes), kind.whitening)


def _compute_constant(whitening: Whitening, feature_PD: Tensor) -> float:
    return float(whitening.whiten_and_clip(feature_PD)[:, -1].mean())


def _take_first_step(
    sums_DC: Tensor, sigma: float, radius: float, constant: float, num_public: int
) -> tuple[Tensor, float]:
    """Take the first step of gradient descent from noisy class sums, and return the weights [D, C] and its length.

    The last row of the sums is that of the intercept's feature. Its ratio to the mean of this feature among the public
    points, ``constant``, estimates the number of records of each class, which decides the step size.
    """
    counts = FirstAnswers(sums_DC[-1] / constant, sigma / constant)
    size, balance, start_C = counts.estimate_size(None), counts.estimate_balance(), counts.estimate_start_logits()
    mechanism = GradientDescent(sigma=sigma, adjacency="add_remove", steps=1)
    mechanism, _ = plan_descent(mechanism, size, num_public, balance, sums_DC.shape[1])
    gradient_DC = sums_DC - sums_DC.sum(1, keepdim=True) * start_C.softmax(0)
    step_length = mechanism.first_step_size * radius / size
    weight_DC = step_length * gradient_DC
    weight_DC[-1] += radius * start_C
    return weight_DC, step_length


def fit_table(noisy: NoisySum) -> TableModel:
    """Fit the model of a synthetic table to noisy marginal tables."""
    kind = noisy.kind
    if not isinstance(kind, MarginalCounts):
        raise checks.error("round", kind.name, "has no marginal tables", "Use train_student.")
    method = kind.method
    counts_M = torch.from_numpy(noisy.numbers).round()  # the model stores whole numbers
    tables = NoisyTables(split_counts(counts_M, method.domain.sizes, kind.cliques), noisy.sigma)
    sizes, target, size = method.domain.sizes, method.target_index, math.ceil(tables.estimate_size())
    if method.order == 1:
        return TableModel(method.domain, size, tables, estimate_independent(tables, sizes, target))
    mixture = fit_mixture(tables, sizes, target)
    return TableModel(method.domain, size, tables, mixture)
