"""Teachers of any kind, fitted in this process and not kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import clone, is_classifier
from torch import Tensor, nn

from pate_torch.core import checks, rng
from pate_torch.protocols import Progress, silent
from pate_torch.sensitive import Votes
from pate_torch.teachers import voting
from pate_torch.teachers.engine import Feed, gather_chunk, make_optimizer
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.types import Dataset, DataSpec, PrivateData, Shards
from pate_torch.voters import teachers
from pate_torch.voters.base import FittedVoters, VotersBase
from pate_torch.voters.description import VotersDescription

if TYPE_CHECKING:
    from pate_torch.config import RunConfig
    from pate_torch.context import RunContext


@dataclass(frozen=True, kw_only=True, eq=False)
class PanelVoters(VotersBase):
    """PRIVATE. Teachers of a panel, each voting on every public point by itself.

    Attributes:
        panel: The teachers.
        kind: What they are, in words: their class and its parameters.
    """

    name: str = "panel"
    panel: Panel = field(repr=False)
    kind: str = ""

    @property
    def num_teachers(self) -> int:
        return len(self.panel)

    def description(self, unit: str, config: RunConfig) -> VotersDescription:
        return teachers.describe(self.num_teachers, unit, counts=getattr(config.mechanism, "counts", False))

    def votes_per_question(self, data: Dataset, config: RunConfig) -> int | None:
        return self.num_teachers

    def fitted(self, run: RunContext) -> FittedVoters:
        """PRIVATE. The teachers' votes."""
        with run.clock("votes"):
            votes = self.panel.votes(run.data.pool.x)
        return FittedVoters(id=run.store.new_alias(run.store.votes_fingerprint(votes)), sensitive=votes)


Member = Callable[[Tensor], Tensor]
"""PRIVATE. Raw points [Q, ...] -> classes, int64 [Q]."""

ABSTAIN = 0
"""What a teacher votes that learnt nothing, or cannot answer: it still has exactly one vote."""


@dataclass(frozen=True, eq=False, repr=False)
class Panel:
    """PRIVATE. K fitted teachers.

    Attributes:
        failed: How many could not be fitted and vote class 0 (for the owner's eyes).
    """

    members: tuple[Member, ...]
    spec: DataSpec
    failed: int = 0

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Panel({len(self)} teachers, content withheld)"

    def predictions(self, x: Tensor, progress: Progress = silent) -> Tensor:
        """PRIVATE. Each teacher's class, int64 [K, Q], of raw points x [Q, ...]; what is no class becomes class 0."""
        rows = []
        for number, member in enumerate(self.members):
            label_Q = member(x)
            rows.append(torch.where((label_Q >= 0) & (label_Q < self.spec.num_classes), label_Q, ABSTAIN))
            progress(number + 1, len(self))
        return torch.stack(rows)

    def votes(self, x: Tensor, progress: Progress = silent) -> Votes:
        """PRIVATE. Every teacher's one vote on each point."""
        return voting.count(self.predictions(x, progress), self.spec.num_classes)


def constant(label: int) -> Member:
    """A teacher that always predicts the same class."""
    return lambda x: torch.full((len(x),), label, dtype=torch.int64)


def fit_estimators(
    estimator: Any, private: PrivateData, spec: DataSpec, shards: Shards, *, seed: int, progress: Progress = silent
) -> Panel:
    """PRIVATE. Fit a clone of a scikit-learn classifier to every shard's normalized, flattened records.

    A shard without records votes class 0, one of a single class votes that class, and so does (for class 0) a teacher
    that cannot be fitted: stopping there would tell of that shard. Its warnings are not shown for the same reason.
    ``random_state``s that were left open are set by teacher.

    Raises:
        ValueError: ``estimator`` is no classifier, or no clone can be fitted.
    """
    if not is_classifier(estimator):
        raise checks.fail("teacher", type(estimator).__name__, "must be a scikit-learn classifier")
    x_ND = spec.normalize(private.x).flatten(1).numpy()
    members: list[Member] = []
    errors: list[Exception] = []
    for teacher in range(shards.num_teachers):
        own = shards.of(teacher).numpy()
        y = private.y.numpy()[own]
        if len(np.unique(y)) < 2:
            members.append(constant(int(y[0]) if len(y) else ABSTAIN))
        else:
            try:
                members.append(_fitted(estimator, x_ND[own], y, spec, seed, teacher))
            except Exception as error:
                errors.append(error)
                members.append(constant(ABSTAIN))
        progress(teacher + 1, shards.num_teachers)
    if errors and len(errors) == shards.num_teachers:
        raise ValueError(f"teacher: no {type(estimator).__name__} could be fitted: {errors[0]}") from errors[0]
    return Panel(tuple(members), spec, len(errors))


