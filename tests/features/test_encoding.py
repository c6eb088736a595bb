"""Runtimes of encoders refuse foreign weights, and the cache of features keeps what was used last."""

import os
import pickle

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from pate_torch.features import encoding
from pate_torch.features.encoder import TEXT_SPEC, Encoder
from tests.features import encoder_worlds as worlds
from tests.features import onnx_files
from tests.features.encoder_worlds import IMAGES, ROWS


def test_onnx_files_with_tensors_in_another_file_are_refused(tmp_path):
    """No hash of the encoder would cover the other file."""
    encoding.check_no_external_data(onnx_files.linear(tmp_path / "in.onnx"))
    outside = Encoder(name="outside", weights=str(onnx_files.linear(tmp_path / "o.onnx", external=True)))
    with pytest.raises(ValueError, match=r"features\.weights='.*o\.onnx': has tensors in another file"):
        outside.encode(worlds.points(ROWS, 3), ROWS)


@pytest.mark.parametrize("place", ["attribute", "sparse", "branch", "function"])
def test_tensors_in_another_file_are_found_anywhere_in_an_onnx_file(place, tmp_path):
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [1.0])
    inside, outside = onnx.TensorProto(), onnx.TensorProto()
    inside.CopyFrom(tensor)
    outside.CopyFrom(tensor)
    outside.external_data.add(key="location", value="beside")
    for name, value in (("in", inside), ("out", outside)):
        constant = onnx.helper.make_node("Constant", [], ["y"], value=value)
        graph = onnx.helper.make_graph([constant] if place == "attribute" else [], "g", [], [])
        functions = []
        if place == "sparse":
            graph.sparse_initializer.add().values.CopyFrom(value)
        if place == "branch":
            branch = onnx.helper.make_graph([constant], "branch", [], [])
            graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch))
        if place == "function":
            functions = [onnx.helper.make_function("d", "f", [], ["y"], [constant], [])]
        file = tmp_path / f"{name}.onnx"
        file.write_bytes(onnx.helper.make_model(graph, functions=functions).SerializeToString())
    encoding.check_no_external_data(tmp_path / "in.onnx")
    with pytest.raises(ValueError, match="has tensors in another file"):
        encoding.check_no_external_data(tmp_path / "out.onnx")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head.bias": None}, r"lacks the tensor head\.bias\."),
        ({"tail.bias": torch.zeros(1)}, r"has the unknown tensor tail\.bias\."),
        ({"head.bias": torch.zeros(9), "head.weight": torch.zeros(9)}, r"has another shape of head\.bias and 1 more"),
    ],
)
def test_weights_that_do_not_fit_the_module_are_named(change, why, tmp_path):
    encoder = worlds.eye(tmp_path)
    tensors = load_file(encoder.weights) | change
    save_file({name: value for name, value in tensors.items() if value is not None}, encoder.weights)
    with pytest.raises(ValueError, match=rf"features\.weights='.*eye\.safetensors': {why}.*Eye"):
        encoder.make_runner(IMAGES)


@pytest.mark.parametrize("name", ["eye.safetensors", "t.onnx", "table.safetensors"])
def test_files_of_another_format_are_named(name, tmp_path):
    encoder, spec = worlds.eye(tmp_path), IMAGES
    if name != "eye.safetensors":
        words = {"tokenizer": worlds.WORDS} if name == "table.safetensors" else {}
        encoder, spec = Encoder(name="t", weights=str(tmp_path / name), **words), TEXT_SPEC if words else ROWS
    (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=rf"{name}.*not a (readable ONNX|safetensors) file"):
        encoder.make_runner(spec)
    if name == "table.safetensors":
        save_file({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, tmp_path / name)
        with pytest.raises(ValueError, match="must hold one table"):
            encoder.make_runner(spec)


class Dangerous:
    """Opens a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def test_a_pickle_is_read_without_running_it(tmp_path):
    network, file = worlds.Eye(), tmp_path / "eye.pth"
    torch.save({"state_dict": network.state_dict()}, file)
    encoder, x = Encoder(name="eye", module=worlds.Eye(), weights=str(file)), worlds.points(IMAGES, 3)
    assert torch.equal(encoder.encode(x, IMAGES), Encoder(name="eye", module=network).encode(x, IMAGES))
    for content in (pickle.dumps(Dangerous(tmp_path / "ran")), b"nothing"):
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"features\.weights='.*eye\.pth': must be a state_dict\(\) that torch\.save"
        ):
            Encoder(name="eye", module=worlds.Eye(), weights=str(file)).make_runner(IMAGES)
    torch.save(network, file)
    with pytest.raises(ValueError, match=r"must be a state_dict\(\)"):
        Encoder(name="eye", module=worlds.Eye(), weights=str(file)).make_runner(IMAGES)
    assert not (tmp_path / "ran").exists()


def test_the_limit_drops_the_features_that_were_not_used_for_longest(tmp_path):
    def ask(name, max_bytes=1000, notify=lambda _: None):
        limits = {"max_bytes": max_bytes, "notify": notify}
        encoding.load_or_encode(tmp_path, name, {}, str, lambda: torch.ones(100), **limits)  # 480 bytes
        return {file.name.split("-")[0] for file in (tmp_path / "features").glob("*.safetensors")}

    for age, name in enumerate(("first", "second")):
        names = ask(name)
        for file in (tmp_path / "features").glob(f"{name}-*"):
            os.utime(file, (age, age))
    assert names == {"first", "second"}
    ask("first")  # used again
    messages = []
    assert ask("third") == ask("none", max_bytes=0) == {"first", "third"}
    assert ask("large", max_bytes=300, notify=messages.append) == {"first", "third"} and "not cached" in messages[0]
