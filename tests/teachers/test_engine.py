"""The next distortions are drawn in a thread while a block of steps uses the present ones."""

import threading
import time

import pytest
import torch

from pate_torch.teachers.engine import prefetch


def test_the_next_item_is_made_while_one_is_used():
    items, threads, before = [], set(), torch.get_num_threads()

    def iterate():
        for k in range(4):
            threads.add((threading.get_ident(), torch.get_num_threads()))
            items.append(k)
            yield k

    for k in prefetch(iterate()):
        deadline = time.monotonic() + 10
        while len(items) < min(k + 2, 4):
            assert time.monotonic() < deadline, "the next item is never made"
            time.sleep(0.001)
        assert len(items) <= k + 2  # and no more than the next
    ((thread, num_threads),) = threads
    assert thread != threading.get_ident() and num_threads == 1 and torch.get_num_threads() == before


def test_the_thread_ends_with_an_error_or_with_its_user():
    def iterate():
        yield 1
        raise ValueError("no second")

    stream = prefetch(iterate())
    assert next(stream) == 1
    with pytest.raises(ValueError, match="no second"):
        next(stream)
    before = threading.active_count()
    abandoned = prefetch(iter(range(5)))
    next(abandoned)
    abandoned.close()
    assert threading.active_count() == before
