"""A decode step as its launches, listed for an H200 without one: how many there are, and that each compiles."""

from functools import cache

import pytest
import torch

from deploy.models.resolve import resolve
from engine.geometry import Geometry, kv_groups, read_geometry
from engine.rank.attention import attention_backend
from engine.rank.batch import Chunk, ForwardBatch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.models.gemma4 import Gemma4
from engine.rank.parallel import SENT_ROWS, SHARDED_ROWS, Single
from engine.rank.sampler import Sampler
from kernels.choose import Ballot
from kernels.joint import Peers
from kernels.launch import Node, record
from kernels.sampling_batch import SlotParameters
from kernels.slots import apply_plan, decode_inputs, gather_pages, rotary_table
from tests.support.compiled import compile_node

pytestmark = pytest.mark.cpu

META = torch.device("meta")
SLOTS, MAX_LEN = 257, 8192
TP = 4


# Bytes of stack that are known: the slow path of sin and cos.
STACK = {("_rotary", (9, 0)): 32}


class OneOfFour(Single):
    """A rank whose peers are only named."""

    size = TP


def int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


@cache
def geometry(member: str) -> Geometry:
    return read_geometry(resolve(f"dummy:{member}"))


@cache
def step(member: str, rows: int) -> tuple[Node, ...]:
    """The launches of a decode step of `rows` rows on one rank of four: inputs, forward, sampling."""
    shape = geometry(member)
    model = Gemma4(shape, OneOfFour(), torch.bfloat16, META)
    caches = [GroupCache(group, 100, SLOTS, MAX_LEN, torch.bfloat16, META) for group in kv_groups(shape, TP)]
    cache = KVCache(caches)
    pointers = torch.empty(TP, dtype=torch.int64, device=META)
    width = shape.hidden * (2 if shape.moe else 1)
    peers = Peers(torch.empty(Peers.bytes(TP, 256, width, torch.bfloat16), dtype=torch.uint8, device=META), pointers, 0,
                  256, width, torch.bfloat16, sharded=SHARDED_ROWS, sent=SENT_ROWS)  # fmt: skip
    ballot = Ballot(torch.empty(Ballot.bytes(TP, 256), dtype=torch.uint8, device=META), pointers, 0, 256, peers.errors)
    parameters = SlotParameters(
        torch.empty((SLOTS, 3), dtype=torch.int64, device=META), torch.empty((SLOTS, 3), device=META), int32(SLOTS, 1024)
    )
    attention = attention_backend("triton", shape, cache, TP, (rows,), META)
    sampler = Sampler(model.parallel, shape.vocab, shape.softcap, (), META)
    with record(target=(9, 0)) as nodes:
        plan, lengths, tokens = int32(4096), int32(SLOTS), int32(SLOTS, MAX_LEN + 1)
        ids, positions, slots = int32(rows), int32(rows), int32(rows)
        apply_plan(plan, [group.table for group in cache], lengths)
        decode_inputs(plan, tokens, lengths, SLOTS - 1, ids, positions, slots)
        pages = tuple(int32(rows, group.read_width) for group in cache)
        for group, out in zip(cache, pages, strict=True):
            group.gather(slots, positions, out)
        rope = {key: torch.empty((rows, 2 * len(frequency)), device=META) for key, frequency in model.frequencies.items()}
        for key, table in rope.items():
            rotary_table(positions, model.frequencies[key], table)
        hidden = model(ForwardBatch(ids, positions, slots, rope, pages), cache, attention, peers)
        sampler.maxima(model.logits(hidden), sampler.batch(slots, positions, parameters, tokens), ballot)
    return tuple(nodes)


