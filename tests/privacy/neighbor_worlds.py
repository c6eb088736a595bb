"""Toy data in every form that data come in, and their neighbors: one privacy unit more, one less, or another.

A world is a list of rows, written as files (or held in memory) and loaded by the package's own source. Its neighbors
are lists that differ by one unit, with ordinary content, extreme values, a class seen nowhere else, an id that occurs
already, or all rows of a group.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pate_torch.core import texts
from pate_torch.data.base import DatasetSource
from pate_torch.data.image_folder import ImageFolder
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.data.libsvm import Libsvm
from pate_torch.data.tabular import Csv, Embeddings, Text
from tests.tensor_data import Tensors

CLASSES = ("0", "1", "2")
"""The last occurs in one private row at most."""
AGREED = {"publish_split": True, "publish_test": True}
"""Most forms are one file, whose owner agrees that it be split."""
FEATURES = 4
SIDE = 8  # of an image
EXTREME = 3e38


@dataclass(frozen=True)
class Row:
    """One record. part: the file it is written to, where a world has several: private, public or test."""

    x: tuple[float, ...]
    label: str
    id: str
    group: str
    part: str = "private"


def rows(private: int = 24, public: int = 16, test: int = 9) -> list[Row]:
    """Two clouds, some equal rows, some repeated ids, groups of one to six rows."""
    draw = np.random.default_rng(7)
    made: list[Row] = []
    for part, count in (("private", private), ("public", public), ("test", test)):
        for i in range(count):
            label = i % 2
            x = draw.normal(3 * label - 1.5, 1.0, FEATURES).round(3)
            group = f"{part}-g{int(i**0.5)}"
            made.append(Row(tuple(map(float, x)), str(label), f"{part}-{i}", group, part))
    twice = made.index(next(row for row in made if row.id == "private-3"))
    made[twice] = dataclasses.replace(made[twice], id="private-5")
    made[8] = dataclasses.replace(made[8], x=made[6].x, label=made[6].label)  # equal content
    return made


UNITS = ("record", "content", "group", "label")
"""What a unit is: a row with an id, which may occur in other rows, the content of a row, a group, or a label alone."""


def unit_of(row: Row, unit: str, form: str) -> object:
    """What tells a row's unit from others."""
    if unit == "record" and form != "tensors":
        return row.id, row.x, row.label  # several rows may have one id
    return row.group if unit == "group" else (row.x, row.label)


# ---- forms ---------------------------------------------------------------------------------------------------------

Write = Callable[[Path, list[Row], str], str]
"""(path, rows, kind of unit) -> the path that was written."""


def _vector_id(row: Row) -> str:
    """The name of a vector; an id that occurs twice is two records."""
    return f"{row.id}-{zlib.crc32(repr(row.x).encode())}"


def _table(columns: Callable[[Row], dict[str, str]], names: dict[str, str]) -> Write:
    """Write a CSV file of these columns, of the column that names units of this kind, and of the label."""

    def write(path: Path, kept: list[Row], unit: str) -> str:
        def cells(row: Row) -> dict[str, str]:
            name = names.get(unit)
            return columns(row) | ({} if name is None else {name: getattr(row, name)}) | {"label": row.label}

        lines = [",".join(cells(kept[0])), *(",".join(cells(row).values()) for row in kept)]
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


BY_ID = {"record": "id", "group": "group"}
_csv = _table(lambda row: {f"x{d}": f"{v!r}" for d, v in enumerate(row.x)}, BY_ID)
_texts = _table(lambda row: {"text": " ".join(f"{v:g}" for v in row.x)}, BY_ID)
_named = _table(lambda row: {"id": _vector_id(row)}, {"group": "group"})


def _svm(path: Path, kept: list[Row], unit: str) -> str:
    lines = []
    for row in kept:
        qid = f" qid:{zlib.crc32(row.group.encode())}" if unit == "group" else ""
        lines.append(f"{row.label}{qid} " + " ".join(f"{d + 1}:{v!r}" for d, v in enumerate(row.x)))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _images(folder: Path, kept: list[Row], unit: str) -> str:
    for row in kept:
        named = f"{_vector_id(row)}.png"
        file = folder / row.label / (f"{row.group}_{named}" if unit == "group" else named)
        file.parent.mkdir(parents=True, exist_ok=True)
        x = np.clip(np.resize(np.nan_to_num(row.x), SIDE * SIDE) * 40 + 128, 0, 255).astype(np.uint8)
        Image.fromarray(x.reshape(SIDE, SIDE)).save(file)
    return str(folder)


