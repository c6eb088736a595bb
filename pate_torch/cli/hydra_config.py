"""From the words of a command line to the components of a run, by Hydra.

Every component is instantiated by its ``_target_``: run only configurations you trust.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, cast

import hydra.utils
import torch
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pate_torch.components import COMPONENTS
from pate_torch.config import PrivacyConfig, RunConfig, Study
from pate_torch.core import checks, run_folders
from pate_torch.data.base import DatasetSource
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.features.base import FeatureRecipe, PointEncoder
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.private_epsilon import PrivateEpsilon
from pate_torch.methods.base import PrivateMethod
from pate_torch.privacy.partition import Partition
from pate_torch.queries.base import QueryStrategy
from pate_torch.release.membership import MembershipTest
from pate_torch.students.base import StudentAlgorithm
from pate_torch.students.selection import Selection
from pate_torch.teachers.training import TeacherRecipe


@functools.cache
def register_components() -> None:
    """Tell Hydra, for the rest of this process, of the package's components and of the resolvers that conf/ names."""
    store = ConfigStore.instance()
    for group, components in COMPONENTS.items():
        for name, component in components.items():
            store.store(group=group, name=name, node=component)
    store.store(group="features", name="none", node={"features": None}, package="_global_")
    OmegaConf.register_new_resolver("adjacency_of", get_adjacency, replace=True)
    OmegaConf.register_new_resolver("home_folder", run_folders.get_home_folder, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folders.get_run_folder, replace=True)
    OmegaConf.register_new_resolver("run_id", run_folders.get_run_id, use_cache=True, replace=True)


@contextlib.contextmanager
def open_configuration() -> Iterator[None]:
    """Let ``hydra.compose`` find conf/ and the package's components within the ``with`` block."""
    register_components()
    folder = run_folders.find_config_folder()
    with refuse_names_of_components(), initialize_config_dir(config_dir=folder, version_base="1.3"):
        yield


@contextlib.contextmanager
def refuse_names_of_components() -> Iterator[None]:
    """Refuse a user's file that has the name of a component: Hydra would mix the keys of the two, with a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"\s*'\S+' is validated against ConfigStore schema")
        try:
            yield
        except UserWarning as warning:
            group, _, name = str(warning).split("'")[1].rpartition("/")
            fix = "Give your file another name."
            raise checks.error(group, name, "is a component of pate_torch already", fix) from warning


def get_adjacency(partition: DictConfig) -> str:
    """The adjacency of a partition, by its class, whatever the name of its configuration is."""
    return str(hydra.utils.instantiate(partition, _convert_="all").adjacency)


def build_run_config(cfg: DictConfig, folder: Path) -> RunConfig:
    """The components that ``cfg`` names.

    Raises:
        ValueError: One cannot be built; the message names its key.
    """
    try:
        values = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or "configuration"
        raise ValueError(f"{key}: {str(error).splitlines()[0]}") from error
    privacy = build_privacy_config(values)
    features = instantiate_component(cfg, "features", FeatureRecipe | PointEncoder) if values["features"] else None
    encoder = None
    if isinstance(features, PointEncoder):  # nobody learns features of points that come encoded
        cfg, encoder, features = cfg.copy(), features, None
        cfg.features = None
    student = _instantiate_optional(cfg, "student", StudentAlgorithm)
    votes_path = values["votes"]
    baseline = checks.boolean("baseline", values["baseline"]) and votes_path is None
    return RunConfig(
        dataset=_build_source(cfg),
        partition=instantiate_component(cfg, "partition", Partition),
        method=_build_method(cfg, values, student, features),
        encoder=encoder,
        student=student,
        privacy=privacy,
        selection=_instantiate_optional(cfg, "selection", Selection),
        private_epsilon=_instantiate_optional(cfg, "private_epsilon", PrivateEpsilon),
        membership=_instantiate_optional(cfg, "membership", MembershipTest),
        labels=values["labels"],
        root=run_folders.check_root(values["paths"]["root"]),
        folder=folder,
        seed=values["seed"],
        device=parse_device(values["device"]),
        baseline=instantiate_component(cfg, "teacher", TeacherRecipe) if baseline else None,
        quiet=checks.boolean("quiet", values["quiet"]),
    )


def build_privacy_config(values: dict[str, Any]) -> PrivacyConfig:
    """The account's terms."""
    if not isinstance(values["privacy"], dict):
        raise checks.error("privacy", values["privacy"], "must be set key by key", "For example privacy.delta=1e-6.")
    terms = {key: value for key, value in values["privacy"].items() if key != "allow_uninformative_labels"}
    return PrivacyConfig(insecure_noise_seed=values["insecure_noise_seed"], **terms)


def _instantiate_optional(cfg: DictConfig, key: str, kind: type) -> Any:
    """A component, or None where the group names none."""
    return instantiate_component(cfg, key, kind) if "_target_" in cfg[key] else None


