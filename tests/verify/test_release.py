"""``pate verify``: releases of every mechanism pass; a lie in any field is found, and lies that mend their traces."""

import csv
import hashlib
import json
import math
import os
import re
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from scipy import stats

from pate_torch import pipeline
from pate_torch.cli.main import main as pate
from pate_torch.core.formatting import format_epsilon
from pate_torch.release import report
from pate_torch.release.renderer import escape_markdown, write_release
from pate_verify import release as verified_files
from pate_verify.command import verify_release
from pate_verify.costs import compute_bounds
from pate_verify.ledger import read_entries
from pate_verify.release import ANSWER_FILES, ReleaseFolder, run_check, run_checks
from tests.command_runs import train
from tests.release.reporting_demo import FORMS, demo
from tests.run_configs import changed
from tests.tiny_runs import again, selection, tiny
from tests.verify.rewriting import rewrite

RECORDS = [
    *("query=random", "student=supervised", "student.network=logistic", "student.augment=null", "student.steps=3"),
    *("dataset.private=120", "dataset.public=40", "dataset.test=20", "num_queries=4", "guide_student.network=logistic"),
    *("guide_student.augment=null", "guide_student.steps=3", "privacy.opening_budget=500", "baseline=false"),
    *("quiet=true", "membership=none", "mechanism.sigma=1"),
]
NOISY = "mechanism.sigma=8"
SCREENED = f"{NOISY} mechanism.screen_sigma=8 mechanism.threshold=100"
SLOW = pytest.mark.slow(reason="one run of the command for each mechanism")
VOTES = [
    f"gaussian {NOISY}",
    f"confident {SCREENED}",
    f"interactive {SCREENED}",
    "sparse_vector mechanism.epsilon=2 mechanism.max_failures=2",
    *(
        pytest.param(words, marks=SLOW)
        for words in (
            f"gaussian mechanism.counts=true {NOISY}",
            f"gaussian noise=discrete {NOISY}",
            f"confident mechanism.max_answers=3 {SCREENED}",
            f"laplace {NOISY}",
            f"laplace noise=discrete {NOISY}",
            f"exponential {NOISY}",
            "single_stable mechanism.epsilon=.2 mechanism.delta=1e-7",
            "soft_sparse_vector mechanism.epsilon=2 mechanism.max_failures=2 mechanism.bins=4",
        )
    ),
]


def release_of(home: Path) -> Path:
    (summary,) = home.glob("runs/*/*/*/release/summary.json")
    return summary.parent


def said(release: Path, ledger: bool = True) -> dict[str, str]:
    """What each check came to: its name -> ok, loose or FAILS (the worst of a name)."""
    found: dict[str, str] = {}
    for check in verify_release(release, release.parents[4] / "ledger.sqlite" if ledger else None):
        found[check.name] = min(str(check).split()[0], found.get(check.name, "ok"))  # FAILS < loose < not < ok
    return found


def passes_less_than_it_costs(release: Path) -> list[str]:
    """The events that may be left out, or told 1 % too low in every place, without a failure."""
    folder, passed = ReleaseFolder.load(release), []
    record = dict(folder.release or {})
    (labels,) = (part["events"] for part in folder.parts if part["what"].startswith("labels"))
    for event in labels:
        for key, value in [(key, value) for key, value in event.items() if key != "kind"]:
            event[key] = 0 if key == "count" else value * 0.99
            (check,) = (check for check in run_checks(replace(folder, release=record)) if check.name == "mechanism")
            passed += [f"{event['kind']}.{key}"] if check.is_ok else []
            event[key] = value
    return passed


@pytest.mark.parametrize("mechanism", VOTES)
def test_labels_by_every_mechanism_pass(mechanism, tmp_path, monkeypatch, capsys):
    truth_Q = np.arange(20) % 3
    wrong_KQ = np.random.default_rng(0).random((250, 20)) < 0.02
    np.save(tmp_path / "votes.npy", np.where(wrong_KQ, (truth_Q + 1) % 3, truth_Q))
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    words = f"votes={tmp_path}/votes.npy num_classes=3 dataset.name=hospitals privacy.delta=1e-5 quiet=true"
    words += f" privacy.opening_budget=100 privacy.allow_uninformative_labels=true mechanism={mechanism}"
    assert pate(["label", *words.split()]) == 0, capsys.readouterr().err
    found = said(release_of(tmp_path))
    assert set(found.values()) == {"ok"}, found
    assert {"schema", "words", "files", "record", "labels", "mechanism", "guarantee", "account"} <= set(found)
    assert {"chain", "terms", "charges", "cap"} <= set(found)
    assert not passes_less_than_it_costs(release_of(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        ("method=reverse_knn", "mechanism=histogram"),
        ("method=reverse_knn", "mechanism=histogram", "partition=replace_one"),
        ("method=gradients", "mechanism=gradient_descent", "query.rounds=2", "query=margin", "partition=replace_one"),
        ("method=gradients", "mechanism=gradient_descent", "first_answers=class_counts"),
        ("method=gradients", "mechanism=gradient_descent", "partition=replace_one", "first_answers=class_counts"),
    ],
    ids=lambda words: "-".join(words[::2]),
)
def test_records_that_answer_pass(words, tmp_path, monkeypatch):
    assert train(tmp_path, *words, monkeypatch=monkeypatch, base=RECORDS).code == 0
    assert set(said(release_of(tmp_path)).values()) == {"ok"}
    assert not passes_less_than_it_costs(release_of(tmp_path))


