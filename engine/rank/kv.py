"""A rank's KV cache: pool and page table of each KV group.

table [slots, width]              pool [owned layers, pages, 2, kv_heads, page, head_dim]
slot 0 | 7 | 3 | 0 | 0 |   ->     page 7: positions 0 .. page - 1 of slot 0, page 3: the next ones
slot 1 | 0 | 0 | 9 | 0 |          page 9: slot 1 has a window; its older pages were released
                                  page 0: the null page; every table entry is valid
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.geometry import KVGroup, Layer
from kernels.slots import gather_pages

PageIds = tuple[Tensor, ...]  # of each KV group
ROW_TOKENS = 256  # a table row covers a multiple of these positions: the step of the widest kernel, and whole cache lines


class GroupCache:
    def __init__(
        self,
        group: KVGroup,
        pages: int,
        slots: int,
        max_len: int,
        device: torch.device,
        queries: int = 1,
    ) -> None:
        self.group = group
        # K at [..., 0, ...], V at [..., 1, ...].
        shape = (len(group.layers), pages, 2, group.kv_heads, group.page, group.head_dim)
        self.pool = torch.zeros(shape, dtype=getattr(torch, group.dtype), device=device)
        # Covers `max_len`, and is a multiple of 256 // page.
        width = -(-max_len // ROW_TOKENS) * (ROW_TOKENS // group.page)
        self.table = torch.zeros((slots, width), dtype=torch.int32, device=device)
        # Most page ids that a sequence of `queries` queries reads.
        self.read_width = min(width, group.worst_pages(width * group.page) - (1 - queries) // group.page)
        self.scales: dict[int, Tensor] = {}  # of e4m3 pages, by layer: fp32 [2, kv_heads], of stored K and V; absent: 1
        self.layers = dict(zip(group.layers, self.pool, strict=True))  # by index of the layers that own K and V


class KVCache:
    def __init__(self, groups: Sequence[GroupCache]) -> None:
        self.groups = tuple(groups)
        self._of = {layer: cache for cache in self.groups for layer in cache.group.layers}

    def __iter__(self) -> Iterator[GroupCache]:
        return iter(self.groups)

    def of(self, layer: Layer) -> GroupCache:
        """The group that holds the K and V that `layer` reads."""
        return self._of[layer.kv_source]

    def page_rows(self, sequences: int) -> PageIds:
        return tuple(cache.table.new_zeros(sequences, cache.read_width, dtype=torch.int32) for cache in self)

    def gather(self, slots: Tensor, positions: Tensor, pages: PageIds) -> PageIds:
        """Gathers the page ids that rows (slot, position), int32 each, read."""
        for cache, page_ids in zip(self, pages, strict=True):
            gather_pages(cache.table, slots, positions, cache.group.page, cache.group.window, page_ids)
        return pages
