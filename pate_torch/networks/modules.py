"""Modules of networks, and feature extractors that are made of networks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual block, shortcut(x) + branch(x)."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.branch(x)


class Flatten(nn.Flatten):
    """Flattens images; their gradient gets the memory layout of the images.

    Otherwise pooling and ReLU would combine two gradients of different layouts, which takes ten times as long.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            x.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
        return super().forward(x)


class Voting(nn.Module):
    """Mean log-probabilities of several networks."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x).log_softmax(1) for member in self.members]).mean(0)


class L2Normalize(nn.Module):
    """Scales rows to length 1, [B, ...] -> [B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.float().flatten(1), dim=1)


class ConcatFeatures(nn.Module):
    """Concatenates the unit-length features of several encoders."""

    def __init__(self, encoders: Sequence[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.normalize(encoder(x).float().flatten(1), dim=1) for encoder in self.encoders], 1)


class Fourier(nn.Module):
    """Appends F random cosines to a point, [B, D] -> [B, D + F] (Rahimi and Recht 2007; ``features.fourier``)."""

    def __init__(self, width: int, cosines: int) -> None:
        super().__init__()
        self.register_buffer("frequency_DF", torch.zeros(width, cosines))
        self.register_buffer("phase_F", torch.zeros(cosines))
        self.frequency_DF: Tensor
        self.phase_F: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, math.sqrt(2) * torch.cos(x @ self.frequency_DF + self.phase_F)], 1)


class MeanShift(nn.Module):
    """Moves unit-length features to the weighted mean of their nearest public features, [B, D] -> [B, D].

    Features move to where public points are dense, and classes apart (mean shift, Fukunaga and Hostetler 1975). The
    k-th of the ``neighbors`` nearest of P public points weighs d_K^2 - d_k^2. The last one weighs nothing, so that the
    mean does not jump where one point takes the place of another.
    """

    def __init__(self, points: int, width: int, neighbors: int) -> None:
        super().__init__()
        self.neighbors = min(neighbors, points)
        self.register_buffer("place_PD", torch.zeros(points, width))  # students on disk use this name
        self.place_PD: Tensor

    def forward(self, x_BD: Tensor) -> Tensor:
        # A product, because it rounds private features alike, which come in batches of one shape.
        nearest = (x_BD @ self.place_PD.T).topk(self.neighbors, dim=1)  # d^2 = 2 - 2 x.p
        weight_BK = (nearest.values - nearest.values[:, -1:]).clamp(min=1e-9)  # equal distances: equal weights
        weight_BK = weight_BK / weight_BK.sum(1, keepdim=True)
        return (weight_BK[:, :, None] * self.place_PD[nearest.indices]).sum(1)


CERTAIN_LOGIT = 40.0
"""Logit of the class that a hypothesis predicts: its softmax is 1 in float32."""


class _Rules(nn.Module):
    """R rules that accept or reject a point: one rule for two classes, else one rule for each class.

    If several rules accept a point, the rarest wins; if none does, the most frequent. ``share_R`` is the share of the
    public points that each rule accepts.
    """

    def __init__(self, rules: int) -> None:
        super().__init__()
        self.register_buffer("share_R", torch.zeros(rules))
        self.share_R: Tensor

    def evaluate(self, x_BD: Tensor) -> Tensor:
        """Whether each rule accepts each point, bool [B, R]."""
        raise NotImplementedError

    def forward(self, x_BD: Tensor) -> Tensor:
        is_yes_BR = self.evaluate(x_BD)
        if is_yes_BR.shape[1] == 1:
            return CERTAIN_LOGIT * torch.cat([~is_yes_BR, is_yes_BR], 1).float()
        return CERTAIN_LOGIT * (is_yes_BR + 0.25 * torch.where(is_yes_BR, -self.share_R, self.share_R))


class AxisRules(_Rules):
    """Rules low <= x_feature < high or their complements (thresholds, intervals, stumps), [B, D] -> [B, C].

    Cuts are float64, since they lie between neighboring float32 values of a feature.
    """

    def __init__(self, rules: int) -> None:
        super().__init__(rules)
        self.low_R = nn.Parameter(torch.zeros(rules, dtype=torch.float64), requires_grad=False)
        self.high_R = nn.Parameter(torch.zeros(rules, dtype=torch.float64), requires_grad=False)
        self.register_buffer("feature_R", torch.zeros(rules, dtype=torch.int64))
        self.register_buffer("inside_R", torch.ones(rules, dtype=torch.bool))
        self.feature_R: Tensor
        self.inside_R: Tensor

    def evaluate(self, x_BD: Tensor) -> Tensor:
        value_BR = x_BD.double()[:, self.feature_R]
        return ((value_BR >= self.low_R) & (value_BR < self.high_R)) == self.inside_R


class HalfPlaneRules(_Rules):
    """Rules "left of the line tail -> head, or on it up to the tail", or constant rules, [B, 2] -> [B, C]."""

    def __init__(self, rules: int) -> None:
        super().__init__(rules)
        self.tail_RD = nn.Parameter(torch.zeros(rules, 2, dtype=torch.float64), requires_grad=False)
        self.head_RD = nn.Parameter(torch.zeros(rules, 2, dtype=torch.float64), requires_grad=False)
        self.register_buffer("always_R", torch.zeros(rules, dtype=torch.bool))
        self.always_R: Tensor

    def evaluate(self, x_BD: Tensor) -> Tensor:
        edge_RD, offset_BRD = self.head_RD - self.tail_RD, x_BD.double()[:, None] - self.tail_RD
        side_BR = edge_RD[:, 0] * offset_BRD[..., 1] - edge_RD[:, 1] * offset_BRD[..., 0]
        beyond_BR = (edge_RD * offset_BRD).sum(2) > 0
        is_yes_BR = (side_BR > 0) | ((side_BR == 0) & ~beyond_BR)
        return torch.where((edge_RD == 0).all(1), self.always_R, is_yes_BR)


def get_last_linear(network: nn.Module) -> str:
    """Return the name of a network's classifier, its last linear layer.

    Raises:
        ValueError: The network has no linear layer, or is one.
    """
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear) and name]
    if not names:
        raise ValueError("features: the network needs a last linear layer apart from its trunk")
    return names[-1]


def remove_head(network: nn.Module) -> nn.Module:
    """Replace the classifier of a network by the identity, in place, and return the network."""
    network.set_submodule(get_last_linear(network), nn.Identity())
    return network


def make_feature_extractor(network: nn.Module) -> nn.Module:
    """Copy a network without its classifier, whose inputs are the features.

    A vote gives the features of all members side by side; a network without a linear layer gives the points themselves.
    """
    if isinstance(network, Voting):
        return ConcatFeatures([make_feature_extractor(member) for member in network.members])
    try:
        return remove_head(copy.deepcopy(network))
    except ValueError:
        return nn.Flatten()


def count_parameters(module: nn.Module) -> int:
    """Count the parameters of a network."""
    return sum(parameter.numel() for parameter in module.parameters())
