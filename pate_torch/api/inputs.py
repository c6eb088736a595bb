"""Readers of tables, arrays, images and classes for PATEClassifier.

Each private row is read separately, so one private row cannot change another. A transform depends only on public points
and on declarations of the user.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from pate_torch.core import checks
from pate_torch.privacy.schema import MAX_CATEGORIES, TableSchema, format_value


def is_table(x: Any) -> bool:
    """Return whether ``x`` is a DataFrame of any library."""
    return hasattr(x, "columns") and hasattr(x, "__getitem__")


def is_images(x: Any) -> bool:
    """Return whether ``x`` is an array or a tensor of images [N, Ch, H, W]."""
    return getattr(x, "ndim", 0) == 4


def to_dense(x: Any) -> Any:
    """Convert a sparse matrix to an array; return other points as they are."""
    return x.toarray() if sparse.issparse(x) else x


@dataclass(frozen=True, eq=False, repr=False)
class PointTransform:
    """Transform of points to numbers that depends on public points alone.

    Attributes:
        schema: Schema of a table. None for arrays and images.
        mean: Means [D] of the public points; 0 for binary features. None for images.
        std: Standard deviations [D] of the public points; 1 for binary and constant features. None for images.
    """

    schema: TableSchema | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None

    @classmethod
    def from_public(
        cls, public: Any, categories: Mapping[str, Sequence[Any]] | None, *, is_encoded: bool
    ) -> tuple[PointTransform, Tensor]:
        """Make the transform from public points. Return the transform and the transformed public points.

        Features of an encoder (``is_encoded``) share one standard deviation.
        """
        if is_images(public):
            return cls(), torch.as_tensor(np.asarray(public))
        if is_table(public):
            schema = TableSchema.from_public(public, categories=categories, max_categories=MAX_CATEGORIES)
            schema = schema.with_fill_values(public)
            x_PD = schema.encode(public, unknown="zeros")
            is_numeric_D = np.isin(np.arange(x_PD.shape[1]), list(schema.numeric_indices))
        else:
            schema, x_PD = None, np.asarray(public)
            is_numeric_D = np.ones(x_PD.shape[1], bool)
        is_numeric_D &= ~((x_PD == 0) | (x_PD == 1)).all(0)  # binary features are not scaled
        mean, std = np.nan_to_num(np.nanmean(x_PD, 0)), np.nan_to_num(np.nanstd(x_PD, 0))
        if is_encoded:
            std[:] = np.sqrt(np.mean(std**2))
        mean, std = np.where(is_numeric_D, mean, 0.0), np.where(is_numeric_D & (std > 0), std, 1.0)
        return cls(schema, mean, std), _fill_missing(x_PD, mean)

    def __call__(self, x: Any, *, warns: bool = False) -> Tensor:
        """Convert points to numbers. The public mean replaces a number that is missing or not finite.

        With ``warns``, one warning lists the columns that have unknown categories. Never set it for private records.
        """
        if self.mean is None:
            return torch.as_tensor(np.asarray(x))
        if self.schema is not None:
            x = self.schema.encode(x, unknown="warn" if warns else "zeros", missing="nan")
        return _fill_missing(np.asarray(x), self.mean)

    def normalize(self, x: Tensor) -> np.ndarray:
        """Normalize points to rows for scikit-learn. Pixels of images are scaled to [0, 1]."""
        if self.mean is None or self.std is None:
            return x.flatten(1).numpy() / 255.0
        return (x.numpy() - self.mean) / self.std


def _fill_missing(x_ND: np.ndarray, mean_D: np.ndarray) -> Tensor:
    with np.errstate(over="ignore"):
        is_finite_ND = np.isfinite(x_ND.astype(np.float32))
    return torch.from_numpy(np.where(is_finite_ND, x_ND, mean_D).astype(np.float32))


def parse_cells(x: np.ndarray) -> np.ndarray:
    """Convert each cell of an array to float64, or to NaN if the cell is not a number."""
    return x.astype(np.float64) if x.dtype.kind in "biuf" else np.vectorize(_parse_number, otypes=[float])(x)


def _parse_number(value: Any) -> float:
    try:
        return float(value) if format_value(value) else math.nan
    except ValueError:
        return math.nan
    except TypeError:
        if isinstance(value, Mapping | Sequence):
            raise
        return math.nan


def encode_labels(y: np.ndarray, classes: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes [C] and the class number of each label, int64 [N], or -1 for a label outside the classes.

    Args:
        y: PRIVATE. Labels [N].
        classes: All classes. None takes the distinct labels, which the owner must have declared public.

    Raises:
        ValueError: There are fewer than two classes, two classes are equal, or no label is one of the classes.
    """
    if classes is None:
        check_classification_targets(y)
        class_C, label_N = np.unique(y, return_inverse=True)
    else:
        class_C = np.asarray(classes)
        number_by_key = {_to_class_key(value): number for number, value in enumerate(classes)}
        if len(number_by_key) < len(class_C):
            raise checks.error("classes", classes, "must be different from each other")
        values, index_N = (y, slice(None)) if y.dtype == object else np.unique(y, return_inverse=True)
        label_N = np.array([number_by_key.get(_to_class_key(value), -1) for value in values], dtype=np.int64)[index_N]
        if (label_N < 0).all():
            raise checks.error("classes", classes, "contains no value of y", "Write the classes as in y.")
    if len(class_C) < 2:
        raise ValueError(f"y: PATEClassifier needs at least 2 classes, but there is only one class: {class_C[0]!r}")
    return class_C, label_N.astype(np.int64)


def _to_class_key(value: Any) -> float | str:
    """Return the key of a class: the values 1, 1.0 and True are one class, and "1" is another class."""
    return float(value) if isinstance(value, int | float | np.bool_ | np.integer | np.floating) else format_value(value)


def predict_all_classes(learner: Any, x: np.ndarray, num_classes: int) -> np.ndarray:
    """Predict probabilities [N, C] by a scikit-learn classifier that may have been trained on fewer classes."""
    probability_NC = np.zeros((len(x), num_classes))
    if hasattr(learner, "predict_proba"):
        probability_NC[:, np.asarray(learner.classes_, dtype=int)] = learner.predict_proba(x)
    else:
        probability_NC[np.arange(len(x)), np.asarray(learner.predict(x), dtype=int)] = 1.0
    return probability_NC
