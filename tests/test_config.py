"""Choices that cannot work: one line that names the key, the value and what is allowed; nothing written or charged."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.cli import hydra_config
from pate_torch.core import checks, run_folders
from pate_torch.data.tensors import Tensors
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.privacy.unit_ids import make_position_ids
from pate_torch.release import store as release_store
from tests import ROOT
from tests.command_runs import TINY, ledger_entries, train, written
from tests.mechanisms.mechanism_forms import FORMS, build
from tests.run_configs import changed
from tests.tiny_runs import tiny

# Overrides, then words that the one line must have: the key, the value, what is allowed or what to do.
TOP = [
    ("seed=-1", "seed=-1", "integer in [0"),
    ("seed=1.5", "seed=1.5", "integer"),
    ("seed=abc", "seed='abc'", "integer"),
    ("seed=null", "seed=None", "integer"),
    ("num_teachers=0", "num_teachers=0", "[1,"),
    ("num_teachers=1.5", "num_teachers=1.5", "integer"),
    ("num_teachers=true", "num_teachers=True", "integer"),
    ("num_teachers=121", "num_teachers=121", "[1, 120]", "120 private records"),
    ("num_teachers=121 partition=replace_one", "num_teachers=121", "[1, 120]"),
    ("num_queries=0", "num_queries=0", "[1,"),
    ("num_queries=41", "num_queries=41", "[1, 40]", "40 public points"),
    ("num_queries=many", "num_queries='many'", "integer"),
    ("teachers=xyz", "teachers='xyz'", "16 hexadecimal"),
    ("teachers=../../etc", "teachers='../../etc'", "16 hexadecimal"),
    ("teachers=/etc/passwd", "teachers='/etc/passwd'", "16 hexadecimal"),
    ("teachers=0123456789abcdef", "teachers='0123456789abcdef'", "no such ensemble"),
    ("labels=../x", "labels='../x'", "16 hexadecimal"),
    ("labels=/etc/passwd", "labels='/etc/passwd'", "16 hexadecimal"),
    ("labels=0123456789abcdef", "labels='0123456789abcdef'", "no such release", "PATE_HOME"),
    ("labels=0123456789abcdef teachers=0123456789abcdef", "labels=", "Leave out teachers"),
    ("votes=/nowhere/votes.npy", "votes='/nowhere/votes.npy'", "no such file"),
    ("votes=5", "votes=5", "text"),
    ("votes=v.npy teachers=0123456789abcdef", "votes='v.npy'", "Leave out teachers"),
    ("noise=foo", "noise='foo'", "discrete, torch"),
    ("noise=1", "noise=1", "discrete, torch"),
    ("insecure_noise_seed=-1", "insecure_noise_seed=-1", "integer in [0"),
    ("insecure_noise_seed=abc", "insecure_noise_seed='abc'", "integer"),
    (
        "insecure_noise_seed=0 noise=discrete",
        "insecure_noise_seed=0",
        "must be null with noise=discrete",
        "noise=torch",
    ),
    ("device=foo", "device='foo'", "auto, cpu, cuda"),
    ("device=meta", "device='meta'", "auto, cpu, cuda"),
    ("device=7", "device=7", "auto, cpu, cuda"),
    ("device=cuda:99", "device='cuda:99'", "device=auto"),
    ("baseline=maybe", "baseline='maybe'", "true or false"),
    ("quiet=3", "quiet=3", "true or false"),
    ("labels_only=maybe", "labels_only='maybe'", "true or false"),
    ("study=foo", "study='foo'", "_target_"),
    ("paths.root=", "paths.root=''", "path of a folder", "PATE_HOME"),
    ("paths.root=null", "paths.root=None", "path of a folder"),
    ("paths.root=5", "paths.root=5", "path of a folder"),
    ("paths.root=/dev/null", "/dev/null", "Not a directory", "PATE_HOME"),
    ("paths.run=/proc/none", "/proc/none", "PATE_HOME"),
]
PRIVACY = [
    ("privacy.delta=0", "privacy.delta=0", "(0, 1)"),
    ("privacy.delta=1", "privacy.delta=1", "(0, 1)"),
    ("privacy.delta=1e-16", "privacy.delta=1e-16", "at least 1e-15 with continuous noise"),
    ("privacy.delta=2", "privacy.delta=2", "(0, 1)"),
    ("privacy.delta=nan", "privacy.delta=nan", "finite number"),
    ("privacy.delta=abc", "privacy.delta='abc'", "finite number"),
    ("privacy.delta=null", "privacy.delta=None", "finite number"),
    ("privacy.budget_epsilon=0", "privacy.budget_epsilon=0", "greater than 0"),
    ("privacy.budget_epsilon=-1", "privacy.budget_epsilon=-1", "greater than 0"),
    ("privacy.budget_epsilon=inf", "privacy.budget_epsilon=inf", "finite"),
    ("privacy.budget_epsilon=x", "privacy.budget_epsilon='x'", "finite number"),
    ("privacy.budget_epsilon=0.001", "privacy.budget_epsilon=0.001", "may cost epsilon", "num_queries"),
    ("privacy.opening_budget=0.01", "privacy.opening_budget=0.01", "may cost epsilon", "larger cap"),
    ("privacy.opening_budget=null", "privacy.opening_budget=None", "finite number"),
    ("privacy.target_epsilon=0", "privacy.target_epsilon=0", "greater than 0"),
    ("privacy.target_epsilon=x", "privacy.target_epsilon='x'", "finite number"),
    ("privacy.target_epsilon=1000", "privacy.opening_budget=50", "larger cap"),
]
MECHANISM = [
    ("mechanism.sigma=-1", "mechanism.sigma=-1", "greater than 0", "votes"),
    ("mechanism.sigma=0", "mechanism.sigma=0", "greater than 0"),
    ("mechanism.sigma=1e-200", "mechanism.sigma=1e-200", "at least 1e-12"),
    ("mechanism.sigma=nan", "mechanism.sigma=nan", "finite number"),
    ("mechanism.sigma=inf", "mechanism.sigma=inf", "finite number"),
    ("mechanism.sigma=x", "mechanism.sigma='x'", "finite number"),
    ("mechanism.sigma=null", "mechanism.sigma=None", "finite number"),
    ("mechanism.sigma=[1,2]", "mechanism.sigma=[1, 2]", "finite number"),
    ("mechanism.name=laplace", "mechanism.name='laplace'", "gaussian"),
    ("mechanism=laplace mechanism.sigma=0", "mechanism.sigma=0", "greater than 0"),
    ("mechanism=exponential noise=discrete", "noise='discrete'", "noise=torch"),
    ("mechanism=confident mechanism.threshold=1000", "mechanism.threshold=1000", "out of reach of 6 teachers"),
    ("mechanism=confident mechanism.threshold=x", "mechanism.threshold='x'", "number of votes"),
    ("mechanism=confident mechanism.screen_sigma=0", "mechanism.screen_sigma=0", "greater than 0"),
    ("mechanism=confident mechanism.max_answers=0", "mechanism.max_answers=0", "Null sets no cap"),
    ("mechanism=interactive mechanism.student_confidence=2", "mechanism.student_confidence=2", "[0, 1]"),
]
STABLE = [  # these mechanisms have no sigma
    ("mechanism=sparse_vector", "num_teachers", "teachers"),
    ("mechanism=soft_sparse_vector", "num_teachers", "teachers"),
    ("mechanism=sparse_vector mechanism.epsilon=0", "mechanism.epsilon=0", "greater than 0"),
    ("mechanism=sparse_vector mechanism.max_failures=0", "mechanism.max_failures=0", "[1,"),
    ("mechanism=single_stable mechanism.delta=1", "mechanism.delta=1", "(0, 1)"),
]
PARTS = [
    ("partition.capacity=0", "partition.capacity=0", "[1,"),
    ("partition.capacity=x", "partition.capacity='x'", "integer"),
    ("teacher.network=foo", "teacher.network='foo'", "logistic", "lean_cnn"),
    ("teacher.steps=0", "teacher.steps=0", "[1,"),
    ("teacher.steps=x", "teacher.steps='x'", "integer"),
    ("teacher.batch_size=0", "teacher.batch_size=0", "[1,"),
    ("teacher.learning_rate=-1", "teacher.learning_rate=-1", "greater than 0"),
    ("teacher.learning_rate=nan", "teacher.learning_rate=nan", "finite"),
    ("teacher.optimizer=lion", "teacher.optimizer='lion'", "adam, sgd"),
    ("teacher.optimizer=adma", "teacher.optimizer='adma'", "Did you mean 'adam'"),
    ("teacher.momentum=2", "teacher.momentum=2", "[0, "),
    ("teacher.weight_decay=-1", "teacher.weight_decay=-1", "at least 0"),
    ("teacher.label_smoothing=0.9", "teacher.label_smoothing=0.9", "[0, 0.5]"),
    ("teacher.schedule=foo", "teacher.schedule='foo'", "cosine"),
    ("teacher.backend=gpu", "teacher.backend='gpu'", "vectorized"),
    ("teacher.chunk=0", "teacher.chunk=0", "[1,"),
    ("teacher.workers=0", "teacher.workers=0", "[1,"),
    ("teacher.dtype=int8", "teacher.dtype='int8'", "float32"),
    ("teacher.augment=5", "teacher.augment=5", "Affine"),
    ("teacher.augment={rotate:-3}", "augment.rotate=-3", "[0, 180]"),
    ("teacher.augment={twist:3}", "teacher.augment key='twist'", "rotate"),
    ("teacher.options=5", "teacher.options=5", "keys and values"),
    ("teacher=mlp +teacher.options.hidden=-1", "network.hidden=-1", "[1,"),
    ("teacher=convnet +teacher.options.foo=1", "option='foo'", "channels"),
    ("method=teachers_transductive method.neighbors=0", "method.neighbors=0", "[1,"),
    ("method=teachers_transductive method.alpha=1", "method.alpha=1", "[0, 0.999]"),
    ("method=teachers_transductive method.balance=much", "method.balance='much'", "true or false"),
    ("query.rounds=0", "query.rounds=0", "[1,"),
    ("query.rounds=1.5", "query.rounds=1.5", "integer"),
    ("student.network=foo", "student.network='foo'", "logistic"),
    ("student.network=mlp +student.network_options.foo=1", "student.network option='foo'", "hidden"),
    ("student.network_options=3", "student.network_options=3", "keys and values"),
    ("student.steps=0", "student.steps=0", "[1,"),
    ("student.batch_size=x", "student.batch_size='x'", "integer"),
    ("student.learning_rate=0", "student.learning_rate=0", "greater than 0"),
    ("student.ema=2", "student.ema=2", "[0, 1]"),
    ("student.weight_decay=x", "student.weight_decay='x'", "finite number"),
    ("student.label_noise=2", "student.label_noise=2", "[0, 1]"),
    ("student.precision=fp4", "student.precision='fp4'", "bfloat16"),
    ("student.augment=5", "student.augment=5", "keys and values"),
    ("student.augment={twist:1}", "student.augment key='twist'", "rotate"),
    ("student.features=3", "student.features=3", "null"),
    ("student=fixmatch student.threshold=2", "student.threshold=2", "[0, 1]"),
    ("student=fixmatch student.unlabeled_batch=0", "student.unlabeled_batch=0", "[1,"),
    ("student=fixmatch student.alignment=foo", "student.alignment='foo'", "uniform"),
    ("student=ensemble student.members=0", "student.members=0", "[1,"),
    ("student=ensemble student.member=3", "student.member=3", "_target_"),
    ("student=vat student.radius=-1", "student.radius=-1", "greater than 0"),
    ("guide_student.steps=0", "guide_student.steps=0", "[1,"),
    ("guide_student.network=foo", "guide_student.network='foo'", "logistic"),
    ("selection=exponential selection.epsilon=0", "selection.epsilon=0", "greater than 0"),
    ("selection=exponential selection.validation=1", "selection.validation=1", "(0, 1)"),
    ("selection=exponential selection.candidates=null", "selection.candidates=None", "keys and values"),
]
COMPOSITION = [
    ("nosuchkey=1", "nosuchkey: no such key", "seed", "+nosuchkey=1"),
    ("num_querys=3", "num_querys: no such key", "Did you mean 'num_queries'?"),
    ("steps=0", "steps: no such key (there are seed", "Did you mean 'teacher.steps' or 'student.steps'"),
    ("mechanism.sgima=3", "mechanism.sgima: no such key", "Did you mean 'sigma'?", "+mechanism.sgima=3"),
    ("recommended.foo=3", "recommended.foo: no such key", "num_teachers"),
    ("+dataset.foo=1", "dataset", "'foo'", "private"),
    ("mechanism=gausian", "mechanism='gausian'", "Did you mean 'gaussian'?"),
    ("dataset=nosuch", "dataset='nosuch'", "digits"),
    ("partition=nosuch", "partition='nosuch'", "add_remove"),
    ("teacher=nosuch", "teacher='nosuch'", "standard"),
    ("query=nosuch", "query='nosuch'", "random"),
    ("method=nosuch", "method='nosuch'", "transductive"),
    ("student=nosuch", "student='nosuch'", "fixmatch"),
    ("selection=nosuch", "selection='nosuch'", "none"),
    ("privacy=nosuch", "privacy='nosuch'", "privacy.delta"),
    ("experiment=nosuch", "experiment='nosuch'", "mnist_pate"),
    ("mechanism=null", "mechanism=null"),
    ("mechanism._target_=os.system", "mechanism._target_='os.system'", "mechanism=<name>"),
    ("mechanism._target_=pate_torch.nothing.X", "mechanism._target_='pate_torch.nothing.X'", "mechanism=<name>"),
    ("mechanism._target_=pate_torch.core.rng.derive_seed", "mechanism"),
    ("seed", "'seed'", "EQUAL"),
    ("mechanism.sigma=${recommended.nope}", "mechanism.sigma", "recommended.nope"),
    ("recommended=null", "recommended"),
]
DATA = [
    (
        "dataset=svhn dataset.path={home}/none",
        "dataset.name='svhn'",
        "not found in",
        "dataset.download=true",
        "data_root",
    ),
    ("dataset=mnist data_root={home}/none", "dataset.name='mnist'", "not found in", "dataset.download=true"),
    ("dataset=mnist data_root=5", "data_root=5", "path"),
    ("dataset=svhn dataset.download=perhaps", "dataset.download='perhaps'", "true or false"),
    ("dataset.private=0", "dataset.private=0", "[1,"),
    ("dataset.private=99999", "dataset.private", "at most 1797"),
    ("dataset.public=-1", "dataset.public=-1", "[1,"),
    ("dataset.test=x", "dataset.test='x'", "integer"),
    ("dataset.name=", "dataset.name=''", "letters"),
    ("dataset.name=null", "dataset.name=None", "letters"),
    ("dataset.name=../../evil", "dataset.name='../../evil'", "letters"),
    ("dataset=csv", "dataset.path=None", "path of the data"),
    ("dataset=csv dataset.publish_split=true dataset.path={home}/none.csv", "dataset.path=", "must exist", "data_root"),
    ("dataset=csv dataset.publish_split=true dataset.path=5", "dataset.path=5", "path"),
    ("dataset=csv dataset.publish_split=true dataset.path={data}", "dataset.path=", "not a readable CSV"),
    ("dataset=csv dataset.publish_split=true dataset.path={data}/empty.csv", "dataset.path=", "has no rows"),
    ("dataset=csv dataset.publish_split=true dataset.path={data}/one.csv", "no public records", "dataset.fractions"),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/one_class.csv",
        "dataset.classes=None",
        "must be declared",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/nan.csv",
        "dataset.missing='error'",
        "dataset.missing=drop",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/pickle.parquet",
        "dataset.path=",
        "not a readable CSV or Parquet",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.label=nope",
        "dataset.label='nope'",
        "a, b, label, user",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.group=nope",
        "dataset.group='nope'",
        "user",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.group=user partition=replace_one",
        "partition",
        "add_remove",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv partition=replace_one",
        "partition=",
        "dataset.roles=position",
        "public_path",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.id=user partition=replace_one",
        "partition='replace_one'",
        "Give the public records a file of their own",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.roles=position",
        "partition='add_remove'",
        "partition=replace_one",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.roles=position dataset.id=user",
        "dataset.roles=",
        "roles=hash",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.fractions=[1,2]",
        "dataset.fractions=[1, 2]",
        "summing to 1",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.fractions=3",
        "dataset.fractions=3",
        "list",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.classes=[x]",
        "dataset.classes=['x']",
        "two different",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.classes=5",
        "dataset.classes=5",
        "list",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.separator=ab",
        "dataset.separator='ab'",
        "one character",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.features=a",
        "dataset.features='a'",
        "list",
    ),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.categories=3",
        "dataset.categories=3",
        "keys and values",
    ),
    ("dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.seed=x", "dataset.seed='x'", "integer"),
    (
        "dataset=csv dataset.publish_split=true dataset.path={data}/ok.csv dataset.nominal_size=-3",
        "dataset.nominal_size=-3",
        "[1,",
    ),
    ("dataset=libsvm dataset.publish_split=true dataset.path={data}/ok.csv", "dataset.path=", "not a readable LIBSVM"),
    ("dataset=image_folder dataset.publish_split=true dataset.path={data}", "dataset.path=", "no images"),
    (
        "dataset=image_folder dataset.publish_split=true dataset.path={data} dataset.channels=2",
        "dataset.channels=2",
        "1 (gray)",
    ),
]


def sampled(cases):
    """Every fourth case in ``make test``, all of them in ``make test-all``: each composes a whole configuration."""
    marks = ((), *[(pytest.mark.slow,)] * 3)
    return [pytest.param(case, id=case[0], marks=marks[number % 4]) for number, case in enumerate(cases)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tables of every kind of wrong."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    rows = [f"{draw.random():.4f},{draw.random():.4f},{'xyz'[i % 3]},u{i % 50}" for i in range(300)]
    head = "a,b,label,user\n"
    (folder / "ok.csv").write_text(head + "\n".join(rows) + "\n")
    (folder / "one_class.csv").write_text(
        head + "\n".join(row.replace(",x,", ",z,").replace(",y,", ",z,") for row in rows)
    )
    (folder / "nan.csv").write_text(head + "\n".join([*(f"nan,{i},x,u1\n,{i},y,u2" for i in range(40)), *rows]))
    (folder / "one.csv").write_text("a,b,label\n1,2,x\n")
    (folder / "empty.csv").write_text("")
    (folder / "pickle.parquet").write_bytes(b"\x80\x04K\x01.")
    return folder


def refused(tmp_path, monkeypatch, case, base=TINY, **places):
    """Run the command; the one line it prints. Asserts that nothing was written or charged."""
    overrides, *words = case
    home = tmp_path / "home"
    for name, place in {"home": home, **places}.items():
        overrides = overrides.replace(f"{{{name}}}", str(place))
    line = train(home, *overrides.split(), monkeypatch=monkeypatch, base=list(base)).error
    assert not [word for word in words if word not in line], line
    assert "Traceback" not in line
    assert written(home) == []
    assert ledger_entries(home) == []
    return line


@pytest.mark.parametrize("case", sampled(TOP + PRIVACY + MECHANISM))
def test_a_bad_choice_is_refused_in_one_line(tmp_path, monkeypatch, case):
    refused(tmp_path, monkeypatch, case)


@pytest.mark.parametrize("case", sampled(PARTS + COMPOSITION))
def test_a_bad_part_is_refused_in_one_line(tmp_path, monkeypatch, case):
    own = "student=ensemble" not in case[0]  # whose network is its member's
    refused(tmp_path, monkeypatch, case, base=[word for word in TINY if own or not word.startswith("student")])


@pytest.mark.parametrize("case", sampled(STABLE))
def test_a_mechanism_without_sigma_is_refused_in_one_line(tmp_path, monkeypatch, case):
    base = [word for word in TINY if not word.startswith("mechanism.sigma")]
    if "soft" in case[0]:
        base = [*base, "num_teachers=6"]
    refused(tmp_path, monkeypatch, case, base=base)


@pytest.mark.parametrize("case", sampled(DATA))
def test_bad_data_are_refused_in_one_line(tmp_path, monkeypatch, data, case):
    own = "dataset=" not in case[0]
    base = [word for word in TINY if own or not word.startswith(("dataset.", "student.augment"))]
    refused(tmp_path, monkeypatch, case, base=base, data=data)


def test_a_wrong_value_of_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_RUN_ID", "../../evil")
    line = refused(tmp_path, monkeypatch, ("seed=0", "PATE_RUN_ID='../../evil'", "letters"))
    assert "evil" not in os.listdir(tmp_path) and line


def test_a_good_choice_is_not_refused(tmp_path, monkeypatch):
    """The base that all refusals share works: they are refused for what they change."""
    outcome = train(tmp_path / "home", monkeypatch=monkeypatch)
    assert (outcome.code, outcome.err) == (0, "")
    assert ledger_entries(tmp_path / "home") == ["genesis", "open", "reserve", "commit"]


def test_an_account_keeps_its_terms(tmp_path, monkeypatch):
    """What an open account refuses charges nothing and trains nobody."""
    home = tmp_path / "home"
    assert train(home, monkeypatch=monkeypatch).code == 0
    entries, teachers = ledger_entries(home), len(list((home / "teachers").iterdir()))
    for override, words in {
        "privacy.delta=1e-6": ("delta=1e-06", "0.0001"),
        "privacy.budget_epsilon=60": ("budget_epsilon=60", "raise-cap"),
        "partition=replace_one": ("adjacency='replace_one'", "'add_remove'"),
        "num_queries=40 mechanism.sigma=0.5 num_teachers=5": ("cap",),
    }.items():
        line = train(home, *override.split(), monkeypatch=monkeypatch).error
        assert not [word for word in words if word not in line], line
    assert ledger_entries(home) == entries
    assert len(list((home / "teachers").iterdir())) == teachers


@pytest.mark.parametrize("full", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_traceback_is_shown_on_demand_only(tmp_path, full):
    """Through a real process, once each way."""
    arguments = [*TINY, f"paths.root={tmp_path}", "mechanism.sigma=-1"]
    environment = {**os.environ, "HYDRA_FULL_ERROR": full, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ("Traceback" in done.stderr) == (full == "1")
    assert "mechanism.sigma=-1: must be greater than 0" in done.stderr
    if full == "0":
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stdout == ""


def test_a_closed_folder_is_refused_in_one_line(tmp_path, monkeypatch):
    """No write permission, as the system tells it (the tests may run as root, whom no mode stops)."""
    home = tmp_path / "home"

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", str(home))

    monkeypatch.setattr("pate_torch.opening.create_private_folder", denied)
    line = train(home, monkeypatch=monkeypatch).error
    assert "Permission denied" in line and str(home) in line and "PATE_HOME" in line
    assert ledger_entries(home) == []


# ---- public functions and types, called from Python ------------------------------------------------------------------

ROWS = {"x": torch.randn(9, 2), "y": torch.arange(9) % 3, "pool_x": torch.randn(4, 2), "test_x": torch.randn(4, 2)}
GOOD = {"name": "t", "class_names": 3, "test_y": torch.tensor([0, 1, 2, 0]), **ROWS}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.randn(9)}, "x="),
        ({"x": torch.full((9, 2), float("nan"))}, "finite"),
        ({"pool_x": torch.full((4, 2), float("nan"))}, "finite"),
        ({"x": torch.zeros(0, 2)}, "at least one point"),
        ({"x": torch.zeros(9, 2, dtype=torch.uint8)}, "float rows"),
        ({"pool_x": torch.randn(4, 3)}, "pool_x"),
        ({"test_x": torch.randn(4, 3)}, "test_x"),
        ({"y": torch.arange(8) % 3}, "integers, one for each point"),
        ({"y": torch.full((9,), 0.5)}, "0..2"),
        ({"y": torch.full((9,), 3)}, "0..2"),
        ({"y": torch.full((9,), -1)}, "0..2"),
        ({"class_names": 1}, "two classes"),
        ({"class_names": ["a"]}, "two classes"),
        ({"unit_id": ["a"]}, "one id for each record"),
        ({"mean": [0.0, 0.0]}, "std"),
        ({"name": "a/b"}, "dataset.name"),
        ({"name": ""}, "dataset.name"),
    ],
)
def test_tensors_of_a_wrong_kind_are_refused(change, words):
    with pytest.raises(ValueError, match=words) as error:
        Tensors(**{**GOOD, **change}).load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Votes(torch.tensor([[1.0, 2.0]]), 3),
        lambda: Votes(torch.tensor([[1, 1]]), 3),
        lambda: Votes(torch.tensor([[-1, 4]]), 3),
        lambda: Votes(torch.tensor([1, 2]), 3),
        lambda: Votes(torch.tensor([[3]]), 3),
        lambda: Votes(torch.tensor([[3, 0]]), 0),
        lambda: PrivateRecords(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64), make_position_ids(2)),
        lambda: PrivateRecords(torch.zeros(2, 1), torch.zeros(2), make_position_ids(2)),
        lambda: DataSpec(name="t", num_classes=1, input_shape=(2,), class_names=("a",), mean=(0.0,), std=(1.0,)),
        lambda: DataSpec(name="t", num_classes=2, input_shape=(2,), class_names=("a",), mean=(0.0,), std=(1.0,)),
        lambda: checks.delta("delta", float("nan")),
        lambda: checks.integer("n", True),
        lambda: checks.collection("list", "abc"),
        lambda: checks.mapping("map", [1]),
        lambda: run_folders.check_root(""),
        lambda: run_folders.check_hex_id("labels", "0123456789ABCDEF"),
        lambda: run_folders.get_run_folder("home", "../x", "gaussian"),
        lambda: hydra_config.parse_device("cpu:x"),
    ],
)
def test_values_of_a_wrong_kind_are_refused(build):
    with pytest.raises(ValueError) as error:
        build()
    assert "\n" not in str(error.value)


def test_a_release_that_is_not_there_is_refused(tmp_path):
    data = Tensors(**GOOD).load()
    with Ledger(tmp_path / "ledger.sqlite") as ledger, pytest.raises(ValueError, match="no such release"):
        release_store.read(tmp_path, "0123456789abcdef", data.pool, data.spec, ledger)


@pytest.mark.parametrize(("name", "noise"), FORMS)
def test_every_mechanism_is_calibrated_to_a_target(tmp_path, name, noise):
    mechanism = build(name, noise, **({"max_failures": 5} if "max_failures" in vars(build(name)) else {}))
    if name in ("confident", "interactive"):
        mechanism = dataclasses.replace(mechanism, screen_sigma=40.0)  # else the checks alone cost more
    method = changed(tiny(tmp_path), mechanism=mechanism, num_queries=30, delta=1e-4).method
    events = method.calibrate(2.0, 1e-4).label_events()
    assert 2 * (1 - 1e-6) < compute_guarantee(events, 1e-4).epsilon <= 2


def test_every_configuration_key_of_the_top_level_is_tried():
    """A new top-level key needs a case here, or a place among those that other keys refer to."""
    from omegaconf import OmegaConf

    top = {str(key) for key in OmegaConf.load(ROOT / "conf" / "config.yaml")} | {"privacy", "paths"}
    top -= {"defaults", "hydra"}
    tried = {word.partition("=")[0] for case in TOP + DATA + COMPOSITION for word in case[0].split()}
    tried |= {word.partition(".")[0] for word in tried}
    assert sorted(top - tried) == []
