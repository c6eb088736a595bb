"""How many records should a linear teacher have, what is it asked, and who learns from the labels? Chosen on stand-ins.

    PYTHONPATH=.:keel python benchmarks/small_teachers.py --cache features --rows rows.jsonl packages-wordllama spambase

Votes of each ensemble are counted once for all public points; each mechanism's noise is then drawn on them. Accuracy on
the test half; delta 1e-5, add_remove, unit record. Every line of ``--rows`` is one ensemble, epsilon and queries.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import measuring
from benchmarks.same_encoder import data, ours
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods import feasibility
from pate_torch.privacy.records import NoisyCounts
from pate_torch.queries.base import QueryState, QueryStrategy, Random
from pate_torch.queries.clusters import Medoids, Prototypes
from pate_torch.students.base import StudentAlgorithm, StudentTask
from pate_torch.students.labels import compute_label_posterior
from pate_torch.students.linear import Logistic
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.training import Supervised
from pate_torch.teachers.recipe import TeacherRecipe

RECORDS = (5, 10, 20, 50, 100)
EPSILONS = (0.5, 2.0)
QUESTIONS_A_CLASS = (6, 12, 25, 50)
TEACHER = TeacherRecipe(network="logistic", steps=60, batch_size=16, learning_rate=0.03)
QUERIES: dict[str, QueryStrategy] = {"random": Random(), "prototypes": Prototypes(), "medoids": Medoids()}
COUNTS = ("counts .5", "counts .9")
_NONE = torch.zeros(0, dtype=torch.int64)


def students() -> dict[str, StudentAlgorithm]:
    """Logistic regression, and label propagation over the public points by how far and before which student.

    Those of ``COUNTS`` see the noisy counts behind the labels, which cost the same.
    """
    linear, mlp = Supervised(network="logistic"), Supervised(network="mlp")
    propagated: tuple[tuple[str, StudentAlgorithm, float], ...] = (
        ("alpha .5", linear, 0.5),
        ("alpha .9", linear, 0.9),
        ("mlp .5", mlp, 0.5),
        ("cross-validated .5", Logistic(), 0.5),
        ("counts .5", linear, 0.5),
        ("counts .9", linear, 0.9),
    )
    found: dict[str, StudentAlgorithm] = {"logistic": Logistic()}
    for name, learner, alpha in propagated:
        found[name] = SelfTraining(first_student=learner, later_students=learner, alpha=alpha, num_generations=1)
    return found


def rows(split: data.Split) -> Iterator[dict[str, Any]]:
    """Every choice on one split, with one draw of the noise each."""
    mean, std = split.scale
    pool, test = (torch.from_numpy((part - mean) / std).float() for part in (split.public, split.test))
    spec = measuring.make_spec(pool.shape[1:], split.classes)
    asked: dict[tuple[str, int], torch.Tensor] = {}
    for records in RECORDS:
        num_teachers = max(2, split.about // records)
        with ours.asked(split, num_teachers, GNMax(sigma=1.0), TEACHER, split.scale) as pate:
            votes_PC = pate._stored_teachers.ensemble.count_votes(ours.floats(split.public)).counts_QC.double()
        for epsilon, a_class, name in itertools.product(EPSILONS, QUESTIONS_A_CLASS, QUERIES):
            count = min(a_class * split.classes, len(pool))
            mechanism = GNMax(sigma=ours.calibrated(lambda sigma: GNMax(sigma=sigma), count, epsilon))
            if (name, count) not in asked:
                state = QueryState(
                    spec, pool, query_Q=_NONE, label_Q=_NONE, num_remaining=count, num_rounds_left=1, seed=split.seed
                )
                asked[name, count] = QUERIES[name].select(state)
            query_Q = asked[name, count]
            noisy_QC = votes_PC[query_Q] + mechanism.sigma * torch.randn(count, split.classes, dtype=torch.float64)
            task = StudentTask(spec, pool, query_Q, noisy_QC.argmax(1))
            counted = replace(
                task, posterior_QC=compute_label_posterior(NoisyCounts(noisy_QC.round().long(), mechanism.sigma))
            )
            lead = feasibility.compute_break_even_lead(mechanism, split.classes)
            right = {
                student: float((algorithm.fit(counted if student in COUNTS else task, seed=split.seed,
                                              device=pool.device).predict(test).numpy() == split.truth).mean())
                for student, algorithm in students().items()
            }  # fmt: skip
            yield {
                "data": split.name, "split": split.seed, "records": records, "epsilon": epsilon, "query": name,
                "a class": a_class, "lead": (lead or 0.0) / num_teachers,
                "plurality": float((votes_PC.argmax(1).numpy() == split.told).mean()),
                "labels right": float((noisy_QC.argmax(1).numpy() == split.told[query_Q.numpy()]).mean()), **right,
            }  # fmt: skip


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "fashion", "rows")
    parser.add_argument("names", nargs="+", choices=[name for name, source in data.SOURCES.items()
                                                     if source.stand_in is None])  # fmt: skip
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    file = measuring.Rows(args.rows)
    for name, seed in itertools.product(args.names, range(args.splits)):
        for row in rows(data.task(name, args.data, args.fashion, args.cache).split(seed)):
            file.add(row)
    found = file.read()
    for epsilon, records, query in itertools.product(EPSILONS, RECORDS, QUERIES):
        line = f"epsilon {epsilon:<4g} {records:3} records a teacher, {query:10}"
        mine = [row for row in found if (row["epsilon"], row["records"], row["query"]) == (epsilon, records, query)]
        print(line, *(f"{name} {100 * np.mean([row[name] for row in mine]):.1f}" for name in students()), sep="  ")


if __name__ == "__main__":
    main()
