"""Texts as uint8 tensors (UTF-8 in zero-padded rows), and the canonical text of a value."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pate_torch.core import checks

if TYPE_CHECKING:
    from torch import Tensor

_TIME_PATTERN = re.compile(
    r"(?:(\d{4}-\d\d-\d\d)[ T])?(\d\d:\d\d(?::\d\d)?)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?"
)  # a timestamp or a time of the day, with or without seconds
_DURATION_PATTERN = re.compile(r"(-?\d+) days?(?: \+?(\d\d):(\d\d):(\d\d)(?:\.(\d+))?)?")
_WHOLE_LIMIT = re.compile(r"\.0(?=[,)\]])")
_NUMBER_BY_BOOLEAN: Final = {"true": "1", "false": "0"}


def encode_texts(key: str, texts: Sequence[str], length: int) -> Tensor:
    """Encode texts that are not empty as uint8 [N, length]; a longer text is cut between two characters.

    The length is public. Messages name the setting ``key``, and do not quote an entry, which may be private.
    """
    import torch  # imported here, because canonical texts need no torch

    x = torch.zeros(len(texts), checks.integer("length", length, low=4), dtype=torch.uint8)
    for row, text in enumerate(texts):
        if not is_text(text):
            raise ValueError(f"{key}: every text must be a non-empty string")
        text_bytes = text.replace("\0", " ").encode(errors="replace")[:length].decode(errors="ignore").encode()
        x[row, : len(text_bytes)] = torch.frombuffer(bytearray(text_bytes), dtype=torch.uint8)
    return x


def decode_texts(x: Tensor) -> list[str]:
    """Decode the texts of uint8 [N, length]."""
    return [bytes(row).rstrip(b"\0").decode() for row in x.cpu().numpy()]


def is_text(value: object) -> bool:
    """Whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip("\0 \t\r\n"))


def to_canonical_text(value: Any) -> str:
    """Convert one value to a text that depends on the value alone, and not on the type of the column that holds it.

    One odd value changes the type of a whole column: integers become floats, float32 becomes float64, days become
    timestamps. The texts of the other values must stay. So 427 and "427" have the same text, and so have a number as
    float32 and as float64; a date, midnight of the same day and their texts; timestamps without seconds, or whose
    seconds have different numbers of trailing zeros, or which name the same instant in different time zones; durations
    in different units and their texts; and intervals with limits of different types.
    """
    if isinstance(value, complex | np.complexfloating) and value.imag == 0:
        value = value.real
    if isinstance(value, bytes):  # NumPy makes bytes of all elements if one element is bytes
        value = value.decode(errors="replace")
    if type(value) is str:
        pass
    elif isinstance(value, float | np.floating):
        return format_number(float(value))
    elif isinstance(value, np.datetime64):
        value = value + np.timedelta64(0, "s")  # the text then has at least seconds
    elif isinstance(value, np.timedelta64 | datetime.timedelta):
        value = value.to_timedelta64() if hasattr(value, "to_timedelta64") else np.timedelta64(value)
        return _format_duration(value.astype("timedelta64[us]").astype(int))
    text = str(value).strip()
    if (text[4:5] == "-" or text[2:3] == ":") and (time := _TIME_PATTERN.fullmatch(text)):
        return _format_time(text, *time.groups())
    if " day" in text and (duration := _DURATION_PATTERN.fullmatch(text)):
        days, hours, minutes, seconds = (int(part or 0) for part in duration.groups()[:4])
        microseconds = int((duration.group(5) or "").ljust(6, "0")[:6])
        return _format_duration((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 10**6 + microseconds)
    return _WHOLE_LIMIT.sub("", text) if text[:1] in ("[", "(") else text


def replace_boolean(text: str) -> str:
    """Replace the text of a boolean, in upper or lower case, by 1 or 0. Other texts stay.

    One integer in an array of booleans turns all of them into integers, and one word in a column of TRUE and FALSE
    leaves all of them texts, which ``pandas.read_csv`` turns into True and False otherwise.
    """
    return _NUMBER_BY_BOOLEAN.get(text.casefold(), text)


def parse_number(value: Any) -> float:
    """Parse a number or its text, or a boolean or its text; NaN for every other value."""
    if isinstance(value, complex | np.complexfloating):
        return float(value.real) if value.imag == 0 else math.nan
    if not isinstance(value, bool | int | float | np.bool_ | np.floating) or isinstance(value, np.timedelta64):
        return parse_canonical_number(to_canonical_text(value))
    try:
        return float(value)
    except OverflowError:
        return math.nan


def parse_canonical_number(text: str) -> float:
    """Parse the canonical text of a number or a boolean; NaN for every other text."""
    try:
        return float(replace_boolean(text))
    except ValueError:
        return math.nan


def format_number(number: float) -> str:
    """Format a number by its value, with the digits of float32 if float32 has the value (``shorten_numbers``)."""
    return repr(_shorten_number(number))


def format_numbers(values: np.ndarray) -> list[str]:
    """Format an array of integers or floats as ``to_canonical_text`` formats each, with "" for NaN.

    Integers of 2^53 and more become floats, as in a column of integers with a missing value.
    """
    if values.dtype.kind != "f":
        return [str(value) if abs(value) < 2**53 else format_number(float(value)) for value in values.tolist()]
    return [repr(value) if value == value else "" for value in shorten_numbers(values).tolist()]


def shorten_numbers(values: np.ndarray) -> np.ndarray:
    """Replace each number that float32 has by the number of the fewest digits that float32 rounds to it, float64 [N].

    A number in a column of texts has all its digits, and as a float it may have those of float32 alone. Whole numbers
    below 2^53 stay, because they may be codes.
    """
    values = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        may_be_short_N = (values.astype(np.float32) == values) & ((values % 1 != 0) | (np.abs(values) >= 2**53))
    distinct_V, index_N = np.unique(values[may_be_short_N], return_inverse=True)
    values[may_be_short_N] = np.array(list(map(_shorten_number, distinct_V.tolist())), dtype=np.float64)[index_N]
    return values


def _shorten_number(number: float) -> float:
    with np.errstate(over="ignore"):
        short = np.float32(number)
    shortest = float(str(short))
    is_short = float(short) == number and (number % 1 != 0 or abs(shortest) >= 2**53)
    return shortest if is_short else number


def _format_duration(microseconds: int) -> str:
    return str(int(microseconds) / 10**6)


def _format_time(text: str, day: str | None, clock: str, decimals: str | None, zone: str | None) -> str:
    if len(clock) == 5:
        if decimals is not None:
            return text
        clock += ":00"
    if zone is not None and day is not None:
        try:
            instant = datetime.datetime.fromisoformat(f"{day} {clock}{zone}").astimezone(datetime.UTC)
        except (ValueError, OverflowError):
            return text
        day, clock = instant.strftime("%Y-%m-%d %H:%M:%S").split(" ")
    decimals, zone = (decimals or "").rstrip("0"), "" if zone is None else "+00:00"
    if day is not None and clock == "00:00:00" and not decimals and not zone:
        return day
    return " ".join(part for part in (day, clock) if part) + (f".{decimals}" if decimals else "") + zone
