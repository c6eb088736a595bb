"""Training at toy size on the pretend GPU, and what one step of it costs."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pate_torch.core.device import settled
from pate_torch.features.augmentation import Affine
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.gpu_check.pretend import Card
from pate_torch.protocols import StudentTask
from pate_torch.students.fixmatch import FixMatch
from pate_torch.students.label_spreading import LabelSpreading
from pate_torch.students.supervised import Supervised
from pate_torch.students.vat import Vat
from tests.worlds import IMAGES, images

CUDA = torch.device("cuda", 0)
AUGMENT = Affine(rotate=10, scale=0.1, shift=1, shear=5)
NETWORK = {"network": "small_cnn", "network_options": {"channels": [2, 4], "hidden": 8}}
SMALL = {**NETWORK, "steps": 100, "batch_size": 8, "augment": AUGMENT}
STUDENTS = {
    "supervised": Supervised(**SMALL),
    "fixmatch": FixMatch(**SMALL, unlabeled_batch=8),
    "vat": Vat(**SMALL, unlabeled_batch=8),
    "label_spreading": LabelSpreading(**SMALL, unlabeled_batch=8),
}
Lines = Counter[tuple[str, str]]
"""By file and function, which stay what they are when lines move."""


@dataclass
class Step:
    """What one step costs."""

    syncs: Lines
    to_device: Lines
    to_host: Lines


class _EnoughSeen(Exception): ...


def fits(name: str) -> Callable[[Callable[[int, int], None]], object]:
    """progress -> a student (or the contrastive encoder) fitted on the card."""
    x, y = images(40, 0)

    def fit(progress: Callable[[int, int], None]) -> object:
        with settled(CUDA):
            if name == "contrastive":
                features = ContrastiveFeatures(**SMALL)
                return features._train(x.to(CUDA), IMAGES, 0, progress)  # not the one that is kept from before
            task = StudentTask(spec=IMAGES, pool_x=x, query_Q=torch.arange(12), label_Q=y[:12])
            return STUDENTS[name].fit(task, seed=0, device=CUDA, progress=progress)

    def until_seen(progress: Callable[[int, int], None]) -> object:
        with contextlib.suppress(_EnoughSeen):
            return fit(progress)

    return until_seen


def each_step(card: Card, fit: Callable[[Callable[[int, int], None]], object], steps: int = 1) -> Step:
    """What the fourth step costs, or so many from it on: by then all that is kept is on the card."""
    seen: list[Counter] = []

    def progress(done: int, total: int) -> None:
        if done == 3:
            card.forget()
        if done == 3 + steps:
            seen.extend(lines(counter) for counter in (card.syncs, card.to_device, card.to_host))
            raise _EnoughSeen

    fit(progress)
    return Step(*seen)


def lines(counter: Counter) -> Lines:
    """What was counted, by file and function."""
    found: Lines = Counter()
    for site, times in counter.items():
        found[site.file, site.function] += times
    return found
