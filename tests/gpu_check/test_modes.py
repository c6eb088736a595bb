"""Every mode of a run on the pretend GPU: all lies where CUDA wants it, and what each step waits for is known."""

import contextlib
import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from pate_torch import networks, pipeline
from pate_torch.data.tensors import Tensors
from pate_torch.features.neighbors import coordinates, neighbor_graph
from pate_torch.networks import NETWORKS
from pate_torch.reporting import tensorboard
from pate_torch.reporting.tensorboard import ReleaseBoard
from pate_torch.students.training import LOOKED_AT
from pate_torch.teachers.launch import ASKED
from pate_torch.teachers.training import train
from pate_torch.types import PrivateData
from pate_torch.voters.records import map_records_independently
from pate_torch.voters.transductive import JointVotes
from tests.gpu_check.device_worlds import CUDA, STUDENTS, Step, each_step, fits, lines
from tests.privacy import neighbor_choices as choices
from tests.run_configs import changed
from tests.teachers.teacher_world import recipe, records, shards_of, spec
from tests.tiny_runs import tiny
from tests.worlds import IMAGES, images

PRICED_BY = {"reverse_knn": "histogram", "gradients": "gradient_descent"}
"""Voters that name the mechanism that prices them."""
FIELDS = ("voters", "teacher", "features", "query", "student", "selection", "membership")
"""What decides what a run computes where."""


def options(field: str) -> list[str]:
    return [name for name in choices.values()[field] if (field, name) != ("student", "none")]


def config(home, **chosen: str):
    """The toy run on images, with these options of some fields."""
    if chosen.get("student") == "released_model":
        chosen = {"voters": "gradients"} | chosen
    x, y = images(160, 0)
    squares = Tensors(
        name="squares", class_names=3, x=x[:80], y=y[:80], pool_x=x[80:130], pool_y=y[80:130],
        test_x=x[130:], test_y=y[130:], nominal_size=80,
    )  # fmt: skip
    mechanism = PRICED_BY.get(chosen.get("voters", "").split(" ")[0])
    short = {"guide_student": "supervised", "student": "supervised"}
    named = short | chosen | ({"mechanism": mechanism} if mechanism else {})
    made = {field: choices.values()[field][name](True, "torch", "add_remove") for field, name in named.items()}
    if made.get("selection") is not None:
        made["student"] = None
    base = changed(tiny(home), opening_budget=1e4, insecure_noise_seed=0)  # prices take longer than all else
    return dataclasses.replace(base, dataset=squares, device=torch.device("cuda"), baseline=False, **made)


@pytest.fixture
def plain_board(monkeypatch):
    """No figures, which are drawn from the report."""
    monkeypatch.setattr(ReleaseBoard, "_figure", lambda *_: None)
    for name in ("confusion_figure", "examples_figure"):
        monkeypatch.setattr(tensorboard, name, lambda _: None)


def runs(home, card, **chosen: str) -> bool:
    """Whether the run is one (a combination may be refused); what it computes, it computes on the card."""
    card.forget()
    try:
        with contextlib.redirect_stdout(None):
            pipeline.run(config(home, **chosen))
    except ValueError as error:
        assert not card.kernels, error
        return False
    assert card.kernels.total() > 20  # a released model is only looked at
    assert (home / "runs/blobs/gaussian/first/release/summary.json").exists()
    return True


def test_every_option_of_a_run_works_on_the_card(tmp_path, card, plain_board):
    """Several options at once; where these are refused together, each by itself. Two rounds are left to the slow."""
    every = {field: [name for name in options(field) if "rounds" not in name] for field in FIELDS}
    ran = set()
    for place in range(max(map(len, every.values()))):
        chosen = {field: names[place % len(names)] for field, names in every.items()}
        if runs(tmp_path / f"{place}", card, **chosen):
            ran |= set(chosen.items())
    for field, name in {(field, name) for field, names in every.items() for name in names} - ran:
        assert runs(tmp_path / f"{field}-{name}", card, **{field: name}), (field, name)


