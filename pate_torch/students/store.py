"""Released students on disk: saving, loading, and export to programs that need PyTorch or an ONNX runtime alone.

    pate_torch.load_student("outputs/runs/digits/gaussian/<run>").predict(x)
    pate export outputs/runs/digits/gaussian/<run>

A student is one safetensors file whose header describes the network, so that loading runs no code of the file. The
input of an exported program is a batch of raw points (uint8 images or float32 rows) of any size, and the output is
class probabilities. Missing numbers are replaced as in training. The points of a table are encoded rows for
``torch.export``, whose extra file ``pate_torch.json`` holds the schema and the names of the features. An ONNX file
takes the columns of a table, each [N, 1]: float32 numbers, and categories as texts, as the schema in its metadata
writes them.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.files import SHARED_FILE_MODE, atomic_replacement
from pate_torch.data.encoded_dataset import ENCODER_FOLDER
from pate_torch.features.encoder import TOKENIZER_FILE, Encoder
from pate_torch.privacy.records import OPTIONAL_SPEC_FIELDS, DataSpec
from pate_torch.students.base import Student
from pate_torch.students.numpy_student import FORMAT, METADATA_KEY, find_student_file, read


def save(student: Student, path: Path, **notes: str) -> None:
    """Write the weights, the description of the network, the public facts about the data and notes to ``path``."""
    spec = student.spec.to_dict()
    extra = {key: spec.pop(key) for key in OPTIONAL_SPEC_FIELDS if key in spec}
    facts = {"format": FORMAT, "network": student.network, "spec": spec, **extra, **notes}
    header = {METADATA_KEY: json.dumps(facts, sort_keys=True)}  # one entry, because the order of several is not fixed
    tensors = {name: value.detach().cpu().contiguous() for name, value in student.module.state_dict().items()}
    with atomic_replacement(path, SHARED_FILE_MODE) as temporary:
        save_file(tensors, temporary, metadata=header)


def load(path: Path | str, device: torch.device | str = "cpu") -> Student:
    """Load the student in ``path``. Raise ValueError if the file is missing, damaged, or not a student."""
    facts, tensors = read(path, "pt", str(device))
    try:
        network: dict[str, Any] = facts["network"]
        spec = DataSpec.from_dict(facts["spec"] | {key: facts[key] for key in OPTIONAL_SPEC_FIELDS if key in facts})
        _check_header(network, spec, tensors)
        with torch.device("meta"):  # no memory is allocated before the sizes in the header are compared
            module = networks.rebuild(network)
        expected = {name: (value.shape, value.dtype) for name, value in module.state_dict().items()}
        if expected != {name: (value.shape, value.dtype) for name, value in tensors.items()}:
            raise ValueError("its tensors have other names, shapes or types")
        module.load_state_dict(tensors, assign=True)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise checks.error("student", str(path), f"does not fit the network in its header ({error})") from error
    return Student(network=network, module=module.to(device).eval(), spec=spec)


def _check_header(network: Any, spec: DataSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if the header and the tensors contradict each other, before the network is built."""
    if list(network["input_shape"]) != list(spec.input_shape) or network["num_classes"] != spec.num_classes:
        raise ValueError("its network and its data differ in the shape of points or the number of classes")
    design: Any = network
    while isinstance(design, dict):  # a network may contain another network
        options = design.get("options") or {}
        counts = [options.get(name, 1) for name in ("members", "blocks")]
        if max(*counts, *(len(v) for v in options.values() if isinstance(v, list)), 1) > len(tensors) + 8:
            raise ValueError("its network has more layers than the file has tensors")
        design = options.get("of")
    for name, value in tensors.items():
        has_features = name.rpartition(".")[2] == "feature_R"
        if has_features and not bool(((value >= 0) & (value < math.prod(spec.input_shape))).all()):
            raise ValueError("its rules use features that the points do not have")


def load_student(
    location: Path | str, device: torch.device | str = "cpu", encoder: Encoder | Mapping[str, Path | str] | None = None
) -> Student:
    """Load a released student from a file or from the folder of a run or release. No code of the file is run.

    Args:
        location: Path of the file or folder.
        device: Device on which the student predicts.
        encoder: Encoder of the points: an ``Encoder``, or the paths of its files, {"weights": ..., "tokenizer": ...}.
            None if the encoder is in the release, or if the student needs no encoder.

    Raises:
        ValueError: There is no student, or the student was trained with another encoder.
    """
    file = find_student_file(location)
    student = load(file, device)
    card, folder = student.spec.encoder, file.parent / ENCODER_FOLDER
    if isinstance(encoder, Mapping):
        if card is None:
            raise checks.error("encoder", sorted(encoder), "must be None, because the student applies no encoder")
        encoder = Encoder.from_card(card, {key: str(path) for key, path in encoder.items()})
    elif encoder is None and card and folder.is_dir() and (card.kind in ("onnx", "static") or ":" in str(card.module)):
        names = {"weights": card.file, "tokenizer": TOKENIZER_FILE if card.tokenizer_sha256 else None}
        encoder = Encoder.from_card(card, {key: str(folder / name) for key, name in names.items() if name is not None})
    return student if encoder is None else student.with_encoder(encoder)


