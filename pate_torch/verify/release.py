"""The checks of a release folder: its files against each other, its claims against what its mechanism costs."""

from __future__ import annotations

import csv
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pate_torch.verify.prices import PURE_KINDS, EpsilonBounds, Event, compute_bounds, compute_sampled_divergence

RELATIVE_TOLERANCE = 1e-9  # relative: the same sum in another order, the same root found to another digit
LOOSE_FACTOR = 1.01
ACCOUNTANT_FACTOR = 1.005  # what two accountants may differ by, of a mechanism whose noise follows from its epsilon
ANSWER_FILES = {"labels_sha256": "labels.csv", "cells_sha256": "cells.csv", "scores_sha256": "scores.safetensors",
           "guide_sha256": "guide.safetensors", "first_answers_sha256": "first_answers.json"}  # fmt: skip
RELEASE_FILES = ("privacy.json", "summary.json", "report.html", "README.md", "student.safetensors")
"""What may lie in any release. A record brings its answers, a published price its file, a student its encoder."""
SQRT2 = math.sqrt(2)
SPARSE_VECTORS = ("sparse_vector", "soft_sparse_vector")
VOTE_MECHANISMS = ("gaussian", "confident", "interactive", "laplace", "exponential", "single_stable", *SPARSE_VECTORS)


@dataclass(frozen=True)
class Check:
    """One line. ``is_loose``: it holds, and claims too much; ``is_checked``: what is at hand can tell."""

    name: str
    is_ok: bool
    message: str
    is_loose: bool = False
    is_checked: bool = True

    def __str__(self) -> str:
        status = "loose" if self.is_loose else "ok" if self.is_checked else "not checked"
        return f"{status if self.is_ok else 'FAILS':<5}  {self.name:<10}  {self.message}"


def make_check(name: str, results: Mapping[str, bool], fault: str, message: str) -> Check:
    """A check of many things at once, which names those that do not hold."""
    failed_names = [key for key, passes in results.items() if not passes]
    return Check(name, not failed_names, f"{fault}: {', '.join(failed_names)}" if failed_names else message)


@dataclass(frozen=True)
class ReleaseFolder:
    """What lies in a release folder; ``release``: None where the labels lie in another."""

    path: Path
    statement: Mapping[str, Any]
    summary: Mapping[str, Any]
    release: Mapping[str, Any] | None

    @classmethod
    def load(cls, folder: Path) -> ReleaseFolder:
        """The folder of a run or of its release.

        Raises:
            ValueError: There is no statement, or one that cannot be read.
        """
        path = folder / "release" if (folder / "release").is_dir() else folder
        names = ["privacy.json", "summary.json", *(f.name for f in path.glob("release.json"))]
        try:
            statement, summary, *release = (dict(json.loads((path / name).read_text("utf-8"))) for name in names)
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"release={str(path)!r}: cannot be read ({error}). Name the folder of a run.") from error
        return cls(path, statement, summary, release[0] if release else None)

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """What paid for this folder."""
        return list(self.statement["composition"]["parts"])


def check_schema(folder: ReleaseFolder) -> Check:
    """The statement against its JSON schema; nothing else can be asked of one that does not fit."""
    from jsonschema import Draft202012Validator

    schema = json.loads(files("pate_torch.release").joinpath("privacy.schema.json").read_text(encoding="utf-8"))
    version, (latest,) = folder.statement.get("schema_version"), schema["properties"]["schema_version"]["enum"]
    if version != latest:
        message = f"privacy.json is of version {version}, and this verifier reads version {latest}"
        return Check("schema", False, message)
    faults = [f"{f.json_path}: {f.message[:80]}" for f in Draft202012Validator(schema).iter_errors(folder.statement)]
    return Check("schema", not faults, "; ".join(faults[:3]) or f"privacy.json fits version {version}")


def run_checks(folder: ReleaseFolder) -> Iterator[Check]:
    """One check after the other, of a folder whose statement fits its schema."""
    for name, check in (("words", _check_words), ("files", _check_files), ("record", _check_record),
                        ("labels", _check_labels), ("student", _check_student), ("mechanism", _check_mechanism),
                        ("claims", _check_claims)):  # fmt: skip
        try:
            result = check(folder)
            yield from (result,) if isinstance(result, Check) else result
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
            yield Check(name, False, f"cannot be read: {type(error).__name__}: {error}")


