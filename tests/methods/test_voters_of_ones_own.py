"""One Python file and one YAML make new voters: commands, Python and the neighbor harness take them as they are."""

import html
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pate_torch import PATE
from pate_torch.cli import label as label
from pate_torch.cli import plan as plan
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.base import PrivateMethod
from pate_torch.release import membership
from tests.command_runs import train
from tests.privacy import neighbor_cases as cases
from tests.privacy import neighbor_choices as choices

MEMBER = '''
"""Sages without a network: each knows the mean of every class of its shard."""

from dataclasses import dataclass

import torch

from pate_torch.methods.description import MethodDescription
from pate_torch.methods.voting import VotingMethod
from pate_torch.privacy.partition import assign_shards
from pate_torch.teachers.voting import count_votes


@dataclass(frozen=True, kw_only=True)
class NearestMean(VotingMethod):
    """A unit lies in one shard, so that it moves one vote on every question."""

    name: str = "nearest_mean"
    num_teachers: int

    @property
    def ensemble_size(self):
        return self.num_teachers

    def describe(self, facts):
        return MethodDescription(
            subject="sages",
            procedure="sages were asked about {asked} places, each by the class means it had seen. "
            "{mechanism} hid them.",
            query_sentence="{answered} of {asked} places, by sages",
            examples="Places as the sages named them.",
            assumptions=(f"The {facts.unit} was seen by one sage.",),
        )

    def validate(self, facts):
        super().validate(facts)
        facts.partition.check(facts.unit, facts.num_units, self.num_teachers)

    def prepare(self, inputs):
        records, spec = inputs.records, inputs.facts.spec
        shards = assign_shards(inputs.facts.partition, records, self.num_teachers, inputs.seed)
        pool_PD = spec.normalize(inputs.facts.pool.x).flatten(1)
        said = []
        for teacher in range(self.num_teachers):
            mine = shards.get_indices(teacher)
            x_ND, y_N = spec.normalize(records.x[mine]).flatten(1).clamp(-1e3, 1e3), records.y[mine]
            mean_CD = torch.full((spec.num_classes, pool_PD.shape[1]), 1e6)
            for c in y_N.unique().tolist():
                mean_CD[c] = x_ND[y_N == c].mean(0)
            said.append(torch.cdist(pool_PD, mean_CD).argmin(1))
        return self.from_votes(inputs, count_votes(torch.stack(said), spec.num_classes))
'''
YAML = """_target_: nearest_mean.NearestMean
name: nearest_mean
num_teachers: ${num_teachers}
"""
SMALL = ("dataset.private=200", "dataset.public=60", "dataset.test=100", "num_teachers=8", "num_queries=6",
         "mechanism.sigma=2", "privacy.opening_budget=500", "method=nearest_mean")  # fmt: skip


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The two files, where a user puts them; ``--config-dir`` is this setting."""
    (tmp_path / "nearest_mean.py").write_text(MEMBER)
    folder = tmp_path / "myconf" / "method"
    folder.mkdir(parents=True)
    (folder / "nearest_mean.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATE_HOME", str(tmp_path / "home"))
    yield f"hydra.searchpath=[file://{folder.parent}]"
    sys.modules.pop("nearest_mean", None)


def released(home: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(home.glob("runs/*/*/*/release/release.json"))]


def test_train_with_its_statement_and_the_owners_attack(tmp_path, found, monkeypatch):
    small = (
        "guide_student.steps=3",
        "student=supervised",
        "student.steps=3",
        "membership.records=40",
        "baseline=false",
    )
    outcome = train(tmp_path / "home", *SMALL, *small, found, monkeypatch=monkeypatch, base=[])
    assert outcome.code == 0, outcome.error
    (record,) = released(tmp_path / "home")
    assert (record["voters"], record["num_teachers"]) == ("nearest_mean", 8)
    (folder,) = (tmp_path / "home").glob("runs/*/*/*/release")
    said = json.loads((folder / "privacy.json").read_text())
    assert said["guarantee"]["plain_words"][-1] == (
        "How: sages were asked about 6 places, each by the class means it had seen. gaussian (sigma = 2) hid them."
    )
    assert said["assumptions"][0] == "The record was seen by one sage." and json.dumps(said).count("add_remove")
    page, card = (folder / "report.html").read_text(), (folder / "README.md").read_text()
    for text in (page, card):
        assert "a student of 8 private sages" in text and "The record was seen by one sage." in text
        assert "sages were asked about 6 places" in text
    assert "6 of 6 places, by sages" in page and "Places as the sages named them." in page
    for text in (page, card, " ".join([*said["guarantee"]["plain_words"], *said["assumptions"]]), outcome.out):
        words = html.unescape(text).replace("votes, teachers' accuracies or data-dependent prices", "")  # of any owner
        assert not re.search(r"teacher\b|teachers\b|gradient|\bcell|reverse|nearest to", words)
    again = train(
        tmp_path / "home", *SMALL, *small, f"labels={record['release_id']}", found, monkeypatch=monkeypatch, base=[]
    )
    assert again.code == 0, again.error
    cards = [file.read_text() for file in (tmp_path / "home").glob("runs/*/*/*/release/README.md")]
    assert len(cards) == 2 and all("sages were asked about 6 places" in card for card in cards)
    owner = json.loads((folder.parent / "private" / "summary.json").read_text())
    assert owner["membership"] is not None


def test_label_answers_by_them_and_trains_nothing(tmp_path, found):
    assert label.main([*SMALL, "dataset=digits", "quiet=true", found]) == 0
    (record,) = released(tmp_path / "home")
    assert record["queries_answered"] == 6 and record["voters"] == "nearest_mean"
    assert not list((tmp_path / "home").rglob("student.safetensors"))


def test_a_plan_foretells_them(tmp_path, found):
    report = plan.plan([*SMALL, "dataset=digits", found])
    (choice,) = report.choices
    assert choice.num_teachers == 8 and choice.epsilon is not None and choice.problem is None


def test_python_takes_them(tmp_path, found):
    from nearest_mean import NearestMean

    method = NearestMean(num_teachers=8, mechanism=GNMax(sigma=2.0))
    assert isinstance(method, PrivateMethod)
    drawn = np.random.default_rng(0)
    y = drawn.integers(0, 3, 120)
    x = torch.tensor(drawn.normal(size=(120, 4)) + 3 * np.eye(4)[y], dtype=torch.float32)
    pate = PATE("mine", classes=3, teacher=method, delta=1e-5,
                budget_epsilon=500, home=tmp_path / "home")  # fmt: skip
    answers = pate.fit_teachers(x, torch.tensor(y)).label(x[:60], num_queries=30)
    assert float((answers.label_Q == torch.tensor(y)[answers.query_Q]).double().mean()) > 0.8
    pate.fit_student("supervised", network="logistic", steps=3)
    found = pate.membership(x + 10, torch.tensor(y), records=40)
    assert isinstance(found, membership.MembershipResult)


@pytest.fixture
def harness(tmp_path, found, monkeypatch):
    """The neighbor harness on a copy of the configuration with one file more."""
    conf = tmp_path / "conf"
    shutil.copytree(choices.CONF, conf)
    (conf / "method").mkdir()
    (conf / "method" / "nearest_mean.yaml").write_text(YAML)
    cached = (choices.groups, choices.composed, choices._made, choices.methods, choices.slots, choices.values)
    monkeypatch.setattr(choices, "CONF", conf)
    for one in cached:
        one.cache_clear()
    yield cases.PLAIN | {"form": "tensors", "unit": "record", "noise": "torch", "partition": "add_remove",
                         "features": "none", "mechanism": "gaussian", "method": "nearest_mean"}  # fmt: skip
    for one in cached:
        one.cache_clear()


def test_the_neighbor_harness_reaches_them(harness):
    assert "nearest_mean" in cases.space()["method"]
    assert cases.attempt(harness, tally := cases.Tally(), most=6), tally.reasons
    assert tally.values and not tally.faults


@pytest.mark.slow(reason="a process that runs the neighbor harness")
def test_the_neighbor_harness_finds_that_a_record_sits_in_every_shard(harness, tmp_path, monkeypatch):
    """Teachers that look at all records, whatever their shard: one of them moves several votes."""
    (tmp_path / "nearest_mean.py").write_text(
        MEMBER.replace("mine = shards.get_indices(teacher)", "mine = slice(None)")
    )
    sys.modules.pop("nearest_mean", None)
    tally = cases.Tally()
    assert cases.attempt(harness, tally, most=None)
    assert tally.faults and "where it says" in str(tally.faults)
