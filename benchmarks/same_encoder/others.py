"""Other people's methods, with the same public points for scaling: libraries where there are any, else our reading.

Sums are priced by the same accountant as ours, data-independently. A record's feature is centered by the public mean,
divided by the public points' median length and clipped to length 1; with ``ridge`` it is whitened by their covariance
first, as ours are: what is public is there for everybody.
"""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from benchmarks.same_encoder.data import Split
from benchmarks.same_encoder.ours import DELTA, Answer, _logistic
from pate_torch.accounting import calibration
from pate_torch.accounting.events import GaussianEvent
from pate_torch.privacy.whitening import Whitening


def no_privacy(split: Split, epsilon: float, *, C: float) -> Answer:
    private, test = split.scaled()
    return np.asarray(LogisticRegression(C=C, max_iter=200).fit(private, split.y).predict(test)), {}


def dp_sgd(
    split: Split, epsilon: float, *, steps: int, rate: float, learning_rate: float, clip: float, ridge: float | None
) -> Answer:
    """A linear head by Opacus, sampled by Poisson."""
    private, _, test = _scaled(split, ridge)
    noise, draw = _sampled_noise(rate, steps, epsilon), torch.Generator().manual_seed(torch.seed() % 2**63)
    model = GradSampleModule(nn.Linear(private.shape[1], split.classes))
    nn.init.zeros_(model._build_module.weight)
    nn.init.zeros_(model._build_module.bias)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9),
        noise_multiplier=noise,
        max_grad_norm=clip,
        expected_batch_size=max(1, round(rate * split.about)),
    )
    label = torch.from_numpy(split.y)
    for _ in range(steps):
        chosen = (torch.rand(len(private), generator=draw) < rate).nonzero().squeeze(1)
        if not len(chosen):
            continue
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.cross_entropy(model(private[chosen]), label[chosen]).backward()
        optimizer.step()
    return model(test).argmax(1).numpy(), {}


def least_squares(split: Split, epsilon: float, *, share: float, penalty: float, ridge: float | None) -> Answer:
    """Noisy second moments of features, and of features with classes (sufficient statistics; our reading of DP-LS)."""
    private, _, test = (_with_one(part) for part in _scaled(split, ridge))
    sigma = noise_of(1, epsilon)
    gram = _symmetric_noise(private.T @ private, sigma / math.sqrt(share))
    moment = _noisy(private.T @ _one_hot(split), sigma / math.sqrt(1 - share))
    return (test @ _solve(gram, penalty * split.about, moment)).argmax(1).numpy(), {}


