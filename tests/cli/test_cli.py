"""The pate command: help, exit codes that arrive, and a list of runs that claims nothing for a run without privacy."""

import json
import os
import subprocess
import sys

import pytest

import pate_torch
from pate_torch.cli import list_runs as runs_command
from pate_torch.cli import main as cli
from tests.command_runs import TINY


def pate(*words):
    return subprocess.run([sys.executable, "-m", "pate_torch", *words], capture_output=True, text=True, timeout=120)


def test_help_names_every_command_without_loading_torch():
    code = "import sys; from pate_torch.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in ("train", "label", "audit", "plan", "ledger", "predict", "export", "runs"):
        assert f"  {name} " in done.stdout


def test_the_package_is_light_and_names_what_it_has():
    code = "import sys, pate_torch; assert 'torch' not in sys.modules; assert 'PATE' in dir(pate_torch)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="nothing_here"):
        pate_torch.nothing_here  # noqa: B018


COMPILER = ("torch._dynamo", "torch._inductor", "sympy")
"""Torch's compiler takes two seconds to load, and compiles nothing here."""


def test_what_runs_is_loaded_without_what_only_some_runs_use():
    unused = (
        *COMPILER,
        "scipy.stats",
        "matplotlib",
        "sklearn",
        "pandas",
        "opacus",
        "hydra",
        "tensorboard",
        "torchvision",
    )
    code = f"import sys, pate_torch.pipeline, pate_torch.api.labeler; assert not set({unused}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_classifier_is_loaded_without_what_only_some_fits_use():
    unused = ("opacus", "hydra", "tensorboard", "torchvision", "matplotlib", "mpmath")
    code = f"import sys; from pate_torch import PATEClassifier; assert not set({unused}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_import_changes_nothing_in_the_host_program():
    code = (
        "import os, sys; before = dict(os.environ), list(sys.meta_path), sys.excepthook, list(sys.path_hooks);"
        "import pate_torch; assert before == (dict(os.environ), sys.meta_path, sys.excepthook, sys.path_hooks)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_run_does_not_load_torch_s_compiler(tmp_path):
    """Teachers, an encoder and a student are trained."""
    settings = [*TINY, "student=fixmatch", "student.network=small_cnn", "student.steps=2", "features=contrastive"]
    settings += ["recommended.features_steps=2", "student.augment={rotate:5}"]
    code = (
        "import sys; from pate_torch.cli.main import main; main(sys.argv[1:]);"
        f"assert 'torch' in sys.modules and not set({COMPILER}) & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *settings],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("student.safetensors"))


@pytest.mark.parametrize("wait", [None, "ACTIVE"])
def test_threads_that_wait_sleep_unless_told_otherwise(wait):
    given = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    given |= {} if wait is None else {"OMP_WAIT_POLICY": wait}
    code = "import os; from pate_torch.cli.main import run_command; run_command(lambda: 0);"
    code += f"assert os.environ['OMP_WAIT_POLICY'] == {wait or 'PASSIVE'!r}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=given)


@pytest.mark.parametrize("words,code", [(["--help"], 0), (["help"], 0), ([], 2), (["lable"], 2)])
def test_exit_codes_of_the_command_itself(capsys, words, code):
    assert cli.main(words) == code
    out = capsys.readouterr()
    assert ("Did you mean 'label'" in out.err) == (words == ["lable"])


@pytest.mark.parametrize(
    "words,code",
    [
        (["ledger", "show", "--path", "nowhere.sqlite"], 1),
        (["ledger", "nonsense"], 2),
        (["label", "num_classes=3"], 2),
        (["export", "nowhere"], 2),
        (["runs", "--home", "nowhere"], 2),
        (["audit", "mechanism=nonsense"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_exit_codes_are_those_of_the_commands(capsys, words, code):
    before = sys.argv
    try:
        found = cli.main(words)
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert sys.argv is before
    assert capsys.readouterr().err


def test_train_is_train_py():
    done = pate("train", "--cfg", "job", "num_teachers=7")
    assert done.returncode == 0, done.stderr
    assert "num_teachers: 7" in done.stdout
    assert pate("train", "nonsense=1").returncode == 2


def write(root, name, **changes):
    folder = root / "runs" / "digits" / "gaussian" / name / "release"
    folder.mkdir(parents=True)
    content = {
        "dataset": "digits",
        "mechanism": "gaussian",
        "student": "fixmatch",
        "epsilon": 1.2341,
        "epsilon_charged": 2.0,
        "delta": 1e-5,
        "student_accuracy": 0.9512,
        "private": True,
        "release_id": "0123456789abcdef",
    } | changes
    (folder / "summary.json").write_text(json.dumps(content))


def test_runs_are_listed(tmp_path, capsys):
    write(tmp_path, "first")
    write(tmp_path, "seeded", private=False, epsilon=None, epsilon_charged=None)
    write(tmp_path, "labels", student=None, student_accuracy=None, dataset="clinics")
    (tmp_path / "runs" / "digits" / "gaussian" / "first" / "release" / "notes").write_text("not a summary")
    assert runs_command.main(["--home", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {"run", "first", "seeded", "labels"} == set(lines)
    assert "1.235" in lines["first"] and "95.1%" in lines["first"]  # an epsilon is rounded up
    assert "NOT PRIVATE" in lines["seeded"] and "1.23" not in lines["seeded"]
    assert runs_command.main(["--home", str(tmp_path), "--json", "--dataset", "clinics"]) == 0
    [only] = json.loads(capsys.readouterr().out)
    assert only["epsilon"] == 1.2341 and only["run"] == "digits/gaussian/labels"


@pytest.mark.parametrize("words", [["train", "--help"], ["--help"], ["train", "--cfg", "job"]])
def test_a_closed_pipe_ends_quietly(words):
    """As of ``pate train --help | head -1``."""
    near, far = os.pipe()
    os.close(near)
    command = [sys.executable, "-m", "pate_torch", *words]
    done = subprocess.run(command, stdout=far, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(far)
    assert (done.returncode, done.stderr) == (141, "")
