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
# A clinic wants to publish a model that predicts readmissions, without revealing any patient. The next cell invents the
# patients: one row each, with numbers, a category and missing values. Replace them by your own table.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pate_torch import PATEClassifier

random = np.random.default_rng(0)


def draw_patients(count: int) -> tuple[pd.DataFrame, pd.Series]:
    """Invent patients and their classes. A tenth of the blood sugar values is missing."""
    age, sugar = random.normal(60, 15, count).round(), random.normal(100, 25, count).round()
    ward = random.choice(["surgery", "cardiology", "general"], count, p=[0.3, 0.3, 0.4])
    risk = (age - 60) / 15 + (sugar - 100) / 25 + (ward == "cardiology") + random.normal(0, 1, count)
    sugar[random.random(count) < 0.1] = np.nan
    return pd.DataFrame({"age": age, "sugar": sugar, "ward": ward}), pd.Series(np.where(risk > 0.8, "yes", "no"))


X, y = draw_patients(3000)  # private
P, _ = draw_patients(400)  # public points need no classes
X_test, y_test = draw_patients(1000)  # public
X.head()

# %% [markdown]
# The **private records** `X` and `y` are protected. The **public points** `P` are rows of the same form that anybody
# may see, for example of patients who agreed. Columns, categories and scales are read off `P` alone.
#
# ## Fit
#
# `epsilon` bounds what the model reveals about any one patient. `account` names the data set in the ledger, which adds
# up everything that is ever released from it. All classes are declared, because a class of a single patient would
# reveal this patient.

# %%
clf = PATEClassifier(epsilon=1, account="clinic", classes=["no", "yes"])
clf.fit(X, y, public=P)

# %% [markdown]
# Line by line:
#
# - **`PATEClassifier, epsilon 1 ...`**: the privacy cost with its terms, and the method. The terms are delta, the
#   neighbors (`add_remove`: a patient more or less) and the privacy unit (a record, here one patient).
# - **`Standard deviation of the noise ...`**: training adds up one gradient per patient, clipped to length 1. Noise of
#   standard deviation 10.8 hides each gradient in the sum. The patients of each class are counted with noise, too.
# - **`Forecast ...`**, from these noisy counts alone: 0 % is a model that only knows how frequent each class is, and
#   100 % a perfect model. If no skill is expected, the fit stops, and only the counts are charged.
# - **`charged 1.000 ...`**: the entry in the ledger. An account ends at its cap (`cap=`, by default 10). The total
#   holds for releases that were planned in advance. If you chose one after you saw another, only the cap holds.
#
# The noise is secret and new in every run, so your numbers differ.
#
# ## How good is the model?

# %%
numbers = make_pipeline(SimpleImputer(), StandardScaler())
columns = make_column_transformer((numbers, ["age", "sugar"]), (OneHotEncoder(), ["ward"]))
without_privacy = make_pipeline(columns, LogisticRegression()).fit(X, y)
print(f"most frequent class  {y_test.value_counts(normalize=True).max():.3f}")
print(f"epsilon 1            {clf.score(X_test, y_test):.3f}")
print(f"without privacy      {without_privacy.score(X_test, y_test):.3f}")

# %% [markdown]
# ## Publish and check
#
# `save_release` copies the folder that may be published. The test patients are public, so their accuracy may be part of
# it. Anybody can check the folder with `pate verify`, which recomputes all claims with separate code.

# %%
folder = clf.save_release("readmission", evaluation=(X_test, y_test))
print(*sorted(file.name for file in folder.iterdir()), sep="\n")

# %% language="bash"
# pate verify readmission

# %% [markdown]
# The lines down to `mechanism` compare the files with each other. `guarantee`, `part` and `account` compute each
# epsilon anew from the noise. Other charges are in your ledger alone, so only you can add `--ledger`.
#
# ## Use it elsewhere
#
# The receiver needs the folder and `ReleasedClassifier`, a scikit-learn classifier. The next cell runs a process of its
# own.

# %% language="bash"
# python - <<'END'
# import pandas
# from pate_torch import ReleasedClassifier
#
# new = pandas.DataFrame({"age": [81, 35], "sugar": [130, None], "ward": ["cardiology", "general"]})
# model = ReleasedClassifier.load("readmission")
# print(model.classes_, model.predict_proba(new).round(2).tolist())
# END

# %% [markdown]
# ## A second fit is charged
#
# The account pays again, so a second fit needs `allow_refit=True`.

# %%
again = PATEClassifier(epsilon=0.5, account="clinic", classes=["no", "yes"], allow_refit=True, verbose=False)
again.fit(X, y, public=P)
print(f"this release: epsilon {again.epsilon}; the account: epsilon {again.total_.epsilon:.3f}")

# %% [markdown]
# The total is below 1.5, because the noise of both releases is composed exactly.
#
# ## Which epsilon?
#
# Do not try several epsilons on the private records: each try is charged, and the choice itself reveals something. This
# plot uses other invented patients as a public stand-in, with an account for each fit that is thrown away.

# %%
stand_in_X, stand_in_y = draw_patients(3000)
epsilons, scores = (0.01, 0.03, 0.1, 0.3, 1), []
options = {"classes": ["no", "yes"], "allow_duplicate_account": True, "spend_anyway": True, "verbose": False}
warnings.simplefilter("ignore")  # several accounts of the same records are meant here
for epsilon in epsilons:
    fits = [PATEClassifier(epsilon=epsilon, account=f"stand-in-{epsilon}-{i}", **options) for i in range(3)]
    scores.append([fit.fit(stand_in_X, stand_in_y, public=P).score(X_test, y_test) for fit in fits])
plt.figure(figsize=(5, 3))
plt.semilogx(epsilons, scores, "o", color="C0", alpha=0.5)
plt.semilogx(epsilons, np.mean(scores, axis=1), color="C0", label="PATEClassifier, mean of three fits")
plt.axhline(without_privacy.score(X_test, y_test), linestyle="--", color="gray", label="without privacy")
plt.axhline(y_test.value_counts(normalize=True).max(), linestyle=":", color="gray", label="most frequent class")
plt.xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
plt.xlabel("epsilon (delta 1e-5, add_remove, unit record, gdp)")
plt.ylabel("test accuracy")
plt.legend(frameon=False)
plt.tight_layout()
plt.show()

# %% [markdown]
# These patients have three columns and two classes, so that a small epsilon is enough. More columns, more classes or
# fewer records need more.
#
# ## When not to use this
#
# - Several rows belong to one patient: pass `groups=` with the patient of each row. Otherwise one row is protected, and
#   not a patient.
# - Nothing public resembles the records: see [a table without public rows](no_public_rows.ipynb).
# - There are fewer than about a hundred records: at epsilon 1 the fit often stops without a model.
#
# Next: [all options](../docs/howto/classifier.md), [what a bad public pool costs](../docs/howto/public-pool.md).
