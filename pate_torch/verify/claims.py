"""What a claim about anybody's mechanism really has: a YAML file of what was stated, nothing filled in.

    source: where it was said, and when (date)
    mechanism: gaussian, laplace or sampled_gaussian (Poisson sampling)
    epsilon, delta: as claimed                              sigma: standard deviation of the noise (Laplace: its scale)
    sensitivity: what the noise was calibrated to           clip: the length to which a unit's part is clipped
    noise_multiplier: in place of sigma over clip           steps, sampling_rate: of the whole run
    adjacency: add_remove or replace_one

Where the adjacency is not stated, the one that flatters the claim is taken, and a line says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pate_torch.core import checks
from pate_torch.verify.prices import Bounds, Event, bounds
from pate_torch.verify.release import Check, verdict

MECHANISMS = ("gaussian", "laplace", "sampled_gaussian")
WORDS = ("source", "date", "mechanism", "adjacency")
NUMBERS = ("epsilon", "delta", "sigma", "sensitivity", "clip", "noise_multiplier", "steps", "sampling_rate")


def read(file: Path) -> dict[str, Any]:
    """The claim in the file.

    Raises:
        ValueError: It cannot be read, has an unknown key or an impossible value, or says too little.
    """
    try:
        said = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise checks.error("claim", str(file), f"cannot be read ({' '.join(str(error).split())})") from error
    claim = dict(checks.mapping("claim", said))
    for key in claim:
        checks.one_of("claim key", str(key), (*WORDS, *NUMBERS))
    checks.one_of("mechanism", claim.get("mechanism"), MECHANISMS)
    if "adjacency" in claim:
        checks.one_of("adjacency", claim["adjacency"], ("add_remove", "replace_one"))
    for key in ("sigma", "sensitivity", "clip", "noise_multiplier"):
        if key in claim:
            claim[key] = checks.positive(key, _number(key, claim[key]))
    fix = "Add it if it was stated; do not guess."
    if "epsilon" not in claim:
        raise checks.error("epsilon", None, "is what is claimed, and is missing", fix)
    claim["epsilon"] = checks.non_negative("epsilon", _number("epsilon", claim["epsilon"]))
    checks.delta("delta", claim.get("delta") if claim.get("delta") is None else _number("delta", claim["delta"]))
    claim["delta"] = _number("delta", claim["delta"])
    checks.integer("steps", claim.get("steps"), low=1, high=10**6, fix=fix)
    if claim["mechanism"] == "sampled_gaussian":
        rate = checks.positive("sampling_rate", _number("sampling_rate", claim.get("sampling_rate")), fix)
        claim["sampling_rate"] = checks.between("sampling_rate", rate, 0, 1)
    if "noise_multiplier" not in claim and not ("sigma" in claim and claim.keys() & {"clip", "sensitivity"}):
        what = "with clip or sensitivity, or noise_multiplier, says how much noise there is"
        raise checks.error("sigma", claim.get("sigma"), what, fix)
    return claim


def _number(key: str, value: Any) -> float:
    """YAML takes 1e-5 for a text."""
    try:
        return checks.number(key, float(value))
    except (TypeError, ValueError) as error:
        raise checks.error(key, value, "must be a number") from error


def examine(file: Path) -> Iterator[Check]:
    """What was stated against what it really has.

    Raises:
        ValueError: The claim says too little to compute anything.
    """
    claim = read(file)
    adjacency = claim.get("adjacency", "add_remove")
    moved = (2 if adjacency == "replace_one" else 1) * claim.get("clip", 0.0)
    stated = claim.get("sensitivity")
    told = "" if "adjacency" in claim else " (not stated: the one under which the claim looks best)"
    terms = ", ".join(f"{key} = {claim[key]:g}" for key in NUMBERS if key in claim)
    yield Check("terms", True, f"{claim['mechanism']}, {terms}; neighbors: {adjacency}{told}", loose=bool(told))
    if moved and stated:
        found = f"noise is calibrated to {stated:g}; clipping to {claim['clip']:g} bounds a unit by {moved:g}"
        times = f", {moved / stated:.6g} times as much" if moved > stated else ""
        yield Check("sensitivity", moved <= stated * (1 + 1e-9), found + times)
        yield verdict("as stated", claim["epsilon"], priced(claim, stated))
    yield verdict("guarantee", claim["epsilon"], priced(claim, moved or stated or 1.0))


def priced(claim: Mapping[str, Any], moved: float) -> Bounds:
    """Bounds on epsilon where a unit moves what is noised by ``moved`` at most."""
    times = claim.get("noise_multiplier") or claim["sigma"] / moved
    checks.between("noise_multiplier", times, 1e-6, 1e6, fix="Beyond, a price says nothing more.")
    event: Event
    if claim["mechanism"] == "laplace":
        event = {"kind": "laplace", "ratio": 1 / times, "count": claim["steps"]}
    elif claim["mechanism"] == "gaussian" or claim["sampling_rate"] == 1:
        event = {"kind": "gaussian", "mu": 1 / times, "count": claim["steps"]}
    else:
        event = {"kind": "sampled_gaussian", "rate": claim["sampling_rate"], "noise": times, "count": claim["steps"]}
    return bounds([event], claim["delta"])
