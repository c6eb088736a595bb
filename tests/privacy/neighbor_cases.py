"""A case is a choice of everything a plan is made of; how its plan is made of a list of rows, and how it is run."""

import dataclasses
import functools
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.api.pate import PATE
from pate_torch.cli import label
from pate_torch.config import RunConfig
from pate_torch.core.progress import Stages
from pate_torch.mechanisms.class_counts import ClassCounts
from pate_torch.methods.base import PrivateMethod
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.record_method import RecordMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.methods.voting import VotesFile
from pate_torch.privacy.partition import DatasetFacts, assign_shards
from pate_torch.privacy.records import LABEL_UNIT, Dataset
from pate_torch.privacy.sensitive import Votes
from pate_torch.queries.base import Random
from pate_torch.teachers.voting import count_votes
from tests.privacy import neighbor_choices as choices
from tests.privacy import neighbor_harness as harness
from tests.privacy import neighbor_worlds as worlds
from tests.run_configs import changed, run_config

Case = dict[str, str]

ROWS = worlds.rows()
QUERIES, TEACHERS, DELTA = 6, 4, 1e-4

RECORDS = ("form", "unit", "partition", "noise", "method", "features", "encoder")
"""What touches records."""

PLAIN = {"encoder": "none", "selection": "none", "membership": "none", "teacher": "logistic", "query": "random",
         "student": "logistic", "guide_student": "logistic", "target": "none", "baseline": "False",
         "route": "train", "classes": "3", "class_counts": "none", "executor": "processes"}  # fmt: skip


def space() -> dict[str, Sequence[str]]:
    """Every value of every choice."""
    found: dict[str, Sequence[str]] = {name: list(made) for name, made in choices.values().items()}
    return found | {
        "form": list(worlds.FORMS),
        "unit": list(worlds.UNITS),
        "noise": ["torch", "discrete"],
        "classes": ["2", "3"],
        "target": ["none", "5"],
        "baseline": ["False", "True"],
        "route": list(ROUTES),
    }


def classes(case: Case) -> tuple[str, ...]:
    return worlds.CLASSES[: int(case["classes"])]


def parts(case: Case, home: Path) -> dict[str, Any]:
    """Everything of a case's plan but its data. ValueError: what does not go together."""
    image = case["form"].startswith("images")
    adjacency = "replace_one" if case["partition"].startswith("replace_one") else "add_remove"
    made = {name: known[case[name]](image, case["noise"], adjacency) for name, known in choices.values().items()}
    for role in ("student", "guide_student"):  # as their files say: features: ${features}
        if "features" in getattr(type(made[role]), "__dataclass_fields__", ()):
            made[role] = dataclasses.replace(made[role], features=made["features"])
    target = None if case["target"] == "none" else float(case["target"])
    given: dict[str, Any] = {
        **made, "root": home / "home", "folder": home / "home/runs/toy/mechanism/1", "seed": 0,
        "num_queries": QUERIES, "delta": DELTA,
        "opening_budget": 1e6, "spend_anyway": True, "target_epsilon": target,
        "baseline": case["baseline"] == "True", "quiet": True,
    }  # fmt: skip
    run_config(dataset=None, **given)
    return given


def plan(case: Case, rows: list[worlds.Row], home: Path) -> RunConfig:
    """The plan of a case on these rows. ValueError: what does not go together."""
    given = parts(case, home)  # most of what is refused is, before any file is written
    home.mkdir(parents=True, exist_ok=True)
    return run_config(dataset=worlds.source(case["form"], case["unit"], rows, home / "data", classes(case)), **given)


# ---- ways to run ---------------------------------------------------------------------------------------------------

WITHOUT_SELECTION = ("dpsgd", "votes", "python", "labeler")
"""Ways to run that have no place for a choice of a student."""


def _refuse_unsuited(route: str, plan: RunConfig, data: Dataset) -> None:
    """Raise ValueError where this way to run cannot be given such a plan at all."""
    if route != "train" and plan.partition.adjacency not in data.adjacencies:
        raise ValueError(f"{route}: the lists of these files are no neighbors")
    if route in ("dpsgd", "votes") and plan.method.ensemble_size is None:
        raise ValueError(f"{route}: is of teachers")
    if route in ("reuse", "python", "labeler") and plan.method.releases_model:
        raise ValueError(f"{route}: is of labels")
    if route in WITHOUT_SELECTION and plan.selection is not None:
        raise ValueError(f"{route}: chooses no student")
    if route in ("python", "labeler") and data.private.unit == LABEL_UNIT:
        raise ValueError(f"{route}: protects whole records")


