"""Students leave as files that are found again, and as programs that say the same: raw points in, probabilities out."""

import dataclasses
import json
import sys
import zipfile

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import pate_torch
from pate_torch.cli.main import main as pate
from pate_torch.privacy.schema import Column, TableSchema
from pate_torch.students import store
from pate_torch.students.base import Student
from tests.students.tasks import FRAME, ROWS, TABLE, make_student
from tests.worlds import IMAGES


@pytest.mark.parametrize("spec,network", [(IMAGES, "small_cnn"), (TABLE, "logistic")], ids=["images", "table"])
def test_an_exported_student_says_the_same_of_any_number_of_points(tmp_path, spec, network):
    student = make_student(spec, network)
    path = store.export(student, tmp_path / "student.pt2")
    program = torch.export.load(path).module()
    for size in (1, 2, 17):
        x = torch.randint(256, (size, *spec.input_shape), dtype=torch.uint8)
        x = x if spec.is_image else x.float() / 50
        probabilities = program(x)
        assert torch.allclose(probabilities, student.compute_probabilities(x), atol=1e-5)
        assert torch.allclose(probabilities.sum(1), torch.ones(size), atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        facts = json.loads(archive.read(next(name for name in archive.namelist() if name.endswith("pate_torch.json"))))
    assert facts["spec"]["class_names"] == list(spec.class_names)
    if spec.schema is not None:
        assert facts["features"] == ["age", "ward=A", "ward=B"]
        rows = torch.from_numpy(TableSchema.from_dict(facts["spec"]["schema"]).encode(FRAME))
        assert torch.allclose(program(rows), student.compute_probabilities(FRAME), atol=1e-6)


def feed_columns(table):
    """The columns of a table, as an ONNX runtime takes them."""
    return {
        name: values.to_numpy(np.float32 if values.dtype.kind in "if" else object)[:, None]
        for name, values in table.items()
    }


@pytest.mark.parametrize("name", ["age", "mean", "X"])
@pytest.mark.parametrize("network", ["logistic", "mlp"])
def test_an_onnx_file_takes_the_columns_of_a_table(tmp_path, network, name):
    schema = TableSchema((Column(name, None, 20.0), Column("ward", ("A", "B", "")), Column("height", None)))
    width = {"input_shape": (5,), "mean": (40.0, 0.0, 0.0, 0.0, 1.0), "std": (9.0, 1.0, 1.0, 1.0, 0.5)}
    student = make_student(dataclasses.replace(TABLE, schema=schema, **width), network)
    store.save(student, tmp_path / "student.safetensors")
    session = onnxruntime.InferenceSession(store.export_onnx(student, tmp_path / "student.onnx"))
    ages, wards = [31, np.nan, np.inf, 7, 80, 55], ["A", "B", "", "of no ward", "A", "B"]
    table = pd.DataFrame({name: ages, "ward": wards, "height": [1.7, 1.6, 1.9, 1.2, 0.4, 1.5]})
    with pytest.warns(UserWarning, match="'ward'"):
        expected = pate_torch.ReleasedClassifier.load(tmp_path)
        expected = expected.predict_proba(table.assign(**{name: table[name].replace(np.inf, np.nan)}))
    assert np.ptp(expected[:, 0]) > 0.1
    (probabilities,) = session.run(None, feed_columns(table))
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["pate_torch"])
    assert TableSchema.from_dict(facts["spec"]["schema"]) == schema
    assert facts["spec"]["class_names"] == ["ill", "well"]


@pytest.mark.parametrize("spec,network", [(IMAGES, "small_cnn"), (ROWS, "fourier")], ids=["images", "rows"])
def test_an_onnx_file_takes_images_and_rows(tmp_path, spec, network):
    student = make_student(spec, network)
    session = onnxruntime.InferenceSession(store.export_onnx(student, tmp_path / "student.onnx"))
    for size in (1, 7):
        x = np.random.default_rng(0).integers(0, 255, (size, *spec.input_shape), np.uint8)
        x = x if spec.is_image else x.astype(np.float32) / 99
        (probabilities,) = session.run(None, {"X": x})
        np.testing.assert_allclose(probabilities, student.compute_probabilities(x), atol=1e-5)


def test_without_the_package_onnx_the_error_names_the_extra(tmp_path, capsys, monkeypatch):
    store.save(make_student(ROWS, "mlp"), tmp_path / "student.safetensors")
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert pate(["export", str(tmp_path), "--format", "onnx"]) == 2
    assert "pate-torch[onnx]" in capsys.readouterr().err


def test_a_program_that_differs_is_not_passed_off(tmp_path, monkeypatch):
    student = make_student(ROWS, "logistic")
    monkeypatch.setattr(Student, "compute_probabilities", lambda self, x: torch.full((len(x), 2), 0.5))
    with pytest.raises(ArithmeticError, match="differs"):
        store.export(student, tmp_path / "student.pt2")


def test_load_student_takes_a_file_a_run_or_its_release(tmp_path):
    student, folder, x = make_student(ROWS, "mlp"), tmp_path / "run" / "release", torch.randn(6, 6)
    folder.mkdir(parents=True)
    store.save(student, folder / "student.safetensors")
    for where in (folder / "student.safetensors", folder, folder.parent, str(folder.parent)):
        loaded = pate_torch.load_student(where)
        assert torch.equal(loaded.compute_probabilities(x), student.compute_probabilities(x))
    with pytest.raises(ValueError, match="must be a student file"):
        pate_torch.load_student(tmp_path)


def test_the_command_writes_beside_a_release_and_never_into_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(store, "export", lambda student, path: path)
    store.save(make_student(ROWS, "mlp"), tmp_path / "student.safetensors")
    assert pate(["export", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "student.pt2")
    release = tmp_path / "run" / "release"
    release.mkdir(parents=True)
    store.save(make_student(ROWS, "mlp"), release / "student.safetensors")
    (release / "privacy.json").write_text("{}")
    assert pate(["export", str(tmp_path / "run")]) == pate(["export", str(release / "student.safetensors")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "run" / "student.pt2")] * 2
    before = {file.name for file in release.iterdir()}
    assert pate(["export", str(release), "--format", "onnx"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "student.onnx")
    assert {file.name for file in release.iterdir()} == before
    assert pate(["export", str(release), "--output", str(release / "student.pt2")]) == 2
    assert "--output" in capsys.readouterr().err
    assert pate(["export", str(tmp_path / "nowhere")]) == 2
    assert "must be a student file" in capsys.readouterr().err
    (tmp_path / "bad.safetensors").write_bytes(b"not a student")
    assert pate(["export", str(tmp_path / "bad.safetensors")]) == 2


@pytest.mark.parametrize("header", ["[]", '"text"', "null", "{", "[" * 100_000, '{"format": "pate_torch.student/1"}'])
def test_a_header_that_describes_no_student_is_refused_in_one_line(header, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "student.safetensors", metadata={store.METADATA_KEY: header})
    with pytest.raises(ValueError, match=r"^student=") as refused:
        store.load(tmp_path / "student.safetensors")
    assert "\n" not in str(refused.value)
