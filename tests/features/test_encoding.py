"""Runtimes of encoders and their cache; networks of libraries give the inputs of their classification heads."""

import csv
import dataclasses
import os
import pickle
import re
import socket
import sys

import onnx
import pytest
import torch
from hydra import compose
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from pate_torch import load_student, pipeline
from pate_torch.cli import hydra_config
from pate_torch.cli import main as cli
from pate_torch.features import encoding
from pate_torch.features.encoder import TEXT_SPEC, Encoder
from pate_torch.privacy.records import DataSpec
from tests.features import encoder_worlds as worlds
from tests.features import onnx_files
from tests.features.encoder_worlds import IMAGES, ROWS
from tests.run_configs import changed
from tests.tensor_data import Tensors
from tests.tiny_runs import tiny
from tests.worlds import images


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
    torch.save(network, tmp_path / "whole.pth")
    for content in (pickle.dumps(Dangerous(tmp_path / "ran")), b"nothing", (tmp_path / "whole.pth").read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"features\.weights='.*eye\.pth': must be a state_dict\(\) that torch"):
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


SIZE = 64
FACTS = {"name": "p", "num_classes": 2, "class_names": ("a", "b"), "mean": (0.5,) * 3, "std": (0.2,) * 3}
PHOTOS = DataSpec(input_shape=(3, SIZE, SIZE), **FACTS)
X = torch.randint(0, 256, (3, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
X[1] //= 3  # darker
SLOW = pytest.mark.slow(reason="networks of up to 500 MB")
NETWORKS = {"resnet18": "fc", "googlenet": "fc", "squeezenet1_1": "classifier.1", "densenet121": "classifier"}
MORE_NETWORKS = {
    "mobilenet_v2": "classifier.1", "mobilenet_v3_small": "classifier.3", "efficientnet_b0": "classifier.1",
    "mnasnet0_5": "classifier.1", "regnet_y_400mf": "fc", "shufflenet_v2_x0_5": "fc",
    "convnext_tiny": "classifier.2", "swin_t": "head", "vit_b_16": "heads.head", "maxvit_t": "classifier.5",
    "inception_v3": "fc", "alexnet": "classifier.6", "vgg11": "classifier.6", "resnext50_32x4d": "fc",
}  # fmt: skip
FIXED_SIZES = {"vit_b_16": 224, "maxvit_t": 224, "inception_v3": 299}


def make_classifier(name):
    """A classifier of torchvision whose weights and statistics of batches are random and moderate."""
    options = {"transform_input": True, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    torch.manual_seed(0)
    network = models.get_model(name, weights=None, **options)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=(3 / module.weight[0].numel()) ** 0.5)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return network.eval()


def hear_head(network, head, x):
    """Call the network and return what reaches the layer ``head``."""
    heard = []
    hook = network.get_submodule(head).register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    with torch.no_grad():
        network(x)
    hook.remove()
    (inputs,) = heard
    return inputs.mean((2, 3)) if inputs.dim() == 4 else inputs


@pytest.mark.parametrize("name", [*NETWORKS, *(pytest.param(name, marks=SLOW) for name in MORE_NETWORKS)])
def test_the_features_are_what_reaches_the_head_after_the_library_prepared_the_images(name, tmp_path):
    network, size = make_classifier(name), FIXED_SIZES.get(name, SIZE)
    # Published files of DenseNet have other names of layers.
    names = {name: re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", name) for name in network.state_dict()}
    torch.save({names[name]: value for name, value in network.state_dict().items()}, tmp_path / "w.pth")
    encoder = Encoder(network=f"torchvision:{name}", weights=str(tmp_path / "w.pth"), size=size)
    x = nn.functional.interpolate(X.float(), (size, size)).to(torch.uint8)
    spec = dataclasses.replace(PHOTOS, input_shape=(3, size, size))
    prepare = models.get_model_weights(name).DEFAULT.transforms(crop_size=size, resize_size=size)
    expected = hear_head(network, {**NETWORKS, **MORE_NETWORKS}[name], prepare(x))
    features, difference = encoder.encode(x, spec), float((expected[0] - expected[1]).abs().max())
    assert features.shape == expected.shape
    assert float((features - expected).abs().max()) < 0.01 * difference


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """(network, file): a ResNet and its state."""
    network, file = make_classifier("resnet18"), tmp_path_factory.mktemp("resnet") / "resnet18-00000000.pth"
    torch.save(network.state_dict(), file)
    return network, file


def make_encoder(file, name="torchvision:resnet18", **options):
    return Encoder(network=name, weights=str(file), size=32, **options)


def test_a_network_draws_no_random_numbers_opens_no_connection_and_encodes_each_point_alone(resnet, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    encoder = make_encoder(resnet[1], batch_size=4)
    encoder.check_batch_independence(X, PHOTOS)
    assert torch.equal(torch.rand(5), expected)
    assert torch.equal(encoder.encode(X, PHOTOS)[1:2], encoder.encode(X[1:2], PHOTOS))


def test_files_in_the_forms_that_people_have_give_the_same_features(resnet, tmp_path):
    network, file = resnet
    state, expected = network.state_dict(), make_encoder(file).encode(X, PHOTOS)
    module = {f"module.{name}": value for name, value in state.items()}
    torch.save({"epoch": 3, "state_dict": module}, tmp_path / "checkpoint.pt")
    tuned = dict(state, **{"fc.weight": torch.zeros(7, 512), "fc.bias": torch.zeros(7)})  # a head of other classes
    old = {name: value for name, value in tuned.items() if "num_batches_tracked" not in name}
    save_file(old, tmp_path / "tuned.safetensors")
    for name in ("checkpoint.pt", "tuned.safetensors"):
        assert torch.equal(make_encoder(tmp_path / name).encode(X, PHOTOS), expected), name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layer1.0.conv1.weight": None}, r"lacks the tensor layer1\.0\.conv1\.weight\. .*ResNet"),
        ({"fc2.bias": torch.zeros(1)}, r"has the unknown tensor fc2\.bias"),
        ({"conv1.weight": torch.zeros(9), "bn1.bias": torch.zeros(9)}, r"has another shape of bn1\.bias and 1 more"),
        ({"conv1.weight": "text"}, r"must be a state_dict\(\) that torch\.save wrote"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, why, resnet, tmp_path):
    state = {name: value for name, value in {**resnet[0].state_dict(), **change}.items() if value is not None}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=rf"features\.weights='.*w\.pth': {why}"):
        make_encoder(tmp_path / "w.pth").make_runner(PHOTOS)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"network": "torchvision:resnet18"}, r"network='torchvision:resnet18': needs features\.weights, a local file"),
        ({"network": "torchvision:resnet18", "module": nn.Identity()}, r"and no features\.module"),
        ({"network": "resnet18"}, r"network='resnet18': must be torchvision:<name> or timm:<name>"),
        ({"network": "torchvision:resnet-18"}, r"must be torchvision:<name>"),
        ({"network": "torchvision:fcn_resnet50"}, r"must be torchvision:<name>"),  # no classifier
        ({"network": "os:path"}, r"must be torchvision:<name>"),
    ],
)
def test_networks_that_cannot_be_made_are_refused(options, why, resnet):
    weights = {} if options == {"network": "torchvision:resnet18"} else {"weights": str(resnet[1])}
    with pytest.raises(ValueError, match=why):
        Encoder(**options, **weights)


