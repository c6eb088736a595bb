"""Rounds: exact sums, one answer for each slot, and one clear line for every file that is refused."""

import hashlib
import multiprocessing
import re
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from pate_torch.privacy.noise import draw_large_discrete_gaussian
from pate_torch.sites import rounds, signed
from pate_torch.sites.charter import make_charter, read_charter
from pate_torch.sites.keys import SiteState
from pate_torch.sites.pairs import bundle_confirmations, confirm_charter
from pate_torch.sites.rounds import accept_sum, make_sum_file, open_round, read_round, sum_answers
from tests.sites.site_worlds import NAMES, make_charter_world, make_terms, make_world

TABLE = np.arange(12).reshape(4, 3)


def draw_nothing(share: Fraction, count: int) -> np.ndarray:
    return np.zeros(count, np.int64)


answer = partial(rounds.answer, draw=draw_nothing)


def draw_share(share: Fraction, count: int) -> np.ndarray:
    return draw_large_discrete_gaussian((count,), share).numpy()


def answer_all(world, raw, tables=None, draw=draw_nothing):
    tables = tables or [TABLE + 100 * i for i in range(len(world.sites))]
    return {f"{i}.pate": answer(s, raw, t, draw=draw) for i, (s, t) in enumerate(zip(world.sites, tables, strict=True))}


def refuse(call, *args, match, **options):
    with pytest.raises(ValueError, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)


def forge(raw: bytes, key, **changes) -> bytes:
    """Sign a file again after changes of its content."""
    header, _, rest = raw.partition(b"\n")
    content = signed.decode_canonically(header) | changes
    kind = content.pop("format").split(" ", 1)[1]
    return signed.make_file(kind, {k: v for k, v in content.items() if k != "body_bytes"}, key, rest[:-129])


@pytest.mark.parametrize("kind", rounds.KINDS)
@pytest.mark.parametrize("num_sites", [2, 5])
def test_the_sum_is_exact_and_single_answers_are_not(tmp_path, kind, num_sites):
    world = make_world(tmp_path, num_sites)
    raw = world.ask(kind=kind, bound=(1 << 63) - 1000)
    tables = [np.random.default_rng(i).integers(-(10**17), 10**17, (4, 3)) for i in range(num_sites)]
    answers = answer_all(world, raw, tables)
    current_round = read_round(raw, world.charter)
    total, digests = sum_answers(world.charter, current_round, dict(reversed(answers.items())))
    assert np.array_equal(total, sum(tables)) and total.dtype == np.int64
    assert digests == tuple(hashlib.sha256(a).hexdigest() for a in answers.values())
    for file, table in zip(answers.values(), tables, strict=True):
        sent = np.frombuffer(signed.read_file(file, "answer", READ_ANY).body, "<u8")
        assert not np.any(sent == table.reshape(-1).astype(sent.dtype))
        assert len(file) < 450 + current_round.count * 8


READ_ANY = {"charter": bool, **rounds._ANSWER_FIELDS}


def test_the_noise_of_the_sum_is_that_of_all_shares(tmp_path):
    world = make_world(tmp_path, 3, colluding=1)
    raw = world.ask(kind="class_sums", shape=(4000,), sigma=Fraction(1 << 33))
    table = np.zeros(4000, int)
    answers = {str(i): answer(site, raw, table, draw=draw_share) for i, site in enumerate(world.sites)}
    total, _ = sum_answers(world.charter, read_round(raw, world.charter), answers)
    expected = 2**33 * (3 / 2) ** 0.5  # H/(H - t) times the variance
    assert total.std() == pytest.approx(expected, rel=0.06)
    assert abs(total.mean()) < 5 * expected / 4000**0.5


def test_the_same_round_gives_the_same_bytes_and_draws_no_noise_twice(tmp_path):
    world, draws = make_world(tmp_path), []

    def draw(share, count):
        draws.append(share)
        return np.full(count, len(draws))

    raw = world.ask()
    first = answer(world.sites[0], raw, TABLE, draw=draw)
    assert open_round(world.sites[0], raw)[1] == first
    assert answer(world.sites[0], raw, TABLE + 1, draw=draw) == first
    assert draws == [read_round(raw, world.charter).share]
    refuse(answer, world.sites[0], world.ask(), TABLE, match="slot 0, which this site spent on another round")
    answer(world.sites[0], world.ask(slot=2), TABLE)
    refuse(answer, world.sites[0], world.ask(slot=1), TABLE, match="slot 1, which was passed over; its key is erased")
    refuse(world.ask, slot=3, match="uses slot 3, and the charter has 3 slots")
    assert answer(SiteState(world.sites[0].folder), raw, TABLE) == first


