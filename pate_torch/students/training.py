"""Students that are trained by gradient descent: batches, losses for noisy labels, averaged weights and the loop.

The weights of a student are the exponential average after the last step. No checkpoint is selected, because private
records and evaluation labels are not available to students.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks, rng
from pate_torch.core.device import single_thread_mode
from pate_torch.core.optimizers import Adam
from pate_torch.core.progress import Log, Progress, do_nothing
from pate_torch.features.augmentation import Affine, make_strong_view, make_weak_view, parse_affine
from pate_torch.features.contrastive import PRECISIONS, ContrastiveFeatures, autocast, transfer_weights
from pate_torch.privacy.records import DataSpec
from pate_torch.students.base import Student, StudentAlgorithm, StudentProblem, StudentTask
from pate_torch.students.labels import clip_noise_rate, with_label_posteriors

Objective = Callable[[nn.Module, int], Tensor]
"""Function from a model in training mode and a step to a scalar loss."""
TensorLog = Callable[[str, Tensor, int], None]
"""Function of (tag, scalar, step), like ``core.progress.Log``, for scalars that are still on the device."""

SYNC_EVERY = 50
"""Number of steps between host synchronizations, because reading the loss at every step would stall a GPU."""
_MAX_SINGLE_THREAD_FEATURES = 400
"""Largest number of features of a point with which a training step on a CPU is not faster on several threads."""


def build_problem(task: StudentTask, seed: int, device: torch.device, label_noise: float = 0.0) -> StudentProblem:
    """Check a task and move it to a device. ``label_noise`` is the expected share of wrong labels.

    Raises:
        ValueError: There are no labels, or the sizes or values of labels and points are inconsistent.
    """
    query_Q, label_Q = task.query_Q.cpu().long(), task.label_Q.cpu().long()
    if len(query_Q) == 0:
        raise ValueError(
            "labels: no public point has a released label, so no student can be trained. Increase num_queries, or "
            "lower mechanism.threshold."
        )
    if len(query_Q) != len(label_Q):
        raise ValueError(f"labels: {len(label_Q)} labels for {len(query_Q)} points. Each point needs one label.")
    for name, value_Q, end in (("label", label_Q, task.spec.num_classes), ("query", query_Q, len(task.pool_x))):
        checks.integer(name, int(value_Q.min()), low=0)
        checks.integer(name, int(value_Q.max()), high=end - 1)
    flip_rate = clip_noise_rate(label_noise, task.spec.num_classes)
    posterior_QC = task.posterior_QC
    if posterior_QC is not None:
        posterior_QC = posterior_QC.cpu().float()
        fits = posterior_QC.dim() == 2 and len(posterior_QC) == len(query_Q) and bool((posterior_QC >= 0).all())
        if not fits or not torch.allclose(posterior_QC.sum(1), torch.ones(len(query_Q)), atol=1e-3):
            shape = tuple(posterior_QC.shape)
            raise ValueError(f"labels: posteriors {shape} must be one row of probabilities for each answered point.")
        rate_per_wrong_class = flip_rate / (posterior_QC.shape[1] - 1)
        posterior_QC = (1 - flip_rate - rate_per_wrong_class) * posterior_QC + rate_per_wrong_class
        # Probabilities are positive, because a model that contradicts a posterior of 0 would lose its gradient.
        posterior_QC = posterior_QC.clamp(min=1e-6).to(device)
    tensors = (task.pool_x.to(device), query_Q.to(device), label_Q.to(device), posterior_QC)
    return StudentProblem(task.spec, *tensors, soft=task.soft, flip_rate=flip_rate, seed=seed, search=task.search)


def compute_released_loss(problem: StudentProblem, logits_BC: Tensor, index_B: Tensor) -> Tensor:
    """Compute the negative log-likelihood [B] of the released answers at the positions ``index_B``.

    The loss of labels is ``compute_label_loss``. The loss of scores is their cross-entropy. The loss of noisy counts is
    -log sum_c p_c P(counts | c): if the counts of two classes are close, the model may predict either class.
    """
    if problem.posterior_QC is None:
        return compute_label_loss(logits_BC, problem.label_Q[index_B], problem.flip_rate)
    if problem.soft:
        return -(logits_BC.log_softmax(1) * problem.posterior_QC[index_B]).sum(1)
    return -(logits_BC.log_softmax(1) + problem.posterior_QC[index_B].log()).logsumexp(1)


def compute_label_loss(logits_BC: Tensor, label_B: Tensor, flip_rate: float) -> Tensor:
    """Compute the cross-entropy [B] of released labels with symmetric flips (Patrini et al. 2017, "forward").

    P(released = c) = (1 - flip) p_c + flip (1 - p_c)/(C - 1). With flip > 0, the gradient of a label vanishes if the
    model is confident in another class, so wrong labels have little weight in the later training.
    """
    log_p_B = -F.cross_entropy(logits_BC, label_B, reduction="none")
    if flip_rate == 0:
        return -log_p_B
    rate_per_wrong_class = flip_rate / (logits_BC.shape[1] - 1)
    return -torch.log((1 - flip_rate - rate_per_wrong_class) * log_p_B.exp() + rate_per_wrong_class)


def iterate_batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Iterate endlessly over batches of ``size`` indices, int64, from concatenated permutations of 0..count-1."""
    queue = torch.zeros(0, dtype=torch.int64, device=generator.device)
    while True:
        while len(queue) < size:
            queue = torch.cat([queue, torch.randperm(count, generator=generator, device=generator.device)])
        yield queue[:size]
        queue = queue[size:]


