"""Take part, with records that stay here, in a release of several sites that do not trust each other.

    pate site init    --account scans --name "Anna Hospital" --folder anna   # writes anna.key, for the joiner
    pate site confirm charter.json --folder anna --cap 1                     # people compare 24 words; anna.confirmed
    pate site answer  round-0.json --folder anna --keys keys.json --data patients.csv   # charges; anna.answer-0.pate
    pate site answer  round-0.json --folder anna --data scans/ --weights resnet18.pth   # images in scans/<class>/

The folder holds the private keys of the site. The ledger of the site is the one in PATE_HOME.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from pate_torch.core import run_folders
from pate_torch.core.files import write_atomically
from pate_torch.core.formatting import format_delta
from pate_torch.sites.charter import read_charter
from pate_torch.sites.keys import SiteState
from pate_torch.sites.options import get_encoder_files, make_data_reader
from pate_torch.sites.pairs import accept_bundle
from pate_torch.sites.rounds import accept_sum, open_round
from pate_torch.sites.site import Site


def main(parsed: argparse.Namespace) -> int:
    """Run one subcommand and return its exit code."""
    {"init": _init, "confirm": _confirm, "answer": _answer}[parsed.command](parsed)
    return 0


def _init(parsed: argparse.Namespace) -> None:
    name = parsed.name or parsed.folder.name
    site = Site.create(
        parsed.folder, run_folders.find_home(), name=name, account=parsed.account, num_slots=parsed.slots
    )
    write_file(Path(f"{parsed.folder.name}.key"), site.state.key_file, "Send it to the joiner.")


def _confirm(parsed: argparse.Namespace) -> None:
    raw, site = parsed.charter.read_bytes(), _open_site(parsed.folder)
    charter = read_charter(raw, str(parsed.charter))
    terms, delta = charter.terms, format_delta(float(Fraction(charter.terms.delta)))
    print("\n".join(f"Site {number}: {each.site}" for number, each in enumerate(charter.sites, 1)))
    print(f"Trust: distributed, t = {terms.colluding} of {len(charter.sites)}; delta = {delta}, {terms.adjacency},")
    print(f"unit {terms.unit}, at {terms.max_sites_per_unit} site(s) at most (declared, not checked).")
    if any(terms.teachers):
        print(f"Teachers of each site: {', '.join(map(str, terms.teachers))}.")
    print("Take part only if you know every site. Call the other sites, not the joiner, and read these words to them:")
    print(f"\n  {charter.format_fingerprint()}\n")
    heard = input("Words that another site read to you: ") if parsed.heard is None else parsed.heard
    confirmation = site.confirm(raw, heard, parsed.cap)
    write_file(Path(f"{parsed.folder.name}.confirmed"), confirmation, "Send it to the joiner.")


def _answer(parsed: argparse.Namespace) -> None:
    site, raw = _open_site(parsed.folder), parsed.round.read_bytes()
    if parsed.keys is not None:
        accept_bundle(site.state, parsed.keys.read_bytes(), str(parsed.keys))
    if parsed.sum is not None:
        accept_sum(site.state, parsed.sum.read_bytes(), str(parsed.sum))
    current_round, _ = open_round(site.state, raw, str(parsed.round))
    path = parsed.round.with_name(current_round.public_name)  # refuses a path

    public, read_data, encoder = path.read_bytes(), make_data_reader(parsed), get_encoder_files(parsed)
    answer = site.answer(raw, public, read_data, encoder=encoder, source=str(parsed.round))
    write_file(Path(f"{parsed.folder.name}.answer-{current_round.slot}.pate"), answer, "Send it to the joiner.")


def _open_site(folder: Path) -> Site:
    return Site(SiteState(folder), run_folders.find_home())


def write_file(path: Path, content: bytes, remark: str) -> None:
    """Write a file, and print its path and a remark."""
    write_atomically(path, content)
    print(f"Written to {path}. {remark}")
