"""split_public: whole units become public by their own names, with the owner's consent in the call."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

from pate_torch import PATEClassifier, split_public
from tests.worlds import clouds

TABLE = pd.DataFrame({"age": np.arange(400.0) / 7, "ward": list("abcd") * 100, "key": range(400)})
Y = np.arange(400) % 3


def find_public(table, *arrays, **options):
    """The keys of the records that become public."""
    return set(split_public(table, *arrays, publish_split=True, **options)[1]["key"])


def test_without_consent_the_call_says_what_would_become_public():
    with pytest.raises(ValueError, match=r"publish_split=False: about 20% of the records .*no epsilon covers them"):
        split_public(TABLE, Y, share=0.2)


def test_every_record_is_in_one_part_and_all_arrays_are_split_alike():
    arrays = [TABLE, Y, TABLE.key.to_numpy()[:, None], torch.arange(400), scipy.sparse.csr_array(TABLE[["key"]]),
              TABLE.key.tolist()]  # fmt: skip
    parts = split_public(*arrays, share=0.25, publish_split=True)
    assert all(type(part) is type(arrays[i // 2]) for i, part in enumerate(parts))
    private, public = parts[0].key.tolist(), parts[1].key.tolist()
    assert sorted(private + public) == list(range(400)) and 70 < len(public) < 130 and public != sorted(public)
    for keys, (y, rows, tensor, matrix, items) in ((private, parts[2::2]), (public, parts[3::2])):
        assert y.tolist() == [key % 3 for key in keys] and items == tensor.tolist() == keys
        assert rows[:, 0].tolist() == matrix.toarray()[:, 0].tolist() == keys


@pytest.mark.parametrize("odd", [None, "no number", pd.Timestamp(0), 2**60])
def test_no_record_decides_over_another(odd):
    """An odd value changes the type of its column; a missing record moves all later ones."""
    public = find_public(TABLE, Y)
    changed = TABLE.astype({"age": object})
    changed.loc[5, "age"] = odd
    assert find_public(changed, Y) ^ public <= {5}
    without = np.arange(400) != 5
    assert find_public(TABLE[without], Y[without]) == public - {5}
    integers = TABLE.assign(age=range(400))
    with_gap = integers.assign(age=[None if key == 5 else key for key in range(400)])
    assert with_gap.age.dtype == float and find_public(integers, Y) ^ find_public(with_gap, Y) <= {5}


def test_groups_stay_whole_and_decide_alone():
    patient = TABLE.key // 4
    public = find_public(TABLE, groups=patient)
    assert {key // 4 for key in public} == {key // 4 for key in public if key % 4 == 0} and len(public) % 4 == 0
    assert find_public(TABLE.assign(age=0.0), groups=patient) == public
    assert find_public(TABLE, groups=patient, random_state=1) != public


def test_equal_records_are_one_unit():
    private, public = split_public([[1.5, "a"]] * 50 + [[key, "b"] for key in range(50)], share=0.5, publish_split=True)
    assert sum(row[1] == "a" for row in public) in (0, 50) and len(private) + len(public) == 100


def test_under_replace_one_the_position_decides():
    public = find_public(TABLE, adjacency="replace_one")
    changed = TABLE.assign(age=-1.0, ward="z")
    assert find_public(changed, adjacency="replace_one") == public and len(public) == 40


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((), {}, "arrays"),
        ((TABLE, Y[:5]), {}, r"arrays=\[5, 400\]: must be .*of one length"),
        ((TABLE,), {"share": 1.0}, "share"),
        ((TABLE[:3],), {"share": 1e-6}, "share=1e-06: leaves no public points"),
        ((TABLE,), {"random_state": None}, "random_state=None.*fixed key"),
        ((TABLE,), {"adjacency": "remove"}, "adjacency"),
        ((TABLE,), {"adjacency": "replace_one", "groups": Y}, "groups.*replace_one"),
        ((TABLE,), {"groups": Y / 2}, "groups"),
    ],
)
def test_a_bad_argument_is_named(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        split_public(*arrays, publish_split=True, **options)


def test_the_parts_are_what_fit_takes(tmp_path):
    x, y = (part.numpy() for part in clouds(1000, 0))
    test, truth = (part.numpy() for part in clouds(300, 2))
    x, public, y, _ = split_public(x, y, publish_split=True)
    clf = PATEClassifier(4.0, account="c", num_records_about=900, classes=[0, 1, 2], home=tmp_path, verbose=False)
    assert clf.fit(x, y, public=public).score(test, truth) > 0.9
