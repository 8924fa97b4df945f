"""Worker processes over real rings: the same plan stream as one rank in this process, the same tokens, one hash."""

import re
import select
import time
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import cast

import msgspec
import pytest
import torch

from engine.errors import ConfigError
from engine.geometry import read_geometry
from engine.lifeline import Allocate, Configure, Failed, Lifeline
from engine.plan import StepPlan, StepResult
from engine.rank import worker
from engine.rank.models.gemma4 import Gemma4
from engine.rank.parallel import Inboxes, Single
from kernels.choose import ArgmaxInbox
from kernels.fused_allreduce_norm import AllReduceInbox
from tests.conftest import Nano
from tests.support.engine.answers import TRIGGER
from tests.support.engine.plan_stream import logprob_error
from tests.support.engine.plans import encoded, result_rows
from tests.support.engine.ranks import WORKER, Ranks, single
from tests.support.engine.recording import (
    PAGES,
    Recording,
    config_of,
    record,
    replay_in_step,
    tokens_of,
)

pytestmark = pytest.mark.cpu

REQUESTS, MAX_TOKENS = 8, (4, 8, 8, 16)  # a third of the steps of the recordings for GPUs, where steps cost nothing


@pytest.fixture(scope="module")
def recording(nano: Nano) -> Recording:
    return record(nano("31b"), requests=REQUESTS, max_tokens=MAX_TOKENS)


def test_the_recording_is_worth_replaying(recording: Recording) -> None:
    """The stream mixes chunks and decodes, reuses slots, preempts, releases sliding pages, reports logprobs, ends by surprise."""
    plans = recording.plans
    admissions = [admission for plan in plans for admission in plan.admissions]
    assert any(plan.chunks and plan.rows for plan in plans)
    again = [admission for admission in admissions if len(admission.tokens) > admission.prompt]
    assert any(admission.tokens[-1] != TRIGGER for admission in again), "nobody was preempted"
    assert len({admission.slot for admission in admissions}) < len(admissions) / 2
    assert any(plan.releases for plan in plans)
    rows = [row for result in recording.results for row in result_rows(result)]
    assert any(row.logprobs for row in rows)
    assert sum(plan.masked for plan in plans) > 10
    assert any(admission.tokens[-1] == TRIGGER for admission in admissions), "nothing followed a trigger"
    assert recording.masks.keys() == {plan.step for plan in plans if plan.masked}
    given = sum(MAX_TOKENS[number % 4] for number in range(REQUESTS)) + 2 * 12
    assert len(rows) < given, "no request ended before its max_tokens"


def replay_two_out(ranks: Ranks, recording: Recording) -> list[StepResult]:
    """Two plans outstanding all the time; masks come behind the result of the step before, when their step's forward has begun."""
    results = []
    ranks.submit(recording.plans[0])
    for plan in recording.plans[1:]:
        ranks.submit(plan)
        results.append(ranks.result())
        if plan.masked:
            ranks.submit_masks(recording.masks[plan.step])
    return [*results, ranks.result()]


def ends_by_an_unreadable_plan(ranks: Ranks, step: int) -> None:
    """Every rank raises, ends with code 1, and writes a traceback whose every line names it."""
    ranks.plans.write(step, b"\\7" * 64)
    assert ranks.wait() == [1] * ranks.config.tp
    for rank, text in enumerate(ranks.stderr()):
        lines = [line for line in text.splitlines() if not line.startswith("loaded ")]
        assert lines
        assert all(line.startswith(f"rank {rank}: ") for line in lines)
        assert "ValueError" in lines[-1]


