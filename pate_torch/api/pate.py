"""The stages of a run on tensors or arrays, as for a notebook, with the same ledger, folders and refusals.

    pate = PATE("hospital", classes=2, num_teachers=50, mechanism=GNMax(sigma=8.0), delta=1e-5, budget_epsilon=3.0)
    pate.fit_teachers(x, y)                       # private; unit_id= names the privacy unit of each record
    pate.label(pool_x, num_queries=100)           # charged, then drawn
    student = pate.fit_student("fixmatch")        # free, any number of times
    student.predict(x_new)
    pate.epsilon, pate.report(test_x, test_y)

All releases under one name are charged to one account, whatever object made them.
"""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
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
from pate_torch.data.base import Constants, DatasetSource, check_name, compute_normalization
from pate_torch.features.base import FeatureRecipe
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.methods import feasibility
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.methods.voting import PanelMethod
from pate_torch.owner_metrics import attack_student
from pate_torch.planning.alternatives import match_label_price, suggest_gradients
from pate_torch.privacy import records as origins
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import AddRemove, DatasetFacts, Partition, assign_shards, drop_unusable
from pate_torch.privacy.records import Dataset, DataSpec, EncoderCard, Evaluation, PublicPool, Release
from pate_torch.privacy.schema import TableSchema
from pate_torch.queries.base import QueryStrategy
from pate_torch.queries.random import Random
from pate_torch.release.membership import MIN_RECORDS, MembershipResult, MembershipTest
from pate_torch.release.report import ReleaseReport
from pate_torch.session import NamedStudent, ReleaseSession, WrittenRelease
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.semi_supervised import FixMatch, LabelSpreading, Vat
from pate_torch.students.training import GradientStudent, Supervised
from pate_torch.teachers.panel import Panel, fit_estimators, fit_modules
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import StoredEnsemble, TeacherStore

STUDENTS: dict[str, type[GradientStudent]] = {
    "fixmatch": FixMatch,
    "label_spreading": LabelSpreading,
    "supervised": Supervised,
    "vat": Vat,
}

Array = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class InMemoryDataset(DatasetSource):
    """A data set that is in memory already."""

    data: Dataset

    @property
    def name(self) -> str:
        return self.data.spec.name

    def load(self) -> Dataset:
        return self.data


