"""Old module names are answered with the new ones."""

import importlib

import pytest

from pate_torch.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_answered_with_the_new_one(old):
    importlib.import_module(f"pate_torch.{MOVED[old]}")
    with pytest.raises(ModuleNotFoundError, match=f"is pate_torch.{MOVED[old]} now"):
        importlib.import_module(f"pate_torch.{old}")


def test_a_name_that_never_was_is_none_of_its_business():
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("pate_torch.nothing")
