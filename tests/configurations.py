"""What a group of the configuration offers: the package's components, and the YAML files of a conf/ folder."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pate_torch.components import COMPONENTS, get_component
from tests import ROOT


def list_options(group: str, conf: Path = ROOT / "conf") -> list[str]:
    """Every name but aliases."""
    named = {name for name, component in COMPONENTS.get(group, {}).items() if set(component) != {"defaults"}}
    return sorted(named | {file.stem for file in (conf / group).glob("*.yaml")})


def load_option(group: str, name: str, conf: Path = ROOT / "conf") -> Any:
    """One configuration, with its interpolations as they stand."""
    file = conf / group / f"{name}.yaml"
    return OmegaConf.load(file) if file.exists() else OmegaConf.create(get_component(group, name))
