"""The contract of every mechanism that can be configured: priced as executed, and never beyond its worst case."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch.accounting import rdp
from pate_torch.accounting.accountant import compute_total_pure_epsilon, compute_total_rho
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    ZCDPEvent,
)
from pate_torch.mechanisms.base import Mechanism, RecordMechanism, VoteMechanism
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, Answers, MechanismContext
from pate_torch.privacy.sensitive import VOTE_SENSITIVITY, Votes
from tests.configurations import load_option
from tests.mechanisms.mechanism_forms import (
    FORMS,
    NAMES,
    build,
    is_about_stability,
    kinds,
    num_classes,
    num_teachers,
    random_votes,
)
from tests.mechanisms.vote_laws import TINY, Recorder, argmax_law, at_least, chi_square, law, pooled, sparse_law, tally

every_form = pytest.mark.parametrize("name,noise", FORMS, ids=["-".join(form) for form in FORMS])
every_name = pytest.mark.parametrize("name", NAMES)


def ask(mechanism, votes: Votes, sizes: list[int], noise) -> tuple[torch.Tensor, tuple]:
    """Answer in rounds of the given sizes, as the labeling protocol does."""
    label_Q, events, start = torch.zeros(0, dtype=torch.int64), (), 0
    for turn, size in enumerate(sizes):
        context = MechanismContext(
            num_queries=sum(sizes),
            rounds=len(sizes),
            round_index=turn,
            num_failures=int((label_Q == NO_ANSWER).sum()),
            num_answered=int((label_Q != NO_ANSWER).sum()),
        )
        answers = mechanism.release(votes.select(torch.arange(start, start + size)), noise, context)
        label_Q, events, start = torch.cat([label_Q, answers.label_Q]), events + answers.events, start + size
    return label_Q, events


MEMBERS = {
    "input_type": Votes,
    "max_sensitivity": property(lambda self: VOTE_SENSITIVITY),
    "privacy_events": lambda self, num_queries, rounds=1: (),
    "draw": lambda self, votes, noise, context: Answers(torch.zeros(len(votes), dtype=torch.int64), ()),
    "_format_fix": lambda self: "Use method=teachers.",
}
"""All that a mechanism must say for itself: this one answers nothing but 0, which costs nothing."""


def without(base: type[Mechanism], *missing: str) -> type[Mechanism]:
    return type("Partial", (base,), {key: value for key, value in MEMBERS.items() if key not in missing})


def test_a_mechanism_says_what_it_draws_what_it_costs_and_what_it_is_priced_for():
    whole = without(Mechanism)()
    answers = whole.release(random_votes(4, 20, 3), DryRunNoise("torch"), MechanismContext(num_queries=4))
    assert answers.label_Q.tolist() == [0] * 4 and answers.events == ()
    for missing in ("draw", "privacy_events", "max_sensitivity"):
        with pytest.raises(TypeError, match=f"abstract.*{missing}"):
            without(Mechanism, missing)()
    for missing in ("draw", "privacy_events"):
        assert without(VoteMechanism, "max_sensitivity")().max_sensitivity == VOTE_SENSITIVITY
        with pytest.raises(TypeError, match=f"abstract.*{missing}"):
            without(VoteMechanism, missing)()
    records = {"sigma": 1.0, "adjacency": "add_remove"}
    for missing in ("draw", "privacy_events", "max_sensitivity"):
        with pytest.raises(TypeError, match=f"abstract.*{missing}"):
            without(RecordMechanism, missing)(**records)


def test_no_mechanism_is_without_a_kind_of_noise():
    """The field is the base class's own, checked when an object is made, so that nothing draws what was not priced."""
    assert without(Mechanism)().noise == "torch"
    for wrong in (None, "", "quantum"):
        with pytest.raises(ValueError, match=r"mechanism\.noise"):
            without(Mechanism)(noise=wrong)
    continuous = type("Continuous", (without(Mechanism),), {"noise_kinds": ("torch",)})
    with pytest.raises(ValueError, match="noise=torch"):
        continuous(noise="discrete")
    with pytest.raises(ValueError, match="priced for"):
        continuous().release(random_votes(4, 20, 3), DryRunNoise("discrete"), MechanismContext(num_queries=4))


# -- form -----------------------------------------------------------------------------------------------------------


