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
# # Small hypothesis classes, exact private algorithms
#
# A hypothesis class is the set of classifiers among which a learner chooses. On finitely many points, the class has
# only finitely many different labelings, which are called its *dichotomies*. A private algorithm can therefore list
# all dichotomies and choose one. Each algorithm below takes a private sample of public size $n$ (neighbors differ in
# one replaced record), charges a budget before it draws, and returns its answer together with the events that it
# incurred.
#
# The data here are synthetic, so a `DryRunNoise` replaces the budget. `DryRunNoise` charges no account, and its seed
# makes this notebook repeatable. With real data, use `Budget.from_account(ledger, "account")` instead. Otherwise
# nothing is charged and nothing is private. `benchmarks.theory` is not part of the installed package: start the
# notebook with the root of a checkout in `PYTHONPATH`.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.theory.agnostic import AgPrivClPlan, run_ag_priv_cl, run_sub_samp
from benchmarks.theory.classes import Listed
from benchmarks.theory.private_predictor import compute_private_predictor_size
from benchmarks.theory.stability import by_teachers, on_average_stability
from pate_torch.hypotheses.classes import HalfPlanes, Intervals, Stumps, Thresholds
from pate_torch.hypotheses.exponential import run_exponential_mechanism, run_sspp
from pate_torch.hypotheses.prediction import compute_flipping_gamma, compute_stability, run_private_prediction
from pate_torch.hypotheses.sample import BelowGuaranteeWarning, Sample, compute_log_sauer_shelah
from pate_torch.mechanisms.exponential import compute_log_probabilities, draw_model_index
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import DataSpec
from pate_torch.teachers.recipe import TeacherRecipe

warnings.simplefilter("ignore", BelowGuaranteeWarning)  # one such warning is shown below
generator, budget = np.random.default_rng(0), DryRunNoise(insecure_seed=0)

# %% [markdown]
# ## Dichotomies
#
# Each dichotomy is enumerated exactly once. The lemma of Sauer and Shelah bounds their number by
# $\sum_{i \le d}\binom{n}{i}$.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
sizes = np.arange(2, 26)
for name, hypotheses, features in [
    ("thresholds, d = 1", Thresholds(), 1),
    ("intervals, d = 2", Intervals(), 1),
    ("stumps, 2 features, d = 3", Stumps(2), 2),
    ("half-planes, d = 3", HalfPlanes(), 2),
]:
    counts = [len(hypotheses.enumerate_representatives(generator.random((n, features)))) for n in sizes]
    (line,) = axes[0].semilogy(sizes, counts, label=name)
    bound = [np.exp(compute_log_sauer_shelah(int(n), hypotheses.vc_dimension)) for n in sizes]
    axes[0].semilogy(sizes, bound, ":", color=line.get_color())
axes[0].set(xlabel="points", ylabel="dichotomies", title="number, and its bound (dotted)")
axes[0].legend(frameon=False, fontsize=8)
few = generator.random((7, 2))
found = HalfPlanes().enumerate_representatives(few)
labelings = HalfPlanes().compute_labelings(found, few)
axes[1].set(title=f"7 points, half-planes: one of {len(found)}", xlim=(0, 1), ylim=(0, 1))
pick = int(np.argmin(np.abs(labelings.sum(1) - 3)))
side = np.linspace(0, 1, 120)
plane = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
inside = HalfPlanes().predict(found[pick], plane).reshape(120, 120)
axes[1].contourf(side, side, inside, levels=1, colors=["white", "#dbe7f3"])
axes[1].scatter(*few.T, c=np.where(labelings[pick], "#1f4e79", "#c55a11"))
plt.show()

# %% [markdown]
# ## The exponential mechanism, and SSPP
#
# The exponential mechanism chooses among *public* candidates with $P(h) \propto e^{-\varepsilon\,\mathrm{err}(h)/2}$.
# It is $\varepsilon$-DP, because one record changes every error count by at most one. It also has a *bounded range*
# of $\varepsilon$, so each choice composes at $\rho = \varepsilon^2/8$. With the dichotomies of public points as
# candidates, this mechanism is SSPP: a private learner whose hypothesis may be published and used without further
# cost.

