"""How every teacher is trained: public constants only, the same for all, whatever is in their shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.features.augmentation import Affine
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.trunk import PublicStart

BACKENDS = ("auto", "vectorized", "processes")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "tf32": torch.float32, "bf16": torch.float32}


@dataclass(frozen=True, kw_only=True)
class TeacherRecipe:
    """How one teacher is trained.

    Every teacher takes exactly ``steps`` steps, whatever the size of its shard: the number of epochs follows from the
    shard, so that one shard's size changes nobody else's arithmetic.

    Attributes:
        network: A name of ``networks.NETWORKS``.
        options: Options of the network, such as ``{"hidden": 64}`` or ``{"channels": [16, 32]}``.
        steps: Number of training steps of each teacher.
        batch_size: Records a step.
        learning_rate: Learning rate of the first step.
        optimizer: adam or sgd.
        momentum: Momentum of sgd.
        weight_decay: Weight decay, which is decoupled with adam.
        label_smoothing: Share of a label's weight that all classes get alike.
        schedule: cosine or constant.
        augment: Random distortions of images, or a mapping of the fields of ``Affine``; None if there are none.
        start: Trunk learnt from public points; None: none.
        backend: How teachers share the machine; all give the same teachers up to rounding.
        chunk: Number of teachers trained at once, on a CPU at most 16; None if ``teachers.launch`` chooses it from the
            network and the device alone.
        workers: Number of processes; None if every core gets one.
        dtype: float32; float64; tf32 (float32 whose products a GPU rounds to TF32; on a CPU the same as float32); bf16
            (float32 parameters, bfloat16 arithmetic).
    """

    network: str = "lean_cnn"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 900
    batch_size: int = 32
    learning_rate: float = 4e-3
    optimizer: str = "adam"
    momentum: float = 0.9
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    schedule: str = "cosine"
    augment: Affine | None = None
    start: PublicStart | None = None
    backend: str = "auto"
    chunk: int | None = None
    workers: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        checks.one_of("network", self.network, tuple(networks.NETWORKS))
        checks.integer("steps", self.steps, low=1)
        checks.integer("batch_size", self.batch_size, low=1)
        checks.positive("learning_rate", self.learning_rate)
        checks.one_of("optimizer", self.optimizer, ("adam", "sgd"))
        checks.between("momentum", self.momentum, 0, 0.9999)
        checks.non_negative("weight_decay", self.weight_decay)
        checks.between("label_smoothing", self.label_smoothing, 0, 0.5)
        checks.one_of("schedule", self.schedule, ("cosine", "constant"))
        checks.one_of("backend", self.backend, BACKENDS)
        checks.one_of("dtype", self.dtype, DTYPES)
        for name, value in (("chunk", self.chunk), ("workers", self.workers)):
            if value is not None:
                checks.integer(name, value, low=1)
        object.__setattr__(self, "options", dict(checks.mapping("options", self.options or {})))
        if isinstance(self.augment, Mapping):
            checks.mapping("augment", self.augment, fields(Affine))
            object.__setattr__(self, "augment", Affine(**self.augment))
        if self.augment is not None and not isinstance(self.augment, Affine):
            raise checks.error(
                "augment", self.augment, "must be null or the fields of pate_torch.features.augmentation.Affine"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of parameters and optimizer state."""
        return DTYPES[self.dtype]

    def compute_learning_rate(self, step: int) -> float:
        """The learning rate at step 0 .. steps-1."""
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError when the data do not fit the recipe."""
        if self.start is not None:
            start = self.start.features
            networks.build(start.network, spec.input_shape, spec.num_classes, **start.network_options)
            spec = dataclasses.replace(spec, input_shape=(1,))  # rows; how wide is known once they are learnt
        elif self.augment is not None and not spec.is_image:
            raise checks.error("augment", self.augment, f"needs images, the data have shape {spec.input_shape}")
        networks.build(self.network, spec.input_shape, spec.num_classes, **self.options)

    def to_configuration(self) -> dict[str, Any]:
        """The choices that decide the trained teachers, as plain data: not the backend or the number of workers.

        A chunk counts where it is set, because it decides how sums are rounded.
        """
        excluded = {"backend", "workers"} | (set() if self.chunk else {"chunk"})
        return {name: value for name, value in asdict(self).items() if name not in excluded}
