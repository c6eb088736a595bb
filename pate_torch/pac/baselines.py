"""What the papers compare with: Dwork and Feldman's vote, plain averaging, and a public representation of the class."""

from __future__ import annotations

import math

import torch
from scipy.special import expit

from pate_torch.accounting.events import DeltaEvent, PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.core.rng import make_numpy_generator
from pate_torch.pac.agnostic import compute_shard_votes
from pate_torch.pac.classes import HypothesisClass, enumerate_representatives
from pate_torch.pac.exponential import ChosenHypothesis, run_exponential_mechanism
from pate_torch.pac.nets import (
    compute_log_sauer_shelah,
    compute_net_size,
    compute_realizable_size,
    compute_uniform_size,
)
from pate_torch.pac.sample import Floats, Sample, charge_events, check_points, check_replace_one, warn_below_guarantee
from pate_torch.pac.stable import Predictions
from pate_torch.privacy.budget import NoiseProvider

_CPU = torch.device("cpu")


def compute_df18_size(vc_dimension: int, *, epsilon: float, alpha: float) -> int:
    """Smallest n for excess error 2 alpha in expectation where some hypothesis makes no error.

    K = ceil((6/epsilon) ln(1/alpha)) teachers that each err on alpha/3 on average: on all points but a share alpha less
    than a third of them errs (Markov), and there they are right but with probability e^(-epsilon K/6) <= alpha.
    """
    teachers = math.ceil(6 * math.log(1 / alpha) / epsilon)
    error_rate = alpha / 6  # a teacher errs on so much, but with a probability of so much
    return teachers * compute_realizable_size(error_rate, error_rate, vc_dimension)


def run_df18_vote(
    hypotheses: HypothesisClass, sample: Sample, x_Q: Floats, *, epsilon: float, alpha: float, budget: NoiseProvider
) -> Predictions:
    """Predicts by an exponential vote P(c) ~ exp(epsilon n_c/2) of ERMs on disjoint shards.

    Warns below ``compute_df18_size``, and that only for a class with a hypothesis without errors.

    Args:
        hypotheses: The class.
        sample: PRIVATE.
        x_Q: Points to label, [Q, D].
        epsilon: Per prediction.
        alpha: Excess error; it sets the number of teachers.
        budget: Pays, and gives the noise.

    Guarantee: epsilon-DP per prediction, pure: one vote moves, so the log-odds move by epsilon. Replace-one.
    Source: Dwork & Feldman 2018 Theorem 4.1, as DF20 Lemma 6 has it.
    """
    check_replace_one(sample, "DF18's vote")
    checks.positive("epsilon", epsilon)
    checks.between("alpha", alpha, 0, 1, exclusive=True)
    x_Q = check_points("x_Q", x_Q)
    teachers = math.ceil(6 * math.log(1 / alpha) / epsilon)
    checks.integer("num_teachers", teachers, low=1, high=sample.n, fix="Every teacher needs a record.")
    min_n = compute_df18_size(hypotheses.vc_dimension, epsilon=epsilon, alpha=alpha)
    warn_below_guarantee("DF18's vote", sample.n, [(f"error {2 * alpha:g} where some hypothesis makes none", min_n)])
    events: tuple[PrivacyEvent, ...] = (PureDPEvent(epsilon=epsilon, count=len(x_Q)),)
    with charge_events(budget, events, "DF18's vote") as spending:
        counts_QC = compute_shard_votes(hypotheses, sample, teachers, x_Q).counts_QC.numpy()
        probability_Q = expit(epsilon / 2 * (counts_QC[:, 1] - counts_QC[:, 0]))
        label_Q = spending.noise.draw_uniform((len(x_Q),), _CPU).numpy() < probability_Q
    return Predictions(label_Q, events, ("epsilon", epsilon))


def compute_averaging_size(vc_dimension: int, *, gamma: float, alpha: float, beta: float) -> int:
    """Smallest n for excess error 2 alpha with probability 1 - beta: ceil(1/gamma) shards, each enough for its ERM."""
    teachers = math.ceil(1 / gamma)
    return teachers * compute_uniform_size(alpha, beta / teachers, vc_dimension)


