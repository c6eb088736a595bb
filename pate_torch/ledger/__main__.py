"""``python -m pate_torch.ledger``."""

import sys

from pate_torch.ledger.command import main

if __name__ == "__main__":
    sys.exit(main())
