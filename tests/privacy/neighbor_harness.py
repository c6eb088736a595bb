"""Run a plan on data D and on a neighbor D', and hold what was sensitive, and what was released, against each other.

Noise is zero. On D every sensitive value is kept where it meets its mechanism; on D' its distance from the one kept is
measured, and the one kept is put in its place. So all that follows on D' follows from public values and from answers
that are D's, and must be D's byte for byte: whatever differs under ``release/`` came from the private side by another
way. Only the hash of the ledger's newest entry may differ (it covers a keyed hash of the records), and times.
"""

import contextlib
import dataclasses
import datetime
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pate_torch import pipeline
from pate_torch.accounting import events as ev
from pate_torch.accounting import rdp
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.api import pate
from pate_torch.core import progress
from pate_torch.hypotheses import exponential
from pate_torch.mechanisms.base import Mechanism
from pate_torch.methods.dpsgd_optimizer import NoiseSourceOptimizer
from pate_torch.privacy.accounts import BudgetExceeded
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.noise import NoiseSource
from pate_torch.privacy.sensitive import (
    UNIT_COUNT_GRID,
    UNIT_NORM,
    GradientSums,
    MarginalTables,
    Sensitivity,
    SoftVotes,
    UnitCounts,
)
from pate_torch.release import builder
from pate_torch.students import selection

FLOAT = 1e-5  # relative: a sum of floats (DP-SGD) rounds


@dataclass
class Seen:
    """One sensitive value, what it says of itself, and who opened it."""

    value: Tensor
    sensitivity: Sensitivity
    rows: bool = False  # the distances are those of each row
    mechanism: Any = None


@dataclass
class Watch:
    """What was opened, in order. reference: what was opened on D, None while that is being run."""

    reference: list[Seen] | None = None
    seen: list[Seen] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def meets(self, value: Tensor, sensitivity: Sensitivity, *, rows: bool = False, mechanism: Any = None) -> Tensor:
        """The value that goes on: itself on D, D's on a neighbor. Notes a distance beyond what the value says."""
        place = len(self.seen)
        self.seen.append(Seen(value.clone(), sensitivity, rows, mechanism))
        if self.reference is None:
            return value
        if place >= len(self.reference):
            self.faults.append(f"value {place}: opened for a neighbor alone")
            return value
        kept = self.reference[place]
        if kept.value.shape != value.shape:
            self.faults.append(f"value {place}: of another shape ({tuple(value.shape)}, {tuple(kept.value.shape)})")
            return value
        self.faults += [f"value {place}: {what}" for what in beyond(kept.value, value, sensitivity, rows)]
        if sensitivity != kept.sensitivity:
            self.faults.append(f"value {place}: says another sensitivity of itself")
        return kept.value


def beyond(one: Tensor, other: Tensor, said: Sensitivity, rows: bool) -> list[str]:
    """Where two values lie further apart than one of them says."""
    apart = (one - other).double()
    apart = apart.flatten(1) if rows and len(apart) else apart.reshape(1, -1)
    if not apart.numel():
        return []
    slack = 1 + (FLOAT if one.is_floating_point() else 1e-12)
    found = {
        "L1": (apart.abs().sum(1).max(), said.l1),
        "L2": (apart.norm(dim=1).max(), said.l2),
        "Linf": (apart.abs().max(), said.linf),
    }
    return [f"{n} {float(d):.4g} where it says {s:.4g}" for n, (d, s) in found.items() if float(d) > s * slack]


class OneDay(datetime.date):
    """The day on which every run is made: reports are dated."""

    @classmethod
    def today(cls):
        return cls(2000, 1, 1)


