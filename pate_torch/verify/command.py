"""``pate verify RELEASE``: recomputes every claim of a release, independently of the code that made the claim.

    pate verify outputs/runs/digits/gaussian/<run>
    pate verify outputs/runs/digits/gaussian/<run> --ledger
    pate verify --claim claim.yaml

The command prints one line for each check. A claim below the lower bound on the cost of its events FAILS. A claim more
than 1 % above the upper bound is loose. The exit code is 0 if all checks pass, 1 if a check fails, and 2 if there is
nothing to check.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pate_torch.core import checks, run_folders
from pate_torch.verify import ledger, release
from pate_torch.verify.prices import EpsilonBounds, Event, compute_bounds
from pate_torch.verify.release import Check, check_epsilon

EXIT_OK, EXIT_FAILED = 0, 1
MECHANISMS = ("gaussian", "laplace", "sampled_gaussian")
TEXT_KEYS = ("source", "date", "mechanism", "adjacency")
NUMBER_KEYS = ("epsilon", "delta", "sigma", "sensitivity", "clip", "noise_multiplier", "steps", "sampling_rate")


def verify_release(path: Path, ledger_place: Path | str | None = None) -> Iterator[Check]:
    """Run every check of the folder of a run or of its release. Raises ValueError if there is nothing to check."""
    folder = release.ReleaseFolder.load(path)
    for check in release.run_checks(folder):
        yield check
        if check.name == "schema" and not check.is_ok:
            return
    if ledger_place is not None:
        yield from ledger.run_checks(folder, ledger_place)
    else:
        message = "the entries, the account's terms, other charges and the cap are checked with --ledger"
        yield Check("ledger", True, message, is_checked=False)


def read_claim(file: Path) -> dict[str, Any]:
    """Read a claim about a mechanism from a YAML file. No missing parameter is filled in.

        source: text on where the claim was made             date: date of the claim
        mechanism: gaussian, laplace or sampled_gaussian (Poisson sampling)
        epsilon, delta: claimed guarantee                    steps, sampling_rate: of the whole run
        sigma: standard deviation of the noise (Laplace: its scale)
        sensitivity: sensitivity to which the noise is calibrated
        clip: norm to which the contribution of a unit is clipped
        noise_multiplier: sigma / clip, in place of both
        adjacency: add_remove or replace_one; if missing, the more favorable one, add_remove

    Raises:
        ValueError: A key is unknown, a value is invalid, or a parameter is missing.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise checks.error("claim", str(file), f"cannot be read ({' '.join(str(error).split())})") from error
    claim, fix = dict(checks.mapping("claim", content)), "Add it if the source states it; do not guess."
    for key, value in claim.items():
        checks.one_of("claim key", str(key), (*TEXT_KEYS, *NUMBER_KEYS))
        if key in NUMBER_KEYS and key != "steps":
            try:
                claim[key] = float(value)  # YAML parses 1e-5 as a string
            except (TypeError, ValueError) as error:
                raise checks.error(key, value, "must be a number") from error
            (checks.non_negative if key == "epsilon" else checks.positive)(key, claim[key])
    checks.one_of("mechanism", claim.get("mechanism"), MECHANISMS)
    checks.one_of("adjacency", claim.get("adjacency", "add_remove"), ("add_remove", "replace_one"))
    checks.number("epsilon", claim.get("epsilon"), fix)
    checks.delta("delta", claim.get("delta"))
    checks.integer("steps", claim.get("steps"), low=1, high=10**6, fix=fix)
    if claim["mechanism"] == "sampled_gaussian":
        checks.between("sampling_rate", checks.positive("sampling_rate", claim.get("sampling_rate"), fix), 0, 1)
    if "noise_multiplier" not in claim and not ("sigma" in claim and claim.keys() & {"clip", "sensitivity"}):
        problem = "must be stated together with clip or sensitivity, unless noise_multiplier is stated"
        raise checks.error("sigma", claim.get("sigma"), problem, fix)
    return claim


def verify_claim(file: Path) -> Iterator[Check]:
    """Check the claim in a YAML file."""
    claim = read_claim(file)
    adjacency = claim.get("adjacency", "add_remove")
    sensitivity = (2 if adjacency == "replace_one" else 1) * claim.get("clip", 0.0)
    stated_sensitivity = claim.get("sensitivity")
    remark = "" if "adjacency" in claim else " (not stated; this one is more favorable)"
    terms_text = ", ".join(f"{key} = {claim[key]:g}" for key in NUMBER_KEYS if key in claim)
    message = f"{claim['mechanism']}, {terms_text}; neighbors: {adjacency}{remark}"
    yield Check("terms", True, message, is_loose=bool(remark))
    if sensitivity and stated_sensitivity:
        factor = sensitivity / stated_sensitivity
        message = f"noise is calibrated to {stated_sensitivity:g}; the clipped sensitivity is {sensitivity:g}"
        message += f", {factor:.6g} times as much" if factor > 1 else ""
        yield Check("sensitivity", sensitivity <= stated_sensitivity * (1 + 1e-9), message)
        yield check_epsilon("as stated", claim["epsilon"], compute_claim_bounds(claim, stated_sensitivity))
    bounds = compute_claim_bounds(claim, sensitivity or stated_sensitivity or 1.0)
    yield check_epsilon("guarantee", claim["epsilon"], bounds)


def compute_claim_bounds(claim: Mapping[str, Any], sensitivity: float) -> EpsilonBounds:
    """Bound epsilon of the claimed mechanism at this sensitivity."""
    noise = claim.get("noise_multiplier") or claim["sigma"] / sensitivity
    checks.between("noise_multiplier", noise, 1e-6, 1e6, fix="Other values cannot be checked.")
    event: Event = {"kind": "gaussian", "mu": 1 / noise, "count": claim["steps"]}
    if claim["mechanism"] == "laplace":
        event = {"kind": "laplace", "ratio": 1 / noise, "count": claim["steps"]}
    elif claim["mechanism"] == "sampled_gaussian" and claim["sampling_rate"] < 1:
        steps = {"rate": claim["sampling_rate"], "noise_multiplier": noise, "steps": claim["steps"]}
        event = {"kind": "sampled_gaussian", "count": 1, **steps}
    return compute_bounds([event], claim["delta"])


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    place = options.ledger
    if place == Path():
        file = run_folders.check_root(run_folders.get_home_folder()) / "ledger.sqlite"
        place = os.environ.get("PATE_LEDGER") or file
    if (options.release is None) == (options.claim is None):
        raise checks.error("release", options.release, "must be set, or --claim", "Set one of them.")
    results = verify_claim(options.claim) if options.claim else verify_release(options.release, place)
    is_ok = True
    for check in results:
        print(check, flush=True)
        is_ok &= check.is_ok
    return EXIT_OK if is_ok else EXIT_FAILED
