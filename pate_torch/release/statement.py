"""The privacy statement: the guarantee in words, its assumptions and its limits.

The sentences are in ``templates/statement.jinja``, and the functions below list the facts. The page, the model card and
the console show the same sentences and facts. Every epsilon is rounded up and shown with its delta, adjacency, unit and
route; the files hold all digits.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.core.progress import format_duration
from pate_torch.privacy.records import LABEL_UNIT, PublicAsset
from pate_torch.release.owner_file import TUNING_METHODS
from pate_torch.release.report import ReleaseRecord, ReleaseReport, format_cost, format_percent, format_route
from pate_torch.students.private_test import CONFIDENCE

if TYPE_CHECKING:
    from jinja2 import Environment

NOT_PRIVATE = "NOT PRIVATE"
NOT_PRIVATE_REASON = (
    "The noise of this run was seeded or switched off, so an outsider can recompute and remove the noise. No privacy "
    "guarantee holds, whatever the parameters are. Such a run is for tests only: do not publish its files."
)
NO_TOTAL_NOTE = "No total is claimed, because a release from these data used seeded noise."
ADAPTIVE_NOTE = "If a later release was chosen after a look at an earlier one, the guarantee is the cap."
FREE_NOTE = "An earlier release paid for the labels, so this run cost nothing."
EX_POST_NOTE = "This value depends on the answers, so it is no guarantee."
NOT_STATED = "not stated"
MAX_COLLUSIONS = 12  # largest number of rows on numbers of colluding sites


def make_environment(**options: Any) -> Environment:
    """Make the Jinja environment of the package's templates, in which an unknown name raises an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here, because few processes write a release

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
    """Load the macros of the sentences. Their text is plain, so the template that inserts a sentence must escape it."""
    names = {"LABEL_UNIT": LABEL_UNIT, "fill_placeholders": _fill_placeholders}
    return make_environment(autoescape=False).get_template("statement.jinja", globals=names).module


def list_paragraphs(name: str, report: ReleaseReport, *arguments: Any) -> tuple[str, ...]:
    """List the paragraphs that the macro ``name`` of ``templates/statement.jinja`` returns for a report."""
    text = getattr(_load_sentences(), name)(report, report.record, report.claim, *arguments)
    return tuple(" ".join(words) for words in map(str.split, re.split(r"\n\s*\n", text)) if words)


def format_sentence(name: str, report: ReleaseReport) -> str:
    """Format the paragraphs of ``list_paragraphs`` as one line; empty if there are no paragraphs."""
    return " ".join(list_paragraphs(name, report))


def _fill_placeholders(text: str, record: ReleaseRecord) -> str:
    value_by_placeholder = {
        "asked": str(record.queries_asked),
        "answered": str(record.queries_answered),
        "mechanism": record.mechanism.replace("_", " "),
        "each_round": f" in each of {record.rounds} rounds" if record.rounds > 1 else "",
    }
    return re.sub(r"\{(\w+)\}", lambda placeholder: value_by_placeholder.get(placeholder[1], placeholder[0]), text)


def format_headline(report: ReleaseReport) -> str:
    """Format the guarantee with its terms in one line."""
    claim = report.claim
    return f"{NOT_PRIVATE}: no guarantee" if claim.epsilon is None else claim.format_with_terms(claim.epsilon)


def format_plain_words(report: ReleaseReport) -> tuple[str, ...]:
    """Explain the guarantee in a few paragraphs, for readers who do not know differential privacy."""
    claim = report.claim
    if claim.epsilon is None:
        return (f"{NOT_PRIVATE}. {NOT_PRIVATE_REASON}",)
    power = compute_attack_bound(claim.epsilon, claim.delta, 0.01)
    return list_paragraphs("plain_words", report, f"{math.ceil(power * 1000) / 10:.1f} %")


def list_verdict(report: ReleaseReport) -> dict[str, str]:
    """List what a reader must know first: who released what, what it means, how accurate it is, how to check it."""
    claim, evaluation = report.claim, report.evaluation
    facts = {"Data": format_sentence("data", report), "Content": format_sentence("contents", report)}
    if claim.epsilon is not None:
        factor = f"the factor {_format_factor(claim.epsilon)}" if claim.epsilon < 10 else "the factor exp(epsilon)"
        facts["Meaning"] = " ".join(list_paragraphs("meaning", report, factor))
        facts["All releases"] = format_sentence("total", report)
    if (share := evaluation.student_share or evaluation.label_share) is not None:
        points = ("public test points" if evaluation.student_share else "labels") if share.size else ""
        interval = f" (95 % interval: {share.interval_words}), on {share.size:,} {points}" if share.size else ""
        facts["Accuracy"] = format_percent(share.value) + interval
    elif (test := evaluation.private_test) is not None:
        low = math.floor(1000 * test.bound) / 10
        facts["Accuracy"] = f"at least {low:.1f} % with probability {CONFIDENCE:g}, by a test on private records"
    elif report.table is not None and evaluation.baselines:
        rows = (f"{row.name.lower()} {format_percent(row.share.value)}" for row in evaluation.baselines)
        facts["Accuracy"] = f"on {evaluation.baselines[0].share.size:,} public test rows: {', '.join(rows)}"
    else:
        facts["Accuracy"] = "not published"
    facts["Check"] = "Run pate verify or pate-verify with the path of this folder. Both recompute every claim."
    return facts


