"""The notebooks run from a bare folder, carry their outputs (``make notebooks``), and are what their sources say."""

import os
import re
import sys
from pathlib import Path

import jupytext
import matplotlib.pyplot
import nbformat
import pytest
from nbclient import NotebookClient

from tests import ROOT

FOLDER = ROOT / "notebooks"


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An empty working directory and home, and no way to data outside the project."""
    for key in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "PATE_HOME"):
        (tmp_path / key.lower()).mkdir()
        monkeypatch.setenv(key, str(tmp_path / key.lower()))
    monkeypatch.delenv("PATE_DATA", raising=False)
    # The package may stand in its checkout, not installed.
    root = str(FOLDER.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))  # shell cells
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def run(notebook, folder):
    """Every cell in order, in a fresh kernel; nothing is written back."""
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()


@pytest.mark.slow(reason="runs every notebook in a kernel")
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda file: file.stem)
def test_notebook_runs_from_a_bare_folder(file, bare):
    run(nbformat.read(file, as_version=4), bare)


@pytest.mark.filterwarnings("ignore")  # as in a kernel
def test_the_notebook_on_reuse_runs_with_few_steps(bare, monkeypatch, capsys):
    """Its cells, in this process: nothing is shown by a kernel but what the slow tests show."""
    monkeypatch.chdir(bare)
    monkeypatch.setattr(matplotlib.pyplot, "show", lambda: matplotlib.pyplot.close("all"))
    names, shorter = {}, re.compile(r"\bsteps=\d+")
    for cell in nbformat.read(FOLDER / "reuse.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(shorter.sub("steps=5", cell.source), names)
    assert "epsilon = " in capsys.readouterr().out and not list(bare.iterdir())
    assert names["report"].evaluation.student_size == len(names["digits"].evaluation.y)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda file: file.stem)
def test_notebook_is_valid_small_and_carries_its_outputs(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "make notebooks"
    assert sum(len(cell.outputs) for cell in code) >= 4 and file.stat().st_size < 300_000
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert not re.search(r"/(tmp|home|root|work)/", file.read_text()), "a place on a machine"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda file: file.stem)
def test_notebook_is_made_of_its_source(file):
    source = file.with_suffix(".py")
    if not source.exists():
        pytest.skip("written as a notebook")
    made, kept = jupytext.read(source), nbformat.read(file, as_version=4)
    fix = f"jupytext --to ipynb {source.name}"
    assert [(c.cell_type, c.source) for c in kept.cells] == [(c.cell_type, c.source) for c in made.cells], fix
