"""Who shares cached prefixes with whom, and who goes first: what of it comes over HTTP, and what reaches the core."""

from typing import Any

import pytest

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.serving.job_run import TURN_BITS
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, Edges

pytestmark = pytest.mark.pure

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(max_tokens=1),
    "/v1/completions": {"model": "nano", "prompt": "Hello", "max_tokens": 1},
}


@pytest.fixture(scope="module")
def isolating(edges: Edges) -> Edge:
    return edges(limits=LimitSettings(isolate_cache=True, min_priority=-5))


def salt(edge: Edge, path: str, key: str | None = None, **body: Any) -> str:
    """What the core is given for a request of the client whose key is `key`."""
    edge.reset()
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    edge.post(path, BODIES[path] | body, headers=headers).raise_for_status()
    (request,) = edge.core.requests
    return request.salt


@pytest.mark.parametrize("path", list(BODIES))
def test_requests_share_by_their_salt(edge: Edge, path: str) -> None:
    """Everybody by default, whatever their key; with a cache_salt only those that have the same one."""
    assert salt(edge, path) == salt(edge, path, "a") == salt(edge, path, "b")
    assert salt(edge, path, "a", cache_salt="x") == salt(edge, path, "b", cache_salt="x")
    assert len({salt(edge, path), salt(edge, path, cache_salt="x"), salt(edge, path, cache_salt="y")}) == 3


@pytest.mark.parametrize("path", list(BODIES))
def test_tenants_can_be_kept_apart(isolating: Edge, path: str) -> None:
    """With isolate_cache nobody reaches another key's prefixes, by no salt that they choose; the key itself goes nowhere."""
    own, other = salt(isolating, path, "secret-a"), salt(isolating, path, "secret-b")
    assert own == salt(isolating, path, "secret-a")
    assert len({own, other, salt(isolating, path), salt(isolating, path, "secret-a", cache_salt="x")}) == 4
    assert salt(isolating, path, "secret-b", cache_salt=own) != own
    assert "secret" not in own


def test_priorities_reach_the_core(edge: Edge, isolating: Edge) -> None:
    """Lower numbers go first, 0 where none is given; more urgent than the setting allows is a 400 that names it."""
    path = "/v1/completions"
    for priority in (0, 7):
        edge.post(path, BODIES[path] | {"priority": priority}).raise_for_status()
    edge.post(path, BODIES[path]).raise_for_status()
    assert [request.priority >> TURN_BITS for request in edge.core.requests] == [0, 7, 0]
    refused = edge.post(path, BODIES[path] | {"priority": -1})
    assert error_of(refused, 400)["param"] == "priority"
    isolating.reset()
    isolating.post(path, BODIES[path] | {"priority": -5}).raise_for_status()
    assert isolating.core.requests[0].priority >> TURN_BITS == -5


@pytest.mark.parametrize("path", list(BODIES))
def test_clients_reach_the_core(edge: Edge, path: str) -> None:
    """By address where there are no keys, so that the core can give them turns."""
    edge.reset()
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        edge.post(path, BODIES[path], headers={"x-forwarded-for": address}).raise_for_status()
    assert [request.client for request in edge.core.requests] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


BAD: list[dict[str, Any]] = [{"cache_salt": ""}, {"cache_salt": "x" * 257}, {"cache_salt": 1}, {"priority": 1.5}, {"priority": "a"}]


@pytest.mark.parametrize("bad", BAD)
def test_bad_values_are_named(edge: Edge, bad: dict[str, Any]) -> None:
    """A salt is a short string, a priority an int32."""
    reply = edge.post("/v1/completions", BODIES["/v1/completions"] | bad)
    assert error_of(reply, 400)["param"] == next(iter(bad))
