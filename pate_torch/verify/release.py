"""The checks of a release folder: its files against each other, its claims against what its mechanism costs."""

from __future__ import annotations

import csv
import hashlib
import html
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pate_torch.verify.prices import Bounds, Event, bounds, sampled_divergence

EQUAL = 1e-9  # relative: the same sum in another order, the same root found to another digit
LOOSE = 1.01
ANSWERS = {"labels_sha256": "labels.csv", "cells_sha256": "cells.csv", "scores_sha256": "scores.safetensors",
           "guide_sha256": "guide.safetensors"}  # fmt: skip
SQRT2 = math.sqrt(2)


@dataclass(frozen=True)
class Check:
    """One line: what was checked, whether it holds, and what was found. loose: it holds, and claims too much."""

    name: str
    holds: bool
    found: str
    loose: bool = False

    def __str__(self) -> str:
        return f"{'FAILS' if not self.holds else 'loose' if self.loose else 'ok':<5}  {self.name:<10}  {self.found}"


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
        try:
            texts = [json.loads((path / name).read_text("utf-8")) for name in ("privacy.json", "summary.json")]
            record = path / "release.json"
            texts.append(json.loads(record.read_text("utf-8")) if record.exists() else None)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"release={str(path)!r}: cannot be read ({error}). Name the folder of a run.") from error
        return cls(path, *texts)

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """What paid for this folder."""
        return list(self.statement["composition"]["parts"])


def check_schema(folder: Folder) -> Check:
    """The statement against its JSON schema; nothing else can be asked of one that does not fit."""
    from jsonschema import Draft202012Validator

    schema = json.loads(files("pate_torch.reporting").joinpath("privacy.schema.json").read_text(encoding="utf-8"))
    version = folder.statement.get("schema_version")
    if version in (1, 2):
        return Check("schema", False, f"is of version {version}, which lists no events: nothing can be recomputed")
    faults = [
        f"{fault.json_path}: {fault.message[:80]}"
        for fault in Draft202012Validator(schema).iter_errors(folder.statement)
    ]
    return Check("schema", not faults, "; ".join(faults[:3]) or f"privacy.json fits version {version}")


def checks(folder: Folder) -> Iterator[Check]:
    """One check after the other, of a folder whose statement fits its schema."""
    for name, check in (("words", _words), ("files", _files), ("record", _record), ("labels", _labels),
                        ("mechanism", _mechanism), ("claims", _claims)):  # fmt: skip
        try:
            found = check(folder)
            yield from (found,) if isinstance(found, Check) else found
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
            yield Check(name, False, f"cannot be read: {type(error).__name__}: {error}")


def _files(folder: Folder) -> Check:
    sums = folder.path / "SHA256SUMS"
    said = dict(line.split("  ", 1)[::-1] for line in sums.read_text().splitlines()) if sums.exists() else {}
    lies = {f.relative_to(folder.path).as_posix(): f for f in folder.path.rglob("*") if f.is_file()}
    lies = {name: file for name, file in lies.items() if not name.startswith("tensorboard/") and file != sums}
    digest = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in lies.items()}
    wrong = [name for name in sorted(digest.keys() | said.keys()) if digest.get(name) != said.get(name)]
    for key, name in ANSWERS.items():
        if folder.release is not None and folder.release.get(key) != digest.get(name):
            wrong.append(f"{name} (release.json)")
    return Check(
        "files", not wrong, f"not as they were written: {', '.join(wrong)}" if wrong else f"{len(said)} hashes"
    )


SAME = {
    "guarantee.epsilon": ("epsilon", None),
    "guarantee.delta": ("delta", "delta"),
    "guarantee.adjacency": ("adjacency", "adjacency"),
    "guarantee.unit": ("unit", "unit"),
    "guarantee.route": ("accountant", None),
    "composition.dataset": ("dataset", "dataset"),
    "composition.this_release": ("epsilon", None),
    "composition.this_release_ex_post": ("epsilon_ex_post", None),
    "composition.account_total": ("epsilon_charged", None),
    "composition.account_total_ex_post": ("epsilon_charged_ex_post", None),
    "composition.account_cap": ("budget_epsilon", None),
    "mechanism.name": ("mechanism", "mechanism"),
    "mechanism.noise": (None, "noise"),
    "mechanism.sensitivity": (None, "sensitivity"),
    "mechanism.num_teachers": ("num_teachers", "num_teachers"),
    "mechanism.queries_asked": ("queries_asked", "queries_asked"),
    "mechanism.queries_answered": ("queries_answered", "queries_answered"),
    "verification.release_id": ("release_id", "release_id"),
    "verification.ledger_head": ("ledger_head", None),
    "utility.student.accuracy": ("student_accuracy", None),
    "utility.labels.accuracy": ("label_accuracy", None),
    "private": ("private", "private"),
}
"""Facts told more than once: where in privacy.json, by which key of summary.json, by which of release.json."""


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = None if tree is None else tree[key]
    return tree


