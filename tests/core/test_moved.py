"""Old names of modules and options are answered with the new ones, and the page for those who have them lists all."""

import importlib

import pytest

from pate_torch.core.moved import FONTS, GONE, MOVED, NAMES, SETTINGS, renamed
from tests import ROOT
from tests.command_runs import train, written

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_answered_with_the_new_one(old):
    importlib.import_module(f"pate_torch.{MOVED[old]}")
    with pytest.raises(ModuleNotFoundError, match=f"is pate_torch.{MOVED[old]} now"):
        importlib.import_module(f"pate_torch.{old}")


@pytest.mark.parametrize("module,name", [(module, name) for module in NAMES for name in NAMES[module]])
def test_a_name_that_left_its_module_is_answered_with_the_new_place(module, name):
    new = NAMES[module][name]
    assert hasattr(importlib.import_module(f"pate_torch.{new}"), name)
    with pytest.raises(ImportError, match=rf"pate_torch\.{module}\.{name} is pate_torch\.{new}\.{name} now"):
        exec(f"from pate_torch.{module} import {name}")


def test_a_name_that_no_module_had_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vars(importlib.import_module("pate_torch.types"))["__getattr__"]("nothing")


@pytest.mark.parametrize("old", FONTS)
def test_the_fonts_are_found_in_a_checkout(old):
    importlib.import_module(FONTS[old])
    with pytest.raises(ModuleNotFoundError, match=f"is {FONTS[old]} now"):
        importlib.import_module(f"pate_torch.{old}")


def test_a_name_that_never_was_is_none_of_its_business():
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("pate_torch.nothing")


@pytest.mark.parametrize("old", SETTINGS)
def test_every_old_option_stands_in_the_page_beside_the_new(old):
    assert f"\n| `{old}` | `{SETTINGS[old]}` |\n" in PAGE
    setting, new = (old, SETTINGS[old]) if "=" in old else (f"{old}=7", f"{SETTINGS[old]}=7")
    assert renamed(["seed=1", setting]) == f"{setting}: is {new} now (docs/migration.md)."


@pytest.mark.parametrize("old", GONE)
def test_every_option_that_is_gone_stands_in_the_page(old):
    assert f"\n| `{old}` | gone: " in PAGE
    setting = old if "=" in old else f"{old}=x"
    assert renamed([setting]) == f"{setting}: {GONE[old]} (docs/migration.md)."


@pytest.mark.parametrize(
    "old,new",
    [
        ("voting=slopes", "voters=gradients"),
        ("voting.reach=.5", "voters.alpha=.5"),
        ("representation=contrastive", "features=contrastive"),
        ("refit.steps=3", "guide_student.steps=3"),
        ("student@refit=carried", "student@guide_student=same"),
        ("student.trust=.5", "student.keep_fraction=.5"),
        ("mechanism=descent", "mechanism=gradient_descent"),
        ("mechanism.cut=.5", "mechanism.clip_norm=.5"),
        ("experiment=mnist_census", "experiment=mnist_reverse_knn"),
    ],
)
def test_a_run_with_an_old_option_is_refused_and_told_the_new(old, new, tmp_path, monkeypatch):
    outcome = train(tmp_path, old, monkeypatch=monkeypatch)
    assert outcome.error == f"{old}: is {new} now (docs/migration.md)."
    assert written(tmp_path) == []
    assert renamed([new]) is None


def test_a_run_with_an_option_that_is_gone_is_told_what_to_use(tmp_path, monkeypatch):
    error = train(tmp_path, "succession=successors", monkeypatch=monkeypatch).error
    assert "is gone" in error and "use student=fixmatch" in error
