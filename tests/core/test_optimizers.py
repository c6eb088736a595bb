"""The optimizers take the steps of ``torch.optim``."""

import pytest
import torch
import torch.nn.functional as F

from pate_torch import networks
from pate_torch.core.optimizers import Adam, ParameterBuffer, Sgd

OURS = {"adam": lambda p: Adam(p, 0.02), "sgd": lambda p: Sgd(p, 0.9, 0.02)}
TORCH = {
    "adam": lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.02),
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.02),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", OURS)
def test_steps_are_those_of_torch_optim(kind, layout):
    x, y = torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.arange(8) % 4
    ours, reference = (networks.build("lean_cnn", (3, 6, 6), 4).double().to(memory_format=layout) for _ in range(2))
    reference.load_state_dict(ours.state_dict())
    mine, theirs = OURS[kind](list(ours.parameters())), TORCH[kind](reference.parameters())
    for step in range(6):
        for model in (ours, reference):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        theirs.param_groups[0]["lr"] = 0.01 / (step + 1)
        theirs.step()
        mine.step(0.01 / (step + 1))
    for (name, parameter), expected in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", OURS)
def test_an_update_in_a_buffer_does_not_depend_on_what_lies_beside_it(kind):
    """The bits of five rows, updated alone and among others, with the tails that a vectorized loop leaves."""

    def update(rows):
        draw = torch.Generator().manual_seed(0)
        full = [torch.randn(16, 7, generator=draw), torch.randn(16, generator=draw)]
        buffer = ParameterBuffer([p[:rows] for p in full])
        optimizer = OURS[kind]([buffer.values])
        for _ in range(5):
            sum((p.exp() * p).sum() for p in buffer.params).backward()
            buffer.gather_gradients()
            optimizer.step(0.01)
        return buffer.params

    expected = update(16)
    for rows in (1, 2, 3, 5, 11, 15):
        for found, whole in zip(update(rows), expected, strict=True):
            assert torch.equal(found, whole[:rows])
