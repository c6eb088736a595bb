"""``PATEClassifier`` and ``PATE`` on records of every type: nothing tells neighbors apart but what is paid for.

``neighbor_estimators`` makes the calls, ``neighbor_harness`` measures. Here: calls that reach every value of every
choice, all triples of values (slow), and each break of the guarantee that was ever found here, planted again.
"""

import contextlib
import dataclasses
import os

import numpy as np
import pytest
import torch

from pate_torch import TabularSynthesizer
from pate_torch.api import pate
from pate_torch.api.pate import PATE
from pate_torch.core import texts
from pate_torch.data import streams, tensors
from pate_torch.features.encoder import Encoder
from pate_torch.methods import synthetic
from pate_torch.methods.base import FirstAnswers
from pate_torch.privacy import partition, unit_ids
from pate_torch.privacy.domain import DomainColumn
from pate_torch.privacy.noise import NoiseSource
from pate_torch.teachers import panel, store
from pate_torch.teachers.network import Network
from pate_torch.teachers.store import TeacherStore
from tests.privacy import neighbor_choices as choices
from tests.privacy import neighbor_estimators as calls
from tests.privacy.neighbor_cases import Tally, judged, unreached

pytestmark = pytest.mark.filterwarnings("ignore")
SEED = int(os.environ.get("NEIGHBORS_SEED", "0"))
SLOW = ("network", "backbone", "teachers")
"""Networks, which PATEClassifier trains as long as any: through the other door alone in the quick test."""


def case(**changes: str) -> dict[str, str]:
    return calls.PLAIN | changes


def test_calls_that_reach_every_value_hold(record_property):
    draw, tally = np.random.default_rng(SEED), Tally()
    for name, value in [(name, value) for name, known in calls.SPACE.items() for value in known]:
        for _ in range(50):
            if (name, value) in tally.reached:
                break
            choice = {key: str(draw.choice(known)) if draw.random() < 0.5 else calls.PLAIN[key]
                      for key, known in calls.SPACE.items()} | {name: value}  # fmt: skip
            if choice["method"] in SLOW:
                choice |= {"door": "PATE"}
            calls.attempt(choice, tally, most=1, seed=SEED)
    judged(tally, record_property, f"; seed {SEED}")
    assert not unreached(tally, calls.SPACE), "values that no accepted call reached"


@pytest.mark.slow(reason="every triple of choices, through either door")
@pytest.mark.parametrize("door", calls.SPACE["door"])
def test_every_triple_of_values_holds(door, record_property):
    tally, array = Tally(), choices.Covering({**calls.SPACE, "door": [door]}, SEED, tries=3)
    for row in array.rows():
        array.said(row, calls.attempt(row, tally, most=4, seed=SEED))
    judged(tally, record_property, f"; {array.total} triples, {array.covered} covered, {array.refused} refused")


@pytest.mark.parametrize(
    "door,changes,words",
    [
        *((door, {"ids": "floats"}, "ids of one type") for door in calls.SPACE["door"]),
        *((door, {"ids": "missing"}, "missing ids") for door in calls.SPACE["door"]),
        ("PATE", {"method": "dpsgd"}, "releases a model"),
    ],
)
def test_ids_that_name_no_units_and_methods_that_label_nothing_are_refused(door, changes, words):
    assert not calls.attempt(case(door=door, **changes), tally := Tally()) and words in next(iter(tally.reasons))


@pytest.mark.parametrize("method", calls.TEACHERS_BY_METHOD)
def test_units_of_several_records_are_refused_where_one_record_is_replaced(method):
    assert not calls.attempt(case(method=method, ids="strings", adjacency="replace_one"), tally := Tally())
    assert "protects single records" in next(iter(tally.reasons))