@contextmanager
def _free_refusals(root: Path) -> Iterator[None]:
    """Count a refusal of the second call of a route as a refusal before any charge if that call charged nothing."""
    before = harness.charged(root)
    try:
        yield
    except ValueError as error:
        if harness.charged(root) == before:
            raise harness.Refused(str(error)) from error
        raise


def reuse(plan: RunConfig) -> None:
    """Labels first, then a student of them in another run, chosen by private records where the plan chooses."""
    _refuse_unsuited("reuse", plan, plan.dataset.load())
    pipeline.run(changed(plan, selection=None))
    record = json.loads((plan.folder / "release" / "release.json").read_text())
    again = plan.folder.with_name("2")
    with _free_refusals(plan.root):
        pipeline.run(changed(plan, labels=record["release_id"], folder=again))


def twice(plan: RunConfig) -> None:
    """The same again: a release of its own, whatever the private store knows by then."""
    pipeline.run(plan)
    with _free_refusals(plan.root):
        pipeline.run(changed(plan, folder=plan.folder.with_name("2")))


def dpsgd(plan: RunConfig) -> None:
    _refuse_unsuited("dpsgd", plan, plan.dataset.load())
    method = partial(DPSGD, network="logistic", steps=2)
    pipeline.run(changed(plan, method=method, target_epsilon=plan.privacy.target_epsilon or 3.0))


def votes_of(plan: RunConfig) -> tuple[Any, Votes]:
    """The data, and votes of teachers that say the commonest label of their shard, or of half of the points none."""
    data = plan.dataset.load()
    _refuse_unsuited("votes", plan, data)
    shards = assign_shards(plan.partition, data.private, plan.method.ensemble_size, plan.seed)
    said = []
    for teacher in range(plan.method.ensemble_size):
        named = torch.bincount(data.private.y[shards.get_indices(teacher)], minlength=data.spec.num_classes)
        said.append(torch.where(torch.arange(len(data.pool)) % 2 == 0, int(named.argmax()), 0))
    return data, count_votes(torch.stack(said), data.spec.num_classes)


def brought(plan: RunConfig) -> None:
    """A file of votes, to the label command's own function."""
    data, votes = votes_of(plan)
    spec = dataclasses.replace(data.spec, input_shape=(1,), mean=(0.0,), std=(1.0,))
    rows = label.make_votes_dataset(spec, data.private.unit, len(votes))
    passive = Random(name="passive", shuffle=False)
    pipeline.run(changed(plan, dataset=rows, query=passive, method=partial(VotesFile, votes=votes), features=None,
                         student=None, guide_student=None, baseline=False))  # fmt: skip


def _pate(plan: RunConfig) -> tuple[Any, PATE]:
    data = plan.dataset.load()
    _refuse_unsuited("python", plan, data)
    method = plan.complete(DatasetFacts.from_dataset(data, plan.partition), Stages(quiet=True)).method
    voters = {"teacher": _teacher(method)}
    if isinstance(method, TeacherVotes):
        voters |= {"num_teachers": method.num_teachers, "mechanism": method.mechanism}
    made = PATE(
        "toy", classes=data.spec.num_classes, delta=plan.privacy.delta, home=plan.root,
        budget_epsilon=plan.privacy.opening_budget, partition=plan.partition, unit=data.private.unit,
        mean=data.spec.mean, std=data.spec.std, spend_anyway=plan.privacy.spend_anyway, **voters,
    )  # fmt: skip
    private, start = data.private, getattr(voters["teacher"], "start", None)
    public_x = data.pool.x if start is not None or data.spec.is_image else None
    return data, made.fit_teachers(private.x, private.y, unit_id=private.unit_id, public_x=public_x)


def _teacher(method: PrivateMethod) -> Any:
    """Methods without teachers as they are; teachers by a recipe where they vote together, else by scikit-learn."""
    if not isinstance(method, TeacherVotes):
        return method
    return method.teacher if isinstance(method, TransductiveTeacherVotes) else LogisticRegression(max_iter=5, C=1e-3)


