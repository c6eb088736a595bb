"""Votes from elsewhere: sixty medical practices train their own models, and only noisy labels are released.

Each practice trains a scikit-learn model on its patients and predicts 300 public points. This package reads only the
file of these predictions. The person who runs it sees the raw votes, and must be trusted with them.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pate_torch.cli.main import main as pate

x, y = load_digits(return_X_y=True)  # instead of records of the practices
public, private = np.arange(300), np.arange(300, len(x))
models = (
    lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
    lambda: RandomForestClassifier(20, random_state=0),
    lambda: GaussianNB(var_smoothing=0.1),
)

votes_KP = []  # [practices, public points]
for practice in range(60):
    own = private[private % 60 == practice]  # the guarantee assumes that every patient belongs to one practice
    model = models[practice % 3]().fit(x[own], y[own])
    votes_KP.append(model.predict(x[public]))

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "votes.npy"
    np.save(file, np.array(votes_KP))
    before = set(Path(os.environ.get("PATE_HOME") or "outputs").glob("runs/practices/*/*/release"))
    settings = [
        "num_classes=10",
        "dataset.name=practices",
        "mechanism.sigma=12",
        "num_queries=60",
        "privacy.delta=1e-5",
    ]
    if pate(["label", f"votes={file}", *settings]) != 0:  # charged to the account "practices" of the ledger
        raise SystemExit(2)

(release,) = set(Path(os.environ.get("PATE_HOME") or "outputs").glob("runs/practices/*/*/release")) - before
query_Q, label_Q = np.loadtxt(release / "labels.csv", delimiter=",", skiprows=1, usecols=(0, 1), dtype=int, unpack=True)
student = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(x[query_Q], label_Q)
rest = np.setdiff1d(public, query_Q)
label_accuracy, accuracy = (label_Q == y[query_Q]).mean(), student.score(x[rest], y[rest])
print(f"accuracy of the labels: {label_accuracy:.0%}; of a model on {len(rest)} other public points: {accuracy:.0%}")
print("may be published:", release)
