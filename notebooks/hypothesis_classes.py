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
# # Small hypothesis classes
#
# A hypothesis class is the set of rules among which a learner chooses. On finitely many points, a class has finitely
# many labelings, which are called *dichotomies*. A private algorithm can therefore list all of them and draw one.
# [`pate learn`](../docs/howto/hypotheses.md) runs these algorithms on a table and charges an account.
#
# The patients below are invented: their age is known, and whether they are ill is private. A `DryRunNoise` replaces
# the account, and its seed makes this notebook repeatable. It charges nothing, and nothing here is private. With real
# records, use `Budget.from_account(ledger, "account")`.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np

from pate_torch.hypotheses.classes import HalfPlanes, Intervals, Stumps, Thresholds
from pate_torch.hypotheses.exponential import run_exponential_mechanism, run_sspp
from pate_torch.hypotheses.prediction import compute_stability, run_private_prediction
from pate_torch.hypotheses.sample import BelowGuaranteeWarning, Sample, compute_log_sauer_shelah
from pate_torch.mechanisms.exponential import compute_log_probabilities
from pate_torch.privacy.noise import DryRunNoise

warnings.simplefilter("ignore", BelowGuaranteeWarning)  # one such warning is shown below
random, budget = np.random.default_rng(0), DryRunNoise(insecure_seed=0)
n = 400
age = random.uniform(20, 100, n)
patients = Sample(age, (age > 68) ^ (random.random(n) < 0.15))  # 15 % of the labels are flipped
public_age = random.uniform(20, 100, 40)

# %% [markdown]
# ## Dichotomies
#
# Each dichotomy is listed once. The lemma of Sauer and Shelah bounds their number by $\sum_{i \le d}\binom{n}{i}$,
# where $d$ is the VC dimension (dotted).

# %%
plt.figure(figsize=(6, 3), layout="constrained")
sizes = np.arange(2, 26)
for name, hypotheses, features in [
    ("thresholds, d = 1", Thresholds(), 1),
    ("intervals, d = 2", Intervals(), 1),
    ("stumps, 2 features, d = 3", Stumps(2), 2),
    ("half-planes, d = 3", HalfPlanes(), 2),
]:
    counts = [len(hypotheses.enumerate_representatives(random.random((size, features)))) for size in sizes]
    (line,) = plt.semilogy(sizes, counts, label=name)
    bound = [np.exp(compute_log_sauer_shelah(int(size), hypotheses.vc_dimension)) for size in sizes]
    plt.semilogy(sizes, bound, ":", color=line.get_color())
plt.xlabel("points")
plt.ylabel("dichotomies")
plt.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Draw a rule
#
# The exponential mechanism draws among *public* candidates with $P(h) \propto e^{-\varepsilon\,\mathrm{err}(h)/2}$. It
# is $\varepsilon$-DP, because one replaced record changes every error count by at most one. If the candidates are the
# dichotomies of public points, the algorithm is called SSPP. Its rule may be published.

# %%
cuts = Thresholds().enumerate_representatives(public_age[:, None])
errors = Thresholds().count_errors(cuts, patients.x, patients.y)
plt.figure(figsize=(6, 3), layout="constrained")
for epsilon in (0.05, 0.2, 1.0):
    probabilities = np.exp(compute_log_probabilities(-errors, epsilon / 2))
    plt.plot(np.clip(cuts, 20, 100), probabilities, marker=".", label=rf"$\varepsilon$ = {epsilon}")
plt.axvline(68, color="black", linewidth=0.7, linestyle=":")
plt.xlabel("threshold in years")
plt.ylabel("probability of being drawn")
plt.legend(frameon=False)
plt.show()
drawn = run_sspp(Thresholds(), patients, public_age, epsilon=1.0, budget=budget)
print(f"drawn: ill from {drawn.hypothesis:.1f} years on, cost {drawn.events}")

# %% [markdown]
# An algorithm warns if its theorem promises nothing for so few records. Privacy does not depend on their number.

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run_exponential_mechanism(Thresholds(), cuts, patients, epsilon=0.1, budget=budget, alpha=0.05)
print(caught[0].message)

# %% [markdown]
# ## Answer single queries
#
# The stable predictor lists the dichotomies of a random part of the records, and draws one of them by its errors on all
# records. One replaced record changes the probability of an answer by at most $3\gamma$, or by the smaller numbers
# below with sharper constants. A flip of each answer with probability $\alpha$ makes it $\varepsilon$-DP.

# %%
grid = np.linspace(20, 100, 101)[:, None]


def compute_answer_probabilities(part, gamma):
    """Compute P(ill) on the grid, given the part of the records."""
    candidates = Thresholds().enumerate_representatives(patients.x[part])
    errors = Thresholds().count_errors(candidates, patients.x, patients.y)
    return np.exp(compute_log_probabilities(-errors, gamma / 2)) @ Thresholds().compute_labelings(candidates, grid)


plt.figure(figsize=(6, 3), layout="constrained")
for gamma in (0.02, 0.1, 0.3):
    size = int(gamma * n)
    parts = [random.choice(n, size, replace=False) for _ in range(200)]
    probabilities = np.mean([compute_answer_probabilities(part, gamma) for part in parts], axis=0)
    change = compute_stability(gamma, size / n, "sharp")
    plt.plot(grid[:, 0], probabilities, label=rf"$\gamma$ = {gamma}: changes by {change:.3f} at most")
plt.axvline(68, color="black", linewidth=0.7, linestyle=":")
plt.xlabel("age in years")
plt.ylabel("P(answer = ill)")
plt.legend(frameon=False)
plt.show()

# %%
queries = np.array([30, 60, 75, 90.0])
answers = run_private_prediction(
    Thresholds(), patients, queries, epsilon=1.0, alpha=0.1, budget=budget, constants="sharp"
)
print(f"answers for {queries}: {answers.label_Q.astype(int)}; cost {answers.events}")

# %% [markdown]
# ## When not to use this
#
# Rules of one or two features rarely suffice. For accuracy, use [`PATEClassifier`](table.ipynb). What the theorems mean
# for teachers was [measured](../docs/experiments/hypothesis-classes.md).
