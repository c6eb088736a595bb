"""Answer classification queries privately, one or many at a time, for as long as the budget lasts.

    reserve a block of questions -> for each call: resume it, draw noise, write the answers down, suspend it -> commit

Questions may depend on earlier answers. A block is priced and reserved as one release, because some mechanisms pay for
a whole sequence (the sparse vector) and a reservation per question would pay for each anew. What a block reserved and
did not use returns to the account when it is settled: when it is used up, by ``close``, or at the next start, where its
questions are not asked in the same way any more; else it goes on. A block with a call that was interrupted is never
settled, and none from a journal that is not as the ledger knows it (an older copy, an edited one): it stays charged at
its worst.

Source: NB20 Algorithm 1 (the interface); BTT18 Algorithms 3 and 4 (online release) and 5 (publishing a classifier);
NB20 Algorithm 4 (universal answers).
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from pate_torch.accounting.events import PrivacyEvent, from_json, to_json
from pate_torch.api import journal
from pate_torch.api.journal import Journal
from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.hypotheses.classes import HypothesisClass
from pate_torch.hypotheses.exponential import run_sspp
from pate_torch.hypotheses.sample import Sample
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.methods import feasibility
from pate_torch.methods.labeling import check_values
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.records import NO_ANSWER, DataSpec, MechanismContext
from pate_torch.privacy.sensitive import Votes
from pate_torch.students import store as student_store
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask
from pate_torch.teachers.ensemble import TeacherEnsemble

VoteFunction = Callable[[Tensor], Votes]
"""PRIVATE. Public points [Q, ...] -> the teachers' votes on them."""

Classifier = Callable[[Tensor], Tensor]
"""Public points [Q, ...] -> labels, int64 [Q]; made from released values alone."""


@dataclass(frozen=True, eq=False)
class History:
    """Releasable. The questions answered so far.

    Attributes:
        x: Points, [H, ...].
        label: What was answered, int64 [H]; -1: no answer.
    """

    x: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)


@dataclass(eq=False)
class _Block:
    """A reserved sequence of questions and how much of it is used. ``calls``: at most so many turns."""

    reservation: str
    num_queries: int
    calls: int
    num_turns: int = 0
    num_asked: int = 0
    num_answered: int = 0
    num_failures: int = 0
    events: tuple[PrivacyEvent, ...] = ()
    is_stopped: bool = False

    def has_room(self, count: int) -> bool:
        return not self.is_stopped and self.num_turns < self.calls and self.num_asked + count <= self.num_queries

    def record_turn(self, label_Q: Tensor, events: tuple[PrivacyEvent, ...], num_asked: int) -> None:
        """Count one turn in which ``num_asked`` questions were put. A mechanism that stops answers a prefix of them."""
        self.num_turns += 1
        self.num_asked += num_asked
        self.num_answered += int((label_Q != NO_ANSWER).sum())
        self.num_failures += int((label_Q == NO_ANSWER).sum())
        self.events += events
        self.is_stopped |= len(label_Q) < num_asked


