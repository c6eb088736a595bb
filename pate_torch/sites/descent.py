"""Descent over several rounds: the joiner asks for one step after another, and every site charges each round.

The noise of all steps is fixed before the first round. The steps themselves are post-processing of the noisy sums: the
length of all steps follows from the sum of the first round, and the weights of a round from the sum of the last one.
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
    slot = max((other for other, (each, *_) in rounds.items() if each.kind == kind.name), default=-1)
    current = rounds[slot][1] if slot in rounds else None
    if not isinstance(current, Descent) or current.settings != kind.settings:
        return joiner.ask(kind, epsilon)
    if not rounds[slot][2] and not again:
        fix = "Run `pate join sum`, or add --again: a new slot, which every site charges in full."
        raise checks.error("round", slot, "has no sum, which the next step needs", fix)
    slots = joiner.list_slots(slot)
    finished = [other for other in slots if rounds[other][2]]
    if len(finished) >= kind.steps:
        problem = f"were all taken ({kind.steps})"
        raise checks.error("steps", kind.steps, problem, "Run `pate join train`; for another descent change a setting.")
    if finished:
        current = take_step(joiner.load_sum(finished[-1]))
    return joiner.ask(current, epsilon, slots[0])