def in_python(plan: RunConfig) -> None:
    data, pate = _pate(plan)
    method, voting = plan.method, None
    assert isinstance(method, LabelingMethod)
    if isinstance(method, TransductiveTeacherVotes):
        voting = {"neighbors": method.neighbors, "alpha": method.alpha, "balance": method.balance}
    guide = None if method.releases_guide else method.guide_student
    pate.label(data.pool.x, method.num_queries, strategy=method.query, guide_student=guide, method=voting,
               features=method.features)  # fmt: skip
    if plan.student is None:
        return
    with _free_refusals(plan.root):  # a student is named after the labels are there, which another student can use
        pate.fit_student(plan.student)
    pate.report(data.evaluation.x, data.evaluation.y)


def one_by_one(plan: RunConfig) -> None:
    data, pate = _pate(plan)
    with pate.labeler(6, calls=3) as labeler:
        for part in data.pool.x[:6].split(2):
            labeler.answer(part)


ROUTES: dict[str, Callable[[RunConfig], Any]] = {
    "train": pipeline.run,
    "reuse": reuse,
    "twice": twice,
    "dpsgd": dpsgd,
    "votes": brought,
    "python": in_python,
    "labeler": one_by_one,
}


# ---- trying a case -------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """composed, refused, ran: cases; neighbors: runs beside the first; faults: what was found, by case."""

    composed: int = 0
    refused: int = 0
    ran: int = 0
    silent: int = 0
    neighbors: int = 0
    values: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    reached: set[tuple[str, str]] = field(default_factory=set)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def refuse(self, why: str) -> bool:
        self.refused += 1
        self.reasons[" ".join(why.split())[:160]] += 1
        return False

    def accept(self, case: Case, first: harness.Outcome) -> None:
        self.ran += 1
        self.silent += first.silent
        self.values += len(first.watch.seen)
        self.reached |= set(case.items())

    def note(self, case: Case, faults: list[str]) -> bool:
        if faults:
            self.faults[" ".join(f"{name}={value!r}" for name, value in sorted(case.items()))] = faults
        return True

    def __str__(self) -> str:
        return (
            f"{self.composed} cases composed, {self.refused} refused, {self.ran} run ({self.silent} without an answer),"
            f" {self.values} sensitive values, {self.neighbors} neighbors, {len(self.faults)} cases with a fault"
        )


def judged(tally: Tally, record_property: Callable[[str, object], None], more: str = "") -> None:
    """Report the counts, and fail with every fault."""
    record_property("neighbors", f"{tally}{more}")
    assert tally.ran, f"none was accepted: {tally.reasons.most_common(5)}"
    told = [f"{case}\n    " + "\n    ".join(faults[:4]) for case, faults in tally.faults.items()]
    assert not tally.faults, f"{tally}\n" + "\n".join(told[:20])