class ExportedModel(nn.Module):
    """A network from raw points [B, ...] to class probabilities, float32 [B, C].

    Args:
        module: Network from normalized points to logits.
        spec: Public facts about the data, with the normalization constants and the values of missing numbers.
    """

    def __init__(self, module: nn.Module, spec: DataSpec) -> None:
        super().__init__()
        self.module, self.scale = module, 255.0 if spec.is_image else 1.0
        mean, std = spec.get_constants(torch.float32, torch.device("cpu"))
        self.mean, self.std = nn.Buffer(mean), nn.Buffer(std)  # buffers follow the weights to another device
        self.low = None if spec.low is None else nn.Buffer(torch.tensor(spec.low))
        self.high = None if spec.high is None else nn.Buffer(torch.tensor(spec.high))
        columns = () if spec.schema is None else spec.schema.columns
        fills = [math.nan if column.fill is None else column.fill for column in columns for _ in column.features]
        fill = torch.tensor(fills or [math.nan])
        self.fill = nn.Buffer(torch.where(fill.isnan(), mean, fill))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() / self.scale
        x = torch.where(x.isfinite(), x, self.fill)
        if self.low is not None:
            x = x.clamp(self.low, self.high)
        return self.module((x - self.mean) / self.std).softmax(1)


def _make_program(student: Student) -> tuple[ExportedModel, Tensor, str]:
    """Copy the student to a program on the CPU. Return the program, an example of its input, and the facts in JSON."""
    network = networks.rebuild(student.network)
    network.load_state_dict({name: value.cpu() for name, value in student.module.state_dict().items()})
    example = _make_example(student.spec, 4)
    facts = {"spec": student.spec.to_dict(), "input": str(example.dtype), "output": "class probabilities"}
    if student.spec.schema is not None:
        facts["features"] = student.spec.schema.feature_names
    return ExportedModel(network.eval(), student.spec), example, json.dumps(facts)


def export(student: Student, path: Path | str) -> Path:
    """Export the student by ``torch.export`` to ``path``. Raise ArithmeticError if the program's predictions differ."""
    path, (program, example, facts) = Path(path), _make_program(student)
    exported = torch.export.export(program, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(exported, path, extra_files={"pate_torch.json": facts})
    loaded = torch.export.load(path).module()
    for size in (1, 3):
        x = _make_example(student.spec, size)
        if not torch.allclose(loaded(x), student.compute_probabilities(x), atol=1e-5):
            raise ArithmeticError(f"{path}: the exported program differs from the student")
    return path


def export_onnx(student: Student, path: Path | str) -> Path:
    """Export the student to an ONNX file at ``path``. Raise ValueError if the package onnx is not installed."""
    onnx = checks.import_optional("onnx", "onnx", "format", "onnx")
    make_node, types, helper = onnx.helper.make_node, onnx.TensorProto, onnx.helper
    program, example, facts = _make_program(student)
    options: dict[str, Any] = {"input_names": ["X"], "output_names": ["probabilities"], "opset_version": 18}
    options["dynamic_axes"] = {name: {0: "N"} for name in ("X", "probabilities")}
    with warnings.catch_warnings(action="ignore"):  # the exporter without dynamo is the one that needs onnx alone
        torch.onnx.export(program, (example,), path, dynamo=False, **options)
    model = onnx.load(path)
    if student.spec.schema is not None:
        model = onnx.compose.add_prefix(model, "pate_torch/", rename_outputs=False)  # other names than those of columns
        nodes, inputs, blocks = [], [], list[str]()
        for column in student.spec.schema.columns:
            is_number = column.categories is None
            cell_type = types.FLOAT if is_number else types.STRING
            inputs.append(helper.make_tensor_value_info(column.name, cell_type, ["N", 1]))
            blocks.append(column.name if is_number else f"pate_torch/X/{len(blocks)}")
            if not is_number:
                options = {"domain": "ai.onnx.ml", "cats_strings": column.categories, "zeros": 1}
                nodes.append(make_node("OneHotEncoder", [column.name], [f"{blocks[-1]}/one_hot"], **options))
                nodes.append(make_node("Flatten", [f"{blocks[-1]}/one_hot"], blocks[-1:]))
        nodes += [make_node("Concat", blocks, ["pate_torch/X"], axis=1), *model.graph.node]
        del model.graph.input[:], model.graph.node[:]
        model.graph.input.extend(inputs)
        model.graph.node.extend(nodes)
        model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    helper.set_model_props(model, {"pate_torch": facts})
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return Path(path)


def _make_example(spec: DataSpec, size: int) -> Tensor:
    values = torch.arange(size * math.prod(spec.input_shape)).view(size, *spec.input_shape)
    return (values % 251).to(torch.uint8) if spec.is_image else (values % 7).float()


def main(options: argparse.Namespace) -> int:
    """Run ``pate export``. Return the exit code: 0, or 2 if an argument is wrong or a file cannot be used."""
    is_onnx = options.format == "onnx"
    file = find_student_file(options.run)
    folder = file.parent.resolve()  # a release must not change, so no file is added
    default_folder = folder.parent if (folder / "privacy.json").exists() else folder
    output = options.output or default_folder / f"{file.stem}.{'onnx' if is_onnx else 'pt2'}"
    if (output.parent / "privacy.json").exists():
        raise checks.error("--output", str(output), "must not lie in a release folder", "Use another folder.")
    print((export_onnx if is_onnx else export)(load(file), output))
    return 0
