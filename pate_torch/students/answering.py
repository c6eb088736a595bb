"""The linear model that gave a round's answers (``voters/gradients.py``), as a network: found again from what it said.

Its answers on the public points are released, and so are the features that they are linear in; nothing else is needed.
In directions in which no public point lies they say nothing of it, and it is taken to say nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.features.contrastive import Representation, among, encode
from pate_torch.protocols import Student, StudentTask

_SMALLEST = 1e-30
"""Probabilities below, of which float32 knows few digits, are not fitted."""
_SPREAD = 1e-6
"""Directions along which the public points spread less, of the most, say nothing."""
_OFF = 1e-3
"""By how much a fitted logit may miss a given one. (It was 3e-6 with 9,000 points of 256 features.)"""


def answering(
    task: StudentTask,
    before: Student | None,
    representation: Representation | None,
    *,
    neighbours: int,
    seed: int,
    device: torch.device,
) -> Student:
    """The model behind one round's probabilities, in the features of the students ``before``; None: those of the
    representation, or, without one, the points themselves. neighbours: as of the round's ``Slopes``.

    Raises ValueError where there are no probabilities, or no model that is linear in those features has them.
    """
    trunk, network = _trunk(task, before, representation, seed, device)
    if task.belief_QC is None:
        raise _not_linear("the answers are labels")
    trunk = among(trunk.to(device), task.pool_x, task.spec, neighbours)
    place_QD = encode(trunk, task.pool_x[task.query_Q.cpu()], task.spec).double()
    share_QC = task.belief_QC.cpu().double()
    fitted_Q = (share_QC > _SMALLEST).all(1)
    # Softmax forgets what is added to a whole row: what counts is how far the classes lie apart.
    logit_QC = share_QC[fitted_Q].log()
    logit_QC = logit_QC - logit_QC.mean(1, keepdim=True)
    known_QD = torch.cat([place_QD, torch.ones(len(place_QD), 1)], 1)[fitted_Q]
    weight_DC = torch.linalg.lstsq(known_QD, logit_QC, rcond=_SPREAD, driver="gelsd").solution
    off = float((known_QD @ weight_DC - logit_QC).abs().max()) if len(known_QD) else float("inf")
    if not off < _OFF:
        raise _not_linear(f"the nearest linear model misses them by {off:.2g}")
    moved = {"points": len(task.pool_x), "neighbours": neighbours} if neighbours else {}
    description = networks.describe("probe", task.spec.input_shape, task.spec.num_classes, of=network, **moved)
    module = networks.rebuild(description)
    state = {f"0.{name}": value for name, value in trunk.state_dict().items()}
    state |= {"2.weight": weight_DC[:-1].T.float().contiguous(), "2.bias": weight_DC[-1].float()}
    module.load_state_dict(state)
    return Student(description, module.to(device).eval(), task.spec)


def _trunk(
    task: StudentTask, before: Student | None, representation: Representation | None, seed: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """The encoder that the round was asked in, and the name and options of the network whose lower part it is."""
    if before is not None:
        return networks.beneath(before.module), {key: before.network[key] for key in ("name", "options")}
    if representation is None:
        return nn.Flatten(), {"name": "logistic", "options": {}}
    trunk = representation.learn(task.pool_x, task.spec, seed=seed, device=device)
    alone = {"name": representation.network, "options": dict(representation.network_options)}
    if representation.encoders == 1:
        return trunk, alone
    return trunk, {"name": "voting", "options": {"members": representation.encoders, "of": alone}}


def _not_linear(why: str) -> ValueError:
    return checks.fail(
        "student.last",
        "model",
        f"needs the answers of a model that is linear in the features of the students before: {why}",
        "Use voting=slopes, with refit the same student but for last. Students trained again elsewhere, or with other "
        "settings, have other features: then student.last=student.",
    )
