"""``python -m pate_torch.plan``."""

import sys

from pate_torch.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
