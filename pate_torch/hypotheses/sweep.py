"""Risk of an algorithm against epsilon or the number of records, on public data, with seeded noise and no account."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.files import write_atomically
from pate_torch.core.progress import Stages
from pate_torch.core.rng import make_numpy_generator
from pate_torch.hypotheses.algorithms import make_problems
from pate_torch.hypotheses.release import HypothesisMethod, make_logistic_student, make_rule_student
from pate_torch.hypotheses.sample import BelowGuaranteeWarning
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import DatasetFacts, drop_unusable, select
from pate_torch.release.renderer import Scale, to_strict_json
from pate_torch.release.statement import NOT_PRIVATE, make_environment


def run_sweep(config: RunConfig, method: HypothesisMethod, sweep: str, repeats: int) -> dict[str, Any]:
    """Learn ``repeats`` hypotheses at each value of ``sweep`` ("epsilon=.1,.5" or "n=100,1000"), and count errors."""
    if not config.dataset.declared_facts().is_benchmark:
        fix = "Set dataset.benchmark=true if every record is public."
        raise checks.error("dataset.benchmark", False, "must be true for --sweep, which shows errors on records", fix)
    key, _, text = sweep.partition("=")
    if not re.fullmatch(r"n=\d+(,\d+)*|epsilon=\d*\.?\d+(,\d*\.?\d+)*", sweep):
        raise checks.error("sweep", sweep, "must be numbers of epsilon or n", "Use epsilon=.1,.5,1 or n=100,1000.")
    values = [float(word) for word in text.split(",")]
    checks.integer("repeats", repeats, low=1)
    data = drop_unusable(config.dataset.load(), config.partition.adjacency)
    test, all_private, points = data.evaluation, data.private, []
    order = make_numpy_generator(config.seed, "learn", "sweep").permutation(len(all_private))
    make_student = make_logistic_student if method.algorithm.is_linear else make_rule_student
    checks.integer("test records", len(test.y), low=1, fix="Set dataset.test_path.")
    with Stages(quiet=config.quiet) as stages, warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowGuaranteeWarning)
        progress = stages(f"Learning by {method.algorithm_name}")
        for number, value in enumerate(values):
            size = checks.integer("n", int(value), low=1, high=len(all_private)) if key == "n" else len(all_private)
            private = select(all_private, order[:size])
            options = replace(method.options, epsilon=value) if key == "epsilon" else method.options
            facts = DatasetFacts.from_dataset(replace(data, private=private), config.partition)
            parts = make_problems(private, facts, options, config.seed, method.delta)
            risks: dict[str, list[float]] = {"test": [], "sample": []}
            for draw in range(repeats):
                noise = DryRunNoise(insecure_seed=(config.seed * len(values) + number) * repeats + draw)
                student = make_student(facts, [method.algorithm.learn(part, noise) for part in parts])
                for name, x, y in (("test", test.x, test.y), ("sample", private.x, private.y)):
                    risks[name].append(float((student.predict(x) != y).double().mean()))
            progress(number + 1, len(values))
            points.append({key: value, **{name: _summarize(draws) for name, draws in risks.items()}})
    note = f"{NOT_PRIVATE}: seeded noise, no account. Every record was declared public."
    return {"note": note, "algorithm": method.algorithm_name, "dataset": data.spec.name, "swept": key, "points": points}


def _summarize(draws: list[float]) -> dict[str, Any]:
    low, mean, high = float(np.quantile(draws, 0.05)), float(np.mean(draws)), float(np.quantile(draws, 0.95))
    return {"mean": mean, "low": low, "high": high, "draws": draws}


def write_sweep(sweep: dict[str, Any], folder: Path) -> None:
    """Print the table of a sweep, and write ``sweep.json`` and the plot ``sweep.svg``."""
    print(f"{sweep['note']}\nShare of errors: mean (5 % to 95 % of draws)\n")
    print(f"{sweep['swept']:>10}  {'on test records':<26}  on the records")
    for point in sweep["points"]:
        test, sample = ("{mean:.4f} ({low:.4f} to {high:.4f})".format(**point[name]) for name in ("test", "sample"))
        print(f"{point[sweep['swept']]:>10g}  {test}  {sample}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "sweep.json", to_strict_json(sweep))
    template = make_environment(autoescape=True).get_template("sweep.svg.jinja")
    write_atomically(folder / "sweep.svg", template.render(sweep=sweep, Scale=Scale, log10=math.log10))
    print(f"\nThe folder {folder} holds sweep.json and the plot sweep.svg.")
