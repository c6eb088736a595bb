"""Events: canonical JSON, merging, and that nothing unknown passes."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    RdpCurveEvent,
    ZCDPEvent,
    from_json,
    merge_events,
    to_json,
)

positive = st.floats(1e-300, 1e300)
counts = st.integers(0, 10**12)
events = st.one_of(
    st.builds(GaussianEvent, mu=positive, count=counts),
    st.builds(LaplaceEvent, ratio=positive, count=counts),
    st.builds(PureDPEvent, epsilon=positive, count=counts),
    st.builds(BoundedRangeEvent, eta=positive, count=counts),
    st.builds(ZCDPEvent, rho=positive, count=counts),
    st.builds(DeltaEvent, delta=st.floats(1e-300, 0.999), count=counts),
    st.builds(
        lambda rows, source, count: RdpCurveEvent(
            orders=tuple(a for a, _ in rows), rdp=tuple(r for _, r in rows), source=source, count=count
        ),
        st.lists(st.tuples(st.floats(1.001, 1e6), st.floats(0, 1e6)), min_size=1, max_size=4),
        st.text(max_size=10),
        counts,
    ),
)


@settings(max_examples=50)
@given(st.lists(events, max_size=5))
def test_json_round_trip_is_exact_and_canonical(facts):
    text = to_json(facts)
    assert from_json(text) == tuple(facts)
    assert to_json(from_json(text)) == text
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


def test_numpy_scalars_serialize_as_the_same_fact():
    event = GaussianEvent(mu=np.float32(0.5), count=np.int64(3))
    assert to_json([event]) == to_json([GaussianEvent(mu=0.5, count=3)])
    assert to_json([GaussianEvent(mu=1)]) == to_json([GaussianEvent(mu=1.0)])


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
        lambda: GaussianEvent(mu=math.nan),
        lambda: GaussianEvent(mu=math.inf),
        lambda: LaplaceEvent(ratio=0.0),
        lambda: PureDPEvent(epsilon=True),
        lambda: BoundedRangeEvent(eta="1"),
        lambda: ZCDPEvent(rho=-1.0),
        lambda: DeltaEvent(delta=1.0),
        lambda: DeltaEvent(delta=0.0),
        lambda: GaussianEvent(mu=1.0, count=1.0),
        lambda: RdpCurveEvent(orders=(1.0,), rdp=(1.0,), source=""),
        lambda: RdpCurveEvent(orders=(2.0,), rdp=(math.inf,), source=""),
        lambda: RdpCurveEvent(orders=(2.0,), rdp=(1.0, 2.0), source=""),
        lambda: RdpCurveEvent(orders=(), rdp=(), source=""),
    ],
)
def test_impossible_facts_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_merged_joins_equal_facts_and_drops_zero_counts():
    facts = [
        GaussianEvent(mu=1.0, count=2),
        DeltaEvent(delta=0.1),
        GaussianEvent(mu=1.0, count=3),
        LaplaceEvent(ratio=1.0, count=0),
    ]
    assert merge_events(facts) == (GaussianEvent(mu=1.0, count=5), DeltaEvent(delta=0.1))


def test_merged_refuses_what_is_not_an_event():
    class Cheaper(GaussianEvent):
        """A subclass could mean anything."""

    for impostor in (None, 0.5, "gaussian", {"kind": "gaussian", "mu": 1.0}, Cheaper(mu=1.0)):
        with pytest.raises(ValueError, match="event="):
            merge_events([impostor])
