"""Events: canonical JSON, merging, and that nothing unknown passes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pate_torch.accounting.events import (
    ZCDP,
    BoundedRange,
    Delta,
    Gaussian,
    Laplace,
    PureDP,
    RdpCurve,
    from_json,
    merged,
    to_json,
)

positive = st.floats(1e-300, 1e300)
counts = st.integers(0, 10**12)
events = st.one_of(
    st.builds(Gaussian, mu=positive, count=counts),
    st.builds(Laplace, ratio=positive, count=counts),
    st.builds(PureDP, epsilon=positive, count=counts),
    st.builds(BoundedRange, eta=positive, count=counts),
    st.builds(ZCDP, rho=positive, count=counts),
    st.builds(Delta, delta=st.floats(1e-300, 0.999), count=counts),
    st.builds(
        lambda rows, source, count: RdpCurve(
            orders=tuple(a for a, _ in rows), rdp=tuple(r for _, r in rows), source=source, count=count
        ),
        st.lists(st.tuples(st.floats(1.001, 1e6), st.floats(0, 1e6)), min_size=1, max_size=4),
        st.text(max_size=10),
        counts,
    ),
)


@given(st.lists(events, max_size=5))
def test_json_round_trip_is_exact_and_canonical(facts):
    text = to_json(facts)
    assert from_json(text) == tuple(facts)
    assert to_json(from_json(text)) == text
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


def test_numpy_scalars_serialize_as_the_same_fact():
    event = Gaussian(mu=np.float32(0.5), count=np.int64(3))
    assert to_json([event]) == to_json([Gaussian(mu=0.5, count=3)])
    assert to_json([Gaussian(mu=1)]) == to_json([Gaussian(mu=1.0)])


@pytest.mark.parametrize(
    "text",
    [
        '[{"kind":"discrete_gaussian","count":1,"mu":1.0}]',
        '[{"count":1,"mu":1.0}]',
        '[{"kind":"gaussian","count":1,"mu":1.0,"subsampling":0.1}]',
        '[{"kind":"gaussian","count":1}]',
        '[{"kind":"gaussian","count":1,"mu":NaN}]',
        '[{"kind":"gaussian","count":1,"mu":-1.0}]',
        '[{"kind":"gaussian","count":-1,"mu":1.0}]',
        '[{"kind":"gaussian","count":1.5,"mu":1.0}]',
        '{"kind":"gaussian"}',
        "[1]",
        "not json",
    ],
)
def test_unknown_or_malformed_json_is_refused(text):
    with pytest.raises(ValueError):
        from_json(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gaussian(mu=math.nan),
        lambda: Gaussian(mu=math.inf),
        lambda: Laplace(ratio=0.0),
        lambda: PureDP(epsilon=True),
        lambda: BoundedRange(eta="1"),
        lambda: ZCDP(rho=-1.0),
        lambda: Delta(delta=1.0),
        lambda: Delta(delta=0.0),
        lambda: Gaussian(mu=1.0, count=1.0),
        lambda: RdpCurve(orders=(1.0,), rdp=(1.0,), source=""),
        lambda: RdpCurve(orders=(2.0,), rdp=(math.inf,), source=""),
        lambda: RdpCurve(orders=(2.0,), rdp=(1.0, 2.0), source=""),
        lambda: RdpCurve(orders=(), rdp=(), source=""),
    ],
)
def test_impossible_facts_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_merged_joins_equal_facts_and_drops_zero_counts():
    facts = [Gaussian(mu=1.0, count=2), Delta(delta=0.1), Gaussian(mu=1.0, count=3), Laplace(ratio=1.0, count=0)]
    assert merged(facts) == (Gaussian(mu=1.0, count=5), Delta(delta=0.1))


def test_merged_refuses_what_is_not_an_event():
    class Cheaper(Gaussian):
        """A subclass could mean anything."""

    for impostor in (None, 0.5, "gaussian", {"kind": "gaussian", "mu": 1.0}, Cheaper(mu=1.0)):
        with pytest.raises(ValueError, match="event="):
            merged([impostor])
