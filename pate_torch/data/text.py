"""Texts of a user's own: a column of a CSV or Parquet file. They need an encoder (``features=encoder``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pate_torch.core import checks, texts
from pate_torch.data.file_source import Part, Points
from pate_torch.data.tabular import LabeledTable
from pate_torch.privacy.unit_ids import compute_content_id


@dataclass(frozen=True, kw_only=True)
class Text(LabeledTable):
    """One text a record. x: UTF-8, uint8 [N, max_bytes] (``core.texts``).

    Attributes:
        column: The column of texts.
        max_bytes: A longer text is cut there: public, so that no text says how long the others' rows are.
        empty: What to do with public records without a text: "error", or "drop" each by itself. A private one is
            dropped by itself or, under replace_one, filled in.
    """

    name: str = "text"
    column: str = "text"
    max_bytes: int = 2048
    empty: str = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.nonempty_string("dataset.column", self.column)
        checks.integer("dataset.max_bytes", self.max_bytes, low=4)
        checks.one_of("dataset.empty", self.empty, ("error", "drop"))

    def _get_required_columns(self) -> dict[str, str]:
        return {"dataset.column": self.column}

    def _build_points(self, parts: dict[int, Part], role_N: np.ndarray) -> Points:
        column = [text for part in parts.values() for text in part.content[self.column]]
        has_text_N = np.array([texts.is_text(text) for text in column])
        num_missing = int((~has_text_N[self._is_public(role_N)]).sum())
        if num_missing and self.empty == "error":
            raise checks.error(
                "dataset.empty",
                self.empty,
                f"stops at {num_missing} public records without a text in column {self.column!r}",
                "Remove them, or drop them one by one (dataset.empty=drop).",
            )
        filled_texts = [text if has else "-" for text, has in zip(column, has_text_N.tolist(), strict=True)]
        x = texts.encode_texts(f"column {self.column}", filled_texts, self.max_bytes)
        x[torch.from_numpy(~has_text_N)] = 0
        return Points(
            x=x,
            text=self.column,
            make_content_ids=lambda public: [
                compute_content_id([text.encode()]) for text in texts.decode_texts(x[public])
            ],
        )
