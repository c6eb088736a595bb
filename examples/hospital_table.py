"""A table of patients: a classifier that may be published, and a check of its claims.

The table is scikit-learn's breast cancer data, which is public (569 patients with 30 measurements of a biopsy). In this
example, every other patient is private, and the others are volunteers whose records are public.
"""

from pathlib import Path

import pandas as pd
from sklearn.datasets import load_breast_cancer

from pate_torch import PATEClassifier
from pate_torch.cli.main import main as pate

table, ill = load_breast_cancer(return_X_y=True, as_frame=True)
diagnosis = ill.map({0: "malignant", 1: "benign"})
private, public, test = slice(0, None, 2), slice(1, None, 4), slice(3, None, 4)

clf = PATEClassifier(
    epsilon=2.0,  # cost of the released model
    account="biopsies",  # every release from these patients is charged to this account
    classes=["benign", "malignant"],  # declared, not read off the private labels
    allow_refit=True,  # a second run of this file is a second release, which is charged
)
clf.fit(table[private], diagnosis[private], public=table[public])

accuracy, baseline = clf.score(table[test], diagnosis[test]), (diagnosis[test] == "benign").mean()
print(f"accuracy on test patients: {accuracy:.1%} (always benign: {baseline:.1%})")
print(clf.privacy_["headline"])
print(pd.DataFrame(clf.predict_proba(table[test][:3]), columns=clf.classes_).round(2))

release = Path(clf.release_)  # this folder may be published: model, report, statement
raise SystemExit(pate(["verify", str(release), "--ledger"]))
