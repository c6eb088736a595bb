"""Runs held to their account's terms: unit, adjacency, noise, ledger and records; and what one unit may move."""

import contextlib
import csv
import dataclasses
import errno
import hashlib
import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from hydra import compose as hydra_compose

from pate_torch import PATE, pipeline, session
from pate_torch.api.pate import InMemoryDataset
from pate_torch.cli import hydra_config
from pate_torch.cli import label as label
from pate_torch.cli import main as cli
from pate_torch.core import run_folders
from pate_torch.data.tabular import Csv
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.dpsgd_optimizer import NoiseSourceOptimizer
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.record_method import RecordMethod
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import DryRunNoise, NoiseSource
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import MechanismContext, PrivateRecords
from pate_torch.students.training import GradientStudent
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import ID_PATTERN
from tests.command_runs import ledger_entries
from tests.killed_runs import blobs, plan
from tests.methods.voter_worlds import ask_records
from tests.run_configs import changed
from tests.tiny_runs import pate, selection
from tests.worlds import benchmark_clouds
from tests.worlds import clouds as points


def released(plan) -> str:
    return json.loads((plan.folder / "release" / "summary.json").read_text())["release_id"]


def entries(home) -> list[str]:
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        return [entry.hash for entry in ledger.read_entries()]


LABEL_OPTIONS = ("num_classes=2", "mechanism.sigma=9", "privacy.delta=1e-5", "quiet=true")


@pytest.fixture
def nothing_runs(monkeypatch):
    """From here on nothing is trained, and no noise is drawn."""

    def forbid():
        monkeypatch.setattr(GradientStudent, "fit", lambda *_, **__: pytest.fail("a student was trained"))
        train = "pate_torch.methods.teacher_votes.train"
        monkeypatch.setattr(train, lambda *_, **__: pytest.fail("teachers were trained"))
        monkeypatch.setattr(NoiseSource, "_fill_blocks", lambda *_: pytest.fail("noise was drawn"))

    return forbid


@pytest.fixture(scope="module")
def charged_twice(tmp_path_factory):
    """A home with two releases and ``older.sqlite``, a ledger that lacks the second: (home, id of the first)."""
    home = tmp_path_factory.mktemp("charged")
    pipeline.run(first := plan(home, "first"))
    with Ledger(home / "ledger.sqlite") as ledger:
        ledger.backup(home / "older.sqlite")
    pipeline.run(plan(home, "second", seed=1))
    return home, released(first)


def refused(one, words, home) -> None:
    """The run is stopped by an error with these words; nothing is charged or left behind."""
    before = entries(home)
    with pytest.raises(ValueError, match=words):
        pipeline.run(one)
    assert entries(home) == before and not one.folder.exists()


# ---- a choice of a student on other terms ---------------------------------------------------------------------------


def table(path, group: str | None) -> Csv:
    """A file for each role, so that parts and features are the same with and without a group."""
    x, y = points(160, 0)
    rows = [(*map(str, x[n].tolist()), str(int(y[n])), f"p{n % 60}") for n in range(160)]
    for name, part in (("private.csv", rows[:120]), ("public.csv", rows[120:140]), ("test.csv", rows[140:])):
        with (path / name).open("w", newline="") as file:
            csv.writer(file).writerows([("a", "b", "label", "patient"), *part])
    files = {key: str(path / f"{key.removesuffix('_path')}.csv") for key in ("public_path", "test_path")}
    return Csv(name="blobs", path=str(path / "private.csv"), **files, features=["a", "b"], group=group)


ADD, REPLACE = {"partition": AddRemove()}, {"partition": ReplaceOne()}
OTHER_TERMS = {
    "now of records": ({"group": "patient"}, {"group": None}, r"unit='record'.*'group:patient'"),
    "now of groups": ({"group": None}, {"group": "patient"}, "the privacy unit is group:patient"),
    "now replace": ({}, REPLACE, "adjacency='replace_one'.*'add_remove'"),
    "now add": (REPLACE, ADD, "adjacency='add_remove'.*'replace_one'"),
    "delta": ({}, {"delta": 1e-5}, "delta=1e-05"),
    "cap": ({}, {"selection": selection(epsilon=60.0)}, "pass the cap"),
}


@pytest.mark.parametrize("case", OTHER_TERMS)
def test_a_choice_on_terms_that_the_account_does_not_admit_is_refused_before_training(
    tmp_path, nothing_runs, charged_twice, case
):
    *terms, words = OTHER_TERMS[case]
    before, now = ({"dataset": table(tmp_path, **one)} if "group" in one else one for one in terms)
    first = plan(tmp_path, "first", **before)
    if before:
        pipeline.run(first)
    else:
        shutil.copytree(charged_twice[0], tmp_path, dirs_exist_ok=True)
    nothing_runs()
    refused(plan(tmp_path, "b", labels=released(first), **{"selection": selection(), **now}), words, tmp_path)


