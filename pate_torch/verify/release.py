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

from pate_torch.verify.prices import PURE, Bounds, Event, bounds, sampled_divergence

EQUAL = 1e-9  # relative: the same sum in another order, the same root found to another digit
LOOSE = 1.01
ALIKE = 1.005  # what two accountants may differ by, of a mechanism whose noise follows from its epsilon
ANSWERS = {"labels_sha256": "labels.csv", "cells_sha256": "cells.csv", "scores_sha256": "scores.safetensors",
           "guide_sha256": "guide.safetensors"}  # fmt: skip
FILES = ("privacy.json", "summary.json", "report.html", "README.md", "student.safetensors")
"""What may lie in any release. A record brings its answers, a published price its file, a student its encoder."""
CURVES = re.compile(r"tensorboard/events\.out\.tfevents\.\d{4,}")
SQRT2 = math.sqrt(2)
STABLE = ("stability", "soft_stability")
VOTES = ("gaussian", "confident", "interactive", "laplace", "exponential", "single_stable", *STABLE)


@dataclass(frozen=True)
class Check:
    """One line. loose: it holds, and claims too much; checked: what is at hand can tell."""

    name: str
    holds: bool
    found: str
    loose: bool = False
    checked: bool = True

    def __str__(self) -> str:
        held = "loose" if self.loose else "ok" if self.checked else "not checked"
        return f"{held if self.holds else 'FAILS':<5}  {self.name:<10}  {self.found}"


def compared(name: str, holds: Mapping[str, bool], fault: str, found: str) -> Check:
    """A check of many things at once, which names those that do not hold."""
    wrong = [thing for thing, does in holds.items() if not does]
    return Check(name, not wrong, f"{fault}: {', '.join(wrong)}" if wrong else found)


@dataclass(frozen=True)
class Folder:
    """What lies in a release folder. release: None where the labels lie in another."""

    path: Path
    statement: Mapping[str, Any]
    summary: Mapping[str, Any]
    release: Mapping[str, Any] | None

    @classmethod
    def read(cls, where: Path) -> Folder:
        """The folder of a run or of its release.

        Raises:
            ValueError: There is no statement, or one that cannot be read.
        """
        path = where / "release" if (where / "release").is_dir() else where
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


def check_schema(folder: Folder) -> Check:
    """The statement against its JSON schema; nothing else can be asked of one that does not fit."""
    from jsonschema import Draft202012Validator

    schema = json.loads(files("pate_torch.reporting").joinpath("privacy.schema.json").read_text(encoding="utf-8"))
    version, (reads,) = folder.statement.get("schema_version"), schema["properties"]["schema_version"]["enum"]
    if version != reads:
        return Check("schema", False, f"privacy.json is of version {version}, and this verifier reads version {reads}")
    faults = [f"{f.json_path}: {f.message[:80]}" for f in Draft202012Validator(schema).iter_errors(folder.statement)]
    return Check("schema", not faults, "; ".join(faults[:3]) or f"privacy.json fits version {version}")


def checks(folder: Folder) -> Iterator[Check]:
    """One check after the other, of a folder whose statement fits its schema."""
    for name, check in (("words", _words), ("files", _files), ("record", _record), ("labels", _labels),
                        ("student", _student), ("mechanism", _mechanism), ("claims", _claims)):  # fmt: skip
        try:
            found = check(folder)
            yield from (found,) if isinstance(found, Check) else found
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
            yield Check(name, False, f"cannot be read: {type(error).__name__}: {error}")


