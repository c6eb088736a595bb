"""Rounds: the joiner's round file, the answers of the sites, and the file of their sum.

The order of steps at a site is fixed. The site checks the round file, erases the keys of its slot durably, draws its
share of noise, writes the answer durably, stores the hash of the answer, and gives the answer its name. If the program
dies before the hash is stored, the slot is spent and the round is lost. Once the hash is stored, the same round file
gives the same bytes again. No noise is drawn twice for a slot, because the difference of two such answers has no masks.
"""

from __future__ import annotations

import hashlib
import math
import secrets as entropy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pate_torch.core import checks
from pate_torch.privacy.noise import MAX_LARGE_SCALE
from pate_torch.sites import masks, signed
from pate_torch.sites.charter import MAX_SITES, Charter
from pate_torch.sites.keys import MAX_NUM_SLOTS, Secrets, SiteState
from pate_torch.sites.pairs import load_charter, take_slot
from pate_torch.sites.shares import check_share, compute_share
from pate_torch.sites.signed import ZERO_DIGEST, SignedFile, is_hex, is_integer, is_list_of, is_mapping_of, is_one_of

KINDS = ("class_sums", "gradients", "histogram", "marginals", "votes")
"""Kinds of tables that can be added up over sites."""
MAX_INPUT = float(1 << 40)
"""Largest absolute value of a number that the joiner sends."""
MAX_NUMBERS = 1 << 24
"""Largest number of entries of a table."""
_MARGIN_SDS = 12  # standard deviations of the noise between the largest sum and the modulus
_is_shape = is_list_of(is_integer(1, MAX_NUMBERS), 1, 3)
_ROUND_FIELDS = {
    "slot": is_integer(0, MAX_NUM_SLOTS - 1),
    "nonce": is_hex(16),
    "previous": is_hex(32),
    "kind": is_one_of(*KINDS),
    "shape": _is_shape,
    "bound": is_integer(0, (1 << 63) - 1),
    "sigma": signed.is_positive_fraction,
    "share": signed.is_positive_fraction,
    "options": is_mapping_of(lambda value: signed.is_text(value) or is_integer(-(1 << 53), 1 << 53)(value)),
    "files": is_mapping_of(is_hex(32)),
}
_ANSWER_FIELDS = {
    "round": is_hex(32),
    "place": is_integer(0, MAX_SITES - 1),
    "answered": is_integer(1, MAX_NUM_SLOTS),
}
_SUM_FIELDS = {"round": is_hex(32), "answers": is_list_of(is_hex(32), high=MAX_SITES)}


@dataclass(frozen=True, kw_only=True)
class Round:
    """What the joiner asks all sites in one round.

    Attributes:
        slot: Number of the slot that this round uses at every site.
        kind: Kind of the table, one of ``KINDS``.
        shape: Shape of the table.
        bound: Upper bound on the absolute value of each number in the sum of all tables, without noise.
        sigma: Standard deviation that the noise of H - t shares must have, in the whole numbers of the table.
        share: Parameter (standard deviation) of each site's share of noise, in the whole numbers of the table.
        previous: SHA-256 of the newest sum file. Zeros if there is none.
        options: Further settings of the round by name, such as the length of a step.
        files: SHA-256 of public files that the sites read, by name.
        body: Numbers that the sites read, such as weights, float64.
        digest: SHA-256 of the round file. Empty if there is no file yet.
    """

    slot: int
    kind: str
    shape: tuple[int, ...]
    bound: int
    sigma: Fraction
    share: Fraction
    previous: str = ZERO_DIGEST
    options: Mapping[str, str | int] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    body: np.ndarray = field(default_factory=lambda: np.empty(0))
    digest: bytes = b""

    @property
    def public_name(self) -> str:
        """Name of the public file, which lies beside the round file. Several rounds may share it."""
        if len(self.files) != 1:
            raise checks.error("round", self.slot, "names no public file", "Ask the joiner for another round.")
        return next(iter(self.files))

    @property
    def count(self) -> int:
        """Number of entries of the table."""
        return math.prod(self.shape)


def make_round(charter: Charter, joiner_key: Ed25519PrivateKey, *, sigma: Fraction, **fields: Any) -> bytes:
    """Make the signed file of a round, with the smallest shares for ``sigma`` and further fields of ``Round``."""
    share = compute_share(sigma, len(charter.sites), charter.terms.colluding)
    values = vars(Round(sigma=sigma, share=share, **fields)) | {"nonce": entropy.token_hex(16)}
    del values["digest"]
    body = values.pop("body").astype("<f8")
    values |= {"shape": list(values["shape"]), "sigma": str(sigma), "share": str(share)}
    raw = charter.make_file("round", values, joiner_key, body.tobytes())
    read_round(raw, charter)
    return raw


