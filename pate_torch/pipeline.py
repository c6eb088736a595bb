"""From private records to a released student.

    method -> votes, counts, gradients -> mechanism <- budget | released labels -> student -> report
    PRIVATE                                                   | may be published

Everything left of the bar is private. What crosses it has passed a mechanism, whose price was reserved before any noise
was drawn.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

from pate_torch import aggregation
from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.aggregation import RoundInputs
from pate_torch.config import RunConfig
from pate_torch.context import DataSplits, LabelRelease, RunContext
from pate_torch.core.device import deterministic_mode
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.progress import Stages
from pate_torch.core.run_folders import create_protected_folder
from pate_torch.data.encoded_dataset import ENCODER_FOLDER, EncodedDataset
from pate_torch.features.contrastive import learn_features
from pate_torch.methods.base import PreparedMethod
from pate_torch.privacy.records import Release
from pate_torch.privacy.sensitive import CellHistogram, Votes
from pate_torch.release import private_metrics
from pate_torch.release import store as release_store
from pate_torch.release.builder import build_report
from pate_torch.release.console import print_summary
from pate_torch.release.renderer import write_release
from pate_torch.release.report import Baseline, ReleaseReport
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.store import save as save_student
from pate_torch.students.task import make_student_task
from pate_torch.teachers import distributed
from pate_torch.teachers.baseline import train_on_all


def run(config: RunConfig) -> ReleaseReport | None:
    """Prepare the method, release its answers under differential privacy, and train the student that may be published.

    Returns:
        What was released, as reported; None on the ranks that only assist.

    Raises:
        ValueError: A choice cannot work. Nothing has been charged.
        BudgetExceeded: The account's cap does not admit this run.
    """
    config = replace(config, device=distributed.get_local_device(config.device))
    if not distributed.is_main():
        run_worker_rank(config)
        return None
    with RunContext.open(config) as context:
        release = context.reused_release or release_labels(context)
        price_message = publish_private_price(context, release)
        student = fit_student(context, release) if config.trains_student else None
        report = write_reports(context, release, student)
    context.finish()  # last: what is still buffered was written as the run closed
    distributed.broadcast_text(distributed.DONE)
    if price_message is not None:
        print(price_message)
    return report


def release_labels(run: RunContext) -> LabelRelease:
    """Ask about public points, and write down the answers that the mechanism releases."""
    config, data, budget = run.config, run.data, run.budget
    assert budget is not None
    method = config.method.prepare(run)
    with run.clock("labels"):
        facts = _build_record(run, method)
        run.check_budget()  # all of it: labels that no student can be chosen from would be paid for in vain
        release_store.check_unused_folder(config.folder)
        if run.unfinished_call is not None:
            run.unfinished_call.begin(config.folder)
        record: dict[str, Any] = {}
        guide = _RoundGuide(run, method)
        raw_votes: list[Votes | CellHistogram] = []  # filled once, at the end, if at all

        def write(labels: Release) -> dict[str, str]:
            record.update(
                release_store.write(
                    run.release_dir, labels, facts, data.spec, guide.student_to_release, data.pool.names
                )
            )
            return release_store.select_digests(record)

        labels = aggregation.answer_queries(
            sensitive=method.sensitive,
            pool=data.pool,
            spec=data.spec,
            mechanism=config.mechanism,
            strategy=config.query,
            budget=budget,
            num_queries=config.num_queries,
            seed=config.seed,
            next_round=guide,
            feature_PD=learn_features(config.features, data, config.seed, config.device, run.stages),
            write=write,
            on_votes=raw_votes.append,
            progress=run.stages("Answering queries"),
        )
    method.record_ledger_head(run.ledger.get_head())
    run.reservation_ids.append(labels.id)
    return LabelRelease(
        labels=labels,
        facts=record,
        guide=guide.student_to_release,
        method=method,
        raw_votes=next(iter(raw_votes), None),
    )


class _RoundGuide:
    """Fits a student between rounds: it guides the next questions, and the method that looks at it."""

    def __init__(self, run: RunContext, method: PreparedMethod) -> None:
        self.run, self.method = run, method
        self.student: Student | None = None
        self.progress = run.stages("Training the guide student") if run.config.is_guided else None

    @property
    def student_to_release(self) -> Student | None:
        """What is released beside the labels: the guide, where the student that is published goes on from it."""
        return self.student if self.run.config.guide_student is None else None

    def __call__(self, labels: Release) -> RoundInputs:
        """What the next round goes by: functions of what was released, and the records in its student's features."""
        config, data, algorithm = self.run.config, self.run.data, self.run.config.guide
        if self.progress is None or algorithm is None or not bool(labels.answered_Q.any()):
            return RoundInputs()
        task = make_student_task(data.spec, data.pool, labels)
        task = replace(task, guide=self.student_to_release)
        self.student = algorithm.fit(task, seed=config.seed, device=config.device, progress=self.progress)
        method = self.method.prepare_round(self.student)
        sensitive = None if method is self.method else method.sensitive
        return RoundInputs(self.student.compute_probabilities(data.pool.x), sensitive, method.feature_PD)