@dataclass(eq=False, repr=False)
class PATE:
    """One private data set, its teachers and what is released from them.

    Teachers of a recipe are stored under ``home`` and found again; other teachers live as long as this object.

    Args:
        name: The account, as ``account`` of ``PATEClassifier``.
        classes: All classes in order, or their number: declared, never read off the private labels.
        num_teachers: Number K of teachers. None if ``teacher`` is a ``PrivateMethod``.
        mechanism: A mechanism of ``pate_torch.mechanisms`` that opens votes; its sigma is in votes. None if ``teacher``
            is a ``PrivateMethod``, which has a mechanism of its own.
        delta: Delta of the account, fixed when the account opens.
        budget_epsilon: Cap of the account, fixed when the account opens. The present cap, or 10 at first, if None.
        teacher: A TeacherRecipe; a scikit-learn classifier, which is cloned for every shard; a function that makes a
            torch.nn.Module from normalized points to logits, which is trained by ``recipe``; or a ``PrivateMethod``
            without teachers, such as GradientMethod(size=..., mechanism=GradientDescent(...)). A small network if None.
        recipe: How modules that ``teacher`` makes are trained.
        partition: Neighboring relation, ``AddRemove()`` or ``ReplaceOne()``.
        unit: Privacy unit, "record" or "group:<what>", which needs ``unit_id``.
        mean: Public means per channel or feature, which normalize points. Those of the public points if None.
        std: Public standard deviations, given together with ``mean``.
        schema: How tables become the rows given here; the student carries it.
        encoder: Card of the frozen encoder that made the rows (``Encoder.make_card``), each from one point alone. The
            student and the privacy statement name it.
        allow_uninformative_labels: Whether to ask questions whose labels would be no better than chance even if all
            teachers agreed.
        first_charge_only: Whether to refuse a charge if the account has any reservation.
        provenance: Source of the classes and constants, for the statement (``privacy.records``).
        insecure_noise_seed: Seed that makes noise repeatable, and the release not private. None for secure noise.
        seed: As ``random_state`` of ``PATEClassifier``.
        quiet: Whether to show no progress.
        home: As for ``PATEClassifier``, like ``allow_duplicate_account``, ``chosen_by`` and ``device``.

    Raises:
        ValueError: A choice cannot work; nothing has been charged.
    """

    name: str
    _: KW_ONLY
    classes: Sequence[str] | int
    delta: float
    num_teachers: int | None = None
    mechanism: VoteMechanism | None = None
    budget_epsilon: float | None = None
    home: Any = None  # a Path or text; a Path from __post_init__ on
    teacher: Any = None
    recipe: TeacherRecipe | None = None
    partition: Partition = field(default_factory=AddRemove)
    unit: str = "record"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    schema: TableSchema | None = None
    encoder: EncoderCard | None = None
    allow_duplicate_account: bool = False
    first_charge_only: bool = False
    allow_uninformative_labels: bool = False
    chosen_by: str | None = None
    provenance: Mapping[str, str] | None = None
    seed: int = 0
    insecure_noise_seed: int | None = None
    device: torch.device | str = "cpu"
    quiet: bool = True

    def __post_init__(self) -> None:
        check_name(self.name)
        self._check_teacher()
        names = range(checks.integer("classes", self.classes, low=2)) if isinstance(self.classes, int) else self.classes
        self.class_names = tuple(map(str, names))
        if (self.mean is None) != (self.std is None):
            raise checks.error("std", self.std, "must be given together with mean")
        self._constants: Constants | None = None
        if self.mean is not None and self.std is not None:
            self._constants = tuple(map(float, self.mean)), tuple(map(float, self.std))
        if self.provenance is None:
            constants_origin = origins.FROM_PUBLIC_POINTS if self.mean is None else origins.FROM_OWNER
            self.provenance = {origins.CLASSES: origins.FROM_OWNER, origins.NORMALIZATION_CONSTANTS: constants_origin}
        checks.boolean("allow_uninformative_labels", self.allow_uninformative_labels)
        self._privacy = PrivacyConfig(
            delta=checks.delta("delta", self.delta),
            insecure_noise_seed=self.insecure_noise_seed,
            budget_epsilon=self.budget_epsilon,
            allow_duplicate_account=self.allow_duplicate_account,
            first_charge_only=self.first_charge_only,
            chosen_by=self.chosen_by,
        )
        self.home = run_folders.check_root(run_folders.get_home_folder(self.home))
        self._data: Dataset | None = None
        self._stored_teachers: StoredEnsemble | None = None
        self._panel: Panel | None = None
        self._session: ReleaseSession | None = None
        self._written: WrittenRelease | None = None
        self._student: NamedStudent | None = None
        self._clock = StageTimer()

    def _check_teacher(self) -> None:
        """Refuse a teacher, a mechanism and a number of teachers that do not go together."""
        teacher = self.teacher
        if isinstance(teacher, nn.Module):
            fix = f"Pass the class, or lambda: {type(teacher).__name__}(...)."
            raise checks.error("teacher", type(teacher).__name__, "must be a function that makes a fresh network", fix)
        if isinstance(teacher, PrivateMethod):
            for key, value in {"mechanism": self.mechanism, "num_teachers": self.num_teachers}.items():
                if value is not None:
                    problem = "goes with teachers that are trained here; this method has a mechanism of its own"
                    raise checks.error(key, value, problem, "Omit it.")
            self.num_teachers = teacher.ensemble_size
        elif not isinstance(self.mechanism, VoteMechanism):
            problem = "must be a mechanism that opens votes, an object of pate_torch.mechanisms"
            raise checks.error("mechanism", self.mechanism, problem, "Such as mechanism=GNMax(sigma=8.0), in votes.")
        else:
            checks.integer("num_teachers", self.num_teachers, low=1)

    def __repr__(self) -> str:
        name = self.teacher.mechanism_name if self.mechanism is None else self.mechanism.name
        return f"PATE({self.name!r}, num_teachers={self.num_teachers}, mechanism={name!r})"

    # ---- the stages ---------------------------------------------------------------------------------------------

    def fit_teachers(self, x: Array, y: Array, *, unit_id: Any = None, public_x: Array | None = None) -> PATE:
        """Train one teacher for each shard, or find those trained before in the same way on the same records.

        If ``teacher`` is a ``PrivateMethod``, this takes the records in and trains nothing.

        Args:
            x: PRIVATE. uint8 images [N, Ch, H, W] or rows [N, D]. A record with a row that is not finite, or a label
                that is no class, cannot be used: it is left out or, under replace_one, filled in.
            y: PRIVATE. Integers [N].
            unit_id: Stable ids [N] of the units: texts, integers, booleans or dates. A hash of the record if None, so
                that equal records are one unit.
            public_x: Public points whose statistics normalize the private ones if ``mean`` is None. If both are None,
                images are normalized by 1/2 and 1/4, and rows are not normalized.
        """
        private, num_dropped = tensors.build_private_data(x, y, unit_id, self.unit, len(self.class_names))
        public = private.x[:0] if public_x is None else tensors.parse_points("public_x", public_x)
        data = Dataset(
            self.make_spec(private.x, public),
            private,
            PublicPool(public),
            Evaluation(private.x[:0], private.y[:0]),
            num_dropped_by_reason=num_dropped,
            provenance=dict(self.provenance or {}),
        )
        self._data = data = drop_unusable(data, self.partition.adjacency)
        self._stored_teachers = self._panel = self._written = self._student = None
        if isinstance(self.teacher, PrivateMethod):
            return self
        if self.teacher is None or isinstance(self.teacher, TeacherRecipe):
            self._get_recipe(data.spec).check(data.spec)
            method = self._make_teacher_votes(data.spec, num_queries=1)
            with ReleaseSession.open_uncharged(self.make_config(data, method), data, self._clock) as session:
                self._stored_teachers, _ = method.load_or_train(session.make_inputs())
        else:
            self._panel = self._fit_panel(data)
        return self

    def label(
        self,
        pool_x: Array,
        num_queries: int = 100,
        *,
        strategy: QueryStrategy | None = None,
        guide_student: str | StudentAlgorithm | None = None,
        method: str | Mapping[str, Any] | None = None,
        features: FeatureRecipe | None = None,
        finish: bool = True,
    ) -> Release:
        """Ask about ``num_queries`` of the public points: charge the worst case, draw the answers, and write them.

        A call that was interrupted after its charge is finished by the same call, for free; any other call is charged.

        Args:
            pool_x: The public points, of the form of the private ones.
            num_queries: Largest number of questions.
            strategy: Any of ``pate_torch.queries``. At random if None.
            guide_student: Student of a strategy of several rounds, trained anew before each but the first: a name of
                ``STUDENTS`` or any StudentAlgorithm. A small supervised network if None.
            method: "teachers_transductive", or a mapping of its options (``neighbors``, ``alpha``, ``balance``): the
                teachers of a recipe answer for all public points together. For each point by itself if None.
            features: How features of the public points are learnt, in which questions are chosen and records are
                assigned to cells. The points themselves if None.
            finish: Whether the call ends with the labels. If False, it ends with ``finish``, and the same call goes on
                with these labels if it is interrupted before that.

        Raises:
            BudgetExceeded: The cap would be passed; nothing has been drawn.
            ValueError: A choice cannot work; nothing has been charged.
        """
        self._clock = StageTimer()  # an earlier call's stages are no part of this one
        data = self.make_data(pool_x)
        guide_options = {"network": "lean_cnn" if data.spec.is_image else "mlp", "steps": 200}
        labeling = self._build_method(
            method,
            data.spec,
            num_queries=num_queries,
            query=Random() if strategy is None else strategy,
            features=features,
            guide_student=_make_student("guide_student", guide_student or "supervised", guide_options),
        )
        with (
            annotate_disk_error(self.home, self.name),
            ReleaseSession.open(self.make_config(data, labeling), self._clock, _format_alternative) as session,
        ):
            if session.forecast is not None:
                warnings.warn(session.forecast, feasibility.LowSignalWarning, stacklevel=3)
            session.stages.print_message(f"Charging account {self.name!r} in {session.ledger.path.absolute()}.")
            written = session.run()
        self._session, self._written, self._student = session, written, None
        if finish:
            self.finish()
        return written.labels

    def finish(self) -> None:
        """Note that the last call of ``label(finish=False)`` has ended: the same call is charged from now on."""
        if self._session is not None:
            self._session.finish()

    def fit_student(self, algorithm: str | StudentAlgorithm = "fixmatch", **options: Any) -> Student:
        """Train a student on the labels and the public points, which costs nothing, and save it with the release.

        Args:
            algorithm: A name of ``STUDENTS``, or any StudentAlgorithm.
            **options: Fields of the algorithm that is named.

        Raises:
            ValueError: No question was answered.
        """
        session, written = self._require_labels()
        if options and not isinstance(algorithm, str):
            problem = "go with an algorithm's name only"
            raise checks.error("options", sorted(options), problem, "Set them on the object.")
        network = select_student_network(session.facts.spec)
        config = replace(session.config, student=_make_student("algorithm", algorithm, {"network": network, **options}))
        with ReleaseSession.open_uncharged(config, session.splits.data, self._clock) as training:
            config.check_students(training.facts)
            self._student = training.fit(written)
        assert self._student is not None
        return self._student[1]

    def report(
        self, test_x: Array | None = None, test_y: Array | None = None, *, pool_y: Array | None = None
    ) -> ReleaseReport:
        """Report everything releasable about the last release and its student, also in the release folder.

        Args:
            test_x: Public points that the student is evaluated on.
            test_y: Labels of ``test_x``.
            pool_y: True labels of the public points, which evaluate the released labels.
        """
        session, written = self._require_labels()
        spec, pool, evaluation = session.facts.spec, session.facts.pool, session.splits.data.evaluation
        if (test_x is None) != (test_y is None):
            raise checks.error("test_y", None, "must be given together with test_x")
        if test_x is not None:
            evaluation = _parse_evaluation("test", test_x, test_y, spec)
        if pool_y is not None:
            pool_label_P = tensors.parse_labels("pool_y", torch.as_tensor(pool_y), len(pool), spec.num_classes)
            evaluation = replace(evaluation, pool_y=pool_label_P)
        data = replace(session.splits.data, evaluation=evaluation)
        with ReleaseSession.open_uncharged(session.config, data, self._clock) as reporting:
            reporting.reservation_ids = list(session.reservation_ids)
            return reporting.write_report(written, self._student)

    def membership(self, other_x: Array, other_y: Array, *, records: int = 2000) -> MembershipResult:
        """PRIVATE. Attack the student by membership inference, and compute the bound on any attack.

        The result is for the owner alone. A choice that is made by it is a release that nobody charged
        (``release.membership``).

        Args:
            other_x: Records of the same kind that no teacher has seen.
            other_y: Labels of ``other_x``.
            records: Largest number of records on each side.
        """
        session, written = self._require_labels()
        if self._student is None:
            raise ValueError("student: there is none yet. Call fit_student() first.")
        data = replace(session.splits.data, evaluation=_parse_evaluation("other", other_x, other_y, session.facts.spec))
        shards = assign_shards(self.partition, data.private, self.num_teachers or 1, self.seed)
        sides = MembershipTest(records=records).select_records(data, shards, None, self.seed)
        if sides is None:
            problem = f"must be at least {MIN_RECORDS} records that are no members"
            raise checks.error("other_x", len(data.evaluation.x), problem)
        events = written.labels.reserved_events if written.record["private"] else None
        return attack_student(sides, self._student[1], None, events, delta=self.delta, seed=self.seed, held_out=False)

    def labeler(self, num_queries: int = 100, *, calls: int | None = None) -> PrivateLabeler:
        """Make a PrivateLabeler of these teachers, which must be closed after use. Its journal lies under ``home``.

        Args:
            num_queries: As for ``PrivateLabeler``.
            calls: As for ``PrivateLabeler``.
        """
        data = self._require_records()
        if isinstance(self.teacher, PrivateMethod):
            problem = "answers all questions at once"
            raise checks.error("teacher", type(self.teacher).__name__, problem, "Use teachers, or label().")
        assert self.mechanism is not None
        data = replace(data, pool=PublicPool(data.private.x[:0]))
        config = self.make_config(data, self._make_teacher_votes(data.spec, num_queries=num_queries))
        events = self.mechanism.privacy_events(num_queries, num_queries if calls is None else calls)
        budget = ReleaseSession.open_account(config, data, events)
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
        """Epsilon of all releases at the account's delta: their reservations, composed, or the cap if that is smaller.

        It is 0 before the first release, and infinite once noise was seeded.
        """
        if self.account is None:
            return 0.0
        return math.inf if self.account.guarantee is None else self.account.guarantee.epsilon

    @property
    def account(self) -> Account | None:
        """The account; None before the first release."""
        return find_account(self.home, self.name)

    @property
    def folder(self) -> Path:
        """The folder of the last release. Everything in it may be published."""
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
            root=self.home,
            folder=Path(folder) / make_unique_run_id(),
            seed=self.seed,
            device=torch.device(self.device),
            quiet=self.quiet,
        )

    def make_spec(self, x: Tensor, public: Tensor) -> DataSpec:
        """Make the public facts about points like ``x``, normalized by ``mean`` and ``std`` or those of ``public``."""
        width = x.shape[1]
        default = ((0.5,) * width, (0.25,) * width) if x.dim() == 4 else ((0.0,) * width, (1.0,) * width)
        mean, std = self._constants or (compute_normalization(public) if len(public) else default)
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

    def make_data(self, pool_x: Array) -> Dataset:
        """PRIVATE. Make the data set of the records and these public points, with the student's constants."""
        data = self._require_records()
        x, pool = data.private.x, PublicPool(tensors.parse_points("pool_x", pool_x))
        if pool.x.shape[1:] != x.shape[1:] or pool.x.dtype != x.dtype:
            raise checks.error("pool_x", tuple(pool.x.shape), f"must have points like x, {tuple(x.shape[1:])}")
        mean, std = self._constants or compute_normalization(pool.x)  # teachers keep those of their training
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
        """The recipe of stored teachers; that of a network that trains in a second if ``teacher`` is no recipe."""
        is_recipe = isinstance(self.teacher, TeacherRecipe)
        return self.teacher if is_recipe else TeacherRecipe(network="lean_cnn" if spec.is_image else "mlp")

    def _build_method(self, method: str | Mapping[str, Any] | None, spec: DataSpec, **choices: Any) -> PrivateMethod:
        """Make the method of one call of ``label``, of stored teachers, the user's method or a panel."""
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
        teacher_repr = f"{teacher_class.__module__}.{teacher_class.__qualname__} {parameters!r}"
        return PanelMethod(panel=self._panel, teacher_repr=teacher_repr, mechanism=self.mechanism, **choices)

    def _fit_panel(self, data: Dataset) -> Panel:
        assert self.num_teachers is not None
        private, spec, seed = data.private, data.spec, self.seed
        shards = assign_shards(self.partition, private, self.num_teachers, seed)
        with Stages(quiet=self.quiet) as stages, self._clock("teachers"):
            progress = stages(f"Training {self.num_teachers} teachers")
            if hasattr(self.teacher, "get_params"):
                return fit_estimators(self.teacher, private, spec, shards, seed=seed, progress=progress)
            if not callable(self.teacher):
                problem = "must be a TeacherRecipe, a scikit-learn classifier or a function that makes a network"
                raise checks.error("teacher", type(self.teacher).__name__, problem)
            recipe, device = self.recipe or TeacherRecipe(), torch.device(self.device)
            return fit_modules(self.teacher, private, spec, shards, recipe, seed=seed, device=device, progress=progress)

    def _require_records(self) -> Dataset:
        has_teachers = isinstance(self.teacher, PrivateMethod) or self._stored_teachers or self._panel
        if self._data is None or not has_teachers:
            raise ValueError("teachers: there are none yet. Call fit_teachers(x, y) first.")
        return self._data

    def _require_labels(self) -> tuple[ReleaseSession, WrittenRelease]:
        if self._session is None or self._written is None:
            raise ValueError("labels: there are none yet. Call label(pool_x, num_queries) first.")
        return self._session, self._written


