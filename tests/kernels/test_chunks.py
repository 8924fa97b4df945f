"""Prefill chunks listed on the device, from a plan's bytes, against the same by hand: rows, results and tiles, padded or not."""

import random

import pytest
import torch

from engine.plan import StepPlan, encode_plan, read_plan
from engine.rank.step import LAYOUT
from kernels.chunks import ResultInputs, StepRows, chunk_inputs, extend_tiles
from tests.support import interpreter
from tests.support.launches import record

pytestmark = pytest.mark.cpu

SLOTS, LENGTH, JUNK = 200, 400, 77
PADDING = SLOTS


def filled(count: int) -> torch.Tensor:
    return torch.full((count,), JUNK, dtype=torch.int32)


def made(seed: int, width: int, *, most: int) -> None:
    """A plan of up to `most` chunks beside decode rows, its rows and results padded by some: all as by hand, and what lies behind
    untouched."""
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), rng.randint(1, most) + rng.randint(0, 5))
    chunks = []
    for slot in slots[: rng.randint(1, len(slots))]:
        start, size = rng.randint(0, 200), rng.choice((1, 2, 7, 40))
        chunks.append((slot, start, start + size, start + size - rng.randint(0, 1), 0, 0))
    decodes, sizes = slots[len(chunks) :], [end - start for _, start, end, *_ in chunks]
    data = encode_plan(StepPlan(1, chunks=chunks, rows=[(slot, width, 0) for slot in decodes]))
    plan = torch.from_numpy(read_plan(data).fixed.copy())
    prompts, listed = sum(sizes) + rng.choice((0, 1, 50)), len(chunks) + rng.choice((0, 3))
    gives = [chunk[:3] for chunk in chunks if chunk[3] < chunk[2]]
    given = (len(gives) + len(decodes) + rng.choice((0, 2))) * width
    tokens = torch.arange((SLOTS + 1) * LENGTH, dtype=torch.int32).view(SLOTS + 1, LENGTH)
    behind = len(decodes) * width + 3
    rows = StepRows(*(torch.cat([filled(prompts), torch.arange(behind, dtype=torch.int32) + 1000 * at]) for at in range(3)))
    results = ResultInputs(filled(given + 1).long(), filled(given + 1), filled(given + 1))
    table = torch.full((listed + 2, 4), JUNK, dtype=torch.int32)
    view = ResultInputs(*(x[:given] for x in results))
    chunk_inputs(plan, LAYOUT, tokens, PADDING, rows, prompts, table[: listed + 1], view, width)

    places = [(slot, position) for slot, start, end, *_ in chunks for position in range(start, end)]
    places += [(PADDING, -1)] * (prompts - len(places))
    assert rows.slots[:prompts].tolist() == [slot for slot, _ in places]
    assert rows.positions[:prompts].tolist() == [position for _, position in places]
    assert rows.ids[:prompts].tolist() == [slot * LENGTH + position if position >= 0 else 0 for slot, position in places]
    assert all(x[prompts:].tolist() == [1000 * at + each for each in range(behind)] for at, x in enumerate(rows))
    firsts = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    entries = [(slot, first, start, end - start) for (slot, start, end, *_), first in zip(chunks, firsts, strict=False)]
    entries += [(PADDING, firsts[-1], firsts[-1] - prompts, prompts - firsts[-1])] + [(0, 0, 0, 0)] * (listed - len(chunks))
    assert table.tolist() == [*map(list, entries), [JUNK] * 4]
    found = list(zip(*(x.tolist() for x in results), strict=True))
    ends = {entry[0]: entry[1] + entry[3] - 1 for entry in entries[: len(chunks)]}
    want = [(ends[slot], slot, -1 if lane else end - 1) for slot, _, end in gives for lane in range(width)]
    want += [(prompts + at, 2000 + at, 1000 + at) for at in range(len(decodes) * width)]
    want += [(0, PADDING, -1)] * (given - len(want)) + [(JUNK, JUNK, JUNK)]
    assert found == want
    size = rng.choice((8, 16))
    tiles = extend_tiles(table[: listed + 1], size, prompts).tolist()
    cut = [
        (slot, first + done, start + done, min(size, count - done))
        for slot, first, start, count in entries
        for done in range(0, count, size)
    ]
    shortest = sorted(cut, key=lambda tile: -tile[2])[::-1]
    fourths = shortest[3::4]
    assert [tuple(tile) for tile in tiles[: len(cut)]] == fourths + [tile for tile in reversed(shortest) if tile not in fourths]
    assert not any(tile[3] for tile in tiles[len(cut) :])


@pytest.mark.parametrize("seed", range(12))
def test_chunks_are_as_by_hand(seed: int) -> None:
    """Chunks of one token to many, of which some give results, behind or without decode rows of one token or three."""
    made(seed, 1 + 2 * (seed % 2), most=9)


def test_a_chunk_that_begins_a_token_later_is_seen() -> None:
    """Another plan gives other rows, so that what is compared is not always the same."""
    tokens, answers = torch.arange(5 * LENGTH, dtype=torch.int32).view(5, LENGTH), []
    for start in (3, 4):
        plan = torch.from_numpy(read_plan(encode_plan(StepPlan(1, chunks=[(2, start, 9, 8, 0, 0)]))).fixed.copy())
        rows, results = StepRows(*(filled(6) for _ in range(3))), ResultInputs(filled(1).long(), filled(1), filled(1))
        chunk_inputs(plan, LAYOUT, tokens, 4, rows, 6, torch.zeros((2, 4), dtype=torch.int32), results)
        answers.append((rows.ids.tolist(), results.rows.tolist()))
    assert answers == [([*range(2 * LENGTH + 3, 2 * LENGTH + 9)], [5]), ([*range(2 * LENGTH + 4, 2 * LENGTH + 9), 0], [4])]


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize(("width", "most"), [(1, 9), (3, 9), (1, 150)])
def interpreted_chunks(width: int, most: int) -> None:
    """As for the reference, in one launch each; of more chunks than are looked at in a turn."""
    with record() as nodes:
        made(most, width, most=most)
    assert [node.kernel for node in nodes] == ["_chunk_inputs", "_tiles"]
