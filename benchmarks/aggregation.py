"""Counting votes and drawing noisy labels: against a NumPy loop over queries, in one run on one machine.

    python benchmarks/aggregation.py [--json] [--queries 1000000] [--teachers 250] [--classes 10]

Both start from the same predictions [teachers, queries]. The loop takes np.bincount of each query: of our bytes,
and of the 64-bit integers that argmax gives; then one vector of noise and argmax; it is timed on a part of the queries
and scaled. Ours is float64 noise from the privacy source, which asks the operating system for every bit, through the
mechanism as a run calls it. The floor of counting is reading all predictions once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks import measuring
from pate_torch.core.rng import make_torch_generator
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.voting import count_votes


def seconds(work: Callable[[], object]) -> float:
    return measuring.measure_seconds(work, time.perf_counter)


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--queries", type=int, default=1_000_000)
    parser.add_argument("--teachers", type=int, default=250)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sample", type=int, default=20_000, help="queries the loop is timed on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = (args.teachers, args.queries)
    prediction_KQ = torch.randint(
        args.classes, shape, dtype=torch.uint8, generator=make_torch_generator(0, "aggregation")
    )
    sample = min(args.sample, args.queries)
    array_KQ = prediction_KQ.numpy()
    votes: Votes = count_votes(prediction_KQ, args.classes)
    counts_QC = votes.counts_QC[:sample].numpy().astype(np.float64)
    draw, source = np.random.default_rng(), DryRunNoise()
    mechanism, context = GNMax(sigma=40.0), MechanismContext(num_queries=args.queries)

    # In turn, so that both find the machine in the same state, and before the loop's 64-bit copy fills the memory.
    words = prediction_KQ.flatten()[: prediction_KQ.numel() // 8 * 8].view(torch.int64)
    pairs = [
        (seconds(words.sum), seconds(lambda: count_votes(prediction_KQ, args.classes)))
        for _ in range(12 * args.repeats)
    ]
    read_s = statistics.median(read for read, _ in pairs)
    floor = statistics.median(ours / read for read, ours in pairs)
    wide_KQ = array_KQ.astype(np.int64)

    def count_loop() -> list[np.ndarray]:
        return [np.bincount(array_KQ[:, q], minlength=args.classes) for q in range(sample)]

    def wide_loop() -> list[np.ndarray]:
        return [np.bincount(wide_KQ[:, q], minlength=args.classes) for q in range(sample)]

    def noise_loop() -> list[int]:
        return [int(np.argmax(row + draw.normal(scale=40.0, size=args.classes))) for row in counts_QC]

    count_votes(prediction_KQ, args.classes)
    scale = args.queries / sample
    table: list[dict[str, object]] = []
    for name, loop, ours in (
        ("counting", count_loop, lambda: count_votes(prediction_KQ, args.classes)),
        ("counting, loop over int64", wide_loop, lambda: count_votes(prediction_KQ, args.classes)),
        ("noisy labels", noise_loop, lambda: mechanism.release(votes, source, context)),
    ):
        slow, fast = [], []
        for _ in range(args.repeats):
            slow.append(seconds(loop) * scale)
            fast.append(seconds(ours))
        ratio = measuring.compute_speedup(slow, fast)
        row = {"task": name, "loop_s": statistics.median(slow), "ours_s": statistics.median(fast), "speedup": ratio}
        table.append(row)
        if not args.json:
            print(f"{name:26s} loop {row['loop_s']:6.2f} s   ours {row['ours_s']:6.3f} s   {ratio:5.1f}x", flush=True)
    if not args.json:
        print(f"counting takes {floor:.1f} times as long as reading the predictions once ({read_s:.3f} s)")
    if args.json:
        head = {
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0],
            "K": args.teachers,
            "Q": args.queries,
            "floor": floor,
        }
        json.dump(head | {"rows": table}, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
