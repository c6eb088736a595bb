"""LIBSVM (svmlight) files. Their sparse rows become dense or are hashed to fewer dimensions."""

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
from pate_torch.data.file_source import FileRecords, FileSource, Points
from pate_torch.privacy.schema import normalize_class_name
from pate_torch.privacy.unit_ids import UnitIds, make_content_ids, parse_unit_ids

_MAX_FEATURES = 2**24  # drawing a random sign for each of more features would take minutes
_MAX_DENSE_FEATURES = 4096
_HASHED_DIMENSIONS = 1024


@dataclass(frozen=True, kw_only=True)
class Libsvm(FileSource):
    """Files (.svm, .svm.gz) with rows ``label index:value ...``. x: float32 [N, D].

    Rows of more than 4,096 features are projected to 1,024 dimensions by a fixed signed hashing.

    Attributes:
        num_features: Declared number of features. None for the largest index in public records. Features of larger
            indices are dropped.
        zero_based: Whether indices start at 0. It must be declared, because a guess would depend on private records.
        standardize: Whether features are centered and scaled by statistics of the public points.

    Source: hashing, Weinberger et al. 2009 (arXiv 0902.2206).
    """

    name: str = "libsvm"
    num_features: int | None = None
    zero_based: bool = False
    standardize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.optional(checks.one_of, "dataset.group", self.group, ("qid",))
        for key in ("zero_based", "standardize"):
            checks.boolean(f"dataset.{key}", getattr(self, key))
        checks.optional(checks.integer, "dataset.num_features", self.num_features, low=1, high=_MAX_FEATURES)

    def _read_file(self, role: int, key: str, path: Path) -> FileRecords:
        has_groups = self.group is not None
        try:
            rows, y, *query_ids = load_svmlight_file(str(path), zero_based=self.zero_based, query_id=has_groups)
        except (ValueError, OSError, EOFError, OverflowError, MemoryError, zlib.error) as error:
            # The parser's message is left out, because it quotes the file and this message may be logged.
            message = f"is not a readable LIBSVM file ({type(error).__name__})"
            fix = "Rows are 'label index:value ...'; with indices from 0 set dataset.zero_based=true."
            raise checks.error(key, str(path), message, fix) from error
        if len(y) == 0:
            raise checks.error(key, str(path), "has no rows")
        rows, labels = sp.csr_matrix(rows), [normalize_class_name(value) for value in y.tolist()]
        if not has_groups:
            return FileRecords(content=rows, labels=labels, unit_ids=_make_row_ids(rows, labels))
        if len(query_ids[0]) != len(y):
            raise checks.error("dataset.group", self.group, f"needs a field qid:<number> in every row of {path}")
        unit_ids = parse_unit_ids("dataset.group", query_ids[0], len(y))
        return FileRecords(content=rows, labels=labels, unit_ids=unit_ids)

    def _build_points(self, files: dict[int, FileRecords], role_N: np.ndarray) -> Points:
        width = max(file.content.shape[1] for file in files.values())
        rows = sp.vstack([_widen(file.content, width) for file in files.values()], format="csr")
        public_N = np.isin(role_N, self._public_roles)
        x = self._to_dense(rows, public_N)
        if not bool(x[torch.from_numpy(public_N)].isfinite().all()):
            message = "has public records whose features are not finite numbers"
            raise checks.error("dataset.name", self.name, message, "Remove NaN and infinity.")
        return Points(gather=x.__getitem__, options={"standardize": self.standardize})

    def _to_dense(self, rows: sp.csr_matrix, public_N: np.ndarray) -> Tensor:
        """Convert rows to float32 [N, D]."""
        width = self.num_features or int(rows[public_N].indices.max(initial=0)) + 1
        if width > _MAX_FEATURES:
            fix = f"Set dataset.num_features to at most {_MAX_FEATURES}. Features of larger indices are dropped."
            message = f"must be declared, because the largest feature index of public rows is {width}"
            raise checks.error("dataset.num_features", None, message, fix)
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and their records are dropped
            rows = _widen(rows, width)[:, :width].astype(np.float32)
        if width > _MAX_DENSE_FEATURES:
            rows = rows @ make_hashing_matrix(width, _HASHED_DIMENSIONS)
        return torch.from_numpy(rows.toarray())


def make_hashing_matrix(features: int, dimensions: int) -> sp.csr_matrix:
    """Make a fixed signed hashing, sparse [features, dimensions], with one +1 or -1 in each row."""
    uniform_N2 = rng.make_numpy_generator(0, "libsvm", "hashing").random((features, 2))
    bucket = (uniform_N2[:, 0] * dimensions).astype(np.int64)
    sign = np.where(uniform_N2[:, 1] < 0.5, -1, 1).astype(np.float32)
    return sp.csr_matrix((sign, (np.arange(features), bucket)), shape=(features, dimensions))


def _widen(rows: sp.csr_matrix, width: int) -> sp.csr_matrix:
    shape = (rows.shape[0], max(width, rows.shape[1]))
    return sp.csr_matrix((rows.data, rows.indices, rows.indptr), shape=shape)


def _make_row_ids(rows: sp.csr_matrix, labels: list[str]) -> UnitIds:
    index, value = rows.indices.astype("<i8"), rows.data.astype("<f8")
    ranges = zip(labels, itertools.pairwise(rows.indptr), strict=True)
    return make_content_ids((label.encode(), index[a:b].tobytes(), value[a:b].tobytes()) for label, (a, b) in ranges)
