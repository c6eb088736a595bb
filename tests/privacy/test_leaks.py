"""Nothing private leaves by a file of the release, a log, a message or a mode, nor in the ways of earlier systems."""

import base64
import csv
import dataclasses
import itertools
import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as numpy_file
from safetensors.torch import load_file

from pate_torch import pipeline
from pate_torch.accounting import gdp
from pate_torch.features import augmentation
from pate_torch.features.augmentation import Affine
from pate_torch.features.neighbors import NeighborSearch, compute_coordinates
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.laplace import LNMax
from pate_torch.methods import teacher_votes
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import Shards
from pate_torch.queries.clusters import Prototypes
from pate_torch.students.base import Student
from pate_torch.students.semi_supervised import LabelSpreading
from pate_torch.students.training import Supervised
from tests import ROOT, killed_runs
from tests.command_runs import train
from tests.killed_runs import plan, reservations
from tests.run_configs import changed
from tests.spies import spy
from tests.tensor_data import Tensors

TEXTS = ["unit-qzxvkw-7f3a9c", "group-wjxqzk-51", "label-vqjxkz", "category-kzqwvj"]
NUMBERS = [7331.15625, -9173.828125]


def spellings(marker: str | float) -> dict[str, bytes]:
    """Every way in which a marker could stand in a file."""
    if isinstance(marker, float):
        text = repr(marker)
        raw = {
            **{f"{form} bytes": struct.pack(form, marker) for form in ("<f", "<d", ">f", ">d")},
            "text": text.encode(),
            "hex text": float(marker).hex().encode(),
        }
    else:
        raw = {"text": marker.encode(), "utf-16": marker.encode("utf-16-le"), "hex": marker.encode().hex().encode()}
        raw["upper"] = marker.upper().encode()
    plain = raw["text"]
    for shift in range(3):  # base64 of a longer text holds the marker at one of three alignments
        coded = base64.b64encode(b"\0" * shift + plain)
        raw[f"base64+{shift}"] = coded[math.ceil(shift * 8 / 6) : len(coded) - 4]
    return raw


def leaks(content: bytes, markers) -> list[str]:
    """Which markers a file holds, and how it spells them."""
    return [
        f"{marker} as {how}" for marker in markers for how, spelling in spellings(marker).items() if spelling in content
    ]


def private_bytes(home: Path) -> dict[str, bytes]:
    """The bytes of what the store keeps private: weights, votes, the key, the fingerprint, the owner's figures."""
    found = {}
    for file in home.glob("teachers/accounts/*.safetensors"):
        for name, values in numpy_file(file).items():
            found[f"{name} of an account"] = values.tobytes()
    for file in home.glob("teachers/*/group_*.safetensors"):
        for name, tensor in load_file(file).items():
            for teacher, row in enumerate(tensor if name != "__trained__" else ()):
                if row.abs().sum() > 0:
                    found[f"{name} of teacher {teacher}"] = row.contiguous().numpy().tobytes()
    for file in home.glob("teachers/*/votes/*.safetensors"):
        counts_QC = load_file(file)["counts_QC"]
        for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
            found[f"votes as {dtype}"] = counts_QC.to(dtype)[:4].numpy().tobytes()
        rows = counts_QC[:4].tolist()
        found["votes as JSON"] = json.dumps(rows)[1:-1].encode()
        found["votes as CSV"] = "\n".join(",".join(map(str, row)) for row in rows).encode()
    for manifest in home.glob("teachers/[0-9a-f]*/manifest.json"):
        found["fingerprint"] = json.loads(manifest.read_text())["fingerprint"].encode()
        found["fingerprint, raw"] = bytes.fromhex(found["fingerprint"].decode())
    key = (home / "teachers" / ".fingerprint_key").read_bytes()
    found |= {"key": key, "key as hex": key.hex().encode(), "key as base64": base64.b64encode(key)}
    for file in home.glob("runs/*/*/*/private/summary.json"):
        for name, value in json.loads(file.read_text()).items():
            if name.startswith("epsilon") or name == "teacher_accuracy_mean":
                for how, spelling in spellings(float(value)).items():
                    found[f"{name} as {how}"] = spelling
                found[f"{name} in short"] = f"{value:.6f}"[:7].encode()
            for model in ("student", "nonprivate") if name == "membership" else ():
                for end in value[model]["auc_interval"]:
                    for how, spelling in spellings(end).items():
                        found[f"what an attack found in the {model} as {how}"] = spelling
    return found


