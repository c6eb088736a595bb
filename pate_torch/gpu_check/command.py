"""Check what this machine's GPU computes, remembers and waits for: a table, and JSON on request.

    python -m pate_torch.gpu_check --json benchmarks/gpu/h200.json

Where there is no GPU the parts run at toy size on a pretend one (``gpu_check.pretend``). Exit codes: 0: all is well; 1:
a check failed; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pate_torch.core.parallel import one_thread
from pate_torch.gpu_check.facts import facts
from pate_torch.gpu_check.parts import FAILED, Bench, Finding, Part, Result, run
from pate_torch.gpu_check.pretend import pretend_gpu
from pate_torch.gpu_check.runs import end_to_end, only_one, several
from pate_torch.gpu_check.speed import speed
from pate_torch.gpu_check.students import repeatability, syncs
from pate_torch.gpu_check.teachers import memory, neighbors, parity

WIDTH = 100


def _timeless(bench: Bench) -> str:
    return "a pretend GPU has no speed" if bench.toy else ""


PARTS = (
    Part("facts", "the GPU and its software", 5, facts),
    Part("parity", "teachers beside the CPU's", 55, parity),
    Part("neighbors", "no bit of another's records", 50, neighbors),
    Part("repeatability", "the same bits again", 45, repeatability),
    Part("memory", "what is taken, of the plan", 50, memory),
    Part("syncs", "what steps wait for", 25, syncs),
    Part("speed", "beside a plain program", 110, speed, absent=_timeless),
    Part("end_to_end", "the default run", 80, end_to_end),
    Part("several_gpus", "teachers dealt to all of them", 45, several, absent=only_one),
)


def check(parts: Sequence[Part], console: Console) -> tuple[list[Result], bool]:
    """Run the parts on the GPU, or on a pretend one; the results, and whether it was a real one."""
    real = torch.cuda.is_available()
    results = []
    with ExitStack() as world:
        if not real:
            world.enter_context(pretend_gpu())
            world.enter_context(one_thread())
        bench = Bench(torch.device("cuda", 0), toy=not real)
        for part in parts:
            if console.is_terminal:
                console.print(Text(f"{part.name}: {part.what} ..."), style="dim")
            results.append(run(part, bench))
    return results, real


def show(results: Sequence[Result], real: bool, console: Console) -> None:
    """Print what was found."""
    table = Table(box=box.HORIZONTALS if console.is_terminal else box.ASCII, width=min(console.width, WIDTH))
    table.add_column("part", width=13)
    table.add_column("what", ratio=5)
    table.add_column("found", ratio=2, overflow="fold")
    for result in results:
        table.add_section()
        table.add_row(Text(result.name, style="bold"), Text(_status(result)), "")
        for finding in result.findings:
            table.add_row("", Text(finding.what), _marked(_number(finding), finding.passed is False))
    console.print(table)
    ran = sum(bool(result.findings) for result in results)
    failed = [result.name for result in results if result.status == FAILED]
    where = "this machine's GPU" if real else "a pretend GPU (there is none here)"
    console.print(Text(f"{ran} of {len(results)} parts run on {where}: {', '.join(failed) or 'none'} failed."))


def _status(result: Result) -> str:
    return f"{result.status}: {result.why}" if result.why else f"{result.status} in {result.seconds:.1f} s"


def _marked(found: str, failed: bool) -> Text:
    return Text(f"{found}  FAILED", style="bold red") if failed else Text(found)


def _number(finding: Finding) -> str:
    found = finding.found if isinstance(finding.found, str) else f"{finding.found:.4g}"
    return f"{found} {finding.unit}".strip()


def payload(results: Sequence[Result], real: bool) -> dict[str, Any]:
    """The results as plain data."""
    passed = all(result.status != FAILED for result in results)
    return {"device": "GPU" if real else "pretend", "passed": passed, "parts": [asdict(result) for result in results]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pate_torch.gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", choices=[p.name for p in PARTS], help="leave out the others"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        print(f"error: json={str(options.json)!r}: there is no such folder. Make it, or name another.", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    results, real = check([part for part in PARTS if options.only is None or part.name in options.only], console)
    show(results, real, console)
    found = payload(results, real)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["passed"] else 1
