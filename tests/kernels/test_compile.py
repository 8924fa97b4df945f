"""Every kernel compiled for the GPUs it is meant for: registers, shared memory, spills, and the order of its accesses to memory.

No GPU is needed: wrappers are called on meta tensors, what they would launch is compiled. A kernel joins by a function that lists
its launches for a target, added to `SUBJECTS`, and a row in `CONSTANT`: the arguments that may be read before `wait`, since
nothing writes them while the engine serves. This holds for each:

    it compiles, for sm_90 and sm_100, for the smaller shared memory of sm_80 and sm_120, and fits
    nothing spills, but for what `SPILLED` lists
    no path to its end passes no wait; before the wait it writes nothing and reads only constants
    page ids are 64-bit before anything is multiplied with them; inboxes are polled by volatile loads
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import triton
import triton.language as tl

from engine.plan_layout import STEP
from engine.rank.step import LAYOUT
from kernels.accept import DraftInputs, Verified, accept
from kernels.adjust import adjust, count_accepted
from kernels.admissions import admit
from kernels.axial_rope import head_norm, norm_axial_rope
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.choose import ArgmaxInbox, choose_best, local_best, parts_of
from kernels.chunks import ResultInputs, StepRows, chunk_inputs, extend_tiles
from kernels.clusters import best_of_clusters
from kernels.experts import experts
from kernels.filters import filtered_tokens, scaled_rows, write_tokens
from kernels.fused_allreduce_norm import AllReduceInbox, Norms, fused_allreduce_norm
from kernels.launch import launch, trigger, wait
from kernels.linear import _run, linear, linear_geglu, linear_send
from kernels.ragged_attention import ragged_attention
from kernels.route import route, router_logits
from kernels.sampling_batch import SamplingBatch, SlotAdjustments, SlotParameters
from kernels.sequence_parallel import SequenceParallel
from kernels.slots import apply_plan, decode_inputs, gather_pages, rotary_table
from kernels.table_check import COPIED_ENTRY, ROW_ENTRY, TABLE_ENTRY, check_rows
from kernels.tiles import TABLE, GemmShape, Tile
from tests.kernels.test_attention_compiled import BLACKWELL, HOPPER, SHARED, chunk_nodes, decode, named
from tests.support.attention import ints, meta, verify_nodes
from tests.support.compiled import Compiled, compile_node
from tests.support.launches import Node, argument_types, record
from tests.support.ptx import accesses, early_reads, ends_without_waiting, narrow_products

pytestmark = pytest.mark.cpu

Target = tuple[int, int]
ROWS = 8
HIDDEN = 5376
fp32, long = (partial(meta, dtype=dtype) for dtype in (torch.float32, torch.int64))

CONSTANT = {
    "_gemv": {"weight", "pointers"},
    "_gemm": {"weight", "pointers"},
    "_allreduce_norm": {"post", "next_norm", "scalar", "pointers"},
    "_allreduce_norm_sharded": {"post", "next_norm", "scalar", "pointers"},
    "_norm_own": {"post", "next_norm", "scalar"},
    "_logits": {"parts", "norm"},
    "_rotary": {"frequencies"},
    "decode_kernel": {"q_norm", "k_norm"},
    "_post": {"q_norm", "k_norm"},
}
PAGE_IDS = {"decode_kernel": "page_ids", "verify_kernel": "page_ids", "_post": "table", "_extend": "table"}
# Bytes a thread, of sine and of what loops do not touch.
SPILLED = {"_rotary": 32, "_extend": 160, "decode_kernel": 40, "verify_kernel": 24, "_filter": 8, "_many_logits": 16}


def recorded(launches: Callable[[], None]) -> Callable[[Target], list[Node]]:
    """Lists what `launches` would start on a target."""

    def nodes(target: Target) -> list[Node]:
        with record(target) as listed:
            launches()
        return listed

    return nodes


def linear_nodes(target: Target) -> Iterator[Node]:
    """Each tile of the table once, in the first shape that names it, and some again where no tile divides the sizes."""
    seen: dict[tuple[Tile, bool], GemmShape] = {}
    for shape, tiles in TABLE.items():
        for tile in tiles.values():
            seen.setdefault((tile, shape.gated), shape)
    for (tile, gated), shape in seen.items():
        yield from product_nodes(tile, shape, target)
        if tile.rows in {1, 16} and target == HOPPER:
            yield from product_nodes(tile, GemmShape(1031, 1032, gated), target)


def product_nodes(tile: Tile, shape: GemmShape, target: Target) -> list[Node]:
    """One product of as many rows as the tile takes."""
    x, weight = meta(tile.rows, shape.n), meta(shape.m * (1 + shape.gated), shape.n)
    with record(target) as nodes:
        _run(tile, x, weight, meta(tile.rows, shape.m), gated=shape.gated)
    return nodes


@recorded
def sent_nodes() -> None:
    """Products that write their parts to four inboxes."""
    memory = meta(AllReduceInbox.bytes(4, 64, HIDDEN, torch.bfloat16) // 2, dtype=torch.int16)
    peers = AllReduceInbox([memory] * 4, 2, 64, HIDDEN, torch.bfloat16)
    for rows in (1, 8):
        linear_send(meta(rows, 2048), meta(HIDDEN, 2048), peers)


@recorded
def allreduce_norm_nodes() -> None:
    """One rank's, two parts, and over four ranks one-shot, the first one, and sharded."""
    n, bf16 = HIDDEN, torch.bfloat16
    memory = meta(AllReduceInbox.bytes(4, 64, n, bf16) // 2, dtype=torch.int16)
    peers = AllReduceInbox([memory] * 4, 2, 64, n, bf16)
    both = Norms(meta(n), meta(n))
    fused_allreduce_norm(meta(ROWS, n), meta(ROWS, n), both, 1e-6, meta(1))
    two = Norms(meta(2816), meta(2816), (meta(2816), meta(2816)))
    fused_allreduce_norm(meta(ROWS, 2 * 2816), meta(ROWS, 2816), two, 1e-6, meta(1))
    fused_allreduce_norm(meta(ROWS, n), meta(ROWS, n), both, 1e-6, meta(1), peers=peers)
    fused_allreduce_norm(meta(ROWS, n), None, Norms(None, meta(n)), 1e-6, scale=73.5, peers=peers)
    fused_allreduce_norm(meta(64, n), meta(64, n), both, 1e-6, meta(1), peers=peers)


@recorded
def sequence_parallel_nodes() -> None:
    """Over four ranks: waits, and norms of own rows."""
    n, bf16 = HIDDEN, torch.bfloat16
    memories = [meta(SequenceParallel.bytes(4, 2048, n, bf16), dtype=torch.uint8) for _ in range(4)]
    peers = SequenceParallel(memories, 1, range(2049), n, bf16, ints(2)).begin(2048)
    peers.norm(peers.cut(meta(2048, n)), meta(2048, n), Norms(meta(n), meta(n)), 1e-6, meta(1))


def sampling_batch(rows: int, stops: int) -> SamplingBatch:
    """Of nine slots that may have so many stop ids."""
    parameters = SlotParameters(long(9, 3), fp32(9, 3), ints(9, stops))
    return SamplingBatch(ints(rows), ints(rows), parameters, ints(9, 2049), ints(5), 30.0)


@recorded
def chunk_list_nodes() -> None:
    """Inputs and tiles of a step's chunks, with decode rows of one token and of three."""
    for width in (1, 3):
        rows, results = StepRows(ints(200), ints(200), ints(200)), ResultInputs(long(24), ints(24), ints(24))
        chunk_inputs(ints(500), LAYOUT, ints(9, 2049), 8, rows, 128, ints(17, 4), results, width)
    extend_tiles(ints(17, 4), 64, 128)


@recorded
def adjust_nodes() -> None:
    """A quarter of the vocabulary, and what samples of adjusted rows."""
    batch, parts = sampling_batch(ROWS, 1024), parts_of(65536, ROWS, 132)
    counts = meta(9, 65536, dtype=torch.int16)
    tables = SlotAdjustments(
        ints(9), ints(9, 1024), fp32(9, 1024), fp32(9, 3), counts, ints(9, 2), ints(9, 2048), ints(9, 1024), ints(9, 128),
        ints(9, 2048), ints(9, 2),
    )  # fmt: skip
    logits = fp32(ROWS, 65536)
    adjusted = adjust(logits, replace(batch, adjustments=tables, plan=ints(500)), 65536, parts)
    local_best(logits, adjusted, 65536, parts)
    candidates(logits, block_peaks(logits, adjusted), adjusted, 65536)
    scaled_rows(fp32(4, 2, 65536), adjusted, 1, 262144)
    adjust(logits, replace(batch, adjustments=tables, plan=ints(500), step=STEP, width=8), 65536, parts)
    count_accepted(tables, ints(ROWS), ints(ROWS), ints(ROWS, 8), ints(ROWS), 65536)


@recorded
def draft_nodes() -> None:
    """Between a step and a drafter's passes: rows of one token, and of eight; and the heads of the small members' drafters."""
    out = DraftInputs(ints(ROWS), ints(ROWS), ints(8, ROWS), meta(ROWS, HIDDEN))
    for width in (1, 8):
        rows = ROWS * width
        verified = Verified(ints(rows, 2), ints(rows), ints(rows), ints(rows), meta(rows, HIDDEN), width)
        accept(verified, ints(9, 1024), ints(9), 8, out)
    best_of_clusters(meta(ROWS, 256), meta(262144, 256), long(262144), long(ROWS, 32), 2048)


@recorded
def choose_nodes() -> None:
    """Sampling over a quarter of the vocabulary, alone and over four ranks; and among 24 clusters, no power of two."""
    parts, batch = parts_of(65536, ROWS, 132), sampling_batch(ROWS, 8)
    inbox = ArgmaxInbox([ints(ArgmaxInbox.bytes(4, ROWS) // 4)] * 4, 2, ROWS, ints(2))
    best = local_best(fp32(ROWS, 65536), batch, 65536, parts)
    for ranks in (None, inbox):
        choose_best(best, batch, ints(ROWS, 2), ranks)
    choose_best(fp32(ROWS, 24, 4), batch, ints(ROWS, 2), None)


@recorded
def candidates_nodes() -> None:
    """Rows with a small top_k over a quarter of the vocabulary, and over all of it; four ranks' candidates, and one's."""
    batch = sampling_batch(ROWS, 8)
    for ranks in (1, 4):
        logits = fp32(ROWS, 262144 // ranks)
        best = candidates(logits, block_peaks(logits, batch), batch, 0)
        choose_candidates(fp32(ROWS, ranks * best.shape[1], 2), batch, ints(ROWS, 2))


@recorded
def filters_nodes() -> None:
    """Filtered rows of one rank of four, and its share of 30 rows."""
    batch = sampling_batch(30, 1024)
    filtered_tokens(scaled_rows(fp32(4, 8, 65536), batch, 1, 262144), batch, ints(30, 2))
    write_tokens(ints(32), batch, ints(30, 2))


def experts_nodes(target: Target) -> Iterator[Node]:
    """Router and experts of the 26B: one row, few, a decode step's many and a prompt's, of a rank's quarter and of the whole."""
    n, count, top_k = 2816, 128, 8
    with record(target) as nodes:
        for rows, m in ((1, 704), (ROWS, 176), (100, 704), (512, 704), (2048, 176), (2048, 704)):
            logits, x = router_logits(meta(rows, n), meta(3, count, n), meta(n), 1e-6)
            weights, chosen = route(logits, fp32(count), top_k)
            experts(x, weights, chosen, meta(count, 2 * m, n), meta(count, n, m), partial(meta, rows, n))
    yield from {(node.kernel, repr(node.constexprs)): node for node in nodes}.values()


@recorded
def slots_nodes() -> None:
    """New sequences, and a step's inputs."""
    table = ints(9, 64)
    admit(ints(500), 2, 300, ints(9, 2049), ints(9), [table, table], sampling_batch(ROWS, 1024).parameters)
    apply_plan(ints(500), LAYOUT, [table, table], ints(9))
    decode_inputs(ints(500), LAYOUT, ints(9, 2049), ints(9), 8, ints(ROWS), ints(ROWS), ints(ROWS))
    decode_inputs(ints(500), LAYOUT, ints(9, 2049), ints(9), 8, *(ints(4 * ROWS) for _ in range(3)), 4)
    gather_pages(table, ints(ROWS), ints(ROWS), 32, 1024, ints(ROWS, 64))
    gather_pages(table, ints(ROWS), ints(ROWS), 32, 1024, ints(ROWS, 40), ints(ROWS))
    rotary_table(ints(ROWS), fp32(128), fp32(ROWS, 256))


@recorded
def table_check_nodes() -> None:
    """Both kinds of group; rows that were copied for FlashInfer too."""
    table, rows = ints(9, 4096), (ints(ROWS), ints(ROWS))
    for window, width in ((1024, 34), (None, 4096)):
        for kind in (TABLE_ENTRY, ROW_ENTRY, COPIED_ENTRY):
            check_rows(kind, 0, ints(ROWS, width), table, 100, *rows, 32, window, ints(8 * 65))


def attention_nodes(target: Target) -> Iterator[Node]:
    """Decode with one row and with many, and what a prompt's chunk takes; tests.kernels.test_attention_compiled has the rest."""
    for name, rows in (("31b-tp4-sliding", 1), ("31b-tp4-full", 100)):
        yield decode(named(name), rows, target)
    for name, q_len in (("31b-tp4-sliding", 8), ("31b-tp4-full", 2), ("31b-tp4-full", 8)):
        yield from verify_nodes(named(name).shape, q_len, target)
    yield from chunk_nodes(named("31b-tp4-sliding"), target)


@recorded
def vision_nodes() -> None:
    """Both towers' heads."""
    for heads, d in ((12, 64), (16, 72)):
        q, tables = meta(90, heads, d), fp32(90, d // 2)
        norm_axial_rope(q, meta(d), tables, tables, 1e-6)
        ragged_attention(q, q, head_norm(q, 1e-6), ints(3), 60)


SUBJECTS: dict[str, Callable[[Target], Iterable[Node]]] = {
    "adjust": adjust_nodes,
    "linear": linear_nodes,
    "sent": sent_nodes,
    "fused_allreduce_norm": allreduce_norm_nodes,
    "sequence_parallel": sequence_parallel_nodes,
    "choose": choose_nodes,
    "chunks": chunk_list_nodes,
    "experts": experts_nodes,
    "candidates": candidates_nodes,
    "drafts": draft_nodes,
    "filters": filters_nodes,
    "slots": slots_nodes,
    "table_check": table_check_nodes,
    "attention": attention_nodes,
    "vision": vision_nodes,
}


@cache
def compiled(subject: str, target: Target) -> list[Compiled]:
    return [compile_node(node, target) for node in SUBJECTS[subject](target)]


def check_fits(kernel: Compiled, target: Target) -> None:
    what = (kernel.node.kernel, kernel.node.constexprs, kernel.registers, kernel.shared, kernel.stack)
    assert kernel.registers * 32 * kernel.node.constexprs["warps"] <= 65536, what
    assert kernel.shared <= SHARED[target], what
    assert kernel.stack <= SPILLED.get(kernel.node.kernel, 0), what


@pytest.mark.parametrize("target", [HOPPER, pytest.param(BLACKWELL, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_fits_and_does_not_spill(subject: str, target: Target) -> None:
    """Machine code for each launch, within a block's registers and shared memory, without spills that nobody listed."""
    for kernel in compiled(subject, target):
        check_fits(kernel, target)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_kernel_fits_the_newer_gpu_too(subject: str) -> None:
    """The last launch of each kernel; all of them are asked for in the slow tier."""
    for node in {node.kernel: node for node in SUBJECTS[subject](BLACKWELL)}.values():
        check_fits(compile_node(node, BLACKWELL), BLACKWELL)


@pytest.mark.parametrize("target", [(8, 0), (12, 0)], ids=str)
def test_smaller_shared_memory(target: Target) -> None:
    """The largest pipeline of the table, cut for a GPU with less shared memory, fits it; uncut it would not."""
    largest = max(
        ((shape, tile) for shape, tiles in TABLE.items() for tile in tiles.values()),
        key=lambda pair: pair[1].shared_bytes(pair[0].gated),
    )
    shape, tile = largest
    assert tile.shared_bytes(shape.gated) > SHARED[12, 0]
    x, weight = meta(tile.rows, shape.n), meta(shape.m * (1 + shape.gated), shape.n)
    with record(target) as nodes:
        linear_geglu(x, weight) if shape.gated else linear(x, weight)
    assert compile_node(nodes[0], target).shared <= SHARED[target]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_dependent_launch_is_safe(subject: str) -> None:
    """Before it waits for its predecessors a kernel writes nothing and reads only what is constant, and no path skips the wait."""
    for kernel in compiled(subject, HOPPER):
        name, arguments = kernel.node.kernel, list(argument_types(kernel.node))
        assert kernel.node.constexprs["PDL"], name
        assert not ends_without_waiting(kernel.ptx), name
        assert early_reads(kernel.ptx, arguments) <= CONSTANT.get(name, set()), name
        found = accesses(kernel.ptx, arguments)
        assert not [access for access in found if access.early and access.writes], name
        assert any(access.writes and access.arguments for access in found), name
        assert any(access.reads and access.arguments for access in found), name
        if name in PAGE_IDS:
            assert not narrow_products(kernel.ptx, arguments, PAGE_IDS[name])


def test_inboxes_are_polled() -> None:
    """What another rank writes is read by volatile loads alone."""
    polls = [
        access.op
        for subject in ("fused_allreduce_norm", "choose")
        for kernel in compiled(subject, HOPPER)
        for access in accesses(kernel.ptx, list(argument_types(kernel.node)))
        if access.reads and "inbox" in access.arguments
    ]
    assert polls
    assert all("volatile" in op for op in polls), polls


def test_waits_for_ranks_end_by_the_clock() -> None:
    """A kernel that polls looks at the time, and no other does: how long a number of polls takes depends on the GPU."""
    for kernel in (*compiled("fused_allreduce_norm", HOPPER), *compiled("choose", HOPPER)):
        found = accesses(kernel.ptx, list(argument_types(kernel.node)))
        inbox = any("inbox" in access.arguments and access.reads for access in found)
        assert ("%globaltimer" in kernel.ptx) == inbox, kernel.node.kernel


def test_weights_are_on_their_way_before_the_wait() -> None:
    """gemv's tiles are loaded, gemm's first ones fetched to L2, before the wait, in PTX and in machine code; gemv lets its
    dependents start before that, gemm never."""
    for kernel in compiled("linear", HOPPER):
        choices = kernel.node.constexprs
        names = list(argument_types(kernel.node))
        early = [access for access in accesses(kernel.ptx, names) if access.early]
        loads = [access for access in early if access.reads]
        vectors = choices["BN"] * choices["BK"] * (1 + choices["GATED"]) // (8 * 32 * choices["warps"])
        if kernel.node.kernel == "_gemv":
            tiles = min(choices["EARLY"], -(-choices["K"] // choices["BK"]))
            assert len(loads) >= tiles * vectors > 0, (choices, len(loads))
        else:
            assert not loads
            assert any(access.op.startswith("prefetch") for access in early)
        code = [instruction.split()[1 if instruction.startswith("@") else 0] for instruction in kernel.instructions]
        before = code[: next(place for place, opcode in enumerate(code) if opcode.startswith("ACQBULK"))]
        assert sum(opcode.startswith("LDG") for opcode in before) == len(loads)
        assert ("PREEXIT" in before) == ("PREEXIT" in code) == (kernel.node.kernel == "_gemv"), choices


# ---- planted faults


@triton.jit
def _early_read(x: tl.tensor, table: tl.tensor, out: tl.tensor, PDL: tl.constexpr) -> None:
    value = tl.load(x)
    tl.store(out, value)
    trigger(PDL)
    wait(PDL)
    page = tl.load(table)
    tl.store(out + page * 4096 + tl.arange(0, 4), tl.load(x + page * 8192 + tl.arange(0, 4)))


@triton.jit
def _careful(x: tl.tensor, table: tl.tensor, out: tl.tensor, PDL: tl.constexpr) -> None:
    wait(PDL)
    page = tl.load(table).to(tl.int64)
    tl.store(out + page * 4096 + tl.arange(0, 4), tl.load(x + page * 8192 + tl.arange(0, 4)))


@triton.jit
def _skips_the_wait(x: tl.tensor, table: tl.tensor, out: tl.tensor, PDL: tl.constexpr) -> None:
    if tl.program_id(0) == 1:
        wait(PDL)
        tl.store(out + tl.program_id(0), tl.load(x) + tl.load(table))


def planted(kernel: object) -> Compiled:
    with record(HOPPER) as nodes:
        launch(kernel, (2,), fp32(8), ints(8), fp32(8), warps=1)
    return compile_node(nodes[0], HOPPER)


def test_planted_faults_are_seen() -> None:
    """A read and a write before the wait, a path around it and a 32-bit page offset are found, and not in a kernel without them."""
    names = ["x", "table", "out"]
    good, bad, skips = (planted(kernel).ptx for kernel in (_careful, _early_read, _skips_the_wait))
    assert (early_reads(good, names), early_reads(bad, names)) == (set(), {"x"})
    assert [access.arguments for access in accesses(bad, names) if access.early and access.writes] == [{"out"}]
    assert not [access for access in accesses(good, names) if access.early]
    assert [ends_without_waiting(ptx) for ptx in (good, bad, skips)] == [False, False, True]
    assert narrow_products(bad, names, "table")
    assert not narrow_products(good, names, "table")


def test_a_spill_is_seen() -> None:
    """A kernel that holds more than a thread's registers shows a stack."""
    (node,) = product_nodes(Tile("gemv", 1, 16, 1024, early=4, warps=1), GemmShape(4096, HIDDEN), HOPPER)
    assert compile_node(node, HOPPER).stack > 0
