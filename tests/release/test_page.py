"""report.html: self-contained, escaped, and no epsilon without its terms."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from pate_torch.release import builder, figures
from pate_torch.release.figures import MAX_POINTS, Scale, encode_picture, thin_points
from pate_torch.release.renderer import render_page
from tests.release.reporting_demo import baseline, confusion, demo, examples

VOID = {"meta", "img", "br"}


class Node:
    def __init__(self, name, attributes, parent):
        self.name, self.attributes, self.parent, self.children = name, dict(attributes), parent, []

    @property
    def words(self):
        return " ".join(c if isinstance(c, str) else c.words for c in self.children)

    def all(self):
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.all()


class Tree(HTMLParser):
    """A strict reader: every tag that opens must close, in order."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.root = self.here = Node("root", {}, None)
        self.feed(html)
        self.close()
        assert self.here is self.root, f"<{self.here.name}> is not closed"

    def handle_starttag(self, name, attributes):
        node = Node(name, attributes, self.here)
        self.here.children.append(node)
        if name not in VOID:
            self.here = node

    def handle_startendtag(self, name, attributes):
        self.here.children.append(Node(name, attributes, self.here))

    def handle_endtag(self, name):
        assert name == self.here.name, f"</{name}> closes <{self.here.name}>"
        self.here = self.here.parent

    def handle_data(self, data):
        self.here.children.append(data)


def nodes(html):
    return list(Tree(html).root.all())


def test_the_page_needs_nothing_else():
    html = render_page(demo())
    words = re.sub(r'src="data:image/png;base64,[^"]*"', "", html)
    assert not re.search(r"https?:|//\w|url\(|@import|javascript:|data:\w", words)
    for node in nodes(html):
        assert node.name not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        assert not {"href", "srcset", "action", "background"} & set(node.attributes)
        assert node.attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert not any(name.startswith("on") for name in node.attributes)
    policies = [node.attributes["content"] for node in nodes(html) if "http-equiv" in node.attributes]
    assert policies and policies[0].startswith("default-src 'none'")


PRICES = ("2.436", "2.914", "4.000", "1.357")


def holder(node):
    """The nearest element that promises to carry an epsilon with its terms."""
    while node is not None and "data-epsilon" not in node.attributes:
        node = node.parent
    return node


def test_every_epsilon_stands_with_delta_adjacency_unit_and_route():
    seen = set()
    for node in nodes(render_page(demo())):
        for child in node.children:
            shown = [price for price in PRICES if isinstance(child, str) and price in child]
            stated = isinstance(child, str) and re.search(r"(ε|epsilon) *[=≤] *[\d.]+", child)
            if node.name == "style" or not (shown or stated):
                continue
            seen.update(shown)
            assert holder(node) is not None, f"{child!r} stands alone"
            for term in ("1e-5", "add_remove", "record", "(gdp)"):
                assert term in holder(node).words, f"{term} is missing beside {child!r}"
    assert seen == set(PRICES)


def test_a_run_that_is_not_private_says_so_first_and_last_and_shows_no_epsilon():
    html = render_page(demo(private=False, epsilon_ex_post=2.1))
    tree = nodes(html)
    body = next(node for node in tree if node.name == "body")
    assert body.children[0].attributes["class"] == "banner" and "NOT PRIVATE" in body.children[0].words
    assert "NOT PRIVATE" in next(node for node in tree if node.name == "title").words
    assert "NOT PRIVATE" in next(node for node in tree if node.name == "footer").words
    words = body.words
    assert not any(price in words for price in (*PRICES, "2.100"))
    assert not re.search(r"(ε|epsilon) *[=≤]", words)


EVIL = "<script>alert('x')</script>\"&"


def test_names_are_escaped_everywhere():
    report = demo(
        dataset=EVIL,
        mechanism=EVIL,
        student=EVIL,
        unit=f"group:{EVIL}",
        accountant=EVIL,
        parameters={EVIL: EVIL},
        class_names=(EVIL, *"123456789"),
        baselines=(baseline(EVIL, 0.5, None),),
        seconds={EVIL: 1.0},
        creation_date=EVIL,
        release_id=EVIL,
        teachers_id=EVIL,
        ledger_head=EVIL,
    )
    html = render_page(report)
    assert "<script" not in html
    assert all(node.name != "script" for node in nodes(html))
    assert EVIL in next(node for node in nodes(html) if node.name == "h1").words


def test_the_page_works_on_a_phone_and_in_the_dark():
    html = render_page(demo())
    assert 'content="width=device-width, initial-scale=1"' in html
    assert "prefers-color-scheme: dark" in html


def test_intervals_and_pictures_are_there():
    html = render_page(demo())
    words = Tree(html).root.words
    assert "96.7 to 98.5" in words and "97.8" in words
    pictures = [node for node in nodes(html) if node.name == "img"]
    assert len(pictures) == 24 and all(p.attributes["alt"] for p in pictures)


