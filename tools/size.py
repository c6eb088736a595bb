"""Measures the size and the structure of this checkout and prints them as a Markdown table.

    python tools/size.py [--run] [--verbose]

- Lines are counted as the files stand; they are comparable only if `ruff format --check` passes, which is checked.
- Lines of code leave out comments, blank lines and strings that stand as statements (docstrings and their like).
- Functions and modules that `python train.py` executes: functions of the package, lambdas apart, that the main process
  enters in any of its threads, and the modules that hold them. Worker processes are not counted.
- A module in an import circle reaches itself by import statements, wherever they stand. An import of `a.b.c` counts for
  that module alone, not for the packages `a` and `a.b` above it.
- The layers of the import contract are those of pyproject.toml, which import-linter holds.
- A function is over 60 lines if its last line is more than 60 lines below its `def`: signature and docstring count.
- A duck attribute is a name that is read by `getattr(value, "name", default)`. Names that only objects of other
  libraries have (FOREIGN_ATTRIBUTES) are counted in the figure in brackets alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grimp

ROOT = Path(__file__).resolve().parents[1]
MAX_FUNCTION_LINES = 60

# Every module that computes a sensitivity, a unit's name or shard, a record's contribution, a cost or a claim, or
# that decides whether a release is charged. What is checked when it runs is not trusted: readers of data (the gate
# for records converts row by row), the training of teachers and networks (one teacher is trained again alone),
# encoders and learnt features (a function of public points, tried alone and in company). A name that ends in a slash
# is a folder with all that lies in it; where two names fit a module, the longer one counts. A name that fits no
# module, and a module that no name fits, is an error: list here what is moved or new.
KERNEL = (
    *("accounting/", "privacy/", "mechanisms/"),  # costs, records, values, noise, ledger
    *("core/files.py", "core/rng.py", "core/texts.py"),  # what ledger and unit names rest on
    *("methods/", "features/batch_invariant.py", "teachers/voting.py", "teachers/independence.py"),  # contributions
    "synthesis/evolution.py",  # the cell of a unit
    "teachers/store.py",  # which teachers and which account these records have
    "data/labels_only.py",  # which side of the data a record is on, beside privacy/unit_ids.py
    *("opening.py", "session.py", "config.py", "students/selection.py"),  # what is charged
    *("api/labeler.py", "api/journal.py"),
    *("release/store.py", "release/builder.py"),  # what is claimed, and used again
)
SITES = ("sites/",)  # masks, shares of noise and their costs; the joiner for the cost that it states
HYPOTHESES = ("hypotheses/", "cli/learn.py")  # private learning of hypothesis classes has guarantees of its own
OUTSIDE = (
    *("__init__.py", "__main__.py", "audit.py", "components.py", "pipeline.py", "owner_metrics.py"),
    "methods/feasibility.py",
    *("api/", "cli/", "core/", "data/", "features/", "networks.py", "planning/", "queries/", "release/"),
    *("students/", "synthesis/", "teachers/"),
    *("sites/flower.py", "sites/options.py"),  # a transport, and options of commands
    "sites/training.py",  # what the joiner plans and learns, against whom the sites protect their records
    "mechanisms/neighboring_values.py",  # audits test mechanisms with these values; no cost, noise or claim does
)

FOREIGN_ATTRIBUTES = {
    *("__name__", "columns", "dtype", "name", "ndim", "shape"),  # Python, NumPy, pandas
    *("full_key", "last_hidden_state", "n_neighbors", "sqlite_errorcode"),  # OmegaConf, encoders, scikit-learn, SQLite
}
FOLDERS = ("benchmarks", "tools", "examples", "notebooks")

# The rows of the table. A row is left out if one of its figures was not measured.
ROWS = (
    ("lines / modules of the package", "{package_lines:,} / {package_modules:,}"),
    ("lines of code of the package", "{package_code_lines:,}"),
    ("lines of its templates and schemas", "{template_lines:,}"),
    (f"lines of {' / '.join(FOLDERS)}", " / ".join(f"{{{folder}_lines:,}}" for folder in FOLDERS)),
    ("lines of code that must be right for the guarantee", "{kernel_code_lines:,}"),
    ("the same for several sites; for hypothesis classes", "{sites_code_lines:,}; {hypotheses_code_lines:,}"),
    ("functions / modules that `python train.py` executes", "{executed_functions:,} / {executed_modules:,}"),
    ("modules in import circles", "{circular_modules}"),
    ("layers of the import contract", "{contract_layers}"),
    ("optional duck attributes (with those of other libraries)", "{duck_attributes} ({duck_attributes_with_foreign})"),
    (f"functions over {MAX_FUNCTION_LINES} lines", "{long_functions}"),
    ("YAML files in conf/", "{yaml_files}"),
    ("lines / modules of tests", "{tests_lines:,} / {test_modules:,}"),
)


@dataclass(frozen=True, eq=False)
class Module:
    """A module of the package: its path within the package, its file, its text and its syntax tree."""

    path: str
    file: Path
    text: str
    tree: ast.Module


def read_modules(package: Path) -> dict[str, Module]:
    """Read all modules of a package, by their dotted names."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        name = ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        text = file.read_text(encoding="utf-8")
        modules[name] = Module(file.relative_to(package).as_posix(), file, text, ast.parse(text))
    return modules


