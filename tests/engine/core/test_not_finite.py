"""Logits that are not finite: they end their own request, and what it computed is neither found nor read."""

import pytest

from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.protocol import AbortReason, FinishReason, SamplingParams
from tests.support.engine.kvmachine import KVFault, KVMachine
from tests.support.engine.plans import result_of
from tests.support.engine.scheduling import SchedulerConfig, finish, request_of, scheduler_of, two_groups

pytestmark = pytest.mark.pure

GROUPS = two_groups()
PAGES = (20, 9)
END = 9


def begun(prefix_cache: bool = False) -> tuple[Scheduler, KVMachine]:
    scheduler = scheduler_of(SchedulerConfig(GROUPS, PAGES, 4, 64, 16, prefix_cache=prefix_cache))
    return scheduler, KVMachine(GROUPS, PAGES, 4, 64, lambda prefix, position, seed: position)


def test_a_prompt_is_not_cached() -> None:
    """Neither its end nor that of a turn in it that the same step computed: asked again, all of it is computed."""
    scheduler, machine = begun(prefix_cache=True)
    prompt, found = [10, 10, 10, 10, 11, 11, 11, END, 12, 12, 12, END, 8], []
    for number in range(3):
        machine.nan = lambda prefix, first=not number: first
        before = scheduler.requests.counters.hit_tokens
        scheduler.requests.add(request_of(number, prompt, SamplingParams(max_tokens=1, stop_ids=(END,))))
        finish(scheduler, machine)
        found.append(scheduler.requests.counters.hit_tokens - before)
    assert scheduler.requests.counters.failed == 1
    assert found == [0, 0, 12]


def test_nan_ends_only_its_own_request() -> None:
    """A row whose logits were not finite ends its request in error; its neighbour goes on."""
    scheduler, machine = begun()
    scheduler.requests.add(request_of(1, [1] * 4, 3))
    scheduler.requests.add(request_of(2, [1] * 4, 3))
    machine.submit(scheduler.schedule())
    result = machine.result()
    rows = [result.row(0)._replace(tokens=(), nan=True), result.row(1)]
    scheduler.commit(result_of(result.step, rows))
    outputs = scheduler.requests.drain()
    assert [(output.id, output.finish) for output in outputs] == [(1, FinishReason.error), (2, None)]
    assert scheduler.requests.counters.failed == 1


def test_what_a_dropped_row_wrote_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was in flight when its sequence stepped back may have written NaN: if the sequence ends before it has computed
    that position again, the page is zeroed before its next use. Planted fault: what the row wrote is forgotten."""

    def serve_next() -> None:
        scheduler, machine = begun()
        scheduler.requests.add(request_of(1, [1] * 4, 20))
        for step in range(2):
            plan = scheduler.schedule()
            assert plan is not None, step
            machine.submit(plan)
        scheduler.commit(machine.result())
        sequence = scheduler.requests.running[0]
        sequence.step_back()
        machine.nan = lambda prefix: True
        scheduler.commit(machine.result())
        scheduler.requests.abort(1, AbortReason.client_gone)
        machine.nan = lambda prefix: False
        scheduler.requests.add(request_of(2, [1] * 20, 2))
        finish(scheduler, machine)
        assert [output.finish for output in scheduler.requests.drain()][-1] is FinishReason.length

    def forgetful(self: Sequence) -> None:
        self.number, self.high = 0, self.low

    serve_next()
    monkeypatch.setattr(Sequence, "step_back", forgetful)
    with pytest.raises(KVFault, match="holds NaN"):
        serve_next()
