"""Values are spelled each by itself, whatever type their column has."""

import datetime

import numpy as np
import pandas as pd
import pytest

from pate_torch.core.texts import to_canonical_text

COLUMNS = {
    "dates": pd.Series(
        pd.to_datetime(["2020-01-01", "2020-01-02 03:04:05", "2021-12-31 23:59:59.500"], format="mixed")
    ),
    "lengths of time": pd.Series(pd.to_timedelta([1, 90, 3661.5], unit="s")),
    "booleans": pd.Series([True, False, True]),
    "integers": pd.Series([1, -2, 3]),
    "long integers": pd.Series([2**60, 2**60 + 1, 7]),
    "texts": pd.Series(["a", " b ", "2020-01-01 00:00:00"]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_value_is_spelled_alike_in_a_typed_column_and_in_one_of_objects(name):
    typed = np.asarray(COLUMNS[name])
    assert list(map(to_canonical_text, typed)) == list(map(to_canonical_text, COLUMNS[name].astype(object)))


def test_a_date_has_one_spelling():
    same = ["2020-01-02", "2020-01-02 00:00:00", "2020-01-02T00:00:00.000", datetime.date(2020, 1, 2),
            datetime.datetime(2020, 1, 2), pd.Timestamp("2020-01-02"), np.datetime64("2020-01-02"),
            np.datetime64("2020-01-02", "ns")]  # fmt: skip
    assert {to_canonical_text(value) for value in same} == {"2020-01-02"}
    moment = np.datetime64("2020-01-02T03:04:05.250", "ns")
    assert to_canonical_text(moment) == to_canonical_text("2020-01-02 03:04:05.25")
    assert to_canonical_text("2020-01-02x") == "2020-01-02x" and to_canonical_text(427) == to_canonical_text("427")
    assert to_canonical_text(np.timedelta64(1500, "ms")) == to_canonical_text(datetime.timedelta(seconds=1.5)) == "1.5"
