"""``python -m pate_torch.label``."""

import sys

from pate_torch.label.command import main

if __name__ == "__main__":
    sys.exit(main())
