"""DP-SGD with Opacus on the private records, at the cost of a PATE release or at a target epsilon.

The method uses neither teachers nor public points, apart from normalization constants. The account of the data is
charged for all steps before the first one, as one event (``SampledGaussianEvent``).

Two parts differ from Opacus. ``NoiseSource`` draws the records of a step and the noise of its gradient, because the
secure mode of Opacus needs torchcsprng, which is not maintained, and a torch generator keeps 32 bits of its seed. The
sampling rate is batch_size over the *declared* number of records, because the exact number is private under add_remove.

Source: Abadi et al. 2016 (DP-SGD); Mironov, Talwar and Zhang 2019 (Renyi divergences); Yousefpour et al. 2021 (Opacus).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from pate_torch import networks
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import calibration
from pate_torch.accounting.events import PrivacyEvent, SampledGaussianEvent
from pate_torch.core import checks
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.mechanisms.base import Mechanism
from pate_torch.methods.base import MethodInputs, ModelRelease, PreparedMethod, PrivateMethod
from pate_torch.privacy.budget import Spending
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import DatasetFacts, select_one_per_unit
from pate_torch.privacy.records import DataSpec, PublicPool
from pate_torch.queries.base import QueryStrategy
from pate_torch.students.base import Student

if TYPE_CHECKING:
    from opacus import GradSampleModule


@dataclass(frozen=True, kw_only=True)
class DPSGD(PrivateMethod):
    """DP-SGD at the cost ``privacy.target_epsilon``, or else at the worst-case cost of a PATE release.

    Attributes:
        network: Name of the network in ``networks.NETWORKS``. It must not use batch normalization, which mixes records.
        options: Options of the network.
        steps: Number of steps of SGD.
        batch_size: Expected number of records of a step. None to use half the declared number of records, at most 1024,
            because large batches have a better ratio of signal to noise.
        learning_rate: Learning rate of the first step, which falls to 0 along a cosine.
        momentum: Momentum of SGD.
        clip: Clipping norm of the gradient of one record.
        noise_multiplier: Standard deviation of the noise of a summed gradient, in units of ``clip``, for runs without a
            target epsilon. None to calibrate the noise to the cost.
        mechanism: Mechanism of the PATE release whose cost is matched. None to use ``privacy.target_epsilon``.
        query: Query strategy of the PATE release. None to use ``privacy.target_epsilon``.
        num_queries: Number of queries of the PATE release.

    Guarantee: that of ``steps`` Poisson-subsampled Gaussian mechanisms, whose rate is batch_size over the declared
    number of records, under add_remove, for units of one record.
    """

    purpose: ClassVar[str] = "model by DP-SGD"
    cost_advice: ClassVar[str] = "Take a smaller privacy.target_epsilon"
    releases_model: ClassVar[bool] = True
    uses_public_points: ClassVar[bool] = False
    name: str = "dpsgd"
    network: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 200
    batch_size: int | None = None
    learning_rate: float = 0.2
    momentum: float = 0.9
    clip: float = 1.0
    noise_multiplier: float | None = None
    mechanism: Mechanism | None = None
    query: QueryStrategy | None = None
    num_queries: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("method.network", self.network, networks.NETWORKS)
        checks.integer("method.steps", self.steps, low=1)
        checks.optional(checks.integer, "method.batch_size", self.batch_size, low=1)
        checks.positive("method.learning_rate", self.learning_rate)
        checks.between("method.momentum", self.momentum, 0, 0.9999)
        checks.positive("method.clip", self.clip)
        checks.optional(checks.noise_scale, "method.noise_multiplier", self.noise_multiplier)

    @property
    def mechanism_name(self) -> str:
        return self.name

    @property
    def student_name(self) -> str:
        return self.network

    @property
    def noise(self) -> str:
        return "torch"

    def calibrate(self, epsilon: float | None, delta: float, facts: DatasetFacts) -> DPSGD:
        if epsilon is None and self.noise_multiplier is not None:
            return self
        if epsilon is None:
            if self.mechanism is None or self.query is None:
                fix = "Set privacy.target_epsilon."
                raise checks.error("privacy.target_epsilon", None, "must be given, because it sets the noise", fix)
            num_queries = min(self.num_queries, len(facts.pool))
            planned_events = self.mechanism.privacy_events(num_queries, min(self.query.rounds, num_queries))
            epsilon = accounting.compute_guarantee(planned_events, delta).epsilon
        rate = self.compute_sampling_rate(facts)
        multiplier = calibration.calibrate_sampled_gaussian(rate, self.steps, epsilon=epsilon, delta=delta)
        return replace(self, noise_multiplier=multiplier)

    def compute_batch_size(self, facts: DatasetFacts) -> int:
        """Compute the expected number of records of a step, which is public, from the declared size."""
        size = facts.spec.nominal_size
        if size is None:
            fix = "Declare the approximate number of records."
            raise checks.error("dataset.nominal_size", None, "must be given for the sampling rate of DP-SGD", fix)
        return max(1, min(1024, size // 2)) if self.batch_size is None else self.batch_size

    def compute_sampling_rate(self, facts: DatasetFacts) -> float:
        """Compute the probability with which a step includes a record. Raises ValueError if units cannot be sampled."""
        if facts.unit != "record":
            problem = f"protects single records, but the privacy unit is {facts.unit}"
            raise checks.error("method", self.name, problem)
        if facts.adjacency != "add_remove":
            problem = f"cannot be combined with method={self.name}, whose cost holds for add_remove"
            raise checks.error("partition", facts.adjacency, problem, "Use partition=add_remove.")
        batch_size = self.compute_batch_size(facts)
        return batch_size / checks.integer("dataset.nominal_size", facts.spec.nominal_size, low=batch_size)

    def validate(self, facts: DatasetFacts) -> None:
        self.compute_sampling_rate(facts)
        self._build_module(facts.spec, seed=0)

    def privacy_events(self, facts: DatasetFacts) -> tuple[PrivacyEvent, ...]:
        assert self.noise_multiplier is not None, "calibrate comes first"
        rate = self.compute_sampling_rate(facts)
        return (SampledGaussianEvent(rate=rate, noise_multiplier=self.noise_multiplier, steps=self.steps),)

    def to_record(self, facts: DatasetFacts) -> dict[str, Any]:
        return {
            "num_teachers": 0,
            "mechanism": self.name,
            "parameters": {
                "noise_multiplier": self.noise_multiplier,
                "clip": self.clip,
                "steps": self.steps,
                "batch_size": self.compute_batch_size(facts),
                "sampling_rate": self.compute_sampling_rate(facts),
            },
            "declared_size": facts.spec.nominal_size,
            "sensitivity": {"l1": None, "l2": self.clip, "linf": self.clip, "per": "step"},
        }

    def prepare(self, inputs: MethodInputs) -> PreparedDPSGD:
        """PRIVATE. Select one record of each unit, so that one unit changes a sum by one clipped gradient."""
        records = select_one_per_unit(inputs.records, inputs.facts.adjacency)
        return PreparedDPSGD(self, replace(inputs, records=records))

    def _build_module(self, spec: DataSpec, seed: int) -> nn.Module:
        module = networks.build(self.network, spec.input_shape, spec.num_classes, **dict(self.options))
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
            problem = "uses batch normalization, by which one record influences the gradients of other records"
            raise checks.error("method.network", self.network, problem)
        return networks.initialize(module, make_torch_generator(seed, "dpsgd", "initial"))


@dataclass(eq=False, repr=False)
class PreparedDPSGD(PreparedMethod):
    """PRIVATE. Calibrated DP-SGD and its inputs, with one record of each unit."""

    method: DPSGD
    inputs: MethodInputs

    def release(self, pool: PublicPool, spending: Spending) -> ModelRelease:
        method, inputs, spec = self.method, self.inputs, self.inputs.facts.spec
        with inputs.clock("training"):
            module = method._build_module(spec, inputs.seed)
            self.train(module, spending.noise, inputs.stages("Training by DP-SGD"))
        network = networks.describe(method.network, spec.input_shape, spec.num_classes, **dict(method.options))
        return ModelRelease(spending.id, Student(network, module.cpu().eval(), spec))

    def train(self, module: nn.Module, noise: NoiseSource, progress: Progress = do_nothing) -> None:
        """Train ``module`` in place. Each step includes each record independently with the same probability."""
        from opacus import GradSampleModule  # here, because it takes seconds to load

        from pate_torch.methods.dpsgd_optimizer import NoiseSourceOptimizer

        method, facts, cpu = self.method, self.inputs.facts, torch.device("cpu")
        rate = method.compute_sampling_rate(facts)
        assert method.noise_multiplier is not None
        model = GradSampleModule(module.to(self.inputs.device).train())
        optimizer = NoiseSourceOptimizer(
            torch.optim.SGD(model.parameters(), lr=method.learning_rate, momentum=method.momentum),
            noise,
            noise_multiplier=method.noise_multiplier,
            max_grad_norm=method.clip,
            expected_batch_size=method.compute_batch_size(facts),
        )
        for step in range(method.steps):
            for group in optimizer.param_groups:
                group["lr"] = method.learning_rate * 0.5 * (1 + math.cos(math.pi * step / method.steps))
            sample_rows = (noise.draw_uniform((len(self.inputs.records),), cpu) < rate).nonzero().squeeze(1)
            optimizer.zero_grad()
            self._compute_gradients(model, sample_rows)
            optimizer.step()
            progress(step + 1, method.steps)
        model.to_standard_module()

    def _compute_gradients(self, model: GradSampleModule, sample_rows: torch.Tensor) -> None:
        """Compute the gradient of each sampled record. Without a sampled record the step releases noise alone."""
        records, device = self.inputs.records, self.inputs.device
        if len(sample_rows) == 0:
            for p in model.parameters():
                p.grad_sample = torch.zeros(0, *p.shape, dtype=p.dtype, device=device)
            return
        x = self.inputs.facts.spec.normalize(records.x[sample_rows].to(device))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the input needs no gradient
            F.cross_entropy(model(x), records.y[sample_rows].to(device)).backward()
        # A gradient with an infinite norm cannot be clipped, so its record contributes 0.
        parts = [p.grad_sample for p in model.parameters()]
        finite_B = torch.stack([part.flatten(1).norm(dim=1).isfinite() for part in parts]).all(0)
        for part in parts:
            part[~finite_B] = 0
