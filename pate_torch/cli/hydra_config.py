"""Conversion of command-line settings to the configuration of a run, by Hydra.

Hydra calls the ``_target_`` of every component, so run only configurations that you trust.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import hydra.utils
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pate_torch.components import COMPONENTS, get_component
from pate_torch.config import PrivacyConfig, RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.device import parse_device
from pate_torch.core.executors import Workers
from pate_torch.data.base import DatasetSource
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.features.base import FeatureRecipe
from pate_torch.features.encoder import Encoder
from pate_torch.mechanisms.base import Mechanism
from pate_torch.mechanisms.class_counts import ClassCounts
from pate_torch.methods.base import PrivateMethod
from pate_torch.privacy.partition import Partition
from pate_torch.queries.base import QueryStrategy
from pate_torch.release.membership import MembershipTest
from pate_torch.students.base import StudentAlgorithm
from pate_torch.students.selection import Selection
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import TeacherStore


class _ComponentNode(ConfigNode):
    """A component in Hydra's store, whose class is imported when a configuration selects it."""

    def __init__(self, group: str, name: str) -> None:
        self.name, self.group, self.package, self.provider = name, group, None, None

    @functools.cached_property
    def node(self) -> DictConfig:  # type: ignore[override]
        return OmegaConf.create(get_component(str(self.group), self.name))


