"""``pate-verify RELEASE``: recomputes every claim of a release, independently of the code that made the claim.

    pate-verify outputs/runs/digits/gaussian/<run>
    pate-verify tumors --ledger ledger.sqlite --policy policy.yaml
    pate-verify --claim claim.yaml

The command prints one line for each check, and a verdict. A claim below the lower bound on the cost of its events
FAILS, and one between the bounds is not checked. A claim more than 1 % above the upper bound is loose. The exit code is
0 if no check fails, 1 if a check or the policy fails, and 2 if there is nothing to check. A check that could not be
made ("not checked") does not change the exit code without a policy. A policy accepts an epsilon only if it was checked,
and refuses every release with a check that was not made if it says ``require_all_checks: true``.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pate_verify import ARGUMENTS, ledger, release, sites
from pate_verify.costs import EpsilonBounds, compute_bounds
from pate_verify.events import Event
from pate_verify.release import Check, check_epsilon

EXIT_OK, EXIT_FAILED, EXIT_ERROR = 0, 1, 2
MECHANISMS, ADJACENCIES = ("gaussian", "laplace", "sampled_gaussian"), ("add_remove", "replace_one")
TEXT_KEYS = ("source", "date", "mechanism", "adjacency")
NUMBER_KEYS = ("epsilon", "delta", "sigma", "sensitivity", "clip", "noise_multiplier", "steps", "sampling_rate")
POLICY_KEYS = ("max_epsilon", "max_account_epsilon", "max_delta", "adjacency", "unit", "require_all_checks")


def make_error(name: str, value: Any, problem: str, fix: str = "") -> ValueError:
    """Make an error that names the setting, its value, the problem and the fix."""
    return ValueError(f"{name}={value!r}: {problem}." + (f" {fix}" if fix else ""))


def read_settings(name: str, file: Path, keys: Collection[str]) -> dict[str, Any]:
    """Read a file of lines ``key: value``, the part of YAML that claims and policies need.

    A value is a number, true, false, a text, a text in quotation marks, or a list of them in brackets.

    Raises:
        ValueError: The file cannot be read, a line has another form, or a key is unknown or repeated.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise make_error(name, str(file), f"cannot be read ({error})") from error
    settings: dict[str, Any] = {}
    quoted, start = r"\"[^\"]*\"|'[^']*'", r"[^\s\"'\[\]{}#,]"
    plain, item = rf"{quoted}|{start}[^\"\[\]{{}}]*?", rf"{quoted}|{start}[^\"'\[\]{{}}#,]*"
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(rf"(\w+):(?: +({plain}|\[ *(?:{item})(?: *, *(?:{item}))* *\]))?\s*(?: #.*)?", line)
        if match is None or match[1] in settings:
            raise make_error(name, str(file), f"line {number} is not 'key: value' with a new key")
        if match[1] not in keys:
            raise make_error(f"{name} key", match[1], f"is unknown. Keys are {', '.join(keys)}")
        text = match[2] or ""
        items = [_parse_value(value.strip()) for value in re.findall(item, text[1:-1])]
        settings[match[1]] = items if text.startswith("[") else _parse_value(text)
    return settings


def _parse_value(text: str) -> Any:
    if text[:1] in ("'", '"'):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        return text


def _check_number(name: str, value: Any, low: float, high: float = math.inf, fix: str = "") -> float:
    """Check for a number with low < value < high, where an infinite high admits no infinity."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not low < number < high:
        raise make_error(name, value, f"must be a number greater than {low:g}, below {high:g}", fix)
    return number


def _check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise make_error(name, value, f"must be one of {', '.join(choices)}")


def verify_release(path: Path, ledger_place: Path | str | None = None) -> Iterator[Check]:
    """Run every check of the folder of a run or of its release. Raises ValueError if there is nothing to check."""
    folder, totals, is_kept = release.ReleaseFolder.load(path), [], False
    for check in release.run_checks(folder):
        if check.name == "account" and folder.statement["composition"]["account_route"] == "cap" and check.is_ok:
            totals.append(check)  # holds if the ledger shows that the filter kept the cap
            continue
        yield check
        if check.name == "schema" and not check.is_ok:
            return
    if ledger_place is None or folder.is_distributed:
        yield from release.run_check(release.check_spent, folder)
    if folder.is_distributed:
        yield from release.run_check(sites.check_sites, folder)
        message = "each site has a ledger of its own, which shows its charges: pate ledger verify"
        yield Check("ledger", True, message, is_checked=False)
        return
    try:
        for check in ledger.run_checks(folder, ledger_place) if ledger_place is not None else ():
            yield check
            is_kept = check.name == "cap" and check.is_ok
    except ImportError as error:
        yield release.make_missing_check("ledger", error, "losses,postgres")
    for check in totals:
        remark = "the ledger confirms that the cap was kept" if is_kept else "only the ledger can confirm the cap"
        yield replace(check, is_checked=is_kept, message=f"{check.message}; {remark}")
    if ledger_place is None:
        message = "the entries, the account's terms, other charges and the cap are checked with --ledger"
        yield Check("ledger", True, message, is_checked=False)


def read_claim(file: Path) -> dict[str, Any]:
    """Read a claim about a mechanism from a file. No missing parameter is filled in.

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
    claim = read_settings("claim", file, (*TEXT_KEYS, *NUMBER_KEYS))
    fix = "Add it if the source states it; do not guess."
    _check_choice("mechanism", claim.get("mechanism"), MECHANISMS)
    _check_choice("adjacency", claim.get("adjacency", "add_remove"), ADJACENCIES)
    limits = {"epsilon": (-1e-300, math.inf), "delta": (0, 1), "steps": (0, 10**6 + 1)}
    if claim["mechanism"] == "sampled_gaussian":
        limits["sampling_rate"] = (0, 1 + 1e-12)
    for key in [key for key in NUMBER_KEYS if key in claim or key in limits]:
        claim[key] = _check_number(key, claim.get(key), *limits.get(key, (0, math.inf)), fix=fix)
    if not claim["steps"].is_integer():
        raise make_error("steps", claim["steps"], "must be a whole number of at least 1", fix)
    claim["steps"] = int(claim["steps"])
    if "noise_multiplier" not in claim and not ("sigma" in claim and claim.keys() & {"clip", "sensitivity"}):
        problem = "must be stated together with clip or sensitivity, unless noise_multiplier is stated"
        raise make_error("sigma", claim.get("sigma"), problem, fix)
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
    _check_number("noise_multiplier", noise, 1e-6, 1e6, "Other values cannot be checked.")
    event: Event = {"kind": "gaussian", "mu": 1 / noise, "count": claim["steps"]}
    if claim["mechanism"] == "laplace":
        event = {"kind": "laplace", "ratio": 1 / noise, "count": claim["steps"]}
    elif claim["mechanism"] == "sampled_gaussian" and claim["sampling_rate"] < 1:
        steps = {"rate": claim["sampling_rate"], "noise_multiplier": noise, "steps": claim["steps"]}
        event = {"kind": "sampled_gaussian", "count": 1, **steps}
    return compute_bounds([event], claim["delta"])


