"""PATE in a notebook: the stages of a run on one's own tensors, with the same ledger, folders and refusals.

    pate = PATE("hospital", classes=2, num_teachers=50, mechanism=GNMax(sigma=8.0), delta=1e-5, budget_epsilon=3.0)
    pate.fit_teachers(x, y)                       # private; whose record is whose: unit_id=
    pate.label(pool_x, num_queries=100)           # charged, then drawn
    student = pate.fit_student("fixmatch")        # free, as often as you like
    student.predict(x_new)
    pate.epsilon, pate.report(test_x, test_y)

All releases of one name are charged to one account, whatever object made them.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pate_torch.api.labeler import PrivateLabeler
from pate_torch.config import PrivacyConfig, RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.core.run_folders import make_unique_run_id
from pate_torch.data import tensors
from pate_torch.data.base import DatasetSource, check_name, compute_normalization
from pate_torch.features.base import FeatureRecipe
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.methods import feasibility
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.panel import PanelMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.planning.alternatives import match_label_price, suggest_gradients
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import AddRemove, Partition, assign_shards
from pate_torch.privacy.records import (
    CLASSES,
    FROM_OWNER,
    FROM_PUBLIC_POINTS,
    NORMALIZATION_CONSTANTS,
    Dataset,
    DataSpec,
    EncoderCard,
    Evaluation,
    PrivateRecords,
    PublicPool,
    Release,
)
from pate_torch.privacy.schema import TableSchema
from pate_torch.privacy.units import drop_unusable
from pate_torch.queries.base import QueryStrategy
from pate_torch.queries.random import Random
from pate_torch.release.membership import MIN_RECORDS, MembershipResult, MembershipTest
from pate_torch.release.private_metrics import attack_student
from pate_torch.release.report import ReleaseReport
from pate_torch.session import ReleaseSession, WrittenRelease
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.fixmatch import FixMatch
from pate_torch.students.label_spreading import LabelSpreading
from pate_torch.students.supervised import Supervised
from pate_torch.students.training import GradientStudent
from pate_torch.students.vat import Vat
from pate_torch.teachers.panel import Panel, fit_estimators, fit_modules
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import StoredEnsemble, TeacherStore

STUDENTS: dict[str, type[GradientStudent]] = {
    "fixmatch": FixMatch,
    "label_spreading": LabelSpreading,
    "supervised": Supervised,
    "vat": Vat,
}

GUIDE_STEPS = 200
"""Of the student that guides rounds of questions."""

TeacherKind = TeacherRecipe | PrivateMethod | Callable[[], nn.Module] | Any


@dataclass(frozen=True, eq=False)
class InMemoryDataset(DatasetSource):
    """A data set that is already here."""

    data: Dataset

    @property
    def name(self) -> str:
        return self.data.spec.name

    def load(self) -> Dataset:
        return self.data


@dataclass(frozen=True, eq=False)
class _LabelResult:
    """A release with what is needed to learn from it and to report it; ``reservation_ids``: those of this call."""

    config: RunConfig
    data: Dataset
    written: WrittenRelease
    reservation_ids: tuple[str, ...]


class PATE:
    """One private data set, its teachers and what is released from them.

    Recipes' teachers are kept under ``home`` and found again; the others live as long as this object.

    Args:
        name: Whose account is charged; all releases from the same records belong under one name.
        classes: All of them, by name or by number: declared, never read off the private labels.
        num_teachers: K; None where ``teacher`` is a ``PrivateMethod``.
        mechanism: Any of ``pate_torch.mechanisms`` that opens votes, its sigma in votes; None where ``teacher`` is a
            ``PrivateMethod``, which has its own.
        delta: The account's, fixed when it opens.
        budget_epsilon: The account's cap, fixed when it opens; None: 10, or the cap it has.
        home: Where teachers, ledger and runs lie; None: PATE_HOME, or the store of this user for teachers and ledger
            and ``outputs`` of the working directory for runs.
        teacher: A TeacherRecipe; any scikit-learn classifier, cloned for every shard; a function that makes a
            torch.nn.Module from normalized points to logits, trained as ``recipe`` says; or any ``PrivateMethod``, such
            as ReverseKnn(mechanism=Histogram(...)) or GradientMethod(size=..., mechanism=GradientDescent(...)), where
            the records answer for themselves. None: a small network for the data.
        recipe: How modules of ``teacher``'s making are trained.
        partition: AddRemove() or ReplaceOne(): what a neighbor is.
        unit: "record" or "group:<what>" (then give unit_id).
        mean: Public constants per channel or feature to normalize by; None: those of the public points.
        std: Public standard deviations, likewise.
        schema: How tables become the rows given here; students carry it. None: rows come from no table.
        encoder: Which frozen encoder made the rows given here (``Encoder.card``), each of its own point alone; students
            and the privacy statement name it. None: none did.
        allow_duplicate_account: Whether these records may be charged to an account of another name, too.
        first_charge_only: Whether to refuse a charge where the account has any reservation.
        allow_uninformative_labels: Whether questions may be asked whose labels would be no better than chance even if
            all teachers agreed.
        chosen_by: How this release is chosen among several settings, for the statement: "public data", "priced" or
            "private scores"; None: not stated.
        provenance: Where the classes and constants come from, for the statement (``types.SOURCES``, by name); None: as
            they are given here.
        seed: Seeds everything but the noise.
        insecure_noise_seed: Makes noise repeatable, and what is released not private.
        device: Where networks are trained.
        quiet: Show no progress.

    Raises:
        ValueError: A choice cannot work; nothing has been charged.
    """

    def __init__(
        self,
        name: str,
        *,
        classes: Sequence[str] | int,
        num_teachers: int | None = None,
        mechanism: VoteMechanism | None = None,
        delta: float,
        budget_epsilon: float | None = None,
        home: Path | str | None = None,
        teacher: TeacherKind = None,
        recipe: TeacherRecipe | None = None,
        partition: Partition | None = None,
        unit: str = "record",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        schema: TableSchema | None = None,
        encoder: EncoderCard | None = None,
        allow_duplicate_account: bool = False,
        first_charge_only: bool = False,
        allow_uninformative_labels: bool = False,
        chosen_by: str | None = None,
        provenance: Mapping[str, str] | None = None,
        seed: int = 0,
        insecure_noise_seed: int | None = None,
        device: torch.device | str = "cpu",
        quiet: bool = True,
    ) -> None:
        check_name(name)
        if (mean is None) != (std is None):
            raise checks.error("std", std, "must be given together with mean")
        if isinstance(teacher, nn.Module):
            raise checks.error("teacher", type(teacher).__name__, "must be a function that makes a fresh network",
                              f"Pass the class, or lambda: {type(teacher).__name__}(...).")  # fmt: skip
        if isinstance(teacher, PrivateMethod):
            if mechanism is not None or num_teachers is not None:
                key = "num_teachers" if mechanism is None else "mechanism"
                problem = "goes with teachers that are trained here; this method has a mechanism of its own"
                raise checks.error(key, num_teachers if mechanism is None else mechanism, problem, "Omit it.")
            self.mechanism_name, num_teachers = teacher.mechanism_name, teacher.ensemble_size
        elif not isinstance(mechanism, VoteMechanism):
            problem = "must be a mechanism that opens votes, an object of pate_torch.mechanisms"
            raise checks.error("mechanism", mechanism, problem, "Such as mechanism=GNMax(sigma=8.0), in votes.")
        else:
            self.mechanism_name = mechanism.name
            checks.integer("num_teachers", num_teachers, low=1)
        self.name, self.mechanism, self.unit = name, mechanism, unit
        names = range(checks.integer("classes", classes, low=2)) if isinstance(classes, int) else classes
        self.class_names = tuple(map(str, names))
        self.home = run_folders.check_root(run_folders.get_home_folder(home))
        self.teacher, self.recipe = teacher, recipe
        self.partition: Partition = AddRemove() if partition is None else partition
        self.num_teachers = num_teachers
        self.delta, self.budget_epsilon = checks.delta("delta", delta), budget_epsilon
        self.allow_duplicate_account = checks.boolean("allow_duplicate_account", allow_duplicate_account)
        self.first_charge_only = checks.boolean("first_charge_only", first_charge_only)
        self.allow_uninformative_labels = checks.boolean("allow_uninformative_labels", allow_uninformative_labels)
        self.chosen_by = chosen_by
        default_provenance = {
            CLASSES: FROM_OWNER,
            NORMALIZATION_CONSTANTS: FROM_PUBLIC_POINTS if mean is None else FROM_OWNER,
        }
        self.provenance = default_provenance if provenance is None else dict(provenance)
        self.seed, self.insecure_noise_seed = seed, insecure_noise_seed
        self.device, self.quiet = torch.device(device), quiet
        self.schema, self.encoder = schema, encoder
        self._constants = None if mean is None or std is None else (tuple(map(float, mean)), tuple(map(float, std)))
        self._private: PrivateRecords | None = None
        self._num_dropped_by_reason: dict[str, int] = {}
        self._spec: DataSpec | None = None
        self._stored_teachers: StoredEnsemble | None = None
        self._panel: Panel | None = None
        self._label_result: _LabelResult | None = None
        self._student: tuple[str, Student] | None = None
        self._session: ReleaseSession | None = None
        self._clock = StageTimer()

    def __repr__(self) -> str:
        return f"PATE({self.name!r}, num_teachers={self.num_teachers}, mechanism={self.mechanism_name!r})"

    # ---- the stages ---------------------------------------------------------------------------------------------

    def fit_teachers(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray,
        *,
        unit_id: Any = None,
        public_x: Tensor | np.ndarray | None = None,
    ) -> PATE:
        """Train one teacher per shard, or find those trained before in the same way on the same records.

        Where the records answer for themselves, this takes them in and trains nothing.

        Args:
            x: PRIVATE. uint8 images [N, Ch, H, W] or rows [N, D]. A row that is not finite, like a label that is no
                class, cannot be used: the record is left out or, under replace_one, filled in.
            y: PRIVATE. Integers [N].
            unit_id: Stable ids [N] of the units, texts, integers, booleans or dates.
                None: a hash of the record, so equal records are one unit.
            public_x: Public points whose statistics normalize the private ones, where no constants were given; None:
                images by 1/2 and 1/4, rows as they are.
        """
        private, self._num_dropped_by_reason = tensors.build_private_data(
            x, y, unit_id, self.unit, len(self.class_names)
        )
        public = private.x[:0] if public_x is None else tensors.parse_points("public_x", public_x)
        spec = self._make_spec(private.x, public)
        data = Dataset(
            spec,
            private,
            PublicPool(public),
            empty_evaluation(spec, private.x),
            num_dropped_by_reason=self._num_dropped_by_reason,
        )
        data = drop_unusable(data, self.partition.adjacency)
        private = data.private
        self._private, self._spec, self._stored_teachers, self._panel, self._label_result = (
            private,
            spec,
            None,
            None,
            None,
        )
        if isinstance(self.teacher, PrivateMethod):
            return self
        if self.teacher is None or isinstance(self.teacher, TeacherRecipe):
            self._get_recipe(spec).check(spec)
            teachers = self._make_teacher_votes(spec, 1, Random())
            with ReleaseSession.open_uncharged(self._make_config(data, teachers), data, self._clock) as session:
                self._stored_teachers, _ = teachers.load_or_train(session.make_inputs())
        else:
            self._panel = self._fit_panel(private, spec)
        return self

    def label(
        self,
        pool_x: Tensor | np.ndarray,
        num_queries: int = 100,
        *,
        strategy: QueryStrategy | None = None,
        guide_student: str | StudentAlgorithm | None = None,
        method: str | Mapping[str, Any] | None = None,
        features: FeatureRecipe | None = None,
        finish: bool = True,
    ) -> Release:
        """Ask about ``num_queries`` of the public points: charged at worst, then drawn, then written down.

        A call that was interrupted after its charge is finished by the same call, for free; any other call is charged.

        Args:
            pool_x: The public points, of the form of the private ones.
            num_queries: Largest number of questions.
            strategy: Any of ``pate_torch.queries``; None: at random.
            guide_student: Of a strategy of several rounds, trained anew before each but the first: a name of
                ``STUDENTS`` or any StudentAlgorithm; None: supervised, a small network.
            method: "teachers_transductive", or a mapping of its options (``neighbors``, ``alpha``, ``balance``): a
                recipe's teachers answer for all public points together; None: for each by itself.
            features: How features of the public points are learnt, in which questions are chosen and records are
                assigned to cells; None: the points as they are.
            finish: Whether the call ends with the labels. False: it ends with ``finish``, and whoever is interrupted
                before that goes on with these labels.

        Raises:
            BudgetExceeded: The cap would be passed; nothing has been drawn.
            ValueError: A choice cannot work; nothing has been charged.
        """
        private, spec = self._require_teachers()
        self._clock = StageTimer()  # an earlier call's stages are no part of this one
        pool = PublicPool(tensors.parse_points("pool_x", pool_x))
        if pool.x.shape[1:] != private.x.shape[1:] or pool.x.dtype != private.x.dtype:
            raise checks.error("pool_x", tuple(pool.x.shape), f"must have points like x, {tuple(private.x.shape[1:])}")
        mean, std = self._constants or compute_normalization(pool.x)
        spec = replace(spec, mean=mean, std=std)  # the student's; teachers keep the constants they learnt with
        evaluation = empty_evaluation(spec, private.x)
        data = Dataset(
            spec,
            private,
            pool,
            evaluation,
            num_dropped_by_reason=self._num_dropped_by_reason,
            provenance=self.provenance,
        )
        guide_options = {"network": _select_guide_network(spec), "steps": GUIDE_STEPS}
        labeling = self._build_method(
            method,
            spec,
            num_queries=num_queries,
            query=Random() if strategy is None else strategy,
            features=features,
            guide_student=_make_student("guide_student", guide_student or "supervised", guide_options),
        )
        config = self._make_config(data, labeling)
        with (
            annotate_disk_error(self.home, self.name),
            ReleaseSession.open(config, self._clock, _format_alternative) as session,
        ):
            if session.forecast is not None:
                warnings.warn(session.forecast, feasibility.LowSignalWarning, stacklevel=3)
            session.stages.print_message(f"Charging account {self.name!r} in {session.ledger.path.absolute()}.")
            written = session.run()
        self._session = session
        if finish:
            self.finish()
        self._label_result = _LabelResult(session.config, data, written, tuple(session.reservation_ids))
        self._student = None
        return written.labels

    def finish(self) -> None:
        """Note that the last call of ``label(finish=False)`` has ended: the same call is charged from now on."""
        if self._session is not None:
            self._session.finish()

    def fit_student(self, algorithm: str | StudentAlgorithm = "fixmatch", **options: Any) -> Student:
        """Train a student on the labels and the public pool, which costs nothing; saved in the release folder.

        Args:
            algorithm: A name of ``STUDENTS``, or any StudentAlgorithm.
            **options: Fields of the algorithm that is named.

        Raises:
            ValueError: No question was answered.
        """
        result = self._require_labels()
        if options and not isinstance(algorithm, str):
            raise checks.error(
                "options", sorted(options), "go with an algorithm's name only", "Set them on the object."
            )
        student = _make_student(
            "algorithm", algorithm, {"network": _select_student_network(result.data.spec), **options}
        )
        config = replace(result.config, student=student)
        with ReleaseSession.open_uncharged(config, result.data, self._clock) as session:
            config.check_students(session.facts)
            self._student = session.fit(result.written)
        assert self._student is not None
        return self._student[1]

    def report(
        self,
        test_x: Tensor | np.ndarray | None = None,
        test_y: Tensor | np.ndarray | None = None,
        *,
        pool_y: Tensor | np.ndarray | None = None,
    ) -> ReleaseReport:
        """Everything releasable about the last release and its student, written into its folder too.

        The labels given here are used for nothing but measurement.

        Args:
            test_x: Public points to measure the student on.
            test_y: Their labels.
            pool_y: The pool's true labels, to measure the released ones.
        """
        result = self._require_labels()
        spec, pool = result.data.spec, result.data.pool
        evaluation = empty_evaluation(spec, pool.x)
        if (test_x is None) != (test_y is None):
            raise checks.error("test_y", None, "must be given together with test_x")
        if test_x is not None and test_y is not None:
            eval_x = tensors.parse_points("test_x", test_x)
            eval_y = tensors.parse_labels("test_y", torch.as_tensor(test_y), len(eval_x), spec.num_classes)
            evaluation = Evaluation(eval_x, eval_y)
        if pool_y is not None:
            truth = tensors.parse_labels("pool_y", torch.as_tensor(pool_y), len(pool), spec.num_classes)
            evaluation = replace(evaluation, pool_y=truth)
        data = replace(result.data, evaluation=evaluation)
        with ReleaseSession.open_uncharged(result.config, data, self._clock) as session:
            session.reservation_ids = list(result.reservation_ids)
            return session.write_report(result.written, self._student)

    def membership(
        self, other_x: Tensor | np.ndarray, other_y: Tensor | np.ndarray, *, records: int = 2000
    ) -> MembershipResult:
        """PRIVATE. How well an attack on the student tells its records from others, beside the bound on any attack.

        It is for the owner's eyes, and a choice made by it is a release that nobody charged; see
        ``release.membership``.

        Args:
            other_x: Records of the same kind that no teacher has seen.
            other_y: Their labels.
            records: Largest number of records of each side.
        """
        result, (private, spec) = self._require_labels(), self._require_teachers()
        if self._student is None:
            raise ValueError("student: there is none yet. Call fit_student() first.")
        eval_x = tensors.parse_points("other_x", other_x)
        eval_y = tensors.parse_labels("other_y", torch.as_tensor(other_y), len(eval_x), spec.num_classes)
        shards = assign_shards(self.partition, private, self.num_teachers or 1, self.seed)
        test = MembershipTest(records=records)
        sides = test.select_records(
            replace(result.data, evaluation=Evaluation(eval_x, eval_y)), shards, None, self.seed
        )
        if sides is None:
            raise checks.error("other_x", len(eval_x), f"must be at least {MIN_RECORDS} records that are no members")
        return attack_student(
            sides,
            student=self._student[1],
            nonprivate=None,
            events=result.written.labels.reserved_events,
            delta=self.delta,
            seed=self.seed,
            secret=result.written.record["private"],
            held_out=False,
        )

    def labeler(self, num_queries: int = 100, *, calls: int | None = None) -> PrivateLabeler:
        """These teachers behind a PrivateLabeler: any question, one or many at a time. Close it after use.

        Its journal of released answers lies under home, and survives a restart.

        Args:
            num_queries: Largest number of questions.
            calls: Largest number of calls; None: one for each question.
        """
        private, spec = self._require_teachers()
        if isinstance(self.teacher, PrivateMethod):
            fix = "Use teachers, or label()."
            raise checks.error(
                "teacher", type(self.teacher).__name__, "is asked all its questions at once, not as they come", fix
            )
        rounds = num_queries if calls is None else calls
        data = Dataset(spec, private, PublicPool(private.x[:0]), empty_evaluation(spec, private.x))
        checks.integer("num_queries", num_queries, low=1)
        config = self._make_config(data, self._make_teacher_votes(spec, num_queries, Random()))
        assert self.mechanism is not None
        planned_events = self.mechanism.privacy_events(num_queries, rounds)
        budget = ReleaseSession.open_account(config, data, planned_events)
        if self._stored_teachers is not None:
            TeacherStore(self.home).set_ledger_head(self._stored_teachers.id, budget.ledger.get_head())
        teachers = self._stored_teachers.ensemble if self._stored_teachers is not None else self._panel
        assert teachers is not None
        return PrivateLabeler(
            teachers.count_votes,
            mechanism=self.mechanism,
            budget=replace(budget, run=f"labeler {self.name}"),
            journal=self.home / "answers" / f"{self.name}.jsonl",
            num_queries=num_queries,
            calls=rounds,
            allow_uninformative_labels=self.allow_uninformative_labels,
            spec=spec,
            owns_ledger=True,
        )

    # ---- where it stands ----------------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """The guarantee of everything released so far, at the account's delta; 0 before the first release.

        It is what was reserved, composed, or the cap where that is less; infinite once noise was seeded.
        """
        account = self.account
        if account is None:
            return 0.0
        return math.inf if account.guarantee is None else account.guarantee.epsilon

    @property
    def account(self) -> Account | None:
        """The account as it stands; None before the first release."""
        return find_account(self.home, self.name)

    @property
    def folder(self) -> Path:
        """The release folder of the last release: everything in it may be published."""
        return self._require_labels().config.folder / "release"

    # ---- parts --------------------------------------------------------------------------------------------------

    def _make_spec(self, x: Tensor, public: Tensor) -> DataSpec:
        constants = self._constants or (compute_normalization(public) if len(public) else _make_default_constants(x))
        mean, std = constants
        return DataSpec(
            name=self.name,
            num_classes=len(self.class_names),
            input_shape=tuple(x.shape[1:]),
            class_names=self.class_names,
            mean=mean,
            std=std,
            schema=self.schema,
            encoder=self.encoder,
        )

    def _make_config(self, data: Dataset, method: PrivateMethod) -> RunConfig:
        folder = run_folders.get_run_folder(str(self.home), self.name, method.mechanism_name)
        return RunConfig(
            dataset=InMemoryDataset(data),
            partition=self.partition,
            method=method,
            privacy=PrivacyConfig(
                delta=self.delta,
                insecure_noise_seed=self.insecure_noise_seed,
                budget_epsilon=self.budget_epsilon,
                allow_duplicate_account=self.allow_duplicate_account,
                first_charge_only=self.first_charge_only,
                chosen_by=self.chosen_by,
            ),
            root=self.home,
            folder=Path(folder) / make_unique_run_id(),
            seed=self.seed,
            device=self.device,
            quiet=self.quiet,
        )

    def _make_teacher_votes(self, spec: DataSpec, num_queries: int, query: QueryStrategy) -> TeacherVotes:
        """A recipe's teachers, each of which votes on every public point by itself."""
        assert isinstance(self.mechanism, VoteMechanism) and self.num_teachers is not None
        return TeacherVotes(
            num_teachers=self.num_teachers,
            teacher=self._get_recipe(spec),
            mechanism=self.mechanism,
            query=query,
            num_queries=num_queries,
            allow_uninformative_labels=self.allow_uninformative_labels,
        )

    def _get_recipe(self, spec: DataSpec) -> TeacherRecipe:
        """Of the teachers that are kept; None was given: a small network for the data."""
        return (
            self.teacher
            if isinstance(self.teacher, TeacherRecipe)
            else TeacherRecipe(network=_select_guide_network(spec))
        )

    def _build_method(
        self, method: str | Mapping[str, Any] | None, spec: DataSpec, *, num_queries: int, **choices: Any
    ) -> PrivateMethod:
        """Who answers: the user's own, those that were trained, or those of a kind that is not kept."""
        choices = {"num_queries": num_queries, **choices}
        options = {"method": method} if isinstance(method, str) else dict(method or {})
        if options:
            checks.one_of("method", options.pop("method", "teachers_transductive"), ("teachers_transductive",))
        if self._stored_teachers is not None:
            teachers = replace(
                self._make_teacher_votes(spec, num_queries, choices["query"]),
                teachers_id=self._stored_teachers.id,
                alias=TeacherStore(self.home).create_alias(
                    self._stored_teachers.identity.fingerprint, self._stored_teachers.id
                ),
                features=choices["features"],
                guide_student=choices["guide_student"],
            )
            if method is None:
                return teachers
            values = {f.name: getattr(teachers, f.name) for f in dataclasses.fields(teachers) if f.name != "name"}
            return TransductiveTeacherVotes(**values, **options)
        if method is not None:
            fix = "Leave out method, or give PATE(teacher=TeacherRecipe(...))."
            raise checks.error("method", method, "needs the probabilities of a recipe's teachers", fix)
        choices["allow_uninformative_labels"] = self.allow_uninformative_labels
        if isinstance(self.teacher, PrivateMethod):
            if self.teacher.releases_model:
                fix = f'Use PATEClassifier(method="{self.teacher.name}").'
                problem = "releases a model, and labels no public points"
                raise checks.error("teacher", self.teacher.name, problem, fix)
            return replace(self.teacher, **choices)
        assert self._panel is not None and isinstance(self.mechanism, VoteMechanism)
        teacher_class = type(self.teacher)
        parameters = self.teacher.get_params() if hasattr(self.teacher, "get_params") else self.teacher
        return PanelMethod(
            panel=self._panel,
            teacher_repr=f"{teacher_class.__module__}.{teacher_class.__qualname__} {parameters!r}",
            mechanism=self.mechanism,
            **choices,
        )

    def _fit_panel(self, private: PrivateRecords, spec: DataSpec) -> Panel:
        assert self.num_teachers is not None
        shards = assign_shards(self.partition, private, self.num_teachers, self.seed)
        with Stages(quiet=self.quiet) as stages, self._clock("teachers"):
            progress = stages(f"Training {self.num_teachers} teachers")
            if hasattr(self.teacher, "get_params"):
                return fit_estimators(self.teacher, private, spec, shards, seed=self.seed, progress=progress)
            if not callable(self.teacher):
                problem = "must be a TeacherRecipe, a scikit-learn classifier or a function that makes a network"
                raise checks.error("teacher", type(self.teacher).__name__, problem)
            recipe = self.recipe or TeacherRecipe()
            return fit_modules(
                self.teacher, private, spec, shards, recipe, seed=self.seed, device=self.device, progress=progress
            )

    def _require_teachers(self) -> tuple[PrivateRecords, DataSpec]:
        has_teachers = (
            isinstance(self.teacher, PrivateMethod) or self._stored_teachers is not None or self._panel is not None
        )
        if self._private is None or self._spec is None or not has_teachers:
            raise ValueError("teachers: there are none yet. Call fit_teachers(x, y) first.")
        return self._private, self._spec

    def _require_labels(self) -> _LabelResult:
        if self._label_result is None:
            raise ValueError("labels: there are none yet. Call label(pool_x, num_queries) first.")
        return self._label_result


