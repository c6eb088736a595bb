"""Readers of tables, arrays, images and classes for PATEClassifier.

Each private row is read separately, so one private row cannot change another. A transform depends only on public points
and on declarations of the user.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.texts import parse_number
from pate_torch.privacy.schema import (
    MAX_CATEGORIES,
    Column,
    TableSchema,
    check_table_type,
    format_value,
    is_missing,
    make_key,
)


def is_table(x: Any) -> bool:
    """Return whether ``x`` is a DataFrame of any library."""
    return hasattr(x, "columns") and hasattr(x, "__getitem__")


def is_images(x: Any) -> bool:
    """Return whether ``x`` is an array or a tensor of images [N, Ch, H, W]."""
    return getattr(x, "ndim", 0) == 4


def has_words(x: Any) -> bool:
    """Return whether an array [N, D] has cells that are neither numbers nor missing, such as texts and dates."""
    is_checked = isinstance(x, np.ndarray) and x.dtype.kind not in "biuf"
    return is_checked and any(not is_missing(cell) and math.isnan(_parse_number(cell)) for cell in x.flat)


def check_rows(key: str, x: Any) -> None:
    """Refuse points that are no table, rows or images. The message quotes no value, because points may be private."""
    if is_table(x):
        check_table_type(key, x)
        names = list(map(str, x.columns))
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise checks.error(key, repeated, "must be names of one column each", "Rename the columns, or drop some.")
        return
    ndim = np.array(x, dtype=object).ndim if isinstance(x, list | tuple) else np.ndim(x)
    if ndim in (2, 4):
        return
    first, fix = next(iter(x), None) if ndim == 1 else None, "Reshape your data to one row for each record."
    if isinstance(first, str):
        fix = "If the points are texts, pass encoder=Encoder(...)."
    elif isinstance(first, Mapping):
        fix = f"Convert the records by pandas.DataFrame({key})."
    problem = "must be a DataFrame, or rows [N, D] with one record in each row"
    raise checks.error(key, f"{type(x).__name__} of {ndim} dimension(s)", problem, fix)


def to_dense(x: Any) -> Any:
    """Convert a sparse matrix to an array; return other points as they are."""
    return x.toarray() if sparse.issparse(x) else x


@dataclass(frozen=True, eq=False, repr=False)
class PointTransform:
    """Transform of points to numbers that depends on public points alone.

    Numbers are clipped to the public range where they are normalized, in private records as in new points: the released
    student includes the range (``DataSpec.low``). Features of an encoder are not clipped.

    Attributes:
        schema: Schema of a table. None for arrays and images.
        mean: Means [D] of the public points; 0 for binary features. None for images.
        std: Standard deviations [D] of the public points; 1 for binary and constant features. None for images.
        value_range: Smallest and largest values [D] of the public points. A constant feature is normalized to 0. None
            for images and for features of an encoder.
    """

    schema: TableSchema | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    value_range: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def from_public(
        cls, public: Any, categories: Mapping[str, Sequence[Any]] | None, *, is_encoded: bool
    ) -> tuple[PointTransform, Tensor]:
        """Make the transform from public points. Return the transform and the transformed public points.

        Features of an encoder (``is_encoded``) share one standard deviation.
        """
        if is_images(public):
            return cls(), torch.as_tensor(np.asarray(public))
        schema, is_numeric_D, is_declared_D = None, np.array(True), np.array(False)
        if has_words(public):
            public = {f"x{index}": column for index, column in enumerate(public.T)}
        if isinstance(public, dict) or is_table(public):
            schema = TableSchema.from_public(public, categories=categories, max_categories=MAX_CATEGORIES)
            schema = schema.with_fill_values(public)
            for name, values in (categories or {}).items():
                is_number = not TableSchema((Column(name, None),)).compute_unreadable_shares(public)[name]
                if is_number and schema.compute_unreadable_shares(public)[name] == 1:
                    problem = f"lists no value of column {name!r}, which holds numbers in the public points"
                    fix = "Leave out the column to use it as a number, or list its values."
                    raise checks.error("categories", {name: list(values)}, problem, fix)
            public = schema.encode(public, unknown="zeros")
            is_numeric_D = np.isin(np.arange(schema.num_features), schema.numeric_indices)
            is_declared_D = np.array([c.name in (categories or ()) for c in schema.columns for _ in c.features])
        with np.errstate(over="ignore"):  # a number beyond float32 is missing, as in private records
            x_PD: Any = np.ma.masked_invalid(np.asarray(public, dtype=np.float32)).astype(np.float64)
        low, high, mean, std = (part.filled(0.0) for part in (x_PD.min(0), x_PD.max(0), x_PD.mean(0), x_PD.std(0)))
        low, high = np.where(is_declared_D, 0.0, low), np.where(is_declared_D, 1.0, high)
        is_scaled_D = is_numeric_D & ~((x_PD == 0) | (x_PD == 1)).filled(False).all(0)  # binary features are not scaled
        if is_encoded:
            std[:] = np.sqrt(np.mean(std**2))
        mean = np.where(low == high, low, np.where(is_scaled_D, mean, 0.0))
        std = np.where(is_scaled_D & (std > 0), std, 1.0)
        value_range = None if is_encoded else (low, high)
        return cls(schema, mean, std, value_range), _fill_missing(x_PD.filled(np.nan), mean)

    def __call__(self, x: Any, *, warns: bool = False) -> Tensor:
        """Convert points to numbers. The public mean replaces a number that is missing or not finite.

        With ``warns``, one warning lists the columns that have unknown categories. Never set it for private records.
        """
        if self.mean is None:
            return torch.as_tensor(np.asarray(x))
        if self.schema is not None:
            x = self.schema.encode(x, unknown="warn" if warns else "zeros", missing="nan")
        return _fill_missing(np.asarray(x), self.mean)

    def is_real_valued(self, pool: Tensor) -> bool:
        """Return whether transformed public points [P, ...] are images, or differ in columns that are not integers.

        Such points equal other points only if they are copies: more than half of the points must be different.
        """
        if self.mean is None:
            return True
        x_PD = pool.numpy()
        is_filled_PD = x_PD == self.mean.astype(np.float32)  # the mean replaces missing numbers
        is_real_D = ((x_PD % 1 != 0) & ~is_filled_PD).any(0)
        return len(np.unique(x_PD[:, is_real_D], axis=0)) > len(x_PD) / 2


def check_public_points(X: Any, public: Any, x: Tensor, pool: Tensor, *, is_real: bool) -> None:
    """Refuse private records as public points, and warn of a few public points that equal private records.

    The refusal and the warning depend on private values. They are for the owner alone, and no file depends on them.

    Args:
        X: PRIVATE. Records as the user passed them.
        public: Public points as the user passed them.
        x: PRIVATE. Transformed records [N, ...].
        pool: Transformed public points [P, ...].
        is_real: Whether equal points are copies (``PointTransform.is_real_valued``). If points can be equal by chance,
            equal points are neither refused nor reported.

    Raises:
        ValueError: ``public`` is ``X`` or shares its memory; or more than half of the distinct public points equal
            private records, and ``is_real``.
    """
    if public is X or _share_memory(X, public):
        raise make_private_points_error(type(public).__name__)
    if not is_real:
        return
    points = {point.tobytes() for point in pool.numpy() + 0}  # -0.0 + 0 is 0.0
    num_equal = len(points.intersection(point.tobytes() for point in x.numpy() + 0))
    if num_equal > len(points) / 2:
        raise make_private_points_error(f"{num_equal} of {len(points)} distinct points")
    if num_equal:
        message = f"{num_equal} of {len(points)} distinct public points equal private records"
        warnings.warn(f"{message}. If they are the same records, no epsilon covers them.", stacklevel=4)


def make_private_points_error(value: str) -> ValueError:
    """Make the error for private records that were passed as public points."""
    problem = "holds records of X: public points are published, and no epsilon covers them"
    fix = "Give up some records by split_public(...), which removes them from X, or pass points from elsewhere."
    return checks.error("public", value, problem, fix)


def find_unreadable_columns(X: Any, schema: TableSchema | None) -> dict[str, float]:
    """PRIVATE. Find columns in which more than half of the private values are no numbers, or none of the categories.

    Args:
        X: PRIVATE. Table or rows [N, D], as the user passed them.
        schema: Schema of the public points. None if they are rows of numbers.

    Returns:
        Share of such values among the values that are not missing, by column. It is for the owner alone.
    """
    if not is_table(X):
        rows = np.array(X, dtype=object) if isinstance(X, list | tuple) else np.asarray(X)
        X = {f"x{index}": column for index, column in enumerate(rows.T)}
    table = {str(name): X[name] for name in _list_names(X)}
    columns = [Column(name, None) for name in table] if schema is None else schema.columns
    # Columns of numbers need no check, and their conversion to text takes long.
    columns = [column for column in columns if column.categories is not None or not _is_numeric(table[column.name])]
    shares = TableSchema(tuple(columns)).compute_unreadable_shares(table) if columns else {}
    return {name: share for name, share in shares.items() if share > 0.5}


def _is_numeric(column: Any) -> bool:
    return np.asarray(column).dtype.kind in "biuf"


def _share_memory(X: Any, public: Any) -> bool:
    pairs = [(X, public)] if hasattr(X, "shape") else []
    if is_table(X) or isinstance(X, Mapping):
        names, public_names = map(_list_names, (X, public))
        pairs = [(X[name], public[name]) for name in names if name in public_names and hasattr(X[name], "shape")]
    return any(np.shares_memory(np.asarray(column), np.asarray(other)) for column, other in pairs)


def _list_names(table: Any) -> list[Any]:
    if isinstance(table, Mapping):
        return list(table)
    return list(table.columns) if is_table(table) else []


def _fill_missing(x_ND: np.ndarray, mean_D: np.ndarray) -> Tensor:
    with np.errstate(over="ignore"):
        is_finite_ND = np.isfinite(x_ND.astype(np.float32))
    return torch.from_numpy(np.where(is_finite_ND, x_ND, mean_D).astype(np.float32) + 0)  # -0.0 becomes 0.0


def parse_cells(x: np.ndarray) -> np.ndarray:
    """Convert each cell of an array to float64, or to NaN if the cell is not a number."""
    if x.dtype.kind in "biuf":
        return x.astype(np.float64)
    return np.array(list(map(_parse_number, x.flat)), dtype=np.float64).reshape(x.shape)


def _parse_number(value: Any) -> float:
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):
        return float(value)  # type: ignore[arg-type]  # raises the TypeError that scikit-learn expects
    return parse_number(value) if format_value(value) else math.nan


def encode_labels(y: np.ndarray, classes: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes [C] and the class number of each label, int64 [N], or -1 for a label outside the classes.

    A missing label (None, NaN or pandas.NA) is outside the classes.

    Args:
        y: PRIVATE. Labels [N].
        classes: All classes. None takes the distinct labels, which the owner must have declared public.

    Raises:
        ValueError: There are fewer than two classes, or two classes are equal.
    """
    if classes is None:
        has_label_N = np.array([format_value(value) != "" for value in y])
        labels = np.array(y[has_label_N].tolist())  # of the type of the labels, without missing ones
        if labels.dtype.kind == "f" and (labels % 1 == 0).all():  # a missing label turns integers into floats
            labels = labels.astype(np.int64)
        if labels.dtype.kind == "U" and not all(isinstance(value, str) for value in y[has_label_N]):
            raise checks.error("classes", None, "must be listed, because the labels in y are of several types")
        check_classification_targets(labels)
        label_N = np.full(len(y), -1)
        class_C, label_N[has_label_N] = np.unique(labels, return_inverse=True)
    else:
        class_C = np.asarray(classes)
        number_by_key = {make_key(value): number for number, value in enumerate(classes)}
        if len(number_by_key) < len(class_C):
            raise checks.error("classes", classes, "must be different from each other")
        values, index_N = (y, slice(None)) if y.dtype == object else np.unique(y, return_inverse=True)
        label_N = np.array([number_by_key.get(make_key(value), -1) for value in values], dtype=np.int64)[index_N]
    if len(class_C) < 2:
        raise ValueError(f"y: PATEClassifier needs at least 2 classes, but there is only one class: {class_C.tolist()}")
    return class_C, label_N.astype(np.int64)


