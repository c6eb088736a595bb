"""PRIVATE. A membership inference attack against a released student, for the owner of the data.

The attack reads private records, so its result stays with the owner; no ledger charges it and nothing of it is
released.

The attack calls a record a member if the model's margin on its true label reaches a threshold. Members are records that
teachers learnt from; the other records come from the same source and reached no teacher. Half of each side chooses the
threshold by which the other half is judged, and the other way round, so that a model that does not know its records has
an advantage of zero on average. The result is a *lower* bound by one attack: a better attack may find more, and finding
nothing proves nothing. The guarantee, which is shown beside it, bounds every attack.

Source: Yeom et al. 2018 (arXiv 1709.01604), the attack; Carlini et al. 2022 (arXiv 2112.03570), its scale.
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
from pate_torch.privacy.partition import get_unit_ids, hold_out, select, select_one_per_unit
from pate_torch.privacy.records import LABEL_UNIT, Dataset, PrivateRecords, Shards
from pate_torch.release.report import Share, format_percent

Scores = NDArray[np.float64]
Z95 = 1.959963984540054  # the normal quantile of 97.5 %

MIN_RECORDS = 20
"""Smallest number of records of each side for which the attack is run."""


@dataclass(frozen=True, eq=False, repr=False)
class MembershipRecords:
    """PRIVATE. Members and other records, x and y as in PrivateRecords. No record is on both sides."""

    member_x: Tensor
    member_y: Tensor
    nonmember_x: Tensor
    nonmember_y: Tensor

    def __repr__(self) -> str:
        return "MembershipRecords(content withheld)"


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """PRIVATE. The result of one attack on one model, with 95 % intervals over the records.

    Attributes:
        members: Number of members.
        others: Number of other records.
        advantage: Share of members called members, less that of the other records; 0 by chance.
        auc: Probability that the margin of a member is above that of another record; 1/2 by chance.
    """

    members: int
    others: int
    advantage: float
    advantage_interval: tuple[float, float]
    auc: float
    auc_interval: tuple[float, float]

    def __str__(self) -> str:
        """Return 'advantage 1.2 % (-3.0 to 5.4), AUC 0.507 (0.485 to 0.529)'; an advantage below 0 is no signal."""
        low, high = self.advantage_interval
        auc_low, auc_high = self.auc_interval
        advantage = f"advantage {format_percent(self.advantage)} ({100 * low:.1f} to {100 * high:.1f})"
        prefix = "no signal found: " if self.advantage <= 0 else ""
        return f"{prefix}{advantage}, AUC {self.auc:.3f} ({auc_low:.3f} to {auc_high:.3f})"


@dataclass(frozen=True, kw_only=True)
class MembershipResult:
    """PRIVATE. The attack on the released student and, for contrast, on a model without privacy.

    The two bounds are averages over the noise, and over a coin for each record that decides its side; they are None if
    no guarantee holds.

    Attributes:
        student: Attack on the released student.
        nonprivate: Attack on the model without privacy; None if there is none.
        bound: Bound on the student's advantage under any attack, by its epsilon and delta alone.
        bound_by_plan: Bound by all of its privacy events; at most ``bound``.
        held_out: Whether the other records were kept from the teachers for this test. Otherwise they are the test set,
            which may differ from the private records for other reasons.
    """

    student: AttackResult
    nonprivate: AttackResult | None
    bound: float | None
    bound_by_plan: float | None
    held_out: bool

    def format_lines(self) -> dict[str, str]:
        """Format the student's figures with the bound on any attack, and the figures without privacy: name -> value."""
        text = str(self.student)
        if self.bound_by_plan is not None:
            text += f"; any attack's advantage is at most {format_percent(self.bound_by_plan)} by the guarantee"
            if self.student.advantage_interval[0] > self.bound_by_plan:  # the whole interval lies above it
                text += ". ABOVE ITS BOUND: a fault, or the records differ from the others"
        lines = {"Attack on the student": text}
        return lines if self.nonprivate is None else lines | {"  and without privacy": str(self.nonprivate)}


