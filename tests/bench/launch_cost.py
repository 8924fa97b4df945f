"""What the host spends on the forward of a step that is launched kernel by kernel, without a GPU:
`python -m tests.bench.launch_cost [--member 26b-a4b] [--rows 16 32 72 512] [--decodes 8] [--record MACHINE]`.

One rank of four, on a GPU that does nothing (`tests.support.idle_cuda`), with weights in memory that is never touched: model code,
wrappers, allocations, Triton's launch and its launcher in C run as beside a GPU. Left out: the driver's time for a launch (a few
microseconds), products of more than 64 rows by cuBLAS, sums over ranks, and what happens before the forward. Shown is the least CPU
time of several forwards, each way in turn: all launches by Triton; as the engine launches; with none, which is what the rest takes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.geometry import kv_groups
from engine.rank.attention import AttentionConfig, attention_backend, paged
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.slices import allocate
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import FirstOfGroup
from kernels import launch as launcher
from kernels import linear
from kernels.launch import launch
from kernels.relaunch import launch_key
from tests.bench.record import Row, add_record_option, append
from tests.support.engine.listed_steps import MAX_LEN, SLOTS, TP, geometry
from tests.support.idle_cuda import use_idle_cuda

CPU = torch.device("cpu")
WAYS = ("by Triton", "as the engine does", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--member", default="31b")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 72, 512], help="of steps, decode rows among them")
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    add_record_option(parser)
    options = parser.parse_args()
    use_idle_cuda()
    take_kernels()
    step = mixed_steps(options.member, options.decodes)
    found: list[Row] = []
    for rows in options.rows:
        forward = step(rows - options.decodes)
        launches, seconds = count(forward), least(forward, options.repeats)
        triton, ours, rest = (1000 * seconds[way] for way in WAYS)
        each = [1000 * (way - rest) / launches for way in (triton, ours)]
        print(
            f"{options.member} TP={TP}, {rows} rows: {launches} launches; forward {triton:.1f} ms by Triton, {ours:.1f} as the "
            f"engine launches, {rest:.1f} without; a launch {each[0]:.1f} and {each[1]:.1f} us", flush=True,
        )  # fmt: skip
        case = f"{options.member}-tp{TP}-mixed-{rows}-decodes-{options.decodes}"
        found += [(case, f"host time of a forward, launches {way}", 1000 * seconds[way], "ms") for way in WAYS]
    append(found, options.record, "tests.bench.launch_cost")


def mixed_steps(member: str, decodes: int) -> Callable[[int], Callable[[], object]]:
    """From a number of prompt tokens to the forward of a step of them and `decodes` decode rows."""
    shape = geometry(member)
    model = Gemma4(shape, FirstOfGroup(TP), torch.bfloat16, CPU)
    allocate(model, TENSORS)
    cache = KVCache([GroupCache(group, 100, SLOTS, MAX_LEN, CPU) for group in kv_groups(shape, TP)])
    attention = attention_backend(AttentionConfig(), shape, cache, TP, (decodes + 1,), CPU)  # of the same parts as `triton`

    def step(chunk: int) -> Callable[[], object]:
        rows = chunk + decodes
        ids, positions, slots = torch.zeros((3, rows), dtype=torch.int32).unbind()
        pages = tuple(torch.zeros((decodes, group.read_width), dtype=torch.int32) for group in cache)
        rope = {key: torch.empty((rows, 2 * len(frequency))) for key, frequency in model.frequencies.items()}
        chunks = {"prompts": chunk, "chunk_list": torch.tensor([[0, 0, 0, chunk]], dtype=torch.int32)}
        batch = ForwardBatch(ids, positions, slots, rope, pages, torch.arange(chunk - 1, rows), **chunks)
        return lambda: model.states(batch, attention)

    return step


def take_kernels() -> None:
    """Wrappers launch for tensors of the CPU what they would for a GPU's; the library's products are left out."""
    assert hasattr(paged, "processors")  # imported: names are set in it, too
    linear._linear_reference = lambda x, weight, out: out
    set_everywhere("enabled", lambda x, module="": True)
    set_everywhere("processors", lambda device: 132)


def set_everywhere(name: str, value: Any) -> None:
    """Sets what our modules have imported under `name`; `launch` itself stays."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("kernels.", "engine.rank.")) and hasattr(module, name) and module is not launcher:
            setattr(module, name, value)


def launch_nothing(*args: Any, **options: Any) -> None:
    """In place of `launch`."""


def by_triton(*parts: Any) -> None:
    """In place of `launch_key`: no launch is known."""


def count(forward: Callable[[], object]) -> int:
    """The launches of a forward; its kernels are compiled."""
    launches: list[None] = []

    def counted(*args: Any, **options: Any) -> None:
        launches.append(launch(*args, **options))

    set_everywhere("launch", counted)
    with torch.inference_mode():
        forward()
    return len(launches)


def least(forward: Callable[[], object], repeats: int) -> dict[str, float]:
    """Seconds of a forward each way."""
    seconds: dict[str, float] = {}
    for turn in range(repeats + 1):
        for way in WAYS:
            set_everywhere("launch", launch_nothing if way == "none" else launch)
            launcher.launch_key = by_triton if way == "by Triton" else launch_key
            with torch.inference_mode():
                began = time.thread_time()
                forward()
                took = time.thread_time() - began
            if turn:
                seconds[way] = min(took, seconds.get(way, took))
    return seconds


if __name__ == "__main__":
    main()