# %%
n = 400
x = generator.random(n)
sample = Sample(x, (x > 0.6) ^ (generator.random(n) < 0.15))
public = generator.random(40)
cuts = Thresholds().enumerate_representatives(public[:, None])
wrong = Thresholds().count_errors(cuts, sample.x, sample.y)
fig, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for epsilon in (0.05, 0.2, 1.0):
    axis.plot(
        np.clip(cuts, 0, 1),
        np.exp(compute_log_probabilities(-wrong, epsilon / 2)),
        marker=".",
        label=rf"$\varepsilon$ = {epsilon}",
    )
axis.axvline(0.6, color="black", linewidth=0.7, linestyle=":")
axis.set(xlabel="threshold", ylabel="probability of being chosen", title="SSPP on 400 records with 15 % of noise")
axis.legend(frameon=False)
plt.show()
chosen = run_sspp(Thresholds(), sample, public, epsilon=1.0, budget=budget)
print(f"chosen threshold {chosen.hypothesis:.3f}, cost {chosen.events}")

# %% [markdown]
# An algorithm warns if the sample is smaller than its theorem needs. Privacy does not depend on the size.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run_exponential_mechanism(Thresholds(), cuts, sample, epsilon=0.1, budget=budget, alpha=0.05)
print(caught[0].message)

# %% [markdown]
# ## Private model selection
#
# The candidates may be of any kind, for instance trained students. The mechanism uses only their error counts on a
# private validation set.

# %%
errors = np.array([212, 187, 240, 190])
drawn = [draw_model_index(errors, 0.5, budget, adjacency="replace_one") for _ in range(500)]
picks = np.bincount(drawn, minlength=4)
print("errors", errors, "-> picked", picks, "times out of 500 at epsilon = 0.5")

# %% [markdown]
# ## One prediction at a time
#
# The stable predictor draws a random subset, enumerates the dichotomies of that subset, and chooses among them by
# their errors on the whole sample. One replaced record changes the probability of any answer by at most $3\gamma$
# (here by 1.25 $\gamma$, with sharper constants). A flip of the answer with probability $\alpha$ turns this stability
# into $\varepsilon$-DP for each prediction.

# %%
grid = np.linspace(0, 1, 101)[:, None]


def stable_law(subset, gamma):
    """Compute P(answer = 1) on the grid, given the subset of the sample."""
    candidates = Thresholds().enumerate_representatives(sample.x[subset])
    law = np.exp(compute_log_probabilities(-Thresholds().count_errors(candidates, sample.x, sample.y), gamma / 2))
    return law @ Thresholds().compute_labelings(candidates, grid)


fig, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for gamma in (0.02, 0.1, 0.3):
    size = int(gamma * n)
    subsets = [generator.choice(n, size, replace=False) for _ in range(200)]
    law = np.mean([stable_law(i, gamma) for i in subsets], axis=0)
    moved = compute_stability(gamma, size / n, "sharp")
    axis.plot(grid[:, 0], law, label=rf"$\gamma$ = {gamma}: changes by {moved:.3f} at most")
axis.axvline(0.6, color="black", linewidth=0.7, linestyle=":")
axis.set(xlabel="x", ylabel="P(answer = 1)", title="the stable predictor")
axis.legend(frameon=False)
plt.show()

# %%
points = np.array([0.1, 0.5, 0.7, 0.9])
done = run_private_prediction(Thresholds(), sample, points, epsilon=1.0, alpha=0.1, budget=budget, constants="sharp")
gammas = [compute_flipping_gamma(1.0, 0.1, constants) for constants in ("paper", "sharp")]
print(f"labels of {points}: {done.label_Q.astype(int)}; cost {done.events}")
print(f"gamma: {gammas[0]:.4f} (paper's constants), {gammas[1]:.4f} (sharp)")
print(
    "The predictor of Theorem 2 has a better rate, but at epsilon = 1, alpha = 0.1 its theorem needs "
    f"n >= {compute_private_predictor_size(1, epsilon=1.0, alpha=0.1, constants='sharp'):,} with the sharp constants"
)

