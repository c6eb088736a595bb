"""Files of released students, and linear students that predict with NumPy.

This module does not import torch, and reading a file runs no code of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pate_torch.core import checks

FORMAT = "pate_torch.student/1"
METADATA_KEY = "pate_torch"
STUDENT_FILE = "student.safetensors"
_FOURIER = ("frequency_DF", "phase_F", "knot_DK", "column_weight_D", "rank_weight_D", "cosine_weight")


def find_student_file(location: Path | str) -> Path:
    """Find the file of a student: ``location``, or a file in the folder of a run or of a release."""
    location = Path(location)
    for candidate in (location, location / "release" / STUDENT_FILE, location / STUDENT_FILE):
        if candidate.is_file():
            return candidate
    raise checks.error("student", str(location), f"must be a student file or a folder with {STUDENT_FILE}")


def read(path: Path | str, framework: str, device: str = "cpu") -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the header of a student's file, and its tensors by name.

    ``framework`` is "pt" for tensors of torch, or "np" for arrays of NumPy.

    Raises:
        ValueError: The file is missing, damaged, or not a student.
    """
    try:
        with safe_open(path, framework=framework, device=device) as file:
            header: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise checks.error("student", str(path), f"is missing or not a safetensors file ({error})") from error
    try:
        facts: Any = json.loads(header.get(METADATA_KEY, "{}"))
    except (ValueError, RecursionError):
        facts = None
    file_format = facts.get("format") if isinstance(facts, dict) else None
    if file_format != FORMAT:
        raise checks.error("student", str(path), f"has format {file_format!r}, not {FORMAT!r}")
    return facts, tensors


@dataclass(frozen=True, eq=False)
class NumpyStudent:
    """Releasable. A linear model of points, or of points and random cosines.

    Attributes:
        spec: Public facts about the data, as ``DataSpec.to_dict`` returns them.
        weight_CD: Weights.
        bias_C: Biases.
        fourier: Tensors of ``networks.Fourier`` by name. None if the features are the points themselves.
        whitening: Center [D], axes [D, E] and radius of features that are scaled to length 1, whitened and clipped
            (``networks.WhitenAndClip``). None if the features are the inputs of the linear model.
    """

    spec: dict[str, Any]
    weight_CD: np.ndarray
    bias_C: np.ndarray
    fourier: dict[str, np.ndarray] | None
    whitening: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    @classmethod
    def load(cls, path: Path | str) -> NumpyStudent | None:
        """Load a student. None if it needs torch. Raise ValueError for a file that is damaged or not a student."""
        facts, tensors = read(path, "np")
        try:
            spec, network = facts | facts["spec"], facts["network"]
            is_probe, options = network["name"] == "probe", network["options"]
            name = (options.get("of") or {"name": "logistic"})["name"] if is_probe else network["name"]
            has_encoder = (spec.get("encoder") or {}).get("points") is not None
            if has_encoder or options.get("neighbors") or name not in ("logistic", "fourier"):
                return None
            trunk, head = ("0.1.", "3.") if is_probe else ("1.", "2." if name == "fourier" else "1.")
            fourier = {key: tensors.pop(f"{trunk}{key}") for key in _FOURIER} if name == "fourier" else None
            whitening = None
            if is_probe:
                whitening = tensors.pop("2.center_D"), tensors.pop("2.axis_DE"), tensors.pop("2.radius")
            student = cls(spec, tensors.pop(f"{head}weight"), tensors.pop(f"{head}bias"), fourier, whitening)
            num_features = student.weight_CD.shape[1] if whitening is None else len(whitening[0])
            if tensors or math.prod(spec["input_shape"]) > num_features:
                raise ValueError("its tensors have other names or shapes")
            probabilities = student.compute_probabilities(np.zeros((1, *spec["input_shape"]), np.float32))
            if probabilities.shape != (1, len(parse_classes(spec))):
                raise ValueError("its weights are not those of its classes")
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise checks.error("student", str(path), f"does not fit the network in its header ({error})") from error
        return student

    def compute_probabilities(self, x: np.ndarray) -> np.ndarray:
        """Compute class probabilities, float64 [N, C], of uint8 images [N, Ch, H, W] or rows [N, D]."""
        z = x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)
        constants = {key: np.float32(self.spec.get(key) or 0.0) for key in ("mean", "std", "low", "high")}
        mean, std, low, high = (value.reshape(-1, *[1] * (x.ndim - 2)) for value in constants.values())
        z = ((z.clip(low, high) if self.spec.get("low") else z) - mean) / std
        z_ND = z.reshape(len(z), math.prod(z.shape[1:])).astype(np.float64)  # because weights may be large
        if self.fourier is not None:
            frequency_DF, phase_F, knot_DK, *weights = self.fourier.values()
            rank_ND = (z_ND[:, :, None] > knot_DK).mean(2) - 0.5
            blocks = z_ND, rank_ND, np.cos(z_ND @ frequency_DF + phase_F)
            z_ND = np.concatenate([weight * block for weight, block in zip(weights, blocks, strict=True)], 1)
        if self.whitening is not None:
            center_D, axis_DE, radius = self.whitening
            z_ND = z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True).clip(1e-12)
            z_ND = np.pad((z_ND - center_D) @ axis_DE, ((0, 0), (0, 1)), constant_values=1.0) / radius
            z_ND = z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True).clip(1)
        logit_NC = z_ND @ self.weight_CD.T + self.bias_C
        odds_NC = np.exp(logit_NC - logit_NC.max(1, keepdims=True))
        return odds_NC / odds_NC.sum(1, keepdims=True)


def parse_classes(spec: Mapping[str, Any]) -> np.ndarray:
    """Return the classes [C] in their own type (``DataSpec.class_type``) from the output of ``DataSpec.to_dict``."""
    parsers: dict[str | None, Any] = {None: str, "int": int, "float": float, "bool": "True".__eq__}
    return np.array([parsers[spec.get("class_type")](name) for name in spec["class_names"]])
