"""Networks by name: shapes, descriptions, initialization, and what they refuse."""

import json
import math

import pytest
import torch
from torch import nn

from pate_torch import networks
from pate_torch.core.rng import make_torch_generator
from pate_torch.teachers import stacked

IMAGES = (3, 16, 16)


@pytest.mark.parametrize("name", networks.NETWORKS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_maps_images_to_logits_and_is_rebuilt_from_plain_data(name, shape):
    module = networks.initialize(networks.build(name, shape, 7), make_torch_generator(0, name))
    x = torch.randn(5, *shape)
    assert module(x).shape == (5, 7)
    again = networks.rebuild(json.loads(json.dumps(networks.describe(name, shape, 7))))
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again.eval()(x), module.eval()(x), rtol=0, atol=0)


def test_options_survive_the_description_and_sizes_are_the_documented_ones():
    for name, low, high in (("cnn", 4e5, 1.2e6), ("lean_cnn", 5e4, 3e5), ("convnet", 2e6, 4e6)):
        assert low < networks.count_parameters(networks.build(name, (1, 28, 28), 10)) < high
    described = networks.describe("lean_cnn", IMAGES, 5, channels=(6, 9), hidden=11)
    assert described["options"] == {"channels": [6, 9], "hidden": 11}
    widths = [p.shape[0] for n, p in networks.rebuild(described).named_parameters() if n.endswith("weight")]
    assert widths == [6, 9, 11, 5]


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_initialization_is_the_stream_s_alone(name):
    modules = [networks.build(name, IMAGES, 5) for _ in range(3)]
    for module, stream in zip(modules, (1, 1, 2), strict=True):
        networks.initialize(module, make_torch_generator(stream, "init"))
    states = [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in modules]
    assert torch.equal(states[0], states[1])
    assert name == "logistic" or not torch.equal(states[0], states[2])
    double = networks.initialize(networks.build(name, IMAGES, 5).double(), make_torch_generator(1, "init"))
    doubled = torch.cat([p.detach().flatten() for p in double.parameters()])
    torch.testing.assert_close(doubled.float(), states[0], rtol=1e-6, atol=0)


def test_initialization_is_he_normal_with_a_zero_output_layer():
    module = networks.build("mlp", (400,), 10, hidden=[300, 200])
    networks.initialize(module, make_torch_generator(0, "init"))
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    for layer in linear[:-1]:
        expected = math.sqrt(2 / layer.in_features)
        assert abs(layer.weight.std().item() / expected - 1) < 0.02
        assert abs(layer.weight.mean().item()) < 0.02 * expected * 2
        bias = layer.bias * math.sqrt(layer.in_features)  # folds lie apart, and not all through the origin
        assert -1 <= bias.min() < -0.9 and 0.9 < bias.max() <= 1 and abs(bias.mean().item()) < 0.15
    assert not linear[-1].weight.any() and not linear[-1].bias.any()
    loss = nn.functional.cross_entropy(module(torch.randn(6, 400)), torch.arange(6))
    assert loss.item() == pytest.approx(math.log(10), abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("lean_cn", IMAGES, 3), {}, "Did you mean 'lean_cnn'"),
        (("lean_cnn", (20,), 3), {}, "network=mlp"),
        (("convnet", (1, 4, 4), 3), {}, "8x8"),
        (("mlp", IMAGES, 3), {"hiden": 3}, "takes hidden"),
        (("mlp", IMAGES, 3), {"hidden": [0]}, "network.hidden"),
        (("logistic", IMAGES, 3), {"hidden": 3}, "no options"),
        (("resnet", IMAGES, 3), {"norm": "layer"}, "network.norm"),
        (("mlp", IMAGES, 1), {}, "num_classes"),
    ],
)
def test_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        networks.build(*arguments, **options)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_flattened_images_get_their_gradient_in_their_own_layout(layout):
    x = torch.randn(5, 3, 4, 4).to(memory_format=layout).requires_grad_()
    gradient, gradients = torch.randn(5, 48), []
    images = x * 1
    flat = networks.Flatten()(images)
    images.register_hook(gradients.append)
    flat.backward(gradient)
    assert torch.equal(x.grad, gradient.view(5, 3, 4, 4)) and gradients[0].is_contiguous(memory_format=layout)
    assert torch.equal(networks.Flatten()(x.detach()), x.detach().flatten(1))
    assert stacked.has_stacked_form(networks.build("small_cnn", (1, 8, 8), 3, norm="group"))
