"""Checks of a release of several sites: its charter, rounds and sums, and its cost against each number of sites.

Each of H sites adds a discrete Gaussian share to every number of its table. Against u colluding sites, the sum has the
noise of H - u shares. The cost follows from the charter and the round files alone, by code that no other package uses.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

from mpmath import mp, mpf

from pate_verify.costs import EpsilonBounds, compute_gaussian_epsilon
from pate_verify.release import RELATIVE_TOLERANCE, Check, ReleaseFolder, check_epsilon, make_check, parse_json

PROTOCOL, VERSIONS = "pate-sites-1", ("shares 1", "discrete gaussian 1")
SIGNATURE_BYTES = 129  # hexadecimal digits and a line feed
UNIT_LENGTH, COUNT_LENGTH = 1 << 30, 1 << 28  # whole numbers that stand for a vector of length 1, and for one count
ZERO_DIGEST = "0" * 64  # in place of the newest sum, if there is none
MIN_SHARE = 3  # smallest parameter of a share for which ``Protocol.bound_cost`` holds
TAIL_SDS, MAX_LAW_ERROR = 40, 1e-9  # T and the largest eta in ``Protocol.bound_cost``
MECHANISMS = {"histogram": "histogram", "marginals": "marginals", "votes": "gaussian"}
MECHANISMS |= dict.fromkeys(("class_sums", "gradients"), "gradient_descent")
"""Kind of a table -> mechanism in the statement."""


@dataclass
class SignedFile:
    """A file of the protocol: one line of JSON, a body, and an Ed25519 signature of both.

    Attributes:
        kind: Kind that the file must have.
        raw: Bytes of the file.
        content: Content of the first line.
        digest: SHA-256 of the file.
    """

    kind: str
    raw: bytes
    content: dict[str, Any] = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        header, _, rest = self.raw.partition(b"\n")
        self.content, self.digest = dict(parse_json(header)), hashlib.sha256(self.raw).hexdigest()
        stated = self.content["format"], self.content["body_bytes"]
        if stated != (f"{PROTOCOL} {self.kind}", len(rest) - SIGNATURE_BYTES):
            raise ValueError(f"a {self.kind} has another kind or length than it states")

    def is_signed_by(self, key: str) -> bool:
        """Return whether the file was signed with this key. Raises ImportError without cryptography."""
        exceptions = importlib.import_module("cryptography.exceptions")
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        signature, signed_part = bytes.fromhex(self.raw[-SIGNATURE_BYTES:].decode()), self.raw[:-SIGNATURE_BYTES]
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, signed_part)
        except exceptions.InvalidSignature:
            return False
        return True


class Protocol:
    """The files of the protocol in a release folder: charter, key files, and the files of the rounds by slot."""

    def __init__(self, path: Path, rounds: Sequence[Mapping[str, Any]]) -> None:
        self.slots = [slot for slot, facts in enumerate(rounds) if facts["used"]]
        self.charter = SignedFile("charter", (path / "charter.json").read_bytes())
        self.keys = [SignedFile("key file", text.encode()) for text in self.charter.content["key_files"]]
        slots = range(len(rounds))
        self.rounds = [SignedFile("round", (path / f"round-{slot}.json").read_bytes()) for slot in slots]
        # Several rounds may share a public file. Only names of the release folder are read.
        names = [Path(next(iter(file.content["files"]))).name for file in self.rounds]
        self.publics = [SignedFile("public", (path / name).read_bytes()) for name in names]
        self.sums = {slot: SignedFile("sum", (path / f"sum-{slot}.json").read_bytes()) for slot in self.slots}

    def compute_squared_length(self, slot: int) -> int:
        """Compute the squared L2 sensitivity of a round's table to one unit at one site, in its whole numbers.

        Under replace_one, a vector is replaced by another vector of at most its length, and a count moves to another
        place of its table.
        """
        vectors = 2 if self.charter.content["adjacency"] == "replace_one" else 1
        match self.rounds[slot].content["kind"]:
            case "class_sums":
                return vectors**2 * UNIT_LENGTH**2
            case "gradients":  # clipped to this length in every round
                clip = Fraction(parse_json(self.publics[slot].content["facts"])["clip_norm"])
                return math.ceil(vectors * UNIT_LENGTH * clip) ** 2
            case "votes":  # one teacher changes its vote on every question
                return 2 * int(self.rounds[slot].content["shape"][0]) * COUNT_LENGTH**2
            case "histogram":
                return vectors * COUNT_LENGTH**2
        return vectors * count_tables(parse_json(self.publics[slot].content["facts"])) * COUNT_LENGTH**2

    def bound_cost(self, slots: Sequence[int], colluding: int, delta: float) -> EpsilonBounds:
        """Bound epsilon of the rounds of ``slots`` together against ``colluding`` sites.

        The sum of n discrete Gaussian shares s is a discrete Gaussian number (Kairouz, Liu & Steinke 2021: up to a
        factor 1 + 1e-36 for s >= 3), which equals a rounded Gaussian number up to a factor exp((T^2 + 1)/(8 n s^2))
        within T standard deviations, and the rest has a probability below 1e-340. The rounded number is mu-GDP. If eta
        is the sum of these exponents over all numbers, (e, d) of mu-GDP becomes (e + 2 eta, exp(eta) d).
        """
        honest, max_sites = len(self.keys) - colluding, self.charter.content["max_sites_per_unit"]
        with mp.workdps(50):
            mu2, eta = mpf(0), mpf(0)
            for slot in slots:
                content = self.rounds[slot].content
                share = Fraction(content["share"])
                variance = honest * (mpf(share.numerator) / share.denominator) ** 2
                mu2 += max_sites**2 * self.compute_squared_length(slot) / variance
                eta += math.prod(content["shape"]) * (TAIL_SDS**2 + 1) / (8 * variance)
            if eta > MAX_LAW_ERROR:  # charged as zCDP, which is more
                eta = mpf(0)
            epsilon = float(2 * eta) + compute_gaussian_epsilon(float(mp.sqrt(mu2)), float(delta * mp.exp(-eta)))
        return EpsilonBounds(epsilon, epsilon, f"shares of {_count(honest, 'site')}, exact Gaussian")


def check_sites(folder: ReleaseFolder) -> Iterator[Check]:
    """Check the files of the protocol, their signatures, and each epsilon against the charter and the round files."""
    trust, statement = folder.statement["trust"], folder.statement
    protocol, t, delta = Protocol(folder.path, trust["rounds"]), trust["colluding"], statement["guarantee"]["delta"]
    yield _check_protocol(protocol, statement)
    yield from _check_unused_rounds(protocol)
    yield _check_signatures(protocol)
    for cost in trust["costs"]:
        bounds = protocol.bound_cost(protocol.slots, cost["colluding"], delta)
        yield check_epsilon(f"t = {cost['colluding']}", cost["epsilon"], bounds)
    claims = {"guarantee": (statement["guarantee"]["epsilon"], protocol.slots)}
    claims["account"] = statement["composition"]["account_total"], [*range(len(protocol.rounds))]
    other_epsilons = {part["release_id"]: part["epsilon"] for part in statement["other_releases"]}
    for slot in {*range(len(protocol.rounds))} - {*protocol.slots}:
        claims[f"round {slot}"] = other_epsilons.get(protocol.rounds[slot].digest[:16], -1), [slot]
    for name, (epsilon, slots) in claims.items():
        yield check_epsilon(name, epsilon, protocol.bound_cost(slots, t, delta))


def _check_protocol(protocol: Protocol, statement: Mapping[str, Any]) -> Check:
    """Compare the charter, the rounds and the sums with each other and with the statement."""
    trust, guarantee, parameters = statement["trust"], statement["guarantee"], statement["mechanism"]["parameters"]
    charter, terms, num_sites = protocol.charter.digest, protocol.charter.content, len(protocol.keys)
    stated_terms = guarantee["delta"], guarantee["adjacency"], guarantee["unit"]
    named_keys = [(key.content["site"], key.content["signing_key"]) for key in protocol.keys]
    results = {
        "charter_sha256": trust["charter_sha256"] == charter,
        "fingerprint": trust["fingerprint"].split() == encode_words(bytes.fromhex(charter)),
        "sites": [(site["name"], site["signing_key"]) for site in trust["sites"]] == named_keys,
        "colluding": trust["colluding"] == terms["colluding"] <= num_sites - 2,
        "costs": [cost["colluding"] for cost in trust["costs"]] == [*range(num_sites)],
        "max_sites_per_unit": trust["max_sites_per_unit"] == terms["max_sites_per_unit"],
        "terms": (float(Fraction(terms["delta"])), terms["adjacency"], terms["unit"]) == stated_terms,
        "version": (terms["accounting"], terms["sampler"]) == VERSIONS,
        "used rounds": bool(protocol.slots),
        **_compare_rounds(protocol, trust["rounds"]),
    }
    for slot, file in protocol.sums.items():
        asked, numbers = protocol.rounds[slot].content, 8 * math.prod(protocol.rounds[slot].content["shape"])
        is_whole = file.content["body_bytes"] == numbers and len({*file.content["answers"]}) == num_sites
        results[f"sum-{slot}.json"] = file.content["round"] == protocol.rounds[slot].digest and is_whole
        results[f"charter of sum {slot}"] = file.content["charter"] == charter
        unit = UNIT_LENGTH if MECHANISMS[asked["kind"]] == "gradient_descent" else COUNT_LENGTH
        sigma = math.sqrt(num_sites) * float(Fraction(asked["share"])) / unit
        results["mechanism"] = MECHANISMS[asked["kind"]] == statement["mechanism"]["name"]
        results["noise"] = parameters["share"] == asked["share"]  # of the newest round
        results["noise"] &= math.isclose(parameters["sigma"], sigma, rel_tol=RELATIVE_TOLERANCE)
    message = f"{num_sites} sites, t = {terms['colluding']}, {_count(len(protocol.rounds), 'round')} of one charter"
    return make_check("sites", results, "do not fit", message)


def _compare_rounds(protocol: Protocol, stated: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Compare each round file with its public file, with the charter, and with the facts in the statement."""
    charter, terms, results = protocol.charter.digest, protocol.charter.content, dict[str, bool]()
    honest = len(protocol.keys) - terms["colluding"]
    for slot, (file, public) in enumerate(zip(protocol.rounds, protocol.publics, strict=True)):
        asked, share = file.content, Fraction(file.content["share"])
        results |= {
            f"round-{slot}.json": file.digest == stated[slot]["sha256"] and asked["slot"] == slot,
            f"round-{slot}.public": public.digest in asked["files"].values()
            and public.content["kind"] == asked["kind"],
            f"charter of round {slot}": asked["charter"] == public.content["charter"] == charter,
            f"share of round {slot}": honest * share**2 >= Fraction(asked["sigma"]) ** 2 and share >= MIN_SHARE,
        }
    return results


