"""Calls of ``PATEClassifier`` and ``PATE`` on records of every type, and on neighbors of these records.

A case says through which door a call goes, who votes, of which type the ids of the units and a column are, and how many
releases one account makes: one, the same again, or one without a certain unit. What is said, warned of, charged and
released must not tell neighbors apart; the harness measures the rest.
"""

import contextlib
import copy
import datetime
import functools
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import Dataset

from pate_torch import PATE, PATEClassifier, TabularSynthesizer
from pate_torch.core import rng
from pate_torch.data import tensors
from pate_torch.features.encoder import Encoder
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.gradients import GradientMethod
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.students.training import Supervised
from pate_torch.teachers.network import Network
from tests.privacy import neighbor_harness as harness
from tests.privacy.neighbor_cases import Tally
from tests.privacy.neighbor_choices import Spelling

CLASSES = ["no", "yes"]
RECORDS, POINTS, QUERIES, TEACHERS = 30, 14, 5, 4
GONE = 5
"""The unit that a second release may be without."""
SYNTHETIC_EPSILON = 3.0
"""With so little, tables of two columns are counted; with more, also larger ones, to which a mixture is fitted."""
IDS_REFUSED = ("missing ids", "ids of one type")
"""What a neighbor with one odd id may be refused for: no release of it is made."""


# ---- teachers of a user's own --------------------------------------------------------------------------------------


class Drawing(ClassifierMixin, BaseEstimator):
    """Draws from the global generator as often as it has records, and votes by what it draws then."""

    def fit(self, x, y):
        self.classes_ = np.unique(y)
        np.random.random(len(y))
        self.coins_ = np.random.randint(2, size=64)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.classes_[np.resize(self.coins_, len(x))]


class Head(nn.Module):
    """The first three numbers of a point: how many there are depends on the type of a column."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :3]


def network() -> nn.Module:
    return nn.Sequential(Head(), nn.Linear(3, 2))


@functools.cache
def backbone() -> nn.Module:
    """A network that was trained elsewhere, and is captured by those who make teachers; it keeps batch statistics."""
    with rng.seeded_generators(0):  # the fresh process, which trains a teacher again, makes the same weights
        return nn.Sequential(Head(), nn.BatchNorm1d(3), nn.Linear(3, 8), nn.ReLU())


def of_a_copy() -> nn.Module:
    return nn.Sequential(copy.deepcopy(backbone()), nn.Linear(8, 2))


def of_the_same() -> nn.Module:
    """What is refused: all teachers train one backbone."""
    return nn.Sequential(backbone(), nn.Linear(8, 2))


TEACHERS_BY_METHOD: dict[str, Any] = {
    "gradients": None,
    "teachers": None,
    "dpsgd": None,
    "synthetic": None,
    "estimator": LogisticRegression(C=1e-2, max_iter=5),
    "drawing": Drawing(),
    "network": Network(network, steps=2, batch_size=8),
    "backbone": Network(of_a_copy, steps=2, batch_size=8),
}

# ---- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One record. unit: its number, of which ``name`` is the id, but for an odd one."""

    x: tuple[float, ...]
    column: Any
    label: Any
    unit: int
    name: Any


def read(values: Sequence[Any]) -> pd.Series:
    """The column that pandas reads from a file of these values: a type for all cells, or texts if one cell is odd."""
    cells = ["" if pd.isna(value) else str(value) for value in values]
    return pd.read_csv(io.StringIO("\n".join(["cell", *cells, ""])), skip_blank_lines=False)["cell"]


