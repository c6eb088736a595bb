"""The privacy statement: who is protected, from what, by how much, on what assumptions, and what it leaves out.

Its sentences are in ``templates/statement.jinja``, its facts in the tables below: page, model card and console lay out
the same ones. An epsilon is never shown without its delta, adjacency, unit and route; shown epsilons are rounded up,
stored ones not at all.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.core.progress import format_duration
from pate_torch.privacy.records import LABEL_UNIT
from pate_torch.release import figures
from pate_torch.release.report import (
    TUNING_METHODS,
    UNSTATED_CHOICE,
    AccountClaim,
    ReleaseRecord,
    ReleaseReport,
    format_route,
)

NOT_PRIVATE = "NOT PRIVATE"
NOT_PRIVATE_REASON = (
    "The noise of this run was seeded or switched off, so that an outsider can recompute it and take it away again. "
    "No privacy guarantee holds, whatever the parameters say. Such a run is for tests: do not publish it."
)
NOT_PRIVATE_WARNING = f"{NOT_PRIVATE}. {NOT_PRIVATE_REASON}"
NO_TOTAL_NOTE = "No total is claimed: a release from these data used seeded noise."
ADAPTIVE_NOTE = "Where a later release was chosen after a look at an earlier one, the guarantee is the cap."
NOT_MEASURED = "No accuracy is published: there are no public labels to measure it on."
FREE_NOTE = "The labels had been paid for before: this run added nothing."
EX_POST_NOTE = "It depends on the answers, so it is not a guarantee."


def make_environment(**options: Any) -> Environment:
    """The jinja environment of these templates: an unknown name is an error, an epsilon is shown in one way."""
    result = Environment(
        loader=PackageLoader("pate_torch.release"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    result.filters |= {"epsilon": format_epsilon, "delta": format_delta}
    return result


@functools.cache
def _load_sentences() -> Any:
    """The sentences: plain text, escaped by whoever lays it out."""
    names = {"LABEL_UNIT": LABEL_UNIT, "UNSTATED_CHOICE": UNSTATED_CHOICE, "fill_placeholders": _fill_placeholders}
    return make_environment(autoescape=False).get_template("statement.jinja", globals=names).module


def _render_paragraphs(name: str, report: ReleaseReport, *arguments: Any) -> tuple[str, ...]:
    """What a macro says, by paragraphs."""
    text = getattr(_load_sentences(), name)(report, report.record, report.claim, *arguments)
    return tuple(" ".join(words) for words in map(str.split, re.split(r"\n\s*\n", text)) if words)


def _render_sentence(name: str, report: ReleaseReport) -> str:
    return " ".join(_render_paragraphs(name, report))


def _fill_placeholders(text: str, record: ReleaseRecord) -> str:
    """A sentence of the method's own, with what is known once it has answered."""
    value_by_placeholder = {
        "asked": str(record.queries_asked),
        "answered": str(record.queries_answered),
        "mechanism": record.mechanism_words,
        "each_round": f" in each of {record.rounds} rounds" if record.rounds > 1 else "",
    }
    return re.sub(r"\{(\w+)\}", lambda placeholder: value_by_placeholder.get(placeholder[1], placeholder[0]), text)


def format_title(report: ReleaseReport) -> str:
    """What was released, in a line."""
    return _render_sentence("title", report)


def format_headline(report: ReleaseReport) -> str:
    """One line: the guarantee with its terms, or that there is none."""
    claim = report.claim
    return f"{NOT_PRIVATE}: no guarantee" if claim.epsilon is None else claim.format_with_terms(claim.epsilon)


def format_inequality(report: ReleaseReport) -> str:
    """The guarantee as an inequality."""
    return _render_sentence("symbols", report)


def format_plain_words(report: ReleaseReport) -> tuple[str, ...]:
    """The guarantee for someone who has never seen one, in a few paragraphs."""
    if report.claim.epsilon is None:
        return (NOT_PRIVATE_WARNING,)
    power = compute_attack_bound(report.claim.epsilon, report.claim.delta, 0.01)
    return _render_paragraphs("plain_words", report, f"{math.ceil(power * 1000) / 10:.1f} %")


def format_examples_caption(report: ReleaseReport) -> str:
    """A caption for the pictures with released labels."""
    return _render_sentence("examples", report)


def list_assumptions(report: ReleaseReport) -> tuple[str, ...]:
    """What must be true for the guarantee to hold."""
    return _render_paragraphs("assumptions", report)


def list_exclusions(report: ReleaseReport) -> tuple[str, ...]:
    """What the guarantee says nothing about."""
    return _render_paragraphs("not_covered", report)


def format_trust(report: ReleaseReport) -> str:
    """Who sees what no noise protects, and what has to be taken on trust."""
    return _render_sentence("trust", report)


