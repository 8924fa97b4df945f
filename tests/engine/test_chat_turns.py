"""A chat of twenty turns through a real group, nano 31B at TP=2: with the prefix cache each turn computes what is new."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.group import Group
from engine.config import engine_config
from engine.front.client import EngineClient
from engine.protocol import Load, SamplingParams
from tests.conftest import Nano
from tests.support.engine.drive import attached, still
from tests.support.engine.outputs import outputs

pytestmark = [pytest.mark.cpu, pytest.mark.alone, pytest.mark.usefixtures("forked_groups")]

TURNS, PREFIX, MESSAGE, ANSWER = 20, 1800, 9, 4
PAGE = 32


@dataclass
class Chat:
    """What the turns found and took."""

    load: Load | None = None
    prompts: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


async def talk(client: EngineClient, turns: int) -> Chat:
    """Each turn: all that was said, and a message more; the last one's prompt is the same however many turns came before it."""
    chat, said = Chat(), [3 + at * 7 % 900 for at in range(PREFIX)]
    for turn in range(TURNS):
        said += [5 + (turn * 31 + at) % 800 for at in range(MESSAGE)]
        if turn >= TURNS - turns:
            tokens, cached, began, first = [], 0, time.monotonic(), 0.0
            async for output in outputs(client.generate(said, SamplingParams(max_tokens=ANSWER))):
                first = first or time.monotonic()
                tokens += output.tokens
                cached += output.cached
            chat.prompts.append(len(said))
            chat.cached.append(cached)
            chat.ttft.append(first - began)
            chat.answers.append(tokens)
        said += [7 + turn] * ANSWER  # what a client sends back is its own affair: here never what was answered
    chat.load = await still(client)
    return chat


@contextmanager
def group(folder: Path, *, cache: bool) -> Iterator[Group]:
    sizes = {"tp": 2, "max_seqs": 2, "max_len": 2304, "prefill_budget": 256, "pages": (120, 200)}
    running = Group.boot(engine_config(model=str(folder), device="cpu", dtype="float32", prefix_cache=cache, page=PAGE, **sizes))
    try:
        yield running
    finally:
        running.close()


def chat(folder: Path, turns: int, *, cache: bool) -> Chat:
    async def main(running: Group) -> Chat:
        async with attached(running) as (client, _):
            return await talk(client, turns)

    with group(folder, cache=cache) as running:
        return asyncio.run(main(running))


@pytest.mark.slow
def test_a_chat_computes_what_is_new(nano: Nano) -> None:
    """Computed prompt tokens are those not cached, to the token; the last first token comes several times faster."""
    cached = chat(nano("31b"), TURNS, cache=True)
    plain = chat(nano("31b"), 1, cache=False)
    assert cached.load is not None
    assert plain.load is not None
    assert cached.load.prefill_tokens == sum(cached.prompts) - sum(cached.cached)
    assert cached.load.hit_tokens == sum(cached.cached)
    assert plain.load.prefill_tokens == plain.prompts[0] == cached.prompts[-1]
    for before, found in zip(cached.prompts[:-1], cached.cached[1:], strict=True):
        assert found == before // PAGE * PAGE, "up to the last page of the prompt before"
    assert cached.answers[-1] == plain.answers[0]
    print(f"TTFT of turn {TURNS}: {1e3 * plain.ttft[0]:.0f} ms without the cache, {1e3 * cached.ttft[-1]:.0f} ms with it")
    assert cached.ttft[-1] < plain.ttft[0] / 3
