"""Recomputes a claim about any mechanism from a YAML file of the stated parameters. No parameter is filled in.

    source: where the claim was made, and when (date)
    mechanism: gaussian, laplace or sampled_gaussian (Poisson sampling)
    epsilon, delta: the claimed guarantee                   sigma: standard deviation of the noise (Laplace: its scale)
    sensitivity: sensitivity that the noise is for          clip: the length to which a unit's part is clipped
    noise_multiplier: in place of sigma over clip           steps, sampling_rate: of the whole run
    adjacency: add_remove or replace_one

If the adjacency is not stated, the one that suits the claim best is taken, and a line says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pate_torch.core import checks
from pate_torch.verify.prices import EpsilonBounds, Event, compute_bounds
from pate_torch.verify.release import Check, check_epsilon

MECHANISMS = ("gaussian", "laplace", "sampled_gaussian")
TEXT_KEYS = ("source", "date", "mechanism", "adjacency")
NUMBER_KEYS = ("epsilon", "delta", "sigma", "sensitivity", "clip", "noise_multiplier", "steps", "sampling_rate")


def read_claim(file: Path) -> dict[str, Any]:
    """Read the claim. Raises ValueError for an unknown key, an impossible value, or a missing parameter."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise checks.error("claim", str(file), f"cannot be read ({' '.join(str(error).split())})") from error
    claim, fix = dict(checks.mapping("claim", content)), "Add it if it was stated; do not guess."
    for key, value in claim.items():
        checks.one_of("claim key", str(key), (*TEXT_KEYS, *NUMBER_KEYS))
        if key in NUMBER_KEYS and key != "steps":
            try:
                claim[key] = float(value)  # YAML takes 1e-5 for a text
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
        problem = "must be stated together with clip or sensitivity, or noise_multiplier in place of them"
        raise checks.error("sigma", claim.get("sigma"), problem, fix)
    return claim


def verify_claim(file: Path) -> Iterator[Check]:
    """Check the claim. Raises ValueError if a parameter is missing."""
    claim = read_claim(file)
    adjacency = claim.get("adjacency", "add_remove")
    sensitivity = (2 if adjacency == "replace_one" else 1) * claim.get("clip", 0.0)
    stated_sensitivity = claim.get("sensitivity")
    remark = "" if "adjacency" in claim else " (not stated: the one that suits the claim best)"
    terms_text = ", ".join(f"{key} = {claim[key]:g}" for key in NUMBER_KEYS if key in claim)
    message = f"{claim['mechanism']}, {terms_text}; neighbors: {adjacency}{remark}"
    yield Check("terms", True, message, is_loose=bool(remark))
    if sensitivity and stated_sensitivity:
        factor = sensitivity / stated_sensitivity
        message = f"noise is calibrated to {stated_sensitivity:g}; clipping to {claim['clip']:g} bounds a unit by "
        message += f"{sensitivity:g}" + (f", {factor:.6g} times as much" if factor > 1 else "")
        yield Check("sensitivity", sensitivity <= stated_sensitivity * (1 + 1e-9), message)
        yield check_epsilon("as stated", claim["epsilon"], compute_claim_bounds(claim, stated_sensitivity))
    bounds = compute_claim_bounds(claim, sensitivity or stated_sensitivity or 1.0)
    yield check_epsilon("guarantee", claim["epsilon"], bounds)


def compute_claim_bounds(claim: Mapping[str, Any], sensitivity: float) -> EpsilonBounds:
    """Bound epsilon if a unit moves the noisy value by ``sensitivity`` at most."""
    noise = claim.get("noise_multiplier") or claim["sigma"] / sensitivity
    checks.between("noise_multiplier", noise, 1e-6, 1e6, fix="Other values are not checked.")
    event: Event = {"kind": "gaussian", "mu": 1 / noise, "count": claim["steps"]}
    if claim["mechanism"] == "laplace":
        event = {"kind": "laplace", "ratio": 1 / noise, "count": claim["steps"]}
    elif claim["mechanism"] == "sampled_gaussian" and claim["sampling_rate"] < 1:
        event = {"kind": "sampled_gaussian", "rate": claim["sampling_rate"], "noise": noise, "count": claim["steps"]}
    return compute_bounds([event], claim["delta"])
