"""``python -m pate_torch`` is ``pate``."""

import sys

from pate_torch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
