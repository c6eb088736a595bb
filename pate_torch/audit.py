"""Tests whether an executed mechanism satisfies its claimed epsilon.

    pate audit mechanism=gaussian sigma=20 noise=discrete --runs 50000 --json

The command runs the mechanism many times on neighboring votes, and prints a lower bound on epsilon that the outcomes
*prove* and the claimed epsilon. If proven > claimed, the mechanism is at fault (exit code 1). If proven <= claimed
(exit code 0), no fault was found, which is no proof of privacy. Exit code 2 means a wrong argument.

Half of the runs choose sets of outcomes, and the other half test these sets. For each set E and each direction, P(E) <=
e^epsilon Q(E) + delta, so epsilon >= ln((p_low - delta) / q_high). The Clopper-Pearson bounds p_low and q_high hold
jointly for all tested sets (Bonferroni).

Source: Jagielski, Ullman & Oprea 2020 (arXiv 2006.07709); Ding et al. 2018.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf
from scipy import stats

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting import rdp
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.components import COMPONENTS, get_component
from pate_torch.core import checks
from pate_torch.core.files import write_atomically
from pate_torch.mechanisms.base import Mechanism, RecordMechanism, VoteMechanism
from pate_torch.mechanisms.neighboring_values import NeighborPair, NeighborValue
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import Answers, MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes

Outcomes = NDArray[np.int64]
ScoreFunction = Callable[[Outcomes], NDArray[np.float64]]
STOPPED_OUTCOME = -2  # outcome of a query after the mechanism has stopped
NUM_TESTED_SETS = 8  # number of outcome sets that the second half tests, in both directions together


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The largest proven lower bound ``epsilon``, from a set of outcomes with the frequencies ``p`` and ``q``."""

    epsilon: float = 0.0
    direction: str = "left"
    p: float = 0.0
    q: float = 0.0
    pair: str = ""


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The proven and the claimed epsilon of a mechanism, both at ``delta``.

    Attributes:
        proven: Largest lower bound on epsilon that the outcomes prove, at level ``confidence``.
        claimed: Epsilon of the mechanism's ``privacy_events``.
        runs: Number of runs, of ``queries`` each, on each side of each pair.
        faults: Faults that are found without statistics, such as events that cost more than was charged.
    """

    mechanism: str
    proven: float
    claimed: float
    delta: float
    confidence: float
    runs: int
    queries: int
    evidence: Evidence
    faults: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return self.proven <= self.claimed and not self.faults


def audit_outcomes(
    left: Outcomes, right: Outcomes, *, delta: float, confidence: float = 0.95, groups: Sequence[int] | None = None
) -> Evidence:
    """Compute the largest epsilon that two samples of categorical outcomes prove, jointly at ``confidence``.

    Args:
        left: Outcomes of one input, int64 [runs] or [runs, queries]; each row is an independent run.
        right: Outcomes of its neighbor, in the same form.
        delta: The delta of the claim.
        confidence: Joint confidence level of all bounds.
        groups: Group number of each column; columns of a group have the same distribution and share one score. None
            if each column is its own group.
    """
    checks.between("delta", delta, 0, 1)
    checks.between("confidence", confidence, 0, 1, exclusive=True)
    sides = [np.atleast_2d(np.asarray(side).T).T for side in (left, right)]
    if sides[0].shape[1] != sides[1].shape[1] or min(map(len, sides)) < 4:
        raise ValueError("outcomes: both samples must have the same number of columns and at least 4 runs")
    selection_half, test_half = zip(*((side[: len(side) // 2], side[len(side) // 2 :]) for side in sides), strict=True)
    level = (1 - confidence) / NUM_TESTED_SETS
    candidates: list[tuple[float, int, float, int]] = []
    row_ratio = _make_log_ratio(*map(_hash_rows, selection_half))
    scores = [_make_additive_score(*selection_half, groups=groups), lambda rows: row_ratio(_hash_rows(rows))]
    for score_index, score in enumerate(scores):
        values = [score(side) for side in selection_half]
        for a, sign in ((0, 1), (1, -1)):
            p, q = np.sort(sign * values[a]), np.sort(sign * values[1 - a])
            cuts = np.unique(np.quantile(p, 1 - np.geomspace(1e-5, 1, 80), method="closest_observation"))
            hits = [len(side) - np.searchsorted(side, cuts) for side in (p, q)]
            bounds = _compute_epsilon_bound(hits[0], len(p), hits[1], len(q), delta, level)
            candidates += [(float(e), a, float(t), score_index) for e, t in zip(bounds, cuts, strict=True)]
    best = Evidence()
    for _, a, cut, score_index in sorted(candidates, reverse=True)[:NUM_TESTED_SETS]:
        p_R, q_R = ((1 - 2 * a) * scores[score_index](test_half[side]) >= cut for side in (a, 1 - a))
        epsilon = float(_compute_epsilon_bound(p_R.sum(), len(p_R), q_R.sum(), len(q_R), delta, level))
        if epsilon > best.epsilon:
            best = Evidence(epsilon=epsilon, direction=("left", "right")[a], p=float(p_R.mean()), q=float(q_R.mean()))
    return best


def _compute_epsilon_bound(
    p_hits: Any, p_runs: int, q_hits: Any, q_runs: int, delta: float, level: float
) -> NDArray[np.float64]:
    """Compute ln((p_low - delta) / q_high) with joint Clopper-Pearson bounds at 1 - level; -inf if p_low <= delta."""
    p_low = np.where(p_hits == 0, 0.0, stats.beta.ppf(level / 2, np.maximum(p_hits, 1), p_runs - p_hits + 1))
    q_high = np.where(q_hits == q_runs, 1.0, stats.beta.isf(level / 2, q_hits + 1, np.maximum(q_runs - q_hits, 1)))
    return np.where(p_low > delta, np.log(np.maximum(p_low - delta, 1e-300) / q_high), -np.inf)


def _make_log_ratio(left: NDArray[np.int64], right: NDArray[np.int64]) -> ScoreFunction:
    """Make a score of outcomes: the smoothed log ratio of the frequencies on both sides; 0 for an unseen outcome."""
    values, index = np.unique(np.concatenate([left, right]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(values)) + 0.5 for part in (index[: len(left)], index[len(left) :])]
    ratio = np.log(counts[0] / len(left)) - np.log(counts[1] / len(right))

    def look_up(outcomes: Outcomes) -> NDArray[np.float64]:
        index = np.clip(np.searchsorted(values, outcomes), 0, len(values) - 1)
        return np.where(values[index] == outcomes, ratio[index], 0.0)

    return look_up


def _make_additive_score(left: Outcomes, right: Outcomes, *, groups: Sequence[int] | None) -> ScoreFunction:
    """Make a score of rows: the sum of the queries' log ratios, which is exact if the queries are independent."""
    columns = np.arange(left.shape[1]) if groups is None else np.asarray(groups)
    ratios = {g: _make_log_ratio(left[:, columns == g].ravel(), right[:, columns == g].ravel()) for g in set(columns)}

    def compute_score(outcomes: Outcomes) -> NDArray[np.float64]:
        total = sum(ratio(outcomes[:, columns == g]).sum(1) for g, ratio in ratios.items())
        return np.round(total, 9)  # removes rounding errors that depend on the order of the sum

    return compute_score


