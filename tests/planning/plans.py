"""Plans made of dataclasses: their data set declares its public facts and lets nobody load it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pate_torch.config import RunConfig
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.planning.choice import Choice, PlanEvaluator, PlanReport
from pate_torch.privacy.partition import AddRemove
from pate_torch.queries.base import Random
from tests.run_configs import run_config


class PrivateRecordsRead(AssertionError):
    pass


@dataclass(frozen=True, kw_only=True)
class Untouchable(DatasetSource):
    """A data set of 60,000 records, 4,000 public points and ten classes that nobody may load."""

    name: str = "untouchable"

    def declared_facts(self) -> SourceFacts:
        return SourceFacts(name=self.name, num_classes=10, num_private=60_000, num_public=4000)

    def load(self):
        raise PrivateRecordsRead


FACTS = Untouchable().declared_facts()


def make_plan(**changes) -> RunConfig:
    plain = {"num_teachers": 250, "mechanism": GNMax(sigma=40.0), "num_queries": 50, "delta": 1e-5}
    parts = {"dataset": Untouchable(), "partition": AddRemove(), "query": Random(), "device": torch.device("cpu")}
    places = {"root": Path("/nowhere"), "folder": Path("/nowhere/run")}
    return run_config(**{**parts, **places, **plain, **changes})


def evaluate(account=None, pilot=None, facts=FACTS, settings=(), **changes) -> Choice:
    evaluator = PlanEvaluator(facts=facts, num_classes=facts.num_classes, account=account, pilot=pilot)
    return evaluator(make_plan(**changes), settings)


def report_on(*choices: Choice, **changes) -> PlanReport:
    terms = {"dataset": "untouchable", "budget_epsilon": 10.0, "budget_source": "privacy.opening_budget", "delta": 1e-5}
    return PlanReport(choices=choices, **{**terms, **changes})