def parse_class_weight(class_weight: Any, classes: Sequence[Any]) -> Tensor | None:
    """Return the public weight of each class, float64 [C], or None for "balanced". Classes without a weight have 1."""
    if isinstance(class_weight, str):
        checks.one_of("class_weight", class_weight, ("balanced",))
        return None
    given = checks.mapping("class_weight", {} if class_weight is None else class_weight)
    weight_by_key = {make_key(value): checks.positive("class_weight", w) for value, w in given.items()}
    weights = [weight_by_key.pop(make_key(value), 1.0) for value in classes]
    if weight_by_key:
        raise checks.error("class_weight", class_weight, "has a weight for a value that is no class")
    return torch.tensor(weights, dtype=torch.float64)


def predict_all_classes(learner: Any, x: np.ndarray, num_classes: int) -> np.ndarray:
    """Predict probabilities [N, C] by a scikit-learn classifier that may have been trained on fewer classes."""
    probability_NC = np.zeros((len(x), num_classes))
    if hasattr(learner, "predict_proba"):
        own_columns = learner.predict_proba(x)
        is_complete = own_columns.shape[1] == num_classes  # such as a network of skorch, which always has C columns
        probability_NC[:, slice(None) if is_complete else np.asarray(learner.classes_, dtype=int)] = own_columns
    else:
        probability_NC[np.arange(len(x)), np.asarray(learner.predict(x), dtype=int)] = 1.0
    return probability_NC