# %% [markdown]
# ## Many queries: AgPrivCl, and a failure of plain voting
#
# This example has three hypotheses and four points, and every label is 1. Each hypothesis is wrong on half of the
# points, and the majority of hypotheses that are trained on small shards is wrong on three quarters (Liu et al. 2021,
# Example 1). AgPrivCl first relabels a sub-sample by *one* good hypothesis, so that all teachers learn that
# hypothesis. After that it pays for unstable queries only.

# %%
three = Listed([lambda x, j=j: np.isin(x[:, 0], (0, j)) for j in (1, 2, 3)])
big = Sample(generator.integers(0, 4, 200_000).astype(float), np.ones(200_000))
corners = np.arange(4.0)
asked = {"epsilon": 1.0, "delta": 1e-3, "alpha": 0.2, "beta": 0.2}
plan = AgPrivClPlan(n=big.n, num_queries=4, vc_dimension=1, **asked, constants="sharp")
mechanism = SparseVector(epsilon=1.0, delta=1e-3, max_failures=1)
plain = run_sub_samp(three, big, corners, num_teachers=8 * plan.num_teachers, mechanism=mechanism, budget=budget)
better = run_ag_priv_cl(three, big, corners, **asked, budget=budget, constants="sharp")
for name, answers in (("sub-sample and aggregate", plain), ("AgPrivCl", better)):
    labels = answers.label_Q.numpy()
    print(f"{name:25s} labels {labels}  error {np.mean(labels != 1):.2f}")
print(f"{plan.num_teachers:,} teachers share {plan.subset_size:,} records; proven: epsilon {plan.total_price[0]:.3f}")

# %% [markdown]
# ## How stable is a learner?
#
# On-average stability (Bassily, Thakkar and Thakurta 2018, Definition 5.7) measures how much a prediction changes
# when one record is replaced. Where this change is small, teachers agree. The change decreases with the size of a
# shard, so a measurement on synthetic or public records helps to choose the number of teachers before any budget is
# spent. All models are trained as one stack of teachers. Both data sets of a pair use the same batches and the same
# initial weights.

# %%
spec = DataSpec(name="line", num_classes=2, input_shape=(1,), class_names=("low", "high"), mean=(0.6,), std=(0.3,))
x_pool = generator.random((4000, 1))
y_pool = ((x_pool[:, 0] > 0.6) ^ (generator.random(4000) < 0.15)).astype(int)
steps = {"steps": 120, "batch_size": 16, "learning_rate": 0.02, "label_smoothing": 0.0}
learners = {
    "logistic regression": TeacherRecipe(network="logistic", **steps),
    "a network of 64 hidden units": TeacherRecipe(network="mlp", options={"hidden": (64,)}, **steps),
}
sizes, where = (10, 20, 40, 80, 160), np.linspace(0, 1, 41)[:, None]
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, recipe in learners.items():
    learner = by_teachers(recipe, spec)
    found = [on_average_stability(learner, x_pool, y_pool, where, n=k, pairs=96, seed=0, batch=96) for k in sizes]
    rms = [np.sqrt((f.alpha_Q**2).mean()) for f in found]
    axes[0].loglog(sizes, rms, marker=".", label=name)
    axes[1].plot(where[:, 0], found[2].alpha_Q, label=name)
axes[0].set(xlabel="records", ylabel="root mean square change of a vote", title="one replaced record, all points")
axes[1].set(xlabel="x", ylabel="the same at x", title="40 records: least stable at the threshold")
axes[0].legend(frameon=False)
plt.show()
