"""Folders of images, one for each class: ``<path>/<class>/.../<file>``."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from pate_torch.core import checks
from pate_torch.core.device import run_in_parallel
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.data.file_source import FileRecords, FileSource, Points, hash_points
from pate_torch.privacy.unit_ids import PUBLIC, parse_unit_ids

RESIZE_METHOD = "bilinear"
"""Interpolation by which Pillow resizes images."""
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # for formats such as EPS, Pillow starts a program
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # at most eight bits in each channel


@dataclass(frozen=True, kw_only=True)
class ImageFolder(FileSource):
    """Images in class folders, resized to size x size. x: uint8 [N, channels, size, size].

    If ``group`` is None, the unit id of an image is its path in the folder. If there is a test folder, the folder of
    public images may hold unlabeled images outside of class folders. Only add_remove is supported: images are sorted by
    path, which includes the class, so a replacement of another name or class would shift the positions of other images.

    Attributes:
        size: Height and width in pixels.
        channels: Number of channels: 3 for color, 1 for gray.
    """

    name: str = "image_folder"
    size: int = 32
    channels: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("dataset.size", self.size, low=4)
        if self.channels not in (1, 3):
            raise checks.error("dataset.channels", self.channels, "must be 1 (gray) or 3 (color)")
        try:
            re.compile(self.group or "")
        except re.error as error:
            raise checks.error("dataset.group", self.group, f"must be a regular expression ({error})") from error

    @property
    def _has_unnamed_records(self) -> bool:
        return False

    @property
    def _unit_name(self) -> str:
        return "record" if self.group is None else "group:file name"

    def _get_adjacency_terms(self) -> tuple[tuple[str, ...], str]:
        reason = "the position of an image depends on its path and its class."
        return ("add_remove",), f"Use partition=add_remove (and labels_only=false): {reason}"

    def _read_file(self, role: int, key: str, path: Path) -> FileRecords:
        if not path.is_dir():
            raise checks.error(key, str(path), "must be a folder of class folders")
        allows_unlabeled = role == PUBLIC and bool(self.test_path)
        images = [image for image in list_image_files(path) if allows_unlabeled or image.parent != path]
        if not images:
            fix = f"Expected <folder>/<class>/<file> ending in {', '.join(sorted(_SUFFIXES))}."
            raise checks.error(key, str(path), "has no images in class folders", fix)
        relative_paths = [image.relative_to(path) for image in images]
        unit_names = [parse_unit_name(image, self.group) for image in relative_paths]
        labels = [image.parts[0] if len(image.parts) > 1 else "" for image in relative_paths]
        unit_ids = parse_unit_ids("dataset.group", unit_names, len(images))
        names = [image.as_posix() for image in relative_paths]
        return FileRecords(content=images, labels=labels, unit_ids=unit_ids, point_names={("file", None): names})

    def _build_points(self, files: dict[int, FileRecords], role_N: np.ndarray) -> Points:
        images = [image for file in files.values() for image in file.content]
        shape = self.channels, self.size, self.size
        x, is_readable_N = torch.zeros(len(images), *shape, dtype=torch.uint8), np.ones(len(images), dtype=bool)

        def read(row: int, _: Progress) -> None:
            try:
                x[row] = read_image("dataset.path", images[row], shape, RESIZE_METHOD)
            except ValueError:
                if role_N[row] in self._public_roles:
                    raise
                is_readable_N[row] = False

        jobs = [functools.partial(read, row) for row in range(len(images))]
        run_in_parallel(jobs, torch.device("cpu"), do_nothing)
        return Points(
            gather=x.__getitem__,
            is_readable_N=is_readable_N,
            make_content_ids=lambda _, public_x: hash_points(public_x),
            options={"resize": RESIZE_METHOD},
        )


def parse_unit_name(path: Path, pattern: str | None, key: str = "dataset.group") -> str:
    """Find the name of the privacy unit by ``pattern`` in a file name, or return the whole path if None."""
    if pattern is None:
        return path.as_posix()
    match = re.search(pattern, path.name)
    unit_name = None if match is None else match.group(1 if match.re.groups else 0)
    if not unit_name:
        raise checks.error(key, pattern, "must match every file name")
    return unit_name


class ImageFolderDataset(Dataset):
    """The images below a folder, in the order of their paths, as uint8 [Ch, H, W] with the name of the class folder.

    The label of an image outside of the class folders is None. Images are converted to ``shape`` [Ch, H, W]: 1 channel
    for gray, 3 for color. Messages name the argument ``key``.
    """

    def __init__(self, path: Path | str, shape: Sequence[int], *, key: str = "path") -> None:
        self.path, self.shape, self.key = Path(path).expanduser(), tuple(shape), key
        self.files = list_image_files(self.path)
        if not self.files:
            raise checks.error(key, str(path), "must be a folder with images", f"Looked in {self.path.absolute()}.")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, str | None]:
        file = self.files[row]
        folders = file.relative_to(self.path).parts
        return read_image(self.key, file, self.shape, RESIZE_METHOD), folders[0] if len(folders) > 1 else None


def find_common_shape(key: str, path: Path | str, size: int | None) -> tuple[int, int, int]:
    """Find the common shape [Ch, H, W] of the public images of a folder, with 1 channel if all images are gray.

    Height and width are ``size`` if it is not None. Otherwise all images must have one size.
    """
    modes, sizes = set[str](), set[tuple[int, int]]()
    for file in list_image_files(Path(path).expanduser()):
        with _open_image(key, file) as image:
            modes.add(image.mode)
            sizes.add(image.size if size is None else (size, size))
    if len(sizes) > 1:
        fix = 'Pass ImageFolderDataset("folder", shape=(3, 64, 64)), for example.'
        raise checks.error(key, str(path), f"has images of {len(sizes)} sizes", fix)
    (width, height) = sizes.pop() if sizes else (1, 1)
    return 1 if modes <= {"1", "L", "LA"} else 3, height, width


@contextlib.contextmanager
def _open_image(key: str, file: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(file, formats=_FORMATS) as image:
            yield image
    except Exception as error:  # for damaged files, each format has different errors
        raise checks.error(key, str(file), f"is not a readable image ({error})") from error


def read_image(key: str, file: Path, shape: Sequence[int], resize: str | None) -> torch.Tensor:
    """Read an image file as uint8 of ``shape``: channels (1 for gray, 3 for color), height and width.

    ``resize`` is RESIZE_METHOD, or None to accept only images of this size. Images of more than eight bits per channel
    are refused.
    """
    channels, height, width = shape
    checks.optional(checks.one_of, "resize", resize, (RESIZE_METHOD,))
    with _open_image(key, file) as image:
        image_mode, size = image.mode, image.size
        converted_image = image.convert("RGB" if channels == 3 else "L")
        pixels = np.array(converted_image.resize((width, height), Image.Resampling.BILINEAR))
    if image_mode not in _MODES:
        message = f"must be one of {', '.join(_MODES)} (file {file})"
        raise checks.error("image mode", image_mode, message, "Convert the image to eight bits per channel.")
    if resize is None and size != (width, height):
        raise checks.error("image size", size, f"must be {width} x {height} (file {file})", "Resize the image.")
    return torch.from_numpy(pixels).view(height, width, -1).permute(2, 0, 1)


def list_image_files(folder: Path) -> list[Path]:
    """List the image files anywhere below a folder, in the order of their paths."""
    return [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in _SUFFIXES and file.is_file()]
