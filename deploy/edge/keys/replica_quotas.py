"""Quotas as a replica asks for them: of a centre that counts for all replicas (shared_use.py), or
here. While the centre does not answer, each of n replicas allows an n-th of every quota."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deploy.edge.http.http_errors import QuotaExceeded
from deploy.edge.keys.key_file import Quota
from deploy.edge.keys.quotas import Allowance, QuotaGrant
from deploy.edge.keys.shared_use import Beat, OpenRequest, Refusal

_NO_LIMIT = Quota()


class CentreLost(Exception):
    """It has not answered in time."""


class Centre(Protocol):
    """SharedUse; adds this replica's name to each call."""

    async def ask(self, method: str, *args: object) -> Any:
        """CentreLost."""

    def tell(self, method: str, *args: object) -> None:
        """Does not wait; a call may be lost."""


@dataclass
class RequestGrant:
    """`number`: at the centre; `here`: counted by this replica."""

    quotas: "ReplicaQuotas"
    number: int
    open: OpenRequest
    here: QuotaGrant | None = None

    async def reserve(self, tokens: int) -> None:
        """As `QuotaGrant.reserve`."""
        if self.here is not None:
            self.here.reserve(tokens)
        else:
            await self.quotas.reserve(self, tokens)

    def close(self, used: int) -> None:
        if self.here is not None:
            self.here.close(used)
        else:
            self.quotas.close(self, used)


class ReplicaQuotas:
    def __init__(self, centre: Centre | None = None) -> None:
        self._centre = centre
        self.joined = asyncio.Event()  # the centre knows this replica, and has said how many there are
        self._answers = False  # the centre, in its last call
        self._replicas = 1
        self._quotas: dict[str, Quota] = {}
        self._here: dict[str, Allowance] = {}
        self._open: dict[int, RequestGrant] = {}  # those that the centre counts
        self._numbers = itertools.count()

    def change(self, quotas: Mapping[str, Quota]) -> None:
        """Holders that remain keep their usage."""
        self._quotas = dict(quotas)
        self._here = {holder: self._here.get(holder) or Allowance(quota) for holder, quota in quotas.items()}
        self._cut()

    def _cut(self) -> None:
        for holder, quota in self._quotas.items():
            self._here[holder].change(_part(quota, self._replicas))

    async def open(self, holder: str) -> RequestGrant:
        """Begin a request. QuotaExceeded."""
        quota = self._quotas[holder]
        request = OpenRequest(holder, quota, 0)
        if self._centre is not None and self._answers and quota != _NO_LIMIT:
            grant = RequestGrant(self, next(self._numbers), request)
            try:
                refusal = await self._ask("open", grant.number, holder, quota)
            except CentreLost:
                self._centre.tell("close", grant.number, 0)  # it may have heard
            except BaseException:  # the client has gone
                self._centre.tell("close", grant.number, 0)
                raise
            else:
                _raise(refusal)
                self._open[grant.number] = grant
                return grant
        return RequestGrant(self, -1, request, self._here[holder].open())

    async def reserve(self, grant: RequestGrant, tokens: int) -> None:
        """QuotaExceeded. Without an answer the request goes on: it began within its quota."""
        grant.open = grant.open._replace(tokens=tokens)
        try:
            _raise(await self._ask("reserve", grant.number, tokens))
        except CentreLost:
            return
        except QuotaExceeded:
            grant.open = grant.open._replace(tokens=0)
            raise

    def close(self, grant: RequestGrant, used: int) -> None:
        assert self._centre is not None, "the centre has counted it"
        del self._open[grant.number]
        self._centre.tell("close", grant.number, used)

    async def beat(self, application: str, begun: Mapping[str, int]) -> dict[str, int]:
        """Returns choices that other replicas began, by client; none without an answer."""
        requests = {number: grant.open for number, grant in self._open.items()}
        try:
            beat: Beat = await self._ask("beat", application, requests, begun)
        except CentreLost:
            return {}
        self._answers = True
        self.joined.set()
        if beat.replicas != self._replicas:
            self._replicas = beat.replicas
            self._cut()
        return beat.elsewhere

    async def _ask(self, method: str, *args: object) -> Any:
        assert self._centre is not None, "only a replica with a centre asks one"
        try:
            return await self._centre.ask(method, *args)
        except CentreLost:
            self._answers = False
            raise


def _raise(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise QuotaExceeded(refusal.sentence, retry_after_s=refusal.retry_after_s)


def _part(quota: Quota, replicas: int) -> Quota:
    """One of `replicas` parts; each at least 1."""
    parts = {name: getattr(quota, name) for name in Quota.__struct_fields__}
    return Quota(**{name: limit and max(1, limit // replicas) for name, limit in parts.items()})
