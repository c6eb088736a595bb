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
    "ledger": (
        "pate_torch.cli.ledger",
        "main",
        "the privacy ledger: what was released, at what price, and its cap",
    ),
    "learn": ("pate_torch.cli.learn", "main", "learn by an algorithm on a hypothesis class, and release it"),
    "predict": ("pate_torch.cli.predict", "main", "what a released student says of new records or images"),
    "export": ("pate_torch.students.store", "main", "a released student for use elsewhere"),
    "runs": ("pate_torch.cli.list_runs", "main", "past runs with their epsilon and accuracy"),
}


EXIT_BROKEN_PIPE = 141
"""What a shell reports of a program whose pipe was closed: 128 + SIGPIPE."""


EXIT_INTERRUPTED = 130
"""What a shell reports of a program that Ctrl-C ended: 128 + SIGINT."""


def format_usage() -> str:
    """What ``pate --help`` shows."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, _, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pate COMMAND ...",
            "",
            "Differentially private deep learning by PATE.",
            "",
            *lines,
            "",
            "pate COMMAND --help says more. Teachers and the ledger lie in a store of each user, runs in outputs/;",
            "PATE_HOME puts all of them in one place.",
        ]
    )


def run_command(command: Callable[[], int]) -> int:
    """Run a command; its exit code. Where its output is cut off, as by ``| head``, it ends silently.

    The threads of torch, which is not loaded yet, are told to sleep while they wait for each other: spinning threads
    would keep processors from the other processes of this machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.umask(os.umask(0o022) | 0o022)  # nobody else writes into what it leaves, whatever was set
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
    return run_command(lambda: _dispatch(arguments))


def _dispatch(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(format_usage())
        return 0 if words else 2
    name, command_words = words[0], words[1:]
    if name not in COMMANDS:
        import difflib

        suggestions = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {suggestions[0]!r}?" if suggestions else ""
        print(f"error: there is no command {name!r} (there are {', '.join(COMMANDS)}).{hint}", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    saved_argv = sys.argv
    sys.argv = [f"pate {name}", *command_words]  # Hydra and argparse both read it
    try:
        return int(getattr(importlib.import_module(module), function)() or 0)
    finally:
        sys.argv = saved_argv
