"""Checks of arguments, which return the value or raise ValueError.

The message names the argument, its value, the requirement and the fix. A ValueError is for users (a bad configuration
or argument). An ``assert`` states an invariant of this package.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field
from numbers import Integral, Real
from typing import Any

MIN_NOISE_SCALE = 1e-12


def error(name: str, value: Any, requirement: str, fix: str = "") -> ValueError:
    """Make the ValueError that every check raises: ``name=value: requirement. fix``."""
    return ValueError(f"{name}={value!r}: {requirement}." + (f" {fix}" if fix else ""))


def prefix_error_key(group: str, error: ValueError) -> str:
    """Return the message with the key that users type: for group "teacher", steps=0 becomes teacher.steps=0."""
    message = str(error)
    if message.startswith(f"{group}."):
        return message
    if not re.match(r"[\w.]+( \w+)?=", message):
        return f"{group}: {message}"
    return f"{group}.{re.sub(r'^(student|mechanism|query|dataset)[.]', '', message)}"


@contextmanager
def prefixed_errors(group: str) -> Iterator[None]:
    """Raise every ValueError of the ``with`` block with the key that users type (``prefix_error_key``)."""
    try:
        yield
    except ValueError as error:
        raise ValueError(prefix_error_key(group, error)) from error


def nonempty_string(name: str, value: Any) -> str:
    """Check for a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise error(name, value, "must be a non-empty string")
    return value


def optional(check: Callable[..., object], name: str, value: Any, *bounds: Any, **options: Any) -> None:
    """Apply a check of this module to a value that may also be None."""
    if value is not None:
        check(name, value, *bounds, **options)


def number(name: str, value: Any, fix: str = "") -> float:
    """Check for a finite real number; True and False are refused."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise error(name, value, "must be a finite number", fix)
    return float(value)


def positive(name: str, value: Any, fix: str = "") -> float:
    """Check for a finite number > 0."""
    if number(name, value, fix) <= 0:
        raise error(name, value, "must be greater than 0", fix)
    return float(value)


def noise_scale(name: str, value: Any, fix: str = "") -> float:
    """Check for a noise scale that has a cost: the square of its inverse must be finite."""
    if positive(name, value, fix) < MIN_NOISE_SCALE:
        raise error(name, value, f"must be at least {MIN_NOISE_SCALE:g}: less noise has no finite cost", fix)
    return float(value)


def non_negative(name: str, value: Any) -> float:
    """Check for a finite number >= 0."""
    if number(name, value) < 0:
        raise error(name, value, "must be at least 0")
    return float(value)


def between(name: str, value: Any, low: float, high: float, *, exclusive: bool = False, fix: str = "") -> float:
    """Check for a number in [low, high], or in (low, high) if ``exclusive``."""
    number(name, value, fix)
    if not (low < value < high if exclusive else low <= value <= high):
        left_bracket, right_bracket = ("(", ")") if exclusive else ("[", "]")
        raise error(name, value, f"must lie in {left_bracket}{low:g}, {high:g}{right_bracket}", fix)
    return float(value)


def delta(name: str, value: Any) -> float:
    """Check for a privacy delta, strictly between 0 and 1."""
    fix = "A usual choice is 0.1 divided by the number of records."
    return between(name, value, 0, 1, exclusive=True, fix=fix)


def integer(name: str, value: Any, low: int | None = None, high: int | None = None, fix: str = "") -> int:
    """Check for an integer in [low, high], where None is no bound."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or (low is not None and value < low) or (high is not None and value > high):
        bounds = f" in [{'-inf' if low is None else low}, {'inf' if high is None else high}]"
        raise error(name, value, "must be an integer" + ("" if low is None and high is None else bounds), fix)
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise error(name, value, "must be true or false")
    return value


def collection(name: str, value: Any) -> Collection[Any]:
    """Check for a collection of values other than a string or a mapping."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise error(name, value, "must be a list", f"Write {name}=[a,b].")
    return value


def mapping(name: str, value: Any, fields: Collection[Field[Any]] | None = None) -> Mapping[str, Any]:
    """Check for a mapping, whose keys must be names of ``fields``. None allows all keys."""
    if not isinstance(value, Mapping):
        raise error(name, value, "must be keys and values", f"Write {name}={{key: value}}.")
    for key in value if fields is not None else ():
        one_of(f"{name} key", key, [field.name for field in fields or ()])
    return value


def one_of(name: str, value: Any, choices: Collection[str], fix: str = "") -> str:
    """Check for one of the choices; the message of the error suggests a similar one."""
    if value not in choices:
        import difflib

        close_matches = difflib.get_close_matches(str(value), list(choices), n=1)
        hint = f"Did you mean {close_matches[0]!r}?" if close_matches else ""
        raise error(name, value, f"must be one of {', '.join(sorted(choices))}", fix or hint)
    return str(value)


def import_optional(module: str, extra: str, key: str, value: str) -> Any:
    """Import a module of an optional extra. Raise ValueError, which names ``key`` and the extra, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as import_error:
        fix = f"pip install 'pate-torch[{extra}]'."
        raise error(key, value, f"needs the package {module}", fix) from import_error
