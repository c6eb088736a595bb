"""A release of labels: questions, votes, and the mechanism through which they are answered.

    1  price the whole release at its worst
    2  reserve that through the budget, which refuses what would pass the cap and hands out noise
    3  for each round: choose questions (public), answer them through the mechanism, show the answers to the next round
    4  write the answers down, then commit what was really incurred

A release that is interrupted after step 2 stays charged at its worst case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.mechanisms.base import Mechanism
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.records import DataSpec, PublicPool, Release
from pate_torch.privacy.sensitive import CellHistogram, SensitiveValue, Sensitivity, Votes, check_sensitivity
from pate_torch.queries.base import QueryState, QueryStrategy


@dataclass(frozen=True, eq=False, repr=False)
class RoundInputs:
    """PRIVATE, as its values are. What the next round of questions starts from.

    Attributes:
        student_PC: The guide student's class probabilities on the whole pool; None: there is none.
        sensitive: PRIVATE. The sensitive values of the coming rounds; None: the same as before.
        feature_PD: Features of the public points, for the next questions; None: the same as before.
    """

    student_PC: Tensor | None = None
    sensitive: SensitiveValue | None = None
    feature_PD: Tensor | None = None


NextRound = Callable[[Release], RoundInputs]
"""Called between rounds with the answers so far."""

WriteRelease = Callable[[Release], Mapping[str, str]]
"""Writes a release to disk, and returns the SHA-256 of its files, by name; called before the ledger commits them."""


def answer_queries(
    *,
    sensitive: SensitiveValue,
    pool: PublicPool,
    spec: DataSpec,
    mechanism: Mechanism,
    strategy: QueryStrategy,
    budget: Budget,
    num_queries: int,
    seed: int,
    next_round: NextRound | None = None,
    feature_PD: Tensor | None = None,
    write: WriteRelease | None = None,
    on_votes: Callable[[Votes | CellHistogram], None] = do_nothing,
    progress: Progress = do_nothing,
) -> Release:
    """Ask at most ``num_queries`` public points, and release the answers.

    Args:
        sensitive: The values to be opened: votes, cell counts or gradient sums, on the whole pool.
        pool: The public points.
        spec: Public facts of the data.
        mechanism: Answers through noise.
        strategy: Chooses the questions of each round.
        budget: Is charged, and hands out noise.
        num_queries: Largest number of questions.
        seed: Seeds the public choices (the noise has no seed).
        next_round: Makes what a later round starts from, of released labels: a student, and the records in its
            features, each a function of one record and of what was released.
        feature_PD: Features of the public points, for the first questions.
        write: Writes the release, before the ledger commits it.
        on_votes: PRIVATE. Gets the votes behind the answers, at the end, where there were any.
        progress: Called with (done, total) questions.

    Returns:
        The questions asked and their answers.

    Raises:
        ValueError: The plan cannot work, or does not keep the account's terms. Nothing has been drawn or charged.
        BudgetExceeded: The cap would be passed. Nothing has been drawn or charged.
    """
    rounds = _check_plan(sensitive, pool, mechanism, strategy, num_queries)
    check_before_charge(sensitive.sensitivity, mechanism, budget)
    with budget.spend(mechanism.privacy_events(num_queries, rounds), mechanism=mechanism.name) as spending:
        spending.record_cost(())  # a strategy may ask nothing
        # The reservation's id: whoever finds the release again can look up in the ledger what it was charged.
        release, state = (
            Release.from_reservation(spending.id, spending.reserved_events),
            RoundInputs(feature_PD=feature_PD),
        )
        opened_votes: list[Votes | CellHistogram] = []
        for round_index in range(rounds):
            if len(release.query_Q) == num_queries:
                break
            if round_index and next_round is not None:
                state = _check_next_round(next_round(release), state, sensitive, mechanism, budget)
                sensitive = sensitive if state.sensitive is None else state.sensitive
            query_Q = _select_queries(strategy, release, state, pool, spec, num_queries, rounds, seed)
            if len(query_Q) == 0:
                break
            round_values = sensitive.select(query_Q)
            context = release.make_context(
                num_queries, rounds, None if state.student_PC is None else state.student_PC[query_Q]
            )
            answers = spending.accept(mechanism.release(round_values, spending.noise, context))
            spending.record_cost(answers.events)
            cell_P = len(release.query_Q) + round_values.cell_P if isinstance(round_values, CellHistogram) else None
            release = release.append_round(query_Q, answers, spending.incurred_events or (), cell_P)
            if isinstance(round_values, Votes | CellHistogram):
                # A mechanism that stops early (the sparse vector after T failures) answers a prefix of the questions.
                opened_votes.append(round_values.select(torch.arange(release.queries_per_round[-1])))
            progress(len(release.query_Q), num_queries)
        if opened_votes:
            on_votes(_merge_votes(opened_votes))
        if write is not None:
            spending.record_files(write(release))
        return release


def _check_next_round(
    state: RoundInputs, previous_state: RoundInputs, sensitive: SensitiveValue, mechanism: Mechanism, budget: Budget
) -> RoundInputs:
    """The next round's state, with what it leaves as it was; its values are held to the price."""
    if state.sensitive is not None:
        if state.sensitive.num_teachers != sensitive.num_teachers or len(state.sensitive) != len(sensitive):
            raise ValueError("votes: those of the next round must be of as many teachers, on the same points")
        check_before_charge(state.sensitive.sensitivity, mechanism, budget)
    return state if state.feature_PD is not None else replace(state, feature_PD=previous_state.feature_PD)


