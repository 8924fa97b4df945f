"""Faults of masks, which the random worlds of test_scheduler.py must show: a row gets a mask that is not its own token's."""

from collections.abc import Callable

import pytest

from engine.core.masks import Masks, _Row
from engine.step_masks import StepMasks
from tests.support.engine.masked_ranks import Plant, a_token_old, left_out, of_another_row, of_the_step_before
from tests.support.engine.worlds import World, check_ends, simulate

pytestmark = pytest.mark.pure

PLANTS: dict[str, Callable[[], Plant]] = {
    "of another row": lambda: of_another_row,
    "a token old": a_token_old,
    "of the step before": of_the_step_before,
    "left out": lambda: left_out,
}


def honest(masks: StepMasks) -> StepMasks:
    return masks


def worlds_until(found: int, most: int, plant: Callable[[], Plant] = lambda: honest) -> int:
    """How many worlds with grammars it takes until a fault has shown in so many of them; AssertionError: more than `most`."""
    shown = tried = seed = 0
    while shown < found:
        world, seed = World(seed), seed + 1
        if not any(request.params.grammar for request in world.requests):
            continue
        tried += 1
        assert tried <= most, f"{shown} of {most} worlds show it"
        try:
            check_ends(world, simulate(world, plant_masks=plant()))
        except AssertionError:
            shown += 1
    return tried


@pytest.mark.parametrize("fault", PLANTS)
def test_a_wrong_mask_shows_in_few_worlds(fault: str) -> None:
    """Planted faults in the records of masks: five worlds that show it are found among the first thirty with grammars."""
    tried = worlds_until(5, 30, PLANTS[fault])
    print(f"{fault}: 5 of the first {tried} worlds with grammars")


def of_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """A mask that was made for an earlier token counts as the row's."""
    patch.setattr(_Row, "ready", property(lambda self: self.free or self.reply.mask is not None))


def of_the_last_plan(patch: pytest.MonkeyPatch) -> None:
    """The rows of the youngest planned step go out as the oldest's."""
    encoded = Masks._encoded
    patch.setattr(Masks, "_encoded", lambda self, step, rows: encoded(self, step, self._planned[-1][1] if self._planned else rows))


FAULTS = (of_what_is_there, of_the_last_plan)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_masks_shows_in_few_worlds(monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Planted faults in what makes the records."""
    fault(monkeypatch)
    monkeypatch.setattr("tests.support.engine.worlds._MAX_STEPS", 1000)
    tried = worlds_until(5, 60)
    print(f"{fault.__name__}: 5 of the first {tried} worlds with grammars")
