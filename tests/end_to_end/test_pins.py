"""What every experiment, command and class leaves for others to read, pinned at toy size.

One file per case lies in ``pins/``: the names of a run's files, its summary, record, privacy statement and labels, and
a few weights of the student. Identifiers, hashes, times and paths are taken out; accuracies and weights may differ a
little, since processors round differently; epsilons are compared to twelve digits, all the rest exactly.

The noise is fixed below the package, where the operating system gives its entropy, so that runs are PRIVATE by all
they say and their epsilons can be pinned; one case has ``insecure_noise_seed``. To accept an intended change::

    python -m pytest tests/end_to_end/test_pins.py --update-pins

and read the difference that git shows; the commit's message says why. A renamed option changes one line of ``SPELLED``.
"""

import csv
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier

from pate_torch import PATE, PrivateLabeler
from pate_torch.cli.main import main
from pate_torch.mechanisms.gaussian import GNMax
from tests import ROOT
from tests.command_runs import train

PINS = Path(__file__).parent / "pins"

SPELLED = {
    "digits": "dataset=digits dataset.private=240 dataset.public=60 dataset.test=200",
    "six queries to eight teachers": "num_teachers=8 num_queries=6 mechanism.sigma=2",
    "short": "recommended.features_steps=2 recommended.student_steps=2 teacher.steps=3",
    "linear teachers": "teacher=logistic",
    "small batches": "recommended.student_batch=8 recommended.unlabeled_batch=16",
    "quick guide": "guide_student.steps=3",
    "room": "privacy.opening_budget=500 privacy.allow_uninformative_labels=true baseline=false quiet=true",
    "seeded noise": "insecure_noise_seed=0",
    "integer noise": "noise=discrete",
    "inductive": "method=teachers",
    "transductive": "method=teachers_transductive",
    "two rounds": "query=margin query.rounds=2",
    "choice of a student": "mechanism.sigma=8 selection=exponential selection.epsilon=0.5"
    " selection.candidates.supervised.steps=3",
    "supervised": "student=supervised student.steps=3",
    "screened": "mechanism=confident mechanism.screen_sigma=2 mechanism.threshold=3",
    "rate": "teacher.steps=20 teacher.learning_rate={rate}",
    "a new student": "labels={release}",
    "the same teachers": "teachers={teachers} num_queries=4 seed=1",
    "labels only": "experiment=labels_only",
    "mnist_pate": "experiment=mnist_pate",
    "reverse k-NN": "experiment=mnist_reverse_knn",
    "gradients": "experiment=mnist_low_epsilon",
    "prototypes": "experiment=mnist_prototypes",
    "small clusters": "num_queries=12 mechanism.sigma=1 student.first_student.batch_size=8"
    " student.first_student.unlabeled_batch=16",
    "few steps": "mechanism.steps=2 mechanism.sigma=.2 method.ridge=10"
    " recommended.student_network=cnn recommended.student_options.width=4",
    "dpsgd": "experiment=dpsgd_baseline method.steps=5 method.network=logistic",
    "table": "--config-dir={conf} experiment=liu2021_table4 study.tables.mushroom.dataset.path={file}"
    " ~study.tables.a9a teacher.steps=5"
    " teacher.batch_size=8 study.repeats=2 study.shard=12 study.epsilons=[1.0,4.0] insecure_noise_seed=3 quiet=true",
    "votes": "votes={file} num_classes=3 dataset.name=hospitals mechanism.sigma=8 privacy.delta=1e-5 quiet=true",
}
"""What a case asks for, and how that is spelled today."""

SMALL = ("digits", "short", "small batches", "room")
TEACHERS = (*SMALL, "six queries to eight teachers", "quick guide")
CASES = {
    "default": TEACHERS,
    "default_seeded": (*TEACHERS, "seeded noise"),
    "integer_noise": (*TEACHERS, "linear teachers", "supervised", "integer noise"),
    "inductive": (*TEACHERS, "linear teachers", "supervised", "inductive"),
    "transductive": (*TEACHERS, "linear teachers", "supervised", "transductive"),
    "screened": (*TEACHERS, "linear teachers", "supervised", "screened"),
    "two_rounds": (*TEACHERS, "linear teachers", "supervised", "two rounds"),
    "selection": (*TEACHERS, "linear teachers", "choice of a student"),
    "mnist_pate": ("mnist_pate", *TEACHERS),
    "mnist_prototypes": ("prototypes", *TEACHERS),
    "labels_only": ("labels only", *TEACHERS),
    "mnist_reverse_knn": ("reverse k-NN", *SMALL, "small clusters"),
    "mnist_low_epsilon": ("gradients", *SMALL, "small clusters", "few steps"),
    "dpsgd_baseline": ("dpsgd", *SMALL),
}
"""A run of the training command each."""


