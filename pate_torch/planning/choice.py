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
from pate_torch.ledger import Account
from pate_torch.planning import feasibility
from pate_torch.planning.pilot import Outcome, Pilot, VoteModel, follow, simulate_release
from pate_torch.types import Dataset

MOST_QUERIES = 10**7
"""Beyond it, a budget is said to hold any number of questions."""

VERDICTS = {
    "ok": "works",
    "over": "the budget does not hold so many questions",
    "random": "labels little better than guesses",
    "poor": "labels nearer to guesses than to the truth",
    "unknown": "no forecast: imagined votes know no features (pilot.on does)",
    "few": "fewer than one question in ten is answered",
    "cannot": "refused",
}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Public facts, each None where nobody declared it.

    Attributes:
        size: Private records.
        pool: Public points.
    """

    name: str
    num_classes: int | None = None
    size: int | None = None
    pool: int | None = None

    @classmethod
    def of(cls, source: Any) -> Declared:
        """Read off a source's own configuration: a benchmark's published constants, a user's declared keys."""
        classes = getattr(source, "num_classes", getattr(source, "classes", getattr(source, "class_names", None)))
        if hasattr(source, "nominal_size"):
            size = source.nominal_size
        else:  # a benchmark: so many of its records, or all of them
            size = getattr(source, "private", None) or getattr(source, "size", None)
        return cls(
            name=source.name,
            num_classes=classes if classes is None or isinstance(classes, int) else len(classes),
            size=size,
            pool=getattr(source, "public", None),
        )

    def shard(self, num_teachers: int) -> int | None:
        """Records of each teacher, about."""
        return None if self.size is None else self.size // num_teachers


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """One row of a plan report. Noise is in votes.

    Attributes:
        num_teachers: K; 0 where records answer for themselves.
        shard: Records of each teacher, about.
        routes: Epsilon of this release alone, by accountant; ``epsilon`` is the smallest.
        fits: Questions that a new account with the budget would admit. It is kept by a filter, which for noise that is
            not Gaussian is stricter than the smallest route.
        left: Questions that the account there is still admits; None: there is none.
        sigma_for_target: The least noise at which ``num_queries`` cost the target.
        outcome: The forecast of the labels.
        problem: Why the plan cannot work.
        break_even: See ``chance``.
        settings: How the command line chose it.
    """

    mechanism: str
    num_teachers: int
    shard: int | None
    num_queries: int
    num_classes: int
    sigma: float | None
    screen_sigma: float | None
    threshold: float | None
    delta: float
    budget: float
    routes: dict[str, float]
    fits: int
    left: int | None
    sigma_for_target: float | None
    outcome: Outcome | None
    problem: str | None
    break_even: float | None = None
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
    def right_labels(self) -> float:
        """The number of right labels to expect."""
        if self.outcome is None or self.outcome.right is None:
            return 0.0
        return self.num_queries * self.outcome.answered * self.outcome.right

    @property
    def verdict(self) -> str:
        """The first key of ``VERDICTS`` that applies."""
        if self.problem is not None:
            return "cannot"
        if self.fits < self.num_queries:
            return "over"
        if self.outcome is None:
            return "unknown"
        if self.outcome.answered < 0.1 or self.outcome.right is None:
            return "few"
        chance = 1 / self.num_classes
        skill = (self.outcome.right - chance) / (1 - chance)
        return "random" if skill < 0.2 else "poor" if skill < 0.5 else "ok"


def best(choices: list[Choice]) -> Choice | None:
    """The recommended choice; None where nothing works.

    Of the teachers' plans that work, it is the cheapest within two per cent of the most right labels; per-record
    gradients, where a larger share of their labels is right for no more epsilon.
    """
    works = [choice for choice in choices if choice.verdict == "ok"]
    teachers = [choice for choice in works if choice.num_teachers]
    most = max((choice.right_labels for choice in teachers), default=0.0)
    near = [choice for choice in teachers if choice.right_labels >= 0.98 * most]
    found = min(near, key=lambda choice: choice.epsilon or 0.0, default=None)
    for choice in works:
        if not choice.num_teachers and (found is None or _better(choice, found)):
            found = choice
    return found


