"""Private test of a final student on units that no release of the account trains on.

One record of each held-out unit counts once in a table of the true classes and of right and wrong predictions, and its
prediction depends on this record and on released values alone. The noise is that of ``mechanisms.histogram``. The sums
over C classes have the variance C sigma^2; in a confusion matrix, wrong predictions would have C (C - 1) sigma^2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pate_torch.accounting import gdp
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core.files import SHARED_FILE_MODE, atomic_replacement, compute_file_digest, write_atomically
from pate_torch.core.progress import Progress
from pate_torch.features.batch_invariant import map_batch_invariant
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.privacy.accounts import PURPOSE_TEST, make_account_charged_error
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.records import MechanismContext, PrivateRecords
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram
from pate_torch.students.base import Student
from pate_torch.students.store import save as save_student

TEST_COST_SHARE = 0.1
"""Share of mu^2 that the private test costs in a release: at epsilon 1 the noise of a count is about 12 units."""
CONFIDENCE, SIZE_FAILURE_SHARE = 0.95, 0.1
"""Probability of the bound on the accuracy, and share of its failures for the limit of the number of units."""
TEST_FILE_NAME, TEST_DIGEST_KEY = "private_test.json", "private_test_sha256"
_MIN_UNITS, _MIN_MULTIPLE, _MAX_MULTIPLE = 100, 0.2, 5.0
_MAX_ACCURACY_STD = 0.03
"""Smallest standard deviation at which a noisy accuracy is too inaccurate to rescale the logits."""


@dataclass(frozen=True)
class PrivateTest:
    """Releasable. Noisy result of a test of a student on held-out units.

    Attributes:
        counts: Noisy number of units by true class: (right predictions, wrong predictions).
        sigma: Standard deviation of the noise of each count.
        num_units: Number of held-out units, which is public under replace_one. None under add_remove.
        number: Number of the test among those of the account, from 1.
        id: Id of the reservation that paid for the noise.
        tested_sha256, student_sha256: SHA-256 of the file of the tested and of the released student.
        multiple: Multiple of the logits of the tested student in the released one, which changes no prediction.
    """

    counts: tuple[tuple[int, int], ...]
    sigma: float
    num_units: int | None
    number: int
    id: str
    tested_sha256: str
    multiple: float = 1.0
    student_sha256: str = ""

    @property
    def accuracy(self) -> tuple[float, float]:
        """Noisy accuracy, in [0, 1], and its standard deviation by the sampling of units and by the noise."""
        return _estimate_share(np.sum(self.counts, axis=0).tolist(), self.sigma * math.sqrt(len(self.counts)))

    @property
    def recalls(self) -> tuple[tuple[float, float], ...]:
        """Noisy recall of each class, in [0, 1], and its standard deviation, which is large for few units."""
        return tuple(_estimate_share(row, self.sigma) for row in self.counts)

    @property
    def bound(self) -> float:
        """Lower limit of the accuracy on units drawn like the held-out ones, with probability ``CONFIDENCE``."""
        std = math.sqrt(len(self.counts) * (self.sigma**2 + 1 / 12))  # with the rounding of the counts
        right, wrong = np.sum(self.counts, axis=0).tolist()
        return compute_accuracy_bound(right, wrong, std, self.num_units)

    def __str__(self) -> str:
        low = f"{math.floor(1000 * self.bound) / 10:.1f} % on such records with probability {CONFIDENCE:g}"
        estimate = "estimate {:.1f} %, standard deviation {:.1f} %".format(*(100 * value for value in self.accuracy))
        return f"test {self.number} on held-out units: accuracy of at least {low} ({estimate})"

    def compute_logit_multiple(self, logit_PC: Tensor) -> float:
        """Compute the multiple of the logits at which the mean confidence on public points is the noisy accuracy.

        The confidence stays a standard deviation of the accuracy below 1. The multiple changes no prediction, and is 1
        if the accuracy is too inaccurate. Class offsets are never fitted to this table, because they make another
        model, whose test needs a second, disjoint share of the units.
        """
        from scipy.optimize import brentq

        accuracy, std = self.accuracy

        def compute_excess(multiple: float) -> float:
            confidence = float((multiple * logit_PC.double()).softmax(1).amax(1).mean())
            return confidence - min(accuracy, 1 - std)

        if std >= _MAX_ACCURACY_STD:
            return 1.0
        if compute_excess(_MIN_MULTIPLE) >= 0:  # the mean confidence increases with the multiple
            return _MIN_MULTIPLE
        if compute_excess(_MAX_MULTIPLE) <= 0:
            return _MAX_MULTIPLE
        return float(brentq(compute_excess, _MIN_MULTIPLE, _MAX_MULTIPLE))


def _estimate_share(counts: Sequence[int], std: float) -> tuple[float, float]:
    """Return the share of the first of two counts in [0, 1], and its standard deviation if their noise has ``std``."""
    size = max(1, sum(counts))
    p = min(1.0, max(0.0, counts[0] / size))
    sampled_p = (p * size + 1) / (size + 2)  # so that the variance of few units is not 0
    noise_variance = (std / size) ** 2 * ((1 - p) ** 2 + p**2)
    return p, math.sqrt(sampled_p * (1 - sampled_p) / size + noise_variance)


def compute_accuracy_bound(right: int, wrong: int, std: float, num_units: int | None) -> float:
    """Compute a lower confidence limit of the accuracy p from noisy counts, whose noise has the standard deviation std.

    If n units were tested, T = (1 - p) right - p wrong is the sum of a binomial number of mean zero and of
    N(0, std^2 ((1 - p)^2 + p^2)). The limit is the p at which a T as large as the observed one has the probability of a
    failure. Its tail is largest for the largest n: ``num_units`` or, if this is None, the upper limit from
    right + wrong, which has a share of the failure probability of its own.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    failure, n = 1 - CONFIDENCE, num_units
    if n is None:
        limit = right + wrong - float(ndtri(SIZE_FAILURE_SHARE * failure)) * math.sqrt(2) * std
        failure, n = failure * (1 - SIZE_FAILURE_SHARE), max(0, math.ceil(limit))
    if right + wrong <= 0 or not n or compute_tail(0.0, right, wrong, std, n) >= failure:
        return 0.0
    return float(brentq(lambda p: compute_tail(p, right, wrong, std, n) - failure, 0.0, 1.0, xtol=1e-12))


