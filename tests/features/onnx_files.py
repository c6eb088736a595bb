"""ONNX files of a few nodes, written by hand: the exporter would need packages of its own."""

from pathlib import Path

import numpy as np

FLOAT, INT64 = 1, 7


def _number(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 127
        out.append(low | (128 if value else 0))
        if not value:
            return bytes(out)


def _field(place: int, value: int | str | bytes) -> bytes:
    """A field of a protocol buffer: a number, or bytes with their length."""
    if isinstance(value, int):
        return _number(place << 3) + _number(value)
    value = value.encode() if isinstance(value, str) else value
    return _number(place << 3 | 2) + _number(len(value)) + value


def _tensor(name: str, array: np.ndarray) -> bytes:
    dims = b"".join(_field(1, size) for size in array.shape)
    return dims + _field(2, FLOAT) + _field(8, name) + _field(9, array.astype("<f4").tobytes())


def _value(name: str, kind: int, *dims: str) -> bytes:
    shape = b"".join(_field(1, _field(2, dim)) for dim in dims)
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, shape)))


def _node(kind: str, inputs: list[str], outputs: list[str]) -> bytes:
    named = b"".join(_field(1, name) for name in inputs) + b"".join(_field(2, name) for name in outputs)
    return named + _field(4, kind)


def _model(nodes: list[bytes], constants: list[bytes], inputs: list[bytes], outputs: list[bytes]) -> bytes:
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, "graph")
    graph += b"".join(_field(5, constant) for constant in constants)
    graph += b"".join(_field(11, value) for value in inputs) + b"".join(_field(12, value) for value in outputs)
    return _field(1, 8) + _field(7, graph) + _field(8, _field(2, 13))


def linear(path: Path, weight_DF: np.ndarray | None = None, *, external: bool = False) -> Path:
    """Rows x W, with W in the file or, if ``external``, in a file beside it."""
    weight_DF = np.ones((4, 9)) if weight_DF is None else weight_DF
    weight = _tensor("w", weight_DF)
    if external:
        beside = path.with_name(f"{path.name}_data")
        beside.write_bytes(weight_DF.astype("<f4").tobytes())
        dims = b"".join(_field(1, size) for size in weight_DF.shape)
        location = _field(13, _field(1, "location") + _field(2, beside.name)) + _field(14, 1)
        weight = dims + _field(2, FLOAT) + _field(8, "w") + location
    inputs, outputs = [_value("x", FLOAT, "b", "d")], [_value("y", FLOAT, "b", "f")]
    path.write_bytes(_model([_node("MatMul", ["x", "w"], ["y"])], [weight], inputs, outputs))
    return path


def table(path: Path, table_VD: np.ndarray) -> Path:
    """The vectors of tokens, with a mask and types that are not looked at, as sentence encoders have them."""
    nodes = [_node("Gather", ["w", "input_ids"], ["last_hidden_state"])]
    inputs = [_value(name, INT64, "b", "l") for name in ("input_ids", "attention_mask", "token_type_ids")]
    outputs = [_value("last_hidden_state", FLOAT, "b", "l", "d")]
    path.write_bytes(_model(nodes, [_tensor("w", table_VD)], inputs, outputs))
    return path


def quantized(path: Path) -> Path:
    """Rows in eight bits, by the range of the whole batch: what dynamic quantization does."""
    nodes = [
        _node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        _node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    path.write_bytes(_model(nodes, [], [_value("x", FLOAT, "b", "d")], [_value("y", FLOAT, "b", "d")]))
    return path
