"""The pages of the site, gathered under build/pages as they lie in the repository, for mkdocs: see ``make docs``.

Beside the documents: each notebook with its outputs, and a page for each part of the package, for mkdocstrings.
"""

from __future__ import annotations

import ast
import base64
import re
import shutil
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "pages"
LINK = re.compile(r"(?:\]\(|(?:src|srcset|href)=\")([^)\s\"#]+)")


def pages() -> list[Path]:
    """Every document, from the root of the repository."""
    tops = (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "NOTATION.md",
        "SECURITY.md",
        "examples/README.md",
    )
    more = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
    return [Path(name) for name in tops] + [file.relative_to(ROOT) for file in more]


def gather(page: Path) -> None:
    """One document, and whatever it links to that is no document."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(
        r"\]\((?:\.\./)*notebooks/([\w]+)\.ipynb\)", r"](%snotebooks/\1.md)" % ("../" * (len(page.parts) - 1)), text
    )
    for link in LINK.findall(text):
        target = (ROOT / page.parent / link).resolve()
        if target.is_dir() and target.is_relative_to(ROOT):  # a folder has no page: its sources are in the reference
            text = text.replace(f"]({link})", f"]({'../' * (len(page.parts) - 1)}reference/index.md)")
        elif target.is_file() and target.suffix != ".md" and target.is_relative_to(ROOT):
            copy = OUT / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copy)
    write(page, text)


def write(page: Path, text: str) -> None:
    (OUT / page).parent.mkdir(parents=True, exist_ok=True)
    (OUT / page).write_text(text, encoding="utf-8")


def notebook(file: Path) -> None:
    """A notebook as a page: its words, its code, what it printed and drew."""
    parts = []
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{file.stem}-{len(parts)}.png"
                (OUT / "notebooks").mkdir(parents=True, exist_ok=True)
                (OUT / "notebooks" / name).write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![A figure of the cell above]({name})")
            else:
                text = output.get("text") or data.get("text/plain", "")
                parts.append(f"```text\n{text.rstrip()}\n```")
    write(Path("notebooks") / f"{file.stem}.md", "\n\n".join(parts) + "\n")


def says(part: str) -> str:
    """What a part of the package is, by the first line of its docstring."""
    file = ROOT / "pate_torch" / ("" if part == "pate_torch" else part) / "__init__.py"
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def reference() -> None:
    """A page for each part of the package, with all its modules."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "pate_torch").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if file.stem != "__main__":
            part = module.split(".")[1] if file.parent != ROOT / "pate_torch" else "pate_torch"
            found.setdefault(part, []).append(module)
    for part, modules in found.items():
        text = f"# {part}\n\n" + "\n".join(f"::: {module}\n" for module in modules if module != f"pate_torch.{part}")
        write(Path("reference") / f"{part}.md", text)
    rows = "".join(f"- [{part}]({part}.md): {says(part)}\n" for part in sorted(found))
    write(
        Path("reference") / "index.md",
        f"# Reference\n\nWhat every module says of itself, from its docstrings.\n\n{rows}",
    )


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    for page in pages():
        gather(page)
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook(file)
    reference()
    shutil.copy(ROOT / "docs" / "site.css", OUT / "docs")
    print(f"{sum(1 for _ in OUT.rglob('*.md'))} pages under {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
