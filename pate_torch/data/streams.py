"""Points as users of PyTorch have them: map-style datasets, arrays of images, and folders of images.

Points are read in blocks, so that neither the user's items nor floating-point copies of all images are in memory.

Guarantee: a point, its label and its readability are functions of its item and of the form of the public points, if
each item of the dataset is made from one record. The global generators have one fixed state before each item is read,
so random transforms give the same result for a record whatever the number of records. A sample is read twice, and a
dataset that returns other values the second time is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from pate_torch.core import checks, rng
from pate_torch.core.device import run_in_parallel
from pate_torch.core.images import convert_images, has_fractions
from pate_torch.core.progress import Progress, Stages, do_nothing
from pate_torch.data.image_folder import ImageFolderDataset, find_common_shape
from pate_torch.privacy.records import DataSpec, convert_points

_BLOCK_POINTS = 256
_NUM_CHECKED_POINTS = 8  # points that are read twice


@dataclass(frozen=True)
class PointForm:
    """Form of the public points, [Ch, H, W] or [D], which all points must have.

    ``has_fractions`` states whether the user's images hold fractions in 0..1, and not whole numbers in 0..255. None
    allows both.
    """

    shape: tuple[int, ...]
    has_fractions: bool | None = None

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    def make_encoder_spec(self) -> DataSpec:
        """Make the specification of an encoder's input, with constants for encoders that declare none of their own."""
        mean, std = ((0.5,) * self.shape[0], (0.25,) * self.shape[0]) if self.is_image else ((0.0,), (1.0,))
        return DataSpec(
            name="points", num_classes=2, input_shape=self.shape, class_names=("0", "1"), mean=mean, std=std
        )


def is_streamed(x: Any) -> bool:
    """Return whether ``PointStream`` reads points of this type: a dataset, a path, or an array of images."""
    return isinstance(x, Dataset | DataLoader | str | Path) or (hasattr(x, "ndim") and x.ndim in (3, 4))


