"""Chest X-rays: teachers that are networks, one protected unit per patient, a student that may be published.

    python examples/chest_xrays.py                        # scikit-learn's digits 3 and 8 in the place of X-rays
    python examples/chest_xrays.py pneumoniamnist.npz     # MedMNIST's file: train is private, val public, test the test

Two images of one patient lie with the same teacher, and both count as one change: the guarantee is for patients.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

from pate_torch import PATE
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.teachers.recipe import TeacherRecipe


def stand_in() -> dict[str, np.ndarray]:
    """Two kinds of small grey images, as MedMNIST names its parts: 7 of 10 private, 2 public, 1 to test."""
    images, kind = load_digits(return_X_y=True)
    chosen = np.isin(kind, (3, 8))
    x, y = np.rint(images[chosen] * 255 / 16).astype(np.uint8).reshape(-1, 8, 8), (kind[chosen] == 8).astype(int)
    part = np.arange(len(x)) % 10
    parts = {"train": part < 7, "val": (part == 7) | (part == 8), "test": part == 9}
    return {
        f"{name}_{what}": value[here] for name, here in parts.items() for what, value in (("images", x), ("labels", y))
    }


name, data = ("xrays", np.load(sys.argv[1])) if len(sys.argv) > 1 else ("scans", stand_in())
x, y = {}, {}
for part in ("train", "val", "test"):
    x[part], y[part] = data[f"{part}_images"][:, None], data[f"{part}_labels"].astype(int).ravel()
patient = np.arange(len(x["train"])) // 2  # here any two neighbors; yours come from a column

scans = PATE(
    name,  # the account
    classes=["normal", "pneumonia"],
    num_teachers=20,
    mechanism=GNMax(sigma=5.0),  # votes
    delta=1e-4,
    budget_epsilon=10.0,  # the cap on all releases from these patients, fixed when the account opens
    teacher=TeacherRecipe(network="logistic", steps=100, batch_size=8, learning_rate=0.02),
    unit="group:patient",
)
scans.fit_teachers(x["train"], y["train"], unit_id=patient)
labels = scans.label(
    x["val"], num_queries=min(25, len(x["val"]))
)  # charged, then drawn; the labels of val are not looked at
scans.fit_student("supervised", network="logistic", steps=200, augment=None)

report = scans.report(x["test"], y["test"])
print(report.claim.format_with_terms(report.claim.epsilon))
print(
    f"{report.record.queries_answered} questions to {report.record.num_teachers} teachers; the student:",
    report.accuracies[0].share,
)
print("may be published:", scans.folder)