def test_only_the_digest_of_a_published_file_declares_training_data(resnet):
    """The digests are those in the names of torchvision's files."""
    described = {
        name: encoding.describe_network(f"torchvision:{name}", digest.ljust(64, "0"))
        for name, digest in (("resnet18", "f37072fd"), ("resnet50", "11ad3fa6"), ("vit_l_16", "4f3808c9"))
    }
    assert {name: facts["trained_on"] for name, facts in described.items()} == {
        "resnet18": "ImageNet-1K", "resnet50": "ImageNet-1K", "vit_l_16": None,  # which has seen Instagram
    }  # fmt: skip
    assert described["resnet18"]["size"] == 224 and described["vit_l_16"]["size"] == 512
    encoder = Encoder(network="torchvision:resnet18", weights=str(resnet[1]))
    assert (encoder.size, encoder.trained_on) == (224, None)  # the name of a file proves nothing
    assert list(encoder.mean) == [0.485, 0.456, 0.406] and list(encoder.std) == [0.229, 0.224, 0.225]
    declared = Encoder(network="torchvision:resnet18", weights=str(resnet[1]), size=96, mean=[0.5], std=[0.1])
    assert (declared.size, declared.mean, declared.std) == (96, [0.5], [0.1])
    assert dataclasses.replace(declared, batch_size=2).size == 96


