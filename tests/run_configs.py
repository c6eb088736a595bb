"""RunConfig from flat keywords: the account's terms, the method's own slots and the teachers' find their places."""

import dataclasses
import functools

from pate_torch.config import PrivacyConfig, RunConfig
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.voting import VotesFile
from pate_torch.teachers.recipe import TeacherRecipe

PRIVACY = {field.name for field in dataclasses.fields(PrivacyConfig)}
LABELING = {field.name for field in dataclasses.fields(LabelingMethod)} - {"name", "releases_guide"}
TEACHERS = {"num_teachers", "teacher", "teachers_id", "alias"}


def run_config(**given) -> RunConfig:
    """``num_teachers`` makes teachers, where no ``method`` is given; ``method`` may wait for its mechanism."""
    terms = {key: given.pop(key) for key in PRIVACY & given.keys()}
    slots = {key: given.pop(key) for key in LABELING & given.keys()}
    teachers = {key: given.pop(key) for key in TEACHERS & given.keys()}
    if given.pop("baseline", True):
        given["baseline"] = teachers.get("teacher", TeacherRecipe())
    method = given.pop("method", functools.partial(TeacherVotes, **teachers))
    if not callable(method):  # it is whole: ``teacher`` is that of the baseline alone
        teachers = {
            key: value for key, value in teachers.items() if key in {f.name for f in dataclasses.fields(method)}
        }
    given["method"] = _completed(method, {**teachers, **slots}, given.get("student"))
    return RunConfig(**given, privacy=PrivacyConfig(**terms))


def changed(config: RunConfig, **changes) -> RunConfig:
    """``teachers``: the id of an ensemble to use again; ``votes``: a file of votes that takes their place."""
    terms = {key: changes.pop(key) for key in PRIVACY & changes.keys()}
    if "teachers" in changes:
        changes["teachers_id"] = changes.pop("teachers")
    slots = {key: changes.pop(key) for key in LABELING & changes.keys()}
    teachers = {key: changes.pop(key) for key in TEACHERS & changes.keys()}
    method = changes.pop("method", config.method)
    if "votes" in changes:
        method = functools.partial(VotesFile, path=changes.pop("votes"))
        changes.setdefault("baseline", False)
    if callable(method):
        former = {key: getattr(config.method, key) for key in LABELING if hasattr(config.method, key)}
        if getattr(config.method, "releases_guide", False):
            former.pop("guide_student")
        if method is TeacherVotes or getattr(method, "func", None) is TeacherVotes:
            teachers = {"teacher": getattr(config.method, "teacher", TeacherRecipe()), **teachers}
        if isinstance(method, functools.partial):
            former = {key: value for key, value in former.items() if key not in method.keywords}
        method = _completed(
            functools.partial(method, **teachers), {**former, **slots}, changes.get("student", config.student)
        )
    else:
        method = dataclasses.replace(method, **slots, **teachers)
        if "guide_student" in slots or getattr(method, "releases_guide", False):
            guide = {"guide_student": slots["guide_student"]} if slots.get("guide_student") else {}
            given = {key: getattr(method, key) for key in LABELING} | {"guide_student": None} | guide
            rest = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
            rest = {key: value for key, value in rest.items() if key not in {*given, "name", "releases_guide"}}
            method = _completed(functools.partial(type(method), **rest), given, changes.get("student", config.student))
    if "baseline" in changes:
        changes["baseline"] = getattr(method, "teacher", TeacherRecipe()) if changes["baseline"] else None
    elif "teacher" in teachers and config.baseline is not None:
        changes["baseline"] = teachers["teacher"]
    return dataclasses.replace(config, method=method, **changes, privacy=dataclasses.replace(config.privacy, **terms))


def _completed(method, slots, student):
    """The method with its slots; without a guide of its own, the student that is published guides."""
    if not callable(method):
        return dataclasses.replace(method, **slots)
    if slots.get("guide_student") is None:
        slots = {**slots, "guide_student": None if student is None else student.guide, "releases_guide": True}
    bound = method.keywords if isinstance(method, functools.partial) else {}
    kind = method.func if isinstance(method, functools.partial) else method
    fields = {field.name for field in dataclasses.fields(kind)}
    return method(**{key: value for key, value in slots.items() if key in fields - (TEACHERS & bound.keys())})
