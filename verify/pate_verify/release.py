"""Checks that the files of a release agree with each other, and its claims with the cost of its mechanism."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mpmath import mp

from pate_verify.costs import EpsilonBounds, compute_bounds
from pate_verify.events import PURE_KINDS, Event
from pate_verify.words import (
    ACCURACY_COLUMNS,
    COST_COLUMNS,
    CURVE_COLUMNS,
    OTHER_COLUMNS,
    Page,
    Rows,
    Words,
    find_rows,
    format_certificate,
    format_test,
    hides_text,
    join_words,
    read_markdown_tables,
    strip_backslashes,
    strip_markup,
)

RELATIVE_TOLERANCE = 1e-9  # rounding of sums and roots
LOOSE_FACTOR = 1.01
GRID_FACTOR = 1.002  # largest ratio of two upper bounds by different grids of losses and of Renyi orders
ACCOUNTANT_FACTOR = 1.005  # largest ratio of two accountants' epsilons for a mechanism calibrated to an epsilon
ANSWER_FILES = {
    "labels_sha256": "labels.csv",
    "cells_sha256": "cells.csv",
    "scores_sha256": "scores.safetensors",
    "guide_sha256": "guide.safetensors",
    "first_answers_sha256": "first_answers.json",
}
STUDENT_FILE = "student.safetensors"
RELEASE_FILES = ("privacy.json", "summary.json", "report.html", "README.md", STUDENT_FILE)
"""Files that every release may have. Answers, a private test and an encoder have further files."""
TABLE_FILES = {
    "synthesizer_sha256": "synthesizer.safetensors",
    "first_answers_sha256": "first_answers.json",
    "rows_sha256": "synthetic.csv",
}
"""Key of a SHA-256 in the ledger -> file of a synthetic table."""
MAX_HEADER_BYTES = 100_000_000
SQRT2 = math.sqrt(2)
CHOICE, TEST, SEEDED = "choice of a student", "test of", "NOT PRIVATE"
"""Words with which the purpose of a reservation begins, and the words that mark seeded noise."""
SPARSE_VECTORS = ("sparse_vector", "soft_sparse_vector")
VOTE_MECHANISMS = ("gaussian", "confident", "interactive", "laplace", "exponential", "single_stable", *SPARSE_VECTORS)


@dataclass(frozen=True)
class Check:
    """The result of one check, which is printed as one line.

    Attributes:
        is_loose: True if the claim holds but is larger than necessary.
        is_checked: True if the present files suffice for the check.
    """

    name: str
    is_ok: bool
    message: str
    is_loose: bool = False
    is_checked: bool = True

    def __str__(self) -> str:
        status = "loose" if self.is_loose else "ok" if self.is_checked else "not checked"
        return f"{status if self.is_ok else 'FAILS':<5}  {self.name:<10}  {self.message}"


def make_check(name: str, results: Mapping[str, bool], fault: str, message: str) -> Check:
    """Combine many results in one check, whose message lists the failed results after ``fault``."""
    failed_names = [key for key, passes in results.items() if not passes]
    return Check(name, not failed_names, f"{fault}: {', '.join(failed_names)}" if failed_names else message)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for what two readers take differently: a repeated key, or an infinite number."""

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(keys := dict(pairs)) < len(pairs):
            raise ValueError(f"a key of {', '.join(keys)[:80]} is repeated")
        return keys

    def parse_number(digits: str) -> float:
        if not math.isfinite(number := float(digits)):
            raise ValueError(f"{digits[:80]} is no finite number")
        return number

    return json.loads(text, object_pairs_hook=make_object, parse_constant=parse_number, parse_float=parse_number)


