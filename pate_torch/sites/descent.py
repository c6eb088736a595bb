"""Gradient descent over several rounds: the joiner asks for one step after another, and every site charges each round.

The noise of all steps is fixed before the first round. The steps are post-processing of the noisy sums: the sum of the
first round decides the length of all steps, and the sum of each round decides the weights of the next round.
"""

from __future__ import annotations

from pate_torch.core import checks
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.tables import Descent
from pate_torch.sites.training import take_step


def ask_step(joiner: Joiner, kind: Descent, epsilon: float, *, again: bool = False) -> tuple[int, bytes, bytes]:
    """Ask for the first step, or for the next step of the newest descent if it has the same settings.

    Args:
        joiner: The joiner.
        kind: Settings of the descent. A descent that has begun keeps its own public file.
        epsilon: Largest price of all steps together.
        again: Whether to ask for the newest step in a new slot because its sum is missing. Every site charges it again.

    Returns:
        Slot, round file and public file.
    """
    rounds = joiner.load_rounds()
    slots = [slot for slot, each in enumerate(rounds) if isinstance(each.kind, Descent)]
    current = rounds[slots[-1]].kind if slots else None
    if not isinstance(current, Descent) or current.settings != kind.settings:
        return joiner.ask(kind, epsilon)
    slot = slots[-1]
    if not rounds[slot].has_sum and not again:
        fix = "Run `pate join sum`, or add --again: a new slot, which every site charges in full."
        raise checks.error("round", slot, "has no sum, which the next step needs", fix)
    slots = joiner.list_slots(slot)
    finished = [other for other in slots if rounds[other].has_sum]
    if len(finished) >= kind.steps:
        problem = f"were all taken ({kind.steps})"
        raise checks.error("steps", kind.steps, problem, "Run `pate join train`; for another descent change a setting.")
    if finished:
        current = take_step(joiner.load_sum(finished[-1]))
    return joiner.ask(current, epsilon, slots[0])
