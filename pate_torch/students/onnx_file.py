"""Export of linear students to ONNX. Needs the package ``onnx``; the file needs an ONNX runtime alone.

A file for a table has one input for each column, [N, 1]: numbers as float32, and categories as strings, with "" for a
missing value. The files of other students have one input ``X``, uint8 images or float32 rows. The outputs are the
classes ``output_label`` [N], in their own type, and ``output_probability``, float32 [N, C]. The metadata ``pate_torch``
hold the facts about the data in JSON: schema, names of the classes, constants.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

from pate_torch.privacy.schema import TableSchema
from pate_torch.students.numpy_student import NumpyStudent, parse_classes

_OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
_IR_VERSION = 9  # of the same age as the operator sets, so that older runtimes read the file


class _Graph:
    """An ONNX graph in the making. An operand is the name of a value, or an array, which becomes a constant."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []

    def add_input(self, name: str, element_type: int, *shape: int) -> str:
        """Add an input [N, *shape], and return its name."""
        self.inputs.append(helper.make_tensor_value_info(name, element_type, ["N", *shape]))
        return name

    def add(self, operator: str, *operands: str | np.ndarray, output: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        names = []
        for operand in operands:
            if isinstance(operand, np.ndarray):
                self.constants.append(numpy_helper.from_array(operand, f"pate_torch:constant {len(self.constants)}"))
                operand = self.constants[-1].name
            names.append(operand)
        output = output or f"pate_torch:value {len(self.nodes)}"
        domain = "ai.onnx.ml" if operator == "OneHotEncoder" else ""
        self.nodes.append(helper.make_node(operator, names, [output], domain=domain, **attributes))
        return output

    def fill(self, x: str, value: np.ndarray | None) -> str:
        """Replace numbers that are not finite. None to replace nothing."""
        is_missing = None if value is None else self.add("Or", self.add("IsNaN", x), self.add("IsInf", x))
        return x if value is None or is_missing is None else self.add("Where", is_missing, value, x)


def export_onnx(student: NumpyStudent, path: Path) -> Path:
    """Export a student to an ONNX file."""
    graph, spec = _Graph(), student.spec
    mean, std, low, high = map(student.get_constant, ("mean", "std", "low", "high"))
    if spec.get("schema"):
        features = []
        for column in TableSchema.from_dict(spec["schema"]).columns:
            if column.categories is None:
                fill = None if column.fill is None else np.float32(column.fill).reshape(1)
                features.append(graph.fill(graph.add_input(column.name, TensorProto.FLOAT, 1), fill))
            else:
                text = graph.add_input(column.name, TensorProto.STRING, 1)
                codes = graph.add("OneHotEncoder", text, cats_strings=list(column.categories), zeros=1)
                features.append(graph.add("Flatten", codes))
        z = graph.add("Concat", *features, axis=1)
    elif len(spec["input_shape"]) == 3:
        pixels = graph.add_input("X", TensorProto.UINT8, *spec["input_shape"])
        z = graph.add("Div", graph.add("Cast", pixels, to=TensorProto.FLOAT), np.array([255], np.float32))
    else:
        z = graph.fill(graph.add_input("X", TensorProto.FLOAT, *spec["input_shape"]), mean)
    if low is not None and high is not None:
        z = graph.add("Min", graph.add("Max", z, low), high)
    assert mean is not None and std is not None
    z = graph.add("Flatten", graph.add("Div", graph.add("Sub", z, mean), std))
    z = graph.add("Cast", z, to=TensorProto.DOUBLE)  # weights may be large
    if student.fourier is not None:
        frequency_DF, phase_F = (part.astype(np.float64) for part in student.fourier)
        cosine = graph.add("Cos", graph.add("Add", graph.add("MatMul", z, frequency_DF), phase_F))
        z = graph.add("Concat", z, graph.add("Mul", cosine, np.array([math.sqrt(2)])), axis=1)
    if student.has_unit_length:
        length = graph.add("ReduceL2", z, np.array([1]))
        z = graph.add("Div", z, graph.add("Max", length, np.array([1e-12])))
    weight_CD, bias_C = student.weight_CD.astype(np.float64), student.bias_C.astype(np.float64)
    logits = graph.add("Gemm", z, weight_CD, bias_C, transB=1)
    probabilities = graph.add("Softmax", logits, axis=1)
    graph.add("Cast", probabilities, output="output_probability", to=TensorProto.FLOAT)
    class_C = parse_classes(spec)
    class_C = class_C.astype(object) if class_C.dtype.kind == "U" else class_C
    best = graph.add("ArgMax", probabilities, axis=1, keepdims=0)
    graph.add("Gather", class_C, best, output="output_label")
    class_type = helper.np_dtype_to_tensor_dtype(class_C.dtype)
    outputs = [
        helper.make_tensor_value_info("output_label", class_type, ["N"]),
        helper.make_tensor_value_info("output_probability", TensorProto.FLOAT, ["N", len(class_C)]),
    ]
    program = helper.make_graph(graph.nodes, "pate_torch", graph.inputs, outputs, graph.constants)
    model = helper.make_model(program, opset_imports=_OPSETS, ir_version=_IR_VERSION, producer_name="pate_torch")
    helper.set_model_props(model, {"pate_torch": json.dumps(dict(spec), sort_keys=True)})
    checker.check_model(model)
    save(model, path)
    return path
