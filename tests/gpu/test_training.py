"""Every option of a run works on the simulated GPU, and every copy and sync of a training step is accounted for."""

import contextlib
from collections import Counter

import numpy as np
import pytest
import torch

import pate_torch.cli.train  # noqa: F401 (registers the resolvers of the configuration)
from benchmarks.gpu.findings import CodeLine, Setup
from benchmarks.gpu.students import make_fits
from benchmarks.gpu.workloads import make_students
from pate_torch import networks, pipeline
from pate_torch.core.device import deterministic_mode
from pate_torch.core.rng import make_torch_generator
from pate_torch.features.neighbors import compute_coordinates
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.record_method import map_records_batch_invariant
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.networks import NETWORKS
from pate_torch.privacy.partition import AddRemove
from pate_torch.privacy.records import PrivateRecords
from pate_torch.queries.base import Random
from pate_torch.students.training import SYNC_EVERY, AveragedModel
from pate_torch.teachers.ensemble import MAX_GPU_POINTS
from pate_torch.teachers.training import train
from tests.gpu.simulated_gpu import CUDA, PlacementError, SimulatedGpu
from tests.privacy import neighbor_choices as choices
from tests.run_configs import run_config
from tests.teachers.teacher_world import recipe, records, shards_of, spec
from tests.tensor_data import Tensors
from tests.tiny_runs import RECIPE
from tests.worlds import IMAGES, images

PRICED_BY = {"reverse_knn": "histogram", "gradients": "gradient_descent"}
"""Methods that no mechanism of votes costs."""
FIELDS = ("method", "teacher", "features", "query", "student", "selection", "membership")
"""What decides what a run computes where."""


REQUIREMENTS = {
    "released_model": {"method": "gradients"},
    "count_regression": {"mechanism": "gaussian counts=True"},
    "gradients plans_from_counts=True": {"class_counts": "class_counts"},
}
"""Options of other fields that an option needs."""


def options(field: str) -> list[str]:
    return [name for name in choices.values()[field] if (field, name) != ("student", "none")]


def config(home, **chosen: str):
    """The toy run on images, with these options of some fields."""
    chosen = {key: name for option in chosen.values() for key, name in REQUIREMENTS.get(option, {}).items()} | chosen
    (x, y), short = images(160, 0), {"guide_student": "supervised", "student": "supervised"}
    squares = Tensors(
        name="squares", class_names=3, x=x[:80], y=y[:80], pool_x=x[80:130], pool_y=y[80:130],
        test_x=x[130:], test_y=y[130:], nominal_size=80,
    )  # fmt: skip
    mechanism = PRICED_BY.get(chosen.get("method", "").split(" ")[0])
    named = short | chosen | ({"mechanism": mechanism} if mechanism else {})
    components = {field: choices.values()[field][name](True, "torch", "add_remove") for field, name in named.items()}
    if components.get("selection") is not None:
        components["student"] = None
    terms = {"delta": 1e-4, "opening_budget": 1e4, "insecure_noise_seed": 0}  # costs take longer than all else
    if named.get("method") == "dpsgd":
        components, terms = components | {"student": None, "selection": None}, terms | {"target_epsilon": 50.0}
    base = {"teacher": RECIPE, "mechanism": GNMax(sigma=2.0), "query": Random(), "num_teachers": 12, "num_queries": 20}
    return run_config(
        dataset=squares, partition=AddRemove(), root=home, folder=home / "runs/blobs/gaussian/first",
        device=torch.device("cuda"), baseline=False, quiet=True, **terms, **(base | components),
    )  # fmt: skip


def run_on_gpu(home, gpu: SimulatedGpu, **chosen: str) -> bool:
    """Return whether the run is allowed (a combination may be refused); a run computes on the GPU."""
    gpu.reset_counts()
    try:
        with contextlib.redirect_stdout(None):
            pipeline.run(config(home, **chosen))
    except ValueError as error:
        assert not gpu.kernels, error
        return False
    assert gpu.kernels.total() > 20  # a released model is only looked at
    assert (home / "runs/blobs/gaussian/first/release/summary.json").exists()
    return True


@pytest.mark.parametrize("k", [1, 2, 3])  # the first method, dpsgd, takes as long as all others
def test_options_of_a_run_work_together_on_the_gpu(tmp_path, simulated_gpu, k):
    every = {field: [name for name in options(field) if "rounds" not in name] for field in FIELDS}
    assert run_on_gpu(tmp_path, simulated_gpu, **{field: names[k % len(names)] for field, names in every.items()})


@pytest.mark.slow(reason="a whole run of each option")
@pytest.mark.parametrize("field,name", [(field, name) for field in FIELDS for name in options(field)])
def test_every_option_works_by_itself_on_the_gpu(tmp_path, simulated_gpu, field, name):
    assert run_on_gpu(tmp_path, simulated_gpu, **{field: name})


OPTIONS = {
    "lean_cnn": {"channels": [2, 4], "hidden": 8},
    "convnet": {"channels": [2, 4], "hidden": [8]},
    "resnet": {"width": 8, "norm": "group"},
    "small_cnn": {"channels": [8, 8], "hidden": 8, "norm": "group"},
    "cnn": {"width": 8, "hidden": 8, "norm": "group"},
}


@pytest.mark.parametrize("network", NETWORKS)
def test_teachers_of_every_network_learn_and_vote_on_the_gpu(network, simulated_gpu):
    settings = recipe(network=network, options=OPTIONS.get(network, {}), steps=1, batch_size=4)
    trained = train(records(12), spec(), shards_of([[0, 1, 2], [3, 4]]), settings, seed=0, device=CUDA)
    before = simulated_gpu.kernels.total()
    votes = trained.count_votes(records(5).x, device=CUDA)
    assert before > 40 and simulated_gpu.kernels.total() > before
    assert votes.counts_QC.sum(1).tolist() == [2] * 5