def test_two_sites_with_different_round_files_give_random_numbers(tmp_path):
    world = make_world(tmp_path)
    first, second = world.ask(), world.ask()  # they differ in the nonce alone
    answers = answer_all(world, first)
    other = make_world(tmp_path / "other")
    refuse(sum_answers, other.charter, read_round(first, world.charter), answers, match="belongs to another charter")
    third = world.ask(slot=1)
    by_file = {"0": answer(world.sites[0], third, TABLE), "1": answer(world.sites[1], third, TABLE)}
    by_file["2"] = answer(world.sites[2], world.ask(slot=1), TABLE)
    refuse(sum_answers, world.charter, read_round(third, world.charter), by_file, match="'2'.*answers another round")
    wrong = forge(by_file["2"], open_signer(world.sites[2]), round=read_round(third, world.charter).digest.hex())
    total, _ = sum_answers(world.charter, read_round(third, world.charter), by_file | {"2": wrong})
    assert np.median(np.abs(total - 3 * TABLE)) > 2**20
    refuse(read_round, second[:-1], world.charter, match="another length")


def open_signer(site):
    with site.open() as secrets:
        return secrets.signer


def cut(raw):
    return raw[:-10]


def alter(raw):
    position = raw.index(b"\n") + 5
    return raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a | {"1.pate": cut(a["1.pate"])}, "answer='1.pate': has another length than it states"),
        (lambda a: a | {"1.pate": alter(a["1.pate"])}, "is not signed by Universität B, or was altered"),
        (lambda a: a | {"1.pate": a["0.pate"]}, "is the second answer of Anna Hospital"),
        (lambda a: a | {"3.pate": a["1.pate"]}, "is the second answer of Universität B"),
        (
            lambda a: {name: a[name] for name in ("0.pate", "2.pate")},
            "sites='Universität B': have not answered",
        ),
        (lambda a: a | {"1.pate": b""}, "is not a file of this protocol"),
        (lambda a: a | {"1.pate": a["1.pate"].replace(b" answer", b" sum")}, "not a file of the kind"),
        (lambda a: a | {"1.pate": a["1.pate"].replace(b'"place":1', b'"place":2')}, "is not signed by Clinic C"),
        (
            lambda a: a | {"1.pate": a["1.pate"].replace(b'"place":1', b'"place":7')},
            "a site that is not in the charter",
        ),
        (lambda a: a | {"1.pate": a["1.pate"].replace(b'"place":1', b'"place":1.0')}, "a floating-point number"),
        (lambda a: a | {"1.pate": a["1.pate"].replace(b'"place":1', b'"place": 1')}, "has another form"),
    ],
)
def test_a_bad_answer_is_refused(tmp_path, change, match):
    world = make_world(tmp_path)
    raw = world.ask()
    refuse(sum_answers, world.charter, read_round(raw, world.charter), change(answer_all(world, raw)), match=match)


def test_an_answer_of_wrong_size_or_of_another_slot_is_refused(tmp_path):
    world = make_world(tmp_path)
    first, second = world.ask(shape=(2, 2)), world.ask(slot=1)
    answers = answer_all(world, first, [TABLE[:2, :2]] * 3)
    current_round = read_round(second, world.charter)
    refuse(sum_answers, world.charter, current_round, answers, match="answers another round file")
    forged = {"a": forge(answers["0.pate"], open_signer(world.sites[0]), round=current_round.digest.hex())}
    refuse(sum_answers, world.charter, current_round, forged, match="has a wrong number of numbers")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"share": "2"}, "must be at least 3"),
        ({"share": "7"}, "is too small: 2 shares have less noise than sigma=10"),  # 2 x 49 < 100
        ({"slot": 3}, "the charter has 3 slots"),
        ({"kind": "confident"}, "'kind' has a value that is not allowed"),
        ({"sigma": "20/2"}, "'sigma' has a value that is not allowed"),
        ({"sigma": 10}, "'sigma' has a value that is not allowed"),
        ({"shape": [True, 3]}, "'shape' has a value that is not allowed"),
        ({"previous": "00"}, "'previous' has a value that is not allowed"),
        ({"bound": (1 << 63) - 100}, "do not fit the bits"),
        ({"share": str((1 << 50) + 1)}, r"above 2\^50"),
        ({"shape": [1 << 13, 1 << 12]}, r"more than 2\^24 numbers"),
        ({"extra": 1}, "must have the fields .*, and no others"),
    ],
)
def test_a_bad_round_file_is_refused(tmp_path, changes, match):
    world = make_world(tmp_path)
    refuse(answer, world.sites[0], forge(world.ask(), world.joiner, **changes), TABLE, match=match)
    answer(world.sites[0], world.ask(), TABLE)  # nothing was spent


