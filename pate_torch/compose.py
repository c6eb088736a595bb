"""From a resolved configuration to the components of a run. Hydra is known here and in the commands, nowhere else.

Every component is instantiated by its ``_target_``: run only configurations you trust.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

import hydra.utils
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pate_torch import checks
from pate_torch.pipeline import Plan

T = TypeVar("T")


def plan(cfg: DictConfig, folder: Path) -> Plan:
    """The components that ``cfg`` names. Raises ValueError, with the offending key, when it cannot be built."""
    try:
        resolved = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration: {str(error).splitlines()[0]}") from error
    return Plan(
        source=component(cfg, "dataset"),
        partition=component(cfg, "partition"),
        recipe=component(cfg, "teacher"),
        mechanism=component(cfg, "mechanism"),
        strategy=component(cfg, "query"),
        student=component(cfg, "student"),
        refit=component(cfg, "refit"),
        root=Path(resolved["paths"]["root"]),
        folder=folder,
        seed=resolved["seed"],
        num_teachers=resolved["num_teachers"],
        num_queries=resolved["num_queries"],
        teachers=resolved["teachers"],
        labels=resolved["labels"],
        votes=None if resolved["votes"] is None else Path(resolved["votes"]),
        noise=resolved["noise"],
        insecure_noise_seed=resolved["insecure_noise_seed"],
        delta=resolved["privacy"]["delta"],
        budget_epsilon=resolved["privacy"]["budget_epsilon"],
        opening_budget=resolved["privacy"]["opening_budget"],
        target_epsilon=resolved["privacy"]["target_epsilon"],
        selection=component(cfg, "selection") if "_target_" in resolved["selection"] else None,
        device=device(resolved["device"]),
        baseline=checks.boolean("baseline", resolved["baseline"]),
        quiet=checks.boolean("quiet", resolved["quiet"]),
    )


def component(cfg: DictConfig, key: str) -> Any:
    """Instantiate one group by its ``_target_``; the component's own complaint is what the user sees."""
    try:
        return hydra.utils.instantiate(cfg[key], _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError):
            raise ValueError(f"{key}: {cause}") from error
        if isinstance(cause, TypeError):
            raise ValueError(f"{key}: {str(cause).splitlines()[0]}") from error
        raise


def device(name: object) -> torch.device:
    """``auto`` is the first CUDA device, else Apple's, else the CPU."""
    text = str(name)
    if text == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(text)
    except RuntimeError as error:
        raise checks.fail("device", name, "must be auto, cpu, cuda, cuda:<n> or mps") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise checks.fail("device", name, "no CUDA device is available here", "Use device=cpu or device=auto.")
    return chosen
