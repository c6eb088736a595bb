"""The ``pate`` command, which runs the commands of the package.

A command is imported after its arguments were read, so that no help imports PyTorch, SciPy or Hydra.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path

from pate_torch.cli.arguments import ARGUMENTS, COMMANDS, SUBCOMMANDS
from pate_torch.components import COMPONENTS
from pate_torch.core.run_folders import find_config_folder

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
        for command, (_, summary) in COMMANDS.items():
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
    if name in ("demo", "train"):
        return _train(name, words)
    options = _parse_arguments(name, words)
    try:
        return int(importlib.import_module(COMMANDS[name][0]).main(options))
    except BrokenPipeError:
        raise  # ``run_command`` ends silently
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        message = "this command needs cryptography. Install it: pip install 'pate-torch[sites]'."
    except (ValueError, OSError, EOFError, BrokenExecutor) as error:  # EOFError: a dialogue was not answered
        message = str(error)
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            file = Path(error.filename)
            pairs = ((key, value if isinstance(value, list) else [value]) for key, value in vars(options).items())
            key = next((key for key, values in pairs if file in values), "file")
            message = f"{key}={str(file)!r}: does not exist. Check its name and the working folder."
    print(f"error: {message}", file=sys.stderr)
    return 2


def _train(name: str, words: Sequence[str]) -> int:
    if words in (("--help",), ("-h",)):
        _print_groups(name)
        return 0
    saved_argv = sys.argv
    sys.argv = [f"pate {name}", *words]  # Hydra reads the arguments from sys.argv
    try:
        from pate_torch.cli.train import train

        return train()
    finally:
        sys.argv = saved_argv


def _parse_arguments(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. Its help is the docstring of its module, which is not imported."""
    module, summary = COMMANDS[name]
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    lines = docstring.replace("``", "").splitlines()[1:]
    examples_of_others = tuple(f"    pate {other} " for other in COMMANDS if other != name)
    text = "\n".join(line for line in lines if not line.startswith(examples_of_others))
    kind = argparse.RawDescriptionHelpFormatter
    description = f"{_make_sentence(summary)}\n{text}"
    parser = argparse.ArgumentParser(prog=f"pate {name}", description=description, formatter_class=kind)
    if name in SUBCOMMANDS:
        commands = parser.add_subparsers(dest="command", required=True)
        for command, help_text in SUBCOMMANDS[name].items():
            each = commands.add_parser(command, help=help_text, description=_make_sentence(help_text))
            for argument, options in ARGUMENTS[f"{name} {command}"]:
                each.add_argument(argument, **options)
        return parser.parse_args(words)
    for argument, options in ARGUMENTS[name]:
        parser.add_argument(argument, **options)
    parser.set_defaults(command=name)
    return parser.parse_intermixed_args(words)


def _make_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _print_groups(name: str) -> None:
    """Print the options of each group and the common keys. With settings beside --help, Hydra prints all their keys."""
    folder = Path(find_config_folder())
    files = {group: [path.stem for path in (folder / group).glob("*.yaml")] for group in ("dataset", "experiment")}
    print(f"usage: pate {name} GROUP=OPTION KEY=VALUE ...\n\nGroups and their options:")
    for group, options in sorted({**COMPONENTS, **files, "features": [*COMPONENTS["features"], "none"]}.items()):
        print(f"  {group}: {', '.join(sorted(options))}")
    for file in ("config.yaml", "account.yaml"):
        print(f"\n{(folder / file).read_text(encoding='utf-8').partition('hydra:')[0].strip()}")
    print(
        f"\npate {name} dataset=svhn --help prints all keys of a run. Fields: python -m pydoc <_target_ of the group>"
    )
