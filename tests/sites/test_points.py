"""Sites with images and texts: the sums of one curator, exactly, and the encoder that the public file names."""

import csv
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pate_torch.api.released import ReleasedClassifier
from pate_torch.cli.main import main
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.data.image_folder import ImageFolder
from pate_torch.data.tabular import Text
from pate_torch.privacy.noise import NoiseSource
from pate_torch.sites import training
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.keys import load_joiner_key
from pate_torch.sites.points import IMAGE, open_encoder, read_columns
from pate_torch.sites.tables import read_public_file
from pate_torch.students.store import save
from tests.features import encoder_worlds
from tests.sites.site_tables import get_charges, make_consortium
from tests.worlds import images

CLASSES = ("low", "high", "none")
LABELS = ("a", "b", "c")


def write_texts(path, count, seed):
    encoder_worlds.mails(path, count, np.random.default_rng(seed))
    return path


def write_images(folder, count, seed, form):
    x, y = images(count, seed)
    if form == "npz":
        path = folder.with_suffix(".npz")
        np.savez(path, **{IMAGE: x.numpy(), "label": np.array(LABELS)[y.numpy()]})
        return path
    for number, (pixels, label) in enumerate(zip(x, y.tolist(), strict=True)):
        place = folder / LABELS[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(place / f"p{number // 4}_{seed}_{number}.png")
    return folder


class World:
    """Three sites with files of one form, public points of this form, and an encoder."""

    def __init__(self, folder, form, *, count=40, **terms):
        self.consortium = make_consortium(folder, **terms)
        self.encoder, self.text = None, None
        if form == "texts":
            self.encoder, self.text = encoder_worlds.static(folder, license="MIT", trained_on="digits"), "text"
            self.paths = [write_texts(folder / f"{i}.csv", count, i) for i in range(4)]
        else:
            self.encoder = encoder_worlds.eye(folder) if form == "encoded folder" else None
            self.paths = [write_images(folder / f"images-{i}", count, i, form) for i in range(4)]
        self.classes = CLASSES if form == "texts" else LABELS
        self.public = read_columns("public", self.paths[3])
        self.tables = [read_columns("data", path, label="label") for path in self.paths[:3]]

    def make_kind(self, name="class_sums"):
        options = {"text": self.text, "encoder": self.encoder}
        if name == "class_sums":
            return training.make_class_sums(self.public, "label", self.classes, **options)
        return training.make_cell_counts(self.public, "label", self.classes, 10, **options)

    def read(self, kind, table, site=0, unit="record"):
        home = self.consortium.sites[site].home
        return kind.read_records(table, unit, open_encoder(kind.encoder, self.encoder, "scans", home))

    def count(self, kind, table, adjacency="add_remove", unit="record"):
        return kind.count(self.read(kind, table, unit=unit), adjacency).numbers

    def ask(self, kind):
        return self.consortium.joiner.ask(kind, 0.5)[1:]

    def answer(self, site, raw, public, **options):
        options = {"encoder": self.encoder} | options
        return self.consortium.sites[site].answer(raw, public, self.tables[site], **options)

    def sum(self, kind):
        raw, public = self.ask(kind)
        self.consortium.joiner.sum({str(i): self.answer(i, raw, public) for i in range(3)})
        return self.consortium.joiner.load_sum()


def concatenate(tables):
    if isinstance(tables[0].get(IMAGE), np.ndarray):
        joined = {IMAGE: np.concatenate([table[IMAGE] for table in tables])}
    else:
        joined = {}
    names = [name for name in tables[0] if name != IMAGE]
    return joined | {name: pa.array([cell for t in tables for cell in t[name].to_pylist()]) for name in names}


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda self, shape, *_: torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("form", "name"),
    [(form, "class_sums") for form in ("texts", "npz", "folder", "encoded folder")] + [("texts", "histogram")],
)
def test_three_sites_give_the_sums_of_one_curator_exactly_and_a_student(tmp_path, no_noise, form, name):
    world = World(tmp_path, form, count=100 if name == "class_sums" else 40)
    kind = world.make_kind(name)
    noisy = world.sum(kind)
    if form in ("texts", "npz"):
        exact = world.count(kind, concatenate(world.tables))
        assert exact.any() and np.array_equal(noisy.numbers, exact / kind.unit_length)
        assert not np.array_equal(exact, world.count(kind, concatenate(world.tables[:2])))
    if name == "histogram":
        return
    student = training.train_student(noisy, world.public, world.encoder)
    x, y = images(300, 9)
    if form == "texts":
        columns = read_columns("data", write_texts(tmp_path / "test.csv", 300, 9))
        y, x = torch.tensor([CLASSES.index(name) for name in columns["label"].to_pylist()]), columns["text"].to_pylist()
    if world.encoder is not None:
        assert student.spec.encoder.sha256 == world.encoder.digests["weights"]
        save(student, tmp_path / "student.safetensors")
        student = student.with_encoder(world.encoder)
    assert float((student.predict(x).cpu() == y).float().mean()) > 0.9


