"""Rewrites the words and tables of a release so that they fit forged numbers, as a careful forger would."""

import json
import re
from pathlib import Path

from markupsafe import escape

from pate_torch.release.renderer import escape_markdown
from pate_verify.words import COST_COLUMNS, OTHER_COLUMNS, Rows, Words


def escape_html(text: str) -> str:
    return str(escape(text)).replace(" %", "\u00a0%")


def format_html_rows(rows: Rows, columns: tuple[str, ...]) -> str:
    lines = []
    for first, *others in rows:
        cells = "".join(f'<td class="num">{escape_html(cell)}</td>\n' for cell in others)
        lines.append(f'<tr><th scope="row">{escape_html(first)}</th>\n{cells}</tr>\n')
    return "".join(lines)


def rewrite(release: Path, privacy: dict) -> None:
    """Rewrite privacy.json, report.html and README.md, of which ``privacy`` holds the forged numbers."""
    old, new = Words(json.loads((release / "privacy.json").read_text())), Words(privacy)
    guarantee, size = privacy["guarantee"], len(old.plain_words)
    privacy["headline"], guarantee["symbols"] = new.headline, new.symbols
    guarantee["plain_words"] = [*new.plain_words, *guarantee["plain_words"][size:]]
    pairs = [(old.headline, new.headline), (old.symbols, new.symbols)]
    pairs += zip(old.plain_words, new.plain_words, strict=True)
    pairs += zip(old.captions[:1], new.captions[:1], strict=True)
    pairs += [(old.verdict[key], new.verdict[key]) for key in old.verdict]
    pairs += [(f"route: {old.terms['accounting route']}", f"route: {new.terms['accounting route']}")]
    page, card = ((release / name).read_text() for name in ("report.html", "README.md"))
    for before, after in pairs:
        page = page.replace(escape_html(before), escape_html(after))
        card = card.replace(escape_markdown(before), escape_markdown(after))
    cells = [f'<td class="num">{words.card[0].removeprefix("ε = ")}</td>' for words in (old, new)]
    page = page.replace(*cells)  # also at the end of the curve
    epsilon, *terms = map(escape_html, new.card)
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in zip(*[iter(terms)] * 2, strict=True))
    page = re.sub(
        r'<div class="eps">.*?</dl>', lambda _: f'<div class="eps">{epsilon}</div><dl>{rows}</dl>', page, flags=re.S
    )
    if old.captions[1] != new.captions[1]:
        page, card = page + escape_html(new.captions[1]), card + escape_markdown(new.captions[1])
        if not old.other_releases:
            names = "".join(f"<th>{name}</th>" for name in OTHER_COLUMNS)
            page += f"<table><thead><tr>{names}</tr></thead><tbody></tbody></table>"
            card += f"\n\n| {' | '.join(OTHER_COLUMNS)} |\n| --- | --- | --- | --- |\n"
    for columns, values in ((COST_COLUMNS, new.costs), (OTHER_COLUMNS, new.other_releases)):
        head = "".join(f"<th[^>]*>{name}</th>" for name in columns)
        text = format_html_rows(values, columns)
        page = re.sub(
            rf"({head}.*?<tbody>).*?(</tbody>)", lambda m, text=text: f"{m[1]}\n{text}{m[2]}", page, flags=re.S
        )
        lines = "".join(f"| {' | '.join(map(escape_markdown, row))} |\n" for row in values)
        head = rf"(\| {' [|] '.join(columns)} [^\n]*\n\|[- |]*\n)(?:\|[^\n]*\n)*"
        card = re.sub(head, lambda m, lines=lines: m[1] + lines, card)
    (release / "report.html").write_text(page)
    (release / "README.md").write_text(card)
    (release / "privacy.json").write_text(json.dumps(privacy))
