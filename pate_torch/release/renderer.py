"""Renders a report as JSON files, a page, a model card, and the closing table on the terminal.

The templates insert the facts of ``report`` and the sentences of ``statement``. Every inserted value is escaped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from markupsafe import Markup

from pate_torch.core import checks
from pate_torch.core.files import compute_file_digest, escape_control_chars, write_atomically
from pate_torch.core.formatting import format_epsilon
from pate_torch.privacy.accounts import PURPOSE_STUDENT_CHOICE
from pate_torch.release import statement
from pate_torch.release.report import (
    INPUT_KINDS,
    AccountClaim,
    Accuracy,
    ColumnReport,
    ReleaseReport,
    Share,
    format_percent,
)
from pate_torch.students.private_test import CONFIDENCE

if TYPE_CHECKING:
    from jinja2 import Environment

_PACKAGE_VERSION = version("pate-torch")  # read at import, so that an error comes before any charge
SUMMARY_SCHEMA = 1
STATEMENT_SCHEMA = 1
CHECKSUM_FILE = "SHA256SUMS"
MAX_POINTS = 300  # largest number of points of a curve
MAX_CLASSES = 24  # largest number of classes in a confusion matrix or a list
WIDTH = 80  # columns of the closing table
PRIVATE_NOTE = "private, for the owner"

ENCODER_KEYS = ("name", "kind", "sha256", "file", "tokenizer_sha256", "module", "license", "trained_on", "disjoint")
SUMMARY_KEYS = (
    *("dataset", "mechanism", "student", "num_teachers", "queries_asked", "queries_answered"),
    *("epsilon", "epsilon_ex_post", "delta", "accountant", "adjacency", "unit"),
    *("epsilon_charged", "epsilon_charged_ex_post", "budget_epsilon", "student_accuracy", "label_accuracy"),
    *("private", "teachers_id", "release_id", "ledger_head"),
)
OWNER_KEYS = ("contact", "collection", "consent", "access", "retention", "period", "renewal")


# ---- files ----------------------------------------------------------------------------------------------------------


def write_release(folder: Path, report: ReleaseReport) -> None:
    """Write all files of the release folder except answers and student."""
    contents = {
        "privacy.json": to_strict_json(build_statement(report)),
        "report.html": render_page(report),
        "README.md": render_model_card(report),
        "summary.json": to_strict_json(build_summary(report)),  # last, because this file marks a finished run
    }
    digests = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in contents.items()}
    for file in folder.rglob("*"):
        if file.is_file() and not file.name.startswith(".") and file.name != CHECKSUM_FILE:
            name = file.relative_to(folder).as_posix()
            digests[name] = digests.get(name) or compute_file_digest(file)
    checksums = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    for name, content in {CHECKSUM_FILE: checksums, **contents}.items():
        write_atomically(folder / name, content)


def check_empty_folder(key: str, folder: Path) -> None:
    """Raise ValueError if a folder exists and is not empty. ``key`` names the folder in the message."""
    if folder.exists() and any(folder.iterdir()):
        raise checks.error(key, str(folder), "is not empty", "Choose a new folder.")


def copy_release(source: Path, folder: Path, report: ReleaseReport | None) -> Path:
    """Copy a release into a new folder, and write ``report`` in place of its report unless ``report`` is None."""
    check_empty_folder("folder", folder)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if report is not None:
        write_release(folder, report)
    return folder


def to_strict_json(content: Mapping[str, Any]) -> str:
    """Format JSON without NaN and infinity, which raise ValueError."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def build_summary(report: ReleaseReport) -> dict[str, Any]:
    """Build the content of summary.json, unrounded. If the run is not private, every epsilon is None."""
    facts = {**vars(report.record), **vars(report.claim), **vars(report.evaluation)}
    summary = {key: facts[key] for key in SUMMARY_KEYS}
    model = {"model": dict(report.record.model)} if report.record.model else {}
    return {"schema_version": SUMMARY_SCHEMA, **summary, "seconds": dict(report.record.seconds), **model}


