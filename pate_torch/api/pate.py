"""The stages of a run as methods on tensors or arrays, for notebooks. They use the ledger and the folders of train.py.

    pate = PATE("hospital", classes=2, num_teachers=50, mechanism=GNMax(sigma=8.0), delta=1e-5, budget_epsilon=3.0)
    pate.fit_teachers(x, y)                       # private; unit_id= gives the privacy unit of each record
    pate.label(pool_x, num_queries=100)           # charges the account, then draws the noise
    student = pate.fit_student("fixmatch")        # free of charge, any number of times
    student.predict(x_new)
    pate.epsilon, pate.report(test_x, test_y)

All releases under one name are charged to one account, even if different objects make the releases.
"""

from __future__ import annotations

import errno
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pate_torch.api.messages import PATE_WORDS, reword_errors
from pate_torch.config import DataSplits, PrivacyConfig, RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.device import parse_device
from pate_torch.core.executors import Workers
from pate_torch.core.progress import Callback, Stages, StageTimer
from pate_torch.core.run_folders import make_unique_run_id
from pate_torch.data import tensors
from pate_torch.data.base import Constants, DatasetSource, check_name, compute_normalization
from pate_torch.features.base import FeatureRecipe
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.mechanisms.class_counts import ClassCounts
from pate_torch.methods import feasibility
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.methods.voting import PanelMethod
from pate_torch.owner_metrics import attack_student
from pate_torch.planning.gradient_budget import match_label_cost, suggest_gradients
from pate_torch.privacy import records as origins
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.ledger import find_account
from pate_torch.privacy.partition import AddRemove, DatasetFacts, Partition, assign_shards, drop_unusable
from pate_torch.privacy.records import Dataset, DataSpec, EncoderCard, Evaluation, PublicPool, Release
from pate_torch.privacy.schema import TableSchema
from pate_torch.queries.base import QueryStrategy, Random
from pate_torch.release.membership import MIN_RECORDS, MembershipResult, MembershipTest
from pate_torch.release.report import ReleaseReport
from pate_torch.release.store import MODEL_FILE_NAME
from pate_torch.session import NamedStudent, ReleaseSession, WrittenRelease
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.private_test import PrivateTest, read_test
from pate_torch.students.semi_supervised import FixMatch, LabelSpreading, Vat
from pate_torch.students.store import save as save_student
from pate_torch.students.training import GradientStudent, Supervised
from pate_torch.teachers.network import Network, to_network
from pate_torch.teachers.panel import Panel, fit_panel
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import StoredEnsemble, TeacherStore

if TYPE_CHECKING:
    from pate_torch.api.labeler import PrivateLabeler

STUDENTS: dict[str, type[StudentAlgorithm]] = {s.name: s for s in (FixMatch, LabelSpreading, Supervised, Vat)}

Array = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class InMemoryDataset(DatasetSource):
    """A data set in memory."""

    data: Dataset

    @property
    def name(self) -> str:
        return self.data.spec.name

    def load(self) -> Dataset:
        return self.data


