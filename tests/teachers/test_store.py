"""The teachers' store: what is saved is loaded and found again by content, and anything else is refused."""

import dataclasses
import hashlib
import json
import pickle
import shutil
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.core.files import compute_tensor_digest
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.voting import VotesFile
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers import store as store_module
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import differing, identity_of, recipe, records, select, shards_of, spec

PRIVATE = records(20)


@pytest.fixture(scope="module")
def ensemble():
    return train(PRIVATE, spec(), shards_of([list(range(10)), list(range(10, 19)), []]), recipe(), seed=0)


@pytest.fixture
def store(tmp_path):
    return TeacherStore(tmp_path)


def identify(store, **changes):
    return identity_of(store, PRIVATE, **({"num_teachers": 3} | changes))


@pytest.fixture
def name(store, ensemble):
    return store.save(ensemble, identify(store), ledger_head="abc")


def test_load_returns_what_was_saved_also_after_the_store_was_moved(store, name, ensemble, tmp_path):
    store.set_ledger_head(name, "def")
    moved = TeacherStore(tmp_path / "moved")
    shutil.copytree(store.folder, moved.folder)
    assert store.find(identify(store)) == moved.find(identify(moved)) == name
    for loaded in (store.load(name), moved.load(name)):
        assert differing(loaded.ensemble.params, ensemble.params) == set()
        assert loaded.ensemble.spec == spec() and loaded.ensemble.network == ensemble.network
        assert loaded.ensemble.trained_K.tolist() == [True, True, False]
        assert loaded.identity == identify(store) and loaded.ledger_head == "def"
        assert "withheld" in repr(loaded.ensemble) and "withheld" in repr(loaded.identity)


def test_folders_are_closed_and_say_private(store, name):
    for folder in (store.folder, store.folder / name, store.folder / name / "votes"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "README").read_text().startswith("PRIVATE")
    files = [path for path in store.folder.rglob("*") if path.is_file() and path.name != "README"]
    assert len(files) == 3 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_find_compares_all_that_decides_the_teachers_as_plain_data(store, name):
    others = [{"configuration": dataclasses.asdict(recipe(**change))} for change in ({"steps": 13}, {"dtype": "bf16"})]
    lists = {"partition": {"name": "add_remove", "sizes": [1, 2]}}
    for same in ({}, lists):
        assert store.find(identify(store, **same)) == name
    for other in ({"seed": 1}, *others):
        assert store.find(identify(store, **other)) is None
    assert TeacherStore(store.root / "elsewhere").find(identify(store)) is None


def test_fingerprint_depends_on_every_record_label_unit_and_the_key(store):
    x, y, units = PRIVATE.x.clone(), PRIVATE.y.clone(), PRIVATE.unit_id.copy()
    x[3, 0, 0, 0] += 1
    y[3] = (y[3] + 1) % 4
    units[3] = "other"
    changed = [
        PrivateRecords.from_rows(x, PRIVATE.y, PRIVATE.unit_id),
        PrivateRecords.from_rows(PRIVATE.x, y, PRIVATE.unit_id),
        PrivateRecords.from_rows(PRIVATE.x, PRIVATE.y, units),
        PrivateRecords.from_rows(PRIVATE.x, PRIVATE.y, PRIVATE.unit_id, unit="group:user"),
        PrivateRecords.from_rows(PRIVATE.x[:-1], PRIVATE.y[:-1], PRIVATE.unit_id[:-1]),
        PrivateRecords.from_rows(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), np.array([], dtype=str)),
    ]
    own = store.compute_fingerprint(PRIVATE)
    assert own == store.compute_fingerprint(records(20))
    other_key = TeacherStore(store.root / "other").compute_fingerprint(PRIVATE)
    assert len({own, other_key, *map(store.compute_fingerprint, changed)}) == 8


def test_votes_are_counted_once(store, name, ensemble):
    calls = []

    def count():
        calls.append(1)
        return ensemble.count_votes(PRIVATE.x)

    first, second = (store.get_or_count_votes(name, PRIVATE.x, count) for _ in range(2))
    assert len(calls) == 1 and torch.equal(first.counts_QC.long(), second.counts_QC)
    store.get_or_count_votes(name, PRIVATE.x[:5], lambda: ensemble.count_votes(PRIVATE.x[:5]))
    assert len(list((store.folder / name / "votes").glob("*.safetensors"))) == 2


