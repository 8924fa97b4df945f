"""Faults of masks, which the random worlds of test_scheduler.py must show: a row gets a mask that is not its own token's."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from engine.core.masks import MaskedRow, Masks, MaskState
from tests.support.engine.draws import chance
from tests.support.engine.masked_ranks import Plant, a_token_old, left_out, of_another_row, of_the_step_before
from tests.support.engine.world_faults import caught, thoughts_end_late
from tests.support.engine.worlds import World, check_ends, simulate

pytestmark = pytest.mark.pure

PLANTS: dict[str, Callable[[], Plant]] = {
    "of another row": lambda: of_another_row,
    "a token old": a_token_old,
    "of the step before": of_the_step_before,
    "left out": lambda: left_out,
}


def shows(worlds: int, kind: str = "grammar", plant: Callable[[], Plant] = lambda: lambda masks: masks) -> bool:
    """Whether a fault shows in five of so many worlds with grammars, or thoughts."""

    def run(world: World) -> None:
        check_ends(world, simulate(world, plant_masks=plant()))

    def has_kind(world: World) -> bool:
        return any(getattr(request.params, kind) for request in world.requests)

    return caught(worlds, 4, run=run, fault=AssertionError, where=has_kind)


@pytest.mark.parametrize("fault", PLANTS)
def test_a_wrong_mask_shows_in_few_worlds(fault: str) -> None:
    """Planted faults in the records of masks: five worlds that show it are found among the first thirty with grammars."""
    assert shows(30, plant=PLANTS[fault])


@pytest.mark.parametrize("fault", PLANTS)
def test_a_wrong_end_of_a_thought_shows_in_few_worlds(fault: str) -> None:
    """The same among worlds with budgets of thought."""
    assert shows(60, "thought", PLANTS[fault])


def of_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """A mask that was made for an earlier token counts as the row's."""
    patch.setattr(MaskedRow, "ready", property(lambda self: self.unmasked or self.state.masks is not None))


def of_the_last_plan(patch: pytest.MonkeyPatch) -> None:
    """The rows of the youngest planned step go out as the oldest's."""
    encoded = Masks._encoded

    def of_another_step(self: Masks, step: int, masks: Mapping[int, np.ndarray]) -> bytes:
        rows = self._planned[-1][1] if self._planned else ()
        made = [row for row in rows if not row.unmasked and row.state.masks is not None]
        return encoded(self, step, {row.state.sequence.slot: row.masks for row in made} or masks)

    patch.setattr(Masks, "_encoded", of_another_step)


@pytest.mark.parametrize("fault", [of_what_is_there, of_the_last_plan])
def test_a_fault_in_masks_shows_in_few_worlds(monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Planted faults in what makes the records."""
    fault(monkeypatch)
    monkeypatch.setattr("tests.support.engine.worlds._MAX_STEPS", 1000)
    assert shows(60)


def in_flight_counts(patch: pytest.MonkeyPatch) -> None:
    """A row in flight that should have ended a thought, or begun a grammar, counts."""
    constrain = MaskState.constrain
    patch.setattr(MaskState, "constrain", lambda self, length: constrain(self, length + (1 << 20)))


def told_twice(patch: pytest.MonkeyPatch) -> None:
    """Of what is computed again after a preemption, the last token is counted once more."""
    follow = Masks._read_tokens

    def again(self: Masks, state: MaskState) -> bool:
        state.read -= state.limit is not None and state.sequence.slot < 0 and state.read == len(state.sequence.tokens) > 1
        return follow(self, state)

    patch.setattr(Masks, "_read_tokens", again)


def free_ends(patch: pytest.MonkeyPatch) -> None:
    """A row that has to end a thought is taken for one of those before it."""
    honest = MaskedRow.unmasked.fget
    patch.setattr(MaskedRow, "unmasked", property(lambda self: honest(self) or self.state.ending))


def slow_ends(patch: pytest.MonkeyPatch) -> None:
    """The mask that ends a thought is slow where the grammar before it was."""
    late = MaskState.late.fget
    patch.setattr(MaskState, "late", property(lambda self: late(self) and chance(0.5, self.sequence.id)))


@pytest.mark.parametrize("fault", [thoughts_end_late, in_flight_counts, told_twice, free_ends, slow_ends])
def test_a_wrong_budget_shows_in_few_worlds(monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Planted faults in what counts the tokens of thoughts."""
    fault(monkeypatch)
    assert shows(40, "thought")
