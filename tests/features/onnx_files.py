"""ONNX files of a few nodes."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def _write(path: Path, nodes: list, tensors: list[TensorProto], inputs: dict[str, int], output: str, dims: str) -> Path:
    inputs = [helper.make_tensor_value_info(name, kind, ["b", "l"]) for name, kind in inputs.items()]
    outputs = [helper.make_tensor_value_info(output, FLOAT, list(dims))]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])
    path.write_bytes(model.SerializeToString())
    return path


def linear(path: Path, weight_DF: np.ndarray | None = None, *, external: bool = False) -> Path:
    """Rows x W, with W in the file or, if ``external``, in a file beside it."""
    weight = numpy_helper.from_array((np.ones((4, 9)) if weight_DF is None else weight_DF).astype("<f4"), "w")
    if external:
        beside = path.with_name(f"{path.name}_data")
        beside.write_bytes(weight.raw_data)
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=beside.name)
    return _write(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], [weight], {"x": FLOAT}, "y", "bf")


def table(path: Path, table_VD: np.ndarray) -> Path:
    """The vectors of tokens, with a mask and types that are not looked at, as sentence encoders have them."""
    node = helper.make_node("Gather", ["w", "input_ids"], ["last_hidden_state"])
    inputs = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), INT64)
    return _write(path, [node], [numpy_helper.from_array(table_VD.astype("<f4"), "w")], inputs, node.output[0], "bld")


def quantized(path: Path) -> Path:
    """Rows in eight bits, by the range of the whole batch: what dynamic quantization does."""
    quantize = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"])
    nodes = [quantize, helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"])]
    return _write(path, nodes, [], {"x": FLOAT}, "y", "bd")
