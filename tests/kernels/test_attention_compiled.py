"""The attention kernels compiled for every GPU they are meant for, and how far ahead they load; test_compile has the rest."""

import re
from collections.abc import Iterator

import pytest
import torch

from kernels.decode import DecodeTile, decode_splits
from kernels.prefill import extend_attention
from kernels.qkv import qkv_post
from tests.bench.attention import LAYERS, PAGE, Layer, Problem
from tests.support.attention import Shape, decode_node, ints, meta, precompile_decode
from tests.support.compiled import Compiled, compile_node
from tests.support.launches import Node, record

pytestmark = pytest.mark.cpu

HOPPER, BLACKWELL = (9, 0), (10, 0)
SMALL = [(8, 0), (8, 9), (12, 0)]
SHARED = {HOPPER: 232448, BLACKWELL: 232448, (8, 0): 166912, (8, 9): 101376, (12, 0): 101376}
SPILLED = {"_extend": 160, "decode_kernel": 32}  # bytes a thread
WIDTH = 64
BUCKETS = (1, 12, 24, 32, 48, 96, 100)


def decode(layer: Layer, rows: int, target: tuple[int, int]) -> Node:
    """The launch for a batch at context 1024."""
    pages = Problem(layer, rows, 1024).pages
    return decode_node(layer.shape, rows, decode_splits(rows, layer.kv_heads, layer.d, pages, 132), target, pages=pages)


def chunk_nodes(layer: Layer, target: tuple[int, int]) -> list[Node]:
    """What comes before attention, and attention, for prefill chunks and, in sliding layers, for chunks with images."""
    pool, table, tokens = meta(9, 2, layer.kv_heads, PAGE, layer.d), ints(3, WIDTH), 100
    q = meta(tokens, layer.heads, layer.d)
    with record(target) as nodes:
        qkv = meta(tokens, (layer.heads + layer.kv_projections * layer.kv_heads) * layer.d)
        cos_sin = meta(tokens, 2 * layer.pairs, dtype=torch.float32)
        qkv_post(qkv, pool, table, ints(tokens), ints(tokens), cos_sin, meta(layer.d), meta(layer.d), 1e-6, q)
        extend_attention(q, pool, table, ints(5, 4), layer.window, meta(tokens, layer.heads, layer.d))
        if layer.window is not None:
            extend_attention(q, pool, table, ints(5, 4), layer.window, meta(tokens, layer.heads, layer.d), ints(tokens))
    return nodes


def named(name: str) -> Layer:
    return next(layer for layer in LAYERS if layer.name == name)


def nodes(target: tuple[int, int]) -> Iterator[Node]:
    """Every layer with one row and with buckets of few to many, each variant once; and what chunks of the 31B at TP=4 take."""
    variants = {repr(node.constexprs): node for layer in LAYERS for rows in BUCKETS for node in [decode(layer, rows, target)]}
    yield from variants.values()
    for name in ("31b-tp4-sliding", "31b-tp4-full"):
        yield from chunk_nodes(named(name), target)


def check(compiled: Compiled) -> None:
    what = (compiled.node.kernel, compiled.node.constexprs, compiled.target, compiled.registers, compiled.stack, compiled.shared)
    assert compiled.shared <= SHARED[compiled.target], what
    assert compiled.stack <= SPILLED.get(compiled.node.kernel, 0), what


@pytest.mark.slow  # tests/kernels/test_compile.py and tests/engine/rank/test_nodes.py compile what a step launches
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL])
def test_every_variant_compiles_without_spilling(target: tuple[int, int]) -> None:
    """Machine code for each, within a block's shared memory; few registers spilled."""
    for node in nodes(target):
        check(compile_node(node, target))


@pytest.mark.slow
@pytest.mark.parametrize("target", SMALL)
def test_small_gpus_get_smaller_tiles(target: tuple[int, int]) -> None:
    """Decode rows and chunks of both kinds of layer fit the shared memory of GPUs that have less; a large one's tiles do not."""
    for name in ("31b-tp4-sliding", "31b-tp4-full"):
        for node in (decode(named(name), 100, target), *chunk_nodes(named(name), target)[1:]):
            compiled = compile_node(node, target)
            assert compiled.shared <= SHARED[target], (node.constexprs, compiled.shared)
    large = compile_node(chunk_nodes(named("31b-tp4-full"), HOPPER)[1], HOPPER)
    assert large.shared > SHARED[target]


def test_keys_are_fetched_ahead() -> None:
    """Where a CTA has a multiprocessor's memory to itself, or half of it, two turns or more are in flight, and the loop waits for
    the oldest one; at 100 rows with a window three CTAs share it, each with a turn of 64 keys. Dependents start behind the wait."""
    for name, rows, kept in (("31b-tp4-sliding", 64, 3 * 2 * PAGE * 256 * 2), ("31b-tp4-full", 100, 2 * 2 * PAGE * 512 * 2)):
        compiled = compile_node(decode(named(name), rows, HOPPER), HOPPER)
        assert compiled.shared >= kept, compiled.shared
        dependency = [line.split(";")[0] for line in compiled.ptx_memory if line.startswith("griddepcontrol")]
        assert dependency == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
        assert any(re.search(r"cp\.async\.cg", line) for line in compiled.ptx_memory)
        assert re.search(r"cp\.async\.wait_group\s+(0x)?[2-9]", compiled.ptx)
    compiled = compile_node(decode(named("31b-tp4-sliding"), 100, HOPPER), HOPPER)
    assert compiled.node.constexprs["KEYS"] == 64
    assert 2 * 64 * 256 * 2 <= compiled.shared <= SHARED[HOPPER] // 3


def test_variants_are_compiled_in_other_processes() -> None:
    """Each once, whatever was asked for twice."""
    tile = DecodeTile(16, 1, 4, 2, early=False)
    variant = (Shape(2, 1, 32, 8), 2, tile, torch.bfloat16, 8)
    assert precompile_decode([variant, variant], 3, HOPPER) == 1