def _hash_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    weights = np.random.default_rng(0).integers(1, 1 << 62, rows.shape[1], dtype=np.int64) | 1
    with np.errstate(over="ignore"):
        return ((rows + 3) * weights).sum(1)


def audit(
    mechanism: Mechanism, pairs: Sequence[NeighborPair], *, runs: int, delta: float = 1e-5, confidence: float = 0.95
) -> AuditResult:
    """Run the mechanism on every pair, and compare the proven epsilon with the epsilon of its ``privacy_events``.

    The mechanism runs ``runs`` times on each side of each pair. ``confidence`` is the joint level of all pairs.
    """
    checks.integer("runs", runs, low=100)
    queries = pairs[0].num_queries
    assert all(pair.num_queries == queries for pair in pairs), "all pairs must have the same number of queries"
    charged_events = mechanism.privacy_events(queries, 1)
    max_curve = rdp.compute_curve(charged_events) * (1 + 1e-9)
    evidences, faults, is_constant = [Evidence()], dict[str, None](), True
    for pair in pairs:
        sides = []
        for side in (pair.left, pair.right):
            outcomes, event_sets = _draw_outcomes(mechanism, pair, side, runs)
            first, second = (_draw_outcomes(mechanism, pair, side, min(runs, 256))[0] for _ in range(2))
            counts = np.unique(outcomes, axis=0, return_counts=True)[1]
            collision_log = len(first) * math.log(float(((counts / len(outcomes)) ** 2).sum()))
            if np.array_equal(first, second) and collision_log <= math.log(1e-9):  # else both may agree by chance
                faults["the noise is seeded, because two fresh noise sources gave the same answers"] = None
            if any((rdp.compute_curve(events) > max_curve).any() for events in event_sets):
                faults["the incurred events cost more than the charged worst case"] = None
            is_constant &= len(counts) == 1
            sides.append(outcomes)
        level = 1 - (1 - confidence) / len(pairs)
        evidence = audit_outcomes(*sides, delta=delta, confidence=level, groups=pair.groups)
        evidences.append(replace(evidence, pair=pair.name))
    if is_constant:
        faults["there is no noise, because all runs of all inputs gave the same answers"] = None
    best_evidence = max(evidences, key=lambda evidence: evidence.epsilon)
    return AuditResult(
        mechanism=mechanism.name,
        proven=best_evidence.epsilon,
        claimed=accounting.compute_guarantee(charged_events, delta).epsilon,
        delta=delta,
        confidence=confidence,
        runs=runs,
        queries=queries,
        evidence=best_evidence,
        faults=tuple(faults),
    )


