"""What is claimed, of whatever was released by whichever route: parts <= release <= account, composed anew here."""

import dataclasses
import html
import json
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.cli import main as cli
from pate_torch.hypotheses.classes import Thresholds
from pate_torch.hypotheses.sample import Sample
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.privacy.accounts import PURPOSE_HYPOTHESIS, PURPOSE_LABELS, PURPOSE_STUDENT_CHOICE
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import ReplaceOne
from pate_torch.queries.base import Random
from pate_torch.release.builder import compute_claim
from pate_torch.release.statement import NO_TOTAL_NOTE, NOT_PRIVATE
from pate_torch.teachers.store import TeacherStore
from tests.killed_runs import blobs, plan
from tests.mechanisms.mechanism_forms import ALL_FORMS, RECORDS, made, num_classes, num_teachers
from tests.release.json_schema import faults, privacy_schema
from tests.spies import spy
from tests.tiny_runs import pate, selection, student
from tests.worlds import benchmark_clouds

DELTA = 1e-4
TERMS = {"delta": DELTA, "adjacency": "add_remove", "unit": "record"}
REL = 1e-9
QUERIES = 6
FREE = "this run cost nothing"


def read(folder, name="summary.json"):
    return json.loads((folder / "release" / name).read_text())


def composed(ledger, account, reservations) -> float:
    """Of what these reserved, or the cap where that is less."""
    charges, terms = ledger.get_charges(account), ledger.get_account(account)
    events = [event for identity in reservations for event in charges[identity].reserved_events]
    return min(accounting.compute_guarantee(events, terms.delta).epsilon, terms.budget_epsilon)


def check(root, folder, account="blobs", alone=True) -> dict:
    """Hold the claims of one folder against the ledger; what lies in the folder, against its parts. Its summary."""
    found, said = read(folder), read(folder, "privacy.json")
    assert (found["schema_version"], said["schema_version"]) == (1, 1)
    assert faults(said, privacy_schema()) == []
    parts = said["composition"]["parts"]
    with Ledger(root / "ledger.sqlite") as ledger:
        ledger.verify()
        everything = composed(ledger, account, ledger.get_charges(account))
        release = composed(ledger, account, [part["release_id"] for part in parts])
        assert {part["release_id"] for part in parts + said["other_releases"]} == set(ledger.get_charges(account))
        for part in parts + said["other_releases"]:
            own = composed(ledger, account, [part["release_id"]])
            assert part["epsilon"] == pytest.approx(own, rel=REL)
            assert part["what"] == ledger.get_charges(account)[part["release_id"]].purpose
            assert own <= (release if part in parts else everything) * (1 + REL)
    assert found["epsilon"] == said["guarantee"]["epsilon"] == pytest.approx(release, rel=REL)
    assert found["epsilon_charged"] == said["composition"]["account_total"] == pytest.approx(everything, rel=REL)
    assert release <= everything * (1 + REL)
    if alone:
        assert found["epsilon_charged"] == pytest.approx(found["epsilon"], rel=REL)
    for total, used in (("epsilon", "epsilon_ex_post"), ("epsilon_charged", "epsilon_charged_ex_post")):
        assert found[used] <= found[total] * (1 + REL)
    words = [part["what"] for part in parts]
    has_labels = (folder / "release" / "labels.csv").exists()
    assert (PURPOSE_LABELS in words) == has_labels or found["release_id"] in {part["release_id"] for part in parts}
    return found


def whats(folder, kind="parts") -> list[str]:
    said = read(folder, "privacy.json")
    rows = said["composition"]["parts"] if kind == "parts" else said[kind]
    return [row["what"] for row in rows]


def shown(folder, out: str) -> dict[str, str]:
    """Everything a person reads, without markup and breaks."""
    page = html.unescape(re.sub(r"<[^>]*>", " ", (folder / "release" / "report.html").read_text(encoding="utf-8")))
    card = (folder / "release" / "README.md").read_text(encoding="utf-8").replace("\\", "")
    said = (folder / "release" / "privacy.json").read_text(encoding="utf-8")
    table = re.sub(r"[|+]", " ", out)
    texts = {"page": page, "card": card, "privacy": said, "table": table}
    return {name: re.sub(r"\s+", " ", text) for name, text in texts.items()}


