"""What a group does, measured: time to ready, TTFT, TPOT, throughput. `make bench`, or `python -m tests.bench.run --help`.

Boots one group without Ray and drives it through EngineClient with random token ids, greedy, without stop ids. Prints what it
finds, and appends it to tests/bench/results.csv when --record names the machine.
"""

import argparse
import asyncio
import csv
import datetime as dt
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.group import Group
from deploy.models.resolve import resolve
from engine.config import engine_config
from engine.front.client import EngineClient
from engine.geometry import read_geometry
from engine.protocol import SamplingParams

RESULTS = Path(__file__).with_name("results.csv")


@dataclass(frozen=True)
class Timing:
    """One request: seconds to its first token, and a token after that."""

    ttft: float
    tpot: float


async def one(client: EngineClient, prompt: list[int], tokens: int) -> Timing:
    """Run one request to its length."""
    began, first, last, count = time.monotonic(), 0.0, 0.0, 0
    async for output in client.generate(prompt, SamplingParams(max_tokens=tokens)):
        last = time.monotonic()
        first = first or last
        count += len(output.tokens)
    assert count == tokens, (count, tokens)
    return Timing(first - began, (last - first) / max(count - 1, 1))


async def batch(client: EngineClient, rng: random.Random, vocab: int, size: int, prompt: int, tokens: int) -> dict[str, float]:
    """`size` requests at once: medians and the rate."""
    prompts = [[rng.randrange(300, vocab - 10) for _ in range(prompt)] for _ in range(size)]
    began = time.monotonic()
    timings = await asyncio.gather(*(one(client, ids, tokens) for ids in prompts))
    seconds = time.monotonic() - began
    return {
        "ttft_ms": 1e3 * statistics.median(timing.ttft for timing in timings),
        "tpot_ms": 1e3 * statistics.median(timing.tpot for timing in timings),
        "output_tok_s": size * tokens / seconds,
    }


async def measure(group: Group, vocab: int, args: argparse.Namespace) -> dict[str, float]:
    """All batches, after one request to warm up."""
    client = EngineClient(group.front_socket)
    await client.start()
    rng = random.Random(args.seed)
    await batch(client, rng, vocab, 1, args.prompt, 8)
    figures: dict[str, float] = {}
    for size in args.batches:
        found = await batch(client, rng, vocab, size, args.prompt, args.tokens)
        figures |= {f"{name} batch {size}": value for name, value in found.items()}
        print(size, {name: round(value, 2) for name, value in found.items()}, flush=True)
    await client.close()
    return figures


def record(figures: dict[str, float], machine: str, module: str = "tests.bench.run") -> None:
    """Append to the results file, with commit and command; a name's first word ends in its unit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    date = dt.datetime.now(tz=dt.UTC).date()
    command = f"python -m {module} " + " ".join(sys.argv[1:])
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for name, value in figures.items():
            unit = name.split()[0].rsplit("_", 1)[-1]
            writer.writerow([date, commit, machine, command, name, f"{value:.3f}", unit, ""])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="random:31b")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=512, help="prefill tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", metavar="MACHINE", help="append to results.csv under this machine's name")
    return parser.parse_args()


def main() -> None:
    """Boot, measure, end."""
    args = arguments()
    folder = resolve(args.model)
    config = engine_config(
        model=str(folder),
        tp=args.tp,
        device=args.device,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        load_format="dummy" if args.model.startswith("dummy:") else "safetensors",
        max_seqs=max(args.batches),
        max_len=args.max_len,
        prefill_budget=args.budget,
    )
    group = Group.boot(config)
    try:
        print(f"ready in {group.boot_s:.1f} s, pages {group.pages}", flush=True)
        figures = {"ready_s": group.boot_s}
        figures |= asyncio.run(measure(group, read_geometry(folder).vocab, args))
    finally:
        group.close()
    if args.record:
        record(figures, args.record)


if __name__ == "__main__":
    main()
