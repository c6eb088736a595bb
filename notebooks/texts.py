# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Texts with a frozen encoder
#
# A help desk wants to publish a model that tells bills from technical trouble, without revealing any single message.
# The messages are invented by the next cell. A *frozen encoder* turns each text into numbers and has never seen a
# private message.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

from pate_torch import PATEClassifier, ReleasedClassifier
from pate_torch.privacy.records import EncoderCard

random = np.random.default_rng(0)
TOPICS = {
    "bill": ["invoice", "refund", "paid", "charge", "amount", "account", "card", "twice", "transfer", "statement"],
    "trouble": ["broken", "login", "error", "crash", "slow", "screen", "reset", "update", "freeze", "connection"],
}
COMMON = [
    "my",
    "the",
    "is",
    "it",
    "please",
    "today",
    "again",
    "since",
    "help",
    "with",
    "and",
    "wrong",
    "customer",
    "number",
    "called",
    "still",
]


def draw_messages(count: int) -> tuple[list[str], np.ndarray]:
    """Draw invented messages of ten words, three of them on the topic; one in ten has words of the other topic."""
    labels = random.choice(list(TOPICS), count)
    messages = []
    for label in labels:
        topic = label if random.random() > 0.1 else next(name for name in TOPICS if name != label)
        messages.append(" ".join(random.permutation([*random.choice(TOPICS[topic], 3), *random.choice(COMMON, 7)])))
    return messages, labels


private, labels = draw_messages(3000)
public, _ = draw_messages(500)
test, truth = draw_messages(1000)
print(private[0], "->", labels[0])

# %% [markdown]
# ## The encoder
#
# Any function of one text alone will do. Here it is learned from the *public* messages: weighted word counts on
# thirty directions. With the extra `[text]`, `Encoder` reads tables of token vectors and ONNX models with their
# tokenizers ([all encoders](../docs/howto/encoders.md)).

# %%
encoder = make_pipeline(TfidfVectorizer(), TruncatedSVD(30, random_state=0), Normalizer()).fit(public)
z, z_public, z_test = (encoder.transform(texts).astype(np.float32) for texts in (private, public, test))
print(z.shape)

# %% [markdown]
# ## Fit
#
# The card tells readers of the release which encoder computed the features, and what it was trained on. The guarantee
# covers what the model learned from the private messages, not what an encoder saw before: `disjoint=True` is your
# statement that it saw none of them.

# %%
card = EncoderCard(name="tf-idf of public messages", kind="given", trained_on="500 public messages", disjoint=True)
clf = PATEClassifier(epsilon=0.5, account="help-desk", classes=list(TOPICS), encoder=card)
clf.fit(z, labels, public=z_public)

# %%
plain = LogisticRegression(max_iter=1000).fit(z, labels)
scores = {"epsilon 0.5": clf.score(z_test, truth), "no privacy": plain.score(z_test, truth)}
print({name: round(score, 3) for name, score in scores.items()}, clf.privacy_["headline"])
plt.figure(figsize=(4, 2.2))
plt.barh(list(scores), list(scores.values()), color=["#1a5fb4", "#999999"])
plt.xlim(0.5, 1)
plt.xlabel("test accuracy")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Use
#
# The receiver encodes a new text with the same encoder and asks the released model.

# %%
clf.save_release("help-desk")
model = ReleasedClassifier.load("help-desk")
new = ["please refund the charge, it was paid twice", "login error again since the update"]
print(model.predict(encoder.transform(new).astype(np.float32)))

# %% [markdown]
# ## When not to use this
#
# - The encoder was trained or tuned on the private texts: no epsilon covers what it learned.
# - The features of one text depend on other texts, as with statistics of a batch: encode every text alone.
# - You want to generate texts.
