"""Contrastive features, which are learned from public points without labels and cost no privacy.

The encoder learns to match two distorted copies of a point among the copies of the other points in the batch. The
features choose queries, initialize students or teachers, or are the frozen inputs of a model.

Source: Chen et al. 2020 (SimCLR), the normalized-temperature cross-entropy of its equation 1.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks, rng
from pate_torch.core.device import Device, run_in_parallel, to_device
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.optimizers import Adam
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.features.augmentation import Affine, make_strong_view, parse_affine
from pate_torch.features.base import FeatureRecipe
from pate_torch.networks import ConcatFeatures, get_last_linear, remove_head
from pate_torch.privacy.records import DataSpec

PRECISIONS = ("float32", "bfloat16", "auto")
_MAX_CACHED_ENCODERS = 8  # in memory: one for the queries, and one for each of several students
_ENCODER_CACHE: OrderedDict[tuple[str, ...], nn.Module] = OrderedDict()


@dataclass(frozen=True, kw_only=True)
class ContrastiveFeatures(FeatureRecipe):
    """A recipe for an encoder: a network without its last linear layer, trained by the contrastive loss.

    Attributes:
        network: Name of the network (``networks.NETWORKS``).
        network_options: Options of the network.
        steps: Number of training steps.
        batch_size: Number of points in a step. Each point is distorted twice.
        learning_rate: Peak learning rate.
        weight_decay: Decoupled weight decay.
        temperature: Temperature of the contrastive loss.
        projection: Width of the two layers between the features and the loss, which are dropped after the training.
        augment: Ranges of the affine maps, which ``make_strong_view`` widens. None for cutout and contrast only.
        precision: "float32", "bfloat16" or "auto" (see ``autocast``).
        encoders: Number of encoders, each learned from a different random stream. The features of all encoders are
            concatenated. A student that starts from the recipe copies the weights of one encoder.
    """

    name: str = "contrastive"
    network: str = "small_cnn"
    network_options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 600
    batch_size: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    temperature: float = 0.2
    projection: int = 128
    augment: Affine | Mapping[str, Any] | None = None
    precision: str = "float32"
    encoders: int = 1

    def __post_init__(self) -> None:
        checks.integer("features.steps", self.steps, low=0)
        checks.integer("features.batch_size", self.batch_size, low=2)
        checks.positive("features.learning_rate", self.learning_rate)
        checks.non_negative("features.weight_decay", self.weight_decay)
        checks.positive("features.temperature", self.temperature)
        checks.integer("features.projection", self.projection, low=2)
        checks.integer("features.encoders", self.encoders, low=1)
        checks.one_of("features.precision", self.precision, PRECISIONS)
        checks.one_of("features.network", self.network, networks.NETWORKS)
        checks.mapping("features.network_options", self.network_options)
        parse_affine(self.augment, "features.augment")

    @property
    def design(self) -> dict[str, Any]:
        single_design = {"name": self.network, "options": dict(self.network_options)}
        if self.encoders == 1:
            return single_design
        return {"name": "voting", "options": {"members": self.encoders, "of": single_design}}

    def check(self, spec: DataSpec) -> None:
        networks.build(self.network, spec.input_shape, spec.num_classes, **self.network_options)

    def learn(
        self, x_P: Tensor, spec: DataSpec, *, seed: int, device: Device = "cpu", progress: Progress = do_nothing
    ) -> nn.Module:
        if self.encoders > 1:
            learn = functools.partial(self.single_encoder.learn, x_P, spec, device=device)
            seeds = [rng.derive_member_seed(seed, k) for k in range(self.encoders)]
            parts = [lambda progress, member=member: learn(seed=member, progress=progress) for member in seeds]
            return ConcatFeatures(run_in_parallel(parts, torch.device(device), progress))
        # Queries and students share a recipe, so a process trains once for the same points, seed and device.
        key = (repr(self), repr(spec), compute_tensor_digest(x_P), str(seed), str(device))
        if key not in _ENCODER_CACHE:
            _ENCODER_CACHE[key] = self._train(x_P.to(device), spec, seed, progress)
        encoder = copy.deepcopy(_ENCODER_CACHE[key])
        while len(_ENCODER_CACHE) > _MAX_CACHED_ENCODERS:
            _ENCODER_CACHE.popitem(last=False)
        return encoder

    @property
    def single_encoder(self) -> ContrastiveFeatures:
        """The recipe of one encoder. Student k of several students starts from encoder k."""
        return replace(self, encoders=1)

    def _train(self, x_P: Tensor, spec: DataSpec, seed: int, progress: Progress) -> nn.Module:
        network = networks.build(self.network, spec.input_shape, spec.num_classes, **self.network_options)
        network = networks.initialize(network, rng.make_torch_generator(seed, "representation", "initial"))
        encoder = remove_head(network).to(x_P.device).to(memory_format=torch.channels_last)
        width = encoder.eval()(spec.normalize(x_P[:1])).shape[1]
        layers = nn.Linear(width, self.projection), nn.Linear(self.projection, self.projection)
        projection_generator = rng.make_torch_generator(seed, "representation", "projection")
        for layer in layers:  # not by networks.initialize, which sets the output layer to zero
            nn.init.orthogonal_(layer.weight, generator=projection_generator)
            nn.init.zeros_(layer.bias)
        head = nn.Sequential(layers[0], nn.ReLU(), layers[1]).to(x_P.device)
        generator = rng.make_torch_generator(seed, "representation", "views", device=x_P.device)
        view = make_strong_view(spec, parse_affine(self.augment))
        size = min(self.batch_size, len(x_P))
        optimizer = Adam([*encoder.parameters(), *head.parameters()], self.weight_decay)
        for step in range(self.steps if len(x_P) > 1 else 0):
            encoder.train()
            x = x_P[torch.randperm(len(x_P), generator=generator, device=generator.device)[:size]]
            pair = torch.cat([view(x, spec, generator), view(x, spec, generator)])
            with autocast(self.precision, x_P.device):
                z = head(encoder(pair))
            compute_contrastive_loss(z, self.temperature).backward()
            optimizer.step(self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps)))
            for parameter in optimizer.params:
                parameter.grad = None
            progress(step + 1, self.steps)
        return encoder.eval().to(memory_format=torch.contiguous_format)


def autocast(precision: str, device: torch.device) -> Any:
    """Return a context for the forward pass in bfloat16 or float32. "auto" takes the faster type of the device."""
    if precision == "auto":
        is_fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_amx_tile_supported()
        precision = "bfloat16" if is_fast and device.type in ("cpu", "cuda") else "float32"
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def compute_contrastive_loss(z_2BD: Tensor, temperature: float) -> Tensor:
    """Compute the mean cross-entropy of finding the other copy of each row, B rows apart, among all other rows."""
    z = F.normalize(z_2BD.float(), dim=1)
    similarity = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return F.cross_entropy(similarity, partner)


def transfer_weights(encoder: nn.Module, network: nn.Module) -> None:
    """Copy the weights of the encoder into a network of the same design, whose classifier stays the same."""
    classifier, state, own_state = get_last_linear(network) + ".", encoder.state_dict(), network.state_dict()
    trunk_shapes = {name: value.shape for name, value in own_state.items() if not name.startswith(classifier)}
    if trunk_shapes != {name: value.shape for name, value in state.items()}:
        raise ValueError("features.network: must be the student's network with the same network_options.")
    network.load_state_dict(state, strict=False)


def encode(encoder: nn.Module, x_P: Tensor, spec: DataSpec, batch: int = 1024) -> Tensor:
    """Compute features of length 1 of raw points, float32 [P, D], on the CPU."""
    return torch.cat([embed(encoder, part, spec) for part in x_P.split(batch)]).cpu()


@torch.no_grad()
def embed(encoder: nn.Module, x_B: Tensor, spec: DataSpec) -> Tensor:
    """Compute features of length 1 of a batch of raw points, float32 [B, D], on the device of the encoder."""
    x_B = spec.normalize(to_device(x_B, _get_device(encoder)))
    return F.normalize(encoder.eval()(x_B).float().flatten(1), dim=1)


def append_mean_shift(encoder: nn.Module, x_P: Tensor, spec: DataSpec, neighbors: int) -> nn.Module:
    """Append one mean-shift step towards the public points (``networks.MeanShift``) if ``neighbors`` > 0."""
    if neighbors == 0:
        return encoder
    feature_PD = encode(encoder, x_P, spec)
    shift = networks.MeanShift(len(feature_PD), feature_PD.shape[1], neighbors)
    shift.place_PD.copy_(feature_PD)
    return nn.Sequential(encoder, networks.L2Normalize(), shift.to(_get_device(encoder)))


def _get_device(encoder: nn.Module) -> torch.device:
    return next((value.device for value in chain(encoder.parameters(), encoder.buffers())), torch.device("cpu"))
