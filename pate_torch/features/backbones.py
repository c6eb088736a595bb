"""Networks of torchvision and timm as encoders. Their weights are local files: nothing is downloaded."""

import re
from typing import Any

import torch
from torch import nn

from pate_torch.core import checks
from pate_torch.features.encoding import import_optional


def describe(network: str, digest: str) -> dict[str, Any]:
    """Return size, mean and std of a network's images, and ``trained_on`` if torchvision published the weights."""
    library, name = _find(network)
    if library.__name__ == "timm":
        config = library.data.resolve_data_config(pretrained_cfg=library.get_pretrained_cfg(name).to_dict())
        return {"size": config["input_size"][-1], "mean": config["mean"], "std": config["std"]}
    versions = library.models.get_model_weights(name)  # their file names contain the first digits of their SHA-256
    published = [version for version in versions if digest.startswith(re.findall("-([0-9a-f]+)[.]", version.url)[-1])]
    transform = [*published, versions.DEFAULT][0].transforms()
    trained_on = "ImageNet-1K" if any(v.name in ("IMAGENET1K_V1", "IMAGENET1K_V2") for v in published) else None
    return {"size": transform.crop_size[0], "mean": transform.mean, "std": transform.std, "trained_on": trained_on}


def build(network: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a network without its classification head, whose inputs are the features, and name the removed layers."""
    library, name = _find(network)
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


def _find(network: str) -> tuple[Any, str]:
    kind, _, name = str(network).partition(":")
    library = import_optional("timm" if kind == "timm" else "torchvision", "timm", "features.network", network)
    names = library.list_pretrained() if kind == "timm" else library.models.list_models(library.models)
    if kind not in ("timm", "torchvision") or name not in names:
        problem = "must be torchvision:<name> or timm:<name>, such as torchvision:resnet18 or timm:resnet18.a1_in1k"
        raise checks.error("features.network", network, problem)
    return library, name
