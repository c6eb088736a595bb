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
# # Use a frozen encoder
#
# This notebook has a thousand private records, 400 public points without labels and 397 test points: the handwritten
# digits of scikit-learn. A public network that computes features of the digits costs no privacy, and no private record
# is needed to learn these features. The digits are public, so this notebook may train on the digits several times, each
# time with a temporary account, and show accuracies on test points. Real records have one account, whose releases
# compose.

# %%
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from pate_torch import PATE, PATEClassifier, load_student
from pate_torch.accounting.calibration import calibrate_sigma
from pate_torch.core.formatting import format_delta
from pate_torch.data.benchmark import Digits
from pate_torch.features.contrastive import ContrastiveFeatures, encode
from pate_torch.features.encoder import Encoder
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.feasibility import LowSignalWarning
from pate_torch.privacy.whitening import solve_ridge
from pate_torch.queries.clusters import Prototypes
from pate_torch.teachers.recipe import TeacherRecipe

torch.set_num_threads(1)
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
DELTA, EPSILONS, PRIVATE = 1e-5, (0.1, 0.5, 1.0, 2.0), 1000
TERMS = f"delta {format_delta(DELTA)}, add_remove, unit record, exact Gaussian accounting"

digits = Digits(private=PRIVATE, public=400, test=397).load()
public, spec = digits.pool.x, digits.spec
others = torch.cat([digits.private.x, digits.evaluation.x])
label = torch.cat([digits.private.y, digits.evaluation.y]).numpy()
splits = [np.random.default_rng(seed).permutation(len(others)) for seed in range(3)]  # private first, then test

# %% [markdown]
# ## Raw points
#
# `PATEClassifier` chooses its method by public facts only: about a thousand records, ten classes, and epsilon. For
# rows it uses per-record gradients of a linear model of random Fourier features. The results are means over three
# splits into private and test records, with standard errors.


# %%
def by_rule(rows, public_rows, split, epsilon, encoder=None):
    """Fit PATEClassifier with its default method."""
    clf = PATEClassifier(
        epsilon,
        account="digits",
        num_records_about=PRIVATE,
        delta=DELTA,
        classes=range(10),
        encoder=encoder,
        home=tempfile.mkdtemp(),
        verbose=False,
    )
    return clf.fit(rows[split[:PRIVATE]], label[split[:PRIVATE]], public=public_rows)


def without_privacy(rows, split):
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return model.fit(rows[split[:PRIVATE]], label[split[:PRIVATE]])


def accuracy(models, rows):
    """Mean and standard error over the splits."""
    found = [np.mean(m.predict(rows[s[PRIVATE:]]) == label[s[PRIVATE:]]) for m, s in zip(models, splits, strict=True)]
    return np.mean(found), np.std(found, ddof=1) / len(found) ** 0.5


pixels, public_pixels = others.flatten(1).numpy(), public.flatten(1).numpy()
raw_models = {e: [by_rule(pixels, public_pixels, split, e) for split in splits] for e in EPSILONS}
raw = [accuracy(fitted, pixels) for fitted in raw_models.values()]
raw_plain = accuracy([without_privacy(pixels, split) for split in splits], pixels)
print(TERMS)
for epsilon, (mean, error) in zip(EPSILONS, raw, strict=True):
    print(f"epsilon {epsilon:<4g} {mean:.1%} ± {error:.1%}")
print(f"no privacy   {raw_plain[0]:.1%} ± {raw_plain[1]:.1%}")

# %% [markdown]
# ## An encoder
#
# Here the encoder is trained on the public points without labels (contrastive learning: two distorted copies of a
# point must be recognized as a pair). Then the encoder is frozen and saved. Your encoder may be a torch module with its
# weights, an ONNX file, or a table of token vectors for texts.
#
# The features of each point are computed independently: their bits are the same whether the point is encoded alone or
# with other points. A network that receives all points in one batch does not guarantee equal bits. If the last bit of a
# feature depends on another record, no cost covers this influence.

