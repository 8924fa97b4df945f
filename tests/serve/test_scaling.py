"""Autoscaling on a real stack: from zero, up with the load, down with it, to zero. One boot; the tests run in order."""

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.stack.load_steps import (
    AUTOSCALING,
    MODEL,
    SLOTS,
    Phase,
    ScalingTrace,
    autoscaled_stack,
    count,
    run,
    wait_for_zero,
)
from tests.support.stack.serve_process import Stack

pytestmark = [pytest.mark.serve, pytest.mark.slow]  # a boot of its own, minutes of load

WAIT = 12  # requests that may wait where there is no replica; more are refused
MORE = 4
RETRY_AFTER_S = 7
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
CLIENTS = 8
LONG = 1600  # tokens of an answer that takes longer than it takes to see that one replica would do


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    refusal = {"status_code": 503, "retry_after_s": RETRY_AFTER_S}
    with autoscaled_stack(tmp_path_factory.mktemp("scaling"), max_queued_requests=WAIT, backpressure_config=refusal) as place:
        yield place


def ask(stack: Stack) -> httpx.Response:
    return stack.chat(BODY)


def test_at_zero_replicas_requests_wait_or_get_retry_after(place: tuple[Stack, str]) -> None:
    """An idle stack goes to zero; then as many requests as the setting says wait for the replica, the others get Retry-After."""
    stack, url = place
    wait_for_zero(url, 40)
    assert count(url) == 0
    with ThreadPoolExecutor(WAIT + MORE) as pool:
        replies = list(pool.map(ask, [stack] * (WAIT + MORE)))
    codes = sorted(reply.status_code for reply in replies)
    print(f"at zero: {codes}, the longest wait {max(reply.elapsed.total_seconds() for reply in replies):.1f} s")
    assert codes == [200] * WAIT + [503] * MORE
    assert {reply.headers.get("retry-after") for reply in replies if reply.status_code == 503} == {str(RETRY_AFTER_S)}
    assert all(reply.elapsed.total_seconds() < 2 for reply in replies if reply.status_code == 503)
    assert count(url) == 1


def ttft(trace: ScalingTrace, since: float, until: float) -> float:
    """Median of those sent between the two moments, seconds."""
    return statistics.median(each.ttft for each in trace.records() if each.ttft is not None and since <= each.sent < until)


def test_replicas_follow_the_load_and_no_request_is_lost(place: tuple[Stack, str]) -> None:
    """A step up brings the second replica and faster first tokens, a plateau keeps it, a step down and nobody take both away.

    What is left after the step up are two long answers, one at each replica: the one that is to go ends its own first.
    """
    stack, url = place
    trace = run(stack, url, [Phase("8 clients", CLIENTS, 24), Phase("two long answers", 2, tokens=LONG), Phase("nobody", 0, 40)])
    (_, step_up, _), (_, step_down, answers), _ = trace.phases
    second = next(at for at, replicas in trace.seen if replicas == 2)
    slow, fast = ttft(trace, step_up, second), ttft(trace, second + 3, step_down)
    print(f"second replica {second - step_up:.1f} s after the step; TTFT {slow:.2f} s before it, {fast:.2f} s after")
    replicas = trace.replicas(step_up, trace.seen[-1][0] + 1)
    print(f"{sum(ledger.sent for _, _, ledger in trace.phases)} requests; replicas {replicas}")
    assert replicas == [1, 2, 1, 0]
    ended = max(record.done for record in answers.records)
    gone = next(at for at, replicas in trace.seen if at > step_down and replicas < 2)
    print(f"two answers took {ended - step_down:.1f} s; the second replica went {gone - ended:.1f} s after them")
    assert gone - ended < AUTOSCALING["downscale_delay_s"], "it was to go only when they had ended"
    assert CLIENTS > SLOTS, "one replica would do"
    assert fast < slow / 2
    for phase, _, ledger in trace.phases:
        balance = ledger.balance()
        assert balance["conserved"], (phase, balance)
        assert balance["finished"] == ledger.sent, (phase, balance)
