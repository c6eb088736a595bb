"""The pate command: help without torch, exit codes that arrive, and an end without a traceback."""

import os
import subprocess
import sys

import pytest
from hydra._internal.hydra import Hydra
from hydra.types import RunMode

import pate_torch
from pate_torch.accounting.events import GaussianEvent
from pate_torch.cli import main as cli
from pate_torch.cli.train import report_refusals
from pate_torch.privacy.ledger import Ledger
from tests import ROOT
from tests.command_runs import QUIET_LOG, TINY, train


def check_in_a_fresh_process(code: str, *words: str, **environment: str) -> str:
    """Run statements, which assert, in another process; its output."""
    given = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | environment
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=given)
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
    assert all(f"  {name} " in output for name in cli.COMMANDS)
    with pytest.raises(AttributeError, match="nothing_here"):
        pate_torch.nothing_here  # noqa: B018


def test_the_help_of_a_command_loads_nothing_that_takes_time():
    names = [*cli.COMMANDS, "ledger show", "site answer", "join ask"]
    output = check_in_a_fresh_process(
        "import contextlib, sys\n"
        "from pate_torch.cli.main import main\n"
        "for words in map(str.split, sys.argv[1:]):\n"
        "    print('----')\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        assert main([*words, '--help']) == 0\n"
        "    assert not {'torch', 'scipy', 'hydra', 'mpmath', 'sklearn'} & set(sys.modules), words",
        *names,
    )
    helps = dict(zip(names, output.split("----\n")[1:], strict=True))
    for name, text in helps.items():
        assert text.startswith(f"usage: pate {name} "), text
        assert not [other for other in cli.COMMANDS if other != name and f"\n    pate {other} " in text], text
    assert helps["diagnose"].split("\n\n")[1].startswith("Measure teachers on public data")


