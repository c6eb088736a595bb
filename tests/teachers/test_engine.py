"""The stacked engine against a loop, and the loop against plain PyTorch."""

import dataclasses
import math
import threading
import time

import pytest
import torch
import torch.nn.functional as F

from pate_torch import networks
from pate_torch.core.rng import make_torch_generator
from pate_torch.features.augmentation import warp
from pate_torch.privacy.partition import AddRemove
from pate_torch.teachers import engine, stacked
from pate_torch.teachers.engine import flush_denormals, gather_chunk, prefetch
from pate_torch.teachers.training import train
from tests.teachers.loop import train_loop
from tests.teachers.teacher_world import recipe, records, shards_of, spec

CPU = torch.device("cpu")


OPTIONS = {"convnet": {"channels": [3, 4], "hidden": [6]}, "resnet": {"width": 8}}


@pytest.mark.parametrize(
    "network,optimizer,matmul",
    [
        *((network, "adam", False) for network in ("logistic", "mlp", "lean_cnn", "convnet", "resnet")),
        ("mlp", "sgd", False),
        ("lean_cnn", "sgd", True),
    ],
)
def test_stacked_equals_loop_in_float64(network, optimizer, matmul, monkeypatch):
    if matmul:
        monkeypatch.setattr(stacked, "MATMUL_DEVICES", {"cpu"})  # the convolutions of GPUs
    private = records(60)
    shards = shards_of([list(range(0, 25)), list(range(25, 28)), list(range(28, 60)), []])
    exact = {"dtype": "float64", "label_smoothing": 0.1, "weight_decay": 0.01}
    settings = recipe(network=network, options=OPTIONS.get(network, {}), optimizer=optimizer, **exact)
    loop = train_loop(gather_chunk(private, shards, range(4)), spec(), settings, 2, CPU)
    batched = train(private, spec(), shards, settings, seed=2)
    for name, parameter in loop.params.items():
        torch.testing.assert_close(batched.params[name], parameter, rtol=0, atol=1e-10)
        assert not batched.params[name][3].any()


def test_the_loop_is_ordinary_training():
    """One teacher against torch.optim and nn.Module, written out."""
    private = records(40)
    settings = recipe(dtype="float64", label_smoothing=0.05, weight_decay=0.02, steps=20)
    ours = train_loop(gather_chunk(private, shards_of([list(range(40))]), range(1)), spec(), settings, 9, CPU)

    module = networks.build("lean_cnn", (1, 12, 12), 4, channels=[4, 8], hidden=16).double()
    networks.initialize(module, make_torch_generator(9, "teacher", 0, "init"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3, weight_decay=0.02)
    order = engine.draw_batches(9, 0, 40, 20, 8)
    maps = settings.augment.draw(20 * 8, (1, 12, 12), make_torch_generator(9, "teacher", 0, "augment"))
    for step, theta in enumerate(maps.view(20, 8, 2, 3)):
        x = warp(private.x[order[step].long()].double() / 255, theta)
        loss = F.cross_entropy(module((x - 0.3) / 0.4), private.y[order[step].long()], label_smoothing=0.05)
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 + math.cos(math.pi * step / 20)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(ours.params[name][0], parameter.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_the_loop_and_the_stacked_engine_cast_the_same_votes_and_are_right_on_easy_data(dtype):
    private, fresh = records(200), records(300, seed=1)
    shards, settings = AddRemove().make_shards(private, 4, seed=0), recipe(steps=60, dtype=dtype)
    batched = train(private, spec(), shards, settings, seed=0)
    prediction = batched.predict(fresh.x)
    assert (prediction == fresh.y).float().mean() > 0.95
    if dtype == "float32":
        loop = train_loop(gather_chunk(private, shards, range(4)), spec(), settings, 0, CPU).params
        assert (dataclasses.replace(batched, groups=[loop]).predict(fresh.x) == prediction).float().mean() >= 0.999


def test_batches_are_permutations_of_the_own_shard():
    order = engine.draw_batches(0, 4, size=10, steps=7, batch_size=6).flatten()[:40].view(4, 10)
    assert torch.equal(order.sort(1).values, torch.arange(10, dtype=torch.int32).expand(4, 10))
    assert len({tuple(row.tolist()) for row in order}) == 4
    assert not torch.equal(order, engine.draw_batches(0, 5, 10, 7, 6).flatten()[:40].view(4, 10))


def test_numbers_too_small_for_full_precision_are_zero_only_while_training():
    tiny = torch.tensor(torch.finfo(torch.float32).smallest_normal)
    with flush_denormals():
        assert float(tiny / 2) == 0
        with flush_denormals():
            pass
        assert float(tiny / 2) == 0
    assert float(tiny / 2) > 0


def test_the_next_item_is_made_while_one_is_used():
    items, threads, before = [], set(), torch.get_num_threads()

    def iterate():
        for k in range(4):
            threads.add((threading.get_ident(), torch.get_num_threads()))
            items.append(k)
            yield k

    for k in prefetch(iterate()):
        deadline = time.monotonic() + 10
        while len(items) < min(k + 2, 4):
            assert time.monotonic() < deadline, "the next item is never made"
            time.sleep(0.001)
        assert len(items) <= k + 2  # and no more than the next
    ((thread, num_threads),) = threads
    assert thread != threading.get_ident() and num_threads == 1 and torch.get_num_threads() == before


def test_the_thread_ends_with_an_error_or_with_its_user():
    def iterate():
        yield 1
        raise ValueError("no second")

    stream = prefetch(iterate())
    assert next(stream) == 1
    with pytest.raises(ValueError, match="no second"):
        next(stream)
    before = threading.active_count()
    abandoned = prefetch(iter(range(5)))
    next(abandoned)
    abandoned.close()
    assert threading.active_count() == before
