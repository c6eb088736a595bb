"""Texts as uint8 tensors (UTF-8 in zero-padded rows), and the canonical text of a value."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pate_torch.core import checks

if TYPE_CHECKING:
    from torch import Tensor

_TIMESTAMP_PATTERN = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?")
_ONE_SECOND = np.timedelta64(1, "s")


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
    """Convert one value to a text that is independent of the type that other values give to the column.

    427 and "427" have the same text. A date, midnight of the same day and their texts have the same text. So have
    timestamps whose seconds have different numbers of trailing zeros, and durations in different units.
    """
    if type(value) is str:
        pass
    elif isinstance(value, np.datetime64):
        value = value + 0 * _ONE_SECOND  # the text then has at least seconds
    elif isinstance(value, np.timedelta64 | datetime.timedelta):
        value = float(round(np.timedelta64(value) / _ONE_SECOND, 6))
    text = str(value).strip()
    if text[4:5] == "-" and (timestamp := _TIMESTAMP_PATTERN.fullmatch(text)):
        day, clock, decimals = timestamp.group(1), timestamp.group(2), (timestamp.group(3) or "").rstrip("0")
        text = f"{day} {clock}" + (f".{decimals}" if decimals else "")
        return day if text == f"{day} 00:00:00" else text
    return text
