"""Small encoders of every kind, and points for them."""

import csv
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from pate_torch.core import texts
from pate_torch.features.encoder import TEXT_SPEC, Encoder
from pate_torch.privacy.records import DataSpec
from tests.features import onnx_files

WORDS = "tests:privacy/characters.json"
TOKENS, WIDTH = 16, 6
IMAGES = DataSpec(name="images", num_classes=2, input_shape=(1, 8, 8), class_names=("a", "b"), mean=(0.4,), std=(0.3,))
ROWS = DataSpec(
    name="rows", num_classes=2, input_shape=(4,), class_names=("a", "b"), mean=(1.0,) * 4, std=(2.0, 1.0, 1.0, 1.0)
)


class Eye(nn.Module):
    """A small network for images, with a batch normalization, and a last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.GELU())
        self.head = nn.Linear(180, 3)

    def forward(self, x):
        return self.head(self.look(x).flatten(1))


class Reader(nn.Module):
    """A transformer of one layer: every token sees the others of its text."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids_BL, mask_BL):
        return self.layer(self.table(ids_BL), src_key_padding_mask=mask_BL == 0)


class Crowd(nn.Module):
    """A point less the mean of its batch."""

    def forward(self, x):
        return x - x.mean(0)


def drawn(module: nn.Module, file: Path, seed: int = 0) -> Path:
    """Weights for a module, as a file."""
    draw = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(value.shape, generator=draw).abs() if value.is_floating_point() else value
        for name, value in module.state_dict().items()
    }
    save_file(state, file)
    return file


def table(file: Path, seed: int = 0) -> torch.Tensor:
    """Vectors of tokens, as a file; returns them."""
    table_VD = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    save_file({"embedding.weight": table_VD}, file)
    return table_VD


def static(folder: Path, **options) -> Encoder:
    table(folder / "table.safetensors")
    return Encoder(name="table", weights=str(folder / "table.safetensors"), tokenizer=WORDS, **options)


def eye(folder: Path, **options) -> Encoder:
    return Encoder(name="eye", module=Eye(), weights=str(drawn(Eye(), folder / "eye.safetensors")), **options)


def reader(folder: Path, **options) -> Encoder:
    weights = drawn(Reader(), folder / "reader.safetensors")
    return Encoder(name="reader", module=Reader(), weights=str(weights), tokenizer=WORDS, max_length=24, **options)


def onnx_rows(folder: Path, **options) -> Encoder:
    weight_DF = np.random.default_rng(0).normal(size=(4, 9))
    return Encoder(name="linear", weights=str(onnx_files.linear(folder / "rows.onnx", weight_DF)), **options)


def onnx_words(folder: Path, **options) -> Encoder:
    table_VD = np.random.default_rng(0).normal(size=(TOKENS, WIDTH))
    weights = onnx_files.table(folder / "words.onnx", table_VD)
    return Encoder(name="words", weights=str(weights), tokenizer=WORDS, max_length=24, **options)


KINDS = {
    "a table of token vectors": (static, TEXT_SPEC),
    "a torch module for images": (eye, IMAGES),
    "a torch module for texts": (reader, TEXT_SPEC),
    "onnx for rows": (onnx_rows, ROWS),
    "onnx for texts": (onnx_words, TEXT_SPEC),
}


def mails(file: Path, count: int, draw: np.random.Generator, *, labeled: bool = True) -> None:
    """A table of texts: of low digits, or of high ones."""
    with file.open("w", newline="") as lines:
        rows = csv.writer(lines)
        rows.writerow(["text", "label"] if labeled else ["text"])
        for _ in range(count):
            high = draw.random() < 0.5
            text = "".join(draw.choice(list("56789" if high else "01234"), draw.integers(4, 20)))
            rows.writerow([text, "high" if high else "low"] if labeled else [text])


def sayings(count: int, seed: int = 0) -> list[str]:
    """Texts of one to thirty characters."""
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(list("0123456789+-.e"), draw.integers(1, 31))) for _ in range(count)]


def points(spec: DataSpec, count: int, seed: int = 0) -> torch.Tensor:
    """Points of that kind, all different."""
    generator = torch.Generator().manual_seed(seed)
    if spec.kind == "text":
        different = [f"{place}e{text}" for place, text in enumerate(sayings(count, seed))]
        return texts.encode_texts("texts", different, spec.input_shape[0])
    if spec.is_image:
        return torch.randint(0, 256, (count, *spec.input_shape), dtype=torch.uint8, generator=generator)
    return torch.randn(count, *spec.input_shape, generator=generator)