def read_round(raw: bytes, charter: Charter, source: str = "") -> Round:
    """Read a round file and check its signature, its noise and its numbers."""
    file = charter.read_file(raw, "round", _ROUND_FIELDS, source)
    values = {name: value for name, value in file.content.items() if name not in ("charter", "nonce")}
    if values["slot"] >= charter.num_slots:
        problem = f"uses slot {values['slot']}, and the charter has {charter.num_slots} slots"
        raise file.make_error(problem, "Make a new charter with new keys.")
    if len(file.body) % 8:
        raise file.make_error("has a part of a number at its end")
    body = np.frombuffer(file.body, dtype="<f8")
    if not (np.abs(body) <= MAX_INPUT).all():  # which no NaN satisfies
        raise file.make_error("has numbers that are not finite or exceed 2^40", "No site answers such a round.")
    values |= {name: Fraction(values[name]) for name in ("sigma", "share")} | {"shape": tuple(values["shape"])}
    current_round = Round(body=body, digest=bytes.fromhex(file.digest), **values)
    num_sites, share = len(charter.sites), current_round.share
    check_share(share, current_round.sigma, num_sites, charter.terms.colluding)
    if share > MAX_LARGE_SCALE or current_round.count > MAX_NUMBERS:
        raise file.make_error("has a share of noise above 2^50, or more than 2^24 numbers", "Ask for a smaller table.")
    room = (1 << (masks.BITS - 1)) - current_round.bound
    if room <= 0 or room**2 <= _MARGIN_SDS**2 * num_sites * share**2:
        raise file.make_error("has sums or noise that do not fit the bits of its numbers", "Use less noise.")
    return current_round


# ---- at a site -------------------------------------------------------------------------------------------------------


def open_round(state: SiteState, round_file: bytes, source: str = "") -> tuple[Round, bytes | None]:
    """Check a round file before anything is charged, and return the round and the answer of this site, if it has one.

    Raises:
        ValueError: The site must not answer this round. Nothing was charged, and no key was erased.
    """
    with state.open() as secrets:
        return _open_round(state, secrets, load_charter(state, secrets), round_file, source)


def _open_round(
    state: SiteState, secrets: Secrets, charter: Charter, round_file: bytes, source: str
) -> tuple[Round, bytes | None]:
    if secrets.kem_seed:
        fix = "Give the file that `pate join keys` wrote (--keys keys.json)."
        raise checks.error("round", source, "cannot be answered before the keys of all pairs are there", fix)
    current_round = read_round(round_file, charter, source)
    slot, digest = str(current_round.slot), current_round.digest.hex()
    if secrets.rounds.get(slot) == digest:
        if slot not in secrets.answers:
            problem = f"was begun in slot {slot} and not finished, so its answer is lost"
            raise checks.error("round", source, problem, "The joiner must ask anew in the next slot.")
        return current_round, state.finish_pending(f"answer {slot}", secrets.answers[slot])
    if slot in secrets.rounds:
        problem = f"uses slot {slot}, which this site spent on another round"
        raise checks.error("round", source, problem, "The joiner must use a new slot.")
    if current_round.slot < secrets.next_slot:
        problem = f"uses slot {slot}, which was passed over; its key is erased"
        raise checks.error("round", source, problem, f"The joiner must use slot {secrets.next_slot} or a later one.")
    if current_round.previous != secrets.last_sum:
        problem = "names another last sum than the one that this site holds"
        raise checks.error("round", source, problem, "Give this site the newest sum file first (--sum).")
    return current_round, None


def answer(
    state: SiteState, round_file: bytes, table: Any, *, draw: Callable[[Fraction, int], np.ndarray], source: str = ""
) -> bytes:
    """Add this site's share of noise and its masks to a table, and return the signed answer.

    A round that was answered gives the same bytes again.

    Args:
        state: State of the site.
        round_file: Bytes of the round file.
        table: PRIVATE. Table of integers without noise, of the round's shape.
        draw: Function that reserves the cost and draws the noise, int64 [count], given the share and the count.
        source: Name of the round file in messages.
    """
    with state.open() as secrets:
        charter = load_charter(state, secrets)
        current_round, finished_answer = _open_round(state, secrets, charter, round_file, source)
        if finished_answer is not None:
            return finished_answer
        values = _check_table(table, current_round)
        slot, place = str(current_round.slot), secrets.place
        private_key, slot_secrets = take_slot(secrets, current_round.slot)
        secrets.rounds[slot] = current_round.digest.hex()
        state.save(secrets)  # the slot is spent
        noise = draw(current_round.share, current_round.count)
        # Not an assert, because the guarantee depends on this check, and python -O drops asserts.
        if noise.dtype != np.int64 or noise.shape != values.shape:
            raise TypeError(f"noise: must be one int64 for each number, and is {noise.dtype} {noise.shape}")
        pair_masks = {}
        for peer, slot_secret in slot_secrets.items():
            peer_key = charter.sites[peer].slot_keys[current_round.slot]
            key = masks.derive_mask_key(
                masks.compute_shared_secret(private_key, peer_key) + slot_secret,
                charter=charter.digest,
                round_digest=current_round.digest,
                places=(min(place, peer), max(place, peer)),
                count=current_round.count,
                ciphertext=bytes.fromhex(secrets.ciphertexts[str(peer)]),
            )
            pair_masks[peer] = masks.expand_mask(key, current_round.count)
        if pair_masks.keys() != set(range(len(charter.sites))) - {place}:
            raise RuntimeError("masks: the site lacks the secret of a pair")
        masked = masks.apply_masks(values + noise, pair_masks, place)
        content = {"round": secrets.rounds[slot], "place": place, "answered": len(secrets.answers) + 1}
        body = masked.astype("<u8").tobytes()
        raw = charter.make_file("answer", content, secrets.signer, body)
        state.write_pending(f"answer {slot}", raw)
        secrets.answers[slot] = hashlib.sha256(raw).hexdigest()
        state.save(secrets)
        return state.finish_pending(f"answer {slot}", secrets.answers[slot])


