"""The teachers' store: what is saved comes back, is found again by content, and anything off is refused."""

import json
import pickle
import shutil
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pate_torch.core.files import compute_tensor_digest
from pate_torch.privacy.records import PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers import store as store_module
from pate_torch.teachers.store import Identity, TeacherStore
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import differing, recipe, records, shards_of, spec


@pytest.fixture(scope="module")
def trained():
    private = records(20)
    return private, train(private, spec(), shards_of([list(range(10)), list(range(10, 19)), []]), recipe(), seed=0)


def identity(store: TeacherStore, private: PrivateRecords, **changes: object) -> Identity:
    settings = recipe().to_configuration()
    base = {
        "dataset": "squares",
        "fingerprint": store.compute_fingerprint(private),
        "partition": {"name": "add_remove", "capacity": None},
        "configuration": settings,
        "seed": 0,
        "num_teachers": 3,
    }
    return Identity(**(base | changes))


@pytest.fixture
def saved(tmp_path, trained):
    private, ensemble = trained
    store = TeacherStore(tmp_path)
    return store, store.save(ensemble, identity(store, private), ledger_head="abc"), private, ensemble


def test_what_is_saved_comes_back(saved):
    store, name, private, ensemble = saved
    stored = store.load(name)
    assert differing(stored.ensemble.params, ensemble.params) == set()
    assert stored.ensemble.spec == spec() and stored.ensemble.network == ensemble.network
    assert stored.ensemble.trained_K.tolist() == [True, True, False]
    assert stored.identity == identity(store, private) and stored.ledger_head == "abc"
    assert torch.equal(stored.ensemble.predict(private.x), ensemble.predict(private.x))
    store.set_ledger_head(name, "def")
    assert store.load(name).ledger_head == "def"


def test_folders_are_closed_and_say_private(saved):
    store, name, _, _ = saved
    for folder in (store.folder, store.folder / name, store.folder / name / "votes"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "README").read_text().startswith("PRIVATE")
    files = [path for path in store.folder.rglob("*") if path.is_file() and path.name != "README"]
    assert len(files) == 3 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert not any("withheld" not in repr(x) for x in (store.load(name).ensemble, store.load(name).identity))


def test_identical_configurations_on_the_same_data_are_found(saved):
    store, name, private, _ = saved
    assert store.find(identity(store, private)) == name
    assert store.find(identity(store, private, seed=1)) is None
    assert store.find(identity(store, private, configuration=recipe(steps=13).to_configuration())) is None
    # How many are launched at once decides bits; who does the work does not.
    assert store.find(identity(store, private, configuration=recipe(chunk=2).to_configuration())) is None
    assert store.find(identity(store, private, configuration=recipe(backend="processes").to_configuration())) == name
    assert TeacherStore(store.root / "elsewhere").find(identity(store, private)) is None


def test_a_changed_record_label_or_unit_is_other_data(saved):
    store, _, private, _ = saved
    own = store.compute_fingerprint(private)
    assert own == store.compute_fingerprint(records(20))
    x, y = private.x.clone(), private.y.clone()
    x[3, 0, 0, 0] += 1
    y[3] = (y[3] + 1) % 4
    units = private.unit_id.copy()
    units[3] = "other"
    changed = [
        PrivateRecords.from_rows(x, private.y, private.unit_id),
        PrivateRecords.from_rows(private.x, y, private.unit_id),
        PrivateRecords.from_rows(private.x, private.y, units),
        PrivateRecords.from_rows(private.x, private.y, private.unit_id, unit="group:user"),
        PrivateRecords.from_rows(private.x[:-1], private.y[:-1], private.unit_id[:-1]),
    ]
    assert len({own, *map(store.compute_fingerprint, changed)}) == 6
    assert TeacherStore(store.root / "other").compute_fingerprint(private) != own  # under another key
    empty = PrivateRecords.from_rows(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), np.array([], dtype=str))
    assert len(store.compute_fingerprint(empty)) == 64


