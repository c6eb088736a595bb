"""The report of a synthetic table: what it says of the rows, and how page, card and statement show it."""

import csv
import html
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch

from pate_torch import TabularSynthesizer
from pate_torch.privacy.domain import TableDomain
from pate_torch.release import report, table_report
from pate_torch.release.renderer import build_statement, render_model_card, render_page
from pate_torch.synthesis.mixture import NoisyTables, ProductMixture
from pate_torch.synthesis.model import TableModel
from tests.release.reporting_demo import FORMS, demo, table

DOMAIN = TableDomain.from_dict(
    {
        "target": "ill",
        "columns": {
            "age": {"type": "integer", "low": 0, "high": 100, "bins": 4},
            "ill": {"type": "category", "values": ["yes", "no"]},
        },
    }
)


def make_model(probabilities, counts=None, size=2000) -> TableModel:
    """A model whose rows have these probabilities [5, 4] of (age, ill)."""
    joint = np.asarray(probabilities, dtype=float) / np.sum(probabilities)
    cells = np.argwhere(joint > 0)
    columns = (np.eye(5)[cells[:, 0]], np.eye(4)[cells[:, 1]])
    mixture = ProductMixture(
        torch.tensor(joint[joint > 0], dtype=torch.float32),
        tuple(torch.tensor(column, dtype=torch.float32) for column in columns),
    )
    tables = NoisyTables({(0, 1): torch.tensor(joint * 1000 if counts is None else counts)}, sigma=10.0)
    return TableModel(DOMAIN, size, tables, mixture)


DEPENDENT = np.zeros((5, 4))
DEPENDENT[1:3, 3], DEPENDENT[3:, 2] = 1, 1  # the young are well, the old ill


def test_a_column_has_the_shares_of_rows_and_of_noisy_counts():
    counts = np.zeros((5, 4))
    counts[1, 2], counts[2, 3], counts[0, 0] = 300.0, 710.0, -10.0
    model = make_model(DEPENDENT, counts)
    described = table_report.describe_table(model, seed=7)
    codes_NJ = model.sample_codes(2000, np.random.default_rng(7))
    age, ill = described.columns
    assert described.num_rows == 2000 and ill.codes == ("missing", "other", "yes", "no")
    assert age.shares == tuple(np.bincount(codes_NJ[:, 0], minlength=5) / 2000)
    assert age.noisy_shares == pytest.approx((-0.01, 0.3, 0.71, 0, 0))
    assert ill.noisy_shares == pytest.approx((-0.01, 0, 0.3, 0.71))
    # The noise of a share is that of a sum of 4 cells (age) or 5 (ill) of standard deviation 10 among 1,000 units.
    assert (age.error, ill.error) == pytest.approx((10 * 4**0.5 / 1000, 10 * 5**0.5 / 1000))


def test_associations_are_those_of_the_common_values():
    draw = np.random.default_rng(0).integers
    codes_NJ = np.stack([draw(1, 4, 4000), draw(1, 3, 4000), draw(1, 3, 4000)], 1)
    codes_NJ[:, 2] = codes_NJ[:, 1]
    codes_NJ[:5] = 0  # a few rows in which all columns are missing
    (_, ab, ac), (_, _, bc), _ = table_report.compute_associations(codes_NJ, (4, 3, 3))
    assert ab == ac < 0.05 and bc == 1
    codes_NJ[:400] = 0  # many such rows are an association
    assert table_report.compute_associations(codes_NJ, (4, 3, 3))[0][1] > 0.5
    assert table_report.compute_associations(np.ones((9, 2), dtype=int), (3, 3))[0][1] == 0, "a constant has none"


def test_classifiers_learn_the_targets_that_test_rows_have():
    noisy = DEPENDENT.copy()
    noisy[1, 0], noisy[4, 1] = 1.5, 1.5  # at these ages, most targets are missing or other
    test_NJ = np.array([(1, 3), (2, 3), (3, 2), (4, 2), (4, 2)] * 20)
    majority, *learners = table_report.measure_usefulness(make_model(noisy), test_NJ)
    assert majority.share.value in (0.4, 0.6) and not majority.is_primary
    assert [(row.share.value, row.share.size, row.is_primary) for row in learners] == [(1.0, 100, True)] * 2
    independent = make_model(np.outer([0, 1, 1, 1, 1], [0, 0, 1, 1]))
    assert max(row.share.value for row in table_report.measure_usefulness(independent, test_NJ)) < 0.85


def test_accuracies_need_a_target():
    with pytest.raises(ValueError, match="target"):
        table_report.measure_usefulness(replace(make_model(DEPENDENT), domain=replace(DOMAIN, target=None)), np.ones(1))


@pytest.mark.parametrize("value", [torch.ones(2), np.float32(0.5), {0.5}])
def test_nothing_but_plain_values_enters(value):
    with pytest.raises(TypeError, match="may not enter"):
        demo(**FORMS["table"] | {"table": table(error=value)})


# ---- page, card and statement ---------------------------------------------------------------------------------------

EVIL = "<script>alert('x')</script>\"&"


def read_words(text: str) -> str:
    return re.sub(r"[\s\\]+", " ", html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("\u00a0", " "))


