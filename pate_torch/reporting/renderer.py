"""The files of a release folder that say what was released: JSON, a page and a model card, all of one report.

Templates lay out the facts of ``report`` and the sentences of ``statement``; everything they insert is escaped.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from pate_torch.core.files import compute_file_digest, escape_control_chars, write_atomically
from pate_torch.core.progress import format_duration
from pate_torch.reporting import figures, statement
from pate_torch.reporting.intervals import Share, percent
from pate_torch.reporting.report import ChargedRelease, ReleaseReport
from pate_torch.types import EncoderCard

_PACKAGE_VERSION = version("pate-torch")  # asked for at import: no run is charged where it is not known
SUMMARY_SCHEMA = 1
STATEMENT_SCHEMA = 1

ENCODER_KEYS = ("name", "kind", "sha256", "file", "tokenizer_sha256", "module", "license", "trained_on", "disjoint")

SUMMARY_KEYS = (
    *("dataset", "mechanism", "student", "num_teachers", "queries_asked", "queries_answered"),
    *("epsilon", "epsilon_ex_post", "delta", "accountant", "adjacency", "unit"),
    *("epsilon_charged", "epsilon_charged_ex_post", "budget_epsilon", "student_accuracy", "label_accuracy"),
    *("private", "teachers_id", "release_id", "ledger_head"),
)
OWNERS = ("contact", "collection", "consent", "access", "retention", "period", "renewal")
"""What the owner says, as the statement has it."""


def write_release(folder: Path, report: ReleaseReport) -> None:
    """Write all the files of the release folder but the labels and the student."""
    written = {
        "privacy.json": strict_json(privacy(report)),
        "report.html": page(report),
        "README.md": card(report),
        "summary.json": strict_json(summary(report)),  # last: it says that a run has finished here
    }
    written = {SUMS: sums(folder, written), **written}
    for name, content in written.items():
        write_atomically(folder / name, content)


SUMS = "SHA256SUMS"


def sums(folder: Path, written: Mapping[str, str]) -> str:
    """The SHA-256 of what is about to be written, and of all else that lies there."""
    found = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in written.items()}
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        if file.is_file() and not name.name.startswith(".") and name.name != SUMS:
            found.setdefault(name.as_posix(), compute_file_digest(file))
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items()))


def summary(report: ReleaseReport) -> dict[str, Any]:
    """The fixed keys of summary.json, unrounded. Every epsilon of a run that is not private is null."""
    facts = {key: getattr(report, key) for key in SUMMARY_KEYS}
    return {"schema_version": SUMMARY_SCHEMA, **facts, "seconds": dict(report.seconds)}


def privacy(report: ReleaseReport) -> dict[str, Any]:
    """The content of privacy.json, the statement for machines; ``privacy.schema.json`` describes it."""
    return {
        "schema_version": STATEMENT_SCHEMA,
        "software": {"name": "pate_torch", "version": _PACKAGE_VERSION, "date": report.created},
        "private": report.private,
        "headline": statement.headline(report),
        "guarantee": {
            "definition": "(epsilon, delta)-differential privacy",
            "epsilon": report.epsilon,
            "delta": report.delta,
            "adjacency": report.adjacency,
            "unit": report.unit,
            "records_per_unit": None if report.group else 1,
            "route": report.accountant,
            "symbols": statement.symbols(report),
            "plain_words": list(statement.plain_words(report)),
        },
        "mechanism": {
            "name": report.mechanism,
            "parameters": dict(report.parameters),
            "sensitivity": dict(report.sensitivity) or None,
            "noise": report.noise,
            "rounds": report.rounds,
            "num_teachers": report.num_teachers,
            "queries_asked": report.queries_asked,
            "queries_answered": report.queries_answered,
        },
        "composition": {
            "dataset": report.dataset,
            "this_release": report.epsilon,
            "this_release_ex_post": report.epsilon_ex_post,
            "account_total": report.epsilon_charged,
            "account_total_ex_post": report.epsilon_charged_ex_post,
            "account_note": statement.NO_TOTAL if report.epsilon_charged is None else statement.ADAPTIVE,
            "parts": [_listed(part) for part in report.parts],
            "account_route": report.charged_accountant or report.accountant,
            "account_cap": report.budget_epsilon,
            "labels_reused": report.reused,
        },
        "other_releases": [_listed(other) for other in report.other_releases],
        "utility": {
            "student": _measured(report.student_share),
            "labels": _measured(report.label_share),
            "classes": [
                {"class": name, **(_measured(None if row is None else row.share) or {})}
                for name, row in zip(report.confusion_names, report.class_accuracies, strict=True)
            ],
            "subgroups": None,
        },
        "trust": {"model": "central", "in_words": statement.trust(report)},
        "tuning": {"parameters": report.owner.tuning, "student": "charged" if report.chosen else "none"},
        "declared_values": dict(report.declared_values),
        "chosen_by": report.chosen_by,
        "public_assets": [asdict(asset) for asset in report.assets],
        "owner": {name: getattr(report.owner, name) for name in OWNERS},
        "missing": list(statement.missing(report)),
        "verification": {
            "release_id": report.release_id,
            "ledger_head": report.ledger_head,
            "audit": {**report.audit, "faults": list(report.audit["faults"])} if report.audit else None,
        },
        "assumptions": list(statement.assumptions(report)),
        "not_covered": list(statement.not_covered(report)),
    } | ({} if report.encoder is None else {"encoder": _encoder(report.encoder)})


def _encoder(card: EncoderCard) -> dict[str, Any]:
    plain = {name: getattr(card, name) for name in ENCODER_KEYS}
    return plain | {"options": dict(card.options)}


def _listed(part: ChargedRelease) -> dict[str, Any]:
    return {
        "release_id": part.release_id,
        "what": part.what,
        "epsilon": part.epsilon,
        "route": part.accountant or None,
        "events": json.loads(part.events),
    }


def _measured(share: Share | None) -> dict[str, Any] | None:
    """An accuracy with its 95 % interval; None: it was not measured."""
    if share is None:
        return None
    low, high = share.interval or (None, None)
    return {"accuracy": share.value, "low": low, "high": high, "points": share.size}


def strict_json(content: Mapping[str, Any]) -> str:
    """JSON that every reader accepts.

    Raises:
        ValueError: The content holds NaN or infinity.
    """
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def page(report: ReleaseReport) -> str:
    """The page report.html, which needs nothing else, neither a network nor a script."""
    return _html().get_template("report.html.jinja").render(report=report).replace(" %", "\u00a0%")


def card(report: ReleaseReport) -> str:
    """The model card README.md: the same facts for those who read text."""
    return _markdown().get_template("model_card.md.jinja").render(report=report)


@functools.cache
def _html() -> Environment:
    return _with_report(statement.environment(autoescape=True))


@functools.cache
def _markdown() -> Environment:
    return _with_report(statement.environment(autoescape=True, finalize=plain, keep_trailing_newline=True))


def _with_report(environment: Environment) -> Environment:
    """What the templates may use beside the report itself."""
    environment.filters |= {"clock": format_duration, "percent": percent}
    environment.globals |= {"statement": statement, "figures": figures}
    return environment


def plain(value: object) -> Markup:
    """Text that Markdown shows as it stands: neither HTML, nor tables, nor emphasis made from a name."""
    if isinstance(value, Markup):
        return value
    kept = (
        escape_control_chars(" ".join(str(value).split()))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    for mark in "\\`*_[]|#":
        kept = kept.replace(mark, f"\\{mark}")
    return Markup(kept)
