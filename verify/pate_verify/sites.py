"""Checks of a release of several sites: its charter, rounds and sums, and its cost against each number of sites.

Each of H sites adds a discrete Gaussian share to every number of its table. Against u colluding sites, the sum has the
noise of H - u shares. The cost follows from the charter and the round files alone, by code that no other package uses.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from mpmath import mp, mpf

from pate_verify.prices import EpsilonBounds, compute_bounds, compute_gaussian_epsilon
from pate_verify.release import RELATIVE_TOLERANCE, Check, ReleaseFolder, check_epsilon, make_check

PROTOCOL, ACCOUNTING, SAMPLER = "pate-sites-1", "shares 1", "discrete gaussian 1"
SIGNATURE_BYTES = 129  # hexadecimal digits and a line feed
UNIT_LENGTH, COUNT_LENGTH = 1 << 30, 1 << 28  # whole numbers in the length of one vector, and in one count
VECTOR_KINDS = ("class_sums", "gradients")
MIN_SHARE, TAIL_SDS = 3, 40
MAX_LAW_ERROR = 1e-9  # largest error of the law of the noise that is priced as Gaussian


@dataclass(frozen=True)
class SignedFile:
    """A file of the protocol: one line of JSON, a body, and an Ed25519 signature of both."""

    raw: bytes

    @cached_property
    def content(self) -> dict[str, Any]:
        """Content of the first line."""
        return dict(json.loads(self.raw.partition(b"\n")[0]))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.raw).hexdigest()

    def is_kind(self, kind: str, charter: str = "") -> bool:
        """Return whether the file has this kind, the length that it states, and this charter."""
        length = len(self.raw.partition(b"\n")[2]) - SIGNATURE_BYTES
        is_of_charter = not charter or self.content["charter"] == charter
        return self.content["format"] == f"{PROTOCOL} {kind}" and self.content["body_bytes"] == length and is_of_charter

    def is_signed_by(self, key: str) -> bool:
        """Return whether the file was signed with this key. Raises ImportError without cryptography."""
        exceptions = importlib.import_module("cryptography.exceptions")
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        signature = bytes.fromhex(self.raw[-SIGNATURE_BYTES:].decode())
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
                signature, self.raw[:-SIGNATURE_BYTES]
            )
        except exceptions.InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Protocol:
    """The files of the protocol in a release folder."""

    charter: SignedFile
    keys: tuple[SignedFile, ...]
    rounds: tuple[SignedFile, ...]
    publics: tuple[SignedFile, ...]
    sums: Mapping[int, SignedFile]

    @classmethod
    def load(cls, path: Path, num_rounds: int) -> Protocol:
        """Load the files, of which those of all rounds must be there."""

        def read(name: str) -> SignedFile:
            return SignedFile((path / name).read_bytes())

        charter, slots = read("charter.json"), range(num_rounds)
        keys = tuple(SignedFile(text.encode()) for text in charter.content["key_files"])
        rounds, publics = (tuple(read(f"round-{s}.{end}") for s in slots) for end in ("json", "public"))
        sums = {s: read(f"sum-{s}.json") for s in slots if (path / f"sum-{s}.json").exists()}
        return cls(charter, keys, rounds, publics, sums)


def check_sites(folder: ReleaseFolder) -> Iterator[Check]:
    """Check the files of the protocol, their signatures, and each epsilon."""
    trust, statement = folder.statement["trust"], folder.statement
    protocol = Protocol.load(folder.path, len(trust["rounds"]))
    yield _check_files(protocol, statement)
    yield _check_signatures(protocol)
    slots = [slot for slot, facts in enumerate(trust["rounds"]) if facts["used"]]
    prices, account = trust["prices"], statement["composition"]
    delta, t = statement["guarantee"]["delta"], trust["colluding"]
    for u, price in enumerate(prices):
        name = "results" if u == 0 else f"{u} sites"
        yield check_epsilon(name, price["epsilon"], compute_cost(protocol, slots, u, delta))
    yield check_epsilon("trust", statement["guarantee"]["epsilon"], compute_cost(protocol, slots, t, delta))
    total = compute_cost(protocol, range(len(protocol.rounds)), t, delta)
    yield check_epsilon("total", account["account_total"], total)
    others = {part["release_id"]: part for part in statement["other_releases"]}
    for slot, file in enumerate(protocol.rounds):
        if slot not in slots:
            epsilon = others.get(file.digest[:16], {"epsilon": -1.0})["epsilon"]
            yield check_epsilon(f"round {slot}", epsilon, compute_cost(protocol, [slot], t, delta))


def _check_files(protocol: Protocol, statement: Mapping[str, Any]) -> Check:
    """Compare charter, rounds, public files and sums with each other and with the statement."""
    trust, guarantee, run = statement["trust"], statement["guarantee"], statement["mechanism"]
    charter, digest, num_sites = protocol.charter, protocol.charter.digest, len(protocol.keys)
    terms, used = charter.content, [slot for slot, facts in enumerate(trust["rounds"]) if facts["used"]]
    results = {
        "charter": charter.is_kind("charter") and all(key.is_kind("key file") for key in protocol.keys),
        "charter_sha256": trust["charter_sha256"] == digest,
        "fingerprint": trust["fingerprint"].split() == encode_words(bytes.fromhex(digest)),
        "sites": [(site["name"], site["signing_key"]) for site in trust["sites"]]
        == [(key.content["site"], key.content["signing_key"]) for key in protocol.keys],
        "colluding": trust["colluding"] == terms["colluding"] <= num_sites - 2,
        "prices": [price["colluding"] for price in trust["prices"]] == [*range(num_sites)],
        "max_sites_per_unit": trust["max_sites_per_unit"] == terms["max_sites_per_unit"],
        "terms": (float(Fraction(terms["delta"])), terms["adjacency"], terms["unit"])
        == (guarantee["delta"], guarantee["adjacency"], guarantee["unit"]),
        "version": (terms["accounting"], terms["sampler"]) == (ACCOUNTING, SAMPLER),
        "used rounds": bool(used) and sorted(protocol.sums) == used,
        "guarantee": trust["prices"][terms["colluding"]]["epsilon"] == guarantee["epsilon"],
    }
    sums = {file.digest for file in protocol.sums.values()} | {"00" * 32}
    for slot, (file, public) in enumerate(zip(protocol.rounds, protocol.publics, strict=True)):
        asked, share, sigma = file.content, Fraction(file.content["share"]), Fraction(file.content["sigma"])
        results |= {
            f"round-{slot}.json": file.is_kind("round", digest) and asked["slot"] == slot,
            f"round {slot} (SHA-256)": file.digest == trust["rounds"][slot]["sha256"],
            f"round-{slot}.public": public.is_kind("public", digest) and public.content["kind"] == asked["kind"],
            f"round {slot} (public file)": [*asked["files"].values()].count(public.digest) == 1,
            f"round {slot} (share)": share >= MIN_SHARE and (num_sites - terms["colluding"]) * share**2 >= sigma**2,
        }
        if slot in used:
            results[f"round {slot} (mechanism)"] = asked["kind"] == run["name"]
    for slot, file in protocol.sums.items():
        answers, size = file.content["answers"], 8 * math.prod(protocol.rounds[slot].content["shape"])
        results[f"sum-{slot}.json"] = file.is_kind("sum", digest) and file.content["body_bytes"] == size
        results[f"sum {slot} (round)"] = file.content["round"] == protocol.rounds[slot].digest
        results[f"sum {slot} (answers)"] = len({*answers}) == len(answers) == num_sites
        previous = protocol.rounds[slot].content["previous"]
        results[f"sum {slot} (previous)"] = slot == used[0] or previous in sums - {"00" * 32}
    if used:
        asked, parameters = protocol.rounds[used[-1]].content, run["parameters"]
        length = UNIT_LENGTH if asked["kind"] in VECTOR_KINDS else COUNT_LENGTH
        sum_sigma = float(Fraction(asked["share"])) / length * math.sqrt(num_sites)
        results["share"] = parameters["share"] == asked["share"]
        results["sigma"] = math.isclose(parameters["sigma"], sum_sigma, rel_tol=RELATIVE_TOLERANCE)
    message = f"{num_sites} sites, t = {terms['colluding']}, {len(protocol.rounds)} rounds, one charter"
    return make_check("sites", results, "do not fit the statement or each other", message)


def _check_signatures(protocol: Protocol) -> Check:
    """Check the signature of every file, if cryptography is installed."""
    joiner_key = protocol.charter.content["joiner_key"]
    signed_files = {"charter.json": protocol.charter}
    signed_files |= {f"round {slot}": file for slot, file in enumerate(protocol.rounds)}
    signed_files |= {f"public {slot}": file for slot, file in enumerate(protocol.publics)}
    signed_files |= {f"sum {slot}": file for slot, file in protocol.sums.items()}
    try:
        results = {name: file.is_signed_by(joiner_key) for name, file in signed_files.items()}
        results |= {k.content["site"]: k.is_signed_by(k.content["signing_key"]) for k in protocol.keys}
    except ImportError as error:
        message = f"needs cryptography: pip install cryptography ({error})"
        return Check("signatures", True, message, is_checked=False)
    return make_check("signatures", results, "are wrong", f"{len(results)} Ed25519 signatures")


def compute_cost(protocol: Protocol, slots: Sequence[int], colluding: int, delta: float) -> EpsilonBounds:
    """Bound epsilon of some rounds together against some colluding sites.

    The sum of n discrete Gaussian shares s is a discrete Gaussian number up to a factor exp(tau/2) (Kairouz, Liu &
    Steinke 2021), which is a rounded Gaussian number up to exp((T^2 + 1)/(8 n s^2)) within T standard deviations. The
    rounded number is exactly mu-GDP. With eta, the sum of these exponents over all numbers, and the probability beta of
    the tails, (e, d) of mu-GDP becomes (e + 2 eta, exp(eta) d + (1 + exp(e + eta)) beta).
    """
    num_sites, max_sites = len(protocol.keys), protocol.charter.content["max_sites_per_unit"]
    with mp.workdps(50):
        mu2, eta, beta = mpf(0), mpf(0), mpf(0)
        for slot in slots:
            content, share = protocol.rounds[slot].content, Fraction(protocol.rounds[slot].content["share"])
            honest, count = num_sites - colluding, math.prod(content["shape"])
            variance = mpf(share.numerator) ** 2 / share.denominator**2 * honest
            tau = sum(10 * mp.exp(-2 * mp.pi**2 * variance / honest * k / (k + 1)) for k in range(1, honest))
            mu2 += max_sites**2 * compute_squared_length(protocol, slot) / variance
            eta += count * ((TAIL_SDS**2 + 1) / (8 * variance) + tau / 2)
            beta += 4 * count * mp.exp(-(mpf(TAIL_SDS) ** 2) / 2)
        mu = float(mp.sqrt(mu2))
        if eta > MAX_LAW_ERROR:  # coarse noise is charged as zCDP
            return compute_bounds([{"kind": "zcdp", "rho": float(mu2 / 2), "count": 1}], delta)
        tail = (1 + mp.exp(compute_gaussian_epsilon(mu, delta) + 1)) * beta
        epsilon = compute_gaussian_epsilon(mu, float((mpf(delta) - tail) / mp.exp(eta))) + float(2 * eta)
    return EpsilonBounds(epsilon, epsilon, f"H - u = {num_sites - colluding} shares, exact Gaussian")


def compute_squared_length(protocol: Protocol, slot: int) -> int:
    """Compute the squared length of the largest change of a round's table by one unit at one site.

    A vector is replaced by any other of its length; a count moves to another place of its table.
    """
    replaces_one = protocol.charter.content["adjacency"] == "replace_one"
    kind, shape = protocol.rounds[slot].content["kind"], protocol.rounds[slot].content["shape"]
    if kind in VECTOR_KINDS:
        return (1 + replaces_one) ** 2 * UNIT_LENGTH**2
    if kind == "votes":  # a vote of one teacher moves, for every question
        return 2 * int(shape[0]) * COUNT_LENGTH**2
    num_tables = count_tables(json.loads(protocol.publics[slot].content["facts"])) if kind == "marginals" else 1
    if kind not in ("histogram", "marginals"):
        raise ValueError(f"round {slot} has the unknown kind {kind!r}")
    return (1 + replaces_one) * num_tables * COUNT_LENGTH**2


def count_tables(facts: Mapping[str, Any]) -> int:
    """Count the marginal tables: the target with 1 to ``order`` other columns, or all sets of 2 to ``order`` + 1."""
    has_target, order = facts["domain"].get("target") is not None, facts["order"]
    num_columns = len(facts["domain"]["columns"]) - has_target
    sizes = range(1 if has_target else 2, order + (1 if has_target else 2))
    return sum(math.comb(num_columns, size) for size in sizes)


def encode_words(digest: bytes) -> list[str]:
    """Encode 256 bits and 8 bits of their SHA-256 as 24 words (BIP 39)."""
    words = files("pate_verify").joinpath("words.txt").read_text("ascii").split()
    bits = "".join(f"{byte:08b}" for byte in digest + hashlib.sha256(digest).digest()[:1])
    return [words[int(bits[start : start + 11], 2)] for start in range(0, len(bits), 11)]
