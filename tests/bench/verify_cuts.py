"""Verify attention, as `tests.bench.attention` measures decode attention: `python -m tests.bench.verify_cuts`."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor

from kernels.qkv import replace_unturned
from kernels.tiles import LARGE_SHARED
from kernels.verify import VerifyTile, verify_attention, verify_cut
from tests.bench.attention import PAGE, PROCESSORS, Cut, Draw, Inputs, Layer, main
from tests.support.attention import Shape

SPLITS = (1, 2, 3, 4, 6, 8, 11, 17, 33)


@dataclass(frozen=True)
class VerifyLayer(Layer):
    """Rows of several queries."""

    def cut(self, rows: int, pages: int) -> Cut:
        shape = self.shape
        group = shape.heads // shape.kv_heads * self.queries
        return verify_cut(rows, shape.kv_heads, group, shape.d, PAGE, pages, PROCESSORS, 2, LARGE_SHARED, shape.read_pairs)

    def others(self, rows: int, pages: int) -> Iterator[Cut]:
        """Tiles of 16 to 80 sums a thread, and shared memory that there is."""
        lanes, shape = self.cut(1, 1)[1].rows, self.shape
        some = product(SPLITS, (32, 64), (4, 8), (2, 3, 4), (1, 2, 4), {0, shape.read_pairs})
        for splits, keys, warps, stages, values, pairs in some:
            tile = VerifyTile(lanes, keys, values, warps, stages, pairs)
            fits = 16 <= lanes * shape.d / values / (32 * warps) <= (128 if pairs else 80) and splits <= pages
            if fits and tile.shared_bytes(shape.d) <= LARGE_SHARED and rows * shape.kv_heads * splits * values <= 12 * PROCESSORS:
                yield splits, tile

    def given(self, rows: int, draw: Draw) -> tuple[Tensor, ...]:
        """The queries, the same with K's norm where rope does not turn it, and that."""
        shape = self.shape
        q, k_norm = draw((rows, shape.heads, shape.d)).mul_(shape.d**-0.25), (1 + 0.1 * draw(shape.d)) * shape.d**-0.25
        return q, replace_unturned(q, q * k_norm, shape.pairs), k_norm

    def attend(self, it: Inputs, pool: Tensor, splits: int, tile: Any) -> None:
        q = it.given[bool(tile and tile.pairs)]
        verify_attention(q, pool, it.page_ids, it.positions, self.shape.window, it.scratch, it.out, splits, tile)


LAYERS = (
    VerifyLayer("e2b-sliding", Shape(8, 1, 256, 128, window=512), batches=(1, 8, 32, 100), queries=3),
    VerifyLayer("e2b-full", Shape(8, 1, 512, 64), batches=(1, 8, 32, 100), queries=3),
    VerifyLayer("31b-tp2-sliding", Shape(16, 8, 256, 128, window=1024), batches=(1, 8, 32, 100), queries=6),
    VerifyLayer("31b-tp2-full", Shape(16, 2, 512, 64, 1), batches=(1, 8, 32, 100), queries=6),
    VerifyLayer("31b-tp2-full-8k", Shape(16, 2, 512, 64, 1), 8192, (1, 8), 6),
    VerifyLayer("31b-tp4-sliding", Shape(8, 4, 256, 128, window=1024), batches=(1, 8, 32, 64), queries=6),
    VerifyLayer("31b-tp4-full", Shape(8, 1, 512, 64, 1), batches=(1, 8, 32, 64), queries=6),
    VerifyLayer("26b-tp1-sliding", Shape(16, 8, 256, 128, window=1024), batches=(1, 5, 16, 48), queries=5),
    VerifyLayer("26b-tp1-full", Shape(16, 2, 512, 64, 1), batches=(1, 5, 16, 48), queries=5),
)

if __name__ == "__main__":
    main(LAYERS)
