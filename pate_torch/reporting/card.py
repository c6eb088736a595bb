"""release/README.md: the model card. The same facts as the page, for those who read text."""

from __future__ import annotations

from pathlib import Path

from pate_torch.accounting.shown import show_epsilon
from pate_torch.reporting import charts, statement
from pate_torch.reporting.released import BECAUSE, NOT_MEASURED, ReleasedReport
from pate_torch.reporting.statement import NOT_PRIVATE


def write_card(report: ReleasedReport, path: Path) -> None:
    """README.md of the release folder."""
    path.write_text(card(report), encoding="utf-8")


def plain(value: object) -> str:
    """Text that Markdown shows as it stands: neither HTML, nor tables, nor emphasis made from a name."""
    kept = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|#":
        kept = kept.replace(mark, f"\\{mark}")
    return kept


def _table(*rows: tuple[object, ...]) -> str:
    head, *body = [f"| {' | '.join(plain(cell) for cell in row)} |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _list(rows: tuple[str, ...]) -> str:
    return "\n".join(f"- {plain(row)}" for row in rows)


def card(report: ReleasedReport) -> str:
    """The card as Markdown."""
    parts = [f"# {plain(report.title)}"]
    if not report.private:
        parts.append(f"> **{plain(statement.WARNING)}**")
    parts += [
        "Everything in this folder may be published; the folder `private/` beside it may not."
        if report.private
        else f"**{NOT_PRIVATE}.** Nothing in this folder may be published as protected.",
        "## Privacy",
        f"**{plain(statement.headline(report))}**",
        *[plain(paragraph) for paragraph in statement.plain_words(report)],
        plain(statement.symbols(report)),
    ]
    if report.private:
        rows = [
            (p.name, "not known" if p.epsilon is None else show_epsilon(p.epsilon), p.route, p.covers)
            for p in statement.composition(report)
        ]
        parts += [
            f"Every epsilon below is at {plain(report.setting)}; rounded up.",
            _table(("What", "epsilon", "Route", "Covers"), *rows),
        ]
    parts += [
        "It holds if:" if report.private else "It would hold if the noise were secret, and:",
        _list(statement.assumptions(report)),
    ]
    parts += ["It does not cover:", _list(statement.not_covered(report))]
    parts += ["## Accuracy", _accuracy(report), "## Use", _use(report), "## Files"]
    parts.append(_table(("File", "What it is"), *report.files.items()))
    return "\n\n".join(parts) + "\n"


def _accuracy(report: ReleasedReport) -> str:
    rows: list[tuple[object, ...]] = [("What", "Accuracy (95 % interval)", "Of")]
    if report.student_share is not None:
        rows.append(("student", charts.show_share(report.student_share), f"{report.student}, test points"))
    if report.label_share is not None:
        rows.append(("released labels", charts.show_share(report.label_share), "questions answered"))
    rows += [(base.name, charts.show_share(base.share), BECAUSE[base.because]) for base in report.baselines]
    if len(rows) == 1:
        return NOT_MEASURED
    below = f"\n\n**{plain(report.below_majority)}**" if report.below_majority else ""
    return _table(*rows) + below


def _use(report: ReleasedReport) -> str:
    classes = ", ".join(plain(name) for name in report.class_names) or "see the data set"
    if not report.student:
        return (
            f"Labels of public points for {plain(report.dataset)} (classes: {classes}), by their position. Training on "
            "`labels.csv` costs no further privacy."
        )
    return (
        f"A classifier for {plain(report.dataset)} (classes: {classes}). The weights are plain tensors: "
        "`safetensors.torch.load_file('student.safetensors')`. Using them, or training on `labels.csv`, costs no "
        "further privacy. Accuracies on test points say nothing of other populations; records unlike most others "
        "are learnt least, which is what the protection means."
    )
