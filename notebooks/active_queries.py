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
# # Which queries are worth their cost?
#
# Each answer costs privacy, so the choice of queries matters more than in ordinary active learning. The answers are
# also noisy, and most of the errors occur where teachers disagree. A query strategy may use public points and released
# answers, but no votes. Here each strategy chooses among 600 distorted printed characters. The characters are drawn
# from a seed and belong to nobody, so this notebook may also show values that are private in a real run.

# %%
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

sys.path.insert(0, str(Path.cwd().parent))  # for benchmarks/, which is not part of the package


from benchmarks.fonts.glyphs import Glyphs
from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import AddRemove
from pate_torch.privacy.records import Release
from pate_torch.queries.base import Margin, Random
from pate_torch.queries.clusters import Coreset, Prototypes
from pate_torch.students.base import Student
from pate_torch.students.labels import make_student_task
from pate_torch.students.semi_supervised import LabelSpreading
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train

torch.set_num_threads(1)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
STRATEGIES = {
    "random": (Random(), "#888888"),
    "prototypes": (Prototypes(), "#1f4e79"),
    "coreset": (Coreset(), "#c55a11"),
    "margin": (Margin(), "#2e7d4f"),
}
SIGMA, DELTA, TEACHERS, REPEATS = 12.0, 1e-5, 80, 10
mechanism = GNMax(sigma=SIGMA)

# %% [markdown]
# ## Eighty teachers
#
# Each teacher is trained on fifty characters. The cap of the account is unrealistically large, because this notebook
# makes 120 releases. A real project would make one release.

# %%
glyphs = Glyphs(private=4000, public=600, test=500, size=14, shift=0.5, rotate=8, shear=5, noise=0.05).load()
pool, truth = glyphs.pool, glyphs.evaluation.pool_y
shards = AddRemove().make_shards(glyphs.private, TEACHERS, seed=0)
recipe = TeacherRecipe(network="mlp", steps=200, batch_size=16)
votes = train(glyphs.private, glyphs.spec, shards, recipe, seed=0).count_votes(pool.x)

ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.sqlite")
terms = {"budget_epsilon": 1000.0, "delta": DELTA, "adjacency": "add_remove", "unit": "record"}
ledger.open_account("glyphs", **terms, planned_events=mechanism.privacy_events(60))
print(
    f"accuracy of one teacher on the pool: {float((votes.counts_QC[torch.arange(600), truth] / TEACHERS).mean()):.0%},"
)
print(f"accuracy of the plurality: {float((votes.compute_plurality() == truth).float().mean()):.0%}")

# %% [markdown]
# ## A quick student
#
# Labels spread along the neighbor graph of the public points, and a small network is trained on these labels. Such a
# student is quick to train, so every experiment can be repeated. The same student guides the strategy `margin`, which
# chooses queries in rounds.
#
# A `PreparedLabeling` combines teachers, mechanism and strategy. It answers questions in rounds, and a reservation in
# the ledger pays for the noise.

# %%
student = LabelSpreading()


def fit(release: Release) -> Student:
    """Train a student on these answers."""
    return student.fit(make_student_task(glyphs.spec, pool, release), seed=0, device=torch.device("cpu"))


def ask(name: str, num_queries: int, seed: int) -> Release:
    """Make one release, which is charged before it is drawn."""
    strategy, _ = STRATEGIES[name]
    labeling = PreparedLabeling(
        mechanism=mechanism,
        query=strategy,
        num_queries=num_queries,
        sensitive=votes,
        spec=glyphs.spec,
        seed=seed,
        guide_student=student if strategy.uses_guide else None,
    )
    budget = Budget.from_account(ledger, "glyphs", run=f"{name}-{num_queries}-{seed}")
    labeling.check(budget, pool)
    events = mechanism.privacy_events(num_queries, strategy.rounds)
    with budget.spend(events, mechanism=mechanism.name) as spending:
        return labeling.release(pool, spending)


# %% [markdown]
# ## The queries
#
# The figure shows the first sixteen of thirty queries in order, with the released labels; orange labels are wrong.
# `prototypes` asks a typical point of each cluster of the pool. `coreset` covers the pool, so it also asks unusual
# points. `margin` starts with random points, and then asks points near the decision boundary of the student.

# %%
SIZES = (15, 30, 60)
releases = {(n, size): [ask(n, size, seed) for seed in range(REPEATS)] for n in STRATEGIES for size in SIZES}

fig, axes = plt.subplots(len(STRATEGIES), 16, figsize=(11, 5.4), layout="constrained")
for row, name in zip(axes, STRATEGIES, strict=True):
    release = releases[name, 30][0]
    for axis, query, given in zip(row, release.query_Q, release.label_Q, strict=False):
        axis.imshow(pool.x[query, 0], cmap="gray_r")
        axis.set_title(glyphs.spec.class_names[given], color="black" if given == truth[query] else "#c55a11")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
