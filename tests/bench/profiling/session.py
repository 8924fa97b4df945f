"""Measuring from a process that is no rank: one is made here, or with several GPUs a process each, and rank 0 answers."""

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
from torch.multiprocessing.spawn import spawn

from engine.config import Device, EngineConfig, engine_config
from engine.errors import ConfigError
from engine.geometry import DType, KVGroup
from engine.memory import CPU_BYTES
from engine.rank.builder import Rank, kv_bytes, load_rank
from engine.rank.parallel import Parallel, Single, connect
from tests.bench.profiling import bare_rank
from tests.bench.profiling.bare_rank import READ_RATE, pages_held
from tests.bench.profiling.decode_times import WARM_STEPS, StepTime, measured_read_rate, time_step
from tests.bench.profiling.loopback import Loopback
from tests.bench.profiling.step_profile import REPEATS, StepProfile, profile_step

Answer = TypeVar("Answer")
Cell = tuple[int, int]  # batch, context
_CONNECT_S = 120.0


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure. read_rate: bytes a second that floors are stated at; None: an H200's best, on other devices what a sum over
    a large tensor reaches. tp ranks on as many GPUs, or with `loopback` rank 0 of so many on one device."""

    folder: Path
    tp: int
    loopback: bool
    device: Device
    dtype: DType
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    prefill_budget: int
    read_rate: float | None = None
    debug_pages: bool = False
    trace: Path | None = None

    def config(self) -> EngineConfig:
        """The rank's settings; ConfigError where they are impossible."""
        if self.device == "cpu" and self.tp > 1 and not self.loopback:
            raise ConfigError(f"{self.tp} ranks are measured on {self.tp} GPUs; on a CPU, and on one GPU, ask for loopback")
        least = WARM_STEPS + REPEATS + 1
        if self.steps <= least:
            raise ConfigError(f"steps must be more than {least}, not {self.steps}")
        return engine_config(
            model=str(self.folder), tp=self.tp, device=self.device, dtype=self.dtype, load_format="dummy",
            max_seqs=max(self.batches), max_len=max(self.contexts) + self.steps + 1, prefill_budget=self.prefill_budget,
            debug_pages=self.debug_pages,
        )  # fmt: skip

    def cells(self) -> list[Cell]:
        """Every batch of every context, short contexts first."""
        return [(batch, context) for context, batch in product(sorted(self.contexts), sorted(self.batches))]


def profiles(request: ProfileRequest, report: Callable[[str], None]) -> list[StepProfile]:
    """The stages of a step of each batch and context that fits; torch's traces beside `request.trace`."""
    return _on_ranks(request, report, partial(profile_step, trace=request.trace))


def step_times(request: ProfileRequest, report: Callable[[str], None]) -> list[StepTime]:
    """The time of a step of each batch and context that fits."""
    return _on_ranks(request, report, time_step)


def _on_ranks(
    request: ProfileRequest, report: Callable[[str], None], measure: Callable[..., Answer]
) -> list[Answer]:
    request.config()
    device = torch.device(request.device)
    if request.tp == 1:
        return _measure(request, Single(), device, report, measure)
    if request.loopback:
        return _measure(request, Loopback(request.tp, device), device, report, measure)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (request, folder, report, measure), request.tp)
        answer: list[Answer] = pickle.loads((Path(folder) / "answer").read_bytes())  # our own child wrote it
        return answer


def _rank(index: int, request: ProfileRequest, folder: str, report: Callable[[str], None], measure: Callable[..., Answer]) -> None:
    device = torch.device("cuda", index)
    parallel = connect(index, request.tp, device, -1, f"{folder}/store", _CONNECT_S)
    answer = _measure(request, parallel, device, report if index == 0 else lambda _: None, measure)
    if index == 0:
        (Path(folder) / "answer").write_bytes(pickle.dumps(answer))
    os._exit(0)


@torch.inference_mode()
def _measure(
    request: ProfileRequest, parallel: Parallel, device: torch.device, report: Callable[[str], None], measure: Callable[..., Answer]
) -> list[Answer]:
    """Every cell that fits, on one rank of any group."""
    config = request.config()
    began = time.monotonic()
    loaded = load_rank(config, parallel, device, checked=False)
    report(f"weights in {time.monotonic() - began:.1f} s")
    groups, budget = config.kv_groups(loaded.geometry), _budget(loaded)
    cells = list(fitting(request.cells(), groups, request.steps, budget))
    if not cells:
        raise ConfigError(f"no batch and context asked for fits into {budget / 2**30:.1f} GiB of KV cache")
    rank = bare_rank.build(loaded, most_pages(groups, cells, request.steps), report, {batch for batch, _ in cells})
    rate = request.read_rate or _read_rate(device)
    answers = []
    for at, (batch, context) in enumerate(request.cells()):
        if (batch, context) in cells:
            answers.append(measure(rank, batch, context, request.steps, 1 + at * (request.steps + 1), rate))
            report(f"batch {batch}, context {context}: measured")
        else:
            report(f"batch {batch}, context {context}: does not fit")
    return answers


def fitting(cells: Sequence[Cell], groups: Sequence[KVGroup], steps: int, budget: int) -> Iterator[Cell]:
    """The cells, in order, that one set of pools within `budget` bytes can hold, each by itself."""
    taken: list[Cell] = []
    for cell in cells:
        pages = most_pages(groups, [*taken, cell], steps)
        if sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True)) <= budget:
            taken.append(cell)
            yield cell


def most_pages(groups: Sequence[KVGroup], cells: Sequence[Cell], steps: int) -> tuple[int, ...]:
    """Pages of pages group's pool with which every one of the cells, one at least, can run."""
    pages = [pages_held(groups, batch, context, steps) for batch, context in cells]
    return tuple(max(column) for column in zip(*pages, strict=True))


def _budget(rank: Rank) -> int:
    """Bytes that every rank may spend on pools."""
    if rank.device.type == "cpu":
        return CPU_BYTES
    mebibytes = torch.tensor([kv_bytes(rank) >> 20], dtype=torch.float32, device=rank.device)  # exact: far below 2^24
    return int(rank.parallel.all_gather(mebibytes).min()) << 20


def _read_rate(device: torch.device) -> float:
    if device.type == "cuda" and "H200" in torch.cuda.get_device_name(device):
        return READ_RATE
    return measured_read_rate(device)
