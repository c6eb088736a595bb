"""The ``pate`` command: one word for every command of the package. Standard library only until one is chosen."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "demo": ("pate_torch.cli.train", "train", "a first run, on data that come with it: half a minute"),
    "train": ("pate_torch.cli.train", "train", "train teachers, label, fit a student: the same as train.py"),
    "label": ("pate_torch.cli.label", "main", "answer a file of votes and nothing more"),
    "audit": ("pate_torch.audit.command", "main", "what epsilon the executed mechanism is proven to spend"),
    "plan": ("pate_torch.cli.plan", "main", "what a choice would cost, before anything is spent"),
    "verify": ("pate_torch.verify.command", "main", "recompute a release's claims, or anybody's, by other code"),
    "ledger": ("pate_torch.cli.ledger", "main", "the privacy ledger: what was released, at what price, and its cap"),
    "learn": ("pate_torch.cli.learn", "main", "learn by an algorithm on a hypothesis class, and release it"),
    "predict": ("pate_torch.cli.predict", "main", "what a released student says of new records or images"),
    "export": ("pate_torch.students.store", "main", "a released student for use elsewhere"),
    "runs": ("pate_torch.cli.list_runs", "main", "past runs with their epsilon and accuracy"),
}

EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141
"""What a shell reports of a program that SIGINT or SIGPIPE ended: 128 and the number of the signal."""


def run_command(command: Callable[[], int]) -> int:
    """Run a command; its exit code. If its output is closed, as by ``| head``, the command ends silently.

    Threads of torch sleep while they wait for each other: spinning threads would keep processors from other processes.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read as torch is imported
    os.umask(os.umask(0o022) | 0o022)  # no other user may write into the files of a run
    try:
        code = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        message = "interrupted: what was charged stays charged (pate ledger show). Run the same command again to go on."
        print(message, file=sys.stderr)
        return EXIT_INTERRUPTED
    except AttributeError:
        if sys.stdout is not None:
            raise
        return EXIT_BROKEN_PIPE  # there is no standard output
    except BrokenPipeError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python would try again to write what is left
            os.dup2(devnull, stream.fileno())
        return EXIT_BROKEN_PIPE
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. 2: there is no such command."""
    return run_command(lambda: _dispatch(*(sys.argv[1:] if arguments is None else arguments)))


def _dispatch(name: str | None = None, *words: str) -> int:
    if name in (None, "-h", "--help", "help"):
        print("usage: pate COMMAND ...\n\nDifferentially private deep learning by PATE.\n")
        for command, (_, _, summary) in COMMANDS.items():
            print(f"  {command:<{max(map(len, COMMANDS))}}  {summary}")
        print("\npate COMMAND --help says more. Teachers and the ledger lie in a store of each user, runs in outputs/;")
        print("PATE_HOME puts all of them in one place.")
        return 2 if name is None else 0
    if name not in COMMANDS:
        import difflib

        suggestions = difflib.get_close_matches(str(name), COMMANDS, n=1)
        hint = f" Did you mean {suggestions[0]!r}?" if suggestions else ""
        print(f"error: there is no command {name!r} (there are {', '.join(COMMANDS)}).{hint}", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    saved_argv = sys.argv
    sys.argv = [f"pate {name}", *words]  # Hydra and argparse both read it
    try:
        return int(getattr(importlib.import_module(module), function)() or 0)
    finally:
        sys.argv = saved_argv
