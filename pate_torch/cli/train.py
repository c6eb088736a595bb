"""The training command, which is run by ``python train.py`` and ``pate train``.

The exit code is 0 for success; 2 for a refused setting or a full or read-only disk, with one line that names the key,
the value and the remedy; and 1 for any other error. HYDRA_FULL_ERROR=1 also shows a traceback for exit code 2.
"""

from __future__ import annotations

import difflib
import functools
import os
import shutil
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from safetensors import SafetensorError

from pate_torch import pipeline
from pate_torch.cli import hydra_config
from pate_torch.config import Study
from pate_torch.core import checks
from pate_torch.core.run_folders import find_config_folder
from pate_torch.planning.gradient_budget import suggest_settings

FULL_ERROR = "HYDRA_FULL_ERROR"
SETTING_BY_ARGUMENT = {
    **{"epsilon": "privacy.target_epsilon", "cap": "privacy.budget_epsilon", "account": "dataset.name"},
    **{"num_records_about": "dataset.nominal_size", "home": "paths.root", "adjacency": "partition"},
}
"""Argument of PATEClassifier -> the setting of train.py, for somebody who types the argument on the command line."""
_shows_traceback = False


@hydra.main(version_base="1.3", config_path=find_config_folder(), config_name="config")
def _run_config(cfg: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        config = hydra_config.build_run_config(cfg, folder)
        if cfg.study is None:
            pipeline.run(config, suggest_settings)
        else:
            hydra_config.instantiate_component(cfg, "study", Study).run(config)
    except Exception as error:  # caught here, because Hydra would print an additional line
        if _shows_traceback or isinstance(error, BrokenPipeError):
            raise
        if isinstance(error, ValueError | FloatingPointError | OSError | SafetensorError):
            print(f"error: {format_error(error)}", file=sys.stderr)
            if {path.name for path in folder.glob("*")} <= {".hydra", "train.log"}:  # a refused run wrote nothing else
                shutil.rmtree(folder, ignore_errors=True)
            sys.exit(2)
        traceback.print_exc()
        sys.exit(1)


def train() -> int:
    """Run the training command on ``sys.argv`` and return its exit code."""
    global _shows_traceback
    hydra_config.register_components()
    if int(os.environ.get("RANK", "0")) > 0:  # only rank 0 writes the folder and the log of the run
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    saved_value = os.environ.get(FULL_ERROR)
    _shows_traceback = saved_value not in (None, "", "0")
    os.environ[FULL_ERROR] = "1"  # Hydra then raises its errors, and this module formats them
    try:
        with hydra_config.refuse_names_of_components():
            _run_config()
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
    except Exception as error:
        if _shows_traceback or isinstance(error, BrokenPipeError):
            raise
        message = format_error(error)
        if not isinstance(error, HydraException | OmegaConfBaseException | OSError) and "=" not in message:
            # An error of Hydra that does not name the key.
            message = f"{message.rstrip('.')}. One of these settings is wrong: {' '.join(sys.argv[1:])}."
        print(f"error: {message}", file=sys.stderr)
        return 2
    finally:
        os.environ.pop(FULL_ERROR)
        if saved_value is not None:
            os.environ[FULL_ERROR] = saved_value
    return 0


def report_refusals(command: Callable[[Namespace], None]) -> Callable[[Namespace], int]:
    """Make a command that returns its exit code: 0, or 2 after one line if it refuses a setting of Hydra."""

    @functools.wraps(command)
    def run(options: Namespace) -> int:
        try:
            command(options)
        except BrokenPipeError:
            raise  # ``run_command`` ends silently
        except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
            print(f"error: {format_error(error)}", file=sys.stderr)
            return 2
        return 0

    return run


def format_error(error: BaseException) -> str:
    """Format an error as one line for the user: the key, the allowed values and the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        try:
            checks.one_of(group, name, error.options)
        except ValueError as refusal:
            return str(refusal)
        return str(checks.error(group, name, "cannot be read", f"Check the file {group}/{name}.yaml."))
    cause = error.__cause__ if isinstance(error, HydraException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return _format_unknown_key(cause, cause.parent_node)
    if isinstance(cause, OmegaConfBaseException):
        return hydra_config.format_configuration_error(cause)
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError | SafetensorError) and not isinstance(error, ChildProcessError):
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        fix = "Free some space or make the folder writable (or set PATE_HOME or paths.root), and run the command again."
        return f"{text}. All charges stay charged. {fix}"
    return text


def _format_unknown_key(error: ConfigAttributeError | ConfigKeyError, parent: DictConfig) -> str:
    """Format the error for a key that does not exist, with the existing keys and a suggestion."""
    key, keys = str(error.full_key), [str(name) for name in parent if name not in ("hydra", "recommended")]
    overrides = [word for word in sys.argv[1:] if f"{key}.".startswith(f"{word.partition('=')[0]}.")]
    override = max(overrides, key=len, default=key)
    groups = {name: parent._get_node(name) for name in keys}
    argument = str(error.key)
    suggestions = [f"{name}.{key}" for name, group in groups.items() if isinstance(group, DictConfig) and key in group]
    suggestions += [SETTING_BY_ARGUMENT[argument]] if argument in SETTING_BY_ARGUMENT else []
    suggestions += [argument] if "." in key and argument in parent._get_root() else []
    suggestions = suggestions or difflib.get_close_matches(argument, keys, n=1)
    hint = f"Did you mean {' or '.join(map(repr, suggestions))}? " if suggestions else ""
    return f"{key}: no such key (existing keys: {', '.join(keys) or 'none'}). {hint}To add the key, set '+{override}'."
