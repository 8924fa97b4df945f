"""Whether another backend's parts agree with our own here: each shape that the model will use, once, over poisoned pages.

It runs wherever such parts were chosen, since nobody has tried trtllm-gen's kernels in this project, and some of them have been
wrong in silence (flashinfer #3864). Poison is finite: FlashInfer multiplies values that it does not see by zero.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention.backend_entry import RowKind
from engine.geometry import Geometry, KVGroup, Layer
from engine.rank.attention import paged
from engine.rank.attention.base import AttentionPart, AttentionParts, LayerRows, PartSettings
from engine.rank.batch import Chunk, ForwardBatch, eager_batch, frequencies_of
from engine.rank.kv import ROW_TOKENS, GroupCache, KVCache
from kernels.selfcheck import TOLERANCE, row_error

ROWS = 5  # of a check, at most
_POISON = 50.0
_DTYPE = torch.bfloat16  # in which a page that is wrong among fifty changes a row by a tenth at least


def mismatches(
    kind: RowKind, geometry: Geometry, groups: Sequence[KVGroup], settings: PartSettings, parts: AttentionParts
) -> dict[tuple[RowKind, int], float]:
    """Runs both parts of each group. Of kind and groups, by index, where they differ by more than TOLERANCE: the largest error of a
    row, as a part of its norm. settings: a bucket of ROWS at least."""
    errors = {}
    for given in groups:
        group = replace(given, index=0, layers=given.layers[:1])
        layer, visible, page = geometry.layers[group.layers[0]], group.window or 500, group.page
        if kind == "decode":  # at the edges of window and page, one of a single key, and padding
            spans = [(end - 1, end) for end in (visible + 2 * page + 6, page, page + 1, 1, 0)]
        else:  # a fresh chunk, and one whose window begins inside a page of its prefix
            spans = [(0, 40), (visible + 3, visible + 36)]
        chunks = (Chunk(0, *spans[0], 0), Chunk(1, *spans[1], 40)) if kind == "extend" else ()
        cache, batch = _poisoned_sequences(group, layer, spans, settings.device, chunks)
        weight = torch.full((group.head_dim,), group.head_dim**-0.25, dtype=_DTYPE, device=settings.device)  # scores of deviation 1
        norms, width = (weight, weight), (settings.heads + (2 - layer.k_eq_v) * group.kv_heads) * group.head_dim
        qkv = torch.randn((batch.rows, width), generator=torch.Generator().manual_seed(batch.rows)).to(settings.device, _DTYPE)
        (block,), outputs = batch.blocks, []
        for maker in (paged.parts(settings), parts):
            part: AttentionPart = getattr(maker, kind)(cache)
            outputs.append(qkv.new_zeros(batch.rows, settings.heads * group.head_dim))
            part.attend(LayerRows(qkv, layer, norms, block, outputs[-1]), part.prepare(block))
        expected, actual = outputs
        errors[kind, given.index] = row_error(actual, expected)
    return {key: error for key, error in errors.items() if not error <= TOLERANCE[_DTYPE]}


def _poisoned_sequences(
    group: KVGroup, layer: Layer, spans: Sequence[tuple[int, int]], device: torch.device, chunks: tuple[Chunk, ...]
) -> tuple[GroupCache, ForwardBatch]:
    """Make a slot for each span of positions, its pages shuffled; behind its end, in its last page and its table's tail, lies
    poison."""
    generator = torch.Generator().manual_seed(group.head_dim)
    needed = [group.pages_for(start, end) if end else range(0) for start, end in spans]
    poisoned = 1 + sum(map(len, needed))
    longest = max(end for _, end in spans) + ROW_TOKENS
    cache = GroupCache(replace(group, dtype="bfloat16"), poisoned + 1, len(spans), longest, device)
    pool = torch.randn(cache.pool.shape[1:], generator=generator)
    pool[:, 0] *= group.head_dim**-0.25
    if layer.k_eq_v:  # K is V times its norm's weight where rope does not turn it, and may be read there
        turned = torch.arange(group.head_dim) % (group.head_dim // 2) < layer.rope.pairs
        pool[:, 0] = torch.where(turned, pool[:, 0], pool[:, 1] * group.head_dim**-0.25)
    pool[0], pool[poisoned] = 0, _POISON
    free = (torch.randperm(poisoned - 1, generator=generator) + 1).int().split([len(entries) for entries in needed])
    for slot, ((_, end), entries, pages) in enumerate(zip(spans, needed, free, strict=True)):
        cache.table[slot, entries.stop :] = poisoned
        cache.table[slot, entries.start : entries.stop] = pages.to(device)
        if end % group.page:
            pool[pages[-1], :, :, end % group.page :] = _POISON
    cache.pool[0] = pool.to(device, _DTYPE)
    slots = torch.cat([torch.full((end - start,), slot) for slot, (start, end) in enumerate(spans)]).to(device)
    positions = torch.cat([torch.arange(*span) for span in spans]).to(device)
    return cache, eager_batch(KVCache([cache]), frequencies_of([layer], device), torch.zeros_like(slots), slots, positions, chunks)
