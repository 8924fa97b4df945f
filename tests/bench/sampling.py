"""What it costs to sample: `python -m tests.bench.sampling [--share 65536] [--rows 1 32] [--record MACHINE]`.

    greedy, drawn     every row's best of the slice, temperature 0 and 1 (`kernels.choose.local_best`)
    default           top_k 64 and top_p 0.95, as of requests that say nothing: a rank's candidates, and the choice among four times
                      as many (`kernels.candidates`); it comes behind `greedy`, and a gather is between
    masked 1, half    the logits of so many rows adjusted, each by a mask of half the ids (`kernels.adjust`)

Microseconds of a launch in a graph. Without a GPU each is launched once, in Triton's interpreter: that the bench reaches its end.
"""

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from engine.rank.adjustments import Adjustments
from kernels.adjust import adjust
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.choose import local_best, parts_of
from kernels.launch import processors
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.bench.record import Row, add_record_option, append
from tests.bench.timing import microseconds

STEP, SOFTCAP = 7, 30.0
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


def batch_of(rows: int, share: int, temperature: float, masked: int) -> SamplingBatch:
    """Rows of as many slots; the first `masked` have a mask."""
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    integers, floats = torch.zeros(rows, 3, dtype=torch.int64, device=DEVICE), torch.full((rows, 3), temperature, device=DEVICE)
    parameters = SlotParameters(integers, floats, torch.full((rows, 8), -1, dtype=torch.int32, device=DEVICE))
    adjustments = Adjustments(rows, range(share), DEVICE)
    bits = np.random.default_rng(rows).integers(-(2**31), 2**31, (masked, share // 32)).astype(np.int32)
    adjustments.set_masks(STEP, np.arange(masked, dtype=np.int32), bits)
    plan = torch.full((16,), STEP, dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros(rows, 64, dtype=torch.int32, device=DEVICE)
    return SamplingBatch(slots, torch.full_like(slots, 9), parameters, tokens, slots[:0], SOFTCAP, adjustments.tables, plan)


def default_batch(rows: int, share: int) -> SamplingBatch:
    """Rows that sample as by default."""
    batch = batch_of(rows, share, 1.0, 0)
    batch.parameters.integers[:, 1], batch.parameters.floats[:, 1:] = 64, torch.tensor([0.95, 0.0], device=DEVICE)
    return batch


def default(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Tokens of four ranks' candidates, were they all like this one's."""
    best = candidates(logits, block_peaks(logits, batch), batch, 0)
    chosen = torch.zeros((len(logits), 2), dtype=torch.int32, device=DEVICE)
    choose_candidates(best.repeat(1, 4, 1), batch, chosen)
    return chosen


def kinds(rows: int, share: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed."""
    parts = parts_of(share, rows, processors(DEVICE))
    logits = torch.randn(rows, share, generator=torch.Generator().manual_seed(rows)).to(DEVICE) * 8
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        batch = batch_of(rows, share, temperature, 0)
        yield name, lambda batch=batch: local_best(logits, batch, 0, parts)  # type: ignore[misc]
    usual = default_batch(rows, share)
    yield "default", lambda: default(logits, usual)
    for name, masked in (("masked 0", 0), ("masked 1", 1), ("masked half", max(1, rows // 2))):
        batch = batch_of(rows, share, 1.0, masked)
        yield name, lambda batch=batch: adjust(logits, batch, 0, parts)  # type: ignore[misc]


def time_us(launch: Callable[[], object]) -> float:
    if GPU:
        return microseconds(launch, DEVICE)
    assert isinstance(launch(), Tensor | SamplingBatch)
    return 0.0


def main() -> None:
    """A line for each kind and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=65536, help="ids of a rank's slice (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 100, 256])
    add_record_option(parser)
    args = parser.parse_args()
    measured: list[Row] = []
    for rows in args.rows:
        for name, run in kinds(rows, args.share):
            us = time_us(run)
            print(f"{rows:4} rows, {name:14} {us:8.1f}", flush=True)
            measured.append((f"sample-{rows}x{args.share}-{name.replace(' ', '-')}", "in a graph", us, "us"))
    append(measured, args.record, "tests.bench.sampling")


if __name__ == "__main__":
    main()
