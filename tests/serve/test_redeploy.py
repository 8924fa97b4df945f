"""Redeploys that fail on a running stack: what ran goes on, or requests get the API's 503 until a good config comes."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.stack.death_probes import BODY
from tests.support.stack.serve_process import Stack, wait

pytestmark = [pytest.mark.serve, pytest.mark.slow]

UNREADABLE: dict[str, Any] = {"model": "nano:no-such-member"}
UNBOOTABLE: dict[str, Any] = {"pages": [2000, 10_000_000]}  # more than the machine's memory: found once a replica boots


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), args={"tp": 1, "mtp": {}})
    print(f"\nready after {stack.start():.1f} s")
    yield stack
    stack.clean_up()


def probed(stack: Stack, seconds: float) -> tuple[Counter[int], float]:
    """Statuses of requests, one after the other, and the longest wait. Each is 200, or 503 with Retry-After and an API's error."""
    statuses, longest, began = Counter[int](), 0.0, time.monotonic()
    while time.monotonic() - began < seconds:
        reply: httpx.Response = stack.chat(BODY, 60)
        longest = max(longest, reply.elapsed.total_seconds())
        statuses[reply.status_code] += 1
        if reply.status_code != 200:
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_restarting"), reply.text
            assert "retry-after" in reply.headers
        time.sleep(0.05)
    return statuses, longest


def test_a_config_that_cannot_be_read_leaves_what_runs(stack: Stack) -> None:
    """Nothing of it is begun: the same replica answers every request."""
    before = stack.find("ServeReplica")
    stack.redeploy(**UNREADABLE)
    statuses, longest = probed(stack, 12)
    print(f"\n{dict(statuses)}, the longest took {longest:.2f} s")
    assert set(statuses) == {200}
    assert stack.find("ServeReplica") == before


def test_a_replica_that_cannot_boot_leaves_what_runs_or_a_clear_error(stack: Stack) -> None:
    """Each request gets an answer or a 503 that says when to come again; the next good config is served. Planted, in the same test:
    that one does replace the replica."""
    before = stack.find("ServeReplica")
    stack.redeploy(**UNBOOTABLE)
    statuses, longest = probed(stack, 30)
    print(f"\n{dict(statuses)}, the longest took {longest:.2f} s; the replica stayed: {stack.find('ServeReplica') == before}")
    stack.redeploy(build="good")
    back = wait(lambda: stack.chat(BODY, 60).status_code == 200, 90, stack.said)
    wait(lambda: not set(before) & set(stack.find("ServeReplica")), 60, stack.said)
    assert stack.chat(BODY).status_code == 200
    print(f"served again after {back:.1f} s")