def _build_record(run: RunContext, method: PreparedMethod) -> dict[str, Any]:
    """What ``release.json`` says beside the answers. Public: configuration, and ids drawn at random."""
    config, data = run.config, run.data
    assert run.budget is not None
    parameters = {f.name: getattr(config.mechanism, f.name) for f in dataclasses.fields(config.mechanism)}  # type: ignore[arg-type]
    nominal_size = config.method.get_nominal_size(data)
    asset = None if config.features is None else config.features.asset
    # How far one unit moves what the mechanism opens; null: not bounded, or no part of the price.
    norms = {norm: getattr(config.mechanism.max_sensitivity, norm) for norm in ("l1", "l2", "linf")}
    finite_norms = {norm: value if math.isfinite(value) else None for norm, value in norms.items()}
    # A switch that is off is left out of the record.
    recorded_parameters = {k: v for k, v in parameters.items() if k not in ("name", "noise") and v is not False}
    return {
        "dataset": data.spec.name,
        "pool_sha256": compute_tensor_digest(data.pool.x),
        "teachers_id": method.id,
        "num_teachers": config.num_teachers,
        "mechanism": config.mechanism.name,
        "parameters": recorded_parameters,
        "noise": config.privacy.noise,
        "private": run.budget.secret,
        "query": config.query.name,
        "voters": config.method.name,
        "rounds": config.num_rounds,
        "seed": config.seed,
        "delta": config.privacy.delta,
        "adjacency": config.partition.adjacency,
        "unit": data.private.unit,
        **({} if data.spec.encoder is None else {"encoder": data.spec.encoder.card_without_points.to_dict()}),
        **({} if nominal_size is None else {"declared_size": nominal_size}),
        "sensitivity": {**finite_norms, "per": getattr(config.mechanism, "sensitivity_unit", "question")},
        **({} if asset is None else {"assets": [dataclasses.asdict(asset)]}),
        "answered_by": config.method.describe(data.private.unit, config).to_dict(),
    }


def publish_private_price(run: RunContext, release: LabelRelease) -> str | None:
    """Publish the data-dependent price where wanted, at a price of its own; returns what to tell the owner about it."""
    config = run.config
    if config.private_epsilon is None or release.labels.id not in run.reservation_ids:
        return None
    assert run.budget is not None and release.method is not None and isinstance(release.method.sensitive, Votes)
    votes = release.method.sensitive.select(release.labels.query_Q)
    plan, delta = config.plan_private_epsilon(run.data.spec.num_classes), config.privacy.delta
    epsilon, reservation_id = config.private_epsilon.publish(
        plan, config.mechanism, votes, run.budget, delta, run.release_dir
    )
    run.reservation_ids.append(reservation_id)
    release.method.record_ledger_head(run.ledger.get_head())
    return (
        f"  Private epsilon  epsilon = {format_epsilon(epsilon)} at delta = {format_delta(delta)}"
        f" with confidence {plan.confidence:g} (forward, {config.partition.adjacency},\n"
        f"                   unit {run.data.private.unit}, this publication included)"
    )


