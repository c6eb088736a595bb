"""The one door to noise: what is refused before a charge, what an error leaves spent, and what may be gone on with."""

import ast
import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import warnings
from pathlib import Path

import pytest
import torch

import pate_torch
from pate_torch.accounting import gdp
from pate_torch.accounting.events import GaussianEvent, ZCDPEvent
from pate_torch.mechanisms.gaussian import GNMax as Gnmax
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.budget import Budget, Spending
from pate_torch.privacy.chain import HashChain, LedgerError
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise, NoiseSource
from pate_torch.privacy.records import Answers, DataSpec, MechanismContext, PublicPool
from pate_torch.privacy.sensitive import COUNT_SENSITIVITY, CellHistogram, SoftVotes, Votes
from pate_torch.queries.base import Random
from pate_torch.release import store as release_store
from tests.answering import answer_queries
from tests.mechanisms.mechanism_forms import ALL_FORMS, made, num_classes, num_teachers, random_votes
from tests.methods.voter_worlds import gradient_sums

PACKAGE = Path(pate_torch.__file__).parent
CPU = torch.device("cpu")
TERMS = {"delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
EACH = GaussianEvent(mu=0.1)
STATE = "5" * 64


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "home" / "ledger.sqlite"


@pytest.fixture
def ledger(path):
    with Ledger(path) as one:
        one.open_account("svhn", budget_epsilon=4.0, **TERMS, planned_events=[EACH], noise="torch")
        yield one


def budget(ledger, **changes) -> Budget:
    return Budget(**{"ledger": ledger, "account": "svhn", **TERMS, "fingerprint": "f", "run": "r", **changes})


def spent(ledger, name="svhn") -> float:
    return ledger.get_account(name).ex_post_guarantee.epsilon


def cost(questions) -> float:
    return pytest.approx(gdp.compute_epsilon(0.1 * math.sqrt(questions), 1e-5), rel=1e-12)


# ---- there is no other door -----------------------------------------------------------------------------------------


def package(*words: str) -> dict[str, ast.Module]:
    """The modules of the package that contain one of these words."""
    texts = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    return {name: ast.parse(text) for name, text in texts.items() if any(word in text for word in words)}


def callers(*names: str) -> set[tuple[str, str]]:
    """(file, method) of whoever uses these methods of anything that is not a budget.

    Of a report and of a written release, ``record`` is a part: what is said of it, or its release.json.
    """
    found = set()
    for name, tree in package(*(f".{name}" for name in names)).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in names:
                whose = ast.unparse(node.value)
                own = name in ("privacy/ledger.py", "release/report.py") and whose == "self"
                is_part = node.attr == "record" and whose.split(".")[-1] in ("report", "_report", "written", "reused")
                is_database = whose in ("self._db", "self._connection")
                if not own and not is_part and not is_database and whose.split(".")[-1] != "budget":
                    found.add((name, node.attr))
    return found


def test_nobody_but_the_budget_charges_the_ledger():
    assert callers("reserve", "record", "resume", "commit") == {
        ("privacy/budget.py", name) for name in ("reserve", "record", "resume", "commit")
    }


def test_noise_is_made_by_the_budget_alone():
    made, derived = set(), set()
    with pytest.raises(TypeError, match=r"budget\.spend"):
        NoiseSource("torch")
    for name, tree in package("NoiseSource", "_ChargedNoise", "DryRunNoise").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("NoiseSource", "_ChargedNoise"):
                made.add((name, ast.unparse(node.func)))
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
                if bases & {"NoiseSource", "_ChargedNoise", "DryRunNoise"}:
                    derived.add(node.name)
    assert made == {("privacy/budget.py", "_ChargedNoise")} and derived == {"_ChargedNoise", "DryRunNoise"}


RANDOM = ("urandom", "randn", "randn_like", "rand", "rand_like", "randint", "randperm", "bernoulli", "multinomial",
          "normal", "normal_", "exponential_", "cauchy_", "default_rng", "RandomState", "Generator", "manual_seed",
          "token_bytes", "SystemRandom", "Normal", "Laplace", "make_numpy_generator",
          "make_torch_generator")  # fmt: skip
NEVER = ("random", "secrets", "os", "numpy.random", "torch.distributions")


def test_what_meets_private_values_draws_from_nowhere_else():
    """Mechanisms, learners and choices have no generator of their own, and import none."""
    among = [PACKAGE / name for name in ("methods/labeling.py", "methods/dpsgd.py", "methods/dpsgd_optimizer.py",
                                         "students/selection.py", "api/labeler.py")]  # fmt: skip
    found = set()
    for file in [*among, *PACKAGE.glob("mechanisms/*.py"), *PACKAGE.glob("hypotheses/*.py")]:
        name, tree = str(file.relative_to(PACKAGE)), ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in RANDOM:
                found.add((name, ast.unparse(node)))
            if isinstance(node, ast.ImportFrom | ast.Import):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                found |= {(name, word) for word in modules if word in NEVER}
            if isinstance(node, ast.Name) and node.id in RANDOM:
                found.add((name, node.id))
    assert found == {
        ("methods/dpsgd.py", "make_torch_generator"),  # a network's first weights, of the seed alone
        ("hypotheses/algorithms.py", "make_numpy_generator"),  # the order of the records, of the seed alone
        ("hypotheses/sweep.py", "make_numpy_generator"),  # the order of public records
    }


# ---- terms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,stored",
    [
        ({"adjacency": "replace_one"}, "add_remove"),
        ({"unit": "group:user"}, "record"),
        ({"delta": 1e-6}, "1e-05"),
        ({"kind": "discrete"}, "torch"),
        ({"kind": "by opacus"}, "torch"),
    ],
    ids=str,
)
def test_other_terms_are_refused_before_anything_is_reserved(ledger, change, stored):
    head, other = ledger.get_head(), budget(ledger, **change)
    (key, asked), *_ = change.items()
    words = rf"{'noise' if key == 'kind' else key}={asked!r}.*'svhn' was opened with '?{stored}"
    for attempt in (other.check_events, lambda events: other.spend(events, mechanism="m").__enter__()):
        with pytest.raises(ValueError, match=words):
            attempt([EACH])
    assert ledger.get_head() == head