def tensors(kept: list[Row], unit: str, folder: Path, classes: Sequence[str] = CLASSES) -> DatasetSource:
    part = {name: [row for row in kept if row.part == name] for name in ("private", "public", "test")}
    x = {name: torch.tensor([row.x for row in rows_], dtype=torch.float32) for name, rows_ in part.items()}
    y = {name: torch.tensor([int(row.label) for row in rows_]) for name, rows_ in part.items()}
    ids = [row.group for row in part["private"]] if unit == "group" else None
    return Tensors(
        name="toy", x=x["private"], y=y["private"], pool_x=x["public"], test_x=x["test"], test_y=y["test"],
        class_names=tuple(classes), unit_id=ids, unit="group:group" if unit == "group" else "record", nominal_size=24,
    )  # fmt: skip


KINDS: dict[str, tuple[Any, Write, str, str, dict[str, Any]]] = {
    "csv": (Csv, _csv, ".csv", "group", {}),
    "libsvm": (Libsvm, _svm, ".svm", "qid", {"num_features": FEATURES}),
    "images": (ImageFolder, _images, "", "^([^_]+)_", {"size": SIDE, "channels": 1}),
    "text": (Text, _texts, ".csv", "group", {"max_bytes": 40}),
    "embeddings": (Embeddings, _named, ".csv", "group", {}),
}
"""kind of files -> source, how a file is written, its suffix, what tells groups, and other options."""
OWN = ("public", "test")


def files(
    kept: list[Row], unit: str, folder: Path, classes: Sequence[str],
    *, kind: str, parts: tuple[str, ...] = (), roles: str = "hash",
) -> DatasetSource:  # fmt: skip
    """A source of files. The private one holds every row that no other file does."""
    source_type, write, suffix, group, options = KINDS[kind]
    options = options | {"roles": roles} if kind in ("csv", "libsvm", "text") else {**options}
    if kind in ("csv", "text") and unit == "record" and roles == "hash":
        options["id"] = "id"
    elif kind == "csv" and unit == "record":
        options["ignore"] = ["id"]
    if kind == "embeddings":
        vectors = {_vector_id(row): row.x for row in kept}
        options |= {"vectors": str(folder / "vectors.npy"), "ids": str(folder / "ids.txt")}
        np.save(options["vectors"], np.array(list(vectors.values()), dtype=np.float32))
        Path(options["ids"]).write_text("\n".join(vectors) + "\n")
    for part in ("private", *parts):
        inside = [row for row in kept if row.part == part or (part == "private" and row.part not in parts)]
        options["path" if part == "private" else f"{part}_path"] = write(folder / f"{part}{suffix}", inside, unit)
    return source_type(
        name="toy", classes=list(classes), nominal_size=24, group=group if unit == "group" else None,
        fractions=(0.5, 0.3, 0.2), **AGREED, **options,
    )  # fmt: skip


FORMS: dict[str, Callable[[list[Row], str, Path, Sequence[str]], DatasetSource]] = {
    "tensors": tensors,
    "csv with a public file": partial(files, kind="csv", parts=OWN),
    "csv with a test file": partial(files, kind="csv", parts=("test",)),
    "csv by hash": partial(files, kind="csv"),
    "csv by position": partial(files, kind="csv", roles="position"),
    "libsvm with a public file": partial(files, kind="libsvm", parts=OWN),
    "libsvm by hash": partial(files, kind="libsvm"),
    "libsvm by position": partial(files, kind="libsvm", roles="position"),
    "images with public ones": partial(files, kind="images", parts=OWN),
    "images by hash": partial(files, kind="images"),
    "text with a public file": partial(files, kind="text", parts=OWN),
    "text by hash": partial(files, kind="text"),
    "text by position": partial(files, kind="text", roles="position"),
    "embeddings with a public file": partial(files, kind="embeddings", parts=OWN),
    "embeddings by hash": partial(files, kind="embeddings"),
}

UNNAMED = ("libsvm with a public file", "libsvm by hash", "libsvm by position")
"""Forms that have no ids of their own: a record is its content, or its position."""


def fits(form: str, unit: str) -> bool:
    """Whether data of this form can have such units at all."""
    if form in UNNAMED:
        return unit in ("content", "group", "label")
    if form.startswith(("images", "embeddings", "tensors")):
        return unit in ("record", "group", "label")
    return True


