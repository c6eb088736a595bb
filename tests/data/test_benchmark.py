"""The digits of scikit-learn: split once and for all, each record once."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pate_torch.data.base import DatasetSource
from pate_torch.data.benchmark import Digits


def test_digits_split_is_fixed_and_complete():
    data, again = Digits().load(), Digits().load()
    assert isinstance(Digits(), DatasetSource) and "withheld" in repr(data) and "withheld" in repr(data.private)
    assert (len(data.private), len(data.pool), len(data.evaluation.y)) == (1100, 450, 247)
    assert torch.equal(data.private.x, again.private.x)
    assert data.private.x.dtype == torch.uint8 and data.private.x.shape[1:] == (1, 8, 8)
    original, labels = load_digits(return_X_y=True)
    positions = data.private.unit_id.astype(int)
    assert len(set(positions)) == 1100
    rescaled = data.private.x.flatten(1).double().numpy() * 16 / 255
    np.testing.assert_allclose(rescaled, original[positions], atol=0.04)
    assert int(data.private.x.max()) == 255 and int(data.private.x.min()) == 0
    assert data.private.y.tolist() == labels[positions].tolist()
    assert set(data.evaluation.y.tolist()) == set(range(10))
    # The three parts together are the data set, each record once.
    pixel_sum = torch.cat([data.private.x, data.pool.x, data.evaluation.x]).flatten(1).long().sum(0)
    np.testing.assert_array_equal(pixel_sum.numpy(), np.rint(original * 255 / 16).astype(int).sum(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"private": 1700}, "at most 1797"),
        ({"private": None}, r"dataset\.private=None"),
        ({"public": 0}, r"dataset\.public=0"),
        ({"test": 0}, r"dataset\.test=0"),
        ({"name": "../x"}, r"dataset\.name='\.\./x'"),
    ],
)
def test_sizes_and_names_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Digits(**options)
