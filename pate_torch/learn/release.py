"""From private records to a released hypothesis: quoted, charged, learnt, written and reported as every release is."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pate_torch import release_store
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.accounting.formatting import format_delta
from pate_torch.budget import Budget, Spending
from pate_torch.config import RunConfig, check_adjacency
from pate_torch.context import open_budget, run_folder_lock
from pate_torch.core import checks
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.data.units import drop_unusable
from pate_torch.learn import student as students
from pate_torch.learn.algorithms import ALGORITHMS, Algorithm, quote, total_delta
from pate_torch.learn.problem import Choices, Problem, problems
from pate_torch.ledger import Ledger
from pate_torch.ledger.accounts import PURPOSE_HYPOTHESIS
from pate_torch.pac.sample import BelowGuarantee, MostlyNoise
from pate_torch.protocols import Progress, Student
from pate_torch.reporting import owner_file
from pate_torch.reporting.builder import compute_claims, compute_student_metrics, make_encoder_asset, make_pool_asset
from pate_torch.reporting.console import print_summary
from pate_torch.reporting.private_metrics import OwnerSummary, count_records, private_test_metrics, write_owner_summary
from pate_torch.reporting.private_writer import make_private_folder
from pate_torch.reporting.renderer import write_release
from pate_torch.reporting.report import ReleaseReport
from pate_torch.sensitive import Sensitivity
from pate_torch.students.store import load
from pate_torch.teachers.store import TeacherStore
from pate_torch.types import Dataset
from pate_torch.unfinished_calls import UnfinishedCall, save_model


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What is to be learnt.

    Attributes:
        name: Of the algorithm.
        choices: What it is told.
        below_guarantee: Whether to go on where the theorem promises no accuracy for so few records.
    """

    name: str
    choices: Choices
    below_guarantee: bool = False

    @property
    def algorithm(self) -> Algorithm:
        """By its name."""
        return ALGORITHMS[self.name]


def learn(config: RunConfig, learning: Learning) -> ReleaseReport:
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
        choices, terms = learning.choices, config.privacy
        delta = terms.delta / 2 if choices.delta is None else choices.delta
        parts = problems(data, choices, delta, config.seed)
        planned = _planned(learning, parts, terms.noise, stages)
        _refuse_dear(config, learning, planned)
        store = TeacherStore(config.root)
        said = {
            "learning": repr(learning),
            "seed": config.seed,
            "pool": compute_tensor_digest(data.pool.x),
            "delta": terms.delta,
        }
        call = UnfinishedCall(store, data.spec.name, said, lambda: store.compute_fingerprint(data.private))
        bought = call.find_model(config.ledger_path)
        config = config if bought is None else replace(config, folder=bought[0])
        release = config.folder / "release"
        with run_folder_lock(config), Ledger(config.ledger_path) as ledger:
            budget = open_budget(config, ledger, data, planned, store.compute_content_fingerprint(data.private))
            if bought is not None:
                release_id = bought[1]
                student = load(release / "student.safetensors")
            else:
                release_store.check_unused_folder(config.folder)
                call.begin(config.folder)
                with budget.spend(planned, mechanism=learning.name, purpose=PURPOSE_HYPOTHESIS) as spending:
                    with clock("learning"), warnings.catch_warnings():
                        for told in (BelowGuarantee, MostlyNoise):
                            warnings.simplefilter("ignore", told)
                        progress = stages(f"Learning by {learning.name}")
                        student = _learn(learning, data, parts, _OneReservation(budget, spending), progress)
                    spending.record_files(save_model(student, release))
                release_id = spending.id
            report = _make_report(config, learning, data, student, ledger, [release_id])
            make_private_folder(config.folder / "private")
            owner = OwnerSummary(
                **private_test_metrics(data, student), records=count_records(data), seconds=clock.seconds
            )
            write_owner_summary(owner, config.folder / "private" / "summary.json")
            write_release(release, report)
            call.end()
    if not config.quiet:
        print_summary(report, owner=owner.format_rows(), paths={"Released": release, "Ledger": ledger.path})
    return report


