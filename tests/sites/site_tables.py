"""Sites with small tables of private rows, a joiner, and public rows of the same population."""

import csv
import functools
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from pate_torch.privacy.domain import TableDomain
from pate_torch.privacy.ledger import open_ledger
from pate_torch.sites import training
from pate_torch.sites.charter import Terms
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.keys import SiteState
from pate_torch.sites.pairs import accept_bundle
from pate_torch.sites.rounds import accept_sum
from pate_torch.sites.site import Site
from pate_torch.sites.tables import Descent, TableKind

CLASSES = ("a", "b", "c")
SCHEMA = {
    "target": "y",
    "columns": {
        "f0": {"type": "real", "low": -4, "high": 4, "bins": 4},
        "f1": {"type": "real", "low": -4, "high": 4, "bins": 4},
        "y": {"type": "category", "values": list(CLASSES)},
    },
}


def make_rows(count: int, seed: int) -> dict[str, pa.Array]:
    random = np.random.default_rng(seed)
    center_CD = 1.5 * np.random.default_rng(5).normal(size=(len(CLASSES), 6))
    y_N = random.integers(0, len(CLASSES), count)
    x_ND = center_CD[y_N] + random.normal(size=(count, 6))
    table = {f"f{j}": pa.array([repr(float(value)) for value in x_ND[:, j]]) for j in range(6)}
    return table | {"y": pa.array([CLASSES[y] for y in y_N])}


def select_rows(table: dict[str, pa.Array], rows: list[int]) -> dict[str, pa.Array]:
    return {name: column.take(pa.array(rows, pa.int64())) for name, column in table.items()}


def write_csv(path: Path, rows: dict[str, pa.Array]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows)
        writer.writerows(zip(*(column.to_pylist() for column in rows.values()), strict=True))


PUBLIC = make_rows(300, 99)
RECORD_KINDS = ("class_sums", "histogram", "marginals")
"""Kinds of tables of one round that are counted without a site's store."""


def make_descent(steps: int = 3, clip_norm: float = 0.5) -> Descent:
    return training.make_descent(PUBLIC, "y", CLASSES, steps, clip_norm)


def add_weights(kind: Descent, scale: float = 3.0) -> Descent:
    generator = torch.Generator().manual_seed(1)
    return replace(kind, weight_DC=scale * torch.randn(kind.shape, dtype=torch.float64, generator=generator))


@functools.cache
def make_kind(name: str) -> TableKind:
    if name == "class_sums":
        return training.make_class_sums(PUBLIC, "y", CLASSES)
    if name == "histogram":
        return training.make_cell_counts(PUBLIC, "y", CLASSES, 20)
    return training.make_marginal_counts(TableDomain.from_dict(SCHEMA), 2)


def compute_squared_change(kind: TableKind, first, second) -> float:
    """Compute the squared length between two tables, whose numbers exceed 64 bits, over what is priced per record."""
    return sum(int(number) ** 2 for number in (first - second).ravel()) / kind.compute_squared_length("add_remove")


def make_terms(num_sites: int, **changes) -> Terms:
    terms = {
        "colluding": min(1, num_sites - 2),
        "adjacency": "add_remove",
        "unit": "record",
        "delta": "1/100000",
        "classes": len(CLASSES),
        "max_records": 100_000,
        "max_sites_per_unit": 1,
        "teachers": (0,) * num_sites,
        "records": (0,) * num_sites,
    }
    return Terms(**terms | changes)


@dataclass
class Consortium:
    """Sites that confirmed a charter, and the joiner."""

    sites: list[Site]
    joiner: Joiner
    data: list[dict[str, pa.Array]] = field(default_factory=list)

    def answer_all(self, round_raw: bytes, public_raw: bytes) -> dict[str, bytes]:
        pairs = zip(self.sites, self.data, strict=True)
        return {site.state.folder.name: site.answer(round_raw, public_raw, rows) for site, rows in pairs}

    def run_round(self, round_raw: bytes, public_raw: bytes) -> bytes:
        """Answer and sum a round, and give the sum to all sites."""
        _, total = self.joiner.sum(self.answer_all(round_raw, public_raw))
        for site in self.sites:
            accept_sum(site.state, total)
        return total


def make_consortium(
    folder: Path, num_sites: int = 3, cap: float = 2.0, num_rows: int = 200, number: int = 0, **changes
) -> Consortium:
    """Copy a consortium into a folder. Those of another ``number`` have other keys."""
    template = _make_template(num_sites, cap, number, tuple(sorted(changes.items())))
    shutil.copytree(template.name, folder, dirs_exist_ok=True)
    sites = [Site(SiteState(folder / f"site-{i}"), folder / f"home-{i}") for i in range(num_sites)]
    return Consortium(sites, Joiner(folder / "join"), [make_rows(num_rows, seed) for seed in range(num_sites)])


@functools.cache
def _make_template(num_sites: int, cap: float, number: int, changes) -> tempfile.TemporaryDirectory:
    template = tempfile.TemporaryDirectory()
    folder = Path(template.name)
    sites = [
        Site.create(folder / f"site-{i}", folder / f"home-{i}", name=f"Site {i}", account="scans", num_slots=4)
        for i in range(num_sites)
    ]
    joiner = Joiner(folder / "join")
    keys = {site.state.folder.name: site.state.key_file for site in sites}
    raw = joiner.create_charter(keys, make_terms(num_sites, **dict(changes)))
    words = joiner.charter.format_fingerprint()
    confirmations = {site.state.folder.name: site.confirm(raw, words, cap) for site in sites}
    bundle = joiner.bundle(confirmations)
    for site in sites:
        accept_bundle(site.state, bundle)
    return template


def get_charges(site: Site):
    with open_ledger(site.home, readonly=True) as ledger:
        return list(ledger.get_charges("scans").values())
