"""Whether a planted fault shows in random worlds, and faults that several tests plant."""

import itertools
from collections.abc import Callable
from itertools import islice

import pytest

from engine.core.masks import ThoughtLimit
from engine.core.requests import Requests
from engine.core.sequence import Sequence
from engine.protocol import GenerateRequest
from tests.support.engine.worlds import World, check_ends, simulate


def whole(world: World) -> None:
    """A world to its end, each request's answer compared."""
    check_ends(world, simulate(world))


def thoughts_end_late(patch: pytest.MonkeyPatch) -> None:
    """Planted fault: a thought may have a token more than its budget."""
    ends_at = ThoughtLimit.ends_at.fget
    assert ends_at is not None
    patch.setattr(ThoughtLimit, "ends_at", property(lambda limit: None if (end := ends_at(limit)) is None else end + 1))


def without_cuts(patch: pytest.MonkeyPatch) -> None:
    """Planted fault: tokens behind the one at which masks begin are kept."""
    honest = Requests.add

    def add(self: Requests, request: GenerateRequest) -> Sequence | None:
        if (sequence := honest(self, request)) is not None:
            sequence.cut_ids = frozenset()
        return sequence

    patch.setattr(Requests, "add", add)


def caught(
    worlds: int,
    more_than: int,
    changed: Callable[[World], World] = lambda world: world,
    run: Callable[[World], object] = whole,
    fault: type[Exception] | tuple[type[Exception], ...] = (AssertionError, StopIteration, ValueError),
    where: Callable[[World], object] = lambda world: True,
) -> bool:
    """Whether a planted fault shows in more than so many of the first worlds that are as `where` says; those behind are not run."""
    count = 0
    for world in islice(filter(where, map(World, itertools.count())), worlds):
        try:
            run(changed(world))
        except fault:
            count += 1
        if count > more_than:
            return True
    return False