def test_the_help_of_train_lists_groups(capsys):
    assert cli.main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for start in (
        "  features: contrastive, encoder, fourier, none",
        "  dataset: a9a, ",
        "seed: 0",
        "  opening_budget: ",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_a_refused_run_leaves_no_folder(tmp_path, monkeypatch):
    for refused in ("num_teachers=0", "num_queries=5000"):  # before and after the folder is locked
        assert "must be an integer in [1, " in train(tmp_path, refused, monkeypatch=monkeypatch).error
    assert not list(tmp_path.glob("runs/*/*/*"))


RELATIVE_HOME = [
    ["train", "dataset.name=a"],
    ["plan"],
    ["label", "dataset.name=a", "num_classes=3", "votes=votes.csv"],
    ["learn", "exponential", "dataset=digits"],
    ["ledger", "show"],
    ["ledger", "move", "postgresql+psycopg://runs@localhost/pate"],
    ["verify", "release", "--ledger"],
    ["owner", "a"],
    ["runs"],
    ["site", "init", "--account", "a", "--name", "A"],
]


@pytest.mark.parametrize("words", RELATIVE_HOME, ids=" ".join)
def test_a_relative_home_is_refused_by_every_command(words, tmp_path, monkeypatch, capsys):
    """Each working directory would have a ledger, and a budget, of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATE_HOME", "one")
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.RUN)
    assert cli.main([*words, *(QUIET_LOG if words[0] == "train" else [])]) in (1, 2)
    problem = "PATE_HOME='one': must be an absolute path: it is another folder in each working directory"
    error = capsys.readouterr().err
    assert problem in error and f"write {tmp_path}/one." in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_relative_home_is_refused_by_the_name_that_was_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    error = train(tmp_path / "home", "paths.root=one", monkeypatch=monkeypatch).error
    assert error.startswith("paths.root='one': must be an absolute path") and f"write {tmp_path}/one." in error
    assert cli.main(["runs", "--home", "one"]) == 2 and "--home='one': must be an absolute" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(reason="a process that imports torch")
def test_the_estimator_loads_no_more_than_it_needs():
    unused = {"opacus", "hydra", "tensorboard", "torchvision", "mpmath", "rich", "jinja2"}
    check_in_a_fresh_process(
        f"import sys; from pate_torch import PATEClassifier; assert not {unused} & set(sys.modules)"
    )


@pytest.mark.slow(reason="a whole run in another process")
def test_a_run_does_not_load_torch_s_compiler(tmp_path):
    """Teachers, an encoder and a student are trained; threads that wait do as the user asked."""
    settings = [*TINY, "student=fixmatch", "student.network=small_cnn", "student.steps=2", "features=contrastive"]
    settings += ["recommended.features_steps=2", "student.augment={rotate:5}"]
    code = (
        "import os, sys; from pate_torch.cli.main import main; main(sys.argv[1:]); assert 'torch' in sys.modules;"
        "assert not {'torch._dynamo', 'torch._inductor', 'sympy', 'opacus'} & set(sys.modules);"
        "assert os.environ['OMP_WAIT_POLICY'] == 'ACTIVE'"
    )
    check_in_a_fresh_process(code, "train", *settings, PATE_HOME=str(tmp_path), OMP_WAIT_POLICY="ACTIVE")
    assert list(tmp_path.rglob("student.safetensors"))


@pytest.mark.parametrize(
    "words,code",
    [
        ([], 2),
        (["help"], 0),
        (["lable"], 2),
        (["ledger", "show", "--path", "nowhere.sqlite"], 1),
        (["ledger", "nonsense"], 2),
        (["label", "num_classes=3"], 2),
        (["export", "nowhere"], 2),
        (["runs", "--home", "nowhere"], 2),
        (["audit", "mechanism=nonsense"], 2),
    ],
    ids=str,
)
def test_exit_codes_are_those_of_the_commands(capsys, words, code):
    before = sys.argv
    try:
        found = cli.main(words)
    except SystemExit as stop:
        found = stop.code
    assert found == code and sys.argv is before
    message = capsys.readouterr().err
    assert bool(message) == (len(words) > 0 and code > 0)
    assert ("Did you mean 'label'" in message) == (words == ["lable"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("join charter nofile.key --colluding 1 --max-records 9", "files='nofile.key': does not exist"),
        ("site confirm nofile.json --cap 1", "charter='nofile.json': does not exist"),
        ("ledger raise-cap clinic 5 --reason more", "epsilon=5.0: must be above"),
        ("ledger move foo", "url: must be postgresql"),
    ],
    ids=lambda value: value.partition(" no")[0],
)
def test_a_refusal_names_the_argument_that_was_typed(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        terms = {"budget_epsilon": 9.0, "delta": 1e-5, "adjacency": "add_remove", "unit": "record"}
        ledger.open_account("clinic", **terms, planned_events=[GaussianEvent(mu=0.1, count=1)])
    assert cli.main(words.split()) in (1, 2)
    assert capsys.readouterr().err.removeprefix("error: ").startswith(message)


@pytest.mark.parametrize(
    ("interrupt", "line"),
    [(KeyboardInterrupt(), "Finished runs stay charged"), (KeyboardInterrupt("charged 1"), "charged 1\n")],
)
def test_an_interrupt_ends_in_one_line(interrupt, line, capsys):
    def raise_interrupt():
        raise interrupt

    assert cli.run_command(raise_interrupt) == 130
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and line in message


SLOW = pytest.mark.slow(reason="a process that imports torch")


@pytest.mark.parametrize(
    "words",
    [
        "--help >&-",
        "--help | false",
        *(pytest.param(f"train {word} | false", marks=SLOW) for word in ("--help", "--cfg job")),
    ],
)
def test_a_closed_output_ends_quietly(words):
    """As of ``pate train --help | head -1``."""
    command = f"{sys.executable} -m pate_torch {words}; exit ${{PIPESTATUS[0]}}"
    finished = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (finished.returncode, finished.stderr) == (141, "")


@pytest.mark.parametrize(
    "command",
    [lambda file: cli._dispatch("verify", "--claim", file), report_refusals(lambda _: print("a plan"))],
    ids=["verify", "plan"],
)
def test_a_command_that_refuses_arguments_lets_a_closed_output_end_it(command, monkeypatch, tmp_path):
    def close(*_, **options):
        if "file" not in options:
            raise BrokenPipeError

    (tmp_path / "claim.yaml").write_text("mechanism: gaussian\nepsilon: 9\ndelta: 1e-5\nsigma: 1\nclip: 1\nsteps: 1\n")
    monkeypatch.setattr("builtins.print", close)
    with pytest.raises(BrokenPipeError):
        command(str(tmp_path / "claim.yaml"))
