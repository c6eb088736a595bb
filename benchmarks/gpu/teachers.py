"""Checks of teachers on a GPU: parity with the CPU, independence of other records, and memory beside the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import workloads
from benchmarks.gpu.findings import Finding, Setup, check_at_most
from benchmarks.gpu.workloads import CPU, Options
from pate_torch import networks
from pate_torch.core.device import float32_precision
from pate_torch.core.progress import do_nothing
from pate_torch.core.rng import make_torch_generator
from pate_torch.methods.record_method import map_records_batch_invariant
from pate_torch.networks import make_feature_extractor
from pate_torch.privacy.records import DataSpec, PrivateRecords
from pate_torch.teachers import stacked, training
from pate_torch.teachers.engine import BLOCK_STEPS, train_stacked
from pate_torch.teachers.ensemble import TeacherEnsemble, compute_gpu_points
from tests.teachers.loop import train_loop

MAX_RELATIVE_ERRORS = {"float64": 1e-9, "float32": 1e-4, "tf32": 0.2, "bf16": 0.5}
"""Largest distance of gradients from those of the CPU in float64, relative to their norm. That of float32 is some
hundred times its rounding error, and less than TF32's. The other two need only be about right: where rounding moves a
maximum to another position, the gradients behind it follow."""


# ---- parity ----------------------------------------------------------------------------------------------------------


def check_parity(setup: Setup) -> Iterator[Finding]:
    """Compare parameters, gradients and logits of stacked teachers with those of the CPU in float64."""
    spec = workloads.make_spec(setup)
    generator = make_torch_generator(0, "points")
    # Points without flat areas, whose maxima would be a matter of rounding.
    x, y = torch.randn(8, 3, *spec.input_shape, generator=generator), torch.randint(4, (3, 8), generator=generator)
    for network, options in workloads.choose_networks(setup).items():
        recipe = workloads.make_recipe(network, options, steps=3, dtype="float64")
        chunk = workloads.draw_chunk(spec, teachers=3)
        exact = train_stacked(chunk, spec, recipe, 0, CPU).params
        for name, train_chunk in (("stacked", train_stacked), ("in a loop", train_loop)):
            error = _compute_relative_error(train_chunk(chunk, spec, recipe, 0, setup.device).params, exact)
            yield check_at_most(f"{network} {name}, float64: parameters", error, MAX_RELATIVE_ERRORS["float64"])
        module, params = _initialize_teachers(network, options, spec)
        exact = _compute_gradients(module, params, x, y, CPU, "float64")
        for dtype, limit in MAX_RELATIVE_ERRORS.items():
            with float32_precision(tf32=dtype == "tf32"):
                error = _compute_relative_error(_compute_gradients(module, params, x, y, setup.device, dtype), exact)
            yield check_at_most(f"{network}, {dtype}: gradients", error, limit)
        in_float64 = {name: value.double() for name, value in params.items()}
        logits = _compute_logits(_make_ensemble(network, options, spec, params), spec, setup.device)
        exact = _compute_logits(_make_ensemble(network, options, spec, in_float64), spec, CPU)
        error = _compute_relative_error(logits, exact)
        yield check_at_most(f"{network}, float32: logits", error, MAX_RELATIVE_ERRORS["float32"])


def _initialize_teachers(network: str, options: Options, spec: DataSpec) -> tuple[nn.Module, stacked.Parameters]:
    """Build a network, and parameters of three teachers whose last layer is not zero."""
    module = networks.build(network, spec.input_shape, spec.num_classes, **options)
    generator = make_torch_generator(0, "parity")
    params = stacked.stack_initial(module, [make_torch_generator(k, "parity") for k in range(3)], torch.float32)
    return module, {name: p + 0.05 * torch.randn(p.shape, generator=generator) for name, p in params.items()}


def _compute_gradients(
    module: nn.Module, params: stacked.Parameters, x: Tensor, y: Tensor, device: torch.device, dtype: str
) -> stacked.Parameters:
    """Compute gradients at points [B, K, ...] of classes [K, B]."""
    number = torch.float64 if dtype == "float64" else torch.float32
    own = {name: value.to(device, number).requires_grad_() for name, value in params.items()}
    logits = stacked.forward(module, own, x.to(device, torch.bfloat16 if dtype == "bf16" else number))
    F.cross_entropy(logits.flatten(0, 1).to(number), y.to(device).flatten()).backward()
    return {name: value.grad.cpu() for name, value in own.items() if value.grad is not None}


def _make_ensemble(network: str, options: Options, spec: DataSpec, params: stacked.Parameters) -> TeacherEnsemble:
    description = networks.describe(network, spec.input_shape, spec.num_classes, **options)
    alive = torch.ones(len(next(iter(params.values()))), dtype=torch.bool)
    return TeacherEnsemble(description, [params], alive, spec)


def _compute_logits(ensemble: TeacherEnsemble, spec: DataSpec, device: torch.device) -> stacked.Parameters:
    parts: list[Tensor] = []
    ensemble.forward_batches(
        workloads.draw_images(spec, 16)[0],
        lambda rows, answers: parts.extend(logits.cpu() for _, logits in answers),
        device=device,
    )
    return {"logits": torch.cat(parts, 1)}


def _compute_relative_error(found: stacked.Parameters, exact: stacked.Parameters) -> float:
    return max(
        float((found[name].double() - value).norm() / value.norm().clamp(min=1e-12)) for name, value in exact.items()
    )


# ---- independence of other records -----------------------------------------------------------------------------------

VICTIM = 3


def check_independence(setup: Setup) -> Iterator[Finding]:
    """Replace one teacher's records again and again, beside other work: no bit of another teacher may change."""
    spec, times = workloads.make_spec(setup), setup.choose(20, 2)
    for network, options in workloads.choose_networks(setup).items():
        recipe = workloads.make_recipe(network, options, steps=setup.choose(10, 3))
        one, neighbor = workloads.draw_chunk(spec, teachers=8), workloads.draw_chunk(spec, teachers=8)
        neighbor.x_kS[VICTIM], neighbor.y_kS[VICTIM] = workloads.draw_images(spec, one.x_kS.shape[1], seed=1)
        changed = []
        with _keep_busy(setup):
            before = train_stacked(one, spec, recipe, 0, setup.device).params
            for _ in range(times):
                after = train_stacked(neighbor, spec, recipe, 0, setup.device).params
                changed.append(
                    {k for name in before for k in range(8) if not torch.equal(before[name][k], after[name][k])}
                )
        others = set().union(*changed) - {VICTIM}
        passed = not others and all(VICTIM in found for found in changed)
        yield Finding(f"{network}: teachers changed by another's records, {times} times", len(others), passed=passed)
    yield _check_encoded_records(setup, spec, times)


