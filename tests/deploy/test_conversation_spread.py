"""The rule of haproxy_routing.py, simulated: conversations on eight replicas, compared with fewest connections alone."""

import heapq
import random

import pytest

pytestmark = [pytest.mark.pure, pytest.mark.slow]

CONVERSATIONS = 10_000
REPLICAS = 8
AT_ONCE = 400
FIRST = 2000  # tokens of the first prompt
TURN = 500  # tokens that each turn adds
REQUEST_S = 8.0
THINK_S = 20.0


class Routed:
    """Every conversation's turns, each on a replica; `computed`: prompt tokens that no replica had cached. Caches are unbounded."""

    def __init__(self, *, stay: bool, lead: int = 32) -> None:
        self.computed = [0] * REPLICAS
        self.open = [0] * REPLICAS
        self.prompt = 0
        self.moved = 0
        self.turns = 0
        self._rng = random.Random(7)
        self._cached: list[dict[int, int]] = [{} for _ in range(REPLICAS)]
        self._turn = 0
        homes: dict[int, int] = {}
        lengths = [self._rng.randint(2, 14) for _ in range(CONVERSATIONS)]
        self.least = sum(FIRST + (turns - 1) * TURN for turns in lengths)  # prompt tokens that one cache of all would compute
        done = [0] * CONVERSATIONS
        waiting = iter(range(AT_ONCE, CONVERSATIONS))
        agenda = [(self._rng.expovariate(1 / THINK_S), number, -1) for number in range(AT_ONCE)]
        heapq.heapify(agenda)
        while agenda:
            now, number, replica = heapq.heappop(agenda)
            if replica >= 0:
                self.open[replica] -= 1
                follower = number if done[number] < lengths[number] else next(waiting, None)
                if follower is not None:
                    heapq.heappush(agenda, (now + self._rng.expovariate(1 / THINK_S), follower, -1))
                continue
            chosen = self._choose(homes.get(number), lead) if stay else self._least()
            homes[number] = chosen
            self._compute(number, done[number], chosen)
            done[number] += 1
            self.open[chosen] += 1
            heapq.heappush(agenda, (now + self._rng.expovariate(1 / REQUEST_S), number, chosen))

    def _choose(self, home: int | None, lead: int) -> int:
        mean = sum(self.open) // REPLICAS
        if home is not None and self.open[home] - mean <= lead:
            return home
        self.moved += home is not None
        self._turn = (self._turn + 1) % REPLICAS
        return self._turn if self.open[self._turn] - mean <= max(1, lead // 4) else self._least()

    def _least(self) -> int:
        return min(range(REPLICAS), key=lambda one: (self.open[one], self._rng.random()))

    def _compute(self, number: int, turn: int, replica: int) -> None:
        length = FIRST + turn * TURN
        self.turns += 1
        self.prompt += length
        self.computed[replica] += length - self._cached[replica].get(number, 0)
        self._cached[replica][number] = length

    @property
    def hits(self) -> float:
        return 1 - sum(self.computed) / self.prompt

    @property
    def busiest(self) -> float:
        return max(self.computed) * REPLICAS / sum(self.computed)


def test_ten_thousand_conversations_stay_and_are_spread() -> None:
    """Hits are at least 0.95 of what one cache of all would have, and no replica computes above 1.2 of the mean. Planted: fewest
    connections alone, and a lead of one request."""
    stays = Routed(stay=True)
    wanders = Routed(stay=False)
    tight = Routed(stay=True, lead=1)
    for name, one in (("stays", stays), ("wanders", wanders), ("lead 1", tight)):
        print(f"{name}: hits {one.hits:.3f}, busiest {one.busiest:.2f}, moved {one.moved} of {one.turns}")
    best = 1 - stays.least / stays.prompt
    assert stays.hits >= 0.95 * best
    assert stays.busiest <= 1.2
    assert wanders.hits < 0.8 * best
    assert tight.moved > 100 * max(1, stays.moved)
