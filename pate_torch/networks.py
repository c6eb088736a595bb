"""Networks of teachers and students, which are built by name, described by plain data and initialized from a seed.

Each network maps normalized floats [B, *input_shape] to logits [B, C]. A network can be rebuilt from its description
(name, shape, classes, options), so weights are stored without code.

Teachers use no batch normalization, because its running statistics depend on whether teachers are trained separately or
together. All other layers have a stacked form in ``teachers/stacked.py``.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core import checks

Design = Mapping[str, Any] | None
"""Name and options of a network. None for logistic regression."""
_BLOCK_POINTS = 1 << 16  # public points that ``NeighborVote`` compares at once
Shape = tuple[int, ...]


class Residual(nn.Module):
    """A residual block: shortcut(x) + branch(x)."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.branch(x)


class Flatten(nn.Flatten):
    """A flattening layer whose gradient has the memory layout of the images.

    With another layout, pooling and ReLU would combine gradients of different layouts, which takes ten times as long.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            x.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
        return super().forward(x)


class Voting(nn.Module):
    """The mean of the log-probabilities of several networks."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x).log_softmax(1) for member in self.members]).mean(0)


class L2Normalize(nn.Module):
    """A layer that flattens points and scales them to length 1, [B, ...] -> [B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.float().flatten(1), dim=1)


class ConcatFeatures(nn.Module):
    """A layer that concatenates the features of several encoders, after scaling each to length 1."""

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.normalize(encoder(x).float().flatten(1), dim=1) for encoder in self.encoders], 1)


class Fourier(nn.Module):
    """A layer that returns columns, their ranks and F random cosines, [B, D] -> [B, 2 D + F] (``features.fourier``).

    The rank of a number is the share of the ``knots`` of its column that it exceeds, less one half.
    """

    def __init__(self, width: int, cosines: int, knots: int) -> None:
        super().__init__()
        self.frequency_DF = nn.Buffer(torch.zeros(width, cosines))
        self.phase_F = nn.Buffer(torch.zeros(cosines))
        self.knot_DK = nn.Buffer(torch.zeros(width, knots))
        self.column_weight_D = nn.Buffer(torch.ones(width))
        self.rank_weight_D = nn.Buffer(torch.zeros(width))
        self.cosine_weight = nn.Buffer(torch.tensor(math.sqrt(2)))

    def forward(self, x: Tensor) -> Tensor:
        rank_BD = (x[:, :, None] > self.knot_DK).float().mean(2) - 0.5
        cosine_BF = torch.cos(x @ self.frequency_DF + self.phase_F)
        return torch.cat([self.column_weight_D * x, self.rank_weight_D * rank_BD, self.cosine_weight * cosine_BF], 1)


class MeanShift(nn.Module):
    """One mean-shift step: the weighted mean of the nearest public features of length 1, [B, D] -> [B, D].

    Features move towards dense regions of the public points, so classes separate (Fukunaga and Hostetler 1975). The
    k-th of the K = ``neighbors`` nearest points has weight d_K^2 - d_k^2. The weight of the last point is 0, so the
    mean is continuous where two points exchange their ranks.
    """

    def __init__(self, points: int, width: int, neighbors: int) -> None:
        super().__init__()
        self.neighbors = min(neighbors, points)
        self.place_PD = nn.Buffer(torch.zeros(points, width))  # students on disk use this name

    def forward(self, x_BD: Tensor) -> Tensor:
        # Distances by a matrix product, whose rounding is the same for all private features in batches of one shape.
        nearest = (x_BD @ self.place_PD.T).topk(self.neighbors, dim=1)  # d^2 = 2 - 2 x.p
        weight_BK = (nearest.values - nearest.values[:, -1:]).clamp(min=1e-9)  # equal distances get equal weights
        weight_BK = weight_BK / weight_BK.sum(1, keepdim=True)
        return (weight_BK[:, :, None] * self.place_PD[nearest.indices]).sum(1)


class NeighborVote(nn.Module):
    """The mean class shares of the nearest public points, as log-probabilities, [B, ...] -> [B, C]."""

    def __init__(self, points: int, width: int, num_classes: int, neighbors: int) -> None:
        super().__init__()
        self.neighbors = min(neighbors, points)
        self.place_PD = nn.Buffer(torch.zeros(points, width))
        self.share_PC = nn.Parameter(torch.zeros(points, num_classes), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x_BD = x.float().flatten(1)
        blocks: list[tuple[Tensor, Tensor]] = []
        for place_PD in self.place_PD.split(_BLOCK_POINTS):  # the scores of all points would take gigabytes
            score_BP = x_BD @ place_PD.T - place_PD.square().sum(1) / 2
            near = score_BP.topk(min(self.neighbors, len(place_PD)), dim=1)
            blocks.append((near.values, near.indices + _BLOCK_POINTS * len(blocks)))
        score_BM, point_BM = (torch.cat(part, 1) for part in zip(*blocks, strict=True))
        nearest_BK = point_BM.gather(1, score_BM.topk(self.neighbors, dim=1).indices)
        return self.share_PC[nearest_BK].mean(1).clamp(min=1e-6).log()


class WhitenAndClip(nn.Module):
    """A layer that whitens features, appends a 1 and clips to length 1 (``privacy.whitening``).

    It maps [B, D] to [B, E + 1], where E is the number of ``directions``.
    """

    def __init__(self, width: int, directions: int) -> None:
        super().__init__()
        self.center_D, self.radius = nn.Buffer(torch.zeros(width)), nn.Buffer(torch.tensor(1.0))
        self.axis_DE = nn.Buffer(torch.zeros(width, directions))

    def forward(self, x_BD: Tensor) -> Tensor:
        z_BE = F.pad((x_BD - self.center_D) @ self.axis_DE, (0, 1), value=1.0) / self.radius
        return z_BE / z_BE.norm(dim=1, keepdim=True).clamp(min=1)


class _Rules(nn.Module):
    """R rules that accept or reject a point: one rule for two classes, or one rule for each of more classes.

    ``share_R`` is the share of the public points that each rule accepts. If several rules accept a point, the rule with
    the smallest share wins. If no rule accepts the point, the rule with the largest share wins. For two classes the
    logits are 0 and 40, so the softmax is 1 in float32.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_rules = 1 if num_classes == 2 else num_classes
        self.share_R = nn.Buffer(torch.zeros(self.num_rules))

    def evaluate(self, x_BD: Tensor) -> Tensor:
        """Return whether each rule accepts each point, bool [B, R]."""
        raise NotImplementedError

    def forward(self, x_BD: Tensor) -> Tensor:
        is_yes_BR = self.evaluate(x_BD)
        if is_yes_BR.shape[1] == 1:
            return 40.0 * torch.cat([~is_yes_BR, is_yes_BR], 1).float()
        return 40.0 * (is_yes_BR + 0.25 * torch.where(is_yes_BR, -self.share_R, self.share_R))