def table(rows) -> str:
    return "height,width,town,label,person\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


def write_tables(folder: Path) -> None:
    """A private table with markers in single records, and public and test tables without any."""
    draw = np.random.default_rng(0)
    center = {"x": (0, 3), "y": (3, -2), "z": (-3, -2)}

    def rows(count, first):
        for i in range(first, first + count):
            label = "xyz"[i % 3]
            a, b = np.array(center[label]) + draw.normal(size=2)
            yield [f"{a:.4f}", f"{b:.4f}", "abc"[i % 3], label, f"person{i}"]

    private = list(rows(160, 0))
    private[0][4] = TEXTS[0]
    private[1][4] = private[2][4] = TEXTS[1]
    private[3][3] = TEXTS[2]  # a class that nobody declared: the record is dropped
    private[4][2] = TEXTS[3]
    private[5][0], private[6][1] = map(repr, NUMBERS)
    (folder / "private.csv").write_text(table(private))
    (folder / "public.csv").write_text(table(rows(40, 1000)))
    (folder / "test.csv").write_text(table(rows(61, 2000)))


OPTIONS = [
    *("dataset=csv", "dataset.name=people", "dataset.group=person", "dataset.classes=[x,y,z]", "num_teachers=7"),
    *("num_queries=13", "query=random", "mechanism.sigma=3", "teacher.steps=20", "executor.workers=1"),
    *("student=supervised", "student.network=logistic", "student.steps=20", "guide_student.network=logistic"),
    *("privacy.opening_budget=80", "privacy.delta=1e-3"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(home, what the command printed) of a real run on the marked tables."""
    folder = tmp_path_factory.mktemp("marked")
    write_tables(folder)
    home = folder / "home"
    paths = [f"dataset.{key}={folder / name}.csv" for key, name in
             (("path", "private"), ("public_path", "public"), ("test_path", "test"))]  # fmt: skip
    environment = {**os.environ, "PATE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *OPTIONS, *paths]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return home, done.stdout + done.stderr


def public_files(home: Path) -> list[Path]:
    """All files of runs that are not on the private side, the log and the configuration among them."""
    files = [file for file in (home / "runs").rglob("*") if file.is_file() and "private" not in file.parts]
    names = {file.name for file in files}
    assert {"labels.csv", "release.json", "summary.json", "privacy.json", "report.html", "README.md"} <= names
    assert {"student.safetensors", "train.log", "config.yaml", "overrides.yaml", "hydra.yaml"} <= names
    assert not any("tfevents" in file.name for file in files)
    return files


def test_the_markers_are_in_the_private_files(told):
    """The run did read the marked records; otherwise nothing would be shown by not finding them."""
    home, _ = told
    (ensemble,) = home.glob("teachers/*/group_000000.safetensors")
    weights = load_file(ensemble)
    assert weights["1.weight"].abs().sum(dim=(1, 2)).gt(0).all()
    assert len(private_bytes(home)) > 20


def test_no_marker_and_nothing_that_the_store_keeps_is_in_any_public_file_or_message(told):
    home, printed = told
    secrets = private_bytes(home)
    for file in public_files(home):
        content = file.read_bytes()
        assert leaks(content, TEXTS + NUMBERS) == [], file
        assert [name for name, value in secrets.items() if value in content] == [], file
    assert leaks(printed, TEXTS + NUMBERS) == []
    figures = [name for name, value in secrets.items() if name.startswith("epsilon") and value in printed]
    assert figures == []  # a data-dependent epsilon is not a cost, not even on the owner's own screen


def test_private_files_are_closed_to_others(told):
    home, _ = told
    private = [home, home / "teachers", *home.rglob("private"), *(home / "teachers").rglob("*"), home / "ledger.sqlite"]
    private += [file for folder in home.rglob("private") for file in folder.rglob("*")]
    for path in private:
        mode = path.stat().st_mode & 0o777
        if path.is_dir():
            assert mode == 0o700, path
        elif not path.name.startswith("README"):
            assert mode & 0o077 == 0, path
    assert all((folder / "README").exists() for folder in home.rglob("private"))


def test_the_search_finds_what_is_planted(told, tmp_path):
    for marker in TEXTS + NUMBERS:
        for spelling in spellings(marker).values():
            assert leaks(b"before" + spelling + b"after", TEXTS + NUMBERS)
    text = base64.b64encode(b"some longer text with " + TEXTS[0].encode() + b" in it")
    assert leaks(text, TEXTS)
    secrets = private_bytes(told[0])
    assert all(value in b"x" + value + b"y" for value in secrets.values()) and min(map(len, secrets.values())) >= 4


BAD_RECORDS = {
    "a number that is none": (0, "csv", "height,width,label,person\n{text},1,x,u\n"),
    "a row too long": (2, "csv", "height,width,label,person\n1,2,x,{text},{text}\n"),
    "not LIBSVM": (2, "libsvm", "+1 1:{text}\n"),
    "a label of words": (2, "libsvm", "{text} 1:1\n"),
}
"""Name of a case -> exit code, kind of data set, and content. A record that cannot be used stops no run."""


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_message_about_a_bad_record_does_not_repeat_it(tmp_path, monkeypatch, name):
    code, dataset, content = BAD_RECORDS[name]
    (tmp_path / "bad").write_text(content.replace("{text}", TEXTS[0]) * 9)
    options = [f"dataset={dataset}", f"dataset.path={tmp_path}/bad", "num_teachers=3", "query=random"]
    if dataset == "csv":
        (tmp_path / "good.csv").write_text("height,width,label,person\n" + "1,2,x,p\n2,1,y,q\n" * 9)
        options += [f"dataset.{part}_path={tmp_path}/good.csv" for part in ("public", "test")]
    outcome = train(tmp_path / "home", *options, monkeypatch=monkeypatch, base=[])
    assert outcome.code == code
    assert leaks((outcome.out + outcome.err).encode(), TEXTS) == []


def weights(home: Path) -> dict[str, torch.Tensor]:
    return load_file(next(home.glob("teachers/[0-9a-f]*/group_000000.safetensors")))


NEIGHBORS = [(AddRemove(), "removed"), (AddRemove(capacity=20), "removed"), (ReplaceOne(), "swapped")]


@pytest.mark.parametrize("partition,neighbor", NEIGHBORS, ids=str)
def test_one_record_reaches_one_teacher_through_the_whole_pipeline(tmp_path, partition, neighbor):
    """Statistics of the private set, a shared batch order or a shard's size would move the others' weights."""
    here = killed_runs.blobs()
    x, y, keep = here.x.clone(), here.y.clone(), torch.arange(len(here.y)) != 7
    x[7], y[7] = torch.tensor([40.0, 40.0]), (y[7] + 1) % 3
    there = dataclasses.replace(here, x=x, y=y)
    if neighbor == "removed":
        there = dataclasses.replace(here, x=x[keep], y=y[keep])
    for name, data in (("a", here), ("b", there)):
        pipeline.run(plan(tmp_path / name, "only", dataset=data, partition=partition))
    left, right = weights(tmp_path / "a"), weights(tmp_path / "b")
    moved_K = torch.stack([(left[name] != right[name]).flatten(1).any(1) for name in left if name[0] != "_"]).any(0)
    assert int(moved_K.sum()) == 1


# ---- how the others broke their own guarantee ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlapping(AddRemove):
    """A partition gone wrong: the first record of the first teacher reaches the second one, too."""

    def make_shards(self, private, num_teachers, seed):
        good = super().make_shards(private, num_teachers, seed)
        index, mask = good.index_KS.clone(), good.mask_KS.clone()
        index[1, 0], mask[1, 0] = index[0, 0], True
        return Shards(index, mask, good.adjacency, good.unit)


def test_overlapping_shards_stop_the_run(tmp_path):
    with pytest.raises(ValueError, match="overlap"):
        pipeline.run(plan(tmp_path, "only", partition=Overlapping()))
    assert not list(tmp_path.rglob("labels.csv"))


def test_shards_are_drawn_once_and_every_teacher_keeps_its_own(tmp_path, monkeypatch):
    """Redrawn shards would let one record reach many teachers over time: each run, each round, the same shards."""
    seen = spy(monkeypatch, teacher_votes, "train", lambda private, spec, shards, *_, **__: shards)
    pipeline.run(plan(tmp_path, "a"))
    pipeline.run(plan(tmp_path, "b", mechanism=GNMax(sigma=3.0)))  # the same teachers: not trained again
    pipeline.run(plan(tmp_path, "c", teacher=dataclasses.replace(plan(tmp_path, "c").method.teacher, steps=6)))
    assert len(seen) == 2
    assert torch.equal(seen[0].index_KS, seen[1].index_KS)
    used = seen[0].index_KS[seen[0].mask_KS]
    assert len(torch.unique(used)) == len(used)


def test_the_search_of_a_run_knows_what_it_finds_among_the_public_points_alone(tmp_path, monkeypatch):
    """Queries and students share it, so it must hold nothing but a function of the public points."""
    tasks = spy(monkeypatch, LabelSpreading, "fit", lambda self, task, **_: task)
    pipeline.run(plan(tmp_path, "only", query=Prototypes(), student=LabelSpreading()))
    search, pool = tasks[0].search, killed_runs.blobs().load()
    fresh = NeighborSearch()
    fresh.find(compute_coordinates(pool.pool.x, pool.spec), 10)
    assert search is not fresh and search.recalls == fresh.recalls == []
    assert search._last[0] == fresh._last[0]
    assert all(torch.equal(*pair) for pair in zip(search._last[1], fresh._last[1], strict=True))


def test_the_student_is_given_public_points_and_released_labels_only(tmp_path, monkeypatch):
    tasks = spy(monkeypatch, Supervised, "fit", lambda self, task, **_: task)
    pipeline.run(plan(tmp_path, "only"))
    (task,) = tasks
    data = killed_runs.blobs().load()
    assert {field.name for field in dataclasses.fields(task)} == {
        *("spec", "pool_x", "query_Q", "label_Q", "posterior_QC", "soft", "round_Q", "guide", "model"),
        *("noisy_counts", "frequency_C", "search"),
    }
    assert {name for name in vars(task.search) if not name.startswith("_")} == {"recalls"}
    assert task.search.recalls == [] and task.search._last == (None, [])  # nothing was searched in this run
    assert task.noisy_counts is task.frequency_C is None  # nothing but labels was released
    assert not task.round_Q.any() and len(task.round_Q) == len(task.query_Q) and not task.soft
    assert task.posterior_QC is None  # of noisy counts that were released, else of nothing
    assert torch.equal(task.pool_x, data.pool.x)
    rows = {tuple(row) for row in task.pool_x.tolist()}
    assert not rows & {tuple(row) for row in data.private.x.tolist()}
    labels = (tmp_path / "runs/blobs/gaussian/only/release/labels.csv").read_text().splitlines()
    released = {int(row["query"]): int(row["label"]) for row in csv.DictReader(labels)}
    assert dict(zip(task.query_Q.tolist(), task.label_Q.tolist(), strict=True)) == released


CONFIDENT = ConfidentGNMax(sigma=2.0, screen_sigma=3.0, threshold=3.0)
RELEASES = [
    (GNMax(sigma=2.0, noise="discrete"), 3),
    (LNMax(sigma=4.0), 1),
    (CONFIDENT, 1),
    (dataclasses.replace(CONFIDENT, max_answers=2), 3),
]


@pytest.mark.parametrize("mechanism,rounds", RELEASES, ids=str)
def test_no_branch_answers_uncharged(tmp_path, monkeypatch, mechanism, rounds):
    """Every draw comes after the charge, and what is released is what the charge covers."""
    names = ("draw_gaussian", "draw_laplace", "draw_gumbel", "draw_uniform")
    draws = [spy(monkeypatch, NoiseSource, name, lambda *_, **__: reservations(tmp_path)) for name in names]
    strategy = dataclasses.replace(plan(tmp_path, "x").method.query, rounds=rounds)
    try:
        pipeline.run(plan(tmp_path, "only", mechanism=mechanism, query=strategy))
    except ValueError as error:
        assert "none of the" in str(error)  # noise may pass every query over; it is charged all the same
    assert any(draws) and min(itertools.chain(*draws)) == 1
    (record,) = (json.loads(file.read_text()) for file in tmp_path.rglob("release.json"))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        charged = [entry for entry in ledger.read_entries("blobs") if entry.kind == "commit"]
        assert [entry.facts["release"] for entry in charged] == [record["release_id"]]
        assert charged[0].facts["events"] == record["incurred"]
    labels = next(iter(tmp_path.rglob("labels.csv"))).read_text().splitlines()
    answered = sum(int(row["label"]) >= 0 for row in csv.DictReader(labels))
    cost = {**record["incurred"][-1], "count": 0}  # of one answer; each round has events of its own
    paid = sum(event["count"] for event in record["incurred"] if {**event, "count": 0} == cost)
    assert answered <= paid and len(labels) - 1 <= 5


def test_the_delta_of_the_user_is_the_delta_of_the_guarantee_and_the_winning_label_alone_is_released(tmp_path):
    """No noisy counts, no scores, no margins: only the argmax is charged."""
    delta = 3e-6
    pipeline.run(plan(tmp_path, "only", delta=delta))
    summary = json.loads(next(iter(tmp_path.rglob("release/summary.json"))).read_text())
    assert summary["delta"] == delta
    assert summary["epsilon"] == pytest.approx(gdp.compute_epsilon(math.sqrt(2 * 5) / 2.0, delta), abs=1e-9)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.get_account("blobs").delta == delta
    folder = tmp_path / "runs/blobs/gaussian/only/release"
    rows = list(csv.reader((folder / "labels.csv").read_text().splitlines()))
    assert rows[0] == ["query", "label", "class"]
    assert all(re.fullmatch(r"\d+", query) and re.fullmatch(r"-1|\d+", label) for query, label, _ in rows[1:])
    suffixes = (".safetensors", ".npy", ".npz", ".pt", ".pkl")
    assert [file.name for file in folder.rglob("*") if file.suffix in suffixes] == ["student.safetensors"]
    assert set(load_file(folder / "student.safetensors")) == {"1.weight", "1.bias"}


def test_noise_and_ids_know_no_seed_and_no_records(tmp_path, monkeypatch):
    """Not the run's, not the published one of the global generators, set anew before each run on the same records."""
    drawn, ids = spy(monkeypatch, NoiseSource, "draw_gaussian"), set()
    for name in ("a", "b"):
        torch.manual_seed(1337)
        np.random.seed(1337)
        pipeline.run(one := plan(tmp_path / name, "only"))
        record = json.loads((one.folder / "release" / "release.json").read_text())
        ids |= {record["release_id"], record["teachers_id"]}
    assert len(ids) == 4 and drawn[0].shape == drawn[1].shape and not (drawn[0] == drawn[1]).any()
    weights_a, weights_b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)  # what is seeded is the same


def images() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (90, 1, 6, 6), generator=draw, dtype=torch.uint8)
    y = (x.float().mean((1, 2, 3)) > 127).long()
    return Tensors(name="images", class_names=2, x=x[:50], y=y[:50], pool_x=x[50:70], test_x=x[70:], test_y=y[70:])


