"""The documents keep their word: every command is run by ``make test-all``; tables, links, the recipe.

Commands are run in an empty folder with a ledger of its own, one page after the other's fashion: in order, as a reader
would. What takes long is shortened by ``SMALL``: fewer steps and queries, fewer runs of an audit, nothing else.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torchvision
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from safetensors.torch import save_file
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import brier_score_loss

import pate_torch
from pate_torch import accounting, audit
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.cli import hydra_config
from pate_torch.cli.main import COMMANDS
from pate_torch.core.formatting import format_epsilon
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.sites.charter import read_charter
from tests.end_to_end import documents
from tests.end_to_end.documents import LINKED, PAGES, ROOT, blocks, links, table
from tests.mechanisms.vote_laws import CERTAIN

RUN = ("recommended.steps=20", "recommended.student_steps=20", "recommended.queries=10", "baseline=false", "quiet=true")
SMALL = {"train": RUN, "audit": ("--runs=2000",), "examples/drawings.py": ("--steps=20",)}
"""What is added to a command that does not set it."""

ID = "0123456789abcdef"
PLACEHOLDERS = {"<run>": "outputs", "<release>": ID, "<teachers>": ID, "<head>": 4 * ID}
every_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


# -- what a command is ----------------------------------------------------------------------------------------------


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """({variable: value} set for the command, its words)."""
    words = shlex.split(line, comments=True)
    environment = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return environment, words


def program(words: Sequence[str]) -> tuple[str, list[str]]:
    """(what is run: train, audit, ..., a file, make, tensorboard; its arguments)."""
    if words[0] == "torchrun":
        start = words.index("train.py") + 1
        return "train", [*words[start:]]
    if words[0] in ("pate", "python") and words[1] != "-m":
        return words[1].removesuffix(".py") if words[1] == "train.py" else words[1], [*words[2:]]
    assert words[0] in ("make", "tensorboard", "eval", "python"), f"{words[0]}: no program that the documents may name"
    return (words[2], [*words[3:]]) if words[0] == "python" else (words[0], [*words[1:]])


def compose_command(line: str, workspace: Path) -> Any:
    """The configuration that a train, plan or label command names; raises for a group or key that is not there."""
    name, words = program(words_of(line)[1])
    folder = words[words.index("--config-dir") + 1] if "--config-dir" in words else None
    public = [word for word in words if name in ("plan", "diagnose") and "=" not in word]
    words = ["dataset=csv"] * len(public) + words
    words = [re.sub("^teachers=(?=[0-9])", "num_teachers=", word) for word in words if not word.startswith("pilot.")]
    settings = [word for word in words if "=" in word or word.startswith("~")]
    settings = [re.sub("<.*>", ID, word) for word in settings if not word.startswith("--")]
    overrides = OverridesParser.create().parse_overrides(settings)
    first_values = [
        f"{each.key_or_group}={next(iter(each.sweep_string_iterator()))}" if each.is_sweep_override() else setting
        for each, setting in zip(overrides, settings, strict=True)
    ]
    search = [] if folder is None else [f"hydra.searchpath=[file://{workspace / folder}]"]
    is_label = name == "label" and not any(setting.startswith("dataset=") for setting in settings)
    with hydra_config.open_configuration():
        cfg = compose("label" if is_label else "config", overrides=[*first_values, *search], return_hydra_config=True)
        OmegaConf.set_struct(cfg, False)
        launcher = cfg.pop("hydra").launcher
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return launcher


# -- files that pages speak of ---------------------------------------------------------------------------------------


def format_visits(generator: np.random.Generator, patients: Sequence[str], labeled: bool = True) -> str:
    """One visit of each of these patients, with the patients' diagnosis if ``labeled``."""
    lines = ["patient,age,pressure,ward" + ",diagnosis" * labeled]
    for patient in patients:
        age, pressure = generator.normal(50, 15), generator.normal(120, 20)
        ill = "ill" if (age - 50) / 15 + (pressure - 120) / 20 > generator.normal(0, 0.3) else "well"
        line = f"{patient},{age:.1f},{pressure:.1f},{generator.choice(list('ABC'))}"
        lines.append(line + f",{ill}" * labeled)
    return "\n".join(lines) + "\n"


