"""Parts that run the whole: the default run on the CPU and on the GPU, and teachers dealt to all GPUs."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from pate_torch.gpu_check import several_gpus
from pate_torch.gpu_check.parts import Bench, Finding, at_most

TOY = (
    *("dataset.private=480", "dataset.public=200", "dataset.test=200", "voters=teachers", "num_teachers=8"),
    *("teacher=mlp", "teacher.steps=60", "query=random", "num_queries=60", "mechanism.sigma=.5"),
    *("student=supervised", "student.network=mlp", "student.steps=60", "student.augment=null", "membership=none"),
    *("guide_student=supervised", "baseline=false", "privacy.opening_budget=1e5", "privacy.allow_chance=true"),
)


def end_to_end(bench: Bench) -> Iterator[Finding]:
    """``python train.py`` on both, with the same noise: students are as good as each other, within chance."""
    accuracy = {}
    for device in ("cpu", "cuda"):
        with tempfile.TemporaryDirectory() as home:
            settings = [*bench.of((), TOY), f"device={device}", "insecure_noise_seed=0", "quiet=true"]
            accuracy[device] = _accuracy(Path(home), settings)
    share, tested = accuracy["cpu"], bench.of(247, 200)
    chance = 3 * math.sqrt(2 * max(share * (1 - share), 1 / tested) / tested)
    yield at_most("difference of accuracies", abs(accuracy["cuda"] - accuracy["cpu"]), round(chance, 3))
    for device, found in accuracy.items():
        yield Finding(f"student's accuracy, device={device}", found)


def _accuracy(home: Path, settings: list[str]) -> float:
    """What the student of one run is measured at.

    Raises:
        RuntimeError: The run was refused.
    """
    from pate_torch.cli.train import train

    # Hydra would set logging up anew, and close what others log to.
    words = ["train.py", *settings, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    said = io.StringIO()
    with (
        patch.dict(os.environ, PATE_HOME=str(home)),
        patch.object(sys, "argv", words),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        code = train()
    if code:
        raise RuntimeError(said.getvalue().strip())
    [summary] = home.glob("runs/*/*/*/release/summary.json")
    return float(json.loads(summary.read_text())["student_accuracy"])


# ---- several GPUs ----------------------------------------------------------------------------------------------------


def only_one(bench: Bench) -> str:
    """Why several GPUs cannot be looked at; "": they can."""
    count = torch.cuda.device_count()
    return "" if count > 1 else bench.of("there is one GPU", "there is one pretend GPU")


def several(bench: Bench) -> Iterator[Finding]:
    """Teachers dealt by torchrun: every rank works on a GPU of its own, and the votes are those of one rank."""
    yield from dealt(bench.device.type, torch.cuda.device_count())


def dealt(device: str, ranks: int) -> Iterator[Finding]:
    """The same with so many ranks on one kind of device."""
    with tempfile.TemporaryDirectory() as folder:
        alone, together = _torchrun(Path(folder) / "alone", device, 1), _torchrun(Path(folder) / "all", device, ranks)
    cards = [rank["device"] for rank in together]
    own = len(set(cards)) == ranks or device == "cpu"
    yield Finding("cards of the ranks", " ".join(cards), passed=own)
    busy = min(rank["seconds"] for rank in together) / max(rank["seconds"] for rank in together)
    yield Finding("time of the least busy rank, of the busiest's", busy, passed=busy > 0.3)
    if device != "cpu":
        least = min(rank["peak"] for rank in together)
        yield Finding("least memory that a rank took", least / 2**20, "MiB", passed=least > 0)
    same = all(rank["votes"] == alone[0]["votes"] for rank in together)
    yield Finding("votes", "those of one rank" if same else "others than one rank's", passed=same)
    yield Finding(f"times as fast as one rank, of {ranks}", alone[0]["seconds"] / max(r["seconds"] for r in together))


def _torchrun(folder: Path, device: str, ranks: int) -> list[several_gpus.Told]:
    folder.mkdir()
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launched, "-m", several_gpus.__name__, str(folder), device], capture_output=True, text=True, timeout=90
    )
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
