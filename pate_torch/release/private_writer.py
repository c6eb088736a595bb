"""PRIVATE. The TensorBoard of a run: how teachers and student are trained, and the figures for the owner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pate_torch.core.files import PRIVATE_FILE_MODE, PRIVATE_README, create_private_folder
from pate_torch.privacy.sensitive import Votes

if TYPE_CHECKING:
    from pate_torch.release.private_metrics import PrivateMetrics

MAX_CURVE_POINTS = 300


class PrivateWriter:
    """PRIVATE. Writes private/tensorboard, the only TensorBoard of a run; nothing in it may be published.

    Args:
        folder: The folder for the event files.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and few commands need it

        create_private_folder(folder)
        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("PRIVATE", PRIVATE_README)
        self.writer.flush()
        for file in folder.glob("events.out.tfevents.*"):
            file.chmod(PRIVATE_FILE_MODE)  # the folder is closed already; a copy of the file alone should be, too

    def log(self, tag: str, value: float, step: int) -> None:
        """PRIVATE. Write one scalar; a ``core.progress.Log`` for the training of teachers and student."""
        self.writer.add_scalar(tag, value, step)

    def log_losses(self, step: int, loss_K: Tensor) -> None:
        """PRIVATE. Write the distribution of the teachers' losses, [K], at a step."""
        self._log_distribution("teachers/loss", loss_K, step)

    def log_votes(self, votes: Votes, answered_Q: Tensor) -> None:
        """PRIVATE. Write how the votes agree, and the share of the questions answered so far (bool [Q])."""
        self._log_distribution("votes/gap", votes.compute_gaps(), 0)
        self._log_distribution("votes/top", votes.compute_top_counts(), 0)
        share_Q = answered_Q.cpu().double().cumsum(0) / torch.arange(1, len(answered_Q) + 1)
        for q in range(0, len(share_Q), 1 + len(share_Q) // MAX_CURVE_POINTS):
            self.log("votes/answered_share", float(share_Q[q]), q + 1)

    def log_metrics(self, metrics: PrivateMetrics) -> None:
        """PRIVATE. Write the figures for the owner."""
        for name, value in vars(metrics).items():
            if isinstance(value, float):
                self.log(f"owner/{name}", value, 0)
        self.writer.add_text("owner", "\n\n".join(f"{name}: {value}" for name, value in metrics.format_rows().items()))

    def _log_distribution(self, tag: str, values: Tensor, step: int) -> None:
        finite = values.double()[values.double().isfinite()]
        if len(finite):  # a diverged teacher must not end the run: its vote is one among K
            self.writer.add_histogram(tag, finite.cpu().numpy(), step)

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()