def test_a_delta_that_continuous_noise_cannot_keep_opens_no_door(ledger):
    tiny = {**TERMS, "delta": 1e-16}
    for kind in ("torch", "discrete"):
        ledger.open_account(kind, budget_epsilon=90.0, **tiny, planned_events=[EACH], noise=kind)
    with pytest.raises(ValueError, match=r"privacy\.delta=1e-16"):
        Budget.from_account(ledger, "torch")
    assert Budget.from_account(ledger, "discrete").kind == "discrete"


@pytest.mark.parametrize(
    "prepare,events,error",
    [
        (lambda ledger: ledger.close_account("svhn", "ended"), [EACH], LedgerError),
        (lambda ledger: None, [GaussianEvent(mu=0.1, count=10**4)], BudgetExceeded),
        (lambda ledger: None, [ZCDPEvent(rho=1e-6)], ValueError),
    ],
    ids=["closed", "cap", "filter"],
)
def test_what_cannot_be_charged_draws_nothing(ledger, prepare, events, error):
    prepare(ledger)
    head = ledger.get_head()
    with pytest.raises(error), budget(ledger).spend(events, mechanism="m"):
        pytest.fail("noise was handed out")
    with pytest.raises(error):
        budget(ledger).check_events(events)
    assert ledger.get_head() == head


@pytest.mark.parametrize(
    "change",
    [{"kind": "quantum"}, {"kind": "by "}, {"insecure_seed": -1}]
    + [{"kind": kind, "insecure_seed": 1} for kind in ("discrete", "by opacus")],
    ids=str,
)
def test_impossible_noise_is_refused(ledger, change):
    with pytest.raises(ValueError, match="noise"):
        budget(ledger, **change)


