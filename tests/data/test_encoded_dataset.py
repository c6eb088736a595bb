"""Data sets through a frozen encoder: cached, named in the release, needed by the student; no private text is left."""

import concurrent.futures
import csv
import dataclasses
import json
import stat
import threading
import time

import numpy as np
import pandas as pd
import pytest
import torch

from pate_torch import PATEClassifier, load_student, pipeline
from pate_torch.cli import main as cli
from pate_torch.core.files import compute_file_digest
from pate_torch.core.progress import Stages
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.data.tabular import Csv, Text
from pate_torch.features.encoder import Encoder
from pate_torch.mechanisms.gaussian import GNMax
from tests.features import encoder_worlds as worlds
from tests.release.json_schema import faults, privacy_schema
from tests.run_configs import changed
from tests.tensor_data import Tensors
from tests.tiny_runs import again, tiny

CPU = torch.device("cpu")


HIGH_LOW = ["high", "low"]


def mails(folder, private=300, public=80):
    """Two files of texts: of low digits, or of high ones."""
    draw = np.random.default_rng(3)
    for name, count in (("private", private), ("public", public)):
        worlds.mails(folder / f"{name}.csv", count, draw)
    paths = {"path": str(folder / "private.csv"), "public_path": str(folder / "public.csv")}
    return Text(name="mails", fractions=(0.4, 0.4, 0.2), nominal_size=300, **paths)


def encoded(folder, source=None, encoder=None):
    encoder = worlds.static(folder) if encoder is None else encoder
    return EncodedDataset(source=source or mails(folder), encoder=encoder, root=folder / "home", device=CPU)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Counted(Encoder):
    """An encoder that counts how often it works."""

    calls: list[int] = dataclasses.field(default_factory=list, repr=False)
    seconds: float = 0.0

    @classmethod
    def of(cls, encoder, **options):
        return cls(**{field.name: getattr(encoder, field.name) for field in dataclasses.fields(Encoder)}, **options)

    def encode(self, *args, **options):
        self.calls.append(1)
        time.sleep(self.seconds)
        return super().encode(*args, **options)


# ---- what is loaded --------------------------------------------------------------------------------------------------


def test_every_side_is_encoded_and_all_else_stays(tmp_path):
    source, encoder = mails(tmp_path), worlds.static(tmp_path)
    data = encoded(tmp_path, source, encoder)
    before, after = source.load(), data.load()
    for side in ("private", "pool", "evaluation"):
        assert torch.equal(getattr(after, side).x, encoder.encode(getattr(before, side).x, before.spec))
    assert torch.equal(after.private.y, before.private.y)
    assert after.private.unit_id.tolist() == before.private.unit_id.tolist()
    assert after.pool.names.names == before.pool.names.names and after.adjacencies == before.adjacencies
    spec = after.spec
    assert spec.input_shape == (worlds.WIDTH,) and spec.kind == "text" and spec.text is None
    assert spec.encoder.name == "table" and spec.encoder.points == before.spec
    # Public points alone are centered, and scaled as one.
    z = spec.normalize(after.pool.x).double()
    assert torch.allclose(z.mean(0), torch.zeros(worlds.WIDTH).double(), atol=1e-5) and len(set(spec.std)) == 1
    assert z.square().mean() == pytest.approx(1, abs=1e-5)
    facts = data.declared_facts()
    assert facts == source.declared_facts() and facts.paths
    assert (facts.name, facts.num_private, facts.num_classes, facts.is_benchmark) == ("mails", 300, None, False)


