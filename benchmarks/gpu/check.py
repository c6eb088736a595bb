"""Check what this machine's GPU computes, how much memory it takes, where it waits and how fast it is.

    python -m benchmarks.gpu.check --json benchmarks/gpu/h200.json

Exit codes: 0: all is well; 1: a check failed; 2: a wrong argument, or there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.findings import Finding, PartNotRun, Setup, check_at_most
from benchmarks.gpu.several_gpus import check_several_gpus
from benchmarks.gpu.speed import measure_speed
from benchmarks.gpu.students import check_repeatability, check_syncs
from benchmarks.gpu.teachers import check_independence, check_memory, check_parity
from pate_torch.cli.train import train
from pate_torch.core.device import deterministic_mode

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run here"
SMALL_RUN = (
    *("dataset.private=480", "dataset.public=200", "dataset.test=200", "method=teachers", "num_teachers=8"),
    *("teacher=mlp", "teacher.steps=60", "query=random", "num_queries=60", "mechanism.sigma=.5"),
    *("student=supervised", "student.network=mlp", "student.steps=60", "student.augment=null", "membership=none"),
    *("student@guide_student=supervised", "baseline=false"),
    *("privacy.opening_budget=1e5", "privacy.allow_uninformative_labels=true"),
)


def describe_environment(setup: Setup) -> Iterator[Finding]:
    """Report the GPU and its software, and check the switches for float32 that a run sets."""
    properties: Any = torch.cuda.get_device_properties(setup.device)
    cudnn: Any = torch.backends.cudnn
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = "unknown: no nvidia-smi"
    yield Finding("device", properties.name)
    yield Finding("number of GPUs", torch.cuda.device_count())
    yield Finding("memory", properties.total_memory / 2**30, "GiB")
    versions = {"driver": driver, "torch": torch.__version__, "CUDA": torch.version.cuda, "cuDNN": cudnn.version()}
    for name, version in (versions | {"Python": platform.python_version()}).items():
        yield Finding(name, str(version))
    for name, found, wanted in (
        ("precision of float32 products", torch.backends.cuda.matmul.fp32_precision, "ieee"),
        ("precision of float32 convolutions", cudnn.conv.fp32_precision, "ieee"),
        ("convolutions are deterministic", str(cudnn.deterministic), "True"),
        ("algorithms are chosen by timing them", str(cudnn.benchmark), "False"),
    ):
        yield Finding(name, found, passed=found == wanted)


def compare_default_runs(setup: Setup) -> Iterator[Finding]:
    """Run ``python train.py`` on the CPU and on the GPU with the same noise: accuracies are equal within chance."""
    accuracy = {device: _run_default(setup, device) for device in ("cpu", "cuda")}
    share, tested = accuracy["cpu"], setup.choose(247, 200)
    chance = 3 * math.sqrt(2 * max(share * (1 - share), 1 / tested) / tested)
    yield check_at_most("difference of accuracies", abs(accuracy["cuda"] - accuracy["cpu"]), round(chance, 3))
    for device, value in accuracy.items():
        yield Finding(f"student's accuracy, device={device}", value)


def _run_default(setup: Setup, device: str) -> float:
    settings = [*setup.choose((), SMALL_RUN), f"device={device}", "insecure_noise_seed=0", "quiet=true"]
    # Hydra would set up logging anew, and close the streams of other loggers.
    words = ["train.py", *settings, "hydra/job_logging=none", "hydra/hydra_logging=none"]
    errors = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as home,
        patch.dict(os.environ, PATE_HOME=home),
        patch.object(sys, "argv", words),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    ):
        if train():
            raise RuntimeError(errors.getvalue().strip())
        [summary] = Path(home).glob("runs/*/*/*/release/summary.json")
        return float(json.loads(summary.read_text())["student_accuracy"])


PARTS: dict[str, tuple[float, Callable[[Setup], Iterator[Finding]]]] = {
    "environment": (5, describe_environment),
    "parity": (55, check_parity),
    "independence": (50, check_independence),
    "repeatability": (45, check_repeatability),
    "memory": (50, check_memory),
    "syncs": (25, check_syncs),
    "speed": (120, measure_speed),
    "end_to_end": (80, compare_default_runs),
    "several_gpus": (45, check_several_gpus),
}
"""The seconds after which a part ends with what it has, and its checks."""


def run_part(name: str, setup: Setup) -> dict[str, Any]:
    """Run one part, print its findings and return them; an error is one of them."""
    seconds, run_checks = PARTS[name]
    findings, reason, start = list[Finding](), "", time.monotonic()
    clock = setup.choose(time.monotonic, time.process_time)  # small workloads end on a busy machine, too
    end = clock() + seconds

    def report(finding: Finding) -> None:
        findings.append(finding)
        value = finding.value if isinstance(finding.value, str) else f"{finding.value:.4g}"
        failed = "  FAILED" if finding.passed is False else ""
        print(f"  {finding.what:<70} {value} {finding.unit}".rstrip() + failed, flush=True)

    print(f"{name}:", flush=True)
    try:
        with deterministic_mode(setup.device):
            for finding in run_checks(setup):
                report(finding)
                if clock() > end:
                    report(Finding("ended early", f"after {seconds:g} seconds"))
                    break
    except PartNotRun as error:
        reason = str(error)
    except Exception as error:
        report(Finding("ended by an error", f"{type(error).__name__}: {error}", passed=False))
    status = FAILED if any(finding.passed is False for finding in findings) else NOT_RUN if reason else PASSED
    duration = time.monotonic() - start
    print(f"  {status}: {reason}" if reason else f"  {status} in {duration:.1f} s")
    found = [asdict(finding) for finding in findings]
    return {"name": name, "status": status, "seconds": duration, "findings": found, "reason": reason}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, help="run these parts alone")
    parser.add_argument("--small", action="store_true", help="use tiny workloads, to try the check itself")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = make_parser().parse_args(arguments)
    error = "" if torch.cuda.is_available() else "there is no GPU that PyTorch can use."
    if options.json is not None and not options.json.absolute().parent.is_dir():
        error = f"json={str(options.json)!r}: there is no such folder. Make it, or name another."
    if error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    setup = Setup(torch.device("cuda", 0), options.small)
    parts = [run_part(name, setup) for name in PARTS if options.only is None or name in options.only]
    failed = [part["name"] for part in parts if part["status"] == FAILED]
    skipped = sum(part["status"] == NOT_RUN for part in parts)
    print(f"{len(parts) - skipped} of {len(parts)} parts run: {', '.join(failed) or 'none'} failed.")
    if options.json is not None:
        results = {"passed": not failed, "small": setup.small, "parts": parts}
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