def _draw_outcomes(
    mechanism: Mechanism, pair: NeighborPair, side: NeighborValue, runs: int
) -> tuple[Outcomes, set[tuple[PrivacyEvent, ...]]]:
    """Draw the outcomes of ``runs`` fresh runs on one side, [runs, queries], and collect the incurred events.

    If the answers to different queries are independent given the votes, one call makes all runs.
    """
    noise, queries = DryRunNoise(mechanism.noise), pair.num_queries
    context = MechanismContext(num_queries=queries, student_QC=pair.student_QC)
    is_count_added = isinstance(mechanism, RecordMechanism) and mechanism.adjacency == "add_remove"
    if mechanism.has_independent_queries:
        student_QC = None if pair.student_QC is None else pair.student_QC.repeat(runs, 1)
        repeated_context = MechanismContext(num_queries=queries, student_QC=student_QC)
        answers = mechanism.release(side.select(torch.arange(queries).repeat(runs)), noise, repeated_context)
        event_sets = {mechanism.release(side, noise, context).events for _ in range(32)}
        return _encode(answers, runs * queries, is_count_added).reshape(runs, queries), event_sets
    rows, event_sets = [], set()
    for _ in range(runs):
        answers = mechanism.release(side, noise, context)
        rows.append(_encode(answers, queries, is_count_added))
        event_sets.add(answers.events)
    return np.stack(rows), event_sets