@pytest.mark.slow
@pytest.mark.parametrize("field,name", [(field, name) for field in FIELDS for name in options(field)])
def test_every_option_works_by_itself_on_the_card(tmp_path, card, plain_board, field, name):
    assert runs(tmp_path, card, **{field: name})


OPTIONS = {
    "lean_cnn": {"channels": [2, 4], "hidden": 8},
    "convnet": {"channels": [2, 4], "hidden": [8]},
    "resnet": {"width": 8, "norm": "group"},
    "small_cnn": {"channels": [8, 8], "hidden": 8, "norm": "group"},
    "cnn": {"width": 8, "hidden": 8, "norm": "group"},
    "wide_resnet": {"depth": 10, "widen": 1, "norm": "group"},
}


@pytest.mark.parametrize("network", NETWORKS)
def test_teachers_of_every_network_learn_and_vote_on_the_card(network, card):
    settings = recipe(network=network, options=OPTIONS.get(network, {}), steps=1, batch_size=4)
    trained = train(records(12), spec(), shards_of([[0, 1, 2], [3, 4]]), settings, seed=0, device=CUDA)
    before = card.kernels.total()
    votes = trained.votes(records(5).x, device=CUDA)
    assert before > 40 and card.kernels.total() > before
    assert votes.counts_QC.sum(1).tolist() == [2] * 5


# ---- what a step waits for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*STUDENTS, "contrastive"])
def test_a_step_copies_nothing_and_students_look_at_their_losses_once_in_fifty(name, card):
    read = Counter({("students/training.py", "_numbers"): 2} if name in STUDENTS else {})  # losses, and what is noted
    assert each_step(card, fits(name)) == Step(Counter(), Counter(), Counter())
    assert each_step(card, fits(name), LOOKED_AT) == Step(syncs=read, to_device=Counter(), to_host=read)


def test_teachers_wait_for_no_step(card):
    """Their batches and their maps are copied from pinned memory; nothing comes back before the end."""
    counted = []
    for steps in (1, 32, 64, 96):
        card.forget()
        settings = recipe(network="logistic", options={}, steps=steps)
        train(records(20), spec(), shards_of([[0, 1, 2], [3, 4]]), settings, seed=0, device=CUDA)
        counted.append((lines(card.syncs), lines(card.to_host)))
    assert counted[1] == counted[2] == counted[3]  # the first brings the constants


def test_votes_wait_once_for_all_points(card):
    trained = train(
        records(20), spec(), shards_of([[0, 1, 2], [3, 4]]), recipe(network="mlp", options={}, steps=1), seed=0
    )
    counted = []
    for points in (1, ASKED, 2 * ASKED):
        card.forget()
        trained.predictions(records(points).x, device=CUDA)
        counted.append(lines(card.syncs))
    assert counted[1] == counted[2] and counted[1]["teachers/ensemble.py", "hear"] == 1


def test_features_of_records_come_back_in_blocks(card):
    encoder, counted = networks.build("logistic", (1, 8, 8), 3).to(CUDA), []
    x, y = images(480, 0)
    for count in (8, 160):  # at least 20 batches in one block
        card.forget()
        private = PrivateData(x[:count], y[:count], np.arange(count).astype(str))
        found = map_records_independently(lambda place_BD: place_BD, encoder, private, IMAGES, lambda *_: None)
        assert found.shape == (count, 3) and found.device.type == "cpu"
        counted.append(lines(card.to_host).total())
    assert counted == [2, 2]  # blanks, to learn what comes out, and the block


def test_votes_on_all_points_together_wait_once_for_some_teachers(card):
    """And for each block of points, whose logits need not all fit on the card."""
    counted, x = [], records(30).x
    for teachers in (2, 4):
        shards = shards_of([[5 * k, 5 * k + 1] for k in range(teachers)])
        trained = train(records(20), spec(), shards, recipe(network="mlp", options={}, steps=1), seed=0)
        graph = neighbor_graph(coordinates(x, spec()).to(CUDA), 3)
        card.forget()
        JointVotes(graph, 0.8, True).predictions(trained, x, CUDA)
        counted.append(lines(card.to_host))
    assert counted[0] == counted[1] and counted[0].total() == 2