def demo_table(file: Path) -> None:
    """patients.csv, and beside it public.csv (without labels) and test.csv: a few visits of each patient."""
    generator = np.random.default_rng(0)
    for name, count, patients in ((file.name, 1200, 240), ("public.csv", 200, 50), ("test.csv", 200, 50)):
        ids = [f"p{patient}" for patient in generator.integers(patients, size=count)]
        file.with_name(name).write_text(format_visits(generator, ids, labeled=name != "public.csv"))


def demo_clinic(file: Path) -> None:
    """patients.csv, and beside it test.csv: visits of 4,000 and of 1,000 patients."""
    generator = np.random.default_rng(0)
    for name, patients in ((file.name, 4000), ("test.csv", 1000)):
        patient_N = np.repeat(np.arange(patients), generator.integers(1, 3, patients))
        age_N, sex_N = generator.normal(52, 17, patients).clip(0, 99).round(), generator.choice(["f", "m"], patients)
        smoker_N = generator.random(patients) < 0.25
        weight_N = generator.normal(np.where(sex_N == "f", 68, 82), 12)
        risk_N = (age_N - 60) / 12 + 1.2 * smoker_N + (weight_N - 75) / 25 + generator.logistic(0, 0.7, patients)
        lines = ["patient,age,sex,smoker,weight,diagnosis"]
        for n in patient_N:
            told = "" if generator.random() < 0.05 else ("no", "yes")[int(smoker_N[n])]
            weight = weight_N[n] + generator.normal(0, 2)
            lines.append(f"p{n},{age_N[n]:.0f},{sex_N[n]},{told},{weight:.1f},{('no', 'yes')[int(risk_N[n] > 0)]}")
        file.with_name(name).write_text("\n".join(lines) + "\n")


def demo_labeled(file: Path) -> None:
    """Visits of 480 other patients, all public and with labels, one a patient."""
    file.write_text(format_visits(np.random.default_rng(1), [f"q{patient}" for patient in range(480)]))


def demo_votes(file: Path) -> None:
    """Predictions of 250 teachers, right four times of five, on 300 points of 10 classes."""
    generator = np.random.default_rng(0)
    truth_P = generator.integers(0, 10, 300)
    wrong_KP = generator.random((250, 300)) < 0.2
    np.save(file, np.where(wrong_KP, generator.integers(0, 10, (250, 300)), truth_P))


WORDS = {
    "bill": ["invoice", "refund", "paid", "cost", "charge"],
    "help": ["broken", "login", "error", "crash", "slow"],
}
COMMON = ["my", "the", "is", "it", "please", "wrong", "today", "again"]


def demo_mails(file: Path) -> None:
    """mails.csv, and beside it public.csv and new.csv (without labels): on bills, or asking for help."""
    generator = np.random.default_rng(0)
    for name, count in ((file.name, 1200), ("public.csv", 400), ("new.csv", 5)):
        lines = ["text,label" if name != "new.csv" else "text"]
        for _ in range(count):
            label = str(generator.choice(list(WORDS)))
            said = [*generator.choice(WORDS[label], 2), *generator.choice(COMMON, 5)]
            lines.append(" ".join(generator.permutation(said)) + (f",{label}" if name != "new.csv" else ""))
        file.with_name(name).write_text("\n".join(lines) + "\n")


def demo_table_of_tokens(file: Path) -> None:
    """A table of token vectors, and beside it its tokenizer.json: words of one kind lie near each other."""
    vocabulary = {word: place for place, word in enumerate(["?", *WORDS["bill"], *WORDS["help"], *COMMON])}
    generator = torch.Generator().manual_seed(0)
    table = 0.3 * torch.randn(len(vocabulary), 8, generator=generator)
    table[1:6, 0] += 1
    table[6:11, 1] += 1
    save_file({"embedding.weight": table}, file)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(file.with_name("tokenizer.json")))


def demo_vectors(file: Path) -> None:
    """ids.csv, and beside it vectors.npy in the order of ids.txt: two clouds."""
    generator = np.random.default_rng(0)
    label = generator.integers(0, 2, 1500)
    file.write_text("id,label\n" + "".join(f"r{i},{('no', 'yes')[y]}\n" for i, y in enumerate(label)))
    order = generator.permutation(1500)
    np.save(file.with_name("vectors.npy"), (generator.normal(size=(1500, 6)) + 2 * label[:, None])[order])
    file.with_name("ids.txt").write_text("".join(f"r{i}\n" for i in order))


def demo_resnet18(file: Path) -> None:
    """Random weights of a ResNet."""
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), file)


MAKERS = {name: maker for name, maker in globals().items() if name.startswith("demo_")}


