"""Groups: the same bits and counts by any workers, whoever is killed and whenever, and each group counted once."""

import dataclasses
import math
import os
import pickle
import signal
import stat
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from pate_torch.core import executors, scheduling
from pate_torch.core.executors import Dask, Submitit, Workers
from pate_torch.privacy.sensitive import SoftVotes, Votes
from pate_torch.teachers import groups, training
from pate_torch.teachers.groups import GroupTally, Manifest, VoteRequest
from pate_torch.teachers.training import train
from tests import ROOT
from tests.teachers.teacher_world import differing, even_shards, recipe, records, spec

PRIVATE, SHARDS, SETTINGS = records(40), even_shards(10, 4), recipe(network="logistic", options={}, augment=None)
POINTS = records(30, seed=5).x
EXECUTORS = {
    "processes": Workers(workers=2),
    "dask": Dask(workers=2),
    "submitit": Submitit(workers=2, cluster="local"),
}
SLOW = pytest.mark.slow(reason="every worker imports torch")


@pytest.fixture(scope="module")
def alone():
    ensemble = train(PRIVATE, spec(), SHARDS, SETTINGS, seed=0)
    return ensemble, ensemble.count_votes(POINTS), ensemble.tally_probabilities(POINTS, 5)


def run(folder, executor, request=VoteRequest(POINTS), **options):  # noqa: B008
    votes = []
    options = {"seed": 0, "folder": folder, "executor": executor, "on_votes": votes.append} | options
    ensemble = train(PRIVATE, spec(), SHARDS, SETTINGS, request=request, **options)
    return ensemble, votes[0]


def check(found, alone):
    ensemble, votes = found
    assert differing(ensemble.params, alone[0].params) == set()
    assert torch.equal(votes.counts_QC.long(), alone[1].counts_QC.long())


@pytest.mark.parametrize("name", ["processes", *(pytest.param(name, marks=SLOW) for name in ("dask", "submitit"))])
@pytest.mark.filterwarnings("ignore:Port .* is already in use")
def test_workers_give_the_bits_and_counts_of_one_process(name, tmp_path, alone):
    check(run(tmp_path / "work", EXECUTORS[name]), alone)
    # A copy of a slow group that is ended while it writes leaves a hidden file, which the store removes.
    kinds = {file.name.split("_")[0] for file in (tmp_path / "work").iterdir() if not file.name.startswith(".")}
    assert kinds <= {"README", "teachers", "votes", "progress", "points.safetensors", "jobs"}  # the records are gone
    for file in (tmp_path / "work").glob("*.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "work").stat().st_mode) == 0o700


@pytest.mark.parametrize("workers", [1, 3])
def test_probabilities_are_counted_in_groups(workers, tmp_path, alone):
    _, soft = run(tmp_path, Workers(workers=workers), VoteRequest(POINTS, bins=5))
    assert isinstance(soft, SoftVotes) and soft.num_teachers == 10
    assert torch.equal(soft.counts_QSV, alone[2].counts_QSV.int())
    assert torch.equal(soft.shifted_QSW, alone[2].shifted_QSW.int())


def test_files_carry_the_records_to_workers_and_no_message_does(tmp_path, alone, monkeypatch):
    """A process that is not forked reads its group from the folder, where the records lie while it may need them."""
    monkeypatch.setattr(training, "can_fork", lambda: False)
    seen, provide_inputs = [], training.provide_inputs

    def look(folder, own_groups, get_chunk, x, *, by_files):
        assert by_files
        seen.extend(own_groups)
        return provide_inputs(folder, own_groups, get_chunk, x, by_files=by_files)

    start, train_group = Workers.start, groups.train_group
    monkeypatch.setattr(training, "provide_inputs", look)
    monkeypatch.setattr(training, "train_group", _train_as_elsewhere)
    check(run(tmp_path, Workers(workers=2)), alone)
    assert len(seen) == 2 and start is Workers.start and train_group is groups.train_group
    assert not list(tmp_path.glob("records_*"))


def _train_as_elsewhere(manifest, group):
    groups._inherited_inputs.clear()
    content = pickle.dumps((manifest, group))
    assert len(content) < 10_000 and PRIVATE.x.numpy().tobytes()[:40] not in content
    return groups.train_group(*pickle.loads(content))


def test_a_question_is_part_of_the_counts_and_not_of_the_teachers(tmp_path, alone):
    check(run(tmp_path, Workers(workers=1)), alone)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*_*.safetensors")}
    _, votes = run(tmp_path, Workers(workers=1), VoteRequest(POINTS[:7]))
    assert torch.equal(votes.counts_QC.long(), alone[1].counts_QC[:7].long())
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert len(list(tmp_path.glob("votes_*"))) == 2 and len(list(tmp_path.glob("teachers_*"))) == 1


def test_results_of_another_kind_of_processor_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "describe_processor", lambda device: "another processor")
    with pytest.raises(ValueError, match=r"executor='another processor': is the processor of a worker"):
        run(tmp_path, Workers(workers=2))
    assert not list(tmp_path.glob("votes_*"))


