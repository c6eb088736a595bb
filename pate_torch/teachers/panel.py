"""Teachers that the user brings: scikit-learn classifiers or networks, fitted in this process and not stored."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import clone, is_classifier
from torch import Tensor, nn

from pate_torch.core import checks, rng
from pate_torch.core.device import deterministic_mode
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.core.rng import seeded_generators
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers import independence, voting
from pate_torch.teachers.engine import Chunk, iterate_batches, make_optimizer
from pate_torch.teachers.recipe import TeacherRecipe

Member = Callable[[Tensor], Tensor]
"""PRIVATE. Fitted teacher: a function from raw points [Q, ...] to classes, int64 [Q]."""
Fit = Callable[[Tensor, Tensor, int], Member]
"""PRIVATE. Function that fits a teacher to points [N, ...] and labels [N], given the number of the teacher; N >= 1."""

FALLBACK_CLASS = 0
"""Vote of a teacher that could not be fitted or cannot predict, so that every teacher has exactly one vote."""


@dataclass(eq=False, repr=False)
class Panel:
    """PRIVATE. K fitted teachers.

    Attributes:
        members: PRIVATE. Teachers.
        spec: Facts of the points that the teachers label.
        num_failed: PRIVATE. Number of teachers that could not be fitted and vote for class 0.
        retraining_check: PRIVATE. Pickled work, points, labels and number of the teacher that a fresh process trains a
            second time. None if ``check_retraining`` has passed, or if the panel has one teacher.
    """

    members: tuple[Member, ...]
    spec: DataSpec
    num_failed: int = 0
    retraining_check: tuple[bytes, Tensor, Tensor, int] | None = None

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Panel({len(self)} teachers, content withheld)"

    def predict(self, x: Tensor, progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Predict the class of raw points [Q, ...] by each teacher, int64 [K, Q]; invalid classes become 0."""
        rows = []
        for number, member in enumerate(self.members):
            rows.append(self._replace_invalid(member(x)))
            progress(number + 1, len(self))
        return torch.stack(rows)

    def _replace_invalid(self, label_Q: Tensor) -> Tensor:
        return torch.where((label_Q >= 0) & (label_Q < self.spec.num_classes), label_Q, FALLBACK_CLASS)

    def count_votes(self, x: Tensor, progress: Progress = do_nothing) -> Votes:
        """PRIVATE. Return the votes on raw points [Q, ...], one of each teacher on each point."""
        return voting.count_votes(self.predict(x, progress), self.spec.num_classes)

    def check_retraining(self, x: Tensor, prediction_KQ: Tensor) -> None:
        """PRIVATE. Raise ValueError unless one teacher predicts the same on these points after a second training."""
        if self.retraining_check is not None:
            work, own_x, own_y, teacher = self.retraining_check
            label_Q = independence.call_in_fresh_process(work, own_x, own_y, teacher, x)
            if not torch.equal(self._replace_invalid(label_Q), prediction_KQ[teacher]):
                raise independence.dependence_error(len(self))
            self.retraining_check = None


def _make_constant(label: int) -> Member:
    return lambda x: torch.full((len(x),), label, dtype=torch.int64)


def _fit_member(fit: Fit, seed: int, x: Tensor, y: Tensor, teacher: int, errors: list[Exception]) -> Member:
    """PRIVATE. Fit a teacher. If this fails, return a constant teacher, because an error would reveal a shard."""
    if len(y) == 0:
        return _make_constant(FALLBACK_CLASS)
    try:
        with seeded_generators(seed, "teacher", teacher, "fit"):
            member = fit(x, y, teacher)
    except Exception as error:
        errors.append(error)
        return _make_constant(FALLBACK_CLASS)

    def predict_seeded(points: Tensor) -> Tensor:
        with seeded_generators(seed, "teacher", teacher, "predict"):
            return member(points)

    return predict_seeded


def _refit_and_predict(fit: Fit, seed: int, x: Tensor, y: Tensor, teacher: int, points: Tensor) -> Tensor:
    return _fit_member(fit, seed, x, y, teacher, [])(points)


def _fit_all(
    fit: Fit, private: PrivateRecords, spec: DataSpec, shards: Shards, seed: int, progress: Progress, teacher_type: str
) -> Panel:
    """PRIVATE. Fit a teacher to each shard; ``teacher_type`` names the teachers in an error message."""
    has_several = shards.num_teachers > 1
    # The work is pickled before the training, so that an error comes at once.
    work = independence.pickle_work(functools.partial(_refit_and_predict, fit, seed)) if has_several else b""
    members, errors = list[Member](), list[Exception]()
    for teacher in range(shards.num_teachers):
        own_rows = shards.get_indices(teacher)
        members.append(_fit_member(fit, seed, private.x[own_rows], private.y[own_rows], teacher, errors))
        progress(teacher + 1, shards.num_teachers)
    if errors and len(errors) == shards.num_teachers:
        raise ValueError(f"teacher: no {teacher_type} could be fitted: {type(errors[0]).__name__}") from errors[0]
    panel = Panel(tuple(members), spec, len(errors))
    if has_several:
        teacher = independence.draw_candidate(range(1, shards.num_teachers))
        own_rows = shards.get_indices(teacher)
        panel.retraining_check = work, private.x[own_rows], private.y[own_rows], teacher
    return panel


