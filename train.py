"""Runs PATE from private data to a released student, with a configuration composed by Hydra."""

import sys

from pate_torch.cli.main import run_command


def run() -> int:
    """Import the command and run it. run_command also handles Ctrl-C during the import, which is slow."""
    from pate_torch.cli.train import train

    return train()


if __name__ == "__main__":
    sys.exit(run_command(run))
