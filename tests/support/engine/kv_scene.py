"""One layer's attention over the pages of one KV group: rows and chunks amid garbage, for whichever parts are to be compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from engine.geometry import KVGroup, Layer, Rope
from engine.rank.attention.base import AttentionBackend, AttentionPart, PartSettings
from engine.rank.attention.paged import PagedDecode, PagedExtend
from engine.rank.attention.trtllm import TrtllmDecode, TrtllmExtend, TrtllmScratch
from engine.rank.batch import Chunk, ForwardBatch, eager_batch
from engine.rank.kv import GroupCache, KVCache
from kernels.qkv import inverse_frequencies, replace_unturned

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scene:
    """Sequences in the pages of one KV group: garbage in every page that nobody holds, and behind each sequence's end."""

    layer: Layer
    cache: GroupCache
    batch: ForwardBatch
    qkv: Tensor
    norms: tuple[Tensor, Tensor | None]
    settings: PartSettings

    def copy(self, device: torch.device = CPU) -> "Scene":
        """The same with a pool and a table of its own, on `device`."""
        group, table, batch = self.cache.group, self.cache.table, self.batch
        cache = GroupCache(group, self.cache.pool.shape[1], len(table), table.shape[1] * group.page, device)
        cache.pool.copy_(self.cache.pool)
        cache.table.copy_(table)
        moved = replace(
            batch,
            ids=batch.ids.to(device),
            positions=batch.positions.to(device),
            slots=batch.slots.to(device),
            rope={key: rope.to(device) for key, rope in batch.rope.items()},
            pages=tuple(pages.to(device) for pages in batch.pages),
        )
        norms = self.norms[0].to(device), None if self.norms[1] is None else self.norms[1].to(device)
        settings = replace(self.settings, device=device)
        return replace(self, cache=cache, batch=moved, qkv=self.qkv.to(device), norms=norms, settings=settings)


@dataclass(frozen=True)
class Kind:
    """A layer's attention on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    kv_projections: int = 2
    page: int = 32


SLIDING, FULL = Kind(8, 4, 256, 1024), Kind(8, 1, 512, None, kv_projections=1)


def scene(kind: Kind, decodes: list[int], chunks: Sequence[tuple[int, int]] = (), dtype: torch.dtype = torch.float32) -> Scene:
    """Decode rows at `decodes` positions (-1: padding) behind chunks of positions [start, end), each of a slot of its own."""
    generator = torch.Generator().manual_seed(len(decodes) + kind.head_dim)
    draw = partial(torch.randn, generator=generator)
    spans = [*chunks, *((position, position + 1) for position in decodes)]
    ends = [end for _, end in spans]
    form = (kind.kv_heads, kind.head_dim, kind.window, kind.page)
    group = KVGroup(0, "full" if kind.window is None else "sliding", (3,), *form, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    pages = sum(-(-end // kind.page) for end in ends) + 4
    cache = GroupCache(group, pages, len(spans), max(ends), CPU)
    cache.pool.copy_(30 * draw(cache.pool.shape))
    cache.pool[:, 0] = 0
    free = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
    for slot, (start, end) in enumerate(spans):
        for entry in group.pages_for(start, end) if start >= 0 else ():
            cache.table[slot, entry] = page = free.pop()
            held = min(kind.page, end - entry * kind.page)
            cache.pool[0, page, :, :, :held] = draw((2, kind.kv_heads, held, kind.head_dim)) / kind.head_dim**0.25
    rope = Rope(1e4, kind.head_dim // 2 if kind.window else kind.head_dim // 8)
    layer = Layer(3 if kind.kv_projections else 7, group.name, kind.head_dim, kind.kv_heads, rope, 16, 3, kind.kv_projections == 1)
    slots = [slot for slot, (start, end) in enumerate(spans) for _ in range(start, end)]
    positions = [position for start, end in spans for position in range(start, end)]
    offsets = [sum(end - start for start, end in chunks[:index]) for index in range(len(chunks))]
    batch = eager_batch(
        KVCache([cache]),
        {(rope, kind.head_dim): inverse_frequencies(rope.theta, rope.pairs, kind.head_dim)},
        torch.zeros(len(slots)),
        torch.tensor(slots),
        torch.tensor(positions),
        tuple(Chunk(slot, start, end, offsets[slot]) for slot, (start, end) in enumerate(chunks)),
    )
    qkv = draw(len(slots), (kind.heads + kind.kv_projections * kind.kv_heads) * kind.head_dim).to(dtype)
    q_norm, k_norm = (((1 + 0.1 * draw(kind.head_dim)) / kind.head_dim**0.25).to(dtype) for _ in "qk")
    if kind.kv_projections == 1:
        k, v = cache.pool[0].unbind(1)
        k.copy_(replace_unturned(k, v * k_norm, rope.pairs))
    settings = PartSettings(kind.heads, 1e-6, (max(1, len(decodes), len(spans)),), CPU)
    return Scene(layer, cache, batch, qkv, (q_norm, k_norm if kind.kv_projections else None), settings)


def attended(it: Scene, router: AttentionBackend) -> Tensor:
    """What a step through `router` gives, over NaN; K and V go into the scene's pages."""
    out = it.qkv.new_full((it.batch.rows, it.settings.heads * it.layer.head_dim), torch.nan)
    router.attend(it.qkv, it.layer, it.norms, it.batch, router.prepare(it.batch), out)
    return out


def ours(it: Scene) -> Tensor:
    """By the house's own ops."""
    return attended(it, routed(it, PagedDecode(it.cache, it.settings), PagedExtend(it.cache, it.settings)))


def theirs(it: Scene, scratch: TrtllmScratch) -> AttentionBackend:
    """A router of FlashInfer's parts alone."""
    decode, extend = (part(it.cache, it.settings, scratch) for part in (TrtllmDecode, TrtllmExtend))
    return routed(it, decode, extend)


def routed(it: Scene, decode: AttentionPart, extend: AttentionPart) -> AttentionBackend:
    """A router of a part each."""
    return AttentionBackend(KVCache([it.cache]), it.settings, {"decode": [decode], "extend": [extend]})


def relative(found: Tensor, want: Tensor) -> float:
    """The largest error of a row, as a part of its norm: nearly uniform attention over many keys gives small values.

    Rows that should be zero must be.
    """
    live = want.any(1)
    assert not found[~live].any()
    off = (found[live].float() - want[live].float()).norm(dim=1) / want[live].float().norm(dim=1)
    return off.nan_to_num(torch.inf).max().item()
