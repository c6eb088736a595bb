"""Every component that the configuration names can be made, states its fields, and explains each of them."""

import dataclasses
import re

import pytest
from hydra.utils import get_class

from pate_torch.components import COMPONENTS, get_component

NAMED = [(group, name) for group, components in COMPONENTS.items() for name in components]
FILLED = {"features", "member", "candidates", "first_student", "later_students", "start"}
"""Fields that hold components, or what is changed about them."""


@pytest.mark.parametrize(("group", "name"), NAMED)
def test_a_component_states_known_fields_and_its_class_explains_them(group, name):
    component = get_component(group, name)
    if "_target_" not in component:
        assert component == {"name": name} or component["defaults"][0] == "standard"
        return
    kind = get_class(component["_target_"])
    assert component.get("name", name) == {"svt": "sparse_vector"}.get(name, name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    keys = component.keys() - {"_target_", "defaults"}
    assert keys <= fields.keys()
    text = "\n".join(parent.__doc__ or "" for parent in kind.__mro__)
    assert [key for key in keys - FILLED - {"name", "noise"} if not re.search(rf"^ +{key}: ", text, re.MULTILINE)] == []
    if group != "method":  # which has groups and top-level keys in its other fields
        missing = fields.keys() - keys - FILLED
        assert {key for key in missing if not key.startswith("_")} == set()


def test_an_alias_is_what_it_stands_for():
    assert get_component("mechanism", "svt") == get_component("mechanism", "sparse_vector")


def test_a_copy_may_be_changed():
    get_component("student", "fixmatch")["steps"] = 1
    assert get_component("student", "fixmatch")["steps"] == "${recommended.student_steps}"
