# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Three hospitals that do not trust each other
#
# Three hospitals train one model together. No hospital shows its records to anybody, and nobody has to be trusted
# with all of them. A **joiner** adds up what the hospitals send: masked tables of whole numbers. This notebook plays
# all four roles in one process, to show what each of them sees. [The guide](../docs/howto/sites.md) has the same
# steps as commands for separate machines.
#
# Handwritten digits of scikit-learn stand in for the records.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
from sklearn.datasets import load_digits

from pate_torch.sites import training
from pate_torch.sites.charter import Terms, read_charter
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.pairs import accept_bundle
from pate_torch.sites.site import Site

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))


def make_table(rows):
    columns = {f"pixel{number}": pa.array(x[rows, number]) for number in range(x.shape[1])}
    return columns | {"digit": pa.array([str(label) for label in y[rows]])}


tables = {"Anna": make_table(order[:600]), "Bruno": make_table(order[600:1000]), "Clara": make_table(order[1000:1300])}
public, test = make_table(order[1300:1600]), order[1600:]
print({name: len(table["digit"]) for name, table in tables.items()})

# %% [markdown]
# ## Keys and charter
#
# Each site makes keys: the private halves stay in its folder, and the public halves go to the joiner. The joiner
# writes the **charter**: who takes part, with which keys, and on which terms. Here one site may be dishonest
# (`colluding=1`).

# %%
sites = {
    name: Site.create(Path(name), Path(f"{name}-ledger").absolute(), name=name, account="digits") for name in tables
}
joiner = Joiner(Path("join"))
terms = Terms(
    colluding=1,
    adjacency="add_remove",
    unit="record",
    delta="1/100000",
    classes=10,
    max_records=10_000,
    max_sites_per_unit=1,
    teachers=(0, 0, 0),
    records=(0, 0, 0),
)
charter = joiner.create_charter({name: site.state.key_file for name, site in sites.items()}, terms)
print(f"{len(charter):,} bytes")

# %% [markdown]
# ## The words
#
# The people of the sites read these words to each other on the telephone, without the joiner. The words change with
# every key, name and term. If the joiner had given the sites different charters, the words would differ.

# %%
words = read_charter(charter).format_fingerprint()
print(words)
confirmations = {name: site.confirm(charter, heard=words, cap_epsilon=3) for name, site in sites.items()}
keys = joiner.bundle(confirmations)
for site in sites.values():
    accept_bundle(site.state, keys)

# %% [markdown]
# ## One exchange
#
# The joiner asks for class sums: for each digit the sum of the features of its records, of which each has length 1 at
# most. Each site charges its own ledger, and adds noise and masks.

# %%
digits = [str(digit) for digit in range(10)]
kind = training.make_class_sums(public, "digit", digits)
slot, question, public_file = joiner.ask(kind, epsilon=1)
answers = {name: site.answer(question, public_file, tables[name]) for name, site in sites.items()}
for name, answer in answers.items():
    print(f"{name} sends {len(answer):,} bytes, among them", np.frombuffer(answer.partition(b"\n")[2][:24], "<u8"))

# %% [markdown]
# A single answer is uniform noise: all values of 64 bits are equally likely, whatever the records are. The sum of all
# three is the sum of the tables, with the noise that the guarantee needs. The right panel compares it with the true
# sum, which nobody in this protocol ever holds.

# %%
joiner.sum(answers)
noisy = joiner.load_sum()
numbers = np.frombuffer(answers["Anna"].partition(b"\n")[2][: 8 * noisy.numbers.size], "<u8")
true = sum(kind.count(kind.read_records(table, "record"), "add_remove").numbers for table in tables.values())

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
left.hist(numbers / 2.0**64, bins=16, range=(0, 1), color="#1a5fb4")
left.set_xlabel("number in Anna's answer, divided by $2^{64}$")
left.set_ylabel("numbers of the table")
left.set_title("one answer")
right.plot(true.ravel() / kind.unit_length, noisy.numbers.ravel(), ".", color="#c64600")
right.axline((0, 0), slope=1, color="#555555", linewidth=1)
right.set_xlabel("true sum")
right.set_ylabel("sum of the three answers")
right.set_title("the sum")
plt.tight_layout()
plt.show()

error = noisy.numbers - true.reshape(noisy.numbers.shape) / kind.unit_length
print(f"standard deviation of the noise: {error.std():.2f}, announced {noisy.sigma:.2f}")

# %% [markdown]
# Two answers do not help either. The masks of the third site remain.

# %%
parts = [np.frombuffer(answers[name].partition(b"\n")[2][:24], "<u8") for name in ("Anna", "Bruno")]
print("Anna and Bruno:", sum(parts))

# %% [markdown]
# ## The cost
#
# Epsilon is 1 against the joiner together with one site, smaller against readers of the results, and larger if both
# other sites are dishonest (delta 1e-5, add_remove, unit record, exact Gaussian accounting).

# %%
for colluding, guarantee in joiner.compute_guarantees([slot]).items():
    print(f"epsilon {guarantee.epsilon:.2f} against the joiner and {colluding} of 3 sites")

# %% [markdown]
# The same question again gives the same bytes and charges nothing. Another question in the same slot would be
# refused.

# %%
again = sites["Anna"].answer(question, public_file, tables["Anna"])
print(again == answers["Anna"])

# %% [markdown]
# ## The model
#
# From here on everything is computed from the noisy sum and public rows, at no further cost. `pate join train` also
# writes the report and the privacy statement.

# %%
student = training.train_student(noisy, public)
columns = {f"pixel{number}": x[test, number] for number in range(x.shape[1])}
is_right = np.array(student.predict_names(columns)) == y[test].astype(str)
print(f"accuracy on {len(test)} test digits: {is_right.mean():.3f}")

# %% [markdown]
# ## When not to use this
#
# - All sites trust one place: `PATEClassifier` on all records needs less noise.
# - A site may lie. One site can send any numbers and spoil the model, and nothing bounds the damage.
# - Sites often fail: the masks cancel only in the sum over all sites.
#
# [The threat model](../docs/explanation/sites.md) has all assumptions.