def _check_unused_rounds(protocol: Protocol) -> Iterator[Check]:
    """Check that no round without a sum in the folder had one, if a used round was planned together with it.

    A round names the newest sum at its time. If that sum is not in the folder, it is that of an unused round in an
    earlier slot, behind the newest sum in the folder that was named before. Rounds of one plan share a public file.
    """
    slot_by_sum = {file.digest: slot for slot, file in protocol.sums.items()}
    used_files = [protocol.rounds[slot].content["files"] for slot in protocol.slots]
    newest, hidden, unclear = -1, dict[str, bool](), []
    for slot, file in enumerate(protocol.rounds):
        if (previous := file.content["previous"]) in slot_by_sum:
            newest = max(newest, slot_by_sum[previous])
        elif previous != ZERO_DIGEST:
            candidates = [s for s in range(newest + 1, slot) if s not in protocol.slots]
            is_planned = [protocol.rounds[s].content["files"] in used_files for s in candidates]
            hidden[f"the sum before round {slot}"] = not all(is_planned)
            unclear += [str(slot)] if any(is_planned) else []
    if not all(hidden.values()):
        yield make_check("unused", hidden, "belongs to a round that was used", "")
    elif unclear:
        message = f"the sum before round {', '.join(unclear)} may belong to a round that was used"
        yield Check("unused", True, message, is_checked=False)