def make_tally(folder, num_teachers=4):
    task = dataclasses.make_dataclass("Task", ["network", "spec", "recipe", "seed", "launch_size", "processor"])
    manifest = Manifest.make(folder, task("n", spec(), SETTINGS, 0, 2, "p"), VoteRequest(POINTS[:2]))
    for name, row in (("a", [2, 0, 0, 0]), ("b", [0, 2, 0, 0]), ("other", [0, 0, 2, 0])):
        counts = torch.tensor([row, row], dtype=torch.int32)
        groups._write(folder / name, {"counts_QC": counts, groups.RECORDS_KEY: torch.zeros(16, dtype=torch.uint8)})
    return GroupTally(manifest, num_teachers), manifest.votes_key


def test_a_group_is_counted_once_by_its_first_result(tmp_path):
    tally, key = make_tally(tmp_path)
    for group, name in ((range(2), "a"), (range(2, 4), "b"), (range(2), "other"), (range(2), "a")):
        tally.add(key, group, name)
    votes = tally.sum_counts()
    assert isinstance(votes, Votes) and votes.num_teachers == 4 and votes.counts_QC.tolist() == [[2, 2, 0, 0]] * 2


@pytest.mark.parametrize(
    "added",
    [
        [(None, range(2))],
        [(None, range(2)), (None, range(1, 3)), (None, range(3, 4))],
        [(None, range(2)), (None, range(3, 5))],
        [(None, range(2)), ("another training", range(2, 4))],
        [(None, range(2)), (None, range(2, 4)), ("another training", range(2))],
        [],
    ],
)
def test_nothing_is_summed_unless_groups_of_one_training_cover_all_teachers_once(added, tmp_path):
    tally, key = make_tally(tmp_path)
    for votes_key, group in added:
        tally.add(votes_key or key, group, "a")
    with pytest.raises(ValueError, match="every teacher must be counted once"):
        tally.sum_counts()


# ---- kills ----------------------------------------------------------------------------------------------------------

EVENTS = [f"{kind}_{start}" for start in (0, 5) for kind in ("begin", "middle", "teachers", "votes")]
"""Places in the work of a group at which a worker is killed: its begin, its training, or before it writes a file."""


def kill_at(event, folder):
    """Kill the process that first comes to this place. Forked workers inherit this."""
    kind, start = event.split("_")
    write, train_launches = groups._write, groups.train_launches

    def kill(place, first):
        if (place, str(first)) == (kind, start):
            try:
                os.close(os.open(folder / "killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def train_or_die(task, chunk, report_share):
        kill("begin", chunk.first)

        def report_or_die(share):
            report_share(share)
            kill("middle", chunk.first)

        return train_launches(task, chunk, report_or_die)

    def write_or_die(file, tensors):
        kill(file.name.split("_")[0], int(file.name.split("_")[1]))
        write(file, tensors)

    groups._write, groups.train_launches = write_or_die, train_or_die
    return write, train_launches


@pytest.mark.skipif(not executors.can_fork(), reason="a spawned worker does not inherit the place of its death")
@pytest.mark.parametrize("event", EVENTS)
def test_a_worker_killed_at_any_place_costs_a_repetition_and_counts_nothing_twice(event, tmp_path, alone, monkeypatch):
    monkeypatch.setattr(scheduling, "SLOW_FACTOR", math.inf)  # no copy of a slow group, which could be faster
    before, lines = kill_at(event, tmp_path), []
    try:
        check(run(tmp_path / "work", Workers(workers=2), print_message=lines.append), alone)
    finally:
        groups._write, groups.train_launches = before
    assert (tmp_path / "killed").exists() and len(lines) == 1


PROGRAM = """
import sys
from pathlib import Path
import torch
from pate_torch.core.executors import Workers
from tests.teachers import test_groups

torch.set_num_threads(1)
test_groups.training.GROUP_TEACHERS = 5
if len(sys.argv) > 2:
    test_groups.kill_at(sys.argv[2], Path(sys.argv[1]))
ensemble, votes = test_groups.run(Path(sys.argv[1]) / "work", Workers(workers=1))
test_groups.groups._write(Path(sys.argv[1]) / "found", ensemble.params | {"counts_QC": votes.counts_QC})
"""


@pytest.mark.slow(reason="kill runs")
@pytest.mark.parametrize("event", EVENTS)
def test_a_main_process_killed_at_any_place_goes_on_from_the_finished_groups(event, tmp_path, alone):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    killed = subprocess.run([*command, event], env=environment, capture_output=True, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "work").glob("teachers_*")}
    assert len(times) == (event.endswith("5") + event.startswith("votes"))
    subprocess.run(command, env=environment, check=True, timeout=300)
    assert {file: file.stat().st_mtime_ns for file in times} == times
    found = load_file(tmp_path / "found")
    votes = Votes(found.pop("counts_QC"), 10)
    check((dataclasses.replace(alone[0], groups=[found]), votes), alone)


def test_a_group_that_is_lost_for_good_ends_the_training(tmp_path, monkeypatch):
    if not executors.can_fork():
        pytest.skip("a spawned worker does not inherit the place of its death")
    monkeypatch.setattr(groups, "train_launches", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ChildProcessError, match=r"lost its worker 4 times"):
        run(tmp_path, Workers(workers=2))
    assert not list(tmp_path.glob("votes_*"))