def _format_factor(epsilon: float) -> str:
    """Format exp(epsilon), rounded up to a tenth, or to a whole number from 100 on."""
    factor = math.exp(epsilon)
    return f"{math.ceil(10 * factor) / 10:.1f}" if factor < 100 else f"{math.ceil(factor):,}"


# ---- the facts ------------------------------------------------------------------------------------------------------


class EpsilonLine(NamedTuple):
    """One line of the table of costs.

    Attributes:
        epsilon: Cost of the releases in ``scope``; None if the cost is not known or the account has no cap.
        route: Accountant that computed epsilon.
        scope: Sentence on the releases that epsilon covers.
        note: Remark, which is also shown if there is no room for ``scope``.
    """

    name: str
    epsilon: float | None
    route: str
    scope: str
    note: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        cost = format_cost(self.epsilon, self.route, missing="not known")
        return self.name, *cost, f"{self.scope} {self.note}".strip()


def list_epsilon_lines(report: ReleaseReport) -> tuple[EpsilonLine, ...]:
    """List the costs of this release and its parts, of all releases together, and the cap; empty if not private."""
    claim = report.claim
    if claim.epsilon is None:
        return ()
    route = format_route(claim.accountant)
    scope = "The guarantee of everything in this folder, and of nothing outside it."
    lines = [EpsilonLine("This release alone", claim.epsilon, route, scope)]
    if report.trust is not None:
        scope += f" Trust: distributed, t = {report.trust['colluding']} of {len(report.trust['sites'])}."
        return (lines[0]._replace(scope=scope), *_list_trust_lines(report, **report.trust))
    for part in claim.parts if len(claim.parts) > 1 else ():
        scope = "This part alone." if part.is_current else "This part alone; an earlier run paid for it."
        lines.append(EpsilonLine(f"  {part.purpose}", part.epsilon, format_route(part.accountant), scope))
    if claim.epsilon_ex_post not in (None, claim.epsilon):
        scope = "The part of the guarantee that was spent when the run stopped."
        lines.append(EpsilonLine("Spent (ex post)", claim.epsilon_ex_post, route, scope, EX_POST_NOTE))
    total = claim.epsilon_charged
    notes = NO_TOTAL_NOTE if total is None else ADAPTIVE_NOTE if claim.other_releases else ""
    notes = f"{notes} {FREE_NOTE}".strip() if report.is_free else notes
    scope = "" if total is None else "The composition of everything that the ledger reserved for these data."
    total_route = format_route(claim.charged_accountant or claim.accountant)
    lines.append(EpsilonLine("All releases together", total, total_route, scope, notes))
    if claim.epsilon_charged_ex_post not in (None, total):
        scope = "The part of the total that all releases spent."
        lines.append(EpsilonLine("All spent (ex post)", claim.epsilon_charged_ex_post, "composed", scope, EX_POST_NOTE))
    scope = "The largest total that is allowed. A release that would exceed it is refused."
    lines.append(EpsilonLine("Cap", claim.budget_epsilon, "set by the owner", scope))
    return tuple(lines)


def _list_trust_lines(
    report: ReleaseReport, *, colluding: int, costs: Sequence[Mapping[str, Any]], **_: Any
) -> Iterator[EpsilonLine]:
    """List the costs against other numbers of colluding sites, and the largest total that a site reserved."""
    numbers = [*range(colluding + 1, len(costs))][:: -math.ceil(len(costs) / MAX_COLLUSIONS)]
    for u in sorted({*numbers, *([0] if colluding else [])}):
        name, scope = f"Against {u} sites", f"The joiner together with {u} of the {len(costs)} sites."
        if u == 0:
            name, scope = "Results only", "Readers who see the results only and know the noise of no site."
        yield EpsilonLine(name, costs[u]["epsilon"], format_route(costs[u]["route"]), scope)
    claim, scope = report.claim, "The largest total that a site reserved under the charter, aborted rounds included."
    note = ADAPTIVE_NOTE if claim.other_releases else ""
    yield EpsilonLine(
        "Total at a site",
        claim.epsilon_charged,
        format_route(claim.charged_accountant or claim.accountant),
        scope,
        note,
    )


