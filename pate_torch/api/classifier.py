"""Private records and public points in, a classifier that may be published out: scikit-learn's protocol.

    clf = PATEClassifier(epsilon=1.0, account="clinic", num_records_about=30_000)
    clf.fit(df, y, public=public_df, groups=patient_id)     # says what it will do and forecasts, charges, trains
    clf.predict(new_df); clf.predict_proba(new_df); clf.score(test_df, test_y)
    clf.save_release("release/"); clf.privacy_              # the statement, as in privacy.json

The method and its noise follow from public facts alone (``planning.autoconfig``). Columns, categories, scaling and what
stands for a missing number come from the public points. ``PATE`` is the power tool; both go through ``pipeline``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone, is_classifier
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn

from pate_torch.accounting.formatting import format_delta
from pate_torch.api.pate import PATE, annotate_disk_error, empty_evaluation, find_account
from pate_torch.core import checks, run_folders, texts
from pate_torch.core.progress import Stages
from pate_torch.data import tensors
from pate_torch.data.encoded_dataset import encode_sides, replace_non_finite
from pate_torch.data.roles import get_categories_origin
from pate_torch.features.encoder import TEXT_SPEC, Encoder
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.gradients import GradientMethod
from pate_torch.planning import autoconfig
from pate_torch.privacy.accounts import account_charged_error
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import (
    CATEGORIES,
    CLASSES,
    FROM_OWNER,
    FROM_PRIVATE_LABELS,
    FROM_PUBLIC_POINTS,
    NORMALIZATION_CONSTANTS,
    NUMBER_OF_RECORDS,
    Dataset,
    DataSpec,
    EncoderCard,
    PublicPool,
)
from pate_torch.privacy.schema import MAX_CATEGORIES, TableSchema, format_value
from pate_torch.privacy.unit_ids import parse_unit_ids
from pate_torch.release.unfinished_calls import UnfinishedCall
from pate_torch.session import ReleaseSession
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.export import load_student
from pate_torch.students.fixmatch import FixMatch
from pate_torch.students.linear_model import ReleasedModel
from pate_torch.students.logistic import Logistic
from pate_torch.students.self_training import SelfTraining
from pate_torch.students.supervised import Supervised
from pate_torch.teachers import panel
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import TeacherStore

DEFAULT_CAP_EPSILON = 10.0
"""Of an account that opens here, in epsilon; more where one fit is to cost more."""


_MODULE_STEPS = 500
"""Of a torch.nn.Module that learns from released labels."""


@dataclass(frozen=True, eq=False, repr=False)
class _PointTransform:
    """How points become numbers: fixed by the public ones.

    Attributes:
        schema: Of a table; None: arrays.
        mean: Public constants by feature; None: images.
        std: Likewise.
    """

    schema: TableSchema | None
    mean: np.ndarray | None
    std: np.ndarray | None

    @classmethod
    def from_public(
        cls, public: Any, categories: Mapping[str, Sequence[Any]] | None, *, is_encoded: bool
    ) -> tuple[_PointTransform, Tensor]:
        """Read them off the public points; returns these as numbers, too. An encoder's features keep their shape."""
        if _is_images(public):
            return cls(None, None, None), torch.as_tensor(np.asarray(public))
        schema = None
        if _is_table(public):
            schema = TableSchema.from_public(
                public, categories=categories, max_categories=MAX_CATEGORIES
            ).with_fill_values(public)
            x_PD = schema.encode(public, unknown="zeros")
        else:
            x_PD = np.asarray(public)
        numeric = np.ones(x_PD.shape[1], bool)
        if schema is not None:
            numeric[:] = False
            numeric[list(schema.numeric_indices)] = True
        numeric &= ~((x_PD == 0) | (x_PD == 1)).all(0)  # what is 0 or 1 stays so
        mean, std = np.nan_to_num(np.nanmean(x_PD, 0)), np.nan_to_num(np.nanstd(x_PD, 0))
        if is_encoded:
            std[:] = np.sqrt(np.mean(std**2))
        mean, std = np.where(numeric, mean, 0.0), np.where(numeric & (std > 0), std, 1.0)
        transform = cls(schema, mean, std)
        return transform, transform._fill_missing(x_PD)

    def __call__(self, x: Any, *, private: bool = False) -> Tensor:
        """Points as numbers; one that is missing or not finite is the public mean.

        Args:
            x: The points.
            private: Whether they are private records. Of others one warning names the columns whose values are no known
                category; they are encoded alike.
        """
        if self.mean is None:
            return torch.as_tensor(np.asarray(x))
        if self.schema is not None:
            x = self.schema.encode(x, unknown="zeros" if private else "warn", missing="nan")
        return self._fill_missing(np.asarray(x))

    def _fill_missing(self, x_ND: np.ndarray) -> Tensor:
        assert self.mean is not None
        with np.errstate(over="ignore"):  # infinite, which is not finite
            finite_ND = np.isfinite(x_ND.astype(np.float32))
        return torch.from_numpy(np.where(finite_ND, x_ND, self.mean).astype(np.float32))


