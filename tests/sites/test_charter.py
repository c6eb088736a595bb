"""The charter and its 24 words."""

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pate_torch.sites import signed
from pate_torch.sites.charter import decode_words, encode_words, load_words, make_charter, read_charter
from pate_torch.sites.keys import SiteState
from tests.sites.site_tables import make_terms
from tests.sites.site_worlds import forge, get_content, make_charter_world, refuse

JOINER = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_charter_world(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="module")
def key_files(world):
    return [site.key_file for site in world.sites]


def make_key_file(name="X", **changes):
    """A key file of an attacker, who signs what others would not."""
    key = Ed25519PrivateKey.generate()
    own = {"site": name, "signing_key": key.public_key().public_bytes_raw().hex()}
    return signed.make_file("key file", own | changes, key)


def test_a_charter_is_read_as_it_was_written(key_files):
    raw = make_charter(key_files, make_terms(3), JOINER)
    charter = read_charter(raw)
    assert [site.raw for site in charter.sites] == key_files and charter.terms == make_terms(3)
    assert charter.digest == hashlib.sha256(raw).digest() and charter.num_slots == 3
    assert make_charter(key_files, make_terms(3), JOINER) == raw
    assert len(raw) * 10 / 3 < 60_000  # ten sites


def test_any_change_of_order_keys_or_terms_changes_the_words(key_files):
    variants = [
        make_charter(key_files, make_terms(3), JOINER),
        make_charter(key_files[::-1], make_terms(3), JOINER),
        make_charter(key_files[:2], make_terms(2), JOINER),
        make_charter(key_files, make_terms(3, colluding=0), JOINER),
        make_charter(key_files, make_terms(3, delta="1/1000000"), JOINER),
        make_charter(key_files, make_terms(3, max_records=9), JOINER),
        make_charter(key_files, make_terms(3), Ed25519PrivateKey.generate()),
    ]
    fingerprints = [read_charter(raw).format_fingerprint() for raw in variants]
    assert len(set(fingerprints)) == len(variants)
    charter = read_charter(variants[0])
    charter.check_fingerprint(fingerprints[0].upper() + "\n")
    for fingerprint in fingerprints[1:]:
        with pytest.raises(ValueError, match="are those of another charter"):
            charter.check_fingerprint(fingerprint)


@pytest.mark.parametrize(
    ("terms", "match"),
    [
        ({"colluding": 2}, "colluding=2: must be at most 1 of 3 sites"),
        ({"colluding": -1}, "'colluding'"),
        ({"adjacency": "both"}, "'adjacency'"),
        ({"delta": "0"}, "'delta'"),
        ({"delta": "1"}, "'delta'"),
        ({"delta": 1e-5}, "floating-point number"),
        ({"max_records": 1 << 22}, "'max_records'"),
        ({"max_sites_per_unit": 4}, "has units at 4 sites, and only 3 sites"),
        ({"max_sites_per_unit": 0}, "'max_sites_per_unit'"),
        ({"teachers": (1, 2)}, "must give a number of teachers and a number of records for each site"),
        ({"adjacency": "replace_one"}, "must state the records of each site under replace_one"),
        ({"adjacency": "replace_one", "unit": "group:p", "records": (9,) * 3}, "protects single records"),
        ({"unit": "group:\x1b[2J"}, "'unit'"),
        ({"sampler": "older"}, "'sampler'"),
        ({"accounting": "older"}, "'accounting'"),
    ],
)
def test_bad_terms_are_refused(key_files, terms, match):
    refuse(make_charter, key_files, make_terms(3, **terms), JOINER, match=match)


