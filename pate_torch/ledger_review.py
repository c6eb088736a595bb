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

from pate_torch.accounting.events import ZCDP, Event, Gaussian
from pate_torch.accounting.shown import show_epsilon
from pate_torch.ledger import CHOICE, PRICE, Account, Charge, Entry, Ledger
from pate_torch.ledger_accounts import State, apply

_SLACK = 1e-9  # relative: the same events summed in another order


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim that was too low. said: what was claimed; holds: what may be (infinite: nothing may); why, in words."""

    folder: str
    claim: str
    said: float
    holds: float
    why: str


def review(ledger: Ledger) -> tuple[int, list[Finding]]:
    """(release folders looked at, claims that were too low), over all runs under the ledger's own root."""
    root, entries = ledger.path.parent, ledger.entries()
    looked, found = 0, list[Finding]()
    for file in sorted(root.glob("runs/*/*/*/release/summary.json")):
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # half written
        if not isinstance(summary, dict) or summary.get("private") is not True:
            continue  # claims nothing
        looked += 1
        found += _folder(file.parent, str(file.parent.relative_to(root)), summary, entries)
    return looked, found


def _folder(release: Path, folder: str, summary: Mapping[str, Any], entries: tuple[Entry, ...]) -> Iterator[Finding]:
    def finding(claim: str, said: Any, holds: float, why: str) -> Iterator[Finding]:
        if isinstance(said, int | float) and holds > said * (1 + _SLACK):
            yield Finding(folder=folder, claim=claim, said=float(said), holds=holds, why=why)

    state = _at(summary.get("ledger_head"), str(summary.get("dataset")), entries)
    if state is None:
        yield from finding("this release", summary.get("epsilon"), math.inf, "the ledger does not know it")
        return
    account = state.view(str(summary["dataset"]))
    parts = _parts(release, summary, state)
    why, factor = _unsound(release.parent / ".hydra" / "config.yaml", account, parts)
    events = [event for charge in parts.values() for event in charge.planned]
    holds = math.inf
    if not any(charge.insecure for charge in parts.values()) and math.isfinite(factor) and events:
        claimed = replace(account, private=True).claim([_longer(event, factor) for event in events])
        holds = math.inf if claimed is None else claimed.epsilon
    elif any(charge.insecure for charge in parts.values()):
        why = "its noise was seeded in part"
    what = ", ".join(charge.what for charge in parts.values())
    yield from finding("this release", summary.get("epsilon"), holds, why or f"of all that lies there: {what}")
    total = account.guarantee
    why = "a release of the account used seeded noise" if total is None else "of what was reserved, not what came out"
    holds = math.inf if total is None else total.epsilon
    yield from finding("all releases together", summary.get("epsilon_charged"), holds, why)


def _at(head: Any, name: str, entries: tuple[Entry, ...]) -> State | None:
    """The account as it stood when the ledger's newest entry was ``head``; None: it had none, or no such entry."""
    accounts: dict[str, State] = {}
    for entry in entries:
        apply(accounts, entry)
        if entry.hash == head:
            return accounts.get(name)
    return None


def _parts(release: Path, summary: Mapping[str, Any], state: State) -> dict[str, Charge]:
    """The reservations whose outputs lie in this folder, by id."""
    run, labels = release.parent.name, summary.get("release_id")
    kinds = {CHOICE: True, PRICE: (release / "sanitised.json").exists()}
    return {
        identity: charge
        for identity, charge in state.charges.items()
        if identity == labels
        or (charge.run == run and kinds.get(charge.what, False))
        or (charge.run == run and labels is None and summary.get("mechanism") == "dpsgd" and "DP-SGD" in charge.what)
    }


def _unsound(config: Path, account: Account, parts: Mapping[str, Charge]) -> tuple[str, float]:
    """(why the options of the run bounded less than they charged for, by what factor); ("", 1): nothing is known."""
    try:
        options = yaml.safe_load(config.read_text(encoding="utf-8"))
        partition, voting, dataset = options["partition"], options["voting"], options["dataset"]
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return "", 1.0  # a run from Python: its options are not on disk
    name = voting.get("name")
    if partition.get("capacity") is not None and name in ("census", "slopes"):
        if account.unit != "record":
            return "partition.capacity: a group more displaces as many records as it has", math.inf
        further = {"census": math.sqrt(2), "slopes": 2.0}[name]
        return "partition.capacity: a record more displaces another's answer", further
    if any(charge.what == CHOICE for charge in parts.values()):
        unit = "record" if not dataset.get("group") else f"group:{dataset['group']}"
        if "group" in dataset and unit.partition(":")[0] != account.unit.partition(":")[0]:
            return f"the student was chosen for unit {unit}, the account is of {account.unit}", math.inf
        if partition.get("name") != account.adjacency:
            return f"the student was chosen under {partition.get('name')}, the account is {account.adjacency}", math.inf
    public = dataset.get("benchmark", True) is True
    moved = "replacing a record changes the parts of others"
    if partition.get("name") == "replace_one" and "fractions" in dataset and not dataset.get("public_path"):
        if dataset.get("roles", "hash") != "position":
            return f"one file under replace_one, parted by its content: {moved}", math.inf
    elif partition.get("name") == "add_remove" and dataset.get("roles") == "position" and not public:
        return f"roles by position under add_remove: {moved.replace('replacing', 'removing')}", math.inf
    return "", 1.0


def _longer(event: Event, factor: float) -> Event:
    """The same noise, for a value that a unit moves ``factor`` times as far."""
    if isinstance(event, Gaussian):
        return replace(event, mu=factor * event.mu)
    return replace(event, rho=factor**2 * event.rho) if isinstance(event, ZCDP) else event


def text(looked: int, found: list[Finding]) -> str:
    """For the terminal."""
    lines = [f"{looked} releases looked at, {len(found)} claims too low"]
    for one in found:
        holds = "nothing may be claimed" if math.isinf(one.holds) else f"epsilon = {show_epsilon(one.holds)}"
        lines += [one.folder, f"  {one.claim}: said {show_epsilon(one.said)}; holds: {holds}", f"  ({one.why})"]
    if found:
        lines.append("Whoever was shown the lower figures should be told these.")
    return "\n".join(lines)


def payload(looked: int, found: list[Finding]) -> dict[str, Any]:
    """For programs: null where nothing may be claimed."""
    rows = [{**asdict(one), "holds": one.holds if math.isfinite(one.holds) else None} for one in found]
    return {"releases": looked, "too_low": rows}