class AxisRules(_Rules):
    """Rules low <= x_feature < high and their complements (thresholds, intervals, stumps), [B, D] -> [B, C].

    Bounds are float64, because they lie between adjacent float32 values of a feature.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.low_R = nn.Parameter(torch.zeros(self.num_rules, dtype=torch.float64), requires_grad=False)
        self.high_R = nn.Parameter(torch.zeros(self.num_rules, dtype=torch.float64), requires_grad=False)
        self.feature_R = nn.Buffer(torch.zeros(self.num_rules, dtype=torch.int64))
        self.inside_R = nn.Buffer(torch.ones(self.num_rules, dtype=torch.bool))

    def evaluate(self, x_BD: Tensor) -> Tensor:
        value_BR = x_BD.double()[:, self.feature_R]
        return ((value_BR >= self.low_R) & (value_BR < self.high_R)) == self.inside_R


class HalfPlaneRules(_Rules):
    """Half-planes left of the line from tail to head, or constant rules, [B, 2] -> [B, C].

    A point on the line is accepted if it does not lie beyond the tail in the direction of the head.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.tail_RD = nn.Parameter(torch.zeros(self.num_rules, 2, dtype=torch.float64), requires_grad=False)
        self.head_RD = nn.Parameter(torch.zeros(self.num_rules, 2, dtype=torch.float64), requires_grad=False)
        self.always_R = nn.Buffer(torch.zeros(self.num_rules, dtype=torch.bool))

    def evaluate(self, x_BD: Tensor) -> Tensor:
        edge_RD, offset_BRD = self.head_RD - self.tail_RD, x_BD.double()[:, None] - self.tail_RD
        side_BR = edge_RD[:, 0] * offset_BRD[..., 1] - edge_RD[:, 1] * offset_BRD[..., 0]
        beyond_BR = (edge_RD * offset_BRD).sum(2) > 0
        is_yes_BR = (side_BR > 0) | ((side_BR == 0) & ~beyond_BR)
        return torch.where((edge_RD == 0).all(1), self.always_R, is_yes_BR)


