"""The import table: which module may know which. A student that cannot import votes cannot see them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "pate_torch"
HYDRA_KNOWERS = {"command", "compose", "audit", "plan", "label"}

# For each part: the pate_torch modules (prefixes) it may import, and outside packages it must not.
ALLOWED = {
    "types": {"checks", "accounting.events"},
    "checks": set(),
    "rng": {"checks"},
    "noise": {"checks", "discrete_noise", "types", "accounting.events"},
    "budget": {"types", "checks", "noise", "protocols", "accounting.events", "ledger"},
    "discrete_noise": {"checks"},
    "augment": {"checks", "rng"},
    "networks": {"checks", "rng"},
    "views": {"types", "checks", "augment"},
    "representation": {"types", "checks", "rng", "protocols", "networks", "augment", "views", "threads"},
    "protocols": {"types", "accounting.events", "accounting.outcomes"},
    "accounting": {"accounting", "checks"},
    "mechanisms": {
        "types",
        "checks",
        "rng",
        "noise",
        "accounting.events",
        "accounting.outcomes",
        "protocols",
        "leanings",
        "mechanisms",
    },
    "leanings": {"types", "checks", "threads"},
    "teachers": {
        "types",
        "checks",
        "locks",
        "rng",
        "protocols",
        "networks",
        "augment",
        "views",
        "representation",
        "diffusion",
        "graph",
        "data",
        "threads",
        "teachers",
    },
    "students": {
        "types",
        "checks",
        "rng",
        "protocols",
        "networks",
        "augment",
        "views",
        "representation",
        "graph",
        "threads",
        "students",
    },
    "queries": {"types", "checks", "rng", "protocols", "representation", "graph", "queries"},
    "diffusion": {"checks", "graph"},
    "graph": {"types", "checks", "rng"},
    "analysis": {
        *("types", "checks", "rng", "protocols", "networks", "accounting", "mechanisms", "analysis"),
        "teachers",  # learners are retrained by the engine
    },
    "data": {"types", "checks", "rng", "augment", "protocols", "data"},
    "ledger": {"accounting", "checks", "ledger_accounts", "ledger_chain", "ledger_command"},
    "ledger_accounts": {"accounting", "ledger_chain"},
    "ledger_chain": {"ledger_file"},
    "ledger_file": set(),
    "ledger_command": {"ledger", "ledger_review", "accounting.epsilon", "accounting.shown"},
    "ledger_review": {"ledger", "ledger_accounts", "accounting"},
    "membership": {"types", "checks", "rng", "data.units", "reporting.intervals"},
    "labelling": {"types", "checks", "protocols", "budget"},
    "locks": {"checks"},
    "journal": {"types", "checks", "locks"},
    "foreign_votes": {"types", "checks", "ledger", "teachers"},
    "chance": {"checks", "accounting.outcomes", "mechanisms", "protocols"},
    "labeler": {
        *("types", "chance", "checks", "protocols", "accounting.events", "budget", "journal", "labelling", "pac"),
        *("students.store", "teachers.ensemble"),
    },
    "cli": set(),
    "runs_command": {"accounting.shown"},
    "pac": {"types", "checks", "rng", "noise", "budget", "ledger", "protocols", "accounting", "mechanisms", "pac"},
}
TORCHLESS = (
    "accounting",
    "ledger",
    "ledger_accounts",
    "ledger_chain",
    "ledger_command",
    "ledger_file",
    "ledger_review",
)
NEVER = {part: {"torch", "hydra", "omegaconf"} for part in TORCHLESS}
# Released reports are built from released values: votes, shards and private data are not even named there.
PRIVATE_NAMES = {"Votes", "Ballots", "Leanings", "Shards", "PrivateData"}


def modules() -> list[tuple[str, Path]]:
    return [(".".join(f.relative_to(ROOT).with_suffix("").parts), f) for f in sorted(ROOT.rglob("*.py"))]


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
        if top in {"hydra", "omegaconf"} and part not in HYDRA_KNOWERS:
            found.append(f"{name} imports {module}")
        if top in NEVER.get(part, set()):
            found.append(f"{name} imports {module}")
        blind = part in {"students", "queries"} or (part == "reporting" and name != "reporting.private")
        if blind and imported in PRIVATE_NAMES:
            found.append(f"{name} imports {imported}")
        if top == "pate_torch" and part in ALLOWED:
            inside = ".".join([*module.split(".")[1:], imported]).strip(".")
            if not any(inside == a or inside.startswith(a + ".") for a in ALLOWED[part]):
                found.append(f"{name} imports {module}.{imported}")
    return found


@pytest.mark.parametrize("name,file", modules(), ids=[name for name, _ in modules()])
def test_module_keeps_the_import_table(name, file):
    assert violations(name, imports(file)) == []


def test_the_table_would_catch_a_breach():
    assert violations("students.x", [("pate_torch.teachers.voting", "count")])
    assert violations("accounting.rdp", [("torch", "")])
    assert violations("labelling", [("hydra.utils", "instantiate")])
    assert violations("reporting.released", [("pate_torch.types", "Votes")])
    assert violations("queries.margin", [("pate_torch.types", "Votes")])
    assert violations("queries.margin", [("pate_torch.types", "DataSpec")]) == []
