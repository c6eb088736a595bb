"""Runs the command ``pate``, for ``python -m pate_torch``."""

import sys

from pate_torch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
