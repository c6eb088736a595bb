"""One-thread worker process: maps the shared private records, trains chunks, writes their parameters back.

It reads chunk numbers, a line each, and answers with lines of JSON: the share of a chunk that is done, and its number
when it is finished. It ends when its orders close, so that no worker outlives its run.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO

import torch
from torch import Tensor

from pate_torch.teachers.engine import gather_rows, train_stacked
from pate_torch.teachers.ensemble import spec_from
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.shared_memory import SharedTensors


def serve(
    setup: Mapping[str, Any],
    orders: TextIO,
    answers: TextIO,
    records: Mapping[str, Tensor],
    results: Mapping[str, Tensor],
) -> None:
    """Train the chunks whose numbers come on ``orders`` until it closes, which ends the process."""
    torch.set_num_threads(1)
    spec = spec_from(setup["spec"])
    recipe = TeacherRecipe(**setup["recipe"])
    tasks: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders, tasks), daemon=True).start()

    def tell(share: float) -> None:
        print(json.dumps({"share": share}), file=answers, flush=True)

    while True:
        number = tasks.get()
        teachers = range(*setup["chunks"][number])
        chunk = gather_rows(records["x"], records["y"], records["index"], records["mask"], teachers)
        trained = train_stacked(chunk, spec, recipe, setup["seed"], torch.device("cpu"), tell)
        rows = slice(teachers.start, teachers.stop)
        for name, parameter in trained.params.items():
            results["params." + name][rows] = parameter
        results["loss"][:, rows], results["accuracy"][:, rows] = trained.loss_Pk, trained.accuracy_Pk
        print(json.dumps({"done": number}), file=answers, flush=True)


def _listen(orders: TextIO, tasks: queue.SimpleQueue[int]) -> None:
    for line in orders:
        tasks.put(int(line))
    os._exit(0)  # the run is over, or its main process is gone: stop in the middle of a chunk too


def main() -> None:
    """Run a worker: the setup is the first line of its orders."""
    setup = json.loads(sys.stdin.readline())
    records, results = (SharedTensors(*setup[name]).tensors for name in ("records", "results"))
    serve(setup, sys.stdin, sys.stdout, records, results)


if __name__ == "__main__":
    main()