VOTED = [form for form in ALL_FORMS if form[0] not in RECORDS]
every_form = pytest.mark.parametrize("name,noise", VOTED, ids=["-".join(form) for form in VOTED])


def votes_file(path, mechanism, points: int):
    """A file of counts: of three rows one is undecided, two are unanimous."""
    teachers, classes = num_teachers(mechanism, points, 2), num_classes(mechanism.name)
    table = np.zeros((points, classes), dtype=np.int64)
    table[np.arange(points), np.arange(points) % classes] = teachers
    table[::3] = [teachers // 2, teachers - teachers // 2] + [0] * (classes - 2)
    np.save(path, table)
    return path


def source(classes: int):
    three = blobs()
    return dataclasses.replace(
        three, class_names=classes, y=three.y % classes, pool_y=three.pool_y % classes, test_y=three.test_y % classes
    )


@every_form
def test_brought_votes(tmp_path, name, noise):
    """Interactive looks at a student between rounds: it gets two, and answers whatever is unanimous."""
    mechanism = made(name, noise)
    if name == "interactive":
        mechanism = dataclasses.replace(mechanism, threshold=-10.0)
    votes, query = votes_file(tmp_path / "votes.npy", mechanism, 30), Random(rounds=2 if name == "interactive" else 1)
    changes = {"votes": votes, "mechanism": mechanism, "query": query, "num_queries": QUERIES}
    changes |= {"student": student(), "guide_student": student()}
    pipeline.run(one := plan(tmp_path, "one", dataset=source(num_classes(name)), **changes))
    found = check(tmp_path, one.folder)
    events = mechanism.privacy_events(QUERIES, one.method.num_rounds)
    assert found["epsilon"] == pytest.approx(min(accounting.compute_guarantee(events, DELTA).epsilon, 50.0), rel=REL)
    if name == "sparse_vector":  # of twenty failures two or three come: what is left of its cost is no claim
        assert found["epsilon_charged_ex_post"] < found["epsilon"] / 2


@pytest.mark.parametrize("name,noise", [("gaussian", "discrete"), ("confident", "torch"), ("sparse_vector", "torch")])
def test_the_label_command(tmp_path, monkeypatch, name, noise):
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    mechanism = made(name, noise)
    names = [f.name for f in dataclasses.fields(mechanism) if f.name not in ("name", "noise")]
    given = {f"mechanism.{key}": getattr(mechanism, key) for key in names}
    given = {key: "null" if value is None else value for key, value in given.items()}
    given |= {"votes": votes_file(tmp_path / "votes.npy", mechanism, 30), "num_classes": num_classes(name)}
    given |= {"dataset.name": "blobs", "mechanism": name, "noise": noise, "num_queries": QUERIES, "quiet": "true"}
    given |= {"privacy.delta": DELTA, "privacy.opening_budget": 50}
    assert cli.main(["label", *(f"{key}={value}" for key, value in given.items())]) == 0
    (folder,) = (tmp_path / "runs" / "blobs" / name).iterdir()
    assert check(tmp_path, folder)["student"] is None


RUNS = {
    "gaussian": {},
    "confident": {"mechanism": ConfidentGNMax(screen_sigma=0.8, threshold=6.0, sigma=2.0)},
    "rounds": {"query": Random(rounds=3), "num_queries": QUERIES},
    "selection": {"selection": selection()},
    "reverse k-NN": {"method": partial(ReverseKnn), "mechanism": Histogram(sigma=3.0, adjacency="add_remove")},
    "reverse k-NN in rounds": {
        "method": partial(ReverseKnn),
        "query": Random(rounds=2),
        "mechanism": Histogram(sigma=3.0, adjacency="add_remove", noise="discrete"),
    },
    "gradients": {
        "method": partial(GradientMethod, size=100),
        "query": Random(rounds=2),
        "mechanism": GradientDescent(sigma=9.0, adjacency="replace_one", early_noise_multiplier=2.0),
        "partition": ReplaceOne(),
    },
    "gradients with whole numbers": {
        "method": partial(GradientMethod, size=100),
        "mechanism": GradientDescent(sigma=9.0, adjacency="add_remove", clip_norm=0.5, noise="discrete"),
    },
}


STAGES = {
    "gaussian": {"labels", "student"},
    "confident": {"labels", "student"},
    "reverse k-NN": {"student"},
    "gradients": {"student"},
}
"""The stages of public sizes, which alone are timed in public."""


@pytest.mark.parametrize("route", RUNS)
def test_whole_runs(tmp_path, route):
    one = plan(tmp_path, "one", **RUNS[route])
    pipeline.run(one)
    found = check(tmp_path, one.folder)
    expected = [PURPOSE_LABELS] + [PURPOSE_STUDENT_CHOICE] * (one.selection is not None)
    assert whats(one.folder) == expected and whats(one.folder, "other_releases") == []
    labels = accounting.compute_guarantee(one.method.privacy_events(), DELTA).epsilon
    if len(expected) == 1:
        assert found["epsilon"] == pytest.approx(labels, rel=REL)
    else:
        assert labels < found["epsilon"]
    if route in STAGES:
        owner = json.loads((one.folder / "private" / "summary.json").read_text())["seconds"]
        assert found["seconds"].keys() == STAGES[route] and found["seconds"].items() <= owner.items()
        assert {"data", "labels", "student", "owner"} <= owner.keys()
        assert ({"teachers", "partition", "votes"} <= owner.keys()) is (one.method.ensemble_size is not None)


def test_releases_of_one_account_stay_below_its_total(tmp_path, monkeypatch):
    """One after the other: each claims its own, and the account all of them, at every moment."""
    steps = [
        plan(tmp_path, "gaussian", mechanism=GNMax(sigma=8.0)),
        plan(tmp_path, "confident", mechanism=ConfidentGNMax(screen_sigma=2.0, threshold=2.0, sigma=4.0)),
        plan(tmp_path, "rounds", mechanism=GNMax(sigma=6.0), query=Random(rounds=2)),
        plan(tmp_path, "chosen", mechanism=GNMax(sigma=7.0), selection=selection()),
    ]
    done = []
    for one in steps:
        pipeline.run(one)
        done.append(check(tmp_path, one.folder, alone=not done))
        assert all(earlier["epsilon"] <= done[-1]["epsilon_charged"] for earlier in done)
        assert sorted(done, key=lambda found: found["epsilon_charged"]) == done
    assert whats(steps[-1].folder) == [PURPOSE_LABELS, PURPOSE_STUDENT_CHOICE]
    assert whats(steps[-1].folder, "other_releases") == [PURPOSE_LABELS] * 3
    with monkeypatch.context() as patch, Ledger(tmp_path / "ledger.sqlite") as ledger:
        asked = spy(patch, Ledger, "make_claim")  # once, however many releases there are
        found = compute_claim(ledger, "blobs", TERMS, reservation_ids=[done[-1]["release_id"]])
    assert len(asked) == 1 and len(found.other_releases) == 4  # three of labels, and the choice of the student


@pytest.mark.parametrize("chosen", [False, True], ids=["reused", "reused and chosen"])
def test_labels_used_again(tmp_path, capsys, chosen):
    pipeline.run(first := plan(tmp_path, "first"))
    before = check(tmp_path, first.folder)
    capsys.readouterr()
    changes = {"selection": selection()} if chosen else {"student": student(4)}
    pipeline.run(second := plan(tmp_path, "second", labels=before["release_id"], **changes))
    found, texts = check(tmp_path, second.folder), shown(second.folder, capsys.readouterr().out)
    assert whats(second.folder) == [PURPOSE_LABELS, PURPOSE_STUDENT_CHOICE][: 1 + chosen]
    assert (found["epsilon"] > before["epsilon"]) is (found["epsilon_charged"] > before["epsilon_charged"]) is chosen
    for where in ("page", "card", "table"):
        assert (FREE in texts[where]) is not chosen, where
    assert read(second.folder, "privacy.json")["composition"]["labels_reused"] is True
    assert not chosen or not found["seconds"]  # the students are judged by private records
    assert "by itself; paid for by an earlier run." not in texts["card"].lower() or chosen
    pipeline.run(third := plan(tmp_path, "third", labels=before["release_id"]))  # a choice of another folder
    assert check(tmp_path, third.folder, alone=not chosen)["epsilon"] == before["epsilon"]
    assert whats(third.folder, "other_releases") == [PURPOSE_STUDENT_CHOICE] * chosen


def test_dp_sgd(tmp_path):
    method = partial(DPSGD, network="logistic", steps=2, batch_size=30)
    one = plan(tmp_path, "one", dataset=benchmark_clouds(benchmark=False), method=method, mechanism=GNMax(sigma=4.0))
    pipeline.run(one)
    found = check(tmp_path, one.folder, "clouds")
    assert whats(one.folder) == ["model by DP-SGD"] and found["release_id"] is None and found["seconds"] == {}
    again = plan(tmp_path, "two", dataset=one.dataset, mechanism=GNMax(sigma=6.0))
    pipeline.run(again)
    check(tmp_path, again.folder, "clouds", alone=False)
    assert whats(again.folder, "other_releases") == ["model by DP-SGD"]


LINE = torch.linspace(-4, 4, 80)[:, None]


@pytest.mark.parametrize("mechanism", [GNMax(sigma=6.0), ConfidentGNMax(screen_sigma=2.0, threshold=1.0, sigma=6.0)],
                         ids=lambda m: m.name)  # fmt: skip
def test_the_python_api(tmp_path, mechanism):
    one = pate(tmp_path, LINE, (LINE[:, 0] > 0).long(), mechanism=mechanism)
    one.label(LINE[::2] + 0.01, num_queries=QUERIES)
    one.fit_student("supervised", network="logistic", steps=2, augment=None)
    report = one.report()
    check(tmp_path, one.folder.parent, "line")
    expected = accounting.compute_guarantee(mechanism.privacy_events(QUERIES), DELTA).epsilon
    assert one.epsilon == report.claim.epsilon == pytest.approx(expected, rel=REL)
    with one.labeler(num_queries=5) as labeler:
        labeler.answer(torch.tensor([[0.3], [0.7]]))
        both = labeler.epsilon
    again = one.report()
    check(tmp_path, one.folder.parent, "line", alone=False)
    assert again.claim.epsilon == report.claim.epsilon < again.claim.epsilon_charged == both == one.epsilon
    assert again.claim.epsilon_charged_ex_post < again.claim.epsilon_charged  # two of five were asked
    assert whats(one.folder.parent, "other_releases") == [PURPOSE_LABELS]


@pytest.mark.filterwarnings("ignore::pate_torch.hypotheses.sample.BelowGuaranteeWarning")
def test_a_published_hypothesis(tmp_path):
    one = pate(tmp_path, LINE, (LINE[:, 0] > 0).long(), partition=ReplaceOne())
    with one.labeler(num_queries=10) as labeler:
        labeler.answer(LINE[::10])
        before = labeler.epsilon
        x = np.linspace(-4, 4, 500)
        labeler.publish_hypothesis(Thresholds(), Sample(x, x > 0), epsilon=1.0)
        after = labeler.epsilon
        charges = labeler.ledger.get_charges("line")
        assert [charge.purpose for charge in charges.values()] == [PURPOSE_LABELS, PURPOSE_HYPOTHESIS]
        each = [composed(labeler.ledger, "line", [identity]) for identity in charges]
        assert max(each) <= after == pytest.approx(composed(labeler.ledger, "line", charges), rel=REL)
        assert before == pytest.approx(each[0], rel=REL) and before < after


def test_a_private_run_after_a_seeded_one_claims_its_own_and_no_total(tmp_path, capsys):
    pipeline.run(plan(tmp_path, "seeded", insecure_noise_seed=0))
    capsys.readouterr()
    pipeline.run(one := plan(tmp_path, "one", seed=1))
    found, said = read(one.folder), read(one.folder, "privacy.json")
    assert found["private"] is True and found["epsilon_charged"] is found["epsilon_charged_ex_post"] is None
    events = one.method.mechanism.privacy_events(one.method.num_queries)
    assert found["epsilon"] == pytest.approx(accounting.compute_guarantee(events, DELTA).epsilon, rel=REL)
    assert faults(said, privacy_schema()) == []
    assert said["composition"]["account_total"] is None and said["composition"]["account_note"] == NO_TOTAL_NOTE
    (other,) = said["other_releases"]
    assert other["epsilon"] is None and NOT_PRIVATE in other["what"]
    for where, text in shown(one.folder, capsys.readouterr().out).items():
        assert NO_TOTAL_NOTE in text, where
        assert f"{NOT_PRIVATE}: no guarantee" not in text, where


def test_a_seeded_choice_makes_the_folder_not_private(tmp_path, capsys):
    pipeline.run(first := plan(tmp_path, "first"))
    assert check(tmp_path, first.folder)["private"] is True
    capsys.readouterr()
    release = read(first.folder)["release_id"]
    pipeline.run(one := plan(tmp_path, "one", labels=release, insecure_noise_seed=1, selection=selection()))
    found, said = read(one.folder), read(one.folder, "privacy.json")
    assert found["private"] is said["private"] is False
    assert found["epsilon"] is found["epsilon_charged"] is said["guarantee"]["epsilon"] is None
    assert faults(said, privacy_schema()) == [] and all(
        part["epsilon"] is None for part in said["composition"]["parts"]
    )
    for where, text in shown(one.folder, capsys.readouterr().out).items():
        assert NOT_PRIVATE in text, where
    # What was released before it stays private, and says so.
    pipeline.run(free := plan(tmp_path, "free", labels=release))
    assert read(free.folder)["private"] is True and read(free.folder)["epsilon"] is not None
    assert read(free.folder)["epsilon_charged"] is None


def test_an_interrupted_release_is_listed_at_its_worst(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(GNMax, "draw", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(plan(tmp_path, "cut", seed=1))
    pipeline.run(one := plan(tmp_path, "one"))
    (other,) = read(one.folder, "privacy.json")["other_releases"]
    found = read(one.folder)
    assert other["what"] == f"{PURPOSE_LABELS}, interrupted: charged at its worst case"
    assert other["epsilon"] == pytest.approx(found["epsilon"], rel=REL) and found["epsilon_charged"] > found["epsilon"]


@pytest.mark.parametrize(
    "slow", ["compute_content_fingerprint", "compute_keyed_digest", "hash_records", "record_charge"]
)
def test_the_times_that_are_shown_do_not_grow_with_the_records(tmp_path, monkeypatch, slow):
    """Whatever reads all records, such as the fingerprint, is no part of a stage that is shown."""
    one = pate(tmp_path, LINE, (LINE[:, 0] > 0).long())
    seconds, calls, inner = [0.0], [], getattr(TeacherStore, slow)

    def take_a_second(self, *given, **options):
        seconds[0] += 1
        calls.append(slow)
        return inner(self, *given, **options)

    monkeypatch.setattr(TeacherStore, slow, take_a_second)
    monkeypatch.setattr("pate_torch.core.progress.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    one.label(LINE[::2] + 0.01, num_queries=QUERIES)
    one.fit_student("supervised", network="logistic", steps=2)
    assert calls and one.report().record.seconds == {"labels": 0, "student": 0}
