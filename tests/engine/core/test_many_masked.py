"""Many constrained requests at once: each of their tokens needs a mask, and they wait no longer than others."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from engine.channel import RingReader, RingWriter, ring_bytes
from engine.plan import DEPTH, ResultRow, StepPlan
from engine.step_masks import decode_masks, encode_masks, mask_words, masks_capacity, only
from tests.support.engine.plans import result_of
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups

pytestmark = pytest.mark.pure

SLOTS, CONSTRAINED, FREE = 256, 200, 100
PROMPT, REPLY = 16, 60


@dataclass
class Waits:
    """`first`: the steps after which requests had their first tokens, ascending; `gap`: the most steps between two of one reply."""

    first: list[int] = field(default_factory=list)
    gap: int = 0


def serve(constrained: int, free: int, served_at_once: int = SLOTS) -> Waits:
    """The constrained requests come first. Masks are made at once, results come one step behind the plans. `served_at_once`: of
    the constrained ones, in order, the others are passed over."""
    scheduler = scheduler_of(SchedulerConfig(two_groups(64, 16), (SLOTS * 10, SLOTS * 8), SLOTS, 1024, 2048))
    for number in range(constrained + free):
        scheduler.requests.add(request_of(number, range(number, number + PROMPT), REPLY))
        scheduler.requests.unfinished[number].masked = number < constrained
    plans: list[StepPlan] = []
    tokens: dict[int, list[int]] = {}
    while scheduler.requests.unfinished:
        for count, sequence in enumerate(sequence for sequence in scheduler.requests.unfinished.values() if sequence.masked):
            sequence.waits = {"mask"} if count >= served_at_once else set()
        while scheduler.in_flight < DEPTH and (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        plan = plans.pop(0)
        running = {sequence.slot: sequence for sequence in scheduler.requests.running}
        numbers = [running[slot].number if slot in running else 0 for slot in plan.result_slots]
        rows = [ResultRow(slot, number, (5,)) for slot, number in zip(plan.result_slots, numbers, strict=True)]
        scheduler.commit(result_of(plan.step, rows))
        for output in scheduler.requests.drain():
            tokens.setdefault(output.id, []).extend([plan.step] * len(output.tokens))
    assert sorted(map(len, tokens.values())) == [REPLY] * (constrained + free)
    gaps = [after - before for steps in tokens.values() for before, after in pairwise(steps)]
    return Waits(sorted(steps[0] for steps in tokens.values()), max(gaps))


def test_constrained_requests_wait_as_free_ones_do() -> None:
    """200 constrained requests before 100 free ones, in 256 slots: first tokens come within twice the steps of 300 free ones, and
    every reply gets a token a step. Planted fault: a step serves the first 64 of them only."""
    free, mixed, limited = serve(0, CONSTRAINED + FREE), serve(CONSTRAINED, FREE), serve(CONSTRAINED, FREE, served_at_once=64)
    print(f"last first token after {free.first[-1]} steps of free requests, {mixed.first[-1]} with constrained ones")
    assert all(step <= 2 * alone for step, alone in zip(mixed.first, free.first, strict=True))
    assert mixed.gap == free.gap == 1
    assert sum(step > 2 * alone for step, alone in zip(limited.first, free.first, strict=True)) > FREE


def test_a_record_holds_a_mask_for_every_slot() -> None:
    """The ring is as large as a step in which all slots are masked needs, at the largest vocabulary, and takes one such record
    after the other; planted fault: a ring for a slot less refuses it."""
    vocabulary, words = 262_144, mask_words(262_144)
    masks = {slot: only(slot, vocabulary)[None] for slot in range(SLOTS)}

    def sent(rows: int) -> None:
        memory = memoryview(bytearray(ring_bytes(1, masks_capacity(rows, vocabulary))))
        writer, reader = RingWriter(memory, 1), RingReader(memory, 1, 0)
        for step in (1, 2, 3):
            writer.write(step, encode_masks(step, masks, words))
            record = reader.poll()
            assert record is not None
            read = decode_masks(record[1])
            assert read.slots.tolist() == list(masks)
            assert all((row == masks[slot]).all() for slot, row in enumerate(read.bits))

    sent(SLOTS)
    with pytest.raises(RuntimeError, match="does not fit"):
        sent(SLOTS - 1)


def test_masks_round_trip() -> None:
    """Step, slots, each as often as it has masks, and bits come back; a record that is cut is refused."""
    bits = np.arange(-4, 8, dtype=np.int32).reshape(3, 4)
    data = encode_masks(7, {3: bits[:2], 1: bits[2:]}, 4)
    again = decode_masks(data)
    assert (again.step, again.slots.tolist(), again.bits.tolist()) == (7, [3, 3, 1], bits.tolist())
    with pytest.raises(ValueError, match="reshape"):
        decode_masks(data[:-4])
