"""Step sizes: what plans are padded to, and so which CUDA graphs and kernel variants run. No torch.

    plan: 700 rows in 3 chunks, 5 sequences decode  --StepShapes.padded-->  768 rows, 16 chunks, 8 sequences, 24 results

Kernels choose their arithmetic by row counts, so a `StepShapes` with one size computes every step
alike.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

from engine.attention import TRITON
from engine.config import EngineConfig
from engine.geometry import Geometry
from engine.plan import PlanView
from engine.protocol import MAX_SPAN

BUCKETS = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16))
# Rows of chunks that a step is padded to on a GPU, up to the budget.
PROMPT_ROWS = (16, 32, 64, 128, 192, 256, *range(384, 1025, 128), *range(1280, 2049, 256))
# Captured too where a launch is short, as layers share K and V or ranks norm rows of their own: the host would be slower there.
LARGE_PROMPT_ROWS = (*range(2560, 4097, 512), *range(5120, 8193, 1024))
DECODES_WITH_PROMPTS = (0, 8, 32, 128)  # sequences that decode in a padded step with chunks; the largest bucket is another
MOST_PADDED_CHUNKS = 16  # of a padded step of up to 2048 prompt tokens, in proportion of a larger one; with more it runs unpadded
SEQUENCE_WORK = 1536 * 5376**2  # rows times hidden^2: with less all-reduces are as fast as norms of own rows


class StepSizes(NamedTuple):
    """Rows of chunks, chunks, decoding sequences, sequences with results; width: tokens of a
    decoding sequence."""

    prompts: int
    chunks: int
    decodes: int
    results: int
    width: int = 1

    @classmethod
    def of(cls, plan: PlanView) -> "StepSizes":
        if not len(plan.chunks):
            return cls.decoding(len(plan.rows), plan.width)
        tokens = plan.chunks[:, 2] - plan.chunks[:, 1]
        return cls(int(tokens.sum()), len(plan.chunks), len(plan.rows), len(plan.result_slots), plan.width)

    @classmethod
    def decoding(cls, sequences: int, width: int = 1) -> "StepSizes":
        return cls(0, 0, sequences, sequences, width)


@dataclass(frozen=True)
class StepShapes:
    sizes: tuple[StepSizes, ...]  # padded sizes, ascending; each is captured on a GPU
    prefill: int  # most chunk rows of a step
    longest: int  # of one chunk
    images: bool = False  # chunks may have bidirectional spans

    @classmethod
    def of(cls, config: EngineConfig) -> "StepShapes":
        """The sizes for a GPU; a CPU runs every number of decode rows, and chunks unpadded."""
        images = config.geometry.bidirectional and bool(config.media)
        prefill = max(config.prefill_budget, min(MAX_SPAN, config.max_len) if images else 0)  # an image is computed at once
        prefill = min(prefill, config.max_seqs * config.max_len)
        longest = min(prefill, config.max_len)
        if config.device == "cpu":
            every = product(range(1, config.max_seqs + 1), range(1, config.widest + 1))
            return cls(tuple(StepSizes.decoding(*each) for each in every), prefill, longest, images)
        sequences = buckets(config.max_seqs)
        sizes = [StepSizes.decoding(*each) for each in product(sequences, config.widths)]
        if config.attention_of("extend") in (None, TRITON.name):  # other backends' chunk kernels read host values
            sizes += mixed_sizes(prompt_rows(config), sequences[-1], config.widths)
        return cls(tuple(sizes), prefill, longest, images)

    @cached_property
    def sequences(self) -> tuple[int, ...]:
        return tuple(sorted({sizes.decodes for sizes in self.sizes if sizes.decodes}))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({sizes.width for sizes in self.sizes}))

    @property
    def padded_prompts(self) -> int:
        """Most chunk rows of a padded step; 0: steps with chunks are not padded."""
        return self.sizes[-1].prompts

    @property
    def results(self) -> int:
        return self.sequences[-1] * self.widths[-1]

    def sequences_of(self, decodes: int) -> int:
        return self.sequences[bisect.bisect_left(self.sequences, decodes)]

    def padded(self, has: StepSizes) -> StepSizes | None:
        """None if the step has no rows, too many rows, or too many chunks."""
        if not has.prompts and not has.decodes:
            return None
        first = bisect.bisect_left(self.sizes, (has.prompts, 0, has.decodes))
        for sizes in islice(self.sizes, first, None):
            if sizes.decodes >= has.decodes and sizes.width >= has.width:
                if sizes.chunks >= has.chunks:
                    return sizes
                return None
        return None

    def unpadded(self, has: StepSizes) -> StepSizes:
        return has._replace(width=next(width for width in mixed_widths(self.widths) if width >= has.width))

    @property
    def warm_rows(self) -> tuple[int, ...]:
        """Powers of two and the most. Kernel tiles cover wider ranges."""
        return (*(1 << power for power in range((self.prefill - 1).bit_length())), self.prefill)


def buckets(max_seqs: int) -> tuple[int, ...]:
    known = [*BUCKETS, *range(320, max_seqs + 64, 64)]
    return tuple(known[: bisect.bisect_left(known, max_seqs) + 1])


def mixed_widths(widths: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({1, *widths[::-2]}))


def prompt_rows(config: EngineConfig) -> list[int]:
    geometry = config.geometry
    large = not all(layer.owns_kv for layer in geometry.layers) or bool(sequence_rows(config, geometry))
    most = min(config.prefill_budget, (LARGE_PROMPT_ROWS if large else PROMPT_ROWS)[-1])
    return [*(rows for rows in PROMPT_ROWS + LARGE_PROMPT_ROWS if rows < most), most]


def mixed_sizes(prompts: Sequence[int], sequences: int, widths: Sequence[int]) -> list[StepSizes]:
    decodes = [rows for rows in DECODES_WITH_PROMPTS if rows < sequences] + [sequences]
    sizes = []
    for tokens, rows, width in product(prompts, decodes, mixed_widths(widths)):
        chunks = max(MOST_PADDED_CHUNKS, tokens // 128)
        if width == 1 or rows:
            sizes.append(StepSizes(tokens, chunks, rows, min(chunks + rows, sequences), width))
    return sizes


def sequence_rows(config: EngineConfig, geometry: Geometry) -> range:
    """Row counts of steps with prompts that use `kernels.sequence_parallel`."""
    if config.tp == 1 or geometry.residual_is_read:
        return range(0)
    most = config.prefill_budget + buckets(config.max_seqs)[-1] * config.widest
    return range(-(-SEQUENCE_WORK // geometry.hidden**2), most + 1)
