"""``python -m pate_torch.learn``."""

import sys

from pate_torch.learn.command import main

if __name__ == "__main__":
    sys.exit(main())
