"""``python -m pate_torch.gpu_check``."""

import sys

from pate_torch.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