# ---- what is replaced while a plan runs ----------------------------------------------------------------------------


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """No noise, no clock, ids in order; every sensitive value passes through the watch."""
    opened, gradient, draw = Mechanism._check_input, GradientSums.compute_gradient_sum, selection.draw_model_index
    add_noise, errors = NoiseSourceOptimizer.add_noise, exponential.count_errors
    ids = itertools.count(1)

    def at_the_door(self: Any, value: Any, noise: Any) -> Any:
        value = opened(self, value, noise)
        if isinstance(value, SoftVotes):  # one teacher moves in every histogram of a score
            kept = []
            for table in (value.counts_QSV.long(), value.shifted_QSW.long()):
                rows = watch.meets(table.flatten(0, 1), value.sensitivity, rows=True, mechanism=self)
                kept.append(rows.view(table.shape))
            return SoftVotes(*kept, value.num_teachers)
        if isinstance(value, UnitCounts):
            counts_F = torch.cat([value.counts_C.double(), value.outside_sum[None] / UNIT_COUNT_GRID])
            kept = watch.meets(counts_F, value.sensitivity, mechanism=self)
            outside_sum = (kept[-1] * UNIT_COUNT_GRID).long()
            return dataclasses.replace(value, counts_C=kept[:-1].long(), outside_sum=outside_sum)
        if isinstance(value, MarginalTables):
            return dataclasses.replace(value, counts_M=watch.meets(value.counts_M, value.sensitivity, mechanism=self))
        counts = getattr(value, "counts_QC", None)
        if counts is None:
            watch.seen.append(Seen(torch.zeros(0), value.sensitivity, False, self))
            if watch.reference is not None and len(watch.seen) > len(watch.reference):
                watch.faults.append("a mechanism was asked once more for a neighbor")
            return value
        kept = watch.meets(counts, value.sensitivity, rows=hasattr(value, "num_teachers"), mechanism=self)
        return dataclasses.replace(value, counts_QC=kept)

    def of_records(self: Any, weight_DC: Tensor, cut: float = 1.0) -> Tensor:
        length = cut * UNIT_NORM
        said = Sensitivity(**{n: length * getattr(self.sensitivity, n) for n in ("l1", "l2", "linf")})
        return watch.meets(gradient(self, weight_DC, cut), said)

    def of_students(errors: Any, epsilon: float, noise: Any, *, adjacency: str, **rest: Any) -> int:
        # Add/remove moves all counts the same way, which the cost rests on: one less than the span of two.
        said = Sensitivity(l1=len(errors), l2=math.sqrt(len(errors)), linf=1.0)
        kept = watch.meets(torch.as_tensor(errors), said).numpy()
        if adjacency == "add_remove" and np.ptp(np.asarray(errors) - kept) > 1:
            watch.faults.append("errors move both ways where a record is added or removed")
        return draw(kept, epsilon, noise, adjacency=adjacency, **rest)

    def of_gradients(self: Any) -> None:
        parts = [p.summed_grad.reshape(-1) for p in self.params]
        said = Sensitivity(l1=math.inf, l2=self.max_grad_norm, linf=math.inf)
        kept = watch.meets(torch.cat(parts), said).split([len(part) for part in parts])
        for p, part in zip(self.params, kept, strict=True):
            p.summed_grad = part.reshape(p.summed_grad.shape).clone()
        add_noise(self)

    def of_hypotheses(*given: Any) -> Any:
        counts = errors(*given)
        said = Sensitivity(l1=len(counts), l2=math.sqrt(len(counts)), linf=1.0)
        return watch.meets(torch.as_tensor(counts), said).numpy()

    def none(self: Any, shape: tuple[int, ...], *given: Any) -> Tensor:
        self._check_draw_allowed()
        return torch.zeros(shape, dtype=torch.int64 if self.kind == "discrete" else torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mechanism, "_check_input", at_the_door)
        patch.setattr(GradientSums, "compute_gradient_sum", of_records)
        patch.setattr(selection, "draw_model_index", of_students)
        patch.setattr(NoiseSourceOptimizer, "add_noise", of_gradients)
        patch.setattr(exponential, "count_errors", of_hypotheses)
        for name in ("draw_gaussian", "draw_laplace", "draw_gumbel", "draw_uniform"):
            patch.setattr(NoiseSource, name, none)
        patch.setattr("secrets.token_hex", lambda size=8: f"{next(ids):0{2 * size}x}")
        patch.setattr("secrets.randbits", lambda bits: 5)  # the key of the units that are held out
        patch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.0))
        patch.setattr(builder, "datetime", SimpleNamespace(date=OneDay))
        calls = itertools.count(1)
        patch.setattr(pate, "make_unique_run_id", lambda: f"{next(calls)}")
        yield


