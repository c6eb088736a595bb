"""Publication of a data-dependent cost, which is computed from the votes, made private by noise, and charged.

The guarantee of a release is its data-independent cost. The published data-dependent cost is smaller if the teachers
agree, and is valid with a stated confidence over the noise of the publication (PATE 2018, appendix B, with the
corrections of ``private_price``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pate_torch.accounting import accountant
from pate_torch.accounting.data_dependent import private_price
from pate_torch.accounting.data_dependent.private_price import PublicationPlan
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.files import write_atomically
from pate_torch.core.formatting import format_epsilon
from pate_torch.mechanisms.base import Mechanism
from pate_torch.privacy.accounts import PURPOSE_PRICE
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.sensitive import Votes


@dataclass(frozen=True, kw_only=True)
class PrivateEpsilon:
    """The settings of the publication of a data-dependent cost.

    Attributes:
        agreement: Public guesses of the winner's share of the votes, which determine the Renyi order and the noise. Do
            not derive the guesses from the private votes.
        confidence: Probability that the published cost is at least the true cost.
        allow_net_loss: Whether to publish even if, for votes as in ``agreement``, labels and publication together cost
            more than the data-independent cost of the labels.
    """

    agreement: Sequence[float] = (1.0, 0.98, 0.95, 0.9, 0.8, 0.6)
    confidence: float = 0.95
    allow_net_loss: bool = False
    _plans: dict[Any, PublicationPlan] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.agreement:
            raise checks.error("private_epsilon.agreement", self.agreement, "must contain at least one share")
        for share in self.agreement:
            checks.between("private_epsilon.agreement", share, 0, 1)
        checks.between("private_epsilon.confidence", self.confidence, 0.5, 0.999999)
        checks.boolean("private_epsilon.allow_net_loss", self.allow_net_loss)

    def make_plan(
        self, mechanism: Mechanism, *, num_queries: int, num_teachers: int, num_classes: int, rounds: int, delta: float
    ) -> PublicationPlan:
        """Choose the public parameters of the publication for a release of this mechanism and the account's delta.

        Raises:
            ValueError: The cost cannot be published, for example because ``rounds`` is not 1, or the publication would
                probably cost more than it saves.
        """
        fix = "Set private_epsilon=none. The data-independent cost is published in any case."
        model = mechanism.make_outcome_model()
        if model is None:
            raise checks.error("private_epsilon", "set", f"{mechanism.name} has no data-dependent cost", fix)
        if rounds > 1:
            rule = f"data-dependent costs do not add up over {rounds} rounds, as queries depend on earlier answers"
            raise checks.error("private_epsilon", "set", rule, fix)
        key = (mechanism, num_queries, num_teachers, num_classes, delta)
        if key in self._plans:
            return self._plans[key]
        examples = private_price.make_example_votes(num_teachers, num_classes, self.agreement)
        try:
            plan = private_price.choose_plan(
                model, examples, num_queries=num_queries, delta=delta, confidence=self.confidence
            )
        except ValueError as error:
            message = f"private_epsilon: {mechanism.name} has no data-dependent cost to publish here ({error}) {fix}"
            raise ValueError(message) from error
        median_epsilon = private_price.forecast_epsilon(plan, model, examples, num_queries=num_queries, delta=delta)
        labels_epsilon = accountant.compute_guarantee(mechanism.privacy_events(num_queries), delta).epsilon
        if median_epsilon >= labels_epsilon and not self.allow_net_loss:
            rule = (
                f"would cost more than it saves: with votes as in private_epsilon.agreement, labels and publication "
                f"together have epsilon {format_epsilon(median_epsilon)} in the median, while the labels alone cost "
                f"{format_epsilon(labels_epsilon)} for any votes"
            )
            fix = f"{fix} To publish nevertheless, set private_epsilon.allow_net_loss=true."
            raise checks.error("private_epsilon", "set", rule, fix)
        self._plans[key] = plan
        return plan

    @staticmethod
    def privacy_events(plan: PublicationPlan) -> tuple[PrivacyEvent, ...]:
        """Return the events that the publication costs, beside those of the labels."""
        return (plan.publication_event,)

    def publish(
        self, plan: PublicationPlan, mechanism: Mechanism, votes: Votes, budget: Budget, delta: float, folder: Path
    ) -> tuple[float, str]:
        """Charge the publication, draw its noise and write ``sanitised.json``.

        Returns:
            Epsilon of labels and publication together, and the id of the reservation.
        """
        model = mechanism.make_outcome_model()
        assert model is not None
        with budget.spend(self.privacy_events(plan), mechanism="sanitised cost", purpose=PURPOSE_PRICE) as spending:
            standard_normal = float(spending.noise.draw_gaussian((1,), 1.0, torch.device("cpu"))[0])
            counts_QC = votes.counts_QC.cpu().numpy()
            price = private_price.compute_private_price(plan, model, counts_QC, standard_normal)
            # Cost and epsilon are rounded up to three decimals, because the last bits of a float could reveal the
            # private scale of the noise.
            price = replace(price, rdp=_round_up(price.rdp))
            epsilon = _round_up(price.compute_epsilon(delta))
            record = {
                "epsilon": epsilon,
                "delta": delta,
                "confidence": plan.confidence,
                "direction": "forward",
                "route": f"Renyi of order {plan.order:g}, smooth sensitivity (PATE 2018, appendix B, corrected)",
                "rdp": price.rdp,
                "rdp_of_this_publication": plan.publication_rdp,
                "order": plan.order,
                "decay": plan.decay,
                "sigma": plan.sigma,
                "private": spending.secret,
            }
            write_atomically(folder / "sanitised.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
        return epsilon, spending.id


def _round_up(value: float) -> float:
    return math.ceil(value * 1000) / 1000
