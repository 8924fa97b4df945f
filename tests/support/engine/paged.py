"""Plays sequences through a model step by step: chunks and decode rows mixed, pages in random order, dead pages poisoned.

`script` decides everything on the host, once, so that every rank of a group can run the same steps.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.geometry import Geometry, KVGroup, PageDType, kv_groups
from engine.rank.attention import attention_backend
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import Chunk, ForwardBatch, eager_batch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.models.gemma4 import Gemma4

Rows = tuple[int, int, int]  # slot, start, end
Entry = tuple[int, int, int, int]  # group, slot, table entry, page
Spans = Sequence[Sequence[tuple[int, int]]]  # of each slot: positions [first, last)
Logits = dict[tuple[int, int], Tensor]  # (slot, position) -> fp32 [vocab], before the soft cap
PlantFault = Callable[[int, KVCache], None]
Backend = Callable[..., AttentionBackend]  # `attention_backend`, or what stands in for it


@dataclass(frozen=True)
class Step:
    """Chunks and decode rows of one step, the batch rows whose logits are wanted, what happens to pages before it, and of each slot
    the positions of images, which no chunk cuts."""

    chunks: tuple[Rows, ...]
    decodes: tuple[Rows, ...]
    wanted: tuple[int, ...]
    released: tuple[Entry, ...]
    mapped: tuple[Entry, ...]
    spans: Spans = ()


class _Pages:
    """Random free pages of each group, and who holds what."""

    def __init__(self, groups: Sequence[KVGroup], pages: int, rng: random.Random) -> None:
        self._groups, self._rng = groups, rng
        self._free = [rng.sample(range(1, pages), pages - 1) for _ in groups]
        self._held: dict[tuple[int, int], dict[int, int]] = {}

    def move(self, slot: int, start: int, end: int) -> tuple[list[Entry], list[Entry]]:
        """(released, mapped): what positions [start, end) of `slot` no longer need, and what they need besides."""
        released, mapped = [], []
        for group in self._groups:
            held = self._held.setdefault((group.index, slot), {})
            needed = group.pages_for(start, end)
            for entry in [entry for entry in held if entry not in needed]:
                released.append((group.index, slot, entry, held[entry]))
                self._free[group.index].insert(self._rng.randrange(2), held.pop(entry))
            for entry in (entry for entry in needed if entry not in held):
                held[entry] = self._free[group.index].pop(0)
                mapped.append((group.index, slot, entry, held[entry]))
        return released, mapped


def script(
    geometry: Geometry, lengths: Sequence[tuple[int, int]], pages: int, seed: int, *, whole: bool, spans: Spans = ()
) -> list[Step]:
    """Steps that run sequences of (prompt, decoded) tokens, one a slot.

    whole: prompts in one chunk each, all logits wanted; else random chunks, of which all, the last or no logits are wanted.
    """
    rng = random.Random(seed)
    allocator = _Pages(kv_groups(geometry, 1), pages, rng)
    done = [0] * len(lengths)
    steps = []
    while any(at < sum(length) for at, length in zip(done, lengths, strict=True)):
        rows = _rows(lengths, done, rng, spans or ((),) * len(lengths), whole=whole)
        if not rows:
            continue
        moves = [allocator.move(*row) for row in rows]
        chunks = tuple(row for row in rows if row[1] < lengths[row[0]][0])
        decodes = tuple(row for row in rows if row not in chunks)
        released, mapped = (tuple(entry for move in moves for entry in move[side]) for side in (0, 1))
        steps.append(Step(chunks, decodes, _wanted(chunks, decodes, rng, whole=whole), released, mapped, spans))
        for slot, _, end in rows:
            done[slot] = end
    return steps


def _rows(
    lengths: Sequence[tuple[int, int]], done: Sequence[int], rng: random.Random, spans: Spans, *, whole: bool
) -> list[Rows]:
    rows = []
    for slot, ((prompt, decoded), at) in enumerate(zip(lengths, done, strict=True)):
        if at == prompt + decoded or rng.random() < 0.25:
            continue
        size = 1 if at >= prompt else prompt - at if whole else min(prompt - at, rng.choice((1, 5, 32, 33, 70, 130)))
        end = max([at + size, *(last for first, last in spans[slot] if first < at + size)])
        rows.append((slot, at, end))
    rng.shuffle(rows)
    return rows


def _wanted(chunks: Sequence[Rows], decodes: Sequence[Rows], rng: random.Random, *, whole: bool) -> tuple[int, ...]:
    wanted = []
    offset = 0
    for _, start, end in chunks:
        size = end - start
        first = 0 if whole else rng.choice((0, size - 1, size))
        wanted += range(offset + first, offset + size)
        offset += size
    return (*wanted, *range(offset, offset + len(decodes)))


def caches(
    geometry: Geometry,
    size: int,
    slots: int,
    max_len: int,
    pages: int,
    dtype: PageDType = "float32",
    poison: float = math.nan,
) -> KVCache:
    """Every group's cache, all pages poisoned: the null page too."""
    groups = kv_groups(geometry, size, dtype=dtype)
    made = KVCache([GroupCache(group, pages, slots, max_len, torch.device("cpu")) for group in groups])
    for cache in made:
        cache.pool.fill_(poison)
    return made


