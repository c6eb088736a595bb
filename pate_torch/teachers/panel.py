"""Teachers that the user brings: scikit-learn classifiers or networks, fitted in this process and not stored."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import clone, is_classifier
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.core.rng import seeded_generators
from pate_torch.privacy.records import DataSpec, PrivateRecords, Shards
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers import independence, voting
from pate_torch.teachers.network import Network, to_network

Member = Callable[[Tensor], Tensor]
"""PRIVATE. Fitted teacher: a function from raw points [Q, ...] to classes, int64 [Q]."""
Fit = Callable[[Tensor, Tensor, int], Member]
"""PRIVATE. Function that fits a teacher to points [N, ...] and labels [N], given the number of the teacher; N >= 1."""

_MIXED_POINTS = 128
FALLBACK_CLASS = 0
"""Vote of a teacher that could not be fitted or cannot predict, so that every teacher has exactly one vote."""


@dataclass(eq=False, repr=False)
class Panel:
    """PRIVATE. K fitted teachers.

    ``retraining_check`` has the pickled work, points, labels and number of the teacher that a fresh process trains a
    second time when votes are first counted. It is None if ``check_retraining`` has passed, or if the panel has one
    teacher.
    """

    members: tuple[Member, ...]
    spec: DataSpec
    retraining_check: tuple[bytes, Tensor, Tensor, int] | None = None

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Panel({len(self)} teachers, content withheld)"

    def predict(self, x: Tensor, progress: Progress = do_nothing) -> Tensor:
        """PRIVATE. Predict the class of raw points [Q, ...] by each teacher, int64 [K, Q]; invalid classes become 0.

        Votes that a mechanism may open come from ``count_votes`` alone.
        """
        rows = []
        for number, member in enumerate(self.members):
            rows.append(self._replace_invalid(member(x)))
            progress(number + 1, len(self))
        return torch.stack(rows)

    def _replace_invalid(self, label_Q: Tensor) -> Tensor:
        return torch.where((label_Q >= 0) & (label_Q < self.spec.num_classes), label_Q, FALLBACK_CLASS)

    def count_votes(self, x: Tensor, progress: Progress = do_nothing) -> Votes:
        """PRIVATE. Count the votes on raw points [Q, ...]. The first call trains one teacher a second time.

        Raises:
            ValueError: The teacher came out different (``check_retraining``).
        """
        prediction_KQ = self.predict(x, progress)
        self.check_retraining(x, prediction_KQ)
        return voting.count_votes(prediction_KQ, self.spec.num_classes)

    def check_retraining(self, x: Tensor, prediction_KQ: Tensor) -> None:
        """PRIVATE. Raise ValueError unless one teacher predicts the same after a second training.

        Its predictions are also compared on mixtures of its records, because there may be one point only.
        """
        if self.retraining_check is not None:
            work, own_x, own_y, teacher = self.retraining_check
            mixed_x = _mix_features(own_x)
            label_M = independence.call_in_fresh_process(work, own_x, own_y, teacher, x, mixed_x)
            expected_M = torch.cat([prediction_KQ[teacher], self._replace_invalid(self.members[teacher](mixed_x))])
            if not torch.equal(self._replace_invalid(label_M), expected_M):
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
        try:
            with seeded_generators(seed, "teacher", teacher, "predict"):
                return member(points).view(len(points))
        except Exception:  # for instance, n_neighbors is larger than the number of records in the shard
            return torch.full((len(points),), FALLBACK_CLASS)

    return predict_seeded


def _refit_and_predict(fit: Fit, seed: int, x: Tensor, y: Tensor, teacher: int, *parts: Tensor) -> Tensor:
    member = _fit_member(fit, seed, x, y, teacher, [])
    return torch.cat([member(points) for points in parts])


def _mix_features(x: Tensor) -> Tensor:
    """PRIVATE. Draw _MIXED_POINTS points, each feature of which is that of a record drawn at random."""
    if len(x) == 0:
        return x
    rows = torch.randint(len(x), (_MIXED_POINTS, x[0].numel()), generator=torch.Generator().manual_seed(0))
    return x.flatten(1).gather(0, rows).view(-1, *x.shape[1:])


def fit_panel(
    teacher: Any,
    private: PrivateRecords,
    spec: DataSpec,
    shards: Shards,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = do_nothing,
) -> Panel:
    """PRIVATE. Train a teacher, of a kind that ``check_learner`` knows, on each shard.

    If a shard has no records, or its teacher cannot be fitted, the teacher votes for class 0. If a shard has one class,
    a classifier votes for this class. Errors and warnings would reveal the shard, so they are not shown. Every
    ``random_state`` that is None is set for each teacher.

    Raises:
        ValueError: ``teacher`` cannot be used (``check_learner``), or no teacher can be fitted.
    """
    teacher = check_learner("teacher", teacher, spec)
    fit: Fit = functools.partial(_fit_estimator, teacher, spec, seed)
    if isinstance(teacher, Network):
        fit = functools.partial(_fit_network, teacher, spec, seed, torch.device(device))
    has_several = shards.num_teachers > 1
    # The work is pickled before the training, so that an error comes at once.
    work = independence.pickle_work(functools.partial(_refit_and_predict, fit, seed)) if has_several else b""
    members, errors = list[Member](), list[Exception]()
    for number in range(shards.num_teachers):
        own_rows = shards.get_indices(number)
        members.append(_fit_member(fit, seed, private.x[own_rows], private.y[own_rows], number, errors))
        progress(number + 1, shards.num_teachers)
    if errors and len(errors) == shards.num_teachers:
        problem = f"teacher: no {type(teacher).__name__} could be fitted: {type(errors[0]).__name__}"
        raise ValueError(problem) from errors[0]
    panel = Panel(tuple(members), spec)
    if has_several:
        number = independence.draw_candidate(range(1, shards.num_teachers))
        own_rows = shards.get_indices(number)
        panel.retraining_check = work, private.x[own_rows], private.y[own_rows], number
    return panel


def _fit_estimator(estimator: Any, spec: DataSpec, seed: int, x: Tensor, y: Tensor, teacher: int) -> Member:
    if len(torch.unique(y)) < 2:
        return _make_constant(int(y[0]))
    classifier = copy_estimator(estimator)
    states = {
        key: rng.derive_seed(seed, "teacher", teacher, key) % 2**32
        for key, value in classifier.get_params(deep=True).items()
        if value is None and key.split("__")[-1] == "random_state"
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classifier.set_params(**states).fit(convert_points(estimator, spec, x), y.numpy())

    def predict(points: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            label_Q = classifier.predict(convert_points(estimator, spec, points))
            return torch.from_numpy(np.asarray(label_Q).astype(np.int64))

    return predict


def is_skorch(estimator: Any) -> bool:
    """Return whether an estimator is a network of skorch. If skorch has not been imported, it is not imported here."""
    skorch = sys.modules.get("skorch")
    return skorch is not None and isinstance(estimator, skorch.NeuralNet)


def copy_estimator(estimator: Any) -> Any:
    """Copy an estimator, not fitted. Networks of skorch in the copy split off no validation records and print nothing.

    A small shard has too few records for a split, and the prints would show losses on private records.
    """
    estimator = copy.deepcopy(clone(estimator))  # some estimators are their own clone
    parts = {"": estimator, **{f"{name}__": value for name, value in estimator.get_params(deep=True).items()}}
    for prefix in [prefix for prefix, part in parts.items() if is_skorch(part)]:
        estimator.set_params(**{f"{prefix}train_split": None, f"{prefix}verbose": 0})
    return estimator


def convert_points(estimator: Any, spec: DataSpec, x: Tensor) -> np.ndarray:
    """Normalize points [N, ...] for an estimator, float32: in their own shape for a network of skorch, else as rows."""
    z = spec.normalize(x)
    return (z if is_skorch(estimator) else z.flatten(1)).numpy()


def check_learner(key: str, choice: Any, spec: DataSpec) -> Any:
    """Return a ``Network`` for a network, class or function, or else the scikit-learn classifier ``choice``.

    Raise ValueError if ``choice``, which was passed as ``key``, is neither, or if a network cannot learn blank points.
    """
    if network := to_network(choice):
        network.check(key, spec)
        return network
    name = type(choice).__name__
    if not hasattr(choice, "get_params") or not is_classifier(choice):
        kinds = "a classifier of scikit-learn, a Network, or a function that returns a torch.nn.Module"
        raise checks.error(key, name, f"must be an object of pate_torch, {kinds}")
    if not is_skorch(choice):
        return choice
    x_CD, label_C = np.zeros((spec.num_classes, *spec.input_shape), dtype=np.float32), np.arange(spec.num_classes)
    with seeded_generators(0, "blank points"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            probability_CC = copy_estimator(choice).set_params(max_epochs=1).fit(x_CD, label_C).predict_proba(x_CD)
            if probability_CC.min() < 0 or not np.allclose(probability_CC @ np.ones(len(x_CD)), 1, atol=1e-3):
                raise ValueError("no probabilities; a module of logits needs criterion=torch.nn.CrossEntropyLoss")
        except Exception as error:
            problem = f"must learn probabilities of {len(x_CD)} classes from blank points without a validation split"
            raise checks.error(key, name, f"{problem} ({type(error).__name__}: {error})") from error
    return choice


def _fit_network(
    network: Network, spec: DataSpec, seed: int, device: torch.device, x: Tensor, y: Tensor, teacher: int
) -> Member:
    module = network.fit(x, y, spec, seed=seed, device=device, teacher=teacher)

    @torch.no_grad()
    def predict(points: Tensor) -> Tensor:
        parts = [torch.zeros(0, dtype=torch.int64)]
        for part in points.split(512):
            logits = module(spec.normalize(part.to(device)))
            parts.append(torch.where(logits.isfinite().all(1), logits.argmax(1), FALLBACK_CLASS).cpu())
        return torch.cat(parts)

    return predict