def fit_estimators(
    estimator: Any,
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    *,
    seed: int,
    progress: Progress = do_nothing,
) -> Panel:
    """PRIVATE. Fit a copy of a scikit-learn classifier to the normalized, flattened records of each shard.

    If a shard has one class, its teacher votes for this class. If a shard has no records, or its teacher cannot be
    fitted, the teacher votes for class 0. Errors and warnings would reveal the shard, so they are not shown. Every
    ``random_state`` that is None is set for each teacher.

    Raises:
        ValueError: ``estimator`` is no classifier, or no teacher can be fitted.
    """
    if not is_classifier(estimator):
        raise checks.error("teacher", type(estimator).__name__, "must be a scikit-learn classifier")
    fit = functools.partial(_fit_estimator, estimator, spec, seed)
    return _fit_all(fit, private, spec, shards, seed, progress, type(estimator).__name__)


def _fit_estimator(estimator: Any, spec: DataSpec, seed: int, x: Tensor, y: Tensor, teacher: int) -> Member:
    if len(torch.unique(y)) < 2:
        return _make_constant(int(y[0]))
    classifier = copy.deepcopy(clone(estimator))  # some estimators are their own clone
    states = {
        key: rng.derive_seed(seed, "teacher", teacher, key) % 2**32
        for key, value in classifier.get_params(deep=True).items()
        if value is None and key.split("__")[-1] == "random_state"
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classifier.set_params(**states).fit(spec.normalize(x).flatten(1).numpy(), y.numpy())

    def predict(points: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                label_Q = np.asarray(classifier.predict(spec.normalize(points).flatten(1).numpy())).astype(np.int64)
                return torch.from_numpy(label_Q).view(len(points))
            except Exception:  # for instance, n_neighbors is larger than the number of records in the shard
                return torch.full((len(points),), FALLBACK_CLASS)

    return predict


def fit_modules(
    factory: Callable[[], nn.Module],
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    recipe: TeacherRecipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = do_nothing,
) -> Panel:
    """PRIVATE. Train a network that the user brings on each shard. The recipe's own network is not used.

    The teacher of a shard without records votes for class 0, and so do logits that are not finite. ``factory`` makes a
    new network, from normalized points [B, ...] to logits [B, C], with random numbers from the teacher's stream.

    Raises:
        ValueError: The logits have another shape, or networks share parameters.
    """
    check_factory("teacher", factory, spec)
    fit = functools.partial(_fit_module_member, factory, spec, recipe, seed, torch.device(device))
    return _fit_all(fit, private, spec, shards, seed, progress, "network")


def _fit_module_member(
    factory: Callable[[], nn.Module],
    spec: DataSpec,
    recipe: TeacherRecipe,
    seed: int,
    device: torch.device,
    x: Tensor,
    y: Tensor,
    teacher: int,
) -> Member:
    module = fit_module(factory, x, y, spec, recipe, teacher, seed=seed, device=device)

    @torch.no_grad()
    def predict(points: Tensor) -> Tensor:
        parts = [torch.zeros(0, dtype=torch.int64)]
        for part in points.split(512):
            logits = module(spec.normalize(part.to(device), recipe.torch_dtype))
            parts.append(torch.where(logits.isfinite().all(1), logits.argmax(1), FALLBACK_CLASS).cpu())
        return torch.cat(parts)

    return predict


def fit_module(
    factory: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    spec: DataSpec,
    recipe: TeacherRecipe,
    teacher: int,
    *,
    seed: int,
    device: torch.device,
) -> nn.Module:
    """Train a network on the points ``x`` and labels ``y`` of one shard, and return it in evaluation mode."""
    with deterministic_mode(device), seeded_generators(seed, "teacher", teacher, "module"):
        module = copy.deepcopy(factory()).to(device, recipe.torch_dtype).train()
        params: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        optimizer, chunk = make_optimizer(params, recipe), Chunk(teacher, x[None], y[None], torch.tensor([len(y)]))
        for step, (x_B, y_B) in enumerate(iterate_batches(chunk, spec, recipe, seed, device)):
            F.cross_entropy(module(x_B[:, 0]), y_B[0], label_smoothing=recipe.label_smoothing).backward()
            for parameter in params:
                if parameter.grad is None:  # the logits do not depend on this parameter
                    parameter.grad = torch.zeros_like(parameter)
            with torch.no_grad():
                optimizer.step(recipe.compute_learning_rate(step))
            for parameter in params:
                parameter.grad = None
    return module.eval()


def check_factory(key: str, factory: Callable[[], nn.Module], spec: DataSpec) -> None:
    """Raise ValueError unless each call of the factory makes a new network from points to logits.

    ``key`` is the setting of the factory, for the message.
    """
    with seeded_generators(0, "factory"), torch.no_grad():
        module, other_module = factory(), factory()
        name = type(module).__name__
        if not isinstance(module, nn.Module) or not isinstance(other_module, nn.Module):
            raise checks.error(key, name, "must be a function that returns a torch.nn.Module")
        if module is other_module or _collect_storages(module) & _collect_storages(other_module):
            problem = "makes networks that share parameters or buffers, so all teachers would train the same network"
            fix = "Make every layer inside the function, or use copy.deepcopy(...) of an outside layer."
            raise checks.error(key, name, problem, fix)
        try:
            module = copy.deepcopy(module)
        except Exception as error:
            raise checks.error(key, name, f"makes a network that copy.deepcopy cannot copy ({error})") from error
        logits = module.eval()(torch.zeros(2, *spec.input_shape))
    if tuple(logits.shape) != (2, spec.num_classes):
        raise checks.error(key, tuple(logits.shape), f"must map 2 points to logits of shape (2, {spec.num_classes})")


def _collect_storages(module: nn.Module) -> set[int]:
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not nn.parameter.is_lazy(t)]
    return {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes()}