def test_a_record_of_which_nothing_finite_is_made_stops_nobody(tmp_path):
    x = torch.randn(40, 4).abs()
    options = {"name": "rows", "y": torch.arange(40) % 2, "class_names": 2, "mean": (0.0,) * 4, "std": (1.0,) * 4}
    x[7, 2] = -5.0
    source = Tensors(x=x, pool_x=x[:5], test_x=x[:5], test_y=torch.arange(5) % 2, **options)

    class Root(torch.nn.Module):
        def forward(self, x):
            return x.sqrt()

    data = encoded(tmp_path, source, Encoder(name="root", module=Root())).load()
    assert data.private.x[7, 2] == 0 and bool(data.private.x.isfinite().all())
    assert torch.allclose(data.private.x[8], x[8].sqrt())
    public = dataclasses.replace(source, pool_x=x[5:9])
    with pytest.raises(ValueError, match=r"features\.name='root': returns features of public points that are not fin"):
        encoded(tmp_path, public, Encoder(name="root", module=Root())).load()


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_points_are_encoded_once_until_something_changes_in_files_of_the_owner_alone(tmp_path):
    source, static = mails(tmp_path), worlds.static(tmp_path)

    def load(encoder):
        counted = Counted.of(encoder)
        return encoded(tmp_path, source, counted).load().private.x, len(counted.calls)

    first, calls = load(static)
    folder = tmp_path / "home/features"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "README").read_text().startswith("PRIVATE")
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name.rsplit("-", 1)[0] for file in files] == ["mails-private", "mails-public", "mails-test"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert {file.name for file in folder.iterdir()} == {"README", *(file.name for file in files)}
    second, again = load(static)
    assert (calls, again) == (3, 0) and torch.equal(first, second)
    files[0].write_bytes(files[0].read_bytes()[:40])  # a damaged file is made anew
    third, calls = load(static)
    assert calls == 1 and torch.equal(first, third)
    shorter, calls = load(dataclasses.replace(static, max_length=3))
    assert calls == 3 and not torch.equal(shorter, first)
    worlds.table(tmp_path / "table.safetensors", seed=1)  # other weights of the same name
    static = dataclasses.replace(static)
    other, calls = load(static)
    assert calls == 3 and not torch.equal(other, first)
    with open(tmp_path / "private.csv", "a") as file:
        file.write("12345,low\n")
    longer, calls = load(static)
    assert calls == 1 and len(longer) == len(first) + 1


def test_two_that_ask_for_the_same_points_encode_them_once(tmp_path):
    source, begun = mails(tmp_path), threading.Barrier(2, timeout=60)
    slow = Counted.of(worlds.static(tmp_path), seconds=0.2)  # time enough for the other to ask, too

    def load(_):
        begun.wait()
        return encoded(tmp_path, source, slow).load().private.x

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(load, range(2))
    assert len(slow.calls) == 3 and torch.equal(first, second)


class Draw(torch.nn.Module):
    """Other features of the same point each time."""

    def forward(self, x):
        return x + torch.randn(1)


class Memory(torch.nn.Module):
    """A state that every point leaves to the next."""

    def __init__(self):
        super().__init__()
        self.before = 0.0

    def forward(self, x):
        self.before, before = 0.9 * self.before + float(x.sum()), self.before
        return x + before


WRONG = {
    "batch statistics": (worlds.Crowd(), 4, "mixes points"),
    "a draw": (Draw(), 1, "the second time"),
    "a state": (Memory(), 1, "the second time|mixes points"),
}


@pytest.mark.parametrize(
    ("door", "wrong"),
    [*(("plan", wrong) for wrong in WRONG), ("pipeline", "batch statistics"), ("classifier", "batch statistics")],
)
def test_an_encoder_through_which_records_see_each_other_is_refused_at_every_door(door, wrong, tmp_path):
    module, batch_size, why = WRONG[wrong]
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    encoder = Encoder(name="wrong", module=module, batch_size=batch_size, cache_gb=0)
    source = Tensors(name="rows", x=x[:40], y=torch.arange(40) % 2, pool_x=x[40:], test_x=x[40:],
                     test_y=torch.arange(20) % 2, class_names=2)  # fmt: skip
    home, sentences = tmp_path / "home", worlds.sayings(60)
    with pytest.raises(ValueError, match=why):
        if door == "pipeline":
            pipeline.run(changed(tiny(home), dataset=source, encoder=encoder))
        elif door == "plan":
            encoded(tmp_path, source, encoder).load()
        else:
            words = dataclasses.replace(encoder, module=Words(module), tokenizer=worlds.WORDS, max_length=8)
            options = {"account": "a", "classes": [0, 1], "num_records_about": 40, "home": home, "verbose": False}
            clf = PATEClassifier(encoder=words, **options)
            clf.fit(sentences[:40], np.arange(40) % 2, public=sentences[40:])
    assert not (home / "ledger.sqlite").exists()


class Words(torch.nn.Module):
    """The tokens of a text as numbers, through another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids_BL, mask_BL):
        width = torch.zeros(len(ids_BL), 8)
        width[:, : ids_BL.shape[1]] = ids_BL * mask_BL
        return self.inner(width)


def test_progress_says_how_long_a_point_takes_and_not_how_many_there_are(tmp_path, capsys):
    encoded(tmp_path, mails(tmp_path, private=317)).load(Stages())
    messages = capsys.readouterr().err
    assert "Encoding the private records" in messages and "ms per point" in messages and "317" not in messages
    assert "its training data are not declared" in messages
    assert "its training data" not in load_messages(tmp_path, capsys, disjoint=True)


def load_messages(folder, capsys, **options):
    encoded(folder, mails(folder), worlds.static(folder, **options)).load(Stages())
    return capsys.readouterr().err


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, plan): a run of teachers on texts."""
    folder = tmp_path_factory.mktemp("texts")
    encoder = worlds.static(folder, license="MIT", trained_on="old mails", max_length=30)
    plan = changed(tiny(folder / "home"), dataset=mails(folder), encoder=encoder)
    pipeline.run(plan)
    return folder, plan


def files_of(folder):
    return {"weights": folder / "table.safetensors", "tokenizer": "tests/privacy/characters.json"}


def test_a_student_learns_from_texts_and_predicts_them(ran):
    folder, plan = ran
    truth = pd.read_csv(folder / "private.csv", dtype=str)
    student = load_student(plan.folder, encoder=files_of(folder))
    predictions = student.predict_names(truth["text"].tolist())
    assert np.mean(np.array(predictions) == truth["label"]) > 0.9
    assert student.predict_names(truth) == predictions
    rows = worlds.static(folder, max_length=30).encode(truth["text"].tolist())
    assert load_student(plan.folder).predict_names(rows) == predictions  # whoever has the features needs no encoder


def test_the_student_names_the_encoder_that_it_needs_and_takes_no_other(ran, tmp_path):
    folder, plan = ran
    digest = compute_file_digest(folder / "table.safetensors")
    with pytest.raises(ValueError, match=rf"needs the encoder table: weights table\.safetensors with SHA-256 {digest}"):
        load_student(plan.folder).predict(["123"])
    worlds.table(tmp_path / "table.safetensors", seed=1)
    for encoder, why in (
        (files_of(tmp_path), rf"encoder sha256=.*must be '{digest}', as in the description of"),
        (worlds.static(folder), r"encoder options=.*max_length"),
        ({"wheels": "x"}, r"encoder='wheels'"),
    ):
        with pytest.raises(ValueError, match=why):
            load_student(plan.folder, encoder=encoder)


def test_the_statement_names_the_encoder_and_warns_of_overlap(ran):
    folder, plan = ran
    release = plan.folder / "release"
    statement = json.loads((release / "privacy.json").read_text())
    assert not faults(statement, privacy_schema())
    card = statement["encoder"]
    assert (card["name"], card["license"], card["trained_on"]) == ("table", "MIT", "old mails")
    assert card["sha256"] == compute_file_digest(folder / "table.safetensors") and card["options"]["max_length"] == 30
    text = " ".join(statement["assumptions"] + statement["not_covered"])
    words = f"SHA-256 {card['sha256']}", "license: MIT", "Nobody has declared that these data are disjoint"
    assert all(word in text for word in words)
    for page in ("README.md", "report.html"):
        text = (release / page).read_text()
        assert card["sha256"] in text and "Nobody has declared" in text and "old mails" in text
    assert '"tokenizer": "tokenizer.json"}' in (release / "README.md").read_text()
    assert json.loads((release / "release.json").read_text())["encoder"]["sha256"] == card["sha256"]


def test_an_encoder_declared_apart_from_the_records_brings_no_warning(ran):
    folder, plan = ran
    encoder = worlds.static(folder, disjoint=True, publish=True)
    other = again(plan, "apart", dataset=mails(folder), encoder=encoder)
    pipeline.run(other)
    release = other.folder / "release"
    text = (release / "README.md").read_text()
    assert "Nobody has declared" not in text
    assert "training data of the encoder contain no private record" in text
    assert "encoder/" in text and 'load_student(".")' in text
    assert {file.name for file in (release / "encoder").iterdir()} == {"table.safetensors", "tokenizer.json"}
    assert load_student(release).predict_names(["56789", "01234"]) == HIGH_LOW

    # No private text and no place of a file leaves.
    private, public = (set(pd.read_csv(folder / f"{name}.csv", dtype=str)["text"]) for name in ("private", "public"))
    released = b"".join(file.read_bytes() for file in (plan.folder / "release").rglob("*") if file.is_file())
    long = [text for text in private - public if len(text) > 9]
    assert len(long) > 50 and not [text for text in long if text.encode() in released]
    assert str(folder).encode() not in released


def test_the_predict_command_reads_texts(ran, tmp_path, capsys):
    folder, plan = ran
    (tmp_path / "new.csv").write_text("text\n56789\n01234\n")
    command = ["predict", str(plan.folder), str(tmp_path / "new.csv")]
    assert cli.main(command) == 2 and "needs the encoder table" in capsys.readouterr().err
    files = [f"--{key}={value}" for key, value in files_of(folder).items()]
    assert cli.main([*command, *files]) == 0
    assert [row["label"] for row in csv.DictReader(capsys.readouterr().out.splitlines())] == HIGH_LOW


def test_texts_without_an_encoder_and_records_of_another_account_are_refused(ran, tmp_path):
    folder, plan = ran
    with pytest.raises(ValueError, match=r"features=None: must be an encoder, because points are texts\. Use features"):
        pipeline.run(changed(tiny(tmp_path / "home"), dataset=mails(tmp_path)))
    assert not (tmp_path / "home/ledger.sqlite").exists()
    other = dataclasses.replace(plan.dataset.source, name="other")  # the same records through another encoder
    with pytest.raises(ValueError, match=r"account='other': shares a tenth or more of the units with account 'mails'"):
        pipeline.run(again(plan, "other", dataset=other, encoder=worlds.static(folder, max_length=7)))


def test_the_classifier_takes_texts_through_an_encoder_that_its_release_names(tmp_path, capsys, monkeypatch):
    mails(tmp_path, private=600)
    private, public = (pd.read_csv(tmp_path / f"{name}.csv", dtype=str) for name in ("private", "public"))
    encoder, plain = worlds.static(tmp_path, license="MIT"), Encoder.encode

    def encode(self, x, *args, **options):  # one private text has no finite features
        features = plain(self, x, *args, **options)
        features[: len(x) > 500] = torch.inf
        return features

    monkeypatch.setattr(Encoder, "encode", encode)
    options = {"account": "mails", "num_records_about": 600, "classes": HIGH_LOW, "home": tmp_path / "home"}
    model = PATEClassifier(epsilon=4, encoder=encoder, method="gradients", **options)
    model.fit(private["text"].tolist(), private["label"], public=public["text"].tolist())
    monkeypatch.setattr(Encoder, "encode", plain)
    assert "its training data are not declared" in "".join(capsys.readouterr())
    assert model.score(public["text"].tolist(), public["label"]) > 0.8
    assert model.privacy_["encoder"]["license"] == "MIT"
    student = load_student(model.release_, encoder=encoder)
    assert student.predict_names(public["text"].tolist()) == model.predict(public["text"].tolist()).tolist()


def test_tables_go_through_a_torch_module_to_a_student_of_theirs(tmp_path):
    rows = pd.DataFrame({"size": np.arange(400.0), "kind": ["a", "b"] * 200, "label": ["no", "yes"] * 200})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    table = Csv(name="rows", path=str(tmp_path / "rows.csv"), publish_split=True, fractions=(0.6, 0.2, 0.2))
    flat = Encoder(name="flat", module=torch.nn.Flatten())
    plan = changed(tiny(tmp_path / "home"), dataset=table, encoder=flat, num_queries=30)
    pipeline.run(plan)
    with pytest.raises(ValueError, match=r"encoder='flat': is the torch module torch\.nn\.modules\.flatten\.Flatten,"):
        load_student(plan.folder, encoder={"weights": "flat.pth"})
    student = load_student(plan.folder, encoder=flat)
    new = rows.drop(columns="label")[:50]
    assert student.predict_names(new) == rows["label"].tolist()[:50] and student.spec.kind == "table"


def test_another_release_encodes_nothing_finds_its_teachers_and_is_charged(ran, monkeypatch):
    _, plan = ran
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded once more"))
    before = json.loads((plan.folder / "release/summary.json").read_text())
    source, encoder = plan.dataset.source, plan.dataset.encoder
    teachers, folders = before["teachers_id"], sorted(path.name for path in (plan.root / "teachers").iterdir())
    other = again(plan, "more", dataset=source, encoder=encoder, teachers=teachers, mechanism=GNMax(sigma=9))
    pipeline.run(other)
    after = json.loads((other.folder / "release/summary.json").read_text())
    assert after["teachers_id"] == teachers and after["release_id"] != before["release_id"]
    assert after["epsilon_charged"] > before["epsilon_charged"]
    assert sorted(path.name for path in (plan.root / "teachers").iterdir()) == folders