def source(form: str, unit: str, kept: list[Row], folder: Path, classes: Sequence[str] = CLASSES) -> DatasetSource:
    """The package's source of these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    made = FORMS[form](kept, "content" if unit == "label" else unit, folder, classes)
    return LabelPrivacyDataset(source=made) if unit == "label" else made


# ---- neighbors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Neighbor:
    """A list of rows that differs by one unit, and how."""

    how: str
    rows: list[Row]


def private_rows(form: str, unit: str, kept: list[Row], folder: Path) -> list[int]:
    """The places, in ``kept``, of the rows that are private. The first file's rows, where roles are given by files."""
    own = {"csv with a test file": ("test",)}.get(form, OWN if "public" in form or form == "tensors" else ())
    if "public" in own:
        return [i for i, row in enumerate(kept) if row.part == "private"]
    data = source(form, unit, kept, folder).load()
    names = data.private.x.flatten(1).double().numpy()
    labels = np.array([data.spec.class_names[y] for y in data.private.y.tolist()])
    places = []
    for i, row in enumerate(kept):
        if row.part in own:
            continue
        if form.startswith("text"):
            x = texts.encode_texts("text", [" ".join(f"{v:g}" for v in row.x)], 40)[0].double().numpy()
        elif form.startswith("images"):
            x = np.clip(np.resize(row.x, SIDE * SIDE) * 40 + 128, 0, 255).astype(np.uint8).astype(float)
        else:
            x = np.float32(row.x).astype(float)
        alike = [other for other in kept if (other.x, other.label) == (row.x, row.label) and other.part not in own]
        # Equal rows of several ids may have several roles: they are chosen only if all are private.
        if len(names) and ((names == x).all(1) & (labels == row.label)).sum() >= len(alike):
            places.append(i)
    return places


def _others(row: Row, kept: list[Row], rare: str) -> Iterator[tuple[str, Row]]:
    """What may come in a row's place, or beside it."""
    yield "ordinary", dataclasses.replace(row, x=(0.25, -1.5, 2.0, 0.5), label="1", id="new", group="private-new")
    yield "extreme", dataclasses.replace(row, x=(EXTREME, -EXTREME, EXTREME, 0.0), id="vast", group="private-vast")
    yield "of a class of its own", dataclasses.replace(row, label=rare, id="rare", group="private-rare")
    yield (
        "with an id that occurs",
        dataclasses.replace(kept[1], x=tuple(-v for v in row.x), label="0" if row.label == "1" else "1"),
    )


def neighbors(
    form: str, unit: str, adjacency: str, kept: list[Row], folder: Path, seed: int = 0, classes: Sequence[str] = CLASSES
) -> list[Neighbor]:
    """Neighbors under this relation. ``folder``: to write files in, where roles must be found out."""
    inside = private_rows(form, unit, kept, folder / "roles")
    draw = np.random.default_rng(seed)
    found: list[Neighbor] = []
    chosen = [inside[i] for i in draw.permutation(len(inside))[:3]]
    if unit == "label":
        for place in chosen[:2]:
            for label in classes:
                if label != kept[place].label:
                    changed = [*kept]
                    changed[place] = dataclasses.replace(kept[place], label=label)
                    found.append(Neighbor(f"label of row {place} is {label}", changed))
        return found
    if adjacency == "replace_one":
        for place in chosen[:2]:
            for how, other in _others(kept[place], kept, classes[-1]):
                changed = [*kept]
                changed[place] = other
                found.append(Neighbor(f"row {place} replaced by one that is {how}", changed))
        return found
    largest = max(
        (unit_of(kept[i], unit, form) for i in inside), key=[unit_of(kept[i], unit, form) for i in inside].count
    )
    for name in dict.fromkeys([largest, *(unit_of(kept[i], unit, form) for i in chosen)]):
        places = [i for i, row in enumerate(kept) if unit_of(row, unit, form) == name]
        if form == "tensors" and unit == "record":
            places = places[:1]  # equal rows in memory are units of their own
        gone = [row for i, row in enumerate(kept) if i not in places]
        found.append(Neighbor(f"without unit {name}"[:60], gone))
    for number, (how, other) in enumerate(_others(kept[chosen[0]], kept, classes[-1])):
        if unit != "record" and how == "with an id that occurs":
            continue  # it would belong to a unit that is there
        for attempt in itertools.count():
            # A unit whose name makes it public or a test point is no private unit more: try another name.
            new = dataclasses.replace(other, id=f"{other.id}-{number}-{attempt}", group=f"{other.group}{attempt}")
            if unit == "record" and how == "with an id that occurs":
                # A vector is found by its id, so that the rows of one id have one vector.
                place = inside[attempt % len(inside)]
                x = kept[place].x if form.startswith("embeddings") else (*other.x[:3], float(attempt))
                new = dataclasses.replace(other, x=x, id=kept[place].id, label="10"[int(kept[place].label)])
            elif unit in ("content", "label") or form in UNNAMED or form == "tensors":
                new = dataclasses.replace(new, x=(new.x[0], new.x[1], new.x[2], float(attempt)))
            size = 3 if unit == "group" else 1
            more = [dataclasses.replace(new, x=(*new.x[:3], new.x[3] + i)) for i in range(size)]
            at = int(draw.integers(len(kept) + 1))
            grown = [*kept[:at], *more, *kept[at:]]
            if size <= len(private_rows(form, unit, grown, folder / f"roles-{number}-{attempt}")) - len(inside):
                found.append(Neighbor(f"one unit more, {how}", grown))
                break
            assert attempt < 40, f"no name makes a unit private: {form}, {unit}, {how}"
    return found
