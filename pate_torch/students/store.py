"""The released student on disk: one safetensors file whose header says how to build the network.

No pickle anywhere: loading a student runs no code from the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.files import SHARED_FILE_MODE, atomic_replacement
from pate_torch.privacy.records import OPTIONAL_SPEC_FIELDS, DataSpec
from pate_torch.students.base import Student

FORMAT = "pate_torch.student/1"
METADATA_KEY = "pate_torch"


def save(student: Student, path: Path) -> None:
    """Write the weights, the network's description and the public facts of the data, by an atomic rename."""
    spec = student.spec.to_dict()
    extra = {key: spec.pop(key) for key in OPTIONAL_SPEC_FIELDS if key in spec}
    facts = {"format": FORMAT, "network": student.network, "spec": spec, **extra}
    header = {METADATA_KEY: json.dumps(facts, sort_keys=True)}  # one entry: several have no fixed order in the file
    tensors = {name: value.detach().cpu().contiguous() for name, value in student.module.state_dict().items()}
    with atomic_replacement(path, SHARED_FILE_MODE) as temporary:
        save_file(tensors, temporary, metadata=header)


def load(path: Path | str, device: torch.device | str = "cpu") -> Student:
    """Load the student in ``path``.

    Raises:
        ValueError: The file is missing, damaged or not a student of ours.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise checks.error("student", str(path), f"is missing or not a safetensors file ({error})") from error
    try:
        facts: Any = json.loads(header.get(METADATA_KEY, "{}"))
    except (ValueError, RecursionError):
        facts = {}
    facts = facts if isinstance(facts, dict) else {}
    if facts.get("format") != FORMAT:
        raise checks.error("student", str(path), f"has format {facts.get('format')!r}, not {FORMAT!r}")
    try:
        network: dict[str, Any] = facts["network"]
        spec = DataSpec.from_dict(facts["spec"] | {key: facts[key] for key in OPTIONAL_SPEC_FIELDS if key in facts})
        _check_header(network, spec, tensors)
        with torch.device("meta"):  # a header may ask for layers of any size: the file's own are compared first
            module = networks.rebuild(network)
        expected = {name: (value.shape, value.dtype) for name, value in module.state_dict().items()}
        if expected != {name: (value.shape, value.dtype) for name, value in tensors.items()}:
            raise ValueError("its tensors have other names, shapes or types")
        module.load_state_dict(tensors, assign=True)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise checks.error("student", str(path), f"does not fit the network its header describes ({error})") from error
    return Student(network=network, module=module.to(device).eval(), spec=spec)


def _check_header(network: dict[str, Any], spec: DataSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError where header and tensors contradict each other, before anything is built of them."""
    if list(network["input_shape"]) != list(spec.input_shape) or network["num_classes"] != spec.num_classes:
        raise ValueError("its network takes other points or has other classes than its data")
    design: Any = network
    while isinstance(design, dict):  # a network may be made of another
        options = design.get("options") or {}
        counts = [options.get(name, 1) for name in ("members", "blocks", "depth")]
        if max(*counts, *(len(v) for v in options.values() if isinstance(v, list)), 1) > len(tensors) + 8:
            raise ValueError("its network has more layers than the file has tensors")
        design = options.get("of")
    for name, value in tensors.items():
        has_features = name.rpartition(".")[2] == "feature_R"
        if has_features and not bool(((value >= 0) & (value < math.prod(spec.input_shape))).all()):
            raise ValueError("its rules are about features that points do not have")