Lines = Counter[tuple[str, str]]
"""Counts by file and function, which stay what they are when lines move."""


def by_function(counter: Counter[CodeLine]) -> Lines:
    counts: Lines = Counter()
    for line, times in counter.items():
        counts[line.file, line.function] += times
    return counts


class EnoughSteps(Exception): ...


def count_step_costs(gpu: SimulatedGpu, name: str = "supervised", steps: int = 1) -> list[Lines]:
    """Syncs, copies to the GPU and copies from it, of this many steps from the fourth on, when constants are there."""
    setup, counted = Setup(CUDA, small=True), []

    def progress(done: int, total: int) -> None:
        if done == 3:
            gpu.reset_counts()
        if done == 3 + steps:
            counted.extend(by_function(counter) for counter in (gpu.syncs, gpu.copies_to_device, gpu.copies_to_host))
            raise EnoughSteps

    with contextlib.suppress(EnoughSteps), deterministic_mode(CUDA):
        make_fits(setup, make_students(setup, 100), 100)[name](progress)
    return counted


STUDENTS = list(make_students(Setup(CUDA, small=True), 100))
SLOW_STUDENT = pytest.mark.slow(reason="fifty simulated steps of students that share one loop")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "supervised" else SLOW_STUDENT) for name in (*STUDENTS, "contrastive")],
)
def test_a_step_copies_nothing_and_students_look_at_their_losses_once_in_fifty(name, simulated_gpu):
    read = Counter({("students/training.py", "flush"): 1} if name in STUDENTS else {})  # losses and notes in one copy
    assert count_step_costs(simulated_gpu, name) == [Counter(), Counter(), Counter()]
    assert count_step_costs(simulated_gpu, name, SYNC_EVERY) == [read, Counter(), read]


def train_on_gpu(teachers=2, device=CUDA, network="mlp", **changes):
    shards, settings = shards_of([[5 * k, 5 * k + 1] for k in range(teachers)]), {"steps": 1, "options": {}} | changes
    return train(records(20), spec(), shards, recipe(network=network, **settings), seed=0, device=device)


def test_teachers_wait_for_no_step(simulated_gpu):
    """Their batches and their maps are copied from pinned memory; nothing comes back before the end."""
    counted = []
    for steps in (1, 32, 64):
        simulated_gpu.reset_counts()
        train_on_gpu(network="logistic", steps=steps)
        counted.append((by_function(simulated_gpu.syncs), by_function(simulated_gpu.copies_to_host)))
    assert counted[1] == counted[2]  # the first brings the constants


def test_votes_wait_once_for_all_points(simulated_gpu):
    trained, counted = train_on_gpu(device="cpu"), []
    for points in (1, MAX_GPU_POINTS, 2 * MAX_GPU_POINTS):
        simulated_gpu.reset_counts()
        trained.predict(records(points).x, device=CUDA)
        counted.append(by_function(simulated_gpu.syncs))
    assert counted[1] == counted[2] and counted[1]["teachers/ensemble.py", "store_predictions"] == 1


def test_features_of_records_come_back_in_blocks(simulated_gpu):
    encoder, counted = networks.build("logistic", (1, 8, 8), 3).to(CUDA), []
    x, y = images(480, 0)
    for count in (8, 160):  # at least 20 batches in one block
        simulated_gpu.reset_counts()
        private = PrivateRecords.from_rows(x[:count], y[:count], np.arange(count).astype(str))
        found = map_records_batch_invariant(lambda place_BD: place_BD, encoder, private, IMAGES, lambda *_: None)
        assert found.shape == (count, 3) and found.device.type == "cpu"
        counted.append(by_function(simulated_gpu.copies_to_host).total())
    assert counted == [2, 2]  # blanks, to learn what comes out, and the block


def test_votes_on_all_points_together_wait_once_for_some_teachers(simulated_gpu):
    """They are propagated on the CPU, along the graph."""
    counted, x = [], records(30).x
    method = TransductiveTeacherVotes(mechanism=GNMax(sigma=1.0), num_teachers=1, neighbors=3)
    for teachers in (2, 4):
        trained = train_on_gpu(teachers, device="cpu")
        vote = method.build_vote(compute_coordinates(x, spec()).to(CUDA))
        simulated_gpu.reset_counts()
        trained.predict(x, CUDA, vote=vote)
        counted.append(by_function(simulated_gpu.copies_to_host))
    assert counted[0] == counted[1] and counted[0].total() == 1


def plant_in_update(monkeypatch, fault):
    """A fault in every step of a student: ``fault`` gets a parameter on the GPU."""
    plain = AveragedModel.update

    def update(self):
        fault(next(self.module.parameters()))
        plain(self)

    monkeypatch.setattr(AveragedModel, "update", update)


def test_a_planted_sync_is_found(simulated_gpu, monkeypatch):
    before = count_step_costs(simulated_gpu)
    plant_in_update(monkeypatch, lambda parameter: parameter.sum().item())
    after = count_step_costs(simulated_gpu)
    assert after[0] - before[0] == {("students/training.py", "_optimize"): 1}


@pytest.mark.parametrize(
    "fault,message",
    [
        (lambda parameter: parameter + torch.ones(2).sum(0, True), "same device"),
        (lambda p: torch.rand(2, generator=make_torch_generator(0, "x"), device=p.device), "generator"),
    ],
)
def test_a_planted_mismatch_or_generator_of_the_host_is_found(fault, message, simulated_gpu, monkeypatch):
    plant_in_update(monkeypatch, fault)
    with pytest.raises(PlacementError, match=rf"{message}.*students/training.py"):
        count_step_costs(simulated_gpu)
