"""Votes from elsewhere: every format reads to the same counts; anything but whole votes is refused."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pate_torch import pipeline
from pate_torch.accounting import gdp
from pate_torch.privacy.ledger import Ledger
from pate_torch.teachers.voting import read_votes
from tests.command_runs import TINY, train
from tests.run_configs import changed
from tests.tiny_runs import again, summary, tiny
from tests.worlds import blobs

K, P, C = 12, 7, 3


@pytest.fixture
def plan(tmp_path):
    return tiny(tmp_path)


@pytest.fixture
def predictions():
    return np.random.default_rng(0).integers(0, C, (K, P))


@pytest.fixture
def counts(predictions):
    return np.array([[(predictions[:, p] == c).sum() for c in range(C)] for p in range(P)])


def write(path, array):
    match path.suffix:
        case ".csv":
            np.savetxt(path, array, fmt="%d", delimiter=",")
        case ".npy":
            np.save(path, array)
        case ".safetensors":
            save_file({"votes": torch.from_numpy(np.ascontiguousarray(array))}, path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".npy", ".safetensors"])
def test_both_forms_in_every_format_give_the_same_counts(tmp_path, predictions, counts, suffix):
    for array in (predictions, counts):
        votes = read_votes(write(tmp_path / f"v{suffix}", array), num_classes=C, num_points=P)
        assert votes.num_teachers == K
        assert votes.counts_QC.tolist() == counts.tolist()
        assert "withheld" in repr(votes)


def test_every_integer_type_is_whole_and_a_header_is_passed_over(tmp_path, counts):
    for dtype in (np.int8, np.uint8, np.int32, np.uint64):
        votes = read_votes(write(tmp_path / "v.npy", counts.astype(dtype)), num_classes=C)
        assert votes.counts_QC.tolist() == counts.tolist()
    path = write(tmp_path / "v.csv", counts)
    path.write_text("cat,dog,cow\n" + path.read_text())
    assert read_votes(path, num_classes=C, num_points=P).counts_QC.tolist() == counts.tolist()


@pytest.mark.parametrize(
    "text,match",
    [
        ("1.5,2,8.5\n1,2,9\n", "line 1"),
        ("1,2,9\nnan,2,9\n", "line 2"),
        ("nan,nan,nan\n1,2,9\n", "line 1"),
        ("a,b,c\n1,2,9\n1,two,9\n", "line 3"),
        ("1,2,9\n1,2\n", "table of whole numbers"),
        ("1,2,9\n1,-1,12\n", "non-negative"),
        ("1,2,9\n1,2,8\n", "sum to the same number"),
        ("0,0,0\n0,0,0\n", "num_teachers and num_points"),
        ("99999999999999999999999,2,9\n", "table of whole numbers"),
        ("", "is empty"),
        ("a,b,c\n", "is empty"),
    ],
)
def test_a_bad_csv_is_refused(tmp_path, text, match):
    path = tmp_path / "v.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        read_votes(path, num_classes=C)


@pytest.mark.parametrize(
    "array,match",
    [
        (np.full((P, C), 4.0), "whole numbers, not float64"),
        (np.full((P, C), np.nan), "whole numbers, not float64"),
        (np.ones((P, C), bool), "whole numbers, not bool"),
        (np.ones(P, np.int64), "two axes"),
        (np.ones((2, P, C), np.int64), "two axes"),
        (np.zeros((0, C), np.int64), "two axes"),
        (np.full((P, C), 2**63, np.uint64), "too large"),
        (np.full((P + 1, C), 4), "shape 8 x 3"),
        (np.full((P, C + 1), 4), "shape 7 x 4"),
        (np.full((K, P - 1), 1), "shape 12 x 6"),
        (np.full((K, P), C), "classes in 0..2"),
        (np.full((K, P), -1), "classes in 0..2"),
    ],
)
def test_a_bad_array_is_refused(tmp_path, array, match):
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(ValueError, match=match):
        read_votes(tmp_path / "v.npy", num_classes=C, num_points=P)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_no_pickle_is_ever_run(tmp_path):
    for name in ("v.npy", "v.pkl", "v.pt", "v.npz", "v.safetensors", "v.csv", "v"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(ValueError, match="votes="):
            read_votes(tmp_path / name, num_classes=C)
    np.save(tmp_path / "v.npy", np.array([[Bomb()]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="plain NPY"):
        read_votes(tmp_path / "v.npy", num_classes=C)


@pytest.mark.parametrize(
    "header", ["{'descr':'<i8','fortran_order':False,'shape':(1000000,1000000)}", "{'descr': '<i8', 'x", "(" * 900]
)
def test_a_header_that_lies_is_refused_in_one_line(tmp_path, header):
    text = header.encode() + b"\n"
    (tmp_path / "v.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(ValueError, match="is not a plain NPY array") as refused:
        read_votes(tmp_path / "v.npy", num_classes=3)
    assert "\n" not in str(refused.value)


def test_there_is_one_table_of_the_declared_sizes(tmp_path, predictions, counts):
    with pytest.raises(ValueError, match="is not a file"):
        read_votes(tmp_path / "v.npy", num_classes=C)
    save_file({"a": torch.zeros(2, 3).long(), "b": torch.zeros(2, 3).long()}, tmp_path / "v.safetensors")
    with pytest.raises(ValueError, match="one tensor, not 2"):
        read_votes(tmp_path / "v.safetensors", num_classes=C)
    for array, match in ((predictions, "12 x 7, but 13 x 7"), (counts, "num_teachers=13")):
        with pytest.raises(ValueError, match=match):
            read_votes(write(tmp_path / "v.npy", array), num_classes=C, num_points=P, num_teachers=13)


def test_a_shape_that_fits_both_forms_is_not_guessed(tmp_path):
    """Two teachers on two points with two classes: as counts or as predictions, one would be wrong."""
    table = np.array([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="shape fits both"):
        read_votes(write(tmp_path / "v.npy", table), num_classes=2)
    for name, expected in (("counts", [[0, 1], [1, 0]]), ("predictions", [[1, 1], [1, 1]])):
        save_file({name: torch.from_numpy(table)}, tmp_path / f"{name}.safetensors")
        assert read_votes(tmp_path / f"{name}.safetensors", num_classes=2).counts_QC.tolist() == expected
    # A value that is no class can only be a count.
    assert read_votes(write(tmp_path / "v.npy", np.array([[5, 0], [4, 1]])), num_classes=2).num_teachers == 5


@pytest.fixture
def votes_file(tmp_path):
    """Twenty teachers, nine in ten of them right, on the 75 public points of the clouds."""
    truth = blobs().pool_y.numpy()
    draw = np.random.default_rng(0)
    wrong = draw.random((20, len(truth))) < 0.1
    return write(tmp_path / "votes.csv", np.where(wrong, draw.integers(0, 3, wrong.shape), truth))


def test_a_run_on_brought_votes_is_charged_each_time_and_shows_none_of_them(plan, votes_file, capsys):
    pipeline.run(one := changed(plan, votes=votes_file))
    found = summary(one)
    cost = pytest.approx(gdp.compute_epsilon(math.sqrt(40) / 2, 1e-4), abs=1e-9)
    assert found["epsilon"] == found["epsilon_charged"] == cost
    assert (found["num_teachers"], len(found["teachers_id"])) == (20, 16) and found["student_accuracy"] > 0.8
    printed = capsys.readouterr().out
    for text in (printed, (one.folder / "release/report.html").read_text()):
        assert f"{found['teachers_id']} (reuse is charged)" in text
    assert "teachers=" not in printed
    owner = json.loads((one.folder / "private" / "summary.json").read_text())
    assert owner["ensemble_accuracy"] is None and owner["epsilon_pate2018"] > 0
    counts = read_votes(votes_file, num_classes=3).counts_QC
    spellings = [counts.to(dtype).numpy().tobytes() for dtype in (torch.int32, torch.int64)]
    files = [file.read_bytes() for file in (one.folder / "release").rglob("*") if file.is_file()]
    assert not any(spelling in content for content in files for spelling in spellings)
    pipeline.run(two := again(one, "second"))  # charged each time, under an id of its own
    assert summary(two)["release_id"] != summary(one)["release_id"]
    assert summary(two)["teachers_id"] != summary(one)["teachers_id"]
    assert summary(two)["epsilon_charged"] > summary(one)["epsilon_charged"]


def test_bad_votes_charge_nothing_and_open_no_account(plan, tmp_path):
    file = write(tmp_path / "votes.npy", np.full((20, 74), 1))
    with pytest.raises(ValueError, match="75 x 3 counts"):
        pipeline.run(changed(plan, votes=file))
    assert Ledger(plan.root / "ledger.sqlite").list_accounts() == ()


def test_beside_votes_from_a_file_no_model_is_trained_on_the_records(tmp_path, monkeypatch):
    """Their teachers are elsewhere: there is nothing to compare it with."""
    monkeypatch.setattr("pate_torch.owner_metrics.train_on_all", lambda *_, **__: pytest.fail("a model was trained"))
    np.save(tmp_path / "votes.npy", np.arange(6 * 40).reshape(6, 40) % 10)
    settings = [word for word in TINY if not word.startswith("baseline")]
    assert train(tmp_path, f"votes={tmp_path / 'votes.npy'}", monkeypatch=monkeypatch, base=settings).code == 0


@pytest.mark.parametrize("key", ["teachers", "labels"])
def test_votes_exclude_teachers_and_labels(tmp_path, votes_file, key, monkeypatch):
    outcome = train(tmp_path, f"votes={votes_file}", f"{key}=0123456789abcdef", monkeypatch=monkeypatch)
    assert f"cannot be combined with {key}" in outcome.error
