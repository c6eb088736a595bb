"""Mailboxes: folders through which a program that the sites need not trust moves the files of the protocol.

Flower and NVIDIA FLARE run code at a site that their server sent. Such a transport must reach neither the records nor
the keys of the site, so it runs as a user of its own, and this user reaches nothing but a mailbox:

    anna-mail/inbox     charter.json, keys.json, round-0.json, round-0.public, sum-0.json    # what the joiner sent
    anna-mail/outbox    site.key, site.confirmed, answer-0.pate                              # what the joiner gets

The site reads the inbox with programs of its own: with ``pate site``, or with this command, which runs until it is
stopped. The command confirms no charter, and answers only under the charter that ``pate site confirm`` confirmed.

    python -m pate_torch.sites.mailbox anna-mail --folder anna --data patients.csv
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pate_torch.sites.options import DATA_ARGUMENTS, get_encoder_files, make_data_reader

if TYPE_CHECKING:
    from pate_torch.sites.joiner import Joiner
    from pate_torch.sites.site import Site

# What imports torch is imported inside functions, because a transport starts a process for each exchange.
_TO_SITES = re.compile(r"charter\.json|keys\.json|round-\d+\.(json|public)|sum-\d+\.json")
_TO_JOINER = re.compile(r"site\.key|site\.confirmed|answer-\d+\.pate")
Exchange = Callable[[Mapping[str, bytes]], Iterable[Mapping[str, bytes]]]
"""Function that sends files to all sites, by name, and returns the files that each site sent back."""

# ---- what a transport calls ------------------------------------------------------------------------------------------


def exchange_files(mailbox: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Put files of the joiner into the inbox of a site, and return the files of its outbox, without any check."""
    for name, raw in files.items():
        path = mailbox / "inbox" / name
        if _TO_SITES.fullmatch(name) and not (path.exists() and path.read_bytes() == raw):
            temporary = path.with_name(f".{name}")
            temporary.write_bytes(raw)
            temporary.replace(path)
    outgoing = [path for path in (mailbox / "outbox").iterdir() if _TO_JOINER.fullmatch(path.name)]
    return {path.name: path.read_bytes() for path in sorted(outgoing)}


def run_joiner(joiner: Joiner, exchange: Exchange, *, num_sites: int, seconds: float, pause_seconds: float) -> None:
    """Exchange files with all sites until the joiner has all files that it waits for, and send what it made of them.

    The joiner waits for the key files of all sites if it has no charter, for all confirmations if it has no bundle of
    keys, and for all answers if its newest round has no sum.

    Args:
        joiner: The joiner.
        exchange: Function that exchanges files with all sites.
        num_sites: Number of sites.
        seconds: Time after which the function gives up.
        pause_seconds: Time between two exchanges.

    Raises:
        ValueError: Files are missing or cannot be used after ``seconds``.
    """
    from pate_torch.core import checks

    end = time.monotonic() + seconds
    while problem := take_replies(joiner, exchange(load_outgoing(joiner)), num_sites):
        if time.monotonic() > end:
            fix = "Nothing is lost: start the transport again, and it goes on."
            raise checks.error("seconds", seconds, f"are over, and this was not done: {problem.rstrip('.')}", fix)
        time.sleep(pause_seconds)
    exchange(load_outgoing(joiner))


# ---- at the joiner ---------------------------------------------------------------------------------------------------


def load_outgoing(joiner: Joiner) -> dict[str, bytes]:
    """Load what all sites need now: the charter, the bundle of keys, the newest sum and the newest round."""
    rounds, sums = _list_slots(joiner)
    names = ["charter.json", "keys.json", *(f"sum-{slot}.json" for slot in sums[-1:])]
    for slot in rounds[-1:]:
        names += [f"round-{joiner.list_slots(slot)[0]}.public", f"round-{slot}.json"]
    return {name: (joiner.folder / name).read_bytes() for name in names if (joiner.folder / name).exists()}


