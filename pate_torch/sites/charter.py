"""The charter, which states the sites, their keys and the terms; and the fingerprint of the charter as 24 words.

The joiner writes and signs the charter. Each site checks the charter, and people compare its fingerprint by voice or on
paper, without the joiner. One comparison covers the keys of all pairs of sites, because the fingerprint is the SHA-256
of all bytes of the charter. With a shorter fingerprint, the joiner could search for two charters with the same one.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from pate_torch.core import checks
from pate_torch.privacy.accounts import check_unit
from pate_torch.privacy.records import ADJACENCIES
from pate_torch.sites import signed
from pate_torch.sites.keys import KeyFile, read_key_file
from pate_torch.sites.shares import ACCOUNTING, SAMPLER
from pate_torch.sites.signed import SignedFile, is_hex, is_integer, is_list_of, is_one_of, is_text

MIN_SITES, MAX_SITES = 2, 1000
NUM_WORDS = 24
_BITS_PER_WORD = 11
_FIELD_PRIME = (1 << 255) - 19
_MAX_RECORDS = (1 << 22) - 1


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a charter, to which every site agrees by its confirmation.

    Attributes:
        colluding: Largest number t of sites that may collude with the joiner, 0 to H - 2.
        adjacency: Neighboring relation, within one site.
        unit: Kind of the privacy unit.
        delta: Delta of all statements, a fraction in lowest terms, such as "1/100000".
        classes: Number of classes.
        max_records: Upper bound on the number of records at all sites together.
        max_sites_per_unit: Largest number M of sites at which one unit has records. It is declared and not checked.
        teachers: Number of teachers at each site, in the order of the sites. Zeros if there are no teachers.
        records: Number of records at each site, which is public under replace_one. Zeros under add_remove.
        sampler: Version of the sampler of noise.
        accounting: Version of the costs of shares.
    """

    colluding: int
    adjacency: str
    unit: str
    delta: str
    classes: int
    max_records: int
    max_sites_per_unit: int
    teachers: tuple[int, ...]
    records: tuple[int, ...]
    sampler: str = SAMPLER
    accounting: str = ACCOUNTING


_TERM_FIELDS = {
    "colluding": is_integer(0, MAX_SITES - 2),
    "adjacency": is_one_of(*ADJACENCIES),
    "unit": is_text,
    "delta": lambda value: signed.is_positive_fraction(value) and Fraction(value) < 1,
    "classes": is_integer(2, 1 << 20),
    "max_records": is_integer(1, _MAX_RECORDS),
    "max_sites_per_unit": is_integer(1, MAX_SITES),
    "teachers": is_list_of(is_integer(0, _MAX_RECORDS)),
    "records": is_list_of(is_integer(0, _MAX_RECORDS)),
    "sampler": is_one_of(SAMPLER),
    "accounting": is_one_of(ACCOUNTING),
}
_CHARTER_FIELDS = {
    "joiner_key": is_hex(32),
    "key_files": is_list_of(lambda value: isinstance(value, str) and value.isascii()),
    **_TERM_FIELDS,
}


@dataclass(frozen=True)
class Charter:
    """A charter whose keys, terms and signatures were checked."""

    sites: tuple[KeyFile, ...]
    terms: Terms
    joiner_key: bytes
    raw: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of the charter's bytes, the fingerprint."""
        return hashlib.sha256(self.raw).digest()

    @property
    def num_slots(self) -> int:
        """Number of slots of each site."""
        return len(self.sites[0].slot_keys)

    def make_file(
        self, kind: str, content: Mapping[str, Any], signing_key: Ed25519PrivateKey, body: bytes = b""
    ) -> bytes:
        """Make a signed file that belongs to this charter and is refused under any other charter."""
        return signed.make_file(kind, {"charter": self.digest.hex(), **content}, signing_key, body)

    def read_file(self, raw: bytes, kind: str, fields: Mapping[str, signed.Condition], source: str) -> SignedFile:
        """Read a file of ``make_file``, which the site in its field "place" signed, or else the joiner."""
        file = signed.read_file(raw, kind, {"charter": is_hex(32), **fields}, source)
        place = file.content.get("place")
        if file.content["charter"] != self.digest.hex():
            raise file.make_error("belongs to another charter", "Ask the sender for the file of this charter.")
        if place is not None and place >= len(self.sites):
            raise file.make_error("is from a site that is not in the charter")
        key = self.joiner_key if place is None else self.sites[place].signing_key
        file.verify(key, "the joiner" if place is None else self.sites[place].site)
        return file

    def format_fingerprint(self) -> str:
        """Format the fingerprint as 24 words, for people to compare by voice."""
        return " ".join(encode_words(self.digest))

    def check_fingerprint(self, heard: str) -> None:
        """Raise ValueError unless the 24 words that another site read aloud are those of this charter."""
        if decode_words(heard) != self.digest:
            problem = "are those of another charter, so the sites hold different charters"
            fix = "Compare the charter files themselves; if they differ, do not take part."
            raise checks.error("words", "heard", problem, fix)


def make_charter(key_files: Sequence[bytes], terms: Terms, joiner_key: Ed25519PrivateKey) -> bytes:
    """Make a charter of the sites with these key files, in this order."""
    content = {
        "joiner_key": joiner_key.public_key().public_bytes_raw().hex(),
        "key_files": [read_key_file(raw, f"number {place}").raw.decode() for place, raw in enumerate(key_files)],
        **asdict(terms),
    }
    raw = signed.make_file("charter", content, joiner_key)
    read_charter(raw)
    return raw


