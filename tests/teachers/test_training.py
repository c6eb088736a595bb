"""Training: isolation of every record in one teacher, equality of the backends, unequal shards, resuming."""

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pate_torch import networks
from pate_torch.core.progress import do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.features.augmentation import warp
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import PrivateRecords
from pate_torch.teachers import engine, stacked, training, workers
from pate_torch.teachers import ensemble as ensemble_module
from pate_torch.teachers.engine import TrainingTask, flush_denormals, gather_chunk
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.training import train
from tests import ROOT
from tests.teachers.loop import train_loop
from tests.teachers.teacher_world import differing, recipe, records, shards_of, spec

CPU = torch.device("cpu")
BACKENDS = ("vectorized", "processes")


def removed(private: PrivateRecords, i: int) -> PrivateRecords:
    keep = torch.arange(len(private)) != i
    return PrivateRecords.from_rows(private.x[keep], private.y[keep], private.unit_id[keep.numpy()])


def replaced(private: PrivateRecords, i: int) -> PrivateRecords:
    x, y = private.x.clone(), private.y.clone()
    x[i], y[i] = 255 - x[i], (y[i] + 1) % 4
    return PrivateRecords.from_rows(x, y, private.unit_id)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replacing_one_record_changes_one_teacher_and_no_bit_of_the_others(backend):
    private, partition = records(70), ReplaceOne()
    shards = partition.make_shards(private, 7, seed=1)
    victim = 23
    owner = int((shards.index_KS == victim).any(1).nonzero())
    before, after = (train(data, spec(), shards, recipe(backend=backend), seed=3) for data in
                     (private, replaced(private, victim)))  # fmt: skip
    assert differing(before.params, after.params) == {owner}


@pytest.mark.parametrize("backend", BACKENDS)
def test_removing_or_adding_one_record_changes_one_teacher_and_no_bit_of_the_others(backend):
    private, partition = records(70), AddRemove()
    fewer = removed(private, 23)
    owner = int((partition.make_shards(private, 7, seed=1).index_KS == 23).any(1).nonzero())
    before, after = (
        train(data, spec(), partition.make_shards(data, 7, seed=1), recipe(backend=backend), seed=3)
        for data in (private, fewer)
    )
    assert differing(before.params, after.params) == {owner}


def test_emptying_a_shard_changes_one_teacher_and_no_bit_of_the_others():
    rows = [[0, 1, 2, 3, 4, 5], [6], [7, 8, 9]]
    full = train(records(10), spec(), shards_of(rows), recipe(), seed=0)
    without = train(records(10), spec(), shards_of([rows[0], [], rows[2]]), recipe(), seed=0)
    assert differing(full.params, without.params) == {1}
    assert without.trained_K.tolist() == [True, False, True]
    assert not without.predict(records(5).x)[1].any()


