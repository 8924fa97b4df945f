"""One request's life: the one mutable request object of the engine.

             admit                  schedule                    commit
    waiting ------> running: [0 ............ scheduled) planned ......> committed tokens in `tokens`
       ^               |
       +---------------+  preempt: pages and slot go back, `tokens` stay, computed again at the next admission

`scheduled` and `committed` are separate counters: a step that is planned has not happened yet. At most `len(tokens) + 1` positions
are ever scheduled: the one beyond is a decode row whose input token the device will know before the core does.
"""

from dataclasses import dataclass, field

from engine.core.pages import PageRun
from engine.protocol import SamplingParams

Key = tuple[int, int]


@dataclass(eq=False)
class Sequence:
    """`key` is (client, the client's id); `arrival` orders the queue; `limit` is the length (prompt and output) it ends at.

    Positions before `quiet` need no page to be taken or given back.
    """

    key: Key
    tokens: list[int]
    prompt: int
    limit: int
    params: SamplingParams
    arrival: int
    number: int = 0
    slot: int = -1
    target: int = 0
    scheduled: int = 0
    committed: int = 0
    quiet: int = 0
    ended: bool = False
    runs: list[PageRun] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def prefilling(self) -> bool:
        """Known tokens of this admission still wait to be computed."""
        return self.scheduled < self.target

    @property
    def exhausted(self) -> bool:
        """Every token it may produce is planned: the last one comes from position limit - 2."""
        return self.scheduled >= self.limit - 1

    def admit(self, slot: int, number: int, groups: int) -> None:
        """Take a slot under a new admission number; everything is to be computed."""
        self.slot, self.number = slot, number
        self.target = len(self.tokens)
        self.scheduled = self.committed = self.quiet = 0
        self.runs = [PageRun() for _ in range(groups)]

    def leave(self) -> int:
        """Give the slot back; results of this admission no longer count."""
        slot, self.slot, self.number = self.slot, -1, 0
        self.runs = []
        return slot
