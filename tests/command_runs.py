"""Runs of the training command inside the test process: Hydra, composition and all, without a new interpreter."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hydra._internal.hydra import Hydra
from hydra.types import RunMode

from pate_torch.cli import train as command

TINY = [
    *("dataset.private=120", "dataset.public=40", "dataset.test=20", "num_teachers=6", "num_queries=4", "query=random"),
    *("mechanism.sigma=4", "teacher=logistic", "teacher.steps=3", "executor.workers=1", "student=supervised"),
    *("student.network=logistic", "student.augment=null", "student.steps=3", "guide_student.network=logistic"),
    *("guide_student.augment=null", "guide_student.steps=3"),
    *("baseline=false", "privacy.opening_budget=50", "quiet=true"),
]
"""A whole run in a second: six logistic teachers of twenty digits each."""


QUIET_LOG = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
"""Setting logging up anew closes every handler of the process, and with absl's the file that pytest captures into."""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a refusal prints."""
        lines = self.err.splitlines()
        assert self.code == 2, (self.code, self.err)
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        return lines[0].removeprefix("error: ")


def train(home: Path, *overrides: str, monkeypatch, base: list[str] = TINY) -> Outcome:
    """``python train.py`` with PATE_HOME=home."""
    monkeypatch.setenv("PATE_HOME", str(home))
    monkeypatch.setattr("sys.argv", ["train.py", *base, *overrides, *QUIET_LOG])
    if "-m" not in base:  # Hydra would compose the configuration once more, to learn whether it asks for a sweep
        monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: RunMode.RUN)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command.train()
    return Outcome(code, out.getvalue(), err.getvalue())


def write_doses(path: Path, count: int, names: tuple[str, ...], labeled: bool = True) -> None:
    """Points in the unit square, whose class the first coordinate decides."""
    draw = np.random.default_rng(len(names) + count)
    lines = ["age,dose" + ",ill" * labeled]
    for x, z in draw.random((count, 2)).round(3):
        lines.append(f"{x},{z}" + (f",{names[min(int(x * len(names)), len(names) - 1)]}" if labeled else ""))
    path.write_text("\n".join(lines) + "\n")


def learn_settings(folder: Path, names: tuple[str, ...] = ("no", "yes"), private: int = 3000) -> list[str]:
    """Arguments of a table of so many private records, with public and test points in files of their own."""
    write_doses(folder / "people.csv", private, names)
    write_doses(folder / "public.csv", 60, names, labeled=False)
    write_doses(folder / "test.csv", 200, names)
    return [
        str(folder / "people.csv"), "dataset.label=ill", "dataset.name=people", "privacy.delta=1e-4", "quiet=true",
        f"dataset.public_path={folder / 'public.csv'}", f"dataset.test_path={folder / 'test.csv'}",
        f"dataset.classes=[{','.join(names)}]",
    ]  # fmt: skip


def written(home: Path) -> list[str]:
    """Every file under ``home`` but what Hydra writes for each run: its log and the configuration as resolved."""
    files = (file.relative_to(home) for file in home.rglob("*") if not file.is_dir())
    return sorted(str(file) for file in files if file.name != "train.log" and ".hydra" not in file.parts)


def ledger_entries(home: Path) -> list[str]:
    """Kinds of the entries of the ledger under ``home``, read past our own code."""
    if not (home / "ledger.sqlite").exists():
        return []
    db = sqlite3.connect(home / "ledger.sqlite")
    try:
        return [kind for (kind,) in db.execute("SELECT json_extract(body, '$.kind') FROM entries ORDER BY seq")]
    finally:
        db.close()