def _check_words(folder: ReleaseFolder) -> Check:
    """What people read: the headline and the inequality, here, in README.md and in report.html."""
    statement, guarantee, headline = folder.statement, folder.statement["guarantee"], folder.statement["headline"]
    if not statement["private"]:
        return Check("words", "NOT PRIVATE" in headline, headline)
    page, card = (_strip_markup((folder.path / name).read_text("utf-8")) for name in ("report.html", "README.md"))
    values = re.findall(r"epsilon = ([\d.E+-]*\d)", headline) + re.findall(r"ε = ([\d.E+-]*\d)", guarantee["symbols"])
    is_rounded = [guarantee["epsilon"] <= float(value) <= 1.02 * guarantee["epsilon"] + 1e-3 for value in values]
    texts = [guarantee["symbols"], *guarantee["plain_words"], *statement["assumptions"], *statement["not_covered"]]
    texts.append(statement["trust"]["in_words"])
    results = {
        "epsilon": len(values) == 2 and all(is_rounded),
        **{key: str(guarantee[key]) in headline for key in ("adjacency", "unit", "route")},
        "README.md": all(_strip_markup(text) in card for text in (headline, *texts)),
        "report.html": all(_strip_markup(text) in page for text in texts),
    }
    return make_check("words", results, "tell another story", headline)


def _strip_markup(text: str) -> str:
    """Without the marks by which Markdown and HTML show it as it stands."""
    return html.unescape(text).replace("\\", "").replace("\u00a0", " ")


def _check_files(folder: ReleaseFolder) -> Check:
    """Every file against its hash; what is no part of a release fails, whatever its hash."""
    sums = folder.path / "SHA256SUMS"
    claims = dict(line.split("  ", 1)[::-1] for line in sums.read_text("utf-8").splitlines())
    paths = [file for file in folder.path.rglob("*") if file != sums and (file.is_symlink() or not file.is_dir())]
    file_by_name = {file.relative_to(folder.path).as_posix(): file for file in paths}
    if extras := [name for name, file in file_by_name.items() if not (_belongs(folder, name) and file.is_file())]:
        return Check("files", False, f"{', '.join(map(repr, sorted(extras)[:5]))} is no part of a release")
    hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in file_by_name.items()}
    results = {name: hashes.get(name) == claims.get(name) for name in sorted(hashes.keys() | claims.keys())}
    if (record := folder.release) is not None:
        results |= {f"{name} (release.json)": record.get(key) == hashes.get(name) for key, name in ANSWER_FILES.items()}
    return make_check("files", results, "not as they were written", f"{len(claims)} hashes")


def _belongs(folder: ReleaseFolder, name: str) -> bool:
    """Whether a file of this name may lie in this release."""
    answer_files = () if folder.release is None else ("release.json", *ANSWER_FILES.values())
    price_files = ["sanitised.json"] if any(part["what"] == "sanitised price" for part in folder.parts) else []
    card = folder.statement.get("encoder") or {}
    encoder_files = [f"encoder/{file}" for file in (card.get("file"), card and "tokenizer.json") if file]
    return name in (*RELEASE_FILES, *answer_files, *price_files, *encoder_files)


def _check_record(folder: ReleaseFolder) -> Check:
    """The same facts in privacy.json, summary.json and release.json."""
    statement, record = folder.statement, folder.release
    guarantee, run, account, utility = (statement[key] for key in ("guarantee", "mechanism", "composition", "utility"))
    common_facts = {
        **{key: guarantee[key] for key in ("delta", "adjacency", "unit")},
        **{key: run[key] for key in ("num_teachers", "queries_asked", "queries_answered")},
        "mechanism": run["name"],
        "dataset": account["dataset"],
        "release_id": statement["verification"]["release_id"],
        "private": statement["private"],
    }
    summary_facts = common_facts | {
        "epsilon": guarantee["epsilon"],
        "epsilon_ex_post": account["this_release_ex_post"],
        "epsilon_charged": account["account_total"],
        "epsilon_charged_ex_post": account["account_total_ex_post"],
        "budget_epsilon": account["account_cap"],
        "accountant": guarantee["route"],
        "ledger_head": statement["verification"]["ledger_head"],
        "student_accuracy": utility["student"] and utility["student"]["accuracy"],
        "label_accuracy": utility["labels"] and utility["labels"]["accuracy"],
    }
    results = {f"{key} (summary.json)": folder.summary.get(key) == fact for key, fact in summary_facts.items()}
    results["this_release"] = account["this_release"] == guarantee["epsilon"]
    num_records = None if guarantee["unit"].startswith("group:") else 1
    results["records_per_unit"] = guarantee["records_per_unit"] == num_records
    if record is None:
        results["release.json is missing"] = account["labels_reused"] or not run["queries_asked"]
    else:
        record_facts = common_facts | {"noise": run["noise"], "sensitivity": run["sensitivity"]}
        results |= {f"{key} (release.json)": record.get(key) == fact for key, fact in record_facts.items()}
        scalar = bool | int | float | str | None
        parameters = {key: value for key, value in record.get("parameters", {}).items() if isinstance(value, scalar)}
        label_events = [part["events"] for part in folder.parts if part["release_id"] == record.get("release_id")]
        pools = [asset["sha256"] for asset in statement["public_assets"] if asset["role"] == "public points"]
        results |= {
            "parameters": run["parameters"] == parameters,
            "rounds": run["rounds"] == max(1, len(record["queries_by_round"])),
            "queries_by_round": sum(record["queries_by_round"]) == run["queries_asked"],
            "teachers_id": folder.summary.get("teachers_id") == record.get("teachers_id"),
            "planned": label_events == ([record.get("planned")] if statement["private"] else [[]]),
            "labels_reused": not account["labels_reused"],
            "pool_sha256": record.get("pool_sha256") in pools,
        }
    return make_check("record", results, "say different things", f"{len(results)} facts agree")