CLOSE = {"weights": 1e-4, "student_accuracy": 0.0151, "accuracy": 0.02, "balanced": 0.02, "utility": 0.02}
"""How far from its pin a float may lie, by the name above it: a student may take three of 200 test points otherwise."""

ALONG_AXES = ("weight_DC", "3.weight", "score_RPC")
LOOSE = {
    "mnist_low_epsilon": CLOSE | {"weights": 0.03} | dict.fromkeys(ALONG_AXES, math.inf),
    "dpsgd_baseline": CLOSE | {"release/privacy.json": 1e-9, "release/summary.json": 1e-9},
}
"""Steps along noisy sums magnify how processors round. Of principal axes with nearly equal variances, rounding alone
says which are found, and the noise is drawn along them, so that only the shapes of such weights are pinned. The noise
of DP-SGD is calibrated, with the relative error of ``calibrate_sigma``."""


@pytest.fixture
def entropy(monkeypatch):
    """What the package asks of the operating system's entropy, in one known order. Identifiers come by ``secrets``."""
    draw, others = np.random.default_rng(0), os.urandom

    def known(size: int) -> bytes:
        asking = sys._getframe(1).f_globals["__name__"]
        return draw.bytes(size) if asking.startswith("pate_torch.") else others(size)

    monkeypatch.setattr(os, "urandom", known)


@pytest.fixture
def pinned(request):
    """Holds what a case left against its pin, or renews the pin."""

    def check(name: str, found: dict, close: Mapping[str, float] = CLOSE) -> None:
        file = PINS / f"{name}.json"
        if request.config.getoption("update_pins"):
            PINS.mkdir(exist_ok=True)
            lines = json.dumps(found, indent=1, ensure_ascii=False)
            file.write_text(re.sub(r"\[[^][{}]*\]", lambda row: re.sub(r"\n *", " ", row[0]), lines) + "\n")
        assert not list(differences(json.loads(file.read_text()), json.loads(json.dumps(found)), close))

    return check


# ---- what is read off a folder -------------------------------------------------------------------------------------


def left(home: Path, folder: Path) -> dict:
    """The names of a run's files, and what can be read in those of them that are released."""
    found: dict = {"files": sorted({plain(str(f.relative_to(folder)), home) for f in folder.rglob("*") if f.is_file()})}
    for file in sorted(f for f in folder.rglob("*") if f.is_file() and not {"private", ".hydra"} & set(f.parts)):
        name = plain(str(file.relative_to(folder)), home)
        if file.suffix == ".json":
            found[name] = normal(json.loads(file.read_text()), home)
            found[name].pop("answered_by", None)  # whole sentences, which privacy.json says again
            if "utility" in found[name]:  # a test point more or less is a few percent of a class
                found[name]["utility"]["classes"] = [row["class"] for row in found[name]["utility"]["classes"]]
        elif file.suffix == ".csv":
            head, *rows = csv.reader(file.read_text().splitlines())
            found[name] = {column: [number(row[i]) for row in rows] for i, column in enumerate(head)}
        elif file.suffix == ".safetensors":
            found[name] = {"weights": {key: some(fixed(key, value)) for key, value in sorted(load_file(file).items())}}
    return found


