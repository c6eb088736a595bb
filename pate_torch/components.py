"""Components from which a run is configured: ``mechanism=laplace`` selects ``COMPONENTS["mechanism"]["laplace"]``.

Each component is a mapping with the content of a Hydra configuration file: ``_target_`` is the path of a dataclass, and
the other keys are fields of this dataclass, whose docstring explains them. ``get_component`` adds the fields that the
mapping leaves out, so that each default is written in the dataclass only. Data sets, experiments and a user's
components are YAML files.

The paths of classes are strings, because importing all classes takes seconds.
"""

from __future__ import annotations

import copy
import dataclasses
import pkgutil
from collections.abc import Mapping
from typing import Any, Final

Component = dict[str, Any]


def _target(path: str, **values: Any) -> Component:
    return {"_target_": f"pate_torch.{path}", **values}


_NETWORK: Final = {
    "network": "${recommended.student_network}",
    "network_options": "${recommended.student_options}",
    "augment": "${recommended.augment}",
    "precision": "${recommended.precision}",
}
_STUDENT: Final = {**_NETWORK, "steps": "${recommended.student_steps}"}
_SELECTION_CANDIDATES: Final = [{f"/student@candidates.{name}": name} for name in ("supervised", "fixmatch", "vat")]
_FIRST = {"batch_size": 64, "unlabeled_batch": 160, "propagation": 0.0, "alignment": "labels", "label_noise": 0.01}
_LATER = {"steps": "${recommended.student_steps}", "batch_size": 224, "features": "${features}", "label_noise": 0.005}
_HEADS = {"network": "logistic", "steps": 150, "batch_size": 32, "learning_rate": 1e-2, "label_smoothing": 0.0}
_RIDGE = {"network": "logistic", "optimizer": "ridge", "steps": 1, "weight_decay": 0.1}
_TEACHER: Final = _target(
    "teachers.recipe.TeacherRecipe",
    network="${recommended.network}",
    steps="${recommended.steps}",
    batch_size="${recommended.batch_size}",
    learning_rate="${recommended.learning_rate}",
    augment="${recommended.augment}",
)
_NONE: Final = {"none": {"name": "none"}}
_MECHANISM: Final = "override /mechanism@_global_.mechanism"

