"""``python -m pate_torch.audit``."""

import sys

from pate_torch.audit.command import main

if __name__ == "__main__":
    sys.exit(main())
