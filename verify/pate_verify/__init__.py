"""Independent verification of a release: its claims are recomputed by code that no other package uses."""

from pathlib import Path
from typing import Any

ARGUMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("release", dict(type=Path, nargs="?", help="the folder of a run or of its release")),
    ("--claim", dict(type=Path, metavar="CLAIM.yaml", help="a claim about any mechanism, in place of a release")),
    (
        "--ledger",
        dict(type=Path, nargs="?", const=Path(), help="ledger file of the release (without a path: PATE_LEDGER)"),
    ),
    ("--policy", dict(type=Path, metavar="POLICY.yaml", help="limits of the receiver, such as max_epsilon: 1")),
)
"""Arguments of the command, for argparse."""
