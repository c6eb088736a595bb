"""The statement of a release of several sites: whom the guarantee trusts, and epsilon against each number of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pate_torch.accounting.accountant import Guarantee
from pate_torch.core.files import compute_file_digest, write_atomically
from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.privacy.records import EncoderCard
from pate_torch.release.report import format_route
from pate_torch.sites.joiner import Joiner

STATEMENT_FILE_NAME, RECORD_FILE_NAME = "statement.md", "sites.json"
RECORD_FORMAT = "pate_torch.sites/1"


def write_statement(joiner: Joiner, slot: int, release: Path) -> str:
    """Write the statement, and the files that prove its numbers, into the folder of a release; return the statement.

    The files are the charter, the round file, the public file and the sum file, all of which may be published.
    """
    names = ("charter.json", f"round-{slot}.json", f"round-{slot}.public", f"sum-{slot}.json")
    for name in names:
        write_atomically(release / name, (joiner.folder / name).read_bytes())
    charter, guarantees, total = joiner.charter, joiner.compute_guarantees(slot), joiner.compute_total()
    terms, num_sites = charter.terms, len(charter.sites)
    files = sorted(path.name for path in release.iterdir() if path.name not in (STATEMENT_FILE_NAME, RECORD_FILE_NAME))
    record = {
        "format": RECORD_FORMAT,
        "trust": "distributed",
        "colluding": terms.colluding,
        "sites": [{"name": site.site, "signing_key": site.signing_key.hex()} for site in charter.sites],
        "charter_sha256": charter.digest.hex(),
        "fingerprint": charter.format_fingerprint(),
        "guarantees": {str(colluding): asdict(guarantee) for colluding, guarantee in guarantees.items()},
        "total": asdict(total),
        "max_sites_per_unit": terms.max_sites_per_unit,
        "sha256": {name: compute_file_digest(release / name) for name in files},
    }
    lines = [
        "# Privacy statement",
        f"Trust: {format_trust(terms.colluding, num_sites)}. The records stayed at {num_sites} sites. Each site added "
        "noise and masks to a table of whole numbers, and the sum of all tables was released. The guarantee holds "
        f"against the joiner together with any {terms.colluding} of the sites, for the records of the other sites, as "
        "long as X25519 or ML-KEM-768, HKDF-SHA256, ChaCha20 and Ed25519 hold, and if the people of the sites compared "
        "the fingerprint of the charter.",
        "| who | epsilon |\n|---|---|\n" + "\n".join(_list_rows(guarantees, terms.colluding)),
        f"The largest total that a site reserved under this charter: {_format(total)}, aborted rounds included.",
        f"Each epsilon is at delta = {format_delta(total.delta)}, {total.adjacency}, unit {total.unit}, accountant "
        f"{', '.join(sorted({format_route(g.route) for g in (*guarantees.values(), total)}))}.",
        f"A unit has records at {terms.max_sites_per_unit} of the sites at most: declared, not checked. A unit with "
        "records at k times as many sites pays k mu.",
        "Not protected: a site as such (its mixture of classes), who answered and when, and the correctness of the "
        "sum, because a site may send any numbers.",
        *_describe_encoder(joiner.load_sum(slot).kind.encoder),
        "Sites: " + "; ".join(site.site for site in charter.sites) + ".",
        f"Fingerprint of the charter: {charter.format_fingerprint()}.",
    ]
    text = "\n\n".join(lines) + "\n"
    write_atomically(release / RECORD_FILE_NAME, json.dumps(record, indent=2, sort_keys=True) + "\n")
    write_atomically(release / STATEMENT_FILE_NAME, text)
    return text


def format_trust(colluding: int, num_sites: int) -> str:
    """Format whom a guarantee trusts, as in "distributed, t = 3 of 10"."""
    return f"distributed, t = {colluding} of {num_sites}"


def _describe_encoder(card: EncoderCard | None) -> list[str]:
    if card is None:
        return []
    tokenizer = f", tokenizer SHA-256 {card.tokenizer_sha256}" if card.tokenizer_sha256 else ""
    origin = f"license: {card.license or 'not declared'}; trained on: {card.trained_on or 'not declared'}"
    disjoint = " The joiner states that its training data contain no private record." if card.disjoint else ""
    return [f"The encoder is public: {card.name}, SHA-256 {card.sha256}{tokenizer}; {origin}.{disjoint}"]


def _format(guarantee: Guarantee) -> str:
    return f"epsilon {format_epsilon(guarantee.epsilon)}"


def _list_rows(guarantees: dict[int, Guarantee], colluding: int) -> list[str]:
    people = {0: "those who see the results only", colluding: f"the joiner and {colluding} site(s) (the guarantee)"}
    people |= {u: f"the joiner and {u} site(s)" for u in guarantees if u > colluding}
    if colluding == 0:
        people[0] = "the joiner without any site (the guarantee), and those who see the results only"
    return [f"| {people[u]} | {format_epsilon(guarantees[u].epsilon)} |" for u in sorted(people)]