@pytest.mark.parametrize("network", ["logistic", "mlp", "lean_cnn", "convnet", "resnet"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_stacked_equals_loop_in_float64(network, optimizer):
    options = {"convnet": {"channels": [3, 4], "hidden": [6]}, "resnet": {"width": 8}}.get(network, {})
    private = records(60)
    shards = shards_of([list(range(0, 25)), list(range(25, 28)), list(range(28, 60))])
    settings = recipe(
        network=network,
        options=options,
        optimizer=optimizer,
        dtype="float64",
        label_smoothing=0.1,
        weight_decay=0.01,
        learning_rate=5e-3,
    )
    loop = train_loop(gather_chunk(private, shards, range(3)), spec(), settings, 2, CPU)
    batched = train(private, spec(), shards, settings, seed=2)
    for name, parameter in loop.params.items():
        torch.testing.assert_close(batched.params[name], parameter, rtol=0, atol=1e-10)


def test_processes_and_distributed_chunks_equal_vectorized_to_the_bit():
    private, shards = records(90), shards_of([list(range(k * 12, k * 12 + 12)) for k in range(7)])
    runs = [train(private, spec(), shards, recipe(backend=b, workers=w), seed=0) for b, w in
            (("vectorized", None), ("processes", 1), ("processes", 2))]  # fmt: skip
    threads = torch.get_num_threads()
    assert threads == 1, "conftest pins one thread, as workers do"
    for run in runs[1:]:
        assert differing(runs[0].params, run.params) == set()


def test_the_number_of_threads_changes_no_bit_and_is_left_as_it_was():
    private, shards = records(90), shards_of([list(range(k * 12, k * 12 + 12)) for k in range(7)])
    one = train(private, spec(), shards, recipe(), seed=0)
    try:
        torch.set_num_threads(3)
        three = train(private, spec(), shards, recipe(), seed=0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert differing(one.params, three.params) == set()


def test_the_loop_is_ordinary_training():
    """One teacher against torch.optim and nn.Module, written out."""
    private = records(40)
    settings = recipe(dtype="float64", label_smoothing=0.05, weight_decay=0.02, steps=20)
    ours = train_loop(gather_chunk(private, shards_of([list(range(40))]), range(1)), spec(), settings, 9, CPU)

    module = networks.build("lean_cnn", (1, 12, 12), 4, channels=[4, 8], hidden=16).double()
    networks.initialize(module, make_torch_generator(9, "teacher", 0, "init"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3, weight_decay=0.02)
    order = engine.draw_batches(9, 0, 40, 20, 8)
    theta = settings.augment.draw(20 * 8, (1, 12, 12), make_torch_generator(9, "teacher", 0, "augment")).view(
        20, 8, 2, 3
    )
    for step in range(20):
        x = warp(private.x[order[step].long()].double() / 255, theta[step])
        loss = F.cross_entropy(module((x - 0.3) / 0.4), private.y[order[step].long()], label_smoothing=0.05)
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 + math.cos(math.pi * step / 20)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(ours.params[name][0], parameter.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["logistic", "mlp", "lean_cnn", "convnet", "resnet"])
@pytest.mark.parametrize("shared", [False, True])
def test_stacked_forward_and_gradients_equal_vmap(name, shared):
    module = networks.build(name, (3, 10, 10), 4).double()
    streams = [make_torch_generator(k, "init") for k in range(3)]
    params = stacked.stack_initial(module, streams, torch.float64)
    params = {n: (p + 0.1 * torch.randn(p.shape, generator=streams[0])).requires_grad_() for n, p in params.items()}
    x = torch.randn(5, 1 if shared else 3, 3, 10, 10, generator=streams[0], dtype=torch.float64)
    weight = torch.randn(3, 5, 4, generator=streams[0], dtype=torch.float64)
    results = []
    for forward in (stacked.forward, stacked.forward_vmap):
        logits = forward(module, params, x)
        results.append([logits, *torch.autograd.grad((logits * weight).sum(), list(params.values()))])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["lean_cnn", "convnet", "resnet"])
def test_convolutions_as_products_equal_grouped_ones(name, monkeypatch):
    """The path GPUs take, on CPU tensors."""
    private, shards = records(30), shards_of([list(range(k * 10, k * 10 + 10)) for k in range(3)])
    settings = recipe(network=name, options={}, dtype="float64", steps=3)
    grouped = train(private, spec(), shards, settings, seed=0)
    monkeypatch.setattr(stacked, "MATMUL_DEVICES", {"cpu"})
    products = train(private, spec(), shards, settings, seed=0)
    for parameter in grouped.params:
        torch.testing.assert_close(products.params[parameter], grouped.params[parameter], rtol=0, atol=1e-10)


def test_an_unknown_layer_goes_through_vmap():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    assert not stacked.has_stacked_form(module)
    params = stacked.stack_initial(module, [make_torch_generator(k, "i") for k in range(2)], torch.float32)
    assert stacked.forward(module, params, torch.randn(5, 2, 4)).shape == (2, 5, 2)


def test_teachers_learn_and_agree_on_easy_data():
    private, fresh = records(400), records(100, seed=1)
    shards = AddRemove().make_shards(private, 8, seed=0)
    ensemble = train(private, spec(), shards, recipe(steps=60, chunk=None), seed=0)
    prediction = ensemble.predict(fresh.x)
    assert (prediction == fresh.y).float().mean() > 0.95
    assert (ensemble.count_votes(fresh.x).compute_plurality() == fresh.y).float().mean() > 0.98


def test_the_loop_and_the_stacked_engine_cast_the_same_votes_after_a_full_float32_run():
    private, fresh = records(400), records(500, seed=1)
    shards = AddRemove().make_shards(private, 8, seed=0)
    settings = recipe(steps=100)
    batched = train(private, spec(), shards, settings, seed=0)
    loop = train_loop(gather_chunk(private, shards, range(8)), spec(), settings, 0, CPU).params
    votes = dataclasses.replace(batched, params=loop).predict(fresh.x)
    assert (votes == batched.predict(fresh.x)).float().mean() >= 0.999


def test_unequal_shards_train_together_for_the_same_steps():
    rows = [[0], [1, 2], list(range(3, 40)), []]
    losses: list[torch.Tensor] = []
    settings = recipe(steps=80, augment=None)
    ensemble = train(
        records(40), spec(), shards_of(rows), settings, seed=0, on_losses=lambda _, loss_K: losses.append(loss_K)
    )
    assert ensemble.trained_K.tolist() == [True, True, True, False]
    assert len(losses) == engine.CURVE_POINTS and all(loss_K.shape == (4,) for loss_K in losses)
    assert (losses[-1][:3] < 0.1).all() and losses[0][0] < math.log(4) + 0.2
    own = records(40)
    for teacher, row in enumerate(rows[:3]):
        index = torch.tensor(row)
        assert (ensemble.predict(own.x[index])[teacher] == own.y[index]).all()


def test_a_diverged_teacher_still_votes_once():
    private = records(24)
    ensemble = train(private, spec(), shards_of([list(range(12)), list(range(12, 24))]), recipe(), seed=0)
    next(iter(ensemble.params.values()))[1] = float("nan")
    votes = ensemble.count_votes(private.x)
    assert not ensemble.predict(private.x)[1].any()
    assert torch.equal(votes.counts_QC.sum(1).long(), torch.full((24,), 2))


def test_predictions_do_not_depend_on_the_batch_or_on_training_time_distortion(monkeypatch):
    private = records(50)
    ensemble = train(private, spec(), shards_of([list(range(25)), list(range(25, 50))]), recipe(), seed=0)
    whole = ensemble.predict(private.x)
    monkeypatch.setattr(ensemble_module, "CPU_POINTS", 7)
    assert torch.equal(whole, ensemble.predict(private.x))
    by_hand = []
    for k in range(2):
        module = networks.rebuild(ensemble.network)
        module.load_state_dict({name: p[k] for name, p in ensemble.params.items()})
        by_hand.append(module(spec().normalize(private.x)).argmax(1))
    assert torch.equal(whole, torch.stack(by_hand))


def test_threads_give_the_same_predictions_and_are_left_as_they_were():
    private, shards = records(120), shards_of([list(range(k * 5, k * 5 + 5)) for k in range(24)])
    ensemble = train(private, spec(), shards, recipe(steps=4), seed=0)
    one = ensemble.predict(private.x)
    seen: list[int] = []
    try:
        torch.set_num_threads(3)
        three = ensemble.predict(private.x, progress=lambda done, _: seen.append(done))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, three) and seen == [8, 16, 24]


def test_batches_are_permutations_of_the_own_shard():
    order = engine.draw_batches(0, 4, size=10, steps=7, batch_size=6).flatten()[:40].view(4, 10)
    assert torch.equal(order.sort(1).values, torch.arange(10, dtype=torch.int32).expand(4, 10))
    assert len({tuple(row.tolist()) for row in order}) == 4
    assert not torch.equal(order, engine.draw_batches(0, 5, 10, 7, 6).flatten()[:40].view(4, 10))


@pytest.mark.parametrize("backend", ["vectorized", "processes"])
def test_resumes_from_finished_groups_to_the_same_bits(tmp_path, backend, monkeypatch):
    private, shards = records(120), shards_of([list(range(k * 3, k * 3 + 3)) for k in range(40)])
    settings = recipe(backend=backend, workers=1, steps=4, chunk=8)
    whole = train(private, spec(), shards, settings, seed=0)

    def interrupt(done: int, _: int) -> None:
        if done >= 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(private, spec(), shards, settings, seed=0, checkpoint_dir=tmp_path, progress=interrupt)
    kept = sorted(tmp_path.glob("*.safetensors"))
    assert len(kept) == 2
    trained: list[range] = []
    plain = training.train_stacked

    def counted(chunk, *arguments):
        trained.append(chunk.teachers)
        return plain(chunk, *arguments)

    monkeypatch.setattr(training, "train_stacked", counted)
    here = recipe(steps=4, chunk=8)
    resumed = train(private, spec(), shards, here, seed=0, checkpoint_dir=tmp_path)
    assert trained == [range(32, 40)]
    assert differing(whole.params, resumed.params) == set()

    trained.clear()  # another seed, other records, a damaged file: trained anew
    train(private, spec(), shards, here, seed=1, checkpoint_dir=tmp_path)
    assert len(trained) == 5
    trained.clear()
    kept[0].write_bytes(b"damaged")
    train(replaced(private, 61), spec(), shards, here, seed=0, checkpoint_dir=tmp_path)
    assert trained == [range(0, 8), range(8, 16), range(16, 24), range(24, 32)]


@pytest.fixture(params=[True, False], ids=["forked", "spawned"])
def start(request, monkeypatch):
    """Both ways to start a worker, wherever the first one works."""
    if request.param and not workers.can_fork():
        pytest.skip("a copy of this process could not compute")
    monkeypatch.setattr(workers, "can_fork", lambda: request.param)


def test_workers_give_the_bits_of_this_process_however_they_start(start):
    """Also after this process has used threads and autograd, which a copy does not inherit alive."""
    torch.nn.Conv2d(1, 8, 3)(torch.randn(64, 1, 32, 32)).sum().backward()
    private, shards = records(90), shards_of([list(range(k * 9, k * 9 + 9)) for k in range(10)])
    here, there = (
        train(private, spec(), shards, recipe(backend=backend, workers=2), seed=0).params
        for backend in ("vectorized", "processes")
    )
    assert differing(here, there) == set()


def test_a_dying_worker_is_a_clear_error(monkeypatch, start):
    private, shards = records(40), shards_of([list(range(k * 5, k * 5 + 5)) for k in range(8)])
    monkeypatch.setenv("PYTHONPATH", "")
    broken = recipe(backend="processes", batch_size=8, steps=3)
    object.__setattr__(broken, "network", "mlp")  # its options do not fit: the worker fails on building it
    shapes = workers._get_result_shapes(spec(), recipe(), 8)
    monkeypatch.setattr(workers, "_get_result_shapes", lambda *_: shapes)
    chunks = [range(3), range(3, 6), range(6, 8)]
    with pytest.raises(ChildProcessError, match=r"worker died: exit code 1; ValueError.*vectorized"):
        list(workers.train_chunks(TrainingTask(private, spec(), shards, broken, 0, CPU), chunks, 2))


def test_a_killed_worker_is_a_clear_error_and_the_others_end(monkeypatch, start):
    private, shards = records(40), shards_of([list(range(k * 5, k * 5 + 5)) for k in range(8)])
    forever = recipe(backend="processes", workers=3, steps=10**6, augment=None)
    started: list[workers._Worker] = []
    plain = workers._start_worker

    def remember(*arguments):
        started.append(plain(*arguments))
        if len(started) == 3:
            started[1].process.kill()
        return started[-1]

    monkeypatch.setattr(workers, "_start_worker", remember)
    monkeypatch.setattr(workers, "_STOP_TIMEOUT_SECONDS", 60.0)  # a spawned one may still be importing torch
    with pytest.raises(ChildProcessError, match="killed by signal 9"):
        train(private, spec(), shards, forever, seed=0)
    assert [one.process.exitcode for one in started] == [0, -9, 0]  # told to stop, and stopped by themselves


ORPHAN = """
import os, signal, sys
sys.path[:0] = [{root!r}]
from tests.teachers.loop import train_loop
from tests.teachers.teacher_world import recipe, records, shards_of, spec
from pate_torch.teachers import workers
from pate_torch.teachers.training import train

plain, started = workers._start_worker, []

def remember(*arguments):
    started.append(plain(*arguments))
    if len(started) == 3:
        print(*(getattr(one.process, "pid", None) or one.process.popen.pid for one in started), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return started[-1]

workers._start_worker = remember
workers.can_fork = lambda: {fork}
forever = recipe(backend="processes", workers=3, steps=10**6, augment=None)
train(records(40), spec(), shards_of([list(range(k * 5, k * 5 + 5)) for k in range(8)]), forever, seed=0)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_no_worker_outlives_a_killed_run(start):
    code = ORPHAN.format(root=str(ROOT), fork=workers.can_fork())
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == -9, run.stderr
    pids = run.stdout.split()
    assert len(pids) == 3
    patience = time.monotonic() + 120  # a worker that is still importing torch looks up when it has
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_progress_and_curves_are_reported():
    seen, tags = [], []
    train(
        records(60),
        spec(),
        shards_of([list(range(k * 10, k * 10 + 10)) for k in range(6)]),
        recipe(steps=4),
        seed=0,
        progress=lambda done, total: seen.append((done, total)),
        log=lambda tag, value, step: tags.append((tag, step)) if math.isfinite(value) else do_nothing(),
    )
    done = [count for count, total in seen if total == 6]
    assert len(done) == len(seen) and done == sorted(done) and {3, 6} <= set(done)
    assert 0 < min(filter(None, done)) < 3  # a sign of life before the first chunk ends
    assert ("teachers/loss_mean", 4) in tags and ("teachers/accuracy_mean", 1) in tags


def test_workers_tell_how_far_they_are_before_a_chunk_ends(start):
    seen = []
    shards = shards_of([list(range(k * 10, k * 10 + 10)) for k in range(6)])
    settings = recipe(backend="processes", workers=1, steps=20)
    train(records(60), spec(), shards, settings, seed=0, progress=lambda done, total: seen.append(done))
    assert seen == sorted(seen) and seen[-1] == 6 and {1, 2, 3, 4, 5} <= set(seen)


def test_teachers_that_all_diverged_are_refused_and_one_that_did_is_not():
    shards = shards_of([list(range(k * 10, k * 10 + 10)) for k in range(6)])
    with pytest.raises(ValueError, match=r"teacher\.learning_rate=1e\+30: all teachers diverged\. Lower teacher"):
        train(records(60), spec(), shards, recipe(learning_rate=1e30, steps=10), seed=0)
    loss = torch.full((6, 5), math.nan)
    loss[3] = 1.0
    training._check_converged(loss, recipe())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "resnet", "options": {"norm": "batch"}}, "batch normalization"),
        ({"options": {"width": 3}}, "takes channels, hidden"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"schedule": "linear"}, "schedule"),
        ({"backend": "threads"}, "backend"),
        ({"dtype": "half"}, "dtype"),
        ({"augment": {"rotate": 400}}, "augment.rotate"),
        ({"augment": 3}, "augment"),
        ({"label_smoothing": 0.9}, "label_smoothing"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        train(records(9), spec(), shards_of([[0, 1], [2, 3]]), recipe(**changes), seed=0)


def test_an_ensemble_checks_its_parameters():
    ensemble = train(records(9), spec(), shards_of([[0, 1], [2, 3]]), recipe(steps=1), seed=0)
    fewer = dict(list(ensemble.params.items())[1:])
    with pytest.raises(ValueError, match="do not fit"):
        TeacherEnsemble(ensemble.network, fewer, ensemble.trained_K, spec())
    assert "withheld" in repr(ensemble)


def test_bf16_trains():
    private = records(200)
    ensemble = train(
        private, spec(), AddRemove().make_shards(private, 4, seed=0), recipe(steps=60, dtype="bf16"), seed=0
    )
    assert (ensemble.predict(private.x) == private.y).float().mean() > 0.95


def test_numbers_too_small_for_full_precision_are_zero_only_while_training():
    tiny = torch.tensor(torch.finfo(torch.float32).smallest_normal)
    with flush_denormals():
        assert float(tiny / 2) == 0
        with flush_denormals():
            pass
        assert float(tiny / 2) == 0
    assert float(tiny / 2) > 0
