"""PATE from private data to a released student: compose a configuration, hand over to the pipeline."""

import sys

from pate_torch.cli.main import run_command


def run() -> int:
    """Import here, so that Ctrl-C ends in one line while torch is loaded, too."""
    from pate_torch.cli.train import train

    return train()


if __name__ == "__main__":
    sys.exit(run_command(run))
