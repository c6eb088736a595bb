r"""Learn a hypothesis by an algorithm of the papers, and release the hypothesis.

    pate learn sspp people.csv dataset.label=income dataset.name=people dataset.publish_split=true \
        --epsilon .5 --below-guarantee
    pate learn bounds --dimension 10          # the number of records that each algorithm needs; reads no record

Settings (key=value) for the data set, the account and the run's folder are those of train.py. Neighbors differ in one
replaced record, and the number of records is public (partition=replace_one). Of several classes, each is learned
against the rest at an equal share of epsilon. ``pate predict`` applies the released hypothesis. The exit code is 0 if
the command succeeds, and 2 if it refuses the request, in which case nothing is charged.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from pate_torch.cli import hydra_config
from pate_torch.cli.train import format_error
from pate_torch.config import RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.hypotheses.algorithms import ALGORITHMS, LearnOptions
from pate_torch.hypotheses.release import HypothesisMethod
from pate_torch.pipeline import run

REPLACE_ONE_SETTING = "partition=replace_one"


def compose_config(name: str, settings: Sequence[str]) -> RunConfig:
    """Compose the configuration of a run of this algorithm.

    Args:
        name: Name of the algorithm.
        settings: At most one path of a table, and key=value settings.

    Raises:
        ValueError: There are two tables or no data set, or the partition is not replace_one.
    """
    tables = [word for word in settings if "=" not in word]
    keys = [word.partition("=")[0] for word in settings]
    overrides = [word for word in settings if "=" in word]
    if len(tables) > 1:
        fix = "Set dataset.public_path to the file of public records."
        raise checks.error("table", tables[1], "is a second table, and only one is allowed", fix)
    if tables:
        overrides = ["dataset=csv", f"dataset.path={tables[0]}", *overrides]
        if "dataset.public_path" not in keys and "dataset.roles" not in keys:
            overrides.append("dataset.roles=position")
    elif "dataset" not in keys:
        fix = "Use pate learn ALGORITHM table.csv dataset.label=<column>, or set dataset=<name>."
        raise checks.error("table", None, "must be the path of a table", fix)
    if "partition" in keys and REPLACE_ONE_SETTING not in overrides:
        (partition,) = (word.partition("=")[2] for word in overrides if word.startswith("partition="))
        message = "must be replace_one, because these algorithms protect a replaced record"
        raise checks.error("partition", partition, message, f"Leave it out, or set {REPLACE_ONE_SETTING}.")
    cfg = hydra_compose(
        "config", overrides=["student=none", "baseline=false", "membership=none", REPLACE_ONE_SETTING, *overrides]
    )
    folder = Path(run_folders.get_run_folder(cfg.paths.root, cfg.dataset.name, name)) / run_folders.get_run_id()
    return hydra_config.build_run_config(cfg, Path(cfg.paths.run) if "paths.run" in keys else folder)


def _make_parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<20}{algorithm.description}" for name, algorithm in ALGORITHMS.items())
    parser = argparse.ArgumentParser(
        prog="pate learn",
        description=f"{__doc__}\nAlgorithms:\n{names}\n  {'bounds':<20}the number of records that each of them needs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("algorithm", choices=[*ALGORITHMS, "bounds"], metavar="ALGORITHM")
    parser.add_argument("settings", nargs="*", metavar="TABLE | key=value")
    for option in dataclasses.fields(LearnOptions):
        kind = int if option.default is None else type(option.default)
        text = option.metadata["help"] + ("" if option.default is None else f" (default: {option.default})")
        choices = option.metadata["choices"]
        parser.add_argument(f"--{option.name}", type=kind, default=option.default, choices=choices, help=text)
    below_help = "continue if no accuracy is promised"
    parser.add_argument("--below-guarantee", action="store_true", help=below_help)
    dimension_help = "bounds: VC dimension, or number of parameters (default: 1)"
    parser.add_argument("--dimension", type=int, default=1, help=dimension_help)
    return parser


def _print_bounds(options: LearnOptions, dimension: int) -> None:
    checks.integer("dimension", dimension, low=1)
    print(
        "Private records that each algorithm needs "
        f"(epsilon {options.epsilon:g}, replace_one, unit record; dimension {dimension})\n"
    )
    for name, algorithm in ALGORITHMS.items():
        n, promise = algorithm.compute_size(options, dimension)
        print(f"  {name:<20}{f'{math.ceil(n):,}' if n < 1e9 else f'{n:.2g}':>16}  {promise}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = _make_parser().parse_intermixed_args(arguments)
    try:
        options = LearnOptions(
            **{field.name: getattr(parsed, field.name) for field in dataclasses.fields(LearnOptions)}
        )
        if parsed.algorithm == "bounds":
            _print_bounds(options, parsed.dimension)
            return 0
        with hydra_config.open_configuration():
            config = compose_config(parsed.algorithm, parsed.settings)
        if config.method.noise != "torch":
            problem = "must be torch, because these algorithms draw continuous noise"
            raise checks.error("noise", config.method.noise, problem, "Leave out noise.")
        method = HypothesisMethod(
            algorithm_name=parsed.algorithm,
            options=options,
            seed=config.seed,
            below_guarantee=parsed.below_guarantee,
        )
        run(dataclasses.replace(config, method=method))
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        is_value_error = isinstance(error, ValueError) and not isinstance(
            error, HydraException | OmegaConfBaseException
        )
        print(f"error: {error if is_value_error else format_error(error)}", file=sys.stderr)
        return 2
    return 0