def fixed(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Instead of whitening axes, their product, which does not depend on which axes of equal variance were found."""
    return tensor @ tensor.T if key.endswith("axis_DE") else tensor


def plain(text: str, home: Path) -> str:
    """Without places, identifiers, hashes and times."""
    text = text.replace(str(home), "HOME")
    text = re.sub(r"(events\.out\.tfevents)\.\S+", r"\1", text)
    text = re.sub(r"\d{4}-\d\d-\d\d([_T][\d:.-]+)?", "TIME", text)
    return re.sub(r"\b[0-9a-f]{16,}\b", "HEX", text)


def normal(value: object, home: Path) -> object:
    if isinstance(value, dict):
        return {k: dict.fromkeys(v, "TIME") if k == "seconds" else normal(v, home) for k, v in value.items()}
    if isinstance(value, list):
        return [normal(part, home) for part in value]
    return plain(value, home) if isinstance(value, str) else value


def number(cell: str) -> object:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def some(tensor: torch.Tensor) -> list:
    """Its shape, and four of its elements from the first to the last."""
    flat = tensor.double().flatten()
    place = torch.linspace(0, len(flat) - 1, min(4, len(flat))).long()
    return [list(tensor.shape), [float(f"{value:.6g}") for value in flat[place].tolist()]]


def differences(pin: object, found: object, close: Mapping[str, float] = CLOSE, at: tuple[str, ...] = ()):
    """Where two differ, as ``path: pinned, found``."""
    where = "/".join(at)
    if isinstance(pin, dict) and isinstance(found, dict):
        for key in sorted(pin.keys() | found.keys()):
            if key not in pin or key not in found:
                yield f"{where}/{key}: {'gone' if key in pin else 'new'}"
            else:
                yield from differences(pin[key], found[key], close, (*at, key))
    elif isinstance(pin, list) and isinstance(found, list) and len(pin) == len(found):
        for place, pair in enumerate(zip(pin, found, strict=True)):
            yield from differences(*pair, close, (*at, str(place)))
    elif isinstance(pin, float) and isinstance(found, float):
        tolerance = max(close.get(key, 1e-12) for key in at)
        if not math.isclose(pin, found, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{where}: {pin!r}, {found!r}"
    elif pin != found or type(pin) is not type(found):
        yield f"{where}: {pin!r}, {found!r}"


# ---- the cases -----------------------------------------------------------------------------------------------------


def run(home: Path, said: tuple[str, ...], monkeypatch, **given: object) -> Path:
    """The folder of one run of the training command."""
    before = set(home.glob("runs/**/.hydra"))
    words = [word.format(**given) for what in said for word in SPELLED[what].split()]
    done = train(home, *words, monkeypatch=monkeypatch, base=[])
    assert done.code == 0, done.err
    (made,) = set(home.glob("runs/**/.hydra")) - before
    return made.parent


SLOW = {"dpsgd_baseline", "labels_only", "mnist_low_epsilon", "mnist_pate", "mnist_prototypes", "mnist_reverse_knn",
        "selection", "transductive", "integer_noise"}  # fmt: skip
MARK = pytest.mark.slow(reason="one of many runs with a pin of its own")


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARK if case in SLOW else ()) for case in CASES])
def test_a_run_leaves_what_is_pinned(case, tmp_path, monkeypatch, entropy, pinned):
    pinned(case, left(tmp_path, run(tmp_path, CASES[case], monkeypatch)), LOOSE.get(case, CLOSE))


def behind(home: Path, folder: Path) -> dict:
    """PRIVATE. Votes and teachers of a run, and its weights to the last bit."""
    (teachers,) = home.glob("teachers/*/group_000000.safetensors")
    return {
        "votes": load_file(folder / "private/votes.safetensors")["counts_QC"].tolist(),
        "weights": {key: some(value) for key, value in sorted(load_file(teachers).items())},
        "digests": [file.read_bytes() for file in (teachers, folder / "release/student.safetensors")],
    }


def test_teachers_and_their_votes_are_pinned_and_the_same_to_the_last_bit(tmp_path, monkeypatch, pinned):
    """Steps longer by 2 % would be noticed: they move weights by more than processors differ in."""
    said = (*TEACHERS, "supervised", "seeded noise")
    homes = [tmp_path / name for name in ("one", "two", "longer")]
    steps = [{}, {}, {"rate": 2.04e-3}]
    one, two, longer = (
        behind(home, run(home, (*said, "rate"), monkeypatch, **{"rate": 2e-3, **given}))
        for home, given in zip(homes, steps, strict=True)
    )
    assert one == two and one["digests"] != longer["digests"]
    found, changed = ({key: part[key] for key in ("votes", "weights")} for part in (one, longer))
    assert any("weights" in text for text in differences(found, changed))
    pinned("teachers", found)


def test_a_change_would_be_noticed():
    pin = {"epsilon": 1.2345678901, "queries": 6, "weights": [0.5], "student_accuracy": 0.9, "files": ["a", "b"]}
    assert not list(differences(pin, pin | {"weights": [0.50001], "student_accuracy": 0.905}))
    for key, other in (
        *(("epsilon", 1.2345678902), ("epsilon", None), ("queries", 7), ("queries", 6.0), ("weights", [0.501])),
        *(("weights", []), ("student_accuracy", 0.8), ("files", ["a"]), ("files", ["a", "c"]), ("more", 1)),
    ):
        assert list(differences(pin, pin | {key: other})), key
    assert list(differences(pin, {key: value for key, value in pin.items() if key != "queries"}))


@pytest.mark.slow(reason="three runs; using labels and teachers again is tested in test_fixed_names")
def test_labels_and_teachers_used_again_leave_what_is_pinned(tmp_path, monkeypatch, entropy, pinned):
    """Labels cost nothing a second time; other queries to the same teachers are charged to the same account."""
    said = (*TEACHERS, "linear teachers", "supervised")
    first = run(tmp_path, said, monkeypatch)
    ids = json.loads((first / "release" / "summary.json").read_text())
    given = {"release": ids["release_id"], "teachers": ids["teachers_id"]}
    student = run(tmp_path, (*SMALL, "quick guide", "a new student"), monkeypatch, **given)
    questions = run(tmp_path, (*said, "the same teachers"), monkeypatch, **given)
    pinned("labels_again", left(tmp_path, student))
    pinned("teachers_again", left(tmp_path, questions))


def test_table_4_leaves_what_is_pinned(tmp_path, monkeypatch, entropy, pinned):
    draw = np.random.default_rng(0)
    y = draw.random(600) < 1 / 3
    file = tmp_path / "signs.svm"
    file.write_text("".join(f"{int(c)} 1:{2 * c - 0.5 - draw.random():.3f} 2:{draw.normal():.3f}\n" for c in y))
    given = {"file": file, "conf": ROOT / "benchmarks" / "conf"}
    pinned("liu2021_table4", left(tmp_path, run(tmp_path, ("table",), monkeypatch, **given)))


def test_a_file_of_votes_leaves_what_is_pinned(tmp_path, monkeypatch, entropy, pinned):
    draw = np.random.default_rng(0)
    np.save(tmp_path / "votes.npy", np.where(draw.random((50, 20)) < 0.1, 0, np.arange(20) % 3))
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    words = ["label", *SPELLED["votes"].format(file=tmp_path / "votes.npy").split()]
    assert main(words) == 0
    (release,) = tmp_path.glob("runs/**/release")
    pinned("label", left(tmp_path, release.parent))


def clouds(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded, so that every processor finds the same bits: units are known by a hash of them."""
    draw = np.random.default_rng(seed)
    y = draw.integers(3, size=count)
    x = (3 * np.eye(3)[y] + draw.normal(size=(count, 3))).round(2)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@pytest.fixture
def pate(tmp_path):
    """Ten nearest-neighbor teachers of three clouds, which take no step that a processor could round."""
    terms = {"mechanism": GNMax(sigma=2.0), "delta": 1e-4, "budget_epsilon": 50.0, "home": tmp_path}
    pate = PATE("clouds", classes=["a", "b", "c"], num_teachers=10, teacher=KNeighborsClassifier(1), **terms)
    return pate.fit_teachers(*clouds(100, 0))


def test_the_estimator_leaves_what_is_pinned(tmp_path, entropy, pinned, pate):
    pool, pool_y = clouds(30, 1)
    pate.label(pool, num_queries=8)
    pate.fit_student("supervised", steps=3)
    report = pate.report(*clouds(200, 2), pool_y=pool_y)
    assert report.claim.epsilon == pate.epsilon
    pinned("estimator", left(tmp_path, pate.folder.parent))


def test_the_labeler_leaves_what_is_pinned(tmp_path, entropy, pinned, pate):
    with pate.labeler(8) as labeler:
        assert isinstance(labeler, PrivateLabeler)
        labels = [labeler.answer(x).tolist() for x in clouds(5, 1)[0].split(2)]
        charged = labeler.epsilon
    account = pate.account
    found = {"labels": labels, "charged": charged, "settled": account.ex_post_guarantee.epsilon}
    (journal,) = tmp_path.glob("answers/*")
    lines = [normal(json.loads(line), tmp_path) for line in journal.read_text().splitlines()]
    pinned("labeler", found | {"journal": lines})
