"""Sweeps on public data: risks against the exact law of the draw, repeatable draws, and the plot."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from pate_torch.core.rng import make_numpy_generator
from pate_torch.hypotheses.algorithms import LearnOptions, make_problems
from pate_torch.hypotheses.release import HypothesisMethod
from pate_torch.hypotheses.sweep import run_sweep, write_sweep
from pate_torch.mechanisms.exponential import compute_log_probabilities
from pate_torch.privacy.partition import DatasetFacts, ReplaceOne, select
from tests.benchmarks.split_worlds import plan_of, write_signs


@pytest.fixture
def config(tmp_path):
    source = replace(write_signs(tmp_path, 400), num_features=1)
    return replace(plan_of(source, tmp_path / "home"), partition=ReplaceOne())


def method_of(name="exponential", **options):
    return HypothesisMethod(algorithm_name=name, options=LearnOptions(hypotheses="thresholds", **options), delta=1e-4)


def expected_risk(config, options, size=None):
    """The mean risk on the records and on the test records under the exact law of the exponential mechanism."""
    data = config.dataset.load()
    order = make_numpy_generator(config.seed, "learn", "sweep").permutation(len(data.private))[:size]
    private = select(data.private, order)
    facts = DatasetFacts.from_dataset(replace(data, private=private), ReplaceOne())
    (part,) = make_problems(private, facts, options, config.seed, 1e-4)
    candidates = part.make_quantile_hypotheses()
    errors = part.hypotheses.count_errors(candidates, part.sample.x, part.sample.y)
    law = np.exp(compute_log_probabilities(-errors, options.epsilon / 2))
    test_x, test_y = data.evaluation.x.double().numpy(), data.evaluation.y.numpy() == 1
    test = part.hypotheses.count_errors(candidates, test_x, test_y) / len(test_y)
    return {"sample": law @ errors / part.sample.n, "test": law @ test}


@pytest.mark.parametrize("sweep", ["epsilon=.01,.05", "n=20,200"])
def test_mean_risks_are_those_of_the_exact_law(sweep, config):
    method = method_of(epsilon=0.04)
    result = run_sweep(config, method, sweep, 100)
    key = result["swept"]
    for point in result["points"]:
        options = replace(method.options, epsilon=point["epsilon"]) if key == "epsilon" else method.options
        expected = expected_risk(config, options, int(point["n"]) if key == "n" else None)
        for name, risk in expected.items():
            draws = np.array(point[name]["draws"])
            assert abs(draws.mean() - risk) < 4 * draws.std() / 10
            assert point[name]["mean"] == pytest.approx(draws.mean())
            assert np.mean(draws < point[name]["low"]) <= 0.05 >= np.mean(draws > point[name]["high"])
    first, last = (expected_risk(config, replace(method.options, epsilon=e))["sample"] for e in (0.01, 0.05))
    assert key == "n" or first - last > 0.03  # so that a sweep that ignores epsilon fails


def test_the_same_seed_gives_the_same_draws_and_no_two_draws_share_their_noise(config):
    one, again = (run_sweep(config, method_of(), "epsilon=.01,.01", 9) for _ in range(2))
    assert one == again and one != run_sweep(replace(config, seed=1), method_of(), "epsilon=.01,.01", 9)
    draws = [point["sample"]["draws"] for point in one["points"]]
    assert draws[0] != draws[1] and len(set(draws[0])) > 3


def test_the_table_the_file_and_the_plot_say_the_same(config, tmp_path, capsys):
    result = run_sweep(config, method_of("sspp"), "epsilon=.01,.1,1", 8)
    write_sweep(result, tmp_path / "out")
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "sweep.json").read_text()) == result
    svg = (tmp_path / "out" / "sweep.svg").read_text()
    root, space = ElementTree.fromstring(svg), "{http://www.w3.org/2000/svg}"
    assert all("NOT PRIVATE" in text for text in (printed, svg, result["note"]))
    circles = [c for c in root.iter(f"{space}circle")]
    height = {}  # a larger mean is a smaller y
    for color, name in (("#c05a00", "sample"), ("#1f5fa8", "test")):
        height[name] = [float(c.get("cy")) for c in circles if c.get("fill") == color][:3]
        means = np.array([point[name]["mean"] for point in result["points"]])
        slope = np.polyfit(means, height[name], 1)
        assert slope[0] < 0 and np.allclose(np.polyval(slope, means), height[name], atol=0.1)
        assert all(f"{mean:.4f}" in printed for mean in means)
    assert re.findall(r">(0\.01|0\.1|1)<", svg)[-3:] == ["0.01", "0.1", "1"]


def test_data_that_are_not_declared_public_are_not_read(config, monkeypatch):
    private = replace(config, dataset=replace(config.dataset, benchmark=False, publish_split=True))
    monkeypatch.setattr(type(private.dataset), "load", lambda self: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"dataset\.benchmark=False"):
        run_sweep(private, method_of(), "epsilon=1", 2)