def sort_rows(x):
    return sorted(row.numpy().tobytes() for row in x.flatten(1))


@pytest.mark.parametrize("form", ["texts", "folder", "encoded folder"])
def test_records_are_those_of_the_data_sets_of_one_curator(tmp_path, form):
    world = World(tmp_path, form)
    path = world.paths[0]
    files = {"path": str(path), "public_path": str(world.paths[3]), "test_path": str(world.paths[2])}
    if form == "texts":
        with path.open("a", newline="") as file:
            csv.writer(file).writerows([["  ", "low"], ["0123", "unknown"]])
        source = Text(**files, classes=("low", "high"), max_bytes=4096)
    else:
        (path / "a" / "damaged.png").write_bytes(b"no image")
        source = ImageFolder(**files, size=8, channels=1)
    world.tables[0] = read_columns("data", path, label="label")
    if world.encoder is not None:
        source = EncodedDataset(source=source, encoder=world.encoder, root=tmp_path, device=torch.device("cpu"))
    expected, kind = source.load(), world.make_kind()
    records = world.read(kind, world.tables[0])
    encode = open_encoder(kind.encoder, world.encoder, "scans", tmp_path)
    table = world.consortium.sites[0]._count(world.consortium.joiner.charter, 0, kind, world.tables[0], encode)
    is_used_N = records.usable_N
    assert len(table.records) == len(expected.private) - int((~expected.private.usable_N).sum()) == 40
    assert sort_rows(records.x[is_used_N]) == sort_rows(expected.private.x[expected.private.usable_N])
    assert records.num_unusable_by_reason == expected.private.num_unusable_by_reason
    assert sorted(records.y[is_used_N].tolist()) == sorted(expected.private.y[expected.private.usable_N].tolist())
    if world.encoder is None:
        assert kind.spec.mean == expected.spec.mean and kind.spec.std == expected.spec.std
    else:
        assert kind.encoder.identity == expected.spec.encoder.identity
        assert np.allclose(kind.spec.mean, expected.spec.mean) and np.allclose(kind.spec.std, expected.spec.std)


