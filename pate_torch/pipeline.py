"""From private records to a released student, as ``train.py`` runs it.

    method -> votes, counts, gradients -> mechanism <- budget | released labels -> student -> report
    PRIVATE                                                   | may be published

Everything left of the bar is private. What crosses it has passed a mechanism, whose price was reserved before any noise
was drawn.
"""

from __future__ import annotations

from dataclasses import replace

from pate_torch.config import DataSplits, RunConfig
from pate_torch.core.device import deterministic_mode
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.opening import AlternativeFormatter, make_inputs
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.release.report import ReleaseReport
from pate_torch.session import ReleaseSession
from pate_torch.teachers import distributed
from pate_torch.teachers.training import train_on_all


def run(config: RunConfig, format_alternative: AlternativeFormatter | None = None) -> ReleaseReport | None:
    """Prepare the method, release its answers under differential privacy, and train the student that may be published.

    Args:
        config: The run's choices.
        format_alternative: Suggests other settings if noise outweighs the votes; general advice if None.

    Returns:
        The report of the release; None on the ranks that only assist.

    Raises:
        ValueError: A choice cannot work. Nothing has been charged.
        BudgetExceeded: The account's cap does not admit this run.
    """
    config = replace(config, device=distributed.get_local_device(config.device))
    if not distributed.is_main():
        run_worker_rank(config)
        return None
    with ReleaseSession.open(config, format_alternative=format_alternative) as session:
        written = session.run()
        price_message = session.publish_private_price(written)
        student = session.fit(written)
        report = session.publish(written, student)
    session.finish()  # last: what is still buffered was written as the session closed
    distributed.broadcast_object(distributed.DONE)
    if price_message is not None:
        print(price_message)
    return report


def run_worker_rank(config: RunConfig) -> None:
    """Do the part of a torchrun's ranks above 0: train teachers and collect their votes, without noise or ledger."""
    stages = Stages(quiet=True)
    data = DataSplits.from_config(config, stages).data
    facts = DatasetFacts.from_dataset(data, config.partition)
    with deterministic_mode(config.device):
        while (command := distributed.broadcast_object()) != distributed.DONE:
            if command == distributed.TRAIN:
                config.method.assist(make_inputs(config, data, facts, stages, StageTimer()))
            elif command == distributed.BASELINE:
                assert config.baseline is not None
                train_on_all(data, config.baseline, seed=config.seed, device=config.device, stages=stages)