def build_statement(report: ReleaseReport) -> dict[str, Any]:
    """Build the content of privacy.json, the machine-readable statement; its schema is ``privacy.schema.json``."""
    record, claim = report.record, report.claim
    owner_statements = statement.list_owner_statements(report)
    trust = {"model": "central"} if report.trust is None else {"model": "distributed", **report.trust}
    content = {
        "schema_version": STATEMENT_SCHEMA,
        "software": {"name": "pate_torch", "version": _PACKAGE_VERSION, "date": record.creation_date},
        "private": claim.private,
        "headline": statement.format_headline(report),
        **_build_guarantee(report),
        "other_releases": [other.to_dict() for other in claim.other_releases],
        "utility": _build_utility(report),
        "trust": trust | {"in_words": statement.format_sentence("trust", report)},
        "tuning": {
            "parameters": record.owner.tuning,
            "student": "charged" if claim.has_part(PURPOSE_STUDENT_CHOICE) else "none",
        },
        "declared_values": dict(record.provenance),
        "chosen_by": record.chosen_by,
        "public_assets": [asdict(asset) for asset in record.assets],
        "owner": {name: getattr(record.owner, name) for name in OWNER_KEYS},
        "missing": [name for name, value in owner_statements.items() if statement.NOT_STATED in value],
        "verification": {
            "release_id": record.release_id,
            "ledger_head": claim.ledger_head,
            "audit": {**record.audit, "faults": list(record.audit["faults"])} if record.audit else None,
        },
        "assumptions": list(statement.list_paragraphs("assumptions", report)),
        "not_covered": list(statement.list_paragraphs("not_covered", report)),
    }
    if (card := record.encoder) is not None:
        content["encoder"] = {name: getattr(card, name) for name in ENCODER_KEYS} | {"options": dict(card.options)}
    return content


def _build_guarantee(report: ReleaseReport) -> dict[str, Any]:
    record, claim = report.record, report.claim
    return {
        "guarantee": {
            "definition": "(epsilon, delta)-differential privacy",
            **{key: getattr(claim, key) for key in ("epsilon", "delta", "adjacency", "unit")},
            "records_per_unit": None if claim.unit.startswith("group:") else 1,
            "route": claim.accountant,
            "symbols": statement.format_sentence("symbols", report),
            "plain_words": list(statement.format_plain_words(report)),
        },
        "mechanism": {
            "name": record.mechanism,
            "parameters": dict(record.parameters),
            "sensitivity": dict(record.sensitivity) or None,
            **{key: getattr(record, key) for key in ("noise", "rounds", "num_teachers")},
            **{key: getattr(record, key) for key in ("queries_asked", "queries_answered")},
        },
        "composition": {
            "dataset": record.dataset,
            "this_release": claim.epsilon,
            "this_release_ex_post": claim.epsilon_ex_post,
            "account_total": claim.epsilon_charged,
            "account_total_ex_post": claim.epsilon_charged_ex_post,
            "account_note": statement.NO_TOTAL_NOTE if claim.epsilon_charged is None else statement.ADAPTIVE_NOTE,
            "parts": [part.to_dict() for part in claim.parts],
            "account_route": claim.charged_accountant or claim.accountant,
            "account_cap": claim.budget_epsilon,
            "labels_reused": record.reuses_labels,
        },
    }


def _build_utility(report: ReleaseReport) -> dict[str, Any]:
    """Build the key of the statement on accuracies and intervals; an accuracy is None if it was not measured."""

    def to_dict(share: Share | None) -> dict[str, Any] | None:
        if share is None:
            return None
        low, high = share.interval or (None, None)
        return {"accuracy": share.value, "low": low, "high": high, "points": share.size}

    derived = {"confidence": CONFIDENCE, "in_words": statement.format_sentence("private_test", report)}
    if test := report.evaluation.private_test:
        derived |= {key: getattr(test, key) for key in ("bound", "accuracy", "recalls")}
    return {
        "student": to_dict(report.evaluation.student_share),
        "labels": to_dict(report.evaluation.label_share),
        "classes": [
            {"class": name, **((row and to_dict(row.share)) or {})}
            for name, row in zip(report.confusion_names, report.class_accuracies, strict=True)
        ],
        "subgroups": None,
        **({"model": dict(report.record.model)} if report.record.model else {}),
        "private_test": test and asdict(test) | derived,
    }


# ---- page and model card --------------------------------------------------------------------------------------------


def render_page(report: ReleaseReport) -> str:
    """Render report.html, a page that needs neither network nor scripts."""
    template = _make_page_environment(is_markdown=False).get_template("report.html.jinja")
    return template.render(report=report, **vars(report)).replace(" %", "\u00a0%")


