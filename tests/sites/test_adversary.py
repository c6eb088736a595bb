"""What an attacker learns and can break at full size, and planted faults that these checks find.

Each check is a function. One test runs it on the package, and others run it with a fault that is planted in the package
and expect that the check fails.
"""

import functools
import itertools
import random
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pate_torch.privacy import noise
from pate_torch.sites import masks, rounds
from pate_torch.sites.charter import make_charter
from pate_torch.sites.joiner import load_joiner_key
from pate_torch.sites.keys import SiteState
from pate_torch.sites.pairs import accept_bundle, confirm_charter, take_slot
from pate_torch.sites.rounds import accept_sum, answer, read_round
from pate_torch.sites.tables import CellCounts
from pate_torch.sites.training import make_cell_counts
from tests.sites.site_tables import CLASSES, PUBLIC, get_charges, make_consortium, make_kind, make_terms
from tests.sites.site_worlds import draw_nothing, forge, make_charter_world, make_world, refuse

COUNT = 20_000
SIGMA = Fraction(1 << 33)
NUM_SITES, COLLUDING = 4, (2,)
HONEST = (0, 1, 3)


def ask(world, slot=0, **changes):
    return world.ask(slot, **{"kind": "class_sums", "shape": (COUNT,), "bound": 1 << 40, "sigma": SIGMA} | changes)


def derive_known_masks(world, raw):
    """Derive the masks that colluding sites share with honest ones, from the keys that they hold before they answer."""
    current_round, known = read_round(raw, world.charter), {}
    for place in COLLUDING:
        with world.sites[place].open() as secrets:
            private_key, slot_secrets = take_slot(replace(secrets, pair_secrets=dict(secrets.pair_secrets)), 0)
        for peer in HONEST:
            peer_key = world.charter.sites[peer].slot_keys[0]
            key = masks.derive_mask_key(
                masks.compute_shared_secret(private_key, peer_key) + slot_secrets[peer],
                charter=world.charter.digest,
                round_digest=current_round.digest,
                places=(min(place, peer), max(place, peer)),
                count=COUNT,
                ciphertext=bytes.fromhex(secrets.ciphertexts[str(peer)]),
            )
            known[place, peer] = masks.expand_mask(key, COUNT)
    return known


def read_numbers(raw):
    return np.frombuffer(raw.partition(b"\n")[2][: 8 * COUNT], "<u8")


def check_is_uniform(number_N):
    """Compare the bytes of numbers of 64 bits, and their sums, with uniform ones."""
    byte_N8 = np.ascontiguousarray(number_N).view(np.uint8).reshape(-1, 8)
    for position in range(8):
        count_256 = np.bincount(byte_N8[:, position], minlength=256)
        chi2 = ((count_256 - COUNT / 256) ** 2).sum() / (COUNT / 256)
        assert abs(chi2 - 255) < 7 * (2 * 255) ** 0.5, "a byte is not uniform"
    assert abs(to_unit(number_N).mean()) < 6 / (3 * COUNT) ** 0.5


def check_is_uncorrelated(first_N, second_N):
    assert abs(np.corrcoef(first_N, second_N)[0, 1]) < 6 / COUNT**0.5, "two values are correlated"


def to_unit(number_N):
    return number_N.view(np.int64) / 2.0**63


def check_honest_sites_hide(world):
    """Check that the joiner and a colluding site see uniform numbers until the last honest answer is there."""
    generator, drawn = np.random.default_rng(1), {}
    table_by_site = [generator.integers(-(1 << 62), 1 << 62, COUNT) for _ in range(NUM_SITES)]
    raw, answers = ask(world), {}
    known = derive_known_masks(world, raw)
    for place, site in enumerate(world.sites):

        def draw(share, count, place=place):
            drawn[place] = noise.draw_large_discrete_gaussian((count,), share).numpy()
            return drawn[place]

        answers[place] = read_numbers(answer(site, raw, table_by_site[place], draw=draw))
    view = {}
    for peer in HONEST:
        view[peer] = answers[peer].copy()
        for place in COLLUDING:
            view[peer] = view[peer] - known[place, peer] if place > peer else view[peer] + known[place, peer]
    for size in range(1, len(HONEST)):
        for part in itertools.combinations(HONEST, size):
            total = sum(view[place] for place in part)
            check_is_uniform(total)
            for place in HONEST:
                check_is_uncorrelated(to_unit(total), table_by_site[place])
                if place not in part and size + 1 < len(HONEST):  # with all of them the sum opens
                    check_is_uncorrelated(to_unit(total), to_unit(view[place]))
    honest_sum = sum((table_by_site[place] + drawn[place]).astype(np.uint64) for place in HONEST)
    assert np.array_equal(sum(view.values()), honest_sum), "the honest sum and its noise are all that opens"