def _words(folder: Folder) -> Check:
    """What people read: the headline and the inequality, here, in README.md and in report.html."""
    s, of = folder.statement, folder.statement["guarantee"]
    if not s["private"]:
        return Check("words", "NOT PRIVATE" in s["headline"], s["headline"])
    page, card = (_plain((folder.path / name).read_text("utf-8")) for name in ("report.html", "README.md"))
    told = re.findall(r"epsilon = ([\d.E+-]*\d)", s["headline"]) + re.findall(r"ε = ([\d.E+-]*\d)", of["symbols"])
    rounded = [of["epsilon"] <= float(epsilon) <= 1.02 * of["epsilon"] + 1e-3 for epsilon in told]
    told_twice = [of["symbols"], *of["plain_words"], *s["assumptions"], *s["not_covered"], s["trust"]["in_words"]]
    holds = {
        "epsilon": len(told) == 2 and all(rounded),
        **{key: str(of[key]) in s["headline"] for key in ("adjacency", "unit", "route")},
        "README.md": all(_plain(text) in card for text in (s["headline"], *told_twice)),
        "report.html": all(_plain(text) in page for text in told_twice),
    }
    return compared("words", holds, "tell another story", s["headline"])


def _plain(text: str) -> str:
    """Without the marks by which Markdown and HTML show it as it stands."""
    return html.unescape(text).replace("\\", "").replace("\u00a0", " ")


def _files(folder: Folder) -> Check:
    """Every file against its hash; what is no part of a release fails, whatever its hash."""
    sums = folder.path / "SHA256SUMS"
    said = dict(line.split("  ", 1)[::-1] for line in sums.read_text("utf-8").splitlines())
    there = [file for file in folder.path.rglob("*") if file != sums and (file.is_symlink() or not file.is_dir())]
    lies = {file.relative_to(folder.path).as_posix(): file for file in there}
    if foreign := [name for name, file in lies.items() if not (_belongs(folder, name) and file.is_file())]:
        return Check("files", False, f"{', '.join(map(repr, sorted(foreign)[:5]))} is no part of a release")
    digest = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in lies.items()}
    holds = {name: digest.get(name) == said.get(name) for name in sorted(digest.keys() | said.keys())}
    if folder.release is not None:
        record = folder.release
        holds |= {f"{name} (release.json)": record.get(key) == digest.get(name) for key, name in ANSWERS.items()}
    return compared("files", holds, "not as they were written", f"{len(said)} hashes")


def _belongs(folder: Folder, name: str) -> bool:
    """Whether a file of this name may lie in this release."""
    answers = () if folder.release is None else ("release.json", *ANSWERS.values())
    price = ["sanitised.json"] if any(part["what"] == "sanitised price" for part in folder.parts) else []
    card = folder.statement.get("encoder") or {}
    encoder = [f"encoder/{file}" for file in (card.get("file"), card and "tokenizer.json") if file]
    return name in (*FILES, *answers, *price, *encoder) or CURVES.fullmatch(name) is not None


def _record(folder: Folder) -> Check:
    """The same facts in privacy.json, summary.json and release.json."""
    s, record = folder.statement, folder.release
    of, run, account, utility = s["guarantee"], s["mechanism"], s["composition"], s["utility"]
    everywhere = {
        **{key: of[key] for key in ("delta", "adjacency", "unit")},
        **{key: run[key] for key in ("num_teachers", "queries_asked", "queries_answered")},
        "mechanism": run["name"],
        "dataset": account["dataset"],
        "release_id": s["verification"]["release_id"],
        "private": s["private"],
    }
    in_summary = everywhere | {
        "epsilon": of["epsilon"],
        "epsilon_ex_post": account["this_release_ex_post"],
        "epsilon_charged": account["account_total"],
        "epsilon_charged_ex_post": account["account_total_ex_post"],
        "budget_epsilon": account["account_cap"],
        "accountant": of["route"],
        "ledger_head": s["verification"]["ledger_head"],
        "student_accuracy": utility["student"] and utility["student"]["accuracy"],
        "label_accuracy": utility["labels"] and utility["labels"]["accuracy"],
    }
    holds = {f"{key} (summary.json)": folder.summary.get(key) == fact for key, fact in in_summary.items()}
    holds["this_release"] = account["this_release"] == of["epsilon"]
    holds["records_per_unit"] = of["records_per_unit"] == (None if of["unit"].startswith("group:") else 1)
    if record is None:
        holds["release.json is missing"] = account["labels_reused"] or not run["queries_asked"]
    else:
        in_record = everywhere | {"noise": run["noise"], "sensitivity": run["sensitivity"]}
        holds |= {f"{key} (release.json)": record.get(key) == fact for key, fact in in_record.items()}
        scalar = bool | int | float | str | None
        plain = {key: value for key, value in record.get("parameters", {}).items() if isinstance(value, scalar)}
        labels = [part["events"] for part in folder.parts if part["release_id"] == record.get("release_id")]
        pools = [asset["sha256"] for asset in s["public_assets"] if asset["role"] == "public points"]
        holds |= {
            "parameters": run["parameters"] == plain,
            "rounds": run["rounds"] == max(1, len(record["queries_by_round"])),
            "queries_by_round": sum(record["queries_by_round"]) == run["queries_asked"],
            "teachers_id": folder.summary.get("teachers_id") == record.get("teachers_id"),
            "planned": labels == ([record.get("planned")] if s["private"] else [[]]),
            "labels_reused": not account["labels_reused"],
            "pool_sha256": record.get("pool_sha256") in pools,
        }
    return compared("record", holds, "say different things", f"{len(holds)} facts agree")


