"""Take part, with records that stay here, in a release of several sites that do not trust each other.

    pate site init    --account scans --name "Anna Hospital" --folder anna   # writes anna.key, for the joiner
    pate site confirm charter.json --folder anna --cap 1                     # people compare 24 words; anna.confirmed
    pate site answer  round-0.json --folder anna --keys keys.json --data patients.csv   # charges; anna.answer-0.pate
    pate site answer  round-0.json --folder anna --data scans/ --weights resnet18.pth   # images in scans/<class>/

The folder holds the private keys of the site. The ledger of the site is the one in PATE_HOME.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from pate_torch.sites.options import add_data_options, get_encoder_files, make_data_reader

Commands = Mapping[str, tuple[str, Callable[[argparse.Namespace], None]]]
"""Name of a command -> its help and its function."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return 0 if it succeeds, and 2 if it is refused."""
    parser = argparse.ArgumentParser(
        prog="pate site", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    options = {name: add_command(commands, name, text) for name, (text, _) in _COMMANDS.items()}
    for each in options.values():
        each.add_argument(
            "--folder", type=Path, default=Path("site"), help="folder of the private keys (default: site)"
        )
    options["init"].add_argument("--account", required=True, help="account of the records in the ledger of this site")
    options["init"].add_argument("--name", help="name of the site, for people (default: name of the folder)")
    options["init"].add_argument("--slots", type=int, default=16, help="rounds that the keys can answer (default: 16)")
    options["confirm"].add_argument("charter", type=Path, help="charter that the joiner wrote")
    options["confirm"].add_argument("--cap", type=float, required=True, help="largest total epsilon of the account")
    options["confirm"].add_argument(
        "--heard", metavar="WORDS", help="24 words that another site read aloud (default: ask for them)"
    )
    options["answer"].add_argument("round", type=Path, help="round file; its public file lies beside it")
    add_data_options(options["answer"])
    options["answer"].add_argument("--keys", type=Path, help="file that `pate join keys` wrote, for the first round")
    options["answer"].add_argument("--sum", type=Path, help="sum file of the last round, for a later round")
    return run_subcommand(_COMMANDS, parser.parse_args(arguments))


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command to the subparsers ``commands``, with ``text`` as help and as description."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return parser


def run_subcommand(commands: Commands, parsed: argparse.Namespace) -> int:
    """Run the function of ``parsed.command``. If it refuses an argument or a file, print one line and return 2."""
    try:
        commands[parsed.command][1](parsed)
    except BrokenPipeError:
        raise  # ``run_command`` ends silently
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "cryptography":
            raise
        print("error: this command needs cryptography. Install it: pip install 'pate-torch[sites]'.", file=sys.stderr)
        return 2
    except (ValueError, OSError, EOFError) as error:  # EOFError: nobody typed the words
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _init(parsed: argparse.Namespace) -> None:
    from pate_torch.sites.site import Site

    name = parsed.name or parsed.folder.name
    site = Site.create(parsed.folder, _get_home(), name=name, account=parsed.account, num_slots=parsed.slots)
    write_file(Path(f"{parsed.folder.name}.key"), site.state.key_file, "Send it to the joiner.")


def _confirm(parsed: argparse.Namespace) -> None:
    from pate_torch.core.formatting import format_delta
    from pate_torch.sites.charter import read_charter

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
    from pate_torch.sites.pairs import accept_bundle
    from pate_torch.sites.rounds import accept_sum, open_round

    site, raw = _open_site(parsed.folder), parsed.round.read_bytes()
    if parsed.keys is not None:
        accept_bundle(site.state, parsed.keys.read_bytes(), str(parsed.keys))
    if parsed.sum is not None:
        accept_sum(site.state, parsed.sum.read_bytes(), str(parsed.sum))
    current_round, _ = open_round(site.state, raw, str(parsed.round))
    path = parsed.round.with_name(current_round.public_name)  # refuses a path

    options = {"encoder": get_encoder_files(parsed), "source": str(parsed.round)}
    answer = site.answer(raw, path.read_bytes(), make_data_reader(parsed), **options)
    write_file(Path(f"{parsed.folder.name}.answer-{current_round.slot}.pate"), answer, "Send it to the joiner.")


def _get_home() -> Path:
    from pate_torch.core import run_folders

    return run_folders.check_root(run_folders.get_home_folder())


def _open_site(folder: Path) -> Any:
    from pate_torch.sites.keys import SiteState
    from pate_torch.sites.site import Site

    return Site(SiteState(folder), _get_home())


def write_file(path: Path, content: bytes, remark: str) -> None:
    """Write a file, and print its path and a remark."""
    from pate_torch.core.files import write_atomically

    write_atomically(path, content)
    print(f"Written to {path}. {remark}")


_COMMANDS: Commands = {
    "init": ("make the keys of a site, and write the key file for the joiner", _init),
    "confirm": ("confirm a charter, after people compared its 24 words", _confirm),
    "answer": ("charge the account, and write the masked answer to a round", _answer),
}