def test_teachers_see_the_questions_as_they_are(tmp_path, monkeypatch):
    """A vote on a randomly distorted point is another query; here distortion ends with training."""
    recipe = dataclasses.replace(plan(tmp_path, "x").method.teacher, augment=Affine(rotate=20.0, shift=1.0))
    one = plan(tmp_path, "only", dataset=images(), teacher=recipe)
    pipeline.run(one)
    (file,) = tmp_path.glob("teachers/[0-9a-f]*/votes/*.safetensors")
    first = load_file(file)["counts_QC"]
    file.unlink()
    drawn = []
    monkeypatch.setattr(augmentation.Affine, "draw", lambda *a, **k: drawn.append(1))
    monkeypatch.setattr(augmentation, "warp", lambda *a, **k: drawn.append(1))
    pipeline.run(changed(one, folder=one.folder.with_name("again"), mechanism=GNMax(sigma=3.0)))
    assert torch.equal(load_file(file)["counts_QC"], first)
    assert not drawn


def test_the_reported_accuracy_is_that_of_the_last_step_measured_once(tmp_path, monkeypatch):
    """Best-of-epochs test accuracy: here the test points are shown to the student once, after it is saved."""

    def note(self, x, *_, **__):
        return len(x), bool(list(tmp_path.rglob("student.safetensors")))

    asked = spy(monkeypatch, Student, "compute_probabilities", note)
    pipeline.run(plan(tmp_path, "only"))
    assert asked == [(30, True)]  # the pool has thirty points too, and nothing asked about it
    summary = json.loads(next(iter(tmp_path.rglob("release/summary.json"))).read_text())
    assert summary["student_accuracy"] is not None


