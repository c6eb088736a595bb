"""The training command: what ``python train.py`` and ``pate train`` run.

Exit codes: 0 done; 2 a bad choice of the user's, or a disk that is full or closed (one line that names the key, the
value, what is allowed and what to do); 1 anything else. A traceback is shown for the first two only with
HYDRA_FULL_ERROR=1.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pate_torch.cli.main import piped
from pate_torch.core import checks
from pate_torch.core.run_folders import get_home_folder, get_run_folder, get_run_id


def configuration() -> str:
    """The folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return str(inside if inside.is_dir() else package.parent / "conf")


def adjacency_of(partition: Any) -> str:
    """What a neighbor is, which the partition's recipe says, whatever the name of its file."""
    return str(instantiate(partition, _convert_="all").adjacency)


OmegaConf.register_new_resolver("adjacency_of", adjacency_of, replace=True)
OmegaConf.register_new_resolver("run_id", get_run_id, use_cache=True, replace=True)
OmegaConf.register_new_resolver("home_folder", get_home_folder, replace=True)
OmegaConf.register_new_resolver("run_folder", get_run_folder, replace=True)
FULL_ERROR = "HYDRA_FULL_ERROR"
_composed = False
_full = False


@hydra.main(version_base="1.3", config_path=configuration(), config_name="config")
def _train(cfg: DictConfig) -> None:
    global _composed
    _composed = True
    # Imported here, so that --help, --cfg and shell completion do not wait for torch.
    from safetensors import SafetensorError

    from pate_torch import pipeline
    from pate_torch.cli import hydra_config

    try:
        config = hydra_config.run_config(cfg, Path(HydraConfig.get().runtime.output_dir))
        study = hydra_config.study(cfg)
        pipeline.run(config) if study is None else study.run(config)
    except (ValueError, FloatingPointError, OSError, SafetensorError) as error:
        if _full or isinstance(error, BrokenPipeError):
            raise
        # Here and not in train: Hydra would print a line of its own on the way.
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(2)


def train() -> int:
    """Run the training command on ``sys.argv``; its exit code."""
    return piped(_guarded)


def _guarded() -> int:
    global _composed, _full
    if int(os.environ.get("RANK", "0")) > 0:  # one rank writes the run's folder and log
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    before = os.environ.get(FULL_ERROR)
    _composed, _full = False, before not in (None, "", "0")
    os.environ[FULL_ERROR] = "1"  # makes Hydra raise: what is shown of an error is decided here
    try:
        _train()
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception as error:
        if _full or isinstance(error, BrokenPipeError):
            raise
        if _composed and not isinstance(error, HydraException | OmegaConfBaseException):
            traceback.print_exc()
            return 1
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    finally:
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before
    return 0


def explain(error: BaseException) -> str:
    """One line for the user: the key, what is allowed, what to do. Hydra and OmegaConf take several."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return str(_unknown(group, name, error.options))
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        key = str(cause.full_key)
        known = [str(name) for name in cause.parent_node if name not in ("hydra", "recommended")]
        asked = [word for word in sys.argv[1:] if f"{key}.".startswith(f"{word.partition('=')[0]}.")]
        added = max(asked, key=len, default=key)
        groups = {name: cause.parent_node._get_node(name) for name in known}
        within = [f"{name}.{key}" for name, group in groups.items() if isinstance(group, DictConfig) and key in group]
        near = within or difflib.get_close_matches(str(cause.key), known, n=1)
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        there = ", ".join(known) or "none"
        return f"{key}: no such key (there are {there}). {hint}To add one all the same: '+{added}'."
    if isinstance(error, ChildProcessError):
        return str(error)
    if isinstance(error, OSError):
        return _explain_disk(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    if _composed and not isinstance(error, ValueError | FloatingPointError | HydraException | OmegaConfBaseException):
        return _explain_disk(str(error))  # safetensors wraps what the system said
    if isinstance(cause, OmegaConfBaseException):
        text = str(cause).splitlines()[0]
        ours = text.partition("ValueError raised while resolving interpolation: ")[2]  # of a resolver of this file
        return ours or (f"{cause.full_key}: {text}" if cause.full_key else text)
    text = " ".join(str(error).split()) or type(error).__name__
    if _composed or isinstance(error, HydraException):
        return text
    return f"{text.rstrip('.')}. One of these is wrong: {' '.join(sys.argv[1:])}."  # Hydra's own complaint names no key


def _unknown(group: str, name: str, options: Sequence[str]) -> ValueError:
    try:
        checks.one_of(group, name, options)
    except ValueError as error:
        return error
    return checks.error(group, name, "cannot be read", f"Look at conf/{group}/{name}.yaml.")


def _explain_disk(what: str) -> str:
    return (
        f"{what}. What was charged stays charged; free some space, or make the folder writable (PATE_HOME or paths.root"
        " names another), then run again."
    )
