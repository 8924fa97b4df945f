"""The real group, nano 31B on the CPU at TP=2: it serves, ends with a name when its ranks differ, and leaves nothing behind."""

import asyncio
import os
import re
import signal
import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from cluster import group as group_module
from cluster.group import Group
from engine.config import EngineConfig, KvEvents, engine_config
from engine.core.prefix import extend_keys, root_key
from engine.errors import EngineDead
from engine.lifeline import RanksReady
from engine.protocol import AbortReason, SamplingParams
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.drive import Request, ask_all, hashes, still
from tests.support.engine.faulty_rank import faulty
from tests.support.engine.groups import Held, end_of, read, running, send
from tests.support.engine.kv_index import KvIndex
from tests.support.engine.outputs import outputs
from tests.support.engine.quantised import saved
from tests.support.judge.pictures import Prompt, pictures

pytestmark = [pytest.mark.cpu, pytest.mark.alone, pytest.mark.usefixtures("forked_groups")]

TP = 2
STREAMS = 4
HEARTBEAT_S = 2.0
PROMPT = list(range(200, 330))  # longer than the window
GREEDY = SamplingParams(max_tokens=24)
LONG = SamplingParams(max_tokens=1500)


@pytest.fixture
def config(nano: Callable[[str], Path]) -> EngineConfig:
    return engine_config(
        model=str(nano("31b")), tp=TP, device="cpu", dtype="float32", heartbeat_timeout_s=HEARTBEAT_S, boot_timeout_s=120.0
    )


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test here ends with the descriptors, children and shared mappings it began with."""
    before = Held.now()
    yield
    assert Held.now() == before


def asked_about_pictures(count: int, seed: int) -> list[Request]:
    """Each about two pictures of its own, 0.3 MB; every other reader leaves at once, or soon."""
    image = SHAPES["31b"].media["<|image|>"]
    requests = []
    for number in range(count):
        one, other = pictures((4, 5), (6, 3), seed=seed + number)
        prompt = Prompt(PROMPT[:20]).picture(one, image).text([8, 9]).picture(other, image).text([10])
        requests.append(Request(prompt.ids, GREEDY, leave_after=(0, None, 2, None)[number % 4], media=prompt.media))
    return requests


def held(group: Group) -> int:
    """Bytes of media."""
    return os.fstat(group.media).st_blocks * 512


def test_media_are_freed_however_requests_end(config: EngineConfig) -> None:
    """To their ends, or aborted while they wait or their pictures are read; a group that dies with some takes them along."""
    group = Group.boot(config)

    async def main() -> None:
        async with running(group) as run, asyncio.timeout(120):
            answers = await ask_all(run.client, asked_about_pictures(24, 0), 12)
            ends = Counter(answer.end for answer in answers)
            assert ends["length"] >= 12
            while held(group):  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.05)
            streams = [run.client.generate(one.prompt, LONG, media=one.media) for one in asked_about_pictures(4, 100)]
            while not held(group):  # noqa: ASYNC110 - a test may poll
                await asyncio.sleep(0.001)
            send("rank 1", signal.SIGKILL)(run)
            for error, _ in await asyncio.gather(*map(end_of, streams)):
                assert isinstance(error, EngineDead)

    asyncio.run(main())


def test_a_router_learns_the_pages_of_a_prompt(config: EngineConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    config = msgspec.structs.replace(config, kv_events=KvEvents(endpoint=endpoint, topic="kv@nano"))

    async def main(group: Group, reader: zmq.Socket[bytes]) -> None:
        index = KvIndex()
        async with running(group) as run, asyncio.timeout(60):
            reader.connect(endpoint)
            first = 0
            while not index.stored:  # what the core tells before the subscription reaches it is lost
                first += 1
                await read(run.client.generate([first, *PROMPT], GREEDY))
                while reader.poll(100):
                    index.apply(reader.recv_multipart()[2])
            pages = (1 + len(PROMPT)) // config.page
            keys: list[bytes] = []
            extend_keys(keys, root_key(""), array("i", [first, *PROMPT]), config.page, pages)
            full, sliding = index.held[1], index.held[0]
            assert full.issuperset(keys)
            assert keys[-1] in sliding
            assert keys[0] not in sliding  # the window has left it
            run.watcher.close()
            run.client.stop()
            assert await asyncio.to_thread(group.close)

    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.subscribe("kv@")
        asyncio.run(main(Group.boot(config), reader))


def test_four_bits_of_a_weight_only_folder(
    config: EngineConfig, nano: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log says that activations become four bits, too. A prompt's greedy tokens do not depend on company; of the
    same folder in fp8 they are others."""
    folder = saved(nano("31b"), tmp_path / "saved", kind="nvfp4a16")
    caplog.set_level("INFO", logger="cluster.group")

    async def main(group: Group) -> list[list[int]]:
        async with running(group) as run, asyncio.timeout(120):
            alone = await ask_all(run.client, [Request(PROMPT, GREEDY)], 1)
            others = [Request([number, *PROMPT[:50]], GREEDY) for number in range(300, 300 + STREAMS)]
            together = await ask_all(run.client, [*others, Request(PROMPT, GREEDY)], STREAMS + 1)
            run.watcher.close()
            run.client.stop()
            assert await asyncio.to_thread(group.close)
            return [answer.tokens for answer in (*alone, together[-1], together[0])]

    found = {}
    for weights in ("nvfp4", "auto"):
        caplog.clear()
        one = msgspec.structs.replace(config, model=str(folder), weights=weights)
        found[weights] = asyncio.run(main(Group.boot(one)))
        said = [message for message in caplog.messages if "activations become four bits" in message]
        assert len(said) == (weights == "nvfp4")
        assert ("weights: nvfp4" in caplog.messages) == (weights == "nvfp4")
    alone, together, other = found["nvfp4"]
    assert alone == together != other
    assert alone != found["auto"][0]