@dataclass(frozen=True, kw_only=True)
class MembershipTest:
    """The settings of the owner's membership test.

    Attributes:
        records: Largest number of records of each side.
        held_out: Share of the private units that are kept from the teachers, to be the other side. With 0 the other
            side is the test set, which costs the teachers no records but may come from another source.
    """

    name: str = "standard"
    records: int = 2000
    held_out: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("membership.records", self.records, low=MIN_RECORDS)
        checks.between("membership.held_out", self.held_out, 0, 0.9)

    def hold_out(self, data: Dataset, adjacency: str, seed: int) -> tuple[Dataset, PrivateRecords | None]:
        """Split the data into (data without the records held out, those records; None if the test set is used)."""
        if self.held_out == 0:
            return data, None
        if data.private.unit == LABEL_UNIT:
            fix = "Set membership.held_out=0."
            raise checks.error("membership.held_out", self.held_out, "has no members to find: features are public", fix)
        training, holdout = hold_out(data.private, self.held_out, adjacency, seed, "membership")
        return replace(data, private=training), holdout

    def select_records(
        self, data: Dataset, shards: Shards, holdout: PrivateRecords | None, seed: int
    ) -> MembershipRecords | None:
        """Select members from the shards, one record of each unit; None if a side has too few records."""
        if data.private.unit == LABEL_UNIT:
            return None
        private, used_index = data.private, shards.index_KS[shards.mask_KS].numpy()
        x, y = data.evaluation.x, data.evaluation.y
        if holdout is not None:
            holdout_records = select_one_per_unit(holdout, shards.adjacency)
            x, y = holdout_records.x, holdout_records.y
        member_digests = set(_hash_records(private.x[used_index], private.y[used_index]))
        nonmember_rows = [row for row, record in enumerate(_hash_records(x, y)) if record not in member_digests]
        first_index = np.unique(get_unit_ids(private, shards.adjacency)[used_index], return_index=True)[1]

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
    """PRIVATE. Attack a model (points [B, ...] to logits [B, C]); ``seed`` decides the halves of the records."""
    members = compute_margins(logits(sides.member_x), sides.member_y)
    return compare_scores(members, compute_margins(logits(sides.nonmember_x), sides.nonmember_y), seed)


def compute_margins(logits_BC: Tensor, y: Tensor) -> Scores:
    """Compute the margins of the true labels, ln(p / (1 - p)), float64 [B], which fall as the loss -ln p grows.

    They are computed from the logits, as z_y less the ln of the sum of e^z over the other classes: p rounds to 1.
    """
    logits_BC, true_B1 = logits_BC.cpu().double(), y.cpu()[:, None]
    rest_B = logits_BC.scatter(1, true_B1, -torch.inf).logsumexp(1)
    return (logits_BC.gather(1, true_B1)[:, 0] - rest_B).nan_to_num(nan=0.0).numpy()


def compare_scores(member_M: Scores, nonmember_O: Scores, seed: int = 0) -> AttackResult:
    """Measure how well scores separate members, whose scores should be larger. Each side needs two scores."""
    stream = make_numpy_generator(seed, "membership", "halves")
    halves = [np.array_split(side[stream.permutation(len(side))], 2) for side in (member_M, nonmember_O)]
    counts = np.zeros(2)  # of members called members, and of other records called members
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
    """Find the threshold t of the test "score >= t" with the largest advantage; infinite if no test has any."""
    values = np.unique(np.concatenate([member_M, nonmember_O])) / 2
    thresholds = np.append(values[1:] + values[:-1], np.inf)  # halfway between neighbors: a gap is cut in its middle
    rates = [1 - np.searchsorted(np.sort(side), thresholds) / len(side) for side in (member_M, nonmember_O)]
    highest_best = np.argmax((rates[0] - rates[1])[::-1])  # the highest of equals has the fewest false alarms
    return float(thresholds[::-1][highest_best])


# ---- intervals ------------------------------------------------------------------------------------------------------


def compute_difference_interval(first: Share, second: Share) -> tuple[float, float]:
    """Compute the 95 % interval for the difference of two shares of independent samples, from their own intervals.

    Source: Newcombe 1998, *Interval estimation for the difference between independent proportions*, method 10.
    """
    assert first.interval is not None and second.interval is not None
    (low, high), (other_low, other_high), gap = first.interval, second.interval, first.value - second.value
    return (
        gap - math.hypot(first.value - low, other_high - second.value),
        gap + math.hypot(high - first.value, second.value - other_low),
    )


def compute_auc_interval(auc: float, first_size: int, second_size: int) -> tuple[float, float]:
    """Compute the 95 % interval for the area under a ROC curve: all areas a with (auc - a)^2 <= z^2 variance(a).

    The variance is that of Hanley & McNeil 1982 with the weights of equal sizes; it is exact at a = 1/2.

    Source: Newcombe 2006, *Confidence intervals for an effect size measure based on the Mann-Whitney statistic*, part
    2, method 5.
    """
    mean_size_minus_1 = (first_size + second_size) / 2 - 1

    def compute_excess(a: float) -> float:
        pairs = a * (1 - a) * (1 + mean_size_minus_1 * ((1 - a) / (2 - a) + a / (1 + a)))
        return (auc - a) ** 2 - Z95**2 * pairs / (first_size * second_size)

    margin = 1e-12  # an area of 0 or 1 is its own root: the other end of the interval is looked for
    return (
        0.0 if auc == 0 else float(brentq(compute_excess, 0.0, auc - margin)),
        1.0 if auc == 1 else float(brentq(compute_excess, auc + margin, 1.0)),
    )
