"""The classifier of a release, for those who receive it.

    clf = ReleasedClassifier.load("release/")
    clf.predict(df); clf.predict_proba([{"age": 61, "ward": "A"}]); clf.score(test_df, test_y)

Loading a linear student imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from pate_torch.core import checks
from pate_torch.privacy.schema import TableSchema
from pate_torch.students.files import find_student_file
from pate_torch.students.numpy_student import NumpyStudent, parse_classes


class ReleasedClassifier(ClassifierMixin, BaseEstimator):
    """A released student as a scikit-learn classifier, which cannot be trained. Make it by ``load``.

    Points are a DataFrame, {column: values}, a list of records ({column: value}), one record, an array [N, D], uint8
    images [N, Ch, H, W] or, if the student applies an encoder, what the encoder takes. Missing numbers and unknown
    categories are encoded as in ``PATEClassifier.predict``.

    Args:
        path: Folder of a release or of a run, or file of a student.

    Attributes:
        classes_: Classes [C], in the type in which the owner declared them.
        n_features_in_: Number of columns, of features, or of values of an image.
        feature_names_in_: Names of the columns, if the student has a table's schema.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = path

    @classmethod
    def load(cls, path: Path | str, *, encoder: Any = None) -> Self:
        """Load the student of a release. No code of the release is run.

        Args:
            path: Folder of a release or of a run, or file of a student.
            encoder: Encoder of the points, if the release does not contain it (see ``load_student``).

        Raises:
            ValueError: There is no student, or its file is damaged.
        """
        return cls(path)._read(encoder)

    def _read(self, encoder: Any = None) -> Self:
        file = find_student_file(self.path or "")
        self._student: Any = NumpyStudent.from_file(file) if encoder is None else None
        if self._student is None:
            from pate_torch.students.store import load_student  # imports torch

            self._student = load_student(file, encoder=encoder)
        is_linear = isinstance(self._student, NumpyStudent)
        self._facts = self._student.spec if is_linear else self._student.spec.to_dict()
        schema = self._facts.get("schema")
        self._schema = TableSchema.from_dict(schema) if schema else None
        self.classes_, self.n_features_in_ = parse_classes(self._facts), int(np.prod(self._facts["input_shape"]))
        if self._schema is not None:
            self.feature_names_in_ = np.array([column.name for column in self._schema.columns], dtype=object)
            self.n_features_in_ = len(self.feature_names_in_)
        return self

    def fit(self, X: Any, y: Any = None) -> Self:
        """Raise ValueError, because a release cannot be trained."""
        raise ValueError(
            "fit: a released classifier cannot be trained further. Use it with predict, predict_proba and score, or "
            "train PATEClassifier on records of your own. For scikit-learn's meta-estimators, wrap it in "
            "sklearn.frozen.FrozenEstimator."
        )

    def predict(self, X: Any) -> np.ndarray:
        """Predict the most probable class of each point, [N]."""
        label_N = self.predict_proba(X).argmax(1)  # before classes_, because predict_proba checks for a loaded student
        return self.classes_[label_N]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict class probabilities, float64 [N, C], in the order of ``classes_``.

        One warning names the columns that have missing or unknown categories.
        """
        check_is_fitted(self, "classes_", msg="This %(name)s has no student. Use ReleasedClassifier.load(path).")
        return np.asarray(self._student.compute_probabilities(self._encode(X)), dtype=np.float64)

    def __sklearn_clone__(self) -> Self:
        return self  # there is nothing to train again

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.sparse = True
        return tags

    def _encode(self, X: Any) -> Any:
        shape = tuple(self._facts["input_shape"])
        if (self._facts.get("encoder") or {}).get("points") and getattr(X, "shape", (0, 0))[1:] != shape:
            return X  # raw points, to which the student applies the encoder
        if len(shape) == 3:
            x = np.asarray(X)
            if x.dtype != np.uint8 or x.shape[1:] != shape:
                raise checks.error("X", f"{x.dtype} {x.shape}", f"must be uint8 images of shape {('N', *shape)}")
            return x
        if self._schema is None:
            x = validate_data(self, X.toarray() if hasattr(X, "toarray") else X, reset=False, dtype=np.float64,
                              ensure_all_finite="allow-nan")  # fmt: skip
        else:
            has_fills = all(column.fill is not None for column in self._schema.columns if column.categories is None)
            x = self._schema.encode(_to_table(X), unknown="warn", missing="nan" if has_fills else "error")
        with np.errstate(over="ignore"):  # a number beyond float32 is missing, as in training
            x = x.astype(np.float32)
        return np.where(np.isfinite(x), x, np.float32(self._facts["mean"]))


def _to_table(X: Any) -> Any:
    """Convert a record or a list of records to {column: values}. Return other points as they are."""
    if isinstance(X, Mapping) and all(np.ndim(value) == 0 for value in X.values()):
        X = [X]
    if isinstance(X, list) and X and all(isinstance(record, Mapping) for record in X):
        names = dict.fromkeys(name for record in X for name in record)
        return {name: [record.get(name) for record in X] for name in names}
    return np.array(X, dtype=object) if isinstance(X, list | tuple) else X
