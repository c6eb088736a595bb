"""One teacher trained again alone: honest ensembles come out bit for bit, and a leak between teachers is refused."""

import pytest
import torch
import torchvision

from pate_torch.teachers import engine, independence, stacked
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import processes, recipe, records, shards_of, spec

ROWS = [[0], [1, 2], list(range(3, 40)), [], list(range(40, 60)), [60], list(range(61, 70)), [], list(range(70, 90))]
CPU, IN_THREES = torch.device("cpu"), processes()
OPTIONS = {"lean_cnn": {"channels": [4, 8], "hidden": 16}}


def trial_of(teacher, monkeypatch, executor=IN_THREES, folder=None, **changes):
    """The trial of this teacher of a new ensemble."""
    tried, settings = [], recipe(steps=8, **changes)
    monkeypatch.setattr(independence, "draw_candidate", lambda pairs: next(p for p in pairs if p[1] == teacher))
    options = {"executor": executor, "folder": folder, "on_retraining_check": tried.append}
    train(records(90), spec(), shards_of(ROWS), settings, seed=0, **options)
    (trial,) = tried
    return trial


@pytest.mark.parametrize("network,teacher", [*(("lean_cnn", k) for k in (1, 2, 3)), ("logistic", 4), ("mlp", 4)])
def test_an_honest_teacher_comes_out_bit_for_bit(network, teacher, monkeypatch):
    """Of shards of unequal sizes, of empty ones, and at every place of a launch."""
    trial_of(teacher, monkeypatch, network=network, options=OPTIONS.get(network, {})).run(records(20, seed=1).x, CPU)


def test_the_only_teacher_of_the_last_launch_comes_out_bit_for_bit(monkeypatch):
    """The ninth of nine teachers in launches of four, which is padded both times."""
    trial = trial_of(8, monkeypatch, processes(chunk=4))
    assert len(trial.retraining.chunk) == 1
    trial.run(records(20, seed=1).x, CPU)


@pytest.mark.fresh_process
def test_a_fresh_process_has_the_records_of_the_teacher_and_nothing_that_is_planted_here(monkeypatch, tmp_path):
    trial_of(4, monkeypatch, processes(workers=2), tmp_path).run(records(20, seed=1).x, CPU)
    plain = engine._compute_losses
    monkeypatch.setattr(engine, "_compute_losses", lambda *given: 2 * plain(*given))
    with pytest.raises(ValueError, match="came out different"):
        trial_of(2, monkeypatch, processes(chunk=1)).run(records(20, seed=1).x, CPU)


@pytest.mark.parametrize("teacher", [1, 4])
def test_a_leak_between_the_slots_of_a_launch_is_refused(teacher, monkeypatch):
    plain = engine._compute_losses

    def mixed(logits, y, smoothing):
        own = plain(logits, y, smoothing)
        return own * (1 + 1e-3 * own.mean())

    monkeypatch.setattr(engine, "_compute_losses", mixed)
    trial = trial_of(teacher, monkeypatch)
    with pytest.raises(ValueError, match=r"1 of 9 teachers.*came out different"):
        trial.run(records(20, seed=1).x, CPU)
    trial_of(teacher, monkeypatch, processes(chunk=1)).run(records(20, seed=1).x, CPU)  # nobody stands beside it


def test_a_leak_between_teachers_that_are_asked_together_is_refused(monkeypatch):
    trial, plain = trial_of(4, monkeypatch), stacked.forward

    def mixed(module, params, x):
        logits = plain(module, params, x)
        return logits + 1e-3 * logits.mean(0)

    monkeypatch.setattr(stacked, "forward", mixed)
    with pytest.raises(ValueError, match="came out different"):
        trial.run(records(20, seed=1).x, CPU)


def test_it_is_drawn_among_all_but_the_first_and_gets_its_own_records_alone(monkeypatch):
    drawn = []
    monkeypatch.setattr(independence, "draw_candidate", lambda pairs: drawn.append(list(pairs)) or pairs[3])
    trials = []
    private = records(90)
    train(
        private, spec(), shards_of(ROWS), recipe(steps=1), seed=0, executor=IN_THREES, on_retraining_check=trials.append
    )
    assert [teacher for _, teacher in drawn[0]] == list(range(1, len(ROWS)))
    chunk = trials[0].retraining.chunk
    assert chunk.teachers == range(3, 6) and trials[0].retraining.row == 1 and chunk.size_k.tolist() == [1, 20, 1]
    assert torch.equal(chunk.x_kS[1, :20], private.x[40:60])
    assert not chunk.x_kS[[0, 2]].any() and not chunk.x_kS[1, 20:].any() and not chunk.y_kS[[0, 2]].any()


def test_one_teacher_alone_is_not_tried():
    train(records(9), spec(), shards_of([[0, 1]]), recipe(steps=1), seed=0, on_retraining_check=pytest.fail)


@pytest.mark.fresh_process
def test_teachers_may_use_attributes_that_are_named_as_submodules_of_torch():
    """A function that uses ``torch`` and an attribute ``ops`` or ``classes``; pickle cannot read these two modules."""

    def make(points):
        layers = torch.nn.Sequential(torchvision.ops.FrozenBatchNorm2d(3), torch.nn.Flatten())
        layers.classes = 3
        return layers.classes * layers(points)

    points = torch.ones(2, 3, 1, 1)
    work = independence.pickle_work(make)
    torch.testing.assert_close(independence.call_in_fresh_process(work, points), make(points), rtol=0, atol=0)