def check_rounds_hide(world):
    """Check that two answers of one site to the same question do not open their difference."""
    table_N = np.arange(COUNT)
    first, second = (
        read_numbers(answer(world.sites[0], ask(world, slot), table_N, draw=draw_nothing)) for slot in (1, 2)
    )
    check_is_uniform(first - second)


def check_two_round_files_open_nothing(world):
    """Check that the sum is random if one honest site saw another round file."""
    first, second = ask(world), ask(world)
    table_N = np.arange(COUNT)
    answers = [read_numbers(answer(site, first, table_N, draw=draw_nothing)) for site in world.sites[:3]]
    answers.append(read_numbers(answer(world.sites[3], second, table_N, draw=draw_nothing)))
    check_is_uniform(sum(answers))


def plant_key(monkeypatch, **fixed):
    """Plant the fault that the key of a mask does not depend on some values."""
    derive = masks.derive_mask_key
    monkeypatch.setattr(masks, "derive_mask_key", lambda secret, **facts: derive(**{"secret": secret} | facts | fixed))


def test_the_joiner_and_a_site_see_uniform_numbers_until_the_last_honest_answer(tmp_path):
    world = make_world(tmp_path, NUM_SITES)
    check_honest_sites_hide(world)
    check_rounds_hide(world)


def test_a_round_file_that_differs_between_two_sites_opens_nothing(tmp_path):
    check_two_round_files_open_nothing(make_world(tmp_path, NUM_SITES))


NOTHING = bytes(32)


@pytest.mark.parametrize(
    ("fixed", "check"),
    [  # all pairs of a round use one mask; the key depends on the pair alone; it does not depend on the round file
        ({"secret": bytes(64), "places": (0, 1), "ciphertext": NOTHING}, check_honest_sites_hide),
        (
            {"secret": bytes(64), "charter": NOTHING, "round_digest": NOTHING, "ciphertext": NOTHING},
            check_rounds_hide,
        ),
        ({"round_digest": NOTHING}, check_two_round_files_open_nothing),
    ],
)
def test_a_mask_that_is_used_twice_is_caught(tmp_path, monkeypatch, fixed, check):
    plant_key(monkeypatch, **fixed)
    with pytest.raises(AssertionError, match=r"is not uniform|are correlated"):
        check(make_world(tmp_path, NUM_SITES))


# ---- noise -----------------------------------------------------------------------------------------------------------


def ask_and_sum(consortium, kind, epsilon=0.5):
    """Run a round, and return the noise of its sum in units of the stated standard deviation."""
    consortium.run_round(*consortium.joiner.ask(kind, epsilon)[1:])
    noisy, terms = consortium.joiner.load_sum(), consortium.joiner.charter.terms
    tables = [kind.count(kind.read_records(rows, terms.unit), terms.adjacency).numbers for rows in consortium.data]
    return (noisy.numbers - sum(tables) / kind.unit_length).ravel() / noisy.sigma


@functools.cache
def make_histogram():
    return make_cell_counts(PUBLIC, "y", CLASSES, 100)


def check_noise(folder):
    """Check the size of the noise of two rounds, and that they are independent."""
    consortium, kind = make_consortium(folder, num_rows=20), make_histogram()
    first, second = ask_and_sum(consortium, kind), ask_and_sum(consortium, kind)
    for error_N in (first, second):
        assert abs((error_N**2).mean() - 1) < 6 * (2 / len(error_N)) ** 0.5, "the noise has another size than it states"
    assert abs((first * second).mean()) < 6 / len(first) ** 0.5, "two rounds have the same noise"


def check_is_fresh_at_one_instant(monkeypatch):
    """Check that two draws differ although the clock and all seeded generators are the same."""
    draws = []
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"):
        monkeypatch.setattr(time, name, lambda name=name: 7 if name.endswith("ns") else 7.0)
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        draws.append(noise.DryRunNoise("discrete").draw_gaussian((200,), Fraction(1 << 30), torch.device("cpu")))
    assert (draws[0] != draws[1]).all(), "two draws are equal"


def plant_noise(monkeypatch, draw):
    monkeypatch.setattr(noise, "draw_large_discrete_gaussian", draw)


def test_the_noise_of_two_rounds_has_its_size_and_is_independent(tmp_path, monkeypatch):
    check_noise(tmp_path)
    check_is_fresh_at_one_instant(monkeypatch)


