"""Compiles a rank's kernels while it loads weights: `python -m engine.rank.compile_ahead '<CompileArgs>'`.

Each process lists a share of the launches on the meta device, and fills Triton's disk cache.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec
import torch

from engine.config import EngineConfig
from engine.rank.builder import build, load_rank
from engine.rank.parallel import FirstOfGroup
from kernels.precompile import ListedLaunch, listed, precompile, set_cache_keys

PROCESSES = 8


class CompileArgs(msgspec.Struct, frozen=True):
    """Process `share` of `shares`. parent: the rank's pid."""

    config: EngineConfig
    target: tuple[int, int]
    processors: int
    share: int
    shares: int
    parent: int


def start(config: EngineConfig) -> list[subprocess.Popen[bytes]]:
    processes = min(PROCESSES, len(os.sched_getaffinity(0)) // 2)
    target = torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = []
    for share in range(processes):
        args = CompileArgs(config, target, properties.multi_processor_count, share, processes, os.getpid())
        command = [sys.executable, "-m", "engine.rank.compile_ahead", msgspec.json.encode(args).decode()]
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment))
    return started


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def launches(args: CompileArgs) -> list[ListedLaunch]:
    with listed(args.target, args.processors) as all_launches, torch.inference_mode():
        rank = load_rank(args.config, FirstOfGroup(args.config.tp), torch.device("meta"), checked=False)
        build(rank, [2 for _ in args.config.kv_groups]).list_launches(args.share, args.shares)
    return list({launch.variant: launch for launch in reversed(all_launches)}.values())[::-1]


def main() -> None:
    """Each process starts elsewhere, since many variants are in several shares."""
    args = msgspec.json.decode(sys.argv[1], type=CompileArgs)
    set_cache_keys()
    signal.alarm(int(args.config.boot_timeout_s))
    variants = launches(args)
    first = len(variants) * args.share // args.shares
    for launch in variants[first:] + variants[:first]:
        if os.getppid() != args.parent:
            return
        precompile(launch, args.target)


if __name__ == "__main__":
    main()