def run_averaging(
    hypotheses: HypothesisClass,
    sample: Sample,
    x_Q: Floats,
    *,
    gamma: float,
    alpha: float,
    beta: float,
    budget: NoiseProvider,
) -> Predictions:
    """Predicts by the ERM of one of ceil(1/gamma) disjoint shards, drawn afresh for each point.

    Warns below ``compute_averaging_size``.

    Guarantee: gamma-uniformly stable, i.e. (0, gamma)-DP, per prediction: a record's shard is drawn with 1/K at most;
        charged as Delta. Replace-one.
    Source: Shalev-Shwartz, Shamir, Srebro & Sridharan 2010, as DF20's introduction compares.
    """
    check_replace_one(sample, "averaging")
    checks.between("gamma", gamma, 0, 1, exclusive=True)
    x_Q = check_points("x_Q", x_Q)
    teachers = math.ceil(1 / gamma)
    checks.integer("num_teachers", teachers, low=1, high=sample.n, fix="Every teacher needs a record.")
    min_n = compute_averaging_size(hypotheses.vc_dimension, gamma=gamma, alpha=alpha, beta=beta)
    warn_below_guarantee("averaging", sample.n, [(f"excess error {2 * alpha:g} with probability {1 - beta:g}", min_n)])
    events: tuple[PrivacyEvent, ...] = (DeltaEvent(delta=1 / teachers, count=len(x_Q)),)
    with charge_events(budget, events, "averaging") as spending:
        counts_QC = compute_shard_votes(hypotheses, sample, teachers, x_Q).counts_QC.numpy()
        label_Q = spending.noise.draw_uniform((len(x_Q),), _CPU).numpy() < counts_QC[:, 1] / teachers
    return Predictions(label_Q, events, ("stability", 1 / teachers))


def compute_representation_size(
    vc_dimension: int, *, epsilon: float, alpha: float, beta: float, reference: int | None = None
) -> int:
    """Smallest n of ``run_representation``: alpha/4 by the draw, by the reference, and twice by convergence."""
    size = compute_net_size(alpha / 4, beta / 3, vc_dimension) if reference is None else reference
    mechanism_size = 8 * (compute_log_sauer_shelah(size, vc_dimension) + math.log(3 / beta)) / (epsilon * alpha)
    return max(math.ceil(mechanism_size), compute_uniform_size(alpha / 4, beta / 3, vc_dimension))


def run_representation(
    hypotheses: HypothesisClass,
    sample: Sample,
    reference_x: Floats,
    *,
    epsilon: float,
    alpha: float,
    beta: float,
    budget: NoiseProvider,
) -> ChosenHypothesis:
    """The exponential mechanism over the dichotomies of draws from a reference distribution, which knows no record.

    Warns below ``compute_representation_size``, and below ``compute_net_size`` at alpha/4 for a reference that *is* the
    points' distribution; where it only dominates it, by a factor c, the latter takes alpha/c.

    Guarantee: BoundedRange(epsilon), hence epsilon-DP. Replace-one; ``reference_x`` is public.
    Source: Beimel, Nissim & Stemmer 2013; WLF16 Examples 6 and 7.
    """
    check_replace_one(sample, "the representation")
    reference_x, d = check_points("reference_x", reference_x), hypotheses.vc_dimension
    min_n = compute_representation_size(d, epsilon=epsilon, alpha=alpha, beta=beta, reference=len(reference_x))
    warn_below_guarantee(
        "representation",
        sample.n,
        [(f"excess error {alpha:g} with probability {1 - beta:g}", min_n)],
        [("reference points", len(reference_x), compute_net_size(alpha / 4, beta / 3, d))],
    )
    candidates = enumerate_representatives(hypotheses, reference_x)
    vacuous_alpha = 1 - 1e-12  # the condition on n has been checked
    return run_exponential_mechanism(
        hypotheses, candidates, sample, epsilon=epsilon, budget=budget, alpha=vacuous_alpha
    )


def draw_uniform_reference(public_x: Floats, count: int, seed: int) -> Floats:
    """Draws uniform in the box that public points span: a reference distribution that any table has, [count, D]."""
    public_x = check_points("public_x", public_x)
    low, high = public_x.min(axis=0), public_x.max(axis=0)
    return low + (high - low) * make_numpy_generator(seed, "reference").random((count, public_x.shape[1]))