# ---- costs --------------------------------------------------------------------------------------------------------


def priced(mechanism: Any, said: Sensitivity, queries: int, turns: int) -> tuple[PrivacyEvent, ...]:
    """What a value of this sensitivity costs at this noise, typed anew; () for a mechanism that is not known here."""
    kind = type(mechanism).__name__

    def gaussian(length: float, sigma: float, count: int) -> PrivacyEvent:
        if mechanism.noise == "discrete":
            return ev.ZCDPEvent(rho=(length / sigma) ** 2 / 2, count=count)
        return ev.GaussianEvent(mu=length / sigma, count=count)

    match kind:
        case "GNMax":
            return (gaussian(said.l2, mechanism.sigma, queries),)
        case "ConfidentGNMax" | "InteractiveGNMax":
            answers = getattr(mechanism, "max_answers", None) or queries
            checked = gaussian(said.linf, mechanism.screen_sigma, queries)
            return (checked, gaussian(said.l2, mechanism.sigma, min(answers, queries)))
        case "LNMax":
            count = round(said.l1 / said.linf) * queries
            if mechanism.noise == "discrete":
                return (ev.PureDPEvent(epsilon=said.linf / mechanism.sigma, count=count),)
            return (ev.LaplaceEvent(ratio=said.linf / mechanism.sigma, count=count),)
        case "ExponentialMechanism":
            return (ev.BoundedRangeEvent(eta=2 * said.linf * mechanism.rate, count=queries),)
        case "ClassCounts" | "Marginals":
            return (gaussian(said.l2, mechanism.sigma, 1),)
        case "Histogram":
            return (gaussian(said.l2, mechanism.sigma, turns),)
        case "GradientDescent":
            last = gaussian(said.l2, mechanism.sigma, mechanism.steps)
            before = gaussian(
                said.l2, mechanism.early_noise_multiplier * mechanism.sigma, mechanism.steps * (turns - 1)
            )
            return (before, last) if turns > 1 else (last,)
        case "DistanceToInstability":
            count = queries
            noise: PrivacyEvent = (
                ev.PureDPEvent(epsilon=mechanism.epsilon, count=count)
                if mechanism.noise == "discrete"
                else ev.LaplaceEvent(ratio=mechanism.epsilon, count=count)
            )
            return (noise, ev.DeltaEvent(delta=mechanism.delta, count=count))
        case "SparseVector" | "SoftSparseVector":
            scale = mechanism.make_cost(queries).noise_scale
            return (
                ev.PureDPEvent(epsilon=2 / scale, count=mechanism.max_failures),
                ev.DeltaEvent(delta=mechanism.failure_delta),
            )
    raise AssertionError(f"{kind}: say here what a value of its sensitivity costs")


def underpriced(seen: list[Seen], queries: int, turns: int) -> list[str]:
    """Where ``privacy_events`` asks for less than what was opened costs."""
    faults = []
    for mechanism, said in {id(s.mechanism): (s.mechanism, s.sensitivity) for s in seen if s.mechanism}.values():
        charged, due = mechanism.privacy_events(queries, turns), priced(mechanism, said, queries, turns)
        orders = np.array([1.5, 2.0, 8.0, 64.0])
        failure = [sum(e.count * e.delta for e in part if isinstance(e, ev.DeltaEvent)) for part in (charged, due)]
        if (rdp.compute_curve(charged, orders) < rdp.compute_curve(due, orders) * (1 - 1e-9)).any() or failure[
            0
        ] < failure[1]:
            faults.append(f"{mechanism.name}: {charged} is charged where {due} is due")
    return faults