@dataclass(frozen=True)
class ReleaseFolder:
    """The JSON files of a release folder. ``release`` is None if the folder has no release.json."""

    path: Path
    statement: Mapping[str, Any]
    summary: Mapping[str, Any]
    release: Mapping[str, Any] | None

    @classmethod
    def load(cls, folder: Path) -> ReleaseFolder:
        """Load the folder of a run or of its release. Raises ValueError if the files cannot be read."""
        path = folder / "release" if (folder / "release").is_dir() else folder
        if path != folder and (folder / "privacy.json").exists():
            problem = f"has a statement, and a folder {path.name!r} that may have another"
            raise ValueError(f"release={str(folder)!r}: {problem}. Name the folder of a run.")
        names = ["privacy.json", "summary.json", *(file.name for file in path.glob("release.json"))]
        try:
            statement, summary, *release = (dict(parse_json((path / name).read_text("utf-8"))) for name in names)
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"release={str(path)!r}: cannot be read ({error}). Name the folder of a run.") from error
        return cls(path, statement, summary, release[0] if release else None)

    @property
    def is_table(self) -> bool:
        """Whether the release is a synthetic table."""
        return bool(self.statement["mechanism"]["name"] == "marginals")

    @property
    def is_distributed(self) -> bool:
        """Whether several sites made the release, whose noise is the sum of their shares."""
        return bool(self.statement["trust"]["model"] == "distributed")

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """The reservations that paid for this folder."""
        return list(self.statement["composition"]["parts"])

    def read_labels(self) -> list[dict[str, str]]:
        """Read the rows of labels.csv; empty if the folder has no labels."""
        if self.release is None:
            return []
        return list(csv.DictReader((self.path / "labels.csv").read_text("utf-8").splitlines()))


def run_checks(folder: ReleaseFolder) -> Iterator[Check]:
    """Run all checks. If privacy.json does not fit its JSON schema, no other check is run."""
    from jsonschema import Draft202012Validator

    schema = json.loads(files("pate_verify").joinpath("privacy.schema.json").read_text(encoding="utf-8"))
    faults = [f"{f.json_path}: {f.message[:80]}" for f in Draft202012Validator(schema).iter_errors(folder.statement)]
    message = f"privacy.json fits version {folder.statement.get('schema_version')}"
    yield Check("schema", not faults, "; ".join(faults[:3]) or message)
    checks = (_check_words, _check_files, _check_record, _check_labels, _check_student, _check_mechanism, _check_claims)
    for check in () if faults else (*checks, _check_test, _check_certificate, _check_table):
        yield from run_check(check, folder)


def run_check(check: Callable[..., Check | Iterator[Check]], folder: ReleaseFolder, *terms: Any) -> Iterator[Check]:
    """Run one check, which fails if it cannot read the release."""
    name = check.__name__.removeprefix("_").removeprefix("check_")
    try:
        result = check(folder, *terms)
        yield from (result,) if isinstance(result, Check) else result
    except ImportError as error:
        yield make_missing_check(name, error)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        yield Check(name, False, f"cannot be read: {type(error).__name__}: {error}")


def _check_words(folder: ReleaseFolder) -> Check:
    """Compare the sentences in privacy.json, report.html and README.md with each other and with the numbers."""
    statement, guarantee, headline = folder.statement, folder.statement["guarantee"], folder.statement["headline"]
    if not statement["private"]:
        return Check("words", SEEDED in headline, headline)
    words, plain_words = Words(statement), guarantee["plain_words"]
    texts = [*words.captions, guarantee["symbols"], *plain_words, *statement["assumptions"], *statement["not_covered"]]
    utility, texts = statement["utility"], [*texts, statement["trust"]["in_words"]]
    texts += [(utility["private_test"] or {}).get("in_words", ""), utility.get("model", {}).get("certificate", "")]
    page, card = Page((folder.path / "report.html").read_text("utf-8")), (folder.path / "README.md").read_text("utf-8")
    tables = read_markdown_tables(card)
    rows = find_rows(tables, ACCURACY_COLUMNS) or []
    results = {
        "headline": headline == words.headline,
        "hidden text (README.md)": not hides_text(card),
        **{f"{fault} (report.html)": False for fault in page.faults},
        "symbols": guarantee["symbols"] == words.symbols,
        "plain_words": plain_words[: len(words.plain_words)] == words.plain_words,
        "epsilon (report.html)": page.card == words.card,
        **dict(_compare_tables(words, "report.html", page.tables, join_words)),
        **dict(_compare_tables(words, "README.md", tables, strip_backslashes)),
        "accuracies (README.md)": rows[: len(words.accuracies)] == words.accuracies,
        "curve (report.html)": _is_curve_priced(folder, words, page),
        "README.md": all(strip_backslashes(text) in strip_markup(card) for text in (headline, *texts)),
        "report.html": all(join_words(text) in page.text for text in texts),
    }
    return make_check("words", results, "differ from the numbers of privacy.json", headline)


