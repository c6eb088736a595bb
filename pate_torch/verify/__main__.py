"""``python -m pate_torch.verify``."""

import sys

from pate_torch.verify.command import main

if __name__ == "__main__":
    sys.exit(main())