@pytest.mark.slow(reason="trains a model by DP-SGD")
def test_a_model_by_dp_sgd_passes(tmp_path, monkeypatch):
    words = ("experiment=dpsgd_baseline", "method.steps=5", "method.network=logistic", "method.batch_size=20")
    words += ("privacy.target_epsilon=1", "dataset.private=120", "dataset.public=40", "dataset.test=20", "quiet=true")
    assert train(tmp_path, *words, monkeypatch=monkeypatch, base=[]).code == 0
    assert set(said(release_of(tmp_path)).values()) == {"ok"}


# ---- lies


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    """Home of two releases from one account: labels, then other labels with a student chosen by private records."""
    home = tmp_path_factory.mktemp("home")
    plan = tiny(home)
    (home / "owner.yaml").write_text(f"{plan.dataset.name}:\n  contact: nobody@example.org\n  tuning: public\n")
    pipeline.run(plan)
    pipeline.run(again(plan, "second", num_queries=1, selection=selection(), student=None))
    return home


@pytest.fixture
def release(honest, tmp_path) -> Path:
    """The first of them, to be lied about."""
    return shutil.copytree(honest, tmp_path / "home") / "runs" / "blobs" / "gaussian" / "first" / "release"


@pytest.fixture
def second(release) -> Path:
    return release.parents[1] / "second" / "release"


def test_honest_releases_pass(release, second):
    assert set(said(release).values()) == set(said(second).values()) == {"ok"}


def test_a_private_test_passes_and_every_lie_about_it_is_found(tmp_path):
    plan = changed(tiny(tmp_path), private_test=0.3)
    pipeline.run(plan)
    release = plan.folder / "release"
    assert set(said(release).values()) == {"ok"}
    texts = {file.name: file.read_text() for file in release.glob("*.*") if file.suffix in (".json", ".md", ".html")}
    privacy, file = json.loads(texts["privacy.json"]), json.loads(texts["private_test.json"])
    test = privacy["utility"]["private_test"]
    assert test["num_units"] is None and 0 < test["bound"] < test["accuracy"][0]
    probability, limit = verified_files.compute_test_failure(test)
    assert probability == pytest.approx(limit, rel=1e-6)  # the bound is not lower than it must be
    right, wrong = test["counts"][0]
    lies = {
        "bound": {"bound": test["bound"] + 1e-4},
        "a better count": {"counts": [[right + 2, wrong], *test["counts"][1:]]},
        "less noise": {"sigma": 0.9 * test["sigma"]},
        "another student": {"student_sha256": "0" * 64},
        "the tested student is the released one": {"multiple": 1.0, "tested_sha256": "0" * 64},
        "a known number of units": {"num_units": 3},
        "another number": {"number": 2},
        "another reservation": {"id": "0" * 16},
        "rounded up": {"in_words": test["in_words"].replace("at least ", "at least 1")},
        "a surer test": {"in_words": test["in_words"].replace("probability 0.95", "probability 0.99999")},
        "the only one": {"in_words": test["in_words"].replace("test 1 on", "test 1 (the only one) on")},
        "a better estimate": {"accuracy": [test["accuracy"][0] + 0.01, test["accuracy"][1]]},
        "a surer estimate": {"accuracy": [test["accuracy"][0], 0.5 * test["accuracy"][1]]},
        "a better recall": {"recalls": [[1.0, 0.001], *test["recalls"][1:]]},
    }
    for lie, changes in lies.items():  # in the statement and, where it has the fact, in the file of the test
        utility = privacy["utility"] | {"private_test": test | changes}
        changed_file = file | {key: value for key, value in changes.items() if key in file}
        (release / "private_test.json").write_text(json.dumps(changed_file))
        mend(release, privacy_json=privacy | {"utility": utility})
        assert "FAILS" in said(release).values(), lie
        if lie == "bound":
            faults = [name for name, status in said(release, ledger=False).items() if status == "FAILS"]
            assert faults == ["test"]  # without the ledger
    (release / "private_test.json").write_text('{"accuracy": 1.0, "patients": ["a"]}')  # beside no result
    mend(release, privacy_json=privacy | {"utility": privacy["utility"] | {"private_test": None}})
    assert said(release, ledger=False)["record"] == "FAILS"
    (release / "private_test.json").write_text(texts["private_test.json"])
    for name in ("privacy.json", "README.md", "report.html"):  # a better estimate in every file with the sentence
        lie = re.sub(r"\(estimate [\d.]+(.)%", r"(estimate 99.9\1%", texts[name])
        assert lie != texts[name]
        (release / name).write_text(lie)
    mend(release)
    assert [name for name, status in said(release).items() if status == "FAILS"] == ["test"]


def claim_the_lower_bound(release: Path) -> None:
    """Claim what the cheapest mechanism of the same events would cost, in every place."""
    privacy, summary = (json.loads((release / name).read_text()) for name in ("privacy.json", "summary.json"))
    (part,) = privacy["composition"]["parts"]
    low = part["epsilon"] = compute_bounds(part["events"], privacy["guarantee"]["delta"]).low
    privacy["guarantee"]["epsilon"] = low
    for key in ("this_release", "this_release_ex_post", "account_total", "account_total_ex_post"):
        privacy["composition"][key] = low
    summary |= dict.fromkeys(("epsilon", "epsilon_ex_post", "epsilon_charged", "epsilon_charged_ex_post"), low)
    rewrite(release, privacy)
    mend(release, summary_json=summary)


