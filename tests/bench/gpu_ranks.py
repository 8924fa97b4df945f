"""A bench on several GPUs: its ranks, a process and a GPU each."""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import multiprocessing

from engine.rank.parallel import Parallel, connect

BOOT_S = 120.0
Run = Callable[[argparse.Namespace, Parallel, torch.device], None]


def run_on_gpus(run: Run, args: argparse.Namespace) -> None:
    """`run`, a module's own function, on each of `args.tp` ranks, to their end; raises what the first that failed said."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (run, args, str(Path(folder) / "store")), args.tp)


def milliseconds(parallel: Parallel, run: Callable[[], object]) -> float:
    """Of the fastest of five runs on this rank's GPU, each of which all ranks begin together."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(5):
        parallel.all_gather(torch.zeros(1, device="cuda"))
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, float(start.elapsed_time(end)))
    return best


def _rank(index: int, run: Run, args: argparse.Namespace, store: str) -> None:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    run(args, connect(index, args.tp, device, -1, store, BOOT_S), device)
    sys.stdout.flush()
    os._exit(0)
