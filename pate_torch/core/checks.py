"""Argument checks whose message names the field, the value, what is allowed and, where known, the fix.

ValueError is for users (a bad configuration or argument); ``assert`` elsewhere is for invariants of ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field
from numbers import Integral, Real
from typing import Any

MIN_NOISE_SCALE = 1e-12


def error(name: str, value: Any, requirement: str, fix: str = "") -> ValueError:
    """The error every check raises: ``name=value: requirement. fix``."""
    return ValueError(f"{name}={value!r}: {requirement}." + (f" {fix}" if fix else ""))


def prefix_error_key(group: str, error: ValueError) -> str:
    """The message of a component's own check, its key as a user writes it: steps=0 becomes teacher.steps=0."""
    message = str(error)
    if message.startswith(f"{group}."):
        return message
    if not re.match(r"[\w.]+( \w+)?=", message):
        return f"{group}: {message}"
    return f"{group}.{re.sub(r'^(student|mechanism|query|dataset)[.]', '', message)}"


@contextmanager
def prefixed_errors(group: str) -> Iterator[None]:
    """A component's own complaint with its key as a user writes it (``prefix_error_key``)."""
    try:
        yield
    except ValueError as error:
        raise ValueError(prefix_error_key(group, error)) from error


def nonempty_string(name: str, value: Any, fix: str = "") -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise error(name, value, "must be a text that is not empty", fix)
    return value


def number(name: str, value: Any, fix: str = "") -> float:
    """A finite real number (bool is not a number here)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise error(name, value, "must be a finite number", fix)
    return float(value)


def positive(name: str, value: Any, fix: str = "") -> float:
    """A finite number > 0."""
    if number(name, value, fix) <= 0:
        raise error(name, value, "must be greater than 0", fix)
    return float(value)


def noise_scale(name: str, value: Any, fix: str = "") -> float:
    """A scale of noise that has a price: the square of its inverse is a number that composes."""
    if positive(name, value, fix) < MIN_NOISE_SCALE:
        raise error(name, value, f"must be at least {MIN_NOISE_SCALE:g}: less is no noise, and has no price", fix)
    return float(value)


def non_negative(name: str, value: Any, fix: str = "") -> float:
    """A finite number >= 0."""
    if number(name, value, fix) < 0:
        raise error(name, value, "must be at least 0", fix)
    return float(value)


def between(name: str, value: Any, low: float, high: float, *, exclusive: bool = False, fix: str = "") -> float:
    """A number in [low, high], or in (low, high) with ``exclusive``."""
    number(name, value, fix)
    inside = low < value < high if exclusive else low <= value <= high
    if not inside:
        left_bracket, right_bracket = ("(", ")") if exclusive else ("[", "]")
        raise error(name, value, f"must lie in {left_bracket}{low:g}, {high:g}{right_bracket}", fix)
    return float(value)


def delta(name: str, value: Any) -> float:
    """A privacy delta: strictly between 0 and 1."""
    return between(
        name, value, 0, 1, exclusive=True, fix="A usual choice is a tenth of one over the number of records."
    )


def integer(name: str, value: Any, low: int | None = None, high: int | None = None, fix: str = "") -> int:
    """An integer, optionally bounded (inclusive)."""
    bounds = f" in [{'-inf' if low is None else low}, {'inf' if high is None else high}]"
    bounds = "" if low is None and high is None else bounds
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(name, value, f"must be an integer{bounds}", fix)
    integer_value = int(value)
    if (low is not None and integer_value < low) or (high is not None and integer_value > high):
        raise error(name, value, f"must be an integer{bounds}", fix)
    return integer_value


def boolean(name: str, value: Any, fix: str = "") -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise error(name, value, "must be true or false", fix)
    return value


def collection(name: str, value: Any) -> Collection[Any]:
    """A list of values; a string is not one."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise error(name, value, "must be a list", f"As in {name}=[a,b].")
    return value


def mapping(name: str, value: Any, fields: Collection[Field[Any]] | None = None) -> Mapping[str, Any]:
    """Keys and values; with ``fields`` (of a dataclass), these keys only."""
    if not isinstance(value, Mapping):
        raise error(name, value, "must be keys and values", f"As in {name}={{key: value}}.")
    for key in value if fields is not None else ():
        one_of(f"{name} key", key, [field.name for field in fields or ()])
    return value


def one_of(name: str, value: Any, choices: Collection[str], fix: str = "") -> str:
    """One of a few names; a near miss is suggested."""
    if value not in choices:
        import difflib

        close_matches = difflib.get_close_matches(str(value), list(choices), n=1)
        hint = f"Did you mean {close_matches[0]!r}?" if close_matches else ""
        raise error(name, value, f"must be one of {', '.join(sorted(choices))}", fix or hint)
    return str(value)
