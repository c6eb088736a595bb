"""``pate verify RELEASE``: recomputes every claim of a release, independently of the code that made the claim.

    pate verify outputs/runs/digits/gaussian/<run>
    pate verify tumors --ledger --policy policy.yaml
    pate verify --claim claim.yaml

The command prints one line for each check, and a verdict. A claim below the lower bound on the cost of its events
FAILS. A claim more than 1 % above the upper bound is loose. The exit code is 0 if no check fails, 1 if a check or the
policy fails, and 2 if there is nothing to check. ``pate-verify`` does the same without this package.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pate_torch.core import run_folders
from pate_verify import command


def main(options: argparse.Namespace) -> int:
    """Run the command of the verifier, where ``--ledger`` without a path is the ledger of this user's store."""
    if options.ledger == Path() and not os.environ.get("PATE_LEDGER"):
        options.ledger = run_folders.find_home() / "ledger.sqlite"
    return command.run(options)