def _check_labels(folder: ReleaseFolder) -> Check:
    if folder.release is None:
        return Check("labels", True, "lie in another folder, or there are none")
    text = (folder.path / "labels.csv").read_text("utf-8")
    run, rows = folder.statement["mechanism"], list(csv.DictReader(text.splitlines()))
    num_answered, num_queries = sum(int(row["label"]) >= 0 for row in rows), len({row["query"] for row in rows})
    is_consistent = len(rows) == num_queries == run["queries_asked"] and num_answered == run["queries_answered"]
    fault = "" if is_consistent else ", which is not what is claimed"
    return Check("labels", is_consistent, f"{num_answered} labels of {num_queries} questions{fault}")


def _check_student(folder: ReleaseFolder) -> Check:
    """The facts in the header of the student's file against the statement; its weights are not looked at."""
    statement, file, kind = folder.statement, folder.path / "student.safetensors", folder.summary["student"]
    if not file.exists():
        return Check("student", kind is None, "none was released" if kind is None else "its file is missing")
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = stream.read(size) if size < file.stat().st_size else b""
    facts = json.loads(json.loads(header)["__metadata__"]["pate_torch"])
    spec, network, classes = facts["spec"], facts["network"], facts["spec"]["class_names"]
    class_names, labels = [row["class"] for row in statement["utility"]["classes"]], []
    if folder.release is not None:
        table = csv.DictReader((folder.path / "labels.csv").read_text("utf-8").splitlines())
        labels = [(int(row["label"]), row["class"]) for row in table if int(row["label"]) >= 0]
    stated_encoder = {key: value for key, value in (statement.get("encoder") or {}).items() if value is not None}
    file_encoder = {key: value for key, value in (facts.get("encoder") or {}).items() if key != "points"}
    results = {
        "data set": spec["name"] == statement["composition"]["dataset"],
        "kind": kind is not None,
        "classes": len(classes) == spec["num_classes"] == network["num_classes"] and class_names in ([], list(classes)),
        "classes (labels.csv)": all(name in (classes[label], f"'{classes[label]}") for label, name in labels),
        "form": list(spec["input_shape"]) == list(network["input_shape"]),
        "encoder": file_encoder == stated_encoder,
    }
    return make_check("student", results, "another one than the statement is about", f"{kind}, {len(classes)} classes")


