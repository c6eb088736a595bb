"""A released student takes tables by the schema it carries, and a student without a schema takes rows."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from pate_torch import load_student
from pate_torch.networks import AxisRules
from pate_torch.privacy.records import DataSpec
from pate_torch.privacy.schema import TableSchema
from pate_torch.students import store
from pate_torch.students.numpy_student import NumpyStudent
from tests.students.tasks import FRAME, TABLE, make_student, make_task
from tests.worlds import IMAGES


@pytest.fixture
def student():
    return make_student(TABLE, "logistic")


def header(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()[store.METADATA_KEY])


def test_tables_and_arrays_are_taken_alike_by_a_student_and_by_its_file(student, tmp_path):
    store.save(student, tmp_path / "student.safetensors")
    rows = torch.tensor([[31, 0, 1], [62.5, 1, 0], [7, 1, 0]])
    for one in (student, load_student(tmp_path)):
        assert one.spec == TABLE and one.class_names == ("ill", "well")
        for points in (FRAME, {"age": ["31", "62.5", 7.0], "ward": list("BAA")}, rows.numpy(), rows.tolist()):
            assert torch.equal(one.predict_proba(points), student.compute_probabilities(rows))
            assert one.predict_names(points) == [TABLE.class_names[label] for label in student.predict(rows)]
            assert one.predict(points).dtype == torch.int64


def test_a_schema_stands_beside_the_other_facts(student, tmp_path):
    store.save(student, tmp_path / "with")
    store.save(dataclasses.replace(student, spec=dataclasses.replace(TABLE, schema=None)), tmp_path / "without")
    without, of_table = header(tmp_path / "without"), header(tmp_path / "with")
    assert set(without) == {"format", "network", "spec"} and "schema" not in without["spec"]
    assert {**without, "schema": TABLE.schema.to_dict()} == of_table
    of_rows = store.load(tmp_path / "without")
    assert of_rows.spec.schema is None and of_rows.predict(torch.zeros(2, 3)).shape == (2,)
    with pytest.raises(ValueError, match=r"has no schema, so tables cannot be converted.*\(N, 3\)"):
        of_rows.predict(FRAME)
    with pytest.raises(ValueError, match=r"points=\(2, 4\): must have the shape \(N, 3\)"):
        student.predict(np.zeros((2, 4), dtype=np.float32))


def test_a_damaged_schema_is_refused_in_one_line(student, tmp_path, monkeypatch):
    monkeypatch.setattr(TableSchema, "to_dict", lambda self: {"columns": [{"name": 1}]})
    store.save(student, tmp_path / "student.safetensors")
    with pytest.raises(ValueError, match=r"^student=.*columns"):
        load_student(tmp_path)


def test_facts_go_through_json():
    shape = {"input_shape": (1, 8, 8), "mean": (0.0,), "std": (1.0,)}
    images = DataSpec(name="i", num_classes=2, class_names=("a", "b"), resize="bilinear", **shape)
    for spec, kind in ((TABLE, "table"), (images, "images"), (dataclasses.replace(TABLE, schema=None), "rows")):
        assert DataSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
        assert spec.kind == kind and ("schema" in spec.to_dict()) == (kind == "table")


def test_the_task_of_a_round_keeps_the_answers_of_that_round():
    task, y = make_task(12)
    posterior_QC, round_Q = torch.rand(12, 3), torch.tensor([0, 2, 0, 2, 2, 5] * 2)
    assert task.split_rounds() == [task]
    rounds = dataclasses.replace(task, posterior_QC=posterior_QC, round_Q=round_Q).split_rounds()
    for part, r in zip(rounds, (0, 2, 5), strict=True):
        asked = (round_Q == r).nonzero().squeeze(1)
        assert torch.equal(part.query_Q, asked) and torch.equal(part.label_Q, y[asked]) and part.round_Q is None
        assert torch.equal(part.posterior_QC, posterior_QC[asked])


@pytest.mark.parametrize("network", ["logistic", "mlp", "fourier", "probe", "voting", "small_cnn"])
def test_adjusted_logits_are_a_multiple_and_an_offset_of_the_logits_also_in_the_file(network, tmp_path):
    spec, offset_C = IMAGES, torch.tensor([0.5, -1.25, 2.0])
    student, x = make_student(spec, network), torch.randint(0, 256, (40, 1, 8, 8)).byte()
    expected = (1.5 * student.compute_logits(x) + offset_C).log_softmax(1)
    before = student.compute_logits(x)
    adjusted = student.adjust_logits(1.5, offset_C)
    store.save(adjusted, tmp_path / "student.safetensors")
    for one in (adjusted, load_student(tmp_path)):
        assert torch.allclose(one.compute_logits(x).log_softmax(1), expected, atol=1e-4)
        assert not torch.allclose(one.compute_logits(x).log_softmax(1), before.log_softmax(1), atol=1e-1)
    assert torch.equal(student.compute_logits(x), before)  # the student itself is unchanged
    if network in ("logistic", "fourier", "probe"):
        probabilities = NumpyStudent.load(tmp_path / "student.safetensors").compute_probabilities(x.numpy())
        assert np.allclose(np.log(probabilities), expected.numpy(), atol=1e-4)


def test_logits_that_no_linear_layer_computes_are_not_adjusted():
    for module in (torch.nn.Flatten(), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()), AxisRules(1)):
        with pytest.raises(ValueError, match="must end with a linear layer that has a bias"):
            dataclasses.replace(make_student(TABLE, "logistic"), module=module).adjust_logits(2.0, torch.zeros(2))