def _compare_tables(
    words: Words, name: str, tables: list[Rows], normalize: Callable[[str], str]
) -> Iterator[tuple[str, bool]]:
    """Compare the tables of a page that state a cost with the numbers."""
    verdict = {row[0]: row[1] for row in tables[0] if len(row) == 2}
    for key, text in words.verdict.items():
        yield f"{key} ({name})", verdict.get(key) == normalize(text)
    expected_rows = {"costs": (COST_COLUMNS, words.costs), "others": (OTHER_COLUMNS, words.other_releases)}
    for key, (columns, rows) in expected_rows.items():
        expected = [tuple(map(normalize, row)) for row in rows]
        yield f"{key} ({name})", (find_rows(tables, columns) or []) == expected


def _is_curve_priced(folder: ReleaseFolder, words: Words, page: Page) -> bool:
    """Return whether the cost of all queries, below the curve of costs, is at least that of the incurred events.

    Without release.json, whose labels are in another folder, the events are not known.
    """
    (*_, (_, stated)) = find_rows(page.folded_tables, CURVE_COLUMNS) or [("", "")]
    terms = words.headline.partition(" (")[2]
    captions = re.findall(rf"epsilon = (\S+) \({re.escape(join_words(terms))} after the last query", page.text)
    if captions != ([stated] if stated else []):
        return False
    if not stated or folder.release is None:
        return True
    try:
        low = compute_bounds(folder.release["incurred"], folder.statement["guarantee"]["delta"]).low
    except ImportError:
        return True
    return float(stated) >= low * (1 - RELATIVE_TOLERANCE)


def _check_files(folder: ReleaseFolder) -> Check:
    """Compare every file with its hash. An unknown file fails even if its hash is correct."""
    sums = folder.path / "SHA256SUMS"
    claims = dict(line.split("  ", 1)[::-1] for line in sums.read_text("utf-8").splitlines())
    paths = [file for file in folder.path.rglob("*") if file != sums or sums.is_symlink()]
    paths = [file for file in paths if file.is_symlink() or not file.is_dir() or not any(file.iterdir())]
    file_by_name = {file.relative_to(folder.path).as_posix(): file for file in paths}
    allowed = {*RELEASE_FILES, *(() if folder.release is None else ("release.json", *ANSWER_FILES.values()))}
    allowed |= {"private_test.json"} if any(part["what"].startswith(TEST) for part in folder.parts) else set()
    if folder.is_table:
        allowed = allowed - {STUDENT_FILE} | {*TABLE_FILES.values()}
    for slot, facts in enumerate(folder.statement["trust"]["rounds"] if folder.is_distributed else ()):
        allowed |= {"charter.json", f"round-{slot}.json", f"round-{slot}.public"}
        allowed |= {f"sum-{slot}.json"} if facts["used"] else set()
    card, encoder = folder.statement.get("encoder", {}), dict[str, str]()
    if STUDENT_FILE in file_by_name and card.get("kind") not in (None, "given"):  # the files that a student applies
        digests = {card["file"]: card["sha256"], "tokenizer.json": card["tokenizer_sha256"]}
        encoder = {f"encoder/{file}": digest for file, digest in digests.items() if file and digest}
    allowed |= encoder.keys()
    is_file = {name: file.is_file() and not file.is_symlink() for name, file in file_by_name.items()}
    if extras := [name for name in file_by_name if name not in allowed or not is_file[name]]:
        return Check("files", False, f"{', '.join(map(repr, sorted(extras)[:5]))} is no part of a release")
    hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in file_by_name.items()}
    results = {name: hashes.get(name) == claims.get(name) for name in sorted(hashes.keys() | claims.keys())}
    results |= {f"{name} (encoder)": hashes[name] == encoder[name] for name in hashes.keys() & encoder.keys()}
    if (record := folder.release) is not None:
        results |= {f"{name} (release.json)": record.get(key) == hashes.get(name) for key, name in ANSWER_FILES.items()}
    return make_check("files", results, "differ from their hashes", f"{len(claims)} hashes")


