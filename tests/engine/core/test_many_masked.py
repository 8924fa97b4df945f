"""Many constrained requests at once: each of their tokens needs a mask, and they wait no longer than others."""


import random

import pytest

from engine.channel import RingReader, RingWriter, ring_bytes
from engine.core.sequence import Sequence
from engine.step_masks import decode_masks, encode_masks, mask_words, masks_capacity, only
from tests.support.engine.scheduling import SchedulerConfig, one_token_each, request_of, scheduler_of, two_groups

pytestmark = pytest.mark.pure

SLOTS = 256


def steps_of(masked: int) -> list[list[int]]:
    """Of 300 requests, the steps that gave each one's tokens; the first `masked` of them are masked, and masks are late."""
    scheduler = scheduler_of(SchedulerConfig(two_groups(64, 16), (SLOTS * 10, SLOTS * 8), SLOTS, 1024, 2048))
    for number in range(300):
        scheduler.requests.add(request_of(number, range(number, number + 16), 60))
        scheduler.requests.unfinished[number].masked = number < masked
    given = [[] for _ in range(300)]
    while scheduler.requests.unfinished:
        if (plan := scheduler.schedule()) is None:
            continue
        scheduler.commit(one_token_each(scheduler, plan))
        for output in scheduler.requests.drain():
            given[output.id] += [plan.step] * len(output.tokens)
    return given


def test_constrained_requests_wait_as_free_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 constrained requests before 100 free ones, in 256 slots, have their tokens in the same steps as 300 free ones. Planted
    fault: one in ten of their rows is left out of its step."""
    free = steps_of(0)
    assert steps_of(200) == free
    honest, draw = Sequence.decodable.fget, random.Random(1)
    seldom = property(lambda self: honest(self) and not (self.masked and draw.random() < 0.1))
    monkeypatch.setattr(Sequence, "decodable", seldom)
    assert steps_of(200) != free


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