def test_the_page_says_what_a_table_is():
    made = demo(**FORMS["table"])
    text = read_words(render_page(made))  # a golden file holds the card
    assert "Release of a differentially private synthetic table: digits" in text
    assert "4,172 synthetic rows with 2 columns, drawn from a model of noisy tables." in text
    assert "most frequent value 57.0 %, logistic regression 79.0 %" in text
    assert "labels.csv" not in text and "release.json" not in text and "queries" not in text
    assert {"synthetic.csv", "synthesizer.safetensors"} <= made.files.keys()
    assert not {"labels.csv", "release.json"} & made.files.keys()
    assert "no substitute" not in render_page(demo()) and "synthetic" not in render_model_card(demo())
    bare = render_model_card(demo(**FORMS["table"] | {"baselines": ()}))
    assert "no public test rows" in bare and "no public labels" not in bare
    with_votes = FORMS["table"] | {"parameters": {"order": 1, "rounds": 2}}
    assert "votes of the units" in read_words(render_page(demo(**with_votes)))


def test_the_statement_of_a_table_speaks_of_no_public_points():
    content = build_statement(demo(**FORMS["table"]))
    assert any("names of the columns" in text for text in content["assumptions"])
    assert not any("public points" in text for text in (*content["assumptions"], *content["not_covered"]))


def read_columns(page: str) -> list[list[ElementTree.Element]]:
    """The rows of each column's figure."""
    return [
        [ElementTree.fromstring(row + "</div>") for row in re.findall(r'(<div class="bars-row">.*?)</div>', text, re.S)]
        for text in re.findall(r'<figure class="bars">(.*?)</figure>', page, re.S)
    ]


def test_bars_and_intervals_lie_on_one_scale():
    (smoker, ward) = read_columns(render_page(demo(**FORMS["table"])))
    assert (len(smoker), len(ward)) == (3, 2)
    for row, share, low, high in zip(smoker, (0, 0.75, 0.25), (0, 0.67, 0.29), (0.01, 0.73, 0.35), strict=True):
        bar, whisker = row.find("svg/rect"), row.find("svg/line")
        assert float(bar.attrib["width"].rstrip("%")) == pytest.approx(100 * share / 0.75, abs=0.01)
        ends = [float(whisker.attrib[key].rstrip("%")) for key in ("x1", "x2")]
        assert ends == pytest.approx([100 * low / 0.75, 100 * high / 0.75], abs=0.01)
        assert f"{100 * share:.1f}\u00a0%" in "".join(row.itertext())


def test_the_commonest_of_many_values_are_shown_in_order():
    shares = np.random.default_rng(0).permutation(np.arange(40.0)) / 780
    names = tuple(f"v{i}" for i in range(40))
    many = {"codes": names, "shares": tuple(shares.tolist()), "noisy_shares": tuple(shares.tolist())}
    page = render_page(demo(**FORMS["table"] | {"table": table(**many)}))
    shown = [row.find("span").text for row in read_columns(page)[0]]
    assert shown == [f"v{i}" for i in range(40) if 780 * shares[i] >= 15.5] and len(shown) == 24
    assert "16 rarer values are not shown." in page


def test_the_map_shades_every_pair():
    page = render_page(demo(**FORMS["table"]))
    cells = re.findall(r'<td class="hit(?: deep)?" style="--v:([\d.]+)" title="(\w+) and (\w+): 0.37">0.37</td>', page)
    assert [pair for _, *pair in cells] == [["smoker", "ward"], ["ward", "smoker"]]
    assert all(0 < float(shade) < 1 for shade, *_ in cells)


def test_names_of_columns_and_values_are_escaped():
    made = demo(**FORMS["table"] | {"table": table(name=EVIL, codes=("missing", EVIL, "b"))})
    page = render_page(made)
    assert "<script" not in page and "<script" not in render_model_card(made)
    assert html.unescape(page).count(EVIL) >= 3


# ---- a release ------------------------------------------------------------------------------------------------------


def test_the_report_of_a_release_describes_the_rows_of_the_release(tmp_path):
    draw = np.random.default_rng(0)
    age = draw.integers(0, 100, 1500)
    rows = pd.DataFrame({"age": age, "ill": np.where(age + draw.normal(0, 15, 1500) > 50, "yes", "no")})
    synthesizer = TabularSynthesizer(2, account="a", schema=DOMAIN, random_state=5, home=tmp_path, verbose=False)
    folder = synthesizer.fit(rows[:1200]).save_release(tmp_path / "release", evaluation=rows[1200:])
    with (folder / "synthetic.csv").open(newline="") as file:
        told = [row["ill"] or "missing" for row in csv.DictReader(file)]
    page = (folder / "report.html").read_text()
    assert f"{len(told):,} synthetic rows with 2 columns" in page
    for row in read_columns(page)[1]:
        name = row.find("span").text
        share = f"{100 * told.count(name) / len(told):.1f}\u00a0%"
        assert row.find("svg").attrib["aria-label"].startswith(f"{name}: {share} of the synthetic rows")
    assert float(re.search(r"Logistic regression \| ([\d.]+) %", (folder / "README.md").read_text())[1]) > 65
    assert {file.name for file in folder.iterdir()} <= {*report.FILES}
