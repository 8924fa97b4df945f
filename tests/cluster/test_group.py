"""A group's life with fake ranks and the real core: boot, its failures, death by every cause, and nothing left behind."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import cluster.group
from cluster.group import Group
from engine.channel import ring_bytes
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, EngineDead, InvalidRequest
from engine.geometry import read_geometry
from engine.protocol import AbortReason, SamplingParams
from engine.step_masks import masks_capacity
from tests.support.engine.drive import booted, still
from tests.support.engine.fake_child import FIRST_TOKEN, Behaviour, commands
from tests.support.engine.fakes import fake_config
from tests.support.engine.groups import Held, Running, alive, ends_after, read, running, send
from tests.support.repo_rules import ROOT

pytestmark = [pytest.mark.cpu, pytest.mark.alone, pytest.mark.usefixtures("forked_groups")]

LONG = SamplingParams(max_tokens=480)
STREAMS = 8
HEARTBEAT_S, STEP_S = 3.0, 3.5
SLOW = Behaviour(step_s=0.01)  # the longest request takes five seconds: no event comes too late


@pytest.fixture(scope="module")
def _uvloop_used() -> None:
    """libuv opens two descriptors at its first loop and keeps them: before anything is counted."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _uvloop_used: None) -> Iterator[None]:
    """Every test here ends with the descriptors, children and shared mappings it began with, and an empty temp folder."""
    empty = tmp_path / "tmp"
    empty.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(empty))
    monkeypatch.setenv("TMPDIR", str(empty))
    before = Held.now()
    yield
    assert Held.now() == before
    assert list(empty.iterdir()) == []


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return fake_config(tmp_path / "model", heartbeat_timeout_s=HEARTBEAT_S, step_timeout_s=STEP_S, boot_timeout_s=60.0)


Loop = Callable[[], asyncio.AbstractEventLoop]


def deaths(group: Group, event: Callable[[Running], None], within_s: float, loop: Loop = asyncio.new_event_loop) -> str:
    """The one reason with which all streams ended after `event`, at most `within_s` later."""

    async def main() -> str:
        async with running(group) as run:
            ends = await ends_after(run, event, STREAMS, [1, 2, 3], LONG)
            assert len(run.deaths) == 1, run.deaths
            assert run.outcomes.failed == STREAMS
        assert all(isinstance(error, EngineDead) for error, _ in ends), ends
        assert len({str(error) for error, _ in ends}) == 1, ends
        print(f"{ends[0][0]}: streams ended after {1000 * max(late for _, late in ends):.0f} ms")
        assert max(late for _, late in ends) < within_s
        return str(ends[0][0])

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main())


