"""Runs on a disk that fails at its n-th operation, and runs killed there: all is charged, and the same call goes on."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from tests import failing_disk
from tests.failing_disk import KINDS, MODES, releases
from tests.killed_runs import fork_server, half_written, unsound

REFITS = ("gradients", "teachers", "dpsgd", "texts")
"""Kinds whose second call is refused unless allow_refit=True."""
STRIDE = int(os.environ.get("FAILING_DISK_STRIDE", "37"))
"""The slow test lets one operation in so many fail. With 1, every operation fails, which takes hours."""


@pytest.fixture(scope="module")
def processes():
    """Children that start with torch imported: forks of a server that never ran anything."""
    return fork_server("tests.failing_disk")


def run(processes, kind, home, mode="kill", fail_at=None, allow_refit=False) -> dict:
    """How one attempt ended: its exit code, and what it wrote down."""
    home.mkdir(parents=True, exist_ok=True)
    told = home.with_suffix(".json")
    told.unlink(missing_ok=True)
    child = processes.Process(target=failing_disk.attempt, args=(kind, home, mode, fail_at, allow_refit))
    child.start()
    child.join(300)
    outcome = json.loads(told.read_text()) if told.exists() else {}
    return outcome | {"code": child.exitcode}


@pytest.fixture(scope="module")
def operations(processes, tmp_path_factory):
    """The number of operations of a whole run of each kind, counted once."""
    counts: dict[str, int] = {}

    def count(kind: str) -> int:
        if kind not in counts:
            outcome = run(processes, kind, tmp_path_factory.mktemp("whole") / "home")
            assert outcome["code"] == 0 and outcome["ended"] == "well", outcome
            counts[kind] = outcome["operations"]
        return counts[kind]

    return count


def fail_and_go_on(processes, kind: str, home: Path, mode: str, fail_at: int) -> None:
    """Let operation ``fail_at`` of a run fail; then make the same call until it ends well.

    The disk's failure is told by ValueError or OSError, nothing is readable that was not charged, a run whose answers
    are written down and committed is finished without a new charge, and nothing half written is left.
    """
    where = f"{kind}, {mode} at operation {fail_at}"
    first = run(processes, kind, home, mode, fail_at)
    where += f" ({first.get('failed', '')})"
    assert first["code"] == (-signal.SIGKILL if mode == "kill" else 0), (where, first)
    assert unsound(home) == [], where
    charged, committed = releases(home)
    finished = first.get("ended") == "well"  # what failed was not needed
    second = run(processes, kind, home)
    assert second["code"] == 0, (where, second)
    if kind in REFITS:
        if finished or charged > committed:  # there is a release already; or its noise was drawn and not recorded
            assert second["ended"] == "ValueError" and "allow_refit" in second["message"], (where, second)
            assert releases(home) == (charged, committed), where
            second = run(processes, kind, home, allow_refit=True)
            assert releases(home) == (charged + 1, committed + 1), (where, second)
        else:
            assert releases(home) == (1, 1), (where, second)
    elif charged == committed and not finished:
        assert releases(home)[0] == max(charged, 1), where
    assert second["ended"] == "well" and second["code"] == 0, (where, second)
    assert unsound(home) == [] and half_written(home) == [], where


@pytest.mark.parametrize(("kind", "mode"), list(zip(("teachers", "train", "learn"), MODES, strict=True)))
def test_a_failing_disk_costs_nothing_that_is_not_charged(processes, operations, tmp_path, kind, mode):
    """One moment in the run's last two thirds, where teachers, charge, answers and reports are written.

    Every kind of run meets every kind of failure in the slow test below.
    """
    count = operations(kind)
    fail_at = random.Random(f"{kind} {mode}").randrange(count // 3, count)
    fail_and_go_on(processes, kind, tmp_path / "home", mode, fail_at)


@pytest.mark.slow(reason="fault injection at every write of a run")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fails_anywhere_costs_nothing_that_is_not_charged(processes, operations, tmp_path, kind, mode):
    faults = []
    for fail_at in range(0, operations(kind), STRIDE):
        try:
            fail_and_go_on(processes, kind, tmp_path / str(fail_at) / "home", mode, fail_at)
        except AssertionError as fault:
            faults.append(str(fault).split("\n")[0])
    assert not faults, "\n".join(faults)
