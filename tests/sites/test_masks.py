"""Masks: the test vectors, cancellation, and what an attacker learns, by enumeration of the joint law."""

import hashlib
import hmac
import itertools
import json
import math
import struct
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from pate_torch.sites import masks, pairs

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())


def sha(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def get_public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


CASE = {"charter": sha("charter"), "round_digest": sha("round"), "places": (0, 1), "count": 4}


def hkdf(secret, salt, info):
    """RFC 5869 for one block of output."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\x01", "sha256")


def chacha20_block(key, counter):
    """RFC 8439 with a nonce of zeros."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, 0, 0, 0]
    x = start.copy()

    def rotate(value, bits):
        return (value << bits | value >> 32 - bits) & 0xFFFFFFFF

    def quarter(a, b, c, d):
        for target, source, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[target] = (x[target] + x[source]) & 0xFFFFFFFF
            x[mixed] = rotate(x[mixed] ^ x[target], bits)

    for _ in range(10):
        for column in range(4):
            quarter(column, column + 4, column + 8, column + 12)
        for row in range(4):
            quarter(row, (row + 1) % 4 + 4, (row + 2) % 4 + 8, (row + 3) % 4 + 12)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(x, start, strict=True)))


def words(key):
    return [f"{int(value):016x}" for value in masks.expand_mask(key, 4)]


def test_the_vector_without_ml_kem():
    secret = masks.compute_shared_secret(sha("site 0"), get_public(sha("site 1")))
    assert secret == masks.compute_shared_secret(sha("site 1"), get_public(sha("site 0")))
    assert secret.hex() == VECTORS["x25519_secret"]
    key = masks.derive_mask_key(secret, **CASE, ciphertext=b"")
    assert key.hex() == VECTORS["without_ml_kem"]["mask_key"]
    assert words(key) == VECTORS["without_ml_kem"]["mask"]


def test_the_vector_with_ml_kem():
    vector = VECTORS["with_ml_kem"]
    ciphertext = bytes.fromhex(vector["ciphertext"])
    private = MLKEM768PrivateKey.from_seed_bytes(hashlib.sha512(b"site 1 kem").digest())
    assert hashlib.sha256(private.public_key().public_bytes_raw()).hexdigest() == vector["public_key_sha256"]
    pair_secret = private.decapsulate(ciphertext)
    assert pair_secret.hex() == vector["pair_secret_0"] and len(ciphertext) == pairs.CIPHERTEXT_BYTES
    for _ in range(2):
        pair_secret = pairs.derive_next_secret(pair_secret)
    slot_secret = pairs.derive_slot_secret(pair_secret)
    assert (pair_secret.hex(), slot_secret.hex()) == (vector["pair_secret_2"], vector["slot_secret_2"])
    secret = bytes.fromhex(VECTORS["x25519_secret"]) + slot_secret
    key = masks.derive_mask_key(secret, **CASE, ciphertext=hashlib.sha256(ciphertext).digest())
    assert key.hex() == vector["mask_key"] and words(key) == vector["mask"]


def test_keys_and_masks_are_those_of_the_standards():
    ciphertext, secret = sha("c"), sha("z") + sha("s")
    info = b"pate-sites-1 mask\0" + sha("round") + bytes([0, 0, 1, 0, 64, 4, 0, 0, 0, 0, 0, 0, 0]) + ciphertext
    key = masks.derive_mask_key(secret, **CASE, ciphertext=ciphertext)
    assert key == hkdf(secret, sha("charter"), info)
    assert pairs.derive_next_secret(key) == hkdf(key, bytes(32), b"next")
    assert pairs.derive_slot_secret(key) == hkdf(key, bytes(32), b"slot")
    stream = chacha20_block(key, 0) + chacha20_block(key, 1)
    assert masks.expand_mask(key, 16).tolist() == np.frombuffer(stream, "<u8").tolist()


def test_the_key_depends_on_everything_that_sites_must_agree_on():
    case = {"secret": sha("z"), **CASE, "ciphertext": sha("c")}
    changes = {name: sha("x") for name in ("charter", "round_digest", "ciphertext", "secret")} | {"count": 5}
    cases = [case, case | {"places": (0, 2)}, case | {"places": (1, 2)}]
    cases += [case | {name: value} for name, value in changes.items()]
    assert len({masks.derive_mask_key(**each) for each in cases}) == len(cases) == 8