def _check_record(folder: ReleaseFolder) -> Check:
    """Compare the facts in privacy.json, summary.json and release.json."""
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
    ids = [part["release_id"] for part in (*folder.parts, *statement["other_releases"])]
    results["parts"] = bool(folder.parts) and len({*ids}) == len(ids)
    has_choice = any(part["what"].startswith(CHOICE) for part in folder.parts)
    has_test = any(part["what"].startswith(TEST) for part in folder.parts)
    results["private_test"] = (utility["private_test"] is not None) == has_test
    other_keys = {"schema_version", "seconds", "student", "teachers_id", "model"}
    results["keys (summary.json)"] = folder.summary.keys() <= summary_facts.keys() | other_keys
    results["model (summary.json)"] = folder.summary.get("model") == utility.get("model")
    results["tuning.student"] = statement["tuning"]["student"] == ("charged" if has_choice else "none")
    if statement["private"]:  # seeded noise has no epsilon, and no part of a private release has it
        for part, can_be_seeded in (
            *((p, False) for p in folder.parts),
            *((p, True) for p in statement["other_releases"]),
        ):
            is_seeded = can_be_seeded and SEEDED in part["what"]
            results[f"epsilon of {part['release_id']}"] = (part["epsilon"] is None) == is_seeded
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
            "product": record["answered_by"].get("product", "labels") == "labels",
            "pool_sha256": record.get("pool_sha256") in pools,
        }
    return make_check("record", results, "differ between the files", f"{len(results)} facts agree")


def _check_labels(folder: ReleaseFolder) -> Check:
    """Compare the numbers of queries and answers in labels.csv with the statement."""
    if folder.release is None:
        return Check("labels", True, "are in another folder, or none were released")
    run, rows = folder.statement["mechanism"], folder.read_labels()
    num_answered, num_queries = sum(int(row["label"]) >= 0 for row in rows), len({row["query"] for row in rows})
    is_consistent = len(rows) == num_queries == run["queries_asked"] and num_answered == run["queries_answered"]
    fault = "" if is_consistent else "; the statement has other numbers"
    return Check("labels", is_consistent, f"{num_answered} labels of {num_queries} queries{fault}")


