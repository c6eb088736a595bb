"""PATE from private data to a released student: compose a configuration, hand over to the pipeline."""

import sys

from pate_torch.cli.train import train

if __name__ == "__main__":
    sys.exit(train())
