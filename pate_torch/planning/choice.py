"""Evaluation of choices of method, noise and queries: the cost, the queries in the budget, and the label quality.

A plan uses the declarations of the data set's source, and never calls ``load()``, because settings that depend on
private records would be a release without a charge.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.formatting import format_delta, format_epsilon, format_noise_scale
from pate_torch.data.base import SourceFacts
from pate_torch.methods import feasibility
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.voting import VotingMethod
from pate_torch.planning.autoconfig import TARGET_LEAD_SHARE
from pate_torch.planning.diagnosis import ShardDiagnosis, explain_theory, format_shards
from pate_torch.planning.gradient_budget import CalibratedDescent
from pate_torch.planning.pilot import Forecast, Pilot
from pate_torch.privacy.accounts import Account

WIDTH = 80
MAX_QUERIES = 10**7
"""Largest number of queries that is tested. A budget that admits this number is reported to admit any number."""

VERDICTS = {
    "ok": "this choice works",
    "over": "the budget does not allow so many queries",
    "few": "fewer than one query in ten is answered",
    "poor": "labels are nearer to guesses than to the truth",
    "noise": "noise outweighs the votes: a useful label needs a lead of more than half of the votes",
    "cannot": "refused",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """One row of a plan report.

    Attributes:
        parameters: Parameters of the mechanism, with calibrated noise if a target epsilon was given.
        num_teachers: Number K of teachers. 0 for per-record gradients.
        shard_size: Approximate number of records per teacher. None if the number of records is not declared.
        epsilon: Cost of this release alone, in epsilon, by the accountant. None if a run would be refused.
        max_queries: Largest number of queries that the public pool and the account, or a new account with the same
            budget, allow. For noise that is not Gaussian, the account's filter is stricter than ``epsilon``.
        lead: Lead over every other class that a useful label needs, in votes. None if the mechanism needs no lead.
        forecast: Forecast of the labels. None without a pilot.
        verdict: Key of ``VERDICTS``.
        problem: Reason why a run would be refused with any budget. None if a run would not be refused.
        settings: Settings of train.py for this choice.
    """

    mechanism: str
    parameters: dict[str, Any]
    num_teachers: int
    shard_size: int | None
    num_queries: int
    num_classes: int
    epsilon: float | None
    max_queries: int
    lead: float | None
    forecast: Forecast | None
    verdict: str
    problem: str | None
    settings: tuple[str, ...]

    @property
    def num_effective_labels(self) -> float:
        """Number of correct labels that teach as much as the expected labels do. 0 without a forecast.

        Q labels that are guesses with probability 1 - s, for a skill s, teach about as much as s^2 Q correct labels.
        """
        if self.forecast is None or self.forecast.accuracy is None:
            return 0.0
        skill = max(0.0, self.forecast.accuracy - 1 / self.num_classes) / (1 - 1 / self.num_classes)
        return self.num_queries * self.forecast.answer_rate * skill**2


def select_best(choices: Sequence[Choice]) -> Choice | None:
    """Select the recommended choice. Return None if no choice works.

    With forecasts, the function selects the cheapest choice with at least 95 % of the largest number of effective
    labels. Without forecasts, it selects the cheapest choice whose labels need a lead of at most ``TARGET_LEAD_SHARE``
    of the votes or, if there is none, the cheapest choice. At one cost, the fewest queries and teachers are best.
    """
    working = [choice for choice in choices if choice.verdict == "ok"]
    max_labels = max((choice.num_effective_labels for choice in working), default=0.0)
    near_best = [choice for choice in working if choice.num_effective_labels >= 0.95 * max_labels]
    clear = [choice for choice in near_best if (choice.lead or 0.0) <= TARGET_LEAD_SHARE * choice.num_teachers]
    candidates = near_best if max_labels else clear or near_best
    return min(candidates, key=lambda c: (round(c.epsilon or 0.0, 6), c.num_queries, c.num_teachers), default=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanEvaluator:
    """Evaluator of choices for one data set.

    ``account`` is None if the account has not been opened. ``pilot`` is None to make no forecast.
    """

    facts: SourceFacts
    num_classes: int
    account: Account | None
    pilot: Pilot | None

    def get_budget(self, plan: RunConfig) -> float:
        """Return the cap in epsilon: ``privacy.budget_epsilon``, else the account's cap, else the default cap."""
        if plan.privacy.budget_epsilon is not None:
            return plan.privacy.budget_epsilon
        return plan.privacy.opening_budget if self.account is None else self.account.budget_epsilon

    def __call__(self, plan: RunConfig, settings: tuple[str, ...]) -> Choice:
        """Evaluate the configuration ``plan``, which these settings of train.py describe."""
        method, terms, problem, epsilon = plan.method, plan.privacy, None, None
        assert isinstance(method, LabelingMethod)
        try:
            plan = plan.calibrate()  # the cost of a test depends on the calibrated noise
            assert isinstance(plan.method, LabelingMethod)
            self._check(method := plan.method)
            events = method.privacy_events() + plan.extra_privacy_events()
            epsilon = compute_guarantee(events, terms.delta).epsilon
        except ValueError as error:
            problem = str(error)
        num_teachers, size = method.ensemble_size or 0, self.facts.num_private
        forecast = None if problem is not None or self.pilot is None else self.pilot.forecast(method)
        max_queries = self._find_max_queries(plan, method)
        verdict = self._judge_labels(method, forecast) if max_queries >= method.num_queries else "over"
        return Choice(
            mechanism=method.mechanism_name,
            parameters=get_parameters(method),
            num_teachers=num_teachers,
            shard_size=None if size is None or not num_teachers else size // num_teachers,
            num_queries=method.num_queries,
            num_classes=self.num_classes,
            epsilon=epsilon,
            max_queries=max_queries,
            lead=self._compute_lead(method),
            forecast=forecast,
            verdict=verdict if problem is None else "cannot",
            problem=problem,
            settings=settings,
        )

    def _check(self, method: LabelingMethod) -> None:
        """Raise ValueError if a run with the declared facts would be refused."""
        num_public, size = self.facts.num_public, self.facts.num_private
        fix = f"The public pool has {num_public} points."
        checks.integer("num_queries", method.num_queries, high=num_public, fix=fix)
        if isinstance(method, GradientMethod) and method.size is None and size is None:
            fix = "Set method.size if the approximate number of records is public."
            raise checks.error("dataset.nominal_size", None, "must be set for per-record gradients", fix)
        if isinstance(method, VotingMethod):
            fix = f"The data set declares {size} private records, and every teacher needs one record."
            num_teachers = checks.integer("num_teachers", method.ensemble_size, low=1, high=size, fix=fix)
            counts: dict[str, Any] = {"num_teachers": num_teachers, "num_classes": self.num_classes}
            method.mechanism.check(**counts, num_queries=method.num_queries, rounds=method.num_rounds)
            allow_uninformative = method.allow_uninformative_labels
            feasibility.check_informative(method.mechanism, **counts, allow_uninformative=allow_uninformative)

    def _find_max_queries(self, plan: RunConfig, method: LabelingMethod) -> int:
        """Find the largest number of queries that a run could ask and the account would admit."""

        def is_excessive(num_queries: int) -> bool:
            larger_method = replace(method, num_queries=num_queries)
            try:
                self._check(larger_method)
                events = larger_method.privacy_events() + plan.extra_privacy_events()
                if self.account is not None:
                    return not self.account.admits(events)
                budget, terms = self.get_budget(plan), plan.privacy
                return not PrivacyFilter.from_planned_events(
                    events, epsilon=budget, delta=terms.delta, delta_reserve=terms.delta_reserve, kind=terms.filter
                ).admits_release(events)
            except ValueError:  # no filter supports this budget, or the mechanism does not support this plan
                return True

        return bisect.bisect_left(range(1, MAX_QUERIES + 1), True, key=is_excessive)

    def _compute_lead(self, method: LabelingMethod) -> float | None:
        lead = feasibility.compute_break_even_lead(method.mechanism, self.num_classes) if method.ensemble_size else None
        if lead is None:
            return feasibility.compute_answering_lead(method.mechanism, method.num_queries, self.num_classes)
        return lead

    def _judge_labels(self, method: LabelingMethod, forecast: Forecast | None) -> str:
        if forecast is not None:
            half_way = (1 + 1 / self.num_classes) / 2
            return "few" if forecast.answer_rate < 0.1 else "poor" if (forecast.accuracy or 0.0) < half_way else "ok"
        if isinstance(method, GradientMethod):
            num_records = method.size or self.facts.num_private
            is_noisy = CalibratedDescent(mechanism=method.mechanism, num_records=num_records).is_noise_dominated
        else:
            is_noisy = (self._compute_lead(method) or 0.0) > feasibility.MAX_LEAD_SHARE * (method.ensemble_size or 0)
        return "noise" if is_noisy else "ok"


