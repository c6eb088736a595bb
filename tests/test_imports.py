"""The import table: which module may know which. A student that cannot import votes cannot see them."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "pate_torch"
HYDRA_KNOWERS = {"cli.train", "cli.hydra_config", "audit.command", "planning.command", "label.command", "learn.command"}

# For each part: the pate_torch modules (prefixes) it may import, and outside packages it must not.
ALLOWED = {
    "types": {"core.checks", "accounting.events", "data.schema"},  # a schema is public, as the spec is
    "sensitive": {"types", "core.checks", "features.whitening"},
    "protocols": {"types", "sensitive", "core.checks", "accounting.events", "accounting.outcomes"},
    "core": {"core", "protocols"},
    "noise": {"noise", "core.checks", "core.files", "types", "sensitive", "accounting.events"},
    "budget": {"types", "sensitive", "core.checks", "noise", "protocols", "accounting.events", "ledger"},
    "networks": {"networks", "core"},
    "features": {"features", "types", "core", "protocols", "networks"},
    "accounting": {"accounting", "core.checks"},
    "mechanisms": {
        *("mechanisms", "types", "sensitive", "core", "noise", "protocols"),
        *("accounting.events", "accounting.outcomes", "accounting.calibration"),
    },
    "teachers": {"teachers", "types", "sensitive", "core", "protocols", "networks", "features", "data"},
    "methods": {
        *(
            "methods",
            "types",
            "sensitive",
            "core",
            "protocols",
            "networks",
            "features",
            "data.units",
            "data.partition",
            "ledger",
        ),
        *("teachers", "config", "context"),  # the last two for their types alone
    },
    "students": {"students", "types", "core", "protocols", "networks", "features"},
    "queries": {"queries", "types", "core", "protocols", "features"},
    "data": {"data", "types", "core", "protocols", "features.augmentation"},
    "ledger": {"ledger", "accounting", "core.checks", "core.run_folders"},
    "aggregation": {"types", "sensitive", "core", "protocols", "budget"},
    "label.journal": {"types", "core"},
    "labeler": {
        *(
            "types",
            "sensitive",
            "core",
            "protocols",
            "accounting.events",
            "budget",
            "planning.feasibility",
            "label.journal",
        ),
        *("aggregation", "pac"),
        *("students.store", "teachers.ensemble"),
    },
    "reporting": {  # what lays out a release knows the report of it, not the owner's part
        *("types", "core", "accounting.formatting", "methods.description"),
        *(
            "reporting.report",
            "reporting.statement",
            "reporting.intervals",
            "reporting.figures",
            "reporting.renderer",
            "reporting.curves",
        ),
    },
    "verify": {"verify", "core.checks", "core.run_folders"},  # it shares nothing with what it checks
    "pac": {"pac", "types", "sensitive", "core", "noise", "budget", "ledger", "protocols", "accounting", "mechanisms"},
}
EXCEPTIONS = {
    "students.selection": {
        "budget",
        "ledger",
        "data.units",
        "pac.exponential",
        "accounting.events",
    },  # by private records
    "reporting.builder": {"protocols", "accounting", "ledger", "teachers.store", "release_store"},
    "reporting.private_writer": {"sensitive", "release.membership"},
    "reporting.private_metrics": {
        *(
            "sensitive",
            "reporting.builder",
            "reporting.private_writer",
            "protocols",
            "accounting",
            "release.membership",
        ),
        *("teachers", "data.partition", "context"),
    },
    "methods.dpsgd": {  # it trains, charges and writes a release of its own
        *("accounting", "noise.source", "release_store", "reporting", "students.store", "unfinished_calls"),
    },
    "release.membership": {"types", "core", "data.units", "reporting.intervals"},
    "cli.main": set(),  # the standard library alone until a command is chosen
    "cli.list_runs": {"accounting.formatting", "core.run_folders"},
}
"""What single modules may import beside what their part may; of a part that is not listed, what they may at all."""
NEVER = {part: {"torch", "hydra", "omegaconf"} for part in ("accounting", "ledger", "verify")}
# Released reports are built from released values: votes, shards and private data are not even named there.
SIGHTED = {"reporting.private_writer", "reporting.private_metrics", "students.selection"}
PRIVATE_NAMES = {"Votes", "CellHistogram", "GradientSums", "Shards", "PrivateRecords"}


def modules() -> list[tuple[str, Path]]:
    return [(".".join(f.relative_to(PACKAGE).with_suffix("").parts), f) for f in sorted(PACKAGE.rglob("*.py"))]


def imports(file: Path) -> list[tuple[str, str]]:
    """(module, name) pairs, wherever in the file they stand."""
    pairs = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            pairs += [(node.module or "", alias.name) for alias in node.names]
    return pairs


def violations(name: str, pairs: list[tuple[str, str]]) -> list[str]:
    part = name.split(".")[0]
    found = []
    for module, imported in pairs:
        top = module.split(".")[0]
        if top in {"hydra", "omegaconf"} and name not in HYDRA_KNOWERS:
            found.append(f"{name} imports {module}")
        if top in NEVER.get(part, set()):
            found.append(f"{name} imports {module}")
        blind = part in {"students", "queries", "reporting"} and name not in SIGHTED
        if blind and imported in PRIVATE_NAMES:
            found.append(f"{name} imports {imported}")
        if top == "pate_torch" and (part in ALLOWED or name in EXCEPTIONS):
            inside = ".".join([*module.split(".")[1:], imported]).strip(".")
            allowed = ALLOWED.get(part, set()) | EXCEPTIONS.get(name, set())
            if not any(inside == a or inside.startswith(a + ".") for a in allowed):
                found.append(f"{name} imports {module}.{imported}")
    return found


@pytest.mark.parametrize("name,file", modules(), ids=[name for name, _ in modules()])
def test_module_keeps_the_import_table(name, file):
    assert violations(name, imports(file)) == []


def test_the_table_would_catch_a_breach():
    assert violations("students.x", [("pate_torch.teachers.voting", "count")])
    assert violations("accounting.rdp", [("torch", "")])
    assert violations("aggregation", [("hydra.utils", "instantiate")])
    assert violations("reporting.report", [("pate_torch.privacy.sensitive", "Votes")])
    assert violations("reporting.renderer", [("pate_torch.release.private_metrics", "OwnerSummary")])
    assert violations("queries.uncertainty", [("pate_torch.privacy.sensitive", "Votes")])
    assert violations("queries.uncertainty", [("pate_torch.privacy.records", "DataSpec")]) == []


REQUIREMENT = {"hydra": "hydra-core", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Modules by another name than their requirement."""