def take_replies(joiner: Joiner, replies: Iterable[Mapping[str, bytes]], num_sites: int) -> str:
    """Store the files of the sites, and bundle the keys or add up the answers. Return why this failed, or ""."""
    from pate_torch.core.files import write_atomically

    received: dict[str, dict[str, bytes]] = {}
    folder = joiner.folder / "received"
    folder.mkdir(parents=True, exist_ok=True)
    for reply in replies:
        for name, raw in reply.items():
            if _TO_JOINER.fullmatch(name):  # the same bytes have the same name, however often they are delivered
                source = f"{hashlib.sha256(raw).hexdigest()[:16]}.{name}"
                received.setdefault(name, {})[source] = raw
                write_atomically(folder / source, raw)
    if not (joiner.folder / "charter.json").exists():
        count = len(received.get("site.key", {}))
        return "" if count >= num_sites else f"{count} of {num_sites} key files were received"
    rounds, sums = _list_slots(joiner)
    try:
        if not (joiner.folder / "keys.json").exists():
            write_atomically(joiner.folder / "keys.json", joiner.bundle(received.get("site.confirmed", {})))
        if rounds and rounds[-1] not in sums:
            joiner.sum(received.get(f"answer-{rounds[-1]}.pate", {}))
    except ValueError as error:
        return str(error)
    return ""


def _list_slots(joiner: Joiner) -> tuple[list[int], list[int]]:
    """List the slots of all rounds and of all sums. The record of the joiner lists no file that a crash left."""
    path = joiner.folder / "joiner.json"
    record = json.loads(path.read_text()) if path.exists() else {"rounds": {}, "sums": {}}
    return sorted(map(int, record["rounds"])), sorted(map(int, record["sums"]))


# ---- at a site -------------------------------------------------------------------------------------------------------


def answer_inbox(site: Site, mailbox: Path, read_data: Callable[..., Any], encoder: Any = None) -> str:
    """Answer the newest round in the inbox, if people confirmed its charter. Return why this was refused, or "".

    Only the site may see the returned text, because the text may tell how many records there are.
    """
    from pate_torch.core.files import write_atomically
    from pate_torch.sites.pairs import accept_bundle
    from pate_torch.sites.rounds import accept_sum, open_round

    inbox, outbox = mailbox / "inbox", mailbox / "outbox"
    write_atomically(outbox / "site.key", site.state.key_file)
    with site.state.open() as secrets:
        if not secrets.charter:
            return ""
        confirmation = site.state.finish_pending("confirmation", secrets.confirmation)
    write_atomically(outbox / "site.confirmed", confirmation)
    try:
        if not (inbox / "keys.json").exists():
            return ""
        accept_bundle(site.state, (inbox / "keys.json").read_bytes(), "keys.json")
        for slot in _find_newest(inbox, "sum"):
            accept_sum(site.state, (inbox / f"sum-{slot}.json").read_bytes(), f"sum-{slot}.json")
        for slot in _find_newest(inbox, "round"):
            name, path = f"round-{slot}.json", inbox / f"round-{slot}.json"
            public = path.with_name(open_round(site.state, path.read_bytes(), name)[0].public_name).read_bytes()
            answer = site.answer(path.read_bytes(), public, read_data, encoder=encoder, source=name)
            write_atomically(outbox / f"answer-{slot}.pate", answer)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _find_newest(inbox: Path, kind: str) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in inbox.glob(f"{kind}-*.json"))[-1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer rounds that arrive in a mailbox, until the time is over or the command is stopped."""
    from pate_torch.core import run_folders
    from pate_torch.sites.keys import SiteState
    from pate_torch.sites.site import Site

    description = "Answer the rounds that arrive in a mailbox, under a charter that people have confirmed by pate site."
    parser = argparse.ArgumentParser(prog="python -m pate_torch.sites.mailbox", description=description)
    parser.add_argument("mailbox", type=Path, help="folder that the transport reaches")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the private keys")
    for name, options in DATA_ARGUMENTS:
        parser.add_argument(name, **options)
    parser.add_argument("--seconds", type=float, default=math.inf, help="seconds to run (default: without end)")
    parsed = parser.parse_args(arguments)
    site = Site(SiteState(parsed.folder), run_folders.find_home())
    read_data, encoder = make_data_reader(parsed), get_encoder_files(parsed)
    for name in ("inbox", "outbox"):
        (parsed.mailbox / name).mkdir(parents=True, exist_ok=True)
    end, seen = time.monotonic() + parsed.seconds, None
    while time.monotonic() < end:
        paths = [parsed.folder / "secrets.json", *sorted((parsed.mailbox / "inbox").glob("[!.]*"))]
        state = [(path.name, path.stat().st_mtime_ns) for path in paths]
        if state != seen:  # a round that was refused is not tried again before something changes
            problem = answer_inbox(site, parsed.mailbox, read_data, encoder)
            if problem:
                print(f"refused: {problem}", file=sys.stderr, flush=True)
            seen = state
        time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
