"""The ``pate`` command, which runs the commands of the package.

A command is imported after its arguments were read, so that no help imports PyTorch, SciPy or Hydra.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from pate_torch.components import COMPONENTS
from pate_torch.core.run_folders import find_config_folder
from pate_torch.hypotheses import DESCRIPTIONS, LearnOptions
from pate_verify import ARGUMENTS as VERIFY_ARGUMENTS

COMMANDS = {
    "demo": ("pate_torch.cli.train", "train", "train on a bundled data set, in half a minute"),
    "train": ("pate_torch.cli.train", "train", "train teachers, release labels and fit a student, as train.py does"),
    "label": ("pate_torch.cli.label", "main", "release labels from a file of votes, without a student"),
    "audit": ("pate_torch.audit", "main", "measure a lower bound on the epsilon of a mechanism"),
    "plan": ("pate_torch.cli.plan", "main", "compute the cost of settings before anything is charged"),
    "diagnose": ("pate_torch.cli.plan", "main", "measure teachers on public data, and recommend K and a mechanism"),
    "verify": ("pate_torch.cli.verify", "main", "recompute the claims of any release by independent code"),
    "owner": ("pate_torch.cli.owner", "main", "write the statements of the owner that releases publish"),
    "ledger": ("pate_torch.cli.ledger", "main", "show, check or copy the privacy ledger, or change a cap"),
    "synthesize": ("pate_torch.cli.synthesize", "main", "release a synthetic table"),
    "site": ("pate_torch.cli.site", "main", "take part in a release of several sites that do not trust each other"),
    "join": (
        "pate_torch.cli.join",
        "main",
        "add up the answers of several sites, and release what is trained on the sum",
    ),
    "learn": ("pate_torch.cli.learn", "main", "learn and release a hypothesis by an algorithm of the papers"),
    "predict": ("pate_torch.cli.predict", "main", "predict new records or images by a released student"),
    "export": ("pate_torch.students.store", "main", "export a released student for other programs"),
    "runs": ("pate_torch.cli.list_runs", "main", "list past runs with their epsilon and accuracy"),
}


_JSON = ("--json", dict(action="store_true", help="print one JSON object"))
_STUDENT = ("run", dict(type=Path, help="folder of a run or of a release, or file of a student"))
_VOTES = "votes=FILE (predictions [K, P] or aggregated counts [P, C]), num_classes=, dataset.name=, ..."
_PUBLIC = "file of labeled public records, and settings of train.py and pilot.*"
_NEIGHBORS = "difference between neighbors: a unit more or less, or another unit (default: add_remove)"
_NOISE = "continuous noise, or noise of exact integers (default: torch)"
_UNKNOWN = "refuse unknown categories, or encode them as zeros (default: error)"
_TABLE = "file of the private table, and settings of train.py"
_ALGORITHMS = {**DESCRIPTIONS, "bounds": "print the sample size that each algorithm needs"}

ARGUMENTS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "label": (("settings", dict(nargs="*", metavar="key=value", help=_VOTES)),),
    "audit": (
        ("settings", dict(nargs="+", metavar="key=value", help="mechanism=<name>, and keys of this mechanism")),
        ("--runs", dict(type=int, help="runs on each side of each pair")),
        ("--queries", dict(type=int, help="queries in each run")),
        ("--delta", dict(type=float, default=1e-5, help="delta of the claimed epsilon (default: 1e-05)")),
        ("--confidence", dict(type=float, default=0.95, help="confidence of the lower bound (default: .95)")),
        ("--output", dict(type=Path, help="also write the JSON object to this file, for owner.yaml")),
        _JSON,
    ),
    "plan": (("settings", dict(nargs="*", metavar="PUBLIC | key=value", help=_PUBLIC)), _JSON),
    "verify": VERIFY_ARGUMENTS,
    "owner": (("account", dict(help="name of the account (dataset.name, or account= in Python)")),),
    "learn": (
        ("algorithm", dict(choices=_ALGORITHMS, help="; ".join(f"{key}: {_ALGORITHMS[key]}" for key in _ALGORITHMS))),
        ("settings", dict(nargs="*", metavar="TABLE | key=value", help=_TABLE)),
        *((f"--{option.name}", dict(default=option.default, **option.metadata)) for option in fields(LearnOptions)),
        ("--below-guarantee", dict(action="store_true", help="continue with too few records for the theorem")),
        ("--sweep", dict(metavar="KEY=VALUES", help="epsilon=.1,.5,1 or n=500,1000: risks on public data")),
        ("--repeats", dict(type=int, default=30, help="number of draws of --sweep (default: 30)")),
        ("--output", dict(type=Path, default=Path("sweep"), help="folder of --sweep (default: sweep)")),
        ("--dimension", dict(type=int, default=1, help="bounds: VC dimension, or number of parameters (default: 1)")),
    ),
    "synthesize": (
        ("table", dict(type=Path, help="CSV or Parquet file of private rows")),
        ("--epsilon", dict(type=float, required=True, help="epsilon of the release")),
        ("--account", dict(required=True, help="account of the private rows in the ledger")),
        ("--out", dict(type=Path, required=True, help="new folder for everything that may be published")),
        ("--schema", dict(type=Path, help="YAML file that declares the columns")),
        ("--public", dict(type=Path, help="file of public rows, off which the columns are read")),
        ("--target", dict(metavar="COLUMN", help="column whose relations with pairs of columns are kept")),
        ("--group", dict(metavar="COLUMN", help="column that names the privacy unit, such as patient")),
        ("--rounds", dict(type=int, default=0, help="rounds of votes for candidate rows (default: 0)")),
        ("--delta", dict(type=float, default=1e-5, help="delta of the guarantee (default: 1e-05)")),
        ("--cap", dict(type=float, help="largest total epsilon of a new account (default: 10)")),
        ("--num-records-about", dict(type=int, help="approximate number of private units, if it is public")),
        ("--adjacency", dict(default="add_remove", choices=("add_remove", "replace_one"), help=_NEIGHBORS)),
        ("--noise", dict(default="torch", choices=("torch", "discrete"), help=_NOISE)),
        ("--allow-refit", dict(action="store_true", help="charge an account that has a release already")),
        ("--separator", dict(default=",", help="separator of the values in a CSV file (default: a comma)")),
    ),
    "export": (
        _STUDENT,
        ("--output", dict(type=Path, help="path of the program (default: beside the release folder)")),
        ("--format", dict(default="torch", choices=("torch", "onnx"), help="kind of program (default: torch)")),
    ),
    "predict": (
        _STUDENT,
        ("records", dict(type=Path, help="CSV, Parquet or .npy file, image, or folder of images")),
        ("--id", dict(metavar="COLUMN", help="column that names the rows (default: row numbers)")),
        ("--unknown", dict(default="error", choices=("error", "zeros"), help=_UNKNOWN)),
        ("--separator", dict(default=",", help="separator of the values in a CSV file (default: a comma)")),
        ("--columns", dict(help="names of the columns, separated by commas, if the file has no header")),
        ("--no-quotes", dict(dest="quotes", action="store_false", help="read quotation marks as part of values")),
        ("--weights", dict(help="file of the encoder's weights, if the release does not contain them")),
        ("--tokenizer", dict(help="file of the encoder's tokenizer, if the release does not contain it")),
        ("--output", dict(type=Path, help="file for the table, .csv or .parquet (default: the terminal)")),
        ("--workers", dict(type=int, default=1, help="number of processes (default: 1)")),
    ),
}
"""Arguments of the commands whose function takes them. The other functions read ``sys.argv``."""
ARGUMENTS["diagnose"] = ARGUMENTS["plan"]

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
    if name in ARGUMENTS:
        options = _parse_arguments(name, words)
        try:
            return int(getattr(importlib.import_module(module), function)(options))
        except BrokenPipeError:
            raise  # ``run_command`` ends silently
        except (ValueError, OSError, BrokenExecutor) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if function == "train" and words in (("--help",), ("-h",)):
        _print_groups()
        return 0
    saved_argv = sys.argv
    sys.argv = [f"pate {name}", *words]  # Hydra and argparse read the arguments from sys.argv
    try:
        return int(getattr(importlib.import_module(module), function)() or 0)
    finally:
        sys.argv = saved_argv


def _parse_arguments(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. Its help is the docstring of its module, which is not imported."""
    module, _, summary = COMMANDS[name]
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    description = f"{summary[0].upper()}{summary[1:]}.\n" + docstring.partition("\n")[2].replace("``", "")
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"pate {name}", description=description, formatter_class=kind)
    for argument, options in ARGUMENTS[name]:
        parser.add_argument(argument, **options)
    parser.set_defaults(command=name)
    return parser.parse_intermixed_args(words)


def _print_groups() -> None:
    """Print the options of each group and the common keys. With settings beside --help, Hydra prints all their keys."""
    folder = Path(find_config_folder())
    files = {group: [path.stem for path in (folder / group).glob("*.yaml")] for group in ("dataset", "experiment")}
    print("usage: pate train GROUP=OPTION KEY=VALUE ...\n\nGroups and their options:")
    for group, options in sorted({**COMPONENTS, **files, "features": [*COMPONENTS["features"], "none"]}.items()):
        print(f"  {group}: {', '.join(sorted(options))}")
    for file in ("config.yaml", "account.yaml"):
        print(f"\n{(folder / file).read_text(encoding='utf-8').partition('hydra:')[0].strip()}")
    print("\npate train dataset=svhn --help prints all keys of a run. Fields: python -m pydoc <_target_ of the group>")
