"""DP-SGD by Opacus on the private records, at the price of the plan's PATE release: the baseline for PATE.

It uses neither teachers nor public points (but for normalization constants), and it *is* a release from the private
data: the ledger is charged before the first step, for the subsampled Gaussian's Renyi curve.

Two things are ours and not Opacus's. Which records a step sees, and the noise on its gradient, are drawn from the
operating system's entropy (``NoiseSource``): Opacus's secure mode needs torchcsprng, which is not maintained, and a
torch generator keeps 32 bits of its seed. And the sampling rate is batch_size over the *declared* number of records:
the exact number is private under add_remove.

Source: Abadi et al. 2016 (DP-SGD); Mironov, Talwar and Zhang 2019 (the curve); Yousefpour et al. 2021 (Opacus).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizer
from torch import nn

from pate_torch import networks
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import calibration
from pate_torch.accounting.sampled_gaussian import make_sampled_gaussian_event
from pate_torch.config import RunConfig, check_adjacency
from pate_torch.context import open_budget, run_folder_lock
from pate_torch.core import checks
from pate_torch.core.files import create_private_folder
from pate_torch.core.progress import Progress, Stages, StageTimer, do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.records import Dataset, DataSpec, PrivateRecords
from pate_torch.privacy.units import drop_unusable, select_one_per_unit
from pate_torch.release import owner_file
from pate_torch.release import store as release_store
from pate_torch.release.builder import build_report
from pate_torch.release.console import print_summary
from pate_torch.release.private_metrics import PrivateMetrics
from pate_torch.release.renderer import write_release
from pate_torch.release.unfinished_calls import UnfinishedCall, save_model
from pate_torch.students.base import Student
from pate_torch.students.store import load
from pate_torch.teachers.store import TeacherStore


class NoiseSourceOptimizer(DPOptimizer):
    """Opacus's optimizer with noise from ``NoiseSource``."""

    def __init__(self, optimizer: torch.optim.Optimizer, noise: NoiseSource, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.noise = noise

    def add_noise(self) -> None:
        """Add noise from ``NoiseSource`` to the summed gradients."""
        for p in self.params:
            sigma = self.noise_multiplier * self.max_grad_norm
            noise = self.noise.draw_gaussian(tuple(p.summed_grad.shape), sigma, p.device)
            p.grad = (p.summed_grad + noise.to(p.dtype)).view_as(p)


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """A recipe for DP-SGD; epsilon is the plan's ``privacy.target_epsilon``, or else its PATE release's worst case.

    Attributes:
        network: The model, a name of ``networks.NETWORKS`` (no batch normalization: it mixes records).
        options: Options of the network.
        steps: Number of steps of SGD.
        batch_size: Records a step sees on average; None: half the declared number, at most 1024, since noise
            outweighs a large batch less.
        momentum: Momentum of SGD.
        clip: Clipping norm of one record's gradient.
    """

    network: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 200
    batch_size: int | None = None
    learning_rate: float = 0.2
    momentum: float = 0.9
    clip: float = 1.0

    def __post_init__(self) -> None:
        checks.one_of("study.network", self.network, networks.NETWORKS)
        checks.integer("study.steps", self.steps, low=1)
        if self.batch_size is not None:
            checks.integer("study.batch_size", self.batch_size, low=1)
        checks.positive("study.learning_rate", self.learning_rate)
        checks.between("study.momentum", self.momentum, 0, 0.9999)
        checks.positive("study.clip", self.clip)

    def run(self, plan: RunConfig) -> Path:
        """Charge, train, and write the files of a release; the folder of the run."""
        clock = StageTimer()
        with Stages(quiet=plan.quiet) as stages:
            with clock("data"):
                data = drop_unusable(plan.dataset.load(), plan.partition.adjacency)
            plan = plan.cap_num_queries(data, stages)
            check_adjacency(data, plan.partition.adjacency)
            all_private = data.private
            # A unit is all records of one id: it is seen, and moves the sum, by one of them.
            data = dataclasses.replace(data, private=select_one_per_unit(all_private, plan.partition.adjacency))
            module = self._build_module(data, plan.seed)
            batch = self.compute_batch_size(data)
            rate = batch / checks.integer("dataset.nominal_size", data.spec.nominal_size, low=batch)
            epsilon = plan.privacy.target_epsilon
            if epsilon is None:
                planned_events = plan.mechanism.privacy_events(plan.num_queries, plan.num_rounds)
                epsilon = accounting.compute_guarantee(planned_events, plan.privacy.delta).epsilon
            multiplier = self.compute_noise_multiplier(rate, epsilon, plan.privacy.delta)
            events = (make_sampled_gaussian_event(rate, multiplier, self.steps),)
            if not plan.quiet:  # Opacus takes some seconds
                stages.print_message(self._compare_with_opacus(rate, multiplier, epsilon, plan.privacy.delta))
            owner_facts = owner_file.read(plan.root, data.spec.name)
            root = self._select_root(plan, data, stages)
            store = TeacherStore(root)
            call_facts = {"model": repr(self), "seed": plan.seed, "events": repr(events), "delta": plan.privacy.delta}
            unfinished_call = UnfinishedCall(
                store, data.spec.name, call_facts, lambda: store.compute_fingerprint(all_private)
            )
            plan = dataclasses.replace(plan, root=root)
            unfinished_model = unfinished_call.find_model(plan.ledger_path)
            plan = plan if unfinished_model is None else dataclasses.replace(plan, folder=unfinished_model[0])
            release = plan.folder / "release"
            with run_folder_lock(plan), Ledger(plan.ledger_path) as ledger:
                budget = open_budget(
                    plan, ledger, data, events, store.compute_content_fingerprint(all_private), kind="torch"
                )
                if unfinished_model is not None:
                    release_id = unfinished_model[1]
                    student = load(release / "student.safetensors")
                else:
                    release_store.check_unused_folder(plan.folder)
                    unfinished_call.begin(plan.folder)
                    with budget.spend(events, mechanism="dpsgd", purpose="model by DP-SGD") as spending:
                        with clock("training"):
                            progress = stages("Training by DP-SGD")
                            self.train(module, data, batch, rate, multiplier, spending.noise, plan.device, progress)
                        student = Student(self._describe_network(data.spec), module.cpu().eval(), data.spec)
                        spending.record_files(save_model(student, release))
                    release_id = spending.id
                report = build_report(
                    data=data,
                    release=None,
                    record=self._make_record(plan, data, batch, multiplier),
                    reservation_ids=[release_id],
                    ledger=ledger,
                    student=student,
                    student_name=self.network,
                    seconds=clock.seconds,
                    owner=owner_facts,
                    chosen_by=plan.privacy.chosen_by,
                )
                create_private_folder(plan.folder / "private")
                metrics = PrivateMetrics.from_student(data, student, clock.seconds, all_private=all_private)
                metrics.write(plan.folder / "private" / "summary.json")
                write_release(release, report)
                unfinished_call.end()
        if not plan.quiet:
            print_summary(report, owner=metrics.format_rows(), paths={"Released": release, "Ledger": ledger.path})
        return plan.folder

    def _describe_network(self, spec: DataSpec) -> dict[str, Any]:
        return networks.describe(self.network, spec.input_shape, spec.num_classes, **dict(self.options))

    def compute_batch_size(self, data: Dataset) -> int:
        """How many records a step sees on average: a public number, since it follows from the declared size."""
        size = data.spec.nominal_size
        if size is None:
            raise checks.error(
                "dataset.nominal_size", None, "sets the sampling rate of DP-SGD", "Declare about how many records."
            )
        if data.private.unit != "record":
            raise checks.error(
                "study", "dpsgd", f"protects single records, but the privacy unit is {data.private.unit}"
            )
        return max(1, min(1024, size // 2)) if self.batch_size is None else self.batch_size

    def compute_noise_multiplier(self, rate: float, epsilon: float, delta: float) -> float:
        """The smallest noise multiplier at which all steps cost at most epsilon."""
        return calibration.calibrate_sigma(
            lambda sigma: (make_sampled_gaussian_event(rate, sigma, self.steps),), epsilon=epsilon, delta=delta
        )

    def _compare_with_opacus(self, rate: float, multiplier: float, epsilon: float, delta: float) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus warns where its best order is the last of its own grid
            opacus_multiplier = {
                name: get_noise_multiplier(
                    target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=self.steps, accountant=name
                )
                for name in ("rdp", "prv")
            }
        return (
            f"Noise multiplier {multiplier:.4f} for epsilon {epsilon:.4g} at delta {delta:g}"
            f" (Opacus: {opacus_multiplier['rdp']:.4f} by RDP, {opacus_multiplier['prv']:.4f} by PRV, which no ledger "
            "can add up)."
        )

    def _select_root(self, plan: RunConfig, data: Dataset, stages: Stages) -> Path:
        """Where the ledger lies: with the data set's account, or apart where its filter cannot bound this mechanism."""
        root = plan.root
        if plan.partition.adjacency != "add_remove":
            raise checks.error(
                "partition", plan.partition.adjacency, "records are sampled", "Use partition=add_remove."
            )
        path = plan.ledger_path
        if path.exists():
            with Ledger(path) as opened_ledger:
                kinds = {account.name: account.filter.kind for account in opened_ledger.list_accounts()}
            if kinds.get(data.spec.name) == "gdp":
                reason = "its account adds up mu^2, which cannot bound a subsampled Gaussian"
                if not data.spec.benchmark:
                    fix = "Open the account with another PATE_HOME, and add the two epsilons by hand."
                    raise checks.error("dataset.name", data.spec.name, reason, fix)
                root = plan.root / "dpsgd"
                stages.print_message(
                    f"{data.spec.name}: {reason}. This baseline keeps a ledger apart, under {root}: its epsilon and "
                    "that of the PATE releases are two statements, and do not compose into one."
                )
        return root

    def _build_module(self, data: Dataset, seed: int) -> nn.Module:
        spec = data.spec
        module = networks.build(self.network, spec.input_shape, spec.num_classes, **dict(self.options))
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
            raise checks.error("study.network", self.network, "normalizes over a batch, so one record touches all")
        return networks.initialize(module, make_torch_generator(seed, "dpsgd", "initial"))

    def train(
        self,
        module: nn.Module,
        data: Dataset,
        batch: int,
        rate: float,
        multiplier: float,
        noise: NoiseSource,
        device: torch.device,
        progress: Progress = do_nothing,
    ) -> None:
        """Train ``module`` in place. Each step sees each record with probability ``rate``, whatever the others do."""
        private, cpu = data.private, torch.device("cpu")
        model = GradSampleModule(module.to(device).train())
        optimizer = NoiseSourceOptimizer(
            torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum),
            noise,
            noise_multiplier=multiplier,
            max_grad_norm=self.clip,
            expected_batch_size=batch,
        )
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / self.steps))
            sample_rows = (noise.draw_uniform((len(private),), cpu) < rate).nonzero().squeeze(1)
            optimizer.zero_grad()
            self._compute_gradients(model, private, data, sample_rows, device)
            optimizer.step()
            progress(step + 1, self.steps)
        model.to_standard_module()

    @staticmethod
    def _compute_gradients(
        model: GradSampleModule, private: PrivateRecords, data: Dataset, sample_rows: torch.Tensor, device: torch.device
    ) -> None:
        """Per-record gradients of the mean loss; none where nobody was sampled, and then noise alone is released."""
        if len(sample_rows) == 0:
            for p in model.parameters():
                p.grad_sample = torch.zeros(0, *p.shape, dtype=p.dtype, device=device)
            return
        x = data.spec.normalize(private.x[sample_rows].to(device))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the input needs no gradient
            F.cross_entropy(model(x), private.y[sample_rows].to(device)).backward()
        # A gradient whose length is no number cannot be clipped to one: such a record moves nothing.
        parts = [p.grad_sample for p in model.parameters()]
        finite_B = torch.stack([part.flatten(1).norm(dim=1).isfinite() for part in parts]).all(0)
        for part in parts:
            part[~finite_B] = 0

    def _make_record(self, plan: RunConfig, data: Dataset, batch: int, multiplier: float) -> dict[str, Any]:
        """What is released, as ``build_report`` takes it."""
        return {
            "mechanism": "dpsgd",
            "parameters": {
                "noise_multiplier": multiplier,
                "clip": self.clip,
                "steps": self.steps,
                "batch_size": batch,
                "sampling_rate": batch / (data.spec.nominal_size or 1),
            },
            "noise": "torch",
            "delta": plan.privacy.delta,
            "adjacency": plan.partition.adjacency,
            "unit": data.private.unit,
            "declared_size": data.spec.nominal_size,
            "sensitivity": {"l1": None, "l2": self.clip, "linf": self.clip, "per": "step"},
        }
