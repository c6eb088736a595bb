"""Students that consist of other students: pooled students, and self-training on propagated labels.

Each generation of self-training learns from labels that are propagated along a graph of the public points, in the
features of the previous generation. Self-training suits many answers with some errors, and answers for cells of points,
because the labels of neighbors correct errors (docs/experiments/reverse-nearest-neighbors.md).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch

from pate_torch import networks
from pate_torch.core import checks, rng
from pate_torch.core.device import run_in_parallel
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.features.base import FeatureRecipe
from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from pate_torch.students.linear import make_linear_student
from pate_torch.students.semi_supervised import ALPHA, propagate, select_most_confident
from pate_torch.students.training import build_problem

_ALPHA_LATER = 0.9
"""``alpha`` of later rounds. Their queries are formed in the features of a student, so labels have more weight."""


@dataclass(frozen=True, kw_only=True)
class PooledStudent(StudentAlgorithm):
    """Several students of one algorithm. The prediction is the mean of their log-probabilities.

    The students have different seeds, and therefore different features. The first student is the student that
    ``member`` returns for the same seed.

    Attributes:
        member: Algorithm of each student.
        members: Number of students.
    """

    member: StudentAlgorithm
    name: str = "pooled"
    members: int = 3

    def __post_init__(self) -> None:
        checks.integer("student.members", self.members, low=1)
        _check_algorithm("member", self.member)

    def check(self, spec: DataSpec) -> None:
        self.member.check(spec)

    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        member_logs: list[list[tuple[str, float, int]]] = [[] for _ in range(self.members)]

        def fit_member(k: int, progress: Progress) -> Student:
            return self.member.fit(
                task,
                seed=rng.derive_member_seed(seed, k),
                device=device,
                progress=progress,
                log=lambda tag, value, step: member_logs[k].append((f"{tag}/{k}", value, step)),
            )

        students = run_in_parallel([functools.partial(fit_member, k) for k in range(self.members)], device, progress)
        for tag, value, step in itertools.chain(*member_logs):  # member by member, because the order of threads varies
            log(tag, value, step)
        spec, design = task.spec, {key: students[0].network[key] for key in ("name", "options")}
        description = networks.describe("voting", spec.input_shape, spec.num_classes, members=self.members, of=design)
        module = networks.Voting([student.module for student in students]).eval()
        return Student(description, module, spec)


@dataclass(frozen=True, kw_only=True)
class SelfTraining(StudentAlgorithm):
    """Generations of students. Each learns from labels that are propagated in the features of the previous student.

    Attributes:
        first_student: Algorithm of the first student.
        later_students: Algorithm of each later student.
        features: Recipe of the features of the first graph. None for principal axes.
        keep_fraction: Share of the propagated labels of each class that the first student learns: the labels with the
            widest lead. The expected share of a class is its share among the answers.
        keep_fraction_later: ``keep_fraction`` of the later students.
        alpha: Share of a label that comes from the neighbors (``neighbors.propagate_labels``), for the first round.
        num_generations: Number of students that learn from the answers of the first round. Each later round adds one.
        members: Number of pooled students in each generation. They start from different features, and the next graph
            is built in their concatenated features.
        publish: "student" for the student that learned from the last round. "released_model" for the released linear
            model (``method=gradients``) in the features of the previous student. The model was fitted to private
            records, so errors of earlier students are not repeated.
    """

    first_student: StudentAlgorithm
    later_students: StudentAlgorithm
    name: str = "self_training"
    features: FeatureRecipe | None = None
    keep_fraction: float = 0.8
    keep_fraction_later: float = 0.95
    alpha: float = ALPHA
    num_generations: int = 2
    members: int = 1
    publish: str = "student"

    def __post_init__(self) -> None:
        _check_algorithm("first_student", self.first_student)
        _check_algorithm("later_students", self.later_students)
        checks.between("student.keep_fraction", self.keep_fraction, 0, 1)
        checks.between("student.keep_fraction_later", self.keep_fraction_later, 0, 1)
        checks.between("student.alpha", self.alpha, 0, 1, exclusive=True)
        checks.integer("student.num_generations", self.num_generations, low=1)
        checks.integer("student.members", self.members, low=1)
        checks.one_of("student.publish", self.publish, ("student", "released_model"))

    @property
    def returns_released_model(self) -> bool:
        return self.publish == "released_model"

    @property
    def guide(self) -> SelfTraining:
        return replace(self, publish="student")

    def check(self, spec: DataSpec) -> None:
        super().check(spec)
        self.first_student.check(spec)
        self.later_students.check(spec)

    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        """Return the student of the last generation, or the released model of the last round (``publish``).

        If ``task.guide`` is not None, it has learned from all rounds but the last, and the training continues with it.
        """

        def make_progress(generation: int) -> Progress:
            return lambda done, total: progress(generation * total + done, len(tasks) * total)

        def make_log(generation: int) -> Log:
            suffix = f"/{generation}" if generation else ""
            return lambda tag, value, step: log(tag + suffix, value, step)

        rounds = task.split_rounds()
        tasks = rounds[:1] * self.num_generations + rounds[1:]
        first_generation = 0 if task.guide is None else len(tasks) - 1
        if self.returns_released_model:  # the model gave the answers of the last round
            tasks = tasks[:-1] if len(rounds) > 1 else []
        student = task.guide
        for generation in range(first_generation, len(tasks)):
            problem = build_problem(tasks[generation], seed, device)
            algorithm, keep_fraction = self.later_students, self.keep_fraction_later
            if student is None:
                algorithm, keep_fraction = self.first_student, self.keep_fraction
            if self.members > 1:
                algorithm = PooledStudent(member=algorithm, members=self.members)
            alpha = self.alpha if generation < self.num_generations else _ALPHA_LATER
            share_C = problem.target_QC.mean(0)
            encoder = None if student is None else networks.make_feature_extractor(student.module)
            share_PC = propagate(problem, self.features, share_C, encoder=encoder, alpha=alpha)
            class_P = select_most_confident(share_PC, keep_fraction).cpu()
            query_Q = (class_P >= 0).nonzero().squeeze(1)
            student = algorithm.fit(
                StudentTask(task.spec, task.pool_x, query_Q, class_P[query_Q], search=task.search),
                seed=seed,
                device=device,
                progress=make_progress(generation),
                log=make_log(generation),
            )
        if self.returns_released_model:
            student = make_linear_student(rounds[-1], student, self.features, seed, device)
        assert student is not None
        return student


def _check_algorithm(key: str, algorithm: object) -> None:
    if not isinstance(algorithm, StudentAlgorithm):
        raise checks.error(f"student.{key}", algorithm, "must be a student algorithm", f"Set student.{key}._target_.")
