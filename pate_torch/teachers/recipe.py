"""Recipes of the training of a teacher. They are public and the same for all teachers, whatever the shards contain.

Teachers may share a trunk: an encoder that is learned from the public points, at no cost in privacy, and then frozen. A
teacher is then a small head that takes the trunk's features, for which sixty records are enough, or ten for a ridge
regression.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.device import Device
from pate_torch.core.progress import Progress, Stages, do_nothing
from pate_torch.features.augmentation import Affine, parse_affine
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.contrastive import ContrastiveFeatures, encode
from pate_torch.privacy.records import DataSpec, PrivateRecords, PublicPool, Shards

DEFAULTS = {"steps": 900, "batch_size": 32, "learning_rate": 4e-3}
LOGISTIC_DEFAULTS = {"steps": 60, "batch_size": 16, "learning_rate": 0.05}
"""Defaults for the network "logistic": votes as good as those of 300 steps of 32, at a fifth of the time
(docs/experiments/teacher-settings.md)."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "tf32": torch.float32, "bf16": torch.float32}


@dataclass(frozen=True, kw_only=True)
class PublicStart:
    """Recipe of a trunk that is learned from the public points before the teachers are trained.

    Attributes:
        features: Recipe of the encoder, which must be a network (``FeatureRecipe.design``).
    """

    features: FeatureRecipe

    def __post_init__(self) -> None:
        if not isinstance(self.features, FeatureRecipe) or self.features.design is None:
            problem = "must be a recipe of a network"
            raise checks.error("start.features", self.features, problem, "Use teacher=public_start.")
        if isinstance(self.features, ContrastiveFeatures):
            checks.integer("start.features.encoders", self.features.encoders, low=1, high=1)

    def learn(
        self, pool_x: Tensor, spec: DataSpec, *, seed: int, device: Device = "cpu", progress: Progress = do_nothing
    ) -> Trunk:
        """Learn the trunk from raw public points [P, ...]."""
        design = self.features.design
        assert design is not None
        description = networks.describe(design["name"], spec.input_shape, spec.num_classes, **design["options"])
        encoder = self.features.learn(pool_x, spec, seed=seed, device=device, progress=progress).cpu().eval()
        feature_PD = encode(encoder, pool_x, spec).double()
        mean_D = feature_PD.mean(0)
        # One scale for all features, because a scale for each feature would enlarge unimportant features.
        scale = float((feature_PD - mean_D).square().mean().sqrt().clamp(min=1e-6))
        width, mean, std = len(mean_D), tuple(mean_D.tolist()), (scale,) * len(mean_D)
        plain_spec = dataclasses.replace(spec, schema=None, resize=None, low=None, high=None)
        output_spec = dataclasses.replace(plain_spec, input_shape=(width,), mean=mean, std=std)
        return Trunk(description, encoder, spec, output_spec)


@dataclass(frozen=True, eq=False)
class Trunk:
    """Releasable. A frozen encoder that was learned from public points: a network without its last layer.

    ``input_spec`` describes its input, and ``spec`` its output, with the constants that normalize the features.
    """

    network: dict[str, Any]
    encoder: nn.Module
    input_spec: DataSpec
    spec: DataSpec

    def __post_init__(self) -> None:
        self.encoder.eval().requires_grad_(False)

    @classmethod
    def rebuild(cls, facts: Mapping[str, Any], state: Mapping[str, Tensor], input_spec: DataSpec) -> Trunk:
        """Make a trunk from the output of ``to_facts`` and ``get_state``.

        Raises:
            KeyError, RuntimeError: The facts and the tensors are not those of a trunk.
        """
        encoder = networks.remove_head(networks.rebuild(facts["network"]))
        encoder.load_state_dict(dict(state))
        return cls(facts["network"], encoder, input_spec, DataSpec.from_dict(facts["spec"]))

    def to_facts(self) -> dict[str, Any]:
        """Return plain data from which, together with the tensors, ``rebuild`` makes the same trunk."""
        return {"network": self.network, "spec": self.spec.to_dict()}

    def get_state(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().contiguous() for name, value in self.encoder.state_dict().items()}

    def compute_features(self, x: Tensor, device: Device = "cpu") -> Tensor:
        """Compute unit-length features of raw points [Q, ...], float32 [Q, D] on the CPU."""
        return encode(self.encoder.to(device), x, self.input_spec)

    def encode_shards(self, private: PrivateRecords, shards: Shards, device: Device = "cpu") -> PrivateRecords:
        """PRIVATE. Replace the points of the records by their features; records in no shard get zeros.

        Each shard is encoded alone, so a record has no influence on the arithmetic of another shard, not even on the
        shape of a batch.
        """
        feature_ND = torch.zeros(len(private), *self.spec.input_shape)
        for teacher in range(shards.num_teachers):
            index = shards.get_indices(teacher)
            feature_ND[index] = self.compute_features(private.x[index], device)
        return dataclasses.replace(private, x=feature_ND)