def _record(folder: Folder) -> Check:
    """The same facts in privacy.json, summary.json and release.json."""
    s, record = folder.statement, folder.release
    run, wrong = s["mechanism"], []
    for path, (summary_key, record_key) in SAME.items():
        fact = _at(s, path)
        differs = summary_key is not None and folder.summary.get(summary_key) != fact
        differs |= record is not None and record_key is not None and record.get(record_key) != fact
        wrong += [path] if differs else []
    each = None if s["guarantee"]["unit"].startswith("group:") else 1
    wrong += ["guarantee.records_per_unit"] if s["guarantee"]["records_per_unit"] != each else []
    if record is not None:
        scalars = bool | int | float | str | None
        plain = {key: value for key, value in record.get("parameters", {}).items() if isinstance(value, scalars)}
        wrong += ["mechanism.parameters"] if run["parameters"] != plain else []
        wrong += ["mechanism.rounds"] if run["rounds"] != max(1, len(record["queries_by_round"])) else []
        labels = [part["events"] for part in folder.parts if part["release_id"] == record.get("release_id")]
        wrong += ["planned"] if labels != ([record.get("planned")] if s["private"] else [[]]) else []
        pools = [asset["sha256"] for asset in s["public_assets"] if asset["role"] == "public points"]
        wrong += ["composition.labels_reused"] if s["composition"]["labels_reused"] else []
        wrong += ["pool_sha256"] if record.get("pool_sha256") not in pools else []
    elif run["queries_asked"] and not s["composition"]["labels_reused"]:
        wrong.append("release.json is missing")
    return Check(
        "record", not wrong, f"say different things: {', '.join(wrong)}" if wrong else f"{len(SAME)} facts agree"
    )


def _labels(folder: Folder) -> Check:
    run, file = folder.statement["mechanism"], folder.path / "labels.csv"
    if folder.release is None or not file.exists():
        whole = folder.release is None
        return Check("labels", whole, "lie in another folder, or there are none" if whole else "labels.csv is missing")
    rows = list(csv.DictReader(io.StringIO(file.read_text("utf-8"))))
    answered, asked = sum(int(row["label"]) >= 0 for row in rows), len({row["query"] for row in rows})
    right = len(rows) == asked == run["queries_asked"] and answered == run["queries_answered"]
    return Check(
        "labels", right, f"{answered} labels of {asked} questions" + ("" if right else ", which is not what is claimed")
    )


def needed(folder: Folder) -> list[Event] | None:
    """The events that what was answered costs by its mechanism's theorem; None: the mechanism is not known here.

    Source: PATE 2018, section 4.1 (gaussian) and Algorithm 1 (confident, interactive); PATE 2017 (laplace); Cesar &
    Rogers 2021 (exponential); BTT18 and LZCW21 (stability); Dwork et al. 2006 (histogram); Bassily, Smith & Thakurta
    2014 (gradient_descent); Mironov, Talwar & Zhang 2019 (dpsgd).
    """
    run, p = folder.statement["mechanism"], folder.statement["mechanism"]["parameters"]
    asked, answered, rounds, whole = (
        run["queries_asked"],
        run["queries_answered"],
        run["rounds"],
        run["noise"] == "discrete",
    )
    replaced = folder.statement["guarantee"]["adjacency"] == "replace_one"

    def normal(moved: float, sigma: float, count: int) -> Event:
        if whole:
            return {"kind": "zcdp", "rho": (moved / sigma) ** 2 / 2, "count": count}
        return {"kind": "gaussian", "mu": moved / sigma, "count": count}

    def pure(loss: float, count: int) -> Event:
        return (
            {"kind": "pure", "epsilon": loss, "count": count}
            if whole
            else {"kind": "laplace", "ratio": loss, "count": count}
        )

    match run["name"]:
        case "gaussian":
            return [normal(SQRT2, p["sigma"], asked)]
        case "confident" | "interactive":
            return [normal(1, p["screen_sigma"], asked), normal(SQRT2, p["sigma"], answered)]
        case "laplace":
            return [pure(1 / p["sigma"], 2 * asked)]
        case "exponential":
            return [{"kind": "bounded_range", "eta": 2 * SQRT2 / p["sigma"], "count": asked}]
        case "single_stable":
            return [pure(p["epsilon"], asked), {"kind": "delta", "delta": p["delta"], "count": asked}]
        case "stability" | "soft_stability":  # whose scale follows from its epsilon: the whole of it is held to that
            return [{"kind": "delta", "delta": p["delta"] / 2, "count": 1}]
        case "histogram":
            return [normal(SQRT2 if replaced else 1, p["sigma"], rounds)]
        case "gradient_descent":
            moved, steps = 2 if replaced else 1, p["steps"]
            early = (
                [normal(moved, p["early_noise_multiplier"] * p["sigma"], steps * (rounds - 1))] if rounds > 1 else []
            )
            return [*early, normal(moved, p["sigma"], steps)]
        case "dpsgd":
            return [
                {
                    "kind": "sampled_gaussian",
                    "rate": p["sampling_rate"],
                    "noise": p["noise_multiplier"],
                    "count": p["steps"],
                }
            ]
    return None