def unreached(tally: Tally, space: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    every = {(name, value) for name, known in space.items() for value in known}
    return sorted(every - tally.reached)


def attempt(case: Case, tally: Tally, *, most: int | None = None, seed: int = 0) -> bool:
    """Run a case on D and on neighbors (``most`` of them; None: all). Whether it was accepted."""
    tally.composed += 1
    if not worlds.fits(case["form"], case["unit"]):
        return tally.refuse("such data have no such units")
    with tempfile.TemporaryDirectory(prefix="neighbors-") as made:
        home, go = Path(made), ROUTES[case["route"]]
        try:
            first = harness.run(plan(case, ROWS, home / "first"), harness.Watch(), go)
        except ValueError as error:
            return tally.refuse(str(error))
        except AssertionError as error:  # refused after it was charged: a fault like any other
            return tally.note(case, [str(error)])
        if first.refused:
            return tally.refuse(first.refused)
        tally.accept(case, first)
        faults = _costs(case, first, home) if case["route"] in ("train", "python", "votes") else []
        adjacency = "replace_one" if case["partition"].startswith("replace_one") else "add_remove"
        beside = worlds.neighbors(case["form"], case["unit"], adjacency, ROWS, home / "worlds", seed, classes(case))
        order = np.random.default_rng(seed).permutation(len(beside))
        for place in order[:most]:
            tally.neighbors += 1
            found = harness.compare(first, plan(case, beside[place].rows, home / f"n{place}"), go)
            faults += [f"{beside[place].how}: {fault}" for fault in found]
    return tally.note(case, faults)


def _costs(case: Case, first: harness.Outcome, home: Path) -> list[str]:
    """What ``privacy_events`` asks, and what the ledger took, are at least what the values cost."""
    made = plan(case, ROWS, home / "costs")
    facts = DatasetFacts.from_dataset(made.dataset.load(), made.partition)
    method = made.complete(facts, Stages(quiet=True)).method
    faults = []
    if isinstance(method, LabelingMethod):
        mechanism = method.mechanism
        seen = [one if one.mechanism is None or isinstance(one.mechanism, ClassCounts) else
                dataclasses.replace(one, mechanism=mechanism) for one in first.watch.seen]  # fmt: skip
        rounds = 1 if case["route"] == "votes" else method.num_rounds
        faults += harness.underpriced(seen, method.num_queries, rounds)
    if made.privacy.target_epsilon is not None:
        cost = accounting.compute_guarantee(method.privacy_events(facts), DELTA).epsilon
        if cost > made.privacy.target_epsilon * (1 + 1e-9):
            faults.append(f"target_epsilon={made.privacy.target_epsilon} costs {cost}")
    return faults


# ---- cases ---------------------------------------------------------------------------------------------------------


def plausible(case: Case) -> bool:
    """Whether a case is worth running: a plan can be made of it that its data bear. What else is refused, is as it
    runs.
    """
    if not worlds.fits(case["form"], case["unit"]):
        return False
    try:
        given = parts(case, Path("nowhere"))
        data = world(case["form"], case["unit"], case["classes"])
        made = run_config(dataset=None, **given)
        _refuse_unsuited(case["route"], made, data)
        facts = DatasetFacts.from_dataset(data, made.partition)
        made = made.complete(facts, Stages(quiet=True))
        made.privacy_events(facts)
        made.validate(facts)
    except ValueError:
        return False
    return True


@functools.cache
def world(form: str, unit: str, classes: str) -> Dataset:
    """D itself, in this form."""
    with tempfile.TemporaryDirectory(prefix="neighbors-") as made:
        return worlds.source(form, unit, ROWS, Path(made), worlds.CLASSES[: int(classes)]).load()


def mechanism_for(case: Case) -> str:
    """One that takes what these voters say; DP-SGD takes the cost of any."""
    method = choices.kind_of(choices.values()["method"][case["method"]](True, "torch", "add_remove"))
    return method.mechanism_type.name if issubclass(method, RecordMethod) else "gaussian"


def of_records(form: str | None = None) -> Iterator[Case]:
    """Every combination of what touches records, all else plain.

    Features learnt of encoded points are features learnt of rows: the two meet at random alone. So do DP-SGD and
    what it has no slot for, features and whole numbers.
    """
    known = space()
    names = [name for name in RECORDS if form is None or name != "form"]
    for chosen in itertools.product(*(known[name] for name in names)):
        case = PLAIN | dict(zip(names, chosen, strict=True)) | ({} if form is None else {"form": form})
        if case["method"] == "dpsgd" and (case["features"], case["noise"]) != ("none", "torch"):
            continue
        if "none" in (case["features"], case["encoder"]):
            yield case | {"mechanism": mechanism_for(case)}
        if case["method"] == "teachers" and case["features"] == "none":
            yield case | {"mechanism": "gaussian counts=True", "teacher": "ridge", "student": "count_regression"}


def at_random(draw: np.random.Generator, fixed: Case, plain: float = 0.6) -> Case:
    """A case with these values; the others at random, plain ones more often."""
    known = space()
    case = {
        name: PLAIN[name] if name in PLAIN and draw.random() < plain else str(draw.choice(list(known[name])))
        for name in known
    } | fixed
    if "unit" not in fixed:
        case["unit"] = str(draw.choice([unit for unit in worlds.UNITS if worlds.fits(case["form"], unit)]))
    if "mechanism" not in fixed and draw.random() < 0.7:
        case["mechanism"] = mechanism_for(case)
    takers = [name for name in known["method"] if mechanism_for({"method": name}) == case["mechanism"].split()[0]]
    if "method" not in fixed and takers and case["method"] not in takers:
        case["method"] = str(draw.choice(takers))
    return case
