"""The files of a release folder that say what was released: JSON, a page and a model card, all of one report.

Templates lay out the facts of ``report`` and the sentences of ``statement``; everything they insert is escaped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from pate_torch.core.files import compute_file_digest, escape_control_chars, write_atomically
from pate_torch.privacy.records import EncoderCard
from pate_torch.release import figures, statement
from pate_torch.release.intervals import Share, format_percent
from pate_torch.release.report import ChargedRelease, ReleaseReport

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
OWNER_KEYS = ("contact", "collection", "consent", "access", "retention", "period", "renewal")
"""What the owner says, as the statement has it."""


def write_release(folder: Path, report: ReleaseReport) -> None:
    """Write all the files of the release folder but the labels and the student."""
    contents = {
        "privacy.json": to_strict_json(build_statement(report)),
        "report.html": render_page(report),
        "README.md": render_model_card(report),
        "summary.json": to_strict_json(build_summary(report)),  # last: it says that a run has finished here
    }
    contents = {CHECKSUM_FILE: compute_checksums(folder, contents), **contents}
    for name, content in contents.items():
        write_atomically(folder / name, content)


CHECKSUM_FILE = "SHA256SUMS"


def compute_checksums(folder: Path, contents: Mapping[str, str]) -> str:
    """The SHA-256 of what is about to be written, and of all else that lies there."""
    digests = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in contents.items()}
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        if file.is_file() and not name.name.startswith(".") and name.name != CHECKSUM_FILE:
            digests.setdefault(name.as_posix(), compute_file_digest(file))
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def build_summary(report: ReleaseReport) -> dict[str, Any]:
    """The fixed keys of summary.json, unrounded. Every epsilon of a run that is not private is null."""
    facts = {**vars(report.record), **vars(report.claim), **vars(report.evaluation)}
    summary = {key: facts[key] for key in SUMMARY_KEYS}
    return {"schema_version": SUMMARY_SCHEMA, **summary, "seconds": dict(report.record.seconds)}


def build_statement(report: ReleaseReport) -> dict[str, Any]:
    """The content of privacy.json, the statement for machines; ``privacy.schema.json`` describes it."""
    record, claim, evaluation = report.record, report.claim, report.evaluation
    return {
        "schema_version": STATEMENT_SCHEMA,
        "software": {"name": "pate_torch", "version": _PACKAGE_VERSION, "date": record.creation_date},
        "private": claim.private,
        "headline": statement.format_headline(report),
        "guarantee": {
            "definition": "(epsilon, delta)-differential privacy",
            "epsilon": claim.epsilon,
            "delta": claim.delta,
            "adjacency": claim.adjacency,
            "unit": claim.unit,
            "records_per_unit": None if claim.group else 1,
            "route": claim.accountant,
            "symbols": statement.format_inequality(report),
            "plain_words": list(statement.format_plain_words(report)),
        },
        "mechanism": {
            "name": record.mechanism,
            "parameters": dict(record.parameters),
            "sensitivity": dict(record.sensitivity) or None,
            "noise": record.noise,
            "rounds": record.rounds,
            "num_teachers": record.num_teachers,
            "queries_asked": record.queries_asked,
            "queries_answered": record.queries_answered,
        },
        "composition": {
            "dataset": record.dataset,
            "this_release": claim.epsilon,
            "this_release_ex_post": claim.epsilon_ex_post,
            "account_total": claim.epsilon_charged,
            "account_total_ex_post": claim.epsilon_charged_ex_post,
            "account_note": statement.NO_TOTAL_NOTE if claim.epsilon_charged is None else statement.ADAPTIVE_NOTE,
            "parts": [_part_to_dict(part) for part in claim.parts],
            "account_route": claim.charged_accountant or claim.accountant,
            "account_cap": claim.budget_epsilon,
            "labels_reused": record.reuses_labels,
        },
        "other_releases": [_part_to_dict(other) for other in claim.other_releases],
        "utility": {
            "student": _share_to_dict(evaluation.student_share),
            "labels": _share_to_dict(evaluation.label_share),
            "classes": [
                {"class": name, **(_share_to_dict(None if row is None else row.share) or {})}
                for name, row in zip(report.confusion_names, report.class_accuracies, strict=True)
            ],
            "subgroups": None,
        },
        "trust": {"model": "central", "in_words": statement.format_trust(report)},
        "tuning": {
            "parameters": record.owner.tuning,
            "student": "charged" if claim.has_part("choice of a student") else "none",
        },
        "declared_values": dict(record.provenance),
        "chosen_by": record.chosen_by,
        "public_assets": [asdict(asset) for asset in record.assets],
        "owner": {name: getattr(record.owner, name) for name in OWNER_KEYS},
        "missing": list(statement.list_unstated_facts(report)),
        "verification": {
            "release_id": record.release_id,
            "ledger_head": claim.ledger_head,
            "audit": {**record.audit, "faults": list(record.audit["faults"])} if record.audit else None,
        },
        "assumptions": list(statement.list_assumptions(report)),
        "not_covered": list(statement.list_exclusions(report)),
    } | ({} if record.encoder is None else {"encoder": _encoder_to_dict(record.encoder)})


def _encoder_to_dict(card: EncoderCard) -> dict[str, Any]:
    content = {name: getattr(card, name) for name in ENCODER_KEYS}
    return content | {"options": dict(card.options)}


def _part_to_dict(part: ChargedRelease) -> dict[str, Any]:
    return {
        "release_id": part.release_id,
        "what": part.purpose,
        "epsilon": part.epsilon,
        "route": part.accountant or None,
        "events": json.loads(part.events),
    }


def _share_to_dict(share: Share | None) -> dict[str, Any] | None:
    """An accuracy with its 95 % interval; None: it was not measured."""
    if share is None:
        return None
    low, high = share.interval or (None, None)
    return {"accuracy": share.value, "low": low, "high": high, "points": share.size}


def to_strict_json(content: Mapping[str, Any]) -> str:
    """JSON that every reader accepts.

    Raises:
        ValueError: The content holds NaN or infinity.
    """
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def render_page(report: ReleaseReport) -> str:
    """The page report.html, which needs nothing else, neither a network nor a script."""
    return _render("report.html.jinja", report).replace(" %", "\u00a0%")


def render_model_card(report: ReleaseReport) -> str:
    """The model card README.md: the same facts for those who read text."""
    return re.sub(r"\n{3,}", "\n\n", _render("model_card.md.jinja", report))


def _render(template: str, report: ReleaseReport) -> str:
    parts = {"record": report.record, "claim": report.claim, "evaluation": report.evaluation}
    return _make_page_environment(template.endswith(".md.jinja")).get_template(template).render(report=report, **parts)


@functools.cache
def _make_page_environment(is_markdown: bool) -> Environment:
    """The templates with what they may use beside the report itself."""
    options = {"finalize": escape_markdown, "keep_trailing_newline": True} if is_markdown else {}
    environment = statement.make_environment(autoescape=True, **options)
    environment.filters |= {"percent": format_percent}
    environment.globals |= {"statement": statement, "figures": figures}
    return environment


def escape_markdown(value: object) -> Markup:
    """Text that Markdown shows as it stands: neither HTML, nor tables, nor emphasis made from a name."""
    if isinstance(value, Markup):
        return value
    text = (
        escape_control_chars(" ".join(str(value).split()))
        .replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
    )
    for mark in "\\`*_[]|#":
        text = text.replace(mark, f"\\{mark}")
    return Markup(text)
