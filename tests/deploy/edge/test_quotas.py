"""Quotas of API keys against a clock that the test moves: nobody gets more than its limits, and what was not used comes back."""

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import pytest

from deploy.edge.http.http_errors import QuotaExceeded
from deploy.edge.keys import quotas
from deploy.edge.keys.key_file import Quota
from deploy.edge.keys.quotas import Allowance, Bucket, QuotaGrant

pytestmark = pytest.mark.pure

SEED = random.SystemRandom().randrange(1 << 30)
NOW = [0.0]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    NOW[0] = 0.0
    monkeypatch.setattr(quotas, "monotonic", lambda: NOW[0])


class Holder:
    """One holder that asks at random, and what its limits allow by a second reckoning, in fractions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        NOW[0] = 0.0
        self.quota = Quota(self.rng.randint(1, 20), self.rng.randint(1, 500), self.rng.randint(1, 6))
        self.allowance = Allowance(self.quota)
        self.open: list[tuple[QuotaGrant, int]] = []
        self.begun: list[float] = []
        self.used, self.largest = 0, 0
        self.wrong: list[str] = []

    def step(self) -> None:
        """Time passes, a request begins, or one ends."""
        what = self.rng.choice(["wait", "begin", "begin", "end"])
        if what == "wait":
            NOW[0] += self.rng.choice([0.01, 1.0, 7.0, 40.0])
        elif what == "begin":
            self._begin(self.rng.randint(1, 300))
        elif self.open:
            grant, most = self.open.pop(self.rng.randrange(len(self.open)))
            self._end(grant, self.rng.choice([0, self.rng.randint(0, most), most]))
        self._check()

    def _begin(self, most: int) -> None:
        try:
            grant = self.allowance.open()
        except QuotaExceeded:
            return
        self.begun.append(NOW[0])
        try:
            grant.reserve(most)
        except QuotaExceeded:
            self._end(grant, 0)
            return
        self.open.append((grant, most))
        self.largest = max(self.largest, most)

    def _end(self, grant: QuotaGrant, used: int) -> None:
        grant.close(used)
        self.used += used

    def _check(self) -> None:
        assert self.quota.tokens is not None
        if len(self.open) > (self.quota.concurrent or 0):
            self.wrong.append(f"{len(self.open)} at once")
        if self.used > self.quota.tokens * (1 + Fraction(NOW[0]) / 60) + self.largest:
            self.wrong.append(f"{self.used} tokens in {NOW[0]} s")

    def finish(self) -> list[str]:
        """What did not hold, of any stretch of time, and that after a long rest a request of any size begins at once."""
        assert self.quota.requests is not None
        for (first, since), (last, until) in combinations(enumerate(self.begun), 2):
            if last - first + 1 > self.quota.requests * (1 + Fraction(until - since) / 60) * Fraction(1 + 10**-9):
                self.wrong.append(f"{last - first + 1} requests in {until - since} s")
        for grant, _ in self.open:
            self._end(grant, 0)
        NOW[0] += 60 * (1 + self.largest)
        try:
            self.allowance.open().reserve(10**6)
        except QuotaExceeded as error:
            self.wrong.append(f"after a long rest: {error}")
        return self.wrong


def violations(rounds: int) -> list[str]:
    """Of so many holders."""
    found = []
    for number in range(rounds):
        holder = Holder(SEED + number)
        for _ in range(80):
            holder.step()
        found += [f"seed {SEED + number}: {what}" for what in holder.finish()]
    return found


def test_no_holder_gets_more_than_its_limits() -> None:
    """In any t minutes (1 + t) times its requests; (1 + t) times its tokens and one request more; no more at once than allowed."""
    assert violations(60) == []


def _never_full(allowance: Allowance, held: int, used: int) -> None:
    allowance._open -= 1


def _nothing_used(allowance: Allowance, held: int, used: int) -> None:
    allowance._open -= 1
    allowance._held -= held


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "what was held never comes back": lambda patch: patch.setattr(Allowance, "_close", _never_full),
    "what was used is not taken": lambda patch: patch.setattr(Allowance, "_close", _nothing_used),
    "it fills twice as fast": lambda patch: patch.setattr(quotas, "MINUTE", 30.0),
    "nothing is taken": lambda patch: patch.setattr(Bucket, "take", lambda *_: None),
    "it holds more than a minute": lambda patch: patch.setattr(quotas, "min", lambda low, high: high, raising=False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_quota_that_does_not_hold_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Planted: each way to get more than the limits, or less for ever, shows."""
    FAULTS[fault](monkeypatch)
    assert violations(60)


def test_tokens_are_settled_as_used() -> None:
    """What a request may come to is held while it is open, and then what it did come to is taken: the rest is there at once."""
    allowance = Allowance(Quota(tokens=100))
    first, second = allowance.open(), allowance.open()
    first.reserve(5000)
    with pytest.raises(QuotaExceeded) as caught:
        second.reserve(1)
    assert caught.value.retry_after_s == 1, "an open request may end any moment"
    first.close(40)
    second.reserve(1)
    second.close(59)
    allowance.open().close(11)  # one token was left: it may begin, and leaves a debt of 10
    with pytest.raises(QuotaExceeded) as caught:
        allowance.open()
    assert caught.value.retry_after_s == 7, "11 tokens at 100 a minute"
    NOW[0] += 7
    allowance.open()


@pytest.mark.parametrize("seed", range(3))
def test_whoever_comes_back_when_told_is_let_in(seed: int) -> None:
    """Retry-After is kept where nothing of the holder is open, and it is not longer than a second too long."""
    rng = random.Random(SEED + seed)
    allowance = Allowance(Quota(requests=rng.randint(1, 50), tokens=rng.randint(1, 1000)))
    refused = 0
    for _ in range(200):
        try:
            allowance.open().close(rng.randint(0, 200))
        except QuotaExceeded as error:
            refused += 1
            NOW[0] += error.retry_after_s - 1.001
            with pytest.raises(QuotaExceeded):
                allowance.open()
            NOW[0] += 1.001
            allowance.open().close(0)
    assert refused > 5


def test_other_limits_hold_at_once_and_forget_nothing() -> None:
    """A file that is read again with other limits: what has been used stays used, what is open stays counted."""
    allowance = Allowance(Quota(requests=2))
    held = [allowance.open(), allowance.open()]
    allowance.change(Quota(requests=60, concurrent=2))
    with pytest.raises(QuotaExceeded, match="60 requests a minute"):
        allowance.open()
    NOW[0] += 1
    with pytest.raises(QuotaExceeded, match="2 requests at once"):
        allowance.open()
    held.pop().close(0)
    allowance.open().close(0)
    allowance.change(Quota())
    for _ in range(100):
        allowance.open().close(10**9)
