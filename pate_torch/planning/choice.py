"""One choice of K, noise and questions: what it costs, how much the budget holds, and what labels to expect.

All that a plan may know of a data set is what its configuration declares. A source is built, never asked to ``load()``:
settings chosen by a look at private records would be a release that no account pays for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.data.base import DatasetSource
from pate_torch.planning import feasibility
from pate_torch.planning.pilot import Forecast, PilotConfig, VoteModel, forecast_gradients, simulate_release
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.records import Dataset

MAX_QUERIES = 10**7
"""Beyond it, a budget is said to hold any number of questions."""

VERDICTS = {
    "ok": "works",
    "over": "the budget does not hold so many questions",
    "random": "labels little better than guesses",
    "poor": "labels nearer to guesses than to the truth",
    "unknown": "no forecast: imagined votes know no features (pilot.dataset does)",
    "few": "fewer than one question in ten is answered",
    "cannot": "refused",
}


@dataclass(frozen=True, kw_only=True)
class DeclaredFacts:
    """Public facts, each None where nobody declared it.

    Attributes:
        num_records: Private records.
        num_public: Public points.
    """

    name: str
    num_classes: int | None = None
    num_records: int | None = None
    num_public: int | None = None

    @classmethod
    def from_source(cls, source: DatasetSource) -> DeclaredFacts:
        """Read off a source's own configuration: a benchmark's published constants, a user's declared keys."""
        facts = source.declared_facts()
        return cls(
            name=facts.name,
            num_classes=facts.num_classes,
            num_records=facts.num_private,
            num_public=facts.num_public,
        )

    def compute_shard_size(self, num_teachers: int) -> int | None:
        """Records of each teacher, about."""
        return None if self.num_records is None else self.num_records // num_teachers


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """One row of a plan report. Noise is in votes.

    Attributes:
        num_teachers: K; 0 where records answer for themselves.
        shard_size: Records of each teacher, about.
        routes: Epsilon of this release alone, by accountant; ``epsilon`` is the smallest.
        max_queries: Questions that a new account with the budget would admit. It is kept by a filter, which for noise
            that is not Gaussian is stricter than the smallest route.
        remaining_queries: Questions that the account there is still admits; None: there is none.
        sigma_for_target: The least noise at which ``num_queries`` cost the target.
        forecast: The forecast of the labels.
        problem: Why the plan cannot work.
        break_even_lead: See ``feasibility``.
        settings: How the command line chose it.
    """

    mechanism: str
    num_teachers: int
    shard_size: int | None
    num_queries: int
    num_classes: int
    sigma: float | None
    screen_sigma: float | None
    threshold: float | None
    delta: float
    budget: float
    routes: dict[str, float]
    max_queries: int
    remaining_queries: int | None
    sigma_for_target: float | None
    forecast: Forecast | None
    problem: str | None
    break_even_lead: float | None = None
    settings: tuple[str, ...] = ()

    @property
    def route(self) -> str | None:
        """The accountant that gives the smallest epsilon."""
        return min(self.routes, key=lambda name: self.routes[name]) if self.routes else None

    @property
    def epsilon(self) -> float | None:
        """The price of this release alone."""
        return None if self.route is None else self.routes[self.route]

    @property
    def num_correct_labels(self) -> float:
        """The number of right labels to expect."""
        if self.forecast is None or self.forecast.accuracy is None:
            return 0.0
        return self.num_queries * self.forecast.answer_rate * self.forecast.accuracy

    @property
    def verdict(self) -> str:
        """The first key of ``VERDICTS`` that applies."""
        if self.problem is not None:
            return "cannot"
        if self.max_queries < self.num_queries:
            return "over"
        if self.forecast is None:
            return "unknown"
        if self.forecast.answer_rate < 0.1 or self.forecast.accuracy is None:
            return "few"
        chance_accuracy = 1 / self.num_classes
        skill = (self.forecast.accuracy - chance_accuracy) / (1 - chance_accuracy)
        return "random" if skill < 0.2 else "poor" if skill < 0.5 else "ok"


