"""One request's life: the one mutable request object of the engine.

             admit                  schedule                          commit
    waiting ------> running: [0 ......... low) committed [low ......... high) planned ......> committed tokens in `tokens`
       ^               |
       +---------------+  preempt: pages and slot go back, `tokens` stay, computed again at the next admission

`committed` is exact: the positions whose results are in. `planned` is an upper bound: the positions planned, if every draft is accepted; a
row that gives fewer tokens than its width lowers it at its commit. Pages are held up to `planned` and given back below `committed`'s window.
At most `limit - 1` positions are needed: the last token is sampled from position limit - 2 and never fed back.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import msgspec

from engine.core.pages import Hit, PagePool, PageRun
from engine.protocol import MediaItem, SamplingParams


class Sequence(msgspec.Struct, eq=False):
    """`id` is the front's; `precedence` is (priority, arrival), the order of the queue.

    tokens      int32, prompt and generated tokens;   prompt: tokens of the prompt
    limit       length, prompt and output, at which it ends
    overtaken   requests of later precedence that were admitted before it
    scored      with `params.prompt_logprobs`: the client has the logprobs of positions below it
    masked      its tokens need masks (core/masks.py)
    waits       for what its next row, or the token of its last known one, has to wait
    number      of its admission; 0 while it waits, or has stepped back;   slot: -1 while it waits
    target      length at its admission: positions below it are prefill
    root, keys  the key before its first page's, and the keys of its pages, as many as were needed
    media       of its prompt, in order;   spans: all of theirs, in order, where they are seen both ways: neither a chunk nor a
                cached prefix ends in one
    encoded     items whose encoders' outputs its slot has had, or does not need
    first_cached  positions found in the prefix cache at its first admission; -1 before
    cache_points  page counts at which it leaves a prefix in the cache, ascending
    hit         while it waits: the last look-up in the prefix cache
    may_draft   drafts are made behind its tokens and verified
    drafts      that ranks have made behind it with its last planned row
    drafted     those behind its last token, where masks are made for them
    rejected    tokens by which its rows have given fewer than planned
    dropped     end of the positions that rows of several tokens, and those whose results are dropped, may have written
    held        positions up to whose end it has pages in every group;   runs: those that it still holds, by group
    release_at  the `committed` from which on a page can be given back: the next page's edge
    not_finite  its values were not finite
    """

    id: int
    tokens: "array[int]"
    prompt: int
    limit: int
    params: SamplingParams
    precedence: tuple[int, int]
    root: bytes
    media: tuple[MediaItem, ...]
    scored: int = 0
    masked: bool = False
    waits: set[Literal["mask", "encoder"]] = set()
    number: int = 0
    slot: int = -1
    target: int = 0
    keys: list[bytes] = []
    encoded: int = 0
    first_cached: int = -1
    cache_points: list[int] = []
    hit: Hit | None = None
    committed: int = 0
    planned: int = 0
    drafts: int = 0
    drafted: list[int] = []
    rejected: int = 0
    dropped: int = 0
    held: int = 0
    release_at: int = 0
    not_finite: bool = False
    overtaken: int = 0
    ended: bool = False
    runs: list[PageRun] = []

    may_draft: bool = True
    stop_ids: frozenset[int] = frozenset()
    cut_ids: frozenset[int | None] = frozenset()  # behind which a row's tokens are dropped: masks may begin there
    spans: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        params = self.params
        self.may_draft = params.drafts
        self.stop_ids = frozenset(params.stop_ids)
        trigger = None if params.grammar is None else params.grammar.trigger
        thought = None if params.thought is None else params.thought.begin
        self.cut_ids = frozenset((trigger, thought))
        self.spans = [span for item in self.media for span in item.spans]

    @property
    def decodable(self) -> bool:
        """A decode row can be planned now; the last one is that of position limit - 2."""
        return self.target <= self.planned < self.limit - 1 and not self.waits

    @property
    def ready(self) -> int:
        """Known tokens that can be computed now. The last one gives a token, so it waits when that token does."""
        if not self.waits:
            return self.target - self.planned
        return 0 if "encoder" in self.waits else self.last_end(self.target - 1) - self.planned

    @property
    def before_item(self) -> bool:
        """Its next position is one of an item that is still to be encoded, or `is_near` it, and that alone it may wait for."""
        may_wait = self.ready > 0 or "encoder" in self.waits
        return may_wait and any(self.planned < item.end and self.is_near(item) for item in self.media[self.encoded :])

    def is_near(self, item: MediaItem) -> bool:
        """The text before the item is no longer than it: a step for that alone is not worth it."""
        return item.first - self.planned <= item.length

    def last_end(self, end: int) -> int:
        """The last position up to `end` that is within no span: there a chunk may end."""
        return self.uncut_ends(end)[0]

    def uncut_ends(self, end: int) -> tuple[int, int]:
        """The nearest positions before and behind `end` at which a chunk may end: itself, if it is within no span."""
        index = bisect_left(self.spans, (end,))
        span = self.spans[index - 1] if index else (0, 0)
        return span if end < span[1] else (end, end)

    @property
    def reports_prompt(self) -> bool:
        """Ranks report logprobs of its prompt: those of the positions that they compute."""
        return self.params.prompt_logprobs is not None

    @property
    def scores(self) -> bool:
        """The client still has to get logprobs of its prompt."""
        return self.reports_prompt and self.scored < self.prompt - 1

    @property
    def reusable(self) -> int:
        """Positions that may come from the prefix cache: one token at least, and all whose logprobs are wanted, are computed."""
        return self.scored if self.scores else len(self.tokens) - 1

    def admit(self, slot: int, number: int, pools: Iterable[PagePool]) -> None:
        """Take a slot under a new admission number; the allocator gives it pages (`attach`)."""
        self.slot, self.number = slot, number
        self.target = len(self.tokens)
        self.drafts = self.encoded = self.dropped = self.release_at = 0
        self.drafted = []
        self.hit = None
        self.runs = [PageRun(pool) for pool in pools]

    def step_back(self) -> None:
        """Drop the decode rows in flight. It keeps slot and pages, and is admitted again with its next row, which begins at `committed`:
        K and V of a position that is computed twice are the same."""
        assert self.committed >= self.target, self
        self.number = self.drafts = 0
        self.drafted = []
        self.dropped = max(self.dropped, self.planned)
        self.planned = self.committed

    def leave(self) -> int:
        """Give the slot back. Results of this admission no longer count."""
        slot = self.slot
        self.slot = -1
        self.number = 0
        self.committed = self.planned = 0
        self.runs = []
        self.waits.discard("encoder")
        return slot
