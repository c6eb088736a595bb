"""Folders of images, one per class: ``<path>/<class>/.../<file>``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pate_torch.core import checks
from pate_torch.data import roles
from pate_torch.data.file_source import FileSource, Part, Points, hash_points
from pate_torch.privacy.records import PointNames
from pate_torch.privacy.unit_ids import parse_unit_ids

RESIZE_METHOD = "bilinear"
"""How images get their size: by Pillow, in eight bits a channel."""
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # others, as EPS, would start a program
_ADJACENCY_TERMS = (
    ("add_remove",),
    "Use partition=add_remove (and labels_only=false): an image's place follows from its path, which names its class.",
)
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # eight bits or fewer a channel


@dataclass(frozen=True, kw_only=True)
class ImageFolder(FileSource):
    """Images of class folders, resized to size x size. x: uint8 [N, channels, size, size].

    The folder of public images may hold unlabeled images directly when there is a test folder. Neighbors are
    add_remove: images stand in the order of their paths, which name the class too, so that one replaced by an image of
    another name, or of another class, moves those between.

    Attributes:
        size: Height and width in pixels.
        channels: 3 (color) or 1 (gray).
        group: A regular expression on the file name whose first bracket (or whole match) names the privacy unit, e.g.
            ``^(patient[0-9]+)_``; None: the unit is the file's path in the folder.
    """

    name: str = "image_folder"
    size: int = 32
    channels: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("dataset.size", self.size, low=4)
        if self.channels not in (1, 3):
            raise checks.error("dataset.channels", self.channels, "must be 1 (gray) or 3 (color)")
        if self.group is not None:
            try:
                re.compile(self.group)
            except re.error as error:
                raise checks.error("dataset.group", self.group, f"must be a regular expression ({error})") from error

    def _read_part(self, role: int, key: str, path: Path) -> Part:
        files = _list_class_images(key, path, allow_unlabeled=role == roles.PUBLIC and bool(self.test_path))
        relative_paths = [file.relative_to(path) for file in files]
        return Part(
            content=(files, relative_paths),
            label=[file.parts[0] if len(file.parts) > 1 else "" for file in relative_paths],
            make_unit_ids=lambda: parse_unit_ids(
                "dataset.group", [self._parse_unit_id(file) for file in relative_paths], len(files)
            ),
        )

    def _build_points(self, parts: dict[int, Part], role_N: np.ndarray) -> Points:
        files = [file for part in parts.values() for file in part.content[0]]
        shape = self.channels, self.size, self.size
        x, is_readable_N = torch.zeros(len(files), *shape, dtype=torch.uint8), np.ones(len(files), dtype=bool)
        for row, (file, is_public) in enumerate(zip(files, self._is_public(role_N).tolist(), strict=True)):
            try:
                x[row] = read_image("dataset.path", file, shape, RESIZE_METHOD)
            except ValueError:
                if is_public:
                    raise
                is_readable_N[row] = False
        return Points(
            x=x,
            is_readable_N=is_readable_N,
            resize=RESIZE_METHOD,
            make_content_ids=lambda public: hash_points(x[public]),
        )

    @property
    def _unit_name(self) -> str:
        return "record" if self.group is None else "group:file name"

    def _get_adjacency_terms(self) -> tuple[tuple[str, ...], str]:
        return _ADJACENCY_TERMS

    def _make_point_names(self, parts: dict[int, Part], points: Points, public: np.ndarray) -> PointNames | None:
        """Files of a public folder by their paths; images split off the data, whose paths name units, by content."""
        if self.public_path is None:
            return super()._make_point_names(parts, points, public)
        relative_paths = [path.as_posix() for part in parts.values() for path in part.content[1]]
        names = tuple(relative_paths[index] for index in public.tolist())
        return PointNames("file", names, Path(self.public_path).name)

    def _parse_unit_id(self, path: Path) -> str:
        if self.group is None:
            return path.as_posix()
        match = re.search(self.group, path.name)
        if match is None or not match.group(1 if match.re.groups else 0):
            message = "does not match every file name, and every file needs a unit"
            raise checks.error("dataset.group", self.group, message)
        return match.group(1 if match.re.groups else 0)


def read_images(key: str, files: Sequence[Path], shape: Sequence[int], resize: str | None) -> torch.Tensor:
    """Image files as uint8 [N, channels, height, width]; arguments and errors as of ``read_image``."""
    x = torch.empty(len(files), *shape, dtype=torch.uint8)
    for row, file in zip(x, files, strict=True):
        row.copy_(read_image(key, file, shape, resize))
    return x


def read_image(key: str, file: Path, shape: Sequence[int], resize: str | None) -> torch.Tensor:
    """An image file as uint8 [channels, height, width].

    Args:
        key: The setting that names it, for errors.
        file: Its place.
        shape: Channels (1: gray, 3: color), height and width.
        resize: RESIZE_METHOD, or None: only images of this size are taken.

    Raises:
        ValueError: Names the file if it cannot be read so.
    """
    channels, height, width = shape
    if resize is not None:
        checks.one_of("resize", resize, (RESIZE_METHOD,))
    try:
        with Image.open(file, formats=_FORMATS) as image:
            image_mode, size = image.mode, image.size
            resized_image = image.convert("RGB" if channels == 3 else "L").resize(
                (width, height), Image.Resampling.BILINEAR
            )
    except Exception as error:  # each format's reader has errors of its own for damaged files
        raise checks.error(key, str(file), f"is not a readable image ({error})") from error
    if image_mode not in _MODES:
        problem = f"must be one of {', '.join(_MODES)} (file {file})"
        raise checks.error("image mode", image_mode, problem, "Convert the image to eight bits a channel.")
    if resize is None and size != (width, height):
        raise checks.error("image size", size, f"must be {width} x {height} (file {file})", "Resize it yourself.")
    return torch.from_numpy(np.array(resized_image)).view(height, width, -1).permute(2, 0, 1)


def list_image_files(folder: Path) -> list[Path]:
    """Image files anywhere below a folder, in the order of their paths."""
    return [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in _SUFFIXES and file.is_file()]


def _list_class_images(key: str, folder: Path, allow_unlabeled: bool) -> list[Path]:
    """Image files below class folders (or also right in the folder), in the order of their paths."""
    if not folder.is_dir():
        raise checks.error(key, str(folder), "must be a folder of class folders")
    files = list_image_files(folder)
    if not allow_unlabeled:
        files = [file for file in files if file.parent != folder]
    if not files:
        raise checks.error(
            key,
            str(folder),
            "has no images in class folders",
            f"Expected <folder>/<class>/<file> ending in {', '.join(sorted(_SUFFIXES))}.",
        )
    return files
