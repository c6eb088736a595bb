"""Sites with keys in folders of their own, a joiner, and a confirmed charter."""

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pate_torch.sites.charter import Charter, Terms, make_charter, read_charter
from pate_torch.sites.keys import SiteState
from pate_torch.sites.pairs import accept_bundle, bundle_confirmations, confirm_charter
from pate_torch.sites.rounds import make_round

NAMES = ("Anna Hospital", "Universität B", "Clinic C", "Clinic D", "Clinic E")


def make_terms(num_sites: int, **changes) -> Terms:
    terms = {
        "colluding": min(1, num_sites - 2),
        "adjacency": "add_remove",
        "unit": "record",
        "delta": "1/100000",
        "classes": 10,
        "max_records": 1_000_000,
        "max_sites_per_unit": 1,
        "teachers": (100,) * num_sites,
        "records": (0,) * num_sites,
        "files": {"pool": "ab" * 32},
    }
    return Terms(**terms | changes)


@dataclass
class World:
    sites: list[SiteState]
    joiner: Ed25519PrivateKey
    charter: Charter
    confirmations: dict[str, bytes] = field(default_factory=dict)
    bundle: bytes = b""

    def ask(self, slot: int = 0, **changes) -> bytes:
        question = {"kind": "votes", "shape": (4, 3), "bound": 300, "sigma": Fraction(10)}
        return make_round(self.charter, self.joiner, slot=slot, **question | changes)


def make_charter_world(folder: Path, num_sites: int = 3, num_slots: int = 3, **changes) -> World:
    sites = [SiteState.create(folder / f"site-{i}", NAMES[i], num_slots) for i in range(num_sites)]
    joiner = Ed25519PrivateKey.generate()
    terms = make_terms(num_sites, **changes)
    return World(sites, joiner, read_charter(make_charter([s.key_file for s in sites], terms, joiner)))


def confirm_all(world: World) -> World:
    heard = world.charter.format_fingerprint()
    for number, site in enumerate(world.sites):
        world.confirmations[f"{number}.confirmed"] = confirm_charter(site, world.charter.raw, heard)
    world.bundle = bundle_confirmations(world.charter, world.confirmations, world.joiner)
    return world


def make_world(folder: Path, num_sites: int = 3, num_slots: int = 3, **changes) -> World:
    world = confirm_all(make_charter_world(folder, num_sites, num_slots, **changes))
    for site in world.sites:
        accept_bundle(site, world.bundle)
    return world