def feature_covariance(
    split: Split, epsilon: float, *, share: float, steps: int, learning_rate: float, clip: float, penalty: float
) -> Answer:
    """Full-batch noisy gradient descent, preconditioned by a noisy private covariance.

    Our reading of DP-FC, Mehta, Krichene, Thakurta, Kurakin & Cutkosky 2022.
    """
    private, _, test = (_with_one(part) for part in _scaled(split, None))
    sigma = noise_of(1, epsilon)
    gram = _symmetric_noise(private.T @ private, sigma / math.sqrt(share))
    weight, truth = torch.zeros(private.shape[1], split.classes), _one_hot(split)
    for _ in range(steps):
        residual = truth - (private @ weight).softmax(1)
        residual = residual * (clip / residual.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
        gradient = _noisy(private.T @ residual, sigma * clip * math.sqrt(steps / (1 - share)))
        weight = weight + learning_rate * _solve(gram, penalty * split.about, gradient)
    return (test @ weight).argmax(1).numpy(), {}


def class_means(split: Split, epsilon: float, *, cosine: bool, ridge: float | None) -> Answer:
    """One noisy sum of features for each class, and the class whose mean, or sum, lies nearest."""
    private, _, test = _scaled(split, ridge)
    sums = _noisy(_one_hot(split).T @ private, noise_of(1, epsilon))
    return (test @ (F.normalize(sums) if cosine else sums).T).argmax(1).numpy(), {}


def public_prototypes(split: Split, epsilon: float, *, prototypes: int, low: float, high: float) -> Answer:
    """For each class, public points near to its records, by the exponential mechanism: pure epsilon.

    A record adds at most high - low to the scores of its own class, and never takes away, so each draw is exponential
    in epsilon x score / (high - low). Our reading of DPPL-Public, Wahdany, Jagielski, Dziedzic & Boenisch 2024.
    """
    private, public, test = (F.normalize(part) for part in _scaled(split, None))
    found = []
    for label in range(split.classes):
        near = (public @ private[split.y == label].T).clamp(low, high) - low
        score = near.sum(1).double() / (high - low) * epsilon / prototypes
        gumbel = -torch.rand(prototypes, len(score), dtype=torch.float64).log().neg().log()
        picked: list[int] = []
        for draw in gumbel:
            noisy = score + draw
            noisy[picked] = -math.inf
            picked.append(int(noisy.argmax()))
        found.append(public[picked].mean(0))
    return (test @ torch.stack(found).T).argmax(1).numpy(), {}


def private_knn(
    split: Split, epsilon: float, *, neighbors: int, rate: float, questions_a_class: int, ridge: float | None
) -> Answer:
    """Votes of the nearest of sampled private records; a logistic regression of the noisy pluralities.

    A record more displaces one vote by its own: L2 sensitivity sqrt 2 on the sample. Our reading of Private-kNN, Zhu,
    Yu, Chandraker & Wang 2020, without screening.
    """
    private, public, _ = _scaled(split, ridge)
    draw = np.random.default_rng(split.seed)
    queries = min(questions_a_class * split.classes, len(public))
    asked = draw.choice(len(public), queries, replace=False)
    noise = math.sqrt(2) * _sampled_noise(rate, queries, epsilon)
    label, votes = torch.from_numpy(split.y), torch.zeros(queries, split.classes)
    for place, distance in enumerate(torch.cdist(public[asked], private)):
        chosen = (torch.rand(len(private)) < rate).nonzero().squeeze(1)
        nearest = distance[chosen].topk(min(neighbors, len(chosen)), largest=False).indices
        votes[place] = torch.bincount(label[chosen[nearest]], minlength=split.classes)
    answer = _noisy(votes, noise).argmax(1).numpy()
    right = float((answer == split.told[asked]).mean())
    return _logistic(split, asked, answer), {"labels_right": right, "sigma": noise}


# ---- parts -----------------------------------------------------------------------------------------------------------


def _scaled(split: Split, ridge: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Private, public and test features, private ones and the others at most 1 long."""
    mean, std = split.scale
    parts = [torch.from_numpy((part - mean) / std).float() for part in (split.x, split.public, split.test)]
    if ridge is not None:
        axis_DE = Whitening.from_features(parts[1], ridge).axis_DE
        parts = [part @ axis_DE for part in parts]
    radius = parts[1].norm(dim=1).median()
    private, public, test = ((part / radius) / (part / radius).norm(dim=1, keepdim=True).clamp(min=1) for part in parts)
    return private, public, test


def _with_one(z: Tensor) -> Tensor:
    """A 1 for the intercept; still at most 1 long."""
    return F.pad(z, (0, 1), value=1.0) / math.sqrt(2)


def _one_hot(split: Split) -> Tensor:
    return F.one_hot(torch.from_numpy(split.y), split.classes).float()


def _noisy(sums: Tensor, sigma: float) -> Tensor:
    return sums + sigma * torch.randn(sums.shape)


def _symmetric_noise(gram: Tensor, sigma: float) -> Tensor:
    upper = torch.triu(sigma * torch.randn(gram.shape))
    return gram + upper + torch.triu(upper, 1).T


def _solve(gram: Tensor, penalty: float, moment: Tensor) -> Tensor:
    """Noise may have made eigenvalues negative: these count as none."""
    values, axes = torch.linalg.eigh(gram)
    return axes @ ((axes.T @ moment) / (values.clamp(min=0) + penalty)[:, None])


@functools.cache
def noise_of(sums: int, epsilon: float) -> float:
    return calibration.calibrate_sigma(
        lambda sigma: (GaussianEvent(mu=1 / sigma, count=sums),), epsilon=epsilon, delta=DELTA
    )


@functools.cache
def _sampled_noise(rate: float, steps: int, epsilon: float) -> float:
    return calibration.calibrate_sampled_gaussian(rate, steps, epsilon=epsilon, delta=DELTA)