class PrivateLabeler:
    """Private answers to any questions, behind one mechanism.

    Mechanisms that stop end the block, and the next question opens another. Any thread of the process may ask, one
    after another.

    Args:
        teachers: A ``TeacherEnsemble``, or a function from points to ``Votes``.
        mechanism: Answers a block.
        budget: An account that is open, on its terms (``Budget.from_account``).
        journal: The file of released answers: a question asked before is answered from it, free of charge and after a
            restart too.
        num_queries: Questions in a block.
        calls: Most turns in which a block may be asked; None: one question a turn.
        allow_uninformative_labels: Whether to answer where answers would be no better than chance even if all teachers
            agreed.
        spec: What points are, where ``teachers`` is a function.
        owns_ledger: Whether ``close`` closes the ledger too.

    Raises:
        ValueError: A plan that cannot work.
        BudgetExceeded: The account does not admit another block.

    Guarantee: that of ``mechanism`` for every block, composed in the account, whose cap holds for adaptively chosen
        questions (``accounting.filters``), under the account's adjacency.
    """

    def __init__(
        self,
        teachers: TeacherEnsemble | VoteFunction,
        *,
        mechanism: VoteMechanism,
        budget: Budget,
        journal: Path | str,
        num_queries: int = 100,
        calls: int | None = None,
        allow_uninformative_labels: bool = False,
        spec: DataSpec | None = None,
        owns_ledger: bool = False,
    ) -> None:
        self._vote_function: VoteFunction = teachers.count_votes if isinstance(teachers, TeacherEnsemble) else teachers
        if spec is None and not isinstance(teachers, TeacherEnsemble):
            raise checks.error(
                "spec", None, "must say what the points are", "A TeacherEnsemble knows; a function does not."
            )
        self.spec: DataSpec = spec or teachers.spec  # type: ignore[union-attr]
        self.mechanism, self.budget = mechanism, budget
        self.ledger, self.account = budget.ledger, budget.account
        self.num_queries = checks.integer("num_queries", num_queries, low=1)
        self.calls = checks.integer("calls", self.num_queries if calls is None else calls, low=1)
        self.allow_uninformative_labels = checks.boolean("allow_uninformative_labels", allow_uninformative_labels)
        self._owns_ledger = owns_ledger
        budget.check_events(())  # raises where there is no such account, or it is on other terms
        self._journal = Journal(journal, account=self.account, spec=self.spec)
        self._block: _Block | None = None
        self._answers: dict[str, int] = {}
        self._query_points: list[Tensor] = []
        self._classifier: Classifier | None = None
        try:
            self._replay()
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> PrivateLabeler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- answers ------------------------------------------------------------------------------------------------

    def answer(self, x: Tensor) -> Tensor:
        """Labels of one point or of a batch, int64; -1 where there is no answer.

        Free: what was asked before, and everything once a classifier is published. The rest is one turn of a block.

        Args:
            x: A point (of the data's shape: the label is a scalar) or a batch.
        """
        points, is_single = self._parse_points(x)
        keys = [journal.compute_key(point) for point in points]
        with self.ledger.exclusive_access():
            if self._classifier is None:
                row_by_key = {key: row for row, key in reversed(list(enumerate(keys))) if key not in self._answers}
                if row_by_key:
                    self._ask(points[sorted(row_by_key.values())])
            label_Q = torch.tensor([self._answers.get(key, NO_ANSWER) for key in keys], dtype=torch.int64)
            if self._classifier is not None and bool((unanswered_Q := label_Q == NO_ANSWER).any()):
                label_Q[unanswered_Q] = self._classifier(points[unanswered_Q])
        return label_Q[0] if is_single else label_Q

    @property
    def history(self) -> History:
        """Everything answered by the mechanism so far, in order. Releasable (unless ``private`` is False)."""
        with self.ledger.exclusive_access():
            x = (
                torch.stack(self._query_points)
                if self._query_points
                else self._parse_points(self._make_empty_points())[0]
            )
            return History(
                x, torch.tensor([self._answers[journal.compute_key(point)] for point in x], dtype=torch.int64)
            )

    @property
    def epsilon(self) -> float:
        """The guarantee of all of the account's releases, at its delta: what blocks reserved, composed, or the cap.

        The smaller of the two; infinite once noise was seeded. What was used of it:
        ``ledger.get_account(...).ex_post_guarantee``.
        """
        guarantee = self.ledger.get_guarantee(self.account)
        return math.inf if guarantee is None else guarantee.epsilon

    @property
    def private(self) -> bool:
        """False once a block was answered with seeded noise: its answers protect nobody."""
        return all(line.facts["private"] for line in self._journal.lines if line.kind == "block")

    @property
    def published(self) -> bool:
        """Whether answers come from a published classifier, and are free."""
        return self._classifier is not None

    def close(self, *, settle: bool = True) -> None:
        """Settle the open block, so that what it did not use returns to the account, and let go of the journal.

        Args:
            settle: False leaves the block open, to go on with at the next start.
        """
        with self.ledger.exclusive_access():
            if settle:
                self._settle()
            self._journal.close()
            if self._owns_ledger:
                self.ledger.close()

    # ---- publishing ---------------------------------------------------------------------------------------------

    def publish(
        self,
        algorithm: StudentAlgorithm,
        *,
        pool_x: Tensor | None = None,
        min_answers: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        progress: Progress = do_nothing,
    ) -> Student:
        """Train a student on the answers so far, save it beside the journal, and answer by it from now on, for free.

        It sees released values only, so it costs nothing (BTT18 Algorithm 5).

        Args:
            algorithm: How the student is trained.
            pool_x: More public points without labels, for algorithms that use them.
            min_answers: m0, fewer answers than which are refused.
            seed: Seed of the training.
            device: Device of the training.
            progress: Told of each step.
        """
        history = self.history
        answered_H = history.label != NO_ANSWER
        if int(answered_H.sum()) < checks.integer("min_answers", min_answers, low=1):
            raise checks.error(
                "min_answers", min_answers, f"only {int(answered_H.sum())} questions have been answered so far"
            )
        pool = history.x if pool_x is None else torch.cat([history.x, self._parse_points(pool_x)[0]])
        task = StudentTask(self.spec, pool, answered_H.nonzero().squeeze(1), history.label[answered_H])
        student = algorithm.fit(task, seed=seed, device=torch.device(device), progress=progress)
        with self.ledger.exclusive_access():
            student_store.save(student, self.student_path)
            self._settle()
            self._journal.append("student", file=self.student_path.name, answers=len(history))
            self._use_student(student)
        return student

    @property
    def student_path(self) -> Path:
        """Where a published student lies."""
        return self._journal.path.with_name(f"{self._journal.path.stem}.student.safetensors")

    def publish_hypothesis(self, hypotheses: HypothesisClass, sample: Sample, *, epsilon: float) -> Any:
        """Choose one hypothesis, by its errors on the private sample, among the dichotomies of the questions so far.

        From then on it answers, for free. After a restart the same call finds the choice in the journal.

        Args:
            hypotheses: The class.
            sample: PRIVATE.
            epsilon: Bounded range of the choice, charged to the account once.

        Returns:
            The hypothesis.

        Guarantee: BoundedRange(epsilon), on top of the answers'. Replace-one (``hypotheses.exponential.run_sspp``).
        Source: NB20 Algorithm 4: the questions of its first phase are the public points of its second.
        """
        if self.ledger.get_account(self.account).adjacency != "replace_one":
            raise checks.error("account", self.account, "must be of adjacency replace_one for a hypothesis class")
        with self.ledger.exclusive_access():
            line = next((line for line in self._journal.lines if line.kind == "hypothesis"), None)
            if line is None:
                points = self._to_rows(self.history.x)
                choice = run_sspp(hypotheses, sample, points, epsilon=epsilon, budget=self.budget)
                self._settle()
                self._journal.append("hypothesis", name=hypotheses.name, index=choice.index, answers=len(points))
                line = self._journal.lines[-1]
        if line.facts["name"] != hypotheses.name:
            raise checks.error("hypotheses", hypotheses.name, f"{line.facts['name']!r} was published")
        points = self._to_rows(self.history.x[: line.facts["answers"]])
        hypothesis = hypotheses.enumerate_representatives(points)[line.facts["index"]]
        self._classifier = lambda x: torch.as_tensor(hypotheses.predict(hypothesis, self._to_rows(x)).astype("int64"))
        return hypothesis

    # ---- one turn -----------------------------------------------------------------------------------------------

    def _ask(self, points: Tensor) -> None:
        votes = self._vote_function(points)
        if len(votes) != len(points) or votes.num_classes != self.spec.num_classes:
            raise ValueError(
                f"teachers: {len(votes)} votes over {votes.num_classes} classes for {len(points)} points of "
                f"{self.spec.num_classes} classes"
            )
        check_values(votes.sensitivity, self.mechanism, self.budget)
        if self._block is not None and not self._block.has_room(len(votes)):
            self._settle()
        try:
            with self._open_turn(votes) as spending:
                if self._block is None:
                    size, teachers = max(self.num_queries, len(votes)), votes.num_teachers
                    self._journal.append(
                        "block",
                        reservation=spending.id,
                        num_queries=size,
                        num_teachers=teachers,
                        **self._describe_plan(),
                    )
                    self._block = _Block(spending.id, size, self.calls)
                block = self._block
                context = MechanismContext(
                    num_queries=block.num_queries,
                    rounds=block.calls,
                    round_index=block.num_turns,
                    num_failures=block.num_failures,
                    num_answered=block.num_answered,
                )
                answers = spending.accept(self.mechanism.release(votes, spending.noise, context))
                label_Q = answers.label_Q.cpu()
                released_points = points[: len(label_Q)]
                self._journal.append(
                    "answers",
                    reservation=block.reservation,
                    points=journal.encode(released_points),
                    labels=label_Q.tolist(),
                    asked=len(points),
                    events=json.loads(to_json(answers.events)),
                )
                spending.record_cost(answers.events)
                block.record_turn(label_Q, answers.events, len(points))
                if block.has_room(1):
                    spending.suspend(self._journal.compute_digest)
        except BaseException:
            self._block = None  # never settled: noise may have been drawn, so it stays charged at its worst
            raise
        self._store_answers(released_points, label_Q)
        if not block.has_room(1):
            self._block = None
            self._journal.append("close", reservation=block.reservation)

    def _open_turn(self, votes: Votes) -> AbstractContextManager[Spending]:
        """The next turn of the present block, or the first of a new one, reserved whole."""
        if self._block is not None:
            return self.budget.resume(self._block.reservation, self._journal.compute_digest)
        size = max(self.num_queries, len(votes))
        self.mechanism.check(
            num_queries=size, num_teachers=votes.num_teachers, num_classes=votes.num_classes, rounds=self.calls
        )
        feasibility.check_informative(
            self.mechanism,
            num_teachers=votes.num_teachers,
            num_classes=votes.num_classes,
            allow_uninformative=self.allow_uninformative_labels,
            override_hint="allow_uninformative_labels=True",
        )
        warning = feasibility.format_low_signal_warning(self.mechanism, votes.num_teachers, votes.num_classes, size)
        if warning is not None:
            warnings.warn(f"{warning} {feasibility.NOISE_ADVICE}", feasibility.LowSignalWarning, stacklevel=4)
        return self.budget.spend(self.mechanism.privacy_events(size, self.calls), mechanism=self.mechanism.name)

    def _describe_plan(self) -> dict[str, Any]:
        """How a block is asked, as its line in the journal says."""
        parameters = {k: v for k, v in dataclasses.asdict(self.mechanism).items() if k != "name"}
        return {
            "calls": self.calls,
            "mechanism": self.mechanism.name,
            "parameters": parameters,
            "private": self.budget.secret,
        }

    def _settle(self) -> None:
        """Commit what the open block incurred."""
        block, self._block = self._block, None
        if block is not None:
            with self.budget.resume(block.reservation, self._journal.compute_digest):
                pass  # nothing more is drawn: what it did not use returns to the account
            self._journal.append("close", reservation=block.reservation)

    # ---- restart ------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """Read the answers, and go on with the block that an earlier process left open, or settle it."""
        blocks: dict[str, _Block] = {}
        reusable_ids: set[str] = set()
        closed_ids: set[str] = set()
        try:
            for line in self._journal.lines:
                facts = line.facts
                match line.kind:
                    case "block":
                        block = _Block(facts["reservation"], facts["num_queries"], facts["calls"])
                        blocks[block.reservation] = block
                        if self._describe_plan() == {key: facts.get(key) for key in self._describe_plan()}:
                            reusable_ids.add(block.reservation)
                    case "answers":
                        label_Q = torch.tensor(facts["labels"], dtype=torch.int64)
                        events = from_json(json.dumps(facts["events"]))
                        blocks[facts["reservation"]].record_turn(label_Q, events, facts["asked"])
                        self._store_answers(journal.decode(facts["points"]), label_Q)
                    case "close":
                        closed_ids.add(facts["reservation"])
                    case "student":
                        self._use_student(student_store.load(self.student_path))
        except (KeyError, TypeError) as error:
            raise self._journal_error(
                f"is damaged ({error!r})", "Restore a backup, or begin another journal."
            ) from error
        charges = self.ledger.get_charges(self.account) if blocks else {}
        for reservation, block in blocks.items():
            if reservation not in charges:
                raise self._journal_error(
                    "holds answers that were charged to another ledger", f"{self.ledger.path} does not know them."
                )
            charge = charges[reservation]
            if charge.is_committed and reservation not in closed_ids:
                self._journal.append("close", reservation=reservation)
            elif self.budget.can_resume(reservation, self._journal.compute_digest):
                self._block = block
                if reservation not in reusable_ids:
                    self._settle()
            # Else a call drew noise and its answers are unknown here: the block stays charged at its worst.

    def _journal_error(self, problem: str, fix: str) -> ValueError:
        return checks.error("journal", str(self._journal.path), problem, fix)

    def _store_answers(self, points: Tensor, label_Q: Tensor) -> None:
        for point, label in zip(points, label_Q.tolist(), strict=True):
            self._answers[journal.compute_key(point)] = label
            self._query_points.append(point)

    def _use_student(self, student: Student) -> None:
        self._classifier = lambda x: student.compute_probabilities(x).argmax(1)

    # ---- points -------------------------------------------------------------------------------------------------

    def _make_empty_points(self) -> Tensor:
        return torch.zeros(0, *self.spec.input_shape, dtype=torch.uint8 if self.spec.is_image else torch.float32)

    def _parse_points(self, x: Tensor) -> tuple[Tensor, bool]:
        """(a batch in the data's own type, whether it was one point). Raises ValueError for another shape."""
        x = torch.as_tensor(x).detach().cpu()
        shape = tuple(self.spec.input_shape)
        if x.shape not in (shape, (*x.shape[:1], *shape)) or (self.spec.is_image and x.dtype != torch.uint8):
            kind = "uint8 images" if self.spec.is_image else "rows"
            raise checks.error("x", f"{tuple(x.shape)} {x.dtype}", f"must be one or many {kind} of shape {shape}")
        is_single = tuple(x.shape) == shape
        points = (x[None] if is_single else x).to(self._make_empty_points().dtype)
        if points.is_floating_point() and not bool(points.isfinite().all()):
            raise checks.error("x", tuple(x.shape), "must be finite", "Remove NaN and infinity.")
        return points.contiguous(), is_single

    def _to_rows(self, x: Tensor) -> Any:
        return x.flatten(1).double().numpy()