@every_name
def test_yaml_is_the_dataclass(name):
    mechanism = build(name)
    assert isinstance(mechanism, Mechanism) and mechanism.name == name
    keys = set(load_option("mechanism", name)) - {"_target_"}
    assert keys == {field.name for field in dataclasses.fields(mechanism)}
    assert dataclasses.replace(mechanism) == mechanism  # plain values: equality and a readable repr
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.name = "other"
    with pytest.raises(ValueError, match=r"mechanism\.name"):
        build(name, name="another")
    doc = type(mechanism).__doc__
    assert all(word in doc for word in ("Guarantee:", "Source:", "adjacency"))


@every_name
def test_bad_values_are_refused_by_name(name):
    mechanism = build(name)
    for field in dataclasses.fields(mechanism):
        if field.name in ("name", "noise"):
            continue
        switch = isinstance(getattr(mechanism, field.name), bool)
        for bad in (math.nan, math.inf, -1, "many", 1 if switch else True):
            if field.name == "threshold" and bad == -1:
                continue  # a negative threshold is odd, not wrong: every query passes
            with pytest.raises(ValueError, match=field.name):
                dataclasses.replace(mechanism, **{field.name: bad})


@every_form
def test_only_the_priced_kind_of_noise_is_accepted(name, noise):
    mechanism = build(name, noise)
    votes = random_votes(4, 20, num_classes(name))
    wrong = DryRunNoise({"torch": "discrete", "discrete": "torch"}[noise])
    with pytest.raises(ValueError, match="noise"):
        mechanism.release(votes, wrong, MechanismContext(num_queries=4))


@every_name
def test_a_kind_it_lacks_is_refused(name):
    with pytest.raises(ValueError, match="noise"):
        build(name, "quantum")
    if "discrete" not in kinds(name):
        with pytest.raises(ValueError, match="noise=torch"):
            build(name, "discrete")


@every_form
def test_outcome_model_only_where_the_law_is_known(name, noise):
    model = build(name, noise).make_outcome_model()
    known = {"gaussian": "GNMax", "laplace": "LNMax", "exponential": "Exponential", "confident": "Confident"}
    expected = known.get(name) if noise == "torch" else None
    assert (model and type(model).__name__) == (expected and f"{expected}Outcomes")


# -- price ----------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("sizes", [[40], [13, 27], [1, 1, 38], [10, 10, 10, 10]], ids=str)
def test_incurred_never_exceeds_the_worst_case(name, noise, sizes):
    mechanism = build(name, noise)
    teachers = num_teachers(mechanism, 40, len(sizes))
    mechanism.check(num_queries=40, num_teachers=teachers, num_classes=num_classes(name), rounds=len(sizes))
    worst = mechanism.privacy_events(40, len(sizes))
    for seed in range(4):
        votes = random_votes(40, teachers, num_classes(name), seed)
        label_Q, incurred = ask(mechanism, votes, sizes, DryRunNoise(noise))
        assert label_Q.dtype == torch.int64
        assert label_Q.min() >= NO_ANSWER and label_Q.max() < num_classes(name)
        assert (rdp.compute_curve(incurred) <= rdp.compute_curve(worst) * (1 + 1e-12)).all()
        failure = [sum(e.count * e.delta for e in events if isinstance(e, DeltaEvent)) for events in (incurred, worst)]
        assert failure[0] <= failure[1]


@every_form
def test_zero_queries_cost_and_answer_nothing(name, noise):
    mechanism = build(name, noise)
    votes = Votes(torch.zeros(0, num_classes(name), dtype=torch.int64), 20)
    answers = mechanism.release(votes, DryRunNoise(noise), MechanismContext(num_queries=5))
    assert answers.label_Q.shape == (0,) and answers.label_Q.dtype == torch.int64
    assert not rdp.compute_curve(answers.events).any() and not any(e.count for e in answers.events)


