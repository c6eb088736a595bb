"""The simulated GPU computes what the CPU does, refuses what CUDA refuses, and counts copies, syncs and memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pate_torch.core import executors
from pate_torch.core.device import deterministic_mode
from pate_torch.teachers import stacked
from pate_torch.teachers.training import train
from tests.gpu.simulated_gpu import CUDA, PlacementError, simulate_gpu
from tests.teachers.teacher_world import recipe, records, shards_of, spec


def ones_on_gpu(*shape):
    return torch.ones(*shape, device=CUDA)


def zeros_long(device="cpu"):
    return torch.zeros(2, dtype=torch.int64, device=device)


REFUSED = {
    "a sum with rows of the host": lambda: ones_on_gpu(3, 2) + torch.ones(2),
    "a product": lambda: ones_on_gpu(3, 2) @ torch.ones(2, 3),
    "a product with a number of the host": lambda: torch.addmm(torch.ones(()), ones_on_gpu(2, 2), ones_on_gpu(2, 2)),
    "rows put together": lambda: torch.cat([ones_on_gpu(2), torch.ones(2)]),
    "the host's rows by indices of the GPU": lambda: torch.ones(4)[zeros_long(CUDA)],
    "rows gathered by indices of the host": lambda: ones_on_gpu(4).index_select(0, zeros_long()),
    "rows of the host written into the GPU's": lambda: ones_on_gpu(4).index_put_((zeros_long(),), torch.ones(2)),
    "a number of the host changed in place": lambda: torch.zeros(()).add_(ones_on_gpu(2).sum()),
    "draws of a generator of the host": lambda: torch.rand(3, generator=torch.Generator(), device=CUDA),
    "draws in place of a generator of the host": lambda: ones_on_gpu(3).uniform_(generator=torch.Generator()),
    "draws for the host of the GPU's": lambda: torch.rand(3, generator=torch.Generator(device=CUDA)),
    "numpy()": lambda: ones_on_gpu(3).numpy(),
    "np.asarray": lambda: np.asarray(ones_on_gpu(3)),
    "a convolution with the host's weight": lambda: F.conv2d(ones_on_gpu(1, 1, 4, 4), torch.ones(1, 1, 3, 3)),
    "a product of integers": lambda: ones_on_gpu(2, 2).long() @ ones_on_gpu(2, 2).long(),  # CUDA has none
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(what, simulated_gpu):
    with pytest.raises((PlacementError, NotImplementedError)):
        REFUSED[what]()


def test_copies_and_syncs_are_counted(simulated_gpu):
    gpu, x, y, pinned = simulated_gpu, ones_on_gpu(4), ones_on_gpu(4), torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not torch.ones(4).is_pinned()
    for number, (work, expected) in enumerate([  # syncs, copies to the GPU, copies from it
        (lambda: x + 1, (0, 0, 0)),
        (lambda: torch.ones(4).to(CUDA), (1, 1, 0)),
        (lambda: torch.ones(4).to(CUDA, non_blocking=True), (1, 1, 0)),  # CUDA waits for what is not pinned
        (lambda: pinned.to(CUDA, non_blocking=True), (0, 1, 0)),
        (lambda: pinned[1:].to(CUDA), (1, 1, 0)),
        (lambda: x.copy_(pinned, non_blocking=True), (0, 1, 0)),
        (lambda: x.cpu(), (1, 0, 1)),
        (lambda: x.tolist(), (1, 0, 1)),
        (lambda: float(x.sum()), (1, 0, 0)),
        (lambda: bool((x > 0).all()), (1, 0, 0)),
        (lambda: x[x > 0], (1, 0, 0)),
        (lambda: x.index_put_((x > 5,), x[:1].sum()), (0, 0, 0)),
        (lambda: x.index_put_((x > 0,), y), (1, 0, 0)),
        (lambda: x[torch.tensor([1, 2])], (1, 1, 0)),
        (lambda: torch.equal(x, x), (1, 0, 0)),
        (lambda: x.to(torch.float64), (0, 0, 0)),
        (lambda: torch.tensor([1.0], device=CUDA), (1, 1, 0)),
        (lambda: torch.cuda.synchronize(), (1, 0, 0)),
    ]):  # fmt: skip
        gpu.reset_counts()
        work()
        counters = gpu.syncs, gpu.copies_to_device, gpu.copies_to_host
        assert tuple(counter.total() for counter in counters) == expected, number


def test_memory_is_counted_for_as_long_as_it_is_held():
    with simulate_gpu() as gpu:
        x = ones_on_gpu(1000)
        view = x[10:]
        assert (gpu.allocated, torch.cuda.memory_allocated()) == (4000, 4000)
        del x
        assert gpu.allocated == 4000, "a part of it is alive"
        y = view + 1
        assert (gpu.allocated, gpu.peak) == (4000 + 3960, 4000 + 3960)
        del y, view
        assert (gpu.allocated, torch.cuda.max_memory_allocated()) == (0, 7960)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0


def test_torch_is_restored_when_the_simulation_ends():
    facts = [torch.cuda.is_available, torch.cuda.device_count, torch.accelerator.is_available, executors.can_fork]
    before, generator = [fact() for fact in facts], torch.Generator
    with simulate_gpu():
        assert torch.cuda.is_available() and not executors.can_fork()
        assert isinstance(torch.Generator(), torch.Generator)
    assert [fact() for fact in facts] == before and torch.Generator is generator
    assert torch.zeros(3).add(1).tolist() == [1, 1, 1]


SHARDS = [list(range(8)), list(range(8, 20)), []]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bf16"])
def test_teachers_of_the_gpu_are_those_of_the_cpu(dtype, monkeypatch):
    """To the bit, where both multiply in the same way."""
    settings = recipe(steps=4, dtype=dtype)
    with simulate_gpu() as gpu:
        there = train(records(20), spec(), shards_of(SHARDS), settings, seed=0, device=CUDA)
        votes = there.count_votes(records(9).x, device=CUDA).counts_QC
        assert gpu.kernels.total() > 400
    monkeypatch.setattr(stacked, "MATMUL_DEVICES", {"cpu"})
    here = train(records(20), spec(), shards_of(SHARDS), settings, seed=0)
    assert all(torch.equal(there.params[name], here.params[name]) for name in here.params)
    assert torch.equal(votes, here.count_votes(records(9).x).counts_QC)


def test_float32_is_rounded_where_tf32_is_on(simulated_gpu):
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 8, 8, generator=draw), torch.randn(4, 3, 3, 3, generator=draw)
    exact = F.conv2d(x, weight)

    def error():
        return (F.conv2d(x.to(CUDA), weight.to(CUDA)).cpu() - exact).abs().max()

    assert 1e-4 < error() < 1e-2, "as it comes, cuDNN rounds"
    with deterministic_mode(CUDA):
        assert error() == 0


def test_convolutions_learn_the_same_twice_only_where_cudnn_is_deterministic(simulated_gpu):
    x, weight = ones_on_gpu(1, 1, 6, 6), torch.full((1, 1, 3, 3), 0.1, device=CUDA, requires_grad=True)

    def gradient():
        return torch.autograd.grad(F.conv2d(x, weight).square().sum(), weight)[0].cpu()

    assert not torch.equal(gradient(), gradient())
    with deterministic_mode(CUDA):
        assert torch.equal(gradient(), gradient())
