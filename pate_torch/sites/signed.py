"""Signed files: one line of canonical JSON, a body of bytes, and an Ed25519 signature of both.

Every file of the protocol has this form. Its hash is the SHA-256 of its bytes as they were received, never of a form
that was serialized again. Canonical JSON has sorted keys, no spaces, ASCII characters only, and no floating-point
numbers, so that each content has one form. The first line names the kind of the file, so that the signature of a file
cannot be used for a file of another kind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pate_torch.core import checks

PROTOCOL = "pate-sites-1"
ZERO_DIGEST = "00" * 32
"""The SHA-256 that a file names if there is no earlier file."""
_SIGNATURE_BYTES = 64
_END_BYTES = 2 * _SIGNATURE_BYTES + 1  # hexadecimal digits and a line feed
Condition = Callable[[Any], bool]


@dataclass(frozen=True)
class SignedFile:
    """A file of the protocol whose form was checked.

    Attributes:
        content: Content of the first line.
        body: Bytes between the first line and the signature.
        source: Name of the file in messages.
    """

    kind: str
    content: Mapping[str, Any]
    body: bytes
    raw: bytes
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""
        return hashlib.sha256(self.raw).hexdigest()

    def make_error(self, problem: str, fix: str = "") -> ValueError:
        """Make the error for this file, with what is wrong and what the user can do."""
        return checks.error(self.kind, self.source, problem, fix)

    def verify(self, public_key: bytes, signer: str) -> None:
        """Raise ValueError unless the file was signed with this Ed25519 key."""
        signature = bytes.fromhex(self.raw[-_END_BYTES:-1].decode())
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, self.raw[:-_END_BYTES])
        except (InvalidSignature, ValueError):
            problem = f"is not signed by {signer}, or was altered"
            raise self.make_error(problem, f"Ask {signer} for the file again.") from None


def make_file(kind: str, content: Mapping[str, Any], signing_key: Ed25519PrivateKey, body: bytes = b"") -> bytes:
    """Make a signed file."""
    header = encode_canonically({"format": f"{PROTOCOL} {kind}", "body_bytes": len(body), **content})
    signed_part = header + b"\n" + body
    return signed_part + signing_key.sign(signed_part).hex().encode() + b"\n"


def read_file(raw: bytes, kind: str, fields: Mapping[str, Condition], source: str = "") -> SignedFile:
    """Read a signed file and check its form, but not its signature. Fields without a condition are refused."""

    def make_error(problem: str) -> ValueError:
        return checks.error(kind, source, problem, "Ask the sender for the file again.")

    if not raw.startswith(b"{"):
        raise make_error("is not a file of this protocol, or its beginning was cut off")
    header, _, rest = raw.partition(b"\n")
    try:
        content = decode_canonically(header)
    except ValueError as error:
        raise make_error(f"its first line is not canonical JSON ({error})") from None
    if content.pop("format", None) != f"{PROTOCOL} {kind}":
        raise make_error(f"is not a file of the kind '{PROTOCOL} {kind}'")
    body_bytes = content.pop("body_bytes", None)
    if type(body_bytes) is not int or body_bytes < 0 or len(rest) != body_bytes + _END_BYTES:
        raise make_error("has another length than it states, so it was cut off or lengthened")
    if not re.fullmatch(rb"[0-9a-f]{128}\n", rest[body_bytes:]):
        raise make_error("has no signature")
    if content.keys() != fields.keys():
        raise make_error(f"must have the fields {', '.join(sorted(fields))}, and no others")
    for name, condition in fields.items():
        if not condition(content[name]):
            raise make_error(f"its field '{name}' has a value that is not allowed")
    return SignedFile(kind, content, rest[:body_bytes], raw, source)


def encode_canonically(content: Mapping[str, Any]) -> bytes:
    """Encode a mapping as canonical JSON. Raises ValueError for a floating-point number."""
    encoded = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    decode_canonically(encoded)
    return encoded


def decode_canonically(encoded: bytes) -> dict[str, Any]:
    """Decode canonical JSON, and raise ValueError for any other form of the same content."""
    try:
        content = json.loads(encoded.decode("ascii"), parse_float=_refuse_float, parse_constant=_refuse_float)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("it cannot be read") from None
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    if json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii") != encoded:
        raise ValueError("the same content has another form")
    return content


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is a floating-point number, and only whole numbers and fractions are allowed")


# ---- conditions of fields --------------------------------------------------------------------------------------------


def is_hex(num_bytes: int) -> Condition:
    """Make the condition that a value consists of this many bytes in lower-case hexadecimal digits."""
    return lambda value: isinstance(value, str) and bool(re.fullmatch(f"[0-9a-f]{{{2 * num_bytes}}}", value))


def is_integer(low: int, high: int) -> Condition:
    """Make the condition that a value is a whole number in [low, high]."""
    return lambda value: type(value) is int and low <= value <= high


def is_list_of(condition: Condition, low: int = 0, high: int = 1 << 20) -> Condition:
    """Make the condition that a value is a list of low to high items that satisfy a condition."""
    return lambda value: isinstance(value, list) and low <= len(value) <= high and all(map(condition, value))


def is_mapping_of(condition: Condition) -> Condition:
    """Make the condition that a value is a mapping from printable names to values that satisfy a condition."""
    return lambda value: isinstance(value, dict) and all(map(is_text, value)) and all(map(condition, value.values()))


def is_one_of(*choices: str) -> Condition:
    """Make the condition that a value is one of some strings."""
    return lambda value: isinstance(value, str) and value in choices


def is_text(value: Any) -> bool:
    """Whether a value is a string of 1 to 200 printable characters without spaces at its ends."""
    return isinstance(value, str) and 1 <= len(value) <= 200 and value.isprintable() and value == value.strip()


def is_positive_fraction(value: Any) -> bool:
    """Whether a value is a positive fraction in lowest terms, such as "7/2" or "3"."""
    if not isinstance(value, str) or len(value) > 200:
        return False
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return bool(re.fullmatch(r"[0-9]+(/[0-9]+)?", value)) and str(Fraction(value)) == value and Fraction(value) > 0
    return False
