"""The privacy statement: the guarantee in words, its assumptions, and what it does not cover.

The sentences are in ``templates/statement.jinja``, the facts in the functions below. Page, model card and console show
the same sentences and facts. An epsilon is shown with its delta, adjacency, unit and route, and is rounded up; files
hold all digits.
"""

from __future__ import annotations

import functools
import math
import re
from decimal import ROUND_FLOOR, Decimal
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.core.progress import format_duration
from pate_torch.privacy.records import LABEL_UNIT
from pate_torch.release.owner_file import TUNING_METHODS
from pate_torch.release.report import ReleaseRecord, ReleaseReport, format_price, format_route

NOT_PRIVATE = "NOT PRIVATE"
NOT_PRIVATE_REASON = (
    "The noise of this run was seeded or switched off, so that an outsider can recompute it and take it away again. "
    "No privacy guarantee holds, whatever the parameters say. Such a run is for tests: do not publish it."
)
NO_TOTAL_NOTE = "No total is claimed: a release from these data used seeded noise."
ADAPTIVE_NOTE = "Where a later release was chosen after a look at an earlier one, the guarantee is the cap."
NOT_MEASURED = "No accuracy is published: there are no public labels to measure it on."
FREE_NOTE = "The labels had been paid for before: this run added nothing."
EX_POST_NOTE = "It depends on the answers, so it is not a guarantee."
NOT_STATED = "not stated"


