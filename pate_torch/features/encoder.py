r"""Frozen encoders: public networks of the user that compute features of texts, images or rows.

    python train.py dataset=text dataset.path=mails.csv features=encoder \
        features.weights=table.safetensors features.tokenizer=tokenizer.json

Methods, teachers and students use only the features. The published student names the encoder by a hash.

Guarantee: the features of a point are a function of that point and the encoder alone, bit for bit. All batches have one
shape, and the position of a point in its batch depends on the content of the point (``map_batch_invariant``). With
``batch_size=1``, the default, each point is alone in its batch. Therefore the features of one unit do not depend on
other units, and an encoder changes no sensitivity.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch.core import checks, texts
from pate_torch.core.device import Device
from pate_torch.core.files import compute_file_digest, get_tensor_bytes
from pate_torch.core.progress import Progress, do_nothing
from pate_torch.features import encoding
from pate_torch.features.batch_invariant import map_batch_invariant
from pate_torch.networks import remove_head
from pate_torch.privacy.records import ENCODER_OPTION_CHECKS, DataSpec, EncoderCard

TOKENIZER_FILE = "tokenizer.json"  # in a release
_NUM_CHECKED_POINTS = 16  # public points on which ``check_batch_independence`` tests an encoder
TEXT_SPEC = DataSpec(
    name="texts", num_classes=2, input_shape=(4096,), class_names=("0", "1"), mean=(0.0,), std=(1.0,), text="text"
)
"""Specification of texts that belong to no data set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoder:
    """A frozen encoder: an ONNX file, a table of token vectors with a tokenizer, or a torch module with its weights.

    Attributes:
        name: Name of the encoder in reports.
        weights: Path of a .safetensors, .pth or .onnx file, or "package:path" for a file of an installed package, whose
            code is not run. None if the weights of ``module`` are used.
        network: Network of a library, without its classification head: "torchvision:resnet18", "timm:resnet18.a1_in1k".
            It determines ``size``, ``mean`` and ``std`` if they are None. None for other encoders.
        module: Torch module. None if ``weights`` is an ONNX file, a table of token vectors, or those of ``network``.
        tokenizer: Path of a tokenizer.json. None if points are no texts.
        max_length: Largest number of tokens of a text. Longer texts are cut.
        special_tokens: Whether the tokenizer adds special tokens. None for yes, except for a table of token vectors.
        pooling: Feature vector of a text: the "mean" of the token vectors, or the "first" token vector.
        headless: Whether to remove the last linear layer of the module. The inputs of this layer are then the features.
        size: Height and width in pixels to which images are resized. None if images keep their size.
        mean: Mean of each channel, in 0..1, for the normalization of images. None for the mean of the data set.
        std: Standard deviation of each channel. None for the standard deviation of the data set.
        batch_size: Number of points in a batch.
        license: License of the encoder, for the privacy statement.
        trained_on: Description of the training data, for the privacy statement. None if the training data are unknown.
        disjoint: Whether the training data hold no private record. If False, the privacy statement warns.
        publish: Whether to publish the files with the student. The license must allow the publication.
        cache_gb: Largest total size in GB of the encoded points on disk. 0 for no cache.
    """

    name: str = "encoder"
    weights: str | None = None
    network: str | None = None
    module: nn.Module | None = field(default=None, repr=False)
    tokenizer: str | None = None
    max_length: int = 256
    special_tokens: bool | None = None
    pooling: str = "mean"
    headless: bool = False
    size: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    batch_size: int = 1
    license: str | None = None
    trained_on: str | None = None
    disjoint: bool = False
    publish: bool = False
    cache_gb: float = 4.0

    def __post_init__(self) -> None:
        facts = {"license": self.license, "trained_on": self.trained_on, "disjoint": self.disjoint}
        EncoderCard(name=self.name, kind="given", **facts)  # type: ignore[arg-type]
        for key, check in ENCODER_OPTION_CHECKS.items():
            if check is not None and getattr(self, key) is not None:
                check(f"features.{key}", getattr(self, key))
        checks.integer("features.max_length", self.max_length, low=2)
        checks.one_of("features.pooling", self.pooling, ("mean", "first"))
        checks.non_negative("features.cache_gb", self.cache_gb)
        checks.boolean("features.publish", self.publish)
        if (self.mean is None) != (self.std is None):
            raise checks.error("features.std", self.std, "must be given together with features.mean")
        if self.module is not None and not isinstance(self.module, nn.Module):
            fix = "Set features.module._target_ to a class or function of your code."
            raise checks.error("features.module", type(self.module).__name__, "must be a torch module", fix)
        if self.network is not None:
            if self.weights is None or self.module is not None:
                problem = "needs features.weights, a local file of trained weights, and no features.module"
                raise checks.error("features.network", self.network, problem, "Nothing is downloaded.")
            for key, value in encoding.describe_network(self.network, self.digests["weights"]).items():
                if getattr(self, key) is None:
                    object.__setattr__(self, key, value)

    @property
    def kind(self) -> str:
        """The kind of the encoder: "torch" module, "onnx" file or "static" table of token vectors."""
        if self.module is not None or self.network is not None:
            return "torch"
        if self.weights is None:
            fix = "Set features.weights=<file>, and features.tokenizer=<file> for texts."
            raise checks.error("features.weights", None, "must be the file of the encoder's weights", fix)
        if self.weights.endswith(".onnx"):
            return "onnx"
        if self.tokenizer is not None:
            return "static"
        message = "needs features.network or features.module (with these weights) or features.tokenizer"
        raise checks.error("features.weights", self.weights, message, "Only a .onnx file needs neither.")

    @functools.cached_property
    def files(self) -> dict[str, Path]:
        """Path of each file by "weights" and "tokenizer"."""
        locations = {"weights": self.weights, "tokenizer": self.tokenizer}
        return {key: resolve_file(f"features.{key}", value) for key, value in locations.items() if value is not None}

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file by "weights" and "tokenizer", or of the module's tensors if there is no weights file."""
        digests = {key: compute_file_digest(path) for key, path in self.files.items()}
        if "weights" not in digests and self.module is not None:
            state = hashlib.sha256()
            for name, tensor in sorted(self.module.state_dict().items()):
                state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                state.update(get_tensor_bytes(tensor))
            digests["weights"] = state.hexdigest()
        return digests

    def make_card(self, points: DataSpec) -> EncoderCard:
        """Describe the encoder for a release. Raise ValueError if the tokenizer does not fit the kind of the points."""
        if points.kind == "text" and self.tokenizer is None:
            fix = "Set features.tokenizer to the path of a tokenizer.json."
            raise checks.error("features.tokenizer", None, "must be set, because points are texts", fix)
        if points.kind != "text" and self.tokenizer is not None:
            message, fix = f"must be null, because points are {points.kind}", "Texts need dataset=text."
            raise checks.error("features.tokenizer", self.tokenizer, message, fix)
        kind, class_ = self.kind, type(self.module)
        module = self.network if self.module is None else f"{class_.__module__}.{class_.__qualname__}"
        options: dict[str, Any] = {"batch_size": self.batch_size}
        if points.kind == "text":
            special_tokens = kind != "static" if self.special_tokens is None else self.special_tokens
            options |= {"max_length": self.max_length, "special_tokens": special_tokens, "pooling": self.pooling}
        if points.is_image:
            options |= {"size": self.size, "mean": self.mean, "std": self.std}
        options |= {"headless": True} if self.headless else {}
        return EncoderCard(
            name=self.name,
            kind=kind,
            sha256=self.digests["weights"],
            file=self.files["weights"].name if "weights" in self.files else None,
            tokenizer_sha256=self.digests.get("tokenizer"),
            module=module,
            options=options,
            license=self.license,
            trained_on=self.trained_on,
            disjoint=self.disjoint,
            points=points,
        )

    @classmethod
    def from_card(cls, card: EncoderCard, files: Mapping[str, str]) -> Encoder:
        """Make the encoder that a card describes. ``files`` holds paths by "weights" and "tokenizer"."""
        network = card.module if ":" in (card.module or "") else None
        if network is None and card.kind not in ("onnx", "static"):
            fix = "Pass an Encoder(module=..., weights=...) of pate_torch.features.encoder."
            message = f"is the torch module {card.module or 'unknown'}, which cannot be loaded from files"
            raise checks.error("encoder", card.name, message, fix)
        if unknown := sorted(set(files) - {"weights", "tokenizer"}):
            raise checks.error("encoder", unknown[0], "must be weights or tokenizer")
        facts: dict[str, Any] = {"license": card.license, "trained_on": card.trained_on, "disjoint": card.disjoint}
        return cls(name=card.name, network=network, **facts, **files, **card.options)  # type: ignore[arg-type]

    def check_card(self, card: EncoderCard) -> None:
        """Raise ValueError if ``card``, which must have ``points``, describes another encoder."""
        assert card.points is not None
        identity = self.make_card(card.points).identity
        for key, value in card.identity.items():
            if identity[key] != value:
                fix = f"Use {card.name}, weights {card.file} with SHA-256 {card.sha256}."
                problem = f"must be {value!r}, as in the description of {card.name}"
                raise checks.error(f"encoder {key}", identity[key], problem, fix)

    def encode(
        self,
        x: Any,
        points: DataSpec = TEXT_SPEC,
        *,
        device: Device = "cpu",
        progress: Progress = do_nothing,
        is_private: bool = False,
    ) -> Tensor:
        """Compute features [N, D], float32 on the CPU. The features of a point do not depend on other points.

        ``x`` are the points, or an iterator over blocks of them. The features do not depend on the blocks. If a private
        point (``is_private``) raises an error in the encoder, its features are NaN.
        """
        run = self.make_runner(points, device)

        def run_alone(x_B: Tensor) -> Tensor:  # PRIVATE: each point without the others, in its own position
            feature_BD = torch.full_like(run(torch.zeros_like(x_B)), torch.nan)
            for row, point in enumerate(x_B):
                single_x = torch.zeros_like(x_B)
                single_x[row] = point
                with contextlib.suppress(Exception):
                    feature_BD[row] = run(single_x)[row]
            return feature_BD

        def run_batch(x_B: Tensor) -> Tensor:
            try:
                return run(x_B)
            except Exception:  # a module of the user may raise anything, and the message may quote the point
                if not is_private:
                    raise
            return run_alone(x_B)

        def encode_batches(batches: Iterator[Tensor]) -> Tensor:
            return torch.stack([run_batch(x_B) for x_B in batches]).cpu()  # one copy from a GPU

        blocks = x if isinstance(x, Iterator) else [x]
        report = do_nothing if isinstance(x, Iterator) else progress  # the reader of the blocks reports them
        tensors = (self.to_tensor(block, points) for block in blocks)
        return torch.cat([map_batch_invariant(encode_batches, x_B, report, self.batch_size) for x_B in tensors])

    def to_tensor(self, x: Any, points: DataSpec) -> Tensor:
        """Convert points (texts, arrays or the columns of a table) to a tensor of raw points."""
        is_table = isinstance(x, Mapping) or hasattr(x, "columns")
        if points.kind == "text" and not isinstance(x, Tensor):
            if is_table:
                checks.one_of("text", points.text, [str(name) for name in x])
                x = x[points.text].to_pylist() if hasattr(x[points.text], "to_pylist") else x[points.text]
            if isinstance(x, str):
                raise checks.error("texts", "one text", "must be a list of texts")
            return texts.encode_texts("texts", list(x), points.input_shape[0])
        if is_table and points.schema is not None:
            return torch.from_numpy(points.schema.encode(x))
        x = torch.as_tensor(x)
        if tuple(x.shape[1:]) != tuple(points.input_shape):
            expected_shape = ", ".join(map(str, points.input_shape))
            raise checks.error("points", tuple(x.shape), f"must be {points.kind} of shape (N, {expected_shape})")
        return x

    def make_runner(self, points: DataSpec, device: Device = "cpu") -> Callable[[Tensor], Tensor]:
        """Make a function from raw points to features, float32 [B, D]. Raise ValueError if a batch of zeros fails."""
        card = self.make_card(points)
        compute, pooling = self._make_runtime(device), "mean" if card.kind == "static" else self.pooling
        preprocess = self._make_tokenizer(card) if points.kind == "text" else functools.partial(self._normalize, points)

        def run(x_B: Tensor) -> Tensor:
            inputs = preprocess(x_B)
            return encoding.pool_features(compute(inputs), inputs, pooling)

        dtype = torch.uint8 if points.is_image or points.kind == "text" else torch.float32
        blank = torch.zeros(self.batch_size, *points.input_shape, dtype=dtype)
        try:
            run(blank)
        except Exception as error:  # a module of the user may raise anything
            reason = " ".join(str(error).split())[:200]
            message = f"cannot take {points.kind} of shape {tuple(points.input_shape)} ({reason})"
            raise checks.error("features.name", self.name, message, "Choose an encoder for such points.") from error
        return run

    def check_batch_independence(self, x_P: Tensor, points: DataSpec, device: Device = "cpu") -> None:
        """Raise ValueError if the features of one public point depend on another point."""
        # Batch normalization and quantization by the range of a batch make features depend on the other points of the
        # batch. A state of the module makes features depend on earlier points. A sample is therefore encoded twice, in
        # reverse order, and point by point.
        run, size = self.make_runner(points, device), self.batch_size
        count = size * math.ceil(_NUM_CHECKED_POINTS / size)
        x_S = x_P[torch.linspace(0, len(x_P) - 1, count).long()]  # a small pool repeats points

        def encode(x_S: Tensor) -> Tensor:
            return torch.cat([run(x_B.clone()).cpu() for x_B in x_S.split(size)])

        feature_SD = encode(x_S)
        if not bool(feature_SD.isfinite().all()):
            raise checks.error("features.name", self.name, "returns features of public points that are not finite")
        if not torch.equal(encode(x_S), feature_SD):
            raise checks.error("features.name", self.name, "returns different features of a point the second time")
        message = "mixes points: the features of a point depend on the other points in its batch"
        dependence_error = checks.error("features.batch_size", size, message, "Use features.batch_size=1.")
        if not torch.equal(encode(x_S.flip(0)).flip(0), feature_SD):  # in the reverse order
            raise dependence_error
        for slot in range(size if size > 1 else 0):
            single_x = torch.zeros_like(x_S[:size])
            single_x[slot] = x_S[slot]
            if not torch.equal(run(single_x)[slot].cpu(), feature_SD[slot]):
                raise dependence_error

    def _make_runtime(self, device: Device) -> encoding.Runtime:
        if self.kind != "torch":
            make = encoding.make_static_runtime if self.kind == "static" else encoding.make_onnx_runtime
            return make(self.files["weights"])
        module, head = (copy.deepcopy(self.module), ()) if self.network is None else encoding.make_network(self.network)
        assert module is not None
        if "weights" in self.files:
            encoding.load_weights(module, self.files["weights"], head)
        return encoding.make_torch_runtime(remove_head(module) if self.headless else module, device)

    def _normalize(self, points: DataSpec, x_B: Tensor) -> Tensor:
        if not points.is_image:
            return points.normalize(x_B)
        z = points.normalize(x_B) if self.mean is None else x_B.float() / 255
        if self.size is not None and tuple(z.shape[2:]) != (self.size, self.size):
            z = F.interpolate(z, (self.size, self.size), mode="bilinear", antialias=True, align_corners=False)
        if self.mean is not None and self.std is not None:
            mean, std = (torch.tensor(list(v), dtype=torch.float32).view(-1, 1, 1) for v in (self.mean, self.std))
            z = (z.expand(-1, len(mean), -1, -1) - mean) / std  # a gray image becomes three equal channels
        return z

    def _make_tokenizer(self, card: EncoderCard) -> Callable[[Tensor], encoding.Tokens]:
        path = self.files["tokenizer"]
        tokenizers = checks.import_optional("tokenizers", "text", "features.tokenizer", str(path))
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain exceptions
            problem = f"is not a readable tokenizer.json ({error})"
            raise checks.error("features.tokenizer", str(path), problem) from error
        pad_id = (tokenizer.padding or {}).get("pad_id", 0)
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_length)
        add_special_tokens = bool(card.options["special_tokens"])

        def tokenize(x_B: Tensor) -> encoding.Tokens:
            try:
                decoded_texts = texts.decode_texts(x_B)
                token_ids = [tokenizer.encode(t, add_special_tokens=add_special_tokens).ids for t in decoded_texts]
            except Exception as error:  # the message does not quote the text
                message = "cannot encode every text, perhaps because it has no token for unknown words"
                raise checks.error("features.tokenizer", str(path), message) from error
            # In a batch of one, a text keeps its length. In larger batches all texts get the public length max_length.
            length = max(1, len(token_ids[0])) if self.batch_size == 1 else self.max_length
            ids_BL = torch.tensor([ids + [pad_id] * (length - len(ids)) for ids in token_ids], dtype=torch.int64)
            count_B = torch.tensor([len(ids) for ids in token_ids])
            return encoding.Tokens(ids_BL, (torch.arange(length) < count_B[:, None]).long())

        return tokenize


def resolve_file(key: str, location: str) -> Path:
    """Find a file, or "package:path" for a file of an installed package, without running the package's code."""
    path = Path(checks.nonempty_string(key, location)).expanduser()
    if path.is_file():
        return path
    package, colon, inner_path = str(location).partition(":")
    if colon and package.isidentifier():
        module_spec = importlib.util.find_spec(package)
        for folder in (module_spec.submodule_search_locations or ()) if module_spec is not None else ():
            if (Path(folder) / inner_path).is_file():
                return Path(folder) / inner_path
        if module_spec is None:
            raise checks.error(key, location, f"the package {package} is not installed", f"pip install {package}.")
        raise checks.error(key, location, f"the package {package} has no file {inner_path}")
    raise checks.error(key, location, "must be an existing file", f"Looked for {path.absolute()}.")
