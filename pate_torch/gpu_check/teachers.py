"""Parts about teachers: parity with the CPU, neighbors bit for bit, and memory against the plan."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pate_torch import networks
from pate_torch.core.device import float32
from pate_torch.core.rng import torch_stream
from pate_torch.gpu_check import worlds
from pate_torch.gpu_check.parts import Bench, Finding, at_most
from pate_torch.gpu_check.worlds import CPU
from pate_torch.networks import feature_extractor
from pate_torch.protocols import silent
from pate_torch.teachers import launch, stacked
from pate_torch.teachers.engine import BLOCK, train_loop, train_stacked
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.recipe import MEMORY_GIB
from pate_torch.teachers.training import train
from pate_torch.types import DataSpec, PrivateData, Shards
from pate_torch.voters.records import map_records_independently

ROUNDING = {"float64": 1e-9, "float32": 1e-4, "tf32": 0.2, "bf16": 0.5}
"""How far gradients may lie from those of the CPU in float64, as a share of their length. For float32 some hundred
times what its last bits come to, and less than TF32's. The other two must only be about right: where rounding moves a
maximum to another place, the gradients behind it follow."""


# ---- parity ----------------------------------------------------------------------------------------------------------


def parity(bench: Bench) -> Iterator[Finding]:
    """Parameters, gradients and votes of stacked teachers beside those of the CPU in float64."""
    spec = worlds.spec(bench)
    for network, options in worlds.teacher_networks(bench).items():
        recipe = worlds.recipe(network, options, steps=3, dtype="float64")
        chunk = worlds.chunk(spec, teachers=3)
        exact = train_stacked(chunk, spec, recipe, 0, CPU).params
        for name, method in (("stacked", train_stacked), ("in a loop", train_loop)):
            found = method(chunk, spec, recipe, 0, bench.device).params
            yield at_most(f"{network} {name}, float64: parameters", _apart(found, exact), ROUNDING["float64"])
        module, params = _network(network, options, spec)
        x, y = _points(spec)
        for dtype, rounding in ROUNDING.items():
            with float32(tf32=dtype == "tf32"):
                found = _gradients(module, params, x, y, bench.device, dtype)
            yield at_most(f"{network}, {dtype}: gradients", _apart(found, _gradients(module, params, x, y)), rounding)
        said = [_opinions(network, options, spec, params, dtype, device) for dtype, device in
                ((torch.float32, bench.device), (torch.float64, CPU))]  # fmt: skip
        yield at_most(f"{network}, float32: opinions when asked", _distance(*said), ROUNDING["float32"])


def _network(network: str, options: Mapping[str, object], spec: DataSpec) -> tuple[nn.Module, stacked.Parameters]:
    """A network, and parameters of three whose last layer is not at zero."""
    module = networks.build(network, spec.input_shape, spec.num_classes, **options)
    draw = torch_stream(0, "parity")
    params = stacked.stack_initial(module, [torch_stream(k, "parity") for k in range(3)], torch.float32)
    return module, {name: value + 0.05 * torch.randn(value.shape, generator=draw) for name, value in params.items()}


def _points(spec: DataSpec) -> tuple[Tensor, Tensor]:
    """Points [B, K, ...] without flat areas, whose maxima would be a matter of rounding, and classes [K, B]."""
    draw = torch_stream(0, "points")
    x = torch.randn(8, 3, *spec.input_shape, generator=draw)
    return x, torch.randint(spec.num_classes, (3, 8), generator=draw)


def _gradients(
    module: nn.Module,
    params: stacked.Parameters,
    x: Tensor,
    y: Tensor,
    device: torch.device = CPU,
    dtype: str = "float64",
) -> stacked.Parameters:
    number = torch.float64 if dtype == "float64" else torch.float32
    own = {name: value.to(device, number).requires_grad_() for name, value in params.items()}
    logits = stacked.forward(module, own, x.to(device, torch.bfloat16 if dtype == "bf16" else number))
    F.cross_entropy(logits.flatten(0, 1).to(number), y.to(device).flatten()).backward()
    return {name: value.grad.cpu() for name, value in own.items() if value.grad is not None}


def _opinions(
    network: str,
    options: Mapping[str, object],
    spec: DataSpec,
    params: stacked.Parameters,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    description = networks.describe(network, spec.input_shape, spec.num_classes, **options)
    own = {name: value.to(dtype) for name, value in params.items()}
    parts: list[Tensor] = []
    Ensemble(description, own, torch.ones(3, dtype=torch.bool), spec).opinions(
        worlds.images(spec, 16)[0], lambda rows, said: parts.extend(logits.cpu() for _, logits in said), device=device
    )
    return torch.cat(parts, 1)


def _apart(found: stacked.Parameters, exact: stacked.Parameters) -> float:
    return max(_distance(found[name], exact[name]) for name in exact)


def _distance(found: Tensor, exact: Tensor) -> float:
    """As a share of the length of what is exact."""
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-12))


# ---- neighbors -------------------------------------------------------------------------------------------------------

VICTIM = 3


def neighbors(bench: Bench) -> Iterator[Finding]:
    """One teacher's records replaced, again and again, beside other work: no bit of another teacher changes."""
    spec, times = worlds.spec(bench), bench.of(20, 2)
    for network, options in worlds.teacher_networks(bench).items():
        recipe = worlds.recipe(network, options, steps=bench.of(10, 3))
        one, other = worlds.chunk(spec, teachers=8), worlds.chunk(spec, teachers=8)
        x, y = worlds.images(spec, one.x_kS.shape[1], seed=1)
        other.x_kS[VICTIM], other.y_kS[VICTIM] = x, y
        with _busy(bench):
            before = train_stacked(one, spec, recipe, 0, bench.device).params
            changed = [_changed(before, train_stacked(other, spec, recipe, 0, bench.device).params)
                       for _ in range(times)]  # fmt: skip
        told = sorted(set().union(*changed) - {VICTIM})
        yield Finding(
            f"{network}: teachers told by another's records, {times} times",
            len(told),
            passed=not told and all(VICTIM in found for found in changed),
        )
    yield from _records(bench, spec, times)


