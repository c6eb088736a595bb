"""PATE 2017 and PATE 2018 on MNIST: votes of 250 teachers under the published mechanisms, and their epsilons.

    PYTHONPATH=. python benchmarks/replications/papernot2018.py --data-root data

The papers trained convolutional networks; these teachers are perceptrons, so that the run takes minutes on two cores.
MNIST is public and stands for private data: epsilons that follow from votes are private otherwise. Writes
benchmarks/results/papernot2018.csv.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch

from pate_torch.accounting import ConfidentCost, GaussianNoisyMaxCost, LaplaceNoisyMaxCost, compute_epsilon
from pate_torch.accounting.data_dependent import compute_data_dependent_epsilon
from pate_torch.core.executors import Workers
from pate_torch.data.benchmark import Mnist
from pate_torch.privacy.partition import AddRemove
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train

TEACHERS, DELTA, DRAWS = 250, 1e-5, 100
PRINTED = {
    "PATE 2017, 100 queries, Laplace 1/gamma = 20": (2.04, None),
    "PATE 2017, 1000 queries, Laplace 1/gamma = 20": (8.03, None),
    "PATE 2018, Confident GNMax (200, 150, 40)": (1.97, 286),
}
"""Epsilon at delta 1e-5 and number of answers that the papers print for MNIST (2017, Table 2; 2018, Table 1)."""


def count_votes(data_root: str) -> tuple[np.ndarray, np.ndarray]:
    """Train the teachers on the training images; return their votes on the test images [Q, C], and the classes [Q]."""
    data = Mnist(root=data_root).load()
    shards = AddRemove().make_shards(data.private, TEACHERS, seed=0)
    recipe = TeacherRecipe(network="mlp", steps=600, batch_size=32)
    ensemble = train(data.private, data.spec, shards, recipe, seed=0, executor=Workers(workers=2))
    label_KQ = ensemble.predict(data.evaluation.x)
    votes = torch.stack([(label_KQ == label).sum(0) for label in range(10)], 1)
    return votes.numpy(), data.evaluation.y.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-root", default="data")
    votes, truth = count_votes(parser.parse_args().data_root)
    random = np.random.default_rng(0)
    rows = []
    for name, (printed, answers) in PRINTED.items():
        scores = []
        if answers is None:
            count = 100 if "100 " in name else 1000
            cost = LaplaceNoisyMaxCost(scale=20)
            independent = compute_epsilon(cost, count, delta=DELTA)
            for _ in range(DRAWS):
                chosen = random.permutation(len(votes))[:count]
                noisy = votes[chosen] + random.laplace(scale=20, size=(count, 10))
                epsilon = compute_data_dependent_epsilon(votes[chosen], cost, delta=DELTA)
                scores.append((epsilon, count, (noisy.argmax(1) == truth[chosen]).mean()))
        else:
            count = 640
            cost = ConfidentCost(sigma=40, screen_sigma=150, threshold=200)
            independent = compute_epsilon(ConfidentCost(sigma=40, screen_sigma=150), count, delta=DELTA)
            for _ in range(DRAWS):
                chosen = random.permutation(len(votes))[:count]
                passed = votes[chosen].max(1) + random.normal(scale=150, size=count) >= 200
                noisy = votes[chosen][passed] + random.normal(scale=40, size=(passed.sum(), 10))
                epsilon = compute_data_dependent_epsilon(votes[chosen], cost, delta=DELTA)
                scores.append((epsilon, passed.sum(), (noisy.argmax(1) == truth[chosen][passed]).mean()))
        means = np.mean(scores, 0)
        rows.append(
            (name, count, printed, answers or count, *(round(float(value), 4) for value in (*means, independent)))
        )
        print(*rows[-1], sep="; ", flush=True)
    plurality = (votes.argmax(1) == truth).mean()
    print(f"plurality of the teachers without noise: {plurality:.4f}")
    print("286 answers by GNMax (40) alone:", compute_epsilon(GaussianNoisyMaxCost(sigma=40), 286, delta=DELTA))
    file = Path(__file__).parents[1] / "results" / "papernot2018.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        head = ("row", "queries", "epsilon_printed", "answers_printed", "epsilon_of_votes", "answers", "labels_right")
        writer.writerow((*head, "epsilon_whatever_the_votes"))
        writer.writerows(rows)


if __name__ == "__main__":
    main()