# ---- how a spending ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "suspended"), [(ValueError, False), (KeyboardInterrupt, True), (GeneratorExit, True)]
)
def test_left_by_an_error_it_stays_reserved_at_its_worst(ledger, error, suspended):
    with pytest.raises(error), budget(ledger).spend([GaussianEvent(mu=0.1, count=9)], mechanism="m") as spending:
        spending.record_cost([EACH])
        if suspended:
            spending.suspend(STATE)
        raise error
    assert spent(ledger) == cost(9) and ledger.get_account("svhn").num_open == 1
    refuses_to_go_on(ledger, spending.id)
    with pytest.raises(LedgerError, match="more than"), budget(ledger).spend([EACH], mechanism="m") as spending:
        spending.record_cost([EACH, EACH])
    assert spent(ledger) == cost(10) and ledger.get_account("svhn").num_open == 2


@pytest.mark.parametrize("incurred,paid", [((), 0), ((4,), 4), ((2, 3), 5), ((9,), 9), (None, 9)])
def test_left_well_it_is_committed_at_what_was_incurred(ledger, incurred, paid):
    """Nothing said: all of it."""
    with budget(ledger).spend([GaussianEvent(mu=0.1, count=9)], mechanism="m", purpose="a thing") as spending:
        for count in incurred if incurred is not None else ():
            spending.record_cost([GaussianEvent(mu=0.1, count=count)])
        if incurred == ():
            spending.record_cost(())
        assert spent(ledger) == cost(9)  # all of it, for as long as noise may be drawn
    assert spent(ledger) == (cost(paid) if paid else 0)
    assert ledger.get_account("svhn").guarantee.epsilon == cost(9)
    (charge,) = ledger.get_charges("svhn").values()
    assert (charge.purpose, charge.run, charge.fingerprint, charge.is_committed) == ("a thing", "r", "f", True)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_noise_is_over_with_its_spending(ledger, error):
    with contextlib.suppress(ZeroDivisionError), budget(ledger).spend([EACH], mechanism="m") as spending:
        noise = spending.noise
        noise.draw_gaussian((3,), 1.0, CPU)
        if error is not None:
            raise error
    over = (
        lambda: spending.noise,
        lambda: noise.draw_gaussian((3,), 1.0, CPU),
        lambda: noise.draw_laplace((3,), 1.0, CPU),
        lambda: noise.draw_uniform((3,), CPU),
        lambda: noise.draw_gumbel((3,), CPU),
        lambda: spending.record_cost([EACH]),
        lambda: spending.suspend(STATE),
        lambda: spending.accept(answers(reservation_id=spending.id)),
    )
    for late in over:
        with pytest.raises(RuntimeError, match="not be charged"):
            late()


def test_a_library_that_draws_its_own_is_handed_none(ledger):
    ledger.open_account("other", budget_epsilon=4.0, **TERMS, planned_events=[EACH], noise="by opacus")
    paid = budget(ledger, account="other", kind="by opacus").spend([EACH], mechanism="m")
    with paid as spending, pytest.raises(RuntimeError, match="drawn by opacus"):
        _ = spending.noise
    assert spent(ledger, "other") == cost(1)


@pytest.mark.parametrize("seed,private", [(None, True), (3, False)])
def test_a_seed_marks_the_charge(ledger, seed, private):
    with budget(ledger, insecure_seed=seed).spend([EACH], mechanism="m") as spending:
        drawn = spending.noise.draw_gaussian((50,), 1.0, CPU)
        assert spending.secret is private
    assert ledger.get_account("svhn").is_private is private
    assert torch.equal(drawn, DryRunNoise("torch", 3).draw_gaussian((50,), 1.0, CPU)) is not private


# ---- answers nobody was charged for ---------------------------------------------------------------------------------


def answers(**changes) -> Answers:
    return Answers(torch.zeros(2, dtype=torch.int64), (EACH,), **changes)


