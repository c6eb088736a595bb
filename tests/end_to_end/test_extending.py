"""The five examples of docs/howto/extending.md run as they stand, each by its own command."""

import json
import re
import sys

import pytest

from tests.command_runs import train
from tests.end_to_end.documents import ROOT, blocks

PAGE = ROOT / "docs" / "howto" / "extending.md"
EXAMPLES = [line for block in blocks(PAGE) if block.language == "bash" for line in block.commands if "myconf" in line]
QUICK = ["num_teachers=6", "num_queries=8", "teacher=logistic", "teacher.steps=3", "guide_student.steps=3",
         "recommended.student_steps=10", "baseline=false", "privacy.opening_budget=100", "mechanism.sigma=1",
         "privacy.allow_uninformative_labels=true", "quiet=true"]  # fmt: skip
DIGITS = ["dataset.private=120", "dataset.public=40", "dataset.test=40"]


@pytest.mark.parametrize("line", EXAMPLES, ids=lambda line: line.split("myconf ")[1])
def test_an_example_runs_as_it_stands(line, tmp_path, monkeypatch):
    before = set(sys.modules)
    for block in blocks(PAGE):
        if block.mark == "file":
            (tmp_path / block.argument).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.argument).write_text(block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = line.split("myconf ")[1].split()
    settings += QUICK + ([] if "dataset=stripes" in settings else DIGITS)
    settings += ["student=supervised", "student.steps=3"] if not any(s.startswith("student=") for s in settings) else []
    settings = [s for s in settings if s != "student.features=null"]
    outcome = train(tmp_path / "home", *settings, f"hydra.searchpath=[file://{tmp_path}/myconf]",
                    monkeypatch=monkeypatch, base=[])  # fmt: skip
    assert outcome.code == 0, outcome.err
    (file,) = (tmp_path / "home").glob("runs/*/*/*/release/summary.json")
    summary = json.loads(file.read_text())
    group, name = line.split("myconf ")[1].split()[0].split("=")
    record = json.loads(file.with_name("release.json").read_text())
    names = {"method": record["voters"], "dataset": record["dataset"],
             "query": record["query"], "student": summary["student"], "features": name}  # fmt: skip
    assert names[group] == name and summary["queries_answered"] == 8
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in str(sys.modules[module].__file__):
            del sys.modules[module]


def test_an_example_is_short_and_every_kind_of_base_class_has_one():
    """Mechanisms have a page of their own, docs/tutorials/mechanism.md."""
    files = {block.argument: block.text for block in blocks(PAGE) if block.mark == "file"}
    code = {name: text for name, text in files.items() if name.endswith(".py")}
    assert len(code) == len(files) - len(code) == len(EXAMPLES) == 5
    assert all(len(text.splitlines()) <= 26 for text in code.values())
    bases = [re.findall(r"^class \w+\((\w+)\):", text, re.MULTILINE) for text in code.values()]
    kinds = {"VotingMethod", "FeatureRecipe", "DatasetSource", "QueryStrategy", "StudentAlgorithm"}
    assert all(len(found) == 1 for found in bases) and {name for found in bases for name in found} == kinds