@pytest.fixture(scope="module")
def released(resnet, tmp_path_factory):
    """(plan, test images): a run on images through the ResNet."""
    (x, y), folder = images(160, 0), tmp_path_factory.mktemp("released")
    test = {"test_x": x[130:], "test_y": y[130:]}
    source = Tensors(name="squares", x=x[:100], y=y[:100], pool_x=x[100:130], class_names=3, **test)
    plan = changed(tiny(folder / "home"), dataset=source, encoder=make_encoder(resnet[1], batch_size=8))
    pipeline.run(plan)
    return plan, x[130:138]


def test_a_colleague_brings_the_network_of_a_release_by_its_name(resnet, released, tmp_path, capsys):
    network, file = resnet
    plan, x = released
    release = plan.folder / "release"
    assert cli.main(["verify", str(release), "--ledger", str(plan.root / "ledger.sqlite")]) == 0
    assert 'load_student(".", encoder={"weights": "resnet18-00000000.pth"})' in (release / "README.md").read_text()
    student = load_student(release)
    with pytest.raises(ValueError, match=r"resnet18-00000000\.pth with SHA-256 .*encoder=\{'weights': <file>\}"):
        student.predict(x)
    encoder = make_encoder(file, batch_size=8)
    expected = student.predict(encoder.encode(x, student.spec.encoder.points)).tolist()
    assert len(set(expected)) > 1
    for same in (dataclasses.replace(encoder, license="BSD"), {"weights": file}):
        assert load_student(release, encoder=same).predict(x).tolist() == expected
    for other, why in (
        (dataclasses.replace(encoder, size=40), "encoder options"),
        (Encoder(module=network, weights=str(file)), r"encoder module=.*must be 'torchvision:resnet18'"),
    ):
        with pytest.raises(ValueError, match=why):
            load_student(release, encoder=other)

    with pytest.raises(ValueError, match=r"points=\[2, 3, 9, 9\]: must be images of shape"):
        load_student(release, encoder={"weights": file}).predict(torch.zeros(2, 3, 9, 9, dtype=torch.uint8))
    for place, image in enumerate(x[:6]):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{place}.png")
    capsys.readouterr()
    assert cli.main(["predict", str(plan.folder), str(tmp_path), "--weights", str(file)]) == 0
    labels = [row["label"] for row in csv.DictReader(capsys.readouterr().out.splitlines())]
    assert labels == load_student(plan.folder, encoder={"weights": file}).predict_names(x[:6])


def test_the_command_line_names_the_network(resnet, tmp_path):
    settings = ["features=encoder", "features.network=torchvision:resnet18", f"features.weights={resnet[1]}"]
    with hydra_config.open_configuration():
        places = [f"paths.root={tmp_path}", f"paths.run={tmp_path}", "teacher=logistic", "student=logistic"]
        cfg = compose("config", overrides=["dataset=digits", *settings, *places])
    encoder = hydra_config.build_run_config(cfg, tmp_path).dataset.encoder
    expected = Encoder(network="torchvision:resnet18", weights=str(resnet[1]))
    assert encoder.make_card(PHOTOS).identity == expected.make_card(PHOTOS).identity


# ---- timm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"])
def test_networks_of_timm_give_what_reaches_their_heads(name, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model(name, pretrained=False).eval()
    head = {"resnet18.a1_in1k": "fc"}.get(name, "head")
    state = dict(network.state_dict(), **{f"{head}.weight": torch.zeros(7, 3)})
    save_file(state, tmp_path / "w.safetensors")
    encoder = Encoder(network=f"timm:{name}", weights=str(tmp_path / "w.safetensors"))
    mean = 0.5 if "augreg" in name else torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = 0.5 if "augreg" in name else torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    x = nn.functional.interpolate(X.float(), (224, 224)).to(torch.uint8)
    expected = hear_head(network, head, (x / 255 - mean) / std)
    spec = dataclasses.replace(PHOTOS, input_shape=(3, 224, 224))
    assert torch.allclose(encoder.encode(x, spec), expected, atol=1e-4 * float(expected.std()))


def test_timm_is_optional_and_a_name_without_the_weights_is_refused(resnet, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"network='timm:resnet18\.a1_in1k': needs the package timm\. pip install"):
        make_encoder(resnet[1], "timm:resnet18.a1_in1k")
    monkeypatch.undo()
    pytest.importorskip("timm")
    for name in ("resnet18", "resnet18.no_such_weights", "hf-hub:timm/resnet18.a1_in1k"):
        with pytest.raises(ValueError, match=r"must be torchvision:<name> or timm:<name>"):
            make_encoder(resnet[1], f"timm:{name}")
