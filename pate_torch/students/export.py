"""Released students for use elsewhere: found by folder or file, and exported with their normalization built in.

    pate_torch.load_student("outputs/runs/digits/gaussian/<run>").predict(x)
    pate export outputs/runs/digits/gaussian/<run> --format torch_export

An exported program takes raw points, as the data have them (uint8 images or rows), in batches of any size, and gives
class probabilities; it runs with PyTorch alone. Of a table it takes the encoded rows: ``pate_torch.json`` in it names
their features, in order, and holds the schema. ONNX is not offered: its exporter needs packages of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.data.encoded_dataset import ENCODER_FOLDER
from pate_torch.features.base import PointEncoder
from pate_torch.features.encoder import Encoder
from pate_torch.privacy.records import DataSpec
from pate_torch.students import store
from pate_torch.students.base import Student

STUDENT_FILE = "student.safetensors"
FORMAT_SUFFIXES = {"torch_export": ".pt2"}


def resolve_path(location: Path | str) -> Path:
    """The student's file: ``location`` itself, or in the folder of a run or of its release.

    Raises:
        ValueError: There is none.
    """
    location = Path(location)
    if location.is_file():
        return location
    for candidate in (location / "release" / STUDENT_FILE, location / STUDENT_FILE):
        if candidate.is_file():
            return candidate
    raise checks.error("student", str(location), f"is neither a student's file nor a run that has one ({STUDENT_FILE})")


def load_student(
    location: Path | str,
    device: torch.device | str = "cpu",
    encoder: PointEncoder | Mapping[str, Path | str] | None = None,
) -> Student:
    """Load a released student, by its file or the folder of its run. No code in the file is run.

    Args:
        location: The student's file, or a folder that has it.
        device: Where it predicts.
        encoder: What the student sees points through, where it needs one that was not published with it: an
            ``Encoder``, or its files, {"weights": ..., "tokenizer": ...}.

    Raises:
        ValueError: There is no student, or the encoder is another than it needs.
    """
    file = resolve_path(location)
    student = store.load(file, device)
    card, folder = student.spec.encoder, file.parent / ENCODER_FOLDER
    if isinstance(encoder, Mapping):
        if card is None:
            raise checks.error("encoder", sorted(encoder), "is not needed: the student takes points as they are")
        encoder = Encoder.from_card(card, {key: str(path) for key, path in encoder.items()})
    elif encoder is None and card is not None and card.kind in ("onnx", "static") and folder.is_dir():
        encoder = Encoder.from_card(card, Encoder.locate_files(card, folder))
    return student if encoder is None else student.with_encoder(encoder)


class ExportedModel(nn.Module):
    """Raw points [B, ...] -> class probabilities, float32 [B, C].

    Args:
        module: From normalized points to logits.
        spec: How points are normalized.
    """

    def __init__(self, module: nn.Module, spec: DataSpec) -> None:
        super().__init__()
        self.module = module
        self.shape = (-1, 1, 1) if spec.is_image else (-1,)
        self.scale = 255.0 if spec.is_image else 1.0
        self.mean: Tensor
        self.std: Tensor
        # Buffers, so that they go where the weights go.
        self.register_buffer("mean", torch.tensor(spec.mean, dtype=torch.float32).view(self.shape))
        self.register_buffer("std", torch.tensor(spec.std, dtype=torch.float32).view(self.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.module((x.float() / self.scale - self.mean) / self.std).softmax(1)


def export(student: Student, path: Path | str, format: str = "torch_export") -> Path:
    """Write the student as a self-contained program at ``path`` and check it against the student itself.

    Raises:
        ValueError: The format is unknown.
        ArithmeticError: The program's output differs from the student's.
    """
    checks.one_of("format", format, FORMAT_SUFFIXES)
    path = Path(path)
    example = _make_example(student.spec, 4)
    # A copy on the CPU: exporting must not move the student.
    network = networks.rebuild(student.network)
    network.load_state_dict({name: value.cpu() for name, value in student.module.state_dict().items()})
    batch = torch.export.Dim("batch")
    program = torch.export.export(ExportedModel(network.eval(), student.spec), (example,), dynamic_shapes=({0: batch},))
    facts = {"spec": student.spec.to_dict(), "input": str(example.dtype), "output": "class probabilities"}
    if student.spec.schema is not None:
        facts["features"] = student.spec.schema.feature_names
    torch.export.save(program, path, extra_files={"pate_torch.json": json.dumps(facts)})
    for size in (1, 3):
        x = _make_example(student.spec, size)
        if not torch.allclose(load_export(path)(x), student.compute_probabilities(x), atol=1e-5):
            raise ArithmeticError(f"{path}: the exported program differs from the student")
    return path


def load_export(path: Path | str) -> nn.Module:
    """An exported program, ready to be called with raw points."""
    return torch.export.load(path).module()


def _make_example(spec: DataSpec, size: int) -> Tensor:
    """Any points of the right shape: the program must not depend on them."""
    values = torch.arange(size * torch.Size(spec.input_shape).numel()).view(size, *spec.input_shape)
    return (values % 251).to(torch.uint8) if spec.is_image else (values % 7).float()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``pate export``; its exit code. 0: done; 2: a bad choice of the user's."""
    parser = argparse.ArgumentParser(prog="pate export", description="Export a released student for use elsewhere.")
    parser.add_argument("run", type=Path, help="the folder of a run or of its release, or a student's file")
    parser.add_argument("--format", default="torch_export", choices=sorted(FORMAT_SUFFIXES))
    parser.add_argument("--output", type=Path, help="where to write (default: beside the release folder)")
    options = parser.parse_args(arguments)
    try:
        file = resolve_path(options.run)
        folder = file.parent.resolve()  # a release is published as it was written: nothing is added to it
        default_folder = folder.parent if (folder / "privacy.json").exists() else folder
        output = options.output or default_folder / f"{file.stem}{FORMAT_SUFFIXES[options.format]}"
        if (output.parent / "privacy.json").exists():
            raise checks.error("--output", str(output), "lies in a release folder", "Write beside it.")
        print(export(store.load(file), output, options.format))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
