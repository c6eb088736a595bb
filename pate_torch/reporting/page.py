"""report.html: one page that needs nothing else, neither a network nor a script. Privacy first, then what it bought."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from pate_torch.accounting.shown import show_delta, show_epsilon
from pate_torch.core.progress import clock
from pate_torch.reporting import charts, statement
from pate_torch.reporting.charts import Line, Row
from pate_torch.reporting.markup import Child, Markup, join, tag
from pate_torch.reporting.released import BECAUSE, NOT_MEASURED, ReleasedReport
from pate_torch.reporting.statement import NOT_PRIVATE, Price, show_route

MAX_EXAMPLES = 40
MAX_CLASSES = 24  # a larger confusion matrix cannot be read

# Nothing may be fetched: a browser refuses what this page does not carry itself.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_page(report: ReleasedReport, path: Path) -> None:
    """report.html."""
    path.write_text(page(report), encoding="utf-8")


def page(report: ReleasedReport) -> str:
    """The whole page."""
    title = report.title
    style = files("pate_torch.reporting").joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title if report.private else f"{NOT_PRIVATE}: {title}"),
        tag("style", Markup(style)),
    )
    sections = [
        _privacy(report),
        _accuracy(report),
        _growth(report),
        _examples(report),
        _classes(report),
        _curves(report),
        _run(report),
        _others(report),
        _limits(report),
        _files(report),
    ]
    body = tag("body", _banner(report), _header(report, title), tag("main", *sections), _footer(report))
    content = tag("html", head, body, lang="en").replace(" %", "\u00a0%")
    return f"<!doctype html>\n{content}\n"


def _section(title: str, *children: Child, id: str) -> Markup:
    return tag("section", tag("h2", title), *children, id=id)


def _lead(words: str) -> Markup:
    return tag("p", words, class_="lead")


def _banner(report: ReleasedReport) -> Markup | None:
    if report.private:
        return None
    return tag("div", tag("div", tag("b", NOT_PRIVATE), statement.WHY_NOT), class_="banner", role="alert")


def _header(report: ReleasedReport, title: str) -> Markup:
    ids = [report.created, f"release {report.release_id}" if report.release_id else ""]
    return tag(
        "header",
        tag("p", "Report of a release", class_="over"),
        tag("h1", title),
        tag("p", " · ".join(part for part in ids if part), class_="meta"),
    )


def _privacy(report: ReleasedReport) -> Markup:
    eps = report.claimed_epsilon
    if eps is None:
        figure = tag("div", NOT_PRIVATE, class_="eps none")
    else:
        figure = tag("div", tag("i", "ε = "), tag("b", show_epsilon(eps)), class_="eps")
    terms = [
        ("delta", show_delta(report.delta)),
        ("Neighbouring data sets", f"{report.adjacency_words} ({report.adjacency})"),
        ("Unit that is protected", report.unit),
        ("Route of the accounting", report.route_words),
    ]
    if eps is None:
        terms = [("Guarantee", "none")]
    facts = join(tag("div", tag("dt", name), tag("dd", value)) for name, value in terms)
    words = [tag("p", paragraph) for paragraph in statement.plain_words(report)]
    card = tag(
        "div",
        tag("div", figure, tag("dl", facts), class_="guarantee", data_epsilon="" if eps is not None else None),
        *words,
        tag(
            "p",
            statement.symbols(report),
            tag("br"),
            tag("small", _setting(report)),
            class_="formula",
            data_epsilon="" if eps is not None else None,
        ),
        class_="card",
    )
    assumed = tag("ul", *[tag("li", row) for row in statement.assumptions(report)], class_="plain")
    return _section(
        "What is protected, and how well",
        _lead("The promise of this release, and all it rests on." if report.private else "Nothing is promised."),
        card,
        _composition(report),
        tag("h3", "It holds if" if report.private else "It would hold if the noise were secret, and"),
        assumed,
        id="privacy",
    )


def _setting(report: ReleasedReport) -> str | None:
    return report.terms[0].upper() + report.terms[1:] if report.private else None


def _composition(report: ReleasedReport) -> Markup | None:
    prices = statement.composition(report)
    if not prices:
        return None
    head = tag("tr", tag("th", "What"), tag("th", "epsilon", class_="num"), tag("th", "Route"), tag("th", "Covers"))
    rows = [
        tag(
            "tr",
            tag("th", price.name, scope="row"),
            tag("td", _epsilon_or(price), class_="num"),
            tag("td", price.route if price.epsilon is not None else ""),
            tag("td", price.covers),
        )
        for price in prices
    ]
    caption = tag("caption", f"Every epsilon at {report.setting}. Shown rounded up; unrounded in summary.json.")
    table = tag("table", caption, tag("thead", head), tag("tbody", *rows), class_="stack", data_epsilon="")
    return join([tag("h3", "How much of the account it used"), table])


def _epsilon_or(price: Price) -> str:
    return "not known" if price.epsilon is None else show_epsilon(price.epsilon)


def _accuracy(report: ReleasedReport) -> Markup:
    rows = []
    if report.student_share is not None:
        note = (
            f"{report.student}; on {report.student_share.size} test points"
            if report.student_share.size
            else report.student
        )
        rows.append(Row(name="Student", share=report.student_share, note=note, strong=True))
    if report.label_share is not None:
        asked = f"{report.queries_answered} of {report.queries_asked} questions answered"
        rows.append(Row(name="Released labels", share=report.label_share, note=asked))
    for base in report.baselines:
        rows.append(Row(name=base.name, share=base.share, note=BECAUSE[base.because]))
    if not rows:
        return _section("What was learnt", _lead(NOT_MEASURED), id="accuracy")
    below = tag("p", tag("b", report.below_majority)) if report.below_majority else None
    return _section(
        "What the student learnt",
        _lead("Share of points classified correctly; 95 % Wilson intervals where their number is known."),
        charts.dots(rows, "Accuracies with intervals"),
        below,
        id="accuracy",
    )


def _growth(report: ReleasedReport) -> Markup | None:
    if not report.private or not report.epsilon_curve:
        return None
    curves = [Line(name="this release", points=_numbered(report.epsilon_curve))]
    if report.account_curve:
        curves.append(Line(name="all releases together", points=_numbered(report.account_curve), kind="b"))
    cap, highest = report.budget_epsilon, max(*report.epsilon_curve, *report.account_curve, report.epsilon or 0.0)
    far = cap is not None and cap > 2.5 * highest
    ends = (1, report.queries_asked)
    if report.epsilon is not None and report.epsilon > 1.001 * report.epsilon_curve[-1]:
        curves.append(Line(name="guarantee", points=[(q, report.epsilon) for q in ends], kind="a", flat=True))
    if cap is not None and not far:
        curves.append(Line(name="cap", points=[(q, cap) for q in ends], kind="c", flat=True))
    drawn = charts.lines(curves, x_name="questions asked", y_name="epsilon")
    above = f" The cap, {show_epsilon(cap)}, lies above the picture." if cap is not None and far else ""
    caption = tag("figcaption", f"{report.with_terms(report.epsilon_curve[-1])} after the last question.{above}")
    return _section(
        "The price, question by question",
        _lead("Each answer costs a little; costs compose to less than their sum."),
        tag("figure", drawn, caption, data_epsilon=""),
        _numbers(report),
        id="growth",
    )


def _numbered(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(q, value) for q, value in enumerate(values, start=1)]


def _numbers(report: ReleasedReport) -> Markup:
    """A dozen points of the curve as a table, for those who do not see pictures."""
    total = len(report.epsilon_curve)
    chosen = sorted({max(1, round(total * i / 10)) for i in range(1, 11)})
    rows = [
        tag("tr", tag("td", q, class_="num"), tag("td", show_epsilon(report.epsilon_curve[q - 1]), class_="num"))
        for q in chosen
    ]
    head = tag("tr", tag("th", "questions", class_="num"), tag("th", "epsilon", class_="num"))
    table = tag(
        "table",
        tag("caption", f"This release; {report.terms}."),
        tag("thead", head),
        tag("tbody", *rows),
        data_epsilon="",
    )
    return tag("details", tag("summary", "As numbers"), table)


def _examples(report: ReleasedReport) -> Markup | None:
    shown = report.examples
    if shown is None or len(shown.label) == 0:
        return None
    items = []
    for image, label, query in list(zip(shown.image, shown.label, shown.query, strict=True))[:MAX_EXAMPLES]:
        name = report.class_name(label) if label >= 0 else "no answer"
        items.append(tag("li", charts.picture(image, f"public point {query}"), name, tag("small", f"no. {query}")))
    lead = "Public points, each with the label the noisy vote gave it. Noise and teachers err: some are wrong."
    if report.slopes:
        lead = "Public points, each with the class that the model moved by noisy sums gave it. Noise and models err."
    elif report.census_rounds:
        lead = (
            "Public points, each with the class that the noisy counts of its cell gave it. Noise errs, and cells mix."
        )
    return _section(
        "Some questions and their released labels",
        _lead(lead),
        tag("ul", *items, class_="examples"),
        id="examples",
    )


def _classes(report: ReleasedReport) -> Markup | None:
    if not report.confusion:
        return None
    names = [report.class_name(c) for c in range(len(report.confusion))]
    rows = [
        Row(name=name, share=share, strong=True)
        for name, share in zip(names, report.class_shares, strict=True)
        if share is not None
    ]
    each = tag("figure", tag("h3", "Each class"), charts.dots(rows, "Accuracy of each class", dense=True))
    caption = tag("figcaption", "Rows: the truth. Columns: what the student said. Shade: share of the row.")
    if len(names) <= MAX_CLASSES:
        right = tag("figure", tag("h3", "What is taken for what"), charts.confusion(report.confusion, names), caption)
    else:
        right = tag("figure", tag("h3", "Taken for another most often"), _worst(report, names))
    return _section(
        "The student, class by class",
        _lead(f"On {sum(map(sum, report.confusion))} test points, with 95 % intervals."),
        tag("div", each, right, class_="pair"),
        id="classes",
    )


def _worst(report: ReleasedReport, names: Sequence[str]) -> Markup:
    """The commonest confusions, where the matrix is too large to show."""
    pairs = [
        (count, true, guess)
        for true, row in enumerate(report.confusion)
        for guess, count in enumerate(row)
        if guess != true and count
    ]
    rows = [
        tag("tr", tag("td", names[true]), tag("td", names[guess]), tag("td", count, class_="num"))
        for count, true, guess in sorted(pairs, reverse=True)[:12]
    ]
    head = tag("tr", tag("th", "True"), tag("th", "Said"), tag("th", "Times", class_="num"))
    return tag("table", tag("thead", head), tag("tbody", *rows))


def _curves(report: ReleasedReport) -> Markup | None:
    drawn = [
        tag("figure", charts.lines([Line(name="", points=points)], x_name="step", y_name=name, zero=False))
        for name, points in report.student_curves.items()
        if len(points) > 1
    ]
    if not drawn:
        return None
    lead = _lead("Seen by the student alone: public points and released labels.")
    return _section("How the student was trained", lead, tag("div", *drawn, class_="pair"), id="curves")


def _run(report: ReleasedReport) -> Markup:
    facts: list[tuple[str, Child]] = [
        ("Mechanism", report.mechanism),
        ("Its parameters", report.parameters_words or "none"),
        ("Noise", {"torch": "continuous, in floating point", "discrete": "exact and discrete"}[report.noise]),
        ("Teachers", report.num_teachers or "none"),
        ("Questions asked", report.queries_asked),
        ("Questions answered", report.queries_answered),
        ("Student", report.student),
        ("Records" if report.census_rounds else "Ensemble" if report.teachers_kept else "Votes", report.teachers_id),
        ("Newest ledger entry", tag("code", report.ledger_head) if report.ledger_head else None),
        ("Time", ", ".join(f"{stage} {clock(took)}" for stage, took in report.seconds.items())),
    ]
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in facts if value not in (None, "")
    ]
    return _section("The run", tag("table", tag("tbody", *rows), class_="facts"), id="run")


def _others(report: ReleasedReport) -> Markup:
    title = "What else was released from these data"
    if not report.other_releases:
        return _section(title, tag("p", "Nothing, as far as this ledger knows."), id="others")
    head = tag("tr", tag("th", "Release"), tag("th", "What"), tag("th", "epsilon", class_="num"), tag("th", "Route"))
    rows = []
    for other in report.other_releases:
        known = other.epsilon is not None and report.private
        rows.append(
            tag(
                "tr",
                tag("th", tag("code", other.release_id), scope="row"),
                tag("td", other.what),
                tag("td", show_epsilon(other.epsilon) if known and other.epsilon is not None else "none", class_="num"),
                tag("td", show_route(other.accountant) if known else ""),
            )
        )
    caption = tag("caption", f"Each by itself, at {report.setting}. Together: see the account above.")
    table = tag(
        "table",
        caption if report.private else None,
        tag("thead", head),
        tag("tbody", *rows),
        class_="stack",
        data_epsilon="" if report.private else None,
    )
    return _section(title, table, id="others")


def _limits(report: ReleasedReport) -> Markup:
    rows = [tag("li", row) for row in statement.not_covered(report)]
    return _section("What is not covered", tag("ul", *rows, class_="plain"), id="limits")


def _files(report: ReleasedReport) -> Markup:
    rows = [
        tag("tr", tag("th", tag("code", name), scope="row"), tag("td", what)) for name, what in report.files.items()
    ]
    return _section("Files beside this page", tag("table", tag("tbody", *rows), class_="stack"), id="files")


def _footer(report: ReleasedReport) -> Markup:
    seal = "" if report.private else f"{NOT_PRIVATE}. "
    return tag("footer", f"{seal}Written by pate_torch from released values alone.")
