"""The privacy statement: who is protected, from what, by how much, on what assumptions, and what it leaves out.

Its sentences are in ``templates/statement.jinja``. An epsilon is never shown without its delta, adjacency, unit and
route; shown epsilons are rounded up, stored ones not at all.
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
from pate_torch.privacy.records import LABEL_UNIT
from pate_torch.release.report import TUNING_METHODS, UNSTATED_CHOICE, ReleaseReport, format_route

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
    result.filters |= {"epsilon": format_epsilon, "delta": format_delta, "route": format_route}
    return result


@functools.cache
def _load_macros() -> Any:
    """The sentences: plain text, escaped by whoever lays it out."""
    macro_globals = {
        "LABEL_UNIT": LABEL_UNIT,
        "UNSTATED_CHOICE": UNSTATED_CHOICE,
        "fill_placeholders": _fill_placeholders,
    }
    return make_environment(autoescape=False).get_template("statement.jinja", globals=macro_globals).module


def _render_paragraphs(name: str, *arguments: Any) -> tuple[str, ...]:
    """What a macro says, by paragraphs."""
    paragraphs = re.split(r"\n\s*\n", getattr(_load_macros(), name)(*arguments))
    return tuple(" ".join(words) for words in map(str.split, paragraphs) if words)


def _fill_placeholders(text: str, report: ReleaseReport) -> str:
    """A sentence of the method's own, with what is known once it has answered."""
    value_by_placeholder = {
        "asked": str(report.queries_asked),
        "answered": str(report.queries_answered),
        "mechanism": report.mechanism_words,
        "each_round": f" in each of {report.rounds} rounds" if report.rounds > 1 else "",
    }
    return re.sub(r"\{(\w+)\}", lambda placeholder: value_by_placeholder.get(placeholder[1], placeholder[0]), text)


def _render_sentence(name: str, report: ReleaseReport) -> str:
    return " ".join(_render_paragraphs(name, report))


def format_title(report: ReleaseReport) -> str:
    """What was released, in a line."""
    return _render_sentence("title", report)


def format_headline(report: ReleaseReport) -> str:
    """One line: the guarantee with its terms, or that there is none."""
    return f"{NOT_PRIVATE}: no guarantee" if report.epsilon is None else report.format_with_terms(report.epsilon)


def format_inequality(report: ReleaseReport) -> str:
    """The guarantee as an inequality."""
    return _render_sentence("symbols", report)


def format_plain_words(report: ReleaseReport) -> tuple[str, ...]:
    """The guarantee for someone who has never seen one, in a few paragraphs."""
    if report.epsilon is None:
        return (NOT_PRIVATE_WARNING,)
    power = compute_attack_bound(report.epsilon, report.delta, 0.01)
    return _render_paragraphs("plain_words", report, f"{math.ceil(power * 1000) / 10:.1f} %")


def format_queries(report: ReleaseReport) -> str:
    """How many questions were put to whom; empty where nobody was asked."""
    return _render_sentence("questions", report)


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


NOT_STATED = "not stated"


def list_owner_statements(report: ReleaseReport) -> dict[str, str]:
    """What a reader of a release asks of its owner: name -> what was said, or NOT_STATED."""
    owner = report.owner
    statements = {
        name.capitalize(): getattr(owner, name) for name in ("contact", "collection", "consent", "access", "retention")
    }
    statements |= {"Period of the cap": owner.period, "Renewal of the cap": owner.renewal}
    statements["Choice of parameters"] = owner.tuning and TUNING_METHODS[owner.tuning]
    for asset in report.assets:
        facts = (("licence", asset.licence), ("source", asset.source), ("SHA-256", asset.sha256))
        training_facts = (("trained on", asset.trained_on),) if asset.role == "encoder" else ()
        words = "; ".join(f"{name}: {value or NOT_STATED}" for name, value in (*facts, *training_facts))
        statements[asset.role.capitalize()] = f"{asset.name}; {words}"
    audit = report.audit
    statements["Audit"] = audit and (
        f"of {audit['audited']} in {audit['runs']} runs, by pate_torch {audit['version']}: "
        + ("no fault found" if audit["sound"] else "REFUTED")
    )
    return {name: value or NOT_STATED for name, value in statements.items()}