def test_share_of_seven_tenths_is_enough_to_the_last_digit(tmp_path):
    world = make_world(tmp_path)
    share = read_round(world.ask(), world.charter).share
    assert 2 * share**2 >= 100 > 2 * (share - Fraction(1, 1 << 16)) ** 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e308, -(2.0**40 + 1)])
def test_numbers_of_the_joiner_are_finite_and_at_most_2_to_the_40(tmp_path, bad):
    world = make_world(tmp_path)
    body = np.array([0.5, bad, -(2.0**40)])
    refuse(world.ask, kind="gradients", body=body, match=r"not finite or exceed 2\^40")
    assert read_round(world.ask(kind="gradients", body=body[[0, 2]]), world.charter).body.tolist() == [0.5, -(2.0**40)]


@pytest.mark.parametrize("table", [TABLE * 1.0, TABLE > 3, TABLE.astype(object), TABLE.T, TABLE[:3]])
def test_a_table_of_floats_or_of_another_shape_is_refused_and_not_shown(tmp_path, table):
    world = make_world(tmp_path)
    raw = world.ask()
    with pytest.raises(ValueError, match=r"table=.*: must (hold whole numbers|have the shape \(4, 3\))") as caught:
        answer(world.sites[0], raw, table)
    assert "11" not in str(caught.value)
    assert answer(world.sites[0], raw, TABLE)  # nothing was spent


def test_a_round_of_a_foreign_joiner_or_charter_is_refused(tmp_path):
    world, other = make_world(tmp_path / "a"), make_world(tmp_path / "b")
    refuse(answer, world.sites[0], other.ask(), TABLE, match="belongs to another charter")
    forged = forge(world.ask(), other.joiner)
    refuse(answer, world.sites[0], forged, TABLE, match="is not signed by the joiner, or was altered")


def test_no_answer_before_the_charter_and_the_keys_of_all_pairs(tmp_path):
    world = make_charter_world(tmp_path)
    refuse(answer, world.sites[0], world.ask(), TABLE, match="is not confirmed at this site")
    confirm_charter(world.sites[0], world.charter.raw, world.charter.format_fingerprint())
    refuse(answer, world.sites[0], world.ask(), TABLE, match="cannot be answered before the keys of all pairs")


def test_sums_form_a_chain(tmp_path):
    world = make_world(tmp_path)
    raw = world.ask()
    answers = answer_all(world, raw)
    current_round = read_round(raw, world.charter)
    sum_file = make_sum_file(world.charter, current_round, answers, world.joiner)
    for site in world.sites[:2]:
        assert np.array_equal(accept_sum(site, sum_file).reshape(4, 3), 3 * TABLE + 300)
        accept_sum(site, sum_file)
    previous = hashlib.sha256(sum_file).hexdigest()
    following = world.ask(slot=1, previous=previous)
    answer(world.sites[0], following, TABLE)
    refuse(answer, world.sites[1], world.ask(slot=1), TABLE, match="another last sum than the one")
    refuse(answer, world.sites[2], following, TABLE, match="Give this site the newest sum file first")
    forged = forge(sum_file, world.joiner, answers=["00" * 32] * 3)
    refuse(accept_sum, world.sites[2], forged, match="does not contain the answer that this site wrote")
    refuse(accept_sum, world.sites[2], alter(sum_file), match="is not signed by the joiner")
    second = signed.make_file("sum", signed_content(sum_file), world.joiner, bytes(12 * 8))
    refuse(accept_sum, world.sites[0], second, match="is a second, different sum of a round")