def votes(queries: int = 2) -> Votes:
    return random_votes(queries, 20, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loose(Gnmax):
    """A mechanism of somebody's own, which answers past the mark."""

    def release(self, votes, noise, context):
        return self.draw(votes, noise, context)


def test_answers_are_admitted_by_what_paid_for_them_alone(ledger):
    mechanism, asked = Gnmax(sigma=20.0), MechanismContext(num_queries=2)
    planned = mechanism.privacy_events(2)
    with budget(ledger).spend(planned, mechanism="m") as spending:
        earlier = spending.accept(mechanism.release(votes(), spending.noise, asked))
    with budget(ledger).spend(planned, mechanism="m") as spending:
        refused = (
            (earlier, "not drawn with this release"),
            (answers(), "not drawn with this release"),
            (mechanism.release(votes(), DryRunNoise("torch"), asked), "of a dry run"),
            (DryRunNoise("torch").stamp(answers(reservation_id=spending.id)), "of a dry run"),
            (Loose(sigma=20.0).release(votes(), spending.noise, asked), "not drawn with this release"),
        )
        for one, words in refused:
            with pytest.raises(ValueError, match=words):
                spending.accept(one)
        with pytest.raises(ValueError, match="not drawn with this noise"):
            spending.noise.stamp(DryRunNoise("torch").stamp(answers()))
        assert spending.accept(answers(reservation_id=spending.id)).reservation_id == spending.id


SPEC = DataSpec(name="svhn", num_classes=3, input_shape=(1,), class_names=("a", "b", "c"), mean=(0.0,), std=(1.0,))
POOL = PublicPool(torch.arange(6.0)[:, None])


def label(door, folder, **changes):
    written = []

    def write(release):
        written.append(release_store.write(folder, release, {"dataset": "svhn"}, SPEC))
        return release_store.select_digests(written[-1])

    given = {"sensitive": votes(6), "pool": POOL, "spec": SPEC, "mechanism": Gnmax(sigma=20.0), "strategy": Random()}
    given |= {"budget": door, "num_queries": 4, "seed": 0, "write": write}
    return answer_queries(**given | changes), written


@dataclasses.dataclass(frozen=True)
class Silent:
    name: str = "silent"
    rounds: int = 1

    def select(self, state):
        return torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    "strategy,mechanism",
    [(Random(rounds=2), Gnmax(sigma=20.0)), (Random(), Loose(sigma=20.0)), (Silent(), Loose(sigma=20.0))],
    ids=["rounds", "past the mark", "nothing asked"],
)
def test_a_rehearsal_in_place_of_a_budget_releases_nothing(tmp_path, strategy, mechanism):
    with pytest.raises((AttributeError, ValueError)):
        label(DryRunNoise("torch"), tmp_path / "out", strategy=strategy, mechanism=mechanism)
    assert not (tmp_path / "out").exists()


def test_a_mechanism_past_the_mark_releases_nothing_and_stays_charged(tmp_path, ledger):
    with pytest.raises(ValueError, match="not drawn with this release"):
        label(budget(ledger), tmp_path / "out", mechanism=Loose(sigma=20.0))
    assert not (tmp_path / "out").exists()
    charge = GaussianEvent(mu=math.sqrt(2) / 20, count=4)
    assert ledger.get_account("svhn").num_open == 1 and ledger.get_account("svhn").reserved_events == (charge,)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"adjacency": "replace_one"}, r"adjacency='replace_one'.*account \(add_remove\)"),
        ({"l2": 2.0}, "sensitivity"),
        ({"mechanism": Gnmax(sigma=3.0, noise="discrete")}, "noise"),
        ({"sensitive": votes(7)}, "votes=7: must cover all 6 public points"),
    ],
    ids=["adjacency", "sensitivity", "noise", "points"],
)
def test_what_would_not_be_opened_is_refused_before_it_is_charged(tmp_path, ledger, changes, words):
    head = ledger.get_head()
    if changes.keys() & {"adjacency", "l2"}:
        said = dataclasses.replace(votes().sensitivity, **changes)
        changes = {"sensitive": dataclasses.replace(votes(6), sensitivity=said)}
    with pytest.raises(ValueError, match=words):
        label(budget(ledger), tmp_path / "out", **changes)
    assert ledger.get_head() == head


# ---- suspended and resumed ------------------------------------------------------------------------------------------


