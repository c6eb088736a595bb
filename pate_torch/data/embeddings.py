"""Features that somebody computed already, joined to records by id: .npy, safetensors or Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pate_torch.core import checks, texts
from pate_torch.core.files import read_tensors
from pate_torch.data import locations
from pate_torch.data.base import compute_common_scale
from pate_torch.data.file_source import Part, Points, hash_points
from pate_torch.data.tabular import LabeledTable
from pate_torch.privacy.records import Dataset, EncoderCard
from pate_torch.privacy.unit_ids import parse_unit_ids

ENCODER_KEYS = ("name", "sha256", "license", "trained_on", "disjoint")
"""What may be declared of whatever made the vectors."""


@dataclass(frozen=True, kw_only=True)
class Embeddings(LabeledTable):
    """A table of ids and labels, and the vector of each id. x: float32 [N, D], centered, and scaled as one.

    Whoever made the vectors must have made each from its own record alone: a vector that another record moves has no
    sensitivity that anybody could state.

    Attributes:
        vectors: .npy [N, D], .safetensors with ``embeddings`` [N, D] (and whole numbers ``id`` [N]), or .parquet
            with the column of ids and either a column of lists, ``embedding``, or columns of numbers.
        ids: A text file of ids, one a line, in the order of the vectors, where their file holds none.
        encoder: What made them, for the statement: {name, sha256, license, trained_on, disjoint}, as far as known.
    """

    name: str = "embeddings"
    id: str | None = "id"
    vectors: str | None = None
    ids: str | None = None
    encoder: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.nonempty_string("dataset.id", self.id)
        if self.encoder is not None:
            checks.mapping("dataset.encoder", self.encoder)
        for key in self.encoder or ():
            checks.one_of("dataset.encoder", key, ENCODER_KEYS)
        _ = self.card

    @property
    def card(self) -> EncoderCard:
        """What the release says of what made the vectors."""
        return EncoderCard(kind="given", **({"name": "an encoder that nobody declares"} | dict(self.encoder or {})))

    def _get_required_columns(self) -> dict[str, str]:
        assert self.id is not None
        return {"dataset.id": self.id}

    def load(self) -> Dataset:
        data = super().load()
        mean, std = compute_common_scale(data.pool.x)
        return replace(data, spec=replace(data.spec, mean=mean, std=std, encoder=self.card))

    def _build_points(self, parts: dict[int, Part], role_N: np.ndarray) -> Points:
        assert self.id is not None
        file = locations.resolve_path("dataset.vectors", self.vectors, self.root)
        ids, x = read_vectors(file, self.id, None if self.ids is None else self._read_ids())
        row_by_id = {name: row for row, name in enumerate(ids)}
        if len(row_by_id) < len(ids):
            raise checks.error("dataset.vectors", str(file), "has several vectors of one id")
        record_ids = [texts.to_canonical_text(name) for part in parts.values() for name in part.content[self.id]]
        row_N = torch.tensor([row_by_id.get(name, -1) for name in record_ids])
        x = x[row_N]
        x[row_N < 0] = torch.nan
        has_vector_N = x.isfinite().all(1).numpy()
        public_N = self._is_public(role_N)
        if not has_vector_N[public_N].all():
            missing_ids = np.array(record_ids)[public_N & ~has_vector_N]
            message = f"has no finite vector of {len(missing_ids)} public records, such as {str(missing_ids[0])!r}"
            raise checks.error("dataset.vectors", str(file), message, "Every id of public records needs one.")
        return Points(x=x, make_content_ids=lambda public: hash_points(x[public]))

    def _read_ids(self) -> list[str]:
        file = locations.resolve_path("dataset.ids", self.ids, self.root)
        try:
            return [texts.to_canonical_text(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise checks.error("dataset.ids", str(file), "is not UTF-8", "One id a line.") from error


def read_vectors(file: Path, column: str, declared_ids: list[str] | None) -> tuple[list[str], Tensor]:
    """Ids and vectors [N, D] of a file.

    Args:
        file: .npy, .safetensors or .parquet.
        column: Of the ids, in a Parquet file.
        declared_ids: The ids in order, where the file holds none.

    Raises:
        ValueError: It is damaged, its vectors are not rows of one length, or ids are missing.
    """
    key, message = "dataset.vectors", "must be .npy, .safetensors or .parquet"
    readers = {".npy": _read_npy, ".safetensors": _read_safetensors, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise checks.error(key, str(file), message)
    try:
        file_ids, array = readers[file.suffix](file, column)
    except (ValueError, OSError, EOFError, KeyError, pa.ArrowException) as error:
        raise checks.error(key, str(file), f"is not readable ({error})", f"It {message}.") from error
    ids = file_ids if declared_ids is None else declared_ids
    if ids is None:
        fix = "Give dataset.ids=<file>, one id a line in their order."
        raise checks.error(key, str(file), "holds no ids to join its vectors by", fix)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.floating):
        message = f"must hold vectors as numbers [N, D], not {array.dtype} {tuple(array.shape)}"
        raise checks.error(key, str(file), message)
    if len(ids) != len(array):
        message = f"has {len(array)} vectors, and there are {len(ids)} ids"
        raise checks.error(key, str(file), message, "One id for each vector, in their order.")
    with np.errstate(over="ignore"):
        return ids, torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _read_npy(file: Path, column: str) -> tuple[list[str] | None, np.ndarray]:
    return None, np.load(file, allow_pickle=False)


def _read_safetensors(file: Path, column: str) -> tuple[list[str] | None, np.ndarray]:
    tensors = read_tensors(file)
    if "embeddings" not in tensors:
        raise ValueError(f"it has no tensor 'embeddings', but {', '.join(sorted(tensors)) or 'none'}")
    id_tensor = tensors.get("id")
    return None if id_tensor is None else [str(value) for value in id_tensor.tolist()], tensors[
        "embeddings"
    ].float().numpy()


def _read_parquet(file: Path, column: str) -> tuple[list[str] | None, np.ndarray]:
    table = pq.read_table(file)
    ids = None
    if column in table.column_names:
        ids = parse_unit_ids(f"column {column}", table.column(column).to_pylist(), table.num_rows).tolist()
        table = table.drop_columns([column])
    if "embedding" in table.column_names:
        rows = table.column("embedding").to_pylist()
        widths = {len(row) for row in rows if row is not None}
        if len(widths) != 1:
            raise ValueError("its vectors are of several lengths")
        return ids, np.array([[np.nan] * max(widths) if row is None else row for row in rows], dtype=np.float32)
    numbers = [name for name in table.column_names if pa.types.is_floating(table.schema.field(name).type)]
    if not numbers:
        raise ValueError("it has neither a column 'embedding' nor columns of floating-point numbers")
    return ids, np.stack([table.column(name).to_numpy() for name in numbers], 1)