def test_masks_cancel_and_signs_return():
    rng, num_sites = np.random.default_rng(0), 6
    pair_masks = {
        pair: rng.integers(0, 1 << 64, 50, dtype=np.uint64) for pair in itertools.combinations(range(num_sites), 2)
    }
    values = rng.integers(-(1 << 60), 1 << 60, (num_sites, 50))
    values[:, 0] = [-(1 << 63) + 5, -1, -1, -1, -1, -1]  # the most negative sum
    total = np.zeros(50, np.uint64)
    for place in range(num_sites):
        own = {a + b - place: mask for (a, b), mask in pair_masks.items() if place in (a, b)}
        masked = masks.apply_masks(values[place], own, place)
        assert masked.dtype == np.uint64
        total += masked
    assert np.array_equal(total.view(np.int64), values.sum(0)) and values.sum(0)[0] == -(1 << 63)


def test_masks_are_added_to_whole_numbers_alone():
    for dtype in (np.float64, np.int32, np.uint64):
        with pytest.raises(TypeError, match=f"must be of type int64, and are of type {np.dtype(dtype)}"):
            masks.apply_masks(np.zeros(3, dtype), {1: np.ones(3, np.uint64)}, 0)


# ---- what an attacker learns: all values of the masks of a toy world of 3 bits -------------------------------------

NOISE = {-1: Fraction(1, 4), 0: Fraction(1, 2), 1: Fraction(1, 4)}
PAIRS = list(itertools.combinations(range(3), 2))


def compute_view_law(tables, colluding, missing=(), reused=False, noise=NOISE):
    """Exact law of all that the joiner and the colluding sites see, for 3 sites and tables of one number modulo 8.

    They see all answers but those of ``missing`` and the masks of the colluding sites, whose tables and noise they
    know. With ``reused``, the same masks are used in a second round, where the first site's table is one larger.
    """
    law, mask_NP = Counter(), np.array(list(itertools.product(range(8), repeat=3)), np.uint64)
    honest, pair_masks = (
        [place for place in range(3) if place not in colluding],
        dict(zip(PAIRS, mask_NP.T, strict=True)),
    )
    for draws in itertools.product(noise, repeat=len(honest) * (1 + reused)):
        views = [mask for pair, mask in pair_masks.items() if set(pair) & set(colluding)]
        for number, draw in enumerate(draws):
            place, is_second = honest[number % len(honest)], number >= len(honest)
            value_N = np.full(8**3, tables[place] + (is_second and place == 0) + draw)
            own = {sum(pair) - place: mask for pair, mask in pair_masks.items() if place in pair}
            if place not in missing:
                views.append(masks.apply_masks(value_N, own, place) % 8)
        probability = math.prod((noise[draw] for draw in draws), start=Fraction(1, 8**3))
        for view in zip(*(view.tolist() for view in views), strict=True):
            law[view] += probability
    assert sum(law.values()) == 1
    return law


@pytest.mark.parametrize(
    ("colluding", "noise"), [({2}, NOISE), (set(), {0: Fraction(1)})], ids=["one site", "the joiner alone"]
)
def test_attackers_learn_the_honest_sum_and_its_noise_alone(colluding, noise):
    law = compute_view_law((1, 5, 3), colluding, noise=noise)
    for tables in ((4, 2, 3), (7, -1, 3)):
        assert law == compute_view_law(tables, colluding, noise=noise)
    assert law != compute_view_law((1, 6, 3), colluding, noise=noise)


def test_two_colluding_sites_learn_the_table_of_the_third_under_its_own_noise():
    """The view is the sum of the honest table and its noise, beside uniform masks, and nothing else."""
    for table in range(8):
        law = compute_view_law((table, 0, 0), colluding={1, 2})
        expected = Counter()
        for a, b, c in itertools.product(range(8), repeat=3):
            for draw, probability in NOISE.items():
                expected[(a, b, c, (table + draw + a + b) % 8)] += probability / 8**3
        assert law == expected


def test_with_an_honest_answer_missing_all_tables_look_alike():
    for missing in ({0}, {1}):
        laws = [compute_view_law((a, b, 0), {2}, missing) for a, b in ((0, 0), (1, 5), (3, 3))]
        assert laws[0] == laws[1] == laws[2]
        assert len(laws[0]) == 8**3 and set(laws[0].values()) == {Fraction(1, 8**3)}  # two masks and one answer


def test_a_reused_mask_shows():
    """The enumeration finds the fault: two answers under the same masks show the change, though a third is missing.

    Under fresh masks the two views are independent, and the test above says that neither depends on a table.
    """
    no_noise = {0: Fraction(1)}
    reused = [compute_view_law(t, {2}, missing={1}, reused=True, noise=no_noise) for t in ((0, 0, 0), (3, 3, 0))]
    differences = [{(view[-1] - view[-2]) % 8 for view in law} for law in reused]
    assert differences == [{1}, {1}]  # the change of the first site's table is open, whatever the masks
