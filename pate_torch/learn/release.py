"""From private records to a released hypothesis: quoted, charged, learnt, written and reported as every release is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.accounting.formatting import format_delta
from pate_torch.config import RunConfig, check_adjacency
from pate_torch.context import open_budget, run_folder_lock
from pate_torch.core import checks
from pate_torch.core.files import compute_tensor_digest, create_private_folder
from pate_torch.core.progress import Progress, Stages, StageTimer
from pate_torch.learn import student as students
from pate_torch.learn.algorithms import ALGORITHMS, Algorithm, plan_events, sum_deltas
from pate_torch.learn.problem import LearnOptions, Problem, make_problems
from pate_torch.pac.sample import BelowGuaranteeWarning, NoisyVotesWarning
from pate_torch.privacy.accounts import PURPOSE_HYPOTHESIS
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset
from pate_torch.privacy.sensitive import Sensitivity
from pate_torch.privacy.units import drop_unusable
from pate_torch.release import owner_file
from pate_torch.release import store as release_store
from pate_torch.release.builder import build_report
from pate_torch.release.console import print_summary
from pate_torch.release.private_metrics import PrivateMetrics
from pate_torch.release.renderer import write_release
from pate_torch.release.report import ReleaseReport
from pate_torch.release.unfinished_calls import UnfinishedCall, save_model
from pate_torch.students.base import Student
from pate_torch.students.store import load
from pate_torch.teachers.store import TeacherStore


@dataclass(frozen=True, kw_only=True)
class LearningTask:
    """What is to be learnt.

    Attributes:
        name: Of the algorithm.
        options: What it is told.
        below_guarantee: Whether to go on where the theorem promises no accuracy for so few records.
    """

    name: str
    options: LearnOptions
    below_guarantee: bool = False

    @property
    def algorithm(self) -> Algorithm:
        """By its name."""
        return ALGORITHMS[self.name]


def learn(config: RunConfig, task: LearningTask) -> ReleaseReport:
    """Charge the account, learn, and write the files of a release.

    Raises:
        ValueError: A choice cannot work, or promises nothing for so few records; nothing has been charged.
        BudgetExceeded: The account's cap would be passed; nothing has been drawn.
    """
    clock = StageTimer()
    with Stages(quiet=config.quiet) as stages:
        with clock("data"):
            data = drop_unusable(config.dataset.load(), config.partition.adjacency)
        check_adjacency(data, config.partition.adjacency)
        options, terms = task.options, config.privacy
        delta = terms.delta / 2 if options.delta is None else options.delta
        problem_parts = make_problems(data, options, delta, config.seed)
        planned_events = _quote_parts(task, problem_parts, terms.noise, stages)
        _check_price(config, task, planned_events)
        store = TeacherStore(config.root)
        call_key = {
            "learning": repr(task),
            "seed": config.seed,
            "pool": compute_tensor_digest(data.pool.x),
            "delta": terms.delta,
        }
        unfinished_call = UnfinishedCall(
            store, data.spec.name, call_key, lambda: store.compute_fingerprint(data.private)
        )
        unfinished_model = unfinished_call.find_model(config.ledger_path)
        config = config if unfinished_model is None else replace(config, folder=unfinished_model[0])
        release = config.folder / "release"
        with run_folder_lock(config), Ledger(config.ledger_path) as ledger:
            budget = open_budget(config, ledger, data, planned_events, store.compute_content_fingerprint(data.private))
            if unfinished_model is not None:
                release_id = unfinished_model[1]
                student = load(release / "student.safetensors")
            else:
                release_store.check_unused_folder(config.folder)
                unfinished_call.begin(config.folder)
                with budget.spend(planned_events, mechanism=task.name, purpose=PURPOSE_HYPOTHESIS) as spending:
                    with clock("learning"), warnings.catch_warnings():
                        for category in (BelowGuaranteeWarning, NoisyVotesWarning):
                            warnings.simplefilter("ignore", category)
                        progress = stages(f"Learning by {task.name}")
                        student = _learn_parts(
                            task, data, problem_parts, _SharedReservation(budget, spending), progress
                        )
                    spending.record_files(save_model(student, release))
                release_id = spending.id
            report = _make_report(config, task, data, student, ledger, release_id, clock)
            create_private_folder(config.folder / "private")
            metrics = PrivateMetrics.from_student(data, student, clock.seconds)
            metrics.write(config.folder / "private" / "summary.json")
            write_release(release, report)
            unfinished_call.end()
    if not config.quiet:
        print_summary(report, owner=metrics.format_rows(), paths={"Released": release, "Ledger": ledger.path})
    return report


class _SharedReservation:
    """The noise provider of all parts of what is learnt, paid for by one reservation."""

    def __init__(self, budget: Budget, spending: Spending) -> None:
        self.budget, self.spending = budget, spending
        self._remaining_events = list(spending.reserved_events)

    @property
    def kind(self) -> str:
        """Kind of the noise."""
        return self.budget.kind

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's."""
        self.budget.check_adjacency(sensitivity)

    @contextmanager
    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = PURPOSE_HYPOTHESIS
    ) -> Iterator[Spending]:
        """The reservation's spending; a part that does not say what it incurred has incurred these events."""
        for event in events:
            self._remaining_events.remove(event)  # ValueError, before anything is drawn, for what was not reserved
        previous_events = self.spending.incurred_events
        yield self.spending
        if self.spending.incurred_events is previous_events:
            self.spending.record_cost(events)