@pytest.fixture
def open_one(ledger) -> Spending:
    """Nine queries reserved, two asked, suspended."""
    with budget(ledger).spend([GaussianEvent(mu=0.1, count=9)], mechanism="m") as spending:
        spending.record_cost([GaussianEvent(mu=0.1, count=2)])
        spending.suspend(STATE)
    return spending


def test_what_is_suspended_goes_on_where_it_stood(path, ledger, open_one):
    assert spent(ledger) == cost(9) and ledger.get_account("svhn").num_open == 1
    with Ledger(path) as elsewhere, budget(elsewhere).resume(open_one.id, STATE) as spending:
        assert spending.incurred_events == (GaussianEvent(mu=0.1, count=2),) and spending.id == open_one.id
        spending.noise.draw_gaussian((1,), 1.0, CPU)
        spending.record_cost([EACH])
        spending.suspend("later")
    with budget(ledger).resume(open_one.id, "later"):
        pass
    assert spent(ledger) == cost(3) and ledger.get_account("svhn").num_releases == 1
    kinds = [entry.kind for entry in ledger.read_entries("svhn")]
    assert kinds == ["open", "reserve", "record", "resume", "record", "resume", "commit"]
    assert ledger.verify()[0].num_releases == 1


def refuses_to_go_on(ledger, identity, state=STATE, words="charged at its worst", **changes) -> None:
    with pytest.raises(ValueError, match=words), budget(ledger, **changes).resume(identity, state):
        pytest.fail("went on")


def crash(ledger, open_one):
    """Resumed, and never recorded again."""
    with contextlib.suppress(KeyboardInterrupt), budget(ledger).resume(open_one.id, STATE):
        raise KeyboardInterrupt


def step(ledger, open_one):
    """A query more, and another state."""
    with budget(ledger).resume(open_one.id, STATE) as spending:
        spending.record_cost([EACH])
        spending.suspend("later")


@pytest.mark.parametrize(
    "before,state",
    [(None, "unknown"), (None, ""), (step, STATE), (crash, STATE), (crash, "unknown")],
    ids=["unknown", "none", "older", "crash", "crash and unknown"],
)
def test_a_state_that_the_ledger_does_not_know_stays_spent(ledger, open_one, before, state):
    if before is not None:
        before(ledger, open_one)
    head = ledger.get_head()
    refuses_to_go_on(ledger, open_one.id, state)
    assert ledger.get_head() == head and spent(ledger) == cost(9)
    ledger.verify()


def test_nothing_is_resumed_while_it_is_resumed(path, ledger, open_one):
    with budget(ledger).resume(open_one.id, STATE) as spending, Ledger(path) as elsewhere:
        refuses_to_go_on(elsewhere, open_one.id)
        spending.suspend(STATE)
    with budget(ledger).resume(open_one.id, STATE):  # as it stood: nothing came of the other
        pass
    assert spent(ledger) == cost(2)


def test_what_was_committed_or_never_suspended_is_not_resumed(ledger, open_one):
    with budget(ledger).resume(open_one.id, STATE):
        pass
    refuses_to_go_on(ledger, open_one.id, words="already committed")
    with contextlib.suppress(ZeroDivisionError), budget(ledger).spend([EACH], mechanism="m") as spending:
        raise ZeroDivisionError
    refuses_to_go_on(ledger, spending.id, "")
    refuses_to_go_on(ledger, "0" * 16, words="is not in account")
    with pytest.raises(ValueError, match="state"), budget(ledger).spend([EACH], mechanism="m") as spending:
        spending.suspend("")


@pytest.mark.parametrize("change", [{"account": "other"}, {"insecure_seed": 1}, {"unit": "group:user"}], ids=str)
def test_nothing_goes_on_at_anothers_expense_or_on_other_terms(ledger, open_one, change):
    """The refusal does not use up the suspension."""
    ledger.open_account("other", budget_epsilon=4.0, **TERMS, planned_events=[EACH], noise="torch")
    refuses_to_go_on(ledger, open_one.id, words="unit=" if "unit" in change else open_one.id, **change)
    assert spent(ledger) == cost(9) and spent(ledger, "other") == 0
    with budget(ledger).resume(open_one.id, STATE):
        pass
    assert spent(ledger) == cost(2)


