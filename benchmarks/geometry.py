"""Queries by the geometry of many public points: neighbor graph, k-means, prototypes, and how they grow.

    python benchmarks/geometry.py [--json] [--points 10000 30000 100000] [--queries 100] [--repeats 3]
    python benchmarks/geometry.py --label 100000 [--curved] [--queries 100]

Processor seconds of one thread, and the peak of resident memory above that of the same program with its points made:
64 unit-length features in 30 loose clusters. Each number of points runs in a process of its own. ``graph`` is compared
with scikit-learn's brute force in turns, at 20,000 points.

``--label`` labels so many points from 100 right answers: one search for neighbors, queries, and a student of
propagated labels. Each stage reports its processor seconds and the peak of resident memory so far. The points are those
above, the worst case of an approximate search, or with ``--curved`` points on a curved surface of 10 dimensions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
BESIDE = 20_000


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def one(points: int, questions: int) -> dict[str, float]:
    """Seconds of each, and MiB at the peak, in this process."""
    import torch

    from pate_torch.features.neighbors import build_neighbor_graph
    from pate_torch.privacy.records import DataSpec
    from pate_torch.queries.base import QueryState
    from pate_torch.queries.clusters import Medoids, Prototypes

    x_PD, none = features(points), torch.zeros(0, dtype=torch.int64)
    spec = DataSpec(
        name="points", num_classes=2, input_shape=(64,), class_names=("a", "b"), mean=(0.0,) * 64, std=(1.0,) * 64
    )
    state = QueryState(spec, x_PD, none, none, questions, 1, 0, feature_PD=x_PD)
    Medoids().select(QueryState(spec, x_PD[:500], none, none, 5, 1, 0, feature_PD=x_PD[:500]))  # imports, threads
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "graph": seconds(lambda: build_neighbor_graph(x_PD, 6)),
        "medoids": seconds(lambda: Medoids().select(state)),
        "prototypes": seconds(lambda: Prototypes().select(state)),
    }
    found["mib"] = unit * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    return found


def label(points: int, questions: int, curved: bool) -> None:
    """Label the points, and print a line for each stage and the accuracy on other points."""
    import torch

    from pate_torch.core.progress import Stages
    from pate_torch.features.neighbors import NeighborSearch, compute_coordinates
    from pate_torch.privacy.records import DataSpec
    from pate_torch.queries.base import QueryState
    from pate_torch.queries.clusters import MAX_PROTOTYPE_POINTS, Medoids, Prototypes
    from pate_torch.students.base import StudentTask
    from pate_torch.students.semi_supervised import LabelSpreading

    x_PD, none, names = features(points + 2000, curved), torch.zeros(0, dtype=torch.int64), tuple("abcdefghij")
    x_PD, other_x = x_PD[:points], x_PD[points:]
    class_P, spec = (
        torch.arange(points + 2000) % 30 % 10,
        DataSpec(
            name="points", num_classes=10, input_shape=(64,), class_names=names, mean=(0.0,) * 64, std=(1.0,) * 64
        ),
    )
    search, strategy = NeighborSearch(Stages()), Prototypes() if points <= MAX_PROTOTYPE_POINTS else Medoids()
    state = QueryState(spec, x_PD, none, none, questions, 1, 0, search=search)
    found, total = {}, 0.0

    def fit():
        query_Q = found[strategy.name].cpu()
        return LabelSpreading().fit(
            StudentTask(spec, x_PD, query_Q, class_P[query_Q], search=search), 0, torch.device("cpu")
        )

    def predict():
        return float((found["student"].predict(other_x) == class_P[points:]).double().mean())

    stages = {
        "search": lambda: search.find(compute_coordinates(x_PD, spec), 10),
        strategy.name: lambda: strategy.select(state),
        "student": fit,
        "2,000 predictions": predict,
    }
    for name, work in stages.items():
        began = time.process_time()
        found[name] = work()
        spent = time.process_time() - began
        total += spent
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        print(f"{points:,} points  {name} {spent:.1f} s, peak {peak:.0f} MiB", flush=True)
    print(f"{points:,} points  total {total:.1f} s, accuracy {found['2,000 predictions']:.3f}, recall {search.recalls}")


def features(points: int, curved: bool = False) -> Tensor:
    import torch

    from pate_torch.core.rng import make_torch_generator

    torch.set_num_threads(1)
    draw = make_torch_generator(0, "benchmark", "geometry")
    if curved:
        center_KD = torch.randn(30, 10, generator=draw)
        bend, out = torch.randn(10, 128, generator=draw) / 3, torch.randn(128, 64, generator=draw) / 11
        place_PD = center_KD[torch.arange(points) % 30] + 0.4 * torch.randn(points, 10, generator=draw)
        return torch.nn.functional.normalize(torch.tanh(place_PD @ bend) @ out, dim=1)
    center_KD = torch.randn(30, 64, generator=draw)
    x_PD = center_KD[torch.arange(points) % 30] / 2 + torch.randn(points, 64, generator=draw)
    return torch.nn.functional.normalize(x_PD, dim=1)


def beside(repeats: int) -> dict[str, float]:
    """The graph of 20,000 points, 10 neighbors, in turns with scikit-learn's search for the neighbors alone."""
    from sklearn.neighbors import NearestNeighbors
    from threadpoolctl import threadpool_limits

    from pate_torch.features.neighbors import build_neighbor_graph

    x_PD = features(BESIDE)
    search = NearestNeighbors(n_neighbors=10, algorithm="brute").fit(x_PD.numpy())
    build_neighbor_graph(x_PD[:500])
    with threadpool_limits(1):
        pairs = [(seconds(lambda: build_neighbor_graph(x_PD)), seconds(search.kneighbors)) for _ in range(repeats)]
    ours, library = zip(*pairs, strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    return {"ours": statistics.median(ours), "scikit_learn": statistics.median(library), "ratio": ratio}


def run(*arguments: str) -> dict[str, float]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY))
    command = [sys.executable, __file__, "--here", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="*", default=[10_000, 30_000, 100_000])
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--label", type=int, help="label so many points, stage by stage")
    parser.add_argument("--curved", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.label:
        label(args.label, args.questions, args.curved)
        return
    if args.here:
        print(json.dumps(one(args.points[0], args.questions) if args.points else beside(args.repeats)))
        return
    rows = []
    for points in args.points:
        rows.append({"points": points, **run("--points", str(points), "--queries", str(args.questions))})
        if not args.json:
            print("  ".join(f"{name} {value:.2f}" for name, value in rows[-1].items()), flush=True)
    exponents = {
        name: math.log(rows[-1][name] / rows[0][name]) / math.log(rows[-1]["points"] / rows[0]["points"])
        for name in ("graph", "medoids", "prototypes")
        if len(rows) > 1
    }
    graph = run("--points", "--repeats", str(args.repeats))
    if args.json:
        json.dump({"load": os.getloadavg()[0], "rows": rows, "exponents": exponents, "beside": graph}, sys.stdout)
        return
    print("exponents", "  ".join(f"{name} {value:.2f}" for name, value in exponents.items()))
    print(f"graph of {BESIDE} points", "  ".join(f"{name} {value:.2f}" for name, value in graph.items()))


if __name__ == "__main__":
    main()