def run_steps(
    model: Gemma4,
    cache: KVCache,
    steps: Sequence[Step],
    ids: Sequence[Tensor],
    plant_fault: PlantFault | None = None,
    poison: float = math.nan,
    backend: Backend = attention_backend,
    adapters: Sequence[int] | None = None,
) -> Logits:
    """Run the steps on one rank. `plant_fault(step number, cache)` runs before each step; `poison` fills released pages;
    `adapters`: of each slot, -1: none."""
    found = {}
    most = max(len(step.wanted) + len(step.decodes) for step in steps)
    attention = backend(None, model.geometry, cache, model.parallel.size, (max(1, most),))
    for number, step in enumerate(steps):
        for group, slot, entry, page in step.released:
            cache.groups[group].table[slot, entry] = 0
            cache.groups[group].pool[:, page] = poison
        for group, slot, entry, page in step.mapped:
            cache.groups[group].table[slot, entry] = page
        if plant_fault is not None:
            plant_fault(number, cache)
        batch = _batch(step, ids, model, cache)
        if adapters is not None:
            batch = replace(batch, adapters=torch.tensor(adapters, dtype=torch.int32)[batch.slots])
        hidden = model.states(batch, attention)[1]
        assert hidden.shape[0] == len(step.wanted)
        logits = model.parallel.all_gather(model.head.logits(hidden))[:, : model.geometry.vocab] if len(step.wanted) else hidden
        where = zip(batch.slots[batch.logit_rows].tolist(), batch.positions[batch.logit_rows].tolist(), strict=True)
        found |= dict(zip(where, logits, strict=True))
    return found


def _batch(step: Step, ids: Sequence[Tensor], model: Gemma4, cache: KVCache) -> ForwardBatch:
    rows = (*step.chunks, *step.decodes)
    places = [(slot, position) for slot, start, end in rows for position in range(start, end)]
    offsets = [sum(end - start for _, start, end in step.chunks[:index]) for index in range(len(step.chunks))]
    batch = eager_batch(
        cache,
        model.frequencies,
        torch.stack([ids[slot][position] for slot, position in places]),
        torch.tensor([slot for slot, _ in places]),
        torch.tensor([position for _, position in places]),
        tuple(Chunk(*row, offset, _spans(step, *row)) for row, offset in zip(step.chunks, offsets, strict=True)),
    )
    return replace(batch, logit_rows=torch.tensor(step.wanted, dtype=torch.int64))


def _spans(step: Step, slot: int, start: int, end: int) -> tuple[tuple[int, int], ...]:
    return tuple(span for span in step.spans[slot] if start <= span[0] < end) if step.spans else ()
