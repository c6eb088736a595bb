"""The documents as data: their fenced blocks, their marks, their tables and links.

A mark is an HTML comment before a block or a table; readers do not see it:

    <!-- file: PATH -->            the block is a file that the page's commands need
    <!-- file: PATH from NAME -->  no block: NAME of test_docs makes the file
    <!-- composed: WHY -->         the commands cannot be run here; they are composed only
    <!-- fails: TEXT -->           the commands end with exit code 1 or 2, and say TEXT
    <!-- table: WHAT -->           the table is held against the code
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "NOTATION.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md"]

_MARK = re.compile(r"<!-- (file|composed|fails|table): (.*?) -->")
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block (language: what stands after the fence), or a mark without one (language "")."""

    language: str
    text: str
    mark: str = ""
    argument: str = ""

    @property
    def commands(self) -> list[str]:
        """One line each, joined where a backslash ends it."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Every fenced block and every mark of a page, in order."""
    found, mark, lines = [], ("", ""), iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if comment := _MARK.fullmatch(line.strip()):
            mark = comment.groups()
            if mark[0] == "table" or " from " in mark[1]:
                found.append(Block("", "", *mark))
                mark = ("", "")
        elif line.startswith("```"):
            text = []
            for inner in lines:
                if inner.startswith("```"):
                    break
                text.append(inner)
            found.append(Block(line[3:].strip(), "\n".join(text) + "\n", *mark))
            mark = ("", "")
        elif line.strip():
            assert mark == ("", ""), f"{page.name}: a mark that belongs to nothing: {mark}"
    return found


def table(page: Path, what: str) -> list[list[str]]:
    """The cells of the table marked ``what``, its head first."""
    rows = page.read_text(encoding="utf-8").split(f"<!-- table: {what} -->", 1)[1].strip().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [cells[0], *cells[2:]]


def links(page: Path) -> list[str]:
    """Targets of links and pictures."""
    return [a or b for a, b in _LINK.findall(page.read_text(encoding="utf-8"))]