Name = Callable[[int], Any]
IDS: dict[str, tuple[Name | None, Callable[[list], Any]]] = {
    "none": (None, list),
    "integers": (lambda u: 1000 + u, pd.Series),
    "64-bit integers": (lambda u: 2**60 + u, list),
    "strings": (lambda u: f"p{u}", np.array),
    "dates": (lambda u: datetime.datetime(2000, 1, 1) + datetime.timedelta(days=u), pd.Series),
    "booleans": (lambda u: bool(u % 2), pd.Series),
    "categories": (lambda u: f"p{u}", lambda values: pd.Series(pd.Categorical(values))),
    "zeros of a file": (lambda u: f"{u:06d}", read),
    "floats": (lambda u: u + 0.5, np.array),
    "missing": (lambda u: None if u == 3 else 1000 + u, pd.Series),
}
"""Type of ids -> the id of a unit, and what holds a column of them. The last two are refused."""
ODD_IDS = [None, float("nan"), 7.5, 2**63 + 5, "a name longer than others", datetime.datetime(2000, 1, 1, 3, 4, 5)]
COLUMNS: dict[str, list[Any]] = {
    "integers": [1, 2, 3, 4, 7],
    "64-bit integers": [2**60 + i for i in range(5)],
    "strings": ["red", "blue", "green"],
    "floats": [0.5, -1.25, 2.0, 7.5],
    "missing": ["red", None, "blue"],
    "dates": [datetime.datetime(2020, 1, day) for day in (1, 2, 3)],
    "private dates": ["red", datetime.datetime(2020, 1, 1), "blue", datetime.datetime(2020, 1, 2, 3)],
    "booleans": [True, False],
    "categories": ["low", "high"],
    "booleans of a file": ["TRUE", "FALSE"],
    "numbers of a file": ["1E5", ".5", "2.0E7", "7."],
    "texts": [],
    "images": [],
    "image arrays": [],
}
"""Type of a column -> its values. ``PATEClassifier`` takes public dates only as declared categories."""
PUBLIC_COLUMNS = {"private dates": ["red", "blue"]}
"""Values of public points, if they are of another type than those of private records."""
ODD_VALUES = [None, float("nan"), 3e38, float("inf"), "purple", 2**60 + 9, datetime.datetime(1700, 1, 1, 1, 1, 1, 1)]


def records(case: dict[str, str], count: int = RECORDS, first: int = 0, *, public: bool = False) -> list[Record]:
    """Two clouds; units of one to three records."""
    draw, name, values = np.random.default_rng(int(public)), IDS[case["ids"]][0], COLUMNS[case["column"]]
    values = PUBLIC_COLUMNS.get(case["column"], values) if public else values
    rows = []
    for i in range(count):
        unit, label = first + i // 2 if i % 5 else first + i // 3, i % 2
        x = tuple(map(float, draw.normal(3 * label - 1.5, 1.0, 2).round(3)))
        rows.append(Record(x, values[i % len(values)] if values else None, CLASSES[label], unit, name and name(unit)))
    return rows


class Drawn(Dataset):
    """Images with a random transform, which cannot be read where the column of the record is odd."""

    def __init__(self, rows: Sequence[Record]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Any]:
        record = self.rows[row]
        if record.column is not None:
            raise ValueError(f"no image {record.column}")
        image = torch.rand(1, 8, 8) / 8
        image[0, 0, :2] = torch.tensor(record.x) / 16 + 0.5
        return image, record.label


def stack(rows: Sequence[Record]) -> np.ndarray:
    """Images of whole numbers. An odd one has fractions or missing pixels, and makes floats of all."""
    images = []
    for row in rows:
        levels = 120 + 40 * np.nan_to_num(np.array(row.x)).clip(-2.9, 3.3)
        image = np.repeat(levels.round().astype(np.int64), 32).reshape(8, 8)
        is_fraction = isinstance(row.column, float) and np.isfinite(row.column)
        images.append(image if row.column is None else image + 0.5 if is_fraction else np.full((8, 8), np.nan))
    return np.stack(images)


def frame(case: dict[str, str], rows: Sequence[Record]) -> Any:
    """The points of these records, as a user holds them."""
    if case["column"] == "image arrays":
        return stack(rows)
    if case["column"] == "images":
        return Drawn(rows)
    if case["column"] == "texts":
        return [" ".join(f"{v:.1f}" for v in row.x) for row in rows]
    numbers, column = np.array([row.x for row in rows]), [row.column for row in rows]
    if case["door"] in ("PATE", "labeler"):  # takes numbers: what is none is missing
        third = pd.to_numeric(pd.Series(column, dtype=object), errors="coerce").astype(float)
        return np.column_stack([numbers, third]).astype(np.float32)
    make = {"categories": pd.Categorical, "booleans of a file": read, "numbers of a file": read}
    series = pd.Series(make.get(case["column"], list)(column))
    return pd.DataFrame({"a": numbers[:, 0], "b": numbers[:, 1], "c": series})


def ids(case: dict[str, str], rows: Sequence[Record]) -> Any:
    name, to_column = IDS[case["ids"]]
    return None if name is None else to_column([row.name for row in rows])