def test_two_ranks_compute_what_one_does(recording: Recording) -> None:
    """TP=2 gives TP=1's tokens and, to 1e-4, its logprobs; all hashes agree after every step; replayed two plans at a time, with
    late masks, the stream ends on the same hash; a stop plan ends every rank in order, one that cannot be read with an error."""
    config = config_of(recording.folder, 2)
    with Ranks(config) as ranks:
        loaded = ranks.boot(PAGES)
        assert all(message.kv_bytes > 0 for message in loaded)
        results, hashes = replay_in_step(ranks, recording.plans, recording.masks)
        statuses = ranks.statuses()
        ranks.submit(StepPlan(len(recording.plans) + 1, stop=True))
        assert ranks.wait() == [0] * 2
    print(f"last step {[(status.busy_us, status.idle_us) for status in statuses]} us on the ranks, {len(recording.plans)} steps")
    assert all(result.took_us > 0 for result in results)
    assert results[-1].took_us == statuses[0].busy_us + statuses[0].idle_us > statuses[0].busy_us
    assert tokens_of(results) == tokens_of(recording.results)
    assert logprob_error(results, recording.results) < 1e-4
    assert all(len(set(step)) == 1 for step in hashes)
    assert len({step[0] for step in hashes}) == len(hashes)
    with Ranks(config) as ranks:
        ranks.boot(PAGES)
        again = replay_two_out(ranks, recording)
        assert ranks.hashes(len(recording.plans)) == hashes[-1]
        assert encoded(again) == encoded(results)
        ends_by_an_unreadable_plan(ranks, len(recording.plans) + 1)


FAULTY = """
import sys
from kernels.allreduce import MappedCollectives
whole, calls = MappedCollectives.all_reduce, [0]
def all_reduce(self, x):
    calls[0] += 1 if x.dim() == 2 else 0
    own = x.clone()
    total = whole(self, x)
    return own if x.dim() == 2 and calls[0] == {call} else total
MappedCollectives.all_reduce = all_reduce
from engine.rank.worker import main
main()
"""


def test_one_all_reduce_left_out_is_seen(recording: Recording) -> None:
    """Planted fault: one rank that keeps its own part of one sum has another hash from that very step on, and logprobs go wrong by
    100 times the tolerance. When their lifelines end, running ranks do soon."""
    script = FAULTY.format(call=13 + 13 * 3 + 2)  # the sign of life at boot, three steps, then the first layer's sum
    with Ranks(config_of(recording.folder, 2), lambda rank: ("-c", script) if rank == 1 else WORKER) as ranks:
        ranks.boot(PAGES)
        results, hashes = replay_in_step(ranks, recording.plans[:24], {})
        for lifeline in ranks.lifelines:
            lifeline.sock.close()
        assert ranks.wait() == [0] * 2
    agree = [len(set(step)) == 1 for step in hashes]
    assert agree == [True] * 3 + [False] * 21
    assert all(len(set(step)) == 2 for step in hashes[3:])
    whole = recording.results[:24]
    assert tokens_of(results) != tokens_of(whole) or logprob_error(results, whole) > 1e-2


def test_an_impossible_boot_is_told(recording: Recording, tmp_path: Path) -> None:
    """A folder without weights is a Failed fit for the user, from the rank, which then ends with code 1."""
    (tmp_path / "config.json").write_bytes((recording.folder / "config.json").read_bytes())
    with Ranks(config_of(tmp_path, 1)) as ranks:
        ranks.send(Configure(ranks.config))
        failure = ranks.lifelines[0].receive()
        assert ranks.wait() == [1]
    assert isinstance(failure, Failed)
    assert failure.user
    assert str(tmp_path) in failure.error


SPEAKING = """
import json, socket, sys, time
from engine.lifeline import BootSocket, Ready
BootSocket(socket.socket(fileno=json.loads(sys.argv[1])["lifeline"])).send(Ready())
time.sleep(60)
"""
SILENT = "import sys, time; print('compiling', file=sys.stderr, flush=True); time.sleep(60)"
GONE = "import sys; sys.exit('no such GPU')"