@pytest.mark.parametrize("epsilon", [1.0, 0.3])
def test_a_hypothesis_passes_and_every_lie_about_its_certificate_is_found(epsilon, tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).random((500, 2))
    for name, part in (("private", rows[:400]), ("public", rows[400:])):
        lines = [f"{x:.4f},{z:.4f},{'yes' if x > 0.5 else 'no'}" for x, z in part]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,z,label", *lines]) + "\n")
    words = "exponential private.csv dataset.public_path=public.csv dataset.label=label dataset.name=people quiet=true"
    assert pate(["learn", *f"{words} dataset.classes=[no,yes] --epsilon {epsilon} --below-guarantee".split()]) == 0
    release = release_of(tmp_path)
    honest = said(release)
    assert honest.pop("mechanism") == "not" and set(honest.values()) == {"ok"}
    low = shutil.copytree(release, release.with_name("low"))
    claim_the_lower_bound(low)
    checks = {check.name: check for check in verify_release(low, tmp_path / "ledger.sqlite")}
    assert all(check.is_ok for check in checks.values())
    assert not any(checks[name].is_checked for name in ("guarantee", "part", "account"))
    (tmp_path / "policy.yaml").write_text("max_epsilon: 10")
    assert pate(["verify", str(low), "--policy", str(tmp_path / "policy.yaml")]) == 1
    copy = shutil.copytree(release, release.with_name("other"))
    with (copy / "student.safetensors").open("r+b") as stream:  # another rule
        stream.seek(-1, os.SEEK_END)
        stream.write(b"?")
    mend(copy)
    assert {check.name for check in verify_release(copy, tmp_path / "ledger.sqlite") if not check.is_ok} == {"charges"}
    (reserve,) = (entry for entry in read_entries(tmp_path / "ledger.sqlite") if entry["kind"] == "reserve")
    privacy, summary = (json.loads((copy / name).read_text()) for name in ("privacy.json", "summary.json"))
    privacy["verification"]["ledger_head"] = summary["ledger_head"] = reserve["hash"]  # before the commit with its hash
    mend(copy, privacy_json=privacy, summary_json=summary)
    assert {check.name for check in verify_release(copy, tmp_path / "ledger.sqlite") if not check.is_ok} == {"charges"}
    privacy = json.loads((release / "privacy.json").read_text())
    privacy["mechanism"]["noise"] = "discrete"  # no event of the exponential mechanism shows its noise
    copy = shutil.copytree(release, release.with_name("discrete"))
    mend(copy, privacy_json=privacy)
    assert {check.name for check in verify_release(copy, tmp_path / "ledger.sqlite") if not check.is_ok} == {"terms"}
    model = json.loads((release / "privacy.json").read_text())["utility"]["model"]
    percent = re.search(r"at most ([\d.]+) percentage points", model["certificate"])[1]
    texts = {name: (release / name).read_text() for name in ("privacy.json", "README.md", "report.html")}
    surer = ("probability 0.9,", "probability 0.99999,")
    lies = {
        "probability in words": {"certificate": model["certificate"].replace(*surer)},
        "excess_risk": {"excess_risk": 0.9 * model["excess_risk"]},
        "probability": {"probability": 0.99},
        "records": {"num_records": 2 * model["num_records"]},
        "in words": {"certificate": model["certificate"].replace(f"most {percent}", f"most {float(percent) / 2:g}")},
        "without numbers": {"excess_risk": None},
    }
    for lie, changes in lies.items():
        privacy = json.loads(texts["privacy.json"])
        privacy["utility"]["model"] |= changes
        if lie == "without numbers":
            del privacy["utility"]["model"]["excess_risk"]
        for name in ("README.md", "report.html"):
            told = {"in words": (f"most {percent}", f"most {float(percent) / 2:g}"), "probability in words": surer}
            (release / name).write_text(texts[name].replace(*told.get(lie, ("", ""))))
        mend(release, privacy_json=privacy)
        assert {"model", "certificate"} & {name for name, status in said(release).items() if status == "FAILS"}, lie


@pytest.mark.parametrize("n,bound", [(None, 0.6), (None, 0.2), (300, 0.7), (20_000, 0.75), (1, 0.3)])
def test_the_probability_of_counts_is_that_of_scipy(n, bound):
    """An independent sum over the whole binomial distribution, by SciPy."""
    test = {"bound": bound, "confidence": 0.95, "num_units": n, "sigma": 5.0, "counts": [[90.5, 30.0], [80.0, 40.5]]}
    probability, limit = verified_files.compute_test_failure(test)
    right, wrong, std, failure = 170.5, 70.5, math.sqrt(2 * (25 + 1 / 12)), 0.05
    if n is None:
        n, failure = math.ceil(241 + stats.norm.isf(0.005) * math.sqrt(2) * std), 0.045
    wrong = max(wrong, -2 * std**2 * 241 / n)
    k = np.arange(n + 1)
    excess = k - n * bound - (1 - bound) * right + bound * wrong + 0.5
    tail = stats.binom.pmf(k, n, bound) @ stats.norm.cdf(excess, scale=std * math.hypot(bound, 1 - bound))
    assert limit == pytest.approx(failure) and probability == pytest.approx(max(bound**n, tail), rel=1e-8, abs=1e-90)


DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "verify.md"
FILES = ("privacy.json", "summary.json", "release.json")