class PointStream:
    """Points of a dataset, a folder of images, or an array of images.

    Args:
        key: Name of the argument, for messages.
        points: Map-style dataset of points or of tuples (point, label); path of a folder of images; or array of images.
            A point is a PIL image, an image [H, W] or [Ch, H, W], or a row [D].
        form: Form of the public points, by which private values are read, whatever their type. None to take the form
            of these points, which are then public.
        adjacency: Neighboring relation of private points. A private point that cannot be read becomes zeros and raises
            no error. None if the points are public.
        size: Height and width in pixels to which images of a folder are resized. None if all have one size.

    Attributes:
        is_readable_N: PRIVATE. Whether each point could be read, bool [N]. All True before the points are read.
        labels: PRIVATE. Label of each point [N]. None for a point without a label, and before the points are read.
    """

    def __init__(
        self,
        key: str,
        points: Any,
        form: PointForm | None = None,
        *,
        adjacency: str | None = None,
        size: int | None = None,
    ) -> None:
        if isinstance(points, DataLoader | IterableDataset):
            fix = "Pass loader.dataset." if isinstance(points, DataLoader) else ""
            raise checks.error(key, type(points).__name__, "must be a map-style Dataset, with len() and indices", fix)
        if isinstance(points, str | Path):
            shape = find_common_shape(key, points, size) if form is None else form.shape
            points = ImageFolderDataset(points, shape, key=key)
        elif not isinstance(points, Dataset):
            points = points.detach().cpu().numpy() if isinstance(points, Tensor) else np.asarray(points)
        if len(points) == 0:
            raise checks.error(key, type(points).__name__, "must have at least one point")
        if adjacency == "replace_one" and _is_sorted_by_path(points):
            problem = "cannot be used with a folder, because the position of an image depends on its name and class"
            raise checks.error("adjacency", adjacency, problem, "Use add_remove.")
        self.key, self.points, self.is_private = key, points, adjacency is not None
        self.is_readable_N, self.labels = np.ones(len(points), dtype=bool), list[Any]([None] * len(points))
        if form is None:
            assert not self.is_private, "the form is public"
            if isinstance(points, np.ndarray):  # values out of range are refused before the form is taken
                convert_images(key, points[:_BLOCK_POINTS])
            with rng.seeded_generators(0):
                first = points[0]
            form = _make_form(_to_array(first[0] if isinstance(first, tuple | list) else first))
        self.form = form
        if isinstance(points, np.ndarray) and _make_form(points[0]).shape != form.shape:
            raise checks.error(key, list(points.shape), f"must be images of shape {['N', *form.shape]}")

    def __len__(self) -> int:
        return len(self.points)

    def load(self, stages: Stages | None = None) -> Tensor:
        """Read all points: uint8 images [N, Ch, H, W] or float32 rows [N, D]."""
        is_array = isinstance(self.points, np.ndarray)
        if is_array and self.points.dtype == np.uint8 and self.points.flags.writeable and not self.form.has_fractions:
            return torch.as_tensor(self.points).reshape(-1, *self.form.shape)  # no copy
        progress = do_nothing if stages is None or is_array else stages(f"Reading {self.key}")
        x = torch.empty(len(self), *self.form.shape, dtype=torch.uint8 if self.form.is_image else torch.float32)
        for begin, block in zip(range(0, len(self), _BLOCK_POINTS), self.iterate_blocks(progress), strict=True):
            x[begin : begin + len(block)] = block
        return x

    def iterate_blocks(self, progress: Progress = do_nothing) -> Iterator[Tensor]:
        """Read the points in blocks, and then a sample once more. Raise ValueError if the sample is not the same."""
        stride = max(1, len(self) // _NUM_CHECKED_POINTS)
        kept_by_row = dict[int, Tensor]()
        for begin in range(0, len(self), _BLOCK_POINTS):
            rows = range(begin, min(begin + _BLOCK_POINTS, len(self)))
            block = self._read_block(rows)
            kept_by_row |= {row: block[row - begin].clone() for row in rows if row % stride == 0}
            yield block
            progress(100 * rows.stop // len(self), 100)
        self._check_second_reading(kept_by_row)

    def _check_second_reading(self, kept_by_row: dict[int, Tensor]) -> None:
        second_by_row = {row: self._read_block(range(row, row + 1))[0] for row in reversed(kept_by_row)}
        # Bytes, because NaN is not equal to itself. One private record alone stops no run.
        differs = [second_by_row[row].numpy().tobytes() != x.numpy().tobytes() for row, x in kept_by_row.items()]
        if sum(differs) > (len(differs) // 2 if self.is_private else 0):
            problem = "returns other values when a point is read a second time"
            raise checks.error(self.key, type(self.points).__name__, problem, "Use transforms without a state.")

    def _read_block(self, rows: range) -> Tensor:
        if isinstance(self.points, np.ndarray):
            images = self.points[rows.start : rows.stop]
            pixels, is_valid_B = self._convert_images(images)
            self.is_readable_N[rows.start : rows.stop] = is_valid_B
            return torch.from_numpy(pixels * is_valid_B[:, None, None, None])
        jobs = [functools.partial(self._read_point, row) for row in rows]
        if type(self.points) is ImageFolderDataset:  # decoding draws no random numbers
            return torch.stack(run_in_parallel(jobs, torch.device("cpu"), do_nothing))
        return torch.stack([read_point() for read_point in jobs])

    def _read_point(self, row: int, _: Progress = do_nothing) -> Tensor:
        self.is_readable_N[row] = True
        try:
            return self._convert_item(row)
        except Exception as error:  # a dataset of the user may raise anything
            if not self.is_private:
                problem = f"has a point that cannot be read ({type(error).__name__}: {error})"
                raise checks.error(self.key, f"point {row}", problem) from error
        self.is_readable_N[row] = False
        return torch.zeros(self.form.shape, dtype=torch.uint8 if self.form.is_image else torch.float32)

    def _convert_item(self, row: int) -> Tensor:
        draws_nothing = type(self.points) is ImageFolderDataset
        with contextlib.nullcontext() if draws_nothing else rng.seeded_generators(0):
            item = self.points[row]
        point, label = (item[0], item[1] if len(item) > 1 else None) if isinstance(item, tuple | list) else (item, None)
        self.labels[row] = label.item() if isinstance(label, Tensor | np.generic) else label
        array = _to_array(point, self.form)
        is_valid = True
        if self.form.is_image:
            pixels, (is_valid,) = self._convert_images(array[None])
            x = torch.tensor(pixels[0])
        else:
            x = convert_points(array).float()
        if not is_valid or tuple(x.shape) != self.form.shape:
            raise ValueError(f"{array.dtype} {list(array.shape)}: is not finite, or has not the form {self.form}")
        return x

    def _convert_images(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return convert_images(self.key, x, is_private=self.is_private, fractions=self.form.has_fractions)


def _is_sorted_by_path(points: Any) -> bool:
    while isinstance(points, Subset):
        points = points.dataset
    if isinstance(points, ConcatDataset):
        return any(map(_is_sorted_by_path, points.datasets))
    if not isinstance(points, Dataset):
        return False
    from torchvision.datasets import DatasetFolder  # not at the start, because this import takes a second

    return isinstance(points, DatasetFolder | ImageFolderDataset)


def _make_form(point: np.ndarray) -> PointForm:
    shape = (1, *point.shape) if point.ndim == 2 else point.shape
    return PointForm(shape, has_fractions(point) if len(shape) == 3 else None)


def _to_array(point: Any, form: PointForm | None = None) -> np.ndarray:
    """Convert an item of a dataset to an array. A PIL image becomes gray or RGB, [Ch, H, W]."""
    if isinstance(point, Image.Image):
        is_gray = point.mode in ("1", "L", "LA") if form is None else form.shape[0] == 1
        pixels = np.asarray(point.convert("L" if is_gray else "RGB"))
        return pixels[None] if is_gray else pixels.transpose(2, 0, 1)
    return point.detach().cpu().numpy() if isinstance(point, Tensor) else np.asarray(point)
