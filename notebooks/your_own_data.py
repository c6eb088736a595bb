# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own data
#
# A clinic has a table with several visits of each patient, and a diagnosis for each visit. The clinic wants to
# publish a classifier. The table in this notebook is synthetic. Replace this table by your own.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression

from pate_torch import PATE, load_student
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.data.tabular import Csv
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.release.statement import format_headline

folder = Path(tempfile.mkdtemp())  # real records need a permanent folder for the ledger
generator = np.random.default_rng(0)


def visits(patients: int, prefix: str) -> pd.DataFrame:
    """Draw one to eight visits for each patient."""
    who = np.repeat(np.arange(patients), generator.integers(1, 9, patients))
    age = generator.normal(50, 15, patients)[who]
    pressure, sugar = generator.normal(120, 20, len(who)), generator.normal(100, 25, len(who))
    risk = (age - 50) / 15 + (pressure - 120) / 20 + (sugar - 100) / 25
    ill = risk + generator.normal(0, 0.5, len(who)) > 0
    columns = {"patient": [f"{prefix}{i}" for i in who], "age": age.round(), "pressure": pressure.round()}
    return pd.DataFrame(columns | {"sugar": sugar.round(), "diagnosis": np.where(ill, "ill", "well")})


visits(1200, "p").to_csv(folder / "patients.csv", index=False)
visits(80, "v").drop(columns="diagnosis").to_csv(folder / "public.csv", index=False)  # volunteers, unlabeled
visits(120, "t").to_csv(folder / "test.csv", index=False)
pd.read_csv(folder / "patients.csv").head()

# %% [markdown]
# ## What is protected?
#
# The most important line is `group="patient"`. Without it, the privacy unit is a *visit*: a patient with eight visits
# could change eight votes, and the reported epsilon would hold for one visit only. With `group="patient"`, all visits
# of a patient belong to the same teacher.
#
# The classes are declared, so no private record determines the classes.

# %%
source = Csv(
    name="clinic",
    path=str(folder / "patients.csv"),
    public_path=str(folder / "public.csv"),
    test_path=str(folder / "test.csv"),
    label="diagnosis",
    group="patient",
    classes=["ill", "well"],
)
clinic = source.load()
private, public, test = clinic.private, clinic.pool, clinic.evaluation
print("unit:", private.unit, "| features:", clinic.spec.input_shape[0], "| public points:", len(public))

# %% [markdown]
# ## Teachers of any kind
#
# PATE works with any kind of teacher. Here each teacher is a logistic regression of scikit-learn, trained on the
# visits of about thirty patients.

# %%
pate = PATE(
    "clinic",
    classes=clinic.spec.class_names,
    num_teachers=40,
    mechanism=GNMax(sigma=7.0),
    delta=1e-5,
    budget_epsilon=8.0,
    home=folder / "home",
    unit=private.unit,
    teacher=LogisticRegression(),
    mean=clinic.spec.mean,  # statistics of the public points
    std=clinic.spec.std,
)
pate.fit_teachers(private.x, private.y, unit_id=private.unit_id)
pate.label(public.x, num_queries=40)
student = pate.fit_student("vat", steps=300)
report = pate.report(test.x, test.y)
print(format_headline(report))
print(f"accuracy of the student on the test visits: {report.evaluation.student_accuracy:.1%}")

# %% [markdown]
# ## More noise or fewer queries?
#
# The noise and the number of queries are public choices, which must be made before anybody looks at the votes. The
# curves need no data, because the mechanism alone determines the cost of a number of queries and a noise scale.
# `ConfidentGNMax` answers only queries on which a noisy check finds that the teachers agree. All other queries cost
# little.

# %%
questions = np.arange(5, 205, 5)
fig, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
frugal = ConfidentGNMax(sigma=7.0, screen_sigma=20.0, threshold=30.0, max_answers=20)
for mechanism, name, style in (
    (GNMax(sigma=5.0), "sigma = 5", "-"),
    (GNMax(sigma=7.0), "sigma = 7", "-"),
    (GNMax(sigma=14.0), "sigma = 14", "-"),
    (frugal, "sigma = 7, at most 20 answers, checks at 20", "--"),
):
    prices = [compute_guarantee(mechanism.privacy_events(int(q)), 1e-5).epsilon for q in questions]
    axis.plot(questions, prices, style, label=name)
axis.axhline(8, color="black", linewidth=0.8, linestyle=":")
axis.text(200, 8, "the account's cap", va="bottom", ha="right")
axis.set(xlabel="queries", ylabel="epsilon at delta = 1e-5", ylim=(0, 14))
axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## One query at a time
#
# The teachers can also answer single queries through the mechanism, until the budget is spent. The labeler reserves a
# block of queries. The journal answers a repeated query, which is free. The cap counts the queries of the block
# that were asked. The published claim counts the whole block, because the whole block was reserved.

# %%
with pate.labeler(num_queries=10) as labeler:
    before = labeler.epsilon
    first = [labeler.answer(point).item() for point in public.x[:3]]
    again = labeler.answer(public.x[:3]).tolist()
    print("answers:", first, "| repeated:", again, "| equal and free")
cap_epsilon = pate.account.ex_post_guarantee.epsilon
print(f"claimed epsilon: {before:.3f} before, {pate.epsilon:.3f} after; the cap counts {cap_epsilon:.3f}")

# %% [markdown]
# ## The student elsewhere
#
# The file of the student holds tensors and a description, and no code. The student takes rows with the columns of the
# table.

# %%
published = load_student(pate.folder)
somebody = torch.tensor([[71.0, 160.0, 130.0], [25.0, 105.0, 80.0]])
for row, share in zip(somebody.tolist(), published.compute_probabilities(somebody), strict=True):
    print(dict(zip(("age", "pressure", "sugar"), row, strict=True)), {
        name: round(p, 3) for name, p in zip(clinic.spec.class_names, share.tolist(), strict=True)
    })  # fmt: skip
