"""Argument checks whose message names the field, the value, what is allowed and, where known, the fix.

ValueError is for users (a bad configuration or argument); ``assert`` elsewhere is for invariants of ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import Field
from numbers import Integral, Real
from typing import Any

LEAST_NOISE = 1e-12


def fail(name: str, value: Any, allowed: str, fix: str = "") -> ValueError:
    """The error every check raises: ``name=value: allowed. fix``."""
    return ValueError(f"{name}={value!r}: {allowed}." + (f" {fix}" if fix else ""))


def under(group: str, error: ValueError) -> str:
    """The message of a component's own check, its key as a user writes it: steps=0 becomes teacher.steps=0."""
    message = str(error)
    if message.startswith(f"{group}."):
        return message
    if not re.match(r"[\w.]+( \w+)?=", message):
        return f"{group}: {message}"
    return f"{group}.{re.sub(r'^(student|mechanism|query|dataset)[.]', '', message)}"


def text(name: str, value: Any, fix: str = "") -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise fail(name, value, "must be a text that is not empty", fix)
    return value


def number(name: str, value: Any, fix: str = "") -> float:
    """A finite real number (bool is not a number here)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise fail(name, value, "must be a finite number", fix)
    return float(value)


def positive(name: str, value: Any, fix: str = "") -> float:
    """A finite number > 0."""
    if number(name, value, fix) <= 0:
        raise fail(name, value, "must be greater than 0", fix)
    return float(value)


def noise(name: str, value: Any, fix: str = "") -> float:
    """A scale of noise that has a price: the square of its inverse is a number that composes."""
    if positive(name, value, fix) < LEAST_NOISE:
        raise fail(name, value, f"must be at least {LEAST_NOISE:g}: less is no noise, and has no price", fix)
    return float(value)


def non_negative(name: str, value: Any, fix: str = "") -> float:
    """A finite number >= 0."""
    if number(name, value, fix) < 0:
        raise fail(name, value, "must be at least 0", fix)
    return float(value)


def between(name: str, value: Any, low: float, high: float, *, open_: bool = False, fix: str = "") -> float:
    """A number in [low, high], or in (low, high) with ``open_``."""
    number(name, value, fix)
    inside = low < value < high if open_ else low <= value <= high
    if not inside:
        left, right = ("(", ")") if open_ else ("[", "]")
        raise fail(name, value, f"must lie in {left}{low:g}, {high:g}{right}", fix)
    return float(value)


def delta(name: str, value: Any) -> float:
    """A privacy delta: strictly between 0 and 1."""
    return between(name, value, 0, 1, open_=True, fix="A usual choice is a tenth of one over the number of records.")


def integer(name: str, value: Any, low: int | None = None, high: int | None = None, fix: str = "") -> int:
    """An integer, optionally bounded (inclusive)."""
    bounds = f" in [{'-inf' if low is None else low}, {'inf' if high is None else high}]"
    bounds = "" if low is None and high is None else bounds
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise fail(name, value, f"must be an integer{bounds}", fix)
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise fail(name, value, f"must be an integer{bounds}", fix)
    return number


def boolean(name: str, value: Any, fix: str = "") -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise fail(name, value, "must be true or false", fix)
    return value


def items(name: str, value: Any) -> Collection[Any]:
    """A list of values; a string is not one."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise fail(name, value, "must be a list", f"As in {name}=[a,b].")
    return value


def mapping(name: str, value: Any, fields: Collection[Field[Any]] | None = None) -> Mapping[str, Any]:
    """Keys and values; with ``fields`` (of a dataclass), these keys only."""
    if not isinstance(value, Mapping):
        raise fail(name, value, "must be keys and values", f"As in {name}={{key: value}}.")
    for key in value if fields is not None else ():
        one_of(f"{name} key", key, [field.name for field in fields or ()])
    return value


def one_of(name: str, value: Any, allowed: Collection[str], fix: str = "") -> str:
    """One of a few names; a near miss is suggested."""
    if value not in allowed:
        import difflib

        near = difflib.get_close_matches(str(value), list(allowed), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise fail(name, value, f"must be one of {', '.join(sorted(allowed))}", fix or hint)
    return str(value)