def _check_student(folder: ReleaseFolder) -> Check:
    """Compare the header of the student's file with the statement. The weights are not read."""
    statement, file, kind = folder.statement, folder.path / STUDENT_FILE, folder.summary["student"]
    if not file.exists():
        return Check("student", kind is None, "none was released" if kind is None else "its file is missing")
    facts = parse_json(read_safetensors_header(file)["__metadata__"]["pate_torch"])
    spec, network, classes = facts["spec"], facts["network"], facts["spec"]["class_names"]
    class_names = [row["class"] for row in statement["utility"]["classes"]]
    labels = [(int(row["label"]), row["class"]) for row in folder.read_labels() if int(row["label"]) >= 0]
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
    return make_check("student", results, "does not fit the statement", f"{kind}, {len(classes)} classes")


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """Read the JSON header of a safetensors file, which follows its length in 8 bytes. The tensors are not read."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"the header of {file.name} has {size} bytes")
        return dict(parse_json(stream.read(size)))


def _check_mechanism(folder: ReleaseFolder) -> Check:
    """Compare the reserved events with the events that the theorem of the mechanism requires."""
    run, name = folder.statement["mechanism"], folder.statement["mechanism"]["name"]
    if folder.is_distributed:
        return Check("mechanism", True, f"{name}, whose cost the checks of the sites recompute")
    costs = list_required_events(folder)
    if not folder.statement["private"]:
        return Check("mechanism", True, "the noise was seeded")
    if costs is None:
        return Check("mechanism", True, f"{name} is unknown, so its events are not checked", is_checked=False)
    if (counts := _make_count_event(folder)) is not None:
        costs.append(counts)
    groups = [part["events"] for part in folder.parts]
    results = {_format_event(cost): any(_covers(group, cost, costs) for group in groups) for cost in costs}
    if name in VOTE_MECHANISMS and run["num_teachers"]:
        sensitivity = run["sensitivity"] and run["sensitivity"]["l2"]
        results[f"sensitivity {sensitivity}"] = math.isclose(sensitivity or 0, SQRT2, rel_tol=RELATIVE_TOLERANCE)
    if name in SPARSE_VECTORS:  # their scale depends on epsilon, so epsilon is compared
        events = [e for group in groups if any(e["kind"] == "delta" for e in group) for e in group]
        blocks = sum(e["count"] for e in events if e["kind"] == "pure")
        bounds, epsilon = compute_bounds(events, run["parameters"]["delta"]), run["parameters"]["epsilon"]
        is_ok = blocks == run["parameters"]["max_failures"] and bool(events)
        is_ok &= bounds.low <= epsilon * (1 + RELATIVE_TOLERANCE) and epsilon <= bounds.high * ACCOUNTANT_FACTOR
        results[f"{blocks} blocks at epsilon {bounds.low:.6g}"] = is_ok
    return make_check("mechanism", results, "not reserved", "; ".join(map(_format_event, costs)))


def list_required_events(folder: ReleaseFolder) -> list[Event] | None:
    """List the events that the answers cost by the theorem of the mechanism; None if the mechanism is unknown.

    Source: PATE 2018, section 4.1 (gaussian) and Algorithm 1 (confident, interactive); PATE 2017 (laplace); Cesar &
    Rogers 2021 (exponential); BTT18 and LZCW21 (sparse_vector); Dwork et al. 2006 (histogram); Bassily, Smith &
    Thakurta 2014 (gradient_descent); Mironov, Talwar & Zhang 2019 (dpsgd); McKenna, Miklau & Sheldon 2021 (marginals).
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
        case "exponential" if run["num_teachers"]:  # the hypothesis of an algorithm has no teachers
            return [make_event("bounded_range", queries, eta=2 * SQRT2 / parameters["sigma"])]
        case "single_stable":
            return [make_pure(parameters["epsilon"], queries), make_event("delta", queries, delta=parameters["delta"])]
        case "sparse_vector" | "soft_sparse_vector":
            return [make_event("delta", 1, delta=parameters["failure_delta"])]
        case "histogram":
            return [make_gaussian(SQRT2 if replaces_one else 1, parameters["sigma"], rounds)]
        case "gradient_descent":
            sensitivity, steps = 2 if replaces_one else 1, parameters["steps"]
            last = make_gaussian(sensitivity, parameters["sigma"], steps)
            sigma = parameters["early_noise_multiplier"] * parameters["sigma"] if rounds > 1 else 0
            return [make_gaussian(sensitivity, sigma, steps * (rounds - 1)), last] if sigma else [last]
        case "marginals":  # a unit changes one count of each table, or two if it is replaced
            length, votes = (SQRT2 if replaces_one else 1), parameters["rounds"]
            tables = make_gaussian(length * math.sqrt(parameters["num_tables"]), parameters["sigma"], 1)
            count = make_gaussian(length, parameters["count_sigma"], 1)
            return [count, tables, *([make_gaussian(length, parameters["vote_sigma"], votes)] if votes else [])]
        case "dpsgd":
            rate, noise = parameters["sampling_rate"], parameters["noise_multiplier"]
            return [make_event("sampled_gaussian", 1, rate=rate, noise_multiplier=noise, steps=parameters["steps"])]
    return None


def _make_count_event(folder: ReleaseFolder) -> Event | None:
    """Make the event of the first answers of a release of labels; None if there are none.

    One vector holds the class counts and half of the units' shares of values outside the public range, so one unit
    changes it by sqrt(1 + 1/4), or by sqrt(2 + 1/4) if the unit is replaced (Dong, Roth & Su 2022, Theorem 2.7).
    """
    if folder.release is None or "first_answers_sha256" not in folder.release:
        return None
    replaces_one = folder.statement["guarantee"]["adjacency"] == "replace_one"
    facts = parse_json((folder.path / ANSWER_FILES["first_answers_sha256"]).read_text("utf-8"))
    return {"kind": "gaussian", "count": 1, "mu": math.sqrt((2 if replaces_one else 1) + 1 / 4) / facts["sigma"]}


def _covers(events: list[Event], cost: Event, costs: list[Event]) -> bool:
    """Return whether the events include as many events of this kind and scale as all costs together require."""

    def count_equal(group: list[Event]) -> int:
        equal_events = [e for e in group if e["kind"] == cost["kind"]]
        for s in cost.keys() - {"kind", "count"}:
            equal_events = [e for e in equal_events if math.isclose(e[s], cost[s], rel_tol=RELATIVE_TOLERANCE)]
        return sum(e["count"] for e in equal_events)

    return count_equal(events) >= count_equal(costs)


def _format_event(event: Event) -> str:
    scales = ", ".join(f"{key} {value:.6g}" for key, value in event.items() if key not in ("kind", "count"))
    return f"{event['count']} x {event['kind']} ({scales})"


