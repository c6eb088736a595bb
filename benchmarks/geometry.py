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
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING

from benchmarks import measuring

if TYPE_CHECKING:
    from torch import Tensor

BESIDE = 20_000


def one(points: int, questions: int) -> dict[str, float]:
    """Seconds of each, and MiB at the peak, in this process."""
    import torch

    from pate_torch.features.neighbors import build_neighbor_graph
    from pate_torch.queries.base import QueryState
    from pate_torch.queries.clusters import Medoids, Prototypes

    x_PD, none = features(points), torch.zeros(0, dtype=torch.int64)
    spec = measuring.make_spec((64,), 2)
    state = QueryState(spec, x_PD, none, none, questions, 1, 0, feature_PD=x_PD)
    Medoids().select(QueryState(spec, x_PD[:500], none, none, 5, 1, 0, feature_PD=x_PD[:500]))  # imports, threads
    before = measuring.get_peak_bytes()
    found = {
        "graph": measuring.measure_seconds(lambda: build_neighbor_graph(x_PD, 6)),
        "medoids": measuring.measure_seconds(lambda: Medoids().select(state)),
        "prototypes": measuring.measure_seconds(lambda: Prototypes().select(state)),
    }
    return found | {"mib": (measuring.get_peak_bytes() - before) / 2**20}


def label(points: int, questions: int, curved: bool) -> None:
    """Label the points, and print a line for each stage and the accuracy on other points."""
    import torch

    from pate_torch.core.progress import Stages
    from pate_torch.features.neighbors import NeighborSearch, compute_coordinates
    from pate_torch.queries.base import QueryState
    from pate_torch.queries.clusters import MAX_PROTOTYPE_POINTS, Medoids, Prototypes
    from pate_torch.students.base import StudentTask
    from pate_torch.students.semi_supervised import LabelSpreading

    x_PD, none = features(points + 2000, curved), torch.zeros(0, dtype=torch.int64)
    x_PD, other_x = x_PD[:points], x_PD[points:]
    class_P, spec = torch.arange(points + 2000) % 30 % 10, measuring.make_spec((64,), 10)
    search, strategy = NeighborSearch(Stages()), Prototypes() if points <= MAX_PROTOTYPE_POINTS else Medoids()
    state = QueryState(spec, x_PD, none, none, questions, 1, 0, search=search)
    found, total = {}, 0.0

    def fit():
        query_Q = found[strategy.name].cpu()
        task = StudentTask(spec, x_PD, query_Q, class_P[query_Q], search=search)
        return LabelSpreading().fit(task, 0, torch.device("cpu"))

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
        peak = measuring.get_peak_bytes() / 2**20
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
        works = (lambda: build_neighbor_graph(x_PD), search.kneighbors)
        pairs = [[measuring.measure_seconds(work) for work in works] for _ in range(repeats)]
    ours, library = zip(*pairs, strict=True)
    ratio = measuring.compute_speedup(library, ours)
    return {"ours": statistics.median(ours), "scikit_learn": statistics.median(library), "ratio": ratio}


def main() -> None:
    parser = measuring.make_parser(__doc__, "json")
    parser.add_argument("--points", type=int, nargs="*", default=[10_000, 30_000, 100_000])
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--label", type=int, help="label so many points, stage by stage")
    parser.add_argument("--curved", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.label:
        label(args.label, args.queries, args.curved)
        return
    if args.here:
        print(json.dumps(one(args.points[0], args.queries) if args.points else beside(args.repeats)))
        return
    rows = []
    for points in args.points:
        found = measuring.run_script(__file__, "--here", "--points", points, "--queries", args.queries)
        rows.append({"points": points, **found})
        if not args.json:
            print("  ".join(f"{name} {value:.2f}" for name, value in rows[-1].items()), flush=True)
    exponents = {
        name: measuring.compute_exponent(*((row["points"], row[name]) for row in (rows[0], rows[-1])))
        for name in ("graph", "medoids", "prototypes")
        if len(rows) > 1
    }
    graph = measuring.run_script(__file__, "--here", "--points", "--repeats", args.repeats)
    if args.json:
        json.dump({"load": os.getloadavg()[0], "rows": rows, "exponents": exponents, "beside": graph}, sys.stdout)
        return
    print("exponents", "  ".join(f"{name} {value:.2f}" for name, value in exponents.items()))
    print(f"graph of {BESIDE} points", "  ".join(f"{name} {value:.2f}" for name, value in graph.items()))


if __name__ == "__main__":
    main()
