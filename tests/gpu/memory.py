"""What a GPU really holds, beside what `quartet plan` says: `python -m tests.gpu.memory [--model dummy:e4b] [--tp 1]`.

A real group boots (core, rings, ranks; the weights of a `dummy:` are drawn on the GPU), answers requests, and stops; its ranks are
`weighed`. Prints Markdown: figure, engine, plan, difference, in MiB, of the rank that had the least left. Exit code 1 when weights,
or what both know of a CPU, differ. Without a GPU it says so, and compares just that.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.capability import probe
from cluster.group import Group
from deploy.cli import sizing
from deploy.models.resolve import resolve
from engine.config import EngineConfig, engine_config
from engine.geometry import read_geometry
from engine.protocol import SamplingParams
from tests.gpu.weighed import STAGES, Stage, Weighed
from tests.support.engine.drive import Request, ask_all, attached, still

Row = tuple[str, int, int | None]  # figure, engine, plan; bytes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.memory", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="dummy:e4b", help="dummy:<member>: a public shape; nano:<member>")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if probe().gpus else "cpu")
    parser.add_argument("--max-seqs", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--prefill-budget", type=int, default=512)
    parser.add_argument("--memory-fraction", type=float, default=0.9)
    parser.add_argument("--requests", type=int, help="at once (default: one a slot)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each request's prompt")
    args = parser.parse_args()
    common, device = measured(configured(args), args.requests or args.max_seqs, args.prompt)
    tell([*common, *device])
    if not device:
        print("no GPU: what CUDA, NCCL and torch hold beside weights and pools was not measured")
    sys.exit(any(ours != plan for _, ours, plan in (common[:1] if device else common)))


def measured(config: EngineConfig, requests: int, prompt: int) -> tuple[list[Row], list[Row]]:
    """Boot, work, stop: the rows of `both_know`, and of `device_knows` where there is one."""
    with tempfile.TemporaryDirectory() as folder:
        command = Weighed(Path(folder))
        with Group.boot(config, command) as group:
            asyncio.run(work(group, requests, prompt))
            assert group.close(timeout_s=60), "the group did not stop in time"
            fullest = min(range(config.tp), key=lambda rank: group.loaded[rank].kv_bytes)
            stages = {name: command.stage(fullest, name) for name in STAGES} if config.device == "cuda" else {}
    common = list(both_know(group, stages["loaded"].total if stages else 0))
    return common, list(device_knows(common, stages)) if stages else []


def configured(args: argparse.Namespace) -> EngineConfig:
    """As a replica would make it, but for what only Ray needs."""
    return engine_config(
        model=str(resolve(args.model)),
        tp=args.tp,
        device=args.device,
        dtype="bfloat16",
        load_format="dummy" if args.model.startswith("dummy:") else "safetensors",
        max_seqs=args.max_seqs,
        max_len=args.max_len,
        prefill_budget=args.prefill_budget,
        memory_fraction=args.memory_fraction,
        boot_timeout_s=300,
        step_timeout_s=120,
    )


async def work(group: Group, requests: int, length: int) -> None:
    """All requests at once: random prompts of `length` tokens, 32 out; then the core is told to stop."""
    rng, vocab = random.Random(0), read_geometry(Path(group.config.model)).vocab
    prompts = [[rng.randrange(300, vocab) for _ in range(length)] for _ in range(requests)]
    params = SamplingParams(max_tokens=32, temperature=1.0, top_p=0.9, seed=1)
    async with attached(group) as (client, _):
        answers = await ask_all(client, [Request(prompt, params) for prompt in prompts], len(prompts))
        load = await still(client)
        client.stop()
    assert all(answer.end == "length" for answer in answers), {answer.end for answer in answers}
    print(f"{len(answers)} requests answered in {load.step} steps, {load.preemptions} preemptions", flush=True)


def both_know(group: Group, total: int) -> Iterator[Row]:
    """What a rank said at boot and what its pages take, beside the plan for a device of `total` bytes."""
    loaded = min(group.loaded, key=lambda each: each.kv_bytes)
    weights, _ = sizing.weight_bytes_and_count(group.config)
    planned = sizing.size(group.config, weights, total)
    yield "weights", loaded.weight_bytes, weights
    yield "KV budget", loaded.kv_bytes, planned.budget
    for ours, plan in zip(sizing.pools(group.config, group.pages), planned.pools, strict=True):
        yield f"KV pool, {ours.group.name}", ours.pool_bytes, plan.pool_bytes
        yield f"page table, {ours.group.name}", ours.table_bytes, plan.table_bytes


def device_knows(rows: Sequence[Row], stages: dict[str, Stage]) -> Iterator[Row]:
    """What only a device can tell; `rows` are those of `both_know`. The plan's reserve is for CUDA, NCCL and torch."""
    (_, weights, _), _, *pools = rows
    planned_pools = sum(plan or 0 for _, _, plan in pools)
    planned = stages["loaded"].total - weights - sizing.RESERVE - planned_pools
    held = weights + sum(ours for _, ours, _ in pools)
    yield "the device", stages["loaded"].total, stages["loaded"].total
    yield "allocated since the weights", stages["ready"].allocated - stages["loaded"].allocated, planned_pools
    yield "a CUDA context", stages["started"].used, None
    yield "beside weights: budget taken", stages["loaded"].used - weights, sizing.RESERVE
    yield "beside weights and pools: ready", stages["ready"].used - held, sizing.RESERVE
    yield "beside weights and pools: after work", stages["stopped"].used - held, sizing.RESERVE
    yield "activations at their peak", stages["stopped"].peak - stages["ready"].allocated, None
    yield "torch's cache, unused: ready", stages["ready"].cached - stages["ready"].allocated, None
    yield "left: ready", stages["ready"].total - stages["ready"].used, planned
    yield "left: after work", stages["stopped"].total - stages["stopped"].used, planned


def tell(rows: list[Row]) -> None:
    """The table."""
    print("| MiB | engine | plan | engine - plan |\n| --- | --- | --- | --- |")
    for name, ours, plan in rows:
        beside = ("", "") if plan is None else (mib(plan), mib(ours - plan))
        print("|", " | ".join((name, mib(ours), *beside)), "|")


def mib(size: int) -> str:
    """Two digits: a page table shows."""
    return f"{size / 2**20:,.2f}"


if __name__ == "__main__":
    main()
