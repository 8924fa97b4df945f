"""A holder's quotas: requests and tokens per minute by token buckets, and open requests.

    open() ------------------ reserve(tokens) ------------- close(used)
      |-- one request, taken -----|-- the most it can use, held --|-- what it used, taken

A bucket holds one minute's amount, so in t minutes a holder begins at most (1 + t) times its
requests. A request begins while the bucket has a token more than open requests hold: a holder uses
at most (1 + t) times its tokens plus one request's.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from deploy.edge.http.http_errors import QuotaExceeded
from deploy.edge.keys.key_file import Quota

MINUTE = 60.0
_ROUNDING = 1e-6  # of a level, which is a sum of floats
_UNLIMITED = 1 << 60  # a minute: as good as no limit


class Bucket:
    """Fills evenly up to one minute's amount. Taking may leave a debt, which fills up first."""

    def __init__(self) -> None:
        self.per_minute = _UNLIMITED
        self._level = float(_UNLIMITED)
        self._at = monotonic()

    def level(self) -> float:
        now = monotonic()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level() - amount

    def wait_s(self) -> float:
        return max(0.0, 1 - self.level()) * MINUTE / self.per_minute

    def resize(self, per_minute: int) -> None:
        """A debt stays, unless there is no limit now."""
        if per_minute == _UNLIMITED:
            self._level = _UNLIMITED
        else:
            self._level = self.level()
        self.per_minute = per_minute


class Allowance:
    def __init__(self, quota: Quota) -> None:
        self._requests = Bucket()
        self._tokens = Bucket()
        self._open = 0
        self._held = 0  # tokens that open requests may yet use
        self.change(quota)

    def change(self, quota: Quota) -> None:
        self._quota = quota
        self._requests.resize(quota.requests or _UNLIMITED)
        self._tokens.resize(quota.tokens or _UNLIMITED)

    def open(self) -> "QuotaGrant":
        """QuotaExceeded says which limit, and when to retry."""
        self._check(begins=True)
        self._requests.take(1)
        self._open += 1
        return QuotaGrant(self)

    def adopt(self, tokens: int) -> "QuotaGrant":
        """Count a request that began elsewhere and holds that many tokens."""
        self._open += 1
        self._held += tokens
        return QuotaGrant(self, tokens)

    def _check(self, *, begins: bool) -> None:
        if reached := list(self._reached(begins=begins)):
            wait_s, limit = max(reached)
            raise QuotaExceeded(f"This API key has reached its limit of {limit}.", retry_after_s=max(1, math.ceil(wait_s)))

    def _reached(self, *, begins: bool) -> Iterator[tuple[float, str]]:
        """(seconds until it is not, limit) of each reached limit; 0: until a request ends."""
        if self._tokens.level() - self._held < 1 - _ROUNDING:
            yield self._tokens.wait_s(), f"{self._quota.tokens} tokens a minute"
        if begins and self._requests.level() < 1 - _ROUNDING:
            yield self._requests.wait_s(), f"{self._quota.requests} requests a minute"
        if begins and self._open >= (self._quota.concurrent or _UNLIMITED):
            yield 0.0, f"{self._quota.concurrent} requests at once"

    def _close(self, held: int, used: int) -> None:
        self._open -= 1
        self._held -= held
        self._tokens.take(used)


@dataclass
class QuotaGrant:
    allowance: Allowance
    _held: int = 0

    def reserve(self, tokens: int) -> None:
        """Hold the most that prompt and answers can use, once. QuotaExceeded holds nothing."""
        assert not self._held, "it has been reserved"
        self.allowance._check(begins=False)
        self.allowance._held += tokens
        self._held = tokens

    def close(self, used: int) -> None:
        self.allowance._close(self._held, used)

