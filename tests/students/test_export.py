"""Students leave as programs that say the same: raw points in, probabilities out, any batch size."""

import json
import zipfile

import pytest
import torch
from safetensors.torch import save_file

import pate_torch
from pate_torch import networks
from pate_torch.privacy.records import DataSpec
from pate_torch.students import export, store
from pate_torch.students.base import Student

IMAGES = DataSpec(
    name="squares", num_classes=3, input_shape=(1, 8, 8), class_names=("a", "b", "c"), mean=(0.3,), std=(0.2,)
)
ROWS = DataSpec(
    name="rows", num_classes=2, input_shape=(5,), class_names=("no", "yes"), mean=(1.0,) * 5, std=(2.0,) * 5
)


def student(spec, network):
    description = networks.describe(network, spec.input_shape, spec.num_classes)
    module = networks.rebuild(description)
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    for name, buffer in module.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=draw) + 0.5)  # not those of a fresh network
    return Student(network=description, module=module.eval(), spec=spec)


@pytest.mark.parametrize("spec,network", [(IMAGES, "small_cnn"), (ROWS, "mlp")], ids=["images", "rows"])
def test_an_exported_student_says_the_same_of_any_number_of_points(tmp_path, spec, network):
    one = student(spec, network)
    path = export.export(one, tmp_path / "student.pt2")
    program = export.load_export(path)
    for size in (1, 2, 17):
        x = torch.randint(256, (size, *spec.input_shape), dtype=torch.uint8)
        x = x if spec.is_image else x.float() / 50
        probabilities = program(x)
        assert torch.allclose(probabilities, one.compute_probabilities(x), atol=1e-5)
        assert torch.allclose(probabilities.sum(1), torch.ones(size), atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        extra = next(name for name in archive.namelist() if name.endswith("pate_torch.json"))
        assert json.loads(archive.read(extra))["spec"]["class_names"] == list(spec.class_names)


def test_a_program_that_differs_is_not_passed_off(tmp_path, monkeypatch):
    one = student(ROWS, "mlp")
    monkeypatch.setattr(Student, "compute_probabilities", lambda self, x: torch.full((len(x), 2), 0.5))
    with pytest.raises(ArithmeticError, match="differs"):
        export.export(one, tmp_path / "student.pt2")


def test_load_student_takes_a_file_a_run_or_its_release(tmp_path):
    one = student(ROWS, "mlp")
    folder = tmp_path / "run" / "release"
    folder.mkdir(parents=True)
    store.save(one, folder / "student.safetensors")
    x = torch.randn(6, 5)
    for where in (folder / "student.safetensors", folder, folder.parent, str(folder.parent)):
        loaded = pate_torch.load_student(where)
        assert torch.equal(loaded.compute_probabilities(x), one.compute_probabilities(x))
        assert torch.equal(loaded.predict(x), one.compute_probabilities(x).argmax(1))
    with pytest.raises(ValueError, match="neither"):
        pate_torch.load_student(tmp_path)


def test_the_command(tmp_path, capsys):
    store.save(student(ROWS, "mlp"), tmp_path / "student.safetensors")
    assert export.main([str(tmp_path), "--format", "torch_export"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "student.pt2")
    assert export.load_export(tmp_path / "student.pt2")(torch.zeros(3, 5)).shape == (3, 2)
    release = tmp_path / "run" / "release"
    release.mkdir(parents=True)
    store.save(student(ROWS, "mlp"), release / "student.safetensors")
    (release / "privacy.json").write_text("{}")
    assert export.main([str(tmp_path / "run")]) == export.main([str(release / "student.safetensors")]) == 0
    assert {file.name for file in release.iterdir()} == {"student.safetensors", "privacy.json"}
    assert capsys.readouterr().out.split() == [str(tmp_path / "run" / "student.pt2")] * 2
    assert export.main([str(release), "--output", str(release / "student.pt2")]) == 2
    assert "--output" in capsys.readouterr().err
    assert export.main([str(tmp_path / "nowhere")]) == 2
    assert "neither" in capsys.readouterr().err
    (tmp_path / "bad.safetensors").write_bytes(b"not a student")
    assert export.main([str(tmp_path / "bad.safetensors")]) == 2


@pytest.mark.parametrize("header", ["[]", '"text"', "null", "{", "[" * 100_000, '{"format": "pate_torch.student/1"}'])
def test_a_header_that_describes_no_student_is_refused_in_one_line(header, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "student.safetensors", metadata={store.METADATA_KEY: header})
    with pytest.raises(ValueError, match=r"^student=") as refused:
        store.load(tmp_path / "student.safetensors")
    assert "\n" not in str(refused.value)
