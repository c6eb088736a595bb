"""Private answers to classification queries, one or many at a time, until the budget is spent.

    reserve a block of queries -> for each call: resume it, draw noise, write the answers, suspend it -> commit

Queries may depend on earlier answers. A block of queries is priced and reserved as one release, because some
mechanisms (the sparse vector) pay for a whole sequence. Settling a block returns the unused part of the reservation to
the account. A block is settled when it is used up, by ``close``, and at a restart with another mechanism, other
parameters or another number of calls. Any other restart continues the block. If a call was interrupted, or if the
journal differs from the state that the ledger stores (an older or edited copy), the block stays charged at its worst
case.

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
from typing import Any

import torch
from torch import Tensor

from pate_torch.accounting.events import from_json, to_json
from pate_torch.api import journal as journals
from pate_torch.api.journal import Journal
from pate_torch.core import checks
from pate_torch.data import tensors
from pate_torch.hypotheses.classes import HypothesisClass
from pate_torch.hypotheses.exponential import run_sspp
from pate_torch.hypotheses.sample import Sample
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.methods import feasibility
from pate_torch.methods.labeling import check_values
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.records import NO_ANSWER, DataSpec, MechanismContext
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.statement import NOT_PRIVATE, NOT_PRIVATE_REASON
from pate_torch.students import store as student_store
from pate_torch.students.base import Student, StudentAlgorithm, StudentTask

VoteFunction = Callable[[Tensor], Votes]
"""PRIVATE. Function that maps public points [Q, ...] to the teachers' votes on these points."""


@dataclass(frozen=True, eq=False)
class History:
    """Releasable. All queries so far, and their answers.

    Attributes:
        x: Points [H, ...].
        label: Answers, int64 [H]; -1 where the mechanism gave no answer.
    """

    x: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)


@dataclass(eq=False)
class _Block:
    """A reservation for at most ``num_queries`` queries in at most ``max_calls`` calls, with counts of its use."""

    reservation: str
    num_queries: int
    max_calls: int
    is_reusable: bool = True  # whether the block has the mechanism, the calls and the kind of noise of this labeler
    num_calls: int = 0
    num_asked: int = 0
    num_answered: int = 0
    num_failures: int = 0
    is_stopped: bool = False

    def has_room(self, count: int) -> bool:
        return not self.is_stopped and self.num_calls < self.max_calls and self.num_asked + count <= self.num_queries

    def record_call(self, label_Q: Tensor, num_asked: int) -> None:
        """Count one call with ``num_asked`` queries. A mechanism that stops early returns fewer labels."""
        num_failures = int((label_Q == NO_ANSWER).sum())
        self.num_calls += 1
        self.num_asked += num_asked
        self.num_answered += len(label_Q) - num_failures
        self.num_failures += num_failures
        self.is_stopped |= len(label_Q) < num_asked


