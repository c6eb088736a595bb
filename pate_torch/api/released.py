"""The classifier of a release, for those who receive it. Linear students load and predict without torch.

    clf = ReleasedClassifier.load("release/")
    clf.predict(df); clf.predict_proba({"age": 61, "ward": "A"}); clf.score(test_df, test_y)

The probabilities are those of the student that ``load_student`` loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from pate_torch.core import checks
from pate_torch.core.images import convert_images
from pate_torch.privacy.schema import TableSchema
from pate_torch.students.numpy_student import NumpyStudent, find_student_file, parse_classes


class ReleasedClassifier(ClassifierMixin, BaseEstimator):
    """A released student as a scikit-learn classifier. It is made by ``load``, and cannot be trained.

    Points are a DataFrame, {column: values}, a list of records ({column: value}), one record, an array [N, D], uint8
    images [N, Ch, H, W], or what the encoder of the student takes. Missing numbers and unknown categories are encoded
    as in ``PATEClassifier.predict``; columns that the student does not know are ignored.

    Args:
        path: Folder of a release or of a run, or file of a student.

    Attributes:
        classes_: Classes [C], in the type in which the owner declared them.
        n_features_in_: Number of columns, of features, or of values of an image.
        feature_names_in_: Names of the columns of a table.
    """

    _student: Any

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = path

    @classmethod
    def load(cls, path: Path | str, *, encoder: Any = None) -> Self:
        """Load a released student. No code of the release is run.

        Args:
            path: Folder of a release or of a run, or file of a student.
            encoder: As for ``load_student``.

        Raises:
            ValueError: There is no student, or its file is damaged.
        """
        classifier, file = cls(path), find_student_file(path)
        classifier._student = NumpyStudent.load(file)
        if classifier._student is None or encoder is not None:
            from pate_torch.students.store import load_student  # imports torch

            classifier._student = load_student(file, encoder=encoder)
        spec = classifier._student.spec
        classifier._spec = spec if isinstance(spec, dict) else spec.to_dict()
        schema, classifier.classes_ = classifier._spec.get("schema"), parse_classes(classifier._spec)
        classifier._schema = TableSchema.from_dict(schema) if schema else None
        classifier.n_features_in_ = int(np.prod(classifier._spec["input_shape"]))
        if classifier._schema is not None:
            names = [column.name for column in classifier._schema.columns]
            classifier.feature_names_in_, classifier.n_features_in_ = np.array(names, dtype=object), len(names)
        return classifier

    def fit(self, X: Any, y: Any = None) -> Self:
        """Raise ValueError, because a release cannot be trained."""
        fix = "Call predict, predict_proba or score. In scikit-learn's meta-estimators, use FrozenEstimator."
        raise ValueError(f"fit: a released classifier cannot be trained further. {fix}")

    def predict(self, X: Any) -> np.ndarray:
        """Predict the most probable class of each point, [N]."""
        label_N = self.predict_proba(X).argmax(1)  # before classes_, because predict_proba checks for a student
        return self.classes_[label_N]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict class probabilities, float64 [N, C]. One warning names columns with missing or unknown categories."""
        check_is_fitted(self, "classes_", msg="%(name)s has no student: call ReleasedClassifier.load(path).")
        probability_NC = np.asarray(self._student.compute_probabilities(self._encode(X)), dtype=np.float64)
        return probability_NC / probability_NC.sum(1, keepdims=True)  # the sum of float32 is 1 to seven digits only

    def __sklearn_clone__(self) -> Self:
        return self  # there is nothing to train again

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.sparse = True
        return tags

    def _encode(self, X: Any) -> Any:
        shape, mean = tuple(self._spec["input_shape"]), np.float32(self._spec["mean"])
        if (self._spec.get("encoder") or {}).get("points") and np.shape(X)[1:] != shape:
            return X  # the student applies its encoder
        if len(shape) == 3:
            if not hasattr(X, "shape"):  # a Dataset or a folder
                from pate_torch.data.streams import PointForm, PointStream  # imports torch

                X = PointStream("X", X, PointForm(shape)).load().numpy()
            x = convert_images("X", X)[0]
            if x.shape[1:] != shape:
                raise checks.error("X", list(x.shape), f"must be images {['N', *shape]}")
            return x
        if self._schema is None:
            X = X.toarray() if hasattr(X, "toarray") else X
            x = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        else:
            has_fills = all(column.fill is not None for column in self._schema.columns if column.categories is None)
            x = self._schema.encode(_to_table(X), unknown="warn", missing="nan" if has_fills else "error")
        with np.errstate(over="ignore"):  # a number beyond float32 is missing, as in training
            x = x.astype(np.float32)
        return np.where(np.isfinite(x), x, mean)


def _to_table(X: Any) -> Any:
    """Convert a record or a list of records to {column: values}. Return other points as they are."""
    if isinstance(X, Mapping) and all(np.ndim(value) == 0 for value in X.values()):
        X = [X]
    if isinstance(X, list) and X and all(isinstance(record, Mapping) for record in X):
        return {name: [record.get(name) for record in X] for name in dict.fromkeys(name for row in X for name in row)}
    return np.array(X, dtype=object) if isinstance(X, list | tuple) else X
