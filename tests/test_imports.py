"""Which module may know which: the import contracts of pyproject.toml, and who may name a private type."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from importlinter.cli import lint_imports

from tests import ROOT

PACKAGE = ROOT / "pate_torch"
# Released reports are built from released values: votes, shards and private data are not even named there.
SIGHTED = {"release.membership", "students.private_test", "students.selection"}
PRIVATE_NAMES = {"Votes", "CellHistogram", "GradientSums", "Shards", "PrivateRecords"}
BLIND = {"students", "queries", "release"}


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


def find_private_names(name: str, pairs: list[tuple[str, str]]) -> list[str]:
    """The private types that a module imports which may see released values alone."""
    if name.split(".")[0] not in BLIND or name in SIGHTED:
        return []
    return [imported for _, imported in pairs if imported in PRIVATE_NAMES]


def test_the_package_keeps_the_import_contracts(monkeypatch):
    """What is printed names the contract that is broken."""
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0


def test_what_may_see_released_values_alone_names_no_private_type():
    found = {name: find_private_names(name, imports(file)) for name, file in modules()}
    assert {name: names for name, names in found.items() if names} == {}


def test_a_private_type_would_be_found():
    assert find_private_names("release.report", [("pate_torch.privacy.sensitive", "Votes")]) == ["Votes"]
    assert find_private_names("queries.base", [("pate_torch.privacy.sensitive", "Votes")]) == ["Votes"]
    assert find_private_names("queries.base", [("pate_torch.privacy.records", "DataSpec")]) == []


REQUIREMENT = {"hydra": "hydra-core", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Modules by another name than their requirement."""


def test_what_is_imported_is_required_and_nothing_else():
    """An empty environment lacks what only the development environment has, and loads nothing for no use."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=\[ ]", text)[0].replace("-", "_") for text in facts["dependencies"]}
    # The extras "postgres" and "sites" serve the others.
    always = [file for name, file in modules() if name != "privacy.postgres" and not name.startswith("sites.")]
    verifier = [
        file for file in (ROOT / "verify" / "pate_verify").glob("*.py") if file.stem not in ("losses", "ledger")
    ]
    found = {module.split(".")[0] for file in (*always, *verifier) for module, _ in imports(file)}
    found |= {"tensorboard"}  # which torch.utils.tensorboard loads
    outside = {name for name in found if name not in sys.stdlib_module_names} - {"pate_torch", "pate_verify"}
    named = {REQUIREMENT.get(name, name).replace("-", "_") for name in outside}
    assert named == required, named ^ required


def test_no_test_imports_another():
    """What several tests need lies in a module of its own, beside them."""
    statement = re.compile(r"^ *(?:from|import) [^\n(]*(?:\([^)]*\))?", re.MULTILINE)  # a syntax tree takes seconds
    texts = {file.stem: file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    found = [(name, text) for name, content in texts.items() for text in statement.findall(content)]
    assert len(found) > 1000
    # A program that a test starts may import the module of this test.
    assert [pair for pair in found if re.search(r"\btest_", pair[1]) and pair[0] not in pair[1]] == []


def test_a_test_lies_where_what_it_tests_lies():
    """Folders as in the package, but for what runs all of it, and for what lies beside the package."""
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    missing = {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()}
    assert missing == {"end_to_end", "gpu", "benchmarks", "tools", "newcomers", "verify"}
