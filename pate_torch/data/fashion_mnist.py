"""Fashion-MNIST: MNIST's format and split, ten kinds of clothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchvision import datasets

from pate_torch.data.mnist import Mnist


@dataclass(frozen=True, kw_only=True)
class FashionMnist(Mnist):
    """28x28 gray clothes from ``FashionMNIST/raw``; parts and errors as in Mnist.

    Source: Xiao, Rasul, Vollgraf 2017 (arXiv 1708.07747).
    """

    name: str = "fashion_mnist"

    reader: ClassVar[type[datasets.MNIST]] = datasets.FashionMNIST
    classes = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
