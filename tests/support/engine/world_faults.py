"""Whether a planted fault shows in random worlds."""

from collections.abc import Callable

from tests.support.engine.worlds import World, check_ends, simulate


def whole(world: World) -> None:
    """A world to its end, each request's answer compared."""
    check_ends(world, simulate(world))


def caught(
    worlds: int,
    more_than: int,
    changed: Callable[[World], World] = lambda world: world,
    run: Callable[[World], object] = whole,
    fault: type[Exception] | tuple[type[Exception], ...] = (AssertionError, StopIteration, ValueError),
) -> bool:
    """Whether a planted fault shows in more than so many of the worlds; those behind are not run."""
    count = 0
    for seed in range(worlds):
        try:
            run(changed(World(seed)))
        except fault:
            count += 1
        if count > more_than:
            return True
    return False
