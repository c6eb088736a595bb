"""A table of patients: a classifier that may be published, and a check of what it claims.

The table is scikit-learn's breast cancer data (569 patients, 30 measurements of a biopsy each): public, and here for
yours. Every other patient is taken to be private here, the rest to be volunteers whose records are public.
"""

from pathlib import Path

import pandas as pd
from sklearn.datasets import load_breast_cancer

from pate_torch import PATEClassifier
from pate_torch.verify.command import main as verify

table, ill = load_breast_cancer(return_X_y=True, as_frame=True)
diagnosis = ill.map({0: "malignant", 1: "benign"})
private, public, test = slice(0, None, 2), slice(1, None, 4), slice(3, None, 4)

clf = PATEClassifier(
    epsilon=2.0,  # what the released model costs in all
    account="biopsies",  # everything released from these patients is charged to this name
    num_records_about=300,  # public knowledge; it decides delta, too
    classes=["benign", "malignant"],  # declared, not read off the private labels
    allow_refit=True,  # run this file twice, and the second release is charged, too
)
clf.fit(table[private], diagnosis[private], public=table[public])

right, always = clf.score(table[test], diagnosis[test]), (diagnosis[test] == "benign").mean()
print(f"right on {right:.1%} of the test patients ({always:.1%} by always saying benign)")
print(clf.privacy_["headline"])
print(pd.DataFrame(clf.predict_proba(table[test][:3]), columns=clf.classes_).round(2))

release = Path(clf.release_)  # this folder may be published: model, report, statement
raise SystemExit(verify([str(release), "--ledger", str(release.parents[4] / "ledger.sqlite")]))