MOVED = {"gaussian": SQRT2, "confident": SQRT2, "interactive": SQRT2, "laplace": SQRT2, "exponential": SQRT2,
         "single_stable": SQRT2, "stability": SQRT2, "soft_stability": SQRT2}  # fmt: skip


def _mechanism(folder: Folder) -> Check:
    """What was reserved for the labels, or the model, against what its mechanism's theorem says it costs."""
    run, name = folder.statement["mechanism"], folder.statement["mechanism"]["name"]
    costs = needed(folder)
    if not folder.statement["private"]:
        return Check("mechanism", True, "nothing was reserved in secret noise")
    if costs is None:
        return Check("mechanism", True, f"{name} is not known here: its events are taken as they stand", loose=True)
    wrong = [_shown(cost) for cost in costs if not any(_covers(part["events"], cost) for part in folder.parts)]
    if name in ("stability", "soft_stability"):
        mine = [part for part in folder.parts if any(e["kind"] == "delta" for e in part["events"])]
        blocks = sum(e["count"] for part in mine for e in part["events"] if e["kind"] == "pure")
        epsilon = bounds(mine[0]["events"], run["parameters"]["delta"]).low if mine else math.inf
        if blocks != run["parameters"]["max_failures"] or epsilon > run["parameters"]["epsilon"] * (1 + EQUAL):
            wrong.append(f"{blocks} blocks at epsilon {epsilon:.6g}")
    moved = (run["sensitivity"] or {}).get("l2")
    if name in MOVED and not math.isclose(moved or 0, MOVED[name], rel_tol=EQUAL):
        wrong.append(f"sensitivity {moved}")
    return Check(
        "mechanism", not wrong, f"not reserved: {'; '.join(wrong)}" if wrong else "; ".join(map(_shown, costs))
    )


def _covers(events: list[Event], cost: Event) -> bool:
    """Whether these events hold as many of this one, of the same scale."""
    if cost["kind"] == "sampled_gaussian":
        curves = [e for e in events if e["kind"] == "rdp_curve" and e["count"] >= cost["count"]]
        return any(
            all(r >= sampled_divergence(cost, a) * (1 - 1e-6) for a, r in zip(e["orders"], e["rdp"], strict=True))
            for e in curves
        )
    (scale,) = cost.keys() - {"kind", "count"}
    same = [e for e in events if e["kind"] == cost["kind"] and math.isclose(e[scale], cost[scale], rel_tol=EQUAL)]
    return sum(e["count"] for e in same) >= cost["count"]


def _shown(event: Event) -> str:
    scales = ", ".join(f"{key} {value:.6g}" for key, value in event.items() if key not in ("kind", "count"))
    return f"{event['count']} x {event['kind']} ({scales})"


