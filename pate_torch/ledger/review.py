"""``python -m pate_torch.ledger review``: were past claims as large as what was spent?

The claim of every release folder beside the ledger is composed anew, from what was *reserved* for what lies in the
folder (labels, the choice of a student, a published price), and its account's total from all that had been reserved by
then. Earlier versions left the published price out of the first, and composed the second from what came out (ex post);
they also accepted combinations of options that bounded less than they charged for. What was said too low is listed,
with the figure that holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pate_torch.accounting.epsilon import epsilon
from pate_torch.accounting.events import ZCDP, Event, Gaussian
from pate_torch.accounting.shown import show_epsilon
from pate_torch.core import run_folders
from pate_torch.ledger.accounts import State, apply
from pate_torch.ledger.ledger import CHOICE, LABELS, PRICE, Account, Charge, Entry, Ledger

_SLACK = 1e-9  # relative: the same events summed in another order


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim that was too low.

    Attributes:
        folder: Folder of the release.
        claim: Which claim.
        said: Epsilon that was claimed.
        holds: Epsilon that may be (infinite: nothing may).
        why: The reason, in words.
    """

    folder: str
    claim: str
    said: float
    holds: float
    why: str


def review(ledger: Ledger) -> tuple[int, list[Finding]]:
    """Every claim that was too low, over all runs under the ledger's own root.

    Returns:
        How many release folders were looked at, and the claims.
    """
    folders = list(_folders(ledger))
    doubts: dict[str, Doubt] = {}
    for one in folders:
        for identity, charge in one.parts.items():
            if charge.run == one.run and one.state is not None:  # made here, with these options
                doubt = _unsound(one.release.parent / ".hydra" / "config.yaml", one.account, charge)
                doubts[identity] = max(doubt, doubts.get(identity, SOUND), key=lambda found: found.factor)
    return len(folders), [finding for one in folders for finding in _findings(one, doubts)]


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A run whose options bounded less than they charged for.

    Attributes:
        why: The reason, in words.
        factor: By which a unit moves its values more.
    """

    why: str
    factor: float


SOUND = Doubt(why="", factor=1.0)


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """What lies in a release folder. state: its account when it was written; None: the ledger knows of none.

    dated: whether the folder says when that was.
    """

    release: Path
    name: str
    summary: Mapping[str, Any]
    state: State | None
    dated: bool
    parts: Mapping[str, Charge]

    @property
    def run(self) -> str:
        return self.release.parent.name

    @property
    def account(self) -> Account:
        assert self.state is not None
        return self.state.view(str(self.summary["dataset"]))


def _folders(ledger: Ledger) -> Iterator[_Folder]:
    """Every release that claims anything."""
    root = ledger.path.parent
    entries, apart = ledger.entries(), root / "dpsgd" / "ledger.sqlite"
    baseline: tuple[Entry, ...] = ()
    if apart.exists():  # a benchmark's baseline that its account could not add up
        with Ledger(apart, create=False, readonly=True) as other:
            baseline = other.entries()
    for file in sorted(run_folders.runs_folder(root).glob("*/*/*/release/summary.json")):
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # half written
        if not isinstance(summary, dict) or summary.get("private") is not True:
            continue  # claims nothing
        head, name = summary.get("ledger_head"), str(summary.get("dataset"))
        elsewhere = summary.get("mechanism") == "dpsgd" and any(entry.hash == head for entry in baseline)
        state = _at(head, name, baseline if elsewhere else entries)
        yield _Folder(
            release=file.parent,
            name=str(file.parent.relative_to(root)),
            summary=summary,
            state=state,
            dated=head is not None,
            parts={} if state is None else _parts(file.parent, summary, state),
        )


def _findings(one: _Folder, doubts: Mapping[str, Doubt]) -> Iterator[Finding]:
    def finding(claim: str, key: str, holds: float, why: str) -> Iterator[Finding]:
        said = one.summary.get(key)
        if isinstance(said, int | float) and holds > said * (1 + _SLACK):
            yield Finding(folder=one.name, claim=claim, said=float(said), holds=holds, why=why)

    if not one.parts or one.state is None:
        yield from finding("this release", "epsilon", math.inf, "the ledger does not know it")
        return
    holds, why = _holds(one.account, one.parts, doubts)
    what = ", ".join(charge.what for charge in one.parts.values())
    yield from finding("this release", "epsilon", holds, why or f"of all that lies there: {what}")
    if one.dated:  # else nobody knows which releases it could count
        holds, why = _holds(one.account, one.state.charges, doubts)
        why = why or "of what was reserved, not what came out"
        yield from finding("all releases together", "epsilon_charged", holds, why)


def _holds(account: Account, charges: Mapping[str, Charge], doubts: Mapping[str, Doubt]) -> tuple[float, str]:
    """Epsilon of these charges (infinite where nothing may be claimed), and why it is more than they say."""
    doubted = max((doubts.get(identity, SOUND) for identity in charges), key=lambda doubt: doubt.factor)
    if any(charge.insecure for charge in charges.values()):
        return math.inf, "seeded noise is part of it"
    if math.isinf(doubted.factor):
        return math.inf, doubted.why
    if doubted == SOUND:
        claimed = replace(account, private=True).claim(e for charge in charges.values() for e in charge.planned)
        return math.inf if claimed is None else claimed.epsilon, ""
    events = [
        _longer(event, doubts.get(identity, SOUND).factor)
        for identity, charge in charges.items()
        for event in charge.planned
    ]
    try:  # past the account's cap, too: its filter counted less than was spent
        return epsilon(events, account.delta).epsilon, doubted.why
    except ValueError:
        return math.inf, doubted.why


def _at(head: Any, name: str, entries: tuple[Entry, ...]) -> State | None:
    """The account as it stood when the ledger's newest entry was ``head`` (None: as it stands).

    None: it had none, or there is no such entry.
    """
    accounts: dict[str, State] = {}
    for entry in entries:
        apply(accounts, entry)
        if entry.hash == head:
            return accounts.get(name)
    return accounts.get(name) if head is None else None


def _parts(release: Path, summary: Mapping[str, Any], state: State) -> dict[str, Charge]:
    """The reservations whose outputs lie in this folder, by id.

    A run of another mechanism may have a folder of the same name: of its own kind the last is this run's, when it
    wrote down the ledger's head, and it follows the labels where they are its own.
    """
    run, labels, found = release.parent.name, summary.get("release_id"), dict[str, Charge]()
    order = list(state.charges)
    if labels is None:
        models = [i for i in order if state.charges[i].run == run and "DP-SGD" in state.charges[i].what]
        return {i: state.charges[i] for i in models[-1:] if summary.get("mechanism") == "dpsgd"}
    if labels not in state.charges:
        return {}
    found[labels] = state.charges[labels]
    since = order.index(labels) if found[labels].run == run else -1
    for what, lies in ((PRICE, (release / "sanitised.json").exists()), (CHOICE, True)):
        mine = [i for i in order[since + 1 :] if state.charges[i].run == run and state.charges[i].what == what]
        found |= {i: state.charges[i] for i in mine[-1:] if lies}
    return found


_OF_RECORDS = {"reverse_knn": math.sqrt(2), "census": math.sqrt(2), "gradients": 2.0, "slopes": 2.0}
"""Voters that earlier versions let a capacity go with, by their names then: how far a displaced record moved the sum.