def _check_test(folder: ReleaseFolder) -> Iterator[Check]:
    """Check the private test: its cost, its student, and the bound that follows from its noisy counts."""
    if (test := folder.statement["utility"]["private_test"]) is None:
        return
    replaces_one = folder.statement["guarantee"]["adjacency"] == "replace_one"
    part = {part["release_id"]: part for part in folder.parts}[test["id"]]
    mu = (SQRT2 if replaces_one else 1) / test["sigma"]
    (event,) = part["events"] or [{"mu": mu}]  # seeded noise has no cost
    digest = hashlib.sha256((folder.path / STUDENT_FILE).read_bytes()).hexdigest()
    facts = parse_json((folder.path / "private_test.json").read_text("utf-8"))
    probability, limit = compute_test_failure(test)
    rows = [[math.fsum(column) for column in zip(*test["counts"], strict=True)], *test["counts"]]
    noise = [test["sigma"] * math.sqrt(len(rows) - 1), *[test["sigma"]] * (len(rows) - 1)]
    estimates = [value for row, std in zip(rows, noise, strict=True) for value in estimate_accuracy(row, std)]
    stated_estimates = [value for pair in (test["accuracy"], *test["recalls"]) for value in pair]
    results = {
        "private_test.json": facts == {key: test[key] for key in facts} and "student_sha256" in facts,
        "cost": math.isclose(event["mu"] if "mu" in event else math.sqrt(2 * event["rho"]), mu, rel_tol=1e-9),
        "student": digest == test["student_sha256"] == (digest if test["multiple"] != 1 else test["tested_sha256"]),
        "number of units": (test["num_units"] is not None) == replaces_one,
        "bound": not test["bound"] or probability <= limit * (1 + 1e-6),
        "estimates": len(estimates) == len(stated_estimates)
        and all(
            math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-8) for pair in zip(estimates, stated_estimates, strict=True)
        ),
        "words": test["in_words"] == format_test(test, folder.statement["guarantee"]["adjacency"]),
    }
    message = (
        f"accuracy {test['bound']:.6g} with probability {test['confidence']:g}, number {test['number']} of the account"
    )
    yield make_check("test", results, "does not fit the statement", message)


def estimate_accuracy(counts: Sequence[float], noise_std: float) -> tuple[float, float]:
    """Estimate an accuracy and its standard deviation from noisy numbers of right and wrong predictions."""
    n = max(1.0, math.fsum(counts))
    p = min(1.0, max(0.0, counts[0] / n))
    sampling = (p * n + 1) * (n - p * n + 1) / (n + 2) ** 2 / n
    return p, math.sqrt(sampling + (noise_std / n) ** 2 * (p**2 + (1 - p) ** 2))


def compute_test_failure(test: Mapping[str, Any]) -> tuple[float, float]:
    """Compute the probability of counts as good as those of a test at the claimed bound, and its allowed maximum."""
    p, failure, n = test["bound"], 1 - test["confidence"], test["num_units"]
    right, wrong = (math.fsum(column) for column in zip(*test["counts"], strict=True))
    std = math.sqrt(len(test["counts"]) * (test["sigma"] ** 2 + 1 / 12))
    if n is None:  # a tenth of the failures is left to the limit of the number of units
        quantile = SQRT2 * float(mp.erfinv(1 - 2 * mp.mpf(failure) / 10))
        n, failure = max(0, math.ceil(right + wrong + quantile * SQRT2 * std)), 0.9 * failure
    wrong = max(wrong, -2 * std**2 * (right + wrong) / max(1, n))
    if not 0 < p < 1:
        return 1.0, failure
    scale, tail = std * math.hypot(p, 1 - p), 0.0
    reach = math.ceil(40 * math.sqrt(n * p * (1 - p)) + 40)  # the binomial mass further from n p is below 1e-100
    for k in range(max(0, int(n * p) - reach), min(n, int(n * p) + reach) + 1):
        log_choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        log_mass = log_choose + k * math.log(p) + (n - k) * math.log1p(-p)
        tail += math.exp(log_mass) * math.erfc((n * p + (1 - p) * right - p * wrong - k - 0.5) / scale / SQRT2) / 2
    return max(p**n, tail), failure


