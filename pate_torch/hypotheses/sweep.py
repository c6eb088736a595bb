"""Risk of an algorithm against epsilon or the number of records, on public data, with seeded noise and no account."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.files import write_atomically
from pate_torch.core.progress import Stages
from pate_torch.hypotheses.algorithms import make_problems
from pate_torch.hypotheses.release import HypothesisMethod, make_student
from pate_torch.hypotheses.sample import BelowGuaranteeWarning
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import DatasetFacts, drop_unusable, select
from pate_torch.release.renderer import Scale, to_strict_json
from pate_torch.release.statement import NOT_PRIVATE, make_environment

NOTE = f"{NOT_PRIVATE}: seeded noise, no account. Every record was declared public."


def run_sweep(
    config: RunConfig, method: HypothesisMethod, key: str, values: Sequence[float], repeats: int
) -> dict[str, Any]:
    """Learn ``repeats`` hypotheses at each value of ``key``, "epsilon" or "n", and measure their risks, for JSON.

    Raises:
        ValueError: The data are not declared public, there are no test records, or a value is out of range.
    """
    if not config.dataset.declared_facts().is_benchmark:
        fix = "Set dataset.benchmark=true if every record is public."
        raise checks.error("dataset.benchmark", False, "must be true for --sweep, which shows risks on records", fix)
    checks.one_of("sweep", key, ("epsilon", "n"))
    checks.integer("repeats", repeats, low=1)
    data, adjacency, points = config.dataset.load(), config.partition.adjacency, []
    data, test = drop_unusable(data, adjacency), data.evaluation
    checks.integer("test records", len(test.y), low=1, fix="Set dataset.test_path.")
    with Stages(quiet=config.quiet) as stages, warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowGuaranteeWarning)
        progress = stages(f"Learning by {method.algorithm_name}")
        for number, value in enumerate(values):
            options, private = method.options, data.private
            if key == "epsilon":
                options = replace(options, epsilon=value)
            else:
                checks.integer("n", value, low=1, high=len(private))
                private = select(private, np.random.default_rng(config.seed).permutation(len(private))[: int(value)])
            facts = DatasetFacts.from_dataset(replace(data, private=private), config.partition)
            parts = make_problems(private, facts, options, config.seed, method.delta)
            risks: dict[str, list[float]] = {"test": [], "sample": []}
            for draw in range(repeats):
                noise = DryRunNoise(insecure_seed=(config.seed * len(values) + number) * repeats + draw)
                student = make_student(method.algorithm, facts, [method.algorithm.learn(p, noise) for p in parts])
                for name, x, y in (("test", test.x, test.y), ("sample", private.x, private.y)):
                    risks[name].append(float((student.predict(x) != y).double().mean()))
                progress(number * repeats + draw + 1, len(values) * repeats)
            points.append({key: value, **{name: _summarize(draws) for name, draws in risks.items()}})
    return {"note": NOTE, "algorithm": method.algorithm_name, "dataset": data.spec.name, "swept": key, "points": points}


def _summarize(draws: list[float]) -> dict[str, Any]:
    low, high = np.quantile(draws, (0.05, 0.95)).tolist()
    return {"mean": float(np.mean(draws)), "low": low, "high": high, "draws": draws}


def write_sweep(sweep: dict[str, Any], folder: Path) -> None:
    """Print the table of a sweep, and write sweep.json and the plot sweep.svg."""
    key, points = sweep["swept"], sweep["points"]
    print(
        f"{NOTE}\nMean risk over draws, with the interval of the middle 90 % of draws\n\n{key:>10}  test{'':22}sample"
    )
    for point in points:
        cells = ["{mean:.4f} ({low:.4f} to {high:.4f})".format(**point[name]) for name in ("test", "sample")]
        print(f"{point[key]:>10g}  {cells[0]:<26}{cells[1]}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "sweep.json", to_strict_json(sweep))
    template = make_environment(autoescape=True).get_template("sweep.svg.jinja")
    write_atomically(folder / "sweep.svg", template.render(sweep=sweep, Scale=Scale, log10=math.log10))
    print(f"\n  {folder / 'sweep.json'}\n  {folder / 'sweep.svg'}")
