"""Options of commands that read records or points: the file of the data, and the files of an encoder."""

# What imports torch is imported inside functions, so that the help of a command is fast.
from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

Argument = tuple[str, dict[str, Any]]
"""Name of an argument of a command -> options of ``ArgumentParser.add_argument``."""

ENCODER_ARGUMENTS: tuple[Argument, ...] = tuple(
    (f"--{name}", dict(type=Path, help=f"file of the encoder's {name}, if the round names an encoder"))
    for name in ("weights", "tokenizer")
)
DATA_ARGUMENTS: tuple[Argument, ...] = (
    ("--data", dict(type=Path, required=True, help="private table, image folder or .npz file")),
    ("--group", dict(metavar="REGEX", help="REGEX that finds the unit in a file name")),
    ("--separator", dict(default=",", help="separator of a CSV file (default: a comma)")),
    *ENCODER_ARGUMENTS,
)


def make_data_reader(parsed: argparse.Namespace) -> Any:
    """Make the function that reads the private data, given ``label``, ``unit`` and ``text`` of ``read_columns``."""
    from pate_torch.sites.points import read_columns

    return partial(read_columns, "data", parsed.data, parsed.separator, pattern=parsed.group)


def get_encoder_files(parsed: argparse.Namespace) -> dict[str, Path] | None:
    """Return the paths of the encoder's files, or None if there are none."""
    files = {"weights": parsed.weights, "tokenizer": parsed.tokenizer}
    return {name: path for name, path in files.items() if path is not None} or None