def _learn_parts(
    task: LearningTask, data: Dataset, parts: Sequence[Problem], budget: _SharedReservation, progress: Progress
) -> Student:
    """Learn every part, and make one student of what was found."""
    hypotheses = []
    for num_done, part in enumerate(parts, start=1):
        hypotheses.append(task.algorithm.learn(part, budget))
        progress(num_done, len(parts))
    make_student = students.make_logistic_student if task.algorithm.is_linear else students.make_rule_student
    return make_student(data, hypotheses)


def _quote_parts(task: LearningTask, parts: list[Problem], kind: str, stages: Stages) -> tuple[PrivacyEvent, ...]:
    """What all parts will be charged. Says, or refuses, what the theorem does not promise for so few records.

    Raises:
        ValueError: Likewise.
    """
    events: list[PrivacyEvent] = []
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        for part in parts:
            events += plan_events(task.algorithm, part, kind)
    for message in dict.fromkeys(
        str(entry.message) for entry in caught_warnings if issubclass(entry.category, NoisyVotesWarning)
    ):
        stages.print_message(message)
    shortfalls = list(
        dict.fromkeys(
            str(entry.message) for entry in caught_warnings if issubclass(entry.category, BelowGuaranteeWarning)
        )
    )
    if shortfalls and not task.below_guarantee:
        fix = "Bring more records, ask for less (--alpha, --beta), or go on without that promise (--below-guarantee)."
        raise ValueError(f"{' '.join(shortfalls)} {fix}")
    for entry in shortfalls:
        stages.print_message(entry)
    return tuple(events)


def _check_price(config: RunConfig, task: LearningTask, planned_events: tuple[PrivacyEvent, ...]) -> None:
    """Raise ValueError for what no account of this delta can hold, in words that name its own choices."""
    delta = config.privacy.delta
    if (delta_sum := sum_deltas(planned_events)) >= delta:
        fix = "Take --delta below the account's, or fewer --points."
        if task.name in ("stable", "averaging"):
            fix = (
                "It is stability without an epsilon: take private-prediction, or fewer --points and a smaller --gamma."
            )
        problem = f"of this release alone is {delta_sum:.3g}, and the account's is {format_delta(delta)}"
        raise checks.error("delta", delta_sum, problem, fix)
    if config.privacy.budget_epsilon is not None and not PrivacyFilter.can_admit(
        planned_events, epsilon=config.privacy.budget_epsilon, delta=delta
    ):
        guarantee = accounting.compute_guarantee(planned_events, delta)
        cost = f"epsilon {guarantee.epsilon:.6g} at delta {delta:g} ({guarantee.route})"
        raise checks.error(
            "privacy.budget_epsilon",
            config.privacy.budget_epsilon,
            f"this release alone may cost {cost}",
            "Take a smaller --epsilon.",
        )


def _make_report(
    config: RunConfig,
    task: LearningTask,
    data: Dataset,
    student: Student,
    ledger: Ledger,
    release_id: str,
    clock: StageTimer,
) -> ReleaseReport:
    """The report of a release without teachers and questions."""
    kind = "linear" if task.algorithm.is_linear else task.options.hypotheses
    record = {
        "mechanism": task.name,
        "parameters": {"hypotheses": kind, "classes": data.spec.num_classes, "alpha": task.options.alpha},
        "noise": "torch",
        "delta": config.privacy.delta,
        "adjacency": config.partition.adjacency,
        "unit": data.private.unit,
        "pool_sha256": compute_tensor_digest(data.pool.x),
    }
    return build_report(
        data=data,
        release=None,
        record=record,
        reservation_ids=[release_id],
        ledger=ledger,
        student=student,
        student_name=kind,
        seconds=clock.seconds,
        owner=owner_file.read(config.root, data.spec.name),
        chosen_by=config.privacy.chosen_by,
    )