def _changed(one: stacked.Parameters, other: stacked.Parameters) -> set[int]:
    return {k for name in one for k in range(len(one[name])) if not torch.equal(one[name][k], other[name][k])}


def _records(bench: Bench, spec: DataSpec, times: int) -> Iterator[Finding]:
    """Records that are encoded each by itself, with one of them replaced, one less, and one more."""
    network = networks.build("small_cnn", spec.input_shape, spec.num_classes, norm="group", channels=(8, 16))
    encoder = feature_extractor(networks.initialize(network, torch_stream(0, "encoder"))).to(bench.device).eval()
    private = worlds.records(spec, 41)
    most = private.x[:40]

    def said(x: Tensor) -> Tensor:
        some = PrivateData(x, private.y[: len(x)], private.unit_id[: len(x)])
        return map_records_independently(lambda feature_BD: feature_BD, encoder, some, spec, silent)

    replaced = most.clone()
    replaced[VICTIM] = 255 - replaced[VICTIM]
    kept = torch.arange(40) != VICTIM
    told = 0
    with _busy(bench):
        before = said(most)
        for _ in range(times):
            others = (
                (said(replaced)[kept], before[kept]),
                (said(most[kept]), before[kept]),
                (said(private.x)[:40], before),
            )
            told += sum(not torch.equal(after, alone) for after, alone in others)
    yield Finding(f"records told by another record, {times} times", told, passed=told == 0)


