"""One tiny run in a process of its own, killed where it is told: between any two of its writes, draws and charges."""

from __future__ import annotations

import csv
import functools
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first vmap of a process would import: seconds, in every child
from safetensors import torch as safetensors_torch

from pate_torch import labelling, pipeline, released
from pate_torch.data.partition import AddRemove
from pate_torch.data.tensors import Tensors
from pate_torch.ledger import Ledger
from pate_torch.mechanisms.gaussian import Gaussian
from pate_torch.noise import Rehearsal
from pate_torch.queries.random import Random
from pate_torch.students.supervised import Supervised
from pate_torch.teachers.training import TeacherRecipe


def blobs() -> Tensors:
    """Three clouds in the plane."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (160,), generator=draw)
    x = torch.tensor([[0.0, 3.0], [3.0, -2.0], [-3.0, -2.0]])[y] + torch.randn(160, 2, generator=draw)
    return Tensors(
        name="blobs",
        class_names=3,
        x=x[:100],
        y=y[:100],
        pool_x=x[100:130],
        pool_y=y[100:130],
        test_x=x[130:],
        test_y=y[130:],
    )


def plan(home: Path, name: str, **changes: Any) -> pipeline.Plan:
    """Eight teachers in two chunks, five questions, a student of a few steps."""
    student = Supervised(network="logistic", steps=3, augment=None)
    recipe = TeacherRecipe(network="logistic", steps=5, batch_size=4, backend="vectorised", chunk=4)
    given: dict[str, Any] = {
        "source": blobs(),
        "partition": AddRemove(),
        "recipe": recipe,
        "mechanism": Gaussian(sigma=2.0),
        "strategy": Random(),
        "student": student,
        "refit": student,
        "root": home,
        "folder": home / "runs" / "blobs" / "gaussian" / name,
        "seed": 0,
        "num_teachers": 8,
        "num_queries": 5,
        "delta": 1e-4,
        "opening_budget": 50.0,
        "baseline": False,
        "quiet": True,
    }
    return pipeline.Plan(**{**given, **changes})


class Steps:
    """Counts the moments of a run between which a kill could matter; kills at the one asked for."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at, self.count = kill_at, 0

    def __call__(self) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def around(self, holder: Any, name: str) -> None:
        """A moment before and one after every call of ``holder.name``."""
        inner: Callable[..., Any] = getattr(holder, name)

        @functools.wraps(inner)
        def stepped(*args: Any, **options: Any) -> Any:
            self()
            result = inner(*args, **options)
            self()
            return result

        setattr(holder, name, stepped)


def watch_noise(home: Path) -> None:
    """Write down, before every draw, how many releases the ledger has charged by then."""
    inner = Rehearsal.gaussian

    def watched(self: Rehearsal, *args: Any, **options: Any) -> Any:
        with (home / "draws.txt").open("a") as file:
            file.write(f"{reservations(home)}\n")
        return inner(self, *args, **options)

    Rehearsal.gaussian = watched  # type: ignore[method-assign]


def reservations(home: Path) -> int:
    """How many charges the file of the ledger holds, read past our own code."""
    db = sqlite3.connect(home / "ledger.sqlite")
    try:
        query = "SELECT count(*) FROM entries WHERE json_extract(body, '$.kind') = 'reserve'"
        return int(db.execute(query).fetchone()[0])
    finally:
        db.close()


def run(home: Path, name: str, kill_at: int | None) -> None:
    """The whole run; writes the number of its steps at the end."""
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    watch_noise(home)
    steps = Steps(kill_at)
    for holder, methods in (
        (os, ("replace", "rename", "fsync", "link", "mkdir")),
        (Path, ("replace", "rename", "write_text", "chmod")),
        (safetensors_torch, ("save_file",)),
        (pipeline, ("save_file", "look", "fit_student", "show_closing")),
        (labelling, ("label",)),
        (released, ("write",)),
        (Ledger, ("open_account", "reserve", "commit")),
        (Gaussian, ("release",)),
        (Rehearsal, ("gaussian",)),
    ):
        for method in methods:
            steps.around(holder, method)
    pipeline.run(plan(home, name))
    (home / "steps.txt").write_text(str(steps.count))


def readable(home: Path) -> dict[str, list[int]]:
    """Every labels.csv under ``home`` by its run: what somebody could take away."""
    found = {}
    for file in (home / "runs").glob("*/*/*/release/labels.csv"):
        found[file.parts[-3]] = [int(row["label"]) for row in csv.DictReader(file.read_text().splitlines())]
    return found
