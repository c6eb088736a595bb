"""LIBSVM / svmlight files (.svm, .svm.gz): sparse rows made dense, or hashed to fewer dimensions."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.datasets import load_svmlight_file
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.data.file_source import FileSource, Part, Points
from pate_torch.privacy.schema import normalize_class_name
from pate_torch.privacy.unit_ids import UnitIds, make_content_ids, parse_unit_ids

_MAX_FEATURES = 2**24
"""A random sign is drawn for each: more take minutes."""


@dataclass(frozen=True, kw_only=True)
class Libsvm(FileSource):
    """Rows ``label index:value ...``. x: float32 [N, D].

    Attributes:
        roles: "hash" (each unit's own id decides) or "position" (a seeded permutation of the file's positions, which
            are the units' ids: for replace_one, and for benchmarks).
        group: "qid" makes the ``qid:`` field the privacy unit.
        num_features: Declared, or None to read it off the public records; private features beyond are dropped.
        zero_based: Whether indices start at 0; never guessed, since a guess would depend on private records.
        feature_limit: Above so many features, rows are projected by fixed signed hashing.
        projected_dim: Dimensions they are projected to.
        standardize: Whether features are centered and scaled by the pool's statistics.

    Source: hashing, Weinberger et al. 2009 (arXiv 0902.2206); the 80/2/18 split, LZCW21 section 6.
    """

    name: str = "libsvm"
    roles: str = "hash"
    num_features: int | None = None
    zero_based: bool = False
    feature_limit: int = 4096
    projected_dim: int = 1024
    standardize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None:
            checks.one_of("dataset.group", self.group, ("qid",))
        for key in ("zero_based", "standardize"):
            checks.boolean(f"dataset.{key}", getattr(self, key))
        if self.num_features is not None:
            checks.integer("dataset.num_features", self.num_features, low=1, high=_MAX_FEATURES)
        checks.integer("dataset.feature_limit", self.feature_limit, low=1)
        checks.integer("dataset.projected_dim", self.projected_dim, low=1)

    @property
    def _role_assignment(self) -> str:
        return self.roles

    def _build_points(self, parts: dict[int, Part], role_N: np.ndarray) -> Points:
        width = max(part.content.shape[1] for part in parts.values())
        rows = sp.vstack([_widen(part.content, width) for part in parts.values()], format="csr")
        public_N = self._is_public(role_N)
        x = self._to_dense(rows, public_N)
        if not bool(x[torch.from_numpy(public_N)].isfinite().all()):
            message = "has public records whose features are not finite numbers"
            raise checks.error("dataset.name", self.name, message, "Remove NaN and infinity.")
        return Points(x=x, standardize=self.standardize)

    def _read_part(self, role: int, key: str, path: Path) -> Part:
        """Sparse float rows, labels as text, and unit ids."""
        try:
            rows, y, *query_ids = load_svmlight_file(
                str(path), zero_based=self.zero_based, query_id=self.group is not None
            )
        except (ValueError, OSError, EOFError, OverflowError, MemoryError, zlib.error) as error:
            raise checks.error(
                key,
                str(path),
                # Not the parser's own words: they repeat what stands in the file, and this message may be logged.
                f"is not a readable LIBSVM file ({type(error).__name__})",
                "Rows are 'label index:value ...'; with indices from 0 set dataset.zero_based=true.",
            ) from error
        rows = sp.csr_matrix(rows)
        if len(y) == 0:
            raise checks.error(key, str(path), "has no rows")
        label = [normalize_class_name(value) for value in y.tolist()]
        if query_ids and len(query_ids[0]) != len(y):
            raise checks.error("dataset.group", self.group, f"needs a qid: field in every row of {path}")
        return Part(
            content=rows,
            label=label,
            make_unit_ids=lambda: (
                parse_unit_ids("dataset.group", query_ids[0], len(y))
                if query_ids
                else _compute_content_ids(rows, label)
            ),
        )

    def _to_dense(self, rows: sp.csr_matrix, public_N: np.ndarray) -> Tensor:
        """float32 [N, D], D declared or read off the public side."""
        index = rows[public_N].indices
        width = self.num_features or int(index.max(initial=0)) + 1
        if width > _MAX_FEATURES:
            fix = f"Set dataset.num_features, at most {_MAX_FEATURES}: features beyond are left out."
            raise checks.error("dataset.num_features", None, f"public rows have features up to number {width}", fix)
        with np.errstate(over="ignore"):  # infinite, which is not finite
            rows = _widen(rows, width)[:, :width].astype(np.float32)
        if width > self.feature_limit:
            rows = rows @ make_hashing_matrix(width, self.projected_dim)
        return torch.from_numpy(rows.toarray())


def make_hashing_matrix(features: int, dimensions: int) -> sp.csr_matrix:
    """A fixed signed hashing, sparse [features, dimensions]: one entry of +-1 a row. Inner products stay unbiased."""
    uniform_N2 = rng.make_numpy_generator(0, "libsvm", "hashing").random((features, 2))
    bucket = (uniform_N2[:, 0] * dimensions).astype(np.int64)
    sign = np.where(uniform_N2[:, 1] < 0.5, -1, 1).astype(np.float32)
    return sp.csr_matrix((sign, (np.arange(features), bucket)), shape=(features, dimensions))


def _widen(rows: sp.csr_matrix, width: int) -> sp.csr_matrix:
    """The same rows with at least ``width`` columns."""
    shape = (rows.shape[0], max(width, rows.shape[1]))
    return sp.csr_matrix((rows.data, rows.indices, rows.indptr), shape=shape)


def _compute_content_ids(rows: sp.csr_matrix, label: list[str]) -> UnitIds:
    """A hash of every row's own label and entries."""
    index, value, start = rows.indices.astype("<i8"), rows.data.astype("<f8"), rows.indptr
    return make_content_ids(
        (name.encode(), index[a:b].tobytes(), value[a:b].tobytes())
        for name, (a, b) in zip(label, itertools.pairwise(start), strict=True)
    )
