"""Gathers the pages of the site under build/pages for mkdocs (``make docs``).

Besides the documents: each notebook with its outputs, and a page of all configuration keys.
"""

from __future__ import annotations

import base64
import inspect
import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat

from pate_torch import components

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "pages"
LINK = re.compile(r"(?:\]\(|(?:src|srcset|href)=\")([^)\s\"#]+)")


def list_pages() -> list[Path]:
    """List every document, relative to the root of the repository."""
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


def gather_page(page: Path) -> None:
    """Copy one document, and the files that it links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(
        r"\]\((?:\.\./)*notebooks/([\w]+)\.ipynb\)", r"](%snotebooks/\1.md)" % ("../" * (len(page.parts) - 1)), text
    )
    for link in LINK.findall(text):
        target = (ROOT / page.parent / link).resolve()
        if target.is_dir() and target.is_relative_to(ROOT):  # a folder has no page: its sources are in the reference
            text = text.replace(f"]({link})", f"]({'../' * (len(page.parts) - 1)}docs/reference/python.md)")
        elif target.is_file() and target.suffix != ".md" and target.is_relative_to(ROOT):
            copy = OUT / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copy)
    write_page(page, text)


def write_page(page: Path, text: str) -> None:
    (OUT / page).parent.mkdir(parents=True, exist_ok=True)
    (OUT / page).write_text(text, encoding="utf-8")


def convert_notebook(file: Path) -> None:
    """Write a notebook as a page of its text, code, printed output and figures."""
    parts = []
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", cell.source))
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
    write_page(Path("notebooks") / f"{file.stem}.md", "\n\n".join(parts) + "\n")


def read_attributes(target: Any) -> dict[str, str]:
    """Read the meaning of each field from the sections ``Attributes:`` of a dataclass and its bases."""
    found: dict[str, str] = {}
    for kind in reversed(target.__mro__):
        section = inspect.cleandoc(kind.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for line in section.partition("\n\n")[0].splitlines():
            if match := re.match(r"    (\w+): (.*)", line):
                name, found[match[1]] = match[1], match[2]
            elif found:
                found[name] += " " + line.strip()
    return found


def format_options(group: str, name: str) -> str:
    """Format the keys of one option of a group as a table."""
    values = components.get_component(group, name)
    if "_target_" not in values:
        return ""
    target = pkgutil.resolve_name(values["_target_"])
    summary = (inspect.getdoc(target) or "").partition("\n")[0]
    meanings = read_attributes(target)
    rows = [
        f"| `{key}` | `{json.dumps(value, default=str)}` | {meanings.get(key, '').replace('|', chr(92) + '|')} |"
        for key, value in values.items()
        if key not in ("_target_", "defaults")
    ]
    head = f"### {group}={name}\n\n{summary} (`{values['_target_'].rpartition('.')[2]}`)\n\n"
    return head + ("| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n\n" if rows else "")


def format_file(file: Path) -> str:
    """Format the keys of a YAML file as a table, with the comment beside each key as its meaning."""
    rows: list[str] = []
    path: list[str] = []
    for line in file.read_text(encoding="utf-8").partition("\nhydra:")[0].splitlines():
        if match := re.fullmatch(r"( *)(- )?([\w@]+):(?: +([^# ].*?))?(?: +# (.*))?", line):
            path[len(match[1]) // 2 :] = [match[3]]
            group = f"[options](#{match[3].partition('@')[0]}) " if match[2] else ""
            if match[4]:
                key = ".".join(path).removeprefix("defaults.")
                rows.append(f"| `{key}` | `{match[4]}` | {group}{match[5] or ''} |")
    return f"## conf/{file.name}\n\n| key or group | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def write_configuration() -> None:
    """Write the page of all keys: the two files of keys, and the fields of the classes of each option."""
    text = "# Configuration\n\nEvery key of `train.py`, `pate plan` and `pate label`, generated from the code. "
    text += "`${...}` refers to another key. `group=option` on the command line chooses an option of a group.\n"
    for name in ("config.yaml", "account.yaml"):
        text += "\n" + format_file(ROOT / "conf" / name)
    for group in ("dataset", "experiment"):
        names = ", ".join(f"`{file.stem}`" for file in sorted((ROOT / "conf" / group).glob("*.yaml")))
        text += f"\n## {group}\n\nFiles in `conf/{group}`: {names}.\n"
    for group, options in components.COMPONENTS.items():
        text += f"\n## {group}\n\n" + "".join(format_options(group, name) for name in options)
    write_page(Path("reference") / "configuration.md", text)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    for page in list_pages():
        gather_page(page)
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        convert_notebook(file)
    write_configuration()
    shutil.copy(ROOT / "docs" / "site.css", OUT / "docs")
    print(f"{sum(1 for _ in OUT.rglob('*.md'))} pages under {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
