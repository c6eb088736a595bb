"""Votes from elsewhere: sixty practices train what they like; only their votes come here, and only noisy labels leave.

Each practice fits any scikit-learn model to its own patients and says what it would answer for 300 public points. The
file of those answers is all that this package sees. Whoever runs it sees raw votes, and must be trusted with them.
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

from pate_torch.cli.label import main as label

x, y = load_digits(return_X_y=True)  # in the place of the practices' records
public, private = np.arange(300), np.arange(300, len(x))
models = (
    lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)),
    lambda: RandomForestClassifier(20, random_state=0),
    lambda: GaussianNB(var_smoothing=0.1),
)

votes_KP = []  # [practices, public points]
for practice in range(60):
    own = private[private % 60 == practice]  # every patient is with one practice: the guarantee rests on it
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
    if label([f"votes={file}", *settings]) != 0:  # charged to the account "practices" of the ledger
        raise SystemExit(2)

(release,) = set(Path(os.environ.get("PATE_HOME") or "outputs").glob("runs/practices/*/*/release")) - before
query_Q, label_Q = np.loadtxt(release / "labels.csv", delimiter=",", skiprows=1, usecols=(0, 1), dtype=int, unpack=True)
student = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(x[query_Q], label_Q)
rest = np.setdiff1d(public, query_Q)
right, learnt = (label_Q == y[query_Q]).mean(), student.score(x[rest], y[rest])
print(f"{right:.0%} of the labels are right, and a model of them on {learnt:.0%} of {len(rest)} other public points")
print("may be published:", release)