def _build_method(
    cfg: DictConfig, values: dict[str, Any], student: StudentAlgorithm | None, features: FeatureRecipe | None
) -> PrivateMethod:
    """The method, with those of the other groups that it has a slot for; teachers give way to a file of votes."""
    votes_path, target = values["votes"], values["method"]
    if votes_path is not None:
        _check_votes(cfg, values)
        cfg = cfg.copy()
        cfg.method = {"_target_": "pate_torch.methods.voting.VotesFile", "path": votes_path}
    slots = _list_slots(cfg)
    if values["teachers"] is not None and "num_teachers" not in slots:
        fix = "Leave out teachers: every record answers for itself."
        raise checks.error("method", target.get("name"), "cannot be combined with teachers", fix)
    guide_student = _instantiate_optional(cfg, "guide_student", StudentAlgorithm)
    components: dict[str, Any] = {
        "num_queries": values["num_queries"],
        "num_queries_is_default": OmegaConf.is_interpolation(cfg, "num_queries"),
        "allow_uninformative_labels": checks.boolean(
            "privacy.allow_uninformative_labels", values["privacy"]["allow_uninformative_labels"]
        ),
        # Without a student of its own, rounds are guided by the one that is published, which then goes on from there.
        "guide_student": (None if student is None else student.guide) if guide_student is None else guide_student,
        "releases_guide": guide_student is None,
        "features": features,
    }
    groups = {"mechanism": Mechanism, "query": QueryStrategy, "teacher": TeacherRecipe}
    for key, kind in groups.items():
        if key in slots:
            components[key] = instantiate_component(cfg, key, kind)
    return instantiate_component(
        cfg, "method", PrivateMethod, **{key: value for key, value in components.items() if key in slots}
    )


def _check_votes(cfg: DictConfig, values: dict[str, Any]) -> None:
    """Raise ValueError for choices that a file of votes leaves no room for."""
    path = checks.nonempty_string("votes", values["votes"])
    method = None if "num_teachers" in _list_slots(cfg) else values["method"]["name"]
    for key, value in (("teachers", values["teachers"]), ("method", method)):
        if value is not None:
            fix = f"Leave out {key}: the teachers behind the votes are not here, nor what they learnt from."
            raise checks.error("votes", path, f"cannot be combined with {key}", fix)


def _list_slots(cfg: DictConfig) -> set[str]:
    """The fields of the method that is named."""
    try:
        return {field.name for field in dataclasses.fields(hydra.utils.get_class(cfg.method["_target_"]))}
    except Exception:  # whatever is wrong with the target, instantiating it says so
        return set()


def _build_source(cfg: DictConfig) -> DatasetSource:
    """The data set, under the promise for labels alone where that is chosen."""
    source: DatasetSource = instantiate_component(cfg, "dataset", DatasetSource)
    return LabelPrivacyDataset(source=source) if checks.boolean("labels_only", cfg.labels_only) else source


def build_study(cfg: DictConfig) -> Study | None:
    """The experiment that takes the place of one run, or None."""
    return None if cfg.study is None else instantiate_component(cfg, "study", Study)


def instantiate_component(cfg: DictConfig, key: str, kind: type | UnionType, **components: Any) -> Any:
    """Instantiate one group by its ``_target_``; the component's own complaint is what the user sees.

    Args:
        cfg: The resolved configuration.
        key: The group.
        kind: The base class of what it must make.
        **components: What is given to it beside its own keys.

    Raises:
        ValueError: The target is not there, or makes something of another kind.
    """
    node = cfg[key]
    if not OmegaConf.is_dict(node) or "_target_" not in node:
        plain_value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        raise checks.error(key, plain_value, "must be a group with a _target_", _name_options(key))
    try:
        # Components are given to a partial, because OmegaConf would take dataclasses for configurations.
        make_instance = hydra.utils.instantiate(node, _convert_="all", _partial_=True)
        instance = make_instance(**components)
    except (InstantiationException, ValueError, TypeError) as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        if isinstance(cause, ValueError):
            raise ValueError(checks.prefix_error_key(key, cause)) from error
        if isinstance(cause, TypeError):
            keys = ", ".join(name for name in map(str, node) if name != "_target_")
            raise ValueError(f"{key}: {str(cause).splitlines()[0]}. Its keys are {keys}.") from error
        if cause is None or isinstance(cause, ImportError):
            raise _bad_target_error(key, node["_target_"], " ".join(str(cause or error).split())) from error
        raise ValueError(f"{key}: {type(cause).__name__}: {' '.join(str(cause).split())}") from error
    if not isinstance(instance, kind):
        kind_name = getattr(kind, "__name__", str(kind))
        raise _bad_target_error(key, node["_target_"], f"makes {type(instance).__name__}, not a {kind_name}")
    return instance


def _bad_target_error(key: str, target: str, reason: str) -> ValueError:
    return checks.error(f"{key}._target_", target, reason, _name_options(key))


def _name_options(group: str) -> str:
    return f"Choose a component by its name, as in {group}=<name>: python train.py --help lists the names."


def parse_device(name: object) -> torch.device:
    """The torch device of that name; ``auto`` is the first CUDA device, else Apple's, else the CPU."""
    text = str(name)
    if text == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    requirement = "must be auto, cpu, cuda, cuda:<n> or mps"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise checks.error("device", name, requirement) from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise checks.error("device", name, requirement)
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[device.type]
    if count == 0:
        device_type = device.type.upper()
        raise checks.error(
            "device", name, f"no {device_type} device is available here", "Use device=cpu or device=auto."
        )
    if (device.index or 0) >= count:
        raise checks.error("device", name, f"there are {count}, numbered from 0", "Use device=auto.")
    return device