def _check_encoded_records(setup: Setup, spec: DataSpec, times: int) -> Finding:
    """Encode records with one of them replaced, with one less, and with one more: the others may not change."""
    network = networks.build("small_cnn", spec.input_shape, spec.num_classes, norm="group", channels=(8, 16))
    encoder = (
        make_feature_extractor(networks.initialize(network, make_torch_generator(0, "encoder"))).to(setup.device).eval()
    )
    private, _ = workloads.draw_shards(spec, 1, 41)

    def encode(x: Tensor) -> Tensor:
        records = PrivateRecords.from_rows(x, private.y[: len(x)], private.unit_id[: len(x)])
        return map_records_batch_invariant(lambda feature_BD: feature_BD, encoder, records, spec, do_nothing)

    x, kept = private.x[:40], torch.arange(40) != VICTIM
    replaced = x.clone()
    replaced[VICTIM] = 255 - replaced[VICTIM]
    changed = 0
    with _keep_busy(setup):
        before = encode(x)
        for _ in range(times):
            pairs = (
                (encode(replaced)[kept], before[kept]),
                (encode(x[kept]), before[kept]),
                (encode(private.x)[:40], before),
            )
            changed += sum(not torch.equal(after, alone) for after, alone in pairs)
    return Finding(f"records changed by another record, {times} times", changed, passed=changed == 0)


@contextmanager
def _keep_busy(setup: Setup) -> Iterator[None]:
    """Keep another stream of a real GPU at work, so that blocks run in another order each time."""
    if setup.small:
        yield
        return
    done = threading.Event()

    def multiply() -> None:
        stream: torch.cuda.Stream = torch.cuda.Stream(setup.device)
        with torch.cuda.stream(stream):
            matrix = torch.randn(2048, 2048, device=setup.device)
            while not done.is_set():
                for _ in range(20):
                    matrix @ matrix
                stream.synchronize()

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- memory ----------------------------------------------------------------------------------------------------------


CARD_GIB = 20.0
"""Of a card of 24 GiB, what is left beside the part of the driver and what the allocator leaves between blocks."""


def check_memory(setup: Setup) -> Iterator[Finding]:
    """Measure the peak of allocated memory of a launch, and of a query of one group, beside a card of 24 GiB."""
    spec, batch_size = workloads.make_spec(setup), setup.choose(32, 8)
    for network, options in workloads.choose_networks(setup).items():
        recipe = workloads.make_recipe(network, options, steps=setup.choose(BLOCK_STEPS, 2), batch_size=batch_size)
        module = networks.build(network, spec.input_shape, spec.num_classes, **options)
        num_parameters = networks.count_parameters(module)
        size = training.compute_launch_size(recipe, num_parameters, spec, setup.choose(10_000, 4), setup.device)
        chunk = workloads.draw_chunk(spec, setup.choose(size, 4))
        peak = _measure_peak_bytes(setup, partial(train_stacked, chunk, spec, recipe, 0, setup.device))
        yield check_at_most(f"{network}: GiB, {len(chunk)} trained at once", peak / 2**30, CARD_GIB)
        points = setup.choose(compute_gpu_points(spec), 64)
        params = {name: torch.zeros(training.GROUP_TEACHERS, *value.shape) for name, value in module.named_parameters()}
        ensemble = _make_ensemble(network, options, spec, params)
        x = workloads.draw_images(spec, points)[0]
        peak = _measure_peak_bytes(setup, partial(ensemble.predict, x, device=setup.device))
        yield check_at_most(f"{network}: GiB, a group asked about {points} points", peak / 2**30, CARD_GIB)


def _measure_peak_bytes(setup: Setup, work: Callable[[], object]) -> int:
    """Measure the memory that some work takes, apart from what libraries allocate at their first use."""
    if not setup.small:
        work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before