def _labels(folder: Folder) -> Check:
    if folder.release is None:
        return Check("labels", True, "lie in another folder, or there are none")
    text = (folder.path / "labels.csv").read_text("utf-8")
    run, rows = folder.statement["mechanism"], list(csv.DictReader(text.splitlines()))
    answered, asked = sum(int(row["label"]) >= 0 for row in rows), len({row["query"] for row in rows})
    right = len(rows) == asked == run["queries_asked"] and answered == run["queries_answered"]
    fault = "" if right else ", which is not what is claimed"
    return Check("labels", right, f"{answered} labels of {asked} questions{fault}")


def _student(folder: Folder) -> Check:
    """The facts in the header of the student's file against the statement; its weights are not looked at."""
    s, file, named = folder.statement, folder.path / "student.safetensors", folder.summary["student"]
    if not file.exists():
        return Check("student", named is None, "none was released" if named is None else "its file is missing")
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        header = content.read(size) if size < file.stat().st_size else b""
    facts = json.loads(json.loads(header)["__metadata__"]["pate_torch"])
    spec, network, classes = facts["spec"], facts["network"], facts["spec"]["class_names"]
    seen, labels = [row["class"] for row in s["utility"]["classes"]], []
    if folder.release is not None:
        table = csv.DictReader((folder.path / "labels.csv").read_text("utf-8").splitlines())
        labels = [(int(row["label"]), row["class"]) for row in table if int(row["label"]) >= 0]
    told = {key: value for key, value in (s.get("encoder") or {}).items() if value is not None}
    carried = {key: value for key, value in (facts.get("encoder") or {}).items() if key != "points"}
    holds = {
        "data set": spec["name"] == s["composition"]["dataset"],
        "kind": named is not None,
        "classes": len(classes) == spec["num_classes"] == network["num_classes"] and seen in ([], list(classes)),
        "classes (labels.csv)": all(name in (classes[label], f"'{classes[label]}") for label, name in labels),
        "form": list(spec["input_shape"]) == list(network["input_shape"]),
        "encoder": carried == told,
    }
    return compared("student", holds, "another one than the statement is about", f"{named}, {len(classes)} classes")


