"""``pate verify --claim``: what was stated, recomputed; what was not stated is asked for, never filled in."""

import math
import time

import pytest
import yaml

from pate_torch.accounting import gdp
from pate_torch.cli.main import main as pate

LOCAL = {"mechanism": "gaussian", "epsilon": 10.0, "delta": "1e-5", "sigma": 4.845e-5, "steps": 1}
LOCAL |= {"sensitivity": "1e-4", "clip": 1.0}


def told(tmp_path, capsys, **claim) -> tuple[int, dict[str, str], str]:
    """Exit code, the lines by their names, and what is said of an error."""
    file = tmp_path / "claim.yaml"
    file.write_text(yaml.safe_dump(claim))
    code = pate(["verify", "--claim", str(file)])
    out = capsys.readouterr()
    return code, {line[7:].split("  ")[0].strip(): line for line in out.out.splitlines()}, out.err


def test_noise_for_a_sensitivity_below_the_clip_is_found(tmp_path, capsys):
    code, lines, _ = told(tmp_path, capsys, **LOCAL)
    assert code == 1 and "10000 times as much" in lines["sensitivity"]
    true = gdp.compute_epsilon(1 / 4.845e-5, 1e-5)
    assert lines["guarantee"].startswith("FAILS") and f"it is {true:.6g} " in lines["guarantee"]
    assert "not stated" in lines["terms"] and lines["terms"].startswith("loose")


GAUSSIAN = {"mechanism": "gaussian", "delta": 1e-5, "sigma": 1 / gdp.compute_mu(1.0, 1e-5), "clip": 1.0, "steps": 1}
SOUND = GAUSSIAN | {"sigma": 4 * GAUSSIAN["sigma"], "steps": 4, "adjacency": "replace_one"}
LAPLACE = {"mechanism": "laplace", "delta": 1e-9, "sigma": 2.0, "clip": 1.0, "steps": 3, "adjacency": "add_remove"}


@pytest.mark.parametrize(
    ("claim", "mark"),
    [
        (SOUND | {"epsilon": 1.0}, "ok"),
        (SOUND | {"epsilon": 1.02}, "loose"),
        (SOUND | {"epsilon": 0.999}, "FAILS"),
        (GAUSSIAN | {"epsilon": 1.0, "adjacency": "add_remove"}, "ok"),
        (GAUSSIAN | {"epsilon": 1.0, "adjacency": "replace_one"}, "FAILS"),  # twice the clip
        (LAPLACE | {"epsilon": 1.5}, "ok"),  # the pure cost
        (LAPLACE | {"epsilon": 1.4}, "FAILS"),
    ],
)
def test_sound_claims_pass_and_modest_ones_are_loose(claim, mark, tmp_path, capsys):
    code, lines, _ = told(tmp_path, capsys, **claim)
    assert code == (mark == "FAILS") and lines["guarantee"].startswith(mark)


@pytest.mark.slow(reason="thousands of convolutions")
def test_dp_sgd_is_bounded_on_both_sides(tmp_path, capsys):
    """The parameters of Abadi et al. 2016, section 3.2, where moments give (1.26, 1e-5)."""
    claim = {"mechanism": "sampled_gaussian", "noise_multiplier": 4.0, "sampling_rate": 0.01, "steps": 10000}
    claim["delta"] = 1e-5
    code, lines, _ = told(tmp_path, capsys, epsilon=1.26, **claim)
    assert code == 0 and lines["guarantee"].startswith("loose")
    assert told(tmp_path, capsys, epsilon=0.85, **claim)[0] == 1


@pytest.mark.slow(reason="thousands of convolutions")
@pytest.mark.parametrize(
    "code,terms",
    [
        (1, {"epsilon": 1.83, "delta": 1 / 48_000, "noise_multiplier": 3.0, "sampling_rate": 0.2, "steps": 50}),
        (0, {"epsilon": 2.16, "delta": 1 / 48_000, "noise_multiplier": 3.0, "sampling_rate": 0.2, "steps": 50}),
        (0, {"epsilon": 0.156, "delta": 1.1e-18, "noise_multiplier": 4.0, "sampling_rate": 0.00033, "steps": 10_000}),
        (0, {"epsilon": 0, "delta": 1e-3, "noise_multiplier": 1.0, "sampling_rate": 105 / 1e5, "steps": 1}),
    ],
    ids=["a central limit", "Renyi", "delta below what a double can tell", "total variation below delta"],
)
def test_public_claims_of_dp_sgd(code, terms, tmp_path, capsys):
    """A central limit is no bound, and an epsilon of 0 can be true (sources: docs/experiments/audits.md)."""
    assert told(tmp_path, capsys, mechanism="sampled_gaussian", **terms)[0] == code


@pytest.mark.parametrize(
    "change,named",
    [
        ({"epsilon": None}, "epsilon"),
        ({"delta": None}, "delta"),
        ({"steps": None}, "steps"),
        ({"sigma": None}, "sigma"),
        ({"clip": None, "sensitivity": None}, "sigma"),
        ({"mechanism": "sampled_gaussian"}, "sampling_rate"),
        ({"mechanism": "magic"}, "mechanism"),
        ({"delta": 2}, "delta"),
        ({"sigma": math.inf}, "sigma"),
        ({"sgma": 1.0}, "claim key"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"steps": 10**7}, "steps"),
        ({"steps": 0.9}, "steps"),
        ({"steps": 1.5}, "steps"),
    ],
)
def test_what_is_missing_or_impossible_is_named(change, named, tmp_path, capsys):
    claim = {key: value for key, value in (LOCAL | change).items() if value is not None}
    code, lines, error = told(tmp_path, capsys, **claim)
    assert code == 2 and not lines and error.startswith(f"error: {named}=") and len(error.splitlines()) == 1


def test_a_file_that_is_none_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "claim.yaml").write_text("{")
    assert pate(["verify", "--claim", str(tmp_path / "claim.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: claim=")


@pytest.mark.parametrize(
    "extreme",
    [
        {"noise_multiplier": 0.01, "sampling_rate": 0.5, "steps": 10},
        {"noise_multiplier": 1.0, "sampling_rate": 0.5, "steps": 10**6},
        {"noise_multiplier": 1e-9, "mechanism": "laplace", "steps": 10},
        {"noise_multiplier": 1e300, "mechanism": "gaussian", "steps": 10},
    ],
)
def test_what_would_take_long_is_refused_in_words(extreme, tmp_path, capsys):
    begun = time.process_time()
    code, _, error = told(tmp_path, capsys, **{"mechanism": "sampled_gaussian", "epsilon": 1, "delta": 1e-5} | extreme)
    assert code == 2 and error.startswith("error: ") and len(error.splitlines()) == 1
    assert time.process_time() - begun < 5