def test_the_same_noise_under_two_rounds_is_caught(tmp_path, monkeypatch):
    cache, draw = {}, noise.draw_large_discrete_gaussian
    calls = itertools.count()
    # The three sites draw in turn, so that each site repeats its own noise.
    plant_noise(monkeypatch, lambda shape, share: cache.setdefault(next(calls) % 3, draw(shape, share)))
    with pytest.raises(AssertionError, match="two rounds have the same noise"):
        check_noise(tmp_path)


def test_too_small_a_share_of_noise_is_caught(tmp_path, monkeypatch):
    draw = noise.draw_large_discrete_gaussian
    plant_noise(monkeypatch, lambda shape, share: draw(shape, share / 4))
    with pytest.raises(AssertionError, match="another size"):
        check_noise(tmp_path)


def test_a_share_for_all_sites_in_place_of_all_but_t_is_caught(tmp_path, monkeypatch):
    compute = rounds.compute_share
    monkeypatch.setattr(rounds, "compute_share", lambda sigma, num_sites, colluding: compute(sigma, num_sites, 0))
    with pytest.raises(ValueError, match="is too small: 3 shares have less noise"):
        ask(make_world(tmp_path, NUM_SITES))


def test_noise_that_is_seeded_by_the_clock_is_caught(monkeypatch):
    def draw(shape, share):
        generator = np.random.default_rng(time.time_ns())
        return torch.from_numpy(np.rint(generator.normal(scale=float(share), size=shape)).astype(np.int64))

    plant_noise(monkeypatch, draw)
    with pytest.raises(AssertionError, match="two draws are equal"):
        check_is_fresh_at_one_instant(monkeypatch)