def test_the_nano_group_serves_aborts_and_closes(config: EngineConfig) -> None:
    """Greedy tokens do not depend on company, an abort frees its pages, the ranks' hashes agree, and stop ends all in order."""

    async def main(group: Group) -> None:
        async with running(group) as run, asyncio.timeout(60):
            started = time.monotonic()
            alone = await read(run.client.generate(PROMPT, GREEDY))
            print(f"{len(alone)} tokens in {time.monotonic() - started:.2f} s")
            left = run.client.generate(PROMPT[::-1], LONG)
            together = await asyncio.gather(*[read(run.client.generate(prompt, GREEDY)) for prompt in (PROMPT, PROMPT[1:])])
            left.abort(AbortReason.client_gone)
            assert len(alone) == GREEDY.max_tokens
            assert together[0] == alone
            assert together[1] != alone
            load = await still(run.client)
            assert (load.received, load.finished, load.aborted) == (4, 3, 1)
            assert [pool.used for pool in load.pools] == [0, 0]
            assert len(hashes(group)) == 1
            assert all(group.status()[0].hashes.values())
            run.watcher.close()
            run.client.stop()
            assert await asyncio.to_thread(group.close)
            assert run.deaths == []

    asyncio.run(main(Group.boot(config)))


def test_a_group_with_a_target_measures_its_steps(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a TPOT target the ranks measure at boot, together, and the core keeps the pace of a stream by it: here one that no step
    keeps to, so that steps of the stream alone come between any two with prompt tokens."""

    async def serve(group: Group) -> int:
        """Tokens that a stream gives while a prompt beside it is computed."""
        async with running(group) as run, asyncio.timeout(60):
            tokens, at_first = 0, -1

            async def beside() -> None:
                nonlocal at_first
                began = tokens
                async for _ in outputs(run.client.generate(PROMPT * 4, SamplingParams(max_tokens=1))):
                    at_first = tokens - began if at_first < 0 else at_first

            other = None
            async for output in outputs(run.client.generate(PROMPT[::-1], SamplingParams(max_tokens=60))):
                tokens += len(output.tokens)
                other = other or asyncio.create_task(beside())
            assert other is not None
            await other
            await still(run.client)
            assert len(hashes(group)) == 1
            return at_first

    config = msgspec.structs.replace(config, tpot_target_ms=0.001, prefill_budget=256, max_seqs=4, max_len=1024)
    told = []
    monkeypatch.setattr(group_module, "RanksReady", lambda times: told.append(times) or RanksReady(times))
    group = Group.boot(config)
    (times,) = told
    assert times is not None
    assert [rows for rows, _ in times.decodes] == [1, config.max_seqs]
    assert [rows for rows, _ in times.prefills] == [1, 128, 256]
    assert [rows for rows, _ in times.mixed] == [1, config.max_seqs - 1]
    assert asyncio.run(serve(group)) >= 15


def test_a_rank_with_a_token_of_its_own_ends_every_stream(config: EngineConfig) -> None:
    """One token of one rank becomes another: every stream raises EngineDead with the step and the ranks. The other groups here are
    watched too, and none of them ends so."""

    async def watched(group: Group) -> list[BaseException | None]:
        async with running(group) as run, asyncio.timeout(60):
            streams = [end_of(run.client.generate(PROMPT[at:], LONG)) for at in range(STREAMS)]
            return [error for error, _ in await asyncio.gather(*streams)]

    ends = asyncio.run(watched(Group.boot(config, faulty("token"))))
    assert all(isinstance(error, EngineDead) for error in ends), ends
    state = r"rank [01] \([0-9a-f]{8}\)"
    assert re.fullmatch(rf"ranks hold different states after step \d+: {state} against {state}", str(ends[0]))