def get_parameters(method: LabelingMethod) -> dict[str, Any]:
    """Return the parameters of the method's mechanism by name."""
    return {field.name: getattr(method.mechanism, field.name) for field in dataclasses.fields(method.mechanism)}


# ---- The report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanReport:
    """Result of ``pate plan``: the rows of the table, the notes below, and the shards of a diagnosis.

    ``budget_epsilon`` is the cap of the account, which comes from a setting of train.py or the account.
    """

    dataset: str
    budget_epsilon: float
    budget_source: str
    delta: float
    choices: tuple[Choice, ...]
    notes: tuple[str, ...] = ()
    shards: tuple[ShardDiagnosis, ...] = ()

    @property
    def best_choice(self) -> Choice | None:
        return select_best(self.choices)

    def to_json(self) -> str:
        """Convert the report to one JSON object, with null for infinity."""
        best = None if self.best_choice is None else self.choices.index(self.best_choice)
        text = json.dumps({**dataclasses.asdict(self), "best": best})
        return json.dumps(json.loads(text, parse_constant=lambda _: None), allow_nan=False)


def format_report(report: PlanReport) -> str:
    """Format the report in 80 columns."""
    budget = f"budget epsilon {report.budget_epsilon:g} ({report.budget_source})"
    head = f"Plan for {report.dataset}: delta {format_delta(report.delta)}, {budget}."
    lines = format_shards(report.shards) if report.shards else []
    lines += [*_wrap(f"{head} No private record was read; nothing is charged.", 2), "", *format_table(report), ""]
    lines += _explain_verdicts(report.choices)
    notes, best = [*report.notes], report.best_choice
    for shard in report.shards:
        if best is not None and shard.num_teachers == best.num_teachers:
            notes += explain_theory(shard, best.lead, best.num_queries, best.epsilon or 0.0, report.delta)
    if best is None:
        notes.append("None of these choices works.")
    else:
        by_lead = "at which useful labels need a lead of at most a quarter (or half) of the votes"
        by_labels = "with at least 95 % of the largest number of effective labels"
        notes.append(f"* The smallest epsilon {by_lead if best.forecast is None else by_labels}.")
    lines += ["", *(line for note in notes for line in _wrap(note, 2))]
    if best is not None:
        words = " ".join(["python train.py", *map(shlex.quote, best.settings)])
        command = textwrap.wrap(words, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        lines.append("  " + " \\\n    ".join(command))
    return "\n".join(lines)


def _explain_verdicts(choices: tuple[Choice, ...]) -> list[str]:
    verdicts = {choice.verdict for choice in choices} - {"cannot"}
    meanings = [(name, meaning) for name, meaning in VERDICTS.items() if name in verdicts]
    meanings += [("cannot", problem) for problem in dict.fromkeys(c.problem for c in choices) if problem is not None]
    if any(choice.lead is not None for choice in choices):
        meanings.append(("lead", "lead over every other class that a useful label needs, in votes"))
    return [line for name, meaning in meanings for line in _wrap(f"{name:>8}  {meaning}")]


def _format_number(value: float | None, pattern: str = "{:.4g}") -> str:
    return "-" if value is None else pattern.format(value)


_CELLS: dict[str, Callable[[Choice], str]] = {
    "mechanism": lambda c: c.mechanism,
    "K": lambda c: str(c.num_teachers or "-"),
    "shard": lambda c: _format_number(c.shard_size, "{}"),
    "sigma": lambda c: format_noise_scale(c.parameters["sigma"]) if "sigma" in c.parameters else "-",
    "screen": lambda c: _format_number(c.parameters.get("screen_sigma")),
    "thr": lambda c: _format_number(c.parameters.get("threshold")),
    "asked": lambda c: str(c.num_queries),
    "epsilon": lambda c: "-" if c.epsilon is None else format_epsilon(c.epsilon),
    "fits": lambda c: "-" if c.problem else "any" if c.max_queries >= MAX_QUERIES else str(c.max_queries),
    "lead": lambda c: _format_number(c.lead, "{:.3g}"),
    "answered": lambda c: "-" if c.forecast is None else f"{c.forecast.answer_rate:.1%}",
    "right": lambda c: "-" if c.forecast is None else _format_number(c.forecast.accuracy, "{:.1%}"),
    "verdict": lambda c: c.verdict,
}
_OPTIONAL_COLUMNS = ("screen", "thr", "asked", "mechanism", "answered", "shard")


def format_table(report: PlanReport) -> list[str]:
    """Format one line of 80 columns for each choice, and mark the best. Columns with one value are dropped first."""
    columns = {name: [name, *map(cell, report.choices)] for name, cell in _CELLS.items()}
    widths = {name: max(map(len, cells)) for name, cells in columns.items() if set(cells) != {name, "-"}}
    if report.shards:
        widths = {name: width for name, width in widths.items() if name not in ("shard", "fits")}
    for name in sorted(_OPTIONAL_COLUMNS, key=lambda name: len(set(columns[name])) > 2):
        if sum(widths.values()) + 2 * len(widths) - 1 > WIDTH:
            widths.pop(name, None)
    marks = [" ", *("*" if choice is report.best_choice else " " for choice in report.choices)]
    rows = zip(*(columns[name] for name in widths), strict=True)
    cells = ((cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True)) for row in rows)
    return [mark + "  ".join(row) for mark, row in zip(marks, cells, strict=True)]


def _wrap(line: str, indent: int = 10) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
