"""Networks of teachers and students: built by name, described by plain data, initialized from one stream.

Every network maps normalized floats [B, *input_shape] to logits [B, C]. A description (name, shape, classes, options)
suffices to build a network again, so that weights are stored without code.

Teachers use no batch normalization: its running statistics are no parameters, and they differ between a teacher that
is trained alone and one that is trained beside others. All other layers have a stacked form in ``teachers/stacked.py``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import nn

from pate_torch.core import checks
from pate_torch.networks.modules import (
    AxisRules,
    Flatten,
    Fourier,
    HalfPlaneRules,
    L2Normalize,
    MeanShift,
    Residual,
    Voting,
    make_feature_extractor,
)

Description = dict[str, Any]
Design = Mapping[str, Any] | None
"""Name and options of a network; None for logistic regression."""


def _check_image_shape(name: str, input_shape: tuple[int, ...], min_size: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < min_size:
        problem = f"needs images of at least {min_size}x{min_size}, the data have shape {input_shape}"
        raise checks.error("network", name, problem, "Feature rows go with network=logistic or network=mlp.")
    return input_shape[0], input_shape[1], input_shape[2]


def _make_conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)


def _make_norm(kind: str, channels: int) -> nn.Module:
    checks.one_of("network.norm", kind, ("group", "batch"))
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(8, channels), channels)


def _make_dense(sizes: Sequence[int], num_classes: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return [*layers, nn.Linear(sizes[-1], num_classes)]


def logistic(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Multinomial logistic regression, which starts at zero, where its convex loss is log C."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def mlp(input_shape: tuple[int, ...], num_classes: int, *, hidden: Sequence[int] = (128,)) -> nn.Module:
    """A multilayer perceptron with ReLU."""
    return nn.Sequential(nn.Flatten(), *_make_dense([math.prod(input_shape), *hidden], num_classes))


def lean_cnn(
    input_shape: tuple[int, ...], num_classes: int, *, channels: Sequence[int] = (16, 32), hidden: int = 128
) -> nn.Module:
    """Two 3x3 convolutions of stride 2, then dense layers; strides cost a quarter of the arithmetic of pooling."""
    depth, height, width = _check_image_shape("lean_cnn", input_shape, 4)
    first, second = channels
    size = second * math.ceil(height / 4) * math.ceil(width / 4)
    layers: list[nn.Module] = []
    for inputs, outputs in ((depth, first), (first, second)):
        layers += [_make_conv(inputs, outputs, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *_make_dense([size, hidden], num_classes))


def convnet(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    channels: Sequence[int] = (64, 128),
    hidden: Sequence[int] = (384, 192),
) -> nn.Module:
    """The teachers of PATE 2017 (appendix A): two 5x5 convolutions with pooling, two dense layers.

    Local response normalization is left out: it costs time and gains nothing with He's initialization.
    """
    depth, height, width = _check_image_shape("convnet", input_shape, 8)
    first, second = channels
    size = second * (height // 4) * (width // 4)
    layers: list[nn.Module] = []
    for inputs, outputs in ((depth, first), (first, second)):
        layers += [_make_conv(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), *_make_dense([size, *hidden], num_classes))


def _make_residual_block(inputs: int, outputs: int, stride: int, norm: str) -> nn.Module:
    """Make a pre-activation residual block (He et al. 2016)."""
    branch = nn.Sequential(
        _make_norm(norm, inputs),
        nn.ReLU(),
        _make_conv(inputs, outputs, stride=stride, bias=False),
        _make_norm(norm, outputs),
        nn.ReLU(),
        _make_conv(outputs, outputs, bias=False),
    )
    is_identity = inputs == outputs and stride == 1
    shortcut = nn.Identity() if is_identity else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return Residual(branch, shortcut)


def resnet(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 16, blocks: int = 1, norm: str = "group"
) -> nn.Module:
    """A small residual network for teachers, with group normalization."""
    depth, _, _ = _check_image_shape("resnet", input_shape, 8)
    layers: list[nn.Module] = [_make_conv(depth, width, bias=False)]
    inputs = width
    for stage, outputs in enumerate((width, 2 * width, 4 * width)):
        for block in range(blocks):
            layers.append(_make_residual_block(inputs, outputs, 2 if stage and not block else 1, norm))
            inputs = outputs
    head = [_make_norm(norm, inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(inputs, num_classes))


def small_cnn(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    channels: Sequence[int] = (32, 64),
    hidden: int = 128,
    norm: str = "batch",
) -> nn.Module:
    """A student for images of about 8x8: two convolutions, one pooling, dense layers."""
    depth, height, width = _check_image_shape("small_cnn", input_shape, 4)
    first, second = channels
    size = second * (height // 2) * (width // 2)
    layers: list[nn.Module] = []
    for inputs, outputs in ((depth, first), (first, second)):
        layers += [_make_conv(inputs, outputs, bias=False), _make_norm(norm, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), Flatten(), *_make_dense([size, hidden], num_classes))


def cnn(
    input_shape: tuple[int, ...], num_classes: int, *, width: int = 32, hidden: int = 128, norm: str = "batch"
) -> nn.Module:
    """A student for 28x28 or 32x32: five normalized 3x3 convolutions, two of them strided, then dense layers.

    It has 1.1 M parameters on 28x28 at the default width, nine tenths of them in the dense layers, where they are fast.
    """
    depth, height, image_width = _check_image_shape("cnn", input_shape, 8)
    plan = [(width, 1), (2 * width, 2), (2 * width, 1), (4 * width, 2), (4 * width, 1)]
    layers: list[nn.Module] = []
    inputs = depth
    for outputs, stride in plan:
        layers += [_make_conv(inputs, outputs, stride=stride, bias=False), _make_norm(norm, outputs), nn.ReLU()]
        inputs = outputs
    size = inputs * math.ceil(height / 4) * math.ceil(image_width / 4)
    return nn.Sequential(*layers, Flatten(), *_make_dense([size, hidden], num_classes))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder for builder in (logistic, mlp, lean_cnn, convnet, resnet, small_cnn, cnn)
}


def voting(input_shape: tuple[int, ...], num_classes: int, *, members: int = 5, of: Design = None) -> nn.Module:
    """A vote of networks of one design (``of``), for students: it has no stacked form."""
    return Voting([_build_design(of, input_shape, num_classes) for _ in range(members)])


def _build_design(of: Design, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    design = {"name": "logistic", "options": {}, **(of or {})}
    return build(design["name"], input_shape, num_classes, **design["options"])


def probe(
    input_shape: tuple[int, ...], num_classes: int, *, of: Design = None, points: int = 0, neighbors: int = 0
) -> nn.Module:
    """A linear map of the unit-length features beneath the last layer of another network (``of``), for students.

    If ``neighbors`` > 0, the nearest public ``points`` move a feature (``MeanShift``).
    """
    trunk = make_feature_extractor(_build_design(of, input_shape, num_classes)).eval()
    with torch.no_grad():
        width = L2Normalize()(trunk(torch.zeros(1, *input_shape))).shape[1]
    if neighbors:
        trunk = nn.Sequential(trunk, L2Normalize(), MeanShift(points, width, neighbors))
    return nn.Sequential(trunk, L2Normalize(), nn.Linear(width, num_classes))


def fourier(input_shape: tuple[int, ...], num_classes: int, *, cosines: int = 256) -> nn.Module:
    """A linear map of points and of random cosines of them, for students (``features.fourier``)."""
    width = math.prod(input_shape)
    return nn.Sequential(nn.Flatten(), Fourier(width, cosines), nn.Linear(width + cosines, num_classes))


def axis_rules(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A hypothesis on single features: one rule, or one for each of three or more classes."""
    return AxisRules(1 if num_classes == 2 else num_classes)


