"""Runtimes of frozen encoders (torch modules, ONNX files, tables of token vectors), and a cache of features on disk.

Networks of torchvision and timm take their weights from local files: nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.core.device import Device
from pate_torch.core.files import atomic_replacement, create_private_folder, read_tensors
from pate_torch.core.run_folders import hold_lock


class Tokens(NamedTuple):
    """Tokens of texts: ids, int64 [B, L], and a mask, int64 [B, L], that is 1 at tokens and 0 at padding."""

    ids_BL: Tensor
    mask_BL: Tensor


Points = Tensor | Tokens
Runtime = Callable[[Points], Tensor]
"""Function from a batch of points or tokens to the output of the encoder's network, on the device of the encoder."""


def make_torch_runtime(module: nn.Module, device: Device) -> Runtime:
    """Make the runtime of a torch module, in evaluation mode."""
    module = module.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def run(points: Points) -> Tensor:
        inputs = points if isinstance(points, Tokens) else (points,)
        output = module(*(tensor.to(device) for tensor in inputs))
        output = getattr(output, "last_hidden_state", output)  # models of the transformers library
        return output[0] if isinstance(output, tuple | list) else output

    return run


def load_weights(module: nn.Module, weights: Path, head: Collection[str] = ()) -> None:
    """Load a file into a module, except the layers of its ``head``. Raise ValueError if names or shapes differ."""
    state, old_names = module.state_dict(), r"^module[.]|(?<=norm|conv)[.](?=[12][.])"  # of DataParallel and DenseNet
    items = _read_weights(weights).items()
    tensors = {name if name in state else re.sub(old_names, "", name): value for name, value in items}
    differences = {  # old files lack the counters of batch normalizations, which evaluation does not use
        "lacks the tensor": {name for name in state.keys() - tensors.keys() if "num_batches_tracked" not in name},
        "has the unknown tensor": {key for key in tensors.keys() - state.keys() if key.rpartition(".")[0] not in head},
        "has another shape of": {name for name in state.keys() & tensors if state[name].shape != tensors[name].shape},
    }
    for problem, names in differences.items():
        if names:
            problem += f" {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            fix = f"The tensors must be those of {type(module).__name__}."
            raise checks.error("features.weights", str(weights), problem, fix)
    state.update((name, tensors[name]) for name in state.keys() & tensors)  # keeps the versions of the layers
    module.load_state_dict(state)


def _read_weights(weights: Path) -> dict[str, Tensor]:
    if weights.suffix not in {".pt", ".pth", ".bin", ".ckpt"}:
        return read_tensors(weights)
    try:
        tensors = torch.load(weights, map_location="cpu", weights_only=True)  # runs no code of the file
        return {name: value.detach() for name, value in tensors.get("state_dict", tensors).items()}
    except Exception as error:  # torch.load raises errors of pickle, zipfile and others
        raise checks.error("features.weights", str(weights), "must be a state_dict() that torch.save wrote") from error


def make_static_runtime(weights: Path) -> Runtime:
    """Make the runtime of a safetensors file that holds one table of token vectors [V, D]."""
    tables = list(read_tensors(weights).values())
    if len(tables) != 1 or tables[0].dim() != 2:
        fix = "For the weights of a network, set features.module."
        raise checks.error("features.weights", str(weights), "must hold one table of token vectors", fix)
    table_VD = tables[0].float()

    def run(points: Points) -> Tensor:
        assert isinstance(points, Tokens)
        return table_VD[points.ids_BL.clamp(max=len(table_VD) - 1)]

    return run


def make_onnx_runtime(weights: Path) -> Runtime:
    """Make the runtime of an ONNX file: onnxruntime on one thread of the CPU."""
    ort = checks.import_optional("onnxruntime", "onnx", "features.weights", str(weights))
    check_no_external_data(weights)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(weights), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the errors of onnxruntime share no public base class
        raise checks.error("features.weights", str(weights), f"is not a readable ONNX file ({error})") from error
    inputs = session.get_inputs()

    def run(points: Points) -> Tensor:
        feed = {onnx_input.name: _make_onnx_input(onnx_input, points) for onnx_input in inputs}
        return torch.from_numpy(np.asarray(session.run(None, feed)[0]))

    return run


def check_no_external_data(weights: Path) -> None:
    """Raise ValueError if an ONNX file is damaged or has tensors in other files, which its hash does not cover."""
    onnx = checks.import_optional("onnx", "onnx", "features.weights", str(weights))
    protobuf = checks.import_optional("google.protobuf.message", "onnx", "features.weights", str(weights))
    try:
        pending = [onnx.load(weights, load_external_data=False)]
    except protobuf.DecodeError as error:
        raise checks.error("features.weights", str(weights), "is not a readable ONNX file (truncated)") from error
    while pending:
        message = pending.pop()
        if isinstance(message, onnx.TensorProto) and (message.external_data or message.data_location):
            fix = "Export the network with all tensors in one file."
            raise checks.error("features.weights", str(weights), "has tensors in another file", fix)
        for field, value in message.ListFields():
            if field.message_type is not None:
                pending += [value] if isinstance(value, protobuf.Message) else value


