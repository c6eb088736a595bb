"""Points of the sites and of the joiner: rows of tables, images and texts, and features that a frozen encoder computes.

The public file of a round describes the points and names the encoder by the SHA-256 of its files and by its options. A
site computes no constant of its own, so the features of a record depend on this record and on public values alone.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pate_torch.core import checks, texts
from pate_torch.core.progress import Stages
from pate_torch.data.base import compute_normalization, make_encoded_spec
from pate_torch.data.encoded_dataset import encode_by_role
from pate_torch.data.image_folder import RESIZE_METHOD, list_image_files, parse_unit_name
from pate_torch.data.streams import PointForm, PointStream
from pate_torch.data.table_files import check_text_type, read_table
from pate_torch.data.tabular import encode_text_column
from pate_torch.features.encoder import TEXT_SPEC, Encoder
from pate_torch.privacy.records import DataSpec, EncoderCard
from pate_torch.privacy.schema import TableSchema, normalize_class_name

IMAGE = "image"
"""Name of the column of images: an array [N, H, W] or [N, Ch, H, W], or the path of a folder."""
EncoderFiles = Encoder | Mapping[str, Path | str] | None
"""An encoder, or the paths of its files, {"weights": ..., "tokenizer": ...}. None if points are not encoded."""
Encode = Callable[[Tensor], Tensor]
"""Function from points [N, ...] to features [N, D], which encodes each point by itself."""


def read_columns(
    key: str,
    path: Path,
    separator: str = ",",
    *,
    label: str = "",
    unit: str | None = None,
    text: str | None = None,
    pattern: str | None = None,
) -> dict[str, Any]:
    """PRIVATE. Read a table, images in folders that are named by their classes, or arrays, as {column: cells}.

    Args:
        key: Name of the argument, for messages.
        path: CSV or Parquet file; folder of images; .npz file with the array "image" and an array for each other
            column; or .npy file of images.
        separator: Separator of a CSV file.
        label: Name of the column of the class, which is made for a folder of images.
        unit: Name of the column of the unit, which is made for a folder of images. None if each record is a unit.
        text: Name of the column of texts, which must hold text in .npz and Parquet files. None if points are no texts.
        pattern: Regular expression that finds the unit in the name of an image file. None if each record is a unit.
    """
    if path.is_dir():
        files = [file.relative_to(path) for file in list_image_files(path)]
        columns = {label: pa.array([file.parts[0] if len(file.parts) > 1 else "" for file in files], pa.string())}
        if unit is not None and pattern is not None:
            columns[unit] = pa.array([parse_unit_name(file, pattern, "group") for file in files], pa.string())
        return {IMAGE: path, **columns}
    if path.suffix not in (".npy", ".npz"):
        return dict(read_table(key, path, separator, id_column=unit, text_column=text))
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            arrays = {IMAGE: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        columns = {name: array if name == IMAGE else pa.array(array) for name, array in arrays.items()}
        if text is not None and text in columns:
            check_text_type(text, columns[text].type)
        return columns
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise checks.error(key, str(path), f"is not a readable .npy or .npz file ({error})") from error


def make_spec(
    rows: Mapping[str, Any], label: str, classes: Sequence[str], *, text: str | None = None, encoder: Any = None
) -> tuple[DataSpec, Tensor]:
    """Make the facts of the records from PUBLIC rows, and return them with the public points [P, ...].

    Args:
        rows: PUBLIC rows, {column: cells}, with the column of images, the column of texts, or the features of a table.
        label: Name of the column of the private rows that holds the class.
        classes: Name of each class.
        text: Column of the texts. None if the points are no texts.
        encoder: ``Encoder`` of the points, which may state the size of images. None if points are not encoded.
    """
    public = {name: cells for name, cells in rows.items() if name != label}
    names = tuple(map(normalize_class_name, classes))
    if len(set(names)) < len(names):
        raise checks.error("classes", names, "must be different names")
    facts: dict[str, Any] = {"name": "sites", "num_classes": len(names), "class_names": names}
    if text is not None:
        points = replace(TEXT_SPEC, **facts, text=text)
        x_P = convert_columns(points, public, is_private=False)[0]
    elif IMAGE in public:
        stream = PointStream("public", public[IMAGE], size=None if encoder is None else encoder.size)
        x_P = stream.load()
        if stream.form.has_fractions:
            raise checks.error("public", "fractions", "must be images of whole numbers in 0..255")
        mean, std = compute_normalization(x_P)
        resize = RESIZE_METHOD if isinstance(public[IMAGE], Path) else None
        points = DataSpec(input_shape=stream.form.shape, mean=mean, std=std, resize=resize, **facts)
    else:
        schema = TableSchema.from_public(public).with_fill_values(public)
        x_P = torch.from_numpy(schema.encode(public, unknown="zeros", missing="nan"))
        mean, std = compute_normalization(x_P, np.isin(np.arange(x_P.shape[1]), schema.numeric_indices).tolist())
        low, high = tuple(x_P.amin(0).tolist()), tuple(x_P.amax(0).tolist())
        points = DataSpec(input_shape=(x_P.shape[1],), mean=mean, std=std, low=low, high=high, schema=schema, **facts)
    spec = points
    if encoder is not None:
        x_P = encode_points(encoder, points, x_P, "the joiner", None)
        spec = make_encoded_spec(points, encoder.make_card(points), x_P)
    check_spec(spec, x_P[0].numel())
    return spec, x_P


def check_spec(spec: DataSpec, width: int) -> None:
    """Raise ValueError if points do not have ``width`` numbers, or if a point could influence another point."""
    card, points = spec.encoder, get_raw_spec(spec)
    if int(np.prod(spec.input_shape)) != width:
        raise ValueError("its points have a wrong shape")
    if card is not None and (card.points is None or card.options.get("batch_size") != 1):
        raise ValueError("features.batch_size must be 1, so that the encoder sees each record without the others")
    if points.encoder is not None or not (points.is_image or points.schema or (points.text and card)):
        raise ValueError("its points are neither rows of a table nor images, nor texts with an encoder")


def get_raw_spec(spec: DataSpec) -> DataSpec:
    """Return the specification of the points before they are encoded."""
    return spec if spec.encoder is None or spec.encoder.points is None else spec.encoder.points


def convert_columns(
    points: DataSpec, columns: Mapping[str, Any], *, is_private: bool = True
) -> tuple[Tensor, np.ndarray | None]:
    """PRIVATE. Convert the cells of each record to a point that is not encoded yet.

    Returns:
        Points [N, ...], and whether each private image could be read, bool [N]. The second value is None if all points
        could be read. A missing text is encoded as zeros, and a missing number as the fill value of its column.
    """
    if points.is_image:
        checks.one_of("data", IMAGE, list(columns), "The round asks for images.")
        # The sum over records depends on the position of no record, so folders are allowed under both adjacencies.
        adjacency = "add_remove" if is_private else None
        stream = PointStream("data", columns[IMAGE], PointForm(tuple(points.input_shape), False), adjacency=adjacency)
        return stream.load(), stream.is_readable_N
    if points.text is None:
        assert points.schema is not None
        return torch.from_numpy(points.schema.encode(columns, unknown="zeros", missing="nan")), None
    cells = columns[checks.one_of("data", points.text, list(columns), "The round asks for this column.")].to_pylist()
    encode_cells = encode_text_column if is_private else texts.encode_texts
    return encode_cells("data", cells, points.input_shape[0]), None


# ---- encoders --------------------------------------------------------------------------------------------------------


def open_encoder(
    card: EncoderCard | None, given: EncoderFiles, name: str = "the joiner", root: Path | None = None
) -> Encode | None:
    """Open the encoder that a card describes, and return the function from points to features.

    Args:
        card: Description of the encoder. None if points are not encoded.
        given: Encoder, or the paths of its files. None only if ``card`` is None.
        name: Name of the data in messages and in the cache.
        root: PRIVATE. Folder of the cache of encoded private records. None if the points are public.

    Raises:
        ValueError: Another encoder is given, or none.
    """
    if card is None and given is None:
        return None
    if card is None:
        raise checks.error("encoder", str(given), "must be None, because the round asks for no encoder")
    if given is None:
        problem = f"must be the encoder {card.name}: weights {card.file or ''} with SHA-256 {card.sha256}"
        raise checks.error("encoder", None, problem, "Ask the joiner for the files of the encoder.")
    encoder = given if isinstance(given, Encoder) else Encoder.from_card(card, {k: str(v) for k, v in given.items()})
    encoder.check_card(card)
    assert card.points is not None
    return partial(encode_points, encoder, card.points, name=name, root=root)


def encode_points(encoder: Encoder, points: DataSpec, x: Tensor, name: str, root: Path | None) -> Tensor:
    """PRIVATE. Encode points, each by itself, float32 [N, D]. For ``name`` and ``root`` see ``open_encoder``."""
    # A site has no public points, so one fixed point tests that the encoder gives the same features twice. The joiner
    # has no store, so nothing is cached.
    fixed_x = torch.full((1, *points.input_shape), ord("0")).to(x.dtype)
    sides = {"public": x} if root is None else {"public": fixed_x, "private": x}
    encoder = replace(encoder, cache_gb=0) if root is None else encoder
    where: dict[str, Any] = {"name": name, "root": root or Path(), "device": torch.device("cpu")}
    with Stages() as stages:
        return encode_by_role(encoder, points, sides, stages=stages, **where)["public" if root is None else "private"]