@dataclass(eq=False, repr=False)
class PATE:
    """A private data set with its teachers and the releases from these teachers.

    Teachers of a TeacherRecipe are stored under ``home`` and reused by later runs. Other teachers exist only in memory.

    Args:
        name: Name of the account, as ``account`` of ``PATEClassifier``.
        classes: All classes in order, or the number of classes. The private labels do not determine them.
        num_teachers: Number K of teachers. None if ``teacher`` is a ``PrivateMethod``.
        mechanism: Mechanism of ``pate_torch.mechanisms`` for votes, with sigma in votes. None if ``teacher`` is a
            ``PrivateMethod``, which includes a mechanism.
        delta: Delta of the account, fixed when the account opens.
        budget_epsilon: Epsilon cap of the account, fixed when the account opens. None for the cap of the existing
            account, or for 10 if the account is new.
        delta_reserve: Part of delta that a new account reserves for failures. None for a tenth.
        filter: Privacy filter of a new account, "gdp" (exact for Gaussian noise) or "rdp" (for mixtures of mechanisms).
            None for "gdp" if the first release has Gaussian noise only.
        teacher: TeacherRecipe; a scikit-learn or skorch classifier, which is cloned for every shard; a ``Network``, or
            a class or function that returns a torch.nn.Module; or a ``PrivateMethod`` without teachers, such as
            GradientMethod(size=..., mechanism=GradientDescent(...)). None for a small network.
        partition: Neighboring relation, ``AddRemove()`` or ``ReplaceOne()``.
        unit: Privacy unit, "record" or "group:<what>". A group unit needs ``unit_id``, and "record" refuses it.
        mean: Public means [D] of channels or features, which normalize points. None for means of the public points.
        std: Public standard deviations [D]. Set them together with ``mean``.
        value_range: Smallest and largest public values [D] of the features, to which points are clipped before they are
            normalized. None to clip nothing.
        schema: Schema that converted tables to rows. The student includes the schema.
        encoder: Card of the frozen encoder that computed the rows (``Encoder.make_card``), each row from one point
            alone. The student and the privacy statement include the card.
        allow_uninformative_labels: Whether to ask queries although the labels would be no better than chance even if
            all teachers agreed.
        first_charge_only: Whether to refuse a charge if the account has any reservation.
        first_answers: Mechanism of noisy class counts, which are drawn first. None to draw none.
        private_test: Share of the units that every release of the account leaves out, for ``test_student``, which costs
            a tenth of mu^2. The first charge of the account fixes the share. 0 for no test.
        spend_anyway: Whether to go on if the class counts show that no skill is expected of the model.
        provenance: Origins of the classes and constants for the privacy statement (``privacy.records``). None to derive
            the origins from the arguments.
        insecure_noise_seed: Seed that makes the noise repeatable and the release not private. None for secret noise.
        seed: Seed of everything except the noise.
        executor: Workers that train the teachers of a TeacherRecipe.
        verbose: Whether to show the progress, on standard error.
        callback: As for ``PATEClassifier``.
        home: As for ``PATEClassifier``, like ``allow_duplicate_account``, ``chosen_by`` and ``device``.

    Raises:
        ValueError: An argument is wrong. Nothing has been charged.
    """

    name: str
    _: KW_ONLY
    classes: Sequence[str] | int
    delta: float
    num_teachers: int | None = None
    mechanism: VoteMechanism | None = None
    budget_epsilon: float | None = None
    delta_reserve: float | None = None
    filter: str | None = None
    home: Any = None  # a Path or a string; __post_init__ converts it to a Path
    teacher: Any = None
    partition: Partition = field(default_factory=AddRemove)
    unit: str = "record"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    value_range: tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray] | None = None
    schema: TableSchema | None = None
    encoder: EncoderCard | None = None
    allow_duplicate_account: bool = False
    first_charge_only: bool = False
    first_answers: ClassCounts | None = None
    private_test: float = 0.0
    spend_anyway: bool = False
    allow_uninformative_labels: bool = False
    chosen_by: str | None = None
    provenance: Mapping[str, str] | None = None
    seed: int = 0
    insecure_noise_seed: int | None = None
    device: torch.device | str = "cpu"
    executor: Workers = field(default_factory=Workers)
    verbose: bool = True
    callback: Callback | None = None

    @reword_errors(PATE_WORDS)
    def __post_init__(self) -> None:
        check_name(self.name)
        self._check_teacher()
        names = range(checks.integer("classes", self.classes, low=2)) if isinstance(self.classes, int) else self.classes
        self.class_names = tuple(map(str, names))
        kinds = {np.asarray(name).dtype.kind for name in names}
        type_by_kind = {"b": "bool", "i": "int", "u": "int", "f": "float"}
        self._class_type = type_by_kind.get(kinds.pop()) if len(kinds) == 1 else None
        if (self.mean is None) != (self.std is None):
            raise checks.error("std", self.std, "must be given together with mean")
        self._constants: Constants | None = None
        if self.mean is not None and self.std is not None:
            self._constants = tuple(map(float, self.mean)), tuple(map(float, self.std))
        if self.provenance is None:
            constants_origin = origins.FROM_PUBLIC_POINTS if self.mean is None else origins.FROM_OWNER
            self.provenance = {origins.CLASSES: origins.FROM_OWNER, origins.NORMALIZATION_CONSTANTS: constants_origin}
        for key in ("allow_uninformative_labels", "verbose"):
            checks.boolean(key, getattr(self, key))
        if not isinstance(self.executor, Workers):
            raise checks.error("executor", self.executor, "must be workers of pate_torch.core.executors")
        self._privacy = PrivacyConfig(
            delta=checks.delta("delta", self.delta),
            insecure_noise_seed=self.insecure_noise_seed,
            budget_epsilon=self.budget_epsilon,
            delta_reserve=self.delta_reserve,
            filter=self.filter,
            allow_duplicate_account=self.allow_duplicate_account,
            first_charge_only=self.first_charge_only,
            spend_anyway=self.spend_anyway,
            chosen_by=self.chosen_by,
        )
        self.home = run_folders.find_home(self.home)
        self._data: Dataset | None = None
        self._stored_teachers: StoredEnsemble | None = None
        self._panel: Panel | None = None
        self._session: ReleaseSession | None = None
        self._written: WrittenRelease | None = None
        self._student: NamedStudent | None = None
        self._clock = StageTimer()

    def _check_teacher(self) -> None:
        """Raise ValueError if teacher, mechanism and number of teachers cannot be combined."""
        teacher = self.teacher
        if isinstance(teacher, PrivateMethod):
            for key, value in {"mechanism": self.mechanism, "num_teachers": self.num_teachers}.items():
                if value is not None:
                    problem = f"must be None, because teacher={type(teacher).__name__} sets {key}"
                    raise checks.error(key, value, problem, f"Omit {key}.")
            self.num_teachers = teacher.ensemble_size
        elif not isinstance(self.mechanism, VoteMechanism):
            problem = "must be a mechanism for votes from pate_torch.mechanisms"
            raise checks.error("mechanism", self.mechanism, problem, "For example mechanism=GNMax(sigma=8.0).")
        else:
            checks.integer("num_teachers", self.num_teachers, low=1)

    def __repr__(self) -> str:
        name = self.teacher.mechanism_name if self.mechanism is None else self.mechanism.name
        return f"PATE({self.name!r}, num_teachers={self.num_teachers}, mechanism={name!r})"

    # ---- the stages ---------------------------------------------------------------------------------------------

    @reword_errors(PATE_WORDS)
    def fit_teachers(self, x: Any, y: Array | None = None, *, unit_id: Any = None, public_x: Any = None) -> PATE:
        """Train one teacher per shard, or load stored teachers of the same recipe on the same records.

        If ``teacher`` is a ``PrivateMethod``, the call only stores the records in memory.

        Args:
            x: PRIVATE. Images, rows [N, D], a Dataset or a folder, as for ``PATEClassifier.fit``. A record is unusable
                if its point cannot be read or is not finite, or its label is not a class. Unusable records are dropped
                or, under replace_one, replaced by fillers.
            y: PRIVATE. Class numbers, integers [N]. None for the labels of a Dataset or a folder.
            unit_id: Stable ids [N] of the groups: strings, integers, booleans or dates. None if ``unit`` is "record":
                each record is then a unit, even if it equals another.
            public_x: Public points that determine the normalization if ``mean`` is None, the form of images and of the
                points of a Dataset or a folder, and the features of a recipe with ``start``. If it is None, which only
                rows allow, and ``mean`` is None, rows are not normalized.

        Raises:
            ValueError: An argument is wrong, or stored teachers cannot be loaded.
        """
        with Stages(quiet=not self.verbose, callback=self.callback) as stages:
            facts = unit_id, self.unit, self.class_names, self.partition.adjacency, public_x
            private = tensors.build_private_data(x, y, *facts, stages=stages)
        public = private.x[:0] if public_x is None else tensors.parse_points("public_x", public_x)
        data = Dataset(
            self.make_spec(private.x, public),
            private,
            PublicPool(public),
            Evaluation(private.x[:0], private.y[:0]),
            num_dropped_by_reason=private.num_unusable_by_reason,
            provenance=dict(self.provenance or {}),
        )
        self._data = data = drop_unusable(data, self.partition.adjacency)
        store = TeacherStore(self.home)
        store.set_test_rule(self.name, self.private_test, self.account)
        training, _, self._held_out = store.hold_out_units(self.name, data.private, self.partition.adjacency)
        data = replace(data, private=training)
        self._stored_teachers = self._panel = self._written = self._student = None
        if isinstance(self.teacher, PrivateMethod):
            return self
        if self.teacher is None or isinstance(self.teacher, TeacherRecipe):
            recipe = self._get_recipe(data.spec)
            recipe.check(data.spec)
            if recipe.start is not None and public_x is None:
                raise checks.error("public_x", None, "must be the points from which teacher.start learns features")
            method = self._make_teacher_votes(data.spec, num_queries=1)
            with ReleaseSession.open_uncharged(self.make_config(data, method), data, self._clock) as session:
                self._stored_teachers, _ = method.load_or_train(session.make_inputs())
        else:
            self._panel = self._fit_panel(data)
        return self

    @reword_errors(PATE_WORDS)
    def label(
        self,
        pool_x: Any,
        num_queries: int = 100,
        *,
        strategy: QueryStrategy | None = None,
        guide_student: str | StudentAlgorithm | None = None,
        method: str | Mapping[str, Any] | None = None,
        features: FeatureRecipe | None = None,
        finish: bool = True,
        student: StudentAlgorithm | None = None,
    ) -> Release:
        """Charge the worst case of ``num_queries`` queries, draw their answers, and write the labels.

        If a call was interrupted after its charge, the same call finishes it free of charge. Any other call is charged.

        Args:
            pool_x: Public points of the same form as the private points, [P, ...], a Dataset or a folder.
            num_queries: Largest number of queries.
            strategy: Query strategy of ``pate_torch.queries``. None to draw the queries at random.
            guide_student: Student that is trained before each round after the first, for strategies of several rounds:
                a name in ``STUDENTS`` or any StudentAlgorithm. None for a small supervised network.
            method: "teachers_transductive", or a mapping with its options (``neighbors``, ``alpha``, ``balance``), if
                the teachers of a recipe shall label all public points together. None to label each point separately.
            features: Recipe for features of the public points, used to choose queries and to assign records to cells.
                None to use the points as they are.
            finish: Whether the release is complete after this call. If False, the caller must call ``finish`` later.
                If the program is interrupted before ``finish``, the same call returns the same labels.
            student: Student that will learn from the labels, to refuse one that cannot before the charge.

        Raises:
            BudgetExceeded: The charge would exceed the cap. Nothing has been drawn or charged.
            ReleaseStopped: The class counts show that no skill is expected of the model. Only the counts are charged.
            ValueError: An argument is wrong. Nothing has been charged.
        """
        self._clock = StageTimer()  # the stages of earlier calls do not belong to this release
        data = self.make_data(pool_x)
        advise = None if self.allow_uninformative_labels else _format_alternative
        guide_options = {"network": "lean_cnn" if data.spec.is_image else "mlp", "steps": 200}
        labeling = self._build_method(
            method,
            data.spec,
            num_queries=num_queries,
            query=Random() if strategy is None else strategy,
            features=features,
            guide_student=_make_student("guide_student", guide_student or "supervised", guide_options),
        )
        _check_student(student, labeling, data.spec)
        config = self.make_config(data, labeling)
        with annotate_disk_error(self.home, self.name), ReleaseSession.open(config, self._clock, advise) as session:
            if session.forecast is not None:
                warnings.warn(session.forecast, feasibility.LowSignalWarning, stacklevel=3)
            session.stages.print_message(f"Charging account {self.name!r} in {session.ledger.place}.")
            written = session.run()
        self._session, self._written, self._student = session, written, None
        if finish:
            self.finish()
        return written.labels

    def finish(self) -> None:
        """Complete the last call of ``label(finish=False)``. The same call is charged again from now on."""
        if self._session is not None:
            self._session.finish()

    @reword_errors(PATE_WORDS)
    def fit_student(self, algorithm: Any = "fixmatch", **options: Any) -> Student:
        """Train a student on the labels and the public points free of charge, and save it with the release.

        A ``Network`` is trained on the labels alone. It is returned, and is not part of the release and its report.

        Args:
            algorithm: Name in ``STUDENTS``; any StudentAlgorithm; or a ``Network``, or a class or function that returns
                a torch.nn.Module.
            **options: Fields of the algorithm or of the ``Network``, if ``algorithm`` is no StudentAlgorithm.

        Raises:
            ValueError: An argument is wrong, ``label`` has not been called, or no query was answered.
        """
        session, written = self._require_labels()
        if not isinstance(algorithm, str | StudentAlgorithm) and (network := to_network(algorithm, **options)):
            return self._fit_network(network, session.facts, written.labels)
        if options and not isinstance(algorithm, str):
            fix = f"Pass {type(algorithm).__name__}({', '.join(f'{key}=...' for key in options)}) as the algorithm."
            raise checks.error("options", sorted(options), "belong to an algorithm that is already made", fix)
        if isinstance(algorithm, str) and issubclass(STUDENTS.get(algorithm, LabelSpreading), GradientStudent):
            options = {"network": select_student_network(session.facts.spec)} | options
        config = replace(session.config, student=_make_student("algorithm", algorithm, options))
        with self._reopen_run(config, session.splits.data) as student_session:
            config.check_students(student_session.facts)
            self._student = student_session.fit(written)
        assert self._student is not None
        return self._student[1]

    @contextmanager
    def _reopen_run(self, config: RunConfig, data: Dataset) -> Iterator[ReleaseSession]:
        """Open the run that released the labels again, and hold its folder while files are written there."""
        with (
            run_folders.hold_run_folder(config.folder),
            ReleaseSession.open_uncharged(config, data, self._clock) as session,
        ):
            yield session

    def _fit_network(self, network: Network, facts: DatasetFacts, labels: Release) -> Student:
        network.check("algorithm", facts.spec)
        query_A, label_A = labels.query_Q[labels.answered_Q], labels.label_Q[labels.answered_Q]
        if not len(label_A):
            raise ValueError("labels: no public point has a released label. The account stays charged.")
        x_A, device = facts.pool.x[query_A], parse_device(self.device)
        module = network.fit(x_A, label_A, facts.spec, seed=self.seed, device=device, teacher=0)
        return Student({"name": "own"}, module, facts.spec)

    def adjust_student(self, multiple: float, offset_C: Tensor) -> Student:
        """Multiply and shift the logits of the last student, free of charge, and save it with the release."""
        session, _ = self._require_labels()
        assert self._student is not None
        name, student = self._student
        self._student = name, student.adjust_logits(multiple, offset_C)
        with run_folders.hold_run_folder(session.config.folder):
            save_student(self._student[1], session.release_dir / MODEL_FILE_NAME)
        return self._student[1]

    @reword_errors(PATE_WORDS)
    def test_student(self) -> tuple[PrivateTest, Student]:
        """Charge and release the test of the final student on held-out units. Also return it with its temperature.

        Raises:
            ValueError: There is no ``private_test`` or no student; or as for ``private_test.release_test``.
        """
        session, _ = self._require_labels()
        if self._student is None or session.config.test_mechanism is None or session.budget is None:
            raise ValueError("private_test: needs PATE(private_test=0.1), and a student. Call fit_student() first.")
        with self._reopen_run(session.config, session.splits.data) as test_session:
            test_session.budget = replace(session.budget, ledger=test_session.ledger)
            test_session.splits, test_session.reservation_ids = session.splits, session.reservation_ids
            self._student = test_session.test(self._student)
        test = read_test(session.release_dir / MODEL_FILE_NAME, "student_sha256")
        assert test is not None and self._student is not None
        return test, self._student[1]

    @reword_errors(PATE_WORDS)
    def report(
        self, test_x: Array | None = None, test_y: Array | None = None, *, pool_y: Array | None = None
    ) -> ReleaseReport:
        """Write the report of the last release and its student to the release folder, and return the report.

        The whole report is releasable.

        Args:
            test_x: Public test points. None to report no test accuracy.
            test_y: Labels of ``test_x``.
            pool_y: True labels [P] of the public points, for the accuracy of the released labels. None if unknown.
        """
        session, written = self._require_labels()
        spec, pool, evaluation = session.facts.spec, session.facts.pool, session.splits.data.evaluation
        if (test_x is None) != (test_y is None):
            raise ValueError("test_x, test_y: must be given together. One of them is None.")
        if test_x is not None:
            evaluation = _parse_evaluation("test", test_x, test_y, spec)
        if pool_y is not None:
            pool_label_P = tensors.parse_labels("pool_y", torch.as_tensor(pool_y), len(pool), spec.num_classes)
            evaluation = replace(evaluation, pool_y=pool_label_P)
        data = replace(session.splits.data, evaluation=evaluation)
        with self._reopen_run(session.config, data) as report_session:
            report_session.reservation_ids = list(session.reservation_ids)
            return report_session.write_report(written, self._student)

    def membership(self, other_x: Array, other_y: Array, *, records: int = 2000) -> MembershipResult:
        """PRIVATE. Attack the student by membership inference, and compute the bound on any attack.

        The result is for the owner alone. A choice that depends on the result would be a release without a charge
        (``release.membership``).

        Args:
            other_x: Records of the same kind on which no teacher was trained.
            other_y: Labels of ``other_x``.
            records: Largest number of members and of other records.

        Raises:
            ValueError: No student has been fitted, or there are too few records.
        """
        session, written = self._require_labels()
        if self._student is None:
            raise ValueError("student: no student has been fitted. Call fit_student() first.")
        data = replace(session.splits.data, evaluation=_parse_evaluation("other", other_x, other_y, session.facts.spec))
        shards = assign_shards(self.partition, data.private, self.num_teachers or 1, self.seed)
        sides = MembershipTest(records=records).select_records(data, shards, None, self.seed)
        if sides is None:
            problem = f"must hold at least {MIN_RECORDS} records that are no members"
            raise checks.error("other_x", f"{len(data.evaluation.x)} records", problem)
        events = written.labels.reserved_events if written.record["private"] else None
        return attack_student(sides, self._student[1], None, events, delta=self.delta, seed=self.seed, held_out=False)

    @reword_errors(PATE_WORDS)
    def labeler(self, num_queries: int = 100, *, calls: int | None = None) -> PrivateLabeler:
        """Make a ``PrivateLabeler`` of these teachers with a journal under ``home``. The caller must close the labeler.

        ``num_queries`` and ``calls`` are arguments of ``PrivateLabeler``.
        """
        data = self._require_records()
        if isinstance(self.teacher, PrivateMethod):
            problem = "answers all queries at once, so it cannot answer them one by one"
            raise checks.error("teacher", type(self.teacher).__name__, problem, "Call label() instead.")
        from pate_torch.api.labeler import PrivateLabeler  # imports hypotheses/

        assert self.mechanism is not None
        data = replace(data, pool=PublicPool(data.private.x[:0]))
        config = self.make_config(data, self._make_teacher_votes(data.spec, num_queries=num_queries))
        events = self.mechanism.privacy_events(num_queries, num_queries if calls is None else calls)
        splits = DataSplits(data=data, all_private=data.private, held_out=self._held_out)
        budget = ReleaseSession.open_account(config, splits, events)
        if self._stored_teachers is not None:
            TeacherStore(self.home).set_ledger_head(self._stored_teachers.id, budget.ledger.get_head())
        teachers = self._panel if self._stored_teachers is None else self._stored_teachers.ensemble
        assert teachers is not None
        return PrivateLabeler(
            teachers.count_votes,
            mechanism=self.mechanism,
            budget=replace(budget, run=f"labeler {self.name}"),
            journal=self.home / "answers" / f"{self.name}.jsonl",
            spec=data.spec,
            num_queries=num_queries,
            calls=calls,
            allow_uninformative_labels=self.allow_uninformative_labels,
            owns_ledger=True,
        )

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """Composed epsilon of all reservations of the account at the account's delta, or the cap if that is smaller.

        The value is 0 before the first release, and infinite if any noise was seeded.
        """
        if self.account is None:
            return 0.0
        return math.inf if self.account.guarantee is None else self.account.guarantee.epsilon

    @property
    def account(self) -> Account | None:
        """Account of the data set. None before the first release."""
        return find_account(self.home, self.name)

    @property
    def folder(self) -> Path:
        """Folder of the last release. All files of the folder may be published."""
        return self._require_labels()[0].release_dir

    # ---- parts --------------------------------------------------------------------------------------------------

    def make_config(self, data: Dataset, method: PrivateMethod) -> RunConfig:
        """Make the configuration of a run of ``method`` on ``data``, in a new folder."""
        folder = run_folders.get_run_folder(str(self.home), self.name, method.mechanism_name)
        return RunConfig(
            dataset=InMemoryDataset(data),
            partition=self.partition,
            method=method,
            privacy=self._privacy,
            private_test=self.private_test,
            root=self.home,
            folder=Path(folder) / make_unique_run_id(),
            seed=self.seed,
            device=parse_device(self.device),
            executor=self.executor,
            quiet=not self.verbose,
            callback=self.callback,
        )

    def make_spec(self, x: Tensor, public: Tensor) -> DataSpec:
        """Make the public facts about points of the form of ``x``. ``public`` sets a normalization that is not set."""
        default = (0.0,) * x.shape[1], (1.0,) * x.shape[1]  # images have public points
        mean, std = self._constants or (compute_normalization(public) if len(public) else default)
        low, high = (None, None) if self.value_range is None else (tuple(map(float, part)) for part in self.value_range)
        return DataSpec(
            name=self.name,
            num_classes=len(self.class_names),
            input_shape=tuple(x.shape[1:]),
            class_names=self.class_names,
            class_type=self._class_type,
            mean=mean,
            std=std,
            low=low,
            high=high,
            schema=self.schema,
            encoder=self.encoder,
        )

    def make_data(self, pool_x: Any) -> Dataset:
        """PRIVATE. Make the data set of the records and these public points, normalized for the student."""
        data = self._require_records()
        x, pool = data.private.x, PublicPool(tensors.parse_points("pool_x", pool_x))
        if pool.x.shape[1:] != x.shape[1:] or pool.x.dtype != x.dtype:
            expected, points = f"{tuple(x.shape[1:])} {x.dtype}", f"{tuple(pool.x.shape)} {pool.x.dtype}"
            raise checks.error("pool_x", points, f"must hold points of the shape and type of x, {expected}")
        mean, std = self._constants or compute_normalization(pool.x)  # teachers keep the constants of their training
        return replace(data, pool=pool, spec=replace(data.spec, mean=mean, std=std))

    def _make_teacher_votes(
        self, spec: DataSpec, teacher_class: type[TeacherVotes] = TeacherVotes, **options: Any
    ) -> TeacherVotes:
        assert isinstance(self.mechanism, VoteMechanism) and self.num_teachers is not None
        return teacher_class(
            num_teachers=self.num_teachers,
            teacher=self._get_recipe(spec),
            mechanism=self.mechanism,
            allow_uninformative_labels=self.allow_uninformative_labels,
            **options,
        )

    def _get_recipe(self, spec: DataSpec) -> TeacherRecipe:
        is_recipe = isinstance(self.teacher, TeacherRecipe)
        return self.teacher if is_recipe else TeacherRecipe(network="lean_cnn" if spec.is_image else "mlp")

    def _build_method(self, method: str | Mapping[str, Any] | None, spec: DataSpec, **choices: Any) -> PrivateMethod:
        """Make the method of one call of ``label`` from stored teachers, the user's ``PrivateMethod`` or a panel."""
        if self.first_answers is not None:
            choices["class_counts"] = self.first_answers
        if self._stored_teachers is not None:
            stored = self._stored_teachers
            alias = TeacherStore(self.home).create_alias(stored.identity.fingerprint, stored.id)
            choices |= {"teachers_id": stored.id, "alias": alias}
            if method is None:
                return self._make_teacher_votes(spec, **choices)
            options = {"method": method} if isinstance(method, str) else dict(method)
            checks.one_of("method", options.pop("method", "teachers_transductive"), ("teachers_transductive",))
            return self._make_teacher_votes(spec, TransductiveTeacherVotes, **choices, **options)
        if method is not None:
            fix = "Omit method, or use PATE(teacher=TeacherRecipe(...))."
            raise checks.error("method", method, "needs the probabilities of a recipe's teachers", fix)
        choices["allow_uninformative_labels"] = self.allow_uninformative_labels
        if isinstance(self.teacher, PrivateMethod):
            if self.teacher.releases_model:
                fix = f'Use PATEClassifier(method="{self.teacher.name}").'
                problem = "releases a model and labels no public points"
                raise checks.error("teacher", self.teacher.name, problem, fix)
            return replace(self.teacher, **choices)
        assert self._panel is not None and isinstance(self.mechanism, VoteMechanism)
        teacher_class = type(self.teacher)
        parameters = self.teacher.get_params() if hasattr(self.teacher, "get_params") else self.teacher
        # Without the addresses of functions, which another process does not have when it finishes an interrupted call.
        parameters_repr = re.sub(" at 0x[0-9a-f]+", "", repr(parameters))
        teacher_repr = f"{teacher_class.__module__}.{teacher_class.__qualname__} {parameters_repr}"
        return PanelMethod(panel=self._panel, teacher_repr=teacher_repr, mechanism=self.mechanism, **choices)

    def _fit_panel(self, data: Dataset) -> Panel:
        assert self.num_teachers is not None
        private, spec, seed = data.private, data.spec, self.seed
        shards = assign_shards(self.partition, private, self.num_teachers, seed)
        with Stages(quiet=not self.verbose, callback=self.callback) as stages, self._clock("teachers"):
            progress = stages(f"Training {self.num_teachers} teachers")
            device = parse_device(self.device)
            return fit_panel(self.teacher, private, spec, shards, seed=seed, device=device, progress=progress)

    def _require_records(self) -> Dataset:
        has_teachers = isinstance(self.teacher, PrivateMethod) or self._stored_teachers or self._panel
        if self._data is None or not has_teachers:
            raise ValueError("teachers: no teachers have been trained. Call fit_teachers(x, y) first.")
        if (TeacherStore(self.home).find_test_rule(self.name) or {}).get("id", "") != self._held_out:
            raise ValueError("teachers: the units that are held out have changed. Call fit_teachers(x, y) again.")
        return self._data

    def _require_labels(self) -> tuple[ReleaseSession, WrittenRelease]:
        if self._session is None or self._written is None:
            raise ValueError("labels: no labels have been released. Call label(pool_x, num_queries) first.")
        return self._session, self._written