def test_prices_of_the_table():
    """Per query: rho, pure epsilon, and the exact Gaussian mu (ALGORITHMS section 1)."""
    s, s1 = 3.0, 4.0
    (gaussian,) = build("gaussian").privacy_events(1)
    assert gaussian == GaussianEvent(mu=math.sqrt(2) / s, count=1)
    assert compute_total_rho([gaussian]) == pytest.approx(1 / s**2)
    assert build("gaussian", "discrete").privacy_events(7) == (ZCDPEvent(rho=1 / s**2, count=7),)

    (laplace,) = build("laplace").privacy_events(1)
    assert laplace == LaplaceEvent(ratio=1 / s, count=2)
    assert compute_total_rho([laplace]) == pytest.approx(1 / s**2) and compute_total_pure_epsilon(
        [laplace]
    ) == pytest.approx(2 / s)
    (laplace,) = build("laplace", "discrete").privacy_events(1)
    assert laplace == PureDPEvent(epsilon=1 / s, count=2)
    assert compute_total_rho([laplace]) == pytest.approx(1 / s**2) and compute_total_pure_epsilon(
        [laplace]
    ) == pytest.approx(2 / s)

    exponential = build("exponential")
    (event,) = exponential.privacy_events(1)
    h = exponential.rate
    assert event == BoundedRangeEvent(eta=2 * h, count=1) and compute_total_pure_epsilon([event]) == pytest.approx(
        2 * h
    )
    assert compute_total_rho([event]) == pytest.approx(h**2 / 2) == pytest.approx(1 / s**2)

    for name in ("confident", "interactive"):
        screen, answer = build(name).privacy_events(9)
        assert screen == GaussianEvent(mu=1 / s1, count=9) and answer == GaussianEvent(mu=math.sqrt(2) / s, count=9)
        screen, answer = build(name, "discrete").privacy_events(9)
        assert screen == ZCDPEvent(rho=1 / (2 * s1**2), count=9) and answer == ZCDPEvent(rho=1 / s**2, count=9)
    screen, answer = build("confident", max_answers=4).privacy_events(9)
    assert (screen.count, answer.count) == (9, 4)

    single = build("single_stable", epsilon=0.5, delta=1e-6)
    assert single.privacy_events(3) == (LaplaceEvent(ratio=0.5, count=3), DeltaEvent(delta=1e-6, count=3))


def test_price_oracle_640_asked_286_answered():
    from pate_torch.accounting.accountant import compute_guarantee

    mechanism = build("confident", sigma=40.0, screen_sigma=150.0, threshold=200.0, max_answers=286)
    found = compute_guarantee(mechanism.privacy_events(640), 1e-5)
    assert found.epsilon == pytest.approx(2.5426, abs=5e-5) and found.route == "gdp"


# -- executed noise -------------------------------------------------------------------------------------------------


def accounted_scales(events, sparse: bool) -> list[tuple[str, float]]:
    """(kind, scale) of the draws that these events pay for, in the order drawn; sensitivities are section 0's."""
    scales = []
    for event in events:
        match event:
            case GaussianEvent(mu=mu):
                scales.append(("gaussian", (1 if len(events) == 2 and not scales else math.sqrt(2)) / mu))
            case ZCDPEvent(rho=rho):
                scales.append(
                    ("gaussian", (1 if len(events) == 2 and not scales else math.sqrt(2)) / math.sqrt(2 * rho))
                )
            case LaplaceEvent(ratio=ratio):
                scales.append(("laplace", 1 / ratio))
            case PureDPEvent(epsilon=eps) if not sparse:
                scales.append(("laplace", 1 / eps))
            case PureDPEvent(
                epsilon=eps
            ):  # sparse vector: lambda = 2/eps; tests take Lap(2 lambda), thresholds Lap(lambda)
                scales += [("laplace", 4 / eps), ("laplace", 2 / eps)]
            case BoundedRangeEvent():
                scales.append(("gumbel", 1.0))
    return scales


def fit(x: np.ndarray, kind: str, scale: float, discrete: bool) -> float:
    """p-value of draws against a law: Kolmogorov-Smirnov, or chi-square on the integers."""
    if not discrete:
        cdf = stats.gumbel_r(scale=scale).cdf if kind == "gumbel" else law(kind, scale, False).cdf
        return float(stats.kstest(x, cdf).pvalue)
    exact = law(kind, scale, True)
    # Bins at the quantiles of the law, so that every one has its share.
    edges = np.unique(np.searchsorted(exact.below, np.linspace(0.02, 0.98, 40)) - exact.reach)
    share = np.diff(np.concatenate([[0.0], exact.cdf(edges), [1.0]]))
    seen = np.bincount(np.searchsorted(edges, x), minlength=len(share))
    return float(stats.chisquare(*pooled(seen, share * len(x))).pvalue)


