"""Rounds: exact sums, one answer for each slot, and one clear line for every round file that is refused."""

import hashlib
import multiprocessing
from functools import partial

import numpy as np
import pytest

from pate_torch.sites import rounds, signed
from pate_torch.sites.keys import SiteState
from pate_torch.sites.pairs import confirm_charter
from pate_torch.sites.rounds import accept_sum, make_sum_file, open_round, read_round, sum_answers
from tests.sites.site_worlds import draw_nothing, forge, get_content, make_charter_world, make_world, refuse

TABLE = np.arange(12).reshape(4, 3)
answer = partial(rounds.answer, draw=draw_nothing)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A world whose sites answer nothing."""
    return make_world(tmp_path_factory.mktemp("world"))


def answer_all(world, raw, tables=None):
    tables = tables or [TABLE + 100 * i for i in range(len(world.sites))]
    return {f"{i}.pate": answer(site, raw, t) for i, (site, t) in enumerate(zip(world.sites, tables, strict=True))}


@pytest.mark.parametrize("num_sites", [2, 5])
def test_the_sum_is_exact_and_single_answers_are_not(tmp_path, num_sites):
    world = make_world(tmp_path, num_sites)
    raw = world.ask(bound=(1 << 63) - 1000)
    tables = [np.random.default_rng(i).integers(-(10**17), 10**17, (4, 3)) for i in range(num_sites)]
    answers = answer_all(world, raw, tables)
    current_round = read_round(raw, world.charter)
    total, digests = sum_answers(world.charter, current_round, dict(reversed(answers.items())))
    assert np.array_equal(total, sum(tables)) and total.dtype == np.int64
    assert digests == tuple(hashlib.sha256(a).hexdigest() for a in answers.values())
    for file, table in zip(answers.values(), tables, strict=True):
        sent = np.frombuffer(file.partition(b"\n")[2][:-129], "<u8")
        assert not np.any(sent == table.reshape(-1).astype(sent.dtype))
        assert len(file) < 450 + current_round.count * 8


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
    folder = world.sites[0].folder
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir() if path.name != "README"}
    assert set(modes.values()) == {0o600} and folder.stat().st_mode & 0o777 == 0o700
    assert not [name for name in modes if "pending" in name]


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
        ({"body": bytes(7)}, "has a part of a number at its end"),
        *(
            ({"body": np.array([0.5, bad]).tobytes()}, r"not finite or exceed 2\^40")
            for bad in (np.nan, np.inf, -np.inf, 1e308, -(2.0**40 + 1))
        ),
    ],
)
def test_a_bad_round_file_is_refused(shared, changes, match):
    refuse(answer, shared.sites[0], forge(shared.ask(), shared.joiner, **changes), TABLE, match=match)
    assert open_round(shared.sites[0], shared.ask())[1] is None  # nothing was spent


def test_numbers_of_the_joiner_of_2_to_the_40_are_read(shared):
    body = np.array([0.5, -(2.0**40)])
    assert read_round(shared.ask(kind="gradients", body=body), shared.charter).body.tolist() == body.tolist()


@pytest.mark.parametrize("table", [TABLE * 1.0, TABLE > 3, TABLE.astype(object), TABLE.T, TABLE[:3]])
def test_a_table_of_floats_or_of_another_shape_is_refused_and_not_shown(shared, table):
    raw = shared.ask()
    with pytest.raises(ValueError, match=r"table=.*: must (hold whole numbers|have the shape \(4, 3\))") as caught:
        answer(shared.sites[0], raw, table)
    assert "11" not in str(caught.value)
    assert open_round(shared.sites[0], raw)[1] is None  # nothing was spent


def test_no_answer_before_the_charter_and_the_keys_of_all_pairs(tmp_path):
    world = make_charter_world(tmp_path)
    refuse(answer, world.sites[0], world.ask(), TABLE, match="is not confirmed at this site")
    confirm_charter(world.sites[0], world.charter.raw, world.charter.format_fingerprint())
    refuse(answer, world.sites[0], world.ask(), TABLE, match="cannot be answered before the keys of all pairs")


def test_sums_form_a_chain_and_a_late_one_is_not_the_newest(tmp_path):
    world, sums = make_world(tmp_path), []
    for slot in range(2):
        raw = world.ask(slot=slot)
        sums.append(make_sum_file(world.charter, read_round(raw, world.charter), answer_all(world, raw), world.joiner))
    for sum_file in reversed(sums):
        assert np.array_equal(accept_sum(world.sites[0], sum_file).reshape(4, 3), 3 * TABLE + 300)
        accept_sum(world.sites[0], sum_file)
    following = world.ask(slot=2, previous=hashlib.sha256(sums[1]).hexdigest())
    answer(world.sites[0], following, TABLE)
    refuse(answer, world.sites[2], following, TABLE, match="Give this site the newest sum file first")
    accept_sum(world.sites[1], sums[1])
    refuse(answer, world.sites[1], world.ask(slot=2), TABLE, match="another last sum than the one")
    forged = forge(sums[0], world.joiner, answers=["00" * 32] * 3)
    refuse(accept_sum, world.sites[2], forged, match="does not contain the answer that this site wrote")
    second = signed.make_file("sum", get_content(sums[0]), world.joiner, bytes(12 * 8))
    refuse(accept_sum, world.sites[0], second, match="is a second, different sum of a round")


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
        assert len(answer_all(world, world.ask(slot=1))) == 3
        return
    total, _ = sum_answers(world.charter, read_round(raw, world.charter), answer_all(world, raw))
    assert np.array_equal(total, 3 * TABLE + 300)


def test_two_processes_at_once_give_one_answer(tmp_path):
    world = make_world(tmp_path)
    raw, context = world.ask(), multiprocessing.get_context("fork")
    results = context.Queue()
    work = lambda: results.put(answer(SiteState(world.sites[0].folder), raw, TABLE))  # noqa: E731
    processes = [context.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    files = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(files) == 1