def _claims(folder: Folder) -> Iterator[Check]:
    """The epsilon of the folder, of each of its parts, and of the account."""
    s, account = folder.statement, folder.statement["composition"]
    if not s["private"]:
        empty = s["guarantee"]["epsilon"] is None and account["account_total"] is None
        yield Check(
            "guarantee",
            False,
            "none is claimed: its noise was seeded" + ("" if empty else ", and yet an epsilon is told"),
        )
        return
    delta, others, cap = s["guarantee"]["delta"], s["other_releases"], account["account_cap"]
    mine = [e for part in folder.parts for e in part["events"]]
    yield claim("guarantee", s["guarantee"]["epsilon"], s["guarantee"]["route"], mine, delta, cap, costs=needed(folder))
    for part in (*folder.parts, *others):
        if part["epsilon"] is not None:
            alone = claim("part", part["epsilon"], part["route"], part["events"], delta, cap)
            yield replace(alone, found=f"{part['what']}: {alone.found}")
    total = account["account_total"]
    if total is None:
        seeded = any("NOT PRIVATE" in other["what"] for other in others)
        yield Check(
            "account", seeded, "no total is claimed: " + ("a release used seeded noise" if seeded else "but why?")
        )
        return
    everything = claim(
        "account", total, account["account_route"], mine + [e for other in others for e in other["events"]], delta, cap
    )
    less = total < s["guarantee"]["epsilon"] * (1 - EQUAL)  # where a curve alone is known, it has no other lower bound
    yield replace(everything, holds=False, found=f"{everything.found}; less than this release") if less else everything


def claim(name: str, epsilon: float, route: str | None, events: list[Event], delta: float, cap: float | None,
          costs: list[Event] | None = None) -> Check:  # fmt: skip
    """One epsilon against what its events cost; costs: what they are of, where that is more than their curve."""
    if route == "cap":
        return Check(name, epsilon == cap, f"the account's cap, {epsilon:.6g}: the ledger's filter keeps it (--ledger)")
    exactly = [e for e in costs or () if e["kind"] == "sampled_gaussian"]
    found = bounds([*exactly, *(e for e in events if not exactly or e["kind"] != "rdp_curve")], delta)
    kinds = {e["kind"] for e in events} - {"delta"}
    odd = (route == "gdp") != (kinds == {"gaussian"}) or (
        route == "pure" and not kinds <= {"laplace", "pure", "bounded_range"}
    )
    odd |= (route == "pld" and bool(kinds & {"zcdp", "rdp_curve"})) or (route == "none") != (not kinds)
    return verdict(
        name, epsilon, found, f", by {route}, which does not go with {', '.join(sorted(kinds))}" if odd else ""
    )


def verdict(name: str, epsilon: float, found: Bounds, fault: str = "") -> Check:
    """Whether an epsilon may be claimed: below the lower bound it fails, 1 % above the upper one it is loose."""
    low, high = found.low * (1 - EQUAL), found.high * LOOSE
    words = f"epsilon {epsilon:.6g} claimed; " + (
        f"it is {found.low:.6g}" if found.low == found.high else f"it lies in {found.low:.6g} to {found.high:.6g}"
    )
    return Check(name, epsilon >= low and not fault, f"{words} ({found.how}){fault}", loose=epsilon > high)


def _words(folder: Folder) -> Check:
    """What people read: the headline and the inequality, here, in README.md and in report.html."""
    s, of = folder.statement, folder.statement["guarantee"]
    if not s["private"]:
        return Check("words", "NOT PRIVATE" in s["headline"], s["headline"])
    told = [
        re.search(pattern, text)
        for pattern, text in ((r"epsilon = ([\d.E+-]+)", s["headline"]), (r"ε = ([\d.E+-]+)", of["symbols"]))
    ]
    wrong = (
        []
        if all(m and of["epsilon"] <= float(m[1].rstrip(".")) <= 1.02 * of["epsilon"] + 1e-3 for m in told)
        else ["epsilon"]
    )
    wrong += [key for key in ("adjacency", "unit", "route") if str(of[key]) not in s["headline"]]
    page, card = (_plain((folder.path / name).read_text("utf-8")) for name in ("report.html", "README.md"))
    told_twice = [of["symbols"], *of["plain_words"], *s["assumptions"], *s["not_covered"], s["trust"]["in_words"]]
    wrong += (
        []
        if all(_plain(text) in page and _plain(text) in card for text in told_twice)
        else ["README.md or report.html"]
    )
    wrong += [] if _plain(s["headline"]) in card else ["headline"]
    return Check("words", not wrong, f"tell another story: {', '.join(wrong)}" if wrong else s["headline"])


def _plain(text: str) -> str:
    """Without the marks by which Markdown and HTML show it as it stands."""
    return html.unescape(text).replace("\\", "").replace("\u00a0", " ")