def test_votes_of_other_teachers_or_points_are_refused_and_not_stored(store, name, ensemble):
    for count in (
        lambda: ensemble.count_votes(PRIVATE.x[:4]),
        lambda: select(ensemble, slice(0, 2)).count_votes(PRIVATE.x),
    ):
        with pytest.raises(ValueError, match="not this ensemble's votes"):
            store.get_or_count_votes(name, PRIVATE.x, count)
    path = store.folder / name / "votes" / f"{compute_tensor_digest(PRIVATE.x)}.safetensors"
    assert not path.exists()
    for counts in (torch.tensor([[3, 0, 0]] * 20), torch.tensor([[3, 0, 0, 0]] * 9), torch.ones(20, 4).long()):
        save_file({"counts_QC": counts}, path)
        with pytest.raises(ValueError, match=r"delete it|sum to num_teachers"):
            store.get_or_count_votes(name, PRIVATE.x, pytest.fail)


@pytest.mark.parametrize("bad", ["../../etc", "", "a" * 15, "A" * 16, "0" * 17, "0123456789abcde/", "..", None, 5])
def test_ids_cannot_be_paths(store, bad):
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        store.load(bad)
    with pytest.raises(ValueError, match="no such ensemble"):
        store.load("0" * 16)


def flip_bit(folder):
    data = bytearray((folder / "group_000000.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "group_000000.safetensors").write_bytes(bytes(data))


def rewrite(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def resign(folder, data):
    """Replace the file of tensors, under a matching checksum."""
    file = folder / "group_000000.safetensors"
    file.write_bytes(data) if isinstance(data, bytes) else save_file(data, file)
    rewrite(folder, sha256={file.name: hashlib.sha256(file.read_bytes()).hexdigest()})


def drop_a_teacher(folder):
    resign(folder, {k: v[:2] for k, v in load_file(folder / "group_000000.safetensors").items()})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (flip_bit, "changed after it was saved"),
        (lambda f: (f / "group_000000.safetensors").unlink(), "missing or was changed"),
        (lambda f: resign(f, pickle.dumps({"weights": [1, 2, 3]})), "not a safetensors file"),
        (lambda f: (f / "manifest.json").write_text("{"), "damaged"),
        (lambda f: (f / "manifest.json").write_text("[]"), "schema version"),
        (lambda f: rewrite(f, schema_version=99), "schema version"),
        (lambda f: rewrite(f, id="f" * 16), "not this ensemble's manifest"),
        (lambda f: rewrite(f, num_teachers=4), "do not fit"),
        (lambda f: rewrite(f, network={"name": "mlp"}), "do not fit"),
        (lambda f: rewrite(f, spec={"name": "x"}), "do not fit"),
        (lambda f: resign(f, {"a": torch.zeros(3)}), "do not fit"),
        (drop_a_teacher, "do not fit"),
    ],
)
def test_damaged_and_foreign_ensembles_are_refused(store, name, harm, message):
    harm(store.folder / name)
    with pytest.raises(ValueError, match=message):
        store.load(name)
    store.find(identify(store))  # finds it or not, but never fails on a broken folder


def test_a_failed_save_leaves_nothing(store, ensemble, monkeypatch):
    identity = identify(store)
    monkeypatch.setattr(store_module, "_write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.save(ensemble, identity)
    assert sorted(path.name for path in store.folder.iterdir()) == [".fingerprint_key", "README"]


def make_rows(x, y=None, units=None):
    x = torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else torch.as_tensor(y)
    return PrivateRecords.from_rows(x, y, np.asarray(range(len(x)) if units is None else units).astype(str))


def find_charged(store, asked, *charged):
    """The account that ``asked`` is known from, after "first" was charged for the other records."""
    for private in charged:
        store.record_charge("first", store.hash_records(private), "0" * 64)
    return store.find_account_of_same_units(store.hash_records(asked), ["first"])


def draw_rows(count, seed):
    return np.random.default_rng(seed).normal(size=(count, 3))


X = draw_rows(400, 0)
CHANGES = {
    "the same": X,
    "shuffled": X[::-1],
    "one value moved": np.concatenate([X[:1] + 1e-6, X[1:]]),
    "a train_test_split": X[np.random.default_rng(1).permutation(400)[:300]],
    "grown eightfold": np.concatenate([X, draw_rows(2800, 2)]),
    "a fifth of them": np.concatenate([X[:80], draw_rows(320, 3)]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_records_of_another_account_are_known_again(store, change):
    assert find_charged(store, make_rows(CHANGES[change]), make_rows(X)) == "first"


def make_groups(x, ids, unit="group:patient"):
    x = torch.tensor(x, dtype=torch.float32)
    return PrivateRecords.from_rows(x, torch.zeros(len(x), dtype=torch.int64), np.asarray(ids), unit=unit)


def test_units_with_ids_of_another_account_are_known_whatever_their_columns_are(store):
    ids, others = [f"p{i // 2}" for i in range(400)], [f"q{i // 2}" for i in range(400)]
    rows, fewer_columns = make_groups(X, ids), make_groups(X[:, 1:] * 10, ids, unit="group:person")
    assert find_charged(store, make_groups(X[:, 1:], others), rows) is None
    assert find_charged(store, fewer_columns) == "first"
    a_fifth = make_groups(draw_rows(400, 5), ids[:80] + others[80:])
    assert find_charged(store, a_fifth) == "first"
    assert find_charged(store, make_groups(draw_rows(400, 6), ids[:30] + others[30:])) is None
    assert find_charged(store, make_rows(X[:, 1:], units=ids)) is None  # names of single records say nothing
    (file,) = store.folder.glob("accounts/*.safetensors")
    assert b"p17" not in file.read_bytes()


def test_ids_are_added_to_an_account_that_was_charged_without_them(store):
    ids, file = [f"p{i // 2}" for i in range(400)], store.folder / "accounts" / "first.safetensors"
    fewer_columns = make_groups(X[:, 1:], ids)
    assert find_charged(store, fewer_columns, make_rows(X)) is None
    hashes = load_file(file)
    save_file({name: hashes[name] for name in ("hash_N", "unit_N", "is_labeled_N")}, file)
    assert find_charged(store, fewer_columns) is None
    assert find_charged(store, fewer_columns, make_groups(X, ids)) == "first"


def test_records_are_known_whatever_their_labels_are(store):
    """Another order of the classes gives every record another label, and equal points of two classes are one hash."""
    y = np.arange(400) % 2
    twice = make_rows(np.repeat(X, 2, axis=0), np.tile([0, 1], 400), np.repeat(np.arange(400), 2))
    first = store.hash_records(make_rows(X, y))
    assert store.compute_content_fingerprint(make_rows(X, 1 - y)) == store.compute_content_fingerprint(make_rows(X, y))
    assert (store.hash_records(make_rows(X, 1 - y)).hash_N[:400] == first.hash_N[:400]).all()
    merged = first.merge(store.hash_records(twice))
    assert merged.hash_N[~merged.is_labeled_N].tolist() == first.hash_N[:400].tolist()
    for asked in (make_rows(X, 1 - y), make_rows(X, 0 * y), twice):
        assert find_charged(store, asked, make_rows(X, y)) == "first"
    assert find_charged(TeacherStore(store.root / "elsewhere"), make_rows(X, y), twice) == "first"


def test_points_of_few_values_are_known_by_their_labels(store):
    """By chance, all points occur twice, and a pair of a point and a label occurs rarely."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(2, size=(1000, 8)).astype(np.float32), draw.integers(200, size=1000)
    order = draw.permutation(1000)
    assert find_charged(store, make_rows(x[order], y[order]), make_rows(x, y)) == "first"
    others = draw.integers(2, size=(1000, 8)).astype(np.float32)
    assert find_charged(store, make_rows(others, draw.permutation(y)), make_rows(x, y)) is None


def test_votes_are_known_in_any_order_of_queries_and_classes(store):
    draw = np.random.default_rng(0)
    counts = torch.as_tensor(draw.multinomial(20, [0.6, 0.3, 0.1], size=50))
    rows = torch.as_tensor(draw.permutation(50))
    orders = [(slice(None), [0, 1, 2]), (rows, [0, 1, 2]), (rows, [2, 0, 1])]
    votes = [Votes(counts[rows][:, classes], 20) for rows, classes in orders]
    methods = [VotesFile(mechanism=GNMax(sigma=9.0), votes=ordered) for ordered in votes]
    none = records(0)
    assert len({method.compute_fingerprint(store, none) for method in methods}) == 1
    assert len({method.compute_call_fingerprint(store, none) for method in methods}) == 3
    moved = counts.clone()
    moved[0] = torch.tensor([20, 0, 0]) if counts[0, 0] != 20 else torch.tensor([0, 20, 0])
    changed = VotesFile(mechanism=GNMax(sigma=9.0), votes=Votes(moved, 20))
    assert changed.compute_fingerprint(store, none) != methods[0].compute_fingerprint(store, none)


def test_other_records_and_keys_are_not_known(store):
    others = np.concatenate([X[:30], draw_rows(370, 4)])  # 7.5 % are known
    assert find_charged(store, make_rows(others), make_rows(X)) is None
    assert store.find_account_of_same_units(store.hash_records(make_rows(X)), []) is None
    foreign = TeacherStore(store.root / "elsewhere").hash_records(make_rows(X))
    assert store.find_account_of_same_units(foreign, ["first"]) is None


@pytest.mark.parametrize("values,size", [(4, 300), (60, 300), (2000, 900), (2000, 100)])
def test_records_of_few_values_coincide_by_chance(store, values, size):
    """Other people's records of the same few values pass; the same people's are known where values tell them apart."""
    draw = np.random.default_rng(values)
    first, other = (make_rows(draw.integers(0, values, (size, 1)).astype(float)) for _ in range(2))
    assert find_charged(store, other, first) is None
    if values == 2000:
        assert find_charged(store, first) == "first"


def test_a_unit_is_known_by_any_of_its_records(store):
    units = np.arange(400) // 4
    one_each = X + (units * 4 != np.arange(400))[:, None]  # a quarter of the records, but of every patient
    assert find_charged(store, make_rows(one_each, units=units), make_rows(X, units=units)) == "first"


def test_an_account_that_grows_knows_all_its_records(store):
    more = draw_rows(400, 5)
    assert find_charged(store, make_rows(more), make_rows(X), make_rows(np.concatenate([X, more]))) == "first"


def make_account(held_out):
    """The charged account "a" of these terms."""
    filter = PrivacyFilter(kind="gdp", epsilon=1.0, delta=1e-5)
    terms = {"adjacency": "add_remove", "unit": "record", "noise": "torch"}
    return Account(name="a", filter=filter, **terms, held_out=held_out, charges={"id": None})


def test_the_first_charge_fixes_the_rule_of_held_out_units(store):
    store.set_test_rule("a", 0.25, None)
    store.set_test_rule("b", 0.25, None)
    rule = store.find_test_rule("a")
    assert rule["share"] == 0.25 and rule["key"] != store.find_test_rule("b")["key"]
    file = store.folder / "held_out" / "a.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    store.sweep()
    charged = make_account(rule["id"])
    for share in (0.25, 0):  # also a run that makes no test leaves the units out
        store.set_test_rule("a", share, charged)
        assert store.find_test_rule("a") == rule
    with pytest.raises(ValueError, match=r"private_test\.share=0\.3: must be 0\.25, which is fixed for this account"):
        store.set_test_rule("a", 0.3, charged)
    file.unlink()
    for share in (0.25, 0):
        with pytest.raises(ValueError, match=r"account='a': holds out the units of teachers/held_out/a\.json.*missing"):
            store.set_test_rule("a", share, charged)


def test_an_account_that_was_charged_for_all_units_has_no_test(store):
    store.set_test_rule("a", 0.25, None)  # a run that lost the race for the first charge has left its rule
    with pytest.raises(ValueError, match=r"share: must be asked for before the account.s first.*Use another"):
        store.set_test_rule("a", 0.25, make_account(""))
    store.set_test_rule("a", 0, make_account(""))
    assert store.find_test_rule("a") is None


def test_a_rule_without_a_charge_can_be_changed_but_not_where_the_ledger_is_lost(store):
    store.set_test_rule("a", 0.25, None)
    store.set_test_rule("a", 0.3, None)
    rule = store.find_test_rule("a")
    assert rule["share"] == 0.3
    store.record_charge("a", None, "head")
    with pytest.raises(ValueError, match=r"share=0.2: must be 0.3, which is fixed for this account"):
        store.set_test_rule("a", 0.2, None)
    store.set_test_rule("a", 0, None)  # the account is refused later, because its ledger is missing
    assert store.find_test_rule("a") == rule


def test_teachers_that_were_trained_before_the_test_do_not_prevent_it(store, ensemble):
    """A stored ensemble is no charge. Without a rule, the test would be charged and would test no unit."""
    store.set_test_rule("a", 0, None)
    store.save(ensemble, identify(store, dataset="a"), "head")
    assert store.find_ledger_heads("a")
    store.set_test_rule("a", 0.25, None)
    assert store.find_test_rule("a")["share"] == 0.25


def test_held_out_units_are_those_of_the_account_alone(store):
    rows = make_rows(torch.arange(400.0)[:, None])
    training, test, rule_id = store.hold_out_units("a", rows, "add_remove")
    assert training is rows and len(test) == 0 and not rule_id  # nothing is held out before a share is fixed
    for account in ("a", "b"):
        store.set_test_rule(account, 0.25, None)
    assert store.hold_out_units("a", rows, "add_remove")[2] == store.find_test_rule("a")["id"]
    parts = [
        [part.x.flatten().tolist() for part in store.hold_out_units(name, rows, "add_remove")[:2]] for name in "aab"
    ]
    assert parts[0] == parts[1] != parts[2]
    assert sorted(parts[0][0] + parts[0][1]) == list(range(400)) and 60 < len(parts[0][1]) < 140
    no_rows = store.hold_out_units("other", rows, "add_remove")[1]
    assert [len(part) for part in store.hold_out_units("a", no_rows, "add_remove")[:2]] == [0, 0]
