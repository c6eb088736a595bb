"""A disk that fails at its n-th operation, and runs of every kind on it, each in its own process.

Operations are every open for writing, write, fsync, rename, link, removal, change of mode and new folder of the process
under the home of a run, every file of tensors, and every entry of the ledger. At the n-th one the process is killed,
or the operation fails as on a full disk: once, or from there on.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch._dynamo  # noqa: F401  the first vmap of a process would import it: seconds, in every child

from pate_torch import PATEClassifier, pipeline
from pate_torch.cli import train as train_command
from pate_torch.cli.main import main as pate
from pate_torch.features.encoder import Encoder
from pate_torch.privacy.chain import HashChain, LedgerError
from pate_torch.privacy.ledger import Ledger
from tests import killed_runs
from tests.command_runs import QUIET_LOG, learn_settings
from tests.features.encoder_worlds import WORDS, mails, sayings, table

MODES = ("kill", "fail once", "fail from there on")
_EVENTS = ("os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.chmod")
_WRITING = os.O_WRONLY | os.O_RDWR


class FailingDisk:
    """Counts the operations under ``home``, and fails at number ``fail_at``, which ``last`` names; None if never."""

    def __init__(self, home: Path, mode: str, fail_at: int | None) -> None:
        self.home, self.mode, self.fail_at = str(home), mode, fail_at
        self.count, self.last, self._inside = 0, "", False

    def install(self) -> None:
        """Watch this process until its end."""
        sys.addaudithook(self._audit)
        os.fsync = self._around(os.fsync, "fsync")
        io.open = __builtins__["open"] = self._opened(io.open)  # type: ignore[index]
        safetensors.torch.serialize_file = self._around(safetensors.torch.serialize_file, "tensors")
        HashChain.append = self._around(HashChain.append, "ledger", LedgerError)  # type: ignore[method-assign]

    def _operation(self, what: str, kind: Callable[..., Exception] | None = None) -> None:
        number, self.count = self.count, self.count + 1
        if self.fail_at is None or number < self.fail_at or (number > self.fail_at and self.mode != MODES[2]):
            return
        self.last = self.last or what
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind is not None:
            raise kind(f"ledger: {what}: No space left on device")
        raise OSError(errno.ENOSPC, "No space left on device", what)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside or (event != "open" and event not in _EVENTS):
            return
        self._inside = True
        try:
            path = arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0]
            if not isinstance(path, str | bytes | os.PathLike) or not os.fsdecode(path).startswith(self.home):
                return
            if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
                return
            self._operation(f"{event} {os.fsdecode(path)}")
        finally:
            self._inside = False

    def _around(self, inner: Callable[..., Any], what: str, kind: Any = None) -> Callable[..., Any]:
        @functools.wraps(inner)
        def operation(*given: Any, **options: Any) -> Any:
            self._operation(what, kind)
            return inner(*given, **options)

        return operation

    def _opened(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def opened(path: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
            file = inner(path, mode, *given, **options)
            if set(mode) & set("wax+") and not isinstance(path, int) and os.fsdecode(path).startswith(self.home):
                file.write = self._around(file.write, f"write {path}")
            return file

        return opened


# ---- what runs on it -------------------------------------------------------------------------------------------------


def _rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, count)
    return draw.normal(size=(count, 3)) + 3.0 * y[:, None], y


def _classifier(home: Path, allow_refit: bool, **settings: Any) -> None:
    X, y = _rows(240, 0)
    clf = PATEClassifier(account="rows", classes=[0, 1], home=home, num_records_about=240, allow_refit=allow_refit,
                         verbose=False, **settings)  # fmt: skip
    clf.fit(X, y, public=_rows(60, 1)[0])


def _texts(home: Path, allow_refit: bool) -> None:
    """Texts seen through an encoder."""
    weights = home.parent / "table.safetensors"
    if not weights.exists():
        table(weights)
    encoder = Encoder(name="table", weights=str(weights), tokenizer=WORDS)
    said = sayings(140)
    y = [int(text[0] > "4") for text in said]
    clf = PATEClassifier(4.0, account="texts", classes=[0, 1], encoder=encoder, num_records_about=100, home=home,
                         allow_refit=allow_refit, verbose=False)  # fmt: skip
    clf.fit(said[:100], y[:100], public=said[100:])


def _command(home: Path, main: Callable[[], int]) -> None:
    os.environ["PATE_HOME"] = str(home)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = main()
    if code:
        raise ValueError(f"exit code {code}: {told.getvalue()}")


def _train(home: Path, allow_refit: bool) -> None:
    pipeline.run(killed_runs.plan(home, f"run{len(list(home.glob('runs/*/*/*')))}", opening_budget=killed_runs.CAP))


def _train_texts(home: Path, allow_refit: bool) -> None:
    """``train.py features=encoder``: texts of a table, through an encoder and its cache."""
    folder, draw = home.parent, np.random.default_rng(0)
    if not (folder / "private.csv").exists():
        table(folder / "table.safetensors")
        for name, count in (("private", 120), ("public", 60), ("test", 20)):
            mails(folder / f"{name}.csv", count, draw)
    places = [f"dataset.{key}={folder / name}.csv" for key, name in
              (("path", "private"), ("public_path", "public"), ("test_path", "test"))]  # fmt: skip
    sys.argv = [
        "train.py", "dataset=text", "dataset.name=mails", "dataset.classes=[low,high]", *places, "features=encoder",
        f"features.weights={folder / 'table.safetensors'}", f"features.tokenizer={WORDS}", "query=random",
        "num_teachers=6", "num_queries=4", "mechanism.sigma=4", "teacher=logistic", "teacher.steps=3",
        "executor.workers=1", "student=supervised", "student.network=logistic", "student.augment=null",
        "student.steps=3", "baseline=false", f"privacy.opening_budget={killed_runs.CAP}", "quiet=true",
        "membership=none", *QUIET_LOG,
    ]  # fmt: skip
    _command(home, train_command.train)


def _learn(home: Path, allow_refit: bool) -> None:
    settings = learn_settings(home.parent, private=400)
    _command(home, lambda: pate(["learn", "sspp", *settings, "--epsilon", "1", "--below-guarantee"]))


KINDS: dict[str, Callable[[Path, bool], None]] = {
    "gradients": partial(_classifier, method="gradients"),
    "teachers": partial(_classifier, epsilon=4.0, method="teachers", num_queries=8, spend_anyway=True),
    "dpsgd": partial(_classifier, method="dpsgd"),
    "texts": _texts,
    "train": _train,
    "train texts": _train_texts,
    "learn": _learn,
}


def attempt(kind: str, home: Path, mode: str, fail_at: int | None, allow_refit: bool) -> None:
    """One run of its kind; writes how it ended, and its number of operations, beside ``home``."""
    killed_runs.quietly()
    disk = FailingDisk(home, mode, fail_at)
    disk.install()
    outcome: dict[str, Any] = {"ended": "well"}
    try:
        KINDS[kind](home, allow_refit)
    except (ValueError, OSError) as error:  # any other error leaves the process with a traceback and exit code 1
        outcome = {"ended": type(error).__name__, "message": str(error)}
    disk.fail_at = None
    home.with_suffix(".json").write_text(json.dumps(outcome | {"operations": disk.count, "failed": disk.last}))


def releases(home: Path) -> tuple[int, int]:
    """(Reservations, committed ones) of the ledger under ``home``."""
    if not (home / "ledger.sqlite").exists():
        return 0, 0
    with Ledger(home / "ledger.sqlite", create=False) as ledger:
        ledger.verify()
        charges = [charge for account in ledger.list_accounts() for charge in ledger.get_charges(account.name).values()]
    return len(charges), sum(charge.is_committed for charge in charges)