@dataclass(frozen=True, kw_only=True)
class TeacherRecipe:
    """Recipe of the training of one teacher, whose fields are all part of the identity of stored teachers.

    Every teacher takes exactly ``steps`` steps, whatever the size of its shard, so that the size of one shard does not
    influence the arithmetic of other teachers.

    Attributes:
        network: Name of the network in ``networks.NETWORKS``.
        options: Options of the network, such as ``{"hidden": 64}`` or ``{"channels": [16, 32]}``.
        steps: Number of training steps of each teacher. None for the default of the network.
        batch_size: Number of records in a batch. None for the default of the network.
        learning_rate: Learning rate of the first step. None for the default of the network.
        optimizer: "adam", "sgd", or "ridge" for a ridge regression in closed form (``engine.fit_ridge``), which needs
            the network "logistic" and takes no steps.
        momentum: Momentum of SGD.
        weight_decay: Weight decay, which is decoupled with Adam. With "ridge", the ridge for each number of an input.
        label_smoothing: Share of the target that is spread over all classes.
        schedule: Schedule of the learning rate, "cosine" (down to 0) or "constant".
        augment: Random distortions of images, also as a mapping of the fields of ``Affine``. None to train on the
            images themselves.
        start: Recipe of a trunk that all teachers share. None to train on the points.
        dtype: "float32"; "float64"; "tf32" (float32, with products that a GPU rounds to TF32); or "bf16" (float32
            parameters with bfloat16 arithmetic).
    """

    network: str = "lean_cnn"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = None  # type: ignore[assignment]  # None until __post_init__
    batch_size: int = None  # type: ignore[assignment]
    learning_rate: float = None  # type: ignore[assignment]
    optimizer: str = "adam"
    momentum: float = 0.9
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    schedule: str = "cosine"
    augment: Affine | None = None
    start: PublicStart | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        checks.one_of("network", self.network, tuple(networks.NETWORKS))
        for name, default in (LOGISTIC_DEFAULTS if self.network == "logistic" else DEFAULTS).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        checks.integer("steps", self.steps, low=1)
        checks.integer("batch_size", self.batch_size, low=1)
        checks.positive("learning_rate", self.learning_rate)
        checks.one_of("optimizer", self.optimizer, ("adam", "sgd", "ridge"))
        checks.between("momentum", self.momentum, 0, 0.9999)
        checks.non_negative("weight_decay", self.weight_decay)
        if self.optimizer == "ridge":
            checks.one_of("network", self.network, ("logistic",))
            checks.positive("weight_decay", self.weight_decay)
        checks.between("label_smoothing", self.label_smoothing, 0, 0.5)
        checks.one_of("schedule", self.schedule, ("cosine", "constant"))
        checks.one_of("dtype", self.dtype, DTYPES)
        object.__setattr__(self, "options", dict(checks.mapping("options", self.options or {})))
        object.__setattr__(self, "augment", parse_affine(self.augment))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the parameters and of the optimizer's state."""
        return DTYPES[self.dtype]

    def compute_learning_rate(self, step: int) -> float:
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def check(self, spec: DataSpec) -> None:
        """Raise ValueError if the recipe does not fit the data."""
        if self.start is not None:
            self.start.features.check(spec)
            spec = dataclasses.replace(spec, input_shape=(1,))  # rows of features, whose width is not known yet
        elif self.augment is not None and not spec.is_image:
            raise checks.error("augment", self.augment, f"needs images, but points have shape {spec.input_shape}")
        networks.build(self.network, spec.input_shape, spec.num_classes, **self.options)

    def learn_trunk(
        self, pool: PublicPool, spec: DataSpec, seed: int, device: torch.device, stages: Stages
    ) -> Trunk | None:
        """Learn the trunk of ``start`` from the public points. Return None if ``start`` is None."""
        if self.start is None:
            return None
        progress = stages("Learning features from public points")
        return self.start.learn(pool.x, spec, seed=seed, device=device, progress=progress)