@every_form
def test_executed_noise_has_the_accounted_scale_and_no_other(name, noise):
    size = 6_000 if "sparse_vector" in name else 12_000  # thresholds are drawn one by one, which is slow
    # Enough failures that the sparse vector draws thousands of thresholds, and few enough queries that all fail.
    extra = {"max_failures": size + 1, "epsilon": 100.0} if "sparse_vector" in name else {}
    mechanism = build(name, noise, **extra)
    votes = Votes(torch.tensor([[19, 1]]).repeat(size, 1), 20)
    source = Recorder(noise)
    mechanism.release(votes, source, MechanismContext(num_queries=size))
    draws: dict = {}
    roles = []  # a draw of another shape or kind has another role; thresholds are drawn one by one
    for kind, tensor in source.drawn:
        role = (kind, len(tensor) == size, tensor.dim())
        if role not in draws:
            roles.append(role)
        draws.setdefault(role, []).append(tensor.double().flatten().numpy())
    events = tuple(e for e in mechanism.privacy_events(size) if not isinstance(e, DeltaEvent))
    scales = accounted_scales(events, hasattr(mechanism, "max_failures"))
    if name in ("confident", "interactive"):
        assert [role[2] for role in roles] == [1, 2]  # the check's noise is one number per query, not one per class
    assert len(roles) == len(scales)
    for role, (kind, scale) in zip(roles, scales, strict=True):
        x = np.concatenate(draws[role])
        assert role[0] == kind and len(x) >= 5000
        assert fit(x, kind, scale, noise == "discrete") > TINY
        for wrong in (2 / 3, 3 / 2):
            assert fit(x, kind, scale * wrong, noise == "discrete") < TINY


# -- law of the answers ---------------------------------------------------------------------------------------------

COUNTS = (9, 7, 4)


def answer_law(name: str, noise: str, factor: float) -> dict:
    """P(label) on COUNTS (student none), at ``factor`` times the accounted noise."""
    discrete = noise == "discrete"
    s, s1, threshold = 3.0 * factor, 4.0 * factor, 12.0
    if name == "exponential":
        weight = np.exp(np.array(COUNTS) * math.sqrt(2) / s)
        return dict(enumerate(weight / weight.sum()))
    if name == "laplace":
        return dict(enumerate(argmax_law(COUNTS, law("laplace", s, discrete))))
    answer = argmax_law(COUNTS, law("gaussian", s, discrete))
    if name == "gaussian":
        return dict(enumerate(answer))
    excess = 9 if name == "confident" else (9 - round(20 / 3) if discrete else 9 - 20 / 3)
    threshold = threshold if name == "confident" else 4.0
    passes = at_least(law("gaussian", s1, discrete), threshold - excess)
    return {NO_ANSWER: 1 - passes} | {c: passes * p for c, p in enumerate(answer)}


@pytest.mark.parametrize("name,noise", [f for f in FORMS if not is_about_stability(f[0])], ids=lambda value: value)
def test_answers_follow_the_exact_law_and_no_other(name, noise):
    size = 60_000
    mechanism = build(name, noise, **({"threshold": 4.0} if name == "interactive" else {}))
    votes = Votes(torch.tensor([COUNTS]).repeat(size, 1), 20)
    label_Q = mechanism.release(votes, DryRunNoise(noise), MechanismContext(num_queries=size)).label_Q
    observed = dict(zip(*(part.tolist() for part in label_Q.unique(return_counts=True)), strict=True))
    assert chi_square(observed, answer_law(name, noise, 1)) > TINY
    for wrong in (2 / 3, 3 / 2):
        assert chi_square(observed, answer_law(name, noise, wrong)) < TINY


@pytest.mark.slow(reason="statistical audit: the law of whole sequences of answers")
@pytest.mark.parametrize("noise", ["torch", "discrete"])
def test_stability_follows_the_exact_law_and_no_other(noise):
    mechanism = build("sparse_vector", noise, epsilon=12.0, max_failures=2)
    plan = mechanism.compute_scales(4)
    distances = [round(plan.threshold) + shift for shift in (1, 0, 2, -1)]
    counts_QC = torch.tensor([[150 + d + 1, 150 - d - 1, 0] for d in distances])
    votes, source, context = Votes(counts_QC, 300), DryRunNoise(noise), MechanismContext(num_queries=4)
    runs = [mechanism.release(votes, source, context).label_Q for _ in range(10_000)]
    assert all(bool(((row == 0) | (row == NO_ANSWER)).all()) for row in runs)
    observed = tally(tuple((row == 0).tolist()) for row in runs)
    right = sparse_law(distances, plan.threshold, plan.scale, 2, noise == "discrete")
    assert chi_square(observed, right) > TINY
    for factor, failures, shift in ((2 / 3, 2, 0), (3 / 2, 2, 0), (1, 2, 2)):
        wrong = sparse_law([d + shift for d in distances], plan.threshold, plan.scale * factor, failures, False)
        assert chi_square(observed, wrong) < TINY