def compute_tail(p: float, right: int, wrong: int, std: float, n: int) -> float:
    """Compute the probability that T (``compute_accuracy_bound``) is at least the T of these counts.

    The result is at least p^n, the probability of n right predictions. The observed T is lowered by 1/2, because counts
    are integers. A lower limit of ``wrong`` makes the result increase with p.
    """
    from scipy.special import gammaln, ndtr, xlog1py, xlogy

    width = 12 * math.sqrt(n * p * (1 - p)) + 30  # the rest has a probability below 1e-20
    k = np.arange(max(0, math.floor(n * p - width)), min(n, math.ceil(n * p + width)) + 1)
    excess = (1 - p) * right - p * max(wrong, -2 * std**2 * (right + wrong) / n) - 0.5
    log_p = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + xlogy(k, p) + xlog1py(n - k, -p)
    return max(p**n, float(np.exp(log_p) @ ndtr((k - n * p - excess) / (std * math.hypot(1 - p, p)))))


def format_size_warning(share: float, num_units: float | None) -> str:
    """Format a warning if few units are held out, and otherwise "".

    ``share`` is the share of the units that is held out. ``num_units`` is the number of all units, or None if it is
    private.
    """
    if not 0 < (size := share * (num_units or 0)) < _MIN_UNITS:
        return ""
    return f"The private test has about {size:.0f} units. With fewer than {_MIN_UNITS} it shows little: leave it out."


def make_test_mechanism(events: tuple[PrivacyEvent, ...], adjacency: str, delta: float, noise: str) -> Histogram:
    """Make the mechanism that tests the student of a release with these events.

    The test costs the share ``TEST_COST_SHARE`` of the mu^2 of release and test together, where mu is that of Gaussian
    differential privacy with the epsilon of the release at ``delta``.
    """
    mu = gdp.compute_mu(compute_guarantee(events, delta).epsilon, delta)
    sigma = COUNT_SENSITIVITY[adjacency].l2 / mu * math.sqrt((1 - TEST_COST_SHARE) / TEST_COST_SHARE)
    return Histogram(sigma=sigma, adjacency=adjacency, noise=noise)


def compute_release_epsilon(epsilon: float, delta: float) -> float:
    """Compute the epsilon that is left for a release whose private test costs ``TEST_COST_SHARE`` of mu^2."""
    return gdp.compute_epsilon(gdp.compute_mu(epsilon, delta) * math.sqrt(1 - TEST_COST_SHARE), delta)