class Sampler:
    """Batches of labeled and unlabeled points, and distorted views of them. Each of the three has a random stream.

    Attributes:
        labeled_batches: Endless iterator over batches of positions in ``query_Q``.
        unlabeled_batches: Endless iterator over batches of indices of public points.
        generator: Random stream of the views, which are drawn in the order of the calls.
    """

    def __init__(self, problem: StudentProblem, augment: Affine | None, batch_size: int, unlabeled_batch: int):
        self.problem = problem
        self.labeled_batches = iterate_batches(len(problem.query_Q), batch_size, problem.make_generator("batches"))
        unlabeled_generator, self.generator = problem.make_generator("unlabelled"), problem.make_generator("views")
        self.unlabeled_batches = iterate_batches(len(problem.pool_x), unlabeled_batch, unlabeled_generator)
        self._weak_view = make_weak_view(problem.spec, augment)
        self._strong_view = make_strong_view(problem.spec, augment)

    def distort_weakly(self, index_B: Tensor) -> Tensor:
        return self._weak_view(self.problem.pool_x[index_B], self.problem.spec, self.generator)

    def distort_strongly(self, index_B: Tensor) -> Tensor:
        return self._strong_view(self.problem.pool_x[index_B], self.problem.spec, self.generator)


class DeferredLog:
    """A log of scalars that stay on the device until ``flush`` passes them to ``log``."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._pending: list[tuple[str | None, Tensor, int]] = []

    def __call__(self, tag: str | None, value: Tensor, step: int) -> None:
        """Store a value of one step. A value without a tag is a loss, which is checked but not logged."""
        self._pending.append((tag, value.detach().float(), step))

    def flush(self) -> None:
        """Log the stored values, with one copy from the device. Raise FloatingPointError if a loss is not finite."""
        values = torch.stack([value for _, value, _ in self._pending]).tolist()
        pending, self._pending = self._pending, []
        for (tag, _, step), value in zip(pending, values, strict=True):
            if tag in (None, "student/loss") and not math.isfinite(value):
                raise FloatingPointError(f"student loss is {value} at step {step}. Lower student.learning_rate.")
            if tag is not None:
                self._log(tag, value, step)


class AveragedModel:
    """The exponential average of the weights and float buffers of a model. Early averages forget faster."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module, self.decay, self.updates = copy.deepcopy(model).eval().requires_grad_(False), decay, 0
        pairs = list(zip(self.module.state_dict().values(), model.state_dict().values(), strict=True))
        self._averages, self._values = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
        self._integer_pairs = [pair for pair in pairs if not pair[0].is_floating_point()]

    def update(self) -> None:
        self.updates += 1
        weight = 1 - min(self.decay, self.updates / (self.updates + 9))
        torch._foreach_lerp_(self._averages, self._values, weight)
        for average, current in self._integer_pairs:
            average.copy_(current)