def _check_mechanism(folder: ReleaseFolder) -> Check:
    """What was reserved for the labels, or the model, against what its mechanism's theorem says it costs."""
    run, name = folder.statement["mechanism"], folder.statement["mechanism"]["name"]
    costs = list_required_events(folder)
    if not folder.statement["private"]:
        return Check("mechanism", True, "nothing was reserved in secret noise")
    if costs is None:
        return Check("mechanism", True, f"{name} is not known here: its events are taken as they stand", is_loose=True)
    groups = [part["events"] for part in folder.parts]
    results = {_format_event(cost): any(_covers(group, cost, costs) for group in groups) for cost in costs}
    if name in VOTE_MECHANISMS:
        sensitivity = run["sensitivity"] and run["sensitivity"]["l2"]
        results[f"sensitivity {sensitivity}"] = math.isclose(sensitivity or 0, SQRT2, rel_tol=RELATIVE_TOLERANCE)
    if name in SPARSE_VECTORS:  # whose scale follows from its epsilon: the whole of it is held to that
        events = [e for group in groups if any(e["kind"] == "delta" for e in group) for e in group]
        blocks = sum(e["count"] for e in events if e["kind"] == "pure")
        bounds, epsilon = compute_bounds(events, run["parameters"]["delta"]), run["parameters"]["epsilon"]
        is_ok = blocks == run["parameters"]["max_failures"] and bool(events)
        is_ok = is_ok and bounds.low <= epsilon * (1 + RELATIVE_TOLERANCE)
        is_ok = is_ok and epsilon <= bounds.high * ACCOUNTANT_FACTOR
        results[f"{blocks} blocks at epsilon {bounds.low:.6g}"] = is_ok
    return make_check("mechanism", results, "not reserved", "; ".join(map(_format_event, costs)))


def list_required_events(folder: ReleaseFolder) -> list[Event] | None:
    """The events that what was answered costs by its mechanism's theorem; None: the mechanism is not known here.

    Source: PATE 2018, section 4.1 (gaussian) and Algorithm 1 (confident, interactive); PATE 2017 (laplace); Cesar &
    Rogers 2021 (exponential); BTT18 and LZCW21 (sparse_vector); Dwork et al. 2006 (histogram); Bassily, Smith &
    Thakurta 2014 (gradient_descent); Mironov, Talwar & Zhang 2019 (dpsgd).
    """
    run, parameters = folder.statement["mechanism"], folder.statement["mechanism"]["parameters"]
    queries, answers, rounds = run["queries_asked"], run["queries_answered"], run["rounds"]
    is_discrete, replaces_one = run["noise"] == "discrete", folder.statement["guarantee"]["adjacency"] == "replace_one"

    def make_event(kind: str, count: int, **scale: float) -> Event:
        return {"kind": kind, "count": count, **scale}

    def make_gaussian(sensitivity: float, sigma: float, count: int) -> Event:
        mu = sensitivity / sigma
        return make_event("zcdp", count, rho=mu**2 / 2) if is_discrete else make_event("gaussian", count, mu=mu)

    def make_pure(loss: float, count: int) -> Event:
        return make_event("pure", count, epsilon=loss) if is_discrete else make_event("laplace", count, ratio=loss)

    match run["name"]:
        case "gaussian":
            return [make_gaussian(SQRT2, parameters["sigma"], queries)]
        case "confident" | "interactive":
            screen = make_gaussian(1, parameters["screen_sigma"], queries)
            return [screen, make_gaussian(SQRT2, parameters["sigma"], answers)]
        case "laplace":
            return [make_pure(1 / parameters["sigma"], 2 * queries)]
        case "exponential":
            return [make_event("bounded_range", queries, eta=2 * SQRT2 / parameters["sigma"])]
        case "single_stable":
            return [make_pure(parameters["epsilon"], queries), make_event("delta", queries, delta=parameters["delta"])]
        case "sparse_vector" | "soft_sparse_vector":
            return [make_event("delta", 1, delta=parameters["delta"] / 2)]
        case "histogram":
            return [make_gaussian(SQRT2 if replaces_one else 1, parameters["sigma"], rounds)]
        case "gradient_descent":
            sensitivity, steps = 2 if replaces_one else 1, parameters["steps"]
            last = make_gaussian(sensitivity, parameters["sigma"], steps)
            sigma = parameters["early_noise_multiplier"] * parameters["sigma"] if rounds > 1 else 0
            return [make_gaussian(sensitivity, sigma, steps * (rounds - 1)), last] if sigma else [last]
        case "dpsgd":
            steps, rate, noise = (parameters[key] for key in ("steps", "sampling_rate", "noise_multiplier"))
            return [make_event("sampled_gaussian", steps, rate=rate, noise=noise)]
    return None


def _covers(events: list[Event], cost: Event, costs: list[Event]) -> bool:
    """Whether these events hold as many of this one, of the same scale, as all the costs together ask for."""
    if cost["kind"] == "sampled_gaussian":
        curves = [zip(e["orders"], e["rdp"], strict=True) for e in events
                  if e["kind"] == "rdp_curve" and e["count"] >= cost["count"]]  # fmt: skip
        return any(all(r >= compute_sampled_divergence(cost, a) * (1 - 1e-6) for a, r in curve) for curve in curves)
    (scale,) = cost.keys() - {"kind", "count"}

    def count_equal(group: list[Event]) -> int:
        equal_events = (e for e in group if e["kind"] == cost["kind"])
        return sum(e["count"] for e in equal_events if math.isclose(e[scale], cost[scale], rel_tol=RELATIVE_TOLERANCE))

    return count_equal(events) >= count_equal(costs)


