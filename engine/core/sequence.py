"""The life of a request, in the only mutable request object of the engine.

             admit                  schedule                            commit
    waiting ------> running: [0 ... committed) [committed ... planned) ------> committed tokens in `tokens`
       ^               |
       +---------------+  preempt: pages and slot are freed, `tokens` stay and are computed again

`planned` assumes that every draft is accepted; a commit lowers it otherwise. The last token is
sampled from position limit - 2, the last that is computed.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import msgspec

from engine.adapters import NO_ADAPTER
from engine.core.pages import Hit, PagePool, PageRun
from engine.protocol import MediaItem, PlacedItem, SamplingParams


class PageState(msgspec.Struct, eq=False):
    root: bytes
    keys: list[bytes] = []  # of the first pages needed so far
    hit: Hit | None = None  # the last look-up in the prefix cache, while the sequence waits
    first_cached: int = -1  # positions found in the prefix cache at the first admission; -1 before
    cache_points: list[int] = []  # page counts at which the sequence leaves a prefix in the cache, ascending
    runs: list[PageRun] = []  # the pages that it still holds, by KV group
    held: int = 0  # it has pages for the positions below, in every group
    release_at: int = 0  # the `committed` from which on a page can be given back
    dropped: int = 0  # end of the positions that rows of several tokens, or rows with a dropped result, may have written
    not_finite: bool = False  # what the sequence computed was not finite

    def admit(self, pools: Iterable[PagePool]) -> None:
        self.hit = None
        self.runs = [PageRun(pool) for pool in pools]
        self.dropped = 0
        self.release_at = 0


class DraftState(msgspec.Struct, eq=False):
    allowed: bool
    planned: int = 0  # drafts that ranks make after its last planned row
    tokens: list[int] = []  # the drafts after its last token, if masks are made for them
    rejected: int = 0  # tokens by which its rows have given fewer than planned

    def drop(self) -> None:
        self.planned = 0
        self.tokens = []


class MediaState(msgspec.Struct, eq=False):
    """A prompt's media items. `spans`: positions with bidirectional attention; no chunk or cached
    prefix ends inside one."""

    items: tuple[PlacedItem, ...]
    spans: list[tuple[int, int]]
    encoded: int = 0  # items whose encodes the slot has had planned, or does not need
    kept_bytes: int = 0  # of data, once all positions were computed in some admission
    dropped: bool = False  # the data may be gone

    def admit(self) -> None:
        self.encoded = 0
        self.kept_bytes = 0

    def note_computed(self, committed: int) -> None:
        if self.items and not self.dropped and self.items[-1].end <= committed:
            self.kept_bytes = sum(item.size for item in self.items)

    def lacks_data(self, first: int) -> bool:
        """Whether an item without data has positions from `first` on."""
        return self.dropped and self.items[-1].end > first

    def last_end(self, end: int) -> int:
        """The last position up to `end` at which a chunk may end."""
        return self.uncut_ends(end)[0]

    def uncut_ends(self, end: int) -> tuple[int, int]:
        """The nearest positions before and after `end` at which a chunk may end."""
        index = bisect_left(self.spans, (end,))
        span = self.spans[index - 1] if index else (0, 0)
        if end < span[1]:
            return span
        return (end, end)


class Sequence(msgspec.Struct, eq=False):
    id: int
    tokens: "array[int]"  # int32: the prompt, then the generated tokens
    prompt: int  # tokens of the prompt
    limit: int  # the length, prompt and output, at which the sequence ends
    params: SamplingParams
    precedence: tuple[int, int]  # (priority, arrival): the order of the queue
    pages: PageState
    drafts: DraftState
    media: MediaState
    adapter: int = NO_ADAPTER  # its id
    client: str = ""  # whose request it is: clients take turns where grammars are compiled
    committed: int = 0
    planned: int = 0
    number: int = 0  # of its admission; 0 while it waits, and after it has stepped back
    slot: int = -1  # -1 while it waits
    target: int = 0  # length at its admission: positions below are prefill
    waits: set[Literal["mask", "transfer"]] = set()  # what its next row has to wait for
    masked: bool = False  # its tokens need masks (core/masks.py)
    scored: int = 0  # with `prompt_logprobs`: the client has the logprobs of the positions below
    overtaken: int = 0  # requests of later precedence that were admitted before it
    ended: bool = False
    stop_ids: frozenset[int] = frozenset()
    cut_ids: frozenset[int | None] = frozenset()  # a row's tokens after one of these are dropped, since masks may begin there

    def __post_init__(self) -> None:
        params = self.params
        self.stop_ids = frozenset(params.stop_ids)
        trigger = None if params.grammar is None else params.grammar.trigger
        thought = None if params.thought is None else params.thought.begin
        self.cut_ids = frozenset((trigger, thought))

    @property
    def decodable(self) -> bool:
        """A decode row can be planned now; the last is at position limit - 2."""
        return self.target <= self.planned < self.limit - 1 and not self.waits

    @property
    def ready(self) -> int:
        """Known tokens that can be computed now, without the last if its result needs a mask."""
        if not self.waits:
            return self.target - self.planned
        if "transfer" in self.waits:
            return 0
        return self.media.last_end(self.target - 1) - self.planned

    @property
    def before_item(self) -> bool:
        """Its next position is in or near an unencoded item, and nothing else delays it."""
        may_wait = self.ready > 0 or "transfer" in self.waits
        items = self.media.items[self.media.encoded :]
        return may_wait and any(self.planned < item.end and self.is_near(item) for item in items)

    def is_near(self, item: MediaItem) -> bool:
        """Text no longer than the item is not worth a step of its own."""
        return item.first - self.planned <= item.length

    @property
    def reports_prompt(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def scores(self) -> bool:
        """The client still needs logprobs of its prompt."""
        return self.reports_prompt and self.scored < self.prompt - 1

    @property
    def reusable(self) -> int:
        """At least one token, and all with wanted logprobs, are computed."""
        if self.scores:
            return self.scored
        return len(self.tokens) - 1

    def set_masks(self, *, masked: bool, waits: bool, may_draft: bool, first: int | None = None) -> None:
        """If a row in flight gives token `first`, which needs a mask, all rows in flight are
        dropped."""
        self.masked = masked
        self.drafts.allowed = may_draft and self.params.drafts
        if waits:
            self.waits.add("mask")
        else:
            self.waits.discard("mask")
        if first is not None and self.planned >= first:
            self.step_back()

    def admit(self, slot: int, number: int, pools: Iterable[PagePool]) -> None:
        self.slot = slot
        self.number = number
        self.target = len(self.tokens)
        self.media.admit()
        self.drafts.drop()
        self.pages.admit(pools)

    def step_back(self) -> None:
        """Drop the decode rows in flight but keep slot and pages. It is readmitted at `committed`;
        recomputed K and V are the same."""
        assert self.committed >= self.target, self
        self.number = 0
        self.drafts.drop()
        self.pages.dropped = max(self.pages.dropped, self.planned)
        self.planned = self.committed

    def leave(self) -> int:
        """Give the slot back. Results of this admission no longer count."""
        slot = self.slot
        self.slot = -1
        self.number = 0
        self.committed = 0
        self.planned = 0
        self.pages.runs = []
        return slot