def test_votes_are_counted_once(saved):
    store, name, private, ensemble = saved
    calls = []

    def compute() -> Votes:
        calls.append(1)
        return ensemble.count_votes(private.x)

    first, second = (store.get_or_count_votes(name, private.x, compute) for _ in range(2))
    assert len(calls) == 1 and torch.equal(first.counts_QC.long(), second.counts_QC)
    store.get_or_count_votes(name, private.x[:5], lambda: ensemble.count_votes(private.x[:5]))
    assert len(list((store.folder / name / "votes").glob("*.safetensors"))) == 2


def test_votes_of_other_teachers_or_points_are_refused(saved):
    store, name, private, ensemble = saved
    with pytest.raises(ValueError, match="not this ensemble's votes"):
        store.get_or_count_votes(name, private.x, lambda: ensemble.count_votes(private.x[:4]))
    with pytest.raises(ValueError, match="not this ensemble's votes"):
        store.get_or_count_votes(name, private.x, lambda: ensemble.select(slice(0, 2)).count_votes(private.x))
    path = store.folder / name / "votes" / f"{compute_tensor_digest(private.x)}.safetensors"
    save_file({"counts_QC": torch.zeros(20, 9, dtype=torch.int32)}, path)
    with pytest.raises(ValueError, match="delete it"):
        store.get_or_count_votes(name, private.x, lambda: ensemble.votes(private.x))
    save_file({"counts_QC": torch.ones(20, 4, dtype=torch.int32)}, path)
    with pytest.raises(ValueError, match="sum to num_teachers"):
        store.get_or_count_votes(name, private.x, lambda: ensemble.votes(private.x))


@pytest.mark.parametrize("name", ["../../etc", "", "a" * 15, "A" * 16, "0" * 17, "0123456789abcde/", "..", None, 5])
def test_ids_cannot_be_paths_and_unknown_ones_say_where_was_looked(saved, name):
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        saved[0].load(name)
    with pytest.raises(ValueError, match=r"no such ensemble under .*teachers"):
        saved[0].load("0" * 16)


