# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A table with public rows
#
# A clinic wants to publish a model that predicts from a few measurements whether a patient will be readmitted. The
# patients of this notebook are drawn by the next cell. Replace them by your own table.

# %%
import subprocess
import sys
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pate_torch import PATEClassifier, ReleasedClassifier

random = np.random.default_rng(0)


def draw_patients(count: int) -> pd.DataFrame:
    """Draw invented patients. A tenth of the blood sugar values is missing."""
    age, sugar = random.normal(60, 15, count).round(), random.normal(100, 25, count).round()
    ward = random.choice(["surgery", "cardiology", "general"], count, p=[0.3, 0.3, 0.4])
    risk = (age - 60) / 15 + (sugar - 100) / 25 + (ward == "cardiology") + random.normal(0, 1, count)
    sugar[random.random(count) < 0.1] = np.nan
    return pd.DataFrame({"age": age, "sugar": sugar, "ward": ward, "readmitted": np.where(risk > 0.8, "yes", "no")})


private, public, test = draw_patients(3000), draw_patients(400), draw_patients(1000)
X, y = private.drop(columns="readmitted"), private["readmitted"]
P = public.drop(columns="readmitted")  # public points need no labels
private.head()

# %% [markdown]
# ## Fit
#
# `epsilon` bounds what the model reveals about any one patient. `account` names these records in the ledger:
# everything ever released from them is added up there. The classes are declared, because a class that one patient
# alone has would reveal this patient.

# %%
clf = PATEClassifier(epsilon=1, account="clinic", classes=["no", "yes"])
clf.fit(X, y, public=P)

# %% [markdown]
# The lines say what the method is and how much noise each sum receives, and then what noisy counts of the classes
# forecast. The charge comes last, with the total of the account and its cap. An epsilon always stands with its terms:
# delta, the neighbors (a patient more or less), the privacy unit (a record) and the accountant.
#
# ## How good is it?

# %%
features, truth = test.drop(columns="readmitted"), test["readmitted"]
numbers = make_pipeline(SimpleImputer(), StandardScaler())
columns = make_column_transformer((numbers, ["age", "sugar"]), (OneHotEncoder(), ["ward"]))
plain = make_pipeline(columns, LogisticRegression()).fit(X, y)
print(f"most frequent class     {truth.value_counts(normalize=True).max():.3f}")
print(f"epsilon 1               {clf.score(features, truth):.3f}")
print(f"without privacy         {plain.score(features, truth):.3f}")

# %% [markdown]
# ## Publish, check, use
#
# `save_release` copies the folder that may be published. The test patients here are public, so their accuracy may be
# published, too. `pate verify readmission` recomputes every claim with separate code.

# %%
clf.save_release("readmission", evaluation=(features, truth))
verify = [sys.executable, "-m", "pate_torch", "verify", "readmission"]
print(subprocess.run(verify, capture_output=True, text=True).stdout)

# %% [markdown]
# The receiver needs the folder only. `ReleasedClassifier` is a scikit-learn classifier:

# %%
model = ReleasedClassifier.load("readmission")
model.predict_proba(pd.DataFrame({"age": [81, 35], "sugar": [130, np.nan], "ward": ["cardiology", "general"]})).round(2)

# %% [markdown]
# ## A second fit is charged
#
# A second fit of the same records needs `allow_refit=True`, because the account pays again.

# %%
again = PATEClassifier(epsilon=0.5, account="clinic", classes=["no", "yes"], allow_refit=True, verbose=False)
again.fit(X, y, public=P)
print(f"this release: {again.privacy_['headline']}")
print(f"the account:  epsilon {again.total_.epsilon:.3f}")

# %% [markdown]
# ## Which epsilon?
#
# Never choose epsilon by trying several on the private records: each try is charged, and the choice itself reveals
# something. This plot uses other invented patients of the same kind, as a public stand-in.

# %%
stand_in = draw_patients(3000)
epsilons, scores = (0.1, 0.3, 1, 3), []
for epsilon in epsilons:
    options = {
        "account": f"stand-in-{epsilon}",
        "allow_duplicate_account": True,
        "spend_anyway": True,
        "verbose": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a second account of the same records is meant here
        tried = PATEClassifier(epsilon=epsilon, classes=["no", "yes"], **options)
        tried.fit(stand_in.drop(columns="readmitted"), stand_in["readmitted"], public=P)
    scores.append(tried.score(features, truth))
plt.figure(figsize=(5, 3))
plt.semilogx(epsilons, scores, "o-", label="PATEClassifier")
plt.axhline(plain.score(features, truth), linestyle="--", color="gray", label="without privacy")
plt.xlabel("epsilon (delta 1e-5, add_remove, unit record, gdp)")
plt.ylabel("test accuracy")
plt.legend(frameon=False)
plt.tight_layout()
plt.show()

# %% [markdown]
# ## When not to use this
#
# - Several rows belong to one patient: pass `groups=` with the patient of each row. Otherwise one row is protected,
#   not a patient.
# - Nothing public resembles the records: see [a table without public rows](no_public_rows.ipynb).
# - The records are fewer than some hundreds: the fit stops, or the model is no better than the most frequent class.
#
# [All options](../docs/howto/classifier.md), [what a bad public pool costs](../docs/howto/public-pool.md).
