"""Linear students that predict with NumPy, so that a program that uses a release needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pate_torch.core import checks
from pate_torch.students import files


@dataclass(frozen=True, eq=False)
class NumpyStudent:
    """Releasable. A linear model of the points, or of the points and random cosines.

    Attributes:
        spec: Public facts about the data, as ``DataSpec.to_dict`` returns them.
        weight_CD: Weights.
        bias_C: Biases.
        fourier: Frequencies [D, F] and phases [F] of the cosines (``networks.Fourier``). None without cosines.
        has_unit_length: Whether features are divided by their length.
    """

    spec: Mapping[str, Any]
    weight_CD: np.ndarray
    bias_C: np.ndarray
    fourier: tuple[np.ndarray, np.ndarray] | None
    has_unit_length: bool

    @classmethod
    def from_file(cls, path: Path | str) -> NumpyStudent | None:
        """Read a student. None if the student is not linear or applies an encoder.

        Raises:
            ValueError: The file is missing, damaged, or not a student.
        """
        facts, tensors = files.read(path, "np")
        try:
            spec, design, prefix = {**facts, **facts["spec"]}, facts["network"], ""
            is_probe = design["name"] == "probe"
            if is_probe:
                options, prefix = design["options"], "0."
                design = options.get("of") or {"name": "logistic"}
                if options.get("neighbors"):
                    return None
            if design["name"] not in ("logistic", "fourier") or (spec.get("encoder") or {}).get("points"):
                return None
            has_cosines, shape = design["name"] == "fourier", spec["input_shape"]
            head = "2" if is_probe or has_cosines else "1"
            fourier = None
            width, num_classes = math.prod(shape), len(spec["class_names"])
            expected = {f"{head}.weight": (num_classes, width), f"{head}.bias": (num_classes,)}
            if has_cosines:
                fourier = tensors[f"{prefix}1.frequency_DF"], tensors[f"{prefix}1.phase_F"]
                (cosines,) = fourier[1].shape
                expected |= {f"{prefix}1.frequency_DF": (width, cosines), f"{prefix}1.phase_F": (cosines,)}
                expected[f"{head}.weight"] = (num_classes, width + cosines)
            if expected != {name: value.shape for name, value in tensors.items()}:
                raise ValueError("its tensors have other names or shapes")
            for key in ("mean", "std", "low", "high"):
                values = [checks.number(key, value) for value in spec.get(key) or ()]
                if len(values) not in (1, shape[0]) and spec.get(key) is not None:
                    raise ValueError(f"{key} has {len(values)} values")
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise files.header_error(path, error) from error
        return cls(spec, tensors[f"{head}.weight"], tensors[f"{head}.bias"], fourier, is_probe)

    def get_constant(self, key: str) -> np.ndarray | None:
        """Return ``mean``, ``std``, ``low`` or ``high`` as float32 that broadcasts to the points. None if not set."""
        values, is_image = self.spec.get(key), len(self.spec["input_shape"]) == 3
        return None if values is None else np.array(values, np.float32).reshape((-1, 1, 1) if is_image else -1)

    def compute_probabilities(self, x: np.ndarray) -> np.ndarray:
        """Compute class probabilities [N, C] of uint8 images [N, Ch, H, W] or rows [N, D]."""
        z = x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)
        mean, std, low, high = map(self.get_constant, ("mean", "std", "low", "high"))
        assert mean is not None and std is not None
        z = ((z if low is None else z.clip(low, high)) - mean) / std
        z_ND = z.reshape(len(z), -1).astype(np.float64)  # as exact as NumPy can, because weights may be large
        if self.fourier is not None:
            frequency_DF, phase_F = self.fourier
            z_ND = np.concatenate([z_ND, math.sqrt(2) * np.cos(z_ND @ frequency_DF + phase_F)], 1)
        if self.has_unit_length:
            z_ND = z_ND / np.linalg.norm(z_ND, axis=1, keepdims=True).clip(1e-12)
        logit_NC = z_ND @ self.weight_CD.T + self.bias_C
        odds_NC = np.exp(logit_NC - logit_NC.max(1, keepdims=True))
        return odds_NC / odds_NC.sum(1, keepdims=True)


def parse_classes(spec: Mapping[str, Any]) -> np.ndarray:
    """Return the classes [C] of a student in their own type, from the facts of ``DataSpec.to_dict``."""
    parsers: dict[str | None, Any] = {None: str, "int": int, "float": float, "bool": "True".__eq__}
    return np.array([parsers[spec.get("class_type")](name) for name in spec["class_names"]])
