"""Classifiers and tables that more than one test module uses."""

import numpy as np
import pandas as pd

from pate_torch import PATEClassifier


def draw_table(count: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Ill are the old in ward a and the young elsewhere; one age in twenty is missing."""
    draw = np.random.default_rng(seed)
    ages, wards = draw.integers(20, 80, count).astype(float), draw.choice(["a", "b", "c"], count)
    table = pd.DataFrame({"age": ages, "ward": wards})
    ill = np.where((table.age > 50) ^ (table.ward == "a"), "ill", "well")
    table.loc[draw.random(count) < 0.05, "age"] = np.nan
    return table, ill


def make_classifier(place, epsilon=4.0, **settings):
    defaults = {"account": "clouds", "num_records_about": 900, "classes": [0, 1, 2], "home": place, "verbose": False}
    return PATEClassifier(epsilon, **(defaults | settings))
