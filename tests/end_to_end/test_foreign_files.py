"""Folders from strangers: whatever their bytes say, readers end in ValueError, soon, and without much memory."""

import copy
import hashlib
import json
import math
import random
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pate_torch import load_student, networks, pipeline
from pate_torch.features.encoder import Encoder
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.schema import Column, TableSchema
from pate_torch.students import store
from pate_torch.students.base import Student
from pate_verify.command import verify_release
from tests.features.encoder_worlds import TOKENS, WIDTH, WORDS
from tests.tiny_runs import again, tiny

VALUES = (None, True, -1, 0, 7, 10**6, 10**9, 2**63, 0.5, 1e308, math.nan, "", "x", "../../etc/passwd", "/etc/passwd",
          [], {}, [[]], [-1], {"x": {}}, ["x"] * 3, [10**6] * 3)  # fmt: skip
MOST_SECONDS, MOST_MEBIBYTES = 5, 1024
"""Of processor time for one file, and of memory for all of them."""


def nodes(tree, path=()):
    """Every place in a tree, but its root."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from nodes(value, (*path, key))


def edited(tree, draw: random.Random):
    """The tree with one value of another type or size, without one, or with one more."""
    tree = copy.deepcopy(tree)
    *above, last = draw.choice(list(nodes(tree)))
    place = tree
    for key in above:
        place = place[key]
    kind = draw.random()
    if kind < 0.1:
        del place[last]
    elif kind < 0.2 and isinstance(place, dict):
        place["unknown"] = draw.choice(VALUES)
    else:
        place[last] = draw.choice(VALUES)
    return tree


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, or the end cut off."""
    if draw.random() < 0.2:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(min(len(changed), draw.choice((8, 200, 10**9))))] = draw.randrange(256)
    return bytes(changed)


def outcome(read) -> bool:
    """Whether a file is refused by ValueError; any other exception is a failure, and so is a long reading."""
    begun = time.process_time()
    try:
        read()
        refused = False
    except ValueError:
        refused = True
    assert time.process_time() - begun < MOST_SECONDS
    return refused


@pytest.fixture(autouse=True)
def _little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEBIBYTES * 1024


def student_of(spec: DataSpec, name: str, **options) -> Student:
    description = networks.describe(name, spec.input_shape, spec.num_classes, **options)
    return Student(description, networks.rebuild(description).eval(), spec)


def spec_of(width: int, **more) -> DataSpec:
    facts = {"num_classes": 2, "input_shape": (width,), "class_names": ("a", "b"), "mean": (0.0,), "std": (1.0,)}
    return DataSpec(name="people", **{**facts, **more})


def table() -> Student:
    schema = TableSchema((Column("town", ("a", "b")), Column("height", None, 1.0)))
    return student_of(spec_of(3, schema=schema), "mlp", hidden=(4, 3))


def texts(folder: Path) -> Student:
    draw = torch.Generator().manual_seed(0)
    (folder / "encoder").mkdir()
    save_file({"table": torch.randn(TOKENS, WIDTH, generator=draw)}, folder / "encoder" / "table.safetensors")
    from pate_torch.features.encoder import resolve_file

    shutil.copy(resolve_file("tokenizer", WORDS), folder / "encoder" / "tokenizer.json")
    files = {"weights": folder / "encoder" / "table.safetensors", "tokenizer": folder / "encoder" / "tokenizer.json"}
    points = spec_of(64, text="text", class_names=("a", "b"))
    card = Encoder(name="words", **{key: str(file) for key, file in files.items()}).make_card(points)
    return student_of(spec_of(WIDTH, encoder=card), "logistic")


def images() -> Student:
    return student_of(spec_of(1, input_shape=(1, 8, 8)), "voting", members=2, of={"name": "small_cnn", "options": {}})


