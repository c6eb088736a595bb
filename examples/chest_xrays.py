"""Chest X-rays: networks as teachers, patients as privacy units, and a student that may be published.

    python examples/chest_xrays.py                        # scikit-learn's digits 3 and 8 instead of X-rays
    python examples/chest_xrays.py pneumoniamnist.npz     # file of MedMNIST: train is private, val is public

Both images of a patient belong to the same teacher and change together, so the guarantee holds for patients.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

from pate_torch import PATE
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.teachers.recipe import TeacherRecipe


def load_substitute() -> dict[str, np.ndarray]:
    """Load gray images of two classes, in parts that are named as in MedMNIST: 70 % private, 20 % public, 10 % test."""
    images, kind = load_digits(return_X_y=True)
    chosen = np.isin(kind, (3, 8))
    x, y = np.rint(images[chosen] * 255 / 16).astype(np.uint8).reshape(-1, 8, 8), (kind[chosen] == 8).astype(int)
    part = np.arange(len(x)) % 10
    parts = {"train": part < 7, "val": (part == 7) | (part == 8), "test": part == 9}
    return {
        f"{name}_{what}": value[here] for name, here in parts.items() for what, value in (("images", x), ("labels", y))
    }


name, data = ("xrays", np.load(sys.argv[1])) if len(sys.argv) > 1 else ("scans", load_substitute())
x, y = {}, {}
for part in ("train", "val", "test"):
    x[part], y[part] = data[f"{part}_images"][:, None], data[f"{part}_labels"].astype(int).ravel()
patient = np.arange(len(x["train"])) // 2  # here two consecutive images; use your column of patients

scans = PATE(
    name,  # account
    classes=["normal", "pneumonia"],
    num_teachers=20,
    mechanism=GNMax(sigma=5.0),  # votes
    delta=1e-4,
    budget_epsilon=10.0,  # cap on all releases from these patients, fixed when the account opens
    teacher=TeacherRecipe(network="logistic", steps=100, batch_size=8, learning_rate=0.02),
    unit="group:patient",
)
scans.fit_teachers(x["train"], y["train"], unit_id=patient, public_x=x["val"])
scans.label(x["val"], num_queries=min(25, len(x["val"])))  # charged, then drawn; the labels of val are not used
scans.fit_student("supervised", network="logistic", steps=200, augment=None)

report = scans.report(x["test"], y["test"])
print(report.claim.format_with_terms(report.claim.epsilon))
print(
    f"{report.record.queries_answered} queries to {report.record.num_teachers} teachers; accuracy of the student:",
    report.accuracies[0].share,
)
print("may be published:", scans.folder)
