"""The tests: folders as in pate_torch; ``privacy`` tries to break the guarantee, ``end_to_end`` runs it all."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
