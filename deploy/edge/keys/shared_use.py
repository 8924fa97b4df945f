"""Use of clients, counted by one actor for a cluster's replicas.

    replica --open, reserve, close--> SharedUse     a request of a holder that has a quota; the answer is a refusal or None
            --beat each second------> SharedUse     open requests, choices begun by client; the answer: Beat

A quota counts for all replicas and models, fair shares for one application. A new SharedUse learns
from beats what is open; its buckets begin full, so a holder may use one more minute's amount.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.edge.http.http_errors import QuotaExceeded
from deploy.edge.keys.key_file import MAX_KEYS, Quota
from deploy.edge.keys.quotas import Allowance, QuotaGrant

SILENT_S = 10.0  # a replica that is silent for so long holds nothing any more
LOST_S = 5.0  # a request that the replica does not list so long after its begin has ended: its `close` was lost
MOST_CLIENTS = 1000  # of which a replica hears in a beat


class Refusal(NamedTuple):
    sentence: str
    retry_after_s: int


class OpenRequest(NamedTuple):
    holder: str
    quota: Quota
    tokens: int


class Beat(NamedTuple):
    """`elsewhere`: choices that other replicas began since the last beat, by client."""

    replicas: int
    elsewhere: dict[str, int]


@dataclass
class _Grant:
    grant: QuotaGrant
    since: float


@dataclass
class _Replica:
    seen: float
    application: str | None = None  # None: it has not beaten yet
    grants: dict[int, _Grant] = field(default_factory=dict)
    elsewhere: Counter[str] = field(default_factory=Counter)


class SharedUse:
    """Replicas number their requests. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self._replicas: dict[str, _Replica] = {}
        self.applications: set[str] = set()

    @property
    def replicas(self) -> int:
        self._forget_silent()
        return len(self._replicas)

    def open(self, replica: str, number: int, holder: str, quota: Quota) -> Refusal | None:
        try:
            grant = self._allowance(holder, quota).open()
        except QuotaExceeded as error:
            return Refusal(str(error), error.retry_after_s)
        self._replica(replica).grants[number] = _Grant(grant, self._clock())
        return None

    def reserve(self, replica: str, number: int, tokens: int) -> Refusal | None:
        held = self._replica(replica).grants.get(number)
        try:
            if held is not None:
                held.grant.reserve(tokens)
        except QuotaExceeded as error:
            return Refusal(str(error), error.retry_after_s)
        return None

    def close(self, replica: str, number: int, used: int) -> None:
        """Idempotent."""
        held = self._replica(replica).grants.pop(number, None)
        if held is not None:
            held.grant.close(used)

    def beat(self, replica: str, application: str, requests: Mapping[int, OpenRequest], begun: Mapping[str, int]) -> Beat:
        now = self._clock()
        heard = self._replica(replica)
        if heard.application is None:
            self._adopt(heard, requests)
        heard.application = application
        self.applications.add(application)
        for number in [number for number, held in heard.grants.items() if number not in requests and now - held.since > LOST_S]:
            self.close(replica, number, 0)
        for other in self._replicas.values():
            if other is not heard and other.application == application:
                other.elsewhere.update(begun)
        self._forget_silent()
        elsewhere = dict(heard.elsewhere.most_common(MOST_CLIENTS))
        heard.elsewhere.clear()
        return Beat(len(self._replicas), elsewhere)

    def _adopt(self, heard: _Replica, requests: Mapping[int, OpenRequest]) -> None:
        """What the replica had open when this began."""
        for number, request in requests.items():
            if number not in heard.grants:
                grant = self._allowance(request.holder, request.quota).adopt(request.tokens)
                heard.grants[number] = _Grant(grant, self._clock())

    def _replica(self, name: str) -> _Replica:
        replica = self._replicas.setdefault(name, _Replica(self._clock()))
        replica.seen = self._clock()
        return replica

    def _allowance(self, holder: str, quota: Quota) -> Allowance:
        allowance = self._allowances.pop(holder, None) or Allowance(quota)
        self._allowances[holder] = allowance  # the last one now
        allowance.change(quota)
        if len(self._allowances) > 2 * MAX_KEYS:  # holders that no file names any more
            del self._allowances[next(iter(self._allowances))]
        return allowance

    def _forget_silent(self) -> None:
        now = self._clock()
        for name in [name for name, replica in self._replicas.items() if now - replica.seen > SILENT_S]:
            for held in self._replicas.pop(name).grants.values():
                held.grant.close(0)
