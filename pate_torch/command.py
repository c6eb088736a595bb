"""The training command: what ``python train.py`` and ``pate train`` run.

Exit codes: 0 done; 2 a bad choice of the user's (one line, nothing charged); 1 anything else. A traceback is shown for
the user's own mistakes only with HYDRA_FULL_ERROR=1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pate_torch.runs import run_id


def configuration() -> str:
    """The folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return str(inside if inside.is_dir() else package.parent / "conf")


OmegaConf.register_new_resolver("run_id", run_id, use_cache=True, replace=True)
_composed = False


@hydra.main(version_base="1.3", config_path=configuration(), config_name="config")
def _train(cfg: DictConfig) -> None:
    global _composed
    _composed = True
    # Imported here, so that --help, --cfg and shell completion do not wait for torch.
    from pate_torch import compose, pipeline

    try:
        pipeline.run(compose.plan(cfg, Path(HydraConfig.get().runtime.output_dir)))
    except ValueError as error:
        if os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def train() -> int:
    """Run the training command on ``sys.argv``; returns the exit code."""
    if int(os.environ.get("RANK", "0")) > 0:  # one rank writes the run's folder and log
        sys.argv += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    try:
        _train()
    except (HydraException, OmegaConfBaseException) as error:  # --cfg and --info compose outside Hydra's own guard
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:
        # Hydra leaves with 1 where the configuration itself cannot be composed: that too is the user's to mend.
        return 2 if stop.code == 1 and not _composed else int(stop.code or 0)
    return 0
