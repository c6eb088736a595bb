"""``pate plan``: the choices that settings name, what it must not touch, and every wrong argument in one line."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from hydra import compose

from pate_torch.cli import hydra_config
from pate_torch.cli import plan as command
from pate_torch.cli.main import main as pate
from pate_torch.core.run_folders import find_config_folder
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.planning.choice import format_report
from pate_torch.planning.pilot import Pilot
from pate_torch.privacy.ledger import Ledger
from tests import ROOT
from tests.features import encoder_worlds as worlds

DATASETS = sorted(file.stem for file in Path(find_config_folder(), "dataset").glob("*.yaml"))
FONTS = f"hydra.searchpath=[file://{ROOT}/benchmarks/conf]"
TERMS = {"budget_epsilon": 4.0, "delta": 1e-4, "adjacency": "add_remove", "unit": "record"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


def plan(*settings):
    return command.plan(settings)


def run_plan(*settings):
    """The plan that train.py would make of the same settings."""
    with hydra_config.open_configuration():
        return command.build_plan(compose("config", overrides=list(settings)))


def test_what_is_left_open_is_halved_and_doubled():
    """The number of teachers only where a pilot tells what it does to their labels."""

    def grid(*settings):
        return [(choice.num_teachers, choice.parameters["sigma"]) for choice in plan(*settings).choices]

    assert grid() == [(75, s) for s in (5.5, 11, 22)]
    assert grid("num_teachers=range(10,30,10)", "mechanism.sigma=5,6") == [(10, 5), (10, 6), (20, 5), (20, 6)]
    axes = command.make_default_axes(run_plan("dataset=digits"), set(), has_pilot=True)
    assert axes["num_teachers"] == ("37", "75", "150")


def test_a_recommended_threshold_moves_with_the_number_of_teachers():
    report = plan("dataset=mnist", "mechanism=confident", "num_teachers=125,1000")
    assert [choice.parameters["threshold"] for choice in report.choices] == [100, 800]
    assert "mechanism.threshold=100" in report.choices[0].settings
    for choice in report.choices:  # the settings of a row are those of the run that it describes
        method = run_plan(*choice.settings).method
        expected = choice.num_teachers, choice.parameters["threshold"]
        assert (method.num_teachers, method.mechanism.threshold) == expected


def test_a_plan_composes_one_configuration_for_each_mechanism(monkeypatch):
    composed = []
    monkeypatch.setattr(command, "compose", lambda *given, **words: composed.append(words) or compose(*given, **words))
    assert len(plan("dataset=mnist").choices) == 3 and len(composed) == 1
    choices = plan("mechanism=gaussian,laplace", "num_teachers=100,200", "mechanism.sigma=20,30").choices
    assert len(choices) == 8 and len(composed) == 3
    for choice in choices[::5]:
        method = run_plan(*choice.settings).method  # as Hydra composes it
        expected = method.num_teachers, method.num_queries, method.mechanism_name, method.mechanism.sigma
        assert (choice.num_teachers, choice.num_queries, choice.mechanism, choice.parameters["sigma"]) == expected


def test_a_plan_states_what_was_measured_with_the_figures_of_the_documentation():
    notes = plan("dataset=svhn", "data_root=/nowhere", "mechanism.sigma=40").notes
    measured = [note for note in notes if "teachers" in note and "2,417" in note]
    assert {note.partition(",")[0] for note in measured} == {"lean_cnn", "convnet"}
    assert "not measured on SVHN" in notes[0]
    page = (ROOT / "docs" / "experiments" / "svhn-format.md").read_text()
    figures = {word for note in measured for word in re.findall(r"\d[\d,.]*(?= %| s | ms| minutes| hours)", note)}
    assert len(figures) >= 6 and not {figure for figure in figures if figure not in page}
    assert not any("2,417" in note for note in plan("dataset=mnist", "mechanism.sigma=40").notes)


def test_the_account_of_the_data_set_is_read_and_nothing_is_charged(home):
    assert not any("Account" in note for note in plan("teachers=50").notes) and list(home.iterdir()) == []
    mechanism = GNMax(sigma=8.3)
    with Ledger(home / "ledger.sqlite") as ledger:
        ledger.open_account("digits", planned_events=mechanism.privacy_events(20), **TERMS)
        head, entries = ledger.get_head(), len(ledger.read_entries())
    report = plan("num_teachers=50", "mechanism.sigma=8.3")
    assert (report.budget_epsilon, report.budget_source) == (4.0, "the account's cap")
    assert any("of 4 at delta 1e-4, add_remove. The column fits refers to" in note for note in report.notes)
    with Ledger(home / "ledger.sqlite") as ledger:
        assert (ledger.get_head(), len(ledger.read_entries())) == (head, entries)


@pytest.mark.slow(reason="composes a configuration for each of 13 data sets")
@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_is_planned_for_without_its_files(name, monkeypatch):
    source = type(run_plan(f"dataset={name}").dataset)
    monkeypatch.setattr(source, "load", lambda self: pytest.fail("private records were read"))
    (choice,) = plan(f"dataset={name}", "data_root=/nowhere", "teachers=60", "mechanism.sigma=8").choices
    assert choice.problem is None and choice.lead is not None


def test_gradients_at_the_same_cost_are_suggested_as_settings_that_can_be_planned():
    csv = ("dataset=csv", "dataset.nominal_size=3000", "dataset.classes=[a,b,c,d]")
    report = plan(*csv, "teachers=24", "mechanism.sigma=20")
    (teachers,) = report.choices
    (note,) = [note for note in report.notes if "method=gradients" in note]
    (gradients,) = plan(*csv, *note.rsplit(": ", 1)[1].split()).choices
    assert gradients.mechanism == "gradient_descent" and gradients.verdict == "ok"
    assert gradients.epsilon == pytest.approx(teachers.epsilon, rel=1e-3)
    few = plan("dataset=csv", "dataset.nominal_size=30", "teachers=15", "mechanism.sigma=2", "num_queries=5")
    assert few.best_choice is not None and not any("method=gradients" in note for note in few.notes)


MAILS = """# @package _global_
defaults: [text]
dataset:
  name: {name}
  path: {folder}/{name}.csv
  public_path: {folder}/{name}_public.csv
  test_path: {folder}/{name}_test.csv
  benchmark: true