def test_public_dates_that_nobody_declared_are_refused_before_anything_is_drawn(monkeypatch, tmp_path):
    rows = calls.records(case(column="dates"))
    monkeypatch.setattr(calls, "PUBLIC_COLUMNS", {"floats": calls.COLUMNS["dates"]})
    monkeypatch.setattr(NoiseSource, "draw_gaussian", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(ValueError, match="column 'c' holds dates"):
        calls.Calls(case(column="floats"), rows, tmp_path)()
    assert not list(tmp_path.rglob("ledger.sqlite"))


def holds(most: int, **changes: str) -> None:
    """The changed case is accepted, and so many neighbors of it tell nothing."""
    assert calls.attempt(case(**changes), tally := Tally(), most=most), tally.reasons
    assert not tally.faults


def faults(*words: str, draws: int = 1, **changes: str) -> bool:
    """Whether a neighbor of the changed case shows a difference in these words, of several draws."""
    for seed in range(draws):
        tally = Tally()
        most = None if draws == 1 else 6
        assert calls.attempt(case(**changes), tally, most=most, seed=seed, stops_at_fault=True), tally.reasons
        found = "\n".join(fault for faults in tally.faults.values() for fault in faults)
        if found:
            return all(word in found for word in words)
    return False


@pytest.mark.parametrize(
    "door,ids,method",
    [("PATEClassifier", "integers", "drawing"), ("PATE", "64-bit integers", "gradients"), ("PATE", "dates", "drawing")],
)
def test_ids_spelled_through_the_type_of_their_column_are_found(monkeypatch, door, ids, method):
    def by_column(key, column, count):
        return np.asarray(column).astype(str).view(unit_ids.UnitIds)

    monkeypatch.setattr("pate_torch.privacy.records.parse_unit_ids", by_column)
    monkeypatch.setattr("pate_torch.api.classifier.parse_unit_ids", by_column)
    assert faults("where it says", door=door, ids=ids, method=method)


def test_a_column_spelled_through_its_type_is_found(monkeypatch):
    monkeypatch.setattr("pate_torch.privacy.schema.format_value", lambda value: "" if value is None else str(value))
    assert faults("where it says", method="gradients", column="dates")


def test_cells_that_pandas_reads_by_the_type_of_their_column_are_found(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(texts, "replace_boolean", lambda text: {"True": "1", "False": "0"}.get(text, text))
        assert faults("where it says", method="gradients", column="booleans of a file")
    monkeypatch.setattr(unit_ids, "format_unit_id", texts.to_canonical_text)
    assert faults("where it says", door="PATE", method="estimator", ids="zeros of a file")


def test_an_id_that_two_releases_share_where_the_votes_are_the_same_is_found(monkeypatch):
    monkeypatch.setattr(TeacherStore, "create_alias", lambda self, fingerprint, ensemble=None: fingerprint[:16])
    assert faults("differs", door="PATE", method="estimator", releases="one and fewer", ids="strings")


def test_a_release_found_again_because_the_votes_are_the_same_is_found(monkeypatch):
    label, seen = PATE.label, set()

    def free_where_known(self, public_x, *given, **options):
        votes = self._panel.count_votes(torch.as_tensor(public_x)).counts_QC
        known = (self.home, votes.numpy().tobytes())
        if known not in seen:
            seen.add(known)
            return label(self, public_x, *given, **options)
        raise ValueError("found again, for free")

    monkeypatch.setattr(PATE, "label", free_where_known)
    assert faults("what was charged differs", method="estimator", releases="one and fewer", ids="strings")


def no_retraining(monkeypatch):
    monkeypatch.setattr(panel.Panel, "check_retraining", lambda *_: None)


def test_teachers_that_draw_from_one_generator_are_refused_and_found(monkeypatch):
    monkeypatch.setattr(panel, "seeded_generators", lambda *_: contextlib.nullcontext())
    assert not calls.attempt(case(door="PATE", method="drawing"), tally := Tally())
    assert "was trained again" in str(tally.reasons)
    assert not calls.attempt(case(door="labeler", method="drawing"), tally := Tally())
    assert "was trained again" in str(tally.reasons)
    no_retraining(monkeypatch)
    np.random.seed(0)
    assert faults("where it says", draws=6, door="PATE", method="drawing", ids="strings")


def test_teachers_that_share_a_backbone_are_refused_and_found(monkeypatch):
    shared = {"door": "PATE", "method": "backbone", "ids": "strings"}
    monkeypatch.setitem(calls.TEACHERS_BY_METHOD, "backbone", Network(calls.of_the_same, steps=2, batch_size=8))
    assert not calls.attempt(case(**shared), tally := Tally()) and "share parameters" in str(tally.reasons)
    no_retraining(monkeypatch)
    monkeypatch.setattr(Network, "check", lambda *_: None)
    monkeypatch.setattr(panel.copy, "deepcopy", lambda module: module)
    assert faults("where it says", **shared)


def test_classes_read_off_private_labels_are_found(monkeypatch):
    def of_the_labels(y, classes):
        text_N = np.array([str(value) for value in y])
        classes, label_N = np.unique(text_N, return_inverse=True)
        return classes, label_N.astype(np.int64)

    monkeypatch.setattr("pate_torch.api.classifier.encode_labels", of_the_labels)
    assert faults(method="gradients")


@pytest.mark.parametrize("rule", ["points influence each other", "a filler that is their mean"])
def test_an_encoder_that_mixes_private_points_is_found(monkeypatch, rule):
    encode = Encoder.encode

    def mixed(self, *given, **options):
        x = encode(self, *given, **options)
        return x - x.mean(0) if rule.startswith("points") else torch.where(x.abs() < 0.5, x, x.mean(0))

    monkeypatch.setattr(Encoder, "encode", mixed)
    monkeypatch.setattr(Encoder, "check_batch_independence", lambda *_: None)
    assert faults("where it says", draws=6, method="gradients", column="texts")


@pytest.mark.parametrize("door", calls.SPACE["door"])
@pytest.mark.parametrize("adjacency", calls.SPACE["adjacency"])
def test_images_of_a_dataset_with_random_transforms_hold(door, adjacency):
    holds(6, door=door, column="images", adjacency=adjacency)


@pytest.mark.parametrize("door", calls.SPACE["door"])
@pytest.mark.parametrize("adjacency", calls.SPACE["adjacency"])
def test_images_of_an_array_hold(door, adjacency):
    holds(8, door=door, column="image arrays", adjacency=adjacency)


@pytest.mark.parametrize("door", calls.SPACE["door"])
@pytest.mark.parametrize("adjacency", calls.SPACE["adjacency"])
@pytest.mark.parametrize("column,unusable", [("floats", {"label": None}), ("images", {"column": "none"})])
def test_records_without_a_usable_one_are_not_refused(monkeypatch, door, adjacency, column, unusable):
    """A neighbor has one usable record. Neither a refusal nor anything else tells the two apart."""
    records = calls.records
    usable = records(case(column=column))[0]

    def without_use(*given, public=False, **options):
        rows = records(*given, public=public, **options)
        return rows if public else [dataclasses.replace(row, **unusable) for row in rows]

    monkeypatch.setattr(calls, "records", without_use)
    in_place = adjacency == "replace_one"
    monkeypatch.setattr(calls, "neighbors", lambda _, rows: [("one usable", [usable, *rows[in_place:]])])
    holds(1, door=door, adjacency=adjacency, column=column, test="0.4")


@pytest.mark.parametrize("door", calls.SPACE["door"])
def test_images_read_by_the_type_of_their_array_are_found(monkeypatch, door):
    convert = streams.convert_images
    monkeypatch.setattr(streams, "convert_images", lambda *x, is_private=False, **_: convert(*x, is_private=is_private))
    assert faults("where it says", door=door, column="image arrays", ids="strings")


@pytest.mark.parametrize("door", calls.SPACE["door"])
def test_transforms_that_draw_from_one_generator_for_all_records_are_found(monkeypatch, door):
    monkeypatch.setattr(streams.rng, "seeded_generators", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(streams.PointStream, "_check_second_reading", lambda *_: None)
    torch.manual_seed(0)
    assert faults("differs", draws=6, door=door, column="images", ids="strings")


def test_a_warning_that_counts_private_records_is_found(monkeypatch):
    records = tensors.build_private_data

    def counting(*given, **options):
        private = records(*given, **options)
        if dropped := private.num_unusable_by_reason:
            print(f"{sum(dropped.values())} records cannot be used")
        return private

    monkeypatch.setattr(pate.tensors, "build_private_data", counting)
    assert faults("said.txt differs", door="PATE")


@pytest.mark.parametrize(
    "ids,adjacency,epsilon",
    [
        ("none", "add_remove", 3.0),
        ("none", "replace_one", 100.0),
        ("strings", "add_remove", 3.0),
        ("strings", "add_remove", 100.0),
    ],
)
def test_synthetic_tables_hold(monkeypatch, ids, adjacency, epsilon):
    monkeypatch.setattr(calls, "SYNTHETIC_EPSILON", epsilon)
    holds(4, method="synthetic", ids=ids, adjacency=adjacency)


@pytest.mark.parametrize("planted", ["all rows of a unit", "bins of the private rows", "as many rows as records"])
def test_faults_of_synthetic_tables_are_found(monkeypatch, planted):
    if planted == "all rows of a unit":
        monkeypatch.setattr(synthetic, "select_one_per_unit", lambda private, adjacency: private)
    elif planted == "bins of the private rows":
        encode = DomainColumn.encode

        def by_rank(self, text):
            code_N = encode(self, text)
            return np.where(code_N > 0, 1 + (np.argsort(np.argsort(code_N)) >= len(code_N) // 2), 0)

        monkeypatch.setattr(DomainColumn, "encode", by_rank)
    else:
        monkeypatch.setattr(FirstAnswers, "estimate_size", lambda self, *_: len(rows_of[0]))
        fit, rows_of = TabularSynthesizer.fit, [None]

        def counting(self, table, **options):
            rows_of[0] = table
            return fit(self, table, **options)

        monkeypatch.setattr(TabularSynthesizer, "fit", counting)
    assert faults(draws=6, method="synthetic", ids="strings")


TESTED = {"method": "gradients", "test": "0.4"}


@pytest.mark.parametrize(
    "door,ids,adjacency",
    [
        ("PATEClassifier", "none", "replace_one"),
        ("PATEClassifier", "strings", "add_remove"),
        ("PATEClassifier", "booleans", "add_remove"),  # two units, of which the one that is left may be held out
        ("PATE", "none", "add_remove"),
        ("PATE", "none", "replace_one"),
    ],
)
def test_a_test_on_held_out_units_holds(door, ids, adjacency):
    holds(4, **TESTED, door=door, ids=ids, adjacency=adjacency, releases="one and the same")


def test_a_test_of_every_record_of_a_unit_is_found(monkeypatch):
    monkeypatch.setattr(store, "select_one_per_unit", lambda private, adjacency, hash_N: private)
    assert faults("where it says", draws=6, **TESTED, ids="strings")


def test_units_that_are_held_out_by_their_place_in_the_data_are_found(monkeypatch):
    monkeypatch.setattr(partition, "get_unit_ids", lambda private, adjacency: unit_ids.make_position_ids(len(private)))
    assert faults("where it says", draws=6, **TESTED, ids="none")