def predict_each(student: Student, x_N: Tensor, progress: Progress) -> Tensor:
    """Predict the class of each point, int64 [N], so that no prediction depends on other points. N may be 0."""

    def predict(batches: Iterator[Tensor]) -> Tensor:
        return torch.stack([student.compute_logits(x_B).argmax(1).cpu() for x_B in batches])

    return map_batch_invariant(predict, x_N, progress)


def count_predictions(student: Student, records: PrivateRecords, adjacency: str, progress: Progress) -> CellHistogram:
    """PRIVATE. Count usable records by [true class, (right, wrong)]. No prediction depends on other records."""
    cell_N = 2 * records.y + (predict_each(student, records.x, progress) != records.y)
    cell_N = cell_N if records.usable_N is None else cell_N[records.usable_N]
    counts_F = torch.bincount(cell_N, minlength=2 * student.spec.num_classes)
    return CellHistogram(counts_F.view(-1, 2), COUNT_SENSITIVITY[adjacency], cell_P=torch.arange(0))


def read_test(file: Path, key: str) -> PrivateTest | None:
    """Read the private test beside the file of a student, if its ``key`` is the digest of this file, or return None."""
    path = file.with_name(TEST_FILE_NAME)
    facts = json.loads(path.read_text()) if path.exists() else {}
    if not file.exists() or facts.get(key) != compute_file_digest(file):
        return None
    return PrivateTest(**facts | {"counts": tuple(map(tuple, facts["counts"]))})


def release_test(
    student: Student,
    file: Path,
    records: PrivateRecords,
    pool_x: Tensor,
    mechanism: Histogram,
    budget: Budget,
    progress: Progress,
) -> tuple[PrivateTest, Student]:
    """Charge the test of a student, and adjust its confidence. Return the test and the adjusted student.

    If an interrupted call has tested the student, its recorded test is read, and nothing is charged. ``records`` are
    PRIVATE: one record of each held-out unit. The file of the adjusted student replaces that of the student. Its
    confidence is measured on the public points ``pool_x``. ``progress`` receives percentages, because the number of
    records may be private.

    Raises:
        ValueError: An interrupted call tested another student, or drew noise that it did not record, and
            ``budget.first_charge_only`` is set. If it is not set, a new test is charged.
    """

    def adjust(test: PrivateTest, path: Path) -> Student:
        no_offsets = torch.zeros(student.spec.num_classes)
        adjusted = student if test.multiple == 1 else student.adjust_logits(test.multiple, no_offsets)
        save_student(adjusted, path)
        return adjusted

    path, test = file.with_name(TEST_FILE_NAME), read_test(file, "tested_sha256")
    events, account = mechanism.privacy_events(1), budget.ledger.get_account(budget.account)
    tests = [charge for charge in account.charges.values() if charge.purpose.startswith(PURPOSE_TEST)]
    committed_digests = [entry.facts.get(TEST_DIGEST_KEY) for entry in budget.ledger.read_entries(account.name)]
    if test is not None and compute_file_digest(path) in committed_digests:
        return test, adjust(test, file)
    if budget.first_charge_only and any(charge.run == budget.run for charge in tests):
        raise make_account_charged_error(account, compute_guarantee(events, account.delta).epsilon)
    table, number = count_predictions(student, records, budget.adjacency, progress), len(tests) + 1
    num_units = len(records) if budget.adjacency == "replace_one" else None
    logit_PC = student.compute_logits(pool_x).cpu()
    purpose = PURPOSE_TEST if number == 1 else f"{PURPOSE_TEST} (number {number} of this account)"
    budget = replace(budget, first_charge_only=False)  # the release of the student is the first charge
    # The adjusted student replaces the tested one once the ledger holds the answers on which it depends.
    replacement = atomic_replacement(file, SHARED_FILE_MODE)
    with replacement as adjusted_file, budget.spend(events, mechanism="private_test", purpose=purpose) as spending:
        spending.check_adjacency(table.sensitivity)
        answers = spending.accept(mechanism.release(table, spending.noise, MechanismContext(num_queries=1)))
        spending.record_cost(answers.events)
        assert answers.noisy_counts is not None
        counts = tuple(map(tuple, answers.noisy_counts.counts_QC.tolist()))
        test = PrivateTest(counts, mechanism.sigma, num_units, number, spending.id, compute_file_digest(file))
        test = replace(test, multiple=test.compute_logit_multiple(logit_PC))
        student = adjust(test, adjusted_file)
        test = replace(test, student_sha256=compute_file_digest(adjusted_file))
        write_atomically(path, json.dumps(asdict(test)) + "\n")
        spending.record_files({TEST_DIGEST_KEY: compute_file_digest(path)})
    return test, student
