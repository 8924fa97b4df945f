"""What ranks write into each other's memory, checked at start: by two processes that share it, in the interpreter.

The ranks run at once, as on GPUs: each kernel sends its part and polls for the others'. A fault is rank 1's alone.
"""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.choose
import kernels.fused_allreduce_norm
import kernels.linear
from engine.errors import ConfigError
from engine.rank.parallel import Inboxes
from engine.rank.start_checks import check_inboxes
from kernels import launch as launcher
from kernels.allreduce import MappedCollectives, shared_bytes
from kernels.choose import ArgmaxInbox
from kernels.fused_allreduce_norm import AllReduceInbox
from kernels.inbox_check import inbox_checks
from kernels.selfcheck import RandomInputs
from tests.support import interpreter
from tests.support.engine.shared_memory import mapped
from tests.support.engine.threads import ThreadParallel, run_ranks
from tests.support.launches import argument_types, record

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
RANKS, ROWS, SHARDED, N = 2, 4, 3, 40
WAIT_S = 100.0
NORM = "kernels.fused_allreduce_norm"
LAUNCHERS = (kernels.fused_allreduce_norm, kernels.linear, kernels.choose)
Meddle = Callable[[str, list[Any], dict[str, Any], bool], None]


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@dataclass(frozen=True)
class Shared:
    """Memory of a group whose ranks are forks of this process: the same addresses in each."""

    collectives: memoryview
    memories: list[Tensor]

    @classmethod
    def made(cls) -> "Shared":
        size = AllReduceInbox.bytes(RANKS, ROWS, 2 * N, torch.float32) + ArgmaxInbox.bytes(RANKS, ROWS)
        return cls(mapped(shared_bytes(RANKS)), [torch.frombuffer(mapped(size), dtype=torch.uint8) for _ in range(RANKS)])

    def inboxes(self, rank: int) -> Inboxes:
        split = AllReduceInbox.bytes(RANKS, ROWS, 2 * N, torch.float32)
        sums, choices = ([memory[part] for memory in self.memories] for part in (slice(split), slice(split, None)))
        allreduce = AllReduceInbox(sums, rank, ROWS, 2 * N, torch.float32)
        allreduce.sharded_rows, allreduce.sent_rows = SHARDED, ROWS
        return Inboxes(allreduce, ArgmaxInbox(choices, rank, ROWS, allreduce.errors))