def _encode(answers: Answers, queries: int, is_count_added: bool) -> Outcomes:
    """Encode the complete answer to each query as one integer.

    If the neighbor has one additional count, only the count of this class is encoded.
    """
    label_Q = answers.label_Q.cpu().numpy()
    if answers.score_QC is not None:
        score_QC = answers.score_QC.cpu().numpy()
        label_Q = label_Q + _hash_rows(np.round(np.nan_to_num(score_QC, nan=-1) * 1e9).astype(np.int64))
    if answers.noisy_counts is not None:  # one vote moves from the first to the second class
        counts_QC = answers.noisy_counts.counts_QC.cpu().numpy()
        count_Q2 = counts_QC[:, : counts_QC.shape[1] // 2 * 2].reshape(len(counts_QC), -1, 2).sum(1)
        width = answers.noisy_counts.sigma * math.sqrt(counts_QC.shape[1] // 2) / 2
        difference_Q = count_Q2[:, 0] - (0 if is_count_added else count_Q2[:, 1])
        label_Q = label_Q * (counts_QC.shape[1] < 4) + 10 * np.floor(difference_Q / width).astype(int)
    if answers.score_PC is not None:  # logits with noise of scale 1; the record has class 0 or 1
        score_QC = answers.score_PC.cpu().double().numpy()
        label_Q = np.floor(2 * (score_QC[:, 0] - score_QC[:, 1] * (not is_count_added))).astype(int)
    if answers.from_student_Q is not None:
        label_Q = label_Q + 100 * answers.from_student_Q.cpu().numpy()
    return np.pad(label_Q, (0, queries - len(label_Q)), constant_values=STOPPED_OUTCOME)


class AuditSetting(NamedTuple):
    """The number of queries and runs, and the parameters of the mechanism, by which an audit finds most faults."""

    queries: int = 2
    runs: int = 500_000
    overrides: Mapping[str, Any] = MappingProxyType({})


# With one failure and lambda of about 1, the cost of a block is visible in a single block of eight tests. With many
# failures, the cost per block would be too small to detect.
_SPARSE = {"epsilon": 2.0, "max_failures": 1}
SETTINGS = {  # by the name of the mechanism, where the default does not fit
    "sparse_vector": AuditSetting(queries=8, runs=20_000, overrides=_SPARSE),
    "soft_sparse_vector": AuditSetting(queries=8, runs=20_000, overrides={**_SPARSE, "bins": 4}),
    "single_stable": AuditSetting(overrides={"epsilon": 1.0, "delta": 1e-7}),
    # Later steps start at noisy weights, where gradients are shorter.
    "gradient_descent": AuditSetting(queries=1, runs=20_000, overrides={"steps": 1}),
}


def load_mechanism(name: str, overrides: Sequence[str], delta: float) -> tuple[Mechanism, AuditSetting]:
    """Load a mechanism by name, with parameters for an audit instead of those of a data set."""
    from hydra.utils import get_class

    checks.one_of("mechanism", name, list(COMPONENTS["mechanism"]))
    defaults = get_component("mechanism", name)
    setting = SETTINGS.get(defaults["name"], AuditSetting())
    mechanism_overrides = OmegaConf.from_dotlist([item.removeprefix("mechanism.") for item in overrides])
    noise = mechanism_overrides.pop("noise", "torch")
    for key in mechanism_overrides:
        checks.one_of("mechanism key", str(key), [str(k) for k in defaults if k != "_target_"])
    # The default adjacency refers to the partition of a run.
    adjacency = {"adjacency": "add_remove"} if "adjacency" in defaults else {}
    recommended = {"sigma": 2.0, "screen_sigma": 3.0, "threshold": 100.0, "delta": delta}
    values = OmegaConf.merge(defaults, adjacency, dict(setting.overrides), mechanism_overrides)
    scope = {"mechanism": values, "recommended": recommended, "privacy": {"delta": delta}, "noise": noise}
    root = OmegaConf.create(scope)
    options = cast(dict[str, Any], OmegaConf.to_container(root.mechanism, resolve=True))
    return get_class(options.pop("_target_"))(**options), setting  # hydra's instantiate would wrap the ValueError


def check_plan(mechanism: Mechanism, pair: NeighborPair) -> None:
    """Raise ValueError if a mechanism for votes refuses the pair's number of queries, teachers or classes."""
    if isinstance(mechanism, VoteMechanism) and isinstance(pair.left, Votes | SoftVotes):
        num_teachers, num_classes = pair.left.num_teachers, pair.left.num_classes
        mechanism.check(num_queries=pair.num_queries, num_teachers=num_teachers, num_classes=num_classes)


def main(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    names = [s.removeprefix("mechanism=") for s in args.settings if s.startswith("mechanism=")]
    other_settings = [s for s in args.settings if not s.startswith("mechanism=")]
    if len(names) != 1 or not all("=" in s for s in other_settings):
        problem = "must be mechanism=<name> once, and key=value settings"
        raise checks.error("settings", " ".join(args.settings), problem)
    mechanism, setting = load_mechanism(names[0], other_settings, checks.delta("delta", args.delta))
    queries = checks.integer("queries", args.queries or setting.queries, low=1)
    pairs = mechanism.worst_case_neighbors(queries)
    for pair in pairs:
        check_plan(mechanism, pair)
    runs = args.runs or setting.runs
    result = audit(mechanism, pairs, runs=runs, delta=args.delta, confidence=args.confidence)
    facts = {"sound": result.is_sound, "audited": str(mechanism), "version": version("pate-torch")}
    description = json.dumps(asdict(result) | facts)
    if args.output is not None:
        write_atomically(args.output, f"{description}\n")
    print(description if args.json else format_result(result, mechanism))
    return 0 if result.is_sound else 1


def format_result(result: AuditResult, mechanism: Mechanism) -> str:
    """Format the result as a few lines of text."""
    evidence = result.evidence
    lines = [
        f"{mechanism}",
        f"{result.queries} queries a run, {result.runs} runs on each side of each pair, delta {result.delta:g}",
        f"claimed epsilon  {result.claimed:.4f}",
        f"proven epsilon   {result.proven:.4f}  (confidence {result.confidence:.0%}, over all tested sets)",
    ]
    if result.proven > 0:
        rates = f"{evidence.p:.4g} against {evidence.q:.4g}"
        lines.append(f"strongest on     {evidence.pair}, {evidence.direction} side: {rates}")
    lines += [f"FAULT: {fault}" for fault in result.faults]
    lines.append("no fault found" if result.is_sound else "REFUTED: the executed mechanism violates its claim")
    return "\n".join(lines)
