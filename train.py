"""Runs PATE from private data to a released student, with a configuration composed by Hydra."""

import sys

from pate_torch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
