"""Every value that a plan can be made of, found by walking configuration and types, and arrays that cover triples.

A component is whatever a YAML file of the configuration makes by its ``_target_``; where it goes in a plan follows from
the type hints of the plan and of the methods, whose slots are choices like any other. So a new mechanism, query
strategy, student or method is reached by being there. A method waits for what fills its slots: it is a partial.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from pate_torch.cli import hydra_config
from pate_torch.components import COMPONENTS
from pate_torch.config import RunConfig
from pate_torch.core.run_folders import find_config_folder
from pate_torch.methods.base import PrivateMethod
from tests.configurations import list_options, load_option

CONF = Path(find_config_folder()).resolve()

TOY = (
    *("recommended.num_teachers=4", "recommended.sigma=2", "recommended.screen_sigma=1", "recommended.threshold=0"),
    *("recommended.queries=6", "recommended.network=logistic", "recommended.steps=2", "recommended.batch_size=4"),
    *("recommended.augment=null", "recommended.student_steps=2", "recommended.features_steps=2"),
)
TABLE = ("recommended.student_network=mlp", "++recommended.student_options={hidden:[8]}")
IMAGE = ("recommended.student_network=small_cnn", "++recommended.student_options={channels:[2,4],hidden:8}")

SMALL = {"steps": 2, "batch_size": 8, "unlabeled_batch": 8, "epochs": 1, "workers": 1}
"""Whatever takes long, by the name of its field, wherever it stands."""


class Shape(torch.nn.Module):
    """A frozen encoder without weights: mean, largest and squares of a point's numbers, which overflow where these are
    extreme."""

    def forward(self, x):
        x = x.flatten(1)
        return torch.stack([x.mean(1), x.amax(1), x.square().sum(1), x[:, 0]], 1)


class Spelling(torch.nn.Module):
    """A frozen encoder of texts without weights: a vector of each character, by its number."""

    def forward(self, ids_BL, mask_BL):
        return torch.cos(ids_BL[:, :, None] * torch.arange(1, 7))


NEEDED: dict[str, dict[str, Any]] = {
    "SparseVector": {"epsilon": 1e5, "max_failures": 3},  # so that four teachers pass
    "SoftSparseVector": {"epsilon": 1e5, "max_failures": 3, "bins": 2},
    "DistanceToInstability": {"epsilon": 100.0},
    "Selection": {"validation": 0.3},
    "MembershipTest": {"records": 20},
    "Workers": {"workers": 1, "chunk": 2},
    "Dask": {"workers": 1},
    "Submitit": {"workers": 2, "cluster": "local"},
    "Logistic": {"ridge": 1.0},  # no cross-validation
    "Encoder": {"module": Shape()},
    "DPSGD": {"network": "logistic", "noise_multiplier": 1.0},
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "ConfidentGNMax": [{"max_answers": 2}],
    "GradientDescent": [{"early_noise_multiplier": 2.0, "clip_norm": 0.25}],
    "GradientMethod": [{"neighbors": 3}, {"effective_dim": 1.5}, {"plans_from_counts": True}],
    "MembershipTest": [{"held_out": 0.3}],
    "AddRemove": [{"capacity": 3}],
    "Encoder": [
        {"batch_size": 4},
        {"module": Spelling(), "tokenizer": "tests:privacy/characters.json"},
        {"module": Spelling(), "tokenizer": "tests:privacy/characters.json", "batch_size": 4, "max_length": 12},
    ],
    "TransductiveTeacherVotes": [{"alpha": 0.0}],
}


def shrunk(value: Any) -> Any:
    """The same component, quick."""
    if isinstance(value, functools.partial):
        keywords = {
            name: SMALL[name] if name in SMALL and isinstance(item, int) else shrunk(item)
            for name, item in value.keywords.items()
        }
        return functools.partial(value.func, **(keywords | NEEDED.get(value.func.__name__, {})))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: SMALL[f.name] if f.name in SMALL and isinstance(getattr(value, f.name), int) else
            shrunk(getattr(value, f.name))
            for f in dataclasses.fields(value) if f.init
        }  # fmt: skip
        return dataclasses.replace(value, **(changes | NEEDED.get(type(value).__name__, {})))
    if isinstance(value, Mapping):
        return {key: shrunk(item) for key, item in value.items()}
    return value


# ---- what there is -------------------------------------------------------------------------------------------------


@functools.cache
def groups() -> tuple[str, ...]:
    """Every group of components that a default of config.yaml names."""
    defaults: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml").defaults)
    named = (next(iter(entry)) for entry in defaults if isinstance(entry, dict))
    return tuple(name for name in named if name in COMPONENTS)


@functools.cache
def composed(override: str, image: bool, noise: str, adjacency: str) -> Any:
    """The whole configuration with one option of one group, at toy size."""
    hydra_config.register_components()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return hydra.compose(
            "config",
            overrides=[override, f"noise={noise}", f"partition={adjacency}", *TOY, *(IMAGE if image else TABLE)],
        )


Changes = tuple[tuple[str, Any], ...]


def component(group: str, option: str, change: Changes, image: bool, noise: str, adjacency: str) -> Any:
    """What the option makes, changed; None where it is the absence of anything. ValueError: it refuses."""
    made = _made(group, option, change, image, noise, adjacency)
    if isinstance(made, ValueError):
        raise made
    return made


@functools.cache
def _made(group: str, option: str, change: Changes, image: bool, noise: str, adjacency: str) -> Any:
    adjacency = option if group == "partition" else adjacency
    raw: Any = load_option(group, option, CONF)
    if not {"_target_", "defaults"} & set(raw):
        return None  # the absence of anything
    if "defaults" in raw:  # made of other files: the slow way
        given = composed(f"{group}={option}", image, noise, adjacency).get(group)
    else:
        whole = composed("seed=0", image, noise, adjacency).copy()
        OmegaConf.set_struct(whole, False)
        whole[group] = raw
        given = whole[group]
    if given is None or "_target_" not in given:
        return None
    try:
        waits = {"_partial_": True} if group == "method" else {}
        made = shrunk(hydra.utils.instantiate(given, _convert_="all", **waits))
        if waits:
            return functools.partial(made.func, **(made.keywords | dict(change)))
        return dataclasses.replace(made, **dict(change)) if change else made
    except InstantiationException as error:
        return ValueError(str(error.__cause__))
    except ValueError as error:
        return error


Make = Callable[[bool, str, str], Any]
"""(image, kind of noise, adjacency) -> a component."""


def kind_of(value: Any) -> type:
    """The class of a component, or of one that waits for its slots."""
    return value.func if isinstance(value, functools.partial) else type(value)


@functools.cache
def methods() -> list[type[PrivateMethod]]:
    """The classes of all methods that the configuration names."""
    targets = (load_option("method", name, CONF)["_target_"] for name in list_options("method", CONF))
    return list(dict.fromkeys(hydra.utils.get_class(target) for target in targets))


@functools.cache
def slots() -> dict[str, list[Any]]:
    """field of a plan, or slot of its method -> the type hints that it has in the classes that have it.

    The baseline is made of the teacher's group, and chosen by yes or no.
    """
    found: dict[str, list[Any]] = {}
    for owner in (RunConfig, *methods()):
        for name, hint in typing.get_type_hints(owner).items():
            if name != "baseline" and typing.get_origin(hint) is not typing.ClassVar:
                found.setdefault(name, []).append(hint)
    return found


def places(value: Any, known: Mapping[str, Sequence[Any]]) -> list[str]:
    """The fields of a plan, and the slots of its method (``slots``), whose type this value has."""
    found = []
    for name, hints in known.items():
        kinds = [k for hint in hints for k in (typing.get_args(hint) or (hint,)) if isinstance(k, type)]
        if any(k.__module__.startswith("pate_torch.") and issubclass(kind_of(value), k) for k in kinds):
            found.append(name)
    return found


@functools.cache
def values() -> dict[str, dict[str, Make]]:
    """field of a plan or slot of its method -> name of a value -> how it is made. "none" where each may be None."""
    found: dict[str, dict[str, Make]] = {}
    known = slots()
    for group in groups():
        members = {
            name: made
            for name in list_options(group, CONF)
            if (made := component(group, name, (), True, "torch", "add_remove")) is not None
        }
        # A group is of one kind (what only looks like another kind is left out), or each member is of its own.
        alike = set.intersection(*(set(places(made, known)) for made in members.values())) if members else set()
        for option, made in members.items():
            for field in alike or places(made, known):
                if field == "guide_student" and made.returns_released_model:
                    continue  # learns nothing that could guide: refused
                for change in _changes(made, field):
                    name = " ".join([option, *(f"{k}={v}" for k, v in change.items())])
                    found.setdefault(field, {})[name] = functools.partial(
                        component, group, option, tuple(change.items())
                    )
    for field, hints in known.items():
        if field in found and all(type(None) in typing.get_args(hint) for hint in hints):
            found[field] = {"none": lambda *_: None, **found[field]}
    return found


def _changes(made: Any, field: str) -> list[dict[str, Any]]:
    """None, those that are listed, and two rounds or a flag turned round where there are such."""
    changes: list[dict[str, Any]] = [{}, *VARIANTS.get(kind_of(made).__name__, [])]
    fields = [f.name for f in dataclasses.fields(kind_of(made)) if f.init]
    if getattr(made, "rounds", None) == 1 and "rounds" in fields:
        changes.append({"rounds": 2})
    if field == "mechanism":
        changes += [{name: not getattr(made, name)} for name in fields if isinstance(getattr(made, name), bool)]
    return changes


# ---- arrays that cover ---------------------------------------------------------------------------------------------

Row = dict[str, str]
Triple = tuple[tuple[str, str], ...]


class Covering:
    """Rows over some fields such that every triple of values stands in an accepted one, where any is accepted.

    tries: completions in which a triple is tried before it counts as refused wherever tried.
    """

    def __init__(self, space: Mapping[str, Sequence[str]], seed: int, tries: int = 6) -> None:
        self.space, self.draw, self.tries = dict(space), np.random.default_rng(seed), tries
        self.open: dict[Triple, int] = {
            tuple(zip(fields, chosen, strict=True)): 0
            for fields in itertools.combinations(sorted(space), 3)
            for chosen in itertools.product(*(space[field] for field in fields))
        }
        self.total, self.covered, self.refused = len(self.open), 0, 0
        self.pairs: dict[frozenset[tuple[str, str]], list[int]] = {}
        self._wanted: Triple = ()
        self._queue = [t for t in self.draw.permutation(np.arange(self.total)).tolist()]
        self._listed = list(self.open)

    def rows(self) -> Iterator[Row]:
        """The next row to try; say of each whether it was ``accepted``."""
        while self._queue:
            triple = self._listed[self._queue[-1]]
            if triple not in self.open:
                self._queue.pop()
                continue
            self._wanted = triple
            yield self._completed(triple)

    def _completed(self, triple: Triple) -> Row:
        """The triple, and for each other field the value that may be expected to cover most open triples with what
        stands: how many it brings, by how often it was accepted beside each. Where the triple was refused before, only
        how often counts.
        """
        row, again = dict(triple), self.open[triple] > 0
        for field in self.draw.permutation(sorted(set(self.space) - set(row))).tolist():
            best, most = "", -1.0
            for value in self.draw.permutation(list(self.space[field])).tolist():
                brings = 1.0
                if not again:
                    pairs = itertools.combinations(row.items(), 2)
                    brings += sum(tuple(sorted((*pair, (field, value)))) in self.open for pair in pairs)
                brings *= min(self._rate((field, value), one) for one in row.items())
                if brings > most:
                    best, most = value, brings
            row[field] = best
        return row

    def _rate(self, one: tuple[str, str], other: tuple[str, str]) -> float:
        accepted, refused = self.pairs.get(frozenset((one, other)), (0, 0))
        return (accepted + 1) / (accepted + refused + 1)

    def _hopeless(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        accepted, refused = self.pairs.get(frozenset((one, other)), (0, 0))
        return not accepted and refused >= 6 * self.tries

    def said(self, row: Row, accepted: bool) -> None:
        """Whether a row was accepted."""
        for pair in itertools.combinations(row.items(), 2):
            self.pairs.setdefault(frozenset(pair), [0, 0])[0 if accepted else 1] += 1
        for triple in itertools.combinations(sorted(row.items()), 3):
            if triple not in self.open:
                continue
            if accepted:
                del self.open[triple]
                self.covered += 1
                continue
            self.open[triple] += triple == self._wanted
            hopeless = any(self._hopeless(*pair) for pair in itertools.combinations(triple, 2))
            if self.open[triple] >= self.tries or hopeless:
                del self.open[triple]
                self.refused += 1
