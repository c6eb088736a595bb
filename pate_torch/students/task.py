"""What a student learns from: the public points, and what was released about them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pate_torch.protocols import StudentTask
from pate_torch.students.label_posterior import class_proportions, label_posterior
from pate_torch.types import DataSpec, PublicPool, Release


def student_task(spec: DataSpec, pool: PublicPool, release: Release) -> StudentTask:
    """The pool and the answers, with the noisy counts or the scores behind them where there are any.

    Answers given for cells, or by a model, speak for every public point.
    """
    if release.pool_rounds:
        label_Q, share_QC = _everywhere(release)
        rounds = torch.arange(release.pool_rounds)
        return StudentTask(
            spec,
            pool.x,
            torch.arange(len(pool)).repeat(len(rounds)),
            label_Q,
            posterior_QC=share_QC,
            round_Q=rounds.repeat_interleave(len(pool)),
            model=release.model,
        )
    answered, believed_QC = release.answered_Q, None
    if release.noisy is not None:  # round by round: how far teachers lead differs with who answers what
        believed_QC = torch.cat([label_posterior(part) for part in release.noisy.split(release.rounds)])[answered]
    elif release.score_QC is not None:
        believed_QC = release.score_QC[answered]
        believed_QC = believed_QC / believed_QC.sum(1, keepdim=True)  # each is the center of a bin: none is 0
    return StudentTask(
        spec,
        pool.x,
        release.query_Q[answered],
        release.label_Q[answered],
        posterior_QC=believed_QC,
        soft=release.score_QC is not None,
        round_Q=release.round_Q[answered],
    )


def _everywhere(release: Release) -> tuple[Tensor, Tensor]:
    """(label, class shares) of every public point, round after round, [Q] and [Q, C] with Q = R P."""
    if release.score_RPC is not None:
        share_QC = release.score_RPC.flatten(0, 1).softmax(1)
        return share_QC.argmax(1), share_QC
    assert release.cell_RP is not None and release.noisy is not None
    cell_Q = release.cell_RP.flatten()
    return release.label_Q[cell_Q], class_proportions(release.noisy)[cell_Q]


def by_round(task: StudentTask) -> list[StudentTask]:
    """The task of each round that has answers."""
    query_Q, label_Q = task.query_Q.cpu(), task.label_Q.cpu()
    round_Q = torch.zeros(len(query_Q), dtype=torch.int64) if task.round_Q is None else task.round_Q.cpu()
    told = []
    for turn in round_Q.unique().tolist() or [0]:
        mine = round_Q == turn
        posterior_QC = None if task.posterior_QC is None else task.posterior_QC.cpu()[mine]
        told.append(
            replace(task, query_Q=query_Q[mine], label_Q=label_Q[mine], posterior_QC=posterior_QC, round_Q=None)
        )
    return told