def test_a_choice_from_labels_of_another_kind_of_noise_is_refused(tmp_path, nothing_runs):
    discrete = {"mechanism": GNMax(sigma=2.0, noise="discrete")}
    pipeline.run(first := plan(tmp_path, "first", **discrete))
    with pytest.raises(ValueError, match=r"selection=.*continuous noise"):
        plan(tmp_path, "b", selection=selection(), **discrete)
    nothing_runs()
    refused(plan(tmp_path, "b", labels=released(first), selection=selection()), "noise='torch'.*'discrete'", tmp_path)
    refused(plan(tmp_path, "c", seed=1), "noise='torch'.*'discrete'", tmp_path)


# ---- a capacity where every record answers for itself ---------------------------------------------------------------

HISTOGRAM, DESCENT = Histogram(sigma=3.0, adjacency="add_remove"), GradientDescent(sigma=9.0, adjacency="add_remove")
REVERSE_KNN = {"method": partial(ReverseKnn), "mechanism": HISTOGRAM}
GRADIENTS = {"method": partial(GradientMethod, size=100), "mechanism": DESCENT}
every_answer = pytest.mark.parametrize("given", [REVERSE_KNN, GRADIENTS], ids=["reverse_knn", "gradients"])


@every_answer
def test_python_refuses_a_capacity(tmp_path, given):
    x, y = points(60, 0)
    parts = {"teacher": given["method"](mechanism=given["mechanism"]), "partition": AddRemove(capacity=50)}
    one = PATE("line", classes=3, home=tmp_path, delta=1e-4, **parts).fit_teachers(x, y)
    with pytest.raises(ValueError, match="capacity=50"):
        one.label(points(30, 1)[0], num_queries=5)
    assert "reserve" not in ledger_entries(tmp_path)


@every_answer
@pytest.mark.parametrize("capacity,moved", [(None, 1.0), (1000, math.inf)])
def test_a_value_under_a_capacity_says_that_nothing_bounds_it(given, capacity, moved):
    """Whether or not it drops a record of these: that is theirs to change."""
    data, partition, mechanism = blobs().load(), AddRemove(capacity=capacity), given["mechanism"]
    answers = ask_records(given["method"](mechanism=mechanism), data, partition, None)
    assert answers.sensitivity.l2 == moved
    refuses = contextlib.nullcontext() if capacity is None else pytest.raises(ValueError, match="sensitivity=")
    with refuses:
        asked = (DryRunNoise("torch"), MechanismContext(num_queries=5))
        assert mechanism.release(answers.select(torch.arange(5)), *asked).events


@every_answer
def test_past_the_plans_check_nothing_is_drawn(tmp_path, monkeypatch, nothing_runs, given):
    monkeypatch.setattr(RecordMethod, "validate", lambda self, facts: None)
    nothing_runs()
    one = plan(tmp_path, "one", **given, partition=AddRemove(capacity=50))
    with pytest.raises(ValueError, match=r"sensitivity=.*partition\.capacity"):
        pipeline.run(one)
    assert not (one.folder / "release").exists()


# ---- a ledger that is not the one that was charged ------------------------------------------------------------------


def lose(home, older=None) -> None:
    """Delete the ledger, or put an older copy in its place."""
    for file in home.glob("ledger.sqlite*"):
        file.unlink()
    if older is not None:
        shutil.copy(older, home / "ledger.sqlite")


NEXT_RUNS = {
    "the same teachers": {"mechanism": GNMax(sigma=3.0)},
    "other teachers": {"num_teachers": 6},
    "reverse k-NN": REVERSE_KNN,
    "gradients": GRADIENTS,
    "a choice": {"selection": selection()},
}


@pytest.mark.parametrize("older", [False, True], ids=["deleted", "older"])
def test_a_lost_ledger_stops_the_next_run_and_is_named(tmp_path, nothing_runs, charged_twice, older):
    """The older copy knows the account, and not its newest release."""
    home, release_id = charged_twice
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    lose(tmp_path, tmp_path / "older.sqlite" if older else None)
    known = entries(tmp_path) if older else []
    nothing_runs()
    for number, now in enumerate(NEXT_RUNS.values()):
        with pytest.raises(ValueError, match=r"dataset\.name='blobs'.*ledger\.sqlite.*\.json remembers"):
            pipeline.run(plan(tmp_path, f"next{number}", **now))
        assert (entries(tmp_path) if older else [k for k in ledger_entries(tmp_path) if k != "genesis"]) == known
    if older:
        again = plan(tmp_path, "again", labels=release_id, selection=selection())
        refused(again, r"another privacy ledger.*\.json remembers", tmp_path)