def get_last_linear(network: nn.Module) -> str:
    """Return the name of the last linear layer. Raise ValueError if there is none, or if it is the whole network."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear) and name]
    if not names:
        raise ValueError("features.network: must have a last linear layer after the layers of the features.")
    return names[-1]


def remove_head(network: nn.Module) -> nn.Module:
    """Replace the classifier of a network by the identity, in place, and return the network."""
    network.set_submodule(get_last_linear(network), nn.Identity())
    return network


def make_feature_extractor(network: nn.Module) -> nn.Module:
    """Copy a network without its classifier. The inputs of the classifier are the features.

    For a ``Voting`` network, the features of all members are concatenated. For a vote of the nearest points, they are
    the features in which points are near. For a network without a linear layer, they are the flattened points.
    """
    if isinstance(network, Voting):
        return ConcatFeatures([make_feature_extractor(member) for member in network.members])
    if isinstance(network, nn.Sequential) and isinstance(network[-1], NeighborVote):
        return nn.Sequential(copy.deepcopy(network[0]), nn.Flatten())
    try:
        return remove_head(copy.deepcopy(network))
    except ValueError:
        return nn.Flatten()


def list_output_layers(network: nn.Module) -> list[nn.Linear]:
    """List the last layer, or those of all members of a ``Voting``. Raise ValueError if one has no weights and bias."""
    if isinstance(network, Voting):
        return [layer for member in network.members for layer in list_output_layers(member)]
    last = list(network.children())[-1] if isinstance(network, nn.Sequential) else network
    if not isinstance(last, nn.Linear) or last.bias is None:
        raise checks.error("student", type(last).__name__, "must end with a linear layer that has a bias")
    return [last]


def count_parameters(module: nn.Module) -> int:
    """Count the parameters of a network."""
    return sum(parameter.numel() for parameter in module.parameters())


def _check_image_shape(name: str, input_shape: Shape, min_size: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < min_size:
        problem = f"needs images of at least {min_size}x{min_size}, but points have shape {input_shape}"
        raise checks.error("network", name, problem, "Use network=logistic or network=mlp for feature rows.")
    return input_shape[0], input_shape[1], input_shape[2]


def _make_norm(kind: str, channels: int) -> nn.Module:
    checks.one_of("network.norm", kind, ("group", "batch"))
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(8, channels), channels)


def _make_conv_block(inputs: int, outputs: int, norm: str, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), _make_norm(norm, outputs), nn.ReLU()]


def _make_dense(sizes: Sequence[int], num_classes: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return [*layers, nn.Linear(sizes[-1], num_classes)]


def logistic(input_shape: Shape, num_classes: int) -> nn.Module:
    """Build a multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def mlp(input_shape: Shape, num_classes: int, *, hidden: Sequence[int] = (128,)) -> nn.Module:
    """Build a multilayer perceptron with ReLU."""
    return nn.Sequential(nn.Flatten(), *_make_dense([math.prod(input_shape), *hidden], num_classes))


def lean_cnn(
    input_shape: Shape, num_classes: int, *, channels: Sequence[int] = (16, 32), hidden: int = 128
) -> nn.Module:
    """Build two 3x3 convolutions and dense layers. Stride 2 needs a quarter of the operations of pooling."""
    depth, height, width = _check_image_shape("lean_cnn", input_shape, 4)
    first, second = channels
    layers = [nn.Conv2d(depth, first, 3, 2, 1), nn.ReLU(), nn.Conv2d(first, second, 3, 2, 1), nn.ReLU()]
    size = second * math.ceil(height / 4) * math.ceil(width / 4)
    return nn.Sequential(*layers, nn.Flatten(), *_make_dense([size, hidden], num_classes))