def _mechanism(folder: Folder) -> Check:
    """What was reserved for the labels, or the model, against what its mechanism's theorem says it costs."""
    run, name = folder.statement["mechanism"], folder.statement["mechanism"]["name"]
    costs = needed(folder)
    if not folder.statement["private"]:
        return Check("mechanism", True, "nothing was reserved in secret noise")
    if costs is None:
        return Check("mechanism", True, f"{name} is not known here: its events are taken as they stand", loose=True)
    holds = {_shown(cost): any(_covers(part["events"], cost, costs) for part in folder.parts) for cost in costs}
    if name in VOTES:
        moved = run["sensitivity"] and run["sensitivity"]["l2"]
        holds[f"sensitivity {moved}"] = math.isclose(moved or 0, SQRT2, rel_tol=EQUAL)
    if name in STABLE:  # whose scale follows from its epsilon: the whole of it is held to that
        mine = [e for part in folder.parts if any(e["kind"] == "delta" for e in part["events"]) for e in part["events"]]
        blocks = sum(e["count"] for e in mine if e["kind"] == "pure")
        found, told = bounds(mine, run["parameters"]["delta"]), run["parameters"]["epsilon"]
        epsilon, within = found.low, bool(mine) and found.low <= told * (1 + EQUAL) and told <= found.high * ALIKE
        holds[f"{blocks} blocks at epsilon {epsilon:.6g}"] = blocks == run["parameters"]["max_failures"] and within
    return compared("mechanism", holds, "not reserved", "; ".join(map(_shown, costs)))


def needed(folder: Folder) -> list[Event] | None:
    """The events that what was answered costs by its mechanism's theorem; None: the mechanism is not known here.

    Source: PATE 2018, section 4.1 (gaussian) and Algorithm 1 (confident, interactive); PATE 2017 (laplace); Cesar &
    Rogers 2021 (exponential); BTT18 and LZCW21 (stability); Dwork et al. 2006 (histogram); Bassily, Smith & Thakurta
    2014 (gradient_descent); Mironov, Talwar & Zhang 2019 (dpsgd).
    """
    run, p = folder.statement["mechanism"], folder.statement["mechanism"]["parameters"]
    asked, answered, rounds = run["queries_asked"], run["queries_answered"], run["rounds"]
    discrete, replaced = run["noise"] == "discrete", folder.statement["guarantee"]["adjacency"] == "replace_one"

    def event(kind: str, count: int, **scale: float) -> Event:
        return {"kind": kind, "count": count, **scale}

    def normal(moved: float, sigma: float, count: int) -> Event:
        mu = moved / sigma
        return event("zcdp", count, rho=mu**2 / 2) if discrete else event("gaussian", count, mu=mu)

    def pure(loss: float, count: int) -> Event:
        return event("pure", count, epsilon=loss) if discrete else event("laplace", count, ratio=loss)

    match run["name"]:
        case "gaussian":
            return [normal(SQRT2, p["sigma"], asked)]
        case "confident" | "interactive":
            return [normal(1, p["screen_sigma"], asked), normal(SQRT2, p["sigma"], answered)]
        case "laplace":
            return [pure(1 / p["sigma"], 2 * asked)]
        case "exponential":
            return [event("bounded_range", asked, eta=2 * SQRT2 / p["sigma"])]
        case "single_stable":
            return [pure(p["epsilon"], asked), event("delta", asked, delta=p["delta"])]
        case "stability" | "soft_stability":
            return [event("delta", 1, delta=p["delta"] / 2)]
        case "histogram":
            return [normal(SQRT2 if replaced else 1, p["sigma"], rounds)]
        case "gradient_descent":
            moved, steps = 2 if replaced else 1, p["steps"]
            last = normal(moved, p["sigma"], steps)
            early = p["early_noise_multiplier"] * p["sigma"] if rounds > 1 else 0
            return [normal(moved, early, steps * (rounds - 1)), last] if early else [last]
        case "dpsgd":
            return [event("sampled_gaussian", p["steps"], rate=p["sampling_rate"], noise=p["noise_multiplier"])]
    return None


def _covers(events: list[Event], cost: Event, costs: list[Event]) -> bool:
    """Whether these events hold as many of this one, of the same scale, as all the costs together ask for."""
    if cost["kind"] == "sampled_gaussian":
        curves = [zip(e["orders"], e["rdp"], strict=True) for e in events
                  if e["kind"] == "rdp_curve" and e["count"] >= cost["count"]]  # fmt: skip
        return any(all(r >= sampled_divergence(cost, a) * (1 - 1e-6) for a, r in curve) for curve in curves)
    (scale,) = cost.keys() - {"kind", "count"}
    held, asked = ([e for e in some if e["kind"] == cost["kind"] and math.isclose(e[scale], cost[scale], rel_tol=EQUAL)]
                   for some in (events, costs))  # fmt: skip
    return sum(e["count"] for e in held) >= sum(e["count"] for e in asked)


