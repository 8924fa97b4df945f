"""One rank of the engine's model on its device, prompts prefilled in chunks and then decoded: `python -m tests.gpu.spmd '<json>'`.

Rank 0 saves soft-capped logits, fp32 [rows, vocab] of each prompt's last `rows` positions. Every rank compares the bits of every
step's final hidden rows with all others. `fault` plants one: a wrong page in a group, or an all-reduce left out.
"""

import itertools
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.geometry import Geometry, kv_groups, read_geometry
from engine.quantisation import read_quantisation
from engine.rank.attention import attention_backend
from engine.rank.batch import Chunk, ForwardBatch, eager_batch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.loader import load
from engine.rank.load.random_fill import dummy
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, connect, self_check
from engine.rank.start_checks import residual_rms

Maker = Callable[[], ForwardBatch]
CHUNK = 384  # crosses page and window edges at every step


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks compute. `decodes`: how many of the last positions run as decode rows; fault: sliding, full, reduce.
    attention_decode: the backend of decode rows; none: the device's."""

    rank: int
    size: int
    device: str
    dtype: str
    folder: str
    load: str
    prompts: list[list[int]]
    rows: int
    decodes: int
    out: str
    store: str = ""
    reduce: int = -1
    fault: str = ""
    attention_decode: str | None = None


class SkippedReduce:
    """A planted fault: all-reduce number 3 of every forward yields this rank's own part only."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self.rank, self.size = parallel.rank, parallel.size
        self.all_gather = parallel.all_gather
        self.calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls += 1
        own = x.clone()
        total = self._parallel.all_reduce(x)
        return own if self.calls == 4 else total


def build(job: Job, parallel: Parallel, device: torch.device) -> Gemma4:
    """The model with its weights, and a line about it."""
    began = time.monotonic()
    geometry = read_geometry(Path(job.folder))
    model = Gemma4(geometry, parallel, getattr(torch, job.dtype), device)
    if job.load == "dummy":
        dummy(model, TENSORS)
    else:
        load(model, TENSORS, Path(job.folder), read_quantisation(Path(job.folder)))
    rms = residual_rms(model, kv_groups(geometry, parallel.size, dtype=job.dtype))
    say(job, f"weights in {time.monotonic() - began:.1f} s, residual rms {rms:.3f}")
    return model


def say(job: Job, text: str) -> None:
    print(f"rank {job.rank}: {text}", flush=True)


def caches(geometry: Geometry, job: Job, device: torch.device) -> KVCache:
    """Pages of every prompt in shuffled order; no window is released, so that one table serves the whole run."""
    longest = max(map(len, job.prompts))
    made = []
    for group in kv_groups(geometry, job.size, dtype=job.dtype):
        each = -(-longest // group.page)
        count = each * len(job.prompts) + 1
        cache = GroupCache(group, count, len(job.prompts), longest, device)
        pages = random.Random(7).sample(range(1, count), count - 1)
        cache.table[:, :each] = torch.tensor(pages, dtype=torch.int32, device=device).view(len(job.prompts), each)
        made.append(cache)
    return KVCache(made)


def batches(job: Job, slot: int, cache: KVCache, model: Gemma4, device: torch.device) -> Iterator[tuple[int, bool, Maker]]:
    """One prompt's chunks, then its decode rows, each as (first position, whether it decodes, how to make its batch); logits are
    wanted of the last `rows` positions. A batch reads the page tables when it is made."""
    ids = torch.tensor(job.prompts[slot], device=device)
    wanted = len(ids) - job.rows
    prefill = len(ids) - job.decodes
    edges = [*range(0, prefill, CHUNK), prefill]
    spans = list(itertools.pairwise(edges)) + [(p, p + 1) for p in range(prefill, len(ids))]
    for start, end in spans:
        decode = start >= prefill
        positions = torch.arange(start, end, device=device)
        logit_rows = torch.arange(max(0, min(wanted, end) - start), end - start, device=device)
        chunks = () if decode else (Chunk(slot, start, end, 0),)
        slots = torch.full_like(positions, slot)
        made = partial(eager_batch, cache, model.frequencies, ids[start:end], slots, positions, chunks)
        yield start, decode, partial(with_logits, made, logit_rows)


def with_logits(make: Maker, rows: Tensor) -> ForwardBatch:
    """The batch, whose logits are wanted of `rows` alone."""
    return replace(make(), logit_rows=rows)


def check_bits(hidden: Tensor, parallel: Parallel) -> None:
    """Every rank holds the same final hidden rows, bit for bit."""
    bits = zlib.crc32(hidden.contiguous().cpu().view(torch.uint8).numpy().tobytes()) & 0x7FFFFF
    seen = parallel.all_gather(torch.full((16,), float(bits), dtype=torch.float32, device=hidden.device))
    assert bool((seen == bits).all()), f"the ranks' hidden rows differ: {seen[::16].tolist()}"


@torch.inference_mode()
def run(job: Job, model: Gemma4, parallel: Parallel, device: torch.device) -> list[Tensor]:
    """Logits of each prompt."""
    geometry, cache = model.geometry, caches(model.geometry, job, device)
    asked = EngineConfig(model="", device="cuda", attention_decode=job.attention_decode)
    attention = attention_backend(asked, geometry, cache, job.size, (job.rows,))
    found, began, steps = [], time.monotonic(), 0
    for slot in range(len(job.prompts)):
        rows = []
        for start, decode, make in batches(job, slot, cache, model, device):
            if job.fault in ("sliding", "full") and slot and decode:
                wrong_page(cache, job.fault, slot, start)
            batch = make()
            if isinstance(parallel, SkippedReduce):
                parallel.calls = 0
            hidden = model.states(batch, attention)[1]
            steps += 1
            if not hidden.shape[0]:
                continue
            if not job.fault:
                check_bits(hidden, parallel)
            logits = parallel.all_gather(model.head.logits(hidden))[:, : geometry.vocab]
            cap = geometry.softcap
            rows.append((logits if cap is None else torch.tanh(logits / cap) * cap).cpu())
        found.append(torch.cat(rows))
    say(job, f"{steps} steps in {time.monotonic() - began:.1f} s, hidden bits equal on all ranks: {not job.fault}")
    return found


def wrong_page(cache: KVCache, name: str, slot: int, position: int) -> None:
    """The page before the one being written, in one group, becomes another prompt's."""
    for group in cache:
        if group.group.name == name:
            entry = position // group.group.page - 1
            group.table[slot, entry] = group.table[slot - 1, entry]


def main() -> None:
    """Entry point of one rank."""
    job = msgspec.json.decode(sys.argv[1], type=Job)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", job.rank) if job.device == "cuda" else torch.device("cpu")
    if job.device == "cuda":
        torch.cuda.set_device(device)
    parallel = connect(job.rank, job.size, device, job.reduce, job.store, 120.0)
    self_check(parallel, device, getattr(torch, job.dtype))
    say(job, f"collectives checked on {device}")
    if job.fault == "reduce":
        parallel = SkippedReduce(parallel)
    model = build(job, parallel, device)
    found = run(job, model, parallel, device)
    if job.rank == 0:
        torch.save(found, job.out)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
