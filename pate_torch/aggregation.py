"""The one place where votes meet noise.

    1  price the whole release at its worst
    2  reserve that through the budget, which refuses what would pass the cap and hands out noise
    3  for each round: choose questions (public), answer them through the mechanism, show the answers to the next round
    4  write the answers down, then commit what was really incurred

A release that is interrupted after step 2 stays charged at its worst case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pate_torch.budget import Budget
from pate_torch.core import checks
from pate_torch.protocols import Electorate, Mechanism, Progress, QueryState, QueryStrategy, silent
from pate_torch.types import NO_ANSWER, Ballots, Context, DataSpec, NoisyCounts, PublicPool, Release, Sensitivity, Votes


@dataclass(frozen=True, eq=False, repr=False)
class Guide:
    """What the next round goes by. student_PC: the student's class probabilities on the whole pool; None: no opinion.

    votes: PRIVATE. Of who answers from now on; None: the same as before. feature_PD: of the public points, for the next
    questions; None: the same as before.
    """

    student_PC: Tensor | None
    votes: Electorate | None = None
    feature_PD: Tensor | None = None


Refit = Callable[[Release], Guide]
"""Called between rounds with the answers so far."""

Seal = Callable[[Release], Mapping[str, str]]
"""Writes a release to disk, and returns the SHA-256 of its files, by name; called before the ledger commits them."""


def label(
    *,
    votes: Electorate,
    pool: PublicPool,
    spec: DataSpec,
    mechanism: Mechanism,
    strategy: QueryStrategy,
    budget: Budget,
    num_queries: int,
    seed: int,
    refit: Refit | None = None,
    feature_PD: Tensor | None = None,
    seal: Seal | None = None,
    witness: Callable[[Votes | Ballots], None] = silent,
    progress: Progress = silent,
) -> Release:
    """Ask at most ``num_queries`` public points and release the answers. ``votes``: of whoever answers, on the pool.

    ``refit`` gives the student's opinion between rounds; it sees public points and released labels only, unless it
    brings the records again, in features of that student: a function of each record and of what was released.
    ``witness``: PRIVATE. Told the votes behind the answers, at the end, where there were any.
    Raises ValueError when the plan cannot work or is not on the account's terms, and the ledger's BudgetExceeded when
    the cap would be passed; in all cases nothing has been drawn or charged.
    """
    rounds = _rounds(votes, pool, mechanism, strategy, num_queries)
    planned = mechanism.worst_case(num_queries, rounds)
    refuse_unpriced(votes.sensitivity, mechanism, budget)
    with budget.spend(planned, mechanism=mechanism.name) as spending:
        spending.incur(())  # a strategy may ask nothing
        query_Q = torch.zeros(0, dtype=torch.int64)
        label_Q = torch.zeros(0, dtype=torch.int64)
        noisy: list[NoisyCounts | None] = []
        asked: list[int] = []
        seen: list[Votes | Ballots] = []
        cells: list[Tensor] = []
        scores: list[Tensor] = []
        student_PC: Tensor | None = None

        def so_far() -> Release:
            # The reservation's id: whoever finds the release again can look up in the ledger what it was charged.
            return Release(
                spending.id,
                query_Q,
                label_Q,
                spending.incurred or (),
                spending.reserved,
                NoisyCounts.joined(noisy),
                rounds=tuple(asked),
                cell_RP=torch.stack(cells) if cells else None,
                score_RPC=torch.stack(scores) if scores else None,
            )

        for turn in range(rounds):
            remaining = num_queries - len(query_Q)
            if remaining == 0:
                break
            if turn and refit is not None:
                guide = refit(so_far())
                student_PC = guide.student_PC
                if guide.votes is not None:
                    if guide.votes.num_teachers != votes.num_teachers or len(guide.votes) != len(pool):
                        raise ValueError("votes: others must answer for as many teachers, on the same points")
                    refuse_unpriced(guide.votes.sensitivity, mechanism, budget)
                    votes = guide.votes
                feature_PD = feature_PD if guide.feature_PD is None else guide.feature_PD
            state = QueryState(
                spec=spec,
                pool_x=pool.x,
                asked_Q=query_Q,
                label_Q=label_Q,
                remaining=remaining,
                rounds_left=rounds - turn,
                seed=seed,
                student_PC=student_PC,
                feature_PD=feature_PD,
            )
            ask = _checked(strategy.select(state), query_Q, remaining, len(pool))
            if len(ask) == 0:
                break
            context = Context(
                num_queries=num_queries,
                rounds=rounds,
                turn=turn,
                failures=int((label_Q == NO_ANSWER).sum()),
                answered=int((label_Q != NO_ANSWER).sum()),
                student_QC=None if student_PC is None else student_PC[ask],
            )
            said = votes.take(ask)
            answers = spending.admit(mechanism.release(said, spending.noise, context))
            spending.incur(answers.events)
            if isinstance(said, Ballots):
                cells.append(len(query_Q) + said.cell_P)
            if answers.score_PC is not None:
                scores.append(answers.score_PC.cpu())
            # A mechanism that stops early (the sparse vector after T failures) answers a prefix of what it was asked.
            shown = len(answers.label_Q)
            query_Q = torch.cat([query_Q, ask[:shown]])
            label_Q = torch.cat([label_Q, answers.label_Q.cpu()])
            noisy.append(answers.noisy)
            asked.append(shown)
            if isinstance(said, Votes | Ballots):
                seen.append(said if shown == len(said) else said.take(torch.arange(shown)))
            progress(len(query_Q), num_queries)

        release = so_far()
        if seen:
            witness(_together(seen))
        if seal is not None:
            spending.wrote(seal(release))
        return release


def refuse_unpriced(said: Sensitivity, mechanism: Mechanism, budget: Budget) -> None:
    """Raise ValueError, before anything is charged, for what the mechanism would refuse to open."""
    budget.covers(said)
    kind = getattr(mechanism, "noise", budget.kind)
    if kind != budget.kind:
        raise checks.fail("noise", budget.kind, f"must be {kind!r}, the kind {mechanism.name} was priced for")
    if not said.within(mechanism.priced_for):
        what = f"is more than mechanism={mechanism.name} is priced for ({mechanism.priced_for})"
        raise checks.fail("sensitivity", said, what, "Leave out partition.capacity, or price what it says.")


def _together(parts: list[Votes | Ballots]) -> Votes | Ballots:
    """PRIVATE. The votes of all rounds in one table."""
    counts_QC = torch.cat([part.counts_QC for part in parts])
    last = parts[-1]
    if isinstance(last, Ballots):
        return Ballots(counts_QC, last.sensitivity, last.cell_P)
    return Votes(counts_QC, last.num_teachers, last.sensitivity)


def _rounds(
    votes: Electorate, pool: PublicPool, mechanism: Mechanism, strategy: QueryStrategy, num_queries: int
) -> int:
    """Check the plan before anything is charged; how many rounds it takes."""
    checks.integer(
        "num_queries", num_queries, low=1, high=len(pool), fix=f"There are {len(pool)} public points to ask about."
    )
    assert len(votes) == len(pool), "votes must cover the whole public pool"
    rounds = min(checks.integer("query.rounds", strategy.rounds, low=1), num_queries)
    mechanism.check(
        num_queries=num_queries, num_teachers=votes.num_teachers, num_classes=votes.num_classes, rounds=rounds
    )
    return rounds


def _checked(ask: Tensor, asked_Q: Tensor, remaining: int, pool_size: int) -> Tensor:
    """The questions a strategy chose, held to the protocol: a repeat or an overrun would be answered uncharged."""
    ask = ask.to("cpu", torch.int64)
    if len(ask) > remaining:
        raise ValueError(f"query strategy: asked {len(ask)} questions where {remaining} remain")
    if len(ask) and (int(ask.min()) < 0 or int(ask.max()) >= pool_size):
        raise ValueError("query strategy: asked for a point outside the public pool")
    if len(torch.unique(ask)) < len(ask) or bool(torch.isin(ask, asked_Q).any()):
        raise ValueError("query strategy: asked for the same point twice")
    return ask
