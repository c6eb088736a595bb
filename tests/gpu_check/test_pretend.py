"""The pretend GPU: it computes what the CPU does, refuses what CUDA refuses, and counts what would be costly."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pate_torch.core.device import settled
from pate_torch.core.rng import torch_stream
from pate_torch.gpu_check.pretend import PlacementError, Site, pretend_gpu
from pate_torch.students.training import Average, GradientStudent
from pate_torch.teachers import stacked, workers
from pate_torch.teachers.training import train
from tests.gpu_check.device_worlds import CUDA, each_step, fits
from tests.teachers.teacher_world import recipe, records, shards_of, spec


def on_card(*shape):
    return torch.ones(*shape, device=CUDA)


REFUSED = {
    "a sum with rows of the host": lambda: on_card(3, 2) + torch.ones(2),
    "a product": lambda: on_card(3, 2) @ torch.ones(2, 3),
    "a product with a number of the host": lambda: torch.addmm(torch.ones(()), on_card(2, 2), on_card(2, 2)),
    "rows put together": lambda: torch.cat([on_card(2), torch.ones(2)]),
    "the host's rows by indices of the card": lambda: torch.ones(4)[torch.zeros(2, dtype=torch.int64, device=CUDA)],
    "rows gathered by indices of the host": lambda: on_card(4).index_select(0, torch.zeros(2, dtype=torch.int64)),
    "rows of the host written into the card's": lambda: on_card(4).index_put_((torch.zeros(2).long(),), torch.ones(2)),
    "a number of the host changed in place": lambda: torch.zeros(()).add_(on_card(2).sum()),
    "draws of a generator of the host": lambda: torch.rand(3, generator=torch.Generator(), device=CUDA),
    "draws in place of a generator of the host": lambda: on_card(3).uniform_(generator=torch.Generator()),
    "draws for the host of the card's": lambda: torch.rand(3, generator=torch.Generator(device=CUDA)),
    "numpy()": lambda: on_card(3).numpy(),
    "np.asarray": lambda: np.asarray(on_card(3)),
    "a convolution with the host's weight": lambda: F.conv2d(on_card(1, 1, 4, 4), torch.ones(1, 1, 3, 3)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(what, card):
    with pytest.raises(PlacementError):
        REFUSED[what]()


ALLOWED = {
    "a sum with a number of the host": lambda: on_card(3) + torch.tensor(2.0),
    "a number of the host in a choice": lambda: torch.where(on_card(3) > 0, on_card(3), torch.tensor(0.0)),
    "indices of the host": lambda: on_card(4)[torch.zeros(2, dtype=torch.int64)],
    "a number of the host written at indices": lambda: on_card(4).index_put_((torch.zeros(2).long(),), torch.ones(())),
    "draws of the card's generator": lambda: torch.rand(3, generator=torch_stream(0, "x", device=CUDA), device=CUDA),
    "a module moved": lambda: torch.nn.Linear(2, 2).to(CUDA).weight,
    "a copy to it": lambda: torch.ones(3).to(CUDA),
    "a copy into it": lambda: on_card(3).copy_(torch.zeros(3)),
    "made of a list": lambda: torch.tensor([1.0, 2.0], device=CUDA),
    "made like another": lambda: torch.zeros_like(on_card(2)),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_cuda_takes_is_taken_and_stays_there(what, card):
    assert ALLOWED[what]().device == CUDA


def test_products_of_integers_are_refused_as_cuda_has_none(card):
    with pytest.raises(NotImplementedError, match="int64"):
        on_card(2, 2).long() @ on_card(2, 2).long()


def waits(card, work):
    """Syncs, copies to the card and from it."""
    card.forget()
    work()
    return card.syncs.total(), card.to_device.total(), card.to_host.total()


def test_copies_and_syncs_are_counted(card):
    x, y, pinned = on_card(4), on_card(4), torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not torch.ones(4).is_pinned()
    counted = [
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
    ]
    for place, (work, expected) in enumerate(counted):
        assert waits(card, work) == expected, place


def test_what_is_counted_names_the_line(card):
    Average(torch.nn.Linear(2, 2).to(CUDA), 0.9).update()
    [line] = [site for site in card.kernels if site.file == "students/training.py" and site.function == "update"][:1]
    assert str(line) == f"students/training.py:{line.line} (update)" and line.line > 100
    assert not card.syncs.keys() - {Site("elsewhere", 0, "")}


def test_memory_is_counted_for_as_long_as_it_is_held():
    with pretend_gpu(memory=10_000) as card:
        x = on_card(1000)
        view = x[10:]
        assert (card.allocated, torch.cuda.memory_allocated()) == (4000, 4000)
        del x
        assert card.allocated == 4000, "a part of it is alive"
        y = view + 1
        assert (card.allocated, card.peak) == (4000 + 3960, 4000 + 3960)
        del y, view
        assert (card.allocated, torch.cuda.max_memory_allocated()) == (0, 7960)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        with pytest.raises(torch.OutOfMemoryError):
            on_card(3000)


def test_the_world_is_as_before_once_the_card_is_gone():
    facts = [torch.cuda.is_available, torch.cuda.device_count, torch.accelerator.is_available, workers.may_fork]
    before, generator = [fact() for fact in facts], torch.Generator
    with pretend_gpu():
        assert torch.cuda.is_available() and not workers.may_fork()
        assert isinstance(torch.Generator(), torch.Generator)
    assert [fact() for fact in facts] == before and torch.Generator is generator
    assert torch.zeros(3).add(1).tolist() == [1, 1, 1]


SHARDS = [list(range(8)), list(range(8, 20)), []]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bf16"])
def test_teachers_of_the_card_are_those_of_the_cpu(dtype, monkeypatch):
    """To the bit, where both multiply in the same way."""
    settings = recipe(steps=4, dtype=dtype)
    with pretend_gpu() as card:
        there = train(records(20), spec(), shards_of(SHARDS), settings, seed=0, device=CUDA)
        votes = there.votes(records(9).x, device=CUDA).counts_QC
        assert card.kernels.total() > 400
    monkeypatch.setattr(stacked, "MATMUL_DEVICES", {"cpu"})
    here = train(records(20), spec(), shards_of(SHARDS), settings, seed=0)
    assert all(torch.equal(there.params[name], here.params[name]) for name in here.params)
    assert torch.equal(votes, here.votes(records(9).x).counts_QC)


def test_float32_is_rounded_where_tf32_is_on(card):
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 8, 8, generator=draw), torch.randn(4, 3, 3, 3, generator=draw)
    exact = F.conv2d(x, weight)

    def error():
        return (F.conv2d(x.to(CUDA), weight.to(CUDA)).cpu() - exact).abs().max()

    assert 1e-4 < error() < 1e-2, "as it comes, cuDNN rounds"
    with settled(CUDA):
        assert error() == 0


def test_convolutions_learn_the_same_twice_only_where_cudnn_is_deterministic(card):
    x, weight = on_card(1, 1, 6, 6), torch.full((1, 1, 3, 3), 0.1, device=CUDA, requires_grad=True)

    def gradient():
        return torch.autograd.grad(F.conv2d(x, weight).square().sum(), weight)[0].cpu()

    assert not torch.equal(gradient(), gradient())
    with settled(CUDA):
        assert torch.equal(gradient(), gradient())


def test_threads_see_the_card_too(card):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.zeros(2, device=CUDA) + 1).result().tolist() == [1, 1]
        assert pool.submit(lambda: torch.tensor([2.0], device=CUDA)).result().tolist() == [2]
        with pytest.raises(PlacementError):
            pool.submit(REFUSED["a product"]).result()


# ---- planted in the package ------------------------------------------------------------------------------------------


def test_a_planted_sync_is_found(card, monkeypatch):
    plain = Average.update

    def update(self):
        next(self.module.parameters()).sum().item()
        plain(self)

    before = each_step(card, fits("supervised"))
    monkeypatch.setattr(Average, "update", update)
    after = each_step(card, fits("supervised"))
    assert after.syncs - before.syncs == {("students/training.py", "_descend"): 1}


def test_a_planted_mismatch_is_found(card, monkeypatch):
    plain = GradientStudent._descend

    def descend(self, model, average, loss, progress, log):
        plain(self, model, average, lambda model, step: loss(model, step) + torch.ones(2).sum(0, True), progress, log)

    each_step(card, fits("supervised"))
    monkeypatch.setattr(GradientStudent, "_descend", descend)
    with pytest.raises(PlacementError, match=r"same device.*students/training.py"):
        each_step(card, fits("supervised"))


def test_a_planted_generator_of_the_host_is_found(card, monkeypatch):
    plain = Average.update

    def update(self):
        plain(self)
        torch.rand(2, generator=torch_stream(0, "x"), device=next(self.module.parameters()).device)

    monkeypatch.setattr(Average, "update", update)
    with pytest.raises(PlacementError, match=r"generator.*students/training.py"):
        each_step(card, fits("supervised"))