def half_plane_rules(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A half-plane of two features, or one for each of three or more classes."""
    return HalfPlaneRules(1 if num_classes == 2 else num_classes)


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    **NETWORKS,
    **{builder.__name__: builder for builder in (voting, probe, fourier, axis_rules, half_plane_rules)},
}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(BUILDERS[name]).parameters.values()
    allowed_options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option, value in options.items():
        if option not in allowed_options:
            problem = f"network {name!r} takes {', '.join(allowed_options) or 'no options'}"
            raise checks.error("network option", option, problem)
        if option in ("norm", "of"):
            continue
        for size in value if _is_list(value) else [value]:
            checks.integer(f"network.{option}", size, low=1)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def build(name: str, input_shape: Sequence[int], num_classes: int, **options: Any) -> nn.Module:
    """Build a network by name for inputs [B, *input_shape]; ``initialize`` draws its weights.

    Raises:
        ValueError: The name or an option is unknown, or the network cannot take the data.
    """
    checks.one_of("network", name, BUILDERS)
    checks.integer("num_classes", num_classes, low=2)
    _check_options(name, options)
    return BUILDERS[name](tuple(int(size) for size in input_shape), num_classes, **options)


def describe(name: str, input_shape: Sequence[int], num_classes: int, **options: Any) -> Description:
    """Describe a network by plain data (JSON), from which ``rebuild`` builds it again."""
    checks.one_of("network", name, BUILDERS)
    _check_options(name, options)
    plain = {key: list(value) if _is_list(value) else value for key, value in options.items()}
    shape = [int(size) for size in input_shape]
    return {"name": name, "input_shape": shape, "num_classes": int(num_classes), "options": plain}


def rebuild(description: Mapping[str, Any]) -> nn.Module:
    """Build the network that ``describe`` described."""
    try:
        name, shape, num_classes, options = (
            description[key] for key in ("name", "input_shape", "num_classes", "options")
        )
    except (KeyError, TypeError):
        raise checks.error("network", description, "must hold name, input_shape, num_classes and options") from None
    return build(name, shape, num_classes, **options)


@torch.no_grad()
def initialize(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw a network's weights in place, and return the network.

    Weights are He-normal (gain sqrt 2), biases uniform within 1/sqrt(fan-in), normalization layers the identity, and
    the output layer zero, so that the first loss is log C exactly. Weights are drawn in float32 on the CPU in the order
    of ``named_parameters``, so that one stream gives one network in every backend, device and precision. With zero
    biases all units would switch at the origin, and points that differ in length alone would be learned slowly.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for parameter in layers[-1].parameters():
        parameter.zero_()
    for layer in layers[:-1]:
        fan_in = layer.weight[0].numel()
        values = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float32) * math.sqrt(2 / fan_in)
        layer.weight.copy_(values)
        if layer.bias is not None:
            values = torch.rand(layer.bias.shape, generator=generator, dtype=torch.float32)
            layer.bias.copy_((2 * values - 1) / math.sqrt(fan_in))
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm | nn.BatchNorm2d):
            norm.weight.fill_(1)
            norm.bias.zero_()
    return module
