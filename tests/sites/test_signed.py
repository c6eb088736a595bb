"""Signed files: one form for each content, and one clear line for every other form."""

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pate_torch.sites import signed

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw()
FIELDS = {"number": signed.is_integer(0, 9), "name": signed.is_text}
RAW = signed.make_file("test", {"number": 3, "name": "Ü"}, KEY, b"body\n\x00")


def test_a_file_is_read_as_it_was_written():
    file = signed.read_file(RAW, "test", FIELDS, "x")
    file.verify(PUBLIC, "us")
    assert (dict(file.content), file.body) == ({"number": 3, "name": "Ü"}, b"body\n\x00")
    assert RAW.startswith(b'{"body_bytes":6,"format":"pate-sites-1 test","name":"\\u00dc","number":3}\nbody')
    assert signed.make_file("test", {"name": "Ü", "number": 3}, KEY, b"body\n\x00") == RAW


def test_every_altered_byte_is_found():
    for position, change in itertools.product(range(0, len(RAW), 7), (1, 128)):
        altered = RAW[:position] + bytes([RAW[position] ^ change]) + RAW[position + 1 :]
        with pytest.raises(ValueError, match=r"test='x': .*Ask us|test='x': .*Ask the sender"):
            signed.read_file(altered, "test", FIELDS, "x").verify(PUBLIC, "us")


def test_every_cut_is_found():
    for length in (0, 1, 60, len(RAW) - 129, len(RAW) - 1):
        for raw in (RAW[:length], RAW[: length + 1] + RAW, RAW + RAW[: length + 1]):
            with pytest.raises(ValueError, match="test='x'"):
                signed.read_file(raw, "test", FIELDS, "x").verify(PUBLIC, "us")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ('{"number":3.0}', r"3\.0 is a floating-point number"),
        ('{"number":1e3}', "1e3 is a floating-point number"),
        ('{"number":NaN}', "NaN is a floating-point number"),
        ('{"number":3,"number":3}', "the same content has another form"),
        ('{"number": 3}', "the same content has another form"),
        ('{"b":1,"a":2}', "the same content has another form"),
        ('{"name":"Ü"}', "it cannot be read"),
        ('{"number":03}', "it cannot be read"),
        ('{"number":-0}', "the same content has another form"),
        ('{"\\u006eumber":3}', "the same content has another form"),
        ('{"number":' + "1" * 5000 + "}", "Exceeds the limit"),
        ("[1]", "it is not an object"),
        ('{"a":' + "[" * 100_000, "it cannot be read"),
    ],
    ids=lambda value: value[:20],
)
def test_other_forms_are_refused(header, match):
    with pytest.raises(ValueError, match=match):
        signed.decode_canonically(header.encode())


def test_a_file_without_a_signature_is_refused():
    for end in (RAW[-129:].upper(), b"0" * 127 + b"g\n", bytes(129)):
        with pytest.raises(ValueError, match="test='x': has no signature"):
            signed.read_file(RAW[:-129] + end, "test", FIELDS, "x")
    with pytest.raises(ValueError, match="has another length than it states"):
        signed.read_file(RAW[:-129], "test", FIELDS, "x")
    with pytest.raises(ValueError, match="is not signed by us"):
        signed.read_file(RAW[:-129] + b"0" * 128 + b"\n", "test", FIELDS, "x").verify(PUBLIC, "us")


def test_floats_are_never_written():
    for value in (1.0, float("nan"), [1.5]):
        with pytest.raises(ValueError, match="float"):
            signed.make_file("test", {"number": value}, KEY)


def test_a_signature_of_one_kind_is_none_of_another():
    other = RAW.replace(b"pate-sites-1 test", b"pate-sites-1 tess")
    with pytest.raises(ValueError, match="is not a file of the kind 'pate-sites-1 test'"):
        signed.read_file(other, "test", FIELDS, "x")
    with pytest.raises(ValueError, match="tess='x': is not signed by us, or was altered"):
        signed.read_file(other, "tess", FIELDS, "x").verify(PUBLIC, "us")


def test_fields_are_those_of_the_kind_with_values_that_are_allowed():
    for content, match in (
        ({"number": 3}, "must have the fields name, number, and no others"),
        ({"number": 3, "name": "a", "more": 1}, "and no others"),
        ({"number": 10, "name": "a"}, "its field 'number'"),
        ({"number": True, "name": "a"}, "its field 'number'"),
        ({"number": 3, "name": "a\x1b[2J"}, "its field 'name'"),
    ):
        with pytest.raises(ValueError, match=match):
            signed.read_file(signed.make_file("test", content, KEY), "test", FIELDS, "x")


def test_fractions_are_in_lowest_terms():
    assert all(map(signed.is_positive_fraction, ("7/2", "3", "1/100000")))
    others = ("14/4", "0", "-1", "1.5", "1/0", "03", " 3", "3/1", 3, None, "1e3", "٣")
    assert not any(map(signed.is_positive_fraction, others))


def test_hexadecimal_digits_are_lower_case():
    assert signed.is_hex(2)("00ff") and not any(map(signed.is_hex(2), ("00FF", "00f", "00ff0", "00fg", 7, "00ff\n")))
