"""Public points in three clusters, and the states that strategies see of them."""

import torch

from pate_torch.privacy.records import DataSpec
from pate_torch.queries.base import QueryState

NONE = torch.zeros(0, dtype=torch.int64)


def blobs(count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    """Three well separated clusters in 5 dimensions."""
    y = torch.arange(count) % 3
    return torch.eye(3, 5)[y] * 8 + torch.randn(count, 5, generator=torch.Generator().manual_seed(0)), y


def state(x: torch.Tensor, num_remaining: int, num_rounds_left: int = 1, classes: int = 3, **more) -> QueryState:
    """The state before the first query, changed by ``more``."""
    width = x.shape[1]
    names, mean, std = tuple("abc"[:classes]), (0.0,) * width, (1.0,) * width
    spec = DataSpec(name="cloud", num_classes=classes, input_shape=(width,), class_names=names, mean=mean, std=std)
    facts = {"query_Q": NONE, "label_Q": NONE, "seed": 0, **more}
    return QueryState(spec=spec, pool_x=x, num_remaining=num_remaining, num_rounds_left=num_rounds_left, **facts)
