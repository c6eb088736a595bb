"""Choices that cannot work: one line that names the key, the value and what is allowed; nothing written or charged."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from pate_torch import pipeline
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.config import PrivacyConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.device import parse_device
from pate_torch.core.executors import Workers
from pate_torch.data.benchmark import Digits, Mnist, Svhn
from pate_torch.data.tabular import Csv
from pate_torch.features.augmentation import Affine
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import AddRemove, DatasetFacts, ReplaceOne
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.privacy.unit_ids import make_position_ids
from pate_torch.queries.base import Margin, Random
from pate_torch.release import store as release_store
from pate_torch.students.selection import Selection
from pate_torch.students.semi_supervised import FixMatch
from pate_torch.students.training import Supervised
from pate_torch.teachers.recipe import TeacherRecipe
from tests import ROOT
from tests.command_runs import TINY, ledger_entries, train, written
from tests.mechanisms.mechanism_forms import FORMS, build
from tests.run_configs import changed
from tests.tensor_data import Tensors
from tests.tiny_runs import selection, tiny

ID = "0123456789abcdef"


def refuse(words: str | tuple[str, ...], make) -> None:
    """Assert that ``make`` is refused in one line with all of these words."""
    with pytest.raises(ValueError) as refusal:
        make()
    line = str(refusal.value)
    assert "\n" not in line
    assert [word for word in ([words] if isinstance(words, str) else words) if word not in line] == []


# ---- a component by itself ------------------------------------------------------------------------------------------

COMPONENTS = [
    (PrivacyConfig, {"budget_epsilon": 0}, ("privacy.budget_epsilon=0", "greater than 0")),
    (PrivacyConfig, {"budget_epsilon": float("inf")}, "privacy.budget_epsilon=inf"),
    (PrivacyConfig, {"opening_budget": None}, "privacy.opening_budget=None"),
    (PrivacyConfig, {"target_epsilon": "x"}, ("privacy.target_epsilon='x'", "finite number")),
    (PrivacyConfig, {"allow_duplicate_account": "maybe"}, "privacy.allow_duplicate_account='maybe'"),
    (PrivacyConfig, {"chosen_by": "luck"}, "privacy.chosen_by='luck'"),
    (GNMax, {"sigma": 1e-200}, ("mechanism.sigma=1e-200", "at least 1e-12")),
    (GNMax, {"sigma": None}, ("mechanism.sigma=None", "finite number")),
    (GNMax, {"sigma": [1, 2]}, ("mechanism.sigma=[1, 2]", "finite number")),
    (GNMax, {"sigma": 1.0, "name": "laplace"}, ("mechanism.name='laplace'", "gaussian")),
    (ConfidentGNMax, {"sigma": 1.0, "screen_sigma": 1.0, "threshold": 1, "max_answers": 0}, "Null sets no cap"),
    (AddRemove, {"capacity": 0}, ("partition.capacity=0", "[1,")),
    (TeacherRecipe, {"network": "foo"}, ("network='foo'", "logistic", "lean_cnn")),
    (TeacherRecipe, {"optimizer": "adma"}, "Did you mean 'adam'"),
    (TeacherRecipe, {"momentum": 2}, ("momentum=2", "[0, ")),
    (TeacherRecipe, {"weight_decay": -1}, "weight_decay=-1"),
    (Workers, {"workers": 0}, "executor.workers=0"),
    (Workers, {"chunk": 2.5}, ("executor.chunk=2.5", "integer")),
    (TeacherRecipe, {"augment": {"twist": 3}}, ("augment key='twist'", "rotate")),
    (TeacherRecipe, {"options": 5}, ("options=5", "keys and values")),
    (TransductiveTeacherVotes, {"num_teachers": 4, "neighbors": 0}, "method.neighbors=0"),
    (TransductiveTeacherVotes, {"num_teachers": 4, "alpha": 1}, ("method.alpha=1", "[0, 0.999]")),
    (TransductiveTeacherVotes, {"num_teachers": 4, "balance": "much"}, "method.balance='much'"),
    (TeacherVotes, {"num_teachers": 0}, ("num_teachers=0", "[1,")),
    (TeacherVotes, {"num_teachers": True}, ("num_teachers=True", "integer")),
    (TeacherVotes, {"num_teachers": 4, "num_queries": "many"}, ("num_queries='many'", "integer")),
    (TeacherVotes, {"num_teachers": 4, "teachers_id": "../../etc"}, ("teachers='../../etc'", "16 hexadecimal")),
    (Random, {"rounds": 1.5}, ("query.rounds=1.5", "integer")),
    (Supervised, {"network_options": 3}, ("student.network_options=3", "keys and values")),
    (Supervised, {"learning_rate": 0}, "student.learning_rate=0"),
    (Supervised, {"weight_decay": "x"}, "student.weight_decay='x'"),
    (Supervised, {"augment": {"twist": 1}}, ("student.augment key='twist'", "rotate")),
    (Supervised, {"features": 3}, ("student.features=3", "null")),
    (FixMatch, {"unlabeled_batch": 0}, "student.unlabeled_batch=0"),
    (Selection, {"candidates": None}, ("selection.candidates=None", "keys and values")),
    (selection, {"epsilon": 0}, "selection.epsilon=0"),
    (selection, {"validation": 1}, ("selection.validation=1", "(0, 1)")),
    (Digits, {"private": 0}, ("dataset.private=0", "[1,")),
    (Digits, {"test": "x"}, ("dataset.test='x'", "integer")),
    (Digits, {"name": "../../evil"}, ("dataset.name='../../evil'", "letters")),
    (Digits, {"name": None}, ("dataset.name=None", "letters")),
    (Svhn, {"download": "perhaps"}, ("dataset.download='perhaps'", "true or false")),
    (Csv, {"fractions": 3}, ("dataset.fractions=3", "list")),
    (Csv, {"features": "a"}, ("dataset.features='a'", "list")),
    (Csv, {"categories": 3}, ("dataset.categories=3", "keys and values")),
    (Csv, {"roles": "position", "id": "user"}, ("dataset.roles=", "roles=hash")),
]


@pytest.mark.parametrize(
    ("component", "values", "words"), COMPONENTS, ids=[f"{kind.__name__}-{values}" for kind, values, _ in COMPONENTS]
)
def test_a_bad_value_of_a_component_is_refused_by_its_key(component, values, words):
    needed = {"delta": 1e-5} if component is PrivacyConfig else {}
    needed = {"mechanism": GNMax(sigma=1.0)} if "num_teachers" in values else needed
    refuse(words, lambda: component(**needed, **values))


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("", lambda: Votes(torch.tensor([[1.0, 2.0]]), 3)),
        ("", lambda: Votes(torch.tensor([[1, 1]]), 3)),
        ("", lambda: Votes(torch.tensor([[-1, 4]]), 3)),
        ("", lambda: Votes(torch.tensor([1, 2]), 3)),
        ("", lambda: Votes(torch.tensor([[3, 0]]), 0)),
        ("", lambda: PrivateRecords(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64), make_position_ids(2))),
        ("", lambda: PrivateRecords(torch.zeros(2, 1), torch.zeros(2), make_position_ids(2))),
        ("", lambda: DataSpec(name="t", num_classes=2, input_shape=(2,), class_names=("a",), mean=(0,), std=(1,))),
        ("delta", lambda: checks.delta("delta", float("nan"))),
        ("n=True", lambda: checks.integer("n", True)),
        ("list", lambda: checks.collection("list", "abc")),
        ("map", lambda: checks.mapping("map", [1])),
        (("paths.root=''", "PATE_HOME"), lambda: run_folders.check_root("")),
        ("paths.root=5", lambda: run_folders.check_root(5)),
        ("labels", lambda: run_folders.check_hex_id("labels", "0123456789ABCDEF")),
        ("dataset.name", lambda: run_folders.get_run_folder("home", "../x", "gaussian")),
        *((f"device={name!r}", lambda name=name: parse_device(name)) for name in ("foo", "meta", 7, "cpu:x")),
        (("device='cuda:99'", "device=auto"), lambda: parse_device("cuda:99")),
    ],
)
def test_values_of_a_wrong_kind_are_refused(words, make):
    refuse(words, make)


# ---- components together --------------------------------------------------------------------------------------------

DIGITS = Digits(private=120, public=40, test=20)
GNMAX_DISCRETE = GNMax(sigma=2.0, noise="discrete")


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (("seed=-1", "integer in [0"), {"seed": -1}),
        (("seed=None", "integer"), {"seed": None}),
        (("insecure_noise_seed=-1", "integer in [0"), {"insecure_noise_seed": -1}),
        (("insecure_noise_seed=0", "noise=torch"), {"insecure_noise_seed": 0, "mechanism": GNMAX_DISCRETE}),
        *((f"privacy.delta={delta!r}", {"delta": delta}) for delta in (0, 1, 2, float("nan"), "abc", None)),
        (("privacy.delta=1e-16", "at least 1e-15 with continuous noise"), {"delta": 1e-16}),
        (("selection", "noise=torch"), {"selection": selection(), "mechanism": GNMAX_DISCRETE}),
        (("labels='../x'", "16 hexadecimal"), {"labels": "../x"}),
        (("labels=", "Leave out teachers"), {"labels": ID, "teachers": ID}),
    ],
)
def test_choices_that_do_not_go_together_are_refused_whatever_the_data(tmp_path, words, changes):
    refuse(words, lambda: changed(tiny(tmp_path), **changes))


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (("num_teachers=121", "[1, 120]", "120 private records"), {"num_teachers": 121, "dataset": DIGITS}),
        (("num_teachers=151", "[1, 150]"), {"num_teachers": 151, "partition": ReplaceOne()}),
        (("num_queries=76", "[1, 75]", "75 public points"), {"num_queries": 76}),
        (("out of reach of 12 teachers"), {"mechanism": ConfidentGNMax(sigma=2.0, screen_sigma=1.0, threshold=1000)}),
        (("num_teachers", "teachers"), {"mechanism": SparseVector(epsilon=1.0, delta=1e-5, max_failures=20)}),
        (("teacher", "option='foo'"), {"teacher": TeacherRecipe(network="mlp", options={"foo": 1})}),
        (("student", "'foo'", "hidden"), {"student": Supervised(network="mlp", network_options={"foo": 1})}),
        (("teachers=", "no such ensemble"), {"teachers": ID}),
        (("labels=", "no such release", "PATE_HOME"), {"labels": ID}),
        (("may cost epsilon", "num_queries"), {"budget_epsilon": 0.001}),
        (("privacy.opening_budget=0.01", "larger cap"), {"opening_budget": 0.01}),
        (("privacy.opening_budget=50", "larger cap"), {"target_epsilon": 1000}),
        ("augment", {"teacher": TeacherRecipe(network="logistic", augment=Affine(rotate=5.0))}),
        ("guide_student=None: must be a student", {"student": None, "guide_student": None, "query": Margin(rounds=2)}),
    ],
)
def test_choices_that_the_data_cannot_bear_are_refused_and_leave_nothing(tmp_path, words, changes):
    refuse(words, lambda: pipeline.run(changed(tiny(tmp_path), **changes)))
    assert written(tmp_path) == [] and ledger_entries(tmp_path) == []


def test_a_partition_that_the_roles_of_a_table_do_not_bear_is_refused(tmp_path):
    rows = (f"{i % 7},{'xy'[i // 50 % 2]},u{i % 50}\n" for i in range(300))
    (tmp_path / "t.csv").write_text("a,label,user\n" + "".join(rows))
    split = {"path": str(tmp_path / "t.csv"), "name": "t", "publish_split": True, "label": "label"}
    for options, partition, words in (
        ({"group": "user"}, ReplaceOne(), ("partition", "add_remove")),
        ({}, ReplaceOne(), ("partition=", "dataset.roles=position", "public_path")),
        ({"id": "user"}, ReplaceOne(), "Put the public records into a separate file"),
        ({"roles": "position"}, AddRemove(), ("partition='add_remove'", "partition=replace_one")),
    ):
        facts = DatasetFacts.from_dataset(Csv(**split, **options).load(), partition)
        config = changed(tiny(tmp_path), partition=partition)
        refuse(words, lambda config=config, facts=facts: config.validate(facts))
    refuse(("dataset.seed='x'", "integer"), Csv(**split, seed="x").load)
    refuse(("data_root=5", "path"), Mnist(root=5).load)


def test_a_release_that_is_not_there_is_refused(tmp_path):
    rows = {"x": torch.randn(9, 2), "pool_x": torch.randn(4, 2), "test_x": torch.randn(4, 2)}
    data = Tensors(name="t", class_names=3, y=torch.arange(9) % 3, test_y=torch.tensor([0, 1, 2, 0]), **rows).load()
    with Ledger(tmp_path / "ledger.sqlite") as ledger, pytest.raises(ValueError, match="no such release"):
        release_store.read(release_store.find_release(tmp_path, ID), data.pool, data.spec, ledger)


@pytest.mark.parametrize(("name", "noise"), FORMS)
def test_every_mechanism_is_calibrated_to_a_target(tmp_path, name, noise):
    mechanism = build(name, noise, **({"max_failures": 5} if "max_failures" in vars(build(name)) else {}))
    if name in ("confident", "interactive"):
        mechanism = dataclasses.replace(mechanism, screen_sigma=40.0)  # else the checks alone cost more
    method = changed(tiny(tmp_path), mechanism=mechanism, num_queries=30, delta=1e-4).method
    events = method.calibrate(2.0, 1e-4).privacy_events()
    assert 2 * (1 - 1e-6) < compute_guarantee(events, 1e-4).epsilon <= 2


# ---- through the command line ---------------------------------------------------------------------------------------

COMMAND_LINES = [
    ("mechanism.sigma=-1", "mechanism.sigma=-1: must be greater than 0", "votes"),  # of a dataclass
    ("teacher.augment={twist:3}", "teacher.augment key='twist'", "rotate"),  # of a part of one
    ("student=fixmatch_ensemble student.member=3", "student.member=3", "_target_"),
    ("num_querys=3", "num_querys: no such key (existing keys: seed", "Did you mean 'num_queries'?"),
    ("epsilon=1", "epsilon: no such key", "Did you mean 'privacy.target_epsilon'?"),  # an argument of PATEClassifier
    ("account=x", "account: no such key", "Did you mean 'dataset.name'?"),
    ("delta=1", "delta: no such key", "Did you mean 'privacy.delta'?"),
    ("sigma=1", "sigma: no such key", "Did you mean 'mechanism.sigma'?"),
    ("teacher.num_teachers=4", "teacher.num_teachers: no such key", "Did you mean 'num_teachers'?"),
    ("steps=0", "steps: no such key", "Did you mean 'teacher.steps' or 'student.steps'"),
    ("mechanism.sgima=3", "mechanism.sgima: no such key", "Did you mean 'sigma'?", "+mechanism.sgima=3"),
    ("+dataset.foo=1", "dataset", "'foo'", "private"),
    ("mechanism=gausian", "mechanism='gausian'", "Did you mean 'gaussian'?", "svt"),
    ("dataset=nosuch", "dataset='nosuch'", "digits"),
    ("privacy=nosuch", "privacy='nosuch'", "privacy.delta"),
    ("mechanism=null", "mechanism=null"),
    ("mechanism._target_=os.system", "mechanism._target_='os.system'", "mechanism=<name>"),
    ("mechanism._target_=pate_torch.nothing.X", "mechanism._target_='pate_torch.nothing.X'", "mechanism=<name>"),
    ("mechanism._target_=pate_torch.core.rng.derive_seed", "mechanism"),
    ("seed", "'seed'", "EQUAL"),
    ("mechanism.sigma=${recommended.nope}", "mechanism.sigma", "recommended.nope"),
    ("recommended=null", "recommended"),
    ("study=foo", "study='foo'", "_target_"),
    ("guide_student=supervised", "guide_student='supervised'", "Set student@guide_student=<name>"),
    ("quiet=3", "quiet=3", "true or false"),
    ("executor.workers=0", "executor.workers=0", "[1,"),
    ("baseline=maybe", "baseline='maybe'", "true or false"),
    ("labels_only=maybe", "labels_only='maybe'", "true or false"),
    ("votes=5", "votes=5", "string"),
    (f"votes=v.npy teachers={ID}", "votes='v.npy'", "Omit teachers"),
    ("paths.root=/dev/null", "/dev/null", "Not a directory", "PATE_HOME"),
    ("paths.run=/proc/none", "/proc/none", "PATE_HOME"),
]


def refuse_command(home, monkeypatch, *overrides: str, base=tuple(TINY)) -> str:
    """Run the command; the one line that it prints. Asserts that nothing was written or charged."""
    line = train(home, *overrides, monkeypatch=monkeypatch, base=list(base)).error
    assert "Traceback" not in line and written(home) == [] and ledger_entries(home) == []
    return line


@pytest.mark.parametrize("case", COMMAND_LINES, ids=lambda case: case[0])
def test_a_wrong_command_line_is_refused_in_one_line(tmp_path, monkeypatch, case):
    overrides, *words = case
    base = [word for word in TINY if "student=fixmatch_ensemble" not in overrides or not word.startswith("student")]
    line = refuse_command(tmp_path / "home", monkeypatch, *overrides.split(), base=base)
    assert [word for word in words if word not in line] == []


def test_a_wrong_value_of_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_RUN_ID", "../../evil")
    line = refuse_command(tmp_path / "home", monkeypatch)
    assert "PATE_RUN_ID='../../evil'" in line and "letters" in line and "evil" not in os.listdir(tmp_path)


def test_a_closed_folder_is_refused_in_one_line(tmp_path, monkeypatch):
    """No write permission, as the system tells it (the tests may run as root, whom no mode stops)."""
    home = tmp_path / "home"

    def deny(*_, **__):
        raise PermissionError(13, "Permission denied", str(home))

    monkeypatch.setattr("pate_torch.opening.create_private_folder", deny)
    line = refuse_command(home, monkeypatch)
    assert "Permission denied" in line and str(home) in line and "PATE_HOME" in line


def test_an_account_keeps_its_terms(tmp_path, monkeypatch):
    """The base of all refusals runs; then what an open account refuses charges nothing and trains nobody."""
    home = tmp_path / "home"
    outcome = train(home, monkeypatch=monkeypatch)
    assert (outcome.code, outcome.err) == (0, "")
    entries, teachers = ledger_entries(home), len(list((home / "teachers").iterdir()))
    assert entries == ["genesis", "open", "reserve", "commit"]
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


@pytest.mark.slow(reason="two processes that import torch")
@pytest.mark.parametrize("full", ["0", "1"])
def test_a_traceback_is_shown_on_demand_only(tmp_path, full):
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
