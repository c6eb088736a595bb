"""Questions in random order, in the order of loading, and where the student is least sure."""

import torch

from pate_torch.queries.random import Margin, Random
from tests.queries.states import blobs, state


def test_without_a_shuffle_points_are_asked_in_order():
    after = state(blobs()[0], 3, query_Q=torch.tensor([1]), label_Q=torch.tensor([0]))
    assert Random(shuffle=False).select(after).tolist() == [0, 2, 3]


def test_the_random_order_is_uniform_and_the_seeds_own():
    x, _ = blobs()
    counts = torch.zeros(90)
    for seed in range(300):
        counts[Random().select(state(x, 30, seed=seed))] += 1
    # Each point is drawn 100 times of 300 on average, with deviation 8.2: 5 of them.
    assert (counts - 100).abs().max() < 41


def test_margin_asks_in_the_order_of_leads():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0.9, 0.05, 0.05], [1.0, 0.0, 0.0]])
    assert Margin().select(state(blobs(4)[0], 4, student_PC=p)).tolist() == [0, 1, 2, 3]
