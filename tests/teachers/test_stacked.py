"""The stacked forward pass and its gradients: against torch.vmap, and the products of GPUs against autograd."""

import pytest
import torch

from pate_torch import networks
from pate_torch.core.rng import make_torch_generator
from pate_torch.teachers import stacked


@pytest.mark.parametrize("name", ["logistic", "mlp", "lean_cnn", "convnet", "resnet"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("matmul", [False, True])
def test_stacked_forward_and_gradients_equal_vmap(name, shared, matmul, monkeypatch):
    """Also by the batched products that GPUs take, on CPU tensors."""
    monkeypatch.setattr(stacked, "MATMUL_DEVICES", {"cpu"} if matmul else set())
    module = networks.build(name, (3, 10, 10), 4).double()
    streams = [make_torch_generator(k, "init") for k in range(3)]
    params = stacked.stack_initial(module, streams, torch.float64)
    params = {n: (p + 0.1 * torch.randn(p.shape, generator=streams[0])).requires_grad_() for n, p in params.items()}
    x = torch.randn(5, 1 if shared else 3, 3, 10, 10, generator=streams[0], dtype=torch.float64)
    weight = torch.randn(3, 5, 4, generator=streams[0], dtype=torch.float64)
    results = []
    for forward in (stacked.forward, stacked.forward_vmap):
        logits = forward(module, params, x)
        results.append([logits, *torch.autograd.grad((logits * weight).sum(), list(params.values()))])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_an_unknown_layer_goes_through_vmap():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    assert not stacked.has_stacked_form(module)
    params = stacked.stack_initial(module, [make_torch_generator(k, "i") for k in range(2)], torch.float32)
    assert stacked.forward(module, params, torch.randn(5, 2, 4)).shape == (2, 5, 2)


@pytest.mark.parametrize("bias,relu", [(True, True), (False, False)])
@pytest.mark.parametrize(
    "kernel,stride,padding,dilation,size",
    [
        (3, 1, 1, 1, (8, 8)),
        (5, 2, 2, 1, (9, 11)),
        (3, 2, 0, 2, (12, 10)),
        (1, 1, 0, 1, (5, 5)),
        ((3, 5), (1, 2), (1, 2), 1, (8, 8)),
    ],
)
def test_convolutions_as_products_agree_with_torch_s_unfold(kernel, stride, padding, dilation, size, bias, relu):
    draw = torch.Generator().manual_seed(0)
    layer = torch.nn.Conv2d(2, 4, kernel, stride, padding, dilation)
    x, weight = torch.randn(5, 6, *size, generator=draw), torch.randn(3, 4, 2, *layer.kernel_size, generator=draw)
    inputs = [x, weight, *([torch.randn(3, 4, generator=draw)] if bias else [])]

    def plain(x, weight, bias=None):
        patches = torch.nn.functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        patches = patches.view(5, 3, -1, patches.shape[2])
        out = torch.einsum("koi,bkil->bkol", weight.flatten(2), patches)
        out = out if bias is None else out + bias[None, :, :, None]
        return torch.relu(out) if relu else out

    def ours(x, weight, bias=None):
        return stacked._ConvMatmul.apply(x, weight, bias, layer, relu)

    results = []
    for form in (plain, ours):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = form(*leaves).reshape(5, 12, -1)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5)