def test_bad_keys_are_refused(world, key_files):
    honest, fresh_file = key_files[0], SiteState.create(world.sites[0].folder.parent / "fresh", "F", 3).key_file
    honest, fresh = (
        {name: get_content(raw)[name] for name in ("slot_keys", "kem_key")} for raw in (honest, fresh_file)
    )
    zero = ["00" * 32, "01" + "00" * 31]  # points of small order
    prime = (2**255 - 19 + 9).to_bytes(32, "little").hex()  # another form of 9
    for changes, match in (
        (honest, "has the same key twice"),
        (fresh | {"slot_keys": honest["slot_keys"]}, "has the same key twice"),
        (fresh | {"kem_key": honest["kem_key"]}, "has the same key twice"),
        (fresh | {"slot_keys": [*fresh["slot_keys"][:2], zero[0]]}, "has a key of X that gives no secret"),
        (fresh | {"slot_keys": [*fresh["slot_keys"][:2], zero[1]]}, "has a key of X that gives no secret"),
        (fresh | {"slot_keys": [*fresh["slot_keys"][:2], prime]}, "has a key of X that is not in its only form"),
        (fresh | {"kem_key": "ff" * 1184}, "has a key of X that gives no secret"),
        (fresh | {"slot_keys": fresh["slot_keys"][:2]}, "has sites with different numbers of slots"),
        (fresh | {"site": "anna hospital"}, "has two sites of the same name"),
        (fresh | {"site": "\uff21nna Hospital"}, "has two sites of the same name"),  # a wide A
    ):
        name = changes.get("site", "X")
        raw = make_key_file(name, **{k: v for k, v in changes.items() if k != "site"})
        refuse(make_charter, [*key_files[:2], raw], make_terms(3), JOINER, match=match)
    make_charter([*key_files[:2], make_key_file("X", **fresh)], make_terms(3), JOINER)
    refuse(make_charter, key_files[:1], make_terms(2), JOINER, match="has 1 sites, and must have 2")


def test_a_key_file_that_the_joiner_altered_is_refused(key_files):
    """The joiner can sign the charter anew, but not the key file of a site."""
    raw, texts = make_charter(key_files, make_terms(3), JOINER), [key_file.decode() for key_file in key_files]
    for text, match in (
        (texts[2].replace("Clinic", "Clinik"), "key file='number 2': is not signed by Clinik C, or was altered"),
        (forge(key_files[2], JOINER).decode(), "key file='number 2': is not signed by Clinic C, or was altered"),
        ("\ud800", "its field 'key_files' has a value that is not allowed"),
        ("Ü", "its field 'key_files' has a value that is not allowed"),
    ):
        refuse(read_charter, forge(raw, JOINER, key_files=[*texts[:2], text]), match=match)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_the_words_are_the_list_of_bip_39():
    text = "".join(word + "\n" for word in load_words())
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "2f5eed53a4727b4bf8880d8f3f199efc90e58503646d9ff8eff3a2ed3b24dbda"
    )
    assert len({word[:4] for word in load_words()}) == 2048


@pytest.mark.parametrize(
    ("digest", "words"),
    [  # test vectors of BIP 39
        ("00" * 32, "abandon " * 23 + "art"),
        ("ff" * 32, "zoo " * 23 + "vote"),
        ("80" * 32, "letter advice cage absurd amount doctor acoustic avoid " * 2
         + "letter advice cage absurd amount doctor acoustic bless"),
        ("f585c11aec520db57dd353c69554b21a89b20fb0650966fa0a9d6f74fd989d8f",
         "void come effort suffer camp survey warrior heavy shoot primary clutch crush open amazing screen patrol "
         "group space point ten exist slush involve unfold"),
    ],
)  # fmt: skip
def test_vectors_of_bip_39(digest, words):
    assert encode_words(bytes.fromhex(digest)) == words.split()
    assert decode_words(words) == bytes.fromhex(digest)


def test_each_of_256_bits_changes_the_words():
    digest = hashlib.sha256(b"charter").digest()
    number = int.from_bytes(digest, "big")
    variants = [(number ^ 1 << bit).to_bytes(32, "big") for bit in range(256)]
    assert len({tuple(encode_words(d)) for d in (digest, *variants)}) == 257
    assert all(decode_words(" ".join(encode_words(d))) == d for d in variants[::16])


def test_misheard_words_are_refused():
    words = encode_words(hashlib.sha256(b"charter").digest())
    for heard, match in (
        (words[:23], "words='23 words': must be 24"),
        ([*words, "zoo"], "words='25 words': must be 24"),
        ([*words[:6], "hospitall", *words[7:]], "words='hospitall': word 7 is not in the list"),
    ):
        refuse(decode_words, " ".join(heard), match=match)
    misheard = 0
    for word in load_words()[::8]:
        try:
            misheard += decode_words(" ".join([word, *words[1:]])) != hashlib.sha256(b"charter").digest()
        except ValueError as error:
            assert "one was misheard" in str(error)
    assert misheard < 8  # 1 of 256; such words are those of another charter