def _check_signatures(protocol: Protocol) -> Check:
    """Check the signature of every file, if cryptography is installed."""
    joiner = protocol.charter.content["joiner_key"]
    signers = [
        (file, joiner) for file in (protocol.charter, *protocol.rounds, *protocol.publics, *protocol.sums.values())
    ]
    signers += [(file, file.content["signing_key"]) for file in protocol.keys]
    try:
        results = {f"{file.kind} {file.digest[:8]}": file.is_signed_by(key) for file, key in signers}
    except ImportError as error:
        return Check("signatures", True, f"needs cryptography: pip install cryptography ({error})", is_checked=False)
    return make_check("signatures", results, "are wrong", f"{len(results)} Ed25519 signatures")


def count_tables(facts: Mapping[str, Any]) -> int:
    """Count the marginal tables: the target with 1 to ``order`` other columns, or all sets of 2 to ``order`` + 1."""
    has_target = facts["domain"].get("target") is not None
    num_columns, smallest = len(facts["domain"]["columns"]) - has_target, 1 if has_target else 2
    return sum(math.comb(num_columns, size) for size in range(smallest, smallest + facts["order"]))


def encode_words(digest: bytes) -> list[str]:
    """Encode 256 bits and 8 bits of their SHA-256 as 24 words (BIP 39)."""
    words = files("pate_verify").joinpath("words.txt").read_text("ascii").split()
    bits = "".join(f"{byte:08b}" for byte in digest + hashlib.sha256(digest).digest()[:1])
    return [words[int(bits[start : start + 11], 2)] for start in range(0, len(bits), 11)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
