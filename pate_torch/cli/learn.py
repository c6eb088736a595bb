r"""Learn a hypothesis by an algorithm of the papers, and release the hypothesis.

    pate learn sspp people.csv dataset.label=income dataset.name=people dataset.publish_split=true \
        --epsilon .5 --below-guarantee
    pate learn bounds --dimension 10          # sample size that each algorithm needs; reads no record
    pate learn exponential dataset=mushroom --sweep epsilon=.1,.5,1,2 --repeats 30      # public data, no account

Settings (key=value) are those of train.py: the data set, the account and the folder of the run. Neighbors differ in one
replaced record, and the number of records is public (partition=replace_one). With more than two classes, one hypothesis
is learned for each class against the rest, at an equal share of epsilon. ``pate predict`` applies the released
hypothesis. The exit code is 0 if the command succeeds, and 2 if an argument is refused before a charge.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from pate_torch.cli import hydra_config
from pate_torch.cli.train import report_refusals
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.hypotheses import LearnOptions
from pate_torch.hypotheses.algorithms import ALGORITHMS
from pate_torch.hypotheses.release import HypothesisMethod
from pate_torch.hypotheses.sweep import run_sweep, write_sweep
from pate_torch.pipeline import run


def compose_config(name: str, words: Sequence[str]) -> RunConfig:
    """Compose the configuration of a run of an algorithm from settings key=value and at most one path of a table."""
    tables = [word for word in words if "=" not in word]
    values = {key: value for key, _, value in (word.partition("=") for word in words if "=" in word)}
    if len(tables) > 1:
        fix = "Set dataset.public_path to the file of public records."
        raise checks.error("table", tables[1], "is a second table, and only one is allowed", fix)
    if tables:
        values = {"dataset": "csv", "dataset.path": tables[0], **values}
        if "dataset.public_path" not in values:
            values.setdefault("dataset.roles", "position")
    elif "dataset" not in values:
        fix = "Use pate learn ALGORITHM table.csv dataset.label=<column>, or set dataset=<name>."
        raise checks.error("table", None, "must be the path of a table", fix)
    if values.setdefault("partition", "replace_one") != "replace_one":
        problem = "must be replace_one, because these algorithms need a public number of records"
        raise checks.error("partition", values["partition"], problem, "Omit partition.")
    return hydra_config.compose_labeling([f"{key}={value}" for key, value in values.items()], name)


def _print_bounds(options: LearnOptions, dimension: int) -> None:
    checks.integer("dimension", dimension, low=1)
    terms = f"epsilon {options.epsilon:g}, replace_one, unit record; dimension {dimension}"
    print(f"Number of private records that each algorithm needs ({terms})\n")
    for name, algorithm in ALGORITHMS.items():
        n, promise = algorithm.compute_size(options, dimension)
        print(f"  {name:<20}{f'{math.ceil(n):,}' if n < 1e9 else f'{n:.2g}':>16}  {promise}")


@report_refusals
def main(parsed: argparse.Namespace) -> None:
    """Run the command."""
    fields = dataclasses.fields(LearnOptions)
    options = LearnOptions(**{field.name: getattr(parsed, field.name) for field in fields})
    if parsed.algorithm == "bounds":
        return _print_bounds(options, parsed.dimension)
    with hydra_config.open_configuration():
        config = compose_config(parsed.algorithm, parsed.settings)
    if config.method.noise != "torch":
        problem = "must be torch, because these algorithms draw continuous noise"
        raise checks.error("noise", config.method.noise, problem, "Omit noise.")
    method = HypothesisMethod(
        algorithm_name=parsed.algorithm,
        options=options,
        delta=config.privacy.delta,
        seed=config.seed,
        below_guarantee=parsed.below_guarantee,
    )
    if parsed.sweep is not None:
        return write_sweep(run_sweep(config, method, parsed.sweep, parsed.repeats), parsed.output)
    run(dataclasses.replace(config, method=method))
