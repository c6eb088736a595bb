"""The rounds of a task, and the students these led to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from pate_torch.features.contrastive import digest
from pate_torch.protocols import Student, StudentTask


def by_round(task: StudentTask) -> list[StudentTask]:
    """The task of each round that has answers."""
    query_Q, label_Q = task.query_Q.cpu(), task.label_Q.cpu()
    round_Q = torch.zeros(len(query_Q), dtype=torch.int64) if task.round_Q is None else task.round_Q.cpu()
    told = []
    for turn in round_Q.unique().tolist() or [0]:
        mine = round_Q == turn
        belief_QC = None if task.belief_QC is None else task.belief_QC.cpu()[mine]
        told.append(replace(task, query_Q=query_Q[mine], label_Q=label_Q[mine], belief_QC=belief_QC, round_Q=None))
    return told


def remembered(names: Iterable[object], rounds: Iterable[StudentTask], fit: Callable[[], Student]) -> Student:
    """``fit()``, or what it gave before in this process for the same names and answers: a student that guided the
    questions is not trained a second time.
    """
    key = tuple(map(str, names))
    for told in rounds:
        parts: list[Tensor | None] = [told.pool_x, told.query_Q, told.label_Q, told.belief_QC]
        key += (repr(told.spec), *(digest(part) for part in parts if part is not None))
    if key not in _FITTED:
        _FITTED[key] = fit()
        while len(_FITTED) > _KEPT:
            _FITTED.popitem(last=False)
    return _FITTED[key]


_KEPT = 8
"""Students of one run: generations and rounds."""
_FITTED: OrderedDict[tuple[str, ...], Student] = OrderedDict()
