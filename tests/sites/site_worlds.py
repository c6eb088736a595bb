"""Sites with keys in folders of their own and no ledger, a joiner, and a confirmed charter."""

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pate_torch.sites import signed
from pate_torch.sites.charter import Charter, make_charter, read_charter
from pate_torch.sites.keys import SiteState
from pate_torch.sites.pairs import accept_bundle, bundle_confirmations, confirm_charter
from pate_torch.sites.rounds import make_round
from tests.sites.site_tables import make_terms

NAMES = ("Anna Hospital", "Universität B", "Clinic C", "Clinic D", "Clinic E")


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


def refuse(call, *arguments, match, **options):
    """Expect a ValueError of one line."""
    with pytest.raises(ValueError, match=match) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


def get_content(raw: bytes) -> dict:
    content = signed.decode_canonically(raw.partition(b"\n")[0])
    return {name: value for name, value in content.items() if name not in ("format", "body_bytes")}


def forge(raw: bytes, key, body: bytes | None = None, **changes) -> bytes:
    """Sign a file with another key, or again after changes of its content."""
    kind = signed.decode_canonically(raw.partition(b"\n")[0])["format"].split(" ", 1)[1]
    body = raw.partition(b"\n")[2][:-129] if body is None else body
    return signed.make_file(kind, get_content(raw) | changes, key, body)


def draw_nothing(share: Fraction, count: int) -> np.ndarray:
    return np.zeros(count, np.int64)