# %%
folder = Path(tempfile.mkdtemp())
changes = {"rotate": 10, "scale": 0.1, "shift": 0.7, "shear": 5}  # a distorted digit stays the same digit
network = ContrastiveFeatures(steps=200, batch_size=128, augment=changes).learn(public, spec, seed=0)
save_file(network.state_dict(), folder / "encoder.safetensors")
encoder = Encoder(
    name="contrastive digits",
    module=network,
    weights=str(folder / "encoder.safetensors"),
    license="Apache-2.0",
    trained_on="400 public digits, without labels",
    disjoint=True,  # the training data include no private record
)
z_public, z = encoder.encode(public, spec).numpy(), encoder.encode(others, spec).numpy()
alone = torch.cat([encoder.encode(others[place : place + 1], spec) for place in range(100)]).numpy()
with torch.no_grad():
    in_one_batch = network(spec.normalize(others)).numpy()
print(f"{z.shape[1]} features")
print("points whose features change in the company of others:", (alone != z[:100]).any(1).sum(), "of 100")
print("the same if the network takes all points in one batch:", (in_one_batch[:100] != z[:100]).any(1).sum(), "of 100")

# %% [markdown]
# ## The same features for all methods
#
# All rows use the same frozen features, public points and splits. `PATEClassifier` again chooses per-record
# gradients, now of the features themselves. The quickstart's method has 75 teachers and twenty queries. The last
# row has no privacy. A teacher has 13 records, and at a small epsilon the noise is larger than the agreement of 75
# such teachers. Both methods give a warning before a release whose noise is that large.


# %%
class Teachers:
    """75 teachers, twenty queries, and labels that spread among the public points."""

    def __init__(self, split, epsilon, questions=20):
        sigma = calibrate_sigma(lambda s: GNMax(sigma=s).privacy_events(questions), epsilon=epsilon, delta=DELTA)
        pate = PATE(
            "digits",
            classes=10,
            num_teachers=75,
            mechanism=GNMax(sigma=sigma),
            delta=DELTA,
            home=tempfile.mkdtemp(),
            teacher=TeacherRecipe(network="logistic", steps=200),
            encoder=card,
            allow_uninformative_labels=True,  # without it, the smallest epsilon is refused
            verbose=False,
        )
        pate.fit_teachers(z[split[:PRIVATE]], label[split[:PRIVATE]], public_x=z_public)
        pate.label(z_public, questions, strategy=Prototypes(), method="teachers_transductive")
        self.student = pate.fit_student("label_spreading", alignment="labels")

    def predict(self, rows):
        return self.student.predict(rows).numpy()


card = encoder.make_card(spec)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", LowSignalWarning)
    teachers = [accuracy([Teachers(split, e) for split in splits], z) for e in EPSILONS]
models = {e: [by_rule(z, z_public, split, e, card) for split in splits] for e in EPSILONS}
gradients = [accuracy(fitted, z) for fitted in models.values()]
plain = accuracy([without_privacy(z, split) for split in splits], z)

fig, axis = plt.subplots(figsize=(8, 4), layout="constrained")
axis.axhspan(plain[0] - plain[1], plain[0] + plain[1], color="black", alpha=0.15)
axis.axhline(plain[0], color="black", label="no privacy, encoder")
rows = {"by rule: gradients, encoder": (gradients, "#1f4e79"), "teachers, encoder": (teachers, "#c55a11")}
for name, (found, ink) in (rows | {"by rule: gradients, raw points": (raw, "#888888")}).items():
    mean, error = np.array(found).T
    axis.errorbar(EPSILONS, mean, error, color=ink, marker="o", capsize=3, label=name)
axis.axhline(0.1, color="black", linewidth=0.8, linestyle=":")
axis.text(0.5, 0.1, "chance", ha="left", va="bottom")
axis.set(xscale="log", xlabel=f"epsilon ({TERMS})", ylabel="accuracy on test points", ylim=(0, 1.02))
axis.set_xticks(EPSILONS, labels=[f"{e:g}" for e in EPSILONS])
axis.minorticks_off()
axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
axis.legend(frameon=False, loc="lower right")
plt.show()
table = {name: [f"{mean:.1%} ± {error:.1%}" for mean, error in found] for name, (found, _) in rows.items()}
print(pd.DataFrame(table, index=pd.Index(EPSILONS, name="epsilon")).T.to_string())
print(f"no privacy, encoder: {plain[0]:.1%} ± {plain[1]:.1%}\n")
first = EPSILONS[0]
print(
    f"warnings before the release at epsilon {first:g}",
    f"- rule: {models[first][0].method_.expectation}",
    f"- teachers: {caught[0].message}",
    sep="\n",
)