@lru_cache(maxsize=4)  # a site reads its charter several times for one answer
def read_charter(raw: bytes, source: str = "") -> Charter:
    """Read a charter, and check everything that is the same for all readers.

    Raises:
        ValueError: A signature is wrong, a key appears twice or gives no secret, or the terms do not fit the sites.
    """
    file = signed.read_file(raw, "charter", _CHARTER_FIELDS, source)
    joiner_key = bytes.fromhex(file.content["joiner_key"])
    file.verify(joiner_key, "the joiner")
    texts = file.content["key_files"]
    sites = tuple(read_key_file(text.encode(), f"number {place}") for place, text in enumerate(texts))
    values: dict[str, Any] = {f.name: file.content[f.name] for f in fields(Terms)}
    terms = Terms(**values | {name: tuple(values[name]) for name in ("teachers", "records")})
    _check_terms(file, len(sites), terms)
    _check_keys(file, sites, joiner_key)
    return Charter(sites, terms, joiner_key, raw)


def _check_terms(file: SignedFile, num_sites: int, terms: Terms) -> None:
    if not MIN_SITES <= num_sites <= MAX_SITES:
        raise file.make_error(f"has {num_sites} sites, and must have {MIN_SITES} to {MAX_SITES}")
    if terms.colluding > num_sites - 2:
        problem = f"must be at most {num_sites - 2} of {num_sites} sites, because two sites must be honest"
        raise checks.error("colluding", terms.colluding, problem)
    if terms.max_sites_per_unit > num_sites:
        raise file.make_error(f"has units at {terms.max_sites_per_unit} sites, and only {num_sites} sites")
    if len(terms.teachers) != num_sites or len(terms.records) != num_sites:
        raise file.make_error("must give a number of teachers and a number of records for each site")
    if (terms.adjacency == "replace_one") != all(terms.records):
        problem = "must state the records of each site under replace_one, and zeros under add_remove"
        raise file.make_error(problem, "Under add_remove the numbers of records are private.")
    check_unit("adjacency", terms.adjacency, terms.unit)


def _check_keys(file: SignedFile, sites: Sequence[KeyFile], joiner_key: bytes) -> None:
    names = [unicodedata.normalize("NFKC", site.site).casefold() for site in sites]
    slot_keys = [key for site in sites for key in site.slot_keys]
    keys = [joiner_key, *(site.signing_key for site in sites), *(site.kem_key for site in sites), *slot_keys]
    if len(set(names)) < len(names):
        raise file.make_error("has two sites of the same name")
    if len(set(keys)) < len(keys):
        raise file.make_error("has the same key twice", "Each site makes its own keys with `pate site init`.")
    if len({len(site.slot_keys) for site in sites}) > 1:
        raise file.make_error("has sites with different numbers of slots")
    probe = X25519PrivateKey.generate()
    for site in sites:
        try:
            MLKEM768PublicKey.from_public_bytes(site.kem_key)
            for key in site.slot_keys:
                probe.exchange(X25519PublicKey.from_public_bytes(key))  # refuses a key whose secrets are all zero
        except ValueError:
            raise file.make_error(f"has a key of {site.site} that gives no secret") from None
        # A number of the field has one form below the prime, so that no key can appear twice in two forms.
        if any(int.from_bytes(key, "little") >= _FIELD_PRIME for key in site.slot_keys):
            raise file.make_error(f"has a key of {site.site} that is not in its only form")


# ---- fingerprints as words -------------------------------------------------------------------------------------------


@cache
def load_words() -> tuple[str, ...]:
    """Load the 2,048 words of the English list of BIP 39 (MIT license). Four letters identify a word."""
    words = tuple(resources.files("pate_verify").joinpath("words.txt").read_text("ascii").split())
    assert len(set(words)) == 1 << _BITS_PER_WORD
    return words


def encode_words(digest: bytes) -> list[str]:
    """Encode 256 bits as 24 words (BIP 39), with 8 bits of their SHA-256, by which a misheard word is found."""
    assert len(digest) == 32
    number = int.from_bytes(digest + hashlib.sha256(digest).digest()[:1], "big")
    shifts = range(_BITS_PER_WORD * (NUM_WORDS - 1), -1, -_BITS_PER_WORD)
    return [load_words()[number >> shift & (1 << _BITS_PER_WORD) - 1] for shift in shifts]


def decode_words(text: str) -> bytes:
    """Decode 24 words to 256 bits. Raises ValueError if a word is missing, unknown or misheard."""
    words = text.casefold().split()
    if len(words) != NUM_WORDS:
        raise checks.error("words", f"{len(words)} words", f"must be {NUM_WORDS}", "Type all words that you heard.")
    number = 0
    for position, word in enumerate(words, 1):
        if word not in load_words():
            raise checks.error("words", word, f"word {position} is not in the list", "Ask to hear it again.")
        number = number << _BITS_PER_WORD | load_words().index(word)
    raw = number.to_bytes(33, "big")
    if hashlib.sha256(raw[:32]).digest()[:1] != raw[32:]:
        raise checks.error("words", "heard", "do not belong together: one was misheard", "Ask to hear all words again.")
    return raw[:32]
