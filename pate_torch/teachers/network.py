"""Networks that the user brings as teachers or as a student, and their training on the records of one shard."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.core.device import deterministic_mode
from pate_torch.core.rng import derive_seed, seeded_generators
from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import StudentAlgorithm
from pate_torch.teachers.engine import draw_batches

_ADAM = functools.partial(torch.optim.Adam, lr=4e-3)


@dataclass(frozen=True)
class Network:
    """A network of your own as teacher or student, and its training by cross-entropy.

    ``teacher=Net`` is short for ``teacher=Network(Net)``. Every training takes exactly ``steps`` steps, whatever the
    number of records. It is repeatable if ``factory``, ``optimizer`` and ``transform`` draw from the global generators
    of random, NumPy and torch alone, which are seeded for each teacher. They may share nothing between teachers.

    Args:
        factory: Class or function that returns a new torch.nn.Module, from normalized points [B, ...] to logits [B, C].
        steps: Number of training steps.
        batch_size: Number of records in a batch.
        optimizer: Class or function that makes a torch.optim.Optimizer of a list of parameters, such as
            ``lambda params: torch.optim.SGD(params, lr=0.1)``. By default Adam with learning rate 4e-3.
        schedule: Schedule of the learning rates, "cosine" (from the optimizer's own rates down to 0) or "constant".
        label_smoothing: Share of the target that is spread over all classes.
        transform: Random transform of one raw point, such as one of torchvision.transforms.v2. It takes and returns a
            uint8 image [Ch, H, W] or a float32 row [D], and is applied whenever a record enters a batch, with the
            global generators seeded for that record. None to train on the points themselves.
    """

    factory: Callable[[], nn.Module]
    _: KW_ONLY
    steps: int = 500
    batch_size: int = 64
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = _ADAM
    schedule: str = "cosine"
    label_smoothing: float = 0.1
    transform: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        checks.integer("steps", self.steps, low=1)
        checks.integer("batch_size", self.batch_size, low=1)
        checks.one_of("schedule", self.schedule, ("cosine", "constant"))
        checks.between("label_smoothing", self.label_smoothing, 0, 0.5)

    def check(self, key: str, spec: DataSpec) -> None:
        """Raise ValueError unless the factory, which was passed as ``key``, optimizer and transform can be used."""
        with seeded_generators(0, "factory"):
            is_module, name = isinstance(self.factory, nn.Module), type(self.factory).__name__
            first, second = (None, None) if is_module else (self.factory(), self.factory())
            if not isinstance(first, nn.Module) or not isinstance(second, nn.Module):
                fix = f"Pass the class, or lambda: {name}(...)." if is_module else ""
                raise checks.error(key, name, "must be a class or function that returns a new torch.nn.Module", fix)
            name = type(first).__name__
            if first is second or _collect_storages(first) & _collect_storages(second):
                problem = "makes networks that share parameters or buffers, so all teachers would train one network"
                fix = "Make every layer inside the function, or use copy.deepcopy(...) of an outside layer."
                raise checks.error(key, name, problem, fix)
            try:
                module, logits = self._make_module(spec, torch.device("cpu"))
            except Exception as error:
                raise checks.error(key, name, f"cannot be copied, or fails on two blank points ({error})") from error
            if tuple(logits.shape) != (2, spec.num_classes):
                problem = f"must map 2 points to logits of shape (2, {spec.num_classes})"
                raise checks.error(key, tuple(logits.shape), problem)
            optimizer = self.optimizer(list(module.parameters())) if callable(self.optimizer) else None
            if not isinstance(optimizer, torch.optim.Optimizer):
                problem = "must make a torch.optim.Optimizer, as does lambda params: torch.optim.SGD(params, lr=0.1)"
                raise checks.error("optimizer", type(self.optimizer).__name__, problem)
            blank = torch.zeros(1, *spec.input_shape, dtype=torch.uint8 if spec.is_image else torch.float32)
            _transform_batch(self.transform, blank, 0, "blank")

    def fit(self, x: Tensor, y: Tensor, spec: DataSpec, *, seed: int, device: torch.device, teacher: int) -> nn.Module:
        """Train a network on raw points [N, ...] and labels [N], N >= 1, and return it in evaluation mode.

        All random numbers come from the streams of ``seed`` and of the number of the teacher.
        """
        names, batches = (seed, "teacher", teacher), draw_batches(seed, teacher, len(y), self.steps, self.batch_size)
        with deterministic_mode(device), seeded_generators(*names, "module"):
            module, transform = self._make_module(spec, device)[0].train(), copy.deepcopy(self.transform)
            optimizer = self.optimizer(list(module.parameters()))
            end = self.steps if self.schedule == "cosine" else math.inf  # the factor for a constant rate is 1
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 + 0.5 * math.cos(math.pi * t / end))

            def compute_loss(z_B: Tensor, y_B: Tensor) -> Any:
                module.zero_grad()
                loss = F.cross_entropy(module(z_B), y_B, label_smoothing=self.label_smoothing)
                loss.backward()
                return loss

            for step, index_B in enumerate(batches.long()):
                x_B = _transform_batch(transform, x[index_B], *names, "transform", step).to(device)
                # An optimizer such as LBFGS computes the loss several times in a step.
                optimizer.step(functools.partial(compute_loss, spec.normalize(x_B), y[index_B].to(device)))
                schedule.step()
            module.zero_grad()
        return module.eval()

    def _make_module(self, spec: DataSpec, device: torch.device) -> tuple[nn.Module, Tensor]:
        """Make a network, and its logits of two blank points, from which lazy layers get their parameters."""
        module = copy.deepcopy(self.factory()).to(device, torch.float32)
        with torch.no_grad():
            return module, module.eval()(torch.zeros(2, *spec.input_shape, device=device))


def to_network(choice: Any, **options: Any) -> Network | None:
    """Return a Network with the fields ``options`` for a Network, class or function, and None for any other choice."""
    checks.mapping("options", options, fields(Network))
    if isinstance(choice, Network):
        return replace(choice, **options)
    is_factory = callable(choice) and not isinstance(choice, StudentAlgorithm | BaseEstimator)
    return Network(choice, **options) if is_factory else None


def _transform_batch(transform: Callable[[Tensor], Tensor] | None, x_B: Tensor, seed: int, *names: str | int) -> Tensor:
    """Transform each point of a batch with generators of its own, so that no point changes the draws of another."""
    if transform is None:
        return x_B
    results = []
    with seeded_generators(seed, *names):
        for position, point in enumerate(x_B):
            derived_seed = derive_seed(seed, *names, position)
            random.seed(derived_seed)
            np.random.seed(derived_seed % 2**32)
            torch.default_generator.manual_seed(derived_seed)  # torch.manual_seed takes ten times as long
            result = transform(point)
            if not isinstance(result, Tensor) or (result.shape, result.dtype) != (point.shape, point.dtype):
                problem = f"must return a {point.dtype} tensor of shape {tuple(point.shape)}, like its input"
                raise checks.error("transform", type(transform).__name__, problem)
            results.append(result)
    return torch.stack(results)


def _collect_storages(module: nn.Module) -> set[int]:
    tensors = [t for t in (*module.parameters(), *module.buffers()) if not nn.parameter.is_lazy(t)]
    return {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes()}