# %% [markdown]
# ## As many dimensions as the noise allows
#
# The noise is equal in all dimensions of the features, but the signal lies mostly in the dimensions in which the
# public points vary. The rule therefore sets the effective number of dimensions to (records / sigma) / 8, by a ridge
# on the covariance of the public points, which costs no privacy. A larger epsilon allows more dimensions. The encoder
# concentrates the variance in few dimensions.


# %%
def variances(clf, rows):
    """Variance of the public points in each dimension of the features of the linear model."""
    x, seen = torch.from_numpy(rows).float(), clf.student_.spec
    recipe = clf.method_.features
    lens = nn.Flatten() if recipe is None else recipe.learn(x, seen, seed=0)
    return torch.linalg.eigvalsh(torch.cov(encode(lens, x, seen).double().T)).flip(0).clamp(min=0)


spread = variances(models[1.0][0], z_public)
raw_spread = variances(raw_models[1.0][0], public_pixels)
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, value, ink in (("encoder", spread, "#1f4e79"), ("raw points: Fourier features", raw_spread, "#888888")):
    left.semilogx(np.arange(1, len(value) + 1), value.cumsum(0) / value.sum(), color=ink, label=name)
left.set(title="share of the variance in the first dimensions", ylim=(0, 1.02))
for epsilon, ink in zip(EPSILONS, ("#b9d3ea", "#6fa3d0", "#3a76ab", "#1f4e79"), strict=True):
    method = models[epsilon][0].method_
    floor = solve_ridge(spread, method.effective_dim) * spread.mean()
    name = f"epsilon {epsilon:g}: sigma {method.mechanism.sigma:.3g}, {method.effective_dim:.1f} dimensions"
    right.semilogx(np.arange(1, len(spread) + 1), spread / (spread + floor), color=ink, label=name)
right.set(title="weight of each dimension, with the encoder", ylim=(0, 1.02))
for axis in (left, right):
    axis.set(xlabel="dimension (principal component of the public points)")
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18))
plt.show()

# %% [markdown]
# ## What is published
#
# The statement identifies the encoder by its hash. To predict elsewhere, you need the release folder, the weights of
# the encoder and, for a torch module, its code. An ONNX file or a table of token vectors needs no code, and may be
# part of the release.

# %%
clf = models[1.0][0]
release = clf.save_release(folder / "release")
print(clf.privacy_["headline"])
for key in ("name", "kind", "sha256", "license", "trained_on"):
    print(f"  {key}: {clf.privacy_['encoder'][key]}")
images = others[splits[0][PRIVATE:]]
try:
    load_student(release).predict(images)
except ValueError as needed:
    print("\nwithout the encoder:", needed)

np.save(folder / "images.npy", images.numpy())
elsewhere = """
import numpy as np
from pate_torch import load_student, networks
from pate_torch.features.encoder import Encoder
module = networks.remove_head(networks.build("small_cnn", (1, 8, 8), 10))
student = load_student("release", encoder=Encoder(module=module, weights="encoder.safetensors"))
print(*student.predict(np.load("images.npy")).tolist())
"""
answer = subprocess.run([sys.executable, "-c", elsewhere], cwd=folder, capture_output=True, text=True, check=True)
same = np.array(answer.stdout.split(), dtype=int) == clf.predict(z[splits[0][PRIVATE:]])
print(f"\na new process, from images: the same class for {same.sum()} of {len(same)}")

# %% [markdown]
# See [encoders](../docs/howto/encoders.md) for texts, ONNX files, precomputed vectors and the assumptions of the
# guarantee, and [the choice of a method](../docs/howto/settings.md).