def test_the_label_command_stops_at_a_lost_ledger(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    given = [*LABEL_OPTIONS, "dataset.name=line"]
    for n, votes in enumerate(([[20, 0]] * 4, [[0, 20]] * 4)):
        np.save(tmp_path / f"{n}.npy", np.array(votes))
    assert cli.main(["label", f"votes={tmp_path / '0.npy'}", *given]) == 0
    lose(tmp_path / "home")
    assert cli.main(["label", f"votes={tmp_path / '1.npy'}", *given]) == 2
    assert ".json remembers one of its entries" in capsys.readouterr().err
    assert ledger_entries(tmp_path / "home") == ["genesis"]


def test_python_stops_at_a_lost_ledger(tmp_path):
    x, y = points(60, 0)
    pate(tmp_path, x, y, classes=3).label(points(30, 1)[0], num_queries=5)
    lose(tmp_path)
    other = pate(tmp_path, x, y, classes=3, seed=1)
    for attempt in (lambda: other.label(points(30, 1)[0], num_queries=5), lambda: other.labeler(5)):
        with pytest.raises(ValueError, match=r"another privacy ledger.*\.json remembers"):
            attempt()
    assert ledger_entries(tmp_path) == ["genesis"]


def test_another_data_set_under_the_same_root_is_not_stopped(tmp_path, charged_twice):
    shutil.copytree(charged_twice[0], tmp_path, dirs_exist_ok=True)
    lose(tmp_path)
    pipeline.run(plan(tmp_path, "other", dataset=dataclasses.replace(blobs(), name="others")))
    assert "commit" in ledger_entries(tmp_path)


# ---- the same records under another name ----------------------------------------------------------------------------

OTHER = dataclasses.replace(blobs(), name="twin")
TWICE = {"teachers": {}, "reverse k-NN": REVERSE_KNN, "gradients": GRADIENTS, "a choice": {"selection": selection()}}


@pytest.mark.parametrize("first", ["teachers", "gradients"])
def test_records_have_one_account_unless_their_owner_says_otherwise(tmp_path, first):
    pipeline.run(plan(tmp_path, "first", **TWICE[first]))
    before = entries(tmp_path)
    for name, options in TWICE.items():
        again = plan(tmp_path, name.replace(" ", "-"), dataset=OTHER, **options)
        with pytest.raises(ValueError, match=r"account='twin': shares .* account 'blobs'.*allow_duplicate_account"):
            pipeline.run(again)
        assert entries(tmp_path) == before
    pipeline.run(changed(again, allow_duplicate_account=True))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert [account.name for account in ledger.list_accounts()] == ["blobs", "twin"]


def test_python_and_the_label_command_know_records_and_votes_again(tmp_path, monkeypatch, capsys):
    x, y = points(60, 0)
    pate(tmp_path, x, y, classes=3).label(points(30, 1)[0], num_queries=5)
    other = pate(tmp_path, x, y, classes=3)
    other.name = "twin"
    for labels in (y, 2 - y):  # also with the classes in another order
        other.fit_teachers(x, labels)
        with pytest.raises(ValueError, match="units with account 'line'"):
            other.label(points(30, 1)[0], num_queries=5)
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    votes = np.array([[20, 0], [18, 2], [3, 17], [20, 0]])
    np.save(tmp_path / "votes.npy", votes)
    given = [f"votes={tmp_path / 'votes.npy'}", *LABEL_OPTIONS]
    assert cli.main(["label", *given, "dataset.name=a"]) == 0
    for order in (votes, votes[::-1], votes[:, ::-1]):
        np.save(tmp_path / "votes.npy", order)
        assert cli.main(["label", *given, "dataset.name=b"]) == 2
        assert "units with account 'a'" in capsys.readouterr().err
    assert cli.main(["label", *given, "dataset.name=b", "privacy.allow_duplicate_account=true"]) == 0


# ---- DP-SGD: a unit is one record, whatever its id is ----------------------------------------------------------------

CLIP = 0.25


def summed(home, monkeypatch, x, y, unit_id=None) -> torch.Tensor:
    """The summed gradient of one step that sees every record, without noise."""
    sums = []

    def add_noise(self):
        for p in self.params:
            sums.append(p.summed_grad.flatten().clone())
            p.grad = p.summed_grad.view_as(p)

    monkeypatch.setattr(NoiseSourceOptimizer, "add_noise", add_noise)
    data = benchmark_clouds(nominal_size=60, mean=(0.0,) * 3, std=(1.0,) * 3).load()
    source = InMemoryDataset(dataclasses.replace(data, private=PrivateRecords.from_rows(x, y, unit_id)))
    method = partial(DPSGD, network="logistic", steps=1, batch_size=60, clip=CLIP)
    pipeline.run(plan(home, "one", dataset=source, method=method, mechanism=GNMax(sigma=9.0)))
    return torch.cat(sums)


def test_a_record_whose_id_occurs_moves_the_gradient_by_one_clip(tmp_path, monkeypatch):
    base = benchmark_clouds()
    x, y, names = base.x[:40], base.y[:40], [f"r{n}" for n in range(40)]
    more_x, more_y = torch.cat([x[:1], x]), torch.cat([1 - y[:1], y])

    def total(name, x, y, ids):
        return summed(tmp_path / name, monkeypatch, x, y, ids)

    without, more = total("without", x, y, names), total("more", more_x, more_y, ["r0", *names])
    assert 0.9 * CLIP < float((more - without).norm()) <= CLIP * (1 + 1e-5)
    assert torch.allclose(more, total("unnamed", more_x, more_y, None))


# ---- one folder, one release ---------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_release_is_not_written_again(tmp_path, charged_twice):
    shutil.copytree(charged_twice[0], tmp_path, dirs_exist_ok=True)
    first = plan(tmp_path, "first")
    before, charged = (first.folder / "release" / "labels.csv").read_bytes(), entries(tmp_path)
    for changes in ({"mechanism": GNMax(sigma=9.0)}, {}, {"labels": released(first)}):
        with pytest.raises(ValueError, match=r"paths\.run.*holds a release already"):
            pipeline.run(plan(tmp_path, "first", **changes))
    assert (first.folder / "release" / "labels.csv").read_bytes() == before and entries(tmp_path) == charged


def test_an_interrupted_run_goes_on_in_its_folder_with_its_own_labels_alone(tmp_path, monkeypatch):
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(session, "write_release", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        pipeline.run(plan(tmp_path, "one"))
    with pytest.raises(ValueError, match="holds a release already"):
        pipeline.run(plan(tmp_path, "one", mechanism=GNMax(sigma=9.0)))
    charged = entries(tmp_path)
    pipeline.run(plan(tmp_path, "one"))
    assert entries(tmp_path) == charged


def _train(home, monkeypatch):
    pipeline.run(plan(home, "one"))


def _labels(home, monkeypatch):
    pipeline.run(plan(home, "one", labels=released(plan(home, "first"))))


def _label(home, monkeypatch):
    np.save(home / "votes.npy", np.array([[20, 0, 0]] * 5))
    monkeypatch.setenv("PATE_HOME", str(home))
    monkeypatch.setenv("PATE_RUN_ID", "one")
    given = [*LABEL_OPTIONS[1:], "num_classes=3", "dataset.name=blobs", "privacy.delta=1e-4"]
    with hydra_config.open_configuration():
        pipeline.run(label.build_config(hydra_compose("label", overrides=[f"votes={home / 'votes.npy'}", *given])))


def _api(home, monkeypatch):
    monkeypatch.setattr("pate_torch.api.pate.make_unique_run_id", lambda: "one")
    one = PATE("blobs", classes=3, teacher=ReverseKnn(mechanism=HISTOGRAM), delta=1e-4, home=home)
    one.fit_teachers(*points(40, 0)).label(points(30, 1)[0], num_queries=5)


def plan_dpsgd(home):
    method = partial(DPSGD, network="logistic", steps=2, batch_size=60)
    return plan(home, "one", dataset=benchmark_clouds(name="blobs"), method=method)


def _dpsgd(home, monkeypatch):
    pipeline.run(plan_dpsgd(home))


def _labeler(home, monkeypatch):
    one = PATE("blobs", classes=3, num_teachers=8, mechanism=GNMax(sigma=6.0), delta=1e-4, home=home,
               teacher=TeacherRecipe(network="logistic", steps=2))  # fmt: skip
    with one.fit_teachers(*points(40, 0)).labeler(5) as labeler:
        labeler.answer(points(1, 1)[0])


COMMANDS = {"train": _train, "labels": _labels, "label": _label, "api": _api, "dpsgd": _dpsgd, "labeler": _labeler}


def reserved(home) -> int:
    return ledger_entries(home).count("reserve")


@pytest.mark.parametrize("lock", ["held", "missing"])
@pytest.mark.parametrize("route", COMMANDS)
def test_no_route_charges_without_a_lock_of_its_folder(tmp_path, monkeypatch, nothing_runs, charged_twice, route, lock):
    """``held``: another run writes there. ``missing``: the disk knows no locks."""
    if route != "dpsgd":  # the account of a run before has no delta in reserve
        shutil.copytree(charged_twice[0], tmp_path, dirs_exist_ok=True)
    charged = reserved(tmp_path)
    nothing_runs()
    place, words = contextlib.nullcontext(), r"files cannot be locked \(No locks available\).*local disk"
    if lock == "missing":
        no_locks = OSError(errno.ENOLCK, "No locks available")
        monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(no_locks))
    elif route == "labeler":
        pytest.skip("writes a journal, and into no folder of a run")
    else:
        words = r"paths\.run=.*is being written by process"
        place = run_folders.hold_run_folder(
            tmp_path / "runs" / "blobs" / ("histogram" if route == "api" else "gaussian") / "one"
        )
    with place, pytest.raises(ValueError, match=words):
        COMMANDS[route](tmp_path, monkeypatch)
    assert reserved(tmp_path) == charged


def test_a_model_that_was_paid_for_is_not_written_over(tmp_path):
    """DP-SGD, killed between the model and what it claims."""
    pipeline.run(run := plan_dpsgd(tmp_path))
    for file in (run.folder / "release").glob("*.*"):
        if file.name != "student.safetensors":
            file.unlink()
    with pytest.raises(ValueError, match="holds a release already"):
        pipeline.run(run)
    assert reserved(tmp_path) == 1


def test_answers_of_a_killed_run_do_not_lie_under_another_claim(tmp_path):
    """Killed before its release.json, reverse k-NN left the cells of its answers where teachers answer next."""
    one = plan(tmp_path, "one")
    (one.folder / "release").mkdir(parents=True)
    left = ("cells.csv", "first_answers.json", ".release.json.0123456789ab")
    for name in ("labels.csv", *left):
        (one.folder / "release" / name).write_text("charged, and in no claim")
    pipeline.run(one)
    names = {path.name for path in (one.folder / "release").iterdir()}
    assert "labels.csv" in names and not names & {*left}


# ---- what was released, and what the ledger knows of it ------------------------------------------------------------


@pytest.mark.parametrize("edit", ["labels", "cells", "cells taken out"])
def test_answers_edited_with_their_record_are_refused(tmp_path, edit):
    changes = {} if edit == "labels" else REVERSE_KNN
    pipeline.run(one := plan(tmp_path, "one", **changes))
    folder = one.folder / "release"
    record = json.loads((folder / "release.json").read_text())
    name = edit.split()[0]
    file, rows = folder / f"{name}.csv", (folder / f"{name}.csv").read_text().splitlines()
    if edit == "labels":
        query, told, _ = rows[1].split(",")
        rows[1] = f"{query},{(int(told) + 1) % 3},{(int(told) + 1) % 3}"
    else:
        point, cell = rows[1].split(",")
        other = next(row.split(",")[1] for row in rows[2:] if row.split(",")[1] != cell)
        rows[1] = f"{point},{other}"
    file.write_text("\n".join(rows) + "\n")
    record[f"{name}_sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    if edit == "cells taken out":
        del record["cells_sha256"]
    (folder / "release.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="its content differs from the ledger's entry"):
        pipeline.run(plan(tmp_path, "two", labels=record["release_id"], **changes))


def test_a_person_taken_out_leaves_what_was_charged(tmp_path):
    """Teachers go, and nobody's budget with them; labels of before stay usable."""
    pipeline.run(first := plan(tmp_path, "first"))
    (teachers,) = (path for path in (tmp_path / "teachers").iterdir() if ID_PATTERN.fullmatch(path.name))
    shutil.rmtree(teachers)
    base = blobs()
    without = dataclasses.replace(base, x=base.x[1:], y=base.y[1:])
    after = pipeline.run(plan(tmp_path, "after", dataset=without))
    assert released(first) in {part.release_id for part in after.claim.other_releases}
    assert after.claim.epsilon_charged > after.claim.epsilon and not teachers.exists()
    again = pipeline.run(plan(tmp_path, "again", dataset=without, labels=released(first)))
    assert again.record.reuses_labels and not again.record.teachers_reusable
    assert again.claim.epsilon_charged == after.claim.epsilon_charged