class PrivateLabeler:
    """Labeler of any sequence of queries by one mechanism. ``PATE.labeler`` makes one from trained teachers.

    When the mechanism stops, the block ends, and the next query opens another block. Threads may share a labeler;
    their calls are answered one after another.

    Args:
        count_votes: Function from public points to ``Votes``.
        mechanism: Mechanism that answers a block.
        budget: Budget of the open account (``Budget.from_account``).
        journal: Path of the file of released answers. Repeated queries are answered from the file free of charge,
            also after a restart.
        spec: Public facts about the points.
        num_queries: Number of queries in a block.
        calls: Largest number of calls of ``answer`` in a block. None for ``num_queries``.
        allow_uninformative_labels: Whether to answer although labels would be no better than chance even if all
            teachers agreed.
        owns_ledger: Whether ``close`` also closes the ledger.

    Attributes:
        ledger: Ledger that is charged.
        account: Name of the account.

    Raises:
        ValueError: An argument is wrong, the account does not exist or has other terms, or the journal is damaged, in
            use, or belongs to another account or data set.

    Guarantee: That of ``mechanism`` for every block under the account's adjacency. The account composes the blocks, and
        its cap holds for adaptively chosen queries (``accounting.filters``).
    """

    def __init__(
        self,
        count_votes: VoteFunction,
        *,
        mechanism: VoteMechanism,
        budget: Budget,
        journal: Path | str,
        spec: DataSpec,
        num_queries: int = 100,
        calls: int | None = None,
        allow_uninformative_labels: bool = False,
        owns_ledger: bool = False,
    ) -> None:
        self._count_votes, self.spec, self.mechanism, self.budget = count_votes, spec, mechanism, budget
        self.ledger, self.account = budget.ledger, budget.account
        self.num_queries = checks.integer("num_queries", num_queries, low=1)
        self.calls = checks.integer("calls", self.num_queries if calls is None else calls, low=1)
        self.allow_uninformative_labels = checks.boolean("allow_uninformative_labels", allow_uninformative_labels)
        self._owns_ledger = owns_ledger
        budget.check_events(())  # raises an error if the account does not exist or has other terms
        self._journal = Journal(journal, account=self.account, spec=self.spec)
        self._block: _Block | None = None
        self._answers: dict[str, int] = {}
        self._query_points: list[Tensor] = []
        self._classifier: Callable[[Tensor], Tensor] | None = None  # public points [Q, ...] to labels, int64 [Q]
        try:
            for reservation, block in self._replay().items():
                # If not, a call drew noise whose answers are not in the journal, so the whole block stays charged.
                if self.budget.can_resume(reservation, self._journal.digest):
                    self._block = block
                    if not block.is_reusable:
                        self._settle()
            if not (self.private and budget.secret):
                warnings.warn(f"{NOT_PRIVATE}. {NOT_PRIVATE_REASON}", stacklevel=2)
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> PrivateLabeler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- answers ------------------------------------------------------------------------------------------------

    def answer(self, x: Tensor) -> Tensor:
        """Label one point or a batch of points.

        Repeated queries are free, and all queries are free after a classifier has been published.

        Args:
            x: Public point of shape ``spec.input_shape``, or a batch [Q, ...] of points.

        Returns:
            Labels, an int64 scalar or int64 [Q]; -1 where the mechanism gives no answer.

        Raises:
            ValueError: The points have another shape, or the mechanism cannot answer them. Nothing has been charged.
            BudgetExceeded: The account does not admit another block. Nothing has been drawn or charged.
        """
        x = torch.as_tensor(x)
        is_single = x.dim() == len(self.spec.input_shape)
        points = self._parse_points(x[None] if is_single else x)
        keys = [journals.compute_key(point) for point in points]
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
        """All queries to the mechanism in order, with their answers. Releasable if ``private`` is True."""
        with self.ledger.exclusive_access():
            points = self._query_points
            x = torch.stack(points) if points else torch.zeros(0, *self.spec.input_shape)
            labels = [self._answers[journals.compute_key(point)] for point in points]
            return History(x, torch.tensor(labels, dtype=torch.int64))

    @property
    def epsilon(self) -> float:
        """Composed epsilon of all reservations of the account at the account's delta, or the cap if that is smaller.

        The value is infinite if any noise was seeded. ``ledger.get_account(...).ex_post_guarantee`` counts only the
        events that were incurred.
        """
        guarantee = self.ledger.get_account(self.account).guarantee
        return math.inf if guarantee is None else guarantee.epsilon

    @property
    def private(self) -> bool:
        """Whether no answer and no choice of a hypothesis used seeded noise, which is not private."""
        return all(line.facts.get("private", True) for line in self._journal.lines)

    def close(self, *, settle: bool = True) -> None:
        """Close the journal and settle the open block. With ``settle=False``, the next start continues the block."""
        with self.ledger.exclusive_access():
            if settle:
                self._settle()
            self._journal.close()
            if self._owns_ledger:
                self.ledger.close()

    # ---- publishing ---------------------------------------------------------------------------------------------

    def publish(
        self, algorithm: StudentAlgorithm, *, pool_x: Tensor | None = None, min_answers: int = 1, seed: int = 0
    ) -> Student:
        """Train a student on the answers free of charge, and save it beside the journal. It answers all new queries.

        If an answer used seeded noise, the header of the file and the journal say NOT PRIVATE.

        Args:
            algorithm: Algorithm of the student.
            pool_x: Additional unlabeled public points [P, ...]. None if there are none.
            min_answers: Smallest number m0 of answers to train on.
            seed: Seed of the training.

        Raises:
            ValueError: Fewer than ``min_answers`` queries have been answered.

        Source: BTT18 Algorithm 5.
        """
        history = self.history
        answered_H = history.label != NO_ANSWER
        num_answers = int(answered_H.sum())
        if num_answers < checks.integer("min_answers", min_answers, low=1):
            problem = f"is more than the {num_answers} queries that have been answered so far"
            raise checks.error("min_answers", min_answers, problem, "Ask more queries, or lower min_answers.")
        pool = history.x if pool_x is None else torch.cat([history.x, self._parse_points(torch.as_tensor(pool_x))])
        task = StudentTask(self.spec, pool, answered_H.nonzero().squeeze(1), history.label[answered_H])
        student = algorithm.fit(task, seed=seed, device=torch.device("cpu"))
        with self.ledger.exclusive_access():
            note = _make_note(self.private)
            student_store.save(student, self.student_path, **note)
            self._settle()
            self._journal.append("student", file=self.student_path.name, answers=len(history), **note)
            self._use_student(student)
        return student

    @property
    def student_path(self) -> Path:
        return self._journal.path.with_name(f"{self._journal.path.stem}.student.safetensors")

    def publish_hypothesis(self, hypotheses: HypothesisClass, sample: Sample, *, epsilon: float) -> Any:
        """Choose one hypothesis for the dichotomies of the queries so far by its errors on the private sample.

        The hypothesis then answers all new queries free of charge. After a restart, the same call reads the choice
        from the journal.

        Args:
            hypotheses: Hypothesis class.
            sample: PRIVATE. Labeled records.
            epsilon: Bounded range of the choice, which is charged to the account once.

        Returns:
            The hypothesis.

        Raises:
            ValueError: The account's adjacency is not replace_one, or a hypothesis of another class was published.
            BudgetExceeded: The account does not admit the choice. Nothing has been drawn or charged.

        Guarantee: BoundedRange(epsilon) in addition to the cost of the answers, under replace-one
            (``hypotheses.exponential.run_sspp``).
        Source: NB20 Algorithm 4, where the queries of the first phase are the public points of the second phase.
        """
        if (adjacency := self.ledger.get_account(self.account).adjacency) != "replace_one":
            problem = f"has the adjacency {adjacency}, but a hypothesis class needs replace_one"
            raise checks.error("account", self.account, problem, "Open another account with partition=ReplaceOne().")
        with self.ledger.exclusive_access():
            line = next((line for line in self._journal.lines if line.kind == "hypothesis"), None)
            if line is None:
                points = _to_rows(self.history.x)
                choice = run_sspp(hypotheses, sample, points, epsilon=epsilon, budget=self.budget)
                self._settle()
                facts = {"name": hypotheses.name, "index": choice.index, "answers": len(points)}
                facts |= {"private": self.budget.secret, **_make_note(self.budget.secret and self.private)}
                self._journal.append("hypothesis", **facts)
                line = self._journal.lines[-1]
        if line.facts["name"] != hypotheses.name:
            problem = f"must be {line.facts['name']!r}, the class of the hypothesis that was published"
            raise checks.error("hypotheses", hypotheses.name, problem)
        points = _to_rows(self.history.x[: line.facts["answers"]])
        hypothesis = hypotheses.enumerate_representatives(points)[line.facts["index"]]
        self._classifier = lambda x: torch.as_tensor(hypotheses.predict(hypothesis, _to_rows(x)).astype("int64"))
        return hypothesis

    # ---- one call -----------------------------------------------------------------------------------------------

    def _ask(self, points: Tensor) -> None:
        votes = self._count_votes(points)
        if len(votes) != len(points) or votes.num_classes != self.spec.num_classes:
            returned = f"count_votes returned {len(votes)} votes over {votes.num_classes} classes"
            raise ValueError(f"teachers: {returned} for {len(points)} points of {self.spec.num_classes} classes")
        check_values(votes.sensitivity, self.mechanism, self.budget)
        if self._block is not None and not self._block.has_room(len(votes)):
            self._settle()
        try:
            with self._open_spending(votes) as spending:
                if self._block is None:
                    size = max(self.num_queries, len(votes))
                    plan = {"num_queries": size, "num_teachers": votes.num_teachers, **self._describe_plan()}
                    self._journal.append("block", reservation=spending.id, **plan, **_make_note(self.budget.secret))
                    self._block = _Block(spending.id, size, self.calls)
                block = self._block
                label_Q = self._draw_answers(points, votes, spending, block)
                if block.has_room(1):
                    spending.suspend(self._journal.digest)
        except BaseException:
            self._block = None  # not settled: noise may have been drawn, so the whole block stays charged
            raise
        self._store_answers(points[: len(label_Q)], label_Q)
        if not block.has_room(1):
            self._block = None
            self._journal.append("close", reservation=block.reservation)

    def _open_spending(self, votes: Votes) -> AbstractContextManager[Spending]:
        if self._block is not None:
            return self.budget.resume(self._block.reservation, self._journal.digest)
        mechanism, num_teachers, num_classes = self.mechanism, votes.num_teachers, votes.num_classes
        size = max(self.num_queries, len(votes))
        mechanism.check(num_queries=size, num_teachers=num_teachers, num_classes=num_classes, rounds=self.calls)
        allow, hint = self.allow_uninformative_labels, "allow_uninformative_labels=True"
        feasibility.check_informative(
            mechanism, num_teachers, num_classes, allow_uninformative=allow, override_hint=hint
        )
        warning = feasibility.format_low_signal_warning(mechanism, num_teachers, num_classes, size)
        if warning is not None:
            warnings.warn(f"{warning} {feasibility.NOISE_ADVICE}", feasibility.LowSignalWarning, stacklevel=4)
        return self.budget.spend(mechanism.privacy_events(size, self.calls), mechanism=mechanism.name)

    def _draw_answers(self, points: Tensor, votes: Votes, spending: Spending, block: _Block) -> Tensor:
        """Draw labels, int64 [at most Q]. Write the labels to the journal, and record their cost."""
        context = MechanismContext(
            num_queries=block.num_queries,
            rounds=block.max_calls,
            round_index=block.num_calls,
            num_failures=block.num_failures,
            num_answered=block.num_answered,
        )
        answers = spending.accept(self.mechanism.release(votes, spending.noise, context))
        label_Q = answers.label_Q.cpu()
        self._journal.append(
            "answers",
            reservation=block.reservation,
            points=journals.encode(points[: len(label_Q)]),
            labels=label_Q.tolist(),
            asked=len(points),
            events=json.loads(to_json(answers.events)),
        )
        spending.record_cost(answers.events)
        block.record_call(label_Q, len(points))
        return label_Q

    def _describe_plan(self) -> dict[str, Any]:
        parameters = {k: v for k, v in dataclasses.asdict(self.mechanism).items() if k != "name"}
        settings = {"calls": self.calls, "mechanism": self.mechanism.name, "parameters": parameters}
        return settings | {"private": self.budget.secret}

    def _settle(self) -> None:
        """Commit the incurred cost of the open block, and return the unused part to the account."""
        block, self._block = self._block, None
        if block is not None:
            with self.budget.resume(block.reservation, self._journal.digest):
                pass
            self._journal.append("close", reservation=block.reservation)

    # ---- restart ------------------------------------------------------------------------------------------------

    def _replay(self) -> dict[str, _Block]:
        """Restore the answers and the student from the journal. Return the open blocks by reservation."""
        blocks: dict[str, _Block] = {}
        closed_ids: set[str] = set()
        plan = self._describe_plan()
        try:
            for line in self._journal.lines:
                facts = line.facts
                match line.kind:
                    case "block":
                        is_reusable = plan == {key: facts.get(key) for key in plan}
                        block = _Block(facts["reservation"], facts["num_queries"], facts["calls"], is_reusable)
                        blocks[block.reservation] = block
                    case "answers":
                        label_Q = torch.tensor(facts["labels"], dtype=torch.int64)
                        from_json(json.dumps(facts["events"]))  # raises an error if an event is damaged
                        blocks[facts["reservation"]].record_call(label_Q, facts["asked"])
                        self._store_answers(journals.decode(facts["points"]), label_Q)
                    case "close":
                        closed_ids.add(facts["reservation"])
                    case "student":
                        self._use_student(student_store.load(self.student_path))
        except (KeyError, TypeError) as error:
            problem = f"is damaged ({error!r})"
            raise self._journal.make_error(problem, "Restore a backup, or begin another journal.") from error
        charges = self.ledger.get_charges(self.account) if blocks else {}
        if not charges.keys() >= blocks.keys():
            problem = "contains answers that were charged to another ledger"
            raise self._journal.make_error(problem, f"{self.ledger.place} has no charge for these answers.")
        for reservation in blocks:
            if reservation not in closed_ids and charges[reservation].is_committed:  # interrupted before "close"
                self._journal.append("close", reservation=reservation)
                closed_ids.add(reservation)
        return {reservation: block for reservation, block in blocks.items() if reservation not in closed_ids}

    def _store_answers(self, points: Tensor, label_Q: Tensor) -> None:
        for point, label in zip(points, label_Q.tolist(), strict=True):
            self._answers[journals.compute_key(point)] = label
            self._query_points.append(point)

    def _use_student(self, student: Student) -> None:
        self._classifier = lambda x: student.compute_probabilities(x).argmax(1)

    def _parse_points(self, x: Tensor) -> Tensor:
        points, shape = tensors.parse_points("x", x), tuple(self.spec.input_shape)
        if tuple(points.shape[1:]) != shape:
            raise checks.error("x", tuple(x.shape), f"must be one point of shape {shape}, or a batch of points")
        return points


def _make_note(is_private: bool) -> dict[str, str]:
    return {} if is_private else {"note": f"{NOT_PRIVATE}: seeded noise"}


def _to_rows(x: Tensor) -> Any:
    return x.flatten(1).double().numpy()