def count_lines(files: Iterable[Path]) -> int:
    """Count the lines of files, all of them."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def count_code_lines(module: Module) -> int:
    """Count the lines without comments, blank lines and strings that stand as statements of their own."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code, documentation, lines = set[int](), set[int](), module.text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in ignored:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(1 for line in code - documentation if lines[line - 1].strip())


def find_circular_modules(package: str) -> list[str]:
    """List the modules of a package that reach themselves by imports."""
    graph = grimp.build_graph(package, cache_dir=None)
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    return sorted(m for m in graph.modules if reached[m] & graph.find_modules_that_directly_import(m))


def find_functions(modules: Mapping[str, Module]) -> list[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Find all functions and methods, also those within functions, each with its module."""
    nodes = [(module, node) for module in modules.values() for node in ast.walk(module.tree)]
    return [(module, node) for module, node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def find_long_functions(modules: Mapping[str, Module]) -> list[str]:
    """List the functions that are too long, each with its lines below its `def`."""
    lengths = [(module, node, (node.end_lineno or 0) - node.lineno) for module, node in find_functions(modules)]
    too_long = [found for found in lengths if found[2] > MAX_FUNCTION_LINES]
    return [f"{module.path}:{node.lineno} {node.name} ({length} lines)" for module, node, length in too_long]


def find_duck_attributes(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Find the names that are read by `getattr` with a default, each with the places that read it."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(ast.Name("getattr"), [value, ast.Constant(str(name)), _]):
                    found.setdefault(name, []).append(f"{module.path}:{node.lineno} of {ast.unparse(value)}")
    return dict(sorted(found.items()))


def assign_modules(modules: Mapping[str, Module]) -> tuple[dict[str, list[Module]], list[str]]:
    """Give each module to the name in one of the four lists that fits it; also list what does not fit."""
    assigned: dict[str, list[Module]] = {name: [] for name in (*KERNEL, *SITES, *HYPOTHESES, *OUTSIDE)}
    unknown: list[Module] = []
    for module in modules.values():
        path = module.path
        fitting = [name for name in assigned if path == name or (name[-1] == "/" and path.startswith(name))]
        (assigned[max(fitting, key=len)] if fitting else unknown).append(module)
    faults = [f"{module.path} is a module that no list names" for module in unknown]
    return assigned, faults + [f"{name} is listed, and no module fits it" for name in assigned if not assigned[name]]


def record_calls(script: Path, file: Path) -> None:
    """Run a script in this process, and write file, line and name of every code object that was entered to a file."""
    entered: set[CodeType] = set()

    def note_call(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    sys.argv = [str(script)]
    threading.setprofile(note_call)
    sys.setprofile(note_call)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.setprofile(None)
        calls = [(code.co_filename, code.co_firstlineno, code.co_name) for code in entered]
        file.write_text(json.dumps(calls), encoding="utf-8")


def find_executed_functions(root: Path, modules: Mapping[str, Module]) -> list[tuple[str, str]]:
    """Run `python train.py` in a temporary folder; the path of the module and the name of each executed function."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls.json"
        command = [sys.executable, __file__, "--record", str(file)]
        environment = {**os.environ, "PATE_HOME": str(Path(folder) / "home"), "PYTHONPATH": str(root)}
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        calls = {tuple(call) for call in json.loads(file.read_text(encoding="utf-8"))}
    executed = []
    for module, function in find_functions(modules):
        first_line = min(part.lineno for part in (function, *function.decorator_list))
        if (str(module.file), first_line, function.name) in calls:
            executed.append((module.path, function.name))
    return executed


def measure_package(modules: Mapping[str, Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure modules by their source: the figures, and what they count."""
    ducks, long = find_duck_attributes(modules), find_long_functions(modules)
    figures = {
        "package_lines": count_lines(module.file for module in modules.values()),
        "package_modules": len(modules),
        "package_code_lines": sum(map(count_code_lines, modules.values())),
        "duck_attributes": len(ducks.keys() - FOREIGN_ATTRIBUTES),
        "duck_attributes_with_foreign": len(ducks),
        "long_functions": len(long),
    }
    return figures, {"duck_attributes": ducks, "long_functions": long}


def measure_kernel(modules: Mapping[str, Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the kernel: the figures (none if a list does not fit the modules), and what they count."""
    assigned, faults = assign_modules(modules)
    lines = {name: sum(map(count_code_lines, found)) for name, found in assigned.items()}
    parts = {"kernel": KERNEL, "sites": SITES, "hypotheses": HYPOTHESES}
    figures = {f"{part}_code_lines": sum(lines[name] for name in names) for part, names in parts.items()}
    figures = {} if faults else figures
    return figures, {"kernel": {name: lines[name] for name in (*KERNEL, *SITES)}, "kernel_faults": faults}


def measure_files(root: Path) -> dict[str, Any]:
    """Measure the files beside the modules of the package, and whether all are formatted with its line length."""
    format_command = [sys.executable, "-m", "ruff", "format", "--check", "--quiet", "."]
    formatted = subprocess.run(format_command, cwd=root, stdout=subprocess.DEVNULL, check=False).returncode == 0
    templates = [*root.glob("pate_torch/**/*.jinja"), *root.glob("pate_torch/**/*schema*.json")]
    return {
        "template_lines": count_lines(templates),
        **{f"{folder}_lines": count_lines(root.glob(f"{folder}/**/*.py")) for folder in (*FOLDERS, "tests")},
        "test_modules": len(list(root.glob("tests/**/test_*.py"))),
        "contract_layers": sum(len(c.get("layers", [])) for c in find_contracts(root)),
        "yaml_files": len([*root.glob("conf/**/*.yaml"), *root.glob("conf/**/*.yml")]),
        "formatted": formatted,
    }


def find_contracts(root: Path) -> list[dict[str, Any]]:
    """Find the import contracts of pyproject.toml."""
    tools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("tool", {})
    return list(tools.get("importlinter", {}).get("contracts", []))


def format_table(figures: Mapping[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    lines = ["| measure | figure |", "|---|---|"]
    for label, template in ROWS:
        with contextlib.suppress(KeyError):
            lines.append(f"| {label} | {template.format(**figures)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure this checkout, print the table, and end with 1 if a module is missing from the lists above."""
    parser = argparse.ArgumentParser(description="Measure the size and the structure of this checkout.")
    parser.add_argument("--run", action="store_true", help="also run train.py and count what it executes")
    parser.add_argument("--verbose", action="store_true", help="also print what the figures count, as JSON")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record_calls(ROOT / "train.py", options.record)
        return 0
    modules = read_modules(ROOT / "pate_torch")
    (figures, details), (kernel, kernel_details) = measure_package(modules), measure_kernel(modules)
    figures, details = figures | kernel | measure_files(ROOT), details | kernel_details
    details["circular_modules"] = find_circular_modules("pate_torch")
    figures["circular_modules"] = len(details["circular_modules"])
    if options.run:
        details["executed"] = executed = find_executed_functions(ROOT, modules)
        figures |= {"executed_functions": len(executed), "executed_modules": len({path for path, _ in executed})}
    print(format_table(figures))
    if not figures["formatted"]:
        print("\n`ruff format --check` fails: the lines are not comparable with others.")
    if options.verbose:
        print(f"\n{json.dumps({**figures, 'details': details}, indent=2)}")
    for fault in details["kernel_faults"]:
        print(f"error: {fault}. Correct its list in {Path(__file__).name}.", file=sys.stderr)
    return 1 if details["kernel_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
