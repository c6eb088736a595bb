"""Toy data that more than one test module uses."""

import io
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pate_torch.privacy.partition import AddRemove, DatasetFacts, ReplaceOne
from pate_torch.privacy.records import Dataset, DataSpec
from tests.tensor_data import Tensors

CENTER = torch.tensor([[0.0, 3.0], [3.0, -2.0], [-3.0, -2.0]])
IMAGES = DataSpec(
    name="squares", num_classes=3, input_shape=(1, 8, 8), class_names=("a", "b", "c"), mean=(0.3,), std=(0.3,)
)


def clouds(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=draw)
    return CENTER[y] + torch.randn(count, 2, generator=draw), y


def images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes, told by where a bright square lies, under noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=generator)
    x = torch.rand(count, 1, 8, 8, generator=generator) * 120
    for i, c in enumerate(y.tolist()):
        row, column = ((0, 0), (0, 4), (4, 2))[c]
        x[i, 0, row : row + 4, column : column + 4] += 110
    return x.to(torch.uint8), y


def blobs(seed: int = 0, n: int = 300) -> Tensors:
    """Three well separated clouds in the plane."""
    (x, x_pool, x_test), (y, y_pool, y_test) = (
        part.split([n // 2, 3 * n // 4 - n // 2, n - 3 * n // 4]) for part in clouds(n, seed)
    )
    public = {"pool_x": x_pool, "pool_y": y_pool, "test_x": x_test, "test_y": y_test}
    return Tensors(name="blobs", class_names=3, x=x, y=y, **public)


def benchmark_clouds(**changes):
    """Two clouds in space, of a declared size."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (500,), generator=draw)
    x = torch.randn(500, 3, generator=draw) + 2.0 * (2 * y[:, None] - 1)
    public = {"pool_x": x[300:400], "pool_y": y[300:400], "test_x": x[400:], "test_y": y[400:]}
    facts = {"name": "clouds", "class_names": 2, "nominal_size": 300, "benchmark": True}
    return Tensors(**(facts | public | {"x": x[:300], "y": y[:300]} | changes))


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    def isatty(self):
        return True


class Counted(TorchDispatchMode):
    """Counts torch's operations by name, in this thread."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function._schema.name.split("::")[-1]] += 1
        return function(*args, **(kwargs or {}))

    @classmethod
    def during(cls, work):
        with cls() as counted:
            work()
        return counted.counts


def check_adjacency(data: Dataset, adjacency: str) -> None:
    """As a run checks it."""
    partition = AddRemove() if adjacency == "add_remove" else ReplaceOne()
    DatasetFacts.from_dataset(data, partition).check_adjacency()
