"""LZCW21 Table 4 at a tiny size: real mechanism, ledger and labeling; means, intervals and files."""

import contextlib
import csv
import dataclasses
import io
import json
import math

import numpy as np
import pytest
import torch

from benchmarks.replications import liu2021_tables as tables
from benchmarks.replications.liu2021 import Liu2021Table4
from benchmarks.replications.splits import Mean, compute_accuracies, compute_sigma
from pate_torch.accounting import gdp
from pate_torch.config import Study
from pate_torch.privacy.partition import AddRemove
from tests.benchmarks.split_worlds import ASKED, plan_of, write_signs
from tests.run_configs import changed

REPLICATION = pytest.mark.slow(reason="replication of a paper: 30 trained students")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_signs(tmp_path_factory.mktemp("libsvm"), 600)


def study(source, **changes):
    given = {"tables": {"mushroom": {"dataset": source}}, **ASKED, "epsilons": (1.0, 4.0), "shard": 12, "repeats": 3}
    return Liu2021Table4(**{**given, **changes})


@pytest.fixture(scope="module")
def measured(source, tmp_path_factory):
    plan = plan_of(source, tmp_path_factory.mktemp("measured"), insecure_noise_seed=3)
    printed = io.StringIO()
    assert isinstance(study(source), Study)
    with contextlib.redirect_stdout(printed):
        study(source).run(plan)
    return plan.folder, printed.getvalue()


@REPLICATION
def test_every_cell_is_measured_spends_what_its_noise_costs_and_is_shown(measured):
    folder, printed = measured
    cells = list(csv.DictReader((folder / "liu2021_table4.csv").read_text().splitlines()))
    assert len(cells) == 3 * 2 * (1 + 2)  # splits, methods, (no privacy, two epsilons)
    assert [path.name for path in folder.parent.iterdir()] == ["run"]  # splits leave no ledger and no teachers
    for cell in cells:
        queries, spent, budget = int(cell["queries"]), float(cell["epsilon_ex_post"]), float(cell["epsilon"])
        full = 60 if cell["method"] == "PSQ" else 18  # a tenth of the records is public, and PSQ asks about all of it
        assert queries == full or (cell["method"] == "ASQ" and 0 < queries < full)
        if math.isinf(budget):
            assert math.isinf(spent)
            continue
        mu = math.sqrt(2 * queries) / float(cell["sigma"])
        assert spent == pytest.approx(gdp.compute_epsilon(mu, 1 / 480), rel=1e-9) and spent <= budget * (1 + 1e-9)
        if queries == full:
            assert spent == pytest.approx(budget, rel=1e-8)
    # Without privacy the student learns what the teachers know.
    content = json.loads((folder / "liu2021_table4.json").read_text())
    free = [row for row in content["rows"] if row["epsilon"] == "inf"]
    assert [row["method"] for row in free] == ["PSQ", "ASQ"]
    assert all(row["accuracy"]["mean"] > 0.9 and row["balanced"]["mean"] > 0.9 for row in free)  # majority: 2/3
    noisy = [row for row in content["rows"] if (row["method"], row["epsilon"]) == ("PSQ", 1.0)]
    assert noisy[0]["label_accuracy"]["mean"] < free[0]["label_accuracy"]["mean"]
    # The text fits 80 columns and shows the paper's figures.
    text = (folder / "liu2021_table4.txt").read_text()
    assert max(map(len, text.splitlines())) <= 80 and text in printed
    assert all(words in text for words in ("PSQ-NP", "ASQ-NP", "majority class", ".7534", "ASQ - PSQ"))
    assert (folder / "liu2021_table4.png").read_bytes().startswith(b"\x89PNG")


def cell(method, split, accuracy):
    place = {"dataset": "a9a", "split": split, "method": method, "epsilon": 0.5, "sigma": 10.0}
    measured = {"queries": 5, "epsilon_ex_post": 0.5, "label_accuracy": 0.5, "accuracy": accuracy, "balanced": 0.5}
    return tables.Table4Cell(**place, **measured)


def test_pairing_removes_what_splits_share():
    cells = [cell("PSQ", s, a) for s, a in enumerate((0.2, 0.5, 0.8))]
    cells += [cell("ASQ", s, a) for s, a in enumerate((0.31, 0.6, 0.89))]
    (difference,) = tables.compare_methods(cells)
    spread = [0.11, 0.10, 0.09]
    assert difference.accuracy.mean == pytest.approx(0.1)
    assert difference.accuracy.half == pytest.approx(1.96 * np.std(spread, ddof=1) / math.sqrt(3))
    assert tables.average_cells(cells)[0].accuracy.half > 10 * difference.accuracy.half
    assert tables.average_cells(cells)[0].paper == Mean(mean=0.5040, half=0.0034)


def test_balanced_accuracy_is_blind_to_the_majority():
    truth = torch.tensor([0] * 8 + [1] * 2)
    assert compute_accuracies(truth, torch.zeros(10, dtype=torch.int64), 3) == (0.8, 0.5)
    mixed = torch.tensor([0] * 4 + [1] * 6)
    assert compute_accuracies(truth, mixed, 3) == (pytest.approx(0.6), 0.75)


def test_the_noise_is_the_exact_one():
    """a9a, epsilon 1, 293 queries: 60.169 on the count of ones, which moves by 1 where GNMax's counts move sqrt 2."""
    sigma = compute_sigma(num_queries=293, epsilon=1.0, delta=1 / 39073)
    assert sigma / math.sqrt(2) == pytest.approx(60.169, abs=1e-3)


@pytest.mark.parametrize(
    ("budget", "records", "asked", "answered", "ex_post"),
    [
        *((49, 6499, 0.5, 40.1, 0.4461), (49, 6499, 1.0, 42.9, 0.9267), (49, 6499, 2.0, 46.5, 1.9410)),
        *((293, 39073, 1.0, 290.8, 0.9958), (293, 39073, 2.0, 290.3, 1.9896)),
    ],
)
def test_the_paper_calibrated_its_noise_exactly(budget, records, asked, answered, ex_post):
    """Table 4's epsilon ex post for the answers it gave is exact Gaussian DP, and no closed form by zCDP."""
    delta, share = 1 / records, answered / budget
    mu = math.sqrt(2 * budget) / compute_sigma(budget, asked, delta)
    exact = gdp.compute_epsilon(mu * math.sqrt(share), delta)
    rho = (math.sqrt(math.log(1 / delta) + asked) - math.sqrt(math.log(1 / delta))) ** 2  # Algorithm 1's
    closed_form = rho * share + 2 * math.sqrt(rho * share * math.log(1 / delta))
    assert abs(exact - ex_post) < 0.001
    assert abs(exact - ex_post) < abs(closed_form - ex_post)


def test_a_size_that_is_not_public_and_data_that_are_no_benchmark_are_refused(source, tmp_path):
    plan = plan_of(source, tmp_path)
    with pytest.raises(ValueError, match="replace_one"):
        study(source).run(changed(plan, partition=AddRemove()))
    own = dataclasses.replace(source, benchmark=False, publish_split=True, publish_test=True)
    with pytest.raises(ValueError, match="not a public benchmark"):
        study(own).run(plan)