@contextmanager
def _busy(bench: Bench) -> Iterator[None]:
    """Another stream of the GPU at work, so that blocks run in another order each time; the pretend one has none."""
    if bench.toy:
        yield
        return
    done = threading.Event()

    def work() -> None:
        stream: torch.cuda.Stream = torch.cuda.Stream(bench.device)
        with torch.cuda.stream(stream):
            some = torch.randn(2048, 2048, device=bench.device)
            while not done.is_set():
                for _ in range(20):
                    some @ some
                stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(bench: Bench) -> Iterator[Finding]:
    """The most that is allocated while teachers are trained and asked, as a share of what the plan says."""
    spec, batch = worlds.spec(bench), bench.of(32, 8)
    for network, options in worlds.teacher_networks(bench).items():
        recipe = worlds.recipe(network, options, steps=bench.of(BLOCK, 2), batch_size=batch)
        cost = launch.network_cost(network, options, spec)
        for teachers in bench.of((8, 16), (2, 4)):
            chunk = worlds.chunk(spec, teachers)
            most = _peak(bench, partial(train_stacked, chunk, spec, recipe, 0, bench.device))
            planned = teachers * launch.training_bytes(recipe, cost) + chunk.x_kS.nbytes + chunk.y_kS.nbytes
            yield at_most(f"{network}: {teachers} trained, of the plan", most / planned, 1.0)
        x = worlds.images(spec, bench.of(512, 64))[0]
        ensemble = _untrained(network, options, spec, bench.of(16, 4), _most_gib(bench))
        most = _peak(bench, partial(ensemble.predictions, x, device=bench.device))
        together, points = launch.ask_size(cost, len(ensemble), ensemble.memory_gib)
        planned = together * launch.asking_bytes(cost, points) + x[:points].nbytes
        yield at_most(f"{network}: asked, of the plan", most / planned, 1.0)
    yield from _too_large(bench, spec)


def _too_large(bench: Bench, spec: DataSpec) -> Iterator[Finding]:
    """What does not fit at once is launched in parts, and what does not fit at all is refused."""
    network = bench.of("wide_resnet", "lean_cnn")
    options, teachers = worlds.teacher_networks(bench)[network], bench.of(40, 6)
    recipe = worlds.recipe(network, options, steps=1, batch_size=bench.of(128, 8))
    cost = launch.network_cost(network, options, spec)
    each = launch.training_bytes(recipe, cost) / 2**30
    recipe = dataclasses.replace(recipe, memory_gib=min(each * teachers / 2, _most_gib(bench)))
    size = launch.train_size(recipe, cost, teachers, bench.device)
    private, shards = worlds.records(spec, 2 * teachers), _shards(teachers, 2)
    most = _peak(bench, lambda: train(private, spec, shards, recipe, seed=0, device=bench.device))
    yield Finding(f"{network}: trained at once, of {teachers} that take twice the memory", size, passed=size < teachers)
    yield at_most(f"{network}: their memory, of what they may take", most / 2**30 / recipe.memory_gib, 1.0)
    asking = launch.asking_bytes(cost, launch.ASKED) * teachers / 2 / 2**30
    ensemble = _untrained(network, options, spec, teachers, min(asking, _most_gib(bench)))
    x = worlds.images(spec, launch.ASKED)[0]
    most = _peak(bench, lambda: ensemble.predictions(x, device=bench.device))
    yield at_most(f"{network}: asked, of what they may take", most / 2**30 / ensemble.memory_gib, 1.0)
    try:
        train(private, spec, shards, dataclasses.replace(recipe, memory_gib=each / 2), seed=0, device=bench.device)
        refused = "trained"
    except ValueError as error:
        refused = str(error)
    yield Finding(f"{network}: where not even one fits", refused, passed=refused.startswith("teacher.memory_gib="))


def _most_gib(bench: Bench) -> float:
    """What teachers may take of this card."""
    card: Any = torch.cuda.get_device_properties(bench.device)
    return min(MEMORY_GIB, 0.8 * card.total_memory / 2**30)


def _untrained(
    network: str, options: Mapping[str, object], spec: DataSpec, teachers: int, memory_gib: float
) -> Ensemble:
    description = networks.describe(network, spec.input_shape, spec.num_classes, **options)
    module = networks.build(network, spec.input_shape, spec.num_classes, **options)
    params = {name: torch.zeros(teachers, *value.shape) for name, value in module.named_parameters()}
    return Ensemble(description, params, torch.ones(teachers, dtype=torch.bool), spec, memory_gib=memory_gib)


def _shards(teachers: int, size: int) -> Shards:
    index_KS = torch.arange(teachers * size).view(teachers, size)
    return Shards(index_KS, torch.ones_like(index_KS, dtype=torch.bool), "add_remove")


def _peak(bench: Bench, work: Callable[[], object]) -> int:
    """Bytes that some work takes at most, beside what libraries hold from its first time on."""
    if not bench.toy:
        work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before
