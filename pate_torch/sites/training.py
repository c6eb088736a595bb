"""What the joiner makes of a noisy sum: public files before a round, a student or a synthetic table after it.

Everything here is computed from public values and noisy sums, which costs no privacy.
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
from pate_torch.sites.joiner import NoisySum
from pate_torch.sites.points import EncoderFiles, make_spec
from pate_torch.sites.tables import CellCounts, ClassSums, Descent, MarginalCounts, PointTable
from pate_torch.sites.votes import VoteCounts, make_recipe
from pate_torch.students.base import Student
from pate_torch.students.labels import make_student_task
from pate_torch.students.linear import Logistic, ReleasedModel
from pate_torch.synthesis.mixture import NoisyTables, estimate_independent, fit_mixture
from pate_torch.synthesis.model import TableModel, split_counts

_RIDGE = 0.1


def plan_directions(
    charter: Charter, epsilon: float, num_public: int, num_records: int | None = None, steps: int = 1
) -> float:
    """Plan the effective number of directions of the public features, by the rule of one curator (``plan_descent``).

    Args:
        charter: The charter, which decides how much noise the sum has.
        epsilon: Largest price of all steps.
        num_public: Number of public points.
        num_records: Approximate number of records at all sites, which must be public. None for the bound of the terms.
        steps: Number of steps.
    """
    terms, num_sites = charter.terms, len(charter.sites)
    length = terms.max_sites_per_unit * (2 if terms.adjacency == "replace_one" else 1)
    excess = num_sites / (num_sites - terms.colluding)
    sigma = length * math.sqrt(steps * excess) / gdp.compute_mu(epsilon, float(Fraction(terms.delta)))
    mechanism = GradientDescent(sigma=sigma, adjacency=terms.adjacency, steps=steps)
    return plan_descent(mechanism, num_records or terms.max_records, num_public, num_classes=terms.classes)[1]


def make_class_sums(
    public: Mapping[str, Any],
    label: str,
    classes: Sequence[str],
    *,
    effective_dim: float | None = None,
    **options: Any,
) -> ClassSums:
    """Make the public file of class sums, whose whitening follows from PUBLIC rows.

    ``effective_dim`` is that of ``plan_directions``; if it is None, all directions are kept. Options: ``make_spec``.
    """
    spec, x_PD = make_spec(public, label, classes, **options)
    whitening = Whitening.from_features(encode(nn.Flatten(), x_PD, spec), _RIDGE, effective_dim)
    return ClassSums(label=label, spec=spec, whitening=whitening)


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
    """Make the public file of a descent, whose whitening follows from PUBLIC rows, as in ``make_class_sums``."""
    spec, x_PD = make_spec(public, label, classes, **options)
    feature_PD = encode(nn.Flatten(), x_PD, spec)
    whitening = Whitening.from_features(feature_PD, _RIDGE, effective_dim)
    return Descent(
        label=label,
        spec=spec,
        whitening=whitening,
        steps=steps,
        clip_norm=clip_norm,
        num_public=len(x_PD),
        constant=_compute_constant(whitening, feature_PD),
    )


def make_cell_counts(
    public: Mapping[str, Any], label: str, classes: Sequence[str], num_questions: int, seed: int = 0, **options: Any
) -> CellCounts:
    """Make the public file of a histogram, whose questions are central PUBLIC points."""
    spec, x_PD = make_spec(public, label, classes, **options)
    feature_PD = encode(nn.Flatten(), x_PD, spec)
    return CellCounts(label=label, spec=spec, query_QD=feature_PD[_select_medoids(spec, x_PD, num_questions, seed)])


def make_vote_counts(
    public: Mapping[str, Any], label: str, classes: Sequence[str], num_questions: int, teacher: Any, **options: Any
) -> VoteCounts:
    """Make the public file of votes on central PUBLIC points; ``teacher`` has settings of ``TeacherRecipe``."""
    spec, x_PD = make_spec(public, label, classes, **options)
    query_x = x_PD[_select_medoids(spec, x_PD, num_questions, 0)]
    return VoteCounts(label=label, spec=spec, query_x=query_x, teacher=make_recipe(teacher))


def _select_medoids(spec: DataSpec, x_PD: Tensor, count: int, seed: int) -> Tensor:
    """Select central public points."""
    checks.integer("questions", count, 1, len(x_PD))
    empty_Q = torch.zeros(0, dtype=torch.int64)
    state = QueryState(
        spec=spec,
        pool_x=x_PD,
        query_Q=empty_Q,
        label_Q=empty_Q,
        num_remaining=count,
        num_rounds_left=1,
        seed=seed,
        feature_PD=encode(nn.Flatten(), x_PD, spec),
    )
    return Medoids().select(state)


def make_marginal_counts(domain: TableDomain, order: int) -> MarginalCounts:
    """Make the public file of marginal tables of a declared domain."""
    checks.integer("order", order, 1, min(3, len(domain.columns) - 1))
    return MarginalCounts(method=SyntheticTable(domain=domain, order=order))


def train_student(noisy: NoisySum, public: Mapping[str, Any], encoder: EncoderFiles = None) -> Student:
    """Train a student from a noisy sum, PUBLIC rows, and the encoder that the public file names, if there is one."""
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
    """Answer PUBLIC points by a noisy sum: by the class of their cell, by votes, or by a linear model."""
    kind = noisy.kind
    if isinstance(kind, MarginalCounts):
        raise checks.error("round", kind.name, "has no classes", "Use fit_table.")
    assert isinstance(kind, ClassSums | CellCounts | VoteCounts)
    encode_points = points.open_encoder(kind.encoder, encoder)
    x_PD, _ = points.convert_columns(points.get_raw_spec(kind.spec), public, is_private=False)
    x_PD = x_PD if encode_points is None else encode_points(x_PD)
    feature_PD, pool = encode(nn.Flatten(), x_PD, kind.spec), PublicPool(x_PD)
    if isinstance(kind, CellCounts | VoteCounts):
        counts = NoisyCounts(torch.from_numpy(noisy.numbers).round().long(), noisy.sigma)
        cell_RP = None
        # The questions were public points.
        if isinstance(kind, CellCounts):
            query_Q, cell_RP = assign_cells(kind.query_QD, feature_PD), assign_cells(feature_PD, kind.query_QD)[None]
        else:
            query_QD, exact = kind.query_x.flatten(1).double(), "donot_use_mm_for_euclid_dist"
            query_Q = torch.cdist(query_QD, x_PD.flatten(1).double(), compute_mode=exact).argmin(1)
        release = Release(
            noisy.id,
            query_Q,
            counts.counts_QC.argmax(1),
            (),
            (),
            noisy_counts=counts,
            queries_per_round=(len(counts.counts_QC),),
            cell_RP=cell_RP,
        )
        return pool, release
    model = fit_descent(noisy) if isinstance(kind, Descent) else fit_class_sums(noisy, kind, feature_PD)
    score_PC = kind.whitening.whiten_and_clip(feature_PD).float() @ model.weight_DC
    release = Release(
        noisy.id,
        torch.arange(len(x_PD)),
        score_PC.argmax(1),
        (),
        (),
        queries_per_round=(len(x_PD),),
        score_RPC=score_PC[None],
        model=model,
    )
    return pool, release


def take_step(noisy: NoisySum) -> Descent:
    """Take a step of gradient descent, and return what the next round asks for."""
    kind = noisy.kind
    assert isinstance(kind, Descent)
    gradient_DC = torch.from_numpy(noisy.numbers) / kind.clip_norm
    if kind.weight_DC is not None:
        return replace(kind, weight_DC=kind.weight_DC + kind.step_length * gradient_DC)
    sigma = noisy.sigma / kind.clip_norm
    weight_DC, step_length = _take_first_step(gradient_DC, sigma, kind.whitening.radius, kind.constant, kind.num_public)
    return replace(kind, weight_DC=weight_DC, step_length=step_length)


def fit_descent(noisy: NoisySum) -> LinearModel:
    """Make the model of the weights after the step of this sum."""
    kind = take_step(noisy)
    assert kind.weight_DC is not None
    return LinearModel(kind.weight_DC.float(), torch.zeros(kind.spec.num_classes), kind.whitening)


def fit_class_sums(noisy: NoisySum, kind: ClassSums, feature_PD: Tensor) -> LinearModel:
    """Make the model of the weights after the first step of gradient descent from noisy class sums."""
    sums_DC, constant = torch.from_numpy(noisy.numbers), _compute_constant(kind.whitening, feature_PD)
    weight_DC, _ = _take_first_step(sums_DC, noisy.sigma, kind.whitening.radius, constant, len(feature_PD))
    return LinearModel(weight_DC.float(), torch.zeros(kind.spec.num_classes), kind.whitening)


def _compute_constant(whitening: Whitening, feature_PD: Tensor) -> float:
    return float(whitening.whiten_and_clip(feature_PD)[:, -1].mean())


def _take_first_step(
    sums_DC: Tensor, sigma: float, radius: float, constant: float, num_public: int
) -> tuple[Tensor, float]:
    """Take the first step of gradient descent from noisy class sums, and return the weights and the step's length.

    The last row of the sums, of the constant feature, estimates the number of records of each class, because the mean
    of this feature among the public points is known. It sets the step size.
    """
    counts = FirstAnswers(sums_DC[-1] / constant, sigma / constant)
    size, balance, frequency_C = counts.estimate_size(None), counts.estimate_balance(), counts.estimate_frequencies()
    mechanism = GradientDescent(sigma=sigma, adjacency="add_remove", steps=1)
    mechanism, _ = plan_descent(mechanism, size, num_public, balance, sums_DC.shape[1])
    log_frequency_C = frequency_C.log()
    start_C = (1 - balance) * (log_frequency_C - log_frequency_C.mean())
    gradient_DC = sums_DC - sums_DC.sum(1, keepdim=True) * start_C.softmax(0)
    step_length = mechanism.first_step_size * radius / size
    weight_DC = step_length * gradient_DC
    weight_DC[-1] += radius * start_C
    return weight_DC, step_length


def fit_table(noisy: NoisySum, seed: int = 0, num_components: int = 200, steps: int = 300) -> TableModel:
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
    mixture = fit_mixture(tables, sizes, target, num_components=num_components, steps=steps, seed=seed)
    return TableModel(method.domain, size, tables, mixture)