def make_environment(**options: Any) -> Environment:
    """Make the jinja environment of the package's templates, in which an unknown name is an error."""
    environment = Environment(
        loader=PackageLoader("pate_torch.release"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.filters |= {"epsilon": format_epsilon, "delta": format_delta}
    return environment


@functools.cache
def _load_sentences() -> Any:
    """Load the macros of the sentences, which give plain text: whoever lays it out escapes it."""
    names = {"LABEL_UNIT": LABEL_UNIT, "fill_placeholders": _fill_placeholders}
    return make_environment(autoescape=False).get_template("statement.jinja", globals=names).module


def list_paragraphs(name: str, report: ReleaseReport, *arguments: Any) -> tuple[str, ...]:
    """List the paragraphs, or the sentences of a list, that a macro of ``templates/statement.jinja`` gives.

    Args:
        name: ``title``, ``symbols``, ``plain_words``, ``questions``, ``examples``, ``assumptions``, ``trust`` or
            ``not_covered``.
        report: The report that they are about.
        *arguments: Further arguments of the macro.
    """
    text = getattr(_load_sentences(), name)(report, report.record, report.claim, *arguments)
    return tuple(" ".join(words) for words in map(str.split, re.split(r"\n\s*\n", text)) if words)


def format_sentence(name: str, report: ReleaseReport) -> str:
    """Format the paragraphs of ``list_paragraphs`` as one line; empty if there is nothing to say."""
    return " ".join(list_paragraphs(name, report))


def _fill_placeholders(text: str, record: ReleaseRecord) -> str:
    """Fill in a sentence of the method's description with facts of the release."""
    value_by_placeholder = {
        "asked": str(record.queries_asked),
        "answered": str(record.queries_answered),
        "mechanism": record.mechanism_words,
        "each_round": f" in each of {record.rounds} rounds" if record.rounds > 1 else "",
    }
    return re.sub(r"\{(\w+)\}", lambda placeholder: value_by_placeholder.get(placeholder[1], placeholder[0]), text)


def format_headline(report: ReleaseReport) -> str:
    """Format the guarantee with its terms in one line."""
    claim = report.claim
    return f"{NOT_PRIVATE}: no guarantee" if claim.epsilon is None else claim.format_with_terms(claim.epsilon)


def format_plain_words(report: ReleaseReport) -> tuple[str, ...]:
    """Explain the guarantee in a few paragraphs, for readers who have never seen one."""
    claim = report.claim
    if claim.epsilon is None:
        return (f"{NOT_PRIVATE}. {NOT_PRIVATE_REASON}",)
    power = compute_attack_bound(claim.epsilon, claim.delta, 0.01)
    return list_paragraphs("plain_words", report, f"{math.ceil(power * 1000) / 10:.1f} %")


# ---- the facts ------------------------------------------------------------------------------------------------------


class EpsilonLine(NamedTuple):
    """One line of the account.

    Attributes:
        epsilon: The price; None if it is not known, or there is no cap.
        route: The accountant that gave it.
        scope: The releases that it is the price of.
        note: A remark that stands beside it, however short the line.
    """

    name: str
    epsilon: float | None
    route: str
    scope: str
    note: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row of a table: name, epsilon, route, and what it covers."""
        covers = f"{self.scope} {self.note}".strip()
        return self.name, *format_price(self.epsilon, self.route, missing="not known"), covers


def list_epsilon_lines(report: ReleaseReport) -> tuple[EpsilonLine, ...]:
    """List the prices of this release and its parts, the account's total and its cap; empty if it is not private."""
    claim = report.claim
    if claim.epsilon is None:
        return ()
    route = format_route(claim.accountant)
    scope = "The guarantee of everything in this folder, and of nothing outside it."
    lines = [EpsilonLine("This release alone", claim.epsilon, route, scope)]
    for part in claim.parts if len(claim.parts) > 1 else ():
        scope = "By itself." if part.is_current else "By itself; paid for by an earlier run."
        lines.append(EpsilonLine(f"  {part.purpose}", part.epsilon, format_route(part.accountant), scope))
    if claim.epsilon_ex_post not in (None, claim.epsilon):
        scope = "The part that was used when the run stopped."
        lines.append(EpsilonLine("Spent (ex post)", claim.epsilon_ex_post, route, scope, EX_POST_NOTE))
    total = claim.epsilon_charged
    notes = NO_TOTAL_NOTE if total is None else ADAPTIVE_NOTE if claim.other_releases else ""
    notes = f"{notes} {FREE_NOTE}".strip() if report.is_free else notes
    scope = "" if total is None else "Everything reserved for these data in the ledger, composed."
    total_route = format_route(claim.charged_accountant or claim.accountant)
    lines.append(EpsilonLine("All releases together", total, total_route, scope, notes))
    if claim.epsilon_charged_ex_post not in (None, total):
        scope = "The part of this total that all releases used."
        lines.append(EpsilonLine("All of it (ex post)", claim.epsilon_charged_ex_post, "composed", scope, EX_POST_NOTE))
    cap, left = claim.budget_epsilon, ""
    if cap is not None and total is not None:  # rounded down
        difference = max(Decimal(0), Decimal(repr(float(cap))) - Decimal(repr(float(total))))
        left = f"{difference.quantize(Decimal('0.001'), rounding=ROUND_FLOOR)} of it is left."
    scope = "The largest total that is allowed. A release that would exceed it is refused."
    lines.append(EpsilonLine("Cap", cap, "set by the owner", scope, left))
    return tuple(lines)


def list_run_facts(report: ReleaseReport, *, has_history: bool = False) -> dict[str, str]:
    """List what was done, and what of it can be used again: name -> value; empty values are left out.

    Args:
        report: The report of the release.
        has_history: Whether to list the newest entry of the ledger and the time of the stages, too.
    """
    record = report.record
    reuse_note = "use again: free" if report.claim.private else NOT_PRIVATE
    facts = {
        "Mechanism": record.mechanism_words,
        "Noise": {"torch": "continuous, in floating point", "discrete": "exact and discrete"}[record.noise],
        "Questions": format_sentence("questions", report),
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
    if has_history:
        facts["Newest ledger entry"] = report.claim.ledger_head
        facts["Time"] = ", ".join(f"{stage} {format_duration(duration)}" for stage, duration in record.seconds.items())
    return {name: value for name, value in facts.items() if value}


def list_owner_statements(report: ReleaseReport) -> dict[str, str]:
    """List what a reader of a release asks of its owner: name -> the owner's statement, or NOT_STATED."""
    owner, audit = report.record.owner, report.record.audit
    statements: dict[str, Any] = {
        **{
            name.capitalize(): getattr(owner, name)
            for name in ("contact", "collection", "consent", "access", "retention")
        },
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


# ---- bounds on attacks ----------------------------------------------------------------------------------------------


def compute_attack_bound(epsilon: float, delta: float, false_alarms: float) -> float:
    """Compute the largest share of members that a membership test can find at this share of false alarms.

    Source: Wasserman & Zhou (2010); Kairouz, Oh & Viswanath (2015): with misses b and false alarms a, e^epsilon a + b
    >= 1 - delta and a + e^epsilon b >= 1 - delta, and nothing more.
    """
    low = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    high = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(1.0, low, high)


def compute_advantage_bound(epsilon: float, delta: float) -> float:
    """Compute the largest advantage, share of members found less share of false alarms, of any membership test.

    (e^epsilon - 1 + 2 delta) / (e^epsilon + 1), at the corner a = b of both lines of ``compute_attack_bound``;
    randomized response reaches it.

    Source: Kairouz, Oh & Viswanath (2015); Humphries et al. (2020, arXiv 2010.12112). Yeom et al. (2018) have e^epsilon
    - 1, which is larger.
    """
    return math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700.0)) + 1)