def test_what_is_imported_is_required_and_nothing_else():
    """An empty environment lacks what only the development environment has, and loads nothing for no use."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=\[ ]", text)[0].replace("-", "_") for text in facts["dependencies"]}
    found = {module.split(".")[0] for _, file in modules() for module, _ in imports(file)}
    outside = {name for name in found if name not in sys.stdlib_module_names and name != "pate_torch"}
    named = {REQUIREMENT.get(name, name).replace("-", "_") for name in outside}
    assert named == required, named ^ required


def test_no_test_imports_another():
    """What several tests need lies in a module of its own, beside them."""
    pairs = [(file.name, pair) for file in (ROOT / "tests").rglob("*.py") for pair in imports(file)]
    assert len(pairs) > 1000
    assert [found for found in pairs if any(part.startswith("test_") for part in ".".join(found[1]).split("."))] == []


def test_a_test_lies_where_what_it_tests_lies():
    """Folders as in the package, but for what runs all of it, and for what lies beside the package."""
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    missing = {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()}
    assert missing == {"privacy", "end_to_end", "gpu", "benchmarks", "tools"}


def test_slow_cases_are_cases_of_tests_that_there_are():
    """A case that is renamed would run by default again, unnoticed; and none is listed twice or out of order."""
    listed = (ROOT / "tests/slow.txt").read_text().splitlines()
    assert listed == sorted(set(listed))
    for case in listed:
        file, name = case.split("[")[0].split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), case
