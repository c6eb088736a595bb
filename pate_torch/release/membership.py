"""PRIVATE. A membership inference attack on a released student, for the owner of the data.

The attack reads private records, so only the owner may see the result. No ledger is charged, and nothing is released.

The attack calls a record a member if the model's margin of the true label reaches a threshold. Members are records that
teachers were trained on; nonmembers come from the same source and were not used for training. The threshold for each
half of the records is chosen on the other half, so the advantage is zero on average for a model that is independent of
its training records. The result is a *lower* bound from one attack: a better attack may find more members, so a small
advantage proves nothing. The guarantee, which is shown with the result, bounds every attack.

Source: Yeom et al. 2018 (arXiv 1709.01604) for the attack; Carlini et al. 2022 (arXiv 2112.03570) for the margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.rng import make_numpy_generator
from pate_torch.privacy.partition import hold_out, number_units, select, select_one_per_unit
from pate_torch.privacy.records import LABEL_UNIT, Dataset, PrivateRecords, Shards
from pate_torch.release.report import Share, format_percent

Scores = NDArray[np.float64]
Z95 = 1.959963984540054  # the normal quantile of 97.5 %
MIN_RECORDS = 20  # smallest number of members, and of nonmembers, for an attack


@dataclass(frozen=True, eq=False, repr=False)
class MembershipRecords:
    """PRIVATE. Members and nonmembers, with x and y as in PrivateRecords. No record is both."""

    member_x: Tensor
    member_y: Tensor
    nonmember_x: Tensor
    nonmember_y: Tensor


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """PRIVATE. The result of an attack on one model, with 95 % intervals over the records.

    Attributes:
        advantage: Share of members that are called members, minus this share of nonmembers; 0 by chance.
        auc: Probability that the margin of a member exceeds the margin of a nonmember; 1/2 by chance.
    """

    members: int
    others: int
    advantage: float
    advantage_interval: tuple[float, float]
    auc: float
    auc_interval: tuple[float, float]

    def __str__(self) -> str:
        """Format as 'advantage 1.2 % (-3.0 to 5.4), AUC 0.507 (0.485 to 0.529)'; at most 0 is called no signal."""
        low, high = self.advantage_interval
        auc_low, auc_high = self.auc_interval
        advantage = f"advantage {format_percent(self.advantage)} ({100 * low:.1f} to {100 * high:.1f})"
        prefix = "no signal found: " if self.advantage <= 0 else ""
        return f"{prefix}{advantage}, AUC {self.auc:.3f} ({auc_low:.3f} to {auc_high:.3f})"


@dataclass(frozen=True, kw_only=True)
class MembershipResult:
    """PRIVATE. The attacks on the released student and on a model without privacy.

    Both bounds hold on average over the noise and over a random choice of the members. They are None if no guarantee
    holds.

    Attributes:
        student: Attack on the released student.
        nonprivate: Attack on the model without privacy; None if no such model was trained.
        bound: Bound on the advantage of any attack on the student, from epsilon and delta.
        bound_by_plan: Bound on the same advantage, from all privacy events; at most ``bound``.
        held_out: True if the nonmembers were held out from the private records. False if they are the test set, which
            may have a different distribution.
    """

    student: AttackResult
    nonprivate: AttackResult | None
    bound: float | None
    bound_by_plan: float | None
    held_out: bool

    def format_lines(self) -> dict[str, str]:
        """Format the student's result with the bound, and the result without privacy: name -> value."""
        text = str(self.student)
        if self.bound_by_plan is not None:
            text += f"; any attack's advantage is at most {format_percent(self.bound_by_plan)} by the guarantee"
            if self.student.advantage_interval[0] > self.bound_by_plan:  # the whole interval is above the bound
                text += ". ABOVE ITS BOUND: a fault, or members and nonmembers have different distributions"
        lines = {"Attack on the student": text}
        return lines if self.nonprivate is None else lines | {"  and without privacy": str(self.nonprivate)}


@dataclass(frozen=True, kw_only=True)
class MembershipTest:
    """The settings of the owner's membership test.

    Attributes:
        records: Largest number of members, and of nonmembers.
        held_out: Share of the private units that are held out as nonmembers. If 0, the test set is used, which takes
            no records from the teachers but may have a different distribution.
    """

    name: str = "standard"
    records: int = 2000
    held_out: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("membership.records", self.records, low=MIN_RECORDS)
        checks.between("membership.held_out", self.held_out, 0, 0.9)

    def hold_out(self, data: Dataset, adjacency: str, seed: int) -> tuple[Dataset, PrivateRecords | None]:
        """Split off the held-out records, or None if the test set is used: (remaining data, held-out records)."""
        if self.held_out == 0:
            return data, None
        if data.private.unit == LABEL_UNIT:
            fix = "Set membership.held_out=0."
            raise checks.error("membership.held_out", self.held_out, "must be 0, because all features are public", fix)
        training, holdout = hold_out(data.private, self.held_out, adjacency, seed, "membership")
        return replace(data, private=training), holdout

    def select_records(
        self, data: Dataset, shards: Shards, holdout: PrivateRecords | None, seed: int
    ) -> MembershipRecords | None:
        """Select members from the shards, one record of each unit, and nonmembers; None if there are too few."""
        if data.private.unit == LABEL_UNIT:
            return None
        private, used_index = data.private, shards.index_KS[shards.mask_KS].numpy()
        x, y = data.evaluation.x, data.evaluation.y
        if holdout is not None:
            holdout_records = select_one_per_unit(holdout, shards.adjacency)
            x, y = holdout_records.x, holdout_records.y
        member_digests = set(_hash_records(private.x[used_index], private.y[used_index]))
        nonmember_rows = [row for row, record in enumerate(_hash_records(x, y)) if record not in member_digests]
        first_index = np.unique(number_units(private, shards.adjacency)[used_index], return_index=True)[1]

        def draw_rows(rows: NDArray[np.int64], kind: str) -> NDArray[np.int64]:
            return np.sort(make_numpy_generator(seed, "membership", kind).permutation(rows)[: self.records])

        members = select(private, draw_rows(used_index[first_index], "members"))
        rows = torch.from_numpy(draw_rows(np.array(nonmember_rows, dtype=np.int64), "others"))
        if min(len(members), len(rows)) < MIN_RECORDS:
            return None
        return MembershipRecords(members.x, members.y, x[rows], y[rows])