def forge(path: Path, *entries) -> None:
    """Append entries with hashes that are right."""
    chain = HashChain(path)
    with chain.transaction():
        chain.read_new_entries()
        for kind, facts in entries:
            chain.append(kind, "svhn", facts)
            chain.read_new_entries()
    chain.close()


@pytest.mark.parametrize(
    "facts,words",
    [
        ({"number": 2}, "a resumption is missing"),
        ({"number": 0}, "a resumption is missing"),
        ({"state": "other"}, "was not suspended in the state"),
        ({"reservation": "0" * 16}, "does not add up"),
    ],
    ids=str,
)
def test_a_resumption_that_does_not_follow_is_damage(path, ledger, open_one, facts, words):
    forge(path, ("resume", {"reservation": open_one.id, "state": STATE, "number": 1} | facts))
    for look in (lambda: Ledger(path), ledger.verify):
        with pytest.raises(LedgerError, match=words):
            look()


def go_on(path: str, identity: str, barrier, done) -> None:
    with Ledger(path) as one:
        barrier.wait(60)
        try:
            with budget(one).resume(identity, STATE) as spending:
                spending.record_cost([EACH])
                with done.get_lock():
                    done.value += 1
        except LedgerError as error:
            assert "charged at its worst" in str(error) or "already committed" in str(error)


@pytest.mark.slow(reason="starts another process")
def test_of_two_processes_one_goes_on(path, ledger, open_one):
    context = multiprocessing.get_context("spawn")
    barrier, done = context.Barrier(2), context.Value("i", 0)
    other = context.Process(target=go_on, args=(str(path), open_one.id, barrier, done))
    other.start()
    go_on(str(path), open_one.id, barrier, done)
    other.join()
    assert other.exitcode == 0 and done.value == 1
    assert spent(ledger) == cost(3)
    ledger.verify()


# ---- what a mechanism opens -----------------------------------------------------------------------------------------


def value(name: str, mechanism):
    """What it opens, at a small size."""
    if name == "histogram":
        table = torch.arange(6).view(2, 3)
        return CellHistogram(table, COUNT_SENSITIVITY["add_remove"], torch.zeros(5, dtype=torch.int64))
    if name == "gradient_descent":
        return gradient_sums()
    return random_votes(4, num_teachers(mechanism, 4, 1), num_classes(name))


class Untouched(NoiseSource):
    def stamp(self, answers):
        return answers

    def _check_draw_allowed(self):
        pytest.fail("noise was drawn")


def larger(value, norm: str, by: float):
    said = value.sensitivity
    return dataclasses.replace(value, sensitivity=dataclasses.replace(said, **{norm: getattr(said, norm) * by}))


every_form = pytest.mark.parametrize("name,noise", ALL_FORMS, ids=["-".join(form) for form in ALL_FORMS])


@pytest.fixture(scope="module")
def other_values() -> list:
    scores = SoftVotes.from_scores(torch.zeros(3, 2, 1), 4)
    return [random_votes(4, 20, 3), value("histogram", None), gradient_sums(), scores]


@every_form
def test_what_a_mechanism_is_not_priced_for_is_not_opened(name, noise, other_values):
    """A value that moves further, or of another adjacency or type, and noise of another kind."""
    mechanism, source = made(name, noise), Untouched(noise)
    opened = value(name, mechanism)
    asked = MechanismContext(num_queries=4)
    for norm, by in itertools.product(("l1", "l2", "linf"), (1.0001, math.inf)):
        if getattr(mechanism.max_sensitivity, norm) == math.inf:
            continue  # no part of its cost
        with pytest.raises(ValueError, match=r"sensitivity=.*more than .* is priced for"):
            mechanism.release(larger(opened, norm, by), source, asked)
    assert mechanism.release(opened, DryRunNoise(noise), asked).label_Q.dtype == torch.int64
    assert type(mechanism).release is Gnmax.release  # none answers past the mark
    with pytest.raises(ValueError, match=r"noise\.kind"):
        mechanism.release(opened, Untouched({"torch": "discrete", "discrete": "torch"}[noise]), asked)
    if mechanism.max_sensitivity.adjacency is not None:
        there = dataclasses.replace(mechanism.max_sensitivity, adjacency="replace_one")
        with pytest.raises(ValueError, match="adjacency"):
            mechanism.release(dataclasses.replace(opened, sensitivity=there), source, asked)
    for wrong in other_values:
        if not isinstance(wrong, mechanism.input_type):
            with pytest.raises(ValueError, match="cannot go with"):
                mechanism.release(wrong, source, asked)