def _format_event(event: Event) -> str:
    scales = ", ".join(f"{key} {value:.6g}" for key, value in event.items() if key not in ("kind", "count"))
    return f"{event['count']} x {event['kind']} ({scales})"


def _check_claims(folder: ReleaseFolder) -> Iterator[Check]:
    """The epsilon of the folder, of each of its parts, and of the account."""
    statement, guarantee, account = folder.statement, folder.statement["guarantee"], folder.statement["composition"]
    if not statement["private"]:
        is_empty = guarantee["epsilon"] is None and account["account_total"] is None
        suffix = "" if is_empty else ", and yet an epsilon is told"
        yield Check("guarantee", False, f"none is claimed: its noise was seeded{suffix}")
        return
    terms, others = (guarantee["delta"], account["account_cap"]), statement["other_releases"]
    own_events, other_events = ([e for part in parts for e in part["events"]] for parts in (folder.parts, others))
    costs = list_required_events(folder)
    yield check_claim("guarantee", guarantee["epsilon"], guarantee["route"], own_events, *terms, costs=costs)
    for part in (*folder.parts, *others):
        if part["epsilon"] is not None:
            part_check = check_claim("part", part["epsilon"], part["route"], part["events"], *terms)
            yield replace(part_check, message=f"{part['what']}: {part_check.message}")
    total = account["account_total"]
    if total is None:
        is_seeded = any("NOT PRIVATE" in release["what"] for release in others)
        reason = "a release used seeded noise" if is_seeded else "but why?"
        yield Check("account", is_seeded, f"no total is claimed: {reason}")
        return
    check = check_claim("account", total, account["account_route"], own_events + other_events, *terms)
    # Where a curve alone is known, the total has no other lower bound than this release.
    if total < guarantee["epsilon"] * (1 - RELATIVE_TOLERANCE):
        check = replace(check, is_ok=False, message=f"{check.message}; less than this release")
    yield check


def check_claim(name: str, epsilon: float, route: str | None, events: list[Event], delta: float, cap: float | None,
          costs: list[Event] | None = None) -> Check:  # fmt: skip
    """One epsilon against what its events cost; costs: what they are of, where that is more than their curve."""
    exact = [e for e in costs or () if e["kind"] == "sampled_gaussian"]
    bounds = compute_bounds([*exact, *(e for e in events if not exact or e["kind"] != "rdp_curve")], delta)
    if route == "cap":  # of many releases together: the filter has admitted what one alone costs
        is_ok = name == "account" and epsilon == cap and epsilon >= bounds.low * (1 - RELATIVE_TOLERANCE)
        result = "not checked here, the ledger's filter keeps it (--ledger)" if is_ok else "no filter of it admits them"
        message = f"the account's cap, {epsilon:.6g}, of events that cost {bounds.low:.6g} at least: {result}"
        return Check(name, is_ok, message, is_checked=False)
    kinds = {e["kind"] for e in events} - {"delta"}
    is_consistent = kinds <= {"pure": {*PURE_KINDS}, "pld": {*PURE_KINDS, "gaussian"}}.get(route or "", kinds)
    is_consistent &= (route == "gdp") == (kinds == {"gaussian"}) and (route in ("none", "delta")) == (not kinds)
    is_consistent &= (route == "delta") == (bool(events) and not kinds)  # distance to instability
    fault = "" if is_consistent else f", by {route}, which does not go with {', '.join(sorted(kinds))}"
    return check_epsilon(name, epsilon, bounds, fault)


def check_epsilon(name: str, epsilon: float, bounds: EpsilonBounds, fault: str = "") -> Check:
    """Whether an epsilon may be claimed: below the lower bound it fails, 1 % above the upper one it is loose."""
    cost = f"is {bounds.low:.6g}" if bounds.low == bounds.high else f"lies in {bounds.low:.6g} to {bounds.high:.6g}"
    message = f"epsilon {epsilon:.6g} claimed; it {cost} ({bounds.derivation}){fault}"
    is_ok = epsilon >= bounds.low * (1 - RELATIVE_TOLERANCE) and not fault
    return Check(name, is_ok, message, is_loose=epsilon > bounds.high * LOOSE_FACTOR)
