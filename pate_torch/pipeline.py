"""The whole run of ``train.py``, from private records to a released student.

    method -> votes, counts, gradients -> mechanism <- budget | released labels -> student -> report
    PRIVATE                                                   | may be published

All values left of the bar are private. Values pass the bar only through a mechanism, whose cost was reserved before
any noise was drawn.
"""

from __future__ import annotations

from dataclasses import replace

from pate_torch.config import DataSplits, RunConfig
from pate_torch.core import ranks
from pate_torch.core.device import deterministic_mode
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.opening import AlternativeFormatter, make_inputs
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.release.report import ReleaseReport
from pate_torch.session import ReleaseSession


def run(config: RunConfig, format_alternative: AlternativeFormatter | None = None) -> ReleaseReport | None:
    """Prepare the method, release its answers under differential privacy, and train the student that may be published.

    Args:
        config: Choices of the run.
        format_alternative: Function that suggests other settings if noise outweighs the votes. None for general advice.

    Returns:
        Report of the release. None on ranks above 0, which only train teachers and count votes.

    Raises:
        ValueError: A choice cannot work. Nothing has been charged.
        BudgetExceeded: The account's cap does not admit this run.
    """
    config = replace(config, device=ranks.get_local_device(config.device))
    if not ranks.is_main():
        run_worker_rank(config)
        return None
    with ReleaseSession.open(config, format_alternative=format_alternative) as session:
        written = session.run()
        student = session.test(session.fit(written))
        report = session.publish(written, student)
    session.finish()  # last, because closing the session writes buffered files
    ranks.broadcast_object(False)  # ends the loops of the other ranks
    return report


def run_worker_rank(config: RunConfig) -> None:
    """Do the part of a rank above 0 under ``torchrun``: train teachers and count votes, without noise or ledger."""
    stages = Stages(quiet=True)
    data = DataSplits.from_config(config, stages).data
    facts = DatasetFacts.from_dataset(data, config.partition)
    with deterministic_mode(config.device):
        while ranks.broadcast_object():
            config.method.assist(make_inputs(config, data, facts, stages, StageTimer(), None))
