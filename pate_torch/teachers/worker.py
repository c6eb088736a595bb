"""One-thread worker process: maps the private records, trains the chunks it is told to, writes parameters back.

Talks in JSON lines: a setup line, then chunk numbers on stdin; one line per finished chunk on stdout. It ends when
stdin closes, so that no worker outlives its run.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading

import torch

from pate_torch.teachers.engine import gather_rows, train_stacked
from pate_torch.teachers.ensemble import spec_from
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.shared_memory import SharedTensors


def main() -> None:
    torch.set_num_threads(1)
    setup = json.loads(sys.stdin.readline())
    records = SharedTensors(*setup["records"]).tensors
    results = SharedTensors(*setup["results"]).tensors
    spec = spec_from(setup["spec"])
    recipe = TeacherRecipe(**setup["recipe"])
    tasks: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    while True:
        number = tasks.get()
        teachers = range(*setup["chunks"][number])
        chunk = gather_rows(records["x"], records["y"], records["index"], records["mask"], teachers)
        trained = train_stacked(chunk, spec, recipe, setup["seed"], torch.device("cpu"))
        rows = slice(teachers.start, teachers.stop)
        for name, parameter in trained.params.items():
            results["params." + name][rows] = parameter
        results["loss"][:, rows], results["accuracy"][:, rows] = trained.loss_Pk, trained.accuracy_Pk
        print(json.dumps({"done": number}), flush=True)


def _listen(tasks: queue.SimpleQueue[int]) -> None:
    for line in sys.stdin:
        tasks.put(int(line))
    os._exit(0)  # the run is over, or its main process is gone: stop in the middle of a chunk too


if __name__ == "__main__":
    main()