def _make_onnx_input(onnx_input: Any, points: Points) -> np.ndarray:
    kind = np.float32 if "float" in onnx_input.type else np.int32 if "int32" in onnx_input.type else np.int64
    if not isinstance(points, Tokens):
        value = points
    elif "mask" in onnx_input.name:
        value = points.mask_BL
    else:
        value = torch.zeros_like(points.ids_BL) if "type" in onnx_input.name else points.ids_BL
    return np.ascontiguousarray(value.cpu().numpy().astype(kind))


def describe_network(network: str, digest: str) -> dict[str, Any]:
    """Return the fields of ``Encoder`` that a library declares for a network: size, mean and std of its images.

    If torchvision published the weights with this SHA-256 ``digest``, ``trained_on`` is declared as well.
    """
    library, name = _find_network(network)
    if library.__name__ == "timm":
        config = library.data.resolve_data_config(pretrained_cfg=library.get_pretrained_cfg(name).to_dict())
        return {"size": config["input_size"][-1], "mean": config["mean"], "std": config["std"]}
    versions = library.models.get_model_weights(name)  # their file names contain the first digits of their SHA-256
    published = [version for version in versions if digest.startswith(re.findall("-([0-9a-f]+)[.]", version.url)[-1])]
    transform = [*published, versions.DEFAULT][0].transforms()
    trained_on = "ImageNet-1K" if any(v.name in ("IMAGENET1K_V1", "IMAGENET1K_V2") for v in published) else None
    return {"size": transform.crop_size[0], "mean": transform.mean, "std": transform.std, "trained_on": trained_on}


def make_network(network: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a network without its classification head, whose inputs are the features, and name the removed layers."""
    library, name = _find_network(network)
    with torch.random.fork_rng(devices=[]):
        if library.__name__ == "timm":
            module = library.create_model(name, pretrained=False, num_classes=0)
            head = module.pretrained_cfg["classifier"] or ()
            return module, (head,) if isinstance(head, str) else tuple(head)
        # The weights of these two networks were trained with another range of inputs, to which the network converts.
        options = {"transform_input": True, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
        module = library.models.get_model(name, weights=None, **options)
    head = [key for key, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1]
    module.set_submodule(head, nn.Identity())
    return module, (head,)


def _find_network(network: str) -> tuple[Any, str]:
    kind, _, name = str(network).partition(":")
    library = checks.import_optional("timm" if kind == "timm" else "torchvision", "timm", "features.network", network)
    names = library.list_pretrained() if kind == "timm" else library.models.list_models(library.models)
    if kind not in ("timm", "torchvision") or name not in names:
        problem = "must be torchvision:<name> or timm:<name>, such as torchvision:resnet18 or timm:resnet18.a1_in1k"
        raise checks.error("features.network", network, problem)
    return library, name


def pool_features(output: Tensor, points: Points, pooling: str) -> Tensor:
    """Pool the output of a network, token vectors [B, L, D] or a feature map [B, D, H, W], to float32 [B, D]."""
    output = output.float()
    if isinstance(points, Tokens) and output.dim() == 3:
        if pooling == "first":
            return output[:, 0]
        mask_BL1 = points.mask_BL[:, :, None].to(output)
        return (output * mask_BL1).sum(1) / mask_BL1.sum(1).clamp(min=1)
    if output.dim() == 4:
        output = output.mean((2, 3))
    return output.flatten(1)


CACHE_README = """PRIVATE: do not publish, do not share.

These files hold the features that a frozen encoder computed of public and private records. The features reveal single
records. You may delete the files at any time; missing features are computed again.
"""


def load_or_encode(
    root: Path,
    name: str,
    key_facts: Mapping[str, object],
    compute_digest: Callable[[], str],
    encode: Callable[[], Tensor],
    *,
    max_bytes: int,
    notify: Callable[[str], object],
) -> Tensor:
    """PRIVATE. Return the features of the points, from ``<root>/features/<name>-<key>.safetensors`` or ``encode``.

    The key is a hash of the points (``compute_digest``) and of ``key_facts``, plain data that determine the features
    together with the points. It is as private as the points. If the files exceed ``max_bytes`` (0 for no cache), the
    least recently used files are deleted. To forget a record, delete the files of its data set.
    """
    if not max_bytes:
        return encode()
    key_text = json.dumps([key_facts, compute_digest()], sort_keys=True)
    key = hashlib.sha256(key_text.encode()).hexdigest()[:32]
    file = create_private_folder(root / "features", CACHE_README) / f"{name}-{key}.safetensors"
    wait_message = "Waiting for {}, which encodes the same points."
    with hold_lock(file.with_suffix(".lock"), "paths.root", on_wait=lambda holder: notify(wait_message.format(holder))):
        if file.exists():
            try:
                feature_ND = read_tensors(file)["features"]
                os.utime(file)  # records the time of the last use
                return feature_ND
            except (ValueError, KeyError):  # a damaged file is replaced
                file.unlink(missing_ok=True)
        feature_ND = encode()
        size = feature_ND.numel() * feature_ND.element_size()
        if size > max_bytes:
            notify(f"Encoded points are not cached: {size / 1e9:.2g} GB are more than features.cache_gb.")
            return feature_ND
        cached_files = sorted(file.parent.glob("*.safetensors"), key=lambda cached_file: cached_file.stat().st_mtime)
        total = size + sum(cached_file.stat().st_size for cached_file in cached_files)
        while total > max_bytes:
            oldest = cached_files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink(missing_ok=True)
        with atomic_replacement(file) as temporary:
            save_file({"features": feature_ND.contiguous()}, temporary)
        return feature_ND
