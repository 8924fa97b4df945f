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


def _rank(index: int, run: Run, args: argparse.Namespace, store: str) -> None:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    run(args, connect(index, args.tp, device, -1, store, BOOT_S), device)
    sys.stdout.flush()
    os._exit(0)
