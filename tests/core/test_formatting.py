"""Numbers as people read them: costs and noise are rounded up, and delta keeps its digits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pate_torch.core.formatting import format_delta, format_epsilon, format_noise_scale

EPSILONS = {2.4353597494239: "2.436", 2.2: "2.200", 0.0: "0.000", 0.1000001: "0.101", 0.012341: "0.0124"}
EPSILONS |= {3e-7: "3.00E-7", math.inf: "infinite", 2.0**100: "1267650600228229400000000000000.000"}


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_epsilon_is_rounded_up(epsilon):
    assert format_epsilon(epsilon) == EPSILONS[epsilon]


@given(st.floats(0, 1e9))
def test_a_formatted_epsilon_is_never_below_the_true_one(epsilon):
    assert epsilon <= float(format_epsilon(epsilon)) <= epsilon + max(0.001, 0.011 * epsilon)


@pytest.mark.parametrize(("delta", "text"), [(1e-5, "1e-5"), (2.559e-05, "2.559e-5"), (0.125, "1.25e-1")])
def test_delta_keeps_its_digits(delta, text):
    assert format_delta(delta) == text


@pytest.mark.parametrize(
    ("sigma", "text"),
    [(37.3094, "37.31"), (37.3101, "37.32"), (20.0, "20"), (8.3, "8.3"), (123456.0, "123500"), (0.0123401, "0.01235")],
)
def test_noise_is_rounded_up_so_that_typing_it_costs_no_more(sigma, text):
    assert format_noise_scale(sigma) == text and float(text) >= sigma