def check_policy(file: Path, statement: Mapping[str, Any], checks: Collection[Check]) -> Iterator[Check]:
    """Compare a statement, whose claims were checked, with the limits of a receiver.

        max_epsilon, max_delta: largest accepted values      max_account_epsilon: the same for the account's total
        adjacency, unit: accepted values, one or a list      require_all_checks: true to refuse what was not checked

    Raises:
        ValueError: A key is unknown, or a value is invalid.
    """
    guarantee, policy = statement["guarantee"], read_settings("policy", file, POLICY_KEYS)
    missing = [check.name for check in checks if not check.is_checked]
    values = {
        "max_epsilon": ("guarantee", guarantee["epsilon"]),
        "max_account_epsilon": ("account", statement["composition"]["account_total"]),
        "max_delta": ("schema", guarantee["delta"]),
    }
    for key, (name, value) in values.items():
        if key in policy:
            limit = _check_number(key, policy[key], 0)
            text = f"{'none' if value is None else f'{value:.6g}'} for at most {limit:g}"
            text += f", but the check {name} was not made" if name in missing else ""
            is_ok = value is not None and value <= limit and name not in missing
            yield Check("policy", is_ok, f"{key.removeprefix('max_').replace('_', ' ')} {text}")
    for key in ("adjacency", "unit"):
        if key in policy:
            accepted = policy[key] if isinstance(policy[key], list) else [policy[key]]
            is_ok = guarantee[key] in accepted
            yield Check("policy", is_ok, f"{key} {guarantee[key]} where {', '.join(map(str, accepted))} is accepted")
    if policy.get("require_all_checks", False):
        yield Check("policy", not missing, f"not checked: {', '.join(missing)}" if missing else "every check was made")


def format_verdict(checks: Collection[Check], headline: str, policy: Path | None) -> str:
    """Format the last line: what failed, what was not checked, and whether the policy accepts the release."""
    failed = [check.name for check in checks if not check.is_ok]
    missing = [check.name for check in checks if check.is_ok and not check.is_checked]
    num_checked = len(checks) - len(missing)
    text = f"all {num_checked} checks passed"
    if failed:
        text = f"{len(failed)} of {num_checked} checks FAILED ({', '.join(dict.fromkeys(failed))})"
    text += f"; not checked: {', '.join(dict.fromkeys(missing))}" if missing else ""
    if policy is not None:
        text = f"{'NOT acceptable' if failed else 'acceptable'} by {policy}: {text}"
    advice = "Do not rely on this release." if failed else headline
    return f"verdict  {text}. {advice}".rstrip()


def run(options: argparse.Namespace) -> int:
    """Run the command with parsed arguments, and return its exit code."""
    place = options.ledger
    if place == Path() and not (place := os.environ.get("PATE_LEDGER")):
        raise make_error("--ledger", "", "has no path, and PATE_LEDGER is not set", "Name a ledger.sqlite.")
    if (options.release is None) == (options.claim is None):
        raise make_error("release", options.release, "must be set, or --claim", "Set one of them.")
    if options.policy is not None and options.release is None:
        raise make_error("--policy", str(options.policy), "needs a release")
    checks: list[Check] = []
    for check in verify_claim(options.claim) if options.claim else verify_release(options.release, place):
        print(check, flush=True)
        checks.append(check)
    headline = ""
    if options.release is not None and all(check.is_ok for check in checks):
        headline = str(release.ReleaseFolder.load(options.release).statement["headline"])
    if options.policy is not None and checks[0].is_ok:
        for check in check_policy(options.policy, release.ReleaseFolder.load(options.release).statement, checks):
            print(check, flush=True)
            checks.append(check)
    print(format_verdict(checks, headline, options.policy))
    return EXIT_OK if all(check.is_ok for check in checks) else EXIT_FAILED


def main() -> int:
    """Run ``pate-verify`` and return its exit code."""
    description = (__doc__ or "").replace("``", "")
    parser = argparse.ArgumentParser(
        "pate-verify", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for argument, settings in ARGUMENTS:
        parser.add_argument(argument, **settings)
    try:
        return run(parser.parse_intermixed_args())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
