"""Checks of arguments. Each returns the value; its ValueError names the field, the value, the requirement and the fix.

A ValueError is for users (a bad configuration or argument); an ``assert`` states an invariant of this package.
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
    """Make the error that every check raises: ``name=value: requirement. fix``."""
    return ValueError(f"{name}={value!r}: {requirement}." + (f" {fix}" if fix else ""))


def prefix_error_key(group: str, error: ValueError) -> str:
    """Write the key of a component's message as users do: for group "teacher", steps=0 becomes teacher.steps=0."""
    message = str(error)
    if message.startswith(f"{group}."):
        return message
    if not re.match(r"[\w.]+( \w+)?=", message):
        return f"{group}: {message}"
    return f"{group}.{re.sub(r'^(student|mechanism|query|dataset)[.]', '', message)}"


@contextmanager
def prefixed_errors(group: str) -> Iterator[None]:
    """Raise the ValueError of a component with its key as users write it (``prefix_error_key``)."""
    try:
        yield
    except ValueError as error:
        raise ValueError(prefix_error_key(group, error)) from error


def nonempty_string(name: str, value: Any, fix: str = "") -> str:
    """Check for a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise error(name, value, "must be a text that is not empty", fix)
    return value


def number(name: str, value: Any, fix: str = "") -> float:
    """Check for a finite real number, which is no boolean."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise error(name, value, "must be a finite number", fix)
    return float(value)


def positive(name: str, value: Any, fix: str = "") -> float:
    """Check for a finite number > 0."""
    if number(name, value, fix) <= 0:
        raise error(name, value, "must be greater than 0", fix)
    return float(value)


def noise_scale(name: str, value: Any, fix: str = "") -> float:
    """Check for a noise scale that has a price: the square of its inverse must be finite."""
    if positive(name, value, fix) < MIN_NOISE_SCALE:
        raise error(name, value, f"must be at least {MIN_NOISE_SCALE:g}: less is no noise, and has no price", fix)
    return float(value)


def non_negative(name: str, value: Any, fix: str = "") -> float:
    """Check for a finite number >= 0."""
    if number(name, value, fix) < 0:
        raise error(name, value, "must be at least 0", fix)
    return float(value)


def between(name: str, value: Any, low: float, high: float, *, exclusive: bool = False, fix: str = "") -> float:
    """Check for a number in [low, high], or in (low, high) with ``exclusive``."""
    number(name, value, fix)
    inside = low < value < high if exclusive else low <= value <= high
    if not inside:
        left_bracket, right_bracket = ("(", ")") if exclusive else ("[", "]")
        raise error(name, value, f"must lie in {left_bracket}{low:g}, {high:g}{right_bracket}", fix)
    return float(value)


def delta(name: str, value: Any) -> float:
    """Check for a privacy delta, strictly between 0 and 1."""
    fix = "A usual choice is a tenth of one over the number of records."
    return between(name, value, 0, 1, exclusive=True, fix=fix)


def integer(name: str, value: Any, low: int | None = None, high: int | None = None, fix: str = "") -> int:
    """Check for an integer in [low, high]; None is no bound."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or (low is not None and value < low) or (high is not None and value > high):
        bounds = f" in [{'-inf' if low is None else low}, {'inf' if high is None else high}]"
        raise error(name, value, "must be an integer" + ("" if low is None and high is None else bounds), fix)
    return int(value)


def boolean(name: str, value: Any, fix: str = "") -> bool:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise error(name, value, "must be true or false", fix)
    return value


def collection(name: str, value: Any) -> Collection[Any]:
    """Check for a list of values, which is no string."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise error(name, value, "must be a list", f"As in {name}=[a,b].")
    return value


def mapping(name: str, value: Any, fields: Collection[Field[Any]] | None = None) -> Mapping[str, Any]:
    """Check for keys and values; with the ``fields`` of a dataclass, for no other keys than these."""
    if not isinstance(value, Mapping):
        raise error(name, value, "must be keys and values", f"As in {name}={{key: value}}.")
    for key in value if fields is not None else ():
        one_of(f"{name} key", key, [field.name for field in fields or ()])
    return value


def one_of(name: str, value: Any, choices: Collection[str], fix: str = "") -> str:
    """Check for one of a few names; the message suggests a similar name."""
    if value not in choices:
        import difflib

        close_matches = difflib.get_close_matches(str(value), list(choices), n=1)
        hint = f"Did you mean {close_matches[0]!r}?" if close_matches else ""
        raise error(name, value, f"must be one of {', '.join(sorted(choices))}", fix or hint)
    return str(value)