def fit_student(run: RunContext, release: LabelRelease) -> tuple[str, Student]:
    """Train and save the student, or several of which private records choose one, at a price.

    Returns:
        The student's name, and the student.

    Raises:
        ValueError: No question was answered.
    """
    config, data, labels = run.config, run.data, release.labels
    if not bool(labels.answered_Q.any()):
        fix = "Take more teachers, fewer questions or a larger epsilon"
        fix += ", or a lower mechanism.threshold." if hasattr(config.mechanism, "threshold") else "."
        raise ValueError(
            f"mechanism: none of the {len(labels.query_Q)} questions was answered, so there is nothing to learn from. "
            f"{fix}"
        )
    validation, selection = run.splits.validation, config.selection
    task = replace(
        make_student_task(data.spec, data.pool, labels), guide=release.guide if config.guide_student is None else None
    )

    def fit(name: str, algorithm: StudentAlgorithm) -> Student:
        def log(tag: str, value: float, step: int) -> None:
            tag = tag if validation is None else tag.replace("student/", f"student/{name}/", 1)
            run.release_writer.log(tag, value, step)

        progress = run.stages(f"Training the student ({name})")
        return algorithm.fit(task, seed=config.seed, device=config.device, progress=progress, log=log)

    with run.clock("student"):
        if selection is None:
            assert config.student is not None
            name, student = config.student.name, fit(config.student.name, config.student)
        else:
            assert validation is not None and run.budget is not None
            name, student, reservation_id = selection.choose(fit, validation=validation, budget=run.budget)
            run.reservation_ids.append(reservation_id)
    create_protected_folder(run.release_dir)
    save_student(student, run.release_dir / "student.safetensors")
    if isinstance(config.dataset, EncodedDataset):
        config.dataset.publish(run.release_dir / ENCODER_FOLDER)
    return name, student


def write_reports(run: RunContext, release: LabelRelease, named_student: tuple[str, Student] | None) -> ReleaseReport:
    """Write what may be published into ``release/``, and what the owner alone may see into ``private/``.

    Args:
        run: The run.
        release: The labels.
        named_student: The student's name, and the student; None: labels are all that was wanted, and the owner sees no
            more.
    """
    create_protected_folder(run.release_dir)
    if named_student is None:
        report = make_report(run, release)
        write_release(run.release_dir, report)
        print_summary(report, paths={"Released": run.release_dir, "Ledger": run.ledger.path.absolute()})
        return report
    name, student = named_student
    private_metrics.save_votes(run, release)
    with run.clock("owner"):
        metrics, nonprivate = private_metrics.compute_private_metrics(run, release)
    report = make_report(run, release, name, student, private_metrics.make_public_baselines(run.data, metrics))
    run.release_writer.write(report)
    run.release_writer.close()  # its files are hashed with the others
    write_release(run.release_dir, report)
    metrics = private_metrics.run_membership_attack(run, release, student, metrics, nonprivate)
    private_metrics.write_owner_summary(metrics, run.private_dir / "summary.json")
    paths = {"Released": run.release_dir, "Private": run.private_dir, "Ledger": run.ledger.path.absolute()}
    print_summary(report, owner=metrics.format_rows(), paths=paths)
    return report


def make_report(
    run: RunContext,
    release: LabelRelease,
    name: str = "",
    student: Student | None = None,
    baselines: tuple[Baseline, ...] = (),
) -> ReleaseReport:
    """The report of a release, and of its student where there is one."""
    return build_report(
        data=run.data,
        release=release.labels,
        record=release.facts,
        reservation_ids=run.reservation_ids,
        student=student,
        student_name=name,
        ledger=run.ledger,
        seconds=run.clock.seconds,
        owner=run.owner,
        chosen_by=run.config.privacy.chosen_by,
        baselines=baselines,
        includes_encoder=(run.release_dir / ENCODER_FOLDER).is_dir(),
    )


def run_worker_rank(config: RunConfig) -> None:
    """Do the part of a torchrun's ranks above 0: train their teachers and ask them, without noise or ledger."""
    data = DataSplits.from_config(config).data
    with deterministic_mode(config.device):
        while (command := distributed.broadcast_text("")) != distributed.DONE:
            if command == distributed.TRAIN:
                config.method.run_worker_rank(data, config)
            elif command == distributed.BASELINE:
                stages = Stages(quiet=True)
                train_on_all(data, config.teacher, seed=config.seed, device=config.device, stages=stages)
