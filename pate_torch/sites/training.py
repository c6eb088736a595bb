"""What the joiner makes of a noisy sum: public files before a round, a student or a synthetic table after it.

Everything here is computed from public values and noisy sums, which costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.data.base import compute_normalization
from pate_torch.features.contrastive import encode
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.base import FirstAnswers
from pate_torch.methods.gradients import plan_descent
from pate_torch.methods.reverse_knn import assign_cells
from pate_torch.methods.synthetic import SyntheticTable
from pate_torch.privacy.domain import TableDomain
from pate_torch.privacy.records import DataSpec, LinearModel, NoisyCounts, PublicPool, Release
from pate_torch.privacy.schema import TableSchema, normalize_class_name
from pate_torch.privacy.whitening import Whitening
from pate_torch.queries.base import QueryState
from pate_torch.queries.clusters import Medoids
from pate_torch.sites.joiner import NoisySum
from pate_torch.sites.tables import CellCounts, ClassSums, MarginalCounts
from pate_torch.sites.votes import VoteCounts, make_recipe
from pate_torch.students.base import Student
from pate_torch.students.labels import make_student_task
from pate_torch.students.linear import Logistic, ReleasedModel
from pate_torch.synthesis.mixture import NoisyTables, estimate_independent, fit_mixture
from pate_torch.synthesis.model import TableModel, split_counts

_RIDGE = 0.1


def make_spec(public: Mapping[str, Any], label: str, classes: Sequence[str]) -> tuple[DataSpec, Tensor]:
    """Make the facts of the records from PUBLIC rows, and return them with the public points, float32 [P, D].

    Args:
        public: PUBLIC rows, {column: cells}. The columns of all records but the label, and no others.
        label: Name of the column of the private rows that holds the class.
        classes: Name of each class.
    """
    columns = {name: cells for name, cells in public.items() if name != label}
    names = tuple(map(normalize_class_name, classes))
    if len(set(names)) < len(names):
        raise checks.error("classes", names, "must be different names")
    schema = TableSchema.from_public(columns).with_fill_values(columns)
    x_PD = torch.from_numpy(schema.encode(columns, unknown="zeros", missing="nan"))
    is_number_D = np.isin(np.arange(x_PD.shape[1]), schema.numeric_indices)
    mean, std = compute_normalization(x_PD, is_number_D.tolist())
    spec = DataSpec(
        name="sites",
        num_classes=len(names),
        input_shape=(x_PD.shape[1],),
        class_names=names,
        mean=tuple(mean),
        std=tuple(std),
        low=tuple(x_PD.amin(0).tolist()),
        high=tuple(x_PD.amax(0).tolist()),
        schema=schema,
    )
    return spec, x_PD


def make_class_sums(public: Mapping[str, Any], label: str, classes: Sequence[str]) -> ClassSums:
    """Make the public file of class sums, whose whitening follows from PUBLIC rows; see ``make_spec``."""
    spec, x_PD = make_spec(public, label, classes)
    whitening = Whitening.from_features(encode(nn.Flatten(), x_PD, spec), _RIDGE)
    return ClassSums(label=label, spec=spec, whitening=whitening)


def make_cell_counts(
    public: Mapping[str, Any], label: str, classes: Sequence[str], num_questions: int, seed: int = 0
) -> CellCounts:
    """Make the public file of a histogram, whose questions are central PUBLIC points."""
    spec, x_PD = make_spec(public, label, classes)
    checks.integer("questions", num_questions, 1, len(x_PD))
    feature_PD = encode(nn.Flatten(), x_PD, spec)
    return CellCounts(label=label, spec=spec, query_QD=feature_PD[_select_medoids(spec, x_PD, num_questions, seed)])


def make_vote_counts(
    public: Mapping[str, Any],
    label: str,
    classes: Sequence[str],
    num_questions: int,
    teacher: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> VoteCounts:
    """Make the public file of votes on central PUBLIC points.

    Args:
        public: PUBLIC rows; see ``make_spec`` for this and the next two arguments.
        label: Name of the column of the class.
        classes: Name of each class.
        num_questions: Number of questions.
        teacher: Settings of ``TeacherRecipe``, the same for the teachers of all sites. None for the defaults.
        seed: Seed of the choice of questions, of the shards and of the training. It seeds no noise.
    """
    spec, x_PD = make_spec(public, label, classes)
    checks.integer("questions", num_questions, 1, len(x_PD))
    query_x = x_PD[_select_medoids(spec, x_PD, num_questions, seed)]
    return VoteCounts(label=label, spec=spec, query_x=query_x, teacher=make_recipe(teacher or {}), seed=seed)


def _select_medoids(spec: DataSpec, x_PD: Tensor, count: int, seed: int) -> Tensor:
    """Select central public points."""
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


def train_student(noisy: NoisySum, public: Mapping[str, Any]) -> Student:
    """Train a student from a noisy sum and PUBLIC rows."""
    kind = noisy.kind
    if isinstance(kind, MarginalCounts):
        raise checks.error("round", kind.name, "has no classes", "Use fit_table.")
    assert isinstance(kind, ClassSums | CellCounts | VoteCounts) and kind.spec.schema is not None
    columns = {name: cells for name, cells in public.items() if name != kind.label}
    x_PD = torch.from_numpy(kind.spec.schema.encode(columns, unknown="zeros", missing="nan"))
    feature_PD, pool = encode(nn.Flatten(), x_PD, kind.spec), PublicPool(x_PD)
    empty_Q, device = torch.zeros(0, dtype=torch.int64), torch.device("cpu")
    release = Release(f"sites round {noisy.slot}", empty_Q, empty_Q, (), ())
    if isinstance(kind, CellCounts | VoteCounts):
        counts = NoisyCounts(torch.from_numpy(noisy.numbers).round().long(), noisy.sigma)
        cell_RP = None
        if isinstance(kind, CellCounts):
            cell_RP = assign_cells(feature_PD, kind.query_QD)[None]
        else:
            pool = PublicPool(torch.cat([kind.query_x, x_PD]))  # the questions come first
        release = Release(
            release.id,
            torch.arange(len(counts.counts_QC)),
            counts.counts_QC.argmax(1),
            (),
            (),
            noisy_counts=counts,
            queries_per_round=(len(counts.counts_QC),),
            cell_RP=cell_RP,
        )
        return Logistic().fit(make_student_task(kind.spec, pool, release), seed=0, device=device)
    model = fit_class_sums(noisy, kind, feature_PD)
    score_PC = kind.whitening.whiten_and_clip(feature_PD).float() @ model.weight_DC
    release = Release(
        release.id,
        torch.arange(len(x_PD)),
        score_PC.argmax(1),
        (),
        (),
        queries_per_round=(len(x_PD),),
        score_RPC=score_PC[None],
        model=model,
    )
    return ReleasedModel().fit(make_student_task(kind.spec, pool, release), seed=0, device=device)


def fit_class_sums(noisy: NoisySum, kind: ClassSums, feature_PD: Tensor) -> LinearModel:
    """Take the first step of gradient descent from noisy class sums.

    The last row of the sums, of the constant feature, estimates the number of records of each class, because the mean
    of this feature among the public points is known. It sets the step size.
    """
    whitening, num_classes = kind.whitening, kind.spec.num_classes
    sums_DC, sigma = torch.from_numpy(noisy.numbers), noisy.sigma
    constant = float(whitening.whiten_and_clip(feature_PD)[:, -1].mean())
    counts = FirstAnswers(sums_DC[-1] / constant, sigma / constant)
    size, balance, frequency_C = counts.estimate_size(None), counts.estimate_balance(), counts.estimate_frequencies()
    mechanism = GradientDescent(sigma=sigma, adjacency="add_remove", steps=1)
    mechanism, _ = plan_descent(mechanism, size, len(feature_PD), balance, num_classes)
    log_frequency_C = frequency_C.log()
    start_C = (1 - balance) * (log_frequency_C - log_frequency_C.mean())
    gradient_DC = sums_DC - sums_DC.sum(1, keepdim=True) * start_C.softmax(0)
    weight_DC = mechanism.first_step_size * whitening.radius / size * gradient_DC
    weight_DC[-1] += whitening.radius * start_C
    return LinearModel(weight_DC.float(), torch.zeros(num_classes), whitening)


def fit_table(noisy: NoisySum, seed: int = 0, num_components: int = 200, steps: int = 300) -> TableModel:
    """Fit the model of a synthetic table to noisy marginal tables."""
    kind = noisy.kind
    if not isinstance(kind, MarginalCounts):
        raise checks.error("round", kind.name, "has no marginal tables", "Use train_student.")
    method = kind.method
    counts_M = torch.from_numpy(noisy.numbers)
    tables = NoisyTables(split_counts(counts_M, method.domain.sizes, kind.cliques), noisy.sigma)
    sizes, target, size = method.domain.sizes, method.target_index, math.ceil(tables.estimate_size())
    if method.order == 1:
        return TableModel(method.domain, size, tables, estimate_independent(tables, sizes, target))
    mixture = fit_mixture(tables, sizes, target, num_components=num_components, steps=steps, seed=seed)
    return TableModel(method.domain, size, tables, mixture)