class PATEClassifier(ClassifierMixin, BaseEstimator):
    """A differentially private classifier.

    Args:
        epsilon: What the released model costs, all of it.
        account: Whose records these are: everything released from them is charged to this name.
        num_records_about: About how many private records there are, where that is public knowledge. None: the number
            of units under replace_one, where it is public; unknown under add_remove.
        delta: None: the largest power of ten below one in ``num_records_about``, at most 1e-5.
        classes: All of them, in order; required, unless ``classes_are_public``.
        classes_are_public: Whether the distinct values of ``y`` are public knowledge. They are then the classes, where
            ``classes`` is None, and the statement says so.
        categories: {column: [values]} of a DataFrame; other columns take the values of the public points.
        encoder: A frozen ``features.encoder.Encoder`` for lists of texts; or which one made the rows that are given,
            each of its own point alone: ``EncoderCard(name=..., kind="given")``. None: rows, tables or images.
        method: "auto", "teachers", "gradients" or "dpsgd"; auto goes by the rule of ``planning.autoconfig``.
        teacher: Of ``method="teachers"``: as for ``PATE``, such as any scikit-learn classifier.
        student: Learns from the released labels: a StudentAlgorithm, which the release then holds; any scikit-learn
            classifier, or a function that makes a torch.nn.Module as for ``teacher``, which stay here; None: by method.
        num_teachers: K; None: by rule.
        num_queries: Public points that teachers are asked about; None: by rule.
        adjacency: "add_remove" or "replace_one": what a neighbor is.
        allow_refit: Whether an account that has been charged may be charged again. A fit that was interrupted after its
            charge is finished by the same fit, for free.
        chosen_by: How this release is chosen among several settings, for the statement: "public data", "priced" or
            "private scores" (of cross-validation on private records, for example); None: not stated.
        allow_duplicate_account: Whether these records may be charged to an account of another name, too.
        spend_anyway: Whether to charge the account even where the forecast says that the labels of teachers will be
            mostly noise.
        home: Where ledger, teachers and runs lie; None: PATE_HOME, or the store of this user for ledger and teachers
            and ``outputs`` of the working directory for runs.
        random_state: Seeds everything but the noise, which no seed may know.
        device: Where networks are trained.
        verbose: Whether to print the choice, the forecast, and progress.

    Attributes:
        classes_: The classes.
        method_: The method that was taken, with its reason (``planning.autoconfig.MethodConfig``).
        privacy_: The privacy statement, as in privacy.json.
        release_: The folder that may be published.
        student_: What predicts.
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        *,
        account: str | None = None,
        num_records_about: int | None = None,
        delta: float | None = None,
        classes: Sequence[Any] | None = None,
        classes_are_public: bool = False,
        categories: Mapping[str, Sequence[Any]] | None = None,
        encoder: Encoder | EncoderCard | None = None,
        method: str = "auto",
        teacher: Any = None,
        student: Any = None,
        num_teachers: int | None = None,
        num_queries: int | None = None,
        adjacency: str = "add_remove",
        allow_refit: bool = False,
        chosen_by: str | None = None,
        allow_duplicate_account: bool = False,
        spend_anyway: bool = False,
        home: Path | str | None = None,
        random_state: int = 0,
        device: str = "cpu",
        verbose: bool = True,
    ) -> None:
        self.epsilon = epsilon
        self.account = account
        self.num_records_about = num_records_about
        self.delta = delta
        self.classes = classes
        self.classes_are_public = classes_are_public
        self.categories = categories
        self.encoder = encoder
        self.method = method
        self.teacher = teacher
        self.student = student
        self.num_teachers = num_teachers
        self.num_queries = num_queries
        self.adjacency = adjacency
        self.allow_refit = allow_refit
        self.chosen_by = chosen_by
        self.allow_duplicate_account = allow_duplicate_account
        self.spend_anyway = spend_anyway
        self.home = home
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = True  # no seed may know the noise
        tags.classifier_tags.poor_score = True  # by design, on a few dozen records
        return tags

    def fit(self, X: Any, y: Any, *, public: Any = None, groups: Any = None) -> PATEClassifier:
        """Charge the account, and train.

        Args:
            X: PRIVATE. A DataFrame, rows [N, D], or uint8 images [N, Ch, H, W]; with an encoder a list of texts.
            y: PRIVATE. The classes [N].
            public: Public points of the same form, without labels. Their values may be published.
            groups: PRIVATE. The privacy unit of each record, such as a patient; None: every record is its own.

        Raises:
            ValueError: A choice cannot work; nothing has been charged.
            BudgetExceeded: The account's cap would be passed; nothing has been drawn.
        """
        self._check_parameters()
        assert self.account is not None
        with annotate_disk_error(self._home, self.account):
            return self._fit(X, y, public, groups)

    def _fit(self, X: Any, y: Any, public: Any, groups: Any) -> PATEClassifier:
        if public is None:
            problem = "must be given: unlabeled points that are public, from which columns and scaling are read"
            raise checks.error("public", None, problem, "fit(X, y, public=...).")
        X, public, has_text_N = self._encode_texts(X, public)
        X, public = self._check_points(X, public)
        transform, pool = _PointTransform.from_public(public, self.categories, is_encoded=self.encoder is not None)
        x = transform(X, private=True)
        if self.classes is not None and isinstance(y, list | tuple):
            y = np.array(y, dtype=object)  # else one text would make all of them texts
        y = column_or_1d(y, warn=True)
        if len(y) != len(x):
            raise checks.error("y", type(y).__name__, "must be one class for each record")
        self.classes_, label_N = self._encode_labels(y)
        label_N = np.where(has_text_N, label_N, -1)
        unit_ids = None if groups is None else parse_unit_ids("groups", groups, len(x))
        checks.one_of("adjacency", self.adjacency, ("add_remove", "replace_one"))
        partition = AddRemove() if self.adjacency == "add_remove" else ReplaceOne()
        records = len(x) if partition.adjacency == "replace_one" else None  # public there, and each is a unit
        if self.num_records_about is not None:
            records = checks.integer("num_records_about", self.num_records_about, low=1)
        facts = autoconfig.PublicFacts(
            epsilon=checks.positive("epsilon", self.epsilon),
            delta=autoconfig.choose_delta(records) if self.delta is None else checks.delta("delta", self.delta),
            adjacency=partition.adjacency,
            has_groups=groups is not None,
            num_records=records,
            num_public=len(pool),
            num_classes=len(self.classes_),
            is_image=pool.dim() == 4,
            is_encoded=self.encoder is not None,
            has_own_teacher=self.teacher is not None,
        )
        self.method_ = autoconfig.choose_method(facts, self.method, self.num_teachers, self.num_queries)
        if self.teacher is not None and self.method_.name != "teachers":
            problem = f"goes with method='teachers', and this is {self.method_.name}"
            raise checks.error("teacher", type(self.teacher).__name__, problem)
        self._check_noise(facts)
        terms = self._build_terms(facts, transform, partition, groups)
        if self.verbose:
            print(self._summary_line(facts))
            print(f"  Charged to account {self.account!r} in {(self._home / 'ledger.sqlite').absolute()}")
        self._transform = transform
        pate = self._make_pate(terms, facts)
        spec = replace(pate._make_spec(pool, pool), nominal_size=facts.num_records)
        if _is_module_factory(self.student):
            panel.check_factory("student", self.student, spec)
        if self.method_.name == "dpsgd":
            private, num_dropped = tensors.build_private_data(
                x, torch.from_numpy(label_N), unit_ids, pate.unit, facts.num_classes
            )
            evaluation = replace(empty_evaluation(spec, x), public=False)
            data = Dataset(
                spec,
                private,
                PublicPool(pool),
                evaluation,
                num_dropped_by_reason=num_dropped,
                provenance=pate.provenance,
            )
            self.student_, self.release_ = _fit_dpsgd(pate, data, facts)
        else:
            pate.fit_teachers(x, torch.from_numpy(label_N), unit_id=unit_ids, public_x=pool)
            self.student_, self.release_ = self._release_and_fit(pate, pool, spec), pate.folder
        self.privacy_ = json.loads((self.release_ / "privacy.json").read_text())
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each point."""
        likeliest_N = self.predict_proba(X).argmax(1)
        return self.classes_[likeliest_N]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities [N, C], in the order of ``classes_``."""
        check_is_fitted(self, "student_")
        if isinstance(self.encoder, Encoder):
            X = replace_non_finite(self.encoder.encode(X, TEXT_SPEC, device=self.device)).numpy()
        x = self._transform(self._validate_points(X, reset=False))
        if isinstance(self.student_, Student):
            return self.student_.compute_probabilities(x).double().numpy()
        return _predict_all_classes(self.student_, self._normalize(x), len(self.classes_))

    def save_release(self, folder: Path | str) -> Path:
        """Copy everything that may be published into a new folder."""
        check_is_fitted(self, "student_")
        folder = Path(folder)
        if folder.exists() and any(folder.iterdir()):
            raise checks.error("folder", str(folder), "is there already", "Name a new one.")
        shutil.copytree(self.release_, folder, dirs_exist_ok=True)
        return folder

    # ---- parts --------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        """Raise ValueError for what cannot work, whatever the data."""
        if self.account is None:
            problem = "must name whose records these are: everything released from them is charged to it"
            raise checks.error("account", None, problem, 'PATEClassifier(account="clinic").')
        learner = self.student
        is_sklearn = isinstance(learner, BaseEstimator) and is_classifier(learner)
        is_supported = isinstance(learner, StudentAlgorithm) or is_sklearn or _is_module_factory(learner)
        if learner is not None and not is_supported:
            fix = f"Pass lambda: {type(learner).__name__}(...)." if isinstance(learner, nn.Module) else ""
            problem = (
                "must be a student algorithm, a scikit-learn classifier or a function that makes a torch.nn.Module"
            )
            raise checks.error("student", type(learner).__name__, problem, fix)
        if self.classes is None and not checks.boolean("classes_are_public", self.classes_are_public):
            problem = "must list all classes: the values of y are private, and the release names its classes"
            fix = "Pass classes=[...]; or classes_are_public=True, if the distinct values of y are public knowledge."
            raise checks.error("classes", None, problem, fix)
        if learner is not None and self.method == "dpsgd":
            raise checks.error("student", type(learner).__name__, "cannot be given with DP-SGD: nothing learns from it")
        if not isinstance(self.encoder, Encoder | EncoderCard | None):
            problem = "must be an Encoder, or an EncoderCard that says which one made the rows"
            raise checks.error("encoder", type(self.encoder).__name__, problem)

    def _check_points(self, X: Any, public: Any) -> tuple[Any, Any]:
        """Both of one form; an array's numbers are checked, a table's values are when it is encoded."""
        if _is_images(X) != _is_images(public) or _is_table(X) != _is_table(public):
            kinds = [f"{type(points).__name__} {getattr(points, 'dtype', '')}".strip() for points in (X, public)]
            raise checks.error("public", kinds[1], f"must be of the form of X, {kinds[0]}")
        X = self._validate_points(X, reset=True)
        if _is_table(X):
            if missing := [name for name in map(str, X.columns) if name not in map(str, public.columns)]:
                raise checks.error(
                    "public", [*map(str, public.columns)], f"lacks the columns {', '.join(missing)} of X"
                )
            return X, public[list(X.columns)]
        if _is_images(X):
            if tuple(X.shape[1:]) != tuple(public.shape[1:]):
                raise checks.error("public", tuple(public.shape), f"must have points like X, {tuple(X.shape[1:])}")
            return X, public
        public = check_array(public, dtype=np.float64, ensure_all_finite="allow-nan", input_name="public")
        if public.shape[1] != X.shape[1]:
            raise checks.error("public", public.shape, f"must have points like X, of {X.shape[1]} numbers")
        return X, public

    def _encode_texts(self, X: Any, public: Any) -> tuple[Any, Any, np.ndarray | bool]:
        """PRIVATE. Features of private and public texts, where there is an encoder, and which records had a text.

        Each empty private text is replaced by a filler.
        """
        if not isinstance(self.encoder, Encoder):
            return X, public, True
        has_text_N = np.array([texts.is_text(text) for text in X], dtype=bool)
        X = [text if has_text else "-" for text, has_text in zip(X, has_text_N.tolist(), strict=True)]
        sides = {"public": self.encoder.to_tensor(public, TEXT_SPEC), "private": self.encoder.to_tensor(X, TEXT_SPEC)}
        with Stages(quiet=not self.verbose) as stages:
            features = encode_sides(self.encoder, TEXT_SPEC, sides, name=str(self.account), root=self._home,
                                device=torch.device(self.device), stages=stages)  # fmt: skip
        return features["private"].numpy(), features["public"].numpy(), has_text_N

    @property
    def _home(self) -> Path:
        return run_folders.check_root(run_folders.get_home_folder(self.home))

    def _validate_points(self, X: Any, *, reset: bool) -> Any:
        """As scikit-learn checks it; sets or compares names and number of features.

        Of private records (``reset``) one cell that is no number, or infinite, is missing and stops nobody's run.
        """
        if _is_images(X):
            if reset:
                self.n_features_in_ = int(np.prod(X.shape[1:]))
            elif int(np.prod(X.shape[1:])) != self.n_features_in_:
                raise checks.error("X", tuple(X.shape), f"must be images of {self.n_features_in_} numbers")
            return X
        if _is_table(X):
            return validate_data(self, X, reset=reset, skip_check_array=True)
        if not reset:
            return validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        X = np.array(X, dtype=object) if isinstance(X, list | tuple) else X  # else one text would make all cells texts
        X = validate_data(self, X, dtype=None, ensure_all_finite=False)
        return np.vectorize(_parse_number, otypes=[float])(X) if X.dtype.kind not in "biuf" else X.astype(np.float64)

    def _encode_labels(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The classes, and each record's, int64 [N]; -1 where it is none of those that are declared."""
        if self.classes is None:
            check_classification_targets(y)
            classes, label_N = np.unique(y, return_inverse=True)
        else:
            classes = np.asarray(self.classes)
            code_by_key = {_to_class_key(value): code for code, value in enumerate(self.classes)}
            if len(code_by_key) < len(classes):
                raise checks.error("classes", self.classes, "must be different")
            values, index_N = (y, slice(None)) if y.dtype == object else np.unique(y, return_inverse=True)
            label_N = np.array([code_by_key.get(_to_class_key(value), -1) for value in values], dtype=np.int64)[index_N]
            if (label_N < 0).all():
                raise checks.error("classes", self.classes, "holds no value of y", "List the classes as y writes them.")
        if len(classes) < 2:
            raise ValueError(f"y: PATEClassifier needs at least 2 classes, and there is one class only: {classes[0]!r}")
        return classes, label_N.astype(np.int64)

    def _build_terms(
        self, facts: autoconfig.PublicFacts, transform: _PointTransform, partition: AddRemove | ReplaceOne, groups: Any
    ) -> dict[str, Any]:
        """What all methods go by; refuses an account that has been charged."""
        home = self._home
        assert self.account is not None
        opened_account = find_account(home, self.account)
        is_charged = opened_account is not None and opened_account.is_charged
        if is_charged and not self.allow_refit and not UnfinishedCall.has_any(TeacherStore(home), self.account):
            assert opened_account is not None
            raise account_charged_error(
                opened_account, facts.epsilon
            )  # before anything is trained; the charge itself checks it again
        return {
            "name": self.account,
            "classes": [str(value) for value in self.classes_],
            "delta": facts.delta,
            "budget_epsilon": None if is_charged else max(DEFAULT_CAP_EPSILON, facts.epsilon),
            "first_charge_only": not self.allow_refit,
            "allow_duplicate_account": self.allow_duplicate_account,
            "chosen_by": self.chosen_by,
            "provenance": self._collect_provenance(transform),
            "home": home,
            "partition": partition,
            "unit": "record" if groups is None else f"group:{getattr(groups, 'name', None) or 'group'}",
            "mean": None if transform.mean is None else transform.mean.tolist(),
            "std": None if transform.std is None else transform.std.tolist(),
            "schema": transform.schema,
            "encoder": self.encoder.make_card(TEXT_SPEC) if isinstance(self.encoder, Encoder) else self.encoder,
            "seed": checks.integer("random_state", self.random_state, low=0),
            "device": self.device,
            "quiet": not self.verbose,
        }

    def _check_noise(self, facts: autoconfig.PublicFacts) -> None:
        """Raise ValueError before the account is charged for labels that the forecast says are mostly noise."""
        if not self.method_.is_noise_dominated or self.spend_anyway:
            return
        problem = "is too small for teachers here: the forecast says that their labels would be mostly noise"
        fix = "Pass a larger epsilon, or spend_anyway=True to charge the account all the same."
        if facts.num_records is None:
            fix = f"Pass num_records_about=..., if about how many private records there are is public knowledge. {fix}"
        raise checks.error("epsilon", facts.epsilon, problem, fix)

    def _collect_provenance(self, transform: _PointTransform) -> dict[str, str]:
        """Where the values come from that are taken to be public, for the statement."""
        provenance = {
            CLASSES: FROM_PRIVATE_LABELS if self.classes is None else FROM_OWNER,
            NORMALIZATION_CONSTANTS: FROM_PUBLIC_POINTS,
        }
        if transform.schema is not None:
            provenance[CATEGORIES] = get_categories_origin(transform.schema, self.categories or ())
        return provenance if self.num_records_about is None else provenance | {NUMBER_OF_RECORDS: FROM_OWNER}

    def _make_pate(self, terms: dict[str, Any], facts: autoconfig.PublicFacts) -> PATE:
        """The stages of a run of teachers, or of records that answer for themselves."""
        method = self.method_
        if method.name == "dpsgd":
            from pate_torch.methods.dpsgd import DPSGD

            return PATE(teacher=DPSGD(network="cnn" if facts.is_image else "mlp"), **terms)
        if method.name == "gradients":
            assert isinstance(method.mechanism, GradientDescent)
            size, dim = facts.num_records, method.effective_dim
            return PATE(teacher=GradientMethod(size=size, effective_dim=dim, mechanism=method.mechanism), **terms)
        assert isinstance(method.mechanism, VoteMechanism)
        teacher = method.teacher if self.teacher is None else self.teacher
        return PATE(teacher=teacher, num_teachers=method.num_teachers, mechanism=method.mechanism, **terms)

    def _release_and_fit(self, pate: PATE, pool: Tensor, spec: DataSpec) -> Any:
        """Buy the answers, and train what learns from them."""
        method, student = self.method_, self.student
        release = pate.label(pool, num_queries=method.num_queries, strategy=method.query, features=method.features,
                             finish=False)  # fmt: skip
        if student is not None and not isinstance(student, StudentAlgorithm):
            query_A, label_A = release.query_Q[release.answered_Q], release.label_Q[release.answered_Q]
            pate.report()
            pate.finish()
            if _is_module_factory(student):
                return _fit_module(student, pool[query_A], label_A, spec, self.random_state, torch.device(self.device))
            return clone(student).fit(self._normalize(pool)[query_A], label_A.numpy())
        fitted_student = pate.fit_student(self._select_student(pool) if student is None else student)
        pate.report()
        pate.finish()
        return fitted_student

    def _select_student(self, pool: Tensor) -> StudentAlgorithm:
        """Of the method: the released model itself, or a student of the answers for data of this form."""
        method, images = self.method_, pool.dim() == 4
        network = "mlp" if self.encoder is None else "logistic"
        if images:
            network = "small_cnn" if min(pool.shape[2:]) < 16 else "cnn"
        if not method.self_training and method.name == "teachers":
            return FixMatch(network=network) if images else Logistic()
        if not method.self_training:
            return ReleasedModel(features=method.features)
        later_students = Supervised(network=network)
        first_student, alpha = (FixMatch(network=network), 0.3) if images else (later_students, 0.5)
        return SelfTraining(first_student=first_student, later_students=later_students, alpha=alpha, num_generations=1)

    def _normalize(self, x: Tensor) -> np.ndarray:
        """As scikit-learn's students take them: rows at public scale."""
        if self._transform.mean is None or self._transform.std is None:
            return x.flatten(1).numpy() / 255.0
        return (x.numpy() - self._transform.mean) / self._transform.std

    def _summary_line(self, facts: autoconfig.PublicFacts) -> str:
        """The choice and the forecast, in two lines."""
        unit = "group" if facts.has_groups else "record"
        price = f"epsilon {facts.epsilon:g} at delta {format_delta(facts.delta)} ({facts.adjacency}, unit {unit})"
        default_note = "delta 1e-5 and the rest go by the public points: num_records_about is not given. " * (
            facts.num_records is None and self.delta is None
        )
        return f"PATEClassifier, {price}: {self.method_.reason}.\n  {default_note}Forecast: {self.method_.expectation}"