def convnet(
    input_shape: Shape, num_classes: int, *, channels: Sequence[int] = (64, 128), hidden: Sequence[int] = (384, 192)
) -> nn.Module:
    """Build the teacher of PATE 2017 (appendix A): two 5x5 convolutions with pooling, two dense layers.

    Local response normalization is left out, because it does not improve accuracy with He initialization.
    """
    depth, height, width = _check_image_shape("convnet", input_shape, 8)
    first, second = channels
    layers: list[nn.Module] = [nn.Conv2d(depth, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    size = second * (height // 4) * (width // 4)
    return nn.Sequential(*layers, nn.Flatten(), *_make_dense([size, *hidden], num_classes))


def _make_residual_block(inputs: int, outputs: int, stride: int, norm: str) -> nn.Module:
    # before the activation, as in He et al. 2016
    convolutions = *_make_conv_block(inputs, outputs, norm, stride), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
    branch = nn.Sequential(_make_norm(norm, inputs), nn.ReLU(), *convolutions)
    is_identity = inputs == outputs and stride == 1
    shortcut = nn.Identity() if is_identity else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return Residual(branch, shortcut)


def resnet(input_shape: Shape, num_classes: int, *, width: int = 16, blocks: int = 1, norm: str = "group") -> nn.Module:
    """Build a small residual network for teachers, with group normalization."""
    depth, _, _ = _check_image_shape("resnet", input_shape, 8)
    layers: list[nn.Module] = [nn.Conv2d(depth, width, 3, padding=1, bias=False)]
    inputs = width
    for stage, outputs in enumerate((width, 2 * width, 4 * width)):
        for block in range(blocks):
            layers.append(_make_residual_block(inputs, outputs, 2 if stage and not block else 1, norm))
            inputs = outputs
    head = [_make_norm(norm, inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(inputs, num_classes))


def small_cnn(
    input_shape: Shape, num_classes: int, *, channels: Sequence[int] = (32, 64), hidden: int = 128, norm: str = "batch"
) -> nn.Module:
    """Build a student for images of about 8x8: two convolutions, one pooling, dense layers."""
    depth, height, width = _check_image_shape("small_cnn", input_shape, 4)
    first, second = channels
    layers = [*_make_conv_block(depth, first, norm), *_make_conv_block(first, second, norm), nn.MaxPool2d(2)]
    size = second * (height // 2) * (width // 2)
    return nn.Sequential(*layers, Flatten(), *_make_dense([size, hidden], num_classes))


def cnn(input_shape: Shape, num_classes: int, *, width: int = 32, hidden: int = 128, norm: str = "batch") -> nn.Module:
    """Build a student for 28x28 or 32x32: five normalized 3x3 convolutions, two of them strided, then dense layers.

    The network has 1.1 M parameters on 28x28, nine tenths of them in the dense layers, which are fast.
    """
    depth, height, image_width = _check_image_shape("cnn", input_shape, 8)
    sizes = [depth, width, 2 * width, 2 * width, 4 * width, 4 * width]
    layers: list[nn.Module] = []
    for (inputs, outputs), stride in zip(pairwise(sizes), (1, 2, 1, 2, 1), strict=True):
        layers += _make_conv_block(inputs, outputs, norm, stride)
    size = sizes[-1] * math.ceil(height / 4) * math.ceil(image_width / 4)
    return nn.Sequential(*layers, Flatten(), *_make_dense([size, hidden], num_classes))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder for builder in (logistic, mlp, lean_cnn, convnet, resnet, small_cnn, cnn)
}


def voting(input_shape: Shape, num_classes: int, *, members: int = 5, of: Design = None) -> nn.Module:
    """Build a ``Voting`` of ``members`` networks of the design ``of``, for students."""
    return Voting([_build_design(of, input_shape, num_classes) for _ in range(members)])


def _build_design(of: Design, input_shape: Shape, num_classes: int) -> nn.Module:
    design = {"name": "logistic", "options": {}, **(of or {})}
    return build(design["name"], input_shape, num_classes, **design["options"])


@torch.no_grad()
def _build_trunk(of: Design, input_shape: Shape, num_classes: int) -> tuple[nn.Module, int]:
    trunk = make_feature_extractor(_build_design(of, input_shape, num_classes)).eval()
    return trunk, trunk(torch.zeros(1, *input_shape)).flatten(1).shape[1]


def probe(
    input_shape: Shape, num_classes: int, *, of: Design = None, points: int = 0, neighbors: int = 0, directions: int = 1
) -> nn.Module:
    """Build the linear model of noisy gradients (``privacy.records.LinearModel``), for students.

    Its inputs are the features of a network of the design ``of``, scaled to length 1, whitened along ``directions`` and
    clipped. If ``neighbors`` > 0, a mean-shift step towards ``points`` public points follows the scaled features
    (``MeanShift``).
    """
    trunk, width = _build_trunk(of, input_shape, num_classes)
    if neighbors:
        trunk = nn.Sequential(trunk, L2Normalize(), MeanShift(points, width, neighbors))
    whitening = WhitenAndClip(width, directions)
    return nn.Sequential(trunk, L2Normalize(), whitening, nn.Linear(directions + 1, num_classes))


def neighbor_vote(
    input_shape: Shape, num_classes: int, *, of: Design = None, points: int = 1, neighbors: int = 10
) -> nn.Module:
    """Build the vote of the nearest public points in the features of a design, for students (``NeighborVote``)."""
    trunk, width = _build_trunk(of, input_shape, num_classes)
    features = nn.Sequential(trunk, L2Normalize()) if of else nn.Identity()
    return nn.Sequential(features, NeighborVote(points, width, num_classes, neighbors))


def fourier(input_shape: Shape, num_classes: int, *, cosines: int = 256, knots: int = 64) -> nn.Module:
    """Build a linear map of points, their ranks and random cosines, for students (``features.fourier``)."""
    width = math.prod(input_shape)
    return nn.Sequential(nn.Flatten(), Fourier(width, cosines, knots), nn.Linear(2 * width + cosines, num_classes))


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    **NETWORKS,
    **{builder.__name__: builder for builder in (voting, probe, neighbor_vote, fourier)},
    "axis_rules": lambda input_shape, num_classes: AxisRules(num_classes),
    "half_plane_rules": lambda input_shape, num_classes: HalfPlaneRules(num_classes),
}


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    checks.one_of("network", name, BUILDERS)
    parameters = inspect.signature(BUILDERS[name]).parameters.values()
    allowed_options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for option, value in options.items():
        if option not in allowed_options:
            problem = f"is unknown: network {name!r} takes {', '.join(allowed_options) or 'no options'}"
            raise checks.error("network option", option, problem)
        if option not in ("norm", "of"):
            for size in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
                checks.integer(f"network.{option}", size, low=1)


def build(name: str, input_shape: Sequence[int], num_classes: int, **options: Any) -> nn.Module:
    """Build a network by name for inputs [B, *input_shape]. ``initialize`` draws its weights.

    Raise ValueError if the name or an option is unknown, or if the network does not support the input shape.
    """
    _check_options(name, options)
    checks.integer("num_classes", num_classes, low=2)
    return BUILDERS[name](tuple(int(size) for size in input_shape), num_classes, **options)


def describe(name: str, input_shape: Sequence[int], num_classes: int, **options: Any) -> dict[str, Any]:
    """Describe a network by plain data (JSON) for ``rebuild``."""
    _check_options(name, options)
    plain = {k: list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v for k, v in options.items()}
    shape = [int(size) for size in input_shape]
    return {"name": name, "input_shape": shape, "num_classes": int(num_classes), "options": plain}


def rebuild(description: Mapping[str, Any]) -> nn.Module:
    """Build a network from the output of ``describe``."""
    get_parts = itemgetter("name", "input_shape", "num_classes", "options")
    try:
        name, shape, num_classes, options = get_parts(description)
    except (KeyError, TypeError):
        raise checks.error("network", description, "must hold name, input_shape, num_classes and options") from None
    return build(name, shape, num_classes, **options)


@torch.no_grad()
def initialize(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Draw the weights of a network in place, and return the network.

    Weights are He-normal (gain sqrt 2), biases uniform in +-1/sqrt(fan-in), normalization layers the identity, and the
    output layer zero, so that the first loss is log C exactly. Weights are drawn in float32 on the CPU in the order of
    ``modules``, so that one seed gives the same network for every backend, device and precision. Biases are not zero,
    because all units would then switch at the origin, and points that differ in length alone would be learned slowly.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for parameter in layers[-1].parameters():
        parameter.zero_()
    for layer in layers[:-1]:
        fan_in = layer.weight[0].numel()
        normal = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float32)
        layer.weight.copy_(normal * math.sqrt(2 / fan_in))
        if layer.bias is not None:
            uniform = torch.rand(layer.bias.shape, generator=generator, dtype=torch.float32)
            layer.bias.copy_((2 * uniform - 1) / math.sqrt(fan_in))
    for norm in module.modules():
        if isinstance(norm, nn.GroupNorm | nn.BatchNorm2d):
            norm.weight.fill_(1)
            norm.bias.zero_()
    return module
