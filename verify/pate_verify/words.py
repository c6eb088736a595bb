"""Rebuilds the words and the tables on the cost of a release from the numbers of its statement, and reads both pages.

The sentences are those of the package that makes releases. No code is shared with it.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from html.parser import HTMLParser
from typing import Any

ROUTES = {
    "gdp": "exact Gaussian accounting",
    "rdp": "Rényi accounting",
    "pld": "privacy loss distributions",
    "zcdp": "zero-concentrated accounting",
    "pure": "pure composition",
    "none": "nothing was released",
    "delta": "only delta is charged, as the probability of a failure",
    "cap": "the account's cap, enforced by its filter",
}
LABEL_UNIT = "label of one record"
COST_COLUMNS, CURVE_COLUMNS = ("What", "epsilon", "Route"), ("queries", "epsilon")
ACCURACY_COLUMNS = ("What", "Accuracy (95 % interval)")
OTHER_COLUMNS = ("Release", "epsilon", "Route", "What")
MAX_COLLUSIONS = 12  # largest number of rows on numbers of colluding sites
SCALE = "Without protection, such a test could find 100 %; with perfect protection, 1 %."
Rows = list[tuple[str, ...]]
STYLE_SHA256 = {"c7d5f9ca1ce5df87176a8a00ec16c79a224c0975cdd4f543542aad4d20e5568e"}
"""Hashes of the style sheets of all versions. Another style sheet could hide words."""
TAGS = (
    "b|body|br|caption|circle|code|dd|details|div|dl|dt|figcaption|figure|footer|g|h[1-3]|head|header|html|i|img|li|line"
    "|main|meta|p|polyline|rect|section|small|span|style|summary|svg|table|tbody|td|th|thead|title|tr|ul"
)
ATTRIBUTES = (
    "alt|aria-label|charset|class|content|cx|cy|data-epsilon|height|http-equiv|id|lang|name|points|preserveaspectratio|r"
    "|role|scope|src|style|title|viewbox|width|x[12]?|y[12]?"
)
"""Elements and attributes of a page. Others may show what this module does not read, or hide what it reads."""
HIDDEN_TAGS, VOID_TAGS = {"head", "svg", "details"}, {"meta", "br", "img"}
META = {("charset", "utf-8"), ("name", "viewport"), ("http-equiv", "Content-Security-Policy")}
PLACEMENT = r"(left|top|--v|--name):[\d.]+(%|ch)?"  # the only style of an element
HIDDEN_MARKDOWN = r"<|\](?=[(:])|(```|~~~)\w*[^\w\n]|[\u202d\u202e]"
"""HTML, targets of links and words behind a fence, in which Markdown hides text; marks that reverse digits."""


def format_epsilon(epsilon: float) -> str:
    """Format epsilon with three decimals, or three significant digits below 0.1, rounded up."""
    value = Decimal(repr(float(epsilon)))
    decimals = 3 if epsilon >= 0.1 or epsilon == 0 else 2 - value.adjusted()
    return str(value.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_CEILING, context=Context(prec=400)))


def format_delta(delta: float) -> str:
    """Format delta with all its digits, as in 1e-5."""
    _, digits, exponent = Decimal(repr(delta)).normalize().as_tuple()
    first, *others = map(str, digits)
    return f"{first}{'.' if others else ''}{''.join(others)}e{int(exponent) + len(others)}"


def format_route(route: str | None) -> str:
    """Format a route with its description; an unknown route is unchanged."""
    return f"{ROUTES[route]} ({route})" if route in ROUTES else route or ""


def compute_attack_bound(epsilon: float, delta: float) -> float:
    """Compute the largest share of members that a test finds at 1 % of false alarms (Kairouz, Oh & Viswanath 2015)."""
    low, high = math.exp(min(epsilon, 700.0)) * 0.01 + delta, 1 - math.exp(-epsilon) * (1 - delta - 0.01)
    return min(1.0, low, high)


def format_share(share: Mapping[str, Any], prefix: str = "") -> str:
    """Format an accuracy with its interval, if the number of points is known."""
    low, high = (f"{100 * (share[key] or 0):.1f}" for key in ("low", "high"))
    return f"{100 * share['accuracy']:.1f} %" + (f" ({prefix}{low} to {high})" if share["points"] else "")


def format_test(test: Mapping[str, Any], adjacency: str) -> str:
    """Format what a private test shows."""
    low, (accuracy, std) = math.floor(1000 * test["bound"]) / 10, (100 * value for value in test["accuracy"])
    words = (
        f"Private test {test['number']} on held-out units: accuracy of at least {low:.1f} % on such records with "
        f"probability {test['confidence']:g} (estimate {accuracy:.1f} %, standard deviation {std:.1f} %). Such records "
        "are one record each of units that are drawn like the held-out units and independently of each other. This "
        "release was not trained on the held-out units, and neither was another release of the account from the same "
        f"records in the same {'form' if adjacency == 'add_remove' else 'order'}. The probability is over their draw "
        "and over the noise, and it holds for this test alone."
    )
    if test["number"] > 1:
        words += (
            " This is not the first test on these units: a student that was chosen or changed after an earlier test "
            "may fit these units better than others."
        )
    return words


def format_certificate(model: Mapping[str, Any], is_single: bool) -> str:
    """Format the certificate of a hypothesis, up to the promise of its theorem."""
    subject = "the released rule" if is_single else "each rule for one class against the rest"
    return (
        f"With probability {model['probability']:g}, the error of {subject} on new records is at most "
        f"{math.ceil(1000 * model['excess_risk']) / 10:g} percentage points above that of the best candidate. The best "
        f"candidate has the smallest error on new records among {model['num_candidates']:,} rules, which public points "
        f"determine. This holds if all n = {model['num_records']:,} private records can be used and are independent "
        f"draws from the population of the new ones. The theorem needs n >= {model['theorem_num_records']:,} for its "
        "own promise ("
    )


class Words:
    """The words and tables on the cost and the accuracy that follow from the numbers of a private statement.

    Attributes:
        terms: Terms that every epsilon is stated with: name -> value.
        setting: The terms that all epsilons of an account share.
    """

    def __init__(self, statement: Mapping[str, Any]) -> None:
        self._guarantee, self._account = statement["guarantee"], statement["composition"]
        self._others, self._utility = list(statement["other_releases"]), statement["utility"]
        self._has_baselines = statement["mechanism"]["name"] == "marginals"  # which no other file holds
        self._trust = statement["trust"] if statement["trust"]["model"] == "distributed" else None
        unit, self._adds = self._guarantee["unit"], self._guarantee["adjacency"] == "add_remove"
        group = unit.removeprefix("group:")
        words = {"record": "one record", LABEL_UNIT: "the label of one record"}
        self._one = words.get(unit, f"all records of one {group}")
        self._all = "every record" if unit == "record" else f"every {group}, with all its records,"
        verb = "add or remove {}" if self._adds else "replace {} by any other"
        self.terms = {
            "delta": format_delta(self._guarantee["delta"]),
            "neighbors": f"{verb.format(self._one)} ({self._guarantee['adjacency']})",
            "privacy unit": unit,
            "accounting route": format_route(self._guarantee["route"]),
        }
        self.setting = f"delta = {self.terms['delta']}; neighbors: {self.terms['neighbors']}; unit: {unit}"
        self._epsilon = format_epsilon(self._guarantee["epsilon"])

    @property
    def headline(self) -> str:
        return f"epsilon = {self._epsilon} ({self.setting}; route: {self.terms['accounting route']})"

    @property
    def symbols(self) -> str:
        change = "added or removed" if self._adds else "replaced"
        return (
            f"For all D and D′ that differ by {self._one} {change}, and every set S of outcomes: Pr[M(D) ∈ S] ≤ exp(ε) "
            f"· Pr[M(D′) ∈ S] + δ, with ε = {self._epsilon} and δ = {self.terms['delta']}."
        )

    @property
    def plain_words(self) -> list[str]:
        """The first paragraphs in plain words, which precede the description of the method."""
        return [*self._list_plain_words()]

    def _list_plain_words(self) -> Iterator[str]:
        epsilon, delta, dataset = self._guarantee["epsilon"], self._guarantee["delta"], self._account["dataset"]
        power = f"at most {math.ceil(compute_attack_bound(epsilon, delta) * 1000) / 10:.1f} %"
        likely = "the same release would have been almost as likely. This holds for every reader, whatever else the "
        likely += "reader knows."
        if self._guarantee["unit"] == LABEL_UNIT:
            yield (
                f"This release protects the label of every record of {dataset}, and no features, because the features "
                f"of all records are taken to be public. If {self._one} had been replaced by any other label, {likely}"
            )
            yield (
                "For example, suppose that a test decides whether a record has label A or label B. If the test is "
                f"wrong about 1 % of the records with label B, the test finds {power} of the records with label A. "
                f"{SCALE}"
            )
        else:
            place, attackers = dataset, ""
            if self._trust is not None:
                t, num_sites = self._trust["colluding"], len(self._trust["sites"])
                place, attackers = (
                    f"the {num_sites} sites",
                    f" together with any {t} of the {num_sites} sites" if t else "",
                )
                attackers = f" It also holds against the joiner{attackers}, for the records of all other sites."
            change = "added or removed" if self._adds else "replaced by any other"
            yield f"This release protects {self._all} of {place}. If {self._one} had been {change}, {likely}{attackers}"
            yield (
                f"For example, suppose that a test decides whether {self._one} took part (a member) or not. If the "
                f"test calls 1 % of the nonmembers members, the test finds {power} of the members. {SCALE}"
            )
        if self._guarantee["route"] == "delta":
            yield (
                "Only delta is charged, and no epsilon: with probability at most δ, the release fails and may reveal "
                f"anything about {self._one}. Otherwise, such a change does not change the release at all."
            )

    @property
    def card(self) -> list[str]:
        """The words of the large epsilon at the top of report.html."""
        return [f"ε = {self._epsilon}", *(word for term in self.terms.items() for word in term)]

    @property
    def verdict(self) -> dict[str, str]:
        """Rows of the first table of both pages that state the cost."""
        epsilon, change = (
            self._guarantee["epsilon"],
            "Adding or removing {}" if self._adds else "Replacing {} by any other",
        )
        factor = "the factor exp(epsilon)"
        if epsilon < 10:
            value = math.exp(epsilon)
            text = f"{math.ceil(10 * value) / 10:.1f}" if value < 100 else f"{math.ceil(value):,}"
            factor = f"the factor {text}"
        meaning = (
            f"{change.format(self._one)} raises or lowers the probability of any result by at most {factor}, apart"
        )
        words = {"Meaning": f"{meaning} from a probability of {self.terms['delta']}.", "All releases": self._total}
        test = self._utility["private_test"]
        words["Accuracy"] = "not published"
        if share := self._utility["student"] or self._utility["labels"]:
            points = f"{share['points'] or 0:,} {'public test points' if self._utility['student'] else 'labels'}"
            words["Accuracy"] = format_share(share, "95 % interval: ") + (f", on {points}" if share["points"] else "")
        elif test:
            low = f"{math.floor(1000 * test['bound']) / 10:.1f} %"
            words["Accuracy"] = f"at least {low} with probability {test['confidence']:g}, by a test on private records"
        elif self._has_baselines:
            del words["Accuracy"]
        return words

    @property
    def accuracies(self) -> Rows:
        """First rows of the table of accuracies."""
        shares = {"Student": self._utility["student"], "Released labels": self._utility["labels"]}
        return [(name, format_share(share)) for name, share in shares.items() if share]

    @property
    def _total(self) -> str:
        total, cap, count = self._account["account_total"], self._account["account_cap"], len(self._others)
        if total is None:
            return "No total is claimed, because a release from these data used seeded noise."
        text = format_epsilon(total)
        if self._trust is not None:
            return f"The largest total that a site reserved under the charter is {text}, aborted rounds included."
        if not count:
            words = "" if cap is None else f" The cap for all releases together is {format_epsilon(cap)}."
            return f"This release is the only one of the account so far.{words}"
        words = "" if cap is None else f", and at most the cap of {format_epsilon(cap)} otherwise"
        others, both = f"{count} other release{'s' if count > 1 else ''}", "all" if count > 1 else "both"
        return f"Together with {others} of the account, epsilon is {text} if {both} were planned in advance{words}."

    @property
    def captions(self) -> list[str]:
        """The sentences beside the table of costs and the table of other releases."""
        captions = [f"Every epsilon holds at {self.setting}, and is rounded up. summary.json has all digits."]
        if self._others:
            text = (
                f"The epsilon of each release alone, at {self.setting}. The table of privacy costs above has the total."
            )
            return [*captions, text]
        place = "ledger has no other release of these data" if self._trust is None else "charter has no other round"
        return [*captions, f"The {place}."]

    @property
    def costs(self) -> Rows:
        """Rows of the table of costs, without the column of explanations."""
        return [(name, *_format_cost(value, route, "not known")) for name, value, route in self._list_costs()]

    def _list_costs(self) -> Iterator[tuple[str, float | None, str]]:
        account, epsilon, route = self._account, self._guarantee["epsilon"], format_route(self._guarantee["route"])
        yield "This release alone", epsilon, route
        total, total_route = account["account_total"], format_route(account["account_route"])
        if self._trust is not None:
            t, costs = self._trust["colluding"], self._trust["costs"]
            numbers = [*range(t + 1, len(costs))][:: -math.ceil(len(costs) / MAX_COLLUSIONS)]
            for u in sorted({*numbers, *([0] if t else [])}):
                name = f"Against {u} sites" if u else "Results only"
                yield name, costs[u]["epsilon"], format_route(costs[u]["route"])
            yield "Total at a site", total, total_route
            return
        for part in account["parts"] if len(account["parts"]) > 1 else ():
            yield join_words(part["what"]), part["epsilon"], format_route(part["route"])
        if account["this_release_ex_post"] not in (None, epsilon):
            yield "Spent (ex post)", account["this_release_ex_post"], route
        yield "All releases together", total, total_route
        if account["account_total_ex_post"] not in (None, total):
            yield "All spent (ex post)", account["account_total_ex_post"], "composed"
        yield "Cap", account["account_cap"], "set by the owner"

    @property
    def other_releases(self) -> Rows:
        """Rows of the table of other releases."""
        return [
            (part["release_id"], *_format_cost(part["epsilon"], format_route(part["route"]), "none"), part["what"])
            for part in self._others
        ]


def _format_cost(epsilon: float | None, route: str, missing: str) -> tuple[str, str]:
    return (missing, "") if epsilon is None else (format_epsilon(epsilon), route)


# ---- the pages -------------------------------------------------------------------------------------------------------


def join_words(text: str) -> str:
    """Join the words of a text by single spaces, which also replace no-break spaces."""
    return " ".join(text.split())


def strip_backslashes(text: str) -> str:
    """Join the words of a text, and leave out backslashes, which escape the marks of Markdown."""
    return join_words(text.replace("\\", ""))


def strip_markup(text: str) -> str:
    """Resolve the escapes of Markdown text."""
    return strip_backslashes(html.unescape(text))


def hides_text(card: str) -> bool:
    """Return whether README.md has marks that can hide text."""
    return re.search(HIDDEN_MARKDOWN, re.sub(r"\\[^\w\s]", "", card)) is not None


@dataclass
class Page(HTMLParser):
    """What report.html shows in tables and in its card.

    Attributes:
        card: Words of the large epsilon, and of the terms beside it.
        tables: Rows of each table that is shown.
        folded_tables: Rows of each table that is shown after a click.
        text: All text that is shown.
        faults: Names of what can hide text, or is read by browsers in another way.
    """

    source: str
    card: list[str] = field(default_factory=list)
    tables: list[Rows] = field(default_factory=list)
    folded_tables: list[Rows] = field(default_factory=list)
    text: str = ""
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._cell: list[str] | None = None
        self._row: list[str] = []
        self._open_tags: list[str] = []
        self._style = ""
        self.feed(self.source)
        self.close()
        self.text = join_words(self.text)
        if hashlib.sha256(self._style.strip().encode()).hexdigest() not in STYLE_SHA256:
            self.faults.append("style")
        if self._open_tags or re.search("[\u202d\u202e]", self.source):
            self.faults.append("text")

    @property
    def _is_hidden(self) -> bool:
        return not HIDDEN_TAGS.isdisjoint(self._open_tags)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a table, a row, or a cell."""
        names, facts = [name for name, _ in attrs], dict(attrs)
        is_known = len(facts) == len(names) and all(re.fullmatch(ATTRIBUTES, name) for name in names)
        is_known &= re.fullmatch(TAGS, tag) is not None
        is_known &= re.fullmatch(PLACEMENT, facts.get("style") or "top:0") is not None
        is_known &= tag != "meta" or any(item in META for item in attrs)
        self.faults += [] if is_known else [f"<{tag}>"]
        self._open_tags += [tag] if tag not in VOID_TAGS else []
        if tag == "table":
            (self.folded_tables if self._is_hidden else self.tables).append([])
        elif tag == "tr":
            self._row = []
        elif tag in ("th", "td", "dt", "dd") or (tag == "div" and "eps" in (facts.get("class") or "").split()):
            self._cell = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Read a mark of a chart; in a browser, other elements stay open."""
        self.faults += [] if "svg" in self._open_tags else [f"<{tag}/>"]
        super().handle_startendtag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        """End a cell or a row."""
        if tag == "tr" and (tables := self.folded_tables if self._is_hidden else self.tables):
            tables[-1].append(tuple(self._row))
        elif tag in ("th", "td", "dt", "dd", "div") and self._cell is not None:
            if tag in ("th", "td") or not self._is_hidden:
                (self._row if tag in ("th", "td") else self.card).append(join_words("".join(self._cell)))
            self._cell = None
        self.faults += [] if self._open_tags and self._open_tags.pop() == tag else [f"</{tag}>"]

    def handle_data(self, data: str) -> None:
        """Add text to the current cell, if there is one."""
        if "style" in self._open_tags:
            self._style += data
        elif not self._is_hidden:
            self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def handle_comment(self, data: str) -> None:
        """Note a comment, or what a browser reads as one."""
        self.faults.append("<!-- -->")

    handle_pi = unknown_decl = handle_comment


def read_markdown_tables(text: str) -> list[Rows]:
    """Read the rows of each table of README.md, without the line below the names of the columns."""
    tables: list[Rows] = []
    is_inside = False
    for line in text.splitlines():
        if is_row := line.startswith("|"):
            cells = tuple(map(strip_markup, re.split(r"(?<!\\)\|", line)[1:-1]))
            if not is_inside:
                tables.append([])
            if {*cells} != {"---"}:
                tables[-1].append(cells)
        is_inside = is_row
    return tables


def find_rows(tables: list[Rows], columns: tuple[str, ...]) -> Rows | None:
    """Find the rows below these columns, without further columns; None unless exactly one table has the columns."""
    size = len(columns)
    found = [rows[1:] for rows in tables if rows and rows[0][:size] == columns]
    return [row[:size] for row in found[0]] if len(found) == 1 else None