@functools.cache
def register_components() -> None:
    """Register the package's components and the resolvers of conf/ with Hydra for the rest of this process."""
    store = ConfigStore.instance()
    for group, components in COMPONENTS.items():
        store.repo[group] = {f"{name}.yaml": _ComponentNode(group, name) for name in components}
    store.store(group="features", name="none", node={"features": None}, package="_global_")
    resolvers: dict[str, Callable[..., str | int]] = {
        "adjacency_of": lambda partition: hydra.utils.instantiate(partition, _convert_="all").adjacency,
        "home_folder": run_folders.get_home_folder,
        "run_folder": run_folders.get_run_folder,
        "steps_for_shard": compute_steps,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    OmegaConf.register_new_resolver("run_id", run_folders.get_run_id, use_cache=True, replace=True)


def compute_steps(dataset: DictConfig, num_teachers: int, batch_size: int, passes: float, least: int) -> int:
    """Compute the steps of a teacher: ``passes`` over a shard of the public, declared size, but at least ``least``.

    The sizes of the shards that are dealt are private, and are not used. For settings that cannot work the result is
    ``least``, because the component that has the setting refuses it with its key.
    """
    try:
        source = hydra.utils.instantiate(dataset, _convert_="all")
        return max(least, math.ceil(passes * source.declared_facts().num_private / num_teachers / batch_size))
    except (InstantiationException, ArithmeticError, AttributeError, TypeError):
        return least


@contextlib.contextmanager
def open_configuration() -> Iterator[None]:
    """Enable ``hydra.compose`` with conf/ and the package's components within the ``with`` block."""
    register_components()
    folder = run_folders.find_config_folder()
    with refuse_names_of_components(), initialize_config_dir(config_dir=folder, version_base="1.3"):
        yield


@contextlib.contextmanager
def refuse_names_of_components() -> Iterator[None]:
    """Raise ValueError for a user's file with the name of a component, because Hydra would mix the keys of both."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"\s*'\S+' is validated against ConfigStore schema")
        try:
            yield
        except UserWarning as warning:
            group, _, name = str(warning).split("'")[1].rpartition("/")
            fix = "Give your file another name."
            raise checks.error(group, name, "is a component of pate_torch", fix) from warning


def compose_labeling(settings: Sequence[str], run_name: str | None = None) -> RunConfig:
    """Compose the configuration of a run that only makes a release, without a student or results for the owner.

    If ``run_name`` is set, it replaces the mechanism's name in the path of the run's folder.
    """
    cfg = hydra.compose("config", overrides=["student=none", "baseline=false", "membership=none", *settings])
    if run_name is not None and not any(setting.startswith("paths.run=") for setting in settings):
        folder = run_folders.get_run_folder(cfg.paths.root, cfg.dataset.name, run_name)
        cfg.paths.run = str(Path(folder) / run_folders.get_run_id())
    return build_run_config(cfg, Path(cfg.paths.run))


def format_configuration_error(error: OmegaConfBaseException) -> str:
    """Format an error of a configuration as one line: the message of the resolver that raised it, or key and cause."""
    text = str(error).splitlines()[0]
    resolver_message = text.partition("ValueError raised while resolving interpolation: ")[2]
    return resolver_message or (f"{error.full_key}: {text}" if error.full_key else text)


def build_run_config(cfg: DictConfig, folder: Path) -> RunConfig:
    """Build the run configuration from ``cfg``. Raise ValueError with the key of a component that cannot be built."""
    try:
        values = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ValueError(format_configuration_error(error)) from error
    privacy = build_privacy_config(values)
    features = instantiate_component(cfg, "features", FeatureRecipe | Encoder) if values["features"] else None
    encoder = None
    if isinstance(features, Encoder):  # an encoder transforms the data set, so no features are learned
        cfg, encoder, features = cfg.copy(), features, None
        cfg.features = None
    student = instantiate_component(cfg, "student", StudentAlgorithm | None)
    dataset = instantiate_component(cfg, "dataset", DatasetSource)
    has_baseline = checks.boolean("baseline", values["baseline"]) and values["votes"] is None
    test_share = checks.mapping("private_test", values["private_test"])["share"]
    if test_share and student is None:
        fix = "Choose a student, or leave out the test."
        raise checks.error("private_test.share", test_share, "needs a student, whose accuracy is tested", fix)
    return RunConfig(
        dataset=LabelPrivacyDataset(source=dataset) if checks.boolean("labels_only", cfg.labels_only) else dataset,
        partition=instantiate_component(cfg, "partition", Partition),
        method=_build_method(cfg, values, student, features),
        encoder=encoder,
        student=student,
        privacy=privacy,
        selection=instantiate_component(cfg, "selection", Selection | None),
        membership=instantiate_component(cfg, "membership", MembershipTest | None),
        labels=values["labels"],
        private_test=test_share,
        root=run_folders.check_root(values["paths"]["root"]),
        folder=folder,
        seed=values["seed"],
        device=parse_device(values["device"]),
        executor=instantiate_component(cfg, "executor", Workers),
        baseline=instantiate_component(cfg, "teacher", TeacherRecipe) if has_baseline else None,
        quiet=checks.boolean("quiet", values["quiet"]),
    )


def build_privacy_config(values: dict[str, Any]) -> PrivacyConfig:
    """Build the terms of the account."""
    if not isinstance(values["privacy"], dict):
        raise checks.error("privacy", values["privacy"], "must be keys and values", "For example privacy.delta=1e-6.")
    terms = {key: value for key, value in values["privacy"].items() if key != "allow_uninformative_labels"}
    return PrivacyConfig(insecure_noise_seed=values["insecure_noise_seed"], **terms)


def _build_method(
    cfg: DictConfig, values: dict[str, Any], student: StudentAlgorithm | None, features: FeatureRecipe | None
) -> PrivateMethod:
    """Build the method. Components of other groups are passed if the class of the method has such a field."""
    votes, teachers, name = values["votes"], values["teachers"], cfg.method.get("name")
    fields = _list_method_fields(cfg)
    if votes is not None:
        for key, value in {"teachers": teachers, "method": None if "num_teachers" in fields else name}.items():
            if value is not None:
                problem = f"cannot be combined with {key}, because a file of votes replaces the teachers"
                raise checks.error("votes", votes, problem, f"Omit {key}.")
        cfg = cfg.copy()
        path = checks.nonempty_string("votes", votes)
        cfg.method = {"_target_": "pate_torch.methods.voting.VotesFile", "path": path}
        fields = _list_method_fields(cfg)
    elif teachers is not None and "num_teachers" not in fields:
        raise checks.error("method", name, "cannot be combined with teachers, because it trains none", "Omit teachers.")
    elif teachers is not None and OmegaConf.is_interpolation(cfg, "num_teachers"):
        cfg, store = cfg.copy(), TeacherStore(run_folders.check_root(values["paths"]["root"]))
        cfg.num_teachers = store.load_manifest(teachers)["num_teachers"]
    guide_student = instantiate_component(cfg, "guide_student", StudentAlgorithm | None)
    allow_uninformative = values["privacy"]["allow_uninformative_labels"]
    components: dict[str, Any] = {
        "num_queries": values["num_queries"],
        "num_queries_is_default": OmegaConf.is_interpolation(cfg, "num_queries"),
        "allow_uninformative_labels": checks.boolean("privacy.allow_uninformative_labels", allow_uninformative),
        # With guide_student=same the published student guides the rounds, and continues from there.
        "guide_student": (None if student is None else student.guide) if guide_student is None else guide_student,
        "releases_guide": guide_student is None,
        "features": features,
        "class_counts": instantiate_component(cfg, "first_answers", ClassCounts | None),
    }
    if components["class_counts"] is not None and "class_counts" not in fields:
        raise checks.error("first_answers", "class_counts", f"cannot be combined with method={name}", "Omit it.")
    for key, kind in {"mechanism": Mechanism, "query": QueryStrategy, "teacher": TeacherRecipe}.items():
        if key in fields:
            components[key] = instantiate_component(cfg, key, kind)
    components = {key: value for key, value in components.items() if key in fields}
    return instantiate_component(cfg, "method", PrivateMethod, **components)


def _list_method_fields(cfg: DictConfig) -> set[str]:
    try:
        return {field.name for field in dataclasses.fields(hydra.utils.get_class(cfg.method["_target_"]))}
    except Exception:  # an error of the target is raised later, when the method is instantiated
        return set()


def instantiate_component(cfg: DictConfig, key: str, kind: Any, **components: Any) -> Any:
    """Instantiate the component of one group by its ``_target_``.

    Args:
        cfg: Configuration.
        key: Name of the group.
        kind: Required type. If the type includes None, a group without ``_target_`` gives None.
        **components: Arguments in addition to the keys of the group.

    Raises:
        ValueError: The target does not exist, refuses its arguments, or returns an object of another type. The message
            starts with the key as users write it.
    """
    option = "student@guide_student" if key == "guide_student" else key
    node, fix = cfg[key], f"Set {option}=<name> to select a component. python train.py --help lists the names."
    if not OmegaConf.is_dict(node) or "_target_" not in node:
        if OmegaConf.is_dict(node) and isinstance(None, kind):
            return None
        plain_value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        raise checks.error(key, plain_value, "must be a group with a _target_", fix)
    target_key, target = f"{key}._target_", node["_target_"]
    try:
        # Components are arguments of a partial, because OmegaConf would convert dataclasses to configurations.
        instance = hydra.utils.instantiate(node, _convert_="all", _partial_=True)(**components)
    except (InstantiationException, ValueError, TypeError) as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        text = " ".join(str(cause or error).split())
        if isinstance(cause, ValueError):
            raise ValueError(checks.prefix_error_key(key, cause)) from error
        if isinstance(cause, TypeError):
            keys = ", ".join(name for name in map(str, node) if name != "_target_")
            raise ValueError(f"{key}: {text}. Its keys are {keys}.") from error
        if cause is None or isinstance(cause, ImportError):
            raise checks.error(target_key, target, text, fix) from error
        raise ValueError(f"{key}: {type(cause).__name__}: {text}") from error
    if not isinstance(instance, kind):
        problem = f"returns a {type(instance).__name__}, which is not allowed for {key}"
        raise checks.error(target_key, target, problem, fix)
    return instance