No longer: what answers says itself how far a unit moves it.
"""


def _unsound(config: Path, account: Account, charge: Charge) -> Doubt:
    """Whether the options of the run that made this charge bounded less than they charged for."""
    try:
        options = yaml.safe_load(config.read_text(encoding="utf-8"))
        partition, dataset = options["partition"] or {}, options["dataset"] or {}
        voting = options.get("voters") or options.get("voting") or {}
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return SOUND  # a run from Python: its options are not on disk
    name = voting.get("name")
    if charge.what == LABELS and partition.get("capacity") is not None and name in _OF_RECORDS:
        if account.unit != "record":
            return Doubt(why="partition.capacity: a group more displaces as many records as it has", factor=math.inf)
        further = _OF_RECORDS[name]
        return Doubt(why="partition.capacity: a record more displaces another's answer", factor=further)
    if charge.what == CHOICE:
        unit = "record" if not dataset.get("group") else f"group:{dataset['group']}"
        if "group" in dataset and unit.partition(":")[0] != account.unit.partition(":")[0]:
            why = f"the student was chosen for unit {unit}, the account is of {account.unit}"
            return Doubt(why=why, factor=math.inf)
        # A partition of the user's own has any name, and was checked by what it says itself.
        if partition.get("name") in ("add_remove", "replace_one") and partition["name"] != account.adjacency:
            why = f"the student was chosen under {partition.get('name')}, the account is {account.adjacency}"
            return Doubt(why=why, factor=math.inf)
    public = dataset.get("benchmark", True) is True
    moved = "replacing a record changes the parts of others"
    if partition.get("name") == "replace_one" and str(dataset.get("_target_", "")).endswith("ImageFolder"):
        return Doubt(why=f"images under replace_one, listed by their names: {moved}", factor=math.inf)
    if partition.get("name") == "replace_one" and "fractions" in dataset and not dataset.get("public_path"):
        if dataset.get("roles", "hash") != "position":
            return Doubt(why=f"one file under replace_one, parted by its content: {moved}", factor=math.inf)
    elif partition.get("name") == "add_remove" and dataset.get("roles") == "position" and not public:
        why = f"roles by position under add_remove: {moved.replace('replacing', 'removing')}"
        return Doubt(why=why, factor=math.inf)
    return SOUND


def _longer(event: Event, factor: float) -> Event:
    """The same noise, for a value that a unit moves ``factor`` times as far."""
    if isinstance(event, Gaussian):
        return replace(event, mu=factor * event.mu)
    return replace(event, rho=factor**2 * event.rho) if isinstance(event, ZCDP) else event


def text(looked: int, found: list[Finding]) -> str:
    """The findings as text for the terminal."""
    lines = [f"{looked} releases looked at, {len(found)} claims too low"]
    for one in found:
        holds = "nothing may be claimed" if math.isinf(one.holds) else f"epsilon = {show_epsilon(one.holds)}"
        lines += [one.folder, f"  {one.claim}: said {show_epsilon(one.said)}; holds: {holds}", f"  ({one.why})"]
    if found:
        lines.append("Whoever was shown the lower figures should be told these.")
    return "\n".join(lines)


def payload(looked: int, found: list[Finding]) -> dict[str, Any]:
    """The findings as JSON for programs: null where nothing may be claimed."""
    rows = [{**asdict(one), "holds": one.holds if math.isfinite(one.holds) else None} for one in found]
    return {"releases": looked, "too_low": rows}