def _is_module_factory(student: Any) -> bool:
    return callable(student) and not isinstance(student, StudentAlgorithm | BaseEstimator | nn.Module)


def _fit_module(
    factory: Callable[[], nn.Module], x: Tensor, y: Tensor, spec: DataSpec, seed: int, device: torch.device
) -> Student:
    """A network of the user's own, from released labels y of public points x."""
    if not len(y):
        raise ValueError("student: no public point has a released label")
    recipe = TeacherRecipe(steps=_MODULE_STEPS, batch_size=64)
    module = panel.fit_module(factory, x, y, spec, recipe, 0, seed=seed, device=device)
    return Student({"name": "own"}, module, spec)


def _fit_dpsgd(pate: PATE, data: Dataset, facts: autoconfig.PublicFacts) -> tuple[Student, Path]:
    """DP-SGD on the records, charged to the same account; the student and its release."""
    assert isinstance(pate.teacher, PrivateMethod)
    config = pate._make_config(data, pate.teacher)
    config = replace(config, privacy=replace(config.privacy, target_epsilon=facts.epsilon), quiet=True)
    with ReleaseSession.open(config) as session:
        written = session.run()
        session.publish(written, session.fit(written), shows_table=False)
    session.finish()
    return load_student(session.config.folder), session.release_dir


