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
from functools import partial
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return 0 if it succeeds, and 2 if it is refused."""
    parser = argparse.ArgumentParser(
        prog="pate site", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    options = {name: add_command(commands, name, text) for name, text in _HELP.items()}
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
    options["answer"].add_argument("--data", type=Path, required=True, help="private table, image folder or .npz file")
    options["answer"].add_argument(
        "--group", metavar="REGEX", help="regular expression that finds the unit in a file name"
    )
    add_encoder_options(options["answer"])
    options["answer"].add_argument("--keys", type=Path, help="file that `pate join keys` wrote, for the first round")
    options["answer"].add_argument("--sum", type=Path, help="sum file of the last round, for a later round")
    options["answer"].add_argument("--separator", default=",", help="separator of a CSV file (default: a comma)")
    return run_or_refuse(_COMMANDS, parser.parse_args(arguments))


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command to the subparsers ``commands``, with ``text`` as help and as description."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return parser


def add_encoder_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the files of the encoder that a public file names."""
    for name in ("weights", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, help=f"file of the encoder's {name}, if the round names an encoder")


def get_encoder_files(parsed: argparse.Namespace) -> dict[str, Path] | None:
    """Return the paths of the encoder's files, or None if there are none."""
    files = {"weights": parsed.weights, "tokenizer": parsed.tokenizer}
    return {name: path for name, path in files.items() if path is not None} or None


def run_or_refuse(commands: Mapping[str, Callable[[argparse.Namespace], None]], parsed: argparse.Namespace) -> int:
    """Run a command. If it refuses an argument or a file, print one line and return 2."""
    try:
        commands[parsed.command](parsed)
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
    _write(parsed.folder, "key", site.state.key_file, "Send it to the joiner.")


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
    _write(parsed.folder, "confirmed", site.confirm(raw, heard, parsed.cap), "Send it to the joiner.")


def _answer(parsed: argparse.Namespace) -> None:
    from pate_torch.sites.pairs import accept_bundle
    from pate_torch.sites.points import read_columns
    from pate_torch.sites.rounds import accept_sum, open_round

    site, raw = _open_site(parsed.folder), parsed.round.read_bytes()
    if parsed.keys is not None:
        accept_bundle(site.state, parsed.keys.read_bytes(), str(parsed.keys))
    if parsed.sum is not None:
        accept_sum(site.state, parsed.sum.read_bytes(), str(parsed.sum))
    current_round, _ = open_round(site.state, raw, str(parsed.round))
    path = parsed.round.with_name(current_round.public_name)  # refuses a path

    read_data = partial(read_columns, "data", parsed.data, parsed.separator, pattern=parsed.group)
    options = {"encoder": get_encoder_files(parsed), "source": str(parsed.round)}
    answer = site.answer(raw, path.read_bytes(), read_data, **options)
    _write(parsed.folder, f"answer-{current_round.slot}.pate", answer, "Send it to the joiner.")


def _get_home() -> Path:
    from pate_torch.core import run_folders

    return run_folders.check_root(run_folders.get_home_folder())


def _open_site(folder: Path) -> Any:
    from pate_torch.sites.keys import SiteState
    from pate_torch.sites.site import Site

    return Site(SiteState(folder), _get_home())


def _write(folder: Path, suffix: str, content: bytes, remark: str) -> None:
    from pate_torch.core.files import write_atomically

    path = Path(f"{folder.name}.{suffix}")
    write_atomically(path, content)
    print(f"Written to {path}. {remark}")


_HELP = {
    "init": "make the keys of a site, and write the key file for the joiner",
    "confirm": "confirm a charter, after people compared its 24 words",
    "answer": "charge the account, and write the masked answer to a round",
}
_COMMANDS = {"init": _init, "confirm": _confirm, "answer": _answer}