def _select_queries(
    strategy: QueryStrategy,
    release: Release,
    state: RoundInputs,
    pool: PublicPool,
    spec: DataSpec,
    num_queries: int,
    rounds: int,
    seed: int,
) -> Tensor:
    """The next round's questions, int64 [Q]: public."""
    remaining = num_queries - len(release.query_Q)
    query_state = QueryState(
        spec=spec,
        pool_x=pool.x,
        query_Q=release.query_Q,
        label_Q=release.label_Q,
        num_remaining=remaining,
        num_rounds_left=rounds - len(release.queries_per_round),
        seed=seed,
        student_PC=state.student_PC,
        feature_PD=state.feature_PD,
    )
    return _check_queries(strategy.select(query_state), release.query_Q, remaining, len(pool))


def check_before_charge(sensitivity: Sensitivity, mechanism: Mechanism, budget: Budget) -> None:
    """Raise ValueError, before anything is charged, for what the mechanism would refuse to open."""
    budget.check_adjacency(sensitivity)
    noise_kind = getattr(mechanism, "noise", budget.kind)
    if noise_kind != budget.kind:
        raise checks.error("noise", budget.kind, f"must be {noise_kind!r}, the kind {mechanism.name} was priced for")
    check_sensitivity(sensitivity, mechanism.max_sensitivity, mechanism.name)


def _merge_votes(parts: list[Votes | CellHistogram]) -> Votes | CellHistogram:
    """PRIVATE. The votes of all rounds in one table."""
    counts_QC = torch.cat([part.counts_QC for part in parts])
    last_part = parts[-1]
    if isinstance(last_part, CellHistogram):
        return CellHistogram(counts_QC, last_part.sensitivity, last_part.cell_P)
    return Votes(counts_QC, last_part.num_teachers, last_part.sensitivity)


def _check_plan(
    sensitive: SensitiveValue, pool: PublicPool, mechanism: Mechanism, strategy: QueryStrategy, num_queries: int
) -> int:
    """Check the plan before anything is charged; how many rounds it takes."""
    checks.integer(
        "num_queries", num_queries, low=1, high=len(pool), fix=f"There are {len(pool)} public points to ask about."
    )
    if len(sensitive) != len(pool):  # no assert: a method can be a user's own, and python -O drops asserts
        fix = "A method answers for every public point, in the pool's order."
        raise checks.error("votes", len(sensitive), f"must cover all {len(pool)} public points", fix)
    rounds = min(checks.integer("query.rounds", strategy.rounds, low=1), num_queries)
    mechanism.check(
        num_queries=num_queries, num_teachers=sensitive.num_teachers, num_classes=sensitive.num_classes, rounds=rounds
    )
    return rounds


def _check_queries(new_query_Q: Tensor, query_Q: Tensor, remaining: int, pool_size: int) -> Tensor:
    """The questions a strategy chose, held to the protocol: a repeat or an overrun would be answered uncharged."""
    new_query_Q = new_query_Q.to("cpu", torch.int64)
    if len(new_query_Q) > remaining:
        raise ValueError(f"query strategy: asked {len(new_query_Q)} questions where {remaining} remain")
    if len(new_query_Q) and (int(new_query_Q.min()) < 0 or int(new_query_Q.max()) >= pool_size):
        raise ValueError("query strategy: asked for a point outside the public pool")
    if len(torch.unique(new_query_Q)) < len(new_query_Q) or bool(torch.isin(new_query_Q, query_Q).any()):
        raise ValueError("query strategy: asked for the same point twice")
    return new_query_Q
