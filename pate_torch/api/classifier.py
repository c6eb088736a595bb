"""A scikit-learn classifier that learns from private records and public points. The fitted model may be published.

    clf = PATEClassifier(epsilon=1.0, account="clinic", num_records_about=30_000, classes=["ill", "well"])
    clf.fit(df, y, public=public_df, groups=patient_id)     # prints the method and a forecast, charges, and trains
    clf.predict(new_df); clf.predict_proba(new_df); clf.score(test_df, test_y)
    clf.save_release("release/"); clf.privacy_              # the privacy statement, as in privacy.json

The method and the noise depend on public facts alone (``planning.autoconfig``). The public points determine columns,
categories, scaling and the values that replace missing numbers. ``PATE`` has more parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from pate_torch.api.estimator import AccountEstimator
from pate_torch.api.inputs import (
    PointTransform,
    check_public_points,
    check_rows,
    encode_labels,
    find_unreadable_columns,
    has_words,
    is_images,
    is_table,
    parse_cells,
    parse_class_weight,
    predict_all_classes,
    to_dense,
)
from pate_torch.api.messages import CLASSIFIER_WORDS, reword_errors
from pate_torch.api.pate import PATE, select_student_network
from pate_torch.core import checks, texts
from pate_torch.core.device import parse_device
from pate_torch.core.progress import Stages
from pate_torch.core.rng import seeded_generators
from pate_torch.data.base import get_categories_origin
from pate_torch.data.encoded_dataset import encode_by_role
from pate_torch.data.streams import PointForm, PointStream, is_streamed
from pate_torch.features.encoder import TEXT_SPEC, Encoder
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.gradients import GradientMethod
from pate_torch.planning import autoconfig
from pate_torch.privacy import records as origins
from pate_torch.privacy.records import DataSpec, EncoderCard
from pate_torch.privacy.unit_ids import name_unit, parse_unit_ids
from pate_torch.release import store as release_store
from pate_torch.release.builder import compare_predictions
from pate_torch.release.renderer import copy_release
from pate_torch.release.report import ReleaseReport
from pate_torch.session import ReleaseSession
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.linear import CountRegression, Logistic, ReleasedModel
from pate_torch.students.private_test import PrivateTest, compute_release_epsilon, format_size_warning
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.semi_supervised import FixMatch
from pate_torch.students.store import load_student
from pate_torch.students.training import Supervised
from pate_torch.teachers.panel import check_learner, convert_points, copy_estimator

MIN_PUBLIC_POINTS: Final = 10
"""Number of public points below which a fit is refused, unless ``spend_anyway``."""


@dataclass(eq=False, repr=False)
class PATEClassifier(ClassifierMixin, AccountEstimator):
    """A differentially private classifier.

    Args:
        epsilon: Privacy cost of the fit, in epsilon.
        account: Name of the ledger account of the private data set. Every release from the data set is charged to it.
        num_records_about: Approximate number of private records, if the number is public. It replaces the noisy total
            of the class counts if both agree within two standard deviations. ``method="dpsgd"`` needs it.
        cap: Largest total epsilon of the account, fixed by its first charge. None for the cap of the existing account,
            or for 10 if the account is new (or ``epsilon``, if larger).
        delta: Delta of the guarantee, which should be far below 1/(number of records).
        classes: All classes, in order. Required unless ``classes_are_public``.
        classes_are_public: Whether the distinct values of ``y`` are public. If True and ``classes`` is None, these
            values are the classes, and the privacy statement mentions their origin.
        categories: Mapping from the name of a categorical DataFrame column to its allowed values. The public points
            determine the values of other columns.
        encoder: Frozen ``features.encoder.Encoder`` for lists of texts; or ``EncoderCard(name=..., kind="given")`` if
            an encoder has already computed each row from one point alone. None if there is no encoder.
        method: "auto", "teachers", "gradients" or "dpsgd". "auto" follows the rule in ``planning.autoconfig``.
        teacher: Teacher for ``method="teachers"``, of a type that ``PATE`` accepts. None for the rule's choice.
        student: Learner of the released labels: a StudentAlgorithm, whose student is part of the release; or a
            scikit-learn or skorch classifier, a ``Network`` or a class or function that returns a torch.nn.Module,
            which are not part of the release. None for the method's default.
        num_teachers: Number K of teachers. None for the rule's choice.
        num_queries: Number of public points that teachers label. None for the rule's choice.
        adjacency: Neighboring relation, "add_remove", or "replace_one" if each record is a unit.
        allow_refit: Whether to charge an account that has already been charged, if only by a fit that stopped. If a fit
            was interrupted after its charge, the same fit finishes it free of charge, even without this option.
        class_weight: Weights of the classes in the prediction, which change the logits by their logarithms: a mapping
            from class to public weight; or "balanced" for 1 / (C * noisy frequency of the class). Training does not
            change. For a model that can represent the class probabilities, this equals training with these weights.
            None for equal weights.
        private_test: Share of the private units that every release of the account leaves out of training, so that
            epsilon also pays for a test of the model on them. The first fit of the account fixes it. 0 for no test.
        chosen_by: How this release was chosen among several settings, for the privacy statement: "public data",
            "priced" or "private scores" (such as cross-validation on private records). None if not stated.
        allow_duplicate_account: Whether these records may also be charged to an account of another name.
        spend_anyway: Whether to spend the whole epsilon even if no skill is expected of the model, or public points
            or records for each teacher are very few.
        home: Absolute path of the folder of ledger, teachers and runs. None for PATE_HOME or, if PATE_HOME is not set,
            the user's store for ledger and teachers, and ``outputs`` in the working directory for runs.
        random_state: Seed of everything except the noise, which is always secret. None draws a new seed for each fit; a
            fit that was interrupted after its charge can then not be finished for free.
        device: Device on which networks are trained: "cpu", "cuda", "cuda:<n>", "mps" or "auto".
        verbose: Whether to print the chosen method, the forecast, the charge and the progress. The logger
            ``pate_torch.api.classifier`` also gets all but the progress, at level INFO.
        callback: Function callback(stage, done, total) that is told the progress. It is for the owner alone, because
            some stages count private records. If it raises an error, the fit ends. None to tell nothing.

    Attributes:
        classes_: Classes, [C].
        method_: Chosen method, with the reason (``planning.autoconfig.MethodConfig``).
        privacy_: Privacy statement, as in privacy.json.
        total_: Guarantee of all releases of the account after the fit (``accounting.accountant.Guarantee``).
        release_: Folder that may be published.
        student_: Model that predicts.
        class_counts_: Noisy number of units in each class, [C], which may be published. None for ``method="dpsgd"``.
        private_test_: Noisy result on held-out units (``students.private_test``). None without ``private_test``.
        unknown_counts_: Number of points of the last prediction whose category was unknown, by column.
    """

    _: KW_ONLY
    num_records_about: float | None = None
    classes: Sequence[Any] | None = None
    classes_are_public: bool = False
    categories: Mapping[str, Sequence[Any]] | None = None
    encoder: Encoder | EncoderCard | None = None
    method: str = "auto"
    teacher: Any = None
    student: Any = None
    num_teachers: int | None = None
    num_queries: int | None = None
    class_weight: Mapping[Any, float] | str | None = None
    private_test: float = 0.0
    device: str = "cpu"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        tags.non_deterministic = True  # no seed may determine the noise
        tags.classifier_tags.poor_score = True  # scikit-learn's checks have a few dozen records, too few for privacy
        return tags

    @reword_errors(CLASSIFIER_WORDS)
    def fit(self, X: Any, y: Any = None, *, public: Any = None, groups: Any = None) -> PATEClassifier:
        """Charge the account and train the released model.

        Args:
            X: PRIVATE. DataFrame or rows [N, D]; images [N, H, W] or [N, Ch, H, W], uint8 or floats in 0..1; the path
                of a folder of images in class folders; a map-style Dataset of points or of tuples (point, class), which
                is read one by one (``data.streams.PointStream``); or a list of N texts for an ``Encoder``.
            y: PRIVATE. Classes [N], one for each record. None for the classes of a folder or a Dataset.
            public: Public points of the same form as ``X``, whose labels are ignored. Their values may be published.
            groups: PRIVATE. Privacy unit of each record, such as a patient, [N]. Records that belong to several units,
                such as mails of a sender and its receivers, are not supported. None if the unit is a record.

        Raises:
            ValueError: An argument is wrong, and nothing has been charged; or, after the charge, no public point has
                a label from which the student could learn.
            BudgetExceeded: The charge would exceed the cap of the account. Nothing has been drawn or charged.
            ReleaseStopped: The noisy class counts show too few records for the noise, so that the model is expected to
                be no better than the class frequencies. Only the counts are charged, and another fit is a new charge,
                which needs ``allow_refit``.
            KeyboardInterrupt: Ctrl-C. The message tells what was charged, and how to go on.
        """
        self._check_parameters()
        self._seed = self._draw_seed()
        self.private_test_: PrivateTest | None = None
        with self._explain_errors():
            x, label_N, pool = self._read_points(X, y, public)
            unit_ids = None if groups is None else parse_unit_ids("groups", groups, len(x))
            facts = self._collect_facts(len(x), pool, has_groups=groups is not None)
            self._choose_method(facts)
            self._weight_C = parse_class_weight(self.class_weight, self.classes_.tolist())
            unit = name_unit(groups)
            pate = self._make_pate_of_method(facts, unit)
            self._spec = spec = pate.make_spec(pool, pool)
            self._announce(f"{self._format_terms(unit)}: {self.method_.reason}.")
            test_warning = format_size_warning(self.private_test, self.num_records_about)
            self._announce(f"  {self.method_.expectation} {test_warning}".rstrip())
            if not isinstance(self.student, StudentAlgorithm | None):
                check_learner("student", self.student, spec)
            pate.fit_teachers(x, torch.from_numpy(label_N), unit_id=unit_ids, public_x=pool)
            if self.method_.name == "dpsgd":
                self.class_counts_: np.ndarray | None = None
                folder = self._fit_dpsgd(pate, pool, facts)
            else:
                self.student_, folder = self._release_and_fit(pate, pool, spec, facts), pate.folder
            self._set_release(folder)
        return self

    def find_unreadable_columns(self, X: Any, public: Any) -> dict[str, float]:
        """PRIVATE. Find columns of records that a fit could hardly use, before anything is charged.

        Args:
            X: PRIVATE. DataFrame or rows [N, D].
            public: Public points of the same form.

        Returns:
            For each column in which more than half of the values are no numbers, or none of the categories, this share
            of its values that are not missing. It is exact, and for the owner alone.
        """
        transform, _ = PointTransform.from_public(to_dense(public), self.categories, is_encoded=False)
        return find_unreadable_columns(to_dense(X), transform.schema)

    def predict(self, X: Any) -> np.ndarray:
        """Predict the most probable class of each point, [N]."""
        label_N = self.predict_proba(X).argmax(1)  # before classes_, because predict_proba checks for a fitted model
        return self.classes_[label_N]

    @reword_errors(CLASSIFIER_WORDS)
    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict class probabilities [N, C], in the order of ``classes_``."""
        check_is_fitted(self, "student_")
        if self._form is not None and is_streamed(X):
            stream = PointStream("X", X, PointForm(self._form.shape))
            X = stream.iterate_blocks() if isinstance(self.encoder, Encoder) else stream.load().numpy()
        if isinstance(self.encoder, Encoder):
            features = self.encoder.encode(X, self._encoder_spec, device=self.device)
            X = features.nan_to_num(0, 0, 0).numpy()  # as ``encode_by_role``
        schema = self._transform.schema
        x = self._validate_points(to_dense(X), reset=False, with_words=schema is not None)
        x = self._transform(x, warns=True)
        self.unknown_counts_ = {} if schema is None else schema.count_unknown(x.numpy())
        if isinstance(self.student_, Student):
            probability_NC = self.student_.compute_probabilities(x).double().numpy()
        else:
            points = convert_points(self.student_, self._spec, x)
            probability_NC = predict_all_classes(self.student_, points, len(self.classes_))
        return probability_NC / probability_NC.sum(1, keepdims=True)  # the sum of float32 is 1 to seven digits only

    @reword_errors(CLASSIFIER_WORDS)
    def save_release(self, folder: Path | str, *, evaluation: tuple[Any, Any] | None = None) -> Path:
        """Copy everything that may be published into a new folder.

        Args:
            folder: Folder that does not exist or is empty.
            evaluation: PUBLIC test points and their classes, (X_test, y_test). The accuracy, its 95 % interval and the
                confusion matrix are published in the copy, exactly and without a charge. Never pass private records:
                no guarantee would cover them. None to publish no accuracy.

        Raises:
            ValueError: The folder is not empty, a test class is unknown, or the release has no student to evaluate.
        """
        check_is_fitted(self, "student_")
        if evaluation is not None and not (isinstance(evaluation, tuple | list) and len(evaluation) == 2):
            problem = "must be public test points and their classes, (X_test, y_test)"
            raise checks.error("evaluation", type(evaluation).__name__, problem)
        report = None if evaluation is None else self._evaluate(*evaluation)
        return copy_release(self.release_, Path(folder), report)

    def _evaluate(self, X: Any, y: Any) -> ReleaseReport:
        """Return the report of the release with the accuracy on public test points."""
        if self._report.record.student is None:
            problem = "needs a student in the release, but student=... of this classifier is not part of it"
            raise checks.error("evaluation", "(X_test, y_test)", problem, "Pass a StudentAlgorithm, or student=None.")
        with checks.prefixed_errors("evaluation"):
            y = column_or_1d(np.array(y, dtype=object) if isinstance(y, list | tuple) else y)
            prediction_N = self.predict_proba(X).argmax(1)
        label_N = encode_labels(y, self.classes_.tolist())[1]
        if len(label_N) != len(prediction_N) or (label_N < 0).any() or len(y) == 0:
            names = ", ".join(map(repr, self.classes_.tolist()))
            problem = f"y_test must hold one of the classes {names} for each of the {len(prediction_N)} test points"
            raise checks.error("evaluation", f"{len(y)} labels, {(label_N < 0).sum()} of no class", problem)
        truth_N, guess_N = torch.from_numpy(label_N), torch.from_numpy(prediction_N)
        metrics = compare_predictions(truth_N, guess_N, len(self.classes_))
        return replace(self._report, evaluation=replace(self._report.evaluation, **metrics))

    # ---- arguments ----------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        """Raise ValueError for a parameter that is wrong for every data set."""
        self._check_account()
        if not checks.boolean("classes_are_public", self.classes_are_public) and self.classes is None:
            problem = "must list all classes: the values of y are private, and the release names its classes"
            fix = "Pass classes=[...], or pass classes_are_public=True if the distinct values of y are public."
            raise checks.error("classes", None, problem, fix)
        if self.classes is not None and (np.ndim(self.classes) != 1 or len(self.classes) == 0):
            problem, fix = "must be a list of all classes, in order", 'For example classes=["ill", "well"].'
            raise checks.error("classes", self.classes, problem, fix)
        checks.number("private_test", self.private_test, "Pass 0 for no test, or a share of the units such as 0.1.")
        for column, values in checks.mapping("categories", self.categories or {}).items():
            if len(checks.collection(f"categories[{column!r}]", values)) == 0:
                problem = "must list the values of the column, or leave it out"
                raise checks.error("categories", {column: list(values)}, problem)
        student = self.student
        if student is not None and self.method == "dpsgd":
            problem = "cannot be combined with method='dpsgd', which releases no labels for a student"
            raise checks.error("student", type(student).__name__, problem, "Omit student.")
        for key, value in {"class_weight": self.class_weight, "private_test": self.private_test}.items():
            is_adjustable = student is None or (isinstance(student, StudentAlgorithm) and student.has_linear_output)
            if value and (self.method == "dpsgd" or not is_adjustable):
                problem = "needs a student of linear output that is part of the release, and noisy class counts"
                raise checks.error(key, value, problem, "Use another method than 'dpsgd', and another student.")
        for key, value in {"num_teachers": self.num_teachers, "num_queries": self.num_queries}.items():
            if value is not None:
                checks.integer(key, value, low=1)
        parse_device(self.device)
        if not isinstance(self.encoder, Encoder | EncoderCard | None):
            problem = "must be an Encoder, or the EncoderCard of the encoder that computed the rows"
            raise checks.error("encoder", type(self.encoder).__name__, problem)

    def _read_points(self, X: Any, y: Any, public: Any) -> tuple[Tensor, np.ndarray, Tensor]:
        """PRIVATE. Read records [N, ...], class numbers [N] (-1 if unusable) and public points; set ``classes_``."""
        if public is None:
            problem = "must be public points: rows like those of X, without labels, whose values may be published"
            fix = (
                "\nThe classifier reads columns, categories and scaling off these rows, never off private records.\n"
                "If you have none, give up a part of the records: X, public, y, _ = pate_torch.split_public(X, y, "
                "publish_split=True)."
            )
            raise checks.error("public", None, problem, fix)
        given_points = (X, public)
        X, public = to_dense(X), to_dense(public)
        streams = self._open_streams(X, public)
        X, public, is_readable_N = self._encode_texts(X, public) if streams is None else self._read_streams(*streams)
        y = streams[0].labels if y is None and streams is not None else y
        X, public = self._check_points(X, public)
        is_encoded = self.encoder is not None
        with reword_errors({r"^table(?==)": "public"}):
            self._transform, pool = PointTransform.from_public(public, self.categories, is_encoded=is_encoded)
        x = self._transform(X)
        has_texts = isinstance(self.encoder, Encoder) and streams is None
        is_real = not has_texts and self._transform.is_real_valued(pool)
        check_public_points(*given_points, x, pool, is_real=is_real)
        if y is None:
            problem = "must hold one class for each record of X: PATEClassifier requires y to be passed"
            raise checks.error("y", None, f"{problem}, but the target y is None")  # the words of scikit-learn's checks
        if isinstance(y, list | tuple):
            y = np.array(y, dtype=object)  # NumPy would convert all labels to strings if one label is a string
        if np.ndim(y) == 2 and np.shape(y)[1] != 1:
            fix = "Several labels of a record are not supported: fit one classifier for each label."
            raise checks.error("y", type(y).__name__, "must hold one class for each record of X", fix)
        y = column_or_1d(y, warn=True)
        if len(y) != len(x):
            raise checks.error("y", f"{len(y)} labels", f"must hold one class for each of the {len(x)} records of X")
        self.classes_, label_N = encode_labels(y, self.classes)
        self.unknown_counts_ = {}
        return x, np.where(is_readable_N, label_N, -1), pool

    def _open_streams(self, X: Any, public: Any) -> tuple[PointStream, PointStream] | None:
        """PRIVATE. Open X and public. Return None if they are no datasets, folders or images."""
        self._form: PointForm | None = None
        self._encoder_spec = TEXT_SPEC
        if not is_streamed(X) and not is_streamed(public):
            return None
        if not is_streamed(X) or not is_streamed(public):
            raise _form_error(X, public)
        size = self.encoder.size if isinstance(self.encoder, Encoder) else None
        pool = PointStream("public", public, size=size)
        private = PointStream("X", X, pool.form, adjacency=self.adjacency)
        self._form, self._encoder_spec = pool.form, pool.form.make_encoder_spec()
        return private, pool

    def _read_streams(self, private: PointStream, public: PointStream) -> tuple[Any, Any, np.ndarray]:
        """PRIVATE. Read the points or encode them. Also return which private points could be read."""
        with Stages(quiet=not self.verbose, callback=self.callback) as stages:
            if isinstance(self.encoder, Encoder):
                x, pool = self._encode_sides(private, public, stages)
            else:
                x, pool = private.load(stages).numpy(), public.load(stages).numpy()
        return x, pool, private.is_readable_N

    def _encode_sides(self, private: Any, public: Any, stages: Stages) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(self.encoder, Encoder)
        features = encode_by_role(
            self.encoder,
            self._encoder_spec,
            {"public": public, "private": private},
            name=str(self.account),
            root=self._home,
            device=parse_device(self.device),
            stages=stages,
        )
        return features["private"].numpy(), features["public"].numpy()

    def _encode_texts(self, X: Any, public: Any) -> tuple[Any, Any, np.ndarray | bool]:
        """PRIVATE. Encode all texts if ``encoder`` is an Encoder. Also return which private records have a text."""
        if not isinstance(self.encoder, Encoder):
            return X, public, True
        has_text_N = np.array([texts.is_text(text) for text in X], dtype=bool)
        X = [text if has_text else "-" for text, has_text in zip(X, has_text_N.tolist(), strict=True)]
        private, pool = (self.encoder.to_tensor(points, TEXT_SPEC) for points in (X, public))
        with Stages(quiet=not self.verbose, callback=self.callback) as stages:
            return *self._encode_sides(private, pool, stages), has_text_N

    def _check_points(self, X: Any, public: Any) -> tuple[Any, Any]:
        """Check that X and public have the same form. The encoding of a table checks its cells later."""
        if is_images(X) != is_images(public) or is_table(X) != is_table(public):
            raise _form_error(X, public)
        check_rows("X", X)
        check_rows("public", public)
        if len(public) == 0:
            raise checks.error("public", "0 points", "must hold at least one point", "Pass public points.")
        with_words = False
        if not is_images(public) and not is_table(public):
            public = np.array(public, dtype=object) if isinstance(public, list | tuple) else np.asarray(public)
            with_words = has_words(public)
        X = self._validate_points(X, reset=True, with_words=with_words)
        if is_table(X):
            columns = [*map(str, public.columns)]
            if missing := [name for name in map(str, X.columns) if name not in columns]:
                raise checks.error("public", columns, f"lacks the columns {', '.join(missing)} of X")
            return X, public[list(X.columns)]
        if not is_images(X):
            public = public if with_words else parse_cells(public)
            dtype = object if with_words else np.float64
            public = check_array(public, dtype=dtype, ensure_all_finite="allow-nan", input_name="public")
        if tuple(public.shape[1:]) != tuple(X.shape[1:]):
            raise checks.error("public", tuple(public.shape), f"must have points like X, {tuple(X.shape[1:])}")
        return X, public

    def _validate_points(self, X: Any, *, reset: bool, with_words: bool = False) -> Any:
        """Check points as scikit-learn does. Set (``reset``) or compare the names and the number of features.

        In private records (``reset``), a cell that is not a finite number counts as missing, unless the public array
        has words (``with_words``), so that its columns are those of a table.
        """
        if is_images(X):
            width = int(np.prod(X.shape[1:]))
            if reset:
                self.n_features_in_ = width
            elif width != self.n_features_in_:
                raise checks.error("X", tuple(X.shape), f"must be images with {self.n_features_in_} values each")
            return X
        if not reset:
            check_rows("X", X)
        if is_table(X):
            X = X if reset else self._select_columns(X)
            return validate_data(self, X, reset=reset, skip_check_array=True)
        if not reset and not with_words:
            return validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        X = np.array(X, dtype=object) if isinstance(X, list | tuple) else X  # for the same reason as y
        x = validate_data(self, X, reset=reset, dtype=object if with_words else None, ensure_all_finite=False)
        return x if with_words else parse_cells(x)

    def _select_columns(self, X: Any) -> Any:
        """Leave out columns of a table that ``fit`` did not see. Raise ValueError for another order of the others."""
        names = [*self.feature_names_in_] if hasattr(self, "feature_names_in_") else []
        columns = [name for name in X.columns if name in {*names}]
        if not names or sorted(columns) != sorted(names):
            return X  # scikit-learn's check names what is missing
        if columns != names:
            problem = "The feature names should match those that were passed during fit.\nFeature names must be in the "
            raise ValueError(f"{problem}same order as they were in fit.\nPass X[list(clf.feature_names_in_)].")
        return X[columns]

    # ---- choices ------------------------------------------------------------------------------------------------

    def _collect_facts(self, num_private: int, pool: Tensor, *, has_groups: bool) -> autoconfig.PublicFacts:
        checks.one_of("adjacency", self.adjacency, ("add_remove", "replace_one"))
        num_records = num_private if self.adjacency == "replace_one" else None  # the number is public there
        if self.num_records_about is not None:
            size = self.num_records_about
            size = int(size) if isinstance(size, float) and size.is_integer() else size
            num_records = checks.integer("num_records_about", size, low=1)
        epsilon, delta = self.epsilon, checks.delta("delta", self.delta)
        if self.private_test:  # the private test costs the rest of mu^2
            epsilon = compute_release_epsilon(epsilon, delta)
        return autoconfig.PublicFacts(
            epsilon=epsilon,
            delta=delta,
            adjacency=self.adjacency,
            has_groups=has_groups,
            num_records=num_records,
            num_public=len(pool),
            num_classes=len(self.classes_),
            is_image=pool.dim() == 4,
            is_encoded=self.encoder is not None,
            has_own_teacher=self.teacher is not None,
        )

    def _choose_method(self, facts: autoconfig.PublicFacts) -> None:
        """Set ``method_``. Raise ValueError if public numbers forbid a useful model, unless ``spend_anyway``."""
        self.method_ = autoconfig.choose_method(facts, self.method, self.num_teachers, self.num_queries)
        if self.teacher is not None and self.method_.name != "teachers":
            problem = f"requires method='teachers', but the method is {self.method_.name!r}"
            raise checks.error("teacher", type(self.teacher).__name__, problem, "Set method='teachers'.")
        if self.spend_anyway:
            return
        if facts.num_public < MIN_PUBLIC_POINTS:
            problem = f"are fewer than {MIN_PUBLIC_POINTS}, too few to show the ranges of the columns or to be labeled"
            fix = "Pass more public points, or pass spend_anyway=True to charge the account anyway."
            raise checks.error("public", f"{facts.num_public} points", problem, fix)
        size, max_teachers = facts.num_records, (facts.num_records or 0) // facts.num_classes
        if size is not None and self.num_teachers is not None and self.num_teachers > max_teachers:
            problem = f"is too large for {size} records: a teacher would have fewer of them than there are classes"
            fix = f"Pass at most {max_teachers}, or pass spend_anyway=True to charge the account anyway."
            raise checks.error("num_teachers", self.num_teachers, problem, fix)
        if self.method_.is_noise_dominated:
            problem = "is too small for teachers: according to the forecast, their labels would be mostly noise"
            fix = "Pass a larger epsilon, or pass spend_anyway=True to charge the account anyway."
            if facts.num_records is None:
                fix = f"Use method='gradients', or pass num_records_about=... if this number is public. {fix}"
            raise checks.error("epsilon", self.epsilon, problem, fix)

    def _make_pate_of_method(self, facts: autoconfig.PublicFacts, unit: str) -> PATE:
        method, transform = self.method_, self._transform
        options: dict[str, Any] = {}
        if method.name == "dpsgd":
            from pate_torch.methods.dpsgd import DPSGD  # imported here, because the module imports Opacus

            teacher: Any = DPSGD(network="cnn" if facts.is_image else "mlp")
        elif method.name == "gradients":
            assert isinstance(method.mechanism, GradientDescent)
            teacher = GradientMethod(
                size=facts.num_records,
                mechanism=method.mechanism,
                class_counts=method.class_counts,
                plans_from_counts=True,
            )
        else:
            assert isinstance(method.mechanism, VoteMechanism)
            teacher = method.teacher if self.teacher is None else self.teacher
            options = {"num_teachers": method.num_teachers, "mechanism": method.mechanism}
            options["first_answers"] = method.class_counts
        return self._make_pate(
            teacher,
            classes=self.classes_.tolist(),
            unit=unit,
            seed=self._seed,
            private_test=self.private_test,
            provenance=self._collect_provenance(),
            mean=None if transform.mean is None else transform.mean.tolist(),
            std=None if transform.std is None else transform.std.tolist(),
            value_range=transform.value_range,
            schema=transform.schema,
            encoder=self.encoder.make_card(self._encoder_spec) if isinstance(self.encoder, Encoder) else self.encoder,
            device=self.device,
            allow_uninformative_labels=self.spend_anyway,
            **options,
        )

    def _collect_provenance(self) -> dict[str, str]:
        provenance = {
            origins.CLASSES: origins.FROM_PRIVATE_LABELS if self.classes is None else origins.FROM_OWNER,
            origins.NORMALIZATION_CONSTANTS: origins.FROM_PUBLIC_POINTS,
        }
        if self._transform.schema is not None:
            provenance[origins.CATEGORIES] = get_categories_origin(self._transform.schema, self.categories or ())
        if self.num_records_about is not None:
            provenance[origins.NUMBER_OF_RECORDS] = origins.FROM_OWNER
        return provenance

    # ---- training -----------------------------------------------------------------------------------------------

    def _release_and_fit(self, pate: PATE, pool: Tensor, spec: DataSpec, facts: autoconfig.PublicFacts) -> Any:
        """Release labels of the public points, train the student, weight its classes and test it."""
        method, student = self.method_, self.student
        options: dict[str, Any] = {"features": method.features, "finish": False}
        options["student"] = student if isinstance(student, StudentAlgorithm) else None
        release = pate.label(pool, method.num_queries, **options)
        first_answers = release_store.read_first_answers(pate.folder)
        self.class_counts_ = None if first_answers is None else first_answers.counts_C.numpy()
        if first_answers is not None and isinstance(method.mechanism, GradientDescent):
            size = first_answers.estimate_size(facts.num_records if self.adjacency == "replace_one" else None)
            self_training = autoconfig.needs_self_training(facts, size, method.mechanism)
            method = self.method_ = replace(method, self_training=self_training)
        if hasattr(student, "get_params"):
            x_AD = convert_points(student, spec, pool[release.query_Q[release.answered_Q]])
            with seeded_generators(self._seed, "student"):
                student = copy_estimator(student).fit(x_AD, release.label_Q[release.answered_Q].numpy())
        else:
            student = pate.fit_student(self._select_student(spec) if student is None else student)
        if self.class_weight is not None:
            assert first_answers is not None
            balanced_C = 1 / (len(self.classes_) * first_answers.estimate_frequencies())
            student = pate.adjust_student(1.0, (balanced_C if self._weight_C is None else self._weight_C).log())
        if self.private_test:
            self.private_test_, student = pate.test_student()
            self._announce(f"  Private {self.private_test_}")
        self._report = pate.report()
        pate.finish()
        return student

    def _select_student(self, spec: DataSpec) -> StudentAlgorithm:
        """Select the default student of the method: the released model, or a student of the released labels."""
        method, images = self.method_, spec.is_image
        network = select_student_network(spec) if images or self.encoder is None else "logistic"
        if method.name == "teachers" and method.teacher is not None:
            return CountRegression(features=method.features)
        if method.name == "teachers":
            return FixMatch(network=network) if images else Logistic()
        if not method.self_training:
            return ReleasedModel(features=method.features)
        later_students = Supervised(network=network)
        first_student, alpha = (FixMatch(network=network), 0.3) if images else (later_students, 0.5)
        return SelfTraining(first_student=first_student, later_students=later_students, alpha=alpha, num_generations=1)

    def _fit_dpsgd(self, pate: PATE, pool: Tensor, facts: autoconfig.PublicFacts) -> Path:
        """Run DP-SGD on the records, charged to the same account. Return the release folder."""
        data = pate.make_data(pool)
        data = replace(data, evaluation=replace(data.evaluation, public=False))
        with ReleaseSession.open(self._make_model_config(pate, data, facts.num_records, facts.epsilon)) as session:
            written = session.run()
            self._report = session.publish(written, session.fit(written), shows_table=False)
        session.finish()
        self.student_ = load_student(session.config.folder)
        return session.release_dir


def _form_error(X: Any, public: Any) -> ValueError:
    kinds = [f"{type(points).__name__} {getattr(points, 'dtype', '')}".strip() for points in (X, public)]
    return checks.error("public", kinds[1], f"must have the form of X, {kinds[0]}")
