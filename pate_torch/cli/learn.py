r"""Learn by an algorithm of the papers on hypothesis classes, and release the hypothesis.

    pate learn sspp people.csv dataset.label=income dataset.name=people dataset.publish_split=true \
        --epsilon .5 --below-guarantee
    pate learn private-predictor dataset=mushroom --epsilon 1       # says how many records it would take
    pate learn bounds --dimension 10                                # all of them, reading no record
    pate learn sspp --audit 20000                                   # what the executed algorithm is proven to spend

Settings (key=value) are those of train.py: the data set, the account, the run's folder. Neighbors differ in one record
that is replaced, and the number of records is public (partition=replace_one). Several classes are learnt one against
the rest, each charged, at an equal share of epsilon. ``pate predict`` applies what is released. Exit codes: 0 done; 1
an audit proved more than is claimed; 2 a bad choice of the user's, with nothing charged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.audit.command import AuditResult
from pate_torch.cli import hydra_config
from pate_torch.cli.train import format_error
from pate_torch.config import RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.learn import bounds
from pate_torch.learn.algorithms import ALGORITHMS
from pate_torch.learn.audit import audit
from pate_torch.learn.problem import HYPOTHESIS_CLASSES, LearnOptions
from pate_torch.learn.release import HypothesisMethod
from pate_torch.pipeline import run

REPLACE_ONE_SETTING = "partition=replace_one"
_AUDIT_DELTA = 1e-5


def compose_config(name: str, settings: Sequence[str]) -> RunConfig:
    """The configuration of a run of this algorithm.

    Args:
        name: Of the algorithm.
        settings: A table's path (or none), and key=value settings.
    """
    tables = [word for word in settings if "=" not in word]
    keys = [word.partition("=")[0] for word in settings]
    overrides = [word for word in settings if "=" in word]
    if len(tables) > 1:
        raise checks.error("table", tables[1], "is a second table", "Give public records by dataset.public_path.")
    if tables:
        overrides = ["dataset=csv", f"dataset.path={tables[0]}", *overrides]
        if "dataset.public_path" not in keys and "dataset.roles" not in keys:
            overrides.append("dataset.roles=position")
    elif "dataset" not in keys:
        fix = "pate learn ALGORITHM table.csv dataset.label=..., or dataset=<name>."
        raise checks.error("table", None, "must be given: records to learn from", fix)
    if "partition" in keys and REPLACE_ONE_SETTING not in overrides:
        reason = "these algorithms are private for a record that is replaced, with a public number of records"
        (setting,) = (word for word in overrides if word.startswith("partition="))
        raise checks.error(
            "partition", setting.partition("=")[2], reason, f"Leave it out, or say {REPLACE_ONE_SETTING}."
        )
    cfg = hydra_compose(
        "config", overrides=["student=none", "baseline=false", "membership=none", REPLACE_ONE_SETTING, *overrides]
    )
    folder = Path(run_folders.get_run_folder(cfg.paths.root, cfg.dataset.name, name)) / run_folders.get_run_id()
    return hydra_config.build_run_config(cfg, Path(cfg.paths.run) if "paths.run" in keys else folder)


def _make_parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<20}{algorithm.description}" for name, algorithm in ALGORITHMS.items())
    parser = argparse.ArgumentParser(
        prog="pate learn",
        description=f"{__doc__}\nAlgorithms:\n{names}\n  {'bounds':<20}what each of them needs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("algorithm", choices=[*ALGORITHMS, "bounds"], metavar="ALGORITHM")
    parser.add_argument("settings", nargs="*", metavar="TABLE | key=value")
    parser.add_argument(
        "--hypotheses", default="stumps", choices=HYPOTHESIS_CLASSES, help="the class (default: stumps)"
    )
    parser.add_argument("--epsilon", type=float, default=1.0, help="of the whole release (default: 1)")
    parser.add_argument("--delta", type=float, help="of the whole release (default: half of the account's)")
    parser.add_argument("--alpha", type=float, default=0.1, help="excess error of the promise (default: .1)")
    parser.add_argument("--beta", type=float, default=0.1, help="probability that it is larger (default: .1)")
    parser.add_argument("--points", type=int, help="public points used, or asked about (default: by algorithm)")
    parser.add_argument(
        "--constants", default="paper", choices=("paper", "sharp"), help="as printed, or as proved here"
    )
    parser.add_argument("--cuts", type=int, default=20, help="of each feature, for a finite class (default: 20)")
    parser.add_argument("--gamma", type=float, default=0.05, help="of stable, averaging (default: .05)")
    parser.add_argument("--shard", type=int, default=30, help="records of a teacher: relabeled, sub-samp (default: 30)")
    parser.add_argument("--failures", type=int, default=1, help="of the sparse vector: sub-samp (default: 1)")
    parser.add_argument("--first", type=int, help="queries before SSPP: unv-priv-cl (default: the paper's)")
    parser.add_argument("--radius", type=float, default=3.0, help="of the parameters: convex (default: 3)")
    parser.add_argument("--ridge", type=float, default=0.05, help="of their penalty: convex (default: .05)")
    parser.add_argument("--cover", action="store_true", help="stable: among a cover (DF20 Remark 1)")
    parser.add_argument("--below-guarantee", action="store_true", help="go on where no accuracy is promised")
    parser.add_argument("--audit", type=int, metavar="RUNS", help="run it so often on two neighbors, and prove epsilon")
    parser.add_argument("--json", action="store_true", help="bounds and --audit: unrounded")
    parser.add_argument("--dimension", type=int, default=1, help="bounds: VC dimension, or parameters (default: 1)")
    return parser


def _make_options(options: argparse.Namespace) -> LearnOptions:
    return LearnOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(LearnOptions)})


def _print_bounds(options: argparse.Namespace) -> None:
    """Print the table, or its numbers."""
    c, d = _make_options(options), checks.integer("dimension", options.dimension, low=1)
    delta = _AUDIT_DELTA if c.delta is None else c.delta
    m, price = c.points or 50, {"epsilon": c.epsilon, "delta": delta}
    records = bounds.tabulate_sample_sizes(
        d, m, **price, alpha=c.alpha, beta=c.beta, gamma=c.gamma, num_hypotheses=2 * c.cuts, radius=c.radius
    )
    if options.json:
        sizes = {name: {"records": n, "for": promise} for name, (n, promise) in records.items()}
        print(json.dumps({"records": sizes}, indent=1))
        return
    terms = f"epsilon {c.epsilon:g}, delta {format_delta(delta)}, replace_one, unit record; dimension {d}, {m} points"
    print(f"Private records that each algorithm asks for ({terms})\n")
    for name, (n, promise) in records.items():
        print(f"  {name:<30}{bounds.format_records(n):>16}  {promise}")


def _print_audit(result: AuditResult, as_json: bool) -> int:
    """Print what was proved; the exit code."""
    if as_json:
        print(json.dumps(dataclasses.asdict(result) | {"sound": result.is_sound}, indent=1))
    else:
        print(
            f"{result.mechanism}: {result.runs:,} runs on each of two neighbors prove epsilon >= {result.proven:.4g}, "
            f"claimed: {format_epsilon(result.claimed)} (delta {format_delta(result.delta)}, replace_one, unit record; "
            f"confidence {result.confidence:g}). "
            + ("No fault was found." if result.is_sound else "THE CLAIM IS REFUTED.")
        )
    return 0 if result.is_sound else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = _make_parser()
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.algorithm == "bounds":
            _print_bounds(options)
            return 0
        if options.audit is not None:
            if options.settings:
                raise checks.error("audit", options.settings[0], "reads no table: it makes a world of its own")
            delta = _AUDIT_DELTA if options.delta is None else options.delta
            return _print_audit(
                audit(options.algorithm, _make_options(options), runs=options.audit, delta=delta), options.json
            )
        with hydra_config.open_configuration():
            config = compose_config(options.algorithm, options.settings)
        if config.method.noise != "torch":
            problem = "must be torch: these algorithms draw continuous noise"
            raise checks.error("noise", config.method.noise, problem, "Leave out noise.")
        method = HypothesisMethod(
            algorithm_name=options.algorithm,
            options=_make_options(options),
            account_delta=config.privacy.delta,
            seed=config.seed,
            below_guarantee=options.below_guarantee,
        )
        run(dataclasses.replace(config, method=method))
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        is_value_error = isinstance(error, ValueError) and not isinstance(
            error, HydraException | OmegaConfBaseException
        )
        print(f"error: {error if is_value_error else format_error(error)}", file=sys.stderr)
        return 2
    return 0