plt.show()

# %% [markdown]
# ## Accuracy against epsilon
#
# The cost depends on the number of queries, and not on the choice of the queries. The figure shows means over
# ten releases with independent noise, and two standard errors.

# %%
prices = [compute_guarantee(mechanism.privacy_events(size), DELTA).epsilon for size in SIZES]


def shares(name: str, size: int) -> tuple[list[float], list[float]]:
    """Accuracy of the student on test points, and of the labels, for each repetition."""
    done = releases[name, size]
    test = glyphs.evaluation
    student_accuracies = [float((fit(release).predict(test.x) == test.y).double().mean()) for release in done]
    return student_accuracies, [float((truth[r.query_Q] == r.label_Q).float().mean()) for r in done]


fig, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
table = {}
for shift, (name, (_, ink)) in enumerate(STRATEGIES.items()):
    results = [shares(name, size) for size in SIZES]
    table[name] = [float(np.mean(student)) for student, _ in results]
    for axis, part in zip(panels, range(2), strict=True):
        mean = [np.mean(result[part]) for result in results]
        error = [2 * np.std(result[part], ddof=1) / REPEATS**0.5 for result in results]
        axis.errorbar(
            np.array(prices) + 0.012 * (shift - 2.5), mean, error, color=ink, marker="o", capsize=2, label=name
        )
for axis, title in zip(panels, ("accuracy of the student on test points", "accuracy of its labels"), strict=True):
    names = [f"{price:.2f}\n{size} queries" for price, size in zip(prices, SIZES, strict=True)]
    axis.set(xlabel=f"epsilon at delta = {DELTA:g}", title=title)
    axis.set_xticks(prices, labels=names)
    axis.set_ylim(top=min(1.0, axis.get_ylim()[1]))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.grid(alpha=0.25)
fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
plt.show()
for name, means in table.items():
    print(f"{name:<11}", "  ".join(f"{mean:.1%}" for mean in means))

# %% [markdown]
# ## The cost of noise
#
# How many of thirty labels would be correct at another cost? The left figure is computed from the teachers' votes.
# In a real run, this figure is **private**, only the owner may see it, and choosing sigma by this figure would be a
# release that was not charged. The right figure explains the differences. It shows the lead of the winning class on
# the points that each strategy asked. If the lead is below two sigma, the noise decides.
#
# Teachers agree on typical points, so under strong noise the labels of typical points are most often correct. With
# fifteen queries, typical points also train the best student. Ambiguous points have two disadvantages: their labels
# are wrong more often, and each label says little about other points. `margin` is hardly better than random queries
# with fifteen and thirty queries, and as good as any strategy with sixty. Coverage of the pool is best with thirty
# queries, because this student propagates each label far along the neighbor graph, and labels in every part of the
# pool help it. The best strategy depends on the student, too: with a student that propagates labels less far
# (scikit-learn's `LabelSpreading(alpha=0.5)`), `coreset` was the worst.

# %%
sigmas = (4, 6, 8, 12, 16, 24, 32)
draw = torch.Generator().manual_seed(0)
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for name, (_, ink) in STRATEGIES.items():
    asked = torch.cat([release.query_Q for release in releases[name, 30]])
    counts = votes.counts_QC[asked].double()
    correct = []
    for sigma in sigmas:
        noisy = counts + sigma * torch.randn(100, *counts.shape, generator=draw, dtype=torch.float64)
        correct.append(float((noisy.argmax(2) == truth[asked]).double().mean()))
    left.plot(
        [compute_guarantee(GNMax(sigma=s).privacy_events(30), DELTA).epsilon for s in sigmas],
        correct,
        color=ink,
        label=name,
    )
    right.plot(np.linspace(0, 1, len(asked)), np.sort(votes.compute_gaps()[asked].numpy())[::-1], color=ink)
left.set(xlabel=f"epsilon of 30 queries at delta = {DELTA:g}", xscale="log", title="expected accuracy of the labels")
left.set_xticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
left.minorticks_off()
left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
left.legend(frameon=False, fontsize=9)
right.axhline(2 * SIGMA, color="black", linewidth=0.8, linestyle=":")
right.text(0, 2 * SIGMA, "two sigma", va="bottom", ha="left")
right.set(xlabel="share of the queries", title="votes between winner and runner-up", ylim=(0, TEACHERS))
for axis in (left, right):
    axis.grid(alpha=0.25)
plt.show()
print(
    f"charged by all releases of this notebook together: epsilon = {ledger.get_account('glyphs').guarantee.epsilon:.1f}"
)
