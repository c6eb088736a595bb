"""Private test of a final student: its noisy confusion matrix on units that no release of the account trains on.

One record of each held-out unit counts once in the table of predicted and true classes, and its prediction depends on
this record and on released values alone. The noise is that of ``mechanisms.histogram``. An unusable record is absent
under add_remove; under replace_one it counts as the record of class 0 that takes its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scipy.optimize import brentq
from torch import Tensor

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.core import checks
from pate_torch.core.files import compute_file_digest, write_atomically
from pate_torch.core.progress import Progress
from pate_torch.features.batch_invariant import map_batch_invariant
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.privacy.accounts import PURPOSE_TEST, account_charged_error
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.records import MechanismContext, PrivateRecords
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram
from pate_torch.students.base import Student

TEST_PRICE_SHARE = 0.1
"""Share of mu^2 that the private test costs in a fit: at epsilon 1 the noise of a cell is about 12 units."""
TEST_FILE_NAME, TEST_DIGEST_KEY = "private_test.json", "private_test_sha256"
_MIN_MULTIPLE, _MAX_MULTIPLE = 0.2, 5.0
_MAX_ACCURACY_STD = 0.03
"""Standard deviation from which on a noisy accuracy is too inaccurate for a temperature."""


@dataclass(frozen=True, eq=False)
class NoisyConfusion:
    """Releasable. Noisy confusion matrix of a student on held-out units.

    Attributes:
        counts_CC: Noisy number of units by [predicted class, true class], int64.
        sigma: Standard deviation of the noise of each count.
        number: Number of the test among those of the account, from 1.
        id: Id of the reservation that paid for the noise.
    """

    counts_CC: Tensor
    sigma: float
    number: int
    id: str

    @property
    def accuracy(self) -> float:
        """Noisy accuracy, in [0, 1]."""
        return min(1.0, max(0.0, int(self.counts_CC.trace()) / max(1, int(self.counts_CC.sum()))))

    @property
    def accuracy_std(self) -> float:
        """Standard deviation of the noisy accuracy, by the sampling of units and by the noise of all counts."""
        p, size, num_classes = self.accuracy, max(1, int(self.counts_CC.sum())), len(self.counts_CC)
        sampled_p = (p * size + 1) / (size + 2)  # so that the variance of few units is not 0
        noise_variance = self.sigma**2 * num_classes * ((1 - p) ** 2 + (num_classes - 1) * p**2)
        return math.sqrt(sampled_p * (1 - sampled_p) / size + noise_variance / size**2)

    def __str__(self) -> str:
        accuracy = f"{100 * self.accuracy:.1f} % (standard deviation {100 * self.accuracy_std:.1f} %, noise included)"
        return f"noisy accuracy on held-out units: {accuracy}; test {self.number} of the account"

    def compute_logit_multiple(self, logit_PC: Tensor) -> float:
        """Compute the multiple of the logits at which the mean confidence on public points is the noisy accuracy.

        The confidence stays a standard deviation of the accuracy below 1. The multiple changes no prediction, and is 1
        if the accuracy is too inaccurate. Class offsets are never fitted to this table, because they make another
        model, whose test needs a second, disjoint share of the units.
        """

        def compute_excess(multiple: float) -> float:
            confidence = float((multiple * logit_PC.double()).softmax(1).amax(1).mean())
            return confidence - min(self.accuracy, 1 - self.accuracy_std)

        if self.accuracy_std >= _MAX_ACCURACY_STD:
            return 1.0
        if compute_excess(_MIN_MULTIPLE) >= 0:  # the mean confidence increases with the multiple
            return _MIN_MULTIPLE
        if compute_excess(_MAX_MULTIPLE) <= 0:
            return _MAX_MULTIPLE
        return float(brentq(compute_excess, _MIN_MULTIPLE, _MAX_MULTIPLE))


def count_predictions(student: Student, records: PrivateRecords, adjacency: str, progress: Progress) -> CellHistogram:
    """PRIVATE. Count records by [predicted class, true class]. Predictions do not depend on other records."""

    def predict(batches: Iterator[Tensor]) -> Tensor:
        return torch.stack([student.compute_logits(x_B).argmax(1).cpu() for x_B in batches])

    cell_N, num_classes = map_batch_invariant(predict, records.x, progress), student.spec.num_classes
    counts_F = torch.bincount(cell_N * num_classes + records.y, minlength=num_classes**2)
    return CellHistogram(counts_F.view(num_classes, -1), COUNT_SENSITIVITY[adjacency], cell_P=torch.arange(0))


def release_confusion(
    student: Student, file: Path, records: PrivateRecords, mechanism: Histogram, budget: Budget, progress: Progress
) -> NoisyConfusion:
    """Release the confusion matrix of a student, or read the one that an interrupted call has released.

    Args:
        student: Final student.
        file: File of the student, in the folder of the release.
        records: PRIVATE. One record of each held-out unit.
        mechanism: Mechanism of the noise.
        budget: Budget that pays for the noise.
        progress: Function that is called with percentages.

    Raises:
        ValueError: The interrupted call tested another student, or drew noise and recorded none, and
            ``budget.first_charge_only`` is set. Otherwise a new test is charged.
    """
    path, student_digest = file.with_name(TEST_FILE_NAME), compute_file_digest(file)
    events, account = mechanism.privacy_events(1), budget.ledger.get_account(budget.account)
    tests = [charge for charge in account.charges.values() if charge.purpose.startswith(PURPOSE_TEST)]
    committed_digests = [entry.facts.get(TEST_DIGEST_KEY) for entry in budget.ledger.read_entries(account.name)]
    if path.exists() and compute_file_digest(path) in committed_digests:
        facts = json.loads(path.read_text())
        if facts.pop("student_sha256") == student_digest:
            return NoisyConfusion(torch.tensor(facts.pop("counts")), **facts)
        if budget.first_charge_only:
            fix = "Repeat the fit with the arguments of the interrupted one, or charge a new test (allow_refit=True)."
            raise checks.error("student", student.network["name"], "is not the student that was tested", fix)
    elif budget.first_charge_only and any(charge.run == budget.run for charge in tests):
        raise account_charged_error(account, compute_guarantee(events, account.delta).epsilon)
    table, number = count_predictions(student, records, budget.adjacency, progress), len(tests) + 1
    purpose = PURPOSE_TEST if number == 1 else f"{PURPOSE_TEST} (number {number} of this account)"
    budget = replace(budget, first_charge_only=False)  # the release of the student is the first charge
    with budget.spend(events, mechanism="private_test", purpose=purpose) as spending:
        spending.check_adjacency(table.sensitivity)
        answers = spending.accept(mechanism.release(table, spending.noise, MechanismContext(num_queries=1)))
        spending.record_cost(answers.events)
        assert answers.noisy_counts is not None
        noisy = NoisyConfusion(answers.noisy_counts.counts_QC, mechanism.sigma, number, spending.id)
        facts = {"counts": noisy.counts_CC.tolist(), "sigma": noisy.sigma, "number": number, "id": noisy.id}
        write_atomically(path, json.dumps(facts | {"student_sha256": student_digest}) + "\n")
        spending.record_files({TEST_DIGEST_KEY: compute_file_digest(path)})
    return noisy
