"""The private folder of a run and its TensorBoard: votes may be seen here, nothing written here may be published."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from pate_torch.core.files import write_atomically
from pate_torch.privacy.sensitive import Votes
from pate_torch.release.curves import Curves
from pate_torch.release.figures import number_points, thin_points
from pate_torch.release.membership import MembershipResult

OWNER_ONLY_MODE = 0o700
OWNER_ONLY_FILE_MODE = 0o600

README_TEMPLATE = """PRIVATE: do not publish, do not copy to where others can read it.

{content}

What lies here was computed from private records without noise, and no privacy guarantee covers it. Choosing a
parameter of a later release after a look at it is a release too, one that no ledger charges.
What may be published lies in the folder `release` of a run.
"""

FOLDER_CONTENTS = {
    "run": "A run's private side: votes, teachers' curves, accuracies, what an attack on the student found, and\n"
    "data-dependent prices (they depend on the votes, so they may not be published as a guarantee).",
    "teachers": "An ensemble: the teachers' weights, how their shares were drawn, and their votes on public points. "
    "It belongs to the ledger of the same root: without that ledger it is refused.",
    "store": "The root of all runs: teachers, ledger and runs. Only the folders `release` below it may be published.",
}


def make_private_folder(path: Path, content: str = "run") -> Path:
    """Create or tighten ``path``, with mode 0700 and a README; ``content``: a key of FOLDER_CONTENTS or a sentence."""
    path.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY_MODE)
    os.chmod(path, OWNER_ONLY_MODE)  # mkdir leaves an existing folder as it was, and obeys the umask
    readme = path / "README.txt"
    write_atomically(readme, README_TEMPLATE.format(content=FOLDER_CONTENTS.get(content, content)))
    return path


LAYOUT = {
    "Teachers: mean, least and greatest": {
        metric: ["Margin", [f"teachers/{metric}_{statistic}" for statistic in ("mean", "min", "max")]]
        for metric in ("loss", "accuracy")
    },
    "Votes": {"share of questions answered": ["Multiline", ["votes/answered_share$"]]},
}
"""Of TensorBoard's page of custom scalars."""


class PrivateWriter:
    """PRIVATE. Writes private/tensorboard: the teachers' learning curves and agreement, the questions answered.

    Args:
        folder: The folder for the events.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # loaded by runs that write one

        make_private_folder(folder)
        self.writer = SummaryWriter(str(folder))
        self.writer.add_text("PRIVATE", README_TEMPLATE.format(content=FOLDER_CONTENTS["run"]))
        self.writer.add_custom_scalars(LAYOUT)
        self.writer.flush()
        for file in folder.glob("events.out.tfevents.*"):
            file.chmod(OWNER_ONLY_FILE_MODE)  # the folder is closed already; a copy of the file alone should be, too
        self.curves = Curves(self.writer)

    def log(self, tag: str, value: float, step: int) -> None:
        """PRIVATE. A ``protocols.Log`` for the teachers' training."""
        self.curves.log(tag, value, step)

    def log_losses(self, step: int, loss_K: Tensor) -> None:
        """PRIVATE. The distribution of the teachers' losses, [K], at a step."""
        self._log_distribution("teachers/loss", loss_K, step)

    def log_accuracies(self, accuracy_K: Tensor, step: int = 0) -> None:
        """PRIVATE. The distribution of the teachers' accuracies, [K]."""
        self._log_distribution("teachers/accuracy", accuracy_K, step)

    def log_votes(self, votes: Votes, answered_Q: Tensor) -> None:
        """PRIVATE. The gaps of the questions asked, and the share of them answered (bool [Q])."""
        self._log_distribution("votes/gap", votes.compute_gaps(), 0)
        self._log_distribution("votes/top", votes.compute_top_counts(), 0)
        if len(answered_Q):
            share_Q = answered_Q.cpu().double().cumsum(0) / torch.arange(1, len(answered_Q) + 1)
            for question, share in thin_points(number_points(share_Q.tolist())):
                self.curves.log("votes/answered_share", share, int(question))

    def log_membership(self, membership: MembershipResult) -> None:
        """PRIVATE. The membership test, beside its bounds and a model without privacy."""
        text = "\n\n".join(f"{name.strip()}: {value}" for name, value in membership.format_lines().items())
        self.writer.add_text("membership", text)

    def _log_distribution(self, tag: str, values: Tensor, step: int) -> None:
        finite = values.double()[values.double().isfinite()]
        if len(finite):  # a diverged teacher must not end the run: its vote is one among K
            self.writer.add_histogram(tag, finite.cpu().numpy(), step)

    def close(self) -> None:
        """Close the file; single numbers stand in text."""
        for tag, value in self.curves.pop_single_values().items():
            self.writer.add_text(tag, f"{value:.6g}")
        self.writer.close()
