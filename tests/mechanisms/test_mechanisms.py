"""The contract of every mechanism that can be configured: priced as executed, and never beyond its worst case."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from pate_torch.accounting import (
    ConfidentCost,
    GaussianNoisyMaxCost,
    LaplaceNoisyMaxCost,
    rdp,
)
from pate_torch.accounting.accountant import compute_total_rho
from pate_torch.accounting.costs import ExponentialCost
from pate_torch.accounting.events import (
    BoundedRangeEvent,
    DeltaEvent,
    GaussianEvent,
    LaplaceEvent,
    PureDPEvent,
    ZCDPEvent,
)
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, MechanismContext
from pate_torch.privacy.sensitive import Votes
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
from tests.mechanisms.vote_laws import Recorder, argmax_law, at_least, chi_square, fit, has_this_scale_alone, law

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


@every_name
def test_no_mechanism_is_without_a_kind_of_noise_that_it_is_priced_for(name):
    for wrong in (None, "", "quantum"):
        with pytest.raises(ValueError, match=r"mechanism\.noise"):
            dataclasses.replace(build(name), noise=wrong)
    if "discrete" not in kinds(name):
        with pytest.raises(ValueError, match="noise=torch"):
            build(name, "discrete")


@every_name
def test_a_mechanism_keeps_its_name_and_says_what_it_guarantees(name):
    with pytest.raises(ValueError, match=r"mechanism\.name"):
        build(name, name="another")
    assert all(word in type(build(name)).__doc__ for word in ("Guarantee:", "Source:", "adjacency"))


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
def test_outcome_model_only_where_the_law_is_known(name, noise):
    model = build(name, noise).make_outcome_model()
    known = {
        "gaussian": GaussianNoisyMaxCost,
        "laplace": LaplaceNoisyMaxCost,
        "exponential": ExponentialCost,
        "confident": ConfidentCost,
    }
    assert (model and type(model)) == (known.get(name) if noise == "torch" else None)


@every_form
@pytest.mark.parametrize("sizes", [[40], [1, 1, 38]], ids=str)
def test_incurred_never_exceeds_the_worst_case(name, noise, sizes):
    mechanism = build(name, noise)
    teachers = num_teachers(mechanism, 40, len(sizes))
    mechanism.check(num_queries=40, num_teachers=teachers, num_classes=num_classes(name), rounds=len(sizes))
    worst = mechanism.privacy_events(40, len(sizes))
    for seed in range(3):
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


S, S1, ROOT2 = 3.0, 4.0, math.sqrt(2)
SCREENED = (GaussianEvent(mu=1 / S1, count=9), GaussianEvent(mu=ROOT2 / S, count=9))
INTEGERS_SCREENED = (ZCDPEvent(rho=1 / (2 * S1**2), count=9), ZCDPEvent(rho=1 / S**2, count=9))
TESTED = (LaplaceEvent(ratio=0.5, count=9), DeltaEvent(delta=1e-6, count=9))


@pytest.mark.parametrize(
    ("name", "noise", "options", "expected"),
    [
        ("gaussian", "torch", {}, (GaussianEvent(mu=ROOT2 / S, count=9),)),
        ("gaussian", "discrete", {}, (ZCDPEvent(rho=1 / S**2, count=9),)),
        ("laplace", "torch", {}, (LaplaceEvent(ratio=1 / S, count=18),)),
        ("laplace", "discrete", {}, (PureDPEvent(epsilon=1 / S, count=18),)),
        ("exponential", "torch", {}, (BoundedRangeEvent(eta=2 * ROOT2 / S, count=9),)),
        ("confident", "torch", {}, SCREENED),
        ("confident", "torch", {"max_answers": 4}, (SCREENED[0], GaussianEvent(mu=ROOT2 / S, count=4))),
        ("confident", "discrete", {}, INTEGERS_SCREENED),
        ("interactive", "torch", {}, SCREENED),
        ("interactive", "discrete", {}, INTEGERS_SCREENED),
        ("single_stable", "torch", {"epsilon": 0.5, "delta": 1e-6}, TESTED),
        ("single_stable", "discrete", {"epsilon": 0.5, "delta": 1e-6}, (PureDPEvent(epsilon=0.5, count=9), TESTED[1])),
    ],
)
def test_costs_of_nine_questions(name, noise, options, expected):
    assert build(name, noise, **options).privacy_events(9) == expected


def accounted_scales(events, sparse: bool) -> list[tuple[str, float]]:
    """(kind, scale) of the draws that these events pay for, in the order drawn, by what a moved vote changes."""
    scales = []
    for event in events:
        vote_distance = 1 if len(events) == 2 and not scales else math.sqrt(2)  # of a check, of an answer
        match event:
            case GaussianEvent(mu=mu):
                scales.append(("gaussian", vote_distance / mu))
            case ZCDPEvent(rho=rho):
                scales.append(("gaussian", vote_distance / math.sqrt(2 * rho)))
            case LaplaceEvent(ratio=ratio):
                scales.append(("laplace", 1 / ratio))
            case PureDPEvent(epsilon=eps):  # sparse vector: lambda = 2/eps; Lap(2 lambda) for tests, then Lap(lambda)
                scales += [("laplace", 4 / eps), ("laplace", 2 / eps)] if sparse else [("laplace", 1 / eps)]
            case BoundedRangeEvent():
                scales.append(("gumbel", 1.0))
    return scales


@every_form
def test_executed_noise_has_the_accounted_scale_and_no_other(name, noise):
    size = 3_000 if "sparse_vector" in name else 12_000  # thresholds are drawn one by one, which is slow
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
        assert role[0] == kind and len(x) >= 2500
        assert has_this_scale_alone(
            lambda factor, x=x, kind=kind, s=scale: fit(x, kind, s * factor, noise == "discrete")
        )


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
    assert has_this_scale_alone(lambda factor: chi_square(observed, answer_law(name, noise, factor)))


@every_form
def test_answers_live_where_the_votes_do(name, noise):
    """On an accelerator where there is one; the type of the counts does not matter."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mechanism = build(name, noise)
    for dtype in (torch.int64, torch.int32, torch.int16):
        votes = Votes(torch.tensor([[15, 5], [5, 15]], dtype=dtype, device=device), 20)
        answers = mechanism.release(votes, DryRunNoise(noise), MechanismContext(num_queries=2))
        assert answers.label_Q.device.type == device.type and answers.label_Q.dtype == torch.int64


@pytest.mark.parametrize("name,noise", [f for f in FORMS if not is_about_stability(f[0])], ids=lambda value: value)
def test_noise_too_small_for_a_cost_is_refused(name, noise):
    for key in {"sigma", "screen_sigma"} & {f.name for f in dataclasses.fields(build(name))}:
        assert math.isfinite(compute_total_rho(build(name, noise, **{key: 1e-12}).privacy_events(1000)))
        with pytest.raises(ValueError, match=f"mechanism.{key}=1e-200: must be at least 1e-12"):
            build(name, noise, **{key: 1e-200})