def furnish(page: Path, folder: Path) -> Path:
    """A folder with what the page's commands need, and train.py; returns it."""
    shutil.copy(ROOT / "train.py", folder)
    for name in ("benchmarks", "examples"):  # of a checkout, too
        (folder / name).symlink_to(ROOT / name)
    for block in blocks(page):
        if block.mark == "file":
            name, _, maker = block.argument.partition(" from ")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if maker:
                MAKERS[maker](folder / name)
            else:
                (folder / name).write_text(block.text)
    return folder


# -- in make test ---------------------------------------------------------------------------------------------------


@every_page
def test_the_first_command_of_a_page_composes(page, tmp_path):
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.commands]
    composable = [line for line in lines if program(words_of(line)[1])[0] in ("train", "plan", "diagnose", "label")]
    if composable:
        compose_command(composable[0], furnish(page, tmp_path))


@pytest.mark.parametrize("line", ["python train.py dataset=nowhere", "pate plan mechanism.sigm=3", "rm -rf outputs"])
def test_a_wrong_command_would_be_noticed(line, tmp_path):
    with pytest.raises((HydraException, AssertionError)):
        compose_command(line, tmp_path)


def test_launchers_are_composed(tmp_path):
    """No Slurm is needed to see what would be submitted."""
    settings = "hydra/launcher=submitit_slurm hydra.launcher.partition=gpu hydra.launcher.gpus_per_node=1"
    launcher = compose_command(f"python train.py {settings}", tmp_path)
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.gpus_per_node) == ("gpu", 1)
    furnish(ROOT / "docs" / "howto" / "machines.md", tmp_path)
    launcher = compose_command("python train.py --config-dir myconf hydra/launcher=gpu", tmp_path)
    assert launcher._target_.endswith("SlurmLauncher") and launcher.cpus_per_task == 8
    assert launcher.setup == ["export PATE_DATA=/scratch/data"]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", documents.LINKED, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    for link in links(page):
        if re.match(r"[a-z]+://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        there = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if link.endswith(".md")}
        waiting += [target for target in there if target.exists() and target not in seen]
    assert set(PAGES) <= seen


def test_every_page_has_its_place_on_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    experiments = ROOT / "docs" / "experiments"
    missing = [page.name for page in LINKED if str(page.relative_to(ROOT)) not in site and page.parent != experiments]
    assert missing == [] and "docs/experiments/*" in site
    assert len(re.findall(r": [\w/.-]+\.md$", site, re.MULTILINE)) <= 35
    assert {file.stem for file in (ROOT / "notebooks").glob("*.ipynb")} == set(re.findall(r"notebooks/(\w+)\.md", site))


def test_the_page_of_the_configuration_names_every_key(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    monkeypatch.setattr(pages, "OUT", tmp_path)
    pages.write_configuration()
    text = (tmp_path / "reference" / "configuration.md").read_text()
    with hydra_config.open_configuration():
        cfg = OmegaConf.to_container(compose("config"), resolve=False)
    keys = {key for key in cfg if key != "recommended"} | {key for key in cfg["mechanism"] if key != "_target_"}
    keys |= {key for group in ("method", "student", "executor", "privacy") for key in cfg[group] if key != "_target_"}
    assert len(keys) > 60 and [key for key in keys if not re.search(rf"\b{key}\b", text)] == []
    rows = re.findall(r"^\| `([\w.@]+)` \| `.*` \| (.*) \|$", text, re.MULTILINE)
    unexplained = {key for key, meaning in rows if not meaning.strip()}
    assert len(rows) > 300 and unexplained <= {"name"}, unexplained
    assert {f"privacy.{key}" for key in cfg["privacy"]} | {f"paths.{key}" for key in cfg["paths"]} <= {*dict(rows)}


def test_the_page_of_python_names_shows_every_public_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    shown = [pkgutil.resolve_name(path) for path in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
    public = [getattr(pate_torch, name) for name in pate_torch.__all__]
    public += [value for value in vars(accounting).values() if callable(value)]
    assert {id(each) for each in shown} == {id(each) for each in public}


def test_the_page_of_commands_names_every_command():
    rows = table(ROOT / "docs" / "reference" / "commands.md", "commands")[1:]
    assert {row[0].strip("`") for row in rows} == {f"pate {name}" for name in COMMANDS}


def test_the_readme_opens_with_the_two_commands():
    first = blocks(ROOT / "README.md")[0]
    assert [line.split("#")[0].strip() for line in first.commands] == ["make demo", "make test"]
    text = (ROOT / "README.md").read_text()
    assert text.index("make demo") < 40 and text.index("make test") < 220


def test_pictures_are_small_and_used():
    used = {(page.parent / link).resolve() for page in LINKED for link in links(page)}
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 300_000, picture.name
        assert picture.resolve() in used, f"{picture.name} is on no page"


def test_the_table_of_costs_is_right():
    what, page = "epsilon of gaussian at delta 1e-5", ROOT / "docs" / "howto" / "settings.md"
    head, *rows = table(page, what)
    sigmas = [float(cell.removeprefix("sigma = ")) for cell in head[1:]]
    assert len(rows) == 6 and len(sigmas) == 4
    for row in rows:
        events = [GNMax(sigma=sigma).privacy_events(int(row[0])) for sigma in sigmas]
        assert row[1:] == [format_epsilon(compute_guarantee(one, 1e-5).epsilon) for one in events]


def test_the_page_of_the_accountant_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = blocks(ROOT / "docs" / "howto" / "accountant.md")
    examples = [pair for pair in zip(found, found[2:], strict=False) if pair[0].mark == "file"]
    assert len(examples) == 5
    for code, printed in examples:
        exec(code.text, {})
        assert capsys.readouterr().out == printed.text


RECIPES = ROOT / "docs" / "howto" / "scikit-learn.md"
NUMBER = re.compile(r"\d+\.\d+")


@pytest.mark.parametrize(
    ("name", "is_as_claimed"),
    [
        ("twin.py", lambda numbers: numbers[0] > 0.9),
        ("private.py", lambda numbers: numbers[0] > 0.85 and numbers[0] == numbers[1]),
        ("rare.py", lambda numbers: numbers[1] > numbers[0] + 0.03),
    ],
)
def test_a_recipe_prints_what_its_page_says(name, is_as_claimed, tmp_path, monkeypatch, capsys):
    """The noise moves the numbers: they are near those of the page, beside the same words, and show what it claims."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    found = blocks(RECIPES)
    ((code, on_page),) = [(a.text, c.text) for a, c in zip(found, found[2:], strict=False) if a.argument == name]
    exec(code, {})
    printed = capsys.readouterr().out
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", on_page)
    numbers, numbers_on_page = ([float(number) for number in NUMBER.findall(text)] for text in (printed, on_page))
    assert numbers == pytest.approx(numbers_on_page, rel=0.4, abs=0.15)
    assert is_as_claimed(numbers) and is_as_claimed(numbers_on_page)


def test_the_preprocessor_of_the_recipe_treats_each_row_alone():
    """It gives the same bits for any number of rows. The product of all rows at once does not."""
    (code,) = [block.text for block in blocks(RECIPES) if block.argument == "private.py"]
    names: dict[str, Any] = {}
    exec(code.partition("clf = ")[0], names)
    scaler, pca, project_rows, x = (names[name] for name in ("scaler", "pca", "project_rows", "X"))
    row_ND = project_rows(scaler.transform(x))
    for first in range(1, 12):
        assert np.array_equal(project_rows(scaler.transform(x[first:])), row_ND[first:])
    assert np.allclose(row_ND, pca.transform(scaler.transform(x)))


@pytest.mark.slow(reason="trains with DP-SGD")
def test_calibration_helps_dpsgd_and_not_the_default_method(tmp_path):
    """As the page on scikit-learn says of the Brier score."""
    x, y = make_classification(3000, 20, n_informative=5, flip_y=0.2, random_state=0)
    (public, public_y), (test, test_y) = ((x[part], y[part]) for part in (slice(1500, 2000), slice(2000, None)))
    gains = []
    for method in ("gradients", "dpsgd"):
        clf = pate_torch.PATEClassifier(
            account=method, classes=[0, 1], method=method, num_records_about=1500, home=tmp_path / method, verbose=False
        )
        clf.fit(x[:1500], y[:1500], public=public)
        calibrated = CalibratedClassifierCV(FrozenEstimator(clf)).fit(public, public_y)
        before, after = (brier_score_loss(test_y, model.predict_proba(test)[:, 1]) for model in (clf, calibrated))
        gains.append(before - after)
    assert abs(gains[0]) < 0.015 and gains[1] > 0.01


def test_every_shape_letter_is_in_the_notation():
    listed = set(re.findall(r"\b[A-Za-z]\b", " ".join(row[0] for row in table(ROOT / "NOTATION.md", "shape letters"))))
    code = "\n".join(file.read_text() for file in (ROOT / "pate_torch").rglob("*.py"))
    used = {letter for letters in re.findall(r"\b[a-z][a-z0-9_]*_(k?[A-Z]{1,5})\b", code) for letter in letters}
    assert {"N", "K", "Q", "P", "C", "k"} <= used <= listed


def keys_in(page: Path, what: str) -> set[str]:
    return {key for row in table(page, what)[1:] for key in re.findall(r"`([a-z_.0-9]+)`", row[0])}


def leaves(content: dict, within: str = "") -> set[str]:
    """Keys of nested mappings, dotted; a mapping of free keys (parameters) counts as one."""
    found = set()
    for key, value in content.items():
        whole = f"{within}{key}"
        found |= leaves(value, f"{whole}.") if isinstance(value, dict) and key != "parameters" else {whole}
    return found


def test_every_field_of_the_statement_is_explained():
    from pate_torch.owner_metrics import PrivateMetrics
    from pate_torch.release.renderer import build_statement, build_summary
    from tests.release.reporting_demo import demo

    page = ROOT / "docs" / "reference" / "statement.md"
    assert keys_in(page, "keys of summary.json") == set(build_summary(demo()))
    assert keys_in(page, "keys of privacy.json") == leaves(build_statement(demo()))
    owner = {field.name for field in dataclasses.fields(PrivateMetrics)}
    assert keys_in(page, "keys of private/summary.json") == owner


def test_the_table_of_nist_names_fields_of_the_statement():
    from pate_torch.release.renderer import build_statement
    from tests.release.reporting_demo import demo

    fields = leaves(build_statement(demo()))
    parents = {field.rpartition(".")[0] for field in fields}
    rows = table(ROOT / "docs" / "howto" / "release.md", "NIST SP 800-226")[1:]
    named = {name for row in rows for name in re.findall(r"`([a-z_.]+)`", row[1])}
    assert len(named) > 15 and named <= fields | parents


# -- the data set of docs/howto/extending.md -----------------------------------------------------------------------


@pytest.mark.slow(reason="trains three students to their accuracy")
def test_students_learn_the_data_set_of_ones_own(tmp_path):
    """By the page's command, not shortened; and other students, too."""
    students = ["vat", "supervised", "label_spreading"]
    page = ROOT / "docs" / "howto" / "extending.md"
    (line,) = (line for block in blocks(page) for line in block.commands if "dataset=stripes student=" in line)
    words = words_of(line.replace("student=supervised", f"student={','.join(students)}"))[1]
    reader = Reader(furnish(page, tmp_path))
    quick = ("baseline=false", "membership=none", "quiet=true", "insecure_noise_seed=0", "-m")
    done = reader.runs([*words, *quick], PYTHONPATH=os.pathsep.join([".", str(ROOT)]))
    assert done.returncode == 0, done.stderr
    files = reader.folder.glob("outputs/runs/stripes/*/*/release/summary.json")
    summaries = [json.loads(file.read_text()) for file in files]
    assert sorted(summary["student"] for summary in summaries) == sorted(students)
    for summary in summaries:
        assert summary["label_accuracy"] >= 0.9 and summary["student_accuracy"] > 0.9, summary["student"]


# -- the recipe of docs/tutorials/mechanism.md ------------------------------------------------------------------------

RECIPE = ROOT / "docs" / "tutorials" / "mechanism.md"


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """The recipe's files, its YAML in a configuration of its own, and the contract tests beside them."""
    furnish(RECIPE, tmp_path)
    (tmp_path / "conf").symlink_to(tmp_path / "myconf")
    (tmp_path / "tests" / "mechanisms").mkdir(parents=True)
    for name in ("", "mechanisms"):
        for file in (ROOT / "tests" / name).glob("*.py"):
            shutil.copy(file, tmp_path / "tests" / name)
    return tmp_path


@pytest.mark.slow(reason="runs the contract tests of all mechanisms in another process")
def test_the_recipe_keeps_the_contract_of_every_mechanism(recipe):
    """The contract tests find its YAML by themselves; only the law of its answers is its author's to say."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(recipe), str(ROOT)])}
    chosen = ["-k", "lead and not (test_mechanisms and exact_law)"]
    words = ["-v", "-p", "no:cacheprovider", "tests/mechanisms/test_mechanisms.py", "test_lead.py", *chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=recipe, env=environment, capture_output=True, text=True
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) >= 15, done.stdout + done.stderr
    assert "exact_law" in done.stdout


def test_the_recipe_passes_the_audit_and_its_broken_twin_does_not(recipe, monkeypatch):
    monkeypatch.syspath_prepend(str(recipe))
    lead = importlib.import_module("lead")
    monkeypatch.delitem(sys.modules, "lead")

    class Thin(lead.Lead):
        """Draws a third of the noise that it is charged for."""

        def draw(self, votes, noise, context):
            answers = lead.Lead(sigma=self.sigma / 3, lead=self.lead).draw(votes, noise, context)
            return dataclasses.replace(answers, events=self.privacy_events(len(votes)))

    for kind, sound in ((lead.Lead, True), (Thin, False)):
        mechanism = kind(sigma=4.0, lead=5.0)
        result = audit.audit(mechanism, mechanism.worst_case_neighbors(1), runs=60_000, confidence=CERTAIN)
        assert result.is_sound is sound and not result.faults and result.proven > 0


# -- in make test-all ------------------------------------------------------------------------------------------------


class Reader:
    """Someone who types the commands of one page, in order, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        taken = ("PATE_HOME", "PATE_DATA", "PATE_RUN_ID", "HYDRA_FULL_ERROR", "PYTHONPATH")
        self.environment = {name: value for name, value in os.environ.items() if name not in taken}
        self.environment["XDG_DATA_HOME"] = str(folder / "store")  # where the ledger of this user lies
        # `python`, `torchrun` and `tensorboard` are those of this environment.
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def newest(self) -> dict[str, str]:
        """What the placeholders stand for: the newest run's."""
        found = sorted(self.folder.glob("*/runs/*/*/*/release/summary.json"), key=lambda f: f.stat().st_mtime_ns)
        if not found:
            return {}
        summary = json.loads(found[-1].read_text())
        values = (found[-1].parents[1], summary["release_id"], summary["teachers_id"], summary["ledger_head"])
        return dict(zip(PLACEHOLDERS, map(str, values), strict=True))

    def types(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run one command, shortened."""
        variables, words = words_of(line)
        variables = {name: value.replace("$PWD", str(self.folder)) for name, value in variables.items()}
        for mark, value in self.newest().items():
            words = [word.replace(mark, value) for word in words]
        words = words[: words.index(">")] if ">" in words else words
        name, arguments = program(words)
        if name == "tensorboard":  # which would serve its pages until it is stopped
            done = self.runs([*words, "--inspect"])
            assert "No event files" not in done.stdout, done.stdout
            return done
        if name == "make":
            return self.makes(arguments)
        if name == "eval":
            words = shlex.split(arguments[0].removeprefix("$(").removesuffix(")"))
        if words[0] == "pate":
            words = ["python", "-m", "pate_torch", *words[1:]]
        if name == "site" and arguments[0] == "confirm":  # somebody reads the words of the charter aloud
            heard = read_charter((self.folder / arguments[1]).read_bytes()).format_fingerprint()
            return self.runs(words, typed=f"{heard}\n", **variables)
        keys = {word.split("=")[0] for word in arguments}
        if name != "train" or not keys & {"--cfg", "--help", "-sc"}:
            words += [extra for extra in SMALL.get(name, ()) if extra.split("=")[0] not in keys]
        return self.runs(words, **variables)

    def runs(self, words: Sequence[str], *, typed: str | None = None, **variables: str) -> Any:
        options = {"cwd": self.folder, "env": self.environment | variables, "input": typed, "timeout": 900}
        return subprocess.run(words, capture_output=True, text=True, errors="replace", **options)

    def makes(self, targets: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """The demo is run; the tests are not run from within the tests."""
        here = ["-f", str(ROOT / "Makefile"), f"BIN={Path(sys.executable).parent}", "-o", "install"]
        dry = [] if list(targets) == ["demo"] else ["--dry-run"]
        return self.runs(["make", *here, *dry, *targets])


@pytest.mark.slow(reason="runs every documented command")
@every_page
def test_every_command_runs(page, tmp_path):
    reader = Reader(furnish(page, tmp_path))
    for block in blocks(page):
        if block.language != "bash" or block.mark == "composed":
            continue
        for line in block.commands:
            done = reader.types(line)
            told = f"{page.name}: {line}\nexit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            if block.mark == "fails":
                assert done.returncode in (1, 2) and block.argument in done.stderr + done.stdout, told
                assert "Traceback" not in done.stderr, told
            else:
                assert done.returncode == 0, told