def _check_certificate(folder: ReleaseFolder) -> Iterator[Check]:
    """Check the certificate of a hypothesis: a sum of terms (docs/howto/hypotheses.md) at the reserved epsilon."""
    if (words := (model := folder.statement["utility"].get("model", {})).get("certificate")) is None:
        return
    n, size, excess = model["num_records"], model["num_candidates"], 0.0
    if events := [e for part in folder.parts for e in part["events"]]:  # none with one candidate, or with seeded noise
        b = (1 - model["probability"]) / (3 * sum(e["count"] for e in events))
        excess = 2 * math.log(size / b) / (min(e["eta"] for e in events) * n)
        excess = min(1, excess + math.sqrt(math.log(size / b) / (2 * n)) + math.sqrt(-math.log(b) / (2 * n)))
    forms = [sum(e["count"] for e in events) == 1] if events else [True, False]  # one rule, or one for each class
    is_whole = any(words.startswith(format_certificate(model, is_single)) for is_single in forms)
    results = {
        "excess_risk": math.isclose(model["excess_risk"], excess, rel_tol=1e-9) or not folder.statement["private"],
        "words": is_whole and words.endswith(").") and words.count(". ") == 3,
    }
    yield make_check("model", results, "does not fit its certificate", f"excess error {excess:.6g}")


def _check_table(folder: ReleaseFolder) -> Iterator[Check]:
    """Compare the files of a synthetic table with the parameters in the statement. The tensors are not read."""
    if not folder.is_table:
        return
    header = read_safetensors_header(folder.path / TABLE_FILES["synthesizer_sha256"])
    facts, parameters = parse_json(header["__metadata__"]["pate_torch"]), folder.statement["mechanism"]["parameters"]
    counts = {"sigma": None}
    if not folder.is_distributed:
        counts = parse_json((folder.path / TABLE_FILES["first_answers_sha256"]).read_text("utf-8"))
    with (folder.path / TABLE_FILES["rows_sha256"]).open(encoding="utf-8", newline="") as stream:
        names, *rows = csv.reader(stream)
    columns = facts["domain"]["columns"]
    results = {
        "num_tables": len({*map(tuple, facts["cliques"])}) == len(facts["cliques"]) == parameters["num_tables"],
        "order": max(map(len, facts["cliques"])) == parameters["order"] + 1,
        "sigma": facts["sigma"] == parameters["sigma"],
        "count_sigma": counts["sigma"] == parameters.get("count_sigma"),
        "rounds": ("rows" in header) == (parameters["rounds"] > 0),
        "columns": all(a in (b, f"'{b}") for a, b in zip(names, columns, strict=True)),  # as spreadsheets need it
        "rows": len(rows) == facts["size"] and all(len(row) == len(columns) for row in rows),
    }
    yield make_check("table", results, "does not fit the statement", f"{len(rows)} rows of {len(columns)} columns")


def make_missing_check(name: str, error: ImportError, extras: str = "losses") -> Check:
    """Make the result of a check that needs packages which are not installed."""
    return Check(name, True, f"needs more packages: pip install 'pate-verify[{extras}]' ({error})", is_checked=False)


def _check_claims(folder: ReleaseFolder) -> Iterator[Check]:
    """Check the epsilon of the folder, of each of its parts, and of the account."""
    statement, guarantee, account = folder.statement, folder.statement["guarantee"], folder.statement["composition"]
    if not statement["private"]:
        is_empty = guarantee["epsilon"] is None and account["account_total"] is None
        suffix = "" if is_empty else ", but the statement has an epsilon"
        yield Check("guarantee", False, f"none is claimed, because the noise was seeded{suffix}")
        return
    terms, others = (guarantee["delta"], account["account_cap"]), statement["other_releases"]
    own_events, other_events = ([e for part in parts for e in part["events"]] for parts in (folder.parts, others))
    yield _check_claim("guarantee", guarantee["epsilon"], guarantee["route"], own_events, *terms)
    for part in (*folder.parts, *others):
        if part["epsilon"] is not None:
            check = _check_claim("part", part["epsilon"], part["route"], part["events"], *terms)
            yield replace(check, message=f"{part['what']}: {check.message}")
    total, is_seeded = account["account_total"], any(SEEDED in part["what"] for part in others)
    is_claimed = [value is not None for value in (total, account["account_total_ex_post"])]
    if is_seeded or not all(is_claimed):
        reason = "because a release used seeded noise" if is_seeded else "but no release used seeded noise"
        is_ok = is_seeded and not any(is_claimed)
        yield Check("account", is_ok, f"{'a' if any(is_claimed) else 'no'} total is claimed, {reason}")
        return
    check = _check_claim("account", total, account["account_route"], own_events + other_events, *terms)
    # The total of events that have only a Renyi curve has no lower bound except the epsilon of this release.
    if total < guarantee["epsilon"] * (1 - RELATIVE_TOLERANCE):
        check = replace(check, is_ok=False, message=f"{check.message}; less than this release")
    yield check