def find_account(home: Path, name: str) -> Account | None:
    """An account as it stands; None before its first release."""
    path = home / "ledger.sqlite"
    if not path.exists():
        return None
    with Ledger(path, create=False) as ledger:
        return next((account for account in ledger.list_accounts() if account.name == name), None)


@contextmanager
def annotate_disk_error(home: Path, account: str) -> Iterator[None]:
    """Say of a full or read-only disk which file failed, and whether the account was charged."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        opened_account = find_account(home, account)
        charge_status = (
            "is charged, and stays charged"
            if opened_account is not None and opened_account.is_charged
            else "was not charged"
        )
        fix = f"Free some space, or make the folder writable (home={str(home)!r}, or PATE_HOME)"
        raise OSError(
            error.errno, f"{error.strerror}. Account {account!r} {charge_status}. {fix}", error.filename
        ) from error


def _format_alternative(config: RunConfig, facts: DatasetFacts) -> str:
    """How these records are asked without teachers, where noise outweighs their votes."""
    descent = match_label_price(config, facts.spec.nominal_size, len(facts.pool))
    if descent is None or not facts.has_records:
        return feasibility.NOISE_ADVICE
    mechanism, size, dim_argument = descent.mechanism, "<about how many>", ""
    arguments = f"sigma={mechanism.sigma:.4g}, adjacency={mechanism.adjacency!r}"
    if descent.effective_dim is not None:
        size, dim_argument = str(descent.num_records), f", effective_dim={descent.effective_dim:.3g}"
        arguments += f", steps={mechanism.steps}, clip_norm={mechanism.clip_norm:g}"
        arguments += f", first_step_size={mechanism.step_size:.3g}, step_size={mechanism.step_size:.3g}"
    call = f"PATE(teacher=GradientMethod(size={size}{dim_argument}, mechanism=GradientDescent({arguments})))"
    return suggest_gradients(descent, call)


def empty_evaluation(spec: DataSpec, points: Tensor) -> Evaluation:
    """Nothing to measure on."""
    return Evaluation(points[:0], torch.zeros(0, dtype=torch.int64))


def _make_default_constants(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Constants that come from no data at all."""
    width = x.shape[1]
    return ((0.5,) * width, (0.25,) * width) if x.dim() == 4 else ((0.0,) * width, (1.0,) * width)


def _make_student(key: str, algorithm: str | StudentAlgorithm, options: Mapping[str, Any]) -> StudentAlgorithm:
    """A student algorithm, made from its name with these options where it is named."""
    if isinstance(algorithm, str):
        return STUDENTS[checks.one_of(key, algorithm, STUDENTS)](**options)
    if not isinstance(algorithm, StudentAlgorithm):
        problem = f"must be one of {', '.join(STUDENTS)}, or an object of pate_torch.students"
        raise checks.error(key, type(algorithm).__name__, problem, "PATEClassifier takes scikit-learn's classifiers.")
    return algorithm


def _select_guide_network(spec: DataSpec) -> str:
    """A network that trains in a second: of teachers, and of students that only guide."""
    return "lean_cnn" if spec.is_image else "mlp"


def _select_student_network(spec: DataSpec) -> str:
    """A published student's network for data of this shape."""
    if not spec.is_image:
        return "mlp"
    return "small_cnn" if min(spec.input_shape[1:]) < 16 else "cnn"