def _hash_records(x: Tensor, y: Tensor) -> Iterator[bytes]:
    for point, label in zip(x.cpu().numpy(), y.cpu().numpy(), strict=True):
        yield blake2b(point.tobytes() + label.tobytes(), digest_size=16).digest()


def attack(logits: Callable[[Tensor], Tensor], sides: MembershipRecords, seed: int = 0) -> AttackResult:
    """PRIVATE. Attack a model that maps points [B, ...] to logits [B, C]. ``seed`` splits the records into halves."""
    members = compute_margins(logits(sides.member_x), sides.member_y)
    return compare_scores(members, compute_margins(logits(sides.nonmember_x), sides.nonmember_y), seed)


def compute_margins(logits_BC: Tensor, y: Tensor) -> Scores:
    """Compute the margins of the true labels, ln(p / (1 - p)), float64 [B].

    The margin is the logit of the true class minus the log-sum-exp of the other logits. The formula with p would lose
    all precision where p rounds to 1.
    """
    logits_BC, true_B1 = logits_BC.cpu().double(), y.cpu()[:, None]
    rest_B = logits_BC.scatter(1, true_B1, -torch.inf).logsumexp(1)
    return (logits_BC.gather(1, true_B1)[:, 0] - rest_B).nan_to_num(nan=0.0).numpy()


def compare_scores(member_M: Scores, nonmember_O: Scores, seed: int = 0) -> AttackResult:
    """Measure how well scores separate members [M] from nonmembers [O]; members should score higher. M, O >= 2."""
    stream = make_numpy_generator(seed, "membership", "halves")
    halves = [np.array_split(side[stream.permutation(len(side))], 2) for side in (member_M, nonmember_O)]
    counts = np.zeros(2)  # members called members, and nonmembers called members
    for judged, chosen in ((0, 1), (1, 0)):
        threshold = find_threshold(halves[0][chosen], halves[1][chosen])
        counts += [(side[judged] >= threshold).sum() for side in halves]
    sizes = len(member_M), len(nonmember_O)
    shares = [Share(value=float(n / size), size=size) for n, size in zip(counts, sizes, strict=True)]
    num_below, num_at_most = (np.searchsorted(np.sort(nonmember_O), member_M, side) for side in ("left", "right"))
    auc = (num_below + num_at_most).mean() / 2 / len(nonmember_O)  # equal scores count half
    return AttackResult(
        members=sizes[0],
        others=sizes[1],
        advantage=shares[0].value - shares[1].value,
        advantage_interval=compute_difference_interval(*shares),
        auc=float(auc),
        auc_interval=compute_auc_interval(float(auc), *sizes),
    )


def find_threshold(member_M: Scores, nonmember_O: Scores) -> float:
    """Find the threshold t of the test "score >= t" with the largest advantage; infinite if none exceeds 0."""
    values = np.unique(np.concatenate([member_M, nonmember_O])) / 2
    thresholds = np.append(values[1:] + values[:-1], np.inf)  # the middle of each gap
    rates = [1 - np.searchsorted(np.sort(side), thresholds) / len(side) for side in (member_M, nonmember_O)]
    highest_best = np.argmax((rates[0] - rates[1])[::-1])  # the highest best threshold
    return float(thresholds[::-1][highest_best])


# ---- intervals ------------------------------------------------------------------------------------------------------


def compute_difference_interval(first: Share, second: Share) -> tuple[float, float]:
    """Compute the 95 % interval for the difference of two shares of independent samples.

    Source: Newcombe 1998, *Interval estimation for the difference between independent proportions*, method 10.
    """
    assert first.interval is not None and second.interval is not None
    (low, high), (other_low, other_high), gap = first.interval, second.interval, first.value - second.value
    below = math.hypot(first.value - low, other_high - second.value)
    return gap - below, gap + math.hypot(high - first.value, second.value - other_low)


def compute_auc_interval(auc: float, first_size: int, second_size: int) -> tuple[float, float]:
    """Compute the 95 % interval for the area under a ROC curve: all areas a with (auc - a)^2 <= z^2 variance(a).

    The variance is from Hanley & McNeil 1982 for two samples of the mean size; it is exact at a = 1/2.

    Source: Newcombe 2006, *Confidence intervals for an effect size measure based on the Mann-Whitney statistic*, part
    2, method 5.
    """
    mean_size_minus_1 = (first_size + second_size) / 2 - 1

    def compute_excess(a: float) -> float:
        pairs = a * (1 - a) * (1 + mean_size_minus_1 * ((1 - a) / (2 - a) + a / (1 + a)))
        return (auc - a) ** 2 - Z95**2 * pairs / (first_size * second_size)

    margin = 1e-12  # excludes the root a = auc if auc is 0 or 1
    low = 0.0 if auc == 0 else float(brentq(compute_excess, 0.0, auc - margin))
    return low, 1.0 if auc == 1 else float(brentq(compute_excess, auc + margin, 1.0))