class _OneReservation:
    """The door to noise for all parts of what is learnt, paid for by one reservation."""

    def __init__(self, budget: Budget, spending: Spending) -> None:
        self.budget, self.spending = budget, spending
        self._left = list(spending.reserved_events)

    @property
    def kind(self) -> str:
        """Kind of the noise."""
        return self.budget.kind

    def covers(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's."""
        self.budget.check_adjacency(sensitivity)

    @contextmanager
    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, what: str = PURPOSE_HYPOTHESIS
    ) -> Iterator[Spending]:
        """The reservation's spending; a part that does not say what it incurred has incurred these events."""
        for event in events:
            self._left.remove(event)  # ValueError, before anything is drawn, for what was not reserved
        before = self.spending.incurred_events
        yield self.spending
        if self.spending.incurred_events is before:
            self.spending.record_cost(events)


def _learn(
    learning: Learning, data: Dataset, parts: Sequence[Problem], door: _OneReservation, progress: Progress
) -> Student:
    """Learn every part, and make one student of what was found."""
    found = []
    for done, part in enumerate(parts, start=1):
        found.append(learning.algorithm.learn(part, door))
        progress(done, len(parts))
    make = students.of_parameters if learning.algorithm.linear else students.of_hypotheses
    return make(data, found)


def _planned(learning: Learning, parts: list[Problem], kind: str, stages: Stages) -> tuple[PrivacyEvent, ...]:
    """What all parts will be charged. Says, or refuses, what the theorem does not promise for so few records.

    Raises:
        ValueError: Likewise.
    """
    events: list[PrivacyEvent] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for part in parts:
            events += quote(learning.algorithm, part, kind)
    for noisy in dict.fromkeys(str(one.message) for one in said if issubclass(one.category, MostlyNoise)):
        stages.print_message(noisy)
    told = list(dict.fromkeys(str(one.message) for one in said if issubclass(one.category, BelowGuarantee)))
    if told and not learning.below_guarantee:
        fix = "Bring more records, ask for less (--alpha, --beta), or go on without that promise (--below-guarantee)."
        raise ValueError(f"{' '.join(told)} {fix}")
    for one in told:
        stages.print_message(one)
    return tuple(events)


def _refuse_dear(config: RunConfig, learning: Learning, planned: tuple[PrivacyEvent, ...]) -> None:
    """Raise ValueError for what no account of this delta can hold, in words that name its own choices."""
    delta = config.privacy.delta
    if (told := total_delta(planned)) >= delta:
        fix = "Take --delta below the account's, or fewer --points."
        if learning.name in ("stable", "averaging"):
            fix = (
                "It is stability without an epsilon: take private-prediction, or fewer --points and a smaller --gamma."
            )
        what = f"of this release alone is {told:.3g}, and the account's is {format_delta(delta)}"
        raise checks.error("delta", told, what, fix)
    if config.privacy.budget_epsilon is not None and not PrivacyFilter.can_admit(
        planned, epsilon=config.privacy.budget_epsilon, delta=delta
    ):
        alone = accounting.compute_guarantee(planned, delta)
        what = f"this release alone may cost epsilon {alone.epsilon:.6g} at delta {delta:g} ({alone.route})"
        raise checks.error("privacy.budget_epsilon", config.privacy.budget_epsilon, what, "Take a smaller --epsilon.")


def _make_report(
    config: RunConfig, learning: Learning, data: Dataset, student: Student, ledger: Ledger, paid: list[str]
) -> ReleaseReport:
    """The report of a release without teachers and questions."""
    spec, choices, owner = data.spec, learning.choices, owner_file.read(config.root, data.spec.name)
    measured = compute_student_metrics(data, student) if data.evaluation.public else {}
    kind = "linear" if learning.algorithm.linear else choices.hypotheses
    return ReleaseReport(
        dataset=spec.name,
        mechanism=learning.name,
        student=kind,
        num_teachers=0,
        queries_asked=0,
        queries_answered=0,
        delta=config.privacy.delta,
        adjacency=config.partition.adjacency,
        unit=data.private.unit,
        **compute_claims(ledger, spec.name, paid, current_ids=paid),
        parameters={"hypotheses": kind, "classes": spec.num_classes, "alpha": choices.alpha},
        noise="torch",
        public_share=data.pool.split,
        reuses_labels=False,
        seconds={},  # the work grows with the records and with what they are
        **measured,
        ledger_head=ledger.get_head(),
        class_names=spec.class_names,
        input_kind=spec.kind,
        creation_date=datetime.date.today().isoformat(),
        encoder=None if spec.encoder is None else spec.encoder.card_without_points,
        includes_encoder=False,
        assets=(make_pool_asset(spec.name, compute_tensor_digest(data.pool.x), owner), *make_encoder_asset(spec)),
        owner=owner,
        provenance=data.provenance,
        chosen_by=config.privacy.chosen_by,
    )
