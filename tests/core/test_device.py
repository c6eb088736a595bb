"""float32 means float32 wherever a run computes, and what was set before is set again."""

import pytest
import torch

from pate_torch.core.device import deterministic_mode, float32_precision
from pate_torch.teachers import engine, training
from pate_torch.teachers.recipe import TeacherRecipe


def switches():
    cudnn = torch.backends.cudnn
    return (
        torch.backends.cuda.matmul.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.deterministic,
        cudnn.benchmark,
    )


def test_a_run_computes_float32_as_such_and_repeatably():
    before = switches()
    assert before[1] == "tf32", "as it comes, cuDNN rounds"
    with deterministic_mode(torch.device("cpu")):
        assert switches() == ("ieee", "ieee", True, False)
        with float32_precision(tf32=True):
            assert switches() == ("tf32", "tf32", True, False)
        assert switches() == ("ieee", "ieee", True, False)
    assert switches() == before


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cpu"])
def test_a_device_may_be_named_with_or_without_its_number(device, simulated_gpu):
    with deterministic_mode(torch.device(device)):
        assert torch.zeros(2, device=device).add(1).tolist() == [1, 1]


def test_the_recipe_alone_decides_how_teachers_are_computed(monkeypatch):
    from tests.teachers.teacher_world import records, shards_of, spec

    seen = []
    plain = engine._compute_losses
    monkeypatch.setattr(engine, "_compute_losses", lambda *given: (seen.append(switches()[:2]), plain(*given))[1])
    shards = shards_of([[0, 1], [2, 3]])
    for dtype, expected in (("float32", "ieee"), ("tf32", "tf32"), ("float64", "ieee")):
        recipe = TeacherRecipe(network="logistic", steps=1, batch_size=1, dtype=dtype)
        training.train(records(4), spec(), shards, recipe, seed=0)
        assert seen.pop() == (expected, expected) and not seen
