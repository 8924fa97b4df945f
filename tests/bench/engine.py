"""An engine group by the protocol that its peers were measured by: `python -m tests.bench.engine --help`, or `make bench`.

A group boots without Ray and is driven through EngineClient: random token ids, no stop ids, no detokenisation; greedy, or with
`--sampling default` as a request that says nothing samples (temperature 1, top_k 64, top_p 0.95). Of each batch, all requests at
once:

    prefill   seconds for one output token
    step      (seconds for --tokens + 1 output tokens - seconds for one) / --tokens, in ms; chunks of prompts among the steps
    beside    seconds until the last has its first token, while those that have theirs decode: what of `step` is no decode step is
              (beside - prefill) / --tokens
    steady    ms between a stream's tokens while all of the batch decode: from the last one's first token to the first one's end

Seconds are the best of --repeat, of one token and of all in turn; in brackets all that were seen: a GPU that has prefilled for
seconds lowers its clock, by a tenth and more on some hosts.

--loads: behind the batches, 128 requests in flight at most, output tokens a second of

    mixed     400 prompts, input and output lengths uniform in 1..1024 (numpy RandomState(0), inputs first)
    long      40 prompts of 8000 tokens, 1000 out

    pictures  instead: ms between tokens of --streams text streams, quiet and beside clients that each ask about one new picture of
              768x768 after another, and those pictures' number a second
    prompts   likewise beside a client that sends a prompt of 8000 tokens every second

Beside it `idle`, microseconds that rank 0's device stood idle before a step (the median of those seen), and how many kernels the
ranks compiled while they served. vLLM's and SGLang's figures for the same stand beside ours where they are known (four H200, random
live weights, 1024 tokens of prompt). --shard-of N: what a rank of N computes, as a model of its own with weights drawn from a
seed: core, rank and GPU as ever, but no wires. --drafts N --accepted A: with a drafter of random weights, of whose drafts a
fixed share is accepted: a step gives A tokens in the mean (tests.bench.synthetic_rank), with `auto` a step of five drafts. --record
MACHINE appends to tests/bench/results.csv.
"""

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path

import torch
from torch import Tensor

from cluster.children import child_command
from cluster.group import Group
from engine.config import engine_config
from engine.front.client import EngineClient
from engine.geometry import read_geometry
from engine.protocol import SamplingParams
from tests.bench.record import Row, add_record_option, append
from tests.bench.shard_model import write_int4, write_shard
from tests.bench.synthetic_rank import Synthetic
from tests.nano.random_models import model_folder
from tests.support.engine import drafters
from tests.support.engine.outcomes import no_sink
from tests.support.engine.outputs import outputs
from tests.support.judge.pictures import Prompt, pictures
from tests.support.load.generator import load_lengths

PEERS = {  # decode step in ms, by model, ranks and batch: vLLM 0.26.0, SGLang 0.5.17
    ("31b", 4, 1): (7.40, 8.51), ("31b", 4, 8): (7.97, 8.91), ("31b", 4, 32): (9.85, 10.88),
    ("31b", 4, 64): (12.62, 13.89), ("31b", 4, 100): (17.56, 16.99),
    ("e2b", 1, 1): (3.24, 4.02), ("e2b", 1, 8): (3.33, 4.09), ("e2b", 1, 32): (3.69, 4.30), ("e2b", 1, 64): (4.82, 4.82),
    ("e2b", 1, 100): (7.79, 9.61),
}  # fmt: skip

PROMPT = 1024  # tokens, of the peers' protocol
BESIDE = (["pictures"], ["prompts"])  # --loads that are measured beside streams
SAMPLING: dict[str, dict[str, float]] = {"greedy": {}, "default": {"temperature": 1.0, "top_k": 64, "top_p": 0.95}}