def find_account(home: Path, name: str) -> Account | None:
    """Read an account; None before its first release."""
    if not (home / "ledger.sqlite").exists():
        return None
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        return next((account for account in ledger.list_accounts() if account.name == name), None)


@contextmanager
def annotate_disk_error(home: Path, account: str) -> Iterator[None]:
    """Add to the error of a full or read-only disk which file failed, and whether the account was charged."""
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
    """Advise, as a call of PATE, to use per-record gradients in place of teachers, whose votes the noise outweighs."""
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


def _parse_evaluation(side: str, x: Array, y: Any, spec: DataSpec) -> Evaluation:
    """Parse the arguments <side>_x and <side>_y."""
    points = tensors.parse_points(f"{side}_x", x)
    return Evaluation(points, tensors.parse_labels(f"{side}_y", torch.as_tensor(y), len(points), spec.num_classes))


def _make_student(key: str, algorithm: str | StudentAlgorithm, options: Mapping[str, Any]) -> StudentAlgorithm:
    if isinstance(algorithm, str):
        return STUDENTS[checks.one_of(key, algorithm, STUDENTS)](**options)
    if not isinstance(algorithm, StudentAlgorithm):
        problem = f"must be one of {', '.join(STUDENTS)}, or an object of pate_torch.students"
        raise checks.error(key, type(algorithm).__name__, problem, "PATEClassifier takes scikit-learn's classifiers.")
    return algorithm


def select_student_network(spec: DataSpec) -> str:
    """The network of a published student for points of this form."""
    if not spec.is_image:
        return "mlp"
    return "small_cnn" if min(spec.input_shape[1:]) < 16 else "cnn"
