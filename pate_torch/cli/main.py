"""The ``pate`` command, which runs the commands of the package. ``pate --help`` imports only the standard library."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "demo": ("pate_torch.cli.train", "train", "train on a bundled data set, in half a minute"),
    "train": ("pate_torch.cli.train", "train", "train teachers, release labels and fit a student, as train.py does"),
    "label": ("pate_torch.cli.label", "main", "release labels from a file of votes, without a student"),
    "audit": ("pate_torch.audit", "main", "measure a lower bound on the epsilon of a mechanism"),
    "plan": ("pate_torch.cli.plan", "main", "compute the cost of settings before anything is charged"),
    "diagnose": ("pate_torch.cli.plan", "diagnose", "measure teachers on public data, and recommend K and a mechanism"),
    "verify": ("pate_torch.verify.command", "main", "recompute the claims of any release by independent code"),
    "ledger": ("pate_torch.cli.ledger", "main", "show, check or copy the privacy ledger, or change a cap"),
    "learn": ("pate_torch.cli.learn", "main", "learn and release a hypothesis by an algorithm of the papers"),
    "predict": ("pate_torch.cli.predict", "main", "predict new records or images by a released student"),
    "export": ("pate_torch.students.store", "main", "export a released student for other programs"),
    "runs": ("pate_torch.cli.list_runs", "main", "list past runs with their epsilon and accuracy"),
}

EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141
"""Exit codes of shells for programs that SIGINT or SIGPIPE ended: 128 plus the number of the signal."""


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit code. The command ends silently if its output is closed, as by ``| head``."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting torch threads sleep and leave cores to other programs
    os.umask(os.umask(0o022) | 0o022)  # other users may not write into the files of a run
    try:
        code = command()
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        # A run that was open has told what it charged (``release.charges``).
        message = "interrupted: no run was open. Finished runs stay charged (pate ledger show). Repeat the command."
        print(str(interrupt) or message, file=sys.stderr)
        return EXIT_INTERRUPTED
    except AttributeError:
        if sys.stdout is not None:
            raise
        return EXIT_BROKEN_PIPE  # the program was started without a standard output
    except BrokenPipeError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # else Python writes its buffers to the closed output at exit
            os.dup2(devnull, stream.fileno())
        return EXIT_BROKEN_PIPE
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, or 2 if the command does not exist."""
    return run_command(lambda: _dispatch(*(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(name: str | None = None, *words: str) -> int:
    if name in (None, "-h", "--help", "help"):
        print("usage: pate COMMAND ...\n\nDifferentially private deep learning by PATE.\n")
        for command, (_, _, summary) in COMMANDS.items():
            print(f"  {command:<{max(map(len, COMMANDS))}}  {summary}")
        print("\nFor the options of a command, run pate COMMAND --help. Teachers and the ledger are stored in a folder")
        print("of each user, and runs in outputs/. The environment variable PATE_HOME sets one folder for all of them.")
        return 2 if name is None else 0
    if name not in COMMANDS:
        import difflib

        suggestions = difflib.get_close_matches(str(name), COMMANDS, n=1)
        hint = f" Did you mean {suggestions[0]!r}?" if suggestions else ""
        print(f"error: there is no command {name!r}. Commands are {', '.join(COMMANDS)}.{hint}", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    saved_argv = sys.argv
    sys.argv = [f"pate {name}", *words]  # Hydra and argparse read the arguments from sys.argv
    try:
        return int(getattr(importlib.import_module(module), function)() or 0)
    finally:
        sys.argv = saved_argv
