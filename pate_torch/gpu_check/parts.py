"""What a part of the check is, and how one is run: within its seconds, its errors its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from pate_torch.core.device import settled

T = TypeVar("T")
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run here"


@dataclass(frozen=True)
class Bench:
    """What is checked.

    Attributes:
        device: The device.
        toy: Whether it is the pretend GPU, at toy size, which has no speed.
    """

    device: torch.device
    toy: bool = False

    def of(self, full: T, toy: T) -> T:
        """One of two sizes."""
        return toy if self.toy else full


@dataclass(frozen=True)
class Finding:
    """One figure.

    Attributes:
        what: What was looked at.
        found: What was found.
        unit: Its unit.
        passed: Whether it is as it should be; None: there is no should.
    """

    what: str
    found: float | str
    unit: str = ""
    passed: bool | None = None


def at_most(what: str, found: float, limit: float) -> Finding:
    """A figure with a limit."""
    return Finding(f"{what} (at most {limit:g})", found, passed=found <= limit)


def at_least(what: str, found: float, limit: float) -> Finding:
    """A figure with a limit from below."""
    return Finding(f"{what} (at least {limit:g})", found, passed=found >= limit)


Checks = Callable[[Bench], Iterator[Finding]]


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        name: Its name.
        what: What it looks at, in a line.
        seconds: After so many it ends with what it has.
        checks: What is looked at, one finding after the other.
        absent: Why it cannot be run on this bench; "": it can.
    """

    name: str
    what: str
    seconds: float
    checks: Checks
    absent: Callable[[Bench], str] = lambda bench: ""


@dataclass(frozen=True)
class Result:
    """What a part came to.

    Attributes:
        name: The part's.
        status: ``passed``, ``failed`` or ``not run here``.
        seconds: How long it took.
        findings: What was found.
        why: Why it was not run.
    """

    name: str
    status: str
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    why: str = ""


def run(part: Part, bench: Bench) -> Result:
    """Run a part, if it can be run on this bench."""
    why = part.absent(bench)
    if why:
        return Result(part.name, NOT_RUN, why=why)
    start = time.monotonic()
    findings = looked_at(part, bench)
    status = FAILED if any(finding.passed is False for finding in findings) else PASSED
    return Result(part.name, status, time.monotonic() - start, tuple(findings))


def looked_at(part: Part, bench: Bench) -> list[Finding]:
    """The findings of a part; an error is one of them."""
    clock = bench.of(time.monotonic, time.process_time)  # a toy on a busy machine is to come to its end
    findings, end = list[Finding](), clock() + part.seconds
    try:
        with settled(bench.device):
            for finding in part.checks(bench):
                findings.append(finding)
                if clock() > end:
                    findings.append(Finding("ended early", f"after {part.seconds:g} seconds"))
                    break
    except Exception as error:  # of whatever kind: it is what was found
        findings.append(Finding("ended by an error", f"{type(error).__name__}: {error}", passed=False))
    return findings