@pytest.fixture(scope="module", params=["texts", "npz", "encoded folder"])
def small_world(request, tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"), request.param, count=24)
    if request.param == "encoded folder":  # the pixels as an array
        x, y = images(24, 0)
        world.tables[0] = {IMAGE: x.numpy(), "label": pa.array(np.array(LABELS)[y.numpy()])}
    return world


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_one_record_moves_the_sums_by_at_most_the_sensitivity(small_world, adjacency):
    world, table = small_world, small_world.tables[0]
    kinds = [world.make_kind(name) for name in ("class_sums", "histogram")]

    def count_all(rows):
        neighbor = {key: cells[rows] if key == IMAGE else cells.take(pa.array(rows)) for key, cells in table.items()}
        records = world.read(kinds[0], neighbor)
        return [kind.count(records, adjacency).numbers for kind in kinds]

    full, largest = count_all(list(range(24))), [0.0, 0.0]
    for row in range(5):
        rows = [i for i in range(24) if i != row]
        if adjacency == "replace_one":
            rows.insert(row, row + 1)
        for number, (kind, moved) in enumerate(zip(kinds, count_all(rows), strict=True)):
            squared = sum(int(value) ** 2 for value in (moved - full[number]).ravel())
            largest[number] = max(largest[number], squared / kind.compute_squared_length(adjacency))
    assert max(largest) <= 1 and min(largest) > 0.2  # the bound is not vacuous


def test_an_image_file_name_gives_the_unit(tmp_path):
    world = World(tmp_path, "folder", unit="group:patient")
    kind = world.make_kind("histogram")
    table = read_columns("data", world.paths[0], label="label", unit="patient", pattern=r"^p(\d+)_")
    assert world.count(kind, table, unit="group:patient").sum() == 10 * kind.unit_length  # 40 images
    with pytest.raises(ValueError, match="must match every file name"):
        read_columns("data", world.paths[0], label="label", unit="patient", pattern=r"^q(\d+)_")
    raw, public = world.ask(kind)
    with pytest.raises(ValueError, match="data='patient'"):
        world.answer(0, raw, public)


# ---- the encoder -----------------------------------------------------------------------------------------------------


def test_another_encoder_is_refused_before_the_charge(tmp_path):
    world = World(tmp_path, "texts")
    raw, public = world.ask(world.make_kind())
    table = tmp_path / "other.safetensors"
    encoder_worlds.table(table, seed=1)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(world.encoder.files["tokenizer"].read_bytes() + b"\n")
    right = {key: str(path) for key, path in world.encoder.files.items()}
    for match, encoder in {
        "must be the encoder table: weights table.safetensors with SHA-256": None,
        "encoder sha256=": right | {"weights": str(table)},
        "encoder tokenizer_sha256=": right | {"tokenizer": str(tokenizer)},
        "encoder options=": replace(world.encoder, max_length=2),
        "features.weights='.*missing'": right | {"weights": "missing"},
    }.items():
        with pytest.raises(ValueError, match=match) as caught:
            world.answer(0, raw, public, encoder=encoder)
        assert "\n" not in str(caught.value)
    with world.consortium.sites[0].state.open() as secrets:
        assert not secrets.rounds and not get_charges(world.consortium.sites[0])
    world.answer(0, raw, public, encoder=right)
    assert len(get_charges(world.consortium.sites[0])) == 1
    images_world = World(tmp_path / "images", "npz")
    raw, public = images_world.ask(images_world.make_kind())
    with pytest.raises(ValueError, match="must be None, because the round asks for no encoder"):
        images_world.answer(0, raw, public, encoder=right)


def test_an_encoder_that_sees_several_records_at_once_is_refused(tmp_path):
    world = World(tmp_path, "texts")
    joiner, kind = world.consortium.joiner, world.make_kind()
    for encoder, match in (
        (replace(world.encoder, batch_size=2), "must be 1, so that the encoder sees each record"),
        (None, "nor texts with an encoder"),
    ):
        world.encoder = encoder
        with pytest.raises(ValueError, match=match):
            world.make_kind()
    card = replace(kind.encoder, options=kind.encoder.options | {"batch_size": 2})
    forged = replace(kind, spec=replace(kind.spec, encoder=card))
    key = load_joiner_key(joiner.folder / "joiner.key")
    assert read_public_file(joiner.charter, kind.to_file(joiner.charter, key)).spec == kind.spec
    for spec in (forged.spec, replace(kind.spec, encoder=replace(card, points=None)), replace(kind.spec, encoder=None)):
        with pytest.raises(ValueError, match=r"must be 1, so that|rows of a table nor images"):
            read_public_file(joiner.charter, replace(kind, spec=spec).to_file(joiner.charter, key))


def test_the_commands_release_a_student_of_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    encoder = encoder_worlds.static(tmp_path)
    tokenizer = str(encoder.files["tokenizer"])
    names = ("s0", "s1", "s2")
    for seed, name in enumerate((*names, "public")):
        write_texts(tmp_path / f"{name}.csv", 200, seed)

    def run(home, *words):
        monkeypatch.setenv("PATE_HOME", str(tmp_path / home))
        assert main(words) == 0, capsys.readouterr().err

    for name in names:
        run(name + "-home", "site", "init", "--account", "mails", "--folder", name)
    run("none", "join", "charter", *(f"{name}.key" for name in names), "--colluding", "1", "--max-records", "10000")
    words = Joiner(tmp_path / "join").charter.format_fingerprint()
    for name in names:
        run(name + "-home", "site", "confirm", "charter.json", "--folder", name, "--cap", "3", "--heard", words)
    run("none", "join", "keys", *(f"{name}.confirmed" for name in names))
    facts = ("weights=table.safetensors", f"tokenizer={tokenizer}", "license=MIT", "trained_on=digits", "name=digits")
    ask = ("join", "ask", "class_sums", "--epsilon", "2", "--public", "public.csv", "--text", "text")
    run("none", *ask, "--label", "label", "--classes", "low", "high", "--encoder", *facts)
    files = ("--weights", "table.safetensors", "--tokenizer", tokenizer)
    for name in names:
        answer = ("site", "answer", "join/round-0.json", "--folder", name, "--keys", "keys.json")
        run(name + "-home", *answer, "--data", f"{name}.csv", *files)
    run("none", "join", "sum", *(f"{name}.answer-0.pate" for name in names))
    run("none", "join", "train", "--public", "public.csv", "--out", "release", *files)
    statement = " ".join(json.loads((tmp_path / "release" / "privacy.json").read_text())["assumptions"])
    assert "The encoder is public: digits" in statement and "license: MIT; trained on: digits." in statement
    assert f"SHA-256 {encoder.digests['weights']}, tokenizer SHA-256" in statement
    assert main(("verify", "release")) == 0, capsys.readouterr().out
    paths = {"weights": "table.safetensors", "tokenizer": tokenizer}
    classifier = ReleasedClassifier.load(tmp_path / "release", encoder=paths)
    columns = read_columns("data", write_texts(tmp_path / "test.csv", 300, 9))
    predicted = np.asarray(classifier.predict(columns["text"].to_pylist()))
    assert np.mean(predicted == np.array(columns["label"].to_pylist())) > 0.9
    assert main(("site", "answer", "join/round-0.json", "--folder", "s0", "--data", "s0.csv")) == 0  # the same bytes


def test_a_damaged_array_file_gives_one_line(tmp_path):
    path = tmp_path / "scans.npz"
    path.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ValueError, match=r"is not a readable .npy or .npz file") as caught:
        read_columns("data", path)
    assert "\n" not in str(caught.value)
    np.savez(path, image=np.zeros((2, 4, 4), np.uint8), label=np.array([["a"], ["b"]]))
    with pytest.raises(ValueError, match=r"is not a readable .npy or .npz file"):
        read_columns("data", path)
    np.save(tmp_path / "scans.npy", np.zeros((2, 4, 4), np.uint8))
    assert list(read_columns("public", tmp_path / "scans.npy")) == [IMAGE]


