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
# # What does a release cost?
#
# $K$ teachers vote on each query. The released label is the class with the most votes after Gaussian noise of
# $\sigma$ votes has been added to every count. A record of one person reaches one teacher, so it changes one vote in
# each query. How much does the release reveal about that person? This notebook compares three costs. Everybody may
# see the first cost, and only the owner of the data may see the last one. At the end, an audit tests the claimed
# costs independently.
#
# The data are *glyphs*, printed characters that are drawn from a seed. Glyphs belong to nobody, so this notebook may
# show values that must stay private for real data.

# %%
import dataclasses
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path.cwd().parent))  # for benchmarks/, which is not part of the package

from benchmarks.fonts.glyphs import Glyphs
from pate_torch.accounting import GaussianNoisyMaxPrice, compute_data_dependent_epsilon, compute_epsilon
from pate_torch.accounting.data_dependent import private_price
from pate_torch.accounting.data_dependent.theorems import compute_rdp
from pate_torch.audit import audit
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.partition import AddRemove
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train

torch.set_num_threads(1)
plt.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
    }
)
INK = {"data-independent": "black", "theorem": "#1f4e79"}
DELTA, TEACHERS, QUESTIONS = 1e-5, 100, 200

# %% [markdown]
# ## The votes
#
# A hundred small networks are trained on about 250 records each.

# %%
data = Glyphs(private=25_000, public=QUESTIONS, test=1, size=16).load()
shards = AddRemove().make_shards(data.private, TEACHERS, seed=0)
recipe = TeacherRecipe(network="lean_cnn", steps=150, batch_size=32)
ensemble = train(data.private, data.spec, shards, recipe, seed=0)
votes = ensemble.count_votes(data.pool.x)
counts_QC, truth_Q = votes.counts_QC.numpy(), data.evaluation.pool_y.numpy()

single = counts_QC[np.arange(QUESTIONS), truth_Q].mean() / TEACHERS
together = (votes.compute_plurality().numpy() == truth_Q).mean()
print(f"accuracy of one teacher: {single:.0%}, of the plurality: {together:.0%}")

fig, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
axes.hist(votes.compute_gaps().numpy(), bins=np.arange(0, TEACHERS + 5, 5), color=INK["theorem"])
axes.set(xlabel="gap between winner and runner-up (votes)", ylabel="queries", title="Most queries have a clear winner")
plt.show()

# %% [markdown]
# ## Three costs
#
# - **Data-independent.** This cost holds for every data set. A changed vote changes the counts by $\sqrt 2$, so $Q$
#   queries are one Gaussian mechanism with $\mu = \sqrt{2Q}/\sigma$, whose $\varepsilon$ is known exactly.
# - **Theorem** (PATE 2018, Theorem 6). If the plurality is clear, a changed vote hardly matters. The theorem bounds
#   one direction only, $D_\alpha(M(D)\,\|\,M(D'))$, for the given votes.
# - **Private epsilon.** This is the cost by the theorem with added noise. The noise is scaled to the largest change of
#   the cost between neighbors, and the cost includes the cost of its publication.
#
# The standard deviations of the noise on the votes correspond to 20, 40 and 100 votes among 250 teachers.

# %%
SIGMAS = (8, 16, 40)
generator = np.random.default_rng(0)


def draw_private_epsilon(price, draws=41):
    """Compute the median of the published cost. The plan is chosen on example votes, never on the priced votes."""
    imagined = private_price.make_example_votes(TEACHERS, data.spec.num_classes, [0.5, 0.6, 0.7, 0.8, 0.9])
    plan = private_price.choose_plan(price, imagined, num_queries=QUESTIONS, delta=DELTA)
    draws_Z = generator.standard_normal(draws)  # seeded, because nothing here is private
    published = [
        private_price.publish_price(plan, price, counts_QC, z, adaptive=False).compute_epsilon(DELTA) for z in draws_Z
    ]
    return np.median(published)


rows = {}
for sigma in SIGMAS:
    price = GaussianNoisyMaxPrice(sigma)
    rows[sigma] = {
        "data-independent": compute_epsilon(price, QUESTIONS, delta=DELTA),
        "private epsilon": draw_private_epsilon(price),
        "theorem": compute_data_dependent_epsilon(counts_QC, price, delta=DELTA),
    }
table = pd.DataFrame(rows).T.rename_axis("sigma")
table.round(2)

# %%
fig, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
for column, name in enumerate(table.columns):
    at = np.arange(len(SIGMAS)) + 0.25 * (column - 1)
    bars = axes.bar(at, table[name], width=0.22, color=INK.get(name, "#c55a11"), label=name)
    axes.bar_label(bars, fmt="%.1f", fontsize=7)