def list_run_facts(report: ReleaseReport, *, has_history: bool = False) -> dict[str, str]:
    """List the mechanism, the queries, and the ids of labels and teachers for reuse: name -> value, never empty.

    If ``has_history``, the newest ledger entry and the time of each stage are listed, too, and the parameters of the
    mechanism are left to a table of their own.
    """
    record = report.record
    reuse_note = "reuse is free" if report.claim.private else NOT_PRIVATE
    facts = {
        "Mechanism": record.mechanism if has_history else record.mechanism_words,
        "Noise": {"torch": "continuous, in floating point", "discrete": "exact and discrete"}[record.noise],
        "Queries": format_sentence("queries", report),
        "Kind of student": record.student,
        **{name: str(record.model.get(name.lower(), "")) for name in ("Hypothesis", "Certificate")},
        "Labels": record.release_id and f"labels={record.release_id} ({reuse_note})" if report.trust is None else None,
    }
    if (card := record.encoder) is not None:
        digest_words = f"SHA-256 {card.sha256[:12]}..., " if card.sha256 else ""
        facts["Encoder"] = f"{card.name} ({digest_words}license: {card.license or 'not declared'})"
    if record.teachers_id and record.teachers_reusable:
        facts["Teachers"] = f"teachers={record.teachers_id} (reuse is charged)"
    elif record.teachers_id and record.num_teachers:
        facts["Voters"] = f"{record.teachers_id} (reuse is charged)"
    if has_history:
        facts["Newest ledger entry"] = report.claim.ledger_head
        facts["Time"] = ", ".join(f"{stage} {format_duration(duration)}" for stage, duration in record.seconds.items())
    return {name: value for name, value in facts.items() if value}


def list_owner_statements(report: ReleaseReport) -> dict[str, str]:
    """List the statements of the data's owner that a reader of a release needs: name -> statement or NOT_STATED."""
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
        words = "; ".join(f"{name}: {value or NOT_STATED}" for name, value in _list_asset_facts(asset).items())
        statements[asset.role.capitalize()] = f"{asset.name}; {words}"
    statements["Audit"] = audit and (
        f"of {audit['audited']} in {audit['runs']} runs, by pate_torch {audit['version']}: "
        + ("no fault found" if audit["sound"] else "REFUTED")
    )
    return {name: value or NOT_STATED for name, value in statements.items()}


def list_stated(report: ReleaseReport) -> dict[str, str]:
    """List the statements that the owner made, and in one row the names of those that are missing."""
    statements = list_owner_statements(report)
    stated = {name: value for name, value in statements.items() if value != NOT_STATED}
    missing = [name.lower() for name in statements if name not in stated]
    for asset in report.record.assets:
        facts = _list_asset_facts(asset)
        words = (f"{name}: {value}" for name, value in facts.items() if value)
        stated[asset.role.capitalize()] = "; ".join((asset.name, *words))
        missing += [f"{name} of the {asset.role}" for name, value in facts.items() if not value]
    if missing:
        stated["Not stated"] = f"{', '.join(missing)}. The owner can add them: pate owner {report.record.dataset}"
    return stated


def _list_asset_facts(asset: PublicAsset) -> dict[str, str | None]:
    facts = {"license": asset.licence, "source": asset.source, "SHA-256": asset.sha256}
    return facts | ({"trained on": asset.trained_on} if asset.role == "encoder" else {})


# ---- bounds on attacks ----------------------------------------------------------------------------------------------


def compute_attack_bound(epsilon: float, delta: float, false_alarms: float) -> float:
    """Compute the largest share of members that a membership test can find at a given share of false alarms.

    For the share a of false alarms and the share b of misses, e^epsilon a + b >= 1 - delta and a + e^epsilon b >= 1 -
    delta. No other condition holds for all mechanisms.

    Source: Wasserman & Zhou (2010); Kairouz, Oh & Viswanath (2015).
    """
    low = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    high = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(1.0, low, high)


def compute_advantage_bound(epsilon: float, delta: float) -> float:
    """Compute the largest advantage of any membership test: the share of members found minus that of false alarms.

    The bound is (e^epsilon - 1 + 2 delta) / (e^epsilon + 1), where both lines of ``compute_attack_bound`` meet (a = b).
    Randomized response reaches this bound.

    Source: Kairouz, Oh & Viswanath (2015); Humphries et al. (2020, arXiv 2010.12112).
    """
    return math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700.0)) + 1)