def _fitted(estimator: Any, x: np.ndarray, y: np.ndarray, spec: DataSpec, seed: int, teacher: int) -> Member:
    own = clone(estimator)
    states = {
        key: rng.derive(seed, "teacher", teacher, key) % 2**32
        for key, value in own.get_params(deep=True).items()
        if value is None and key.split("__")[-1] == "random_state"
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own.set_params(**states).fit(x, y)

    def member(points: Tensor) -> Tensor:
        label = np.full(len(points), ABSTAIN, dtype=np.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                label[:] = np.asarray(own.predict(spec.normalize(points).flatten(1).numpy())).astype(np.int64)
            except Exception:  # as in fitting: more neighbors asked for than the shard has records, for instance
                label[:] = ABSTAIN
        return torch.from_numpy(label)

    return member


def fit_modules(
    factory: Callable[[], nn.Module],
    private: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> Panel:
    """PRIVATE. Train a network of the user's own for every shard, as ``recipe`` says (but for its network).

    A shard without records votes class 0, and so do non-finite logits.

    Args:
        factory: Makes a fresh network from normalized points [B, ...] to logits [B, C]; whatever it draws comes from
            the teacher's own stream.
        private: The private records.
        spec: How they are normalized.
        shards: Which records each teacher learns from.
        recipe: Recipe of the training.
        seed: Seed of the teachers' streams.
        device: Device of the training.
        progress: Called with (done, total) teachers.

    Raises:
        ValueError: The network has another shape.
    """
    device = torch.device(device)
    check_factory("teacher", factory, spec)
    members: list[Member] = []
    for teacher in range(shards.num_teachers):
        if len(shards.of(teacher)) == 0:
            members.append(constant(ABSTAIN))
        else:
            module = fit_module(factory, private, spec, shards, recipe, teacher, seed=seed, device=device)
            members.append(_network(module, spec, device, recipe.torch_dtype))
        progress(teacher + 1, shards.num_teachers)
    return Panel(tuple(members), spec)


def fit_module(
    factory: Callable[[], nn.Module],
    records: PrivateData,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    teacher: int,
    *,
    seed: int,
    device: torch.device,
) -> nn.Module:
    """The network of one shard that has records, in evaluation mode; arguments as of ``fit_modules``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.derive(seed, "teacher", teacher, "module"))
        module = factory().to(device, recipe.torch_dtype)
        own = gather_chunk(records, shards, range(teacher, teacher + 1))
        _descend(module, Feed(own, spec, recipe, seed, device), recipe)
    return module


def check_factory(key: str, factory: Callable[[], nn.Module], spec: DataSpec) -> None:
    """Raise ValueError unless it makes networks from points of this form to logits; ``key`` names it."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = factory()
        if not isinstance(module, nn.Module):
            raise checks.fail(key, type(module).__name__, "must be made a torch.nn.Module by its factory")
        out = module.eval()(torch.zeros(2, *spec.input_shape))
    if tuple(out.shape) != (2, spec.num_classes):
        raise checks.fail(key, tuple(out.shape), f"must map 2 points to logits of shape (2, {spec.num_classes})")


def _descend(module: nn.Module, feed: Feed, recipe: TeacherRecipe) -> None:
    params: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_optimizer(params, recipe)
    module.train()
    for step, (x, y) in enumerate(feed):
        F.cross_entropy(module(x[:, 0]), y[0], label_smoothing=recipe.label_smoothing).backward()
        for parameter in params:
            if parameter.grad is None:  # takes no part in the logits
                parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            optimizer.step(recipe.rate(step))
        for parameter in params:
            parameter.grad = None
    module.eval()


def _network(module: nn.Module, spec: DataSpec, device: torch.device, dtype: torch.dtype) -> Member:
    @torch.no_grad()
    def member(points: Tensor) -> Tensor:
        parts = [torch.zeros(0, dtype=torch.int64)]
        for part in points.split(512):
            logits = module(spec.normalize(part.to(device), dtype))
            parts.append(torch.where(logits.isfinite().all(1), logits.argmax(1), ABSTAIN).cpu())
        return torch.cat(parts)

    return member
