"""``pate predict``: a release alone, in another folder, says what records are, or names what does not fit."""

import csv
import io
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from pate_torch import load_student, networks
from pate_torch.cli.main import main as pate
from pate_torch.data.benchmark import Digits
from pate_torch.data.tabular import Csv
from pate_torch.students import store
from pate_torch.students.base import Student
from tests.data.owner_files import ImageFolder, write_gallery

SECRET = "Xanadu"
"""A town of private records alone."""


def people(count, seed):
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"town": draw.choice(["a", "b"], count), "height": draw.normal(170, 9, count).round(3)})
    frame["label"] = np.where(frame["height"] > 170, "tall", "short")
    return frame


def student_of(data):
    network = networks.describe("logistic", data.spec.input_shape, data.spec.num_classes)
    module = networks.rebuild(network)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return Student(network, module.eval(), data.spec)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """(A folder with a student's file alone, its data)."""
    folder = tmp_path_factory.mktemp("tables")
    private = people(200, 0)
    private.loc[5:9, "town"] = SECRET
    for name, frame in (("private", private), ("public", people(60, 1)), ("test", people(60, 2))):
        frame.to_csv(folder / f"{name}.csv", index=False)
    paths = {key: str(folder / f"{name}.csv") for key, name in
             (("path", "private"), ("public_path", "public"), ("test_path", "test"))}  # fmt: skip
    data = Csv(name="people", **paths).load()
    away = tmp_path_factory.mktemp("away")
    store.save(student_of(data), away / "student.safetensors")
    return away, data


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def run(capsys, *words):
    code = pate(["predict", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_release_alone_predicts_records_of_any_file(tables, tmp_path, capsys):
    away, data = tables
    frame = people(30, 3)
    frame.to_csv(tmp_path / "new.csv", index=False)
    frame.drop(columns="label").to_parquet(tmp_path / "new.parquet")
    (code, table, err), of_parquet = (run(capsys, away, tmp_path / f"new.{kind}") for kind in ("csv", "parquet"))
    assert (code, err) == (0, "Ignored columns: label.\n") and of_parquet == (0, table, "")
    found = rows(table)
    assert [row["id"] for row in found] == [str(row) for row in range(30)]
    assert list(found[0]) == ["id", "label", "probability_short", "probability_tall"]
    student = load_student(away)
    assert [row["label"] for row in found] == student.predict_names(frame)
    shares = torch.tensor([[float(row["probability_short"]), float(row["probability_tall"])] for row in found])
    assert torch.allclose(shares, student.predict_proba(frame), atol=1e-5)
    assert SECRET not in json.dumps(data.spec.to_dict())
    assert SECRET.encode() not in (away / "student.safetensors").read_bytes()


def test_the_students_of_a_table_say_of_its_records_what_they_say_of_its_rows(tables, tmp_path, capsys):
    away, data = tables
    frame = people(60, 2)
    frame.to_csv(tmp_path / "test.csv", index=False)
    code, out, _ = run(capsys, away, tmp_path / "test.csv")
    assert code == 0
    student, order = load_student(away), np.argsort(frame["height"].to_numpy(dtype=np.float32))
    place = np.argsort(data.evaluation.x[:, -1].numpy())
    label = [data.spec.class_names[y] for y in student.predict(data.evaluation.x).tolist()]
    found = [row["label"] for row in rows(out)]
    assert [found[row] for row in order] == [label[row] for row in place]


def test_what_does_not_fit_is_one_line_that_names_it(tables, tmp_path, capsys):
    away, _ = tables
    frame = people(4, 3).assign(name=list("wxyz"))
    frame.loc[2, "town"] = "Oz"
    frame.to_csv(tmp_path / "new.csv", index=False)
    code, out, err = run(capsys, away, tmp_path / "new.csv")
    assert (code, out) == (2, "") and "town='Oz' (row 2)" in err and "unknown=zeros" in err and err.count("\n") == 1
    output = tmp_path / "said.csv"
    code, out, err = run(capsys, away, tmp_path / "new.csv", "--unknown", "zeros", "--id", "name", "--output", output)
    assert (code, out, err) == (0, "", "Ignored columns: label.\n")
    assert [row["id"] for row in rows(output.read_text())] == list("wxyz")
    frame.drop(columns=["town", "height"]).to_csv(tmp_path / "less.csv", index=False)
    code, out, err = run(capsys, away, tmp_path / "less.csv")
    assert (code, out) == (2, "") and "lacks the columns town, height" in err and err.count("\n") == 1
    for words in ((tmp_path / "none.csv",), (tmp_path / "new.csv", "--id", "nam")):
        code, _, err = run(capsys, away, *words)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert run(capsys, tmp_path, tmp_path / "new.csv")[0] == 2


def test_images_are_decoded_as_the_folder_was(tmp_path, capsys):
    data = ImageFolder(name="scans", path=write_gallery(tmp_path / "all", classes=("a", "b"))).load()
    assert data.spec.resize == "bilinear"
    store.save(student_of(data), tmp_path / "student.safetensors")
    new = tmp_path / "new"
    shutil.copytree(tmp_path / "all", new)
    code, out, _ = run(capsys, tmp_path / "student.safetensors", new)
    found = {row["id"]: row["label"] for row in rows(out)}
    assert code == 0 and set(found) == {f"{kind}/p{i % 10}_{i}.png" for kind in "ab" for i in range(30)}
    everything = torch.cat([data.private.x, data.pool.x, data.evaluation.x])
    student = load_student(tmp_path / "student.safetensors")
    assert sorted(found.values()) == sorted(student.predict_names(everything))
    code, out, _ = run(capsys, tmp_path / "student.safetensors", new / "a" / "p0_0.png")
    assert code == 0 and [(row["id"], row["label"]) for row in rows(out)] == [("p0_0.png", found["a/p0_0.png"])]
    (new / "a" / "p0_0.png").write_bytes(b"no image")
    code, out, err = run(capsys, tmp_path / "student.safetensors", new)
    assert code == 2 and "records=" in err and "p0_0.png" in err and err.count("\n") == 1
    assert run(capsys, tmp_path / "student.safetensors", tmp_path / "all" / "c")[0] == 2


def test_a_student_of_images_of_one_size_takes_no_other(tmp_path, capsys):
    student = student_of(Digits().load())
    store.save(student, tmp_path / "student.safetensors")
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "right.png")
    Image.fromarray(np.zeros((9, 8), dtype=np.uint8)).save(tmp_path / "wrong.png")
    code, out, _ = run(capsys, tmp_path, tmp_path / "right.png")
    assert code == 0 and [rows(out)[0]["label"]] == student.predict_names(pixels[None, None])
    code, _, err = run(capsys, tmp_path, tmp_path / "wrong.png")
    assert code == 2 and "must be 8 x 8" in err and err.count("\n") == 1