@pytest.mark.parametrize(("script", "told"), [(SILENT, "nothing from ranks [1] in 2 s"), (GONE, "rank 1 ended")])
def test_a_boot_that_fails_says_what_the_ranks_wrote(nano: Nano, script: str, told: str) -> None:
    """A rank that says nothing, or is gone, ends the wait; the error shows every rank's exit code, status and stderr."""
    boot_s = 2.0 if script is SILENT else 60.0
    ranks = Ranks(config_of(nano("31b"), 2), lambda rank: ("-c", script if rank else SPEAKING), boot_s=boot_s)
    with ranks:
        select.select([ranks.lifelines[0].sock], [], [], 60)  # a rank takes a while to start
        while not ranks.stderr()[1]:
            time.sleep(0.01)
        with pytest.raises(AssertionError, match=re.escape(told)) as raised:
            ranks.receive()
    assert ("compiling" if script is SILENT else "no such GPU") in str(raised.value)
    assert "rank 0: exit code None" in str(raised.value)


def test_the_end_of_the_lifeline_ends_a_rank_that_boots(recording: Recording) -> None:
    """Ranks whose replica is gone before Ready end by themselves."""
    with Ranks(config_of(recording.folder, 2)) as ranks:
        ranks.send(Configure(ranks.config))
        for lifeline in ranks.lifelines:
            lifeline.sock.close()
        assert ranks.wait(30.0) == [0, 0]


def test_a_rank_alone_raises(recording: Recording) -> None:
    """With a peer killed, a rank that waits for its part of a sum raises within the step's bound: nothing hangs silently."""
    config = msgspec.structs.replace(config_of(recording.folder, 2), step_timeout_s=1.0)
    with Ranks(config) as ranks:
        ranks.boot(PAGES)
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        ranks.submit(recording.plans[0])
        assert ranks.processes[0].wait(10) == 1
        assert "rank 1 did not come" in ranks.stderr()[0]


@pytest.mark.parametrize("step", ["load", "build"])
def test_a_boot_without_memory_says_what_helps(recording: Recording, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A GPU that is too small for the weights, or for what comes behind them, is a ConfigError with advice; another is not."""
    config = config_of(recording.folder, 1)
    messages = {Configure: Configure(config), Allocate: Allocate(PAGES)}
    lifeline = Namespace(args=None, receive=messages.__getitem__, send=lambda _: None)
    monkeypatch.setattr(worker, "load", lambda *_: single(config))
    for error, seen in (torch.OutOfMemoryError("Tried to allocate 9 GiB"), ConfigError), (RuntimeError("else"), RuntimeError):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(worker, step, fail)
        with pytest.raises((RuntimeError, ConfigError), match=str(error)) as raised:
            worker.boot(cast(Lifeline, lifeline))
        assert raised.type is seen
        assert ("memory_fraction" in str(raised.value)) == (seen is ConfigError)


def test_ranks_are_waited_for_as_the_settings_say(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """While kernels are compiled and captured another rank's part may take as long as the boot may, and then as long as a step."""
    config = config_of(recording.folder, 2, boot_timeout_s=600.0, step_timeout_s=60.0)
    memory = torch.zeros(AllReduceInbox.bytes(2, 1, 2, torch.float32), dtype=torch.uint8)
    peers = AllReduceInbox([memory] * 2, 0, 1, 2, torch.float32)
    geometry = read_geometry(recording.folder)
    device, model = torch.device("cpu"), cast(Gemma4, type("Bare", (), {"parameters": list, "dtype": torch.float32}))
    inboxes = Inboxes(peers, cast(ArgmaxInbox, None))
    rank = worker.Rank(config, geometry, device, Single(), model, inboxes, (), (), None, {})
    seen = []
    runner = Namespace(capturable=True, capture=lambda: seen.append(int(peers.errors[1])))
    messages = {Configure: Configure(config), Allocate: Allocate(PAGES)}
    lifeline = Namespace(args=None, receive=messages.__getitem__, phase=lambda *_: None, send=lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "load", lambda *_: rank)
        patched.setattr(worker, "build", lambda *_: runner)
        patched.setattr(worker, "residual_rms", lambda *_: 1.0)
        patched.setattr(worker.launch, "ready", lambda: None)
        patched.setattr(worker, "gc", Namespace(collect=int, freeze=int, disable=int))
        worker.boot(cast(Lifeline, lifeline))
    assert seen == [600_000]
    assert peers.errors.tolist() == [0, 60_000]
