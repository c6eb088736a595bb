"""Runs notebooks and writes each notebook with its outputs: python notebooks/render.py [name ...]

The source of a notebook is the .py file of the same name. A notebook runs in an empty folder. Progress and paths, which
change from run to run, are removed from the outputs; of the progress, the forecast of a fit stays.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.ipynb"))


def run_notebook(source: Path) -> nbformat.NotebookNode:
    """Make a notebook from its source, and run the notebook."""
    notebook = jupytext.read(source)
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as home:
        for key in ("HOME", "IPYTHONDIR", "MPLCONFIGDIR", "PATE_HOME"):
            (Path(home) / key).mkdir()
            os.environ[key] = str(Path(home) / key)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), before.get("PYTHONPATH")]))
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for shell cells
        os.environ.pop("PATE_DATA", None)
        try:
            place = {"metadata": {"path": home}}
            NotebookClient(notebook, timeout=900, kernel_name="python3", resources=place).execute()
        finally:
            os.environ.clear()
            os.environ.update(before)
        for cell in notebook.cells:
            cell.pop("id", None)
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = _join_streams([output for output in cell.outputs if _clean_output(output, home)])
    notebook.metadata = {"kernelspec": notebook.metadata.get("kernelspec", {}), "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def _clean_output(output: nbformat.NotebookNode, home: str) -> bool:
    """Remove progress and paths from an output, and return whether the output is to be kept."""
    if output.output_type == "stream":
        output.text = re.sub(r"\S*" + re.escape(home), "", output.text)
        if output.name == "stderr":
            output.name, lines = "stdout", re.findall(r"^Forecast.*\n", output.text, re.MULTILINE)
            output.text = "".join(lines)
        return bool(output.text)
    picture = output.get("data", {}).get("image/png")
    if picture:
        output.data["image/png"] = _reduce_colors(picture)
    return True


def _join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join the parts in which a kernel happened to send one text."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return [output for output in joined if output.output_type != "stream" or output.text.strip()]


def _reduce_colors(picture: str) -> str:
    """Reduce a picture to 64 colors."""
    file = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        notebook = run_notebook(FOLDER / f"{name}.py")
        nbformat.validate(notebook)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        size = (FOLDER / f"{name}.ipynb").stat().st_size
        print(
            f"{name}: {sum(len(c.get('outputs', ())) for c in notebook.cells)} outputs, {size / 1000:.0f} kB",
            flush=True,
        )


if __name__ == "__main__":
    main()