@contextmanager
def annotate_disk_error(home: Path, account: str) -> Iterator[None]:
    """Add the file and whether the account was charged to the error of a full or read-only disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        opened = find_account(home, account)
        status = "is charged, and stays charged" if opened is not None and opened.is_charged else "was not charged"
        fix = f"Free some space, or make the folder writable (home={str(home)!r}, or PATE_HOME)"
        message = f"{error.strerror}. Account {account!r} {status}. {fix}"
        raise OSError(error.errno, message, error.filename) from error


def _format_alternative(config: RunConfig, facts: DatasetFacts) -> str:
    """Format advice to use per-record gradients instead of teachers, as a call of PATE."""
    descent = match_label_cost(config, facts.spec.nominal_size, len(facts.pool))
    if descent is None or not facts.has_records:
        return feasibility.NOISE_ADVICE
    mechanism, size, dim_argument = descent.mechanism, "<approximate number>", ""
    arguments = f"sigma={mechanism.sigma:.4g}, adjacency={mechanism.adjacency!r}"
    if descent.effective_dim is not None:
        size, dim_argument = str(descent.num_records), f", effective_dim={descent.effective_dim:.3g}"
        arguments += f", steps={mechanism.steps}, clip_norm={mechanism.clip_norm:g}"
        arguments += f", first_step_size={mechanism.step_size:.3g}, step_size={mechanism.step_size:.3g}"
    call = f"PATE(teacher=GradientMethod(size={size}{dim_argument}, mechanism=GradientDescent({arguments})))"
    return suggest_gradients(descent, call)


def _parse_evaluation(side: str, x: Array, y: Any, spec: DataSpec) -> Evaluation:
    points = tensors.parse_points(f"{side}_x", x)
    return Evaluation(points, tensors.parse_labels(f"{side}_y", torch.as_tensor(y), len(points), spec.num_classes))


def _check_student(student: StudentAlgorithm | None, method: PrivateMethod, spec: DataSpec) -> None:
    if student is not None:
        method.check_student(student)
        with checks.prefixed_errors("student"):
            student.check(spec)


def _make_student(key: str, algorithm: str | StudentAlgorithm, options: Mapping[str, Any]) -> StudentAlgorithm:
    if isinstance(algorithm, str):
        return STUDENTS[checks.one_of(key, algorithm, STUDENTS)](**options)
    if not isinstance(algorithm, StudentAlgorithm):
        problem = f"must be one of {', '.join(STUDENTS)}, an algorithm of pate_torch.students, or a Network"
        raise checks.error(key, type(algorithm).__name__, problem, "For scikit-learn classifiers use PATEClassifier.")
    return algorithm


def select_student_network(spec: DataSpec) -> str:
    """Return the default network of a published student for points of this form."""
    if not spec.is_image:
        return "mlp"
    return "small_cnn" if min(spec.input_shape[1:]) < 16 else "cnn"