def _better(one: Choice, other: Choice) -> bool:
    return _right(one) > _right(other) and (one.epsilon or 0.0) <= (other.epsilon or 0.0) * (1 + 1e-6)


def _right(choice: Choice) -> float:
    return 0.0 if choice.outcome is None else choice.outcome.right or 0.0


class PlanEvaluator:
    """Judges plans by one data set's declared facts, one pilot and (if there is one) its account.

    Args:
        declared: The data set's declared facts.
        pilot: How votes are simulated.
        crowd: Number of teachers -> the vote model to try them on.
        stand_in: A public data set in place of the private records.
        num_classes: Number of classes.
        account: The data set's; None: there is none.

    Raises:
        ValueError: The input fits no choice.
    """

    def __init__(
        self,
        declared: Declared,
        pilot: Pilot,
        crowd: Callable[[int], VoteModel],
        stand_in: Callable[[], Dataset],
        num_classes: int,
        account: Account | None,
    ) -> None:
        self.declared, self.pilot, self.num_classes, self.account = declared, pilot, num_classes, account
        self._stand_in = stand_in
        self._crowd, self._crowds = crowd, dict[int, VoteModel]()
        self._sigmas = dict[Any, float | None]()

    def budget(self, plan: RunConfig) -> float:
        """The cap for a run of this plan: the one given, the account's, or what opens one."""
        if plan.privacy.budget_epsilon is not None:
            return plan.privacy.budget_epsilon
        return plan.privacy.opening_budget if self.account is None else self.account.budget_epsilon

    def __call__(self, plan: RunConfig, settings: tuple[str, ...] = ()) -> Choice:
        """Evaluate one plan; ``settings``: how the command line chose it."""
        problem, routes = self._problem(plan), dict[str, float]()
        if problem is None:
            plan = plan.calibrate_noise()
            try:
                routes = accounting.compute_route_epsilons(self.events(plan, plan.num_queries), plan.privacy.delta)
            except ValueError as error:
                problem = str(error)
        mechanism: Any = plan.mechanism
        return Choice(
            mechanism=mechanism.name,
            num_teachers=plan.num_teachers,
            shard=self.declared.shard(plan.num_teachers) if plan.num_teachers else None,
            num_queries=plan.num_queries,
            num_classes=self.num_classes,
            sigma=getattr(mechanism, "sigma", None),
            screen_sigma=getattr(mechanism, "screen_sigma", None),
            threshold=getattr(mechanism, "threshold", None),
            delta=plan.privacy.delta,
            budget=self.budget(plan),
            routes=routes,
            fits=self._most(plan, functools.partial(self._opens, plan)),
            left=None if self.account is None else self._most(plan, self._admits),
            sigma_for_target=self._sigma_for_target(plan),
            outcome=None if problem is not None else self._rehearse(plan),
            problem=problem,
            break_even=feasibility.break_even(mechanism, self.num_classes),
            settings=settings,
        )

    def _problem(self, plan: RunConfig) -> str | None:
        """Why a run of this plan would be refused, whatever the budget; None if it would not."""
        try:
            if self.declared.pool is not None:
                fix = f"The public pool holds {self.declared.pool} points."
                checks.integer("num_queries", plan.num_queries, high=self.declared.pool, fix=fix)
            if not plan.num_teachers and self._size(plan) is None:
                fix = "Set voters.size, where about how many records there are is public."
                raise checks.error("dataset.nominal_size", None, "must be declared for per-record gradients", fix)
            if self.declared.size is not None:
                fix = f"{self.declared.size} private records are declared, and every teacher needs one."
                checks.integer("num_teachers", plan.num_teachers, high=self.declared.size, fix=fix)
            self._check(plan, plan.num_queries)
            plan.calibrate_noise()
        except ValueError as error:
            return str(error)
        return None

    def _check(self, plan: RunConfig, queries: int) -> None:
        plan.mechanism.check(
            num_queries=queries,
            num_teachers=plan.num_teachers,
            num_classes=self.num_classes,
            rounds=min(plan.query.rounds, queries),
        )

    def _most(self, plan: RunConfig, admits: Callable[[tuple[PrivacyEvent, ...]], bool]) -> int:
        """The largest number of questions that is both possible and admitted; prices and checks grow with it."""

        def fits(queries: int) -> bool:
            try:
                self._check(plan, queries)
                return admits(self.events(plan, queries))
            except ValueError:  # no filter could keep such a budget, or the mechanism no such plan
                return False

        if not fits(1):
            return 0
        good, bad = 1, 2
        while bad <= MOST_QUERIES and fits(bad):
            good, bad = bad, 2 * bad
        if bad > MOST_QUERIES:
            return MOST_QUERIES
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return good

    def events(self, plan: RunConfig, queries: int) -> tuple[PrivacyEvent, ...]:
        """What a run of so many questions may charge, the publication of their price as the plan has it."""
        labels = plan.mechanism.privacy_events(queries, min(plan.query.rounds, queries))
        return labels + plan.extra_privacy_events(self.num_classes)

    def _opens(self, plan: RunConfig, events: tuple[PrivacyEvent, ...]) -> bool:
        return PrivacyFilter.can_admit(events, epsilon=self.budget(plan), delta=plan.privacy.delta)

    def _admits(self, events: tuple[PrivacyEvent, ...]) -> bool:
        assert self.account is not None
        return self.account.admits(events)

    def _sigma_for_target(self, plan: RunConfig) -> float | None:
        mechanism: Any = plan.mechanism
        if not plan.num_teachers or "sigma" not in {f.name for f in dataclasses.fields(mechanism)}:
            return None
        # The noise of the answer is what is looked for: choices that differ in it alone share the result.
        target = plan.privacy.target_epsilon or self.budget(plan)
        key = (replace(mechanism, sigma=1.0), plan.num_queries, plan.num_rounds, target, plan.privacy.delta)
        if key not in self._sigmas:
            try:
                aimed = replace(plan, privacy=replace(plan.privacy, target_epsilon=target)).calibrate_noise()
                self._sigmas[key] = cast(Any, aimed.mechanism).sigma
            except ValueError:  # the checks alone cost more
                self._sigmas[key] = None
        return self._sigmas[key]

    def _size(self, plan: RunConfig) -> int | None:
        return getattr(plan.method, "size", None) or self.declared.size

    def _rehearse(self, plan: RunConfig) -> Outcome | None:
        if plan.method.releases_model:
            size = self._size(plan)
            if self.pilot.on is None:
                return None
            assert size is not None
            return follow(
                plan.mechanism,
                plan.method,
                self._stand_in(),
                size=size,
                features=functools.partial(_features, plan),
                seed=plan.seed,
            )
        if plan.num_teachers not in self._crowds:
            self._crowds[plan.num_teachers] = self._crowd(plan.num_teachers)
        return simulate_release(
            plan.mechanism,
            self._crowds[plan.num_teachers],
            num_teachers=plan.num_teachers,
            num_queries=plan.num_queries,
            rounds=plan.num_rounds,
            at_least=self.pilot.questions,
            seed=plan.seed,
            soft=takes_probabilities(plan),
        )


def takes_probabilities(plan: RunConfig) -> bool:
    """Whether a run of this plan opens teachers' probabilities, and not their votes."""
    soft: Callable[[RunConfig], bool] | None = getattr(plan.method, "soft", None)
    return soft is not None and soft(plan)


def _features(plan: RunConfig, data: Dataset) -> nn.Module | None:
    """As a run learns them, from the public points of ``data``."""
    if plan.features is None:
        return None
    return plan.features.learn(data.pool.x, data.spec, seed=plan.seed, device=plan.device)
