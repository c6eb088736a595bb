# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A synthetic table of tumors
#
# A clinic has measured tumors and may not show the measurements. A course on statistics asks for a table to practice
# on. The clinic gives the course a **synthetic table**: rows that describe no real person, drawn from noisy counts of
# the private rows.
#
# The data set breast cancer of scikit-learn stands in for the records of the clinic. A quarter of its rows are a public
# test set. An eighth are public rows, which only the classifier at the end needs.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pate_torch import PATEClassifier, TabularSynthesizer

x, y = load_breast_cancer(return_X_y=True, as_frame=True)
tumors = x.assign(diagnosis=np.where(y == 1, "benign", "malignant"))
place = np.arange(len(tumors))
test, public = tumors[place % 4 == 3], tumors[place % 8 == 2]
private = tumors[(place % 4 != 3) & (place % 8 != 2)]
print(f"{len(private)} private rows, {len(public)} public rows, {len(test)} public test rows")

# %% [markdown]
# ## The schema
#
# The schema names the columns, and what values they can have. It is published with the table, so write it from general
# knowledge, never from the private rows: a maximum of the private rows would reveal one of them. A value outside the
# limits is counted in the nearest bin. Columns that the schema does not name are ignored.
#
# There are few rows. So the schema names five measurements of thirty, with six bins each.

# %%
limits = {
    "mean radius": (5, 30),
    "mean texture": (5, 40),
    "mean smoothness": (0.05, 0.17),
    "mean concavity": (0, 0.45),
    "mean symmetry": (0.1, 0.3),
}
columns = {name: {"type": "real", "low": low, "high": high, "bins": 6} for name, (low, high) in limits.items()}
columns["diagnosis"] = {"type": "category", "values": ["benign", "malignant"]}
schema = {"target": "diagnosis", "columns": columns}

# %% [markdown]
# ## Fit
#
# `fit` charges the account and counts the rows with noise. `sample` draws as many rows as there are private rows
# according to the noisy counts.

# %%
synthesizer = TabularSynthesizer(epsilon=1, account="tumors", schema=schema)
synthesizer.fit(private)
synthetic = synthesizer.sample()
synthetic.head()

# %% [markdown]
# Empty cells, and values that the schema does not list ("other"), are possible in any table. Their counts receive noise
# like all others. So some synthetic rows have them although no private row does, the more the fewer rows there are.

# %%
synthetic.diagnosis.value_counts(dropna=False)

# %% [markdown]
# ## Single columns
#
# The public test rows show how similar the synthetic rows are. A comparison with private rows would be a release that
# no epsilon covers.

# %%
figure, axes = plt.subplots(2, 3, figsize=(9, 4.5))
for axis, name in zip(axes.flat, limits, strict=False):
    bins = np.linspace(*limits[name], 7)
    for rows, label in ((synthetic, "synthetic"), (test, "public test rows")):
        values = rows[name].dropna().clip(*limits[name])
        axis.hist(values, bins, weights=np.full(len(values), 1 / len(values)), alpha=0.5, label=label)
    axis.set_title(name, fontsize=10)
axes[0, 0].set_ylabel("share of the rows")
axes[1, 2].axis("off")
axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", frameon=False)
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Associations
#
# `fit` counts tables of the target with one, two or three other columns. The noisy number of units decides how many:
# the more columns a table has, the more rows it needs. 350 rows bear at most two other columns here. Associations are
# weaker than they should be where the noise is as large as the counts.

# %%
is_whole = synthetic.diagnosis.isin(["benign", "malignant"])
figure, axes = plt.subplots(1, 2, figsize=(9, 4))
for axis, rows, title in ((axes[0], synthetic[is_whole].dropna(), "synthetic"), (axes[1], test, "public test rows")):
    values = rows[list(limits)].assign(malignant=rows.diagnosis == "malignant").corr()
    axis.imshow(values, vmin=-1, vmax=1, cmap="RdBu_r")
    for (row, column), value in np.ndenumerate(values):
        axis.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(values)), values.columns, rotation=90)
    axis.set_yticks(range(len(values)), values.columns if axis is axes[0] else [])
    axis.set_title(f"correlations, {title}", fontsize=10)
plt.tight_layout()
plt.show()
most = max(len(clique) for clique in synthesizer.model_.tables.counts) - 1
print(f"tables of the diagnosis with up to {most} other columns")

# %% [markdown]
# ## Train on synthetic rows, test on public rows
#
# Any learner can be trained on the synthetic rows, at no further privacy cost. Rows with empty cells are left out here.

# %%
complete = synthetic[is_whole].dropna()
learner = make_pipeline(StandardScaler(), LogisticRegression())
learner.fit(complete[list(limits)], complete.diagnosis)
print(f"most frequent diagnosis        {test.diagnosis.value_counts(normalize=True).max():.3f}")
print(f"trained on synthetic rows      {learner.score(test[list(limits)], test.diagnosis):.3f}")

# %% [markdown]
# If you want a classifier, release a classifier: with few rows it is often more accurate at the same epsilon, and it
# can use all thirty columns. Both releases together cost more than each of them: the account adds them up, and the
# second fit needs `allow_refit=True`.

# %%
for names in (list(limits), list(x.columns)):
    clf = PATEClassifier(epsilon=1, account="tumors", classes=["benign", "malignant"], allow_refit=True, verbose=False)
    clf.fit(private[names], private.diagnosis, public=public[names])
    print(f"PATEClassifier, {len(names):>2} columns     {clf.score(test[names], test.diagnosis):.3f}")
print(f"the account has spent epsilon {clf.total_.epsilon:.2f} in three releases (delta 1e-5, unit record)")

# %% [markdown]
# ## Publish
#
# `save_release` copies what may be published: `synthetic.csv`, the model from which more rows can be drawn, the privacy
# statement, and a report with the distributions and the associations. With `evaluation=`, public test rows, the report
# also shows how useful the rows are for the prediction of the target.

# %%
folder = synthesizer.save_release("tumors", evaluation=test)
print(*sorted(file.name for file in folder.iterdir()))
print(pd.read_csv(folder / "synthetic.csv").shape)
print(json.loads((folder / "privacy.json").read_text())["headline"])

# %% [markdown]
# Everybody can recompute the claims, with code that shares nothing with the code that made them.

# %%
# !pate verify tumors

# %% [markdown]
# ## When not to use this
#
# - You want a classifier: `PATEClassifier` above.
# - Your records are texts, or one person has a series of measurements over time: each unit is counted by one row.
# - You have fewer rows, or many more columns for so few rows. If no table has more signal than noise, the fit stops,
#   and only the number of units is charged.
# - Single rare values matter: a share that is smaller than its noise says nothing.
#
# [The guide to synthetic tables](../docs/howto/synthetic.md) has the command line, and accuracies on larger tables.