def test_a_sum_that_comes_late_is_not_the_newest(tmp_path):
    world, sums = make_world(tmp_path), []
    for slot in range(2):
        raw = world.ask(slot=slot)
        sums.append(make_sum_file(world.charter, read_round(raw, world.charter), answer_all(world, raw), world.joiner))
    for sum_file in reversed(sums):
        accept_sum(world.sites[0], sum_file)
    following = world.ask(slot=2, previous=hashlib.sha256(sums[1]).hexdigest())
    assert answer(world.sites[0], following, TABLE)


def signed_content(raw):
    content = signed.decode_canonically(raw.partition(b"\n")[0])
    return {name: value for name, value in content.items() if name not in ("format", "body_bytes")}


STEPS = ("slot spent", "noise drawn", "answer pending", "hash stored")


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_a_step_leaves_the_slot_spent_or_the_answer_whole(tmp_path, monkeypatch, step):
    world = make_world(tmp_path)
    raw, site = world.ask(), world.sites[0]
    saves = []

    class Crash(Exception):
        pass

    def crash(*args):
        raise Crash

    def save_and_crash(state, secrets, limit=1 if step == "slot spent" else 2):
        original_save(state, secrets)
        saves.append(1)
        if len(saves) == limit:
            raise Crash

    original_save, original_write = SiteState.save, SiteState.write_pending

    def write_and_crash(state, name, content):
        original_write(state, name, content)
        raise Crash

    with monkeypatch.context() as patch:
        if step in ("slot spent", "hash stored"):
            patch.setattr(SiteState, "save", save_and_crash)
        if step == "answer pending":
            patch.setattr(SiteState, "write_pending", write_and_crash)
        with pytest.raises(Crash):
            answer(site, raw, TABLE, draw=crash if step == "noise drawn" else draw_nothing)
    with site.open() as secrets:
        assert "0" not in secrets.slot_keys and secrets.next_slot == 1
    if step != "hash stored":
        refuse(answer, site, raw, TABLE, match="was begun in slot 0 and not finished, so its answer is lost")
        answers = answer_all(world, world.ask(slot=1))
        assert len(answers) == 3
        return
    answers = answer_all(world, raw, draw=draw_nothing)
    total, _ = sum_answers(world.charter, read_round(raw, world.charter), answers)
    assert np.array_equal(total, 3 * TABLE + 300)


def answer_in_a_process(folder, raw, results):
    results.put(answer(SiteState(folder), raw, TABLE))


def test_two_processes_at_once_give_one_answer(tmp_path):
    world = make_world(tmp_path)
    raw, context = world.ask(), multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=answer_in_a_process, args=(world.sites[0].folder, raw, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    files = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(files) == 1


def test_private_files_and_answers_cannot_be_read_by_others(tmp_path):
    world = make_world(tmp_path)
    answer(world.sites[0], world.ask(), TABLE)
    folder = world.sites[0].folder
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.name != "README"}
    assert set(modes.values()) == {0o600} and folder.stat().st_mode & 0o777 == 0o700
    assert not [name for name in modes if re.search("pending", name)]


def test_an_invented_site_takes_part_under_its_name_alone(tmp_path):
    """The joiner can add sites of its own: people see their names, and the words differ from those of the others."""
    world = make_charter_world(tmp_path)
    invented = [SiteState.create(tmp_path / f"x{i}", f"Invented {i}") for i in range(2)]
    refuse(
        make_charter,
        [site.key_file for site in (*world.sites, *invented)],
        make_terms(5),
        world.joiner,
        match="sites with different numbers of slots",
    )
    invented = [SiteState.create(tmp_path / f"y{i}", f"Invented {i}", 3) for i in range(2)]
    files = [site.key_file for site in (*world.sites, *invented)]
    shown = read_charter(make_charter(files, make_terms(5), world.joiner))
    assert [site.site for site in shown.sites] == [*NAMES[:3], "Invented 0", "Invented 1"]
    heard = world.charter.format_fingerprint()
    refuse(confirm_charter, world.sites[0], shown.raw, heard, match="the sites hold different charters")


def test_the_bundle_of_another_joiner_key_is_refused(tmp_path):
    world, other = make_world(tmp_path / "a"), make_charter_world(tmp_path / "b")
    bundle = bundle_confirmations(world.charter, world.confirmations, other.joiner)
    from pate_torch.sites.pairs import accept_bundle

    refuse(accept_bundle, world.sites[0], bundle, match="is not signed by the joiner")
