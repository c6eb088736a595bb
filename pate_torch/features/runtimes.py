"""What runs a frozen encoder: a torch module, an ONNX file, or a table of token vectors. Each takes one batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.core.files import atomic_replacement, read_tensors

PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}


class Tokens(NamedTuple):
    """Texts as tokens: ids int64 [B, L], and 1 where there is one, int64 [B, L]."""

    ids_BL: Tensor
    mask_BL: Tensor


Points = Tensor | Tokens
Runtime = Callable[[Points], Tensor]
"""From a batch of points, or of their tokens, to features, float32 [B, D], where the encoder is."""


def make_torch_runtime(module: nn.Module, pooling: str, device: torch.device | str) -> Runtime:
    """A module in evaluation mode."""
    module = module.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def run(points: Points) -> Tensor:
        inputs = points if isinstance(points, Tokens) else (points,)
        output = module(*(tensor.to(device) for tensor in inputs))
        output = getattr(output, "last_hidden_state", output)  # as transformers' models have it
        output = output[0] if isinstance(output, tuple | list) else output
        return pool_features(output, points, pooling)

    return run


def load_weights(module: nn.Module, weights: Path) -> None:
    """Load a safetensors file into a module, every tensor of it.

    Raises:
        ValueError: Another kind of file, or tensors of other names or shapes.
    """
    if weights.suffix in PICKLE_SUFFIXES:
        fix = (
            'Convert it once, without running code of it: python -c "from pate_torch.features.runtimes import convert; '
            f"convert('{weights.name}', '{weights.stem}.safetensors')\"."
        )
        raise checks.error("features.weights", str(weights), "is a pickle, which may run code when it is loaded", fix)
    tensors, expected = read_tensors(weights), module.state_dict()
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    common = expected.keys() & tensors.keys()
    mismatched = sorted(name for name in common if expected[name].shape != tensors[name].shape)
    fix = f"They must be those of {type(module).__name__}."
    for verb, names in (("lack", missing), ("hold, beside what fits,", extra), ("have another shape of", mismatched)):
        if names:
            others_text = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise checks.error("features.weights", str(weights), f"{verb} {names[0]}{others_text}", fix)
    module.load_state_dict(tensors)


def convert(pickle: Path | str, weights: Path | str) -> None:
    """Write the tensors of a pickle, which torch reads without running any code of it, as safetensors."""
    tensors = torch.load(pickle, map_location="cpu", weights_only=True)
    tensors = tensors.get("state_dict", tensors)
    with atomic_replacement(Path(weights)) as temporary:
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, temporary)


def make_static_runtime(weights: Path) -> Runtime:
    """Mean of the tokens' vectors, by a safetensors file that holds their table [V, D] alone.

    Raises:
        ValueError: The file holds something else.
    """
    tensors = read_tensors(weights)
    if len(tensors) != 1 or next(iter(tensors.values())).dim() != 2:
        fix = "Give features.module, the network that they are of."
        raise checks.error("features.weights", str(weights), "is not one table of token vectors", fix)
    table_VD = next(iter(tensors.values())).float()

    def run(points: Points) -> Tensor:
        assert isinstance(points, Tokens)
        return pool_features(table_VD[points.ids_BL.clamp(max=len(table_VD) - 1)], points, "mean")

    return run


def make_onnx_runtime(weights: Path, pooling: str) -> Runtime:
    """An ONNX file, run by onnxruntime on one thread of the CPU.

    Raises:
        ValueError: onnxruntime is not installed, or the file is none of its kind.
    """
    ort = import_optional("onnxruntime", "onnx", "features.weights", str(weights))
    check_no_external_data(weights)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(weights), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of a base class of its own
        raise checks.error("features.weights", str(weights), f"is not a readable ONNX file ({error})") from error
    inputs = session.get_inputs()

    def run(points: Points) -> Tensor:
        feed = {onnx_input.name: _make_input(onnx_input, points) for onnx_input in inputs}
        return pool_features(torch.from_numpy(np.asarray(session.run(None, feed)[0])), points, pooling)

    return run


_TENSOR_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""The fields of each message of an ONNX file that hold tensors, by number. Source: onnx.proto."""
_EXTERNAL_DATA_FIELD, _DATA_LOCATION_FIELD = 13, 14


def check_no_external_data(weights: Path) -> None:
    """Raise ValueError if an ONNX file names tensors outside of it, which no hash would cover, or is damaged."""
    # onnxruntime requires protobuf, but not the classes of ONNX: an empty message keeps every field as unknown.
    protobuf = import_optional("google.protobuf.message", "onnx", "features.weights", str(weights))
    empty = importlib.import_module("google.protobuf.empty_pb2").Empty
    make_fields = importlib.import_module("google.protobuf.unknown_fields").UnknownFieldSet
    pending = [("model", weights.read_bytes())]
    try:
        while pending:
            kind, content = pending.pop()
            for field in make_fields(empty.FromString(content)):
                number, value = field.field_number, field.data
                is_external = number == _EXTERNAL_DATA_FIELD or (number == _DATA_LOCATION_FIELD and value != 0)
                if kind == "tensor" and is_external:
                    fix = "Export it with its tensors inside the file."
                    raise checks.error("features.weights", str(weights), "keeps tensors in another file", fix)
                if number in _TENSOR_FIELDS[kind] and isinstance(value, bytes):
                    pending.append((_TENSOR_FIELDS[kind][number], value))
    except protobuf.DecodeError as error:
        raise checks.error("features.weights", str(weights), "is not a readable ONNX file (it is cut off)") from error


def _make_input(onnx_input: Any, points: Points) -> np.ndarray:
    """What an input of an ONNX file gets, by its name and type."""
    kind = np.float32 if "float" in onnx_input.type else np.int32 if "int32" in onnx_input.type else np.int64
    if not isinstance(points, Tokens):
        value = points
    elif "mask" in onnx_input.name:
        value = points.mask_BL
    else:
        value = torch.zeros_like(points.ids_BL) if "type" in onnx_input.name else points.ids_BL
    return np.ascontiguousarray(value.cpu().numpy().astype(kind))


def import_optional(module: str, extra: str, key: str, value: str) -> Any:
    """A package that an extra brings.

    Raises:
        ValueError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install 'pate-torch[{extra}]'."
        raise checks.error(key, value, f"needs the package {module}", fix) from error


def pool_features(output: Tensor, points: Points, pooling: str) -> Tensor:
    """Features of a batch, float32 [B, D]: of tokens' vectors [B, L, D] the mean or the first; of a map its mean."""
    output = output.float()
    if isinstance(points, Tokens) and output.dim() == 3:
        if pooling == "first":
            return output[:, 0]
        mask_BL1 = points.mask_BL[:, :, None].to(output)
        return (output * mask_BL1).sum(1) / mask_BL1.sum(1).clamp(min=1)
    if output.dim() == 4:
        output = output.mean((2, 3))
    return output.flatten(1)
