"""Every mechanism that the configuration names in every kind of noise, at small values, and votes to ask it about."""

import math

import numpy as np
import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf

from pate_torch.mechanisms.sparse_vector import SoftSparseVector, compute_instability_distance
from pate_torch.privacy.sensitive import Votes
from tests.configurations import list_options, load_option

# A histogram counts records in cells, gradient descent sums gradients: see tests/methods.
ALL = list_options("mechanism")
NAMES = [name for name in ALL if name not in ("histogram", "gradient_descent")]
SMALL = {"recommended": {"sigma": 3.0, "screen_sigma": 4.0, "threshold": 12.0, "delta": 1e-5}}


def build(name: str, noise: str = "torch", /, **values):
    """The mechanism of one configuration, its interpolations filled with small values."""
    merged = OmegaConf.merge(load_option("mechanism", name), values)
    root = OmegaConf.create({**SMALL, "privacy": {"delta": 1e-5}, "noise": noise, "mechanism": merged})
    values = OmegaConf.to_container(root.mechanism, resolve=True)
    return get_class(values.pop("_target_"))(**values)


def kinds(name: str) -> tuple[str, ...]:
    return type(build(name)).noise_kinds


FORMS = [(name, noise) for name in NAMES for noise in kinds(name)]
RECORDS = {"histogram": ("torch", "discrete"), "gradient_descent": ("torch", "discrete")}
ALL_FORMS = [(name, noise) for name in ALL for noise in (RECORDS.get(name) or kinds(name))]


def made(name: str, noise: str):
    return build(name, noise, **({"adjacency": "add_remove"} if name in RECORDS else {}))


def num_classes(name: str) -> int:
    return 2 if name == "soft_sparse_vector" else 3


def num_teachers(mechanism, queries: int, rounds: int) -> int:
    """Enough for the mechanism to answer some queries and refuse others."""
    if hasattr(mechanism, "make_cost"):
        return 2 * mechanism.make_cost(queries).min_teachers
    if mechanism.name == "single_stable":
        return 2 * math.ceil(2 * mechanism.threshold)
    return 20


def random_votes(queries: int, teachers: int, classes: int, seed: int = 0) -> Votes:
    """Rows from near unanimous to near ties."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(classes, 0.4), queries)
    return Votes(torch.from_numpy(np.stack([rng.multinomial(teachers, p / p.sum()) for p in share])), teachers)


def is_about_stability(name: str) -> bool:
    """Whether a mechanism answers by its distance to instability."""
    return name in ("single_stable", "sparse_vector", "soft_sparse_vector")


both_kinds = pytest.mark.parametrize("noise", ["torch", "discrete"])


def soft(**values) -> SoftSparseVector:
    return SoftSparseVector(**({"epsilon": 1.0, "delta": 1e-5, "max_failures": 20, "bins": 4} | values))


def halved(counts) -> int:
    return int(compute_instability_distance(torch.tensor([counts]))[0])