KINDS = {
    "table": (table, {"town": ["a", "b"], "height": [1.0, 2.0]}),
    "texts": (texts, ["one text", "another"]),
    "images": (images, torch.zeros(2, 1, 8, 8, dtype=torch.uint8)),
    "rules": (lambda: student_of(spec_of(3), "axis_rules"), torch.zeros(2, 3)),
    "probe": (lambda: student_of(spec_of(3), "probe", points=4, neighbors=2), torch.zeros(2, 3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_students_from_strangers_end_in_a_prediction_or_a_value_error(kind, tmp_path):
    make, x = KINDS[kind]
    student, file, draw = make(*[tmp_path] * (kind == "texts")), tmp_path / "student.safetensors", random.Random(0)
    store.save(student, file)

    def predict():
        assert len(load_student(tmp_path).predict_proba(x)) == 2

    predict()
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    facts, refused = json.loads(header["__metadata__"]["pate_torch"]), 0
    for turn in range(44):
        if turn % 11 == 9:
            file.write_bytes(damaged(whole, draw))
        else:
            other = copy.deepcopy(header)
            if turn % 11 == 10:  # tensors of other names, types, shapes and places
                del other["__metadata__"]
                other = edited(other, draw) | {"__metadata__": header["__metadata__"]}
            else:
                other["__metadata__"]["pate_torch"] = json.dumps(edited(facts, draw))
            text = json.dumps(other).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
        refused += outcome(predict)
    assert refused > 12


def test_a_header_that_asks_for_huge_layers_is_refused_before_memory_is_taken(tmp_path):
    file = tmp_path / "student.safetensors"
    for name, options in (("mlp", {"hidden": [10**9, 10**9]}), ("voting", {"members": 10**9}),
                          ("resnet", {"blocks": 10**8})):  # fmt: skip
        shape = [1, 8, 8]
        network = {"name": name, "input_shape": shape, "num_classes": 2, "options": options}
        spec = spec_of(1, input_shape=(1, 8, 8)).to_dict()
        facts = {"format": store.FORMAT, "network": network, "spec": spec}
        save_file({"x": torch.zeros(1)}, file, metadata={store.METADATA_KEY: json.dumps(facts)})
        with pytest.raises(ValueError, match="does not fit the network"):
            load_student(file)


@pytest.mark.parametrize("file", ["/etc/passwd", "../secret.safetensors", "..", "a/b.safetensors"])
def test_a_header_names_no_file_outside_its_folder(file, tmp_path):
    store.save(texts(tmp_path), tmp_path / "student.safetensors")
    whole = (tmp_path / "student.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    text = whole[8 : 8 + size].replace(b"table.safetensors", file.encode())
    (tmp_path / "student.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    with pytest.raises(ValueError, match="plain name"):
        load_student(tmp_path)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("home")
    pipeline.run(tiny(place))
    return place


def rewritten(release: Path, name: str, draw: random.Random) -> None:
    """One file of a release with a false value or damaged bytes, under a hash that fits."""
    content = (release / name).read_bytes()
    if name.endswith(".json") and draw.random() < 0.8:
        content = json.dumps(edited(json.loads(content), draw)).encode()
    else:
        content = damaged(content, draw)
    (release / name).write_bytes(content)
    rows = [line.split("  ", 1) for line in (release / "SHA256SUMS").read_text().splitlines()]
    sums = [f"{hashlib.sha256(content).hexdigest() if file == name else digest}  {file}\n" for digest, file in rows]
    (release / "SHA256SUMS").write_text("".join(sums))


@pytest.mark.parametrize("name", ["privacy.json", "summary.json", "release.json", "labels.csv", "student.safetensors"])
def test_releases_from_strangers_are_checked_to_an_end(name, home, tmp_path):
    whole, draw, failed = home / "runs/blobs/gaussian/first/release", random.Random(0), 0
    for turn in range(10):
        release = shutil.copytree(whole, tmp_path / str(turn))
        rewritten(release, name, draw)
        found: list = []
        failed += outcome(lambda release=release, found=found: found.extend(verify_release(release)))
        failed += any(not check.is_ok for check in found)
    assert failed > 3


@pytest.mark.parametrize("name", ["release.json", "labels.csv"])
def test_labels_from_strangers_are_used_or_refused(name, home, tmp_path):
    shutil.copytree(home, tmp_path / "home")
    release = tmp_path / "home/runs/blobs/gaussian/first/release"
    first, draw, refused = json.loads((release / "release.json").read_text())["release_id"], random.Random(0), 0
    whole = (release / name).read_bytes()
    for turn in range(6):
        (release / name).write_bytes(whole)
        rewritten(release, name, draw)
        plan = again(tiny(tmp_path / "home"), f"again{turn}", labels=first, student=None)
        refused += outcome(lambda plan=plan: pipeline.run(plan))
    assert refused >= 2