# ---- figures on records split off a private file --------------------------------------------------------------------

ONE_FILE = [
    *("dataset=csv", "dataset.name=split", "num_teachers=7", "query=random", "mechanism.sigma=9", "teacher.steps=20"),
    *("recommended.queries=500", "executor.workers=1", "student=supervised", "student.network=logistic"),
    *("student.steps=20", "privacy.opening_budget=80", "baseline=false", "dataset.fractions=[0.6,0.2,0.2]"),
    *("dataset.publish_split=true", "dataset.missing=drop", "membership=none"),
]


@pytest.mark.parametrize("agreed", [False, True])
def test_figures_on_test_records_of_a_private_file_are_the_owners_until_agreed(agreed, tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    lines = [f"{a:.4f},{b:.4f},{'xy'[int(a > b)]}" for a, b in draw.normal(size=(300, 2))]
    (tmp_path / "t.csv").write_text("\n".join(["height,width,label", *lines, "7,,x", "8,9,"]) + "\n")
    options = (f"dataset.path={tmp_path}/t.csv", f"dataset.publish_test={str(agreed).lower()}")
    done = train(tmp_path / "home", *options, base=ONE_FILE, monkeypatch=monkeypatch)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "home" / "runs").glob("*/*/*")
    released, owner = (json.loads((run / side / "summary.json").read_text()) for side in ("release", "private"))
    assert owner["records"].keys() >= {"private", "public", "test", "left out with missing or infinite numbers"}
    assert sum(owner["records"].values()) == 302
    assert f"num_queries is {owner['records']['public']} instead of the recommended 500" in done.err
    assert released["queries_asked"] == owner["records"]["public"]
    page, card = ((run / "release" / name).read_text() for name in ("report.html", "README.md"))
    assert not list((run / "release").rglob("*tfevents*"))
    assert "because the owner agreed" in page and "because the owner agreed" in card
    assert ('id="classes"' in page) == agreed
    if agreed:
        assert owner["student_accuracy"] is None and 0 < released["student_accuracy"] <= 1
        return
    assert released["student_accuracy"] is None and 0 < owner["student_accuracy"] <= 1
    assert sum(map(sum, owner["confusion"])) == owner["student_size"] == owner["records"]["test"]
    shown, hidden = done.out.split("For the owner only")
    assert "| Student " not in shown and "Accuracy of student" in hidden and "Records" in hidden
