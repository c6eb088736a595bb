"""The part of the joiner in the protocol: it writes the charter and the rounds, and signs the sum of the answers.

The joiner holds no record, draws no noise and has no account. A round takes its slot durably before its file is
written, so that no slot is used for two rounds. A round that failed keeps its slot, and its cost stays in the total.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from filelock import FileLock

from pate_torch.accounting import gdp
from pate_torch.accounting.accountant import Guarantee, compute_guarantee
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement, create_private_folder, write_atomically
from pate_torch.sites.charter import Charter, Terms, make_charter, read_charter
from pate_torch.sites.keys import load_joiner_key, read_stored_file, write_privately
from pate_torch.sites.pairs import bundle_confirmations
from pate_torch.sites.rounds import Round, make_round, make_sum_file, read_round
from pate_torch.sites.shares import compute_share
from pate_torch.sites.signed import ZERO_DIGEST
from pate_torch.sites.site import check_public_file
from pate_torch.sites.tables import TableKind, read_public_file

_README = """PRIVATE: do not share.

This folder holds the signing key of the joiner. The other files were sent to all sites or may be published.
"""
_SIGMA_STEPS = 1 << 16  # sigma is a multiple of 2^-16
_NOISE_FACTORS = (1 + 1e-9, 1 + 1e-7, 1 + 1e-5, *(1 + 2.0**-power for power in range(12, -1, -1)))
"""Multiples of the noise that a Gaussian number needs. The first multiple whose cost is at most epsilon is used."""


@dataclass
class JoinerRecord:
    """Hashes of the files that the joiner signed, as hexadecimal digits; those of rounds and sums by their slots."""

    charter: str
    rounds: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    last_sum: str = ZERO_DIGEST


class PlannedRound(NamedTuple):
    """A round that the joiner asked for, what it counts, and whether the answers of all sites were added up."""

    round: Round
    kind: TableKind
    has_sum: bool


@dataclass(frozen=True)
class NoisySum:
    """Releasable. The sum of the tables of all sites with the noise of all shares.

    Attributes:
        id: Id of the sum, the first 16 digits of the SHA-256 of the round file.
        slot: Slot of the round.
        kind: What was counted.
        numbers: Noisy sum, float64, of the shape of the table. 1 is one count, or the length 1 of a feature vector.
        sigma: Standard deviation of the noise of each number, in the same unit.
    """

    id: str
    slot: int
    kind: TableKind
    numbers: np.ndarray
    sigma: float


@dataclass(frozen=True)
class Joiner:
    """The joiner, whose folder holds its key, the charter, the rounds and the sums."""

    folder: Path

    def create_charter(self, key_files: Mapping[str, bytes], terms: Terms) -> bytes:
        """Make the charter of the sites whose key files these are, {name of the file in messages: bytes}, in order."""
        create_private_folder(self.folder, _README)
        with self._lock():
            if self._record_path.exists():
                problem = "has a charter already"
                raise checks.error("folder", str(self.folder), problem, "Use another folder for another charter.")
            if not self._key_path.exists():
                write_privately(self._key_path, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode())
            raw = make_charter(list(key_files.values()), terms, load_joiner_key(self._key_path))
            write_atomically(self.folder / "charter.json", raw)
            self._save(JoinerRecord(hashlib.sha256(raw).hexdigest()))
        return raw

    @property
    def charter(self) -> Charter:
        """Charter of the sites, which is read from the folder and checked."""
        with self._open() as record:
            return read_charter(self._read("charter.json", record.charter), "charter.json")

    def bundle(self, confirmations: Mapping[str, bytes]) -> bytes:
        """Bundle the confirmation files of all sites into the file of keys, which every site needs."""
        return bundle_confirmations(self.charter, confirmations, load_joiner_key(self._key_path))

    def ask(self, kind: TableKind, epsilon: float, first_slot: int | None = None) -> tuple[int, bytes, bytes]:
        """Take the next slot for a round, with the least noise that costs at most ``epsilon``.

        Args:
            kind: What is counted.
            epsilon: Largest cost of the round, or of all rounds that are planned together.
            first_slot: Slot of the first of several planned rounds, whose noise and public file this round shares.
                None for a new plan.

        Returns:
            Slot, round file and public file.
        """
        charter, key = self.charter, load_joiner_key(self._key_path)
        sigma = calibrate_sigma(charter, kind, epsilon)
        with self._open() as record:
            slot = 1 + max(map(int, record.rounds), default=-1)
            if slot >= charter.num_slots:
                problem = f"has only {charter.num_slots} slots, and all of them are used"
                raise checks.error("charter", charter.digest.hex(), problem, "Make a new charter with new keys.")
            if first_slot is None:
                public, name = kind.to_file(charter, key), f"round-{slot}.public"
                digest = hashlib.sha256(public).hexdigest()
                read_public_file(charter, public)  # refuses numbers that no site would accept
                write_atomically(self.folder / name, public)
            else:
                first_round, _ = self._read_round(record, charter, first_slot)
                ((name, digest),) = first_round.files.items()
                public = self._read(name, digest)
                if sigma != first_round.sigma:
                    problem = "differs from the one of the first round, which fixed the noise of all rounds"
                    raise checks.error("epsilon", epsilon, problem, "Give the epsilon of the first round.")
            raw = make_round(
                charter,
                key,
                sigma=sigma,
                slot=slot,
                kind=kind.name,
                shape=kind.shape,
                bound=kind.compute_bound(charter.terms),
                previous=record.last_sum,
                files={name: digest},
                **kind.round_fields,
            )
            record.rounds[str(slot)] = hashlib.sha256(raw).hexdigest()
            write_atomically(self.folder / f"round-{slot}.json.pending", raw)
            self._save(record)  # from here on, the round is part of every total
            self._read(f"round-{slot}.json", record.rounds[str(slot)])
        return slot, raw, public

    def sum(self, answers: Mapping[str, bytes], slot: int | None = None) -> tuple[int, bytes]:
        """Add up the answers to the round of ``slot``, by default the newest, and return its slot and the sum file.

        The same answers give the same bytes.
        """
        charter, key = self.charter, load_joiner_key(self._key_path)
        with self._open() as record:
            slot = self._choose_slot(record, slot)
            current_round, _ = self._read_round(record, charter, slot)
            raw = make_sum_file(charter, current_round, answers, key)
            digest = hashlib.sha256(raw).hexdigest()
            if record.sums.get(str(slot), digest) != digest:
                problem = f"gives another sum than the one of round {slot} that was signed before"
                raise checks.error("answers", "", problem, "Use the answers of that sum.")
            write_atomically(self.folder / f"sum-{slot}.json", raw)
            if str(slot) not in record.sums:
                if slot > max(map(int, record.sums), default=-1):  # an older sum that comes late is not the newest
                    record.last_sum = digest
                record.sums[str(slot)] = digest
                self._save(record)
        return slot, raw

    def load_rounds(self) -> tuple[PlannedRound, ...]:
        """Load the rounds of all slots in order, failed ones included."""
        charter = self.charter
        with self._open() as record:
            slots = range(len(record.rounds))
            return tuple(PlannedRound(*self._read_round(record, charter, s), str(s) in record.sums) for s in slots)

    def load_sum(self, slot: int | None = None) -> NoisySum:
        """Load the sum of the round of ``slot``, by default of the newest round."""
        charter = self.charter
        with self._open() as record:
            slot = self._choose_slot(record, slot)
            if str(slot) not in record.sums:
                raise checks.error("round", slot, "has no sum", "Run `pate join sum` with the answers of all sites.")
            current_round, kind = self._read_round(record, charter, slot)
            raw = self._read(f"sum-{slot}.json", record.sums[str(slot)])
        body = raw.partition(b"\n")[2][: 8 * current_round.count]
        numbers = np.frombuffer(body, dtype="<i8").reshape(current_round.shape) / kind.unit_length
        sigma = float(current_round.share) * math.sqrt(len(charter.sites)) / kind.unit_length
        return NoisySum(current_round.digest.hex()[:16], slot, kind, numbers, sigma)

    def list_slots(self, slot: int) -> list[int]:
        """List the slots of the rounds that were planned together with the round of ``slot``, failed ones included."""
        rounds = [each.round for each in self.load_rounds()]
        return [other for other, each in enumerate(rounds) if each.files == rounds[slot].files]

    # ---- costs ------------------------------------------------------------------------------------------------------

    def compute_guarantees(self, slots: Iterable[int] | None = None) -> dict[int, Guarantee]:
        """Compute the guarantee of the rounds of these slots together against each number of colluding sites.

        Number 0 is the guarantee against readers who see the results only. If ``slots`` is None, all rounds of the
        charter count, failed rounds included. No site reserved more for this charter than the guarantee of number t.
        """
        charter, rounds, guarantees = self.charter, self._select_rounds(slots), {}
        terms, delta = charter.terms, float(Fraction(charter.terms.delta))
        for colluding in range(len(charter.sites)):
            events = _compute_events(charter, rounds, colluding)
            guarantees[colluding] = compute_guarantee(events, delta, adjacency=terms.adjacency, unit=terms.unit)
        return guarantees

    def compute_events(self, slots: Iterable[int]) -> tuple[PrivacyEvent, ...]:
        """Compute the privacy events of the rounds of these slots against t colluding sites and the joiner."""
        charter = self.charter
        return _compute_events(charter, self._select_rounds(slots), charter.terms.colluding)

    def _select_rounds(self, slots: Iterable[int] | None) -> Sequence[PlannedRound]:
        rounds = self.load_rounds()
        return rounds if slots is None else [rounds[slot] for slot in slots]

    # ---- files ------------------------------------------------------------------------------------------------------

    @property
    def _key_path(self) -> Path:
        return self.folder / "joiner.key"

    @property
    def _record_path(self) -> Path:
        return self.folder / "joiner.json"

    def _lock(self) -> FileLock:
        return FileLock(self.folder / ".lock", mode=0o600)

    @contextmanager
    def _open(self) -> Iterator[JoinerRecord]:
        if not self._record_path.exists():
            raise checks.error("folder", str(self.folder), "has no charter", "Run `pate join charter` first.")
        with self._lock():
            try:
                record = JoinerRecord(**json.loads(self._record_path.read_text()))
            except (TypeError, ValueError):
                raise checks.error("folder", str(self.folder), "its file joiner.json is damaged") from None
            yield record

    def _save(self, record: JoinerRecord) -> None:
        with atomic_replacement(self._record_path) as temporary:
            temporary.write_text(json.dumps(asdict(record), sort_keys=True))

    def _read(self, name: str, digest: str) -> bytes:
        return read_stored_file(self.folder / name, self.folder / f"{name}.pending", digest)

    def _read_round(self, record: JoinerRecord, charter: Charter, slot: int) -> tuple[Round, TableKind]:
        raw = self._read(f"round-{slot}.json", record.rounds[str(slot)])
        current_round = read_round(raw, charter, f"round-{slot}.json")
        ((name, digest),) = current_round.files.items()
        return current_round, check_public_file(charter, current_round, self._read(name, digest))

    def _choose_slot(self, record: JoinerRecord, slot: int | None) -> int:
        slot = max(map(int, record.rounds), default=-1) if slot is None else slot
        if str(slot) not in record.rounds:
            raise checks.error("round", slot, "was not asked", "Run `pate join ask` first.")
        return slot


def _compute_events(charter: Charter, rounds: Sequence[PlannedRound], colluding: int) -> tuple[PrivacyEvent, ...]:
    events = (each.kind.compute_events(charter, each.round.share, colluding) for each in rounds)
    return tuple(itertools.chain.from_iterable(events))


def calibrate_sigma(charter: Charter, kind: TableKind, epsilon: float) -> Fraction:
    """Compute the noise of H - t shares whose cost is at most ``epsilon``, close to the smallest such noise."""
    checks.positive("epsilon", epsilon)
    terms, num_sites = charter.terms, len(charter.sites)
    delta = float(Fraction(terms.delta))
    length = terms.max_sites_per_unit * math.sqrt(kind.compute_squared_length(terms.adjacency) * kind.num_rounds)
    smallest = length / gdp.compute_mu(epsilon, delta)
    for factor in _NOISE_FACTORS:
        sigma = Fraction(math.ceil(smallest * factor * _SIGMA_STEPS), _SIGMA_STEPS)
        share = compute_share(sigma, num_sites, terms.colluding)
        if compute_guarantee(kind.compute_events(charter, share) * kind.num_rounds, delta).epsilon <= epsilon:
            return sigma
    raise checks.error("epsilon", epsilon, f"is too small for delta={delta:g}", "Use a larger epsilon.")
