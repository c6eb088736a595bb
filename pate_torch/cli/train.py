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

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from safetensors import SafetensorError

from pate_torch import pipeline
from pate_torch.cli import hydra_config
from pate_torch.cli.main import run_command
from pate_torch.core import checks
from pate_torch.core.run_folders import find_config_folder
from pate_torch.planning.alternatives import suggest_settings

FULL_ERROR = "HYDRA_FULL_ERROR"
_shows_traceback = False


@hydra.main(version_base="1.3", config_path=find_config_folder(), config_name="config")
def _train(cfg: DictConfig) -> None:
    try:
        config = hydra_config.build_run_config(cfg, Path(HydraConfig.get().runtime.output_dir))
        study = hydra_config.build_study(cfg)
        pipeline.run(config, suggest_settings) if study is None else study.run(config)
    except Exception as error:  # here, because Hydra would print a line of its own on the way
        if _shows_traceback or isinstance(error, BrokenPipeError):
            raise
        if isinstance(error, ValueError | FloatingPointError | OSError | SafetensorError):
            print(f"error: {format_error(error)}", file=sys.stderr)
            sys.exit(2)
        traceback.print_exc()
        sys.exit(1)


def train() -> int:
    """Run the training command on ``sys.argv``; its exit code."""
    return run_command(_run_hydra)


def _run_hydra() -> int:
    global _shows_traceback
    hydra_config.register_components()
    if int(os.environ.get("RANK", "0")) > 0:  # one rank writes the run's folder and log
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    saved_value = os.environ.get(FULL_ERROR)
    _shows_traceback = saved_value not in (None, "", "0")
    os.environ[FULL_ERROR] = "1"  # makes Hydra raise: what is shown of an error is decided here
    try:
        with hydra_config.refuse_names_of_components():
            _train()
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
    except Exception as error:
        if _shows_traceback or isinstance(error, BrokenPipeError):
            raise
        message = format_error(error)
        if not isinstance(error, HydraException | OmegaConfBaseException | OSError) and "=" not in message:
            # A complaint of Hydra's own, which names no key.
            message = f"{message.rstrip('.')}. One of these is wrong: {' '.join(sys.argv[1:])}."
        print(f"error: {message}", file=sys.stderr)
        return 2
    finally:
        os.environ.pop(FULL_ERROR)
        if saved_value is not None:
            os.environ[FULL_ERROR] = saved_value
    return 0


def format_error(error: BaseException) -> str:
    """One line for the user: the key, what is allowed, what to do. Hydra and OmegaConf take several."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return str(_make_unknown_option_error(group, name, error.options))
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return _format_unknown_key(cause, cause.parent_node)
    if isinstance(cause, OmegaConfBaseException):
        text = str(cause).splitlines()[0]
        resolver_message = text.partition("ValueError raised while resolving interpolation: ")[2]
        return resolver_message or (f"{cause.full_key}: {text}" if cause.full_key else text)
    if isinstance(error, OSError) and not isinstance(error, ChildProcessError):
        return _format_disk_error(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
    if isinstance(error, SafetensorError):  # which wraps what the system said
        return _format_disk_error(str(error))
    return " ".join(str(error).split()) or type(error).__name__


def _format_unknown_key(error: ConfigAttributeError | ConfigKeyError, parent: DictConfig) -> str:
    """The key that is not there, the keys that are, the likeliest of them, and how to add a key all the same."""
    key = str(error.full_key)
    keys = [str(name) for name in parent if name not in ("hydra", "recommended")]
    overrides = [word for word in sys.argv[1:] if f"{key}.".startswith(f"{word.partition('=')[0]}.")]
    override = max(overrides, key=len, default=key)
    groups = {name: parent._get_node(name) for name in keys}
    qualified_keys = [
        f"{name}.{key}" for name, group in groups.items() if isinstance(group, DictConfig) and key in group
    ]
    suggestions = qualified_keys or difflib.get_close_matches(str(error.key), keys, n=1)
    hint = f"Did you mean {' or '.join(map(repr, suggestions))}? " if suggestions else ""
    return f"{key}: no such key (there are {', '.join(keys) or 'none'}). {hint}To add one all the same: '+{override}'."


def _make_unknown_option_error(group: str, name: str, options: Sequence[str]) -> ValueError:
    try:
        checks.one_of(group, name, options)
    except ValueError as error:
        return error
    return checks.error(group, name, "cannot be read", f"Look at conf/{group}/{name}.yaml.")


def _format_disk_error(message: str) -> str:
    return (
        f"{message}. What was charged stays charged; free some space, or make the folder writable (PATE_HOME or "
        "paths.root names another), then run again."
    )