COMPONENTS: Final[Mapping[str, Mapping[str, Component]]] = {
    "executor": {
        "processes": _target("core.executors.Workers"),
        "dask": _target("core.executors.Dask"),
        "submitit": _target("core.executors.Submitit"),
    },
    "features": {
        "contrastive": _target(
            "features.contrastive.ContrastiveFeatures", **_NETWORK, steps="${recommended.features_steps}"
        ),
        "encoder": _target("features.encoder.Encoder"),
        "fourier": _target("features.fourier.FourierFeatures"),
    },
    "first_answers": {
        **_NONE,
        "class_counts": _target("mechanisms.class_counts.ClassCounts", adjacency="${partition.name}", sigma=20.0),
    },
    "mechanism": {
        "confident": _target("mechanisms.confident.ConfidentGNMax"),
        "exponential": _target("mechanisms.exponential.ExponentialMechanism"),
        "gaussian": _target("mechanisms.gaussian.GNMax"),
        "gradient_descent": _target("mechanisms.gradient_descent.GradientDescent"),
        "histogram": _target("mechanisms.histogram.Histogram"),
        "interactive": _target("mechanisms.confident.InteractiveGNMax", student_confidence=0.9),
        "laplace": _target("mechanisms.laplace.LNMax"),
        "single_stable": _target("mechanisms.sparse_vector.DistanceToInstability", epsilon=0.1, delta=1e-9),
        "soft_sparse_vector": _target(
            "mechanisms.sparse_vector.SoftSparseVector", epsilon=1.0, max_failures=20, bins=10
        ),
        "sparse_vector": _target("mechanisms.sparse_vector.SparseVector", epsilon=1.0, max_failures=20),
        "svt": {"defaults": ["sparse_vector"]},
    },
    "membership": {**_NONE, "standard": _target("release.membership.MembershipTest")},
    "method": {
        "dpsgd": _target("methods.dpsgd.DPSGD"),
        "gradients": _target("methods.gradients.GradientMethod", defaults=[{_MECHANISM: "gradient_descent"}]),
        "reverse_knn": _target("methods.reverse_knn.ReverseKnn", defaults=[{_MECHANISM: "histogram"}]),
        "teachers": _target("methods.teacher_votes.TeacherVotes"),
        "teachers_transductive": _target("methods.transductive.TransductiveTeacherVotes"),
    },
    "partition": {
        "add_remove": _target("privacy.partition.AddRemove"),
        "replace_one": _target("privacy.partition.ReplaceOne"),
    },
    "query": {
        "disagreement": _target("queries.disagreement.Disagreement"),
        "margin": _target("queries.base.Margin"),
        "medoids": _target("queries.clusters.Medoids"),
        "passive": _target("queries.base.Random", name="passive", shuffle=False),
        "prototypes": _target("queries.clusters.Prototypes"),
        "random": _target("queries.base.Random"),
    },
    "selection": {
        **_NONE,
        "exponential": _target("students.selection.Selection", defaults=[*_SELECTION_CANDIDATES, "_self_"]),
    },
    "student": {
        "count_regression": _target("students.linear.CountRegression", features="${features}"),
        "fixmatch": _target(
            "students.semi_supervised.FixMatch",
            **_STUDENT,
            features="${features}",
            batch_size="${recommended.student_batch}",
            unlabeled_batch="${recommended.unlabeled_batch}",
        ),
        # Several FixMatch students with separate features and random streams, whose predictions are pooled.
        "fixmatch_ensemble": _target(
            "students.self_training.PooledStudent",
            defaults=[{"/student@member": "fixmatch"}, "_self_"],
            name="fixmatch_ensemble",
        ),
        "label_spreading": _target("students.semi_supervised.LabelSpreading", features="${features}"),
        "logistic": _target("students.linear.Logistic"),
        "none": {"name": "none"},
        "released_model": _target("students.linear.ReleasedModel", features="${features}"),
        "same": {"name": "same"},  # for guide_student: the published student itself guides the rounds
        # The first student learns from labels that were propagated before, and that show how frequent each class is.
        "self_training": _target(
            "students.self_training.SelfTraining",
            features="${features}",
            defaults=[{"/student@first_student": "fixmatch"}, {"/student@later_students": "supervised"}, "_self_"],
            first_student=_FIRST,
            later_students=_LATER,
        ),
        # The supervised student has few steps, because it also guides rounds of queries.
        "supervised": _target("students.training.Supervised", **_NETWORK, steps=400),
        "vat": _target("students.semi_supervised.Vat", **_STUDENT),
    },
    "teacher": {
        **{network: {**_TEACHER, "network": network} for network in ("convnet", "lean_cnn", "mlp", "resnet")},
        "logistic": _target("teachers.recipe.TeacherRecipe", network="logistic"),
        # Linear heads on frozen features that were learned from public points, for shards of about sixty records.
        "public_start": {
            "defaults": ["standard", {"/features@start.features": "contrastive"}, "_self_"],
            **_HEADS,
            "start": _target("teachers.recipe.PublicStart"),
        },
        # Ridge regressions on random Fourier features, for shards of about twelve records.
        "ridge": {
            "defaults": ["standard", {"/features@start.features": "fourier"}, "_self_"],
            **_RIDGE,
            "start": _target("teachers.recipe.PublicStart", features={"cosine_variance": 1.0}),
        },
        "standard": _TEACHER,
    },
}
"""Mapping of each component, by group and name."""

_FROM_RUN: Final = {
    "mechanism": {
        "sigma": "${recommended.sigma}",
        "screen_sigma": "${recommended.screen_sigma}",
        "threshold": "${recommended.threshold}",
        "counts": "${oc.select:recommended.counts,false}",
        "delta": "${privacy.delta}",
        "noise": "${noise}",
        "adjacency": "${adjacency_of:${partition}}",
    },
    "method": {"num_teachers": "${num_teachers}", "teachers_id": "${teachers}"},
}
"""Interpolations that replace the default of a field, by group and field."""
_NOT_IN_METHOD: Final = {"teacher", "alias", "noise_multiplier"}
"""Fields of a method, besides those of ``LabelingMethod``, that another group or only Python code sets."""


def get_component(group: str, name: str) -> Component:
    """Return the configuration of one component with all its fields. An alias returns the component that it names."""
    values = copy.deepcopy(COMPONENTS[group][name])
    if set(values) == {"defaults"}:
        return get_component(group, values["defaults"][0])
    if "_target_" not in values:
        return values
    omitted, from_run = set[str](), _FROM_RUN.get(group, {})
    if group == "method":
        from pate_torch.methods.labeling import LabelingMethod

        omitted |= _NOT_IN_METHOD | {field.name for field in dataclasses.fields(LabelingMethod)} - {"name"}
    for field in dataclasses.fields(pkgutil.resolve_name(values["_target_"])):
        if field.name in omitted or field.name.startswith("_"):
            continue
        if field.name in values:
            values[field.name] = values.pop(field.name)  # moves the key, so that keys have the order of the fields
        elif field.name in from_run:
            values[field.name] = from_run[field.name]
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return values
