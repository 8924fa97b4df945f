"""Time per output token beside requests with a grammar: `python -m tests.bench.masked_neighbours --help`.

A group without Ray serves --batch requests at once. Of some batches all are free, of others --masked have a grammar: objects of a
random schema, one behind another, more than they have tokens for, over a vocabulary of 262 144 pieces. Both kinds in turn, --repeat
times; the median TPOT of the free ones (ms, while all of both kinds decode) is compared. Beside it means, while they run, of how
long rank 0's device took for a step, in which it may wait for masks, and stood idle before one.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import string
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from cluster.group import Group
from deploy.models.resolve import resolve
from engine.config import engine_config
from engine.front.client import EngineClient
from engine.front.grammar import Thought, grammar, json_answer
from engine.front.reply import Markers
from engine.front.text import TextProcessor
from engine.protocol import Grammar, SamplingParams
from tests.bench.engine import case, device_times, one
from tests.bench.record import Row, add_record_option, append
from tests.bench.shard_model import write_shard
from tests.support.engine.outcomes import no_sink
from tests.support.engine.schemas import members

VOCABULARY = 262_144
_ENDS = (1, 106)


def random_grammars(markers: Markers, count: int) -> list[str]:
    """Of a thousand objects by random schemas, one behind another."""
    schemas = [members(random.Random(seed), 2) for seed in range(count)]
    items = [json_answer(each).replace("answer:", "item:", 1) for each in schemas]
    return [grammar(markers, f"answer: item{{1000}}\n{item}", Thought.none) for item in items]


def made_up_words(known: Iterable[str], count: int) -> list[str]:
    """Words of letters that are not `known`, half of them behind a space."""
    rng, known, words = random.Random(1), set(known), []
    while len(words) < count:
        word = " " * rng.randint(0, 1) + "".join(rng.choices(string.ascii_letters, k=rng.randint(3, 10)))
        if word not in known:
            known.add(word)
            words.append(word)
    return words


def large_tokenizer(folder: Path, to: Path) -> Path:
    """The checkpoint's files in `to`, its tokenizer filled up with made-up words to as many pieces as the model has ids."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    file = to / "tokenizer.json"
    described = json.loads(file.read_text())
    known = described["model"]["vocab"]
    first = 1 + max([*known.values(), *(token["id"] for token in described["added_tokens"])])
    words = made_up_words([piece.replace("\u2581", " ") for piece in known], VOCABULARY - first)
    known |= {word.replace(" ", "\u2581"): number for number, word in enumerate(words, first)}
    file.write_text(json.dumps(described))
    return to


def masked(grammar: str, tokens: int) -> SamplingParams:
    """A reply of a grammar that does not end before it is cut."""
    return SamplingParams(max_tokens=tokens, temperature=1.0, seed=len(grammar), stop_ids=_ENDS, grammar=Grammar(grammar))


async def neighbours(
    group: Group, client: EngineClient, prompts: list[list[int]], args: argparse.Namespace, grammars: Sequence[str]
) -> tuple[float, float]:
    """Median ms a token of the free requests; of those with a grammar (nan: there are none)."""
    steps: list[tuple[int, int]] = []
    watching = asyncio.create_task(device_times(group, steps))
    count = args.masked if grammars else 0
    beside = [one(client, prompt, masked(grammars[at], args.tokens)) for at, prompt in enumerate(prompts[:count])]
    free = [one(client, prompt, SamplingParams(max_tokens=args.tokens)) for prompt in prompts[count:]]
    others = asyncio.gather(*beside)
    times = await asyncio.gather(*free)
    watching.cancel()
    constrained = await others
    busy, idle = (statistics.mean(each) / 1e3 for each in zip(*steps, strict=True))
    print(f"{count:3} with grammars: a step {busy:.3f} ms, idle before it {idle:.3f}; {len(steps)} steps seen", flush=True)
    start, end = max(each[0] for each in [*times, *constrained]), min(each[-1] for each in times)
    tpots = []
    for each in times:
        seen = [at for at in each if start <= at <= end]
        tpots.append(1e3 * (seen[-1] - seen[0]) / (len(seen) - 1))
    gaps = [later - earlier for each in constrained for earlier, later in pairwise(each)]
    return statistics.median(tpots), 1e3 * statistics.median(gaps) if gaps else float("nan")


async def measure(group: Group, folder: Path, args: argparse.Namespace) -> list[Row]:
    """Free and masked batches in turn."""
    markers = Markers.of(TextProcessor.load(folder))
    grammars = random_grammars(markers, args.masked)
    client = EngineClient(group.front_socket, group.media, sink=no_sink)
    await client.start()
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(300, 1000) for _ in range(args.prompt)] for _ in range(args.batch)]
    for rules in (grammars, ()):
        await neighbours(group, client, prompts, args, rules)  # compiles, warms
    free: list[float] = []
    beside: list[float] = []
    theirs: list[float] = []
    for _ in range(args.repeat):
        free.append((await neighbours(group, client, prompts, args, ()))[0])
        ours, other = await neighbours(group, client, prompts, args, grammars)
        beside.append(ours)
        theirs.append(other)
    await client.close()
    for name, all_ in (("all free", free), (f"beside {args.masked} with grammars", beside), ("those", theirs)):
        print(f"{name:26} {statistics.median(all_):7.3f} ms a token [{' '.join(f'{each:.3f}' for each in all_)}]", flush=True)
    print(f"neighbours wait {100 * (statistics.median(beside) / statistics.median(free) - 1):+.2f} %", flush=True)
    name = f"{case(args)}-decode-b{args.batch}"
    return [
        (name, "TPOT, all free", statistics.median(free), "ms"),
        (f"{name}-masked{args.masked}", "TPOT of the free", statistics.median(beside), "ms"),
        (f"{name}-masked{args.masked}", "TPOT of those with a grammar", statistics.median(theirs), "ms"),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.masked_neighbours", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--model", default="dummy:31b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--shard-of", type=int, default=1, metavar="N", help="a rank's shard of N, its head whole")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--masked", type=int, default=8, help="of the batch")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_record_option(parser)
    parser.set_defaults(sampling="greedy")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = large_tokenizer(resolve(args.model), Path(scratch, "whole"))
        if args.shard_of > 1:
            folder = write_shard(folder, args.shard_of, Path(scratch, "shard"), keep_vocabulary=True)
        config = engine_config(
            model=str(folder), tp=args.tp, device=args.device, dtype="bfloat16" if args.device == "cuda" else "float32",
            load_format="dummy", max_seqs=args.batch, max_len=2048, prefill_budget=2048, prefix_cache=False,
        )  # fmt: skip
        group = Group.boot(config)
        try:
            rows = asyncio.run(measure(group, folder, args))
        finally:
            group.close()
    append(rows, args.record, "tests.bench.masked_neighbours")


if __name__ == "__main__":
    main()