@dataclass(frozen=True, kw_only=True)
class GradientStudent(StudentAlgorithm):
    """A student that is trained by gradient descent. Subclasses define the loss.

    Attributes:
        include_unqueried: Whether the student also learns estimated posteriors (``labels.with_label_posteriors``) of
            points that were not queried. False for students that propagate labels.
        network: Name of the network (``networks.NETWORKS``).
        network_options: Options of the network.
        steps: Number of training steps.
        batch_size: Number of labeled points in a batch.
        learning_rate: Peak learning rate of AdamW, after the warm-up.
        weight_decay: Decoupled weight decay.
        ema: Decay of the averaged weights.
        augment: Ranges of the affine maps: an ``Affine`` or a mapping of its fields. None for no affine maps.
        features: Recipe of the initial trunk of the network, which is learned from public points without labels. None
            for random initial weights.
        label_noise: Expected share of wrong labels, or of wrong leading classes in noisy counts. None for an estimate
            from the labels of feature rows (``labels.with_label_posteriors``), and for 0 on images and noisy counts.
        precision: "float32", "bfloat16" (mixed), or "auto" for bfloat16 on processors with hardware support. With
            "auto", results depend on the machine.
    """

    include_unqueried: ClassVar[bool] = True
    name: str
    network: str = "small_cnn"
    network_options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 500
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    ema: float = 0.99
    augment: Affine | Mapping[str, Any] | None = None
    features: ContrastiveFeatures | None = None
    label_noise: float | None = None
    precision: str = "float32"

    def __post_init__(self) -> None:
        checks.integer("student.steps", self.steps, low=1)
        checks.integer("student.batch_size", self.batch_size, low=1)
        checks.positive("student.learning_rate", self.learning_rate)
        checks.non_negative("student.weight_decay", self.weight_decay)
        checks.between("student.ema", self.ema, 0, 1)
        checks.optional(checks.between, "student.label_noise", self.label_noise, 0, 1)
        checks.one_of("student.precision", self.precision, PRECISIONS)
        checks.one_of("student.network", self.network, networks.NETWORKS)
        checks.mapping("student.network_options", self.network_options)
        parse_affine(self.augment, "student.augment")
        if self.features is not None and not isinstance(self.features, ContrastiveFeatures):
            fix = "Set student.features._target_, as in conf/dataset/digits.yaml."
            raise checks.error("student.features", self.features, "must be ContrastiveFeatures or null", fix)

    def check(self, spec: DataSpec) -> None:
        networks.build(self.network, spec.input_shape, spec.num_classes, **self.network_options)
        super().check(spec)

    @abstractmethod
    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        """Make the loss of one step. The predictions of the averaged model ``average`` may be targets."""

    def make_sampler(self, problem: StudentProblem, unlabeled_batch: int = 1) -> Sampler:
        return Sampler(problem, parse_affine(self.augment), self.batch_size, unlabeled_batch)

    def is_logged(self, step: int) -> bool:
        """Return whether the values of a step are logged. About fifty steps are logged."""
        return step % max(1, self.steps // 50) == 0

    def fit(
        self, task: StudentTask, seed: int, device: torch.device, progress: Progress = do_nothing, log: Log = do_nothing
    ) -> Student:
        problem, spec = build_problem(task, seed, device, self.label_noise or 0.0), task.spec
        if self.label_noise is None and task.posterior_QC is None and not spec.is_image:
            problem = with_label_posteriors(problem, include_unqueried=self.include_unqueried)
        description = networks.describe(self.network, spec.input_shape, spec.num_classes, **self.network_options)
        # Convolutions are a fifth faster in channels last. Results are the same except for rounding.
        model = self.make_initial_network(problem, description).to(memory_format=torch.channels_last)
        average, note = AveragedModel(model, self.ema), DeferredLog(log)
        with single_thread_mode(device.type == "cpu" and math.prod(spec.input_shape) <= _MAX_SINGLE_THREAD_FEATURES):
            self._optimize(model, average, self.make_objective(problem, average, note), progress, note)
        return Student(description, average.module.to(memory_format=torch.contiguous_format), spec)

    def make_initial_network(self, problem: StudentProblem, description: dict[str, Any]) -> nn.Module:
        """Make the initial network, with random weights or with a trunk that was learned from public points."""
        device = problem.pool_x.device
        generator = rng.make_torch_generator(problem.seed, "student", "initial")
        model = networks.initialize(networks.rebuild(description), generator).to(device)
        if self.features is not None:
            encoder = self.features.single_encoder
            transfer_weights(encoder.learn(problem.pool_x, problem.spec, seed=problem.seed, device=device), model)
        return model

    def _optimize(
        self, model: nn.Module, average: AveragedModel, loss: Objective, progress: Progress, note: DeferredLog
    ) -> None:
        decayed_params = [p for p in model.parameters() if p.dim() > 1]
        undecayed_params = [p for p in model.parameters() if p.dim() <= 1]
        optimizers = [Adam(decayed_params, self.weight_decay), Adam(undecayed_params, 0.0)]
        for step in range(self.steps):
            model.train()
            with autocast(self.precision, next(model.parameters()).device):
                value = loss(model, step)
            model.zero_grad()
            value.backward()
            for optimizer in optimizers:
                optimizer.step(self.learning_rate * compute_lr_factor(step, self.steps))
            average.update()
            is_last_step = step == self.steps - 1
            note("student/loss" if is_last_step or self.is_logged(step) else None, value, step)
            if is_last_step or (step + 1) % SYNC_EVERY == 0:
                note.flush()
            progress(step + 1, self.steps)


@dataclass(frozen=True, kw_only=True)
class Supervised(GradientStudent):
    """A network trained on the answered points alone: a fast baseline, and the default guide student."""

    name: str = "supervised"

    def make_objective(self, problem: StudentProblem, average: AveragedModel, note: TensorLog) -> Objective:
        sampler = self.make_sampler(problem)

        def compute_loss(model: nn.Module, step: int) -> Tensor:
            index_B = next(sampler.labeled_batches)
            return compute_released_loss(
                problem, model(sampler.distort_weakly(problem.query_Q[index_B])).float(), index_B
            ).mean()

        return compute_loss


def compute_lr_factor(step: int, steps: int) -> float:
    """Compute the share of the peak learning rate: linear warm-up over 5 % of the steps, then cosine decay to 1 %."""
    warmup_steps = max(1, round(0.05 * steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))
