"""The order in which prompts share a step, and how often a request may be overtaken; policies are chosen by name.

    arrival   strictly in order: the oldest prompt takes what it can use; if the head of the queue lacks pages, the queue waits
    fair      shortest first, waiting prompts included; a quarter of the prompts' steps, or of their time, is the oldest's. Two
              long prompts are computed at a time. A request may be overtaken a number of times, then the queue waits for it

Precedence is by `priority` (lower first, as in vLLM), then by arrival; preemption goes in the reverse order.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """`order(wanted, turn)`: the indices of prompts in the order of service. `wanted`: tokens that each could use, running prompts
    by precedence, then waiting ones. `turn`: the first prompt is served first.

    overtaking  how many later requests may be admitted before one that could not be
    long        how many prompts longer than a step's budget are computed at a time
    """

    order: Callable[[list[int], bool], list[int]]
    overtaking: int
    long: int


def in_order(wanted: list[int], turn: bool) -> list[int]:  # noqa: ARG001 (a Policy's)
    """In order of precedence."""
    return list(range(len(wanted)))


def shortest_first(wanted: list[int], turn: bool) -> list[int]:
    """The first prompt on its turn, then the shortest: short ones hardly wait for long ones, and long ones finish."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    if turn and order:
        order.remove(0)
        order.insert(0, 0)
    return order


POLICIES = {"fair": Policy(shortest_first, overtaking=64, long=2), "arrival": Policy(in_order, overtaking=0, long=1 << 30)}
