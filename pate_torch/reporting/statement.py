"""The privacy statement: who is protected, from what, by how much, on what assumptions, and what it leaves out.

An epsilon is never shown without its delta, adjacency, unit and route: ``PrivacyFacts.terms`` is the one place
that spells them, and every writer goes through it. Shown epsilons are rounded up, stored ones not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pate_torch.accounting.shown import show_delta, show_epsilon
from pate_torch.core import checks
from pate_torch.types import LABEL_UNIT

NOT_PRIVATE = "NOT PRIVATE"
WHY_NOT = (
    "The noise of this run was seeded or switched off, so that an outsider can recompute it and take it away again. "
    "No privacy guarantee holds, whatever the parameters say. Such a run is for tests: do not publish it."
)
WARNING = f"{NOT_PRIVATE}. {WHY_NOT}"

NO_TOTAL = "No total is claimed: a release from these data used seeded noise."
ADAPTIVE = "Where a later release was chosen after a look at an earlier one, the guarantee is the cap."

Scalar = bool | int | float | str | None

ROUTES = {
    "gdp": "exact Gaussian accounting",
    "rdp": "Rényi accounting",
    "pld": "privacy loss distributions",
    "zcdp": "zero-concentrated accounting",
    "pure": "pure composition",
    "none": "nothing was released",
    "cap": "the account's cap, kept by its filter",
}


def show_route(accountant: str) -> str:
    """gdp -> 'exact Gaussian accounting (gdp)'; an unknown name stays as it is."""
    return f"{ROUTES[accountant]} ({accountant})" if accountant in ROUTES else accountant


def attack_bound(epsilon: float, delta: float, false_alarms: float) -> float:
    """The largest share of members any membership test can find at this share of false alarms.

    Source: Wasserman & Zhou (2010); Kairouz, Oh & Viswanath (2015): with misses b and false alarms a,
    e^epsilon a + b >= 1 - delta and a + e^epsilon b >= 1 - delta, and nothing more.
    """
    low = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    high = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(1.0, low, high)


def advantage_bound(epsilon: float, delta: float) -> float:
    """The largest share of members found less share of false alarms, of any membership test: ``attack_bound`` - a.

    (e^epsilon - 1 + 2 delta) / (e^epsilon + 1), at the corner a = b of both lines; randomised response reaches it.
    Source: Kairouz, Oh & Viswanath (2015); Humphries et al. (2020, arXiv 2010.12112). Yeom et al. (2018) have
    e^epsilon - 1, which is larger.
    """
    return math.tanh(epsilon / 2) + 2 * delta / (math.exp(min(epsilon, 700.0)) + 1)


@dataclass(frozen=True, kw_only=True)
class OtherRelease:
    """Something released from the same private data, in this folder or elsewhere.

    ``epsilon`` is its own guarantee at the report's delta and adjacency, by the route ``accountant``; None where it
    has none. now: whether the run that reports was charged for it.
    """

    release_id: str
    what: str
    epsilon: float | None = None
    accountant: str = ""
    now: bool = False

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            checks.non_negative("other_releases.epsilon", self.epsilon)
            if not self.accountant:
                raise checks.fail("other_releases.accountant", self.accountant, "must name the route that gave epsilon")


@dataclass(frozen=True, kw_only=True)
class PrivacyFacts:
    """What the statement is made of; releasable, every one.

    epsilon: the guarantee of everything in the folder, composed from what was reserved for its ``parts``;
    ``epsilon_ex_post``: what had been spent when the run stopped, not a guarantee; ``epsilon_charged``: the account's
    total, all releases composed from what they reserved (None: some used seeded noise, and no total is claimed);
    ``epsilon_charged_ex_post``: what they used; ``budget_epsilon``: the account's cap; all at ``delta``.
    ``accountant``: the route that gave epsilon (and the account's total, unless ``charged_accountant`` names another).
    ``noise``: "torch" or "discrete". ``private``: False when the noise was seeded or switched off: then no epsilon
    is claimed by any writer, whatever is passed here. ``reused``: the labels had been released before.
    ``declared_size``: the publicly declared number of records, if the plan used one. ``split``: the share of the
    owner's file that was made public, as the public points. ``num_teachers`` is 0 for
    training without teachers (DP-SGD), and where records answered for themselves in so many ``census_rounds`` (0: they
    did not); ``slopes``: whether they said which way a model should move. ``successors``: of releases
    from before, whether others answered in later rounds, who had started from a released student.
    """

    dataset: str
    mechanism: str
    num_teachers: int
    queries_asked: int
    queries_answered: int
    epsilon: float | None
    delta: float
    accountant: str
    adjacency: str
    unit: str
    private: bool
    epsilon_ex_post: float | None = None
    epsilon_charged: float | None = None
    epsilon_charged_ex_post: float | None = None
    charged_accountant: str | None = None
    parts: tuple[OtherRelease, ...] = ()
    budget_epsilon: float | None = None
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    noise: str = "torch"
    declared_size: int | None = None
    split: float = 0.0
    reused: bool = False
    successors: bool = False
    census_rounds: int = 0
    slopes: bool = False
    other_releases: tuple[OtherRelease, ...] = ()

    def __post_init__(self) -> None:
        checks.integer("num_teachers", self.num_teachers, low=0)
        checks.integer("census_rounds", self.census_rounds, low=0)
        checks.integer("queries_asked", self.queries_asked, low=0)
        checks.integer("queries_answered", self.queries_answered, low=0, high=self.queries_asked)
        checks.delta("delta", self.delta)
        checks.one_of("adjacency", self.adjacency, ("add_remove", "replace_one"))
        checks.one_of("noise", self.noise, ("torch", "discrete"))
        checks.boolean("private", self.private)
        checks.boolean("reused", self.reused)
        checks.between("split", self.split, 0, 1)
        grouped = self.unit.startswith("group:") and len(self.unit) > len("group:")
        if self.unit not in ("record", LABEL_UNIT) and not grouped:
            raise checks.fail("unit", self.unit, f"must be 'record', 'group:<column>' or {LABEL_UNIT!r}")
        for name in ("epsilon", "epsilon_ex_post", "epsilon_charged", "epsilon_charged_ex_post", "budget_epsilon"):
            value = getattr(self, name)
            if value is not None:
                checks.non_negative(name, value)
        if self.private and self.epsilon is None:
            raise checks.fail(
                "epsilon", None, "must be a number in a private run", "Without a price nothing is released."
            )

    @property
    def claimed_epsilon(self) -> float | None:
        """The epsilon that may be claimed: None unless the run is private."""
        return self.epsilon if self.private else None

    @property
    def claimed_epsilon_ex_post(self) -> float | None:
        return self.epsilon_ex_post if self.private else None

    @property
    def claimed_epsilon_charged(self) -> float | None:
        return self.epsilon_charged if self.private else None

    @property
    def claimed_epsilon_charged_ex_post(self) -> float | None:
        return self.epsilon_charged_ex_post if self.private else None

    @property
    def budget_left(self) -> float | None:
        """The cap less what all releases reserved: what is left by what may be claimed. What votes left unused of
        mechanisms that keep quiet is not counted: how much depends on them.
        """
        if self.budget_epsilon is None or self.epsilon_charged is None:
            return None
        return max(0.0, self.budget_epsilon - self.epsilon_charged)

    @property
    def free(self) -> bool:
        """Whether this run added nothing to the account."""
        return self.reused and not any(part.now for part in self.parts)

    @property
    def unit_words(self) -> str:
        if self.unit == LABEL_UNIT:
            return "the label of one record"
        return "one record" if self.unit == "record" else f"all records of one {self.unit.removeprefix('group:')}"

    @property
    def adjacency_words(self) -> str:
        if self.adjacency == "add_remove":
            return f"add or remove {self.unit_words}"
        return f"replace {self.unit_words} by any other"

    @property
    def route_words(self) -> str:
        return show_route(self.accountant)

    @property
    def terms(self) -> str:
        """What an epsilon means nothing without."""
        return f"{self.setting}; route: {self.route_words}"

    @property
    def setting(self) -> str:
        """The terms that every epsilon of an account shares: all but the route."""
        neighbours = f"{self.adjacency_words} ({self.adjacency})"
        return f"delta = {show_delta(self.delta)}; neighbours: {neighbours}; unit: {self.unit}"

    def with_terms(self, epsilon: float) -> str:
        return f"epsilon = {show_epsilon(epsilon)} ({self.terms})"

    @property
    def parameters_words(self) -> str:
        """To six digits; privacy.json has them all."""
        shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.parameters.items() if v is not None}
        return ", ".join(f"{name} = {value}" for name, value in shown.items())


def headline(facts: PrivacyFacts) -> str:
    """One line: the guarantee with its terms, or that there is none."""
    if facts.claimed_epsilon is None:
        return f"{NOT_PRIVATE}: no guarantee"
    return facts.with_terms(facts.claimed_epsilon)


def symbols(facts: PrivacyFacts) -> str:
    """The guarantee as an inequality."""
    if facts.claimed_epsilon is None:
        return "For no epsilon: Pr[M(D) ∈ S] may be 1 where Pr[M(D′) ∈ S] is 0."
    relation = "D and D′ that differ by " + {
        "add_remove": f"{facts.unit_words} added or removed",
        "replace_one": f"{facts.unit_words} replaced",
    }.get(facts.adjacency, facts.adjacency)
    return (
        f"For all {relation}, and every set S of outcomes: Pr[M(D) ∈ S] ≤ exp(ε) · Pr[M(D′) ∈ S] + δ, "
        f"with ε = {show_epsilon(facts.claimed_epsilon)} and δ = {show_delta(facts.delta)}."
    )


_SCALE = (
    "With no protection it could be 100 %, with perfect protection 1 %. (The advantage, power less false alarms at "
    "whatever rate of them suits the attack, is another figure, with a bound of its own.)"
)


def plain_words(facts: PrivacyFacts) -> tuple[str, ...]:
    """The guarantee for someone who has never seen one, in a few paragraphs."""
    if facts.claimed_epsilon is None:
        return (WARNING,)
    eps = facts.claimed_epsilon
    found = attack_bound(eps, facts.delta, 0.01)
    verb = "added or removed" if facts.adjacency == "add_remove" else "replaced by any other"
    if facts.unit == LABEL_UNIT:
        return (
            f"This release protects the label of every record of {facts.dataset}, and nothing else of it: the features "
            f"of all records are taken to be public. Everything in it would have come out almost as likely with "
            f"{facts.unit_words} replaced by any other, whoever looks, and whatever else they know.",
            f"What that means: someone who tests whether a record has one label or another, and is wrong about 1 % of "
            f"those that have the other, can be right about at most {math.ceil(found * 1000) / 10:.1f} % of those that "
            f"have the one (its power at 1 % false alarms). {_SCALE}",
            _how(facts),
        )
    many = (
        "every record"
        if facts.unit == "record"
        else f"every {facts.unit.removeprefix('group:')}, with all its records,"
    )
    return (
        f"This release protects {many} of {facts.dataset}: everything in it would have come out almost as likely "
        f"with {facts.unit_words} {verb}, whoever looks, and whatever else they know.",
        f"What that means: someone who tests whether {facts.unit_words} took part, and is wrong about 1 % of those "
        f"that did not, can be right about at most {math.ceil(found * 1000) / 10:.1f} % of those that did (its power "
        f"at 1 % false alarms). {_SCALE}",
        _how(facts),
    )


def _how(facts: PrivacyFacts) -> str:
    given = f" ({facts.parameters_words})" if facts.parameters else ""
    if facts.slopes:
        return (
            f"How: {_counted(facts)}: which way a public model should move to be right about it. The mechanism "
            f"{facts.mechanism}{given} added noise to every sum of what they said, and only the answers of the models "
            "moved by these noisy sums left, on public points. A student sees nothing but public points and these "
            "answers."
        )
    if facts.census_rounds:
        lies = "most of its records lie" if facts.unit.startswith("group:") else "it lies"
        return (
            f"How: {_counted(facts)}: for its class, at the one of the public points asked ({facts.queries_asked} in "
            f"all) that {lies} nearest to. The mechanism {facts.mechanism}{given} added noise to every count, and only "
            "the noisy counts left. A student sees nothing but public points and these counts."
        )
    if facts.num_teachers == 0:
        return f"How: the model was trained on the private records themselves by {facts.mechanism}{given}."
    left = "answers, with the noisy votes behind them," if facts.parameters.get("counts") is True else "answers"
    then = ""
    if facts.successors:
        then = " (after the first round as many successors, who started from what the answers so far taught a student)"
    return (
        f"How: {facts.num_teachers} teachers{then}, each trained on its own share of the records, voted on "
        f"{facts.queries_asked} public questions. The mechanism {facts.mechanism}{given} added noise to the votes, and "
        f"only its {facts.queries_answered} {left} left. A student sees nothing but public points and these answers."
    )


def _counted(facts: PrivacyFacts) -> str:
    named = {"record": "Every record", LABEL_UNIT: "The label of every record"}
    who = named.get(facts.unit, f"Every {facts.unit.removeprefix('group:')}")
    rounds = "" if facts.census_rounds == 1 else f" in each of {facts.census_rounds} rounds"
    if facts.slopes:
        steps = facts.parameters.get("steps", 1)
        return f"{who} had a say {'once' if steps == 1 else f'{steps} times'}{rounds}"
    return f"{who} was counted once{rounds}"


@dataclass(frozen=True, kw_only=True)
class Price:
    """One line of the account: an epsilon (None: unknown, or no cap), the route that gave it, and what it covers."""

    name: str
    epsilon: float | None
    route: str
    covers: str


def composition(facts: PrivacyFacts) -> tuple[Price, ...]:
    """This release, the account's total and its cap; empty if not private."""
    if facts.claimed_epsilon is None:
        return ()
    route = facts.route_words
    rows = [
        Price(
            name="This release alone",
            epsilon=facts.claimed_epsilon,
            route=route,
            covers="The guarantee: of everything in this folder, and of nothing outside it.",
        )
    ]
    if len(facts.parts) > 1:
        rows += [
            Price(
                name=f"  {part.what}",
                epsilon=part.epsilon,
                route=show_route(part.accountant),
                covers="By itself." if part.now else "By itself; paid for by an earlier run.",
            )
            for part in facts.parts
        ]
    if facts.epsilon_ex_post is not None and facts.epsilon_ex_post != facts.claimed_epsilon:
        spent = "What had been used when the run stopped. It depends on the answers, so it is not a guarantee."
        rows.append(Price(name="Spent (ex post)", epsilon=facts.epsilon_ex_post, route=route, covers=spent))
    free = " The labels had been paid for before: this run added nothing." if facts.free else ""
    together = "Everything reserved for these data in the ledger, composed."
    if facts.epsilon_charged is None:
        together = NO_TOTAL
    elif facts.other_releases:
        together += f" {ADAPTIVE}"
    rows.append(
        Price(
            name="All releases together",
            epsilon=facts.epsilon_charged,
            route=show_route(facts.charged_accountant or facts.accountant),
            covers=together + free,
        )
    )
    if facts.epsilon_charged_ex_post is not None and facts.epsilon_charged_ex_post != facts.epsilon_charged:
        used = "What all of them used of it. It depends on the answers, so it is not a guarantee."
        rows.append(
            Price(name="All of it (ex post)", epsilon=facts.epsilon_charged_ex_post, route="composed", covers=used)
        )
    rows.append(
        Price(
            name="Cap",
            epsilon=facts.budget_epsilon,
            route="set by the owner",
            covers="What all releases together may reach. A release that would pass it is refused.",
        )
    )
    return tuple(rows)


def assumptions(facts: PrivacyFacts) -> tuple[str, ...]:
    """What must be true for the guarantee to hold."""
    rows = []
    if facts.slopes:
        rows.append(f"{_counted(facts)}, never longer than 1, by itself and by public values alone.")
    elif facts.census_rounds:
        rows.append(f"{_counted(facts)}, in one number of one table, by itself and by public values alone.")
    if facts.num_teachers:
        who = "Each record" if facts.unit == "record" else facts.unit_words[0].upper() + facts.unit_words[1:]
        rows.append(
            f"{who} reached exactly one of the {facts.num_teachers} teachers, and no teacher learnt anything from "
            "outside its own share."
        )
        if facts.successors:
            rows.append(
                f"{who} reached exactly one of the {facts.num_teachers} successors of each later round, who learnt "
                "from their own share and from answers that had left before."
            )
    if facts.private and facts.noise == "discrete":
        rows.append(
            "The noise is exact and discrete, and comes from the operating system's entropy, unknown to anyone."
        )
    elif facts.private:
        way_out = "" if facts.slopes else " (noise=discrete does)"
        rows.append(
            "The noise comes from the operating system's entropy, unknown to anyone, and is rounded to floating point: "
            f"the guarantee is for real numbers, and attacks on the rounding are not excluded{way_out}."
        )
    rows.append(
        "The list of classes, the normalisation constants and the configuration are public: nothing in them came from "
        "private records."
    )
    if facts.declared_size is not None:
        rows.append(f"The declared number of records, {facts.declared_size}, is public.")
    elif facts.adjacency == "replace_one":
        rows.append("The number of records is public.")
    if facts.unit == LABEL_UNIT:
        rows.append("The features of all records are public, and so are the labels used for measuring.")
    else:
        rows.append(
            "The public points and the labels used for measuring are public, and disjoint from the private records."
        )
    return tuple(rows)


def _published(facts: PrivacyFacts) -> str:
    if not facts.split:
        return ""
    return f" They were about {facts.split:.0%} of the same file, which its owner made public."


def not_covered(facts: PrivacyFacts) -> tuple[str, ...]:
    """What the guarantee says nothing about."""
    rows = [
        "Time: how long the computation took, and anything else seen of the machine while it ran.",
        "The owner's own looks at private results: a parameter chosen after seeing votes, teachers' accuracies or "
        "data-dependent prices is a release that nobody charged.",
        "The public pool: its points are shown as they are." + _published(facts),
        "Anything from the same records published by other means than this ledger's account.",
        "What holds of the population: a pattern among many records can be learnt, and is meant to be.",
    ]
    if facts.unit == LABEL_UNIT:
        rows.append("The features of the private records, and who is among them: they were used as public points.")
    if facts.unit == "record":
        rows.append(
            "Several records of one person together: the guarantee is for one record (set a group column for persons)."
        )
    return tuple(rows)