def _shown(event: Event) -> str:
    scales = ", ".join(f"{key} {value:.6g}" for key, value in event.items() if key not in ("kind", "count"))
    return f"{event['count']} x {event['kind']} ({scales})"


def _claims(folder: Folder) -> Iterator[Check]:
    """The epsilon of the folder, of each of its parts, and of the account."""
    s, of, account = folder.statement, folder.statement["guarantee"], folder.statement["composition"]
    if not s["private"]:
        empty = of["epsilon"] is None and account["account_total"] is None
        lie = "" if empty else ", and yet an epsilon is told"
        yield Check("guarantee", False, f"none is claimed: its noise was seeded{lie}")
        return
    terms, others = (of["delta"], account["account_cap"]), s["other_releases"]
    mine, more = ([e for part in parts for e in part["events"]] for parts in (folder.parts, others))
    yield claim("guarantee", of["epsilon"], of["route"], mine, *terms, costs=needed(folder))
    for part in (*folder.parts, *others):
        if part["epsilon"] is not None:
            alone = claim("part", part["epsilon"], part["route"], part["events"], *terms)
            yield replace(alone, found=f"{part['what']}: {alone.found}")
    total = account["account_total"]
    if total is None:
        seeded = any("NOT PRIVATE" in other["what"] for other in others)
        why = "a release used seeded noise" if seeded else "but why?"
        yield Check("account", seeded, f"no total is claimed: {why}")
        return
    everything = claim("account", total, account["account_route"], mine + more, *terms)
    less = total < of["epsilon"] * (1 - EQUAL)  # where a curve alone is known, it has no other lower bound
    yield replace(everything, holds=False, found=f"{everything.found}; less than this release") if less else everything


def claim(name: str, epsilon: float, route: str | None, events: list[Event], delta: float, cap: float | None,
          costs: list[Event] | None = None) -> Check:  # fmt: skip
    """One epsilon against what its events cost; costs: what they are of, where that is more than their curve."""
    exactly = [e for e in costs or () if e["kind"] == "sampled_gaussian"]
    found = bounds([*exactly, *(e for e in events if not exactly or e["kind"] != "rdp_curve")], delta)
    if route == "cap":  # of many releases together: the filter has admitted what one alone costs
        holds = name == "account" and epsilon == cap and epsilon >= found.low * (1 - EQUAL)
        words = f"the account's cap, {epsilon:.6g}, of events that cost {found.low:.6g} at least: "
        words += "not checked here, the ledger's filter keeps it (--ledger)" if holds else "no filter of it admits them"
        return Check(name, holds, words, checked=False)
    kinds = {e["kind"] for e in events} - {"delta"}
    right = kinds <= {"pure": {*PURE}, "pld": {*PURE, "gaussian"}}.get(route or "", kinds)
    right &= (route == "gdp") == (kinds == {"gaussian"}) and (route in ("none", "delta")) == (not kinds)
    right &= (route == "delta") == (bool(events) and not kinds)  # a stability mechanism
    fault = "" if right else f", by {route}, which does not go with {', '.join(sorted(kinds))}"
    return verdict(name, epsilon, found, fault)


def verdict(name: str, epsilon: float, found: Bounds, fault: str = "") -> Check:
    """Whether an epsilon may be claimed: below the lower bound it fails, 1 % above the upper one it is loose."""
    exact = found.low == found.high
    words = f"it is {found.low:.6g}" if exact else f"it lies in {found.low:.6g} to {found.high:.6g}"
    return Check(
        name,
        epsilon >= found.low * (1 - EQUAL) and not fault,
        f"epsilon {epsilon:.6g} claimed; {words} ({found.how}){fault}",
        loose=epsilon > found.high * LOOSE,
    )
