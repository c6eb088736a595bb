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
# $K$ teachers vote on each question, and the label released is the class with the most votes after Gaussian noise of
# $\sigma$ votes on every count. One person's record reaches one teacher, so it moves one vote in each question. How
# much does the release say about that person? Three answers follow, from the one that anybody may read to the
# one that is for the data's owner alone, and then a test that trusts none of them.
#
# The data are *glyphs*, printed characters drawn from a seed: nobody's, so this notebook may show what a real one
# must keep to itself.

# %%
import dataclasses
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path.cwd().parent))  # benchmarks/ lies beside this folder, and is no part of the package

from benchmarks.fonts.glyphs import Glyphs
from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import rdp
from pate_torch.accounting.data_dependent import private_price
from pate_torch.accounting.data_dependent.theorems import compute_rdp
from pate_torch.audit.command import audit
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.partition import AddRemove
from pate_torch.teachers.training import TeacherRecipe, train

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
# A hundred small networks, some 250 records each.

# %%
data = Glyphs(private=25_000, public=QUESTIONS, test=1, size=16).load()
shards = AddRemove().make_shards(data.private, TEACHERS, seed=0)
recipe = TeacherRecipe(network="lean_cnn", steps=150, batch_size=32, backend="vectorized")
votes = train(data.private, data.spec, shards, recipe, seed=0).count_votes(data.pool.x)
counts_QC, truth_Q = votes.counts_QC.numpy(), data.evaluation.pool_y.numpy()

single = counts_QC[np.arange(QUESTIONS), truth_Q].mean() / TEACHERS
together = (votes.compute_plurality().numpy() == truth_Q).mean()
print(f"one teacher is right {single:.0%} of the time, the plurality {together:.0%}")

fig, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
axes.hist(votes.compute_gaps().numpy(), bins=np.arange(0, TEACHERS + 5, 5), color=INK["theorem"])
axes.set(xlabel="gap between winner and runner-up (votes)", ylabel="questions", title="Most questions are not close")
plt.show()

# %% [markdown]
# ## Three prices
#
# - **Data-independent.** True for every data set: a moved vote changes the counts by $\sqrt 2$, so $Q$ questions are
#   one Gaussian mechanism with $\mu = \sqrt{2Q}/\sigma$, whose $\varepsilon$ is known exactly.
# - **Theorem** (PATE 2018, Theorem 6). If the plurality is clear, a moved vote hardly matters. It bounds one direction
#   only, $D_\alpha(M(D)\,\|\,M(D'))$, for the votes at hand.
# - **Private epsilon**. The theorem's price with noise, scaled to how fast it can change
#   from one data set to the next, and with what publishing it costs.
#
# The noise is that of 20, 40 and 100 votes among 250 teachers, scaled to 100.

# %%
SIGMAS = (8, 16, 40)
generator = np.random.default_rng(0)


def theorem_epsilon(mechanism, counts_QC=counts_QC):
    curve_A = compute_rdp(mechanism.make_outcome_model(), counts_QC, rdp.ORDERS)
    return rdp.to_epsilon(rdp.ORDERS, curve_A, DELTA)


def draw_private_epsilon(mechanism, draws=41):
    """Median of what would be published. The plan is chosen on imagined votes, never on those it prices."""
    imagined = private_price.make_example_votes(TEACHERS, data.spec.num_classes, [0.5, 0.6, 0.7, 0.8, 0.9])
    model = mechanism.make_outcome_model()
    plan = private_price.choose_plan(model, imagined, num_queries=QUESTIONS, delta=DELTA)
    draws_Z = generator.standard_normal(draws)  # of a seed: nothing here is private
    published = [
        private_price.publish_price(plan, model, counts_QC, z, adaptive=False).compute_epsilon(DELTA) for z in draws_Z
    ]
    return np.median(published)