def test_a_float_in_the_table_or_in_the_noise_is_caught(tmp_path, monkeypatch):
    consortium, kind = make_consortium(tmp_path), make_kind("histogram")
    site, rows = consortium.sites[0], consortium.data[0]
    _, raw, public = consortium.joiner.ask(kind, 0.5)
    count = CellCounts.count

    def count_floats(kind, records, adjacency):
        table = count(kind, records, adjacency)
        return replace(table, numbers=table.numbers * 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(CellCounts, "count", count_floats)
        with pytest.raises(ValueError, match="table='float64': must hold whole numbers"):
            site.answer(raw, public, rows)
    assert not get_charges(site)
    draw = noise.draw_large_discrete_gaussian
    plant_noise(monkeypatch, lambda shape, share: draw(shape, share).double())
    with pytest.raises(TypeError, match="noise: must be one int64 for each number, and is float64"):
        site.answer(raw, public, rows)
    assert len(get_charges(site)) == 1  # the cost was reserved before the draw, and stays
    assert not list(site.state.folder.glob("answer*"))


# ---- files -----------------------------------------------------------------------------------------------------------


def list_bad_forms(raw):
    """List what a stranger can make of a file: cut, lengthened, altered, unsigned, and signed by a stranger."""
    middle = len(raw) // 2
    return {
        "cut at the end": raw[:-1],
        "cut in the middle": raw[:middle],
        "cut at the beginning": raw[1:],
        "empty": b"",
        "lengthened": raw + b"\n",
        "doubled": raw + raw,
        "altered": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
        "without signature": raw[:-129],
        "with an empty signature": raw[:-129] + b"0" * 128 + b"\n",
        "signed by a stranger": forge(raw, Ed25519PrivateKey.generate()),
    }


def read_state(folder, *patterns):
    return {path.name: path.read_bytes() for pattern in patterns for path in sorted(folder.glob(pattern))}


def test_no_bad_file_changes_a_site(tmp_path):
    """Every bad file gives one line and spends nothing, and the good files still work after all of them."""
    consortium, other = make_consortium(tmp_path / "a"), make_consortium(tmp_path / "b", number=1)
    site, rows, kind = consortium.sites[1], consortium.data[1], make_kind("histogram")
    joiner_key = load_joiner_key(consortium.joiner.folder / "joiner.key")
    _, first, first_public = consortium.joiner.ask(kind, 0.1)
    total = consortium.run_round(first, first_public)
    _, foreign, foreign_public = other.joiner.ask(kind, 0.1)
    foreign_total = other.run_round(foreign, foreign_public)
    _, raw, public = consortium.joiner.ask(kind, 0.1)
    charter, bundle = consortium.joiner.charter.raw, make_bundle(consortium)
    words = consortium.joiner.charter.format_fingerprint()
    readers = {
        "round": (lambda raw: site.answer(raw, public, rows), raw, foreign),
        "public": (lambda public: site.answer(raw, public, rows), public, foreign_public),
        "sum": (lambda total: accept_sum(site.state, total), total, foreign_total),
        "bundle": (lambda bundle: accept_bundle(site.state, bundle), bundle, make_bundle(other)),
        "charter": (lambda raw: confirm_charter(site.state, raw, words), charter, other.joiner.charter.raw),
    }
    before, num_charges = read_state(site.state.folder, "secrets.json", "*.pate"), len(get_charges(site))
    for name, (read, good, foreign) in readers.items():
        bad = list_bad_forms(good) | {"foreign": foreign}
        bad |= {f"a {kind}": raw for kind, (_, raw, _) in readers.items() if kind != name}
        if name == "round":
            bad |= {
                "replayed slot": forge(raw, joiner_key, slot=0),
                "other history": forge(raw, joiner_key, previous="00" * 32),
                "small share": forge(raw, joiner_key, share="2"),
                "other shape": forge(raw, joiner_key, shape=[19, 3]),
            }
        if name == "sum":
            bad["second sum"] = forge(total, joiner_key, body=bytes(8 * 60))
        for form, file in bad.items():
            with pytest.raises(ValueError) as caught:
                read(file)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 400, (name, form)
            assert read_state(site.state.folder, "secrets.json", "*.pate") == before, (name, form)
            assert not list(site.state.folder.glob("*.pending"))
    assert len(get_charges(site)) == num_charges == 1
    consortium.joiner.sum(consortium.answer_all(raw, public))
    assert len(get_charges(site)) == 2


def make_bundle(consortium):
    words = consortium.joiner.charter.format_fingerprint()
    raw = consortium.joiner.charter.raw
    files = {str(place): confirm_charter(site.state, raw, words) for place, site in enumerate(consortium.sites)}
    return consortium.joiner.bundle(files)


def test_no_bad_answer_changes_the_joiner(tmp_path):
    consortium, kind = make_consortium(tmp_path), make_kind("histogram")
    joiner, keys = consortium.joiner, []
    for site in consortium.sites:
        with site.state.open() as secrets:
            keys.append(secrets.signer)
    _, earlier_raw, earlier_public = joiner.ask(kind, 0.1)
    earlier = consortium.answer_all(earlier_raw, earlier_public)
    _, raw, public = joiner.ask(kind, 0.1)
    answers = consortium.answer_all(raw, public)
    good, body = answers["site-1"], answers["site-1"].partition(b"\n")[2][:-129]
    bad = list_bad_forms(good) | {
        "counted twice": answers["site-0"],
        "of an earlier round": earlier["site-1"],
        "in the place of another": forge(good, keys[1], place=2),
        "of an invented site": forge(good, keys[1], place=3),
        "too short": forge(good, keys[1], body=body[:-8]),
        "too long": forge(good, keys[1], body=body + bytes(8)),
        "a round": raw,
    }
    before = read_state(joiner.folder, "*")
    refuse(joiner.sum, {name: answers[name] for name in ("site-0", "site-2")}, match="'Site 1': have not answered")
    refuse(joiner.sum, answers | {"copy": good}, match="is the second answer of Site 1")
    for form, file in bad.items():
        for files in (answers | {"site-1": file}, answers | {"copy": file}):
            with pytest.raises(ValueError) as caught:
                joiner.sum(files)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 400, form
            assert read_state(joiner.folder, "*") == before, form
    first = joiner.sum(answers)
    assert joiner.sum(dict(reversed(answers.items()))) == first


def test_a_shortened_reordered_or_altered_charter_is_not_confirmed(tmp_path):
    """One site holds what all agreed on, and the joiner gives another site a charter of its own making."""
    world = make_charter_world(tmp_path, NUM_SITES)
    site, heard, files = world.sites[1], world.charter.format_fingerprint(), [s.key_file for s in world.sites]
    fresh_keys = SiteState.create(tmp_path / "fresh", "Clinic C", 3).key_file
    invented = SiteState.create(tmp_path / "invented", "Invented", 3).key_file
    before = read_state(site.folder, "*")
    for key_files, terms, match in (
        (files[:3], make_terms(3), "the sites hold different charters"),
        (files[::-1], make_terms(4), "the sites hold different charters"),
        (files, make_terms(4, colluding=2), "the sites hold different charters"),
        (files, make_terms(4, delta="1/100"), "the sites hold different charters"),
        ([*files[:2], fresh_keys, files[3]], make_terms(4), "the sites hold different charters"),
        ([*files, invented], make_terms(5), "the sites hold different charters"),
        ([files[0], fresh_keys, *files[2:]], make_terms(4), "two sites of the same name"),
        ([files[0], files[2], files[3]], make_terms(3), "does not have the keys of this site"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            confirm_charter(site, make_charter(key_files, terms, world.joiner), heard)
        assert "\n" not in str(caught.value) and read_state(site.folder, "*") == before
    assert confirm_charter(site, world.charter.raw, heard)