@cache
def mixed(chunk: int, decodes: int) -> tuple[Node, ...]:
    """The launches of a step of the 31B with a prefill chunk, and decode rows behind it: inputs and forward."""
    shape, rows = geometry("31b"), chunk + decodes
    model = Gemma4(shape, OneOfFour(), torch.bfloat16, META)
    cache = KVCache([GroupCache(group, 100, SLOTS, MAX_LEN, torch.bfloat16, META) for group in kv_groups(shape, TP)])
    attention = attention_backend("triton", shape, cache, TP, (8,), META)
    with record(target=(9, 0)) as nodes:
        ids, positions, slots = int32(rows), int32(rows), int32(rows)
        plan, tokens, lengths = int32(4096), int32(SLOTS, MAX_LEN + 1), int32(SLOTS)
        decode_inputs(plan, tokens, lengths, SLOTS - 1, ids[chunk:], positions[chunk:], slots[chunk:])
        pages = tuple(int32(decodes, group.read_width) for group in cache)
        for group, out in zip(cache, pages, strict=True):
            group.gather(slots[chunk:], positions[chunk:], out)
        rope = {key: torch.empty((rows, 2 * len(frequency)), device=META) for key, frequency in model.frequencies.items()}
        for key, table in rope.items():
            rotary_table(positions[chunk:], model.frequencies[key], table[chunk:])
            rotary_table(positions, model.frequencies[key], table)
        ends = torch.arange(chunk - 1, rows, device=META)
        model(ForwardBatch(ids, positions, slots, rope, pages, ends, (Chunk(0, 0, chunk, 0),)), cache, attention)
    return tuple(nodes)


def test_decode_rows_behind_a_chunk_need_no_variants_of_their_own() -> None:
    """Wherever they begin: a variant that is first met while requests run is compiled while they wait. One whose argument's place
    is compiled in is seen."""

    def variants(nodes: tuple[Node, ...]) -> set[str]:
        return {repr((node.kernel, sorted(node.types.items()), node.aligned, node.constants, node.constexprs)) for node in nodes}

    ready = variants(mixed(2040, 8))
    for chunk, decodes in ((2046, 2), (2045, 3), (1993, 7)):
        assert variants(mixed(chunk, decodes)) <= ready
    rows, table = int32(12), int32(12, 64)
    with record(target=(9, 0)) as nodes:
        for first in (0, 2):
            gather_pages(int32(SLOTS, 64), rows[:4], rows[:4], 32, 1024, table.flatten()[first : first + 256].view(4, 64))
    assert len(variants(tuple(nodes))) == 2


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_dense_layer_is_seven_launches(rows: int) -> None:
    """QKV, attention, O, joint, gate and up, down, joint: seven nodes in each of the 60 layers of the 31B; eleven around them."""
    names = [node.kernel for node in step("31b", rows)]
    products = "_gemv" if rows == 1 else "_gemm"
    joint = "_joint_sharded" if rows >= 32 else "_joint"
    layer = [products, "decode_kernel", products, joint, products, products, joint]
    before = ["_apply", "_inputs", "_pages", "_pages", "_rotary", "_rotary", "_embed", joint]
    assert names == before + 60 * layer + [products, "_local_best", "_choose"]


@pytest.mark.parametrize("rows", [1, 8, 24, 64])
def test_a_layer_with_experts(rows: int) -> None:
    """Eleven launches in each of the 30 layers of the 26B, thirteen from nine rows on; joints' rows are never shared out, because
    routers read the residual."""
    names = [node.kernel for node in step("26b-a4b", rows)]
    products = "_gemv" if rows == 1 else "_gemm"
    some = "_few" if rows <= 8 else "_many"
    experts = {"_few": ["_up", "_down"], "_many": ["_group", "_grouped", "_grouped", "_combine"]}[some]
    layer = [products, "decode_kernel", products, "_joint", "_logits", "_route", products, products, *experts, "_joint"]
    assert names[7:-3] == ["_joint"] + 30 * layer


@pytest.mark.parametrize(("member", "rows", "target"), [("31b", 1, (9, 0)), ("31b", 96, (9, 0)), ("26b-a4b", 1, (9, 0))])
def test_every_launch_compiles(member: str, rows: int, target: tuple[int, int]) -> None:
    """Each distinct launch of a step compiles for its target, within its shared memory; joints and inputs without spills."""
    distinct = {(node.kernel, tuple(sorted(node.types.items())), repr(node.constexprs)): node for node in step(member, rows)}
    for node in distinct.values():
        made = compile_node(node, target)
        print(f"{node.kernel:16} {node.grid!s:16} {made.registers:4} registers, {made.shared:6} B shared, stack {made.stack}")
        assert made.shared <= 232448, node
        assert made.stack <= STACK.get((node.kernel, target), 0), (node.kernel, made.stack)
