"""Readers of points, labels and private records that are tensors, arrays, datasets or folders of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.data.streams import PointForm, PointStream, is_streamed
from pate_torch.privacy.records import PrivateRecords, convert_labels, convert_points


def build_private_data(
    x: Any,
    y: Any,
    unit_id: Any,
    unit: str,
    class_names: Sequence[str],
    adjacency: str = "replace_one",
    public_x: Any = None,
    stages: Stages | None = None,
) -> PrivateRecords:
    """PRIVATE. Build private records (``PrivateRecords.from_rows``) of arrays, a Dataset or a folder of images.

    If ``y`` is None, the labels of the Dataset or the folder are class numbers or class names. The public points fix
    the form of images, and of the points of a Dataset or a folder.
    """
    if unit_id is not None and unit == "record":
        problem = "cannot be given if the privacy unit is one record, because records of one id would be one unit"
        fix = "Set unit='group:<what the ids identify>', such as unit='group:patient', or leave out unit_id."
        raise checks.error("unit_id", type(unit_id).__name__, problem, fix)
    is_readable_N, num_classes = None, len(class_names)
    if is_streamed(x):
        if public_x is None:
            raise checks.error("public_x", None, "must be given, because the public points fix the form of all points")
        if is_streamed(public_x):
            form = PointStream("public_x", public_x).form
        else:
            form = PointForm(tuple(parse_points("public_x", public_x).shape[1:]))
        stream = PointStream("x", x, form, adjacency=adjacency)
        x, is_readable_N = stream.load(stages), stream.is_readable_N
        if y is None:
            number_by_name = {name: number for number, name in enumerate(class_names)}
            y = [number_by_name.get(label, -1) if isinstance(label, str) else label for label in stream.labels]
    x = parse_points("x", x, require_finite=False)
    kind = getattr(y, "dtype", None)
    if kind in (torch.bool, torch.complex64, torch.complex128):
        raise checks.error("y", kind, "must be integers, one for each point")
    return PrivateRecords.from_rows(x, y, unit_id, unit, num_classes=num_classes, is_readable_N=is_readable_N)


def parse_points(key: str, value: Any, *, require_finite: bool = True) -> Tensor:
    """Convert points to uint8 images or float32 rows. Datasets and folders of images are read."""
    if hasattr(value, "columns"):
        fix = "Pass an array (df.to_numpy()), or use PATEClassifier, which accepts data frames."
        raise checks.error(key, type(value).__name__, "must be an array or a tensor", fix)
    x = PointStream(key, value).load() if is_streamed(value) else convert_points(value)
    if x.dim() == 2 and x.dtype.is_floating_point:
        if require_finite and not bool(x.isfinite().all()):
            raise checks.error(key, tuple(x.shape), "must be finite", "Remove NaN and infinity.")
    elif not (x.dim() == 4 and x.dtype == torch.uint8):
        shape_and_dtype = f"{('*', *x.shape[1:])} {x.dtype}"
        raise checks.error(key, shape_and_dtype, "must be images [*, Ch, H, W] or float rows [*, D]")
    if len(x) == 0:
        raise checks.error(key, tuple(x.shape), "must have at least one point")
    return x.contiguous()


def parse_labels(key: str, value: Tensor, count: int, num_classes: int) -> Tensor:
    """Convert labels to int64 [count]. Raise ValueError unless each label is an integer in 0..num_classes-1."""
    y = convert_labels(value)
    if y.shape != (count,):
        raise checks.error(key, tuple(y.shape), f"must be {count} integers, one for each point")
    if int(y.min()) < 0 or int(y.max()) >= num_classes:
        fix = "List every class in class_names."
        raise checks.error(key, "labels", f"must be integers in 0..{num_classes - 1}", fix)
    return y
