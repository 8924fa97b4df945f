"""Checks the API key and its rights before anything else of a request is read. Rights go by the
scope's path, as the router sees it; an unknown path needs all."""

from collections.abc import Sequence

from starlette.types import Scope

from deploy.edge.apis import endpoint_of
from deploy.edge.http.http_errors import Forbidden, Unauthenticated
from deploy.edge.http.scope import Headers, client_name, values_of
from deploy.edge.keys.key_file import RIGHTS, ApiKey
from deploy.edge.keys.key_ring import KeyRing
from deploy.edge.observe.record import record_of
from engine.errors import QuartetError


async def check_key(ring: KeyRing, scope: Scope, proxies: Sequence[str]) -> str:
    """Note and count whose request it is. Unauthenticated, Forbidden, QuotaExceeded."""
    record = record_of(scope)
    if (key := await _identify(ring, scope)) is not None:
        record.key = key.name
        if not _is_open(scope):
            check_right(key, scope)
            record.models = key.models
            record.grant = await ring.open(key)
    return client_name(scope, record.key, proxies)


async def sender(ring: KeyRing, scope: Scope, proxies: Sequence[str]) -> str | None:
    """Whose request it is; None if `check_key` will refuse it, so its body need not be read."""
    try:
        key = await _identify(ring, scope)
        if key is not None:
            check_right(key, scope)
    except QuartetError:  # the application says it, with an access line
        return None
    return client_name(scope, None if key is None else key.name, proxies)


async def _identify(ring: KeyRing, scope: Scope) -> ApiKey | None:
    await ring.refresh()
    given = credentials(scope["headers"])
    key = ring.find(given[0]) if len(given) == 1 and given[0] else None
    if key is None and not _is_open(scope):
        raise Unauthenticated(_what_is_wrong(given))
    return key


def credentials(headers: Headers) -> list[bytes]:
    """The different keys of a request. An Authorization header without one counts as an empty key."""
    presented = [value.strip() for value in values_of(headers, b"x-api-key")]
    for value in values_of(headers, b"authorization"):
        scheme, _, token = value.strip().partition(b" ")
        presented.append(token.strip() if scheme.lower() == b"bearer" else b"")
    return list(dict.fromkeys(presented))


def check_right(key: ApiKey, scope: Scope) -> None:
    endpoint = endpoint_of(scope)
    if endpoint.right == "all":
        if not key.rights.issuperset(RIGHTS):
            raise Forbidden("This path needs an API key with all rights.")
    elif endpoint.right not in {"open", *key.rights}:
        raise Forbidden(f"This API key lacks the right `{endpoint.right}`.")


def _is_open(scope: Scope) -> bool:
    return endpoint_of(scope).right == "open"


def _what_is_wrong(given: list[bytes]) -> str:
    if not given:
        return "This server needs an API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
    if len(given) > 1:
        return "Send exactly one API key, as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
    return "The API key is not valid."