def test_a_bare_report_has_no_empty_sections():
    bare = demo(
        student_accuracy=None, label_accuracy=None, confusion=(), epsilon_curve=(), examples=(),
        baselines=(), other_releases=(), class_names=(), budget_epsilon=None, epsilon_charged=None,
    )  # fmt: skip
    tree = nodes(render_page(bare))
    assert [n.attributes["id"] for n in tree if n.name == "section"] == [
        "privacy",
        "accuracy",
        "run",
        "others",
        "limits",
        "owner",
        "files",
    ]
    assert "No accuracy is published" in render_page(bare)


def test_many_classes_are_listed_by_their_commonest_confusions():
    report = demo(confusion=confusion(classes=30), class_names=tuple(f"class {c}" for c in range(30)))
    html = render_page(report)
    assert 'class="confusion"' not in html and "Taken for another most often" in html
    assert "The 24 least known of 30 classes" in html
    worst = sorted(share.share.value for share in report.class_accuracies)[:24]
    assert [share.share.value for share in figures.select_worst_classes(report)] == worst
    assert figures.select_worst_classes(demo()) == list(demo().class_accuracies), "few are in their order"


def test_confusions_of_too_many_classes_are_not_counted():
    label = torch.tensor([0, 1023, 1023])
    counts = builder.compute_confusion(label, label.clamp(max=5), 1024)
    assert (counts[0][0], counts[1023][5], sum(map(sum, counts))) == (1, 2, 3)
    assert (
        builder.compute_confusion(label, label, 2**15) == ()
        and render_page(demo(confusion=())).count("class by class") == 0
    )


def test_answers_that_are_none_are_called_so():
    shown = (replace(examples(1)[0], label=-1),)
    assert "no answer" in render_page(demo(examples=shown))


def test_the_cap_is_drawn_when_near_and_said_when_far():
    assert '"key c flat"' in render_page(demo())
    far = render_page(demo(budget_epsilon=50.0))
    assert '"key c flat"' not in far and "The cap, 50.000, lies above" in far


def test_an_unfinished_curve_shows_the_guarantee_above_it():
    assert '"key a flat"' not in render_page(demo())
    assert '"key a flat"' in render_page(demo(epsilon=2.7))


@pytest.mark.parametrize(
    "low,high,most", [(0, 1, 5), (0.7, 1, 4), (0, 286, 4), (1, 3, 5), (-0.3, 2.4e-3, 5), (0, 7e6, 5)]
)
def test_ticks_are_round_inside_and_few(low, high, most):
    values = Scale(low, high).make_ticks(most)
    assert all(low - 1e-9 <= v <= high + 1e-9 for v in values) and 2 <= len(values) <= most + 1
    steps = np.diff(values)
    assert np.allclose(steps, steps[0])
    assert f"{steps[0]:.0e}"[0] in "1235"  # 1, 2, 2.5 or 5 times a power of ten


def test_curves_place_their_points_linearly_between_zero_and_the_top():
    growth = tuple(0.01 * q for q in range(1, 287))
    html = render_page(demo(epsilon_curve=growth, budget_epsilon=None, epsilon=2.86))
    (drawn,) = (node for node in nodes(html) if node.name == "polyline")
    x, y = np.array([[float(part) for part in point.split(",")] for point in drawn.attributes["points"].split()]).T
    assert np.allclose(x, 100 * np.arange(286) / 285, atol=1e-3)
    assert np.allclose(y, 100 * (1 - np.array(growth) / 1.06 / 2.86), atol=1e-3)


def test_long_curves_are_thinned_but_keep_their_ends():
    points = [(float(i), float(i)) for i in range(10_000)]
    kept = thin_points(points)
    assert len(kept) <= MAX_POINTS and kept[0] == points[0] and kept[-1] == points[-1]


def test_dots_place_shares_on_their_scale():
    baselines = (
        baseline("a", 0.9, None),
        baseline("b", 0.5, None),
    )
    html = render_page(demo(student_accuracy=None, label_accuracy=None, confusion=(), baselines=baselines))
    places = [float(node.attributes["cx"].rstrip("%")) for node in nodes(html) if node.name == "circle"]
    low = 0.4
    assert places == pytest.approx([100 * (0.9 - low) / (1 - low), 100 * (0.5 - low) / (1 - low)], abs=1e-3)


def test_pictures_keep_their_pixels():
    import base64
    import io

    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    source = encode_picture(image).removeprefix("data:image/png;base64,")
    read = np.asarray(Image.open(io.BytesIO(base64.b64decode(source))))
    assert np.array_equal(np.moveaxis(read, 2, 0), image)
