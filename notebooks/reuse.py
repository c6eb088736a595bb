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
# # One ensemble, three students
#
# Training teachers takes time, and their votes cost privacy. Students cost little time and no privacy: any number of
# them may learn from the same released labels. Here 1,100 handwritten digits are private. Seventy-five small teachers
# are trained once, on about 15 records each, vote on twenty public queries, and three students learn from the noisy
# answers.

# %%
import tempfile

import matplotlib.pyplot as plt
import numpy as np

from pate_torch import PATE, load_student
from pate_torch.data.benchmark import Digits
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.queries.clusters import Prototypes
from pate_torch.release.statement import format_headline, format_plain_words
from pate_torch.teachers.recipe import TeacherRecipe

digits = Digits().load()
small_changes = {"rotate": 10, "scale": 0.1, "shift": 0.7, "shear": 5}  # a distorted digit stays the same digit
print(len(digits.private), "private records,", len(digits.pool), "public points without labels")

# %% [markdown]
# ## Teachers
#
# `delta` and `budget_epsilon` are terms of the data set's account, and are fixed when the account opens. Teachers,
# ledger and releases are stored in `home`, which is a temporary folder here. Real records need a permanent folder,
# because **the ledger must outlive every run**.

# %%
pate = PATE(
    "digits",
    classes=10,
    num_teachers=75,
    mechanism=GNMax(sigma=11),  # votes
    delta=1e-4,
    budget_epsilon=2.5,
    home=tempfile.mkdtemp(),
    teacher=TeacherRecipe(network="mlp", steps=600, batch_size=16, augment=small_changes),
)
pate.fit_teachers(digits.private.x, digits.private.y, public_x=digits.pool.x)

# %% [markdown]
# ## Twenty queries
#
# The strategy `Prototypes` asks one typical point of each cluster of the public points. A teacher that was trained on
# fifteen records errs often. The method `teachers_transductive` reduces these errors: each teacher labels all public
# points together and uses the neighbor graph of these points, which is public. The cost of the whole plan is reserved
# in the ledger before any noise is drawn.

# %%
release = pate.label(digits.pool.x, num_queries=20, strategy=Prototypes(), method="teachers_transductive")
truth = digits.evaluation.pool_y[release.query_Q]

fig, axes = plt.subplots(2, 10, figsize=(9, 2.6), layout="constrained")
for axis, query, label, right in zip(axes.flat, release.query_Q, release.label_Q, truth, strict=True):
    axis.imshow(digits.pool.x[query, 0], cmap="gray_r")
    axis.set_title(int(label), color="black" if label == right else "#c55a11", fontsize=12)
    axis.set(xticks=[], yticks=[])
fig.suptitle("the queries and the released labels (orange: wrong)")
plt.show()

# %% [markdown]
# ## Three students
#
# A student sees the twenty labels and 450 public points without labels, and nothing private. The ledger does not
# change.

# %%
before = pate.epsilon
options = {"supervised": {}, "vat": {}, "fixmatch": {"augment": small_changes}}
accuracy = {}
for name, more in options.items():
    student = pate.fit_student(name, steps=200, **more)
    accuracy[name] = float((student.predict(digits.evaluation.x) == digits.evaluation.y).float().mean())
    print(f"{name:12} accuracy {accuracy[name]:.3f}, the account has spent epsilon {pate.epsilon:.3f}")
assert pate.epsilon == before

# %% [markdown]
# The last student is the one in the release. The accuracies may choose among the students, because the test points
# are public. Curves of each training are in the private folder of the run, for TensorBoard.

# %%
report = pate.report(digits.evaluation.x, digits.evaluation.y, pool_y=digits.evaluation.pool_y)
measured = report.evaluation
print(f"accuracy of the student on {measured.student_size} test points: {measured.student_accuracy:.1%}")
print(f"accuracy of the labels it was trained on: {measured.label_accuracy:.0%}")

# %% [markdown]
# ## The cost

# %%
print(format_headline(report))
for paragraph in format_plain_words(report):
    print("-", paragraph)

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(3, 2))
queries = np.arange(1, len(report.claim.epsilon_curve) + 1)
left.plot(queries, report.claim.epsilon_curve, color="#1f4e79")
left.axhline(report.claim.budget_epsilon, color="black", linewidth=0.8, linestyle=":")
left.text(1, report.claim.budget_epsilon, " the account's cap", va="bottom")
left.set(xlabel="queries", ylabel="epsilon at delta = 1e-4", title="cost")
left.set(xlim=(0, 20.5), ylim=(0, 2.8), xticks=range(0, 21, 5))
counts = np.array(report.evaluation.confusion)
right.imshow(counts / counts.sum(1, keepdims=True), cmap="Blues", vmin=0, vmax=1)
right.set(
    xlabel="predicted class", ylabel="true class", title="confusion of the student", xticks=range(10), yticks=range(10)
)
plt.show()

# %% [markdown]
# ## Publication
#
# Everything in the release folder may be published: the report (`report.html`), the labels, the machine-readable
# statement and the student, which can be loaded without the private files.

# %%
print(*sorted(file.name for file in pate.folder.iterdir()), sep="\n")
published = load_student(pate.folder)
print("five test points:", published.predict(digits.evaluation.x[:5]).tolist(), digits.evaluation.y[:5].tolist())

# %% [markdown]
# ## More queries to the same teachers are charged
#
# The teachers are stored and can answer again, at a further cost. Another twenty queries would exceed the cap of this
# account, so the call is refused before any noise is drawn. Four more fit.

# %%
try:
    pate.label(digits.pool.x, num_queries=20)
except BudgetExceeded as refused:
    print(refused)
print(f"before: epsilon {pate.epsilon:.3f}")
more = pate.label(digits.pool.x, num_queries=4)
print(f"after:  epsilon {pate.epsilon:.3f}, {len(more.query_Q)} more labels")

# %% [markdown]
# ## When not to use this
#
# For a table or vectors, [`PATEClassifier`](table.ipynb) is simpler and usually more accurate at the same epsilon.
# Train teachers yourself where you need many students, a labeling service, or models that only their owners can
# train. [How it works](../docs/explanation/how-it-works.md), [PATE in Python](../docs/howto/labeler.md).
