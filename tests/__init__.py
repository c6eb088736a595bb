"""The tests: folders as in pate_torch; ``privacy`` tries to break the guarantee, ``end_to_end`` runs it all.

``benchmarks`` checks what lies in the folder of that name: replications of the papers' tables, and their theorems.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
