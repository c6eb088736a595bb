# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A table without public rows
#
# A clinic has private visits and nothing public. It can give up a small part of its patients: their visits become
# public with all values, and no epsilon covers them. The other patients are protected. The next cell invents the
# visits, several per patient.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from pate_torch import PATEClassifier, split_public

random = np.random.default_rng(0)


def draw_visits(num_patients: int) -> tuple[pd.DataFrame, pd.Series, pd.Series]:
    """Invent visits, their diagnoses and their patients. Values of one patient are similar."""
    patient = np.repeat(np.arange(num_patients), random.integers(1, 4, num_patients))
    visits = {}
    for name, mean, spread in (("pulse", 75, 10), ("temperature", 37.5, 0.8), ("pain", 4, 2)):
        usual = random.normal(mean, spread, num_patients)
        visits[name] = (usual[patient] + random.normal(0, spread / 2, len(patient))).round(1)
    risk = (visits["pulse"] - 75) / 10 + (visits["temperature"] - 37.5) / 0.8 + random.normal(0, 1, len(patient))
    return pd.DataFrame(visits), pd.Series(np.where(risk > 0.5, "flu", "other")), pd.Series(patient, name="patient")


X, y, patient = draw_visits(2000)
X_test, y_test, _ = draw_visits(500)
print(f"{len(X)} visits of {patient.nunique()} patients")

# %% [markdown]
# ## What is refused
#
# Private rows are no public rows. `fit` notices this and refuses before it charges anything.

# %%
clf = PATEClassifier(epsilon=1, account="visits", classes=["flu", "other"])
try:
    clf.fit(X, y, public=X, groups=patient)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Consent
#
# `split_public` takes patients out only if the owner agrees in the call.

# %%
try:
    split_public(X, y, patient, groups=patient, share=0.1)
except ValueError as error:
    print(error)

# %%
parts = split_public(X, y, patient, groups=patient, share=0.1, publish_split=True)
private, public, labels, public_labels, private_patient, public_patient = parts
print(f"{private_patient.nunique()} patients stay private, {public_patient.nunique()} become public")
print(f"patients on both sides: {len(set(private_patient) & set(public_patient))}")
public.assign(diagnosis=public_labels).head(3)

# %% [markdown]
# Everybody may see these rows from now on. The **unit** that is given up is the unit that is protected: with `groups=`
# all visits of a patient, without it single rows. A keyed hash of the patient's own name decides. So the same call
# gives up the same patients, also after others were added or removed. Do not try other values of `random_state`,
# because each would make other patients public.
#
# ## Fit

# %%
clf.fit(private, labels, public=public, groups=private_patient)
print(f"most frequent class  {y_test.value_counts(normalize=True).max():.3f}")
print(f"epsilon 1            {clf.score(X_test, y_test):.3f}")

# %% [markdown]
# ## What is lost
#
# The patients that were given up lose all protection. What the model loses depends on the share: a small share shows
# little of the columns, and a large share leaves few private records. Decide before you look at private results. This
# plot uses other invented patients as a stand-in, with an account for each fit that is thrown away.

# %%
stand_in = draw_visits(2000)
shares, scores = (0.005, 0.02, 0.1, 0.5, 0.9), []
options = {"classes": ["flu", "other"], "allow_duplicate_account": True, "spend_anyway": True, "verbose": False}
warnings.simplefilter("ignore")  # several accounts of the same records are meant here
for share in shares:
    kept, given, kept_y, _, unit, _ = split_public(*stand_in, groups=stand_in[2], share=share, publish_split=True)
    fits = [PATEClassifier(epsilon=1, account=f"stand-in-{share}-{i}", **options) for i in range(3)]
    scores.append([fit.fit(kept, kept_y, public=given, groups=unit).score(X_test, y_test) for fit in fits])
plt.figure(figsize=(5, 3))
plt.semilogx(shares, scores, "o", color="C0", alpha=0.5)
plt.semilogx(shares, np.mean(scores, axis=1), color="C0", label="mean of three fits")
plt.axhline(y_test.value_counts(normalize=True).max(), linestyle=":", color="gray", label="most frequent class")
plt.xticks(shares, [f"{100 * share:g} %" for share in shares])
plt.xlabel("patients who become public")
plt.ylabel("test accuracy at epsilon 1")
plt.legend(frameon=False)
plt.tight_layout()
plt.show()

# %% [markdown]
# Here ten patients are as useful as two hundred. A table with rare categories needs more, because the model does not
# learn from a category that no public row shows.
#
# ## When not to use this
#
# - No patient may be given up: train with DP-SGD, for example with [Opacus](../docs/howto/libraries.md), which needs no
#   public points.
# - Similar public data exist elsewhere: they cost nobody's privacy. [How similar they must
#   be](../docs/howto/public-pool.md).
