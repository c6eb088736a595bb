"""How many directions of the public points does the noise bear, and how long is a step? Both chosen on stand-ins.

    PYTHONPATH=.:keel python benchmarks/directions.py --cache features packages-wordllama sst2-wordllama pneumonia-lite0
    PYTHONPATH=.:keel python benchmarks/directions.py --cache features spambase satimage magic

Noisy descent of a linear model as ``method.gradients`` has it, in floats: eight steps, clipping norm .5, with a step's
size where a whitened point is of length 1, and one direction for so many records for each unit of noise. The mean
accuracy over the stand-ins, two splits and two noises each; over random Fourier features where a name has no encoder.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measuring
from benchmarks.same_encoder import data
from benchmarks.same_encoder.others import noise_of
from pate_torch.features.fourier import FourierFeatures
from pate_torch.privacy.whitening import Whitening

STEPS, CLIP = 8, 0.5


def accuracy(split: data.Split, z: tuple[Tensor, Tensor, Tensor], epsilon: float, step: float, records: float) -> float:
    """Of one noise; z: private, public and test features."""
    sigma = math.sqrt(STEPS) * noise_of(1, epsilon)
    whitening = Whitening.from_features(z[1], 0.1, split.about / sigma / records)
    z_ND, truth_NC = whitening.whiten_and_clip(z[0]), F.one_hot(torch.from_numpy(split.y), split.classes).double()
    weight_DC = torch.zeros(z_ND.shape[1], split.classes, dtype=torch.float64)
    for _ in range(STEPS):
        residual_NC = truth_NC - (whitening.radius * z_ND @ weight_DC).softmax(1)
        residual_NC *= (CLIP / residual_NC.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
        noisy_DC = z_ND.T @ residual_NC / CLIP + sigma * torch.randn(weight_DC.shape, dtype=torch.float64)
        weight_DC += step * whitening.radius / split.about * noisy_DC
    predicted = (whitening(z[2]).double() @ weight_DC).argmax(1).numpy()
    return float((predicted == split.truth).mean())


def features(split: data.Split) -> tuple[Tensor, Tensor, Tensor]:
    """Of private, public and test points."""
    mean, std = split.scale
    parts = [torch.from_numpy((part - mean) / std).float() for part in (split.x, split.public, split.test)]
    if not split.encoded:
        spec = measuring.make_spec(parts[0].shape[1:], 2)
        with torch.no_grad():
            parts = [FourierFeatures().learn(parts[1], spec, seed=split.seed)(part) for part in parts]
    return parts[0], parts[1], parts[2]


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "fashion")
    parser.add_argument("stand_ins", nargs="+", choices=list(data.SOURCES))
    parser.add_argument("--cache", type=Path, required=True)
    args = parser.parse_args()
    tasks = [data.task(name, args.data, args.fashion, args.cache) for name in args.stand_ins]
    splits = [(split, features(split)) for task in tasks for split in map(task.split, range(2))]
    for epsilon in (0.1, 0.5, 2.0):
        for step in (0.5, 1.0, 2.0, 4.0):
            for records in (3, 5, 8, 12):
                right = np.mean([accuracy(split, z, epsilon, step, records) for split, z in splits for _ in range(2)])
                print(f"epsilon {epsilon:<4g} step {step:<4g} records a direction {records:<3} {100 * right:.1f}")


if __name__ == "__main__":
    main()