def leaves(tree, path=()):
    """Every place of a value that is neither a mapping nor a list."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def other(value):
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 1.0
    return value + "x" if isinstance(value, str) else ["x"]


def put(tree, path, change):
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = change(tree[path[-1]])


@pytest.mark.parametrize("file", FILES)
def test_a_lie_in_one_field_is_found_by_more_than_the_hashes_but_where_it_is_a_matter_of_trust(file, release):
    """The documented list, read: it is no longer and no shorter than what can be told without being found."""
    text = (release / file).read_text()
    places, trusted = list(leaves(json.loads(text))), set()
    assert len(places) > 20
    for place in places:
        lie = json.loads(text)
        put(lie, place, other)
        mend(release, **{file.replace(".", "_"): lie})
        if all(check.is_ok for check in verify_release(release, release.parents[4] / "ledger.sqlite")):
            trusted.add(".".join(key for key in place if isinstance(key, str)))
            mend(release, **{file.replace(".", "_"): text})
            (release / file).write_text(json.dumps(lie))
            assert not all(check.is_ok for check in verify_release(release)), place  # by its hash
    listed = re.search(rf"<!-- on trust: {file} -->\n```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert trusted ^ set(listed[1].split()) == set()


def mend(release: Path, record=None, **texts) -> None:
    """Write what was changed, and the hashes of everything as they should be."""
    for name, content in texts.items():
        file = release / name.replace("_", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    rows = (line.split("  ", 1)[1] for line in (release / "SHA256SUMS").read_text().splitlines())
    sums = [f"{hashlib.sha256((release / name).read_bytes()).hexdigest()}  {name}\n" for name in rows]
    (release / "SHA256SUMS").write_text("".join(sums))


class Liar:
    """Tells a lie in every place where the same fact stands, and leaves hashes that fit."""

    def __init__(self, release: Path) -> None:
        self.release = release
        self.privacy, self.summary, self.record = (json.loads((release / name).read_text()) for name in FILES)
        self.before, self.headline_edits = self.privacy["guarantee"]["epsilon"], []
        self.account = self.privacy["composition"]

    @property
    def labels(self) -> dict:
        (part,) = (p for p in self.account["parts"] if p["release_id"] == self.record["release_id"])
        return part

    def fact(self, value, privacy: str, summary: str = "", record: str = "") -> None:
        put(self.privacy, privacy.split("."), lambda _: value)
        if summary:
            self.summary[summary] = value
        if record:
            self.record[record] = value

    def headlines(self, before: str, after: str) -> None:
        self.headline_edits.append((before, after))

    def epsilon(self, value: float) -> None:
        self.fact(value, "guarantee.epsilon", "epsilon")
        self.fact(value, "composition.this_release")
        self.fact(value, "composition.this_release_ex_post", "epsilon_ex_post")

    def total(self, value: float | None) -> None:
        self.fact(value, "composition.account_total", "epsilon_charged")
        self.fact(value, "composition.account_total_ex_post", "epsilon_charged_ex_post")

    def route(self, name: str, words: str) -> None:
        self.fact(name, "guarantee.route", "accountant")
        self.fact(name, "composition.account_route")
        self.headlines("route: .*", f"route: {words} ({name}))")

    def noise(self, factor: float) -> None:
        self.privacy["mechanism"]["parameters"]["sigma"] *= factor
        self.record["parameters"]["sigma"] *= factor

    def events(self, change) -> None:
        """Of the labels, everywhere."""
        self.labels["events"] = self.record["planned"] = [change(dict(event)) for event in self.labels["events"]]
        self.record["incurred"] = [change(dict(event)) for event in self.record["incurred"]]
        self.recompute()

    def recompute(self) -> None:
        """Every epsilon from the events as they now stand."""
        delta, mine, others = self.privacy["guarantee"]["delta"], self.account["parts"], self.privacy["other_releases"]
        for part in (*mine, *others):
            part["epsilon"] = compute_bounds(part["events"], delta).high
        self.epsilon(compute_bounds([event for part in mine for event in part["events"]], delta).high)
        self.total(compute_bounds([event for part in (*mine, *others) for event in part["events"]], delta).high)

    def tell(self) -> None:
        """Write it all, the words for people too."""
        rewrite(self.release, self.privacy)
        card, before = self.release / "README.md", self.privacy["headline"]
        for pattern, words in self.headline_edits:
            self.privacy["headline"] = re.sub(pattern, words, self.privacy["headline"])
        card.write_text(card.read_text().replace(escape_markdown(before), escape_markdown(self.privacy["headline"])))
        mend(self.release, privacy_json=self.privacy, summary_json=self.summary, release_json=self.record)


def halve_mu(event):
    return event | {"mu": event["mu"] / 2}


def claim_the_cap_for_a_cost(liar):
    """A cap of .1, kept by a filter that never admitted these events."""
    liar.epsilon(0.1)
    liar.total(0.1)
    liar.fact(0.1, "composition.account_cap", "budget_epsilon")
    liar.route("cap", "the account's cap")
    liar.labels["route"], liar.labels["epsilon"] = "cap", 0.1


def claim_the_cap_where_one_release_needs_none(liar):
    """A true statement, but one that the folder alone cannot show."""
    liar.epsilon(liar.account["account_cap"])
    liar.total(liar.account["account_cap"])
    liar.route("cap", "the account's cap")


def claim_the_cap_for_all_releases_alone(liar):
    liar.fact(0.1, "composition.account_total", "epsilon_charged")
    liar.fact(0.1, "composition.account_cap", "budget_epsilon")
    liar.account["account_route"] = "cap"


def change_the_words_of_the_page_alone(liar):
    page = liar.release / "report.html"
    page.write_text(page.read_text().replace("almost as likely", "as likely"))


def list_the_labels_twice(liar):
    liar.privacy["other_releases"].append(dict(liar.labels))
    liar.events(halve_mu)
    liar.noise(2)


def claim_less_was_spent(liar):
    for key, name in (("this_release", "epsilon_ex_post"), ("account_total", "epsilon_charged_ex_post")):
        liar.fact(0.01, f"composition.{key}_ex_post", name)


FOUND = {
    "less spent": ("spent", claim_less_was_spent),
    "no total of what was spent": (
        "account",
        lambda liar: liar.fact(None, "composition.account_total_ex_post", "epsilon_charged_ex_post"),
    ),
    "half": ("guarantee", lambda liar: liar.epsilon(liar.before / 2)),
    "a thousandth less": ("guarantee", lambda liar: liar.epsilon(liar.before * 0.999)),
    "a smaller delta": (
        "guarantee",
        lambda liar: (liar.fact(1e-5, "guarantee.delta", "delta", "delta"), liar.headlines("1e-4", "1e-5")),
    ),
    "more noise": ("mechanism", lambda liar: liar.noise(2)),
    "cheaper events": ("mechanism", lambda liar: liar.events(halve_mu)),
    "fewer events": ("mechanism", lambda liar: liar.events(lambda e: e | {"count": e["count"] // 2})),
    "another kind": (
        "mechanism",
        lambda liar: liar.events(lambda e: {"kind": "zcdp", "rho": e["mu"] ** 2 / 4, "count": e["count"]}),
    ),
    "less in all": (
        "account",
        lambda liar: liar.fact(liar.account["account_total"] / 2, "composition.account_total", "epsilon_charged"),
    ),
    "no total": ("account", lambda liar: liar.fact(None, "composition.account_total", "epsilon_charged")),
    "another route": ("guarantee", lambda liar: liar.fact("zcdp", "guarantee.route", "accountant")),
    "fewer queries": ("labels", lambda liar: liar.fact(5, "mechanism.queries_asked", *["queries_asked"] * 2)),
    "another sensitivity": (
        "mechanism",
        lambda liar: liar.fact({**liar.record["sensitivity"], "l2": 1.0}, "mechanism.sensitivity", "", "sensitivity"),
    ),
    "the cap for a cost": ("guarantee part", claim_the_cap_for_a_cost),
    "the cap where one release needs none": ("guarantee", claim_the_cap_where_one_release_needs_none),
    "the cap for all releases alone": ("account", claim_the_cap_for_all_releases_alone),
    "other public points": ("record", lambda liar: liar.record.update(pool_sha256="0" * 64)),
    "words of the page alone": ("words", change_the_words_of_the_page_alone),
    "words alone": ("words", lambda liar: liar.headlines(r"epsilon = [\d.]+", "epsilon = 0.100")),
    "another version": ("schema", lambda liar: liar.privacy.update(schema_version=2)),  # nothing else is judged
    "a reservation twice, once at half the cost": ("record", list_the_labels_twice),
    "a part without an epsilon": ("record", lambda liar: liar.labels.update(epsilon=None)),
    "a cost without secret noise": ("guarantee", lambda liar: liar.fact(False, *["private"] * 3)),
}
"""Lies that mend their traces, and what finds them in the folder alone."""


@pytest.mark.parametrize("lie", FOUND)
def test_a_lie_that_mends_its_traces_is_found(lie, release):
    finders, tell = FOUND[lie]
    liar = Liar(release)
    tell(liar)
    liar.tell()
    found = said(release, ledger=False)
    assert {found[name] for name in finders.split()} == {"FAILS"}, found
    assert found.get("files", "ok") == "ok", "the traces were mended"


def claim_another_unit(liar):
    liar.fact("group:patient", "guarantee.unit", "unit", "unit")
    liar.fact(None, "guarantee.records_per_unit")
    liar.headlines("unit: record", "unit: group:patient")


def claim_another_adjacency(liar):
    liar.fact("replace_one", "guarantee.adjacency", "adjacency", "adjacency")
    liar.headlines("add_remove", "replace_one")


def hide_the_choice_of_the_student(liar):
    liar.account["parts"] = [part for part in liar.account["parts"] if part is liar.labels]
    liar.privacy["tuning"]["student"] = "none"
    liar.recompute()
    liar.route("gdp", "exact Gaussian accounting")


def list_the_choice_of_the_student_elsewhere(liar):
    (choice,) = (part for part in liar.account["parts"] if part is not liar.labels)
    liar.privacy["other_releases"].append(choice)
    hide_the_choice_of_the_student(liar)
    liar.fact("rdp", "composition.account_route")


def mark_the_choice_of_the_student_as_seeded(liar):
    (choice,) = (part for part in liar.account["parts"] if part is not liar.labels)
    choice["what"] += ", NOT PRIVATE: seeded noise"
    choice["events"] = [event | {"eta": event["eta"] / 2} for event in choice["events"]]
    liar.recompute()


def tell_other_answers(liar):
    rows = list(csv.reader((liar.release / "labels.csv").read_text().splitlines()))
    rows[1][1] = rows[1][2] = "1" if rows[1][1] == "0" else "0"
    table = "".join(",".join(row) + "\n" for row in rows)
    (liar.release / "labels.csv").write_text(table)
    liar.record["labels_sha256"] = hashlib.sha256(table.encode()).hexdigest()


def hide_the_commit(liar):
    """The head is the entry of the reservation, after which the ledger has no hash of any file yet."""
    tell_other_answers(liar)
    liar.fact(find_entry(liar, "reserve")["hash"], "verification.ledger_head", "ledger_head")


def find_entry(liar, kind):
    entries = read_entries(liar.release.parents[4] / "ledger.sqlite")
    (entry,) = (e for e in entries if e["kind"] == kind and e["facts"]["reservation"] == liar.record["release_id"])
    return entry


CHARGED = {
    "other answers before the commit": ("charges", hide_the_commit),
    "another was interrupted": (
        "charges",
        lambda liar: liar.privacy["other_releases"][0].update(what="labels, interrupted: charged at its worst case"),
    ),
    "everything with twice the noise": ("charges", lambda liar: (liar.noise(2), liar.events(halve_mu))),
    "another unit": ("terms", claim_another_unit),
    "another adjacency": ("terms", claim_another_adjacency),
    "another cap": ("terms", lambda liar: liar.fact(60.0, "composition.account_cap", "budget_epsilon")),
    "nothing else was released": ("charges", lambda liar: (liar.privacy.update(other_releases=[]), liar.recompute())),
    "the choice is another release": ("charges", list_the_choice_of_the_student_elsewhere),
    "the choice had seeded noise": ("charges", mark_the_choice_of_the_student_as_seeded),
    "no choice": ("charges", hide_the_choice_of_the_student),
    "other answers": ("charges", tell_other_answers),
    "another head": ("chain", lambda liar: liar.fact("0" * 64, "verification.ledger_head", "ledger_head")),
}
"""Whole stories, told without a contradiction: what finds them in the ledger."""


@pytest.mark.parametrize("lie", CHARGED)
def test_a_story_without_a_contradiction_is_found_by_the_ledger(lie, release, second):
    finder, tell = CHARGED[lie]
    release = second if "choice" in lie or lie in ("nothing else was released", "another was interrupted") else release
    liar = Liar(release)
    tell(liar)
    liar.tell()
    failed = {name for name, mark in said(release).items() if mark == "FAILS"}
    assert finder in failed <= {"chain", "terms", "charges", "cap"}, failed


def test_a_release_without_a_part_is_found(release):
    """All that was charged is listed as another release, and what was charged for is left out of the folder."""
    liar = Liar(release)
    liar.privacy["other_releases"] += liar.account["parts"]
    liar.account["parts"] = []
    liar.recompute()
    liar.route("none", "nothing was released")
    liar.fact("gdp", "composition.account_route")
    for key in ("queries_asked", "queries_answered"):
        liar.fact(0, f"mechanism.{key}", key)
    liar.fact("public", "mechanism.name", "mechanism")
    liar.fact(None, "verification.release_id", "release_id")
    liar.tell()
    for name in ("release.json", "labels.csv"):
        (release / name).unlink()
    lines = (release / "SHA256SUMS").read_text().splitlines(keepends=True)
    (release / "SHA256SUMS").write_text("".join(line for line in lines if (release / line.split()[1]).exists()))
    found = said(release)
    assert found["record"] == found["charges"] == "FAILS" and found["mechanism"] == "not", found
    assert {found[name] for name in ("words", "files", "guarantee", "account")} == {"ok"}, found


PAGE_LIES = {
    "the large number": [("<b>{e}</b>", "<b>0.100</b>")],
    "cells of the page": [('<td class="num">{e}</td>', '<td class="num">0.100</td>')],
    "cells of the card": [("| This release alone | {e} |", "| This release alone | 0.100 |")],
    "the factor": [("at most the factor", "at most half the factor")],
    "delta": [("delta = 1e-4", "delta = 1e-12"), ("δ = 1e-4", "δ = 1e-12")],
    "the attack": [("finds at most 1", "finds at most "), ("finds at most 2", "finds at most ")],
    "the unit": [
        ("add or remove one record (", "add or remove all records of one patient ("),
        ("protects every record of", "protects all records of every patient in"),
        ("by one record added", "by all records of one patient added"),
    ],
    "a hidden number": [("<b>{e}</b>", "<b>0.100</b><!-- {e} -->")],
}


@pytest.mark.parametrize("lie", PAGE_LIES)
def test_other_words_than_the_numbers_are_found_although_all_files_agree(lie, release):
    statement = json.loads((release / "privacy.json").read_text())
    epsilon = format_epsilon(statement["guarantee"]["epsilon"])
    assert "finds at most 1" in str(statement) or "finds at most 2" in str(statement)
    for name in ("privacy.json", "README.md", "report.html"):
        text = (release / name).read_text()
        for before, after in PAGE_LIES[lie]:
            text = text.replace(before.replace("{e}", epsilon), after.replace("{e}", epsilon))
        (release / name).write_text(text)
    mend(release)
    assert [name for name, mark in said(release).items() if mark == "FAILS"] == ["words"]


HIDDEN = {
    "a comment": ("report.html", "<main>", "<main><!-- -->"),
    "an attribute": ("report.html", "<main>", "<main hidden>"),
    "an element": ("report.html", "<main>", "<main><template></template>"),
    "a style": ("report.html", "<main>", '<main style="display:none">'),
    "a color": ("report.html", "<body>", '<body style="--ink:transparent">'),
    "a style sheet": ("report.html", "</style>", "main { opacity: 0 }</style>"),
    "another style sheet": ("report.html", "</style>", "</style><style>main { opacity: 0 }</style>"),
    "folded": ("report.html", "<main>", "<main><details><summary>-</summary></details>"),
    "an end that browsers ignore": (
        "report.html",
        "<main>",
        "<main><details><table><tr><td></details></td></tr></table>",
    ),
    "an element that browsers leave open": ("report.html", "<main>", "<main><details/>"),
    "another page": ("report.html", "<head>", '<head><meta http-equiv="refresh" content="0;url=data:,x">'),
    "reversed digits": ("report.html", "<main>", "<main>\u202e"),
    "a comment of the card": ("README.md", "## Privacy", "<!--\n## Privacy"),
    "HTML in the card": ("README.md", "## Privacy", "<details>\n## Privacy"),
    "the title of a link": ("README.md", "## Privacy", "[a]: b '\n## Privacy"),
    "the words of a picture": ("README.md", "## Privacy", "![## Privacy](b)"),
    "words behind a fence": ("README.md", "## Privacy", "``` ## Privacy"),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_a_page_that_can_hide_words_is_found(way, release):
    name, before, after = HIDDEN[way]
    text = (release / name).read_text()
    text = text.replace(before, after, 1)
    if way == "folded":  # the true page, before a false one
        text = text.replace("</details>", "", 1).replace("</main>", "</details></main>")
    (release / name).write_text(text)
    mend(release)
    assert [name for name, mark in said(release).items() if mark == "FAILS"] == ["words"]


@pytest.mark.parametrize(
    "name", ["patients.csv", "tensorboard/events.out.tfevents.0000", "encoder/model.onnx", ".hidden", "cells"]
)
def test_a_file_that_is_no_part_of_a_release_fails_whatever_its_hash(name, release):
    (release / name).parent.mkdir(exist_ok=True)
    (release / name).write_text("name,diagnosis\n")
    with (release / "SHA256SUMS").open("a") as sums:
        sums.write(f"{hashlib.sha256((release / name).read_bytes()).hexdigest()}  {name}\n")
    (check,) = (check for check in verify_release(release) if not check.is_ok)
    assert check.name == "files" and "is no part of a release" in check.message and name in check.message


def test_a_file_of_an_encoder_is_the_one_that_the_card_names(release):
    """A student applies the encoder, whose file is that of the hash. Given features have no encoder."""
    privacy = json.loads((release / "privacy.json").read_text())
    table, sums = b"name,diagnosis\n", (release / "SHA256SUMS").read_text()
    (release / "encoder").mkdir()
    (release / "encoder" / "patients.csv").write_bytes(table)
    digest = hashlib.sha256(table).hexdigest()
    (release / "SHA256SUMS").write_text(f"{sums}{digest}  encoder/patients.csv\n")
    card = {"name": "e", "kind": "onnx", "sha256": digest, "file": "patients.csv", "tokenizer_sha256": None}
    card |= {"module": None, "license": None, "trained_on": None, "disjoint": True, "options": {}}
    cases = {"no file": {"sha256": "0" * 64}, "none": {"sha256": None}, "given": {"kind": "given"}, "the file": {}}
    for case, changes in cases.items():
        mend(release, privacy_json=privacy | {"encoder": card | changes})
        assert said(release, ledger=False)["files"] == ("ok" if case == "the file" else "FAILS"), case
    (release / "student.safetensors").unlink()
    (release / "SHA256SUMS").write_text("".join(line for line in sums.splitlines(True) if "student" not in line))
    assert said(release, ledger=False)["files"] == "FAILS"


def test_a_link_and_an_empty_folder_are_no_part_of_a_release(release, tmp_path):
    (release / "labels.csv").rename(tmp_path / "labels.csv")
    (release / "labels.csv").symlink_to(tmp_path / "labels.csv")
    assert said(release, ledger=False)["files"] == "FAILS"
    (release / "labels.csv").unlink()
    (tmp_path / "labels.csv").rename(release / "labels.csv")
    assert said(release, ledger=False)["files"] == "ok"
    (release / "patients").mkdir()
    assert said(release, ledger=False)["files"] == "FAILS"


def test_a_statement_beside_another_one_is_refused(release, tmp_path, capsys):
    outer = shutil.copytree(release, tmp_path / "outer")
    shutil.copytree(release, outer / "release")
    assert pate(["verify", str(outer)]) == 2
    assert "that may have another" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", '0.1, "epsilon": 0.2'])
@pytest.mark.parametrize("file", FILES)
def test_json_that_two_readers_take_differently_is_refused(file, number, release, capsys):
    text = (release / file).read_text()
    mend(release, **{file.replace(".", "_"): text.replace("{", f'{{"epsilon": {number}, ', 1)})
    assert pate(["verify", str(release)]) == 2
    assert "is repeated" in (error := capsys.readouterr().err) or "is no finite number" in error


def test_a_key_that_was_added_to_the_summary_is_found(release):
    summary = json.loads((release / "summary.json").read_text())
    mend(release, summary_json=summary | {"epsilon_with_amplification": 0.01})
    assert said(release, ledger=False)["record"] == "FAILS"


@pytest.mark.parametrize("before", ["| Accuracy | ", "| Student | ", "| Released labels | ", "Accuracy</th>\n<td>"])
def test_another_accuracy_on_a_page_is_found(before, release):
    for name in ("README.md", "report.html"):
        text = (release / name).read_text()
        (release / name).write_text(re.sub(rf"({re.escape(before)})[\d.]+", r"\g<1>99.9", text))
    mend(release)
    assert [name for name, mark in said(release).items() if mark == "FAILS"] == ["words"]


def test_what_is_no_file_is_no_part_of_a_release_and_is_not_opened(release):
    os.mkfifo(release / "pipe")
    assert said(release, ledger=False)["files"] == "FAILS"


def test_the_files_that_the_verifier_admits_are_those_that_a_release_says_it_holds():
    named = {*FILES, *verified_files.RELEASE_FILES, *ANSWER_FILES.values(), "private_test.json"}
    named |= {"SHA256SUMS"}
    of_tables = {*verified_files.TABLE_FILES.values()}
    of_sites = {"charter.json", "round-*.json", "round-*.public", "sum-*.json"}  # one of each for every slot
    assert named | {"encoder/"} | of_tables | of_sites == set(report.FILES) | of_tables


STUDENTS = {
    "data set": lambda facts: facts["spec"].update(name="others"),
    "classes": lambda facts: facts["spec"].update(class_names=["0", "1", "x"]),
    "classes (labels.csv)": lambda facts: facts["spec"].update(class_names=["0", "2", "1"]),
    "form": lambda facts: facts["spec"].update(input_shape=[3]),
    "encoder": lambda facts: facts.update(encoder={"name": "x", "kind": "onnx"}),
}


@pytest.mark.parametrize("fault", STUDENTS)
def test_a_student_of_other_data_is_found(fault, release):
    file = release / "student.safetensors"
    with safe_open(file, framework="pt") as held:
        facts, tensors = json.loads(held.metadata()["pate_torch"]), {key: held.get_tensor(key) for key in held.keys()}  # noqa: SIM118 (not a dict)
    STUDENTS[fault](facts)
    save_file(tensors, file, metadata={"pate_torch": json.dumps(facts)})
    mend(release)
    (check,) = (check for check in verify_release(release) if not check.is_ok)
    assert check.name == "student" and fault in check.message


def test_a_seeded_run_claims_nothing_and_is_found_by_the_ledger_if_it_says_that_it_is_private(
    release, tmp_path, capsys
):
    """The head of the statement moves to the entry of a seeded charge of the same events."""
    pipeline.run(again(tiny(tmp_path / "seeded"), "first", insecure_noise_seed=1))
    false, true = release_of(tmp_path / "seeded"), release
    assert pate(["verify", str(false)]) == 1 and "none is claimed" in capsys.readouterr().out
    false_ids, true_ids = (json.loads((folder / "summary.json").read_text()) for folder in (false, true))
    for file in (file for file in true.iterdir() if file.name != "SHA256SUMS"):
        if file.name in FILES:
            text = file.read_text()
            for key in ("release_id", "ledger_head"):
                text = text.replace(true_ids[key], false_ids[key])
            (false / file.name).write_text(text)
        else:
            shutil.copy(file, false / file.name)
    mend(false)
    assert said(false)["charges"] == "FAILS" and said(false, ledger=False)["guarantee"] == "ok"


def test_no_total_is_claimed_beside_a_release_with_seeded_noise(tmp_path):
    """Neither of what was reserved nor of what was spent."""
    pipeline.run(again(tiny(tmp_path), "first", insecure_noise_seed=1))
    plan = again(tiny(tmp_path), "second", num_queries=1)
    pipeline.run(plan)
    release = plan.folder / "release"
    assert set(said(release).values()) == {"ok"}
    for key, name in (("account_total", "epsilon_charged"), ("account_total_ex_post", "epsilon_charged_ex_post")):
        copy = shutil.copytree(release, release.with_name(key))
        liar = Liar(copy)
        liar.fact(liar.before, f"composition.{key}", name)
        liar.fact("gdp", "composition.account_route")
        liar.tell()
        assert said(copy, ledger=False)["account"] == "FAILS", key


def test_an_edited_ledger_and_a_missing_folder_are_said_in_a_line(release, tmp_path, capsys):
    ledger = release.parents[4] / "ledger.sqlite"
    with sqlite3.connect(ledger) as database:
        database.execute("DROP TRIGGER no_update")
        database.execute("UPDATE entries SET body = replace(body, '50.0', '51.0') WHERE seq = 2")
    assert pate(["verify", str(release), "--ledger", str(ledger)]) == 2
    assert "breaks at entry 2" in capsys.readouterr().err
    assert pate(["verify", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("error: release=")
    (release / "privacy.json").write_text("[1]")
    assert pate(["verify", str(release)]) == 2
    assert capsys.readouterr().err.startswith("error: release=")


@pytest.mark.parametrize("code,lied", [(0, False), (1, True)])
def test_one_line_a_check_and_an_exit_code(code, lied, release, capsys):
    if lied:
        (release / "labels.csv").write_text("query,label,class\n")
    assert pate(["verify", str(release.parent)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok|loose|FAILS) +\S", line) for line in lines[:-2]) and len(lines) == 12
    assert lines[-2].startswith("not checked  ledger")
    assert any(line.startswith("FAILS") for line in lines) == lied
    verdict = "2 of 10 checks FAILED (files, labels)" if lied else "all 10 checks passed"
    assert lines[-1].startswith(f"verdict  {verdict}; not checked: ledger. ")
    assert ("epsilon = " in lines[-1]) == (not lied)


def test_labels_used_again_pass_without_their_record(honest, tmp_path):
    home = shutil.copytree(honest, tmp_path / "home")
    first = json.loads((home / "runs/blobs/gaussian/first/release/summary.json").read_text())
    plan = again(tiny(home), "third", labels=first["release_id"])
    pipeline.run(plan)
    assert set(said(plan.folder / "release").values()) == {"ok"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"unit": "group:a | *b* & (c)", "adjacency": "add_remove", "delta": 1.25e-7, "epsilon": 12.3456},
        {"unit": "label of one record", "adjacency": "replace_one", "other_releases": ()},
        {"accountant": "delta", "epsilon": 0.0, "epsilon_curve": ()},
        {"epsilon_charged": None, "budget_epsilon": None, "epsilon": 0.0123, "epsilon_curve": ()},
    ],
)
def test_the_words_of_every_form_are_those_that_the_verifier_rebuilds(form, changes, tmp_path):
    made = demo(**FORMS[form] | changes)
    write_release(tmp_path, made)
    (check,) = run_check(verified_files._check_words, replace(ReleaseFolder.load(tmp_path), release=None))
    assert check.is_ok, check.message