def render_model_card(report: ReleaseReport) -> str:
    """Render README.md, the model card."""
    template = _make_page_environment(is_markdown=True).get_template("model_card.md.jinja")
    return re.sub(r"\n{3,}", "\n\n", template.render(report=report, **vars(report)))


@functools.cache
def _make_page_environment(*, is_markdown: bool) -> Environment:
    options = {"finalize": escape_markdown, "keep_trailing_newline": True} if is_markdown else {}
    environment = statement.make_environment(autoescape=True, **options)
    environment.filters |= {"percent": format_percent}
    functions = make_share_scale, make_cost_curves, thin_points, is_cap_far, select_worst_classes, find_top_confusions
    environment.globals |= {
        "statement": statement,
        "sentence": statement.format_sentence,
        "sentences": statement.list_paragraphs,
        "Scale": Scale,
        "max_classes": MAX_CLASSES,
        "input_kinds": INPUT_KINDS,
        **{function.__name__: function for function in (*functions, select_values)},
    }
    return environment


def escape_markdown(value: object) -> Markup:
    """Escape text for Markdown, so that it cannot become HTML, a table or emphasis."""
    if isinstance(value, Markup):
        return value
    text = escape_control_chars(" ".join(str(value).split()))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(re.sub(r"[\\`*_\[\]|#]", r"\\\g<0>", text))


# ---- charts of the page ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high`` on which positions are given in percent of its length."""

    low: float
    high: float

    def to_percent(self, value: float) -> float:
        """Compute the position of a value, in percent from the lower end."""
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def make_ticks(self, max_ticks: int = 5) -> list[float]:
        """Choose round values on the axis, at most ``max_ticks`` + 1 of them."""
        raw_step = (self.high - self.low) / max_ticks
        size = 10.0 ** math.floor(math.log10(raw_step))
        step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw_step * (1 - 1e-9))
        first_index, last_index = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first_index, last_index + 1)]


def make_share_scale(rows: Sequence[Accuracy]) -> Scale:
    """Make the axis of accuracies, from a multiple of 0.1 below all intervals to 1."""
    min_share = min((row.share.interval or (row.share.value,))[0] for row in rows)
    return Scale(max(0.0, math.floor((min_share - 0.01) * 10) / 10), 1.0)


def thin_points(values: Sequence[float], max_points: int) -> list[tuple[int, float]]:
    """Select at most ``max_points`` values, including the first and the last: (number from 1, value)."""
    index = np.unique(np.linspace(0, len(values) - 1, min(max_points, len(values))).round().astype(int)).tolist()
    return [(i + 1, values[i]) for i in index]


def make_cost_curves(claim: AccountClaim) -> list[dict[str, Any]]:
    """Make the curve of this release's cost, and the levels of guarantee and cap: name, style, points."""
    curve = claim.epsilon_curve
    curves = [{"name": "this release", "style": "a", "points": thin_points(curve, MAX_POINTS)}]
    if claim.epsilon is not None and claim.epsilon > 1.001 * curve[-1]:
        level = [(1, claim.epsilon), (len(curve), claim.epsilon)]
        curves.append({"name": "guarantee", "style": "a flat", "points": level})
    if (cap := claim.budget_epsilon) is not None and not is_cap_far(claim):
        curves.append({"name": "cap", "style": "c flat", "points": [(1, cap), (len(curve), cap)]})
    return curves


def is_cap_far(claim: AccountClaim) -> bool:
    """Return whether the cap is so high that the curve would look flat beside it."""
    highest = max(*claim.epsilon_curve, claim.epsilon or 0.0)
    return claim.budget_epsilon is not None and claim.budget_epsilon > 2.5 * highest


def select_worst_classes(report: ReleaseReport) -> list[Accuracy]:
    """Select the accuracies of all tested classes in order, or of the MAX_CLASSES worst if there are more."""
    accuracies = [accuracy for accuracy in report.class_accuracies if accuracy]
    if len(accuracies) <= MAX_CLASSES:
        return accuracies
    return sorted(accuracies, key=lambda accuracy: accuracy.share.value)[:MAX_CLASSES]