async def one(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[float]:
    """Run one request to its length; when each token came."""
    times, tokens = list[float](), params.max_tokens
    async for output in outputs(client.generate(prompt, params)):
        times += [time.monotonic()] * len(output.tokens)
    assert len(times) == tokens, (len(times), tokens)
    return times


@dataclass(frozen=True)
class Run:
    """A batch, all at once. seconds: to the last token; beside: to the last one's first; steady: ms between tokens while all
    decode, nan where they never do; gap: the most ms between two tokens of a stream."""

    seconds: float
    beside: float
    steady: float
    gap: float


async def run(client: EngineClient, prompts: list[list[int]], tokens: int, sampling: str) -> Run:
    """All prompts at once, to their last token."""
    began = time.monotonic()
    params = [SamplingParams(max_tokens=tokens, seed=seed, **SAMPLING[sampling]) for seed in range(len(prompts))]
    streams = await asyncio.gather(*map(one, repeat(client), prompts, params))
    took = time.monotonic() - began
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    seen = [time for time in max(streams, key=lambda times: times[0]) if start <= time <= end]
    gap = max((after - before for times in streams for before, after in pairwise(times)), default=0.0)
    return Run(took, start - began, 1e3 * (seen[-1] - seen[0]) / (len(seen) - 1) if len(seen) > 1 else math.nan, 1e3 * gap)


async def run_load(client: EngineClient, load: str, vocab: int, args: argparse.Namespace) -> list[Row]:
    """Output tokens a second, and ms between a stream's tokens."""
    lengths, rng = load_lengths(load, args.max_len), random.Random(args.seed)
    prompts = [[rng.randrange(300, vocab - 10) for _ in range(n)] for n, _ in lengths]
    flying, began = asyncio.Semaphore(128), time.monotonic()

    async def ask(prompt: list[int], tokens: int, seed: int) -> list[float]:
        async with flying:
            return await one(client, prompt, SamplingParams(max_tokens=tokens, seed=seed, **SAMPLING[args.sampling]))

    streams = await asyncio.gather(*(ask(prompt, m, i) for i, (prompt, (_, m)) in enumerate(zip(prompts, lengths, strict=True))))
    rate = sum(m for _, m in lengths) / (time.monotonic() - began)
    tpot = statistics.mean(1e3 * (times[-1] - times[0]) / (len(times) - 1) for times in streams if len(times) > 1)
    print(f"{load} load: {rate:.0f} output tokens a second, TPOT {tpot:.2f} ms", flush=True)
    return [(f"{case(args)}-{load}", "output tokens a second", rate, "tok/s"), (f"{case(args)}-{load}", "mean TPOT", tpot, "ms")]


@dataclass
class PictureClients:
    """Each asks about a picture after the other, for ten tokens. done: answers so far."""

    client: EngineClient
    vocab: int
    picture: Tensor
    done: int = 0
    asked: int = 0

    async def ask(self) -> None:
        """Until cancelled."""
        while True:
            self.asked += 1
            self.picture[0, 0] = torch.tensor([self.asked % 256, self.asked // 256 % 256, self.asked // 65536])
            prompt = Prompt([300] * 20).picture(self.picture, self.vocab - 5).text([400] * 10)
            stream = self.client.generate(prompt.ids, SamplingParams(max_tokens=10), media=prompt.media)
            async for output in outputs(stream):
                assert output.error is None, output.error
            self.done += 1


@dataclass
class PromptClients:
    """Each sends a prompt of `length` tokens every second, for one token. done: answers so far."""

    client: EngineClient
    vocab: int
    length: int
    done: int = 0

    async def ask(self) -> None:
        """Until cancelled."""
        rng = random.Random(0)
        while True:
            second = asyncio.create_task(asyncio.sleep(1.0))
            await one(self.client, [rng.randrange(300, self.vocab - 10) for _ in range(self.length)], SamplingParams(max_tokens=1))
            self.done += 1
            await second


async def beside(client: EngineClient, load: str, vocab: int, args: argparse.Namespace) -> list[Row]:
    """ms between tokens of text streams, by how many clients with pictures or prompts are beside them, for --seconds each."""
    times = list[float]()

    async def stream(seed: int) -> None:
        prompt = [300 + (seed * 37 + at) % (vocab - 320) for at in range(32)]
        async for output in outputs(client.generate(prompt, SamplingParams(max_tokens=args.max_len - 40, seed=seed))):
            times.extend([time.monotonic()] * len(output.tokens))
        raise RuntimeError("a text stream ended within the measurement: --max-len is too short, or --seconds too long")

    streams = [asyncio.create_task(stream(seed)) for seed in range(args.streams)]
    asking: PictureClients | PromptClients = PromptClients(client, vocab, min(8000, args.max_len // 2))
    if load == "pictures":
        asking = PictureClients(client, vocab, pictures((16, 16) if args.device == "cuda" else (1, 2))[0])
    rows, quiet = list[Row](), 0.0
    for clients in (0, 1, 0, 4, 0, 16) if load == "pictures" else (0, 1):
        showing = [asyncio.create_task(asking.ask()) for _ in range(clients)]
        await asyncio.sleep(1.0)  # also the streams' prompts, and what is compiled
        shown, began = asking.done, time.monotonic()
        ended, _ = await asyncio.wait([*streams, *showing], timeout=args.seconds, return_when="FIRST_COMPLETED")
        for task in [*ended, *showing]:
            task.cancel() if task not in ended else task.result()
        took, rate = time.monotonic() - began, (asking.done - shown) / args.seconds
        seen = sorted({at for at in times if at >= began})
        tpot = 1e3 * args.streams * took / sum(at >= began for at in times)
        gaps = sorted(1e3 * (after - before) for before, after in pairwise(seen))
        quiet = quiet if clients else tpot  # streams slow down as they grow: the last one
        print(
            f"{args.streams} streams beside {clients:2} clients: {rate:6.1f} {load}/s, TPOT {tpot:.3f} ms ({tpot / quiet:.3f} of "
            f"quiet), silence p99 {gaps[99 * len(gaps) // 100]:.2f} ms, at most {gaps[-1]:.2f}",
            flush=True,
        )
        name = f"{case(args)}-beside-{clients}-clients-with-{load}"
        rows += [(name, "mean TPOT", tpot, "ms"), (name, load, rate, "1/s")]
        await asyncio.sleep(0.5)  # answers that were given up end
    for task in streams:
        task.cancel()
    return rows


async def device_times(group: Group, found: list[tuple[int, int]]) -> None:
    """Appends, until cancelled, how many microseconds rank 0's device took for a step, and stood idle before one."""
    last = -1
    while True:
        status = group.status()[0]
        if status.finished != last:
            last = status.finished
            found.append((status.busy_us, status.idle_us))
        await asyncio.sleep(0.002)


async def measure(group: Group, vocab: int, args: argparse.Namespace) -> list[Row]:
    """(case, metric, value, unit) of every batch, behind one request that warms up."""
    client = EngineClient(group.front_socket, sink=no_sink)
    await client.start()
    rng = random.Random(args.seed)
    rows: list[Row] = []
    if args.loads in BESIDE:
        rows = await beside(client, args.loads[0], vocab, args)
        await client.close()
        return rows
    await run(client, [[rng.randrange(300, vocab - 10) for _ in range(PROMPT)]], 8, args.sampling)
    for size, length in args.batches:
        prompts = [[rng.randrange(300, vocab - 10) for _ in range(length)] for _ in range(size)]
        steps: list[tuple[int, int]] = []
        firsts, wholes = [], []
        for _ in range(args.repeat):
            firsts.append(await run(client, prompts, 1, args.sampling))
            watching = asyncio.create_task(device_times(group, steps))
            wholes.append(await run(client, prompts, args.tokens + 1, args.sampling))
            watching.cancel()
        rows += told(args, size, length, firsts, wholes, statistics.median(idle for _, idle in steps))
    for load in args.loads:
        rows += await run_load(client, load, vocab, args)
    await client.close()
    return rows


def told(args: argparse.Namespace, size: int, length: int, firsts: list[Run], wholes: list[Run], idle: float) -> list[Row]:
    """The rows of a batch, printed."""
    first, whole = min(run.seconds for run in firsts), min(run.seconds for run in wholes)
    beside, steady = min(run.beside for run in wholes), min(run.steady for run in wholes)
    step, gap = 1e3 * (whole - first) / args.tokens, min(run.gap for run in wholes)
    compared = length == PROMPT and args.shard_of == 1 and args.sampling == "greedy" and not args.drafts
    peers = PEERS.get((args.model.split(":")[-1], args.tp, size)) if compared else None
    against = f"  vLLM {peers[0]:.2f} ({peers[0] / step:.2f}x), SGLang {peers[1]:.2f} ({peers[1] / step:.2f}x)" if peers else ""
    seen = {"prefill": [run.seconds for run in firsts], "beside": [run.beside for run in wholes]}
    each = "  ".join(f"{name} {min(all_):.4f} s [{' '.join(f'{one:.4f}' for one in all_)}]" for name, all_ in seen.items())
    times = f"step {step:.3f} ms  steady {steady:.3f} ms  gap {gap:.0f} ms  idle {idle:.0f} us"
    print(f"batch {size:4} x {length}  {each}  {times}{against}", flush=True)
    batch = f"b{size}" if length == PROMPT else f"b{size}x{length}"
    prefill, decode = (f"{case(args)}-{kind}-{batch}" for kind in ("prefill", "decode"))
    return [
        (prefill, "prefill", first, "s"), (prefill, "prefill beside decode rows", beside, "s"), (decode, "step", step, "ms"),
        (decode, "step while all decode", steady, "ms"), (decode, "longest gap of a stream", gap, "ms"),
        (decode, "device idle before a step", idle / 1e3, "ms"),
    ]


def case(args: argparse.Namespace) -> str:
    """What runs, in the name of a row's case."""
    shard = f"-shard-of-{args.shard_of}" if args.shard_of > 1 else ""
    sampled = "" if args.sampling == "greedy" else f"-{args.sampling}-sampling"
    drafted = f"-{args.drafts}-drafts-{args.accepted:g}-tokens" if args.drafts else ""
    weights = "" if args.weights == "auto" else f"-{args.weights}"
    weights += "" if args.head == "bf16" else f"-head-{args.head}"
    weights += "" if args.kv_dtype == "auto" else f"-kv-{args.kv_dtype}"
    return f"{args.model.split(':')[-1]}{weights}{shard}-tp{args.tp}{sampled}{drafted}"


def batch(text: str) -> tuple[int, int]:
    """Read a --batches entry: requests, and tokens of a prompt."""
    size, _, length = text.partition("x")
    return int(size), int(length or PROMPT)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="random:31b")
    parser.add_argument("--weights", default="auto", help="plain, fp8 or int4")
    parser.add_argument("--head", default="bf16", help="fp8")
    parser.add_argument("--kv-dtype", default="auto", help="fp8")
    parser.add_argument("--memory-fraction", type=float, default=0.9)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--shard-of", type=int, default=1, metavar="N", help="a rank's shard of N, as a model of its own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens behind the first")
    parser.add_argument(
        "--batches", type=batch, nargs="+", default=[(size, PROMPT) for size in (1, 8, 32, 64, 100)], metavar="N[xTOKENS]",
        help=f"requests at once, and tokens of a prompt ({PROMPT})",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=3, help="of which the best counts")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--prefill-budget", type=int, default=8192, help="rows of a step")
    parser.add_argument("--longest-step", type=float, metavar="MS", help="of steps with decode rows; by default the setting's")
    loads = ["mixed", "long", "pictures", "prompts"]
    parser.add_argument("--loads", choices=loads, nargs="*", default=[], help="loads behind the batches")
    parser.add_argument("--streams", type=int, default=16, help="text streams beside pictures or prompts")
    parser.add_argument("--tpot-target", type=float, metavar="MS", help="of steps with decode rows")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each number of clients beside them")
    parser.add_argument("--slots", type=int, default=0, help="requests that run at once; by default the largest batch")
    parser.add_argument("--sampling", choices=list(SAMPLING), default="greedy")
    parser.add_argument("--drafts", type=lambda text: "auto" if text == "auto" else int(text), default=0, help="a number, or auto")
    parser.add_argument("--accepted", type=float, default=1.0, help="tokens of a step with drafts, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    add_record_option(parser)
    return parser.parse_args()


def serve(folder: Path, drafter: Path, args: argparse.Namespace) -> list[Row]:
    """Boot, measure, end. drafter: a folder to write it into."""
    mtp = {"model": str(drafters.write(folder, drafter)), "drafts": args.drafts} if args.drafts else {}
    config = engine_config(
        model=str(folder),
        tp=args.tp,
        device=args.device,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        load_format="dummy" if args.model.startswith("dummy:") or args.shard_of > 1 or args.drafts else "safetensors",
        mtp=mtp,
        max_seqs=args.slots or (args.streams + 16 if args.loads in BESIDE else max(args.batches)[0]),
        max_len=args.max_len,
        prefill_budget=args.prefill_budget,
        prefix_cache=False,
        weights=args.weights,
        head=args.head,
        kv_dtype=args.kv_dtype,
        memory_fraction=args.memory_fraction,
        tpot_target_ms=args.tpot_target,
        longest_step_ms=args.longest_step,
    )
    synthetic = Synthetic(args.accepted, 5 if args.drafts == "auto" else args.drafts)
    began = time.monotonic()
    group = Group.boot(config, synthetic if args.drafts else child_command)
    ready_s = time.monotonic() - began
    try:
        print(f"ready in {ready_s:.1f} s, pages {group.pages}", flush=True)
        rows = [(f"{case(args)}-start", "ready", ready_s, "s")]
        rows += asyncio.run(measure(group, read_geometry(folder).vocab, args))
        print(f"kernels compiled while serving: {[status.late_compilations for status in group.status()[: args.tp]]}", flush=True)
    finally:
        group.close()
    return rows


def main() -> None:
    """See the module's docstring."""
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        whole = model_folder(args.model)
        target = whole if args.shard_of == 1 else write_shard(whole, args.shard_of, Path(scratch) / "target")
        if args.weights == "int4":
            target = write_int4(target, Path(scratch) / "int4")
        rows = serve(target, Path(scratch) / "drafter", args)
    append(rows, args.record, "tests.bench.engine")


if __name__ == "__main__":
    main()
