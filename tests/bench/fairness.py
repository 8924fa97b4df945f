"""What company costs, on real ranks: `python -m tests.bench.fairness [--record MACHINE]`.

    cached     seconds of a long prompt to its first token: never seen, and with fifteen sixteenths of it in the prefix cache
    fairness   TTFT of short prompts that come at random, and TPOT of streams that run all the time: quiet, and while two long
               prompts are always on their way; the target of a step is --target times the quiet TPOT without one
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.group import Group
from engine.config import EngineConfig, engine_config
from engine.front.client import EngineClient
from engine.geometry import read_geometry
from engine.protocol import AbortReason, SamplingParams
from tests.bench.record import Row, add_record_option, append
from tests.nano.random_models import model_folder
from tests.support.engine.outcomes import no_sink
from tests.support.engine.outputs import outputs

T = TypeVar("T")


@dataclass
class Load:
    """Requests of random tokens to one client; what their readers saw, in seconds."""

    client: EngineClient
    vocab: int
    rng: random.Random
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(300, self.vocab - 10) for _ in range(length)]

    async def ask(self, prompt: list[int], tokens: int, seed: int = 0) -> None:
        """One request to its end."""
        async for _ in outputs(self.client.generate(prompt, SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed))):
            pass

    async def short(self, length: int) -> None:
        """A short prompt: when its first token comes."""
        began = time.monotonic()
        stream = self.client.generate(self.prompt(length), SamplingParams(max_tokens=4))
        await anext(outputs(stream))
        self.ttft.append(time.monotonic() - began)
        stream.abort(AbortReason.client_gone)

    async def stream(self, until: float) -> None:
        """Answers one behind the other: how long each token takes behind the one before it."""
        while time.monotonic() < until:
            last = None
            stream = self.client.generate(self.prompt(32), SamplingParams(max_tokens=256))
            async with aclosing(outputs(stream)) as reader:
                async for output in reader:
                    now = time.monotonic()
                    if last is not None:
                        self.gaps.append((now - last) / len(output.tokens))
                        self.tokens += len(output.tokens)
                    last = now
                    if now > until:
                        break

    async def longs(self, until: float, length: int) -> None:
        """Long prompts one behind the other."""
        while time.monotonic() < until:
            await self.ask(self.prompt(length), 2)

    async def shorts(self, until: float, length: int, every: float) -> None:
        """Short ones at random."""
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < until:
                tasks.create_task(self.short(length))
                await asyncio.sleep(self.rng.expovariate(1 / every))


@dataclass(frozen=True)
class Felt:
    """Milliseconds: the 99th percentile (the largest below a hundred) of first tokens, and the mean of streams' tokens."""

    ttft_p99: float
    tpot: float
    shorts: int


async def felt(load: Load, args: argparse.Namespace, *, longs: int) -> Felt:
    """Streams and short prompts, with so many long ones beside them."""
    load.ttft.clear()
    load.gaps.clear()
    until = time.monotonic() + args.seconds
    beside = [load.longs(until, args.long) for _ in range(longs)]
    await asyncio.gather(*(load.stream(until) for _ in range(args.streams)), load.shorts(until, args.short, args.every), *beside)
    ordered = sorted(load.ttft)
    return Felt(1e3 * ordered[len(ordered) * 99 // 100], 1e3 * statistics.mean(load.gaps), len(ordered))


async def cached(load: Load, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of one token behind a long prompt, and behind one of which 15/16 were asked before; the best of three."""
    cold, hit = [], []
    for _ in range(3):
        prompt = load.prompt(args.long)
        await load.ask(prompt[: args.long * 15 // 16], 1)
        for spent, each in ((hit, prompt), (cold, load.prompt(args.long))):
            began = time.monotonic()
            await load.ask(each, 1)
            spent.append(time.monotonic() - began)
    return min(cold), min(hit)


def with_group(config: EngineConfig, body: Callable[[Load], Awaitable[T]]) -> T:
    """What `body` finds at a client of a group that lives so long."""

    async def run(group: Group) -> T:
        client = EngineClient(group.front_socket, group.media, sink=no_sink)
        await client.start()
        load = Load(client, read_geometry(Path(config.model)).vocab, random.Random(5))
        await load.ask(load.prompt(300), 8)
        found = await body(load)
        await client.close()
        return found

    group = Group.boot(config)
    try:
        return asyncio.run(run(group))
    finally:
        group.kill()


def measure(config: EngineConfig, args: argparse.Namespace) -> list[Row]:
    """(case, metric, value, unit) of everything."""
    cold, hit = with_group(config, lambda load: cached(load, args))
    print(f"a prompt of {args.long}: {cold:.3f} s to its first token, {hit:.3f} s where 15/16 are cached", flush=True)
    name = f"{args.model.removeprefix('dummy:').replace(':', '-')}-tp{args.tp}"
    rows = [(f"{name}-cold", "long prompt to its first token", cold, "s")]
    rows += [(f"{name}-hit", "long prompt to its first token, 15/16 cached", hit, "s")]
    return rows + (fairness(config, name, args) if args.seconds else [])


def fairness(config: EngineConfig, name: str, args: argparse.Namespace) -> list[Row]:
    """The rows of quiet and busy loads, with and without a target."""
    plain = with_group(config, lambda load: felt(load, args, longs=0))
    target = args.target * plain.tpot
    kept = msgspec.structs.replace(config, tpot_target_ms=target)

    async def both(load: Load) -> tuple[Felt, Felt]:
        return await felt(load, args, longs=0), await felt(load, args, longs=2)

    quiet, busy = with_group(kept, both)
    crowded = with_group(config, lambda load: felt(load, args, longs=2))
    print(f"no target, quiet  {plain}\nno target, busy   {crowded}\ntarget {target:.1f} ms, quiet {quiet}\ntarget, busy {busy}")
    print(f"TTFT p99 {busy.ttft_p99 / quiet.ttft_p99:.2f} x quiet, TPOT {busy.tpot / plain.tpot:.2f} x quiet without a target")
    rows: list[Row] = []
    for load, found in (("quiet", plain), ("busy", crowded), ("quiet-target", quiet), ("busy-target", busy)):
        case = f"{name}-{load}"
        rows += [(case, "TTFT p99 of short prompts", found.ttft_p99, "ms"), (case, "TPOT", found.tpot, "ms")]
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="random:31b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--short", type=int, default=100, help="tokens of a short prompt")
    parser.add_argument("--long", type=int, default=1800, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=0.6, help="seconds between short prompts, on average")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load; 0: no fairness")
    parser.add_argument("--target", type=float, default=1.5, help="of a step, in times of the quiet TPOT")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--prefill-budget", type=int, default=256)
    add_record_option(parser)
    return parser.parse_args()


def main() -> None:
    """Boot, measure, end."""
    args = arguments()
    rows = measure(
        engine_config(
            model=str(model_folder(args.model)),
            tp=args.tp,
            device=args.device,
            dtype="bfloat16" if args.device == "cuda" else "float32",
            load_format="dummy" if args.model.startswith("dummy:") else "safetensors",
            max_len=args.max_len,
            prefill_budget=args.prefill_budget,
        ),
        args,
    )
    append(rows, args.record, "tests.bench.fairness")


if __name__ == "__main__":
    main()
