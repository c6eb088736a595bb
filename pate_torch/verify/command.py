"""``pate verify RELEASE``: recomputes every claim of a release by code that shares nothing with what made it.

    pate verify outputs/runs/digits/gaussian/<run>
    pate verify outputs/runs/digits/gaussian/<run> --ledger
    pate verify --claim claim.yaml

One line a check. A claim below what the events cost at the very least FAILS; one more than 1 % above what they cost at
most is loose. Exit code 0: all hold; 1: one fails; 2: there is nothing to check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pate_torch.core import run_folders
from pate_torch.verify import claims, ledger, release
from pate_torch.verify.release import Check

OK, FAILS, NOTHING = 0, 1, 2


def verified(where: Path, ledger_path: Path | None = None) -> Iterator[Check]:
    """Every check of a release folder.

    Args:
        where: The folder of a run or of its release.
        ledger_path: The ledger that it was charged to; None: it is not at hand.

    Raises:
        ValueError: There is nothing to check.
    """
    folder = release.Folder.read(where)
    fits = release.check_schema(folder)
    yield fits
    if not fits.holds:
        return
    yield from release.checks(folder)
    if ledger_path is not None:
        yield from ledger.checks(folder, ledger_path)
    else:
        what = "the entries, the account's terms, other charges and the cap: the ledger alone shows them (--ledger)"
        yield Check("ledger", True, what, checked=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="pate verify", description=(__doc__ or "").split("\n\n", 1)[0].split(": ", 1)[1]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("release", type=Path, nargs="?", help="the folder of a run or of its release")
    what.add_argument(
        "--claim", type=Path, metavar="CLAIM.yaml", help="a claim about anybody's mechanism (docs/verify.md)"
    )
    own = run_folders.check_root(run_folders.get_home_folder()) / "ledger.sqlite"
    what_for = "the ledger that the release was charged to (without a path: your own)"
    parser.add_argument("--ledger", type=Path, nargs="?", const=own, help=what_for)
    options = parser.parse_args(arguments)
    try:
        found = claims.examine(options.claim) if options.claim else verified(options.release, options.ledger)
        holds = True
        for check in found:
            print(check, flush=True)
            holds &= check.holds
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOTHING
    return OK if holds else FAILS