def test_the_ring_of_masks_holds_one_for_every_slot(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `max_seqs`, rows' width and the model's vocabulary; those of plans and results have one size."""
    large = msgspec.structs.replace(config, max_seqs=300, mtp=msgspec.structs.replace(config.mtp, model="drafter", drafts=4))
    assert large.widest == 5
    geometry = replace(read_geometry(Path(config.model)), vocab=262_144)
    monkeypatch.setattr(EngineConfig, "geometry", geometry)
    with cluster.group._shared(large) as shared:
        sizes = [os.fstat(descriptor).st_size for descriptor in (shared["masks"], shared["plan"])]
    assert sizes == [ring_bytes(large.tp, masks_capacity(5 * 300, 262_144)), ring_bytes(large.tp)]


def test_a_group_boots_serves_and_closes(config: EngineConfig) -> None:
    """Fake ranks and the real core boot, answer two requests as scripted, and end by themselves when told to stop."""

    async def main(group: Group) -> None:
        async with running(group) as run:
            streams = [run.client.generate([1] * 40, SamplingParams(max_tokens=5)) for _ in range(2)]
            expected = list(range(FIRST_TOKEN, FIRST_TOKEN + 5))
            assert await asyncio.gather(*map(read, streams)) == [expected, expected]
            run.watcher.close()
            run.client.stop()
            assert await asyncio.to_thread(group.close)
            assert run.outcomes.finished == 2
            assert run.deaths == []

    group = Group.boot(config, commands())
    assert len(group.pages) == 2
    asyncio.run(main(group))
    assert {child.process.returncode for child in group.children} == {0}
    assert len(group.status()) == config.tp + 1
    group.kill()


def test_close_kills_what_does_not_end(config: EngineConfig) -> None:
    """A stopped child makes close fall back to the kill."""
    group = Group.boot(config, commands())
    os.kill(group.children[0].process.pid, signal.SIGSTOP)
    assert not group.close(timeout_s=0.3)
    assert group.children[0].process.returncode == -signal.SIGKILL


def test_what_ranks_leave_out_is_said(config: EngineConfig) -> None:
    """What a rank's checks found wrong stands in the group's choice of attention, its name and its sentence; else nothing does."""
    sentence = "kernels.linear is wrong: plain torch in its place"
    with booted(config, commands(ranks=Behaviour(fallbacks=(sentence,)))) as group:
        assert group.attention.fallbacks == (sentence,)
        assert group.attention.name == "reference, with fallbacks"
        assert str(group.attention) == f"attention reference, with fallbacks: no GPU; {sentence}"
    with booted(config, commands()) as group:
        assert str(group.attention) == "attention reference: no GPU"
        assert (group.config.attention_decode, group.config.attention_extend) == ("reference", "reference")


@pytest.mark.parametrize("max_len", [257, 258])
def test_a_max_len_beyond_the_pools_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, max_len: int) -> None:
    """Where a request of max_len tokens can never run, a line of the log says how long one may be; else none does."""
    with booted(fake_config(tmp_path / "small", max_len=max_len, pages=(99, 9)), commands()):
        pass
    said = [record.message for record in caplog.records if record.name == "cluster.group" and record.levelname == "WARNING"]
    assert said == (["the KV pools hold 257 tokens of one request, not max_len's 258"] if max_len > 257 else [])


def test_shared_memory_has_no_name(config: EngineConfig) -> None:
    """Every writable shared mapping of every child is an anonymous memfd: there is no file that a kill could leave behind."""
    with booted(config, commands()) as group:
        for child in group.children:
            lines = Path(f"/proc/{child.process.pid}/maps").read_text().splitlines()
            shared = [line for line in lines if line.split()[1] == "rw-s"]
            assert len(shared) >= 2, child.name
            assert all("/memfd:quartet-" in line for line in shared), shared


def test_a_refusal_is_forwarded_and_the_group_lives(config: EngineConfig) -> None:
    """A request that cannot fit raises InvalidRequest with the core's words; the next one is served."""

    async def main(group: Group) -> None:
        async with running(group) as run:
            with pytest.raises(InvalidRequest, match="exceeds the context"):
                await read(run.client.generate([1] * 600, LONG))
            assert len(await read(run.client.generate([1], SamplingParams(max_tokens=3)))) == 3

    asyncio.run(main(Group.boot(config, commands())))


def test_aborts_at_any_stage_leave_nothing(config: EngineConfig) -> None:
    """200 requests, half of them left after a random while: client and core agree on every end, and every page is back."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def one(run: Running) -> None:
        stream = run.client.generate([1] * rng.randint(1, 200), SamplingParams(max_tokens=rng.randint(1, 30)))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.2)
            stream.abort(rng.choice(list(AbortReason)))
        else:
            await read(stream)

    async def main(group: Group) -> None:
        async with running(group) as run, asyncio.timeout(60):
            await asyncio.gather(*[one(run) for _ in range(200)])
            load, ours = await still(run.client), run.outcomes
            assert (load.received, load.finished, load.aborted) == (ours.received, ours.finished, ours.aborted)
            assert (ours.received, ours.finished + ours.aborted) == (200, 200)
            assert ours.aborted > 10
            assert [pool.used for pool in load.pools] == [0, 0]

    asyncio.run(main(Group.boot(config, commands())))


@pytest.mark.parametrize(
    ("name", "loop"), [("rank 0", "asyncio"), ("rank 1", "asyncio"), ("the core", "asyncio"), ("rank 1", "uvloop")]
)
def test_a_killed_process_ends_every_stream(config: EngineConfig, name: str, loop: str) -> None:
    """kill -9 of any process under load: all streams raise EngineDead naming it before a heartbeat would tell, reported once; so
    under uvloop, which Ray Serve uses."""
    made = pytest.importorskip(loop).new_event_loop
    reason = deaths(Group.boot(config, commands(ranks=SLOW)), send(name, signal.SIGKILL), HEARTBEAT_S, made)
    assert reason == f"{name} was killed by SIGKILL"


@pytest.mark.parametrize("name", ["rank 1", "the core"])
def test_a_stopped_process_ends_every_stream(config: EngineConfig, name: str) -> None:
    """SIGSTOP of any process under load: all streams raise EngineDead naming it within the heartbeat bound and a bit."""
    reason = deaths(Group.boot(config, commands(ranks=SLOW)), send(name, signal.SIGSTOP), HEARTBEAT_S + 10)
    assert reason.startswith(f"{name}: not scheduled")


def test_a_hung_rank_is_named_with_its_step(config: EngineConfig) -> None:
    """A rank that hangs in step 100 with its heart beating is named with the step, within the step bound and a bit."""
    group = Group.boot(config, commands(rank_0=Behaviour(stall=100, step_s=0.01), ranks=SLOW))
    assert deaths(group, lambda _: None, STEP_S + 10).startswith("rank 0 made no progress in step 100 for ")


def test_a_rank_that_raises_says_why(config: EngineConfig) -> None:
    """An exception in a rank ends all streams with the rank's name and the exception's words."""
    group = Group.boot(config, commands(rank_1=Behaviour(crash=100, step_s=0.01), ranks=SLOW))
    assert deaths(group, lambda _: None, 1.0 + HEARTBEAT_S) == "rank 1 failed: RuntimeError: planted in step 100"


BOOT_FAILURES = [
    ({"rank_1": Behaviour(load="refuse")}, ConfigError, "model.layers.3.mlp.up_proj.weight is missing"),
    ({"ranks": Behaviour(load="refuse")}, ConfigError, "model.layers.3.mlp.up_proj.weight is missing"),
    ({"rank_1": Behaviour(load="crash")}, EngineDead, "boot: rank 1 failed: RuntimeError: planted while loading"),
    ({"rank_1": Behaviour(load="full")}, EngineDead, "boot: rank 1 failed: RuntimeError: planted while loading"),
    ({"rank_0": Behaviour(load="exit")}, EngineDead, "boot: rank 0 ended with exit code 7"),
    ({"rank_1": Behaviour(load="die")}, EngineDead, "boot: rank 1 was killed by SIGKILL"),
    ({"rank_0": Behaviour(load="crash"), "rank_1": Behaviour(load="die")}, EngineDead, "boot: rank 1 was killed by SIGKILL"),
    ({"ranks": Behaviour(kv_bytes=1 << 20)}, ConfigError, "the KV cache does not fit"),
]


@pytest.mark.parametrize(("odd", "kind", "words"), BOOT_FAILURES)
def test_a_failed_boot_names_its_cause(config: EngineConfig, odd: dict[str, Behaviour], kind: type[Exception], words: str) -> None:
    """Whatever goes wrong while booting is raised once, by its first cause, in well under the boot timeout."""
    started = time.monotonic()
    with pytest.raises(kind) as failed:
        Group.boot(config, commands(**odd))
    assert str(failed.value).startswith(words)
    assert "\n" not in str(failed.value)
    assert time.monotonic() - started < 30


def test_the_boot_timeout_names_who_is_missing(config: EngineConfig, tmp_path: Path) -> None:
    """A rank that never loads ends the boot at its timeout, with the rank's name; the other ranks are not named."""
    late = fake_config(tmp_path / "late", tp=4, boot_timeout_s=5)
    started = time.monotonic()
    with pytest.raises(EngineDead, match=r"^boot took longer than boot_timeout_s, 5 s: no Loaded from rank 2$"):
        Group.boot(late, commands(rank_2=Behaviour(load="hang")))
    assert 5 <= time.monotonic() - started < 30


def test_a_program_that_cannot_start_leaves_nothing(config: EngineConfig) -> None:
    """When the second child's program does not exist, boot raises and the first child is gone; without a model none is started."""
    command = commands()
    with pytest.raises(FileNotFoundError):
        Group.boot(config, lambda args: command(args) if args.index == 0 else ["/no/such/program"])
    (Path(config.model) / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        Group.boot(config, command)


def test_gpus_that_are_not_there_are_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TP above the node's GPUs is one line, before any process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="tp 2 needs 2 GPUs on one node; this one shows 0"):
        Group.boot(fake_config(tmp_path / "gpu", device="cuda", dtype="bfloat16"), commands())


REPLICA = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from cluster.group import Group
    from tests.support.engine.fake_child import Behaviour, commands
    from tests.support.engine.fakes import fake_config

    group = Group.boot(fake_config(Path(sys.argv[1])), commands())
    print(*[child.process.pid for child in group.children], flush=True)
    time.sleep(60)
""")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_replica_takes_its_children_along(tmp_path: Path, stopped: bool) -> None:
    """kill -9 of the booting process: all children are gone soon, stopped ones too."""
    command = [sys.executable, "-c", REPLICA, str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as replica:
        assert replica.stdout is not None
        pids = [int(word) for word in replica.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        if stopped:
            os.kill(pids[1], signal.SIGSTOP)
        replica.kill()
        killed = time.monotonic()
        while any(map(alive, pids)) and time.monotonic() < killed + 10:
            time.sleep(0.005)
        print(f"children gone {1000 * (time.monotonic() - killed):.0f} ms after the replica")
        assert not any(map(alive, pids))
