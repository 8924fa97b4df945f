"""Loads a running server: `python -m tests.bench.load [--concurrency 1 8 32] [--requests 200 | --seconds 60]`.

For each level percentiles in milliseconds, throughput, and the ledger: sent = finished + refused + failed + cut + timeout +
unreachable, every request exactly once. Ends with 1 if a request did not finish, or is not accounted for. A closed load of random
words, with pictures or without. --load and --ids: the requests of `tests.bench.engine --loads`, to be held against the engine's own
rate. For other loads there are the clients of vLLM and SGLang (docs/api.md).
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle

import httpx
import numpy as np

from tests.support.load.generator import (
    Ledger,
    Lengths,
    Level,
    LoadRun,
    Pictures,
    Prompts,
    Scale,
    calibrate,
    connected,
    load_lengths,
)
from tests.support.load.request import Endpoint

SHARES = (50, 90, 99)
LONGEST = 9000  # tokens of a request's prompt and answer, of the loads


def times_ms(ledger: Ledger) -> dict[str, list[float]]:
    """Milliseconds of each kind, of the requests that finished."""
    done = ledger.finished
    seconds: dict[str, list[float | None]] = {
        "time to first token": [record.ttft for record in done],
        "time per output token": [record.tpot for record in done],
        "between events": [gap for record in done for gap in record.gaps],
        "whole request": [record.e2e for record in done],
    }
    return {name: [1000 * value for value in values if value is not None] for name, values in seconds.items()}


def report(ledger: Ledger) -> Iterator[str]:
    """The lines of one level."""
    for name, values in times_ms(ledger).items():
        if values:
            shares = ", ".join(f"p{share} {value:.1f}" for share, value in zip(SHARES, np.percentile(values, SHARES), strict=True))
            yield f"  {name:22} mean {np.mean(values):.1f}, {shares} ms"
    prompt, output = (sum(getattr(record, name) for record in ledger.finished) for name in ("prompt_tokens", "output_tokens"))
    tokens = f"{output / ledger.seconds:.1f} output and {prompt / ledger.seconds:.1f} prompt tokens a second"
    yield f"  {len(ledger.finished) / ledger.seconds:.2f} requests, {tokens}"
    yield f"  {({name: value for name, value in ledger.balance().items() if value})}"
    yield from sorted({f"  {record.end}: {record.detail}" for record in ledger.records if record.end != "finished"})[:5]


async def loaded(target: Endpoint, levels: Sequence[Level], prompts_of: Callable[[Scale], Prompts]) -> list[Ledger]:
    """Run every level, one after the other, and print each report."""
    ledgers = []
    async with connected(target) as client:
        prompts = prompts_of(await calibrate(client, target, 0))
        for level in levels:
            ledgers.append(await LoadRun(client, target, prompts).run(level))
            print("\n".join([f"{level.concurrency} clients, {ledgers[-1].seconds:.1f} s", *report(ledgers[-1])]), flush=True)
    return ledgers


def first_model(url: str) -> str:
    """The first that /v1/models names."""
    return str(httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()["data"][0]["id"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.load", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that /v1/models names")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8])
    parser.add_argument("--requests", type=int, help="of each level (default: 32, unless --seconds)")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--prompt", type=int, nargs=2, default=[128, 128], metavar=("LOW", "HIGH"), help="tokens")
    parser.add_argument("--output", type=int, nargs=2, default=[64, 64], metavar=("LOW", "HIGH"), help="tokens")
    parser.add_argument("--pictures", type=int, nargs=3, metavar=("COUNT", "WIDTH", "HEIGHT"), help="of each request")
    parser.add_argument("--load", choices=["mixed", "long"], help="lengths, and unless --requests their number")
    parser.add_argument("--ids", type=int, metavar="N", help="prompts are token ids below N, of /v1/completions")
    args = parser.parse_args(arguments)
    usual = len(load_lengths(args.load, LONGEST)) if args.load else 32
    requests = args.requests or (None if args.seconds else usual)
    levels = [Level(size, requests, args.seconds) for size in args.concurrency]
    target = Endpoint(args.url, args.model or first_model(args.url))
    pictures = Pictures(*args.pictures) if args.pictures else None
    lengths = cycle(load_lengths(args.load, LONGEST)) if args.load else None
    prompts_of = partial(Prompts, Lengths(*args.prompt), Lengths(*args.output), pictures=pictures, lengths=lengths, ids=args.ids)
    ledgers = asyncio.run(loaded(target, levels, prompts_of))
    return int(not all(ledger.balance()["conserved"] and len(ledger.finished) == ledger.sent for ledger in ledgers))


if __name__ == "__main__":
    sys.exit(main())