# ---- the facts, each once: label -> value --------------------------------------------------------------------------

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of facts, as page and model card lay it out.

    Attributes:
        columns: The headings; empty if the rows are pairs of a label and its value.
        caption: What holds of all rows.
        shows_epsilon: Whether epsilons stand in it; the caption then names their terms.
        has_code: Whether the first column holds names of files or ids.
    """

    rows: Rows
    columns: tuple[str, ...] = ()
    caption: str = ""
    shows_epsilon: bool = False
    has_code: bool = False


@dataclass(frozen=True)
class EpsilonLine:
    """One line of the account.

    Attributes:
        epsilon: None if it is not known, or there is no cap.
        route: The accountant that gave it.
        scope: What it is a price of.
        note: What must be said beside it, however short the line.
    """

    name: str
    epsilon: float | None
    route: str
    scope: str
    note: str = ""


def list_terms(report: ReleaseReport) -> dict[str, str]:
    """The terms without which an epsilon means nothing: name -> value."""
    claim = report.claim
    return {
        "delta": format_delta(claim.delta),
        "neighbors": claim.adjacency_words,
        "privacy unit": claim.unit,
        "accounting route": format_route(claim.accountant),
    }


def list_epsilon_lines(report: ReleaseReport) -> tuple[EpsilonLine, ...]:
    """The prices of this release with its parts, the account's total and its cap; empty if not private."""
    claim = report.claim
    if claim.epsilon is None:
        return ()
    route = format_route(claim.accountant)
    scope = "The guarantee: of everything in this folder, and of nothing outside it."
    lines = [EpsilonLine("This release alone", claim.epsilon, route, scope)]
    for part in claim.parts if len(claim.parts) > 1 else ():
        scope = "By itself." if part.is_current else "By itself; paid for by an earlier run."
        lines.append(EpsilonLine(f"  {part.purpose}", part.epsilon, format_route(part.accountant), scope))
    if claim.epsilon_ex_post not in (None, claim.epsilon):
        scope = "What had been used when the run stopped."
        lines.append(EpsilonLine("Spent (ex post)", claim.epsilon_ex_post, route, scope, EX_POST_NOTE))
    total = claim.epsilon_charged
    notes = (
        NO_TOTAL_NOTE if total is None else ADAPTIVE_NOTE if claim.other_releases else "",
        FREE_NOTE if report.is_free else "",
    )
    scope = "" if total is None else "Everything reserved for these data in the ledger, composed."
    total_route = format_route(claim.charged_accountant or claim.accountant)
    lines.append(EpsilonLine("All releases together", total, total_route, scope, " ".join(filter(None, notes))))
    if claim.epsilon_charged_ex_post not in (None, total):
        scope = "What all of them used of it."
        lines.append(EpsilonLine("All of it (ex post)", claim.epsilon_charged_ex_post, "composed", scope, EX_POST_NOTE))
    scope = "What all releases together may reach. A release that would pass it is refused."
    lines.append(EpsilonLine("Cap", claim.budget_epsilon, "set by the owner", scope, _format_budget_left(claim)))
    return tuple(lines)


def _format_budget_left(claim: AccountClaim) -> str:
    """How much of the cap is left, rounded down."""
    if claim.budget_epsilon is None or claim.epsilon_charged is None:
        return ""
    cap, charged = (Decimal(repr(float(value))) for value in (claim.budget_epsilon, claim.epsilon_charged))
    return f"{max(Decimal(0), cap - charged).quantize(Decimal('0.001'), rounding=ROUND_FLOOR)} of it is left."


def make_price_table(report: ReleaseReport) -> Table:
    """What this release and all others cost."""
    return Table(
        columns=("What", "epsilon", "Route", "Covers"),
        rows=tuple(
            (line.name, *_format_price(line.epsilon, line.route, "not known"), f"{line.scope} {line.note}".strip())
            for line in list_epsilon_lines(report)
        ),
        caption=f"Every epsilon at {report.claim.setting}. Shown rounded up; unrounded in summary.json.",
        shows_epsilon=True,
    )


def make_growth_table(report: ReleaseReport) -> Table:
    """What the first questions cost."""
    points = figures.thin_points(figures.number_points(report.claim.epsilon_curve), 10)
    rows = tuple((f"{q}", format_epsilon(epsilon)) for q, epsilon in points)
    caption = f"This release; {report.claim.terms}."
    return Table(columns=("questions", "epsilon"), rows=rows, caption=caption, shows_epsilon=True)


def make_other_releases_table(report: ReleaseReport) -> Table:
    """What else was released from these data."""
    return Table(
        columns=("Release", "epsilon", "Route", "What"),
        rows=tuple(
            (other.release_id, *_format_price(other.epsilon, format_route(other.accountant), "none"), other.purpose)
            for other in report.claim.other_releases
        ),
        caption=f"Each by itself, at {report.claim.setting}. Together: see the account." * report.claim.private,
        shows_epsilon=report.claim.private,
        has_code=True,
    )