# ---- honest mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
def test_noise_whose_cost_is_not_recorded_is_charged_in_full(ledger, resumed):
    one = budget(ledger)
    with one.spend([dataclasses.replace(EACH, count=4)], mechanism="m") as spending:
        spending.noise.draw_gaussian((1,), 1.0, CPU)
        spending.record_cost([EACH])
        if resumed:
            spending.suspend(STATE)
        else:
            spending.noise.draw_gaussian((1,), 1.0, CPU)
    if resumed:
        with one.resume(spending.id, STATE) as again:
            again.noise.draw_gaussian((1,), 1.0, CPU)
    assert spent(ledger) == cost(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfItsOwn(Gnmax):
    """Draws from a generator of its own, and looks as private as any."""

    def draw(self, votes, noise, context):
        noisy_QC = votes.counts_QC + self.sigma * torch.randn(votes.counts_QC.shape)
        return Answers(noisy_QC.argmax(1), self.privacy_events(len(votes)))


def test_answers_without_a_draw_are_not_admitted(ledger):
    mechanism, votes = OfItsOwn(sigma=3.0), Votes(torch.tensor([[3, 1]]), 4)
    with pytest.raises(ValueError, match="no noise was drawn"), budget(ledger).spend([EACH], mechanism="m") as spending:
        spending.accept(mechanism.release(votes, spending.noise, MechanismContext(num_queries=1)))


def test_the_cap_is_no_bound_once_seeded_noise_may_have_told_what_to_ask(ledger):
    """The cap is kept for what is chosen after private answers: after others, only plans add up."""
    large = [dataclasses.replace(EACH, count=60)]
    with budget(ledger).spend(large, mechanism="m") as first:
        first.noise.draw_gaussian((1,), 1.0, CPU)
        first.record_cost([EACH])
    with budget(ledger, insecure_seed=1).spend([EACH], mechanism="m"):
        pass
    with budget(ledger).spend([dataclasses.replace(EACH, count=60)], mechanism="m") as last:
        pass
    claim = ledger.make_claim("svhn", [first.id, last.id])
    assert claim.guarantee.route == "gdp" and claim.guarantee.epsilon == cost(120) and cost(120).expected > 4.0
    assert ledger.get_account("svhn").guarantee is None


@pytest.mark.parametrize("kind", ["torch", "discrete"])
def test_a_fork_draws_no_noise_that_its_parent_paid_for(path, kind):
    """Neither from the source itself nor by asking for it, and the parent's charge and noise are as they were."""

    def draw(spending: Spending, source: NoiseSource | None = None) -> str:
        try:
            noise = spending.noise if source is None else source
            return str(noise.draw_gaussian((1,), 1.0, CPU))
        except LedgerError as error:
            return str(error)

    with Ledger(path) as ledger:
        ledger.open_account("svhn", budget_epsilon=4.0, **TERMS, planned_events=[EACH], noise=kind)
        with budget(ledger, kind=kind).spend([EACH], mechanism="m") as spending:
            told, source = multiprocessing.get_context("fork").SimpleQueue(), spending.noise
            work = lambda: told.put([draw(spending), draw(spending, source)])  # noqa: E731
            child = multiprocessing.get_context("fork").Process(target=work)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
                child.start()
            assert told.get() == ["ledger: was opened by another process. Open it anew in this one."] * 2
            child.join()
            assert source.draw_gaussian((1,), 1.0, CPU).shape == (1,)
            spending.record_cost([EACH])
        assert spent(ledger) == cost(1)
        ledger.verify()