def planted(meddle: Meddle) -> None:
    """Every launch of this process is meddled with, before and after."""
    real = launcher.launch

    def faulty(kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
        given = list(args)
        meddle(kernel.__name__, given, named, False)
        real(kernel, grid, *given, **named)
        meddle(kernel.__name__, given, named, True)

    for module in LAUNCHERS:
        module.launch = faulty  # type: ignore[attr-defined]  # of a process of the test's own


def body(rank: int, shared: Shared, meddle: Meddle | None, end: Connection) -> None:
    """One rank's process."""
    if meddle is not None and rank == 1:
        planted(meddle)
    parallel = MappedCollectives(shared.collectives, rank, RANKS, WAIT_S)
    inboxes = shared.inboxes(rank)
    inboxes.allreduce.wait_at_most(2.0 if meddle is lost else WAIT_S)  # a busy machine must not end it
    parallel.all_reduce(torch.zeros(1))
    try:
        end.send(check_inboxes(parallel, inboxes, N, CPU, torch.float32))
    except ConfigError as error:
        end.send(str(error))


def group_says(meddle: Meddle | None) -> list[str | None]:
    """What each rank's check refuses, if it does."""
    forks, shared = multiprocessing.get_context("fork"), Shared.made()
    ends = [forks.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [forks.Process(target=body, args=(rank, shared, meddle, ends[rank][1])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + WAIT_S
        while (alive := [each for each in ranks if each.is_alive()]) and not any(each.exitcode for each in ranks):
            if not wait([each.sentinel for each in alive], max(0.0, deadline - time.monotonic())):
                break
        assert [process.exitcode for process in ranks] == [0] * RANKS
        return [end.recv() for end, _ in ends]
    finally:
        for process in ranks:
            process.kill()
            process.join()
        for pair in ends:
            for end in pair:
                end.close()


def interpreted_sound_kernels_pass() -> None:
    """All ranks find every kernel right, and their inboxes are empty behind it."""
    assert group_says(None) == [None] * RANKS


def spoiled(name: str, args: list[Any], named: dict[str, Any], done: bool) -> None:
    """Every kernel's fault: a number that it writes, or one that it reads and sends, becomes another."""
    if done and name == "_allreduce_norm":
        args[8].view(-1)[0] += 3
    elif done and name in {"_allreduce_norm_sharded", "_choose"}:
        args[5][1] += 3
    elif not done and name in {"_gemv", "_gemm"}:
        args[0] = args[0] + 1


def interpreted_faults_of_one_rank_are_found() -> None:
    """Rank 1 writes or sends a wrong number in every kernel: each check fails there, and what is sent on the other rank too."""
    said = group_says(spoiled)
    inboxes = Shared.made().inboxes(0)
    checks = inbox_checks(inboxes.allreduce, inboxes.argmax, N)
    assert all(f"{check.what} ({check.module}) is wrong by" in (said[1] or "") for check in checks), said
    assert "product of 1 rows that is sent to the ranks (kernels.linear) is wrong by" in (said[0] or "")


# ---- one fault at a time


def after(kernel: str, argument: int, row: int = 0) -> Meddle:
    """One number that `kernel` writes to its argument becomes another."""

    def meddle(name: str, args: list[Any], named: dict[str, Any], done: bool) -> None:
        if done and name == kernel:
            args[argument][row, 0] += 3

    return meddle


def before(kernel: str) -> Meddle:
    """What `kernel` reads and sends is another number."""

    def meddle(name: str, args: list[Any], named: dict[str, Any], done: bool) -> None:
        if not done and name == kernel:
            args[0] = args[0] + 3

    return meddle


def not_read(kernel: str, argument: int) -> Meddle:
    """`kernel` leaves something in its inbox."""

    def meddle(name: str, args: list[Any], named: dict[str, Any], done: bool) -> None:
        if done and name == kernel:
            args[argument][-1] = 5

    return meddle


def lost(name: str, args: list[Any], named: dict[str, Any], done: bool) -> None:
    """A product sends its part to nobody but itself."""
    if not done and name in {"_gemv", "_gemm"}:
        args[5] = args[5][1:].repeat(RANKS)


FAULTS: dict[str, tuple[Meddle, str]] = {
    "a fused norm's residual": (after("_allreduce_norm", 7), f"a fused norm over ranks ({NORM}) is wrong"),
    "a fused norm's normed row": (after("_allreduce_norm", 8), f"a fused norm of two parts over ranks ({NORM}) is wrong"),
    "a part that is sent": (before("_allreduce_norm"), f"a fused norm over ranks ({NORM}) is wrong"),
    "shared residuals": (after("_allreduce_norm_sharded", 5, 1), f"a fused norm of rows that ranks share ({NORM}) is wrong"),
    "shared rows": (after("_allreduce_norm_sharded", 6), f"a fused norm of rows that ranks share ({NORM}) is wrong"),
    "a sent row": (before("_gemv"), "a product of 1 rows that is sent to the ranks (kernels.linear) is wrong"),
    "sent rows": (before("_gemm"), "a product of 2 rows that is sent to the ranks (kernels.linear) is wrong"),
    "a choice": (after("_choose", 5), "sampling over ranks (kernels.choose) is wrong"),
    "a choice that is sent": (before("_choose"), "sampling over ranks (kernels.choose) is wrong"),
    "a lost product": (lost, "a product of 1 rows that is sent to the ranks (kernels.linear) is wrong"),
    "a fused norm's inbox": (not_read("_allreduce_norm_sharded", 8), "not left empty"),
    "the inbox of choices": (not_read("_choose", 7), "not left empty"),
}


@pytest.mark.slow
def test_under_the_interpreter_one_fault_at_a_time() -> None:
    """The cases of single faults hold."""
    interpreter.run(__file__, cases="single_fault_*")


@pytest.mark.parametrize("fault", FAULTS)
def single_fault_is_found(fault: str) -> None:
    """Rank 1 computes, sends or leaves behind something wrong in one kernel: a rank's check names it, which ends the group."""
    meddle, sentence = FAULTS[fault]
    said = group_says(meddle)
    assert any(sentence in (each or "") for each in said), said


class Hasty(ThreadParallel):
    """A planted fault: nobody is waited for after the first time."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.reduces else super().all_reduce(x)


def test_a_rank_that_looks_late_finds_nothing_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes to rank 1's inbox as soon as its check is over, and rank 1 takes long to look."""
    monkeypatch.setattr("kernels.selfcheck.failures", lambda *_: [])
    empty = ArgmaxInbox.empty

    def late(inbox: ArgmaxInbox) -> bool:
        time.sleep(0.1 * inbox.rank)
        return empty.__get__(inbox)

    monkeypatch.setattr(ArgmaxInbox, "empty", property(late))

    def check(parallel: ThreadParallel) -> None:
        check_inboxes(parallel, inboxes[parallel.rank], N, CPU, torch.float32)
        inboxes[1].argmax.inbox[0] = 5

    for group in (ThreadParallel, Hasty):
        shared = Shared.made()
        inboxes = [shared.inboxes(rank) for rank in range(RANKS)]
        with pytest.raises(ConfigError, match="not left empty") if group is Hasty else nullcontext():
            run_ranks(RANKS, check, group)


@pytest.mark.parametrize(("most", "sharded"), [(96, True), (64, False)])
def test_every_kernel_that_writes_to_other_ranks_is_launched(most: int, *, sharded: bool) -> None:
    """At TP=4: fused norms of one part and two, of rows that are shared out where there are so many, products of both kinds that
    send theirs, and the choice, each with the inboxes of four ranks."""
    meta, bf16 = torch.device("meta"), torch.bfloat16
    sizes = AllReduceInbox.bytes(4, most, 2 * 5376, bf16), ArgmaxInbox.bytes(4, most)
    sums, choices = ([torch.empty(size, dtype=torch.uint8, device=meta)] * 4 for size in sizes)
    peers = AllReduceInbox(sums, 0, most, 2 * 5376, bf16)
    inbox = ArgmaxInbox(choices, 0, most, peers.errors)
    with record(target=(10, 0)) as nodes:
        for check in inbox_checks(peers, inbox, 5376):
            check.run(RandomInputs(meta, bf16), *check.arguments)
    over = [node for node in nodes if node.constexprs.get("SIZE") == 4]
    names = {"_allreduce_norm", "_gemv", "_gemm", "_choose"}
    assert {node.kernel for node in over} == names | ({"_allreduce_norm_sharded"} if sharded else set())
    assert {"post_a" in argument_types(node) for node in over if node.kernel == "_allreduce_norm"} == {False, True}
    assert sum(not node.constexprs.get("SEND", True) for node in over) == 2, "behind the products, which have sent"
    assert len(nodes) == len(over) + 1, "the choice is of the best of a rank's slice"