"""
ENCODED = ("dataset=text", "dataset.nominal_size=400", "features=encoder", f"features.tokenizer={worlds.WORDS}")
BRIEF = ("pilot.teachers=4", "pilot.num_queries=100", "teacher=logistic", "teacher.steps=20", "teachers=8")


def mails(folder, name, seed, labeled=True):
    """A data set of one's own, by a file of one's own."""
    draw = np.random.default_rng(seed)
    for part, count in (("", 300), ("_public", 120), ("_test", 120)):
        worlds.mails(folder / f"{name}{part}.csv", count, draw, labeled=labeled or part != "_public")
    (folder / "dataset").mkdir(exist_ok=True)
    (folder / "dataset" / f"{name}.yaml").write_text(MAILS.format(name=name, folder=folder))


@pytest.fixture
def encoded(tmp_path):
    """A plan for texts through an encoder, and public texts that it may be tried on."""
    mails(tmp_path, "old", seed=1)
    worlds.table(tmp_path / "table.safetensors")
    return (*ENCODED, f"features.weights={tmp_path}/table.safetensors", f"hydra.searchpath=[file://{tmp_path}]")


def test_a_pilot_sees_its_stand_in_as_the_run_sees_its_records(encoded, tmp_path, monkeypatch):
    """Through the same encoder, as features; and the planned data are left alone, of which there is no file."""
    seen = []
    monkeypatch.setattr(command, "Pilot", lambda *given: seen.append(given[1]) or Pilot(*given))
    paths = (f"dataset.path={tmp_path}/mails.csv", "dataset.name=mails", "pilot.dataset=old")
    report = plan(*encoded, *paths, *BRIEF, "mechanism.sigma=2", "num_queries=20")
    texts = [row.split(",")[0] for row in (tmp_path / "old.csv").read_text().split()[1:]]
    feature_ND = worlds.static(tmp_path).encode(texts)
    (data,) = seen
    assert sorted(data.private.x.tolist()) == sorted(feature_ND.tolist()) and not (tmp_path / "mails.csv").exists()
    (choice,) = report.choices
    assert choice.forecast.accuracy > 0.8 and any("measured on old" in note for note in report.notes)


def test_a_stand_in_of_the_same_kind_is_of_other_files_and_knows_its_classes(encoded, tmp_path, capsys):
    planned = (*encoded, "dataset.name=mails", "pilot.dataset=old", *BRIEF)
    mails(tmp_path, "bare", seed=2, labeled=False)
    for settings, message in (
        (planned, "must not hold the private records"),  # nobody knows of which file
        ((*planned, "labels_only=true"), "must not hold the private records"),
        ((*planned, f"dataset.path={tmp_path}/dataset/../old.csv"), "must not hold the private records"),
        ((*planned, "dataset.path=old.csv", f"data_root={tmp_path}"), "must not hold the private records"),
        ((*encoded, "dataset.path=mails.csv", "pilot.dataset=bare", *BRIEF), "but has no labels"),
        ((*encoded, "pilot.dataset=digits", *BRIEF), "because points are images"),
        ((*encoded, "pilot.dataset=nosuch"), "does not exist"),
        ((*encoded, "pilot.dataset=libsvm"), "must be declared as public"),
        ((*encoded, "pilot.dataset=digits", "dataset.classes=[a,b,c]"), "10 classes"),
        (("pilot.dataset=digits",), "must not hold the private records"),
        (("dataset=csv", "pilot.dataset=digits"), "nominal_size"),
    ):
        assert pate(["plan", *settings]) == 2
        assert message in capsys.readouterr().err


def test_the_command_prints_a_table_or_one_object(capsys):
    assert pate(["plan", "teachers=50", "mechanism.sigma=8.3"]) == 0
    assert "python train.py num_teachers=50 mechanism.sigma=8.3" in capsys.readouterr().out
    assert pate(["plan", "mechanism.sigma=8.3", "teachers=50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["num_teachers"] == 50


@pytest.mark.parametrize(
    "settings,key",
    [
        (["mechanism.sigma=a,b"], "mechanism.sigma"),
        (["mechanism=single_stable", "mechanism.epsilon=1e200"], "mechanism.epsilon"),
        (["privacy.delta=1e-5,1e-6"], "privacy.delta"),
        (["privacy.target_epsilon=1", "mechanism.sigma=1,2"], "target_epsilon"),
        (["teachers=few"], "teachers"),
        (["teachers=5", "num_teachers=6"], "num_teachers"),
        (["labels=0123456789abcdef"], "labels"),
        (["votes=mine.csv"], "votes"),
        (["method=dpsgd"], "target_epsilon"),
        (["pilot.accuracy=0.5"], "pilot"),
        (["pilot=digits"], "pilot"),
        (["num_teachers=range(1,100)"], "combinations"),
        (["nonsense"], "nonsense"),
        (["nofile.csv"], "PUBLIC='nofile.csv': does not exist"),
        (["teachers=0"], "error: teachers=0: must be"),
        (["num_teachers=0"], "error: num_teachers=0: must be"),
    ],
)
def test_bad_input_is_one_line_and_code_2(settings, key, capsys, home):
    assert pate(["plan", *settings]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and key in err
    assert list(home.iterdir()) == []


# -- pate diagnose ----------------------------------------------------------------------------------------------------

TABLE = ("dataset.path=private.csv", "dataset.nominal_size=900", "dataset.name=ward", "privacy.target_epsilon=2")
QUICK = ("teacher.steps=40", "pilot.num_queries=150", "pilot.teachers=16")


def write_table(file: Path, count: int, *, labeled: bool = True) -> str:
    """Two overlapping clouds, sorted by class."""
    y = np.arange(count) * 2 // count
    x = np.random.default_rng(4).normal(2.0 * y[:, None], 1.0, (count, 2))
    rows = [f"{a:.3f},{b:.3f}" + f",{['no', 'yes'][label]}" * labeled for (a, b), label in zip(x, y, strict=True)]
    file.write_text("\n".join(["a,b" + ",label" * labeled, *rows]) + "\n")
    return str(file)


def test_a_diagnosis_reads_public_rows_alone_and_its_command_can_be_planned(tmp_path, home, monkeypatch):
    """The private file does not even exist, and no ledger is made. The plan of the same pilot has the same forecast."""
    few = {"gaussian": {}, "sparse_vector": {"mechanism.max_failures": ("4",)}}
    monkeypatch.setattr(command, "DIAGNOSED_MECHANISMS", few)
    public = write_table(tmp_path / "public.csv", 400)
    report = command.plan((public, *TABLE, *QUICK), diagnoses=True)
    text, found = format_report(report), json.loads(report.to_json())
    assert list(home.iterdir()) == [] and max(map(len, text.splitlines())) <= 80 + len(public)
    words = shlex.split(text.partition("python train.py ")[2].replace("\\\n", " "))
    method = run_plan(*[word for word in words if not word.startswith("pilot.")]).method
    assert {f"dataset.public_path={public}", "dataset.path=private.csv", "mechanism=gaussian"} <= set(words)
    assert not any(word.startswith("pilot.") for word in words)
    assert "helps" in text and "Proposition 18" in text and "resemble it" in text
    best = found["choices"][found["best"]]
    assert (best["num_teachers"], best["num_queries"]) == (method.num_teachers, method.num_queries)
    assert {choice["mechanism"] for choice in found["choices"]} == {"gaussian", "sparse_vector"}
    sizes, accuracies = zip(*((s["shard_size"], s["teacher_accuracy"][0]) for s in found["shards"]), strict=True)
    assert sizes == (11, 3, 1) and accuracies[0] > accuracies[2] > 0.5
    chosen = [word for word in words if word.startswith(("num_", "mechanism", "privacy"))]
    (choice,) = plan(public, *chosen, *TABLE[:3], *QUICK).choices
    assert choice.forecast.accuracy == best["forecast"]["accuracy"]


def test_a_benchmark_is_diagnosed_on_itself(capsys, monkeypatch):
    monkeypatch.setattr(command, "DIAGNOSED_MECHANISMS", {"gaussian": {}})
    pilot = ("teacher.steps=40", "pilot.num_queries=100", "pilot.teachers=6")
    assert pate(["diagnose", "privacy.target_epsilon=2", "teacher=logistic", *pilot]) == 0
    text = capsys.readouterr().out
    assert "measured on digits" in text and "python train.py privacy.target_epsilon=2" in text


def test_what_is_not_declared_public_is_not_diagnosed(tmp_path, capsys):
    public, bare = write_table(tmp_path / "public.csv", 60), write_table(tmp_path / "bare.csv", 60, labeled=False)
    (tmp_path / "linked.csv").hardlink_to(public)
    for settings, message in (
        (("dataset=csv", *TABLE), "must be declared as public"),
        ((public, *TABLE[1:]), "must not hold the private records"),  # nobody knows which file is private
        ((public, f"dataset.path={tmp_path}/../{tmp_path.name}/public.csv", *TABLE[1:]), "must not hold the private"),
        ((public, f"dataset.path={tmp_path}/linked.csv", *TABLE[1:]), "must not hold the private"),
        ((public, TABLE[0]), "nominal_size"),
        ((bare, *TABLE), "dataset.label"),
        ((public, "other.csv", *TABLE), "other.csv"),
        ((public, "dataset=digits"), "public_path"),
        ((public, *TABLE, "num_teachers=5"), "num_teachers"),
        ((public, *TABLE, "mechanism=confident"), "mechanism"),
        ((public, *TABLE, "method=gradients", "mechanism.sigma=3"), "mechanism"),
        ((public, *TABLE, "pilot.num_queries=99"), "pilot.num_queries"),
    ):
        assert pate(["diagnose", *settings]) == 2, settings
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1, (settings, err)