def damage_tensor(folder):
    data = bytearray((folder / "ensemble.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "ensemble.safetensors").write_bytes(bytes(data))


def rewrite(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def resign(folder, tensors):
    """Other tensors under a matching checksum."""
    import hashlib

    save_file(tensors, folder / "ensemble.safetensors")
    rewrite(folder, sha256=hashlib.sha256((folder / "ensemble.safetensors").read_bytes()).hexdigest())


def pickled(folder):
    import hashlib

    data = pickle.dumps({"weights": [1, 2, 3]})
    (folder / "ensemble.safetensors").write_bytes(data)
    rewrite(folder, sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage_tensor, "changed after it was saved"),
        (lambda f: (f / "ensemble.safetensors").unlink(), "missing or was changed"),
        (pickled, "not a safetensors file"),
        (lambda f: (f / "manifest.json").write_text("{"), "damaged"),
        (lambda f: (f / "manifest.json").write_text("[]"), "schema version"),
        (lambda f: rewrite(f, schema_version=99), "schema version"),
        (lambda f: rewrite(f, id="f" * 16), "not this ensemble's manifest"),
        (lambda f: rewrite(f, num_teachers=4), "do not fit"),
        (lambda f: rewrite(f, network={"name": "mlp"}), "do not fit"),
        (lambda f: rewrite(f, spec={"name": "x"}), "do not fit"),
        (lambda f: rewrite(f, fingerprint="x"), "do not fit"),
        (lambda f: resign(f, {"a": torch.zeros(3)}), "do not fit"),
        (
            lambda f: resign(f, {k: v[:2] for k, v in load_file(f / "ensemble.safetensors").items()}),
            "do not fit",
        ),
    ],
)
def test_damaged_and_foreign_ensembles_are_refused(saved, harm, message):
    store, name, private, _ = saved
    harm(store.folder / name)
    with pytest.raises(ValueError, match=message):
        store.load(name)
    store.find(identity(store, private))  # finds it or not, but never fails on somebody's broken folder


def test_a_failed_save_leaves_nothing(tmp_path, trained, monkeypatch):
    private, ensemble = trained
    store = TeacherStore(tmp_path)
    own = identity(store, private)
    with pytest.raises(ValueError, match="not the whole ensemble"):
        store.save(ensemble.select(slice(0, 2)), own)
    monkeypatch.setattr(store_module, "_write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.save(ensemble, own)
    assert sorted(path.name for path in store.folder.iterdir()) == [".fingerprint_key", "README"]


def test_a_moved_store_still_recognizes_its_data(saved, tmp_path):
    store, name, private, _ = saved
    moved = TeacherStore(tmp_path / "moved")
    shutil.copytree(store.folder, moved.folder)
    assert moved.find(identity(moved, private)) == name
    assert moved.load(name).identity.seed == 0


def test_identities_compare_as_plain_data(saved):
    store, _, private, _ = saved
    tuples = identity(store, private, partition={"sizes": (1, 2)})
    assert tuples == identity(store, private, partition={"sizes": [1, 2]})
    with pytest.raises(ValueError, match="fingerprint"):
        identity(store, private, fingerprint="zz")


# ---- records of accounts --------------------------------------------------------------------------------------------


def make_rows(x, y=None, units=None) -> PrivateRecords:
    x = torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else torch.as_tensor(y)
    return PrivateRecords.from_rows(
        x, y, np.arange(len(x)).astype(str) if units is None else np.asarray(units).astype(str)
    )


@pytest.fixture
def store(tmp_path):
    return TeacherStore(tmp_path)


def charge(store, account, private) -> None:
    store.record_charge(account, store.hash_records(private), "0" * 64)


def find(store, private) -> str | None:
    """The account that these records are known from."""
    return store.find_account_of_same_units(store.hash_records(private), ["first"])


def charge_then_find(store, charged, asked) -> str | None:
    """The account that ``asked`` is known from, after "first" was charged for the other records."""
    charge(store, "first", charged)
    return find(store, asked)


X = np.random.default_rng(0).normal(size=(400, 3))
CHANGES = {
    "the same": X,
    "shuffled": X[::-1],
    "one value moved": np.concatenate([X[:1] + 1e-6, X[1:]]),
    "a train_test_split": X[np.random.default_rng(1).permutation(400)[:300]],
    "grown eightfold": np.concatenate([X, np.random.default_rng(2).normal(size=(2800, 3))]),
    "a fifth of them": np.concatenate([X[:80], np.random.default_rng(3).normal(size=(320, 3))]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_records_of_another_account_are_known_again(store, change):
    assert charge_then_find(store, make_rows(X), make_rows(CHANGES[change])) == "first"


def test_other_records_and_those_of_the_same_account_pass(store):
    others = np.concatenate([X[:30], np.random.default_rng(4).normal(size=(370, 3))])  # 7.5 % are known
    assert charge_then_find(store, make_rows(X), make_rows(others)) is None
    assert store.find_account_of_same_units(store.hash_records(make_rows(X)), []) is None


@pytest.mark.parametrize("values,size", [(4, 300), (60, 300), (2000, 900), (2000, 100)])
def test_records_of_few_values_coincide_by_chance(store, values, size):
    """Other people's records of the same few values pass; the same people's are known where values tell them apart."""
    draw = np.random.default_rng(values)
    first, other = (draw.integers(0, values, (size, 1)).astype(float) for _ in range(2))
    assert charge_then_find(store, make_rows(first), make_rows(other)) is None
    if values == 2000:
        assert find(store, make_rows(first)) == "first"


def test_a_unit_is_known_by_any_of_its_records(store):
    units = np.arange(400) // 4
    one_each = X.copy()
    one_each[units * 4 != np.arange(400)] += 1.0  # a quarter of the records, but of every patient
    assert charge_then_find(store, make_rows(X, units=units), make_rows(one_each, units=units)) == "first"


def test_an_account_that_grows_knows_all_its_records(store):
    more = np.random.default_rng(5).normal(size=(400, 3))
    for part in (X, np.concatenate([X, more])):
        charge(store, "first", make_rows(part))
    assert find(store, make_rows(more)) == "first"


def test_labels_and_types_are_part_of_a_record(store):
    assert charge_then_find(store, make_rows(X), make_rows(X, y=np.ones(400, dtype=np.int64))) is None
    foreign = TeacherStore(store.root / "elsewhere").hash_records(make_rows(X))  # under another key
    assert store.find_account_of_same_units(foreign, ["first"]) is None