@pytest.mark.parametrize("noise", ["torch", "discrete"])
def test_single_stable_passes_as_often_as_it_should(noise):
    mechanism = build("single_stable", noise, epsilon=0.5, delta=1e-3)
    size, distance = 40_000, 11
    votes = Votes(torch.tensor([[50 + distance + 1, 50 - distance - 1]]).repeat(size, 1), 100)
    label_Q = mechanism.release(votes, DryRunNoise(noise), MechanismContext(num_queries=size)).label_Q
    observed = {c: int((label_Q == c).sum()) for c in (0, NO_ANSWER)}
    for epsilon, fits in ((0.5, True), (0.75, False), (1 / 3, False)):
        passes = float(law("laplace", 1 / epsilon, noise == "discrete").sf(math.log(1e3) / 0.5 - distance))
        p = chi_square(observed, {0: passes, NO_ANSWER: 1 - passes})
        assert p > TINY if fits else p < TINY


# -- behavior ------------------------------------------------------------------------------------------------------


@every_name
def test_repeatable_under_an_insecure_seed_only(name):
    mechanism = build(name)
    teachers = num_teachers(mechanism, 200, 1)
    counts_QC = random_votes(200, teachers, num_classes(name)).counts_QC
    if is_about_stability(name):  # distances about the threshold, where the answers are random
        level = mechanism.compute_scales(200).threshold if hasattr(mechanism, "compute_scales") else mechanism.threshold
        top = teachers // 2 + round(level) + 1
        counts_QC = torch.zeros_like(counts_QC)
        counts_QC[:, 0], counts_QC[:, 1] = top, teachers - top
    votes = Votes(counts_QC, teachers)

    def labels(source: DryRunNoise) -> list[int]:
        return mechanism.release(votes, source, MechanismContext(num_queries=200)).label_Q.tolist()

    assert labels(DryRunNoise(insecure_seed=3)) == labels(DryRunNoise(insecure_seed=3))
    assert labels(DryRunNoise(insecure_seed=3)) != labels(DryRunNoise(insecure_seed=4))
    assert labels(DryRunNoise()) != labels(DryRunNoise())


