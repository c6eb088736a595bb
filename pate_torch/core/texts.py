"""Texts as tensors, to be dealt like other points: UTF-8 in rows of one length, filled up with zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pate_torch.core import checks


def pack(key: str, texts: Sequence[str], length: int) -> Tensor:
    """Texts as uint8 [N, length]; what is longer is cut, between two characters.

    Args:
        key: The setting or argument that names them, for messages.
        texts: None of them empty.
        length: Bytes of a row, which is public.

    Raises:
        ValueError: One is empty, or no text.
    """
    x = torch.zeros(len(texts), checks.integer("length", length, low=4), dtype=torch.uint8)
    for place, text in enumerate(texts):
        if not is_text(text):  # nothing is said of it, which may be private
            raise ValueError(f"{key}: every one must be a text that is not empty")
        kept = text.replace("\0", " ").encode(errors="replace")[:length].decode(errors="ignore").encode()
        x[place, : len(kept)] = torch.frombuffer(bytearray(kept), dtype=torch.uint8)
    return x


def is_text(value: object) -> bool:
    """Whether something is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip("\0 \t\r\n"))


def unpack(x: Tensor) -> list[str]:
    """The texts of uint8 [N, length]."""
    return [bytes(row).rstrip(b"\0").decode() for row in x.cpu().numpy()]
