"""Every point's output, from batches of one shape."""

import pytest
import torch

from pate_torch.features.batch_invariant import map_batch_invariant


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_every_point_gets_its_own_output_from_batches_of_one_shape(slots):
    x, shapes, reports = torch.randn(50, 3), set(), []

    def double(batches):
        batches = list(batches)
        shapes.update(batch.shape for batch in batches)
        return torch.stack([2 * batch for batch in batches])

    assert torch.equal(map_batch_invariant(double, x, lambda *share: reports.append(share), slots), 2 * x)
    assert shapes == {(slots, 3)} and reports[-1] == (100, 100)
    assert map_batch_invariant(double, x[:0], lambda *_: None, slots).shape == (0, 3)
