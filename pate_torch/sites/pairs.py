"""Pair secrets: ML-KEM-768 secrets that are exchanged once, and the chain that gives each slot a secret of its own.

When a site confirms the charter, it encapsulates a secret to every site at a higher place. The joiner bundles the
ciphertexts, and each site decapsulates those that are meant for it and erases its decapsulation key. Slot r uses
HKDF(S_r, "slot"), and S_(r+1) = HKDF(S_r, "next") replaces S_r before slot r is answered, so that later secrets do not
reveal earlier ones. The masks of a pair depend on this secret and on the X25519 secret of the slot. They stay hidden as
long as one of the two secrets stays hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pate_torch.core import checks
from pate_torch.sites.charter import MAX_SITES, Charter, read_charter
from pate_torch.sites.keys import Secrets, SiteState
from pate_torch.sites.signed import is_integer, is_list_of

CIPHERTEXT_BYTES = 1088
_CONFIRMATION_FIELDS = {"place": is_integer(0, MAX_SITES - 1)}
_BUNDLE_FIELDS = {"lengths": is_list_of(is_integer(1, 1 << 24), high=MAX_SITES)}


def confirm_charter(state: SiteState, charter_raw: bytes, heard: str) -> bytes:
    """Confirm a charter after people compared its fingerprint, and return the confirmation file with the ciphertexts.

    The same charter gives the same bytes again. ``heard`` are the 24 words that another site read aloud.

    Raises:
        ValueError: The charter lacks the unchanged keys of this site, or the words belong to another charter, or this
            site confirmed another charter with these keys.
    """
    charter = read_charter(charter_raw)
    with state.open() as secrets:
        digests = [hashlib.sha256(site.raw).hexdigest() for site in charter.sites]
        if secrets.key_file not in digests:
            problem = "does not have the keys of this site as the site made them"
            raise checks.error("charter", charter.digest.hex(), problem, "Do not take part, and tell the other sites.")
        if secrets.charter not in ("", charter.digest.hex()):
            fix = "Make new keys with `pate site init` for a new charter."
            raise checks.error("charter", charter.digest.hex(), "differs from the charter of these keys", fix)
        charter.check_fingerprint(heard)
        if not secrets.charter:
            _encapsulate(state, secrets, charter, digests.index(secrets.key_file))
        state.finish_pending("charter", secrets.charter)
        return state.finish_pending("confirmation", secrets.confirmation)


def _encapsulate(state: SiteState, secrets: Secrets, charter: Charter, place: int) -> None:
    ciphertexts = {}
    for peer in range(place + 1, len(charter.sites)):
        secret, ciphertexts[peer] = MLKEM768PublicKey.from_public_bytes(charter.sites[peer].kem_key).encapsulate()
        secrets.pair_secrets[str(peer)] = secret.hex()
        secrets.ciphertexts[str(peer)] = hashlib.sha256(ciphertexts[peer]).hexdigest()
    raw = charter.make_file("confirmation", {"place": place}, secrets.signer, b"".join(ciphertexts.values()))
    secrets.charter, secrets.place = charter.digest.hex(), place
    secrets.confirmation = hashlib.sha256(raw).hexdigest()
    state.write_pending("charter", charter.raw)
    state.write_pending("confirmation", raw)
    state.save(secrets)


def load_charter(state: SiteState, secrets: Secrets) -> Charter:
    """Load the charter that the site confirmed."""
    if not secrets.charter:
        raise checks.error("charter", "", "is not confirmed at this site", "Run `pate site confirm` first.")
    return read_charter(state.finish_pending("charter", secrets.charter))


def bundle_confirmations(charter: Charter, confirmations: Mapping[str, bytes], joiner_key: Ed25519PrivateKey) -> bytes:
    """Bundle the confirmation files of all sites, {name in messages: bytes}, into the file that each site needs."""
    by_place: dict[int, bytes] = {}
    for source, raw in confirmations.items():
        place, _ = _read_confirmation(charter, raw, source)
        if place in by_place:
            name = charter.sites[place].site
            raise checks.error("confirmation", source, f"is the second one of {name}", "Give one file for each site.")
        by_place[place] = raw
    for place, site in enumerate(charter.sites):
        if place not in by_place:
            raise checks.error("confirmation", site.site, "is missing", "Wait for the confirmation of every site.")
    files = [by_place[place] for place in range(len(charter.sites))]
    return charter.make_file("bundle", {"lengths": list(map(len, files))}, joiner_key, b"".join(files))


def _read_confirmation(charter: Charter, raw: bytes, source: str) -> tuple[int, dict[int, bytes]]:
    """Read a confirmation file and return its place and its ciphertexts by the place of the receiver."""
    file = charter.read_file(raw, "confirmation", _CONFIRMATION_FIELDS, source)
    place = file.content["place"]
    peers = range(place + 1, len(charter.sites))
    if len(file.body) != CIPHERTEXT_BYTES * len(peers):
        raise file.make_error("has a wrong number of ciphertexts", "Ask the site for a new confirmation.")
    parts = [file.body[start : start + CIPHERTEXT_BYTES] for start in range(0, len(file.body), CIPHERTEXT_BYTES)]
    return place, dict(zip(peers, parts, strict=True))


def accept_bundle(state: SiteState, raw: bytes, source: str = "") -> None:
    """Verify all confirmations, decapsulate the secrets of this site once, and erase the decapsulation key.

    A bundle that is given again changes nothing.
    """
    with state.open() as secrets:
        charter = load_charter(state, secrets)
        file = charter.read_file(raw, "bundle", _BUNDLE_FIELDS, source)
        lengths = file.content["lengths"]
        if len(lengths) != len(charter.sites) or sum(lengths) != len(file.body):
            raise file.make_error("must have one confirmation for each site of the charter")
        ciphertexts, start = {}, 0
        for expected_place, length in enumerate(lengths):
            confirmation = file.body[start : start + length]
            place, by_receiver = _read_confirmation(charter, confirmation, charter.sites[expected_place].site)
            if place != expected_place:
                raise file.make_error(f"has the confirmation of {charter.sites[place].site} in the place of another")
            if place == secrets.place and hashlib.sha256(confirmation).hexdigest() != secrets.confirmation:
                raise file.make_error("has another confirmation of this site than the site wrote")
            if place < secrets.place:
                ciphertexts[place] = by_receiver[secrets.place]
            start += length
        digests = {str(place): hashlib.sha256(value).hexdigest() for place, value in ciphertexts.items()}
        if not secrets.kem_seed:
            if not digests.items() <= secrets.ciphertexts.items():
                raise file.make_error("has other ciphertexts than the bundle that this site accepted before")
            return
        kem_key = MLKEM768PrivateKey.from_seed_bytes(bytes.fromhex(secrets.kem_seed))
        secrets.pair_secrets |= {str(place): kem_key.decapsulate(value).hex() for place, value in ciphertexts.items()}
        secrets.ciphertexts |= digests
        secrets.kem_seed = ""
        state.save(secrets)


def derive_slot_secret(pair_secret: bytes) -> bytes:
    """Derive the secret of slot r, which its masks use, from the pair secret S_r."""
    return HKDF(SHA256(), 32, salt=None, info=b"slot").derive(pair_secret)


def derive_next_secret(pair_secret: bytes) -> bytes:
    """Derive the pair secret S_(r+1) from S_r."""
    return HKDF(SHA256(), 32, salt=None, info=b"next").derive(pair_secret)


def take_slot(secrets: Secrets, slot: int) -> tuple[bytes, dict[int, bytes]]:
    """Return the private X25519 key of a slot and the secret of each pair, and erase both from ``secrets``.

    The keys of earlier slots are erased too. The caller saves ``secrets`` before anything depends on the keys.
    """
    private_key = bytes.fromhex(secrets.slot_keys[str(slot)])
    slot_secrets = {}
    for peer, text in secrets.pair_secrets.items():
        pair_secret = bytes.fromhex(text)
        for _ in range(secrets.next_slot, slot):
            pair_secret = derive_next_secret(pair_secret)
        slot_secrets[int(peer)] = derive_slot_secret(pair_secret)
        secrets.pair_secrets[peer] = derive_next_secret(pair_secret).hex()
    secrets.slot_keys = {number: key for number, key in secrets.slot_keys.items() if int(number) > slot}
    secrets.next_slot = slot + 1
    return private_key, slot_secrets