def check_spent(folder: ReleaseFolder, commits: Mapping[str, list[Event]] | None = None) -> Iterator[Check]:
    """Check each epsilon that was spent (ex post), where it differs from the checked epsilon of the worst case.

    ``commits`` holds the incurred events of each reservation in the ledger. Without it, only those in release.json are
    known: they bound the spent epsilon from below, and together with the reserved events of all others from above.
    """
    statement, account, record = folder.statement, folder.statement["composition"], folder.release or {}
    incurred = {record.get("release_id"): record.get("incurred", [])} if commits is None else commits
    parts = {"this_release": folder.parts, "account_total": [*folder.parts, *statement["other_releases"]]}
    for key, group in parts.items():
        worst, spent = account[key], account[f"{key}_ex_post"]
        if spent == worst or not statement["private"]:
            continue
        if spent is None or worst is None or folder.is_distributed:
            yield Check("spent", False, f"{key}: the epsilon that was spent does not fit that of the worst case")
            continue
        known = [e for part in group for e in incurred.get(part["release_id"], [])]
        others = [e for part in group if part["release_id"] not in incurred for e in part["events"]]
        try:
            low, high = (compute_bounds(events, statement["guarantee"]["delta"]) for events in (known, known + others))
        except ImportError as error:
            yield make_missing_check("spent", error)
            continue
        check = check_epsilon("spent", spent, replace(high, low=low.low))
        yield replace(check, message=f"{key}: {check.message}")


def _check_claim(name: str, epsilon: float, route: str, events: list[Event], delta: float, cap: float) -> Check:
    """Compare an epsilon with the cost of its events."""
    if route == "cap":  # The filter charges what releases incurred, which can be less than they reserved.
        is_ok = name == "account" and epsilon == cap
        fault = "" if is_ok else f", but the cap is {cap:.6g}, for all releases together"
        return Check(name, is_ok, f"epsilon {epsilon:.6g} claimed by the account's cap{fault}", is_checked=False)
    try:
        bounds = compute_bounds(events, delta)
    except ImportError as error:
        return make_missing_check(name, error)
    kinds = {e["kind"] for e in events} - {"delta"}
    gaussian_kinds = {"gaussian", "sampled_gaussian"}
    is_consistent = kinds <= {"pure": {*PURE_KINDS}, "pld": {*PURE_KINDS, *gaussian_kinds}}.get(route or "", kinds)
    is_consistent &= kinds <= gaussian_kinds if route == "gdp" else kinds != {"gaussian"}
    is_consistent &= (route in ("none", "delta")) == (not kinds) and (route == "delta") == (bool(events) and not kinds)
    fault = "" if is_consistent else f"; the route {route} does not apply to {', '.join(sorted(kinds))}"
    return check_epsilon(name, epsilon, bounds, fault)


def check_epsilon(name: str, epsilon: float, bounds: EpsilonBounds, fault: str = "") -> Check:
    """Compare an epsilon with its bounds: below ``low`` the check fails, 1 % above ``high`` the claim is loose.

    An epsilon between the bounds may be too low, so it is not confirmed.
    """
    cost = f"is {bounds.low:.6g}" if bounds.low == bounds.high else f"lies in {bounds.low:.6g} to {bounds.high:.6g}"
    is_ok = epsilon >= bounds.low * (1 - RELATIVE_TOLERANCE) and not fault
    is_confirmed = bounds.is_complete and epsilon * GRID_FACTOR >= bounds.high
    remark = "; only an epsilon of at least the upper bound is confirmed" if is_ok and not is_confirmed else ""
    message = f"epsilon {epsilon:.6g} claimed; it {cost} ({bounds.derivation}){fault}{remark}"
    is_loose = bounds.is_complete and epsilon > bounds.high * LOOSE_FACTOR
    return Check(name, is_ok, message, is_loose, is_confirmed)
