"""Past claims held to what was reserved: folders as earlier versions wrote them, and what the review says of each."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pate_torch import pipeline
from pate_torch.accounting import gdp
from pate_torch.accounting.epsilon import epsilon
from pate_torch.accounting.events import BoundedRange, Gaussian, RdpCurve
from pate_torch.budget import Budget
from pate_torch.ledger.accounts import priced
from pate_torch.ledger.chain import Chain
from pate_torch.ledger.command import main
from pate_torch.ledger.ledger import CHOICE, LABELS, PRICE, Ledger
from pate_torch.ledger.review import review
from pate_torch.mechanisms.gaussian import Gaussian as Gnmax
from pate_torch.published_price import Sanitiser
from tests.command_runs import TINY, train
from tests.killed_runs import plan
from tests.tiny_runs import selection

DELTA = 1e-4
QUESTIONS = Gaussian(mu=0.2, count=6)
ONE = BoundedRange(eta=0.5)
CURVE = RdpCurve(orders=(8.0,), rdp=(0.3,), source="smooth sensitivity")
NAMES = {LABELS: "gaussian", CHOICE: "selection:exponential", PRICE: "sanitised price", "model by DP-SGD": "dpsgd"}
SOUND = {
    "partition": {"name": "add_remove", "capacity": None},
    "voting": {"name": "inductive"},
    "dataset": {"name": "blobs", "roles": "hash", "fractions": [0.8, 0.1, 0.1], "group": None, "benchmark": False},
}


def alone(*events) -> float:
    return epsilon(events, DELTA).epsilon


@dataclass
class Home:
    """A root with a ledger and the folders of its runs. old: entries as they were before they said what they are of."""

    root: Path
    old: bool
    terms: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path = self.root / "ledger.sqlite"
        self.terms = {"delta": DELTA, "adjacency": "add_remove", "unit": "record"} | self.terms
        with self.ledger as ledger:
            ledger.open_account("blobs", budget_epsilon=30.0, **self.terms, planned_events=[QUESTIONS, CURVE])

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path)

    def pay(self, run: str, event, what: str = LABELS, *, used=None, seeded: bool = False) -> str:
        """A release that is charged and committed; its reservation."""
        used = event if used is None else used
        with self.ledger as ledger:
            if not self.old:
                made = Budget(ledger=ledger, account="blobs", **self.terms, fingerprint="f", run=run,
                              insecure_seed=1 if seeded else None)  # fmt: skip
                with made.spend([event], mechanism=NAMES[what], what=what) as spending:
                    spending.incur([used])
                return spending.id
            identity = f"{len(ledger.entries()):016x}"
            facts = priced([event], ledger.check("blobs", [event]))
            facts |= {"reservation": identity, "mechanism": NAMES[what], "run": run, "insecure": seeded}
            chain = Chain(self.path)
            with chain.writing():
                chain.news()
                chain.append("reserve", "blobs", facts | {"fingerprint": "f", "note": ""})
            chain.close()
            ledger.commit(identity, [used])
            return identity

    def write(self, run: str, release: str | None, said: float, total: float, **changes: Any) -> Path:
        """The folder of a run, with the figures of the time."""
        options, files = changes.pop("options", None), changes.pop("files", ())
        mechanism = changes.get("mechanism", "gaussian")
        folder = self.root / "runs" / "blobs" / mechanism / run
        (folder / "release").mkdir(parents=True)
        with self.ledger as ledger:
            head = ledger.head()
        facts = {
            "schema_version": 1,
            "dataset": "blobs",
            "mechanism": mechanism,
            "epsilon": said,
            "epsilon_charged": total,
            "private": True,
            "release_id": release,
            "ledger_head": head,
        }
        (folder / "release" / "summary.json").write_text(json.dumps(facts | changes))
        for name in files:
            (folder / "release" / name).write_text("{}")
        if options is not None:
            (folder / ".hydra").mkdir()
            whole = {key: SOUND[key] | options.get(key, {}) for key in SOUND}
            (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(whole))
        return folder / "release"

    def found(self) -> dict[tuple[str, str], tuple[float, float]]:
        """(run, claim) -> (said, holds)."""
        with Ledger(self.path, create=False, readonly=True) as ledger:
            _, findings = review(ledger)
        assert all(one.why for one in findings)
        return {(one.folder.split("/")[3], one.claim): (one.said, one.holds) for one in findings}


THIS, ALL = "this release", "all releases together"


@pytest.fixture(params=[False, True], ids=["named", "old"])
def home(request, tmp_path) -> Home:
    return Home(tmp_path, request.param)


def close(said: float, holds: float):
    return pytest.approx((said, holds), rel=1e-9)


# ---- what was said too low ------------------------------------------------------------------------------------------


def test_a_sanitised_price_left_out_of_its_release(home):
    labels = home.pay("a", QUESTIONS)
    home.pay("a", CURVE, PRICE)
    said, holds = alone(QUESTIONS), alone(QUESTIONS, CURVE)
    home.write("a", labels, said, holds, files=["sanitised.json"])
    assert home.found() == {("a", THIS): close(said, holds)} and holds > 1.2 * said


def test_a_total_of_what_came_out(home):
    """Confident: half of the questions were answered, which depends on the votes."""
    used = Gaussian(mu=0.2, count=3)
    labels = home.pay("a", QUESTIONS, used=used)
    home.write("a", labels, alone(QUESTIONS), alone(used))
    assert home.found() == {("a", ALL): close(alone(used), alone(QUESTIONS))}


def test_totals_over_a_seeded_release(home):
    home.pay("seeded", QUESTIONS, seeded=True)
    labels = home.pay("a", QUESTIONS)
    home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS, QUESTIONS))
    assert home.found() == {("a", ALL): (close(alone(QUESTIONS, QUESTIONS), math.inf))}


def test_a_seeded_choice(home):
    first = home.pay("a", QUESTIONS)
    home.write("a", first, alone(QUESTIONS), alone(QUESTIONS))
    home.pay("b", ONE, CHOICE, seeded=True)
    both = alone(QUESTIONS, ONE)
    home.write("b", first, both, both)
    assert home.found() == {("b", claim): close(both, math.inf) for claim in (THIS, ALL)}


@pytest.mark.parametrize(
    "voting,factor,said,holds", [("slopes", 2.0, 1.697, 3.80), ("census", math.sqrt(2), 1.697, 2.54)]
)
def test_a_capacity_where_every_record_answers_for_itself(home, voting, factor, said, holds):
    mu = gdp.mu(said, DELTA)
    labels = home.pay("a", Gaussian(mu=mu))
    options = {"partition": {"capacity": 1000}, "voting": {"name": voting}}
    home.write("a", labels, said, said, options=options)
    right = gdp.epsilon(factor * mu, DELTA)
    assert right == pytest.approx(holds, abs=0.01)
    assert home.found() == {("a", THIS): close(said, right), ("a", ALL): close(said, right)}


def test_a_capacity_past_the_cap_is_not_held_by_it(home):
    event = Gaussian(mu=gdp.mu(12.0, DELTA))
    labels = home.pay("a", event)
    home.write("a", labels, 12.0, 12.0, options={"partition": {"capacity": 9}, "voting": {"name": "slopes"}})
    assert home.found()["a", THIS][1] > 30


def test_whoever_learns_from_unsound_labels_is_listed_whatever_his_own_options(home):
    labels = home.pay("a", QUESTIONS)
    bad = {"partition": {"capacity": 1000}, "voting": {"name": "slopes"}}
    home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS), options=bad)
    home.write("again", labels, alone(QUESTIONS), alone(QUESTIONS), options={})
    later = home.pay("later", ONE)
    home.write("later", later, alone(ONE), alone(QUESTIONS, ONE), options={})
    twice = alone(Gaussian(mu=0.4, count=6))
    expected = {(run, claim): close(alone(QUESTIONS), twice) for run in ("a", "again") for claim in (THIS, ALL)}
    expected["later", ALL] = close(alone(QUESTIONS, ONE), alone(Gaussian(mu=0.4, count=6), ONE))
    assert home.found() == expected


def test_options_of_a_run_that_asked_nobody_doubt_nothing(home):
    labels = home.pay("a", QUESTIONS)
    home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS), options={})
    bad = {"partition": {"capacity": 1000}, "voting": {"name": "slopes"}}
    home.write("again", labels, alone(QUESTIONS), alone(QUESTIONS), options=bad)
    assert home.found() == {}


GROUPS = {"unit": "group:patient"}


@pytest.mark.parametrize(
    "terms,options",
    [
        (GROUPS, {}),
        ({}, {"partition": {"name": "replace_one"}, "dataset": {"roles": "position"}}),
        ({"adjacency": "replace_one"}, {}),
    ],
    ids=["unit", "adjacency", "and back"],
)
def test_a_choice_on_other_terms_than_the_accounts(tmp_path, terms, options):
    home = Home(tmp_path, True, terms)
    labels, both = home.pay("a", QUESTIONS), alone(QUESTIONS, ONE)
    home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS))
    home.pay("b", ONE, CHOICE)
    home.write("b", labels, both, both, options=options)
    assert home.found() == {("b", claim): close(both, math.inf) for claim in (THIS, ALL)}


def test_a_capacity_of_groups_is_bounded_by_nothing(tmp_path):
    home = Home(tmp_path, True, GROUPS)
    options = {"partition": {"capacity": 9}, "voting": {"name": "census"}, "dataset": {"group": "patient"}}
    home.write("a", home.pay("a", QUESTIONS), 1.0, 9.0, options=options)
    assert {holds for _, holds in home.found().values()} == {math.inf}


@pytest.mark.parametrize(
    "adjacency,dataset,holds",
    [
        ("replace_one", {}, False),
        ("replace_one", {"roles": "position"}, True),
        ("replace_one", {"public_path": "public.csv"}, True),
        ("add_remove", {}, True),
        ("add_remove", {"roles": "position"}, False),
        ("add_remove", {"roles": "position", "benchmark": True}, True),
    ],
    ids=str,
)
def test_one_file_whose_parts_a_record_moves(tmp_path, adjacency, dataset, holds):
    home = Home(tmp_path, True, {"adjacency": adjacency})
    options = {"partition": {"name": adjacency}, "dataset": dataset}
    labels = home.pay("a", QUESTIONS)
    home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS), options=options)
    one = close(alone(QUESTIONS), math.inf)
    assert home.found() == ({} if holds else {("a", claim): one for claim in (THIS, ALL)})


def test_one_file_of_an_earlier_version_said_nothing_of_roles(tmp_path):
    home = Home(tmp_path, True, {"adjacency": "replace_one"})
    labels = home.pay("a", QUESTIONS)
    release = home.write("a", labels, 1.0, 9.0, options={"partition": {"name": "replace_one"}})
    file = release.parent / ".hydra" / "config.yaml"
    options = yaml.safe_load(file.read_text())
    del options["dataset"]["roles"], options["dataset"]["group"]
    file.write_text(yaml.safe_dump(options))
    assert home.found()["a", THIS] == (1.0, math.inf)


# ---- what is sound, and what cannot be known ------------------------------------------------------------------------


def test_sound_claims_are_not_listed(home):
    a = home.pay("a", QUESTIONS)
    home.write("a", a, alone(QUESTIONS), alone(QUESTIONS), options={})
    b = home.pay("b", QUESTIONS)
    home.pay("b", CURVE, PRICE)
    home.pay("b", ONE, CHOICE)
    both = alone(QUESTIONS, CURVE, ONE)
    everything = alone(QUESTIONS, QUESTIONS, CURVE, ONE)
    home.write("b", b, both, everything, options={}, files=["sanitised.json"])
    home.write("free", b, alone(QUESTIONS), everything, options={})  # its student was not chosen, nor its price shown
    home.pay("later", QUESTIONS)  # after them: no part of their totals
    assert home.found() == {}


def test_folders_of_one_name_are_not_mixed_up(home):
    """Two mechanisms of one batch job: each folder holds its own choice and its own price."""
    a = home.pay("job", QUESTIONS)
    home.pay("job", CURVE, PRICE)
    home.pay("job", ONE, CHOICE)
    first = alone(QUESTIONS, CURVE, ONE)
    home.write("job", a, first, first, files=["sanitised.json"])
    b = home.pay("job", QUESTIONS)
    total = alone(QUESTIONS, QUESTIONS, CURVE, ONE)
    home.write("job", b, alone(QUESTIONS), total, mechanism="laplace")
    c = home.pay("job", QUESTIONS)
    home.pay("job", ONE, CHOICE)
    third = alone(QUESTIONS, ONE)
    home.write("job", c, third, alone(*[QUESTIONS] * 3, CURVE, ONE, ONE), mechanism="confident")
    assert home.found() == {}


def test_dp_sgd(home):
    event = Gaussian(mu=0.5)
    home.pay("a", event, "model by DP-SGD")
    home.write("a", None, alone(event), alone(event), mechanism="dpsgd")
    home.pay("b", event, "model by DP-SGD")
    home.write("b", None, alone(event) / 2, alone(event, event), mechanism="dpsgd")
    assert home.found() == {("b", THIS): close(alone(event) / 2, alone(event))}


def test_a_baseline_with_a_ledger_apart(tmp_path):
    """Its folder lies with the others, its ledger in a folder of its own."""
    home, apart = Home(tmp_path, True), Home(tmp_path / "dpsgd", True)
    home.write("a", home.pay("a", QUESTIONS), alone(QUESTIONS), alone(QUESTIONS))
    event = Gaussian(mu=0.5)
    apart.pay("b", event, "model by DP-SGD")
    with apart.ledger as ledger:
        head = ledger.head()
    home.write("b", None, alone(event), alone(event), mechanism="dpsgd", ledger_head=head)
    home.write("c", None, alone(event), alone(event), mechanism="dpsgd", ledger_head="0" * 64)
    assert home.found() == {("c", THIS): (alone(event), math.inf)}


@pytest.mark.parametrize("head", [None, "missing"])
def test_a_folder_that_does_not_say_when(home, head):
    """Held against what its reservations say; of its total nothing can be told."""
    labels = home.pay("a", QUESTIONS)
    release = home.write("a", labels, alone(QUESTIONS), 0.1, ledger_head=None)
    low = home.write("b", labels, alone(QUESTIONS) / 2, 0.1, ledger_head=None)
    if head == "missing":
        for file in (release / "summary.json", low / "summary.json"):
            facts = json.loads(file.read_text())
            del facts["ledger_head"]
            file.write_text(json.dumps(facts))
    home.pay("later", QUESTIONS)
    assert home.found() == {("b", THIS): close(alone(QUESTIONS) / 2, alone(QUESTIONS))}


@pytest.mark.parametrize(
    "changes", [{"ledger_head": "0" * 64}, {"release_id": "f" * 16}, {"dataset": "other"}], ids=str
)
def test_what_the_ledger_does_not_know_may_claim_nothing(home, changes):
    labels = home.pay("a", QUESTIONS)
    home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS), **changes)
    assert home.found() == {("a", THIS): close(alone(QUESTIONS), math.inf)}


def test_folders_that_claim_nothing_are_passed_over(home):
    labels = home.pay("a", QUESTIONS)
    home.write("a", labels, 0.1, 0.1, private=False)
    (home.write("b", labels, 0.1, 0.1) / "summary.json").write_text("{half")
    (home.write("c", labels, 0.1, 0.1) / "summary.json").write_text("[]")
    with home.ledger as ledger:
        assert review(ledger) == (0, [])


def test_options_that_cannot_be_read_doubt_nothing(home):
    labels = home.pay("a", QUESTIONS)
    release = home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS), options={})
    for text in ("{", "- a", "voting: null\n", "partition: null\nvoting: null\ndataset: null\n"):
        (release.parent / ".hydra" / "config.yaml").write_text(text)
        assert home.found() == {}


def test_what_is_written_today_is_sound(tmp_path, monkeypatch):
    """Runs of the command and from Python: labels, a price, a choice, labels used again, seeded noise."""
    assert train(tmp_path, "dataset.name=blobs", monkeypatch=monkeypatch, base=TINY).code == 0
    pipeline.run(
        one := plan(
            tmp_path / "b",
            "one",
            mechanism=Gnmax(sigma=8.0),
            sanitiser=Sanitiser(at_a_loss=True),
            selection=selection(),
        )
    )
    labels = json.loads((one.folder / "release" / "summary.json").read_text())["release_id"]
    pipeline.run(plan(tmp_path / "b", "two", labels=labels, selection=selection()))
    pipeline.run(plan(tmp_path / "b", "three", labels=labels, insecure_noise_seed=1, selection=selection()))
    pipeline.run(plan(tmp_path / "b", "four", labels=labels))
    for root, looked in ((tmp_path, 1), (tmp_path / "b", 3)):
        with Ledger(root / "ledger.sqlite", create=False, readonly=True) as ledger:
            assert review(ledger) == (looked, [])


# ---- the command ----------------------------------------------------------------------------------------------------


def command(home, capsys, *options) -> tuple[int, str]:
    code = main(["review", "--path", str(home.path), *options])
    shown = capsys.readouterr()
    assert shown.err == ""
    return code, shown.out


def test_the_command_on_sound_claims(home, capsys):
    labels = home.pay("a", QUESTIONS)
    home.write("a", labels, alone(QUESTIONS), alone(QUESTIONS))
    assert command(home, capsys) == (0, "1 releases looked at, 0 claims too low\n")
    code, out = command(home, capsys, "--json")
    assert code == 0 and json.loads(out) == {"ok": True, "releases": 1, "too_low": []}


def test_the_command_on_claims_that_were_too_low(home, capsys):
    used = Gaussian(mu=0.2, count=3)
    home.write("a", home.pay("a", QUESTIONS, used=used), alone(QUESTIONS), alone(used))
    home.write("b", "f" * 16, 1.5, 1.5)
    code, out = command(home, capsys)
    assert code == 1 and "2 releases looked at, 2 claims too low" in out
    for words in ("a/release", "all releases together: said", "of what was reserved", "b/release", "told these"):
        assert words in out
    assert "said 1.500; holds: nothing may be claimed" in out
    assert max(map(len, out.splitlines())) <= 100
    code, out = command(home, capsys, "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert code == 1 and found["ok"] is False and found["releases"] == 2
    first, second = found["too_low"]
    assert first["holds"] == pytest.approx(alone(QUESTIONS)) and second["holds"] is None
    assert set(first) == {"folder", "claim", "said", "holds", "why"}


def test_the_command_changes_nothing(home, capsys):
    home.write("a", home.pay("a", QUESTIONS), 0.1, 0.1)
    before = {file: file.read_bytes() for file in home.root.rglob("*") if file.is_file() and "sqlite-" not in file.name}
    assert command(home, capsys)[0] == 1
    assert before == {file: file.read_bytes() for file in before}
