"""bf16 on GPUs against fp32 of the same weights: no further off than transformers' own bf16 is.

A case is a folder (a nano checkpoint, or a public shape with random weights drawn on the device), a TP size and prompts.
QUARTET_GPU_DEVICE=cpu runs the very same comparison on the CPU.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.channel import create_shared
from engine.geometry import read_geometry
from kernels.allreduce import shared_bytes
from tests.gpu.spmd import Job
from tests.nano.random_models import model_folder

DEVICE = os.environ.get("QUARTET_GPU_DEVICE", "cuda")
RANKS = 4 if DEVICE == "cpu" else min(4, torch.cuda.device_count())  # of a group over several GPUs
ROOT = Path(__file__).resolve().parents[2]
EXACT = 1e-4  # fp32 on both sides, largest logprob error: another order of sums
SENSITIVE = 100  # how many times a planted fault must exceed a tolerance
RATIO = 1.25  # how much larger than transformers' own bf16 errors ours may be
MEMBERS = ("31b", "26b-a4b", "12b", "e4b", "e2b")


def run_ranks(size: int, settings: dict[str, object], timeout_s: float) -> list[Tensor]:
    """Rank 0's logits; all ranks are killed at the first failure or at the bound."""
    with tempfile.TemporaryDirectory() as scratch:
        out, reduce = Path(scratch) / "logits.pt", create_shared("reduce", shared_bytes(size))
        jobs = [
            Job(rank=rank, size=size, device=DEVICE, store=f"{scratch}/store", reduce=reduce, out=str(out), **settings)
            for rank in range(size)
        ]
        command = [sys.executable, "-m", "tests.gpu.spmd"]
        ranks = [subprocess.Popen([*command, msgspec.json.encode(job).decode()], cwd=ROOT, pass_fds=(reduce,)) for job in jobs]
        try:
            wait_all(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            os.close(reduce)
        return torch.load(out, weights_only=True)


def wait_all(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    while any(rank.poll() is None for rank in ranks):
        codes = [rank.poll() for rank in ranks]
        assert not any(codes), f"exit codes {codes}"
        assert time.monotonic() < deadline, f"the ranks are not done in time: {codes}"
        time.sleep(0.05)
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)


def run_judge(device: str, settings: dict[str, object], dtype: str, timeout_s: float) -> list[Tensor]:
    """transformers' logits, from a process of its own, so that its memory is free again."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits.pt"
        asked = json.dumps({**settings, "dtype": dtype, "device": device, "out": str(out)})
        subprocess.run([sys.executable, "-m", "tests.gpu.judge", asked], cwd=ROOT, check=True, timeout=timeout_s)
        return torch.load(out, weights_only=True)


def errors(found: list[Tensor], truth: list[Tensor]) -> tuple[float, float]:
    """(mean, largest) absolute error of the logprobs of the truth's 64 likeliest tokens; the largest is averaged over prompts."""
    means, largest = [], []
    for ours, theirs in zip(found, truth, strict=True):
        right = theirs.double().log_softmax(-1)
        top = right.topk(64, dim=-1).indices
        off = (ours.double().log_softmax(-1) - right).gather(-1, top).abs()
        means.append(off.mean().item())
        largest.append(off.max().item())
    return statistics.mean(means), statistics.mean(largest)


def case(model: str, prompts: int, length: int, rows: int, decodes: int) -> dict[str, object]:
    """Settings of a run: random prompts from a printed seed."""
    folder = model_folder(model)
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"{model}: prompts from seed {seed}", flush=True)
    rng = random.Random(seed)
    vocab = min(read_geometry(folder).vocab, 250_000)
    ids = [[rng.randrange(300, vocab - 10) for _ in range(length)] for _ in range(prompts)]
    load = "dummy" if model.startswith("dummy:") else "safetensors"
    return {"folder": str(folder), "load": load, "prompts": ids, "rows": rows, "decodes": decodes}


def decoded(logits: list[Tensor], settings: dict[str, object]) -> list[Tensor]:
    """The decode rows of all prompts but the first: where a planted page is read."""
    return [rows[-int(str(settings["decodes"])) :] for rows in logits[1:]]


def compare(model: str, size: int, settings: dict[str, object], timeout_s: float, judges: tuple[str, str]) -> None:
    """Ours in bf16 at `size` against transformers in fp32 and in bf16, and each planted fault against the same truth."""
    asked = {key: value for key, value in settings.items() if key != "decodes"}
    with ThreadPoolExecutor(2) as pool:
        dtypes = ("float32", "bfloat16")
        halves = [pool.submit(run_judge, judge, asked, dtype, timeout_s) for judge, dtype in zip(judges, dtypes, strict=True)]
        truth, theirs = (half.result() for half in halves)
    ours = run_ranks(size, {**settings, "dtype": "bfloat16"}, timeout_s)
    (mean, worst), (their_mean, their_worst) = errors(ours, truth), errors(theirs, truth)
    print(f"{model} tp {size} bf16 logprob error, mean and largest: ours {mean:.5f} {worst:.4f}", end="; ")
    print(f"transformers {their_mean:.5f} {their_worst:.4f}")
    agree = [(a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in zip(ours, truth, strict=True)]
    print(f"{model} tp {size} greedy token match rate with fp32: {sum(agree) / len(agree):.4f}", flush=True)
    for fault in ("sliding", "full", "reduce") if size > 1 else ("sliding", "full"):
        broken = run_ranks(size, {**settings, "dtype": "bfloat16", "fault": fault}, timeout_s)
        off, largest = errors(decoded(broken, settings), decoded(truth, settings))
        bound = RATIO * errors(decoded(theirs, settings), decoded(truth, settings))[0]
        print(f"{model} tp {size} fault {fault}: mean {off:.4f}, {off / bound:.1f}x the bound; largest {largest:.3f}", flush=True)
        assert off > bound, f"{fault} goes unnoticed"
    assert mean <= RATIO * their_mean
    assert worst <= RATIO * their_worst


def exact(model: str, size: int, settings: dict[str, object], timeout_s: float) -> None:
    """Ours in fp32 at `size` against transformers in fp32, within EXACT; each planted fault exceeds it SENSITIVE times."""
    asked = {key: value for key, value in settings.items() if key != "decodes"}
    truth = run_judge(DEVICE, asked, "float32", timeout_s)
    mean, worst = errors(run_ranks(size, {**settings, "dtype": "float32"}, timeout_s), truth)
    print(f"{model} tp {size} fp32 logprob error, mean and largest: {mean:.1e} {worst:.1e}", flush=True)
    for fault in ("sliding", "full", "reduce") if size > 1 else ("sliding", "full"):
        broken = run_ranks(size, {**settings, "dtype": "float32", "fault": fault}, timeout_s)
        off = errors(decoded(broken, settings), decoded(truth, settings))[1]
        print(f"{model} tp {size} fp32 fault {fault}: largest {off:.2f}, {off / EXACT:.0f}x the tolerance", flush=True)
        assert off > SENSITIVE * EXACT, f"{fault} goes unnoticed"
    assert worst <= EXACT
