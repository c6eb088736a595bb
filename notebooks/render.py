"""Run every notebook, and write it with its outputs: python notebooks/render.py [name ...]

A notebook is made of its source, the .py file beside it, in an empty folder with a home of its own. What changes from
run to run without meaning anything (progress, places on this machine) is left out.
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


def rendered(source: Path) -> nbformat.NotebookNode:
    """The notebook of a source, run."""
    notebook = jupytext.read(source)
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as home:
        for key in ("HOME", "IPYTHONDIR", "MPLCONFIGDIR", "PATE_HOME"):
            (Path(home) / key).mkdir()
            os.environ[key] = str(Path(home) / key)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), before.get("PYTHONPATH")]))
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
                cell.outputs = [kept for output in cell.outputs if (kept := _kept(output, home)) is not None]
    notebook.metadata = {"kernelspec": notebook.metadata.get("kernelspec", {}), "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def _kept(output: nbformat.NotebookNode, home: str) -> nbformat.NotebookNode | None:
    """An output without progress and places; None: there is nothing else in it."""
    if output.output_type == "stream":
        if output.name == "stderr":
            return None
        output.text = re.sub(r"\S*" + re.escape(home), "", output.text)
        return output if output.text.strip() else None
    picture = output.get("data", {}).get("image/png")
    if picture:
        output.data["image/png"] = _small(picture)
    return output


def _small(picture: str) -> str:
    """The same picture in 64 colors."""
    small = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        notebook = rendered(FOLDER / f"{name}.py")
        nbformat.validate(notebook)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        size = (FOLDER / f"{name}.ipynb").stat().st_size
        print(
            f"{name}: {sum(len(c.get('outputs', ())) for c in notebook.cells)} outputs, {size / 1000:.0f} kB",
            flush=True,
        )


if __name__ == "__main__":
    main()