def find_top_confusions(report: ReleaseReport, max_pairs: int = 12) -> list[tuple[str, str, int]]:
    """Find the most frequent confusions: (truth, prediction, count)."""
    counts, names = np.array(report.evaluation.confusion), report.confusion_names
    np.fill_diagonal(counts, 0)
    order = np.argsort(counts, axis=None, kind="stable")[::-1][:max_pairs]
    pairs = zip(*np.unravel_index(order, counts.shape), strict=True)
    return [(names[true], names[guess], int(counts[true, guess])) for true, guess in pairs if counts[true, guess]]


def select_values(column: ColumnReport) -> list[tuple[str, float, float, float, float]]:
    """Select the values of a column in order, or the MAX_CLASSES most frequent among the synthetic rows.

    Returns:
        Name, share of the synthetic rows, noisy share and the ends of its interval, the last three clipped to [0, 1].
    """
    order = sorted(range(len(column.codes)), key=lambda code: -column.shares[code])
    rows = []
    for code in sorted(order[:MAX_CLASSES]):
        noisy, low, high = np.clip(column.noisy_shares[code] + 2 * column.error * np.array([0, -1, 1]), 0, 1).tolist()
        rows.append((column.codes[code], column.shares[code], noisy, low, high))
    return rows


# ---- the terminal ---------------------------------------------------------------------------------------------------


def print_summary(
    report: ReleaseReport,
    *,
    owner: Mapping[str, str] | None = None,
    paths: Mapping[str, Path | str] | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print the closing table of a run in at most 80 columns, as plain text if ``stream`` is no terminal.

    ``owner`` has the private metrics for the owner (name -> value), and ``paths`` the written files (name -> path). If
    ``stream`` is None, the table is printed to standard output.
    """
    from rich import box  # imported here, because few processes print a table
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    frame, lines = (box.ROUNDED, box.HORIZONTALS) if console.is_terminal else (box.ASCII, box.ASCII)
    if not report.claim.private:
        warning, title = Text(statement.NOT_PRIVATE_REASON), statement.NOT_PRIVATE
        console.print(Panel(warning, title=title, border_style="bold red", box=frame, width=WIDTH))
    table = Table(box=lines, show_header=False, width=WIDTH)
    table.add_column(width=22, style="bold")
    table.add_column(ratio=1)
    for name, value in _list_console_rows(report):
        table.add_row(Text(name), Text(value))  # Text, because a string would be parsed as markup
    if owner:
        table.add_section()
        table.add_row(Text("For the owner only"), Text("not in the release folder; do not publish"))
        for name, value in owner.items():
            table.add_row(Text(name), Text(f"{value}  ({PRIVATE_NOTE})"), style="dim")
    console.print(table)
    for name, path in (paths or {}).items():
        console.print(Text(f"  {name:<16}{path}"), soft_wrap=True)  # one line, so that a path can be copied


def _list_console_rows(report: ReleaseReport) -> Iterator[tuple[str, str]]:
    claim = report.claim
    yield "Data set", report.record.dataset
    if claim.epsilon is None:
        yield "Privacy", statement.format_headline(report)
    else:
        yield "Protected", f"{claim.unit_words}, in all files of this release"
        yield "Guarantee", f"epsilon = {format_epsilon(claim.epsilon)}, delta = {claim.terms['delta']}"
        yield from ((f"  {name}", value) for name, value in claim.terms.items() if name != "delta")
        guarantee, *other_costs = statement.list_epsilon_lines(report)
        for cost in other_costs:
            route = f" ({cost.route})" if cost.route != guarantee.route else ""
            terms = "" if cost.epsilon is None else f"epsilon = {format_epsilon(cost.epsilon)}, same terms{route}"
            if terms or cost.note:
                yield cost.name, ". ".join(filter(None, (terms, cost.note)))
    yield from statement.list_run_facts(report).items()
    for accuracy in report.accuracies:
        if accuracy not in report.evaluation.baselines:  # the owner's metrics include the baselines
            yield accuracy.name, f"accuracy {accuracy.share}: {accuracy.description}"
    if report.majority_warning is not None:
        yield "", report.majority_warning
    if report.evaluation.private_test is not None:
        yield "Private test", str(report.evaluation.private_test).capitalize()
        yield "  Recall", "; ".join(statement.list_paragraphs("recalls", report)[:MAX_CLASSES])