axes.set_xticks(range(len(SIGMAS)), [f"{sigma} votes" for sigma in SIGMAS])
axes.set(xlabel=r"noise $\sigma$", ylabel=rf"$\varepsilon$ at $\delta$ = {DELTA:g}")
axes.set_title(f"{QUESTIONS} queries to {TEACHERS} teachers")
axes.grid(axis="x", visible=False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The theorem can even give a *higher* cost than the data-independent one: it is based on Rényi divergences, whose
# conversion to $\varepsilon$ is never exact, while the Gaussian cost is exact. The publication of a data-dependent
# cost is worthwhile only if the mechanism has little noise. Otherwise the noise that hides the dependence on the
# votes costs more than the data-dependent cost saves.
#
# ## One query
#
# The savings come from queries with a wide gap. Each dot is the cost of one query at Rényi order 10.

# %%
sigma, order = 8, 10.0
price = GaussianNoisyMaxPrice(sigma)
gap_Q = votes.compute_gaps().numpy()
price_Q = [compute_rdp(price, row[None], [order])[0] for row in counts_QC]

fig, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
axes.axhline(order / sigma**2, color="black", label="data-independent")
axes.semilogy(gap_Q, np.maximum(price_Q, 1e-18), ".", color=INK["theorem"], label="theorem")
axes.set(xlabel="gap (votes)", ylabel="cost of one query", title=rf"$\sigma$ = {sigma}, order {order:g}")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What may be published
#
# | value | who may see it |
# |---|---|
# | data-independent $\varepsilon$ | **everybody**: it does not depend on the votes |
# | private $\varepsilon$ | **everybody**: a noisy release that includes its cost (95 % confidence, forward only) |
# | theorem | **the owner of the data only** |
# | gaps, votes, accuracy of the ensemble | **the owner of the data only** |
#
# The cost by the theorem is a function of private votes. If one person leaves the data, one teacher votes at random,
# and the last digits of the cost change. Somebody who knows all other records can therefore tell from the cost
# whether the person's record was used.

# %%
neighbor_QC = counts_QC.copy()
for row in neighbor_QC:
    row[generator.choice(len(row), p=row / row.sum())] -= 1
    row[generator.integers(len(row))] += 1
price = GaussianNoisyMaxPrice(16)
for name, counts in (("with the person", counts_QC), ("without", neighbor_QC)):
    print(f"{name:>16}: epsilon by the theorem {compute_data_dependent_epsilon(counts, price, delta=DELTA):.6f}")
print(f"{'in both cases':>16}: data-independent {table.loc[16, 'data-independent']:.6f}")

# %% [markdown]
# ## The audit
#
# All costs above are computed from a description of the mechanism. The audit executes the mechanism many times on
# neighboring votes, and computes a lower bound on $\varepsilon$ from the answers, with 95 % confidence. For a sound
# mechanism, the proven lower bound is below the claim. A lower bound above the claim refutes the mechanism. Each sound
# mechanism is compared with a faulty variant that claims the same cost but draws a quarter of the noise.


# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultyGNMax(GNMax):
    """A FAULTY mechanism: it draws less noise than it claims."""

    def draw(self, votes, noise, context):
        answers = GNMax(sigma=self.sigma / 4).draw(votes, noise, context)
        return dataclasses.replace(answers, events=self.privacy_events(len(votes)))


found = {}
for sigma in (2, 4, 8):
    for kind in (GNMax, FaultyGNMax):
        mechanism = kind(sigma=sigma)
        result = audit(mechanism, mechanism.worst_case_neighbors(2), runs=50_000, delta=DELTA)
        found[sigma, kind.__name__] = (result.claimed, result.proven, "sound" if result.is_sound else "REFUTED")
audited = pd.DataFrame(found, index=["claimed", "proven", "verdict"]).T.rename_axis(["sigma", "mechanism"])
audited.convert_dtypes().round(2)

# %%
fig, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
for place, sigma in enumerate((2, 4, 8)):
    claimed = audited.loc[(sigma, "GNMax"), "claimed"]
    axes.plot([place - 0.35, place + 0.35], [claimed, claimed], color="black", label="claimed" if not place else None)
    for side, kind, ink in ((-0.17, "GNMax", "#1f4e79"), (0.17, "FaultyGNMax", "#c55a11")):
        proven = audited.loc[(sigma, kind), "proven"]
        name = {"GNMax": "proven for the mechanism", "FaultyGNMax": "proven for the faulty variant"}[kind]
        axes.bar(place + side, proven, width=0.3, color=ink, label=name if not place else None)
axes.set_xticks(range(3), [f"{sigma} votes" for sigma in (2, 4, 8)])
axes.set(
    xlabel=r"noise $\sigma$ claimed",
    ylabel=r"$\varepsilon$",
    title="Two queries, 50,000 runs on each of two neighbors",
)
axes.grid(axis="x", visible=False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# `pate audit mechanism=gaussian` runs this audit for any mechanism, and `pate plan` computes in advance what a choice
# of $K$, $\sigma$ and the number of queries will cost.