def neighbors(case: dict[str, str], rows: list[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Records that differ by one unit: one less, one more, or one record in another's place, ordinary or odd."""
    name = IDS[case["ids"]][0]
    name = name or (lambda unit: None)
    new = Record((0.25, -1.5), rows[0].column, "yes", 90, name(90))
    odd = [replace(new, column=value) for value in ODD_VALUES]
    odd += [replace(new, label=None), replace(new, label="maybe"), replace(new, x=(3e38, float("nan")))]
    if case["ids"] == "none":  # each record is a unit
        for place in (GONE, 0):
            if case["adjacency"] == "add_remove":
                yield f"without record {place}", [*rows[:place], *rows[place + 1 :]]
            for other in (new, *odd):
                if case["adjacency"] == "replace_one":
                    yield f"{other} in place {place}", [*rows[:place], other, *rows[place + 1 :]]
                else:
                    yield f"{other} more at {place}", [*rows[:place], other, *rows[place:]]
        return
    for unit in (GONE, rows[0].unit):
        here = [row for row in rows if row.name != name(unit)]
        yield f"without unit {unit}", here
    if case["ids"] == "booleans":
        return  # there is no third one
    for other in (new, *odd, *(replace(new, name=odd_id) for odd_id in ODD_IDS)):
        yield f"two records like {other} more", [*rows[:3], other, *rows[3:], other]


# ---- calls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """One or two calls that charge one account. root: their home."""

    case: dict[str, str]
    rows: list[Record]
    root: Path

    def __call__(self) -> None:
        """Call, and write what was printed and warned of to where the harness compares."""
        second = self.case["releases"]
        messages = [self._call(self.rows, first=True)]
        if second != "one":
            rows = [row for row in self.rows if row.unit != GONE] if second == "one and fewer" else self.rows
            messages.append(self._call(rows, first=False))
        folder = self.root / "release"
        folder.mkdir()
        (folder / "said.txt").write_text("\n".join(messages).replace(str(self.root), "HOME"))

    def _call(self, rows: list[Record], first: bool) -> str:
        """Everything printed. ValueError of a first call alone: a second is refused by what the first charged."""
        output, refusal = io.StringIO(), ""
        with (
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("always")
            try:
                if self.case["method"] == "synthetic":
                    self._synthesizer(rows, first)
                else:
                    self._classifier(rows, first) if self.case["door"] == "PATEClassifier" else self._pate(rows)
            except ValueError as error:
                if first:
                    raise
                refusal = str(error)
        return "\n".join([output.getvalue(), *(str(warning.message) for warning in warned), refusal])

    def _public(self) -> Any:
        return frame(self.case, records(self.case, POINTS, 50, public=True))

    def _classifier(self, rows: list[Record], first: bool) -> None:
        teacher, options = TEACHERS_BY_METHOD[self.case["method"]], {}
        method = self.case["method"] if teacher is None else "teachers"
        if method == "teachers":
            options = {"num_teachers": TEACHERS, "num_queries": QUERIES}
        if self.case["column"] == "texts":
            options["encoder"] = Encoder(module=Spelling(), tokenizer="tests:privacy/characters.json")
        if self.case["column"] == "dates":
            options["categories"] = {"c": COLUMNS["dates"]}
        if self.case["column"].startswith("image") and method == "teachers":
            options["student"] = Supervised(network="logistic", steps=2)
        options |= {
            "private_test": float(self.case["test"]),
            "class_weight": "balanced" if self.case["test"] != "0" else None,
        }
        options |= {"classes": CLASSES, "num_records_about": RECORDS, "spend_anyway": True, "allow_refit": not first}
        options |= {"method": method, "teacher": teacher, "adjacency": self.case["adjacency"], "home": self.root}
        classifier = PATEClassifier(3.0, account="toy", **options)
        y, groups = [row.label for row in rows], ids(self.case, rows)
        y = None if self.case["column"] == "images" else y  # the dataset has them
        classifier.fit(frame(self.case, rows), y, public=self._public(), groups=groups)

    def _synthesizer(self, rows: list[Record], first: bool) -> None:
        if self.case["door"] != "PATEClassifier" or self.case["test"] != "0":
            raise ValueError("a synthesizer has another door, and no test")
        table, public = (frame(self.case, part) for part in (rows, records(self.case, POINTS, 50, public=True)))
        if not hasattr(table, "columns"):
            raise ValueError("a synthesizer takes tables alone")
        table["label"], public["label"] = [row.label for row in rows], [CLASSES[i % 2] for i in range(len(public))]
        synthesizer = TabularSynthesizer(
            SYNTHETIC_EPSILON,
            account="toy",
            target="label",
            public=public,
            rounds=1,
            adjacency=self.case["adjacency"],
            allow_refit=not first,
            spend_anyway=True,
            cap=1e4,
            home=self.root,
        )
        synthesizer.fit(table, groups=ids(self.case, rows))

    def _pate(self, rows: list[Record]) -> None:
        if self.case["column"] == "texts":
            raise ValueError("PATE takes no texts")
        is_image, unit_ids = self.case["column"].startswith("image"), ids(self.case, rows)
        width = 1 if is_image else 3
        partition = ReplaceOne() if self.case["adjacency"] == "replace_one" else AddRemove()
        descent = GradientDescent(sigma=2.0, steps=2, adjacency=partition.adjacency)
        teacher = TEACHERS_BY_METHOD[self.case["method"]]
        trained = {"teacher": teacher, "num_teachers": TEACHERS, "mechanism": GNMax(sigma=2.0)}
        options = {
            "gradients": {"teacher": GradientMethod(size=RECORDS, mechanism=descent)},
            "dpsgd": {"teacher": DPSGD(network="logistic")},  # labels no points: refused
        }.get(self.case["method"], trained)
        options |= {"unit": "record" if unit_ids is None else "group:person", "partition": partition}
        options |= {"mean": [0.0] * width, "std": [1.0] * width}
        options |= {"private_test": float(self.case["test"])}
        options |= {"budget_epsilon": 1e4, "verbose": True, "allow_uninformative_labels": True, "home": self.root}
        pate = PATE("toy", classes=CLASSES, delta=1e-4, **options)
        y = np.array([CLASSES.index(row.label) if row.label in CLASSES else -1 for row in rows])
        y = None if self.case["column"] == "images" else y
        public = self._public() if is_image else np.nan_to_num(self._public())
        pate.fit_teachers(frame(self.case, rows), y, unit_id=unit_ids, public_x=public)
        if self.case["door"] == "labeler":
            with pate.labeler(QUERIES) as labeler:
                points = tensors.parse_points("public", public)
                print([labeler.answer(point).item() for point in points[:QUERIES]])
            return
        pate.label(public, QUERIES)
        if options["private_test"]:
            pate.fit_student(Supervised(network="logistic", steps=2))
            print(pate.test_student()[0])
            pate.report()


# ---- cases ---------------------------------------------------------------------------------------------------------

PLAIN = {"door": "PATEClassifier", "method": "estimator", "ids": "none", "column": "floats", "adjacency": "add_remove",
         "releases": "one", "test": "0"}  # fmt: skip
SPACE: dict[str, Sequence[str]] = {
    "door": ["PATEClassifier", "PATE", "labeler"],
    "method": list(TEACHERS_BY_METHOD),
    "ids": list(IDS)[:-2],
    "column": list(COLUMNS),
    "adjacency": ["add_remove", "replace_one"],
    "releases": ["one", "one and the same", "one and fewer"],
    "test": ["0", "0.4"],
}


def attempt(
    case: dict[str, str], tally: Tally, *, most: int | None = None, seed: int = 0, stops_at_fault: bool = False
) -> bool:
    """Run a case on its records and on neighbors of them (``most``; None: all). Whether it was accepted."""
    tally.composed += 1
    with tempfile.TemporaryDirectory(prefix="neighbors-") as folder:
        home, rows = Path(folder), records(case)
        first = harness.run(Calls(case, rows, home / "first"), harness.Watch(), Calls.__call__)
        if first.refused:
            return tally.refuse(first.refused)
        tally.accept(case, first)
        beside, faults = list(neighbors(case, rows)), []
        for place in np.random.default_rng(seed).permutation(len(beside))[:most]:
            how, other = beside[place]
            differences = harness.compare(first, Calls(case, other, home / f"n{place}"), Calls.__call__)
            is_refused = len(differences) == 1 and "refused" in differences[0]
            if is_refused and any(words in differences[0] for words in IDS_REFUSED):
                continue
            tally.neighbors += 1
            faults += [f"{how}: {difference}" for difference in differences]
            if faults and stops_at_fault:
                break
    return tally.note(case, faults)