def test_no_private_image_of_a_site_decides_by_its_type_how_the_others_are_read(tmp_path):
    whole = np.random.default_rng(0).integers(0, 256, (20, 8, 8))
    np.savez(tmp_path / "public.npz", image=whole[:9].astype(np.uint8))
    np.savez(tmp_path / "fewer.npz", image=whole, label=np.full(20, "a"))
    more = np.concatenate([whole, np.full((1, 8, 8), np.nan)])
    np.savez(tmp_path / "more.npz", image=more, label=np.full(21, "a"))
    kind = training.make_class_sums(read_columns("public", tmp_path / "public.npz"), "label", LABELS)
    tables = (read_columns("data", tmp_path / f"{name}.npz", label="label") for name in ("fewer", "more"))
    fewer, more = (kind.read_records(table, "record").x for table in tables)
    assert torch.equal(fewer, more[:20]) and torch.equal(fewer[:, 0], torch.from_numpy(whole.astype(np.uint8)))
    np.savez(tmp_path / "public.npz", image=whole[:9] / 255)
    with pytest.raises(ValueError, match=r"^public='fractions': must be images of whole numbers in 0\.\.255"):
        training.make_class_sums(read_columns("public", tmp_path / "public.npz"), "label", LABELS)


def test_numbers_of_a_site_are_no_texts(tmp_path):
    """One missing number changes the type of a column, and with it the texts of all numbers."""
    world = World(tmp_path, "texts")
    raw, public = world.ask(world.make_kind())
    columns = {"text": np.arange(6), "label": np.array(["low", "high"] * 3)}
    np.savez(tmp_path / "numbers.npz", **columns)
    pq.write_table(pa.table(columns), tmp_path / "numbers.parquet")
    for name in ("numbers.npz", "numbers.parquet"):
        world.tables[0] = partial(read_columns, "data", tmp_path / name)
        with pytest.raises(ValueError, match=r"^data=.*column 'text' of type int64 holds no texts: write the column"):
            world.answer(0, raw, public)
    assert not get_charges(world.consortium.sites[0])


def test_floating_point_ids_of_units_are_refused(tmp_path):
    """One missing or odd id of a Parquet file makes floats of all, which merge the units of long ids."""
    public = {"a": pa.array([str(i) for i in range(9)]), "label": pa.array(["a"] * 9)}
    kind = training.make_class_sums(public, "label", LABELS)
    for dtype in (pa.int64(), pa.float64()):
        ids = pa.array([2**60 + i for i in range(9)], pa.int64()).cast(dtype, safe=False)
        pq.write_table(pa.table(public | {"patient": ids}), tmp_path / "data.parquet")
        table = read_columns("data", tmp_path / "data.parquet", label="label", unit="patient")
        if dtype == pa.int64():
            assert len(set(kind.read_records(table, "group:patient").unit_id)) == 9
        else:
            with pytest.raises(ValueError, match="must hold ids of one type"):
                kind.read_records(table, "group:patient")
