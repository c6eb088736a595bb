"""What a student learns from: the public points, and what was released about them.

The Gaussian mechanism's price is that of the whole noisy count vector, and its argmax throws most of it away: how far
the winner leads. Given the right class, the counts are modeled as a lead g of that class over the others plus noise,
so the likelihood of class c is proportional to exp(g z_c / sigma^2), z the noisy counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pate_torch.privacy.records import DataSpec, NoisyCounts, PublicPool, Release
from pate_torch.students.base import StudentTask

_NUM_GRID_POINTS = 400


def make_student_task(spec: DataSpec, pool: PublicPool, release: Release) -> StudentTask:
    """The pool and the answers, with the noisy counts or the scores behind them where there are any.

    Answers given for cells, or by a model, speak for every public point.
    """
    if release.num_pool_rounds:
        label_Q, share_QC = _compute_pool_labels(release)
        rounds = torch.arange(release.num_pool_rounds)
        query_Q, round_Q = torch.arange(len(pool)).repeat(len(rounds)), rounds.repeat_interleave(len(pool))
        return StudentTask(spec, pool.x, query_Q, label_Q, posterior_QC=share_QC, round_Q=round_Q, model=release.model)
    answered_Q, posterior_QC = release.answered_Q, None
    if release.noisy_counts is not None:  # round by round: how far teachers lead differs with who answers what
        parts = release.noisy_counts.split(release.queries_per_round)
        posterior_QC = torch.cat([compute_label_posterior(part) for part in parts])[answered_Q]
    elif release.score_QC is not None:
        posterior_QC = release.score_QC[answered_Q]
        posterior_QC = posterior_QC / posterior_QC.sum(1, keepdim=True)  # each is the center of a bin: none is 0
    return StudentTask(
        spec,
        pool.x,
        release.query_Q[answered_Q],
        release.label_Q[answered_Q],
        posterior_QC=posterior_QC,
        soft=release.score_QC is not None,
        round_Q=release.round_Q[answered_Q],
    )


def _compute_pool_labels(release: Release) -> tuple[Tensor, Tensor]:
    """(label, class shares) of every public point, round after round, [Q] and [Q, C] with Q = R P."""
    if release.score_RPC is not None:
        share_QC = release.score_RPC.flatten(0, 1).softmax(1)
        return share_QC.argmax(1), share_QC
    assert release.cell_RP is not None and release.noisy_counts is not None
    cell_Q = release.cell_RP.flatten()
    return release.label_Q[cell_Q], compute_class_proportions(release.noisy_counts)[cell_Q]


def estimate_lead(noisy: NoisyCounts) -> float:
    """The maximum-likelihood lead g > 0, in votes; the class of each question is unknown.

    log-likelihood: sum_q log mean_c exp((g z_qc - g^2 (1 - 1/C) / 2) / sigma^2), z centered in each row.
    """
    z_QC = _center_rows(noisy)
    max_lead = float((z_QC.max(1).values - z_QC.min(1).values).max().clamp(min=1.0))
    g_G = torch.linspace(1 / _NUM_GRID_POINTS, 1, _NUM_GRID_POINTS, dtype=torch.float64) * max_lead
    penalty_G = g_G.square() * (1 - 1 / z_QC.shape[1]) / 2
    log_GQ = torch.stack([((g * z_QC - p) / noisy.sigma**2).logsumexp(1) for g, p in zip(g_G, penalty_G, strict=True)])
    return float(g_G[log_GQ.sum(1).argmax()])


def compute_label_posterior(noisy: NoisyCounts) -> Tensor:
    """Class probabilities, float32 [Q, C], from a uniform prior; the lead is estimated from all questions together."""
    if len(noisy.counts_QC) == 0:
        return torch.zeros(noisy.counts_QC.shape)
    return (estimate_lead(noisy) * _center_rows(noisy) / noisy.sigma**2).softmax(1).float()


def compute_class_proportions(noisy: NoisyCounts) -> Tensor:
    """How common each class is among the records of each cell, float32 [Q, C], rows summing to 1.

    A count below sigma counts as zero, and sigma is subtracted from the others: else nine classes that are absent would
    together outweigh the one that is there. A cell without any count above sigma gets equal proportions.
    """
    excess_QC = (noisy.counts_QC.double().cpu() - noisy.sigma).clamp(min=0)
    total_Q1 = excess_QC.sum(1, keepdim=True)
    uniform = 1 / excess_QC.shape[1]
    return torch.where(total_Q1 > 0, excess_QC / total_Q1.clamp(min=1e-12), uniform).float()


def _center_rows(noisy: NoisyCounts) -> Tensor:
    counts_QC = noisy.counts_QC.double().cpu()
    return counts_QC - counts_QC.mean(1, keepdim=True)