def _check_table(table: Any, current_round: Round) -> np.ndarray:
    """Return the table as a row of int64. Errors show its type and shape only, because its values are private."""
    array = np.asarray(table)
    if array.dtype.kind not in "iu":
        raise checks.error("table", array.dtype.name, "must hold whole numbers", "Round each record before the sum.")
    if array.shape != current_round.shape:
        raise checks.error("table", array.shape, f"must have the shape {current_round.shape} of the round")
    return array.astype(np.int64).reshape(-1)


def accept_sum(state: SiteState, sum_file: bytes, source: str = "") -> np.ndarray:
    """Store the hash of a sum file, which the next round file must name. Return the noisy sum as a row of int64."""
    with state.open() as secrets:
        charter = load_charter(state, secrets)
        file = charter.read_file(sum_file, "sum", _SUM_FIELDS, source)
        if len(file.content["answers"]) != len(charter.sites) or len(file.body) % 8:
            raise file.make_error("must name one answer for each site, and hold whole numbers of 8 bytes")
        digest = file.content["round"]
        slot = next((slot for slot, other in secrets.rounds.items() if other == digest), None)
        if slot is None or file.content["answers"][secrets.place] != secrets.answers.get(slot):
            raise file.make_error("does not contain the answer that this site wrote")
        if secrets.sums.get(digest, file.digest) != file.digest:
            raise file.make_error("is a second, different sum of a round", "Ask the other sites which sum they hold.")
        if digest not in secrets.sums:
            answered = [int(number) for number, other in secrets.rounds.items() if other in secrets.sums]
            secrets.sums[digest] = file.digest
            if int(slot) > max(answered, default=-1):  # an older sum that comes late is not the newest
                secrets.last_sum = file.digest
            state.save(secrets)
        return np.frombuffer(file.body, dtype="<i8")


# ---- at the joiner ---------------------------------------------------------------------------------------------------


def sum_answers(
    charter: Charter, current_round: Round, answers: Mapping[str, bytes]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Add up the answers of all sites, {name in messages: bytes}.

    Returns:
        The noisy sum, int64, in the round's shape; and the SHA-256 of each answer, in the order of the sites.

    Raises:
        ValueError: An answer is missing, double, altered, or of another round.
    """
    files: dict[int, SignedFile] = {}
    for source, raw in answers.items():
        file = _read_answer(charter, current_round, raw, source)
        if file.content["place"] in files:
            name = charter.sites[file.content["place"]].site
            raise file.make_error(f"is the second answer of {name}", "Give one answer for each site.")
        files[file.content["place"]] = file
    missing = [site.site for place, site in enumerate(charter.sites) if place not in files]
    if missing:
        fix = "The masks cancel only in the sum over all sites: wait for them. A new round is charged again."
        raise checks.error("sites", ", ".join(missing), "have not answered this round", fix)
    total = np.zeros(current_round.count, np.uint64)
    for file in files.values():
        total += np.frombuffer(file.body, dtype="<u8")
    numbers = total.view(np.int64).reshape(current_round.shape)
    return numbers, tuple(files[place].digest for place in range(len(charter.sites)))


def _read_answer(charter: Charter, current_round: Round, raw: bytes, source: str) -> SignedFile:
    file = charter.read_file(raw, "answer", _ANSWER_FIELDS, source)
    site = charter.sites[file.content["place"]]
    if file.content["round"] != current_round.digest.hex():
        raise file.make_error("answers another round file", f"Ask {site.site} for its answer to this round.")
    if len(file.body) != 8 * current_round.count:
        raise file.make_error("has a wrong number of numbers", f"Ask {site.site} for the file again.")
    return file


def make_sum_file(
    charter: Charter, current_round: Round, answers: Mapping[str, bytes], joiner_key: Ed25519PrivateKey
) -> bytes:
    """Add up the answers of all sites, and sign the sum together with the hashes of the answers."""
    numbers, digests = sum_answers(charter, current_round, answers)
    content = {"round": current_round.digest.hex(), "answers": list(digests)}
    return charter.make_file("sum", content, joiner_key, numbers.astype("<i8").tobytes())