def _is_table(x: Any) -> bool:
    return hasattr(x, "columns") and hasattr(x, "__getitem__")


def _is_images(x: Any) -> bool:
    return getattr(x, "ndim", 0) == 4


def _parse_number(value: Any) -> float:
    """A cell as a number; NaN where it is none."""
    try:
        return float(value) if format_value(value) else math.nan
    except ValueError:
        return math.nan
    except TypeError:
        if isinstance(value, Mapping | Sequence):  # no cell at all
            raise
        return math.nan


def _to_class_key(value: Any) -> float | str:
    """What tells a class from others, a function of this one value: 1, 1.0 and True are one class, "1" is another."""
    return float(value) if isinstance(value, int | float | np.bool_ | np.integer | np.floating) else format_value(value)


def _predict_all_classes(learner: Any, x: np.ndarray, classes: int) -> np.ndarray:
    """Probabilities of a scikit-learn student, which may know only some of the classes."""
    probability_NC = np.zeros((len(x), classes))
    if hasattr(learner, "predict_proba"):
        probability_NC[:, np.asarray(learner.classes_, dtype=int)] = learner.predict_proba(x)
    else:
        probability_NC[np.arange(len(x)), np.asarray(learner.predict(x), dtype=int)] = 1.0
    return probability_NC
