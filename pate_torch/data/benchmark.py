"""Common parts of the public image benchmarks: one fixed split, public normalization, one error if missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.data.locations import missing
from pate_torch.data.units import positions
from pate_torch.types import (
    BUILT_IN,
    CLASSES,
    CONSTANTS,
    OF_PUBLIC_POINTS,
    SIZE,
    Dataset,
    DataSpec,
    Evaluation,
    PrivateData,
    PublicPool,
)


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel of public uint8 images [Q, Ch, H, W], as fractions of 255.

    Of the public pool, never of private records. The usual published constants of these benchmarks are statistics of
    their training images, which are the private side here.
    """
    channels = x.transpose(0, 1).flatten(1)
    counts = torch.stack([torch.bincount(channel.long(), minlength=256) for channel in channels]).double()
    level = torch.arange(256, dtype=torch.float64) / 255
    weight = counts / counts.sum(1, keepdim=True).clamp(min=1)
    mean = weight @ level
    variance = weight @ level.square() - mean.square()
    std = variance.clamp(min=0).sqrt().clamp(min=1 / 255)  # a constant channel must not divide by zero
    return tuple(mean.tolist()), tuple(std.tolist())


def check_counts(public: int, test: int, private: int | None = None) -> None:
    """Refuse sizes of the three parts that are not positive."""
    checks.integer("dataset.public", public, low=1)
    checks.integer("dataset.test", test, low=1)
    if private is not None:
        checks.integer("dataset.private", private, low=1)


def held_out(x: Tensor, y: Tensor, public: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first ``public`` records and the ``test`` after them, in file order: pool x, pool y, test x, test y."""
    if public + test > len(y):
        raise checks.fail(
            "dataset.public + dataset.test",
            public + test,
            f"must be at most {len(y)}, the size of the held-out part",
            "Lower dataset.public or dataset.test.",
        )
    return x[:public], y[:public], x[public : public + test], y[public : public + test]


def assemble(
    *,
    name: str,
    class_names: tuple[str, ...],
    private: tuple[Tensor, Tensor],
    held: tuple[Tensor, Tensor, Tensor, Tensor],
    nominal_size: int,
    unit_id: np.ndarray | None = None,
) -> Dataset:
    """A benchmark's Dataset from uint8 images and int64 labels; unit ids are positions in the original file."""
    x, y = private
    pool_x, pool_y, test_x, test_y = held
    mean, std = channel_statistics(pool_x)
    spec = DataSpec(
        name=name,
        num_classes=len(class_names),
        input_shape=tuple(x.shape[1:]),
        class_names=class_names,
        mean=mean,
        std=std,
        benchmark=True,
        nominal_size=nominal_size,
    )
    return Dataset(
        spec=spec,
        private=PrivateData(x, y, positions(len(y)) if unit_id is None else unit_id),
        pool=PublicPool(pool_x),
        evaluation=Evaluation(test_x, test_y, pool_y),
        declared={CLASSES: BUILT_IN, CONSTANTS: OF_PUBLIC_POINTS, SIZE: BUILT_IN},
    )


def read(
    name: str, where: Path, download: bool, classes: int, open_: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Images and labels as ``open_`` returns them.

    Args:
        name: Name of the benchmark.
        where: The folder of its files.
        download: Whether they may be fetched.
        classes: How many there are.
        open_: Reads the files.

    Raises:
        ValueError: Files that are missing (it names the switch), unreadable or could not be fetched.
    """
    try:
        x, y = open_()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing(name, where, str(error)) from error
    except (RuntimeError, OSError) as error:
        if download:
            raise checks.fail(
                "dataset.download",
                True,
                f"{name} could not be fetched into {where.absolute()} ({error})",
                "Check the network, or put the files there by hand.",
            ) from error
        if "not found" in str(error):
            raise missing(name, where) from error
        raise unreadable(name, where, repr(error)) from error
    except Exception as error:  # each parser has errors of its own for damaged files (zlib, pickle, MATLAB, ...)
        raise unreadable(name, where, repr(error)) from error
    if len(x) != len(y) or len(y) == 0:
        raise unreadable(name, where, f"{len(x)} images, {len(y)} labels")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise unreadable(name, where, f"labels outside 0..{classes - 1}")
    return x, y


def unreadable(name: str, where: Path, reason: str) -> ValueError:
    """The error of files that are there but are not what they should be."""
    return checks.fail(
        "dataset.name",
        name,
        f"its files in {where.absolute()} could not be read ({reason})",
        "Remove them and fetch them anew with dataset.download=true.",
    )