def _format_price(epsilon: float | None, route: str, missing: str) -> tuple[str, str]:
    return (missing, "") if epsilon is None else (format_epsilon(epsilon), route)


def make_accuracy_table(report: ReleaseReport) -> Table:
    """The accuracies with their intervals."""
    rows = tuple((row.name, str(row.share), row.description) for row in report.accuracies)
    return Table(columns=("What", "Accuracy (95 % interval)", "Of"), rows=rows)


def list_run_facts(report: ReleaseReport) -> dict[str, str]:
    """What was done, and what of it can be used again: name -> value; empty values left out."""
    record = report.record
    reuse_note = "use again: free" if report.claim.private else NOT_PRIVATE
    facts = {
        "Mechanism": record.mechanism_words,
        "Noise": {"torch": "continuous, in floating point", "discrete": "exact and discrete"}[record.noise],
        "Questions": _render_sentence("questions", report),
        "Kind of student": record.student,
        "Release": record.release_id and f"labels={record.release_id} ({reuse_note})",
    }
    if (card := record.encoder) is not None:
        digest_words = f"SHA-256 {card.sha256[:12]}..., " if card.sha256 else ""
        facts["Encoder"] = f"{card.name} ({digest_words}license: {card.license or 'not declared'})"
    if record.teachers_id and record.teachers_reusable:
        facts["Teachers"] = f"teachers={record.teachers_id} (use again: charged)"
    elif record.teachers_id:
        facts["Voters"] = f"{record.teachers_id} (bring them again: charged)"
    return {name: value for name, value in facts.items() if value}


def make_run_table(report: ReleaseReport) -> Table:
    """What was done, how long it took, and where the ledger stood."""
    seconds = report.record.seconds
    facts = {
        **list_run_facts(report),
        "Newest ledger entry": report.claim.ledger_head,
        "Time": ", ".join(f"{stage} {format_duration(duration)}" for stage, duration in seconds.items()),
    }
    return Table(rows=tuple((name, value) for name, value in facts.items() if value))


NOT_STATED = "not stated"


def list_owner_statements(report: ReleaseReport) -> dict[str, str]:
    """What a reader of a release asks of its owner: name -> what was said, or NOT_STATED."""
    owner, audit = report.record.owner, report.record.audit
    statements: dict[str, Any] = {
        "Contact": owner.contact,
        "Collection": owner.collection,
        "Consent": owner.consent,
        "Access": owner.access,
        "Retention": owner.retention,
        "Period of the cap": owner.period,
        "Renewal of the cap": owner.renewal,
        "Choice of parameters": owner.tuning and TUNING_METHODS[owner.tuning],
    }
    for asset in report.record.assets:
        facts = {"licence": asset.licence, "source": asset.source, "SHA-256": asset.sha256}
        facts |= {"trained on": asset.trained_on} if asset.role == "encoder" else {}
        words = "; ".join(f"{name}: {value or NOT_STATED}" for name, value in facts.items())
        statements[asset.role.capitalize()] = f"{asset.name}; {words}"
    statements["Audit"] = audit and (
        f"of {audit['audited']} in {audit['runs']} runs, by pate_torch {audit['version']}: "
        + ("no fault found" if audit["sound"] else "REFUTED")
    )
    return {name: value or NOT_STATED for name, value in statements.items()}


def make_owner_table(report: ReleaseReport) -> Table:
    """What the owner of the data states."""
    return Table(columns=("What", "Stated"), rows=tuple(list_owner_statements(report).items()))


def list_unstated_facts(report: ReleaseReport) -> tuple[str, ...]:
    """The names of what nobody stated."""
    return tuple(name for name, value in list_owner_statements(report).items() if NOT_STATED in value)


def make_file_table(report: ReleaseReport) -> Table:
    """The files of the release folder."""
    return Table(columns=("File", "What it is"), rows=tuple(report.files.items()), has_code=True)


def compute_attack_bound(epsilon: float, delta: float, false_alarms: float) -> float:
    """The largest share of members any membership test can find at this share of false alarms.

    Source: Wasserman & Zhou (2010); Kairouz, Oh & Viswanath (2015): with misses b and false alarms a, e^epsilon a + b
    >= 1 - delta and a + e^epsilon b >= 1 - delta, and nothing more.
    """
    low = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    high = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(1.0, low, high)


def compute_advantage_bound(epsilon: float, delta: float) -> float:
    """The largest advantage, share of members found less share of false alarms, of any membership test.

    (e^epsilon - 1 + 2 delta) / (e^epsilon + 1), at the corner a = b of both lines of ``compute_attack_bound``;
    randomized response reaches it.

    Source: Kairouz, Oh & Viswanath (2015); Humphries et al. (2020, arXiv 2010.12112). Yeom et al. (2018) have e^epsilon
    - 1, which is larger.
    """
    return math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700.0)) + 1)
