"""Planted faults that must show in the random worlds of test_scheduler.py: one for each thing that these check."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from engine.core import prefix, requests, results
from engine.core.allocator import Allocator
from engine.core.masks import MaskedRow, Masks, MaskState, ThoughtLimit
from engine.core.pages import PagePool
from engine.core.pending import MediaUses
from engine.core.prefix import PrefixCache
from engine.core.results import Results
from engine.core.scheduler import Scheduler
from engine.core.sequence import MediaState, Sequence
from engine.geometry import KVGroup
from engine.plan import StepPlan
from engine.protocol import FinishReason, PromptLogprobs
from tests.support.engine import draws, worlds
from tests.support.engine.world_checks import check_ends
from tests.support.engine.world_runs import simulate
from tests.support.engine.worlds import World

pytestmark = pytest.mark.pure

WORLDS, SHOW = 300, 3
Patch = pytest.MonkeyPatch


def window_a_token_short(patch: Patch) -> None:
    """A page is given back too early, and a row reads another's entry."""
    honest = KVGroup.pages_for

    def hasty(self: KVGroup, start: int, end: int) -> range:
        pages = honest(self, start, end)
        return range((max(0, start - self.window + 2) // self.page) if self.window else pages.start, pages.stop)

    patch.setattr(KVGroup, "pages_for", hasty)
    patch.setattr("tests.support.engine.world_runs.check_windows", lambda scheduler: None)


def pages_held_past_their_window(patch: Patch) -> None:
    honest = Allocator.release

    def late(self: Allocator, sequence: Sequence, plan: StepPlan) -> None:
        low, sequence.committed = sequence.committed, max(0, sequence.committed - self.pools[0].group.page)
        honest(self, sequence, plan)
        sequence.committed = low

    patch.setattr(Allocator, "release", late)


def page_freed_while_shared(patch: Patch) -> None:
    """The first of two holders to go frees the page."""
    honest = PagePool.give

    def hasty(self: PagePool, pages: list[int]) -> None:
        pages = list(pages)
        honest(self, pages)
        self._free.extend(page for page in pages if self.holders[page] and page not in self._free)

    patch.setattr(PagePool, "give", hasty)


def tokens_behind_a_stop_id(patch: Patch) -> None:
    """A row of several tokens is taken whole, though one of them ends the request."""
    honest = results._cut

    def uncut(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[list[int], FinishReason | None]:
        return list(tokens), honest(sequence, tokens)[1]

    patch.setattr(results, "_cut", uncut)


def rejected_drafts_stay_planned(patch: Patch) -> None:
    honest = Results._fold
    patch.setattr(Results, "_fold", lambda self, sequence, width, row: honest(self, sequence, len(row.tokens), row))


def mask_lost_with_its_row(patch: Patch) -> None:
    """A sequence that is preempted while a masked row is in flight waits for a mask that has come already."""
    honest = MaskState.update_wait

    def forgetful(self: MaskState) -> None:
        if self.sequence.slot >= 0 or not self.sequence.waits:
            honest(self)

    patch.setattr(MaskState, "update_wait", forgetful)


def masks_left_out(patch: Patch) -> None:
    encoded = Masks._encoded
    patch.setattr(Masks, "_encoded", lambda self, step, masks: encoded(self, step, {}))


def masks_shifted(patch: Patch) -> None:
    """A row's first token has the mask of its last."""
    honest = MaskedRow.masks.fget
    patch.setattr(MaskedRow, "masks", property(lambda self: np.roll(honest(self), 1, axis=0)))


def thoughts_end_late(patch: Patch) -> None:
    ends_at = ThoughtLimit.ends_at.fget
    patch.setattr(ThoughtLimit, "ends_at", property(lambda self: None if (end := ends_at(self)) is None else end + 1))


def items_computed_before_they_are_encoded(patch: Patch) -> None:
    encode = Scheduler._encode
    patch.setattr(Scheduler, "_encode", lambda self, sequence, size, draft: (encode(self, sequence, size, draft), size)[1])


def media_freed_before_they_are_read(patch: Patch) -> None:
    honest = MediaUses.next_free
    patch.setattr(MediaUses, "next_free", lambda self, read: honest(self, self._transfers.begun))


def media_left_with_requests_that_end(patch: Patch) -> None:
    """The memory of a request that ends while it waits is kept for ever."""
    honest = requests.Requests._drop_media

    def forgetful(self: requests.Requests, media: MediaState) -> None:
        if not media.items or media.encoded:
            honest(self, media)

    patch.setattr(requests.Requests, "_drop_media", forgetful)


FAULTS: dict[str, Callable[[Patch], None]] = {
    fault.__name__: fault
    for fault in (
        window_a_token_short, pages_held_past_their_window, page_freed_while_shared, tokens_behind_a_stop_id,
        rejected_drafts_stay_planned, mask_lost_with_its_row, masks_left_out, masks_shifted, thoughts_end_late,
        items_computed_before_they_are_encoded, media_freed_before_they_are_read, media_left_with_requests_that_end,
    )
} | {
    "pages with NaN handed on": lambda patch: patch.setattr(PagePool, "take_not_finite", lambda self, pages: []),
    "a lookup kept too long": lambda patch: patch.setattr(
        PrefixCache, "version", property(lambda self: 0, lambda self, version: None), raising=False
    ),
    "nobody preempted for the first": lambda patch: patch.setattr(
        Scheduler, "_preempt_for", lambda self, sequence, count: self.allocator.fitting(sequence, count) >= count
    ),
    "decode rows beside the budget": lambda patch: patch.setattr(Sequence, "decodable", False),
    "prompt's logprobs told again": lambda patch: patch.setattr(PromptLogprobs, "after", lambda self, position: self),
    "rows behind a cut go on": lambda patch: patch.setattr(Sequence, "step_back", lambda self: None),
    "rows run before their masks": lambda patch: patch.setattr(MaskState, "update_wait", lambda self: self.sequence.waits.clear()),
    "spans cut by chunks": lambda patch: patch.setattr(MediaState, "last_end", lambda self, end: end),
    "another adapter's pages": lambda patch: patch.setattr(requests, "root_key", lambda salt, adapter: prefix.root_key(salt)),
    "another picture's pages": lambda patch: patch.setattr(prefix, "_media_by_page", lambda media, page: {}),
}  # fmt: skip


# Features that a world must have to show a fault: others are not run.
NEEDED = {
    "mask_lost_with_its_row": {"grammars"},
    "masks_left_out": {"grammars"},
    "masks_shifted": {"grammars"},
    "rows run before their masks": {"grammars"},
    "pages with NaN handed on": {"NaN"},
    "another adapter's pages": {"adapters", "prefix cache"},
    "another picture's pages": {"media", "prefix cache"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_in_random_worlds(monkeypatch: Patch, fault: str) -> None:
    """Three of the first few hundred worlds end otherwise, or not at all."""
    FAULTS[fault](monkeypatch)
    monkeypatch.setattr("tests.support.engine.world_runs._MAX_STEPS", 1000)
    shown = 0
    needed = NEEDED.get(fault, set())
    for world in map(World, (seed for seed in range(WORLDS) if needed <= worlds.features_of(seed))):
        try:
            check_ends(world, simulate(world))
        except (AssertionError, StopIteration, ValueError):
            shown += 1
        if shown == SHOW:
            return
    pytest.fail(f"{shown} of {WORLDS} worlds show it")


def pairs_that_do_not_meet(seeds: range) -> list[tuple[str, str]]:
    """Pairs of features that far fewer or far more of these worlds have than of independent draws."""
    features = [worlds.features_of(seed) for seed in seeds]
    odd = []
    for one, other in combinations(worlds.FEATURES, 2):
        expected = len(seeds) * worlds.FEATURES[one] * worlds.FEATURES[other]
        met = sum(one in found and other in found for found in features)
        if abs(met - expected) > 5 * expected**0.5:
            odd.append((one, other))
    return odd


def test_any_two_features_of_worlds_meet(monkeypatch: Patch) -> None:
    """As often as independent draws do. Planted: one draw for all features."""
    assert pairs_that_do_not_meet(range(4000)) == []
    monkeypatch.setattr(worlds, "crc32", lambda name: 0)
    assert len(pairs_that_do_not_meet(range(4000))) > 50


def test_features_meet_in_requests() -> None:
    """A request with its own adapter, with media and with a budget of thought, in a KV cache of fp8 with drafts."""
    wanted = {"fp8 KV", "adapters", "media", "thoughts", "drafts"}
    found = [World(seed) for seed in range(2000) if wanted <= worlds.features_of(seed)]
    asked = [request for world in found for request in world.requests]
    assert any(request.adapter >= 0 and request.media and request.params.thought for request in asked)
    assert all(world.groups[0].dtype == "float8_e4m3fn" and world.config.drafts for world in found)


def test_chances_are_independent() -> None:
    """Two draws of a seed. Planted: one round of mixing, with which these two are never both true."""

    def met(mixed: Callable[..., int]) -> float:
        return sum(mixed(seed, 9) < 0.4 * 2**32 and mixed(seed, 7) < 0.3 * 2**32 for seed in range(20_000)) / 20_000

    def once(*values: int) -> int:
        mix = 0x9E3779B97F4A7C15
        for value in values:
            mix = (mix ^ value) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
            mix ^= mix >> 29
        return mix >> 32

    assert abs(met(draws.mixed) - 0.12) < 0.01
    assert met(once) == 0
