"""The prefix cache with adapters: pages of another adapter, or of the model itself, are never found."""

import pytest

from engine.adapters import NO_ADAPTER
from engine.core import requests
from engine.core.prefix import root_key
from engine.plan import Admission
from engine.protocol import SamplingParams
from tests.support.engine.kvmachine import KVFault, KVMachine
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups

pytestmark = pytest.mark.pure

GROUPS = two_groups(9)
PAGES = (40, 60)
PROMPT = [10 + at % 7 for at in range(60)]
ADAPTERS = (NO_ADAPTER, 0, 1)


def cached_of(adapters: tuple[int, ...]) -> tuple[list[int], list[Admission]]:
    """How many tokens of one prompt requests of these adapters find, one after the other; and their admissions."""
    scheduler = scheduler_of(SchedulerConfig(GROUPS, PAGES, 4, 96, 16, prefix_cache=True, adapters=2))
    machine = KVMachine(GROUPS, PAGES, 4, 96, lambda prefix, position, seed: 7)
    found, admissions = [], []
    for number, adapter in enumerate(adapters):
        scheduler.requests.add(request_of(number, PROMPT, SamplingParams(max_tokens=3), adapter=adapter))
        while scheduler.requests.unfinished or scheduler.in_flight:
            while scheduler.in_flight < 2 and (plan := scheduler.schedule()) is not None:
                admissions += plan.admissions
                machine.submit(plan)
            if scheduler.in_flight:
                scheduler.commit(machine.result())
        found.append(sum(output.cached for output in scheduler.requests.drain()))
    return found, admissions


def test_a_prefix_is_found_by_its_own_adapter_alone() -> None:
    """The first request of each adapter finds nothing, and the second what the first has left; ranks are told the adapter."""
    found, admissions = cached_of(ADAPTERS + ADAPTERS)
    assert found[:3] == [0, 0, 0]
    assert min(found[3:]) > 0
    assert [admission.adapter for admission in admissions] == [*ADAPTERS, *ADAPTERS]
    assert len({root_key("", adapter) for adapter in ADAPTERS}) == len({root_key("a", adapter) for adapter in ADAPTERS}) == 3


def test_pages_of_another_adapter_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: keys without their adapter; the second request then reads what the first one's adapter has written."""
    monkeypatch.setattr(requests, "root_key", lambda salt, _: root_key(salt))
    with pytest.raises(KVFault, match="not its own entry"):
        cached_of(ADAPTERS)