def select_best(choices: list[Choice]) -> Choice | None:
    """The recommended choice; None where nothing works.

    Of the teachers' plans that work, it is the cheapest within two per cent of the most right labels; per-record
    gradients, where a larger share of their labels is right for no more epsilon.
    """
    working_choices = [choice for choice in choices if choice.verdict == "ok"]
    teacher_choices = [choice for choice in working_choices if choice.num_teachers]
    max_correct = max((choice.num_correct_labels for choice in teacher_choices), default=0.0)
    near_best = [choice for choice in teacher_choices if choice.num_correct_labels >= 0.98 * max_correct]
    best_choice = min(near_best, key=lambda choice: choice.epsilon or 0.0, default=None)
    for choice in working_choices:
        if not choice.num_teachers and (best_choice is None or _is_better(choice, best_choice)):
            best_choice = choice
    return best_choice


def _is_better(choice: Choice, baseline: Choice) -> bool:
    return _get_accuracy(choice) > _get_accuracy(baseline) and (choice.epsilon or 0.0) <= (baseline.epsilon or 0.0) * (
        1 + 1e-6
    )


def _get_accuracy(choice: Choice) -> float:
    return 0.0 if choice.forecast is None else choice.forecast.accuracy or 0.0


class PlanEvaluator:
    """Judges plans by one data set's declared facts, one pilot and (if there is one) its account.

    Args:
        facts: The data set's declared facts.
        pilot: How votes are simulated.
        votes_by_num_teachers: Number of teachers -> the vote model to try them on.
        proxy_dataset: Loads a public data set in place of the private records.
        num_classes: Number of classes.
        account: The data set's; None: there is none.

    Raises:
        ValueError: The input fits no choice.
    """

    def __init__(
        self,
        facts: DeclaredFacts,
        pilot: PilotConfig,
        votes_by_num_teachers: Callable[[int], VoteModel],
        proxy_dataset: Callable[[], Dataset],
        num_classes: int,
        account: Account | None,
    ) -> None:
        self.facts, self.pilot, self.num_classes, self.account = facts, pilot, num_classes, account
        self._proxy_dataset = proxy_dataset
        self._votes_by_num_teachers, self._vote_models = votes_by_num_teachers, dict[int, VoteModel]()
        self._sigmas = dict[Any, float | None]()

    def get_budget(self, plan: RunConfig) -> float:
        """The cap for a run of this plan: the one given, the account's, or what opens one."""
        if plan.privacy.budget_epsilon is not None:
            return plan.privacy.budget_epsilon
        return plan.privacy.opening_budget if self.account is None else self.account.budget_epsilon

    def __call__(self, plan: RunConfig, settings: tuple[str, ...] = ()) -> Choice:
        """Evaluate one plan; ``settings``: how the command line chose it."""
        problem, routes = self._find_problem(plan), dict[str, float]()
        if problem is None:
            plan = plan.calibrate_noise()
            try:
                routes = accounting.compute_route_epsilons(
                    self.privacy_events(plan, plan.num_queries), plan.privacy.delta
                )
            except ValueError as error:
                problem = str(error)
        mechanism: Any = plan.mechanism
        return Choice(
            mechanism=mechanism.name,
            num_teachers=plan.num_teachers,
            shard_size=self.facts.compute_shard_size(plan.num_teachers) if plan.num_teachers else None,
            num_queries=plan.num_queries,
            num_classes=self.num_classes,
            sigma=getattr(mechanism, "sigma", None),
            screen_sigma=getattr(mechanism, "screen_sigma", None),
            threshold=getattr(mechanism, "threshold", None),
            delta=plan.privacy.delta,
            budget=self.get_budget(plan),
            routes=routes,
            max_queries=self._find_max_queries(plan, functools.partial(self._can_open_account, plan)),
            remaining_queries=None if self.account is None else self._find_max_queries(plan, self._admits),
            sigma_for_target=self._calibrate_sigma(plan),
            forecast=None if problem is not None else self._forecast(plan),
            problem=problem,
            break_even_lead=feasibility.compute_break_even_lead(mechanism, self.num_classes),
            settings=settings,
        )

    def _find_problem(self, plan: RunConfig) -> str | None:
        """Why a run of this plan would be refused, whatever the budget; None if it would not."""
        try:
            if self.facts.num_public is not None:
                fix = f"The public pool holds {self.facts.num_public} points."
                checks.integer("num_queries", plan.num_queries, high=self.facts.num_public, fix=fix)
            if not plan.num_teachers and self._get_num_records(plan) is None:
                fix = "Set method.size, where about how many records there are is public."
                raise checks.error("dataset.nominal_size", None, "must be declared for per-record gradients", fix)
            if self.facts.num_records is not None:
                fix = f"{self.facts.num_records} private records are declared, and every teacher needs one."
                checks.integer("num_teachers", plan.num_teachers, high=self.facts.num_records, fix=fix)
            self._check(plan, plan.num_queries)
            plan.calibrate_noise()
        except ValueError as error:
            return str(error)
        return None

    def _check(self, plan: RunConfig, num_queries: int) -> None:
        plan.mechanism.check(
            num_queries=num_queries,
            num_teachers=plan.num_teachers,
            num_classes=self.num_classes,
            rounds=min(plan.query.rounds, num_queries),
        )

    def _find_max_queries(self, plan: RunConfig, admits: Callable[[tuple[PrivacyEvent, ...]], bool]) -> int:
        """The largest number of questions that is both possible and admitted; prices and checks grow with it."""

        def is_affordable(num_queries: int) -> bool:
            try:
                self._check(plan, num_queries)
                return admits(self.privacy_events(plan, num_queries))
            except ValueError:  # no filter could keep such a budget, or the mechanism no such plan
                return False

        if not is_affordable(1):
            return 0
        low, high = 1, 2
        while high <= MAX_QUERIES and is_affordable(high):
            low, high = high, 2 * high
        if high > MAX_QUERIES:
            return MAX_QUERIES
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_affordable(middle) else (low, middle)
        return low

    def privacy_events(self, plan: RunConfig, num_queries: int) -> tuple[PrivacyEvent, ...]:
        """What a run of so many questions may charge, the publication of their price as the plan has it."""
        label_events = plan.mechanism.privacy_events(num_queries, min(plan.query.rounds, num_queries))
        return label_events + plan.extra_privacy_events(self.num_classes)

    def _can_open_account(self, plan: RunConfig, events: tuple[PrivacyEvent, ...]) -> bool:
        return PrivacyFilter.can_admit(events, epsilon=self.get_budget(plan), delta=plan.privacy.delta)

    def _admits(self, events: tuple[PrivacyEvent, ...]) -> bool:
        assert self.account is not None
        return self.account.admits(events)

    def _calibrate_sigma(self, plan: RunConfig) -> float | None:
        mechanism: Any = plan.mechanism
        if not plan.num_teachers or "sigma" not in {f.name for f in dataclasses.fields(mechanism)}:
            return None
        # The noise of the answer is what is looked for: choices that differ in it alone share the result.
        target = plan.privacy.target_epsilon or self.get_budget(plan)
        key = (replace(mechanism, sigma=1.0), plan.num_queries, plan.num_rounds, target, plan.privacy.delta)
        if key not in self._sigmas:
            try:
                calibrated_plan = replace(plan, privacy=replace(plan.privacy, target_epsilon=target)).calibrate_noise()
                self._sigmas[key] = cast(Any, calibrated_plan.mechanism).sigma
            except ValueError:  # the checks alone cost more
                self._sigmas[key] = None
        return self._sigmas[key]

    def _get_num_records(self, plan: RunConfig) -> int | None:
        return getattr(plan.method, "size", None) or self.facts.num_records

    def _forecast(self, plan: RunConfig) -> Forecast | None:
        if plan.method.releases_model:
            num_records = self._get_num_records(plan)
            if self.pilot.dataset is None:
                return None
            assert num_records is not None
            return forecast_gradients(
                plan.mechanism,
                plan.method,
                self._proxy_dataset(),
                num_records=num_records,
                build_encoder=functools.partial(_learn_features, plan),
                seed=plan.seed,
            )
        if plan.num_teachers not in self._vote_models:
            self._vote_models[plan.num_teachers] = self._votes_by_num_teachers(plan.num_teachers)
        return simulate_release(
            plan.mechanism,
            self._vote_models[plan.num_teachers],
            num_teachers=plan.num_teachers,
            num_queries=plan.num_queries,
            rounds=plan.num_rounds,
            min_queries=self.pilot.num_queries,
            seed=plan.seed,
            soft=takes_probabilities(plan),
        )


def takes_probabilities(plan: RunConfig) -> bool:
    """Whether a run of this plan opens teachers' probabilities, and not their votes."""
    is_soft: Callable[[RunConfig], bool] | None = getattr(plan.method, "is_soft", None)
    return is_soft is not None and is_soft(plan)


def _learn_features(plan: RunConfig, data: Dataset) -> nn.Module | None:
    """As a run learns them, from the public points of ``data``."""
    if plan.features is None:
        return None
    return plan.features.learn(data.pool.x, data.spec, seed=plan.seed, device=plan.device)
