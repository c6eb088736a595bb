"""Points, labels and private records of tensors."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from pate_torch.data.image_folder import ImageFolderDataset
from pate_torch.data.tensors import build_private_data
from tests.tensor_data import Tensors


def tensors(**changes):
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(20) % 3
    parts = {"x": x[:20], "y": y, "pool_x": x[20:26], "test_x": x[26:], "test_y": y[:4]}
    return Tensors(**({"name": "mine", "class_names": 3} | parts | changes))


def test_tensors_have_the_statistics_of_the_pool_and_ids_of_their_content():
    source = tensors()
    data, fewer = source.load(), tensors(x=source.x[1:], y=source.y[1:]).load()
    assert data.spec.mean == pytest.approx(source.pool_x.double().mean(0).tolist())
    assert len(set(data.private.unit_id)) == 20
    assert fewer.private.unit_id.tolist() == data.private.unit_id.tolist()[1:] and fewer.spec == data.spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_x": torch.full((20, 4), float("nan"))}, "pool_x.*must be finite"),
        ({"test_x": torch.zeros(0, 4), "test_y": torch.zeros(0).long()}, "test_x.*at least one"),
        ({"y": torch.zeros(19).long()}, "must be integers, one for each point"),
        ({"unit_id": ["a"], "unit": "group:patient"}, "unit_id='list of 1 ids': must be one list"),
        ({"unit_id": ["a"], "x": None}, "unit_id='list'.*unit='group:patient', or leave out unit_id"),
    ],
)
def test_tensors_are_refused_clearly(changes, message):
    with pytest.raises(ValueError, match=message):
        tensors(**changes).load()


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.full((20, 4), float("nan"))},
        {"y": torch.arange(20) + 3},
        {"y": torch.full((20,), 0.5)},
    ],
)
def test_no_number_of_usable_records_refuses_a_run(changes):
    private = tensors(**changes).load().private
    assert len(private) == 20 and not private.usable_N.any()


def test_no_number_of_readable_items_refuses_a_run():
    class Unreadable(FirstDiffers):
        def __getitem__(self, row):
            raise OSError

    private = build_private_data(Unreadable(None), None, None, "record", ["a", "b"], public_x=torch.zeros(3, 3))
    assert len(private) == 12 and not private.usable_N.any()


class FirstDiffers(Dataset):
    """Rows of three numbers, except the first item."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 12

    def __getitem__(self, row):
        return (self.first() if row == 0 else np.arange(3.0) + row), row % 2


FIRSTS = {"a longer row": lambda: np.zeros(5), "an error": lambda: 1 / 0, "an image": lambda: np.zeros((1, 3, 3))}


@pytest.mark.parametrize("first", FIRSTS.values(), ids=FIRSTS)
def test_the_form_of_private_points_is_that_of_public_rows(first):
    facts = None, "record", ("0", "1"), "replace_one"
    private = build_private_data(FirstDiffers(first), None, *facts, public_x=torch.zeros(4, 3))
    assert private.usable_N.tolist() == [False] + [True] * 11
    assert torch.equal(private.x[1:], torch.arange(1.0, 12)[:, None] + torch.arange(3.0))


def test_odd_private_images_raise_nothing_and_images_and_datasets_need_public_points(tmp_path):
    x, facts = torch.full((6, 1, 4, 4), 0.5), (torch.arange(6) % 2, None, "record", ("0", "1"), "add_remove")
    x[2, 0, 0, 0] = 7.25
    assert build_private_data(x, *facts, public_x=torch.ones(3, 4, 4)).usable_N is None
    x[2, 0, 0, 0] = torch.nan
    private = build_private_data(x, *facts, public_x=torch.ones(3, 4, 4))
    assert private.usable_N.tolist() == [row != 2 for row in range(6)]
    whole, public = torch.full((6, 1, 4, 4), 9), torch.ones(3, 4, 4, dtype=torch.uint8)
    for dtype in (torch.int64, torch.float32):  # one more image may have made fractions of all
        assert build_private_data(whole.to(dtype), *facts, public_x=public).x.unique().tolist() == [9]
    with pytest.raises(ValueError, match=r"must be images of shape \['N', 4\]"):
        build_private_data(x, *facts, public_x=torch.ones(3, 4))
    torch.save(0, tmp_path / "cat.png")  # no image
    folder = ImageFolderDataset(tmp_path, shape=(1, 2, 2))
    for points in (TensorDataset(torch.zeros(3, 2)), folder, str(tmp_path), x, whole.numpy()[:, 0]):
        with pytest.raises(ValueError, match=r"^public_x=None: must be given"):
            build_private_data(points, None, None, "record", ("0", "1"), "add_remove")