rows = {}
for sigma in SIGMAS:
    mechanism = GNMax(sigma=sigma)
    rows[sigma] = {
        "data-independent": accounting.compute_guarantee(mechanism.privacy_events(QUESTIONS), DELTA).epsilon,
        "private epsilon": draw_private_epsilon(mechanism),
        "theorem": theorem_epsilon(mechanism),
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
axes.set_title(f"{QUESTIONS} questions to {TEACHERS} teachers")
axes.grid(axis="x", visible=False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The theorem can even cost *more* than the price that needs no data: it goes by Rényi divergences, whose conversion to
# $\varepsilon$ is never exact, while the Gaussian price is. Publishing a data-dependent price pays only where there is
# little noise: elsewhere the noise that hides the price's dependence on the votes costs more than the price saves.
#
# ## One question
#
# Where do the savings come from? From questions with a wide gap. Each dot is one question's price at Rényi order 10.

# %%
sigma, order = 8, 10.0
model = GNMax(sigma=sigma).make_outcome_model()
gap_Q = votes.compute_gaps().numpy()
price_Q = [compute_rdp(model, row[None], [order])[0] for row in counts_QC]

fig, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
axes.axhline(order / sigma**2, color="black", label="data-independent")
axes.semilogy(gap_Q, np.maximum(price_Q, 1e-18), ".", color=INK["theorem"], label="theorem")
axes.set(xlabel="gap (votes)", ylabel="price of one question", title=rf"$\sigma$ = {sigma}, order {order:g}")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What may be published
#
# | figure | who may see it |
# |---|---|
# | data-independent $\varepsilon$ | **anybody**: no vote enters it |
# | private $\varepsilon$ | **anybody**: a noisy release, its own cost included (95 % confidence, forward only) |
# | theorem | **the data's owner alone** |
# | gaps, votes, the ensemble's accuracy | **the data's owner alone** |
#
# The theorem's price is a function of private votes. Let one person leave, so that one teacher votes at
# random: the figure moves in its digits, and whoever knows everybody else's records reads off which data set it was.

# %%
neighbor_QC = counts_QC.copy()
for row in neighbor_QC:
    row[generator.choice(len(row), p=row / row.sum())] -= 1
    row[generator.integers(len(row))] += 1
mechanism = GNMax(sigma=16)
for name, counts in (("with the person", counts_QC), ("without", neighbor_QC)):
    print(f"{name:>16}: epsilon by the theorem {theorem_epsilon(mechanism, counts):.6f}")
print(f"{'either way':>16}: data-independent {table.loc[16, 'data-independent']:.6f}")

# %% [markdown]
# ## Trust nothing: the audit
#
# All of the above prices the mechanism on paper. The audit runs the one that is executed, many times on neighboring
# votes, and asks what its answers *prove*: a lower bound on $\varepsilon$, with 95 % confidence. Proven below claimed
# is what one sees of a sound mechanism; proven above claimed refutes it. Beside each sound mechanism stands a twin
# with a slip: a quarter of the noise, at the same claim.


# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slipped(GNMax):
    """NOT what it claims to be."""

    def draw(self, votes, noise, context):
        answers = GNMax(sigma=self.sigma / 4).draw(votes, noise, context)
        return dataclasses.replace(answers, events=self.privacy_events(len(votes)))


found = {}
for sigma in (2, 4, 8):
    for kind in (GNMax, Slipped):
        mechanism = kind(sigma=sigma)
        result = audit(mechanism, mechanism.worst_case_neighbors(2), runs=50_000, delta=DELTA)
        found[sigma, kind.__name__] = (result.claimed, result.proven, "sound" if result.is_sound else "REFUTED")
audited = pd.DataFrame(found, index=["claimed", "proven", "verdict"]).T.rename_axis(["sigma", "mechanism"])
audited.convert_dtypes().round(2)

# %%
fig, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
for place, sigma in enumerate((2, 4, 8)):
    claimed = audited.loc[(sigma, "Gaussian"), "claimed"]
    axes.plot([place - 0.35, place + 0.35], [claimed, claimed], color="black", label="claimed" if not place else None)
    for side, kind, ink in ((-0.17, "Gaussian", "#1f4e79"), (0.17, "Slipped", "#c55a11")):
        proven = audited.loc[(sigma, kind), "proven"]
        name = {"Gaussian": "proven of the mechanism", "Slipped": "proven of its slipped twin"}[kind]
        axes.bar(place + side, proven, width=0.3, color=ink, label=name if not place else None)
axes.set_xticks(range(3), [f"{sigma} votes" for sigma in (2, 4, 8)])
axes.set(xlabel=r"noise $\sigma$ claimed", ylabel=r"$\varepsilon$", title="Two questions, 50,000 runs a side")
axes.grid(axis="x", visible=False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# `pate audit mechanism=gaussian` runs this for every mechanism, and `pate plan` says
# beforehand what a choice of $K$, $\sigma$ and questions will cost.
