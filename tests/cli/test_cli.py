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


def check_in_a_fresh_process(code: str, *words: str, **environment: str) -> str:
    """Run statements, which assert, in another process; its output."""
    given = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240, env=given, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_and_its_help_load_no_torch_and_change_nothing_in_the_host_program():
    output = check_in_a_fresh_process(
        "import os, sys\n"
        "before = dict(os.environ), list(sys.meta_path), sys.excepthook, list(sys.path_hooks)\n"
        "import pate_torch\n"
        "assert before == (dict(os.environ), sys.meta_path, sys.excepthook, sys.path_hooks)\n"
        "assert 'PATE' in dir(pate_torch)\n"
        "from pate_torch.cli.main import main, run_command\n"
        "main(['--help'])\n"
        "assert not {'torch', 'hydra'} & set(sys.modules)\n"
        "run_command(lambda: 0)\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'"  # threads that wait sleep
    )
    assert all(f"  {name} " in output for name in ("train", "label", "audit", "plan", "ledger", "predict", "export"))
    with pytest.raises(AttributeError, match="nothing_here"):
        pate_torch.nothing_here  # noqa: B018


COMPILER = ("torch._dynamo", "torch._inductor", "sympy")
"""Torch's compiler takes two seconds to load, and compiles nothing here."""


def test_python_loads_what_all_fits_use_and_leaves_the_configuration_alone():
    unused = ("opacus", "hydra", "tensorboard", "torchvision", "matplotlib", "mpmath")
    check_in_a_fresh_process(
        f"import sys; from pate_torch import PATEClassifier; assert not set({unused}) & set(sys.modules)"
    )


@pytest.mark.slow(reason="a whole run in another process")
def test_a_run_does_not_load_torch_s_compiler(tmp_path):
    """Teachers, an encoder and a student are trained; threads that wait do as the user asked."""
    settings = [*TINY, "student=fixmatch", "student.network=small_cnn", "student.steps=2", "features=contrastive"]
    settings += ["recommended.features_steps=2", "student.augment={rotate:5}"]
    code = (
        "import os, sys; from pate_torch.cli.main import main; main(sys.argv[1:]);"
        f"assert 'torch' in sys.modules and not set({(*COMPILER, 'opacus')}) & set(sys.modules);"
        "assert os.environ['OMP_WAIT_POLICY'] == 'ACTIVE'"
    )
    check_in_a_fresh_process(code, "train", *settings, PATE_HOME=str(tmp_path), OMP_WAIT_POLICY="ACTIVE")
    assert list(tmp_path.rglob("student.safetensors"))


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


@pytest.mark.slow(reason="a process that imports torch")
def test_train_is_train_py():
    words = [sys.executable, "-m", "pate_torch", "train", "--cfg", "job", "num_teachers=7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "num_teachers: 7" in done.stdout, done.stderr


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


SLOW = pytest.mark.slow(reason="a process that imports torch")


@pytest.mark.parametrize(
    "words",
    [["--help"], *(pytest.param(words, marks=SLOW) for words in (["train", "--help"], ["train", "--cfg", "job"]))],
)
def test_a_closed_pipe_ends_quietly(words):
    """As of ``pate train --help | head -1``."""
    near, far = os.pipe()
    os.close(near)
    command = [sys.executable, "-m", "pate_torch", *words]
    done = subprocess.run(command, stdout=far, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(far)
    assert (done.returncode, done.stderr) == (141, "")
