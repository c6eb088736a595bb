"""The components that a run is configured from: ``mechanism=laplace`` names ``COMPONENTS["mechanism"]["laplace"]``.

Each component is a mapping from keys to values, as a YAML file of the group would be: ``_target_`` names a dataclass,
and the other keys are the fields of that dataclass, whose docstring explains them. A default stands in the dataclass
alone, unless the configuration of the run decides the value, as in ``sigma: ${recommended.sigma}``. Data sets and
experiments are YAML files in conf/, and a user's own components are YAML files, too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from pate_torch.features.contrastive import ContrastiveFeatures
from pate_torch.features.encoder import Encoder
from pate_torch.features.fourier import FourierFeatures
from pate_torch.mechanisms.confident import ConfidentGNMax, InteractiveGNMax
from pate_torch.mechanisms.exponential import ExponentialMechanism
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.mechanisms.histogram import Histogram
from pate_torch.mechanisms.laplace import LNMax
from pate_torch.mechanisms.private_epsilon import PrivateEpsilon
from pate_torch.mechanisms.soft_sparse_vector import SoftSparseVector
from pate_torch.mechanisms.sparse_vector import DistanceToInstability, SparseVector
from pate_torch.methods.dpsgd import DPSGD
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.reverse_knn import ReverseKnn
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.queries.clusters import Coreset, Medoids, Prototypes
from pate_torch.queries.disagreement import Disagreement
from pate_torch.queries.random import Margin, Random
from pate_torch.release.membership import MembershipTest
from pate_torch.students.linear import Logistic, ReleasedModel
from pate_torch.students.selection import Selection
from pate_torch.students.self_training import PooledStudent, SelfTraining
from pate_torch.students.semi_supervised import FixMatch, LabelSpreading, Vat
from pate_torch.students.training import Supervised
from pate_torch.teachers.recipe import PublicStart, TeacherRecipe

Component = dict[str, Any]

_FROM_OTHER_GROUPS: Final = {field.name for field in dataclasses.fields(LabelingMethod)} - {"name"} | {"teacher"}
"""Fields of a method whose values are components of other groups, or keys of the top level."""
_FOR_CALLERS: Final = {"alias", "noise_multiplier"}
"""Fields of a method that Python code alone sets."""


def configure(component: type, from_run: Mapping[str, str], **values: Any) -> Component:
    """The configuration of one component.

    Args:
        component: Dataclass of the component.
        from_run: Interpolations that take the place of a default, by the name of the field.
        **values: Values that take the place of either.
    """
    values = {"_target_": f"{component.__module__}.{component.__qualname__}", **values}
    for field in dataclasses.fields(component):
        if field.name in values or field.name.startswith("_"):
            continue
        if field.name in from_run:
            values[field.name] = from_run[field.name]
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return values


def _configure_mechanism(component: type, **values: Any) -> Component:
    from_run = {
        "sigma": "${recommended.sigma}",
        "screen_sigma": "${recommended.screen_sigma}",
        "threshold": "${recommended.threshold}",
        "counts": "${oc.select:recommended.counts,false}",
        "delta": "${privacy.delta}",
        "noise": "${noise}",
        "adjacency": "${adjacency_of:${partition}}",
    }
    return configure(component, from_run, **values)


def _configure_method(component: type, **values: Any) -> Component:
    from_run = {"num_teachers": "${num_teachers}", "teachers_id": "${teachers}"}
    method = configure(component, from_run, **values)
    return {key: value for key, value in method.items() if key not in _FROM_OTHER_GROUPS | _FOR_CALLERS}


_NETWORK: Final = {
    "network": "${recommended.student_network}",
    "network_options": "${recommended.student_options}",
    "augment": "${recommended.augment}",
    "precision": "${recommended.precision}",
}
_STUDENT: Final = {**_NETWORK, "steps": "${recommended.student_steps}"}
_FEATURE_STUDENT: Final = {**_STUDENT, "features": "${features}"}
_TEACHER: Final = {
    "network": "${recommended.network}",
    "steps": "${recommended.steps}",
    "batch_size": "${recommended.batch_size}",
    "augment": "${recommended.augment}",
}

_FEATURES: Final = {
    "contrastive": configure(ContrastiveFeatures, {**_NETWORK, "steps": "${recommended.features_steps}"}),
    "encoder": configure(Encoder, {}),
    "fourier": configure(FourierFeatures, {}),
}
_MECHANISMS: Final = {
    "confident": _configure_mechanism(ConfidentGNMax),
    "exponential": _configure_mechanism(ExponentialMechanism),
    "gaussian": _configure_mechanism(GNMax),
    "gradient_descent": _configure_mechanism(GradientDescent),
    "histogram": _configure_mechanism(Histogram),
    "interactive": _configure_mechanism(InteractiveGNMax, student_confidence=0.9),
    "laplace": _configure_mechanism(LNMax),
    "single_stable": _configure_mechanism(DistanceToInstability, epsilon=0.1, delta=1e-9),
    "soft_sparse_vector": _configure_mechanism(SoftSparseVector, epsilon=1.0, max_failures=20, bins=10),
    "sparse_vector": _configure_mechanism(SparseVector, epsilon=1.0, max_failures=20),
    "svt": {"defaults": ["sparse_vector"]},
}
_METHODS: Final = {
    "dpsgd": _configure_method(DPSGD),
    "gradients": _configure_method(
        GradientMethod, defaults=[{"override /mechanism@_global_.mechanism": "gradient_descent"}]
    ),
    "reverse_knn": _configure_method(ReverseKnn, defaults=[{"override /mechanism@_global_.mechanism": "histogram"}]),
    "teachers": _configure_method(TeacherVotes),
    "teachers_transductive": _configure_method(TransductiveTeacherVotes),
}
_QUERIES: Final = {
    "coreset": configure(Coreset, {}),
    "disagreement": configure(Disagreement, {}),
    "margin": configure(Margin, {}),
    "medoids": configure(Medoids, {}),
    "passive": configure(Random, {}, name="passive", shuffle=False),
    "prototypes": configure(Prototypes, {}),
    "random": configure(Random, {}),
}
_STUDENTS: Final = {
    "fixmatch": configure(
        FixMatch,
        {
            **_FEATURE_STUDENT,
            "batch_size": "${recommended.student_batch}",
            "unlabeled_batch": "${recommended.unlabeled_batch}",
        },
    ),
    # Several FixMatch students, each with features and random streams of its own, whose predictions are pooled.
    "fixmatch_ensemble": configure(
        PooledStudent, {}, defaults=[{"/student@member": "fixmatch"}, "_self_"], name="fixmatch_ensemble"
    ),
    "label_spreading": configure(LabelSpreading, _FEATURE_STUDENT),
    "logistic": configure(Logistic, {}),
    "none": {"name": "none"},
    "released_model": configure(ReleasedModel, {"features": "${features}"}),
    "same": {"name": "same"},  # as guide_student: the student that is published guides the rounds, too
    # The first student's labels are propagated already, and tell how common each class is.
    "self_training": configure(
        SelfTraining,
        {"features": "${features}"},
        defaults=[{"/student@first_student": "fixmatch"}, {"/student@later_students": "supervised"}, "_self_"],
        first_student={
            "batch_size": 64,
            "unlabeled_batch": 160,
            "propagation": 0.0,
            "alignment": "labels",
            "label_noise": 0.01,
        },
        later_students={
            "steps": "${recommended.student_steps}",
            "batch_size": 224,
            "features": "${features}",
            "label_noise": 0.005,
        },
    ),
    "supervised": configure(Supervised, _NETWORK, steps=400),  # it is quick: it also guides rounds of questions
    "vat": configure(Vat, _STUDENT),
}
_SELECTION_CANDIDATES: Final = [{f"/student@candidates.{name}": name} for name in ("supervised", "fixmatch", "vat")]
_TEACHERS: Final = {
    "convnet": configure(TeacherRecipe, _TEACHER, network="convnet"),
    "lean_cnn": configure(TeacherRecipe, _TEACHER, network="lean_cnn"),
    "logistic": configure(TeacherRecipe, _TEACHER, network="logistic", learning_rate=1e-2, augment=None),
    "mlp": configure(TeacherRecipe, _TEACHER, network="mlp"),
    # Linear heads over frozen features of the public points: they learn from a shard of some sixty records.
    "public_start": {
        "defaults": ["standard", {"/features@start.features": "contrastive"}, "_self_"],
        "network": "logistic",
        "steps": 150,
        "batch_size": 32,
        "learning_rate": 1e-2,
        "label_smoothing": 0.0,
        "start": configure(PublicStart, {}),
    },
    "resnet": configure(TeacherRecipe, _TEACHER, network="resnet"),
    "standard": configure(TeacherRecipe, _TEACHER),
}
_NONE: Final = {"none": {"name": "none"}}

COMPONENTS: Final[Mapping[str, Mapping[str, Component]]] = {
    "features": _FEATURES,
    "mechanism": _MECHANISMS,
    "membership": {**_NONE, "standard": configure(MembershipTest, {})},
    "method": _METHODS,
    "partition": {"add_remove": configure(AddRemove, {}), "replace_one": configure(ReplaceOne, {})},
    "private_epsilon": {**_NONE, "smooth": configure(PrivateEpsilon, {})},
    "query": _QUERIES,
    "selection": {**_NONE, "exponential": configure(Selection, {}, defaults=[*_SELECTION_CANDIDATES, "_self_"])},
    "student": _STUDENTS,
    "teacher": _TEACHERS,
}
"""The configuration of every component, by its group and its name."""


def get_component(group: str, name: str) -> Component:
    """A copy of one component's configuration, of the component that is meant where the name is an alias."""
    component = COMPONENTS[group][name]
    if set(component) == {"defaults"}:
        return get_component(group, component["defaults"][0])
    return copy.deepcopy(component)