@every_form
def test_answers_live_where_the_votes_do(name, noise):
    """On an accelerator where there is one; the type of the counts does not matter."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mechanism = build(name, noise)
    for dtype in (torch.int64, torch.int32, torch.int16):
        votes = Votes(torch.tensor([[15, 5], [5, 15]], dtype=dtype, device=device), 20)
        answers = mechanism.release(votes, DryRunNoise(noise), MechanismContext(num_queries=2))
        assert answers.label_Q.device.type == device.type and answers.label_Q.dtype == torch.int64


@pytest.mark.parametrize("name", ["gaussian", "laplace"])
def test_ties_of_integer_noise_go_to_the_lowest_class(name):
    mechanism = build(name, "discrete", sigma=0.01)  # exp(-100): no noise is ever drawn
    counts_QC = torch.tensor([[5, 5, 5], [3, 6, 6], [1, 5, 9]]).repeat(50, 1)
    votes = Votes(counts_QC, 15)
    answers = mechanism.release(votes, DryRunNoise("discrete"), MechanismContext(num_queries=150))
    assert answers.label_Q.tolist() == [0, 1, 2] * 50


# -- Confident and Interactive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[100], [30, 70], [10, 20, 70]], ids=str)
def test_max_answers_ends_the_asking(sizes):
    mechanism = build("confident", max_answers=7, screen_sigma=0.1, sigma=0.1)
    agree = torch.tensor([20, 0, 0])
    split = torch.tensor([7, 7, 6])
    votes = Votes(torch.stack([agree if q % 3 == 0 else split for q in range(100)]), 20)
    source, label_Q, incurred, start = DryRunNoise(), torch.zeros(0, dtype=torch.int64), (), 0
    for size in sizes:
        context = MechanismContext(num_queries=100, rounds=len(sizes), num_answered=int((label_Q >= 0).sum()))
        answers = mechanism.release(votes.select(torch.arange(start, start + size)), source, context)
        label_Q, incurred, start = torch.cat([label_Q, answers.label_Q]), incurred + answers.events, start + size
        if len(answers.label_Q) < size:
            break
    assert label_Q.tolist() == [0, -1, -1] * 6 + [0]  # ends with the seventh answer
    assert sum(e.count for e in incurred if e.mu == 1 / 0.1) == 19
    assert sum(e.count for e in incurred if e.mu != 1 / 0.1) == 7


def test_confident_refuses_a_threshold_out_of_reach():
    with pytest.raises(ValueError, match="threshold"):
        build("confident", threshold=100).check(num_queries=5, num_teachers=20, num_classes=3)
    build("confident").check(num_queries=5, num_teachers=20, num_classes=3)


def test_interactive_pays_only_where_the_student_is_wrong():
    mechanism = build("interactive", threshold=10.0, sigma=0.2, screen_sigma=0.2, student_confidence=0.8)
    votes = Votes(torch.tensor([[20, 0], [20, 0], [10, 10]]), 20)
    student_QC = torch.tensor([[0.95, 0.05], [0.1, 0.9], [0.6, 0.4]])
    answers = mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=3, student_QC=student_QC))
    assert answers.label_Q.tolist() == [0, 0, NO_ANSWER]  # the student's own; the teachers'; nobody's
    assert answers.from_student_Q.tolist() == [True, False, False]
    assert [e.count for e in answers.events] == [3, 1]
    # Without a student no label is the student's, and a uniform expectation (10 votes each) stands in for it.
    lower = dataclasses.replace(mechanism, threshold=5.0)
    answers = lower.release(votes, DryRunNoise(), MechanismContext(num_queries=3))
    assert answers.label_Q.tolist() == [0, 0, NO_ANSWER]
    assert not answers.from_student_Q.any()


@pytest.mark.parametrize(
    "student", [[[math.nan, 1.0]], [[0.7, 0.7]], [[1.5, -0.5]], [[0.5, 0.25, 0.25]], [[0.5, 0.5], [0.5, 0.5]]], ids=str
)
def test_interactive_refuses_what_is_not_a_probability(student):
    votes = Votes(torch.tensor([[12, 8]]), 20)
    with pytest.raises(ValueError, match="student"):
        build("interactive").release(
            votes, DryRunNoise(), MechanismContext(num_queries=1, student_QC=torch.tensor(student))
        )


def test_interactive_baseline_is_whole_votes_under_integer_noise():
    """Integer noise moves a count by whole votes: a fractional baseline would show through it."""
    mechanism = build("interactive", "discrete", threshold=0.0, screen_sigma=0.05, student_confidence=1.0)
    votes = Votes(torch.tensor([[10, 10]]), 20)
    # K p = (10.4, 9.6), rounded (10, 10): the excess is exactly 0 and passes; unrounded it would be 0.4 and pass a
    # threshold of 0.3 that no whole excess of 0 passes.
    context = MechanismContext(num_queries=1, student_QC=torch.tensor([[0.52, 0.48]]))
    assert mechanism.release(votes, DryRunNoise("discrete"), context).events[1].count == 1
    mechanism = dataclasses.replace(mechanism, threshold=0.3)
    assert mechanism.release(votes, DryRunNoise("discrete"), context).events[1].count == 0


@pytest.mark.parametrize("name", ["gaussian", "laplace", "exponential", "confident", "interactive"])
@pytest.mark.parametrize("noise", ["torch", "discrete"])
def test_noise_too_small_for_a_price_is_refused(name, noise):
    if noise not in kinds(name):
        return
    for key in {"sigma", "screen_sigma"} & {f.name for f in dataclasses.fields(build(name))}:
        assert math.isfinite(compute_total_rho(build(name, noise, **{key: 1e-12}).privacy_events(1000)))
        with pytest.raises(ValueError, match=f"mechanism.{key}=1e-200: must be at least 1e-12"):
            build(name, noise, **{key: 1e-200})
