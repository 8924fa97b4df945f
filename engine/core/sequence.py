"""One request's life: the one mutable request object of the engine.

             admit                  schedule                          commit
    waiting ------> running: [0 ......... low) committed [low ......... high) planned ......> committed tokens in `tokens`
       ^               |
       +---------------+  preempt: pages and slot go back, `tokens` stay, computed again at the next admission

`low` is exact: so many positions are computed and their results are in. `high` is an upper bound: what is planned, if every draft
is accepted; a row that gives fewer tokens lowers it at its commit. Pages are held up to `high` and given back below `low`'s window.
At most `limit - 1` positions are ever needed: the last token is sampled from position limit - 2 and is never fed back.
"""

import enum
from array import array
from dataclasses import dataclass, field

from engine.core.pages import PageRun
from engine.core.prefix import Hit
from engine.protocol import SamplingParams

Key = tuple[int, int]


class Wait(enum.Enum):
    """What of the host a sequence's next token waits for."""

    mask = "mask"


@dataclass(eq=False, slots=True)
class Sequence:
    """`key` is (client, the client's id); `precedence` is (priority, arrival), the order of the queue.

    limit       length, prompt and output, at which it ends
    overtaken   how many of later precedence were admitted before it
    tokens      int32, prompt and what was generated
    scored      with `params.prompt_logprobs`: positions below it have given theirs to the client
    masked      each of its tokens needs a mask that the host computes from those before it
    mask_for    length for whose next token the host has given a mask last
    late_masks  its rows are planned before their masks are made, which come while the forward runs
    target      length at its admission: positions below it are prefill
    root, keys  what its first page's key follows, and the keys of its pages as far as they were needed
    cached      positions that it found in the prefix cache at its admission; `first_cached`: at its first admission;
                `cached_when_queued`: those that were there when it was queued
    marks       pages at whose ends it is to leave a prefix in the cache, ascending
    hit         while it waits: what of it was cached when that was looked up last
    held        positions that it holds pages for, in every group
    release_at  value of `low` from which on a page can be given back
    """

    key: Key
    tokens: "array[int]"
    prompt: int
    limit: int
    params: SamplingParams
    precedence: tuple[int, int]
    scored: int = 0
    masked: bool = False
    mask_for: int = 0
    late_masks: bool = False
    number: int = 0
    slot: int = -1
    target: int = 0
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0
    first_cached: int = 0
    cached_when_queued: int = 0
    marks: list[int] = field(default_factory=list)
    hit: Hit | None = None
    low: int = 0
    high: int = 0
    held: int = 0
    release_at: int = 0
    waits_for: Wait | None = None
    started: bool = False
    overtaken: int = 0
    ended: bool = False
    runs: list[PageRun] = field(default_factory=list)

    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.params.stop_ids)
        if self.masked:
            self.waits_for = Wait.mask

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def decodable(self) -> bool:
        """A decode row can be planned now. The last is that of position limit - 2: once it may be planned, nothing more is."""
        return self.target <= self.high < self.limit - 1 and self.waits_for is None

    @property
    def ready(self) -> int:
        """Known tokens that can be computed now; the last one gives a token, so it waits for what the token waits for."""
        known = self.target - self.high
        return known - 1 if self.waits_for else known

    @property
    def scores(self) -> bool:
        """Logprobs of its prompt are still to be told."""
        return self.params.prompt_logprobs is not None and self.scored < self.prompt - 1

    @property
    def reusable(self) -> int:
        """Positions that may come out of the prefix cache: one token at least is computed, and whatever still gives logprobs."""
        return min(self.scored, len(self.tokens) - 1) if self.scores else len(self.tokens) - 1

    @property
    def uncached(self) -> int:
        """Of one that waits: known tokens that it will probably have to compute."""
        return len(self.tokens) - self.cached_when_queued

    def admit(self, slot: int, number: int, groups: int) -> None:
        """Take a slot under a new admission number; everything is to be computed."""
        self.slot, self.number = slot, number
        self.target = len(self.tokens)
        self.low = self.high = self.cached = self.held = self.release_at = 0
        self.marks, self.hit = [], None
        self.runs = [PageRun() for _ in range(groups)]

    def leave(self) -> int:
        """Give the slot back; results of this admission no longer count, and a mask that one of its rows had used is free again."""
        slot, self.slot, self.number = self.slot, -1, 0
        self.low = self.high = 0
        self.runs = []
        if self.masked:
            self.waits_for = None if self.late_masks or self.mask_for == len(self.tokens) else Wait.mask
        return slot
