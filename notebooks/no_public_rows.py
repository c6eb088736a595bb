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
# A lab has a table of private measurements and nothing public. It can give up a small part of its records: these
# become public with all their values, and no epsilon covers them. The other records are protected. The data are
# scikit-learn's breast tumors.

# %%
import warnings

import matplotlib.pyplot as plt
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from pate_torch import PATEClassifier, split_public

x, y = load_breast_cancer(return_X_y=True, as_frame=True)
x, test, y, truth = train_test_split(x, y, test_size=150, random_state=0)
print(f"{len(x)} records")

# %% [markdown]
# ## What does not work
#
# Private rows are no public rows. `fit` notices and refuses before it charges anything.

# %%
clf = PATEClassifier(epsilon=1, account="lab", classes=[0, 1])
try:
    clf.fit(x, y, public=x)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Consent
#
# `split_public` takes out about a tenth of the records, if you agree in the call that they may be published.

# %%
try:
    split_public(x, y, share=0.1)
except ValueError as error:
    print(error)

# %%
private, public, labels, public_labels = split_public(x, y, share=0.1, publish_split=True)
print(f"{len(private)} records stay private, {len(public)} become public")

# %% [markdown]
# A keyed hash of each record decides which ones become public. So the same call gives up the same records, also after
# others were added or removed. With several rows of a person, pass `groups=`: whole persons are given up.
#
# ## Fit

# %%
clf.fit(private, labels, public=public)

# %%
print(f"accuracy {clf.score(test, truth):.3f}; most frequent class {truth.value_counts(normalize=True).max():.3f}")
print(clf.privacy_["headline"])

# %% [markdown]
# The statement of the release says that a part of the owner's records became public.
#
# ## How many to give up?
#
# Decide before you look at private results, or try it on other data of the same kind. Here the same tumors play this
# part, with accounts that are thrown away.

# %%
shares, scores = (0.03, 0.05, 0.1, 0.2, 0.4), []
for share in shares:
    part, given, part_labels, _ = split_public(x, y, share=share, publish_split=True)
    options = {"allow_duplicate_account": True, "spend_anyway": True, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a second account of the same records is meant here
        tried = PATEClassifier(epsilon=1, account=f"stand-in-{share}", classes=[0, 1], **options)
        scores.append(tried.fit(part, part_labels, public=given).score(test, truth))
plt.figure(figsize=(5, 3))
plt.plot(shares, scores, "o-")
plt.xlabel("share of the records that become public")
plt.ylabel("test accuracy at epsilon 1")
plt.tight_layout()
plt.show()

# %% [markdown]
# One fit each, so the points move with the noise.
#
# ## When not to use this
#
# - Nobody may be given up, not even with consent of a few: then train with DP-SGD, which needs no public points.
# - Public data of the same kind exist elsewhere: they cost nobody's privacy. [How similar they must
#   be](../docs/howto/public-pool.md).