# ---- what was released ---------------------------------------------------------------------------------------------


def released(home: Path) -> dict[str, Any]:
    """Every releasable file of a home, by name, and what was charged.

    Bytes, but for the ledger's head and hashes.
    """
    heads, totals = set(), []
    for path in home.rglob("ledger.sqlite"):
        with Ledger(path, readonly=True, create=False) as ledger:
            heads |= {entry.hash.encode() for entry in ledger.read_entries()}
            totals += [(account.name, account.num_releases, account.guarantee) for account in ledger.list_accounts()]
    found: dict[str, Any] = {"what was charged": totals}
    for file in sorted(path for path in home.rglob("*") if path.is_file()):
        name = file.relative_to(home)
        if not {"release", "answers"} & set(name.parts):
            continue
        content = file.read_bytes()
        if file.name == "SHA256SUMS":  # of files that are compared themselves, and hold the head
            content = re.sub(rb"^[0-9a-f]{64}", b"", content, flags=re.MULTILINE)
        for head in heads:
            content = content.replace(head, b"HEAD")
        found[str(name)] = content
    return _numbered(found)


def _numbered(found: dict[str, Any]) -> dict[str, Any]:
    """The same with every random id as the number of its first occurrence: only what repeats can tell anything."""
    numbers: dict[bytes, bytes] = {}

    def number(id: re.Match[bytes]) -> bytes:
        return numbers.setdefault(id[0], b"ID%d" % len(numbers))

    return {
        name: re.sub(rb"\b[0-9a-f]{16}\b", number, content) if isinstance(content, bytes) else content
        for name, content in sorted(found.items())
    }


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of files that are not alike."""
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]


# ---- one run -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """refused: why, before anything was charged. silent: no query was answered, so that no student was trained."""

    watch: Watch
    home: Path
    refused: str = ""
    silent: bool = False


class Refused(Exception):
    """A later run of several was refused before it was charged."""


def charged(home: Path) -> int:
    """How many reservations the ledgers below hold."""
    count = 0
    for path in home.rglob("ledger.sqlite"):
        with Ledger(path, readonly=True, create=False) as ledger:
            count += sum(entry.kind == "reserve" for entry in ledger.read_entries())
    return count


def run(plan: Any, watch: Watch, go: Any = pipeline.run) -> Outcome:
    """Run a plan in a home of its own. AssertionError: it was refused after it was charged."""
    outcome = Outcome(watch, plan.root)
    with watched(watch), contextlib.redirect_stdout(None):
        try:
            go(plan)
        except Refused as error:
            outcome.refused = str(error)
        except BudgetExceeded as error:  # of a later block of queries: an answer like any other
            outcome.refused = "" if charged(plan.root) else str(error)
        except ValueError as error:
            outcome.silent = "was answered, so there is nothing to learn" in str(error)
            if not outcome.silent:
                assert not charged(plan.root), f"refused after it was charged: {error}"
                outcome.refused = str(error)
    return outcome


def compare(first: Outcome, plan: Any, go: Any = pipeline.run) -> list[str]:
    """Run the plan of a neighbor, in the same way; every way in which it tells itself from D."""
    watch = Watch(reference=first.watch.seen)
    second = run(plan, watch, go)
    if second.refused:
        return [f"accepted on one side, refused on the other: {second.refused}"]
    faults = [*watch.faults]
    if len(watch.seen) < len(first.watch.seen):
        faults.append("fewer values were opened for a neighbor")
    faults += [f"{name} differs" for name in different(released(first.home), released(second.home))]
    return faults
