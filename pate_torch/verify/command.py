"""``pate verify RELEASE``: recomputes every claim of a release with code that is independent of the code that made it.

    pate verify outputs/runs/digits/gaussian/<run>
    pate verify outputs/runs/digits/gaussian/<run> --ledger
    pate verify --claim claim.yaml

It prints one line for each check. A claim below the lower bound on the cost of its events FAILS; a claim more than 1 %
above the upper bound is loose. The exit code is 0 if all checks pass, 1 if one fails, 2 if there is nothing to check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pate_torch.core import run_folders
from pate_torch.verify import ledger, release
from pate_torch.verify.claims import verify_claim
from pate_torch.verify.release import Check

EXIT_OK, EXIT_FAILED, EXIT_NOTHING_TO_CHECK = 0, 1, 2


def verify_release(path: Path, ledger_path: Path | None = None) -> Iterator[Check]:
    """Run every check of a release folder.

    Args:
        path: The folder of a run or of its release.
        ledger_path: The ledger that it was charged to; None if it is not available.

    Raises:
        ValueError: There is nothing to check.
    """
    folder = release.ReleaseFolder.load(path)
    for check in release.run_checks(folder):
        yield check
        if check.name == "schema" and not check.is_ok:
            return
    if ledger_path is not None:
        yield from ledger.run_checks(folder, ledger_path)
    else:
        message = "the entries, the account's terms, other charges and the cap need the ledger (--ledger)"
        yield Check("ledger", True, message, is_checked=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    description = (__doc__ or "").split("\n\n", 1)[0].split(": ", 1)[1]
    parser = argparse.ArgumentParser(prog="pate verify", description=description)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("release", type=Path, nargs="?", help="the folder of a run or of its release")
    help_text = "a claim about any mechanism (docs/verify.md)"
    target.add_argument("--claim", type=Path, metavar="CLAIM.yaml", help=help_text)
    own_ledger = run_folders.check_root(run_folders.get_home_folder()) / "ledger.sqlite"
    help_text = "the ledger that the release was charged to (without a path: your own)"
    parser.add_argument("--ledger", type=Path, nargs="?", const=own_ledger, help=help_text)
    options = parser.parse_args(arguments)
    try:
        checks = verify_claim(options.claim) if options.claim else verify_release(options.release, options.ledger)
        is_ok = True
        for check in checks:
            print(check, flush=True)
            is_ok &= check.is_ok
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOTHING_TO_CHECK
    return EXIT_OK if is_ok else EXIT_FAILED
