"""The device's time of a step and its idleness before, seen on a GPU: a wait of the host is found, work in the stream hides it."""

import time

import pytest
import torch

from deploy.models.resolve import resolve
from engine.plan import encode_plan
from engine.rank.builder import build
from engine.rank.runner import Runner
from tests.golden.record import load
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of

pytestmark = pytest.mark.gpu

PLANS, _ = load()
FIRST = 11  # from here on plans of decode rows alone


def started() -> Runner:
    made = build(single(config_of(resolve("nano:31b"), 1, device="cuda")), PAGES)
    made.capture()
    for plan in PLANS[: FIRST - 1]:
        run(made, plan)
    return made


def test_a_waiting_host_shows_as_idleness() -> None:
    """50 ms between two launches are 50 ms of idleness; before a step that was in the stream in time there is next to none."""
    made = started()
    first, second, third = (encode_plan(plan) for plan in PLANS[FIRST - 1 : FIRST + 2])
    torch.cuda._sleep(200_000_000)  # about a tenth of a second: both steps are launched behind it
    one, two = made.launch(first), made.launch(second)
    for step in (one, two):
        step.result()
        step.fold()
    assert two.idle_us < 200
    assert 0 < two.busy_us < 50_000
    time.sleep(0.05)
    late = made.launch(third)
    late.result()
    late.fold()
    assert 45_000 < late.idle_us < 200_000