def list_unstated_facts(report: ReleaseReport) -> tuple[str, ...]:
    """The names of what nobody stated."""
    return tuple(name for name, value in list_owner_statements(report).items() if NOT_STATED in value)


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

    @property
    def description(self) -> str:
        """The line in words."""
        return f"{self.scope} {self.note}".strip()


def list_epsilon_lines(report: ReleaseReport) -> tuple[EpsilonLine, ...]:
    """The prices of this release with its parts, the account's total and its cap; empty if not private."""
    if report.epsilon is None:
        return ()
    release_scope = "The guarantee: of everything in this folder, and of nothing outside it."
    rows = [EpsilonLine("This release alone", report.epsilon, report.route_words, release_scope)]
    if len(report.parts) > 1:
        for part in report.parts:
            part_scope = "By itself." if part.is_current else "By itself; paid for by an earlier run."
            rows.append(EpsilonLine(f"  {part.purpose}", part.epsilon, format_route(part.accountant), part_scope))
    if report.epsilon_ex_post not in (None, report.epsilon):
        used_scope = "What had been used when the run stopped."
        rows.append(
            EpsilonLine("Spent (ex post)", report.epsilon_ex_post, report.route_words, used_scope, EX_POST_NOTE)
        )
    has_total = report.epsilon_charged is not None
    route = format_route(report.charged_accountant or report.accountant)
    total_scope = "Everything reserved for these data in the ledger, composed." if has_total else ""
    notes = (
        NO_TOTAL_NOTE if not has_total else ADAPTIVE_NOTE if report.other_releases else "",
        FREE_NOTE if report.is_free else "",
    )
    rows.append(
        EpsilonLine("All releases together", report.epsilon_charged, route, total_scope, " ".join(filter(None, notes)))
    )
    if report.epsilon_charged_ex_post not in (None, report.epsilon_charged):
        used_scope = "What all of them used of it."
        rows.append(
            EpsilonLine("All of it (ex post)", report.epsilon_charged_ex_post, "composed", used_scope, EX_POST_NOTE)
        )
    cap_scope = "What all releases together may reach. A release that would pass it is refused."
    return (
        *rows,
        EpsilonLine("Cap", report.budget_epsilon, "set by the owner", cap_scope, _format_budget_left(report)),
    )


def _format_budget_left(report: ReleaseReport) -> str:
    """How much of the cap is left, rounded down."""
    if report.budget_epsilon is None or report.epsilon_charged is None:
        return ""
    cap, charged_epsilon = (Decimal(repr(float(value))) for value in (report.budget_epsilon, report.epsilon_charged))
    budget_left = max(Decimal(0), cap - charged_epsilon).quantize(Decimal("0.001"), rounding=ROUND_FLOOR)
    return f"{budget_left} of it is left."


def list_run_facts(report: ReleaseReport) -> dict[str, str]:
    """What was done, and what of it can be used again: name -> value; empty values left out."""
    reuse_note = "use again: free" if report.private else NOT_PRIVATE
    facts = {
        "Mechanism": report.mechanism_words,
        "Noise": {"torch": "continuous, in floating point", "discrete": "exact and discrete"}[report.noise],
        "Questions": format_queries(report),
        "Kind of student": report.student,
        "Release": report.release_id and f"labels={report.release_id} ({reuse_note})",
    }
    if report.encoder is not None:
        card = report.encoder
        digest_words = f"SHA-256 {card.sha256[:12]}..., " if card.sha256 else ""
        facts["Encoder"] = f"{card.name} ({digest_words}license: {card.license or 'not declared'})"
    if report.teachers_id and report.teachers_reusable:
        facts["Teachers"] = f"teachers={report.teachers_id} (use again: charged)"
    elif report.teachers_id:
        facts["Voters"] = f"{report.teachers_id} (bring them again: charged)"
    return {name: value for name, value in facts.items() if value}


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
