"""The measures of size find in a tiny package what was put there, and know every module of the real one."""

from tests import ROOT
from tools.size import (
    FOREIGN_ATTRIBUTES,
    assign_modules,
    find_circular_modules,
    find_duck_attributes,
    format_table,
    measure_package,
    read_modules,
)

FIRST = '''"""A module."""

from tiny.second import double


def read(value):
    """Read a duck attribute, and one of another library."""
    return getattr(value, "steps", 1), getattr(value, "dtype", None), getattr(value, "sure")
'''
SECOND = '''from tiny.first import read

LIMIT = 2
"""A string below an attribute is no code."""


def double(value):
    from tiny import third

    return third, read(value)  # a comment beside code
'''


def write_package(tmp_path):
    package = tmp_path / "tiny"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text(FIRST)
    (package / "second.py").write_text(SECOND)
    # The last line is 61 lines below the `def` of the long function, and 60 below that of the other one.
    functions = (f"def {name}():\n" + "    name = 1\n" * lines for name, lines in (("long", 61), ("fits", 60)))
    (package / "third.py").write_text("\n\n".join(functions))
    return package


def test_measure_package_finds_what_was_put_there(tmp_path):
    figures, details = measure_package(read_modules(write_package(tmp_path)))
    assert figures == {
        "package_lines": 8 + 10 + 125,
        "package_modules": 4,
        "package_code_lines": 3 + 5 + 123,
        "duck_attributes": 1,
        "duck_attributes_with_foreign": 2,
        "long_functions": 1,
    }
    assert details["duck_attributes"]["steps"] == ["first.py:8 of value"]
    assert details["long_functions"] == ["third.py:1 long (61 lines)"]


def test_an_import_circle_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(write_package(tmp_path).parent))
    assert find_circular_modules("tiny") == ["tiny.first", "tiny.second"]


def test_table_leaves_out_what_was_not_measured():
    assert format_table({"yaml_files": 3}).splitlines()[2:] == ["| YAML files in conf/ | 3 |"]


def test_a_missing_and_an_unknown_module_are_errors(tmp_path):
    faults = assign_modules(read_modules(write_package(tmp_path)))[1]
    assert "first.py is a module that no list names" in faults
    assert "session.py is listed, and no module fits it" in faults


def test_the_package_has_no_module_outside_the_lists_no_duck_attribute_and_no_circle():
    """A new module must not leave the kernel unnoticed; an optional attribute is a member of the base class."""
    modules = read_modules(ROOT / "pate_torch")
    assert assign_modules(modules)[1] == []
    attributes = find_duck_attributes(modules)
    assert {name: places for name, places in attributes.items() if name not in FOREIGN_ATTRIBUTES} == {}
    assert find_circular_modules("pate_torch") == []
