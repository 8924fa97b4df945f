"""The adapter to FlashInfer's attention, by its pinned signatures and, where FlashInfer is installed, through its own front end.

Behind the front end stands `KernelStandIn`; what it must agree with is the house's own attention, over the same pages.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.geometry import Geometry, KVGroup, Layer, Rope, read_geometry
from engine.rank.attention import attention_backend, trtllm
from engine.rank.attention.base import PartSettings
from engine.rank.attention.paged import PagedDecode, PagedExtend
from engine.rank.attention.router import AttentionRouter
from engine.rank.attention.trtllm import TableRows, TrtllmDecode, TrtllmExtend, TrtllmScratch, call_decode, check_group
from engine.rank.batch import Chunk, ForwardBatch, eager_batch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.models.gemma4 import Gemma4
from engine.rank.parallel import Single
from engine.rank.weights import load
from kernels.qkv import inverse_frequencies, qkv_post
from tests.support.engine.paged import Backend, PlantFault, caches, run_steps, script
from tests.support.flashinfer_calls import CONTEXT_FFI, DECODE_FFI, PROCESSORS, SIGNATURES, KernelStandIn, pinned, real, signature

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
NEWEST = "0.7.2.post1"
FRONTS = [*SIGNATURES, "installed"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02}  # sums in another order; one rounding of outputs of unit size
FAULT = 100 * TOLERANCE[torch.float32]
WORKSPACE = 1 << 10
PAGES = 60


@dataclass(frozen=True)
class Scene:
    """Sequences in the pages of one KV group: garbage in every page that nobody holds, and behind each sequence's end."""

    layer: Layer
    cache: GroupCache
    batch: ForwardBatch
    qkv: Tensor
    norms: tuple[Tensor, Tensor | None]
    settings: PartSettings

    def copy(self) -> "Scene":
        """The same with a pool and a table of its own."""
        group, table = self.cache.group, self.cache.table
        cache = GroupCache(group, self.cache.pool.shape[1], len(table), table.shape[1] * group.page, self.cache.pool.dtype, CPU)
        cache.pool.copy_(self.cache.pool)
        cache.table.copy_(table)
        return replace(self, cache=cache)


@dataclass(frozen=True)
class Kind:
    """A layer's attention on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    sides: int = 2
    page: int = 32


SLIDING, FULL = Kind(8, 4, 256, 1024), Kind(8, 1, 512, None, sides=1)
SMALL = Kind(4, 2, 32, 300, page=16)


def scene(kind: Kind, decodes: list[int], chunks: list[tuple[int, int]] = (), dtype: torch.dtype = torch.float32) -> Scene:  # type: ignore[assignment]
    """Decode rows at `decodes` positions (-1: padding) behind chunks of positions [start, end), each of a slot of its own."""
    generator = torch.Generator().manual_seed(len(decodes) + kind.head_dim)
    draw = partial(torch.randn, generator=generator)
    spans = [*chunks, *((position, position + 1) for position in decodes)]
    ends = [end for _, end in spans]
    group = KVGroup(0, "full" if kind.window is None else "sliding", (3,), kind.kv_heads, kind.head_dim, kind.window, kind.page)
    pages = sum(-(-end // kind.page) for end in ends) + 4
    cache = GroupCache(group, pages, len(spans), max(ends), dtype, CPU)
    cache.pool.copy_(30 * draw(cache.pool.shape))
    cache.pool[:, 0] = 0
    free = (torch.randperm(pages - 1, generator=generator) + 1).tolist()
    for slot, (start, end) in enumerate(spans):
        for entry in group.pages_for(start, end) if start >= 0 else ():
            cache.table[slot, entry] = page = free.pop()
            held = min(kind.page, end - entry * kind.page)
            cache.pool[0, page, :, :, :held] = draw((2, kind.kv_heads, held, kind.head_dim)) / kind.head_dim**0.25
    rope = Rope(1e4, kind.head_dim // 2 if kind.window else kind.head_dim // 8)
    layer = Layer(3 if kind.sides else 7, group.name, kind.head_dim, kind.kv_heads, rope, 16, kind.sides == 1, 3)
    slots = [slot for slot, (start, end) in enumerate(spans) for _ in range(start, end)]
    positions = [position for start, end in spans for position in range(start, end)]
    offsets = [sum(end - start for start, end in chunks[:index]) for index in range(len(chunks))]
    batch = eager_batch(
        KVCache([cache]),
        {(rope, kind.head_dim): inverse_frequencies(rope.theta, rope.pairs, kind.head_dim)},
        torch.zeros(len(slots)),
        torch.tensor(slots),
        torch.tensor(positions),
        tuple(Chunk(slot, start, end, offsets[slot]) for slot, (start, end) in enumerate(chunks)),
    )
    qkv = draw(len(slots), (kind.heads + kind.sides * kind.kv_heads) * kind.head_dim).to(dtype)
    norms = ((1 + 0.1 * draw(kind.head_dim)) / kind.head_dim**0.25).to(dtype), ((1 + 0.1 * draw(kind.head_dim)).to(dtype))
    settings = PartSettings(kind.heads, 1e-6, (max(1, len(decodes), len(spans)),), CPU)
    return Scene(layer, cache, batch, qkv, (norms[0], norms[1] / kind.head_dim**0.25 if kind.sides else None), settings)


def attended(it: Scene, router: AttentionRouter) -> Tensor:
    out = torch.full((it.batch.rows, it.settings.heads * it.layer.head_dim), torch.nan, dtype=it.qkv.dtype)
    router.attend(it.qkv, it.layer, it.norms, it.batch, router.prepare(it.batch), it.cache, out)
    return out


def ours(it: Scene) -> Tensor:
    return attended(it, AttentionRouter([PagedDecode(it.cache, it.settings)], [PagedExtend(it.cache, it.settings)], it.settings))


def router_of(it: Scene, scratch: TrtllmScratch) -> AttentionRouter:
    decode, extend = (part(it.cache, it.settings, scratch) for part in (TrtllmDecode, TrtllmExtend))
    return AttentionRouter([decode], [extend], it.settings)


@pytest.fixture
def any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has kernels for every head dim, and for fp32."""
    monkeypatch.setattr(trtllm, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(trtllm, "check_group", lambda *_: None)


@pytest.fixture(params=FRONTS)
def scratch_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> "ScratchFor":
    """Scratch on a front end of each version, and the kernel behind it."""

    monkeypatch.setattr(trtllm, "processors", lambda _: PROCESSORS)

    def make(it: Scene) -> tuple[TrtllmScratch, KernelStandIn]:
        kernel = KernelStandIn()
        front = real(kernel, monkeypatch) if request.param == "installed" else pinned(request.param, kernel)
        return TrtllmScratch(front, it.settings, WORKSPACE), kernel

    return make


ScratchFor = Callable[[Scene], tuple[TrtllmScratch, KernelStandIn]]


# ---- signatures


@pytest.mark.parametrize("version", SIGNATURES)
def test_every_supported_version_takes_what_we_give(version: str) -> None:
    """Each argument that the calls name is one of the version's; a name of ours that it lacks would be seen."""
    for text, names in zip(SIGNATURES[version], (trtllm.DECODE_ARGUMENTS, trtllm.CONTEXT_ARGUMENTS), strict=True):
        known = signature(text).parameters
        assert set(names) <= set(known)
        assert not {*names, "page_table"} <= set(known)
        assert {name for name, each in known.items() if each.default is each.empty} <= set(names)


def test_the_installed_version_is_one_that_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed FlashInfer's parameters, their order and defaults are those that are pinned for its version."""
    found = real(KernelStandIn(), monkeypatch)
    assert found.version in SIGNATURES, f"FlashInfer {found.version} is new here: read its front end, then pin it"
    for call, text in zip((found.decode, found.context), SIGNATURES[found.version], strict=True):
        theirs = [(name, each.default) for name, each in inspect.signature(call).parameters.items()]
        assert theirs == [(name, each.default) for name, each in signature(text).parameters.items()]


def test_a_version_that_lacks_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlashInfer without the counters' argument is a ConfigError that names it."""
    real(KernelStandIn(), monkeypatch)
    monkeypatch.setattr("flashinfer.decode.trtllm_batch_decode_with_kv_cache", lambda query, kv_cache: None)
    with pytest.raises(ConfigError, match="has no backend, block_tables"):
        trtllm.load_for("trtllm-gen")


# ---- answers


@pytest.mark.parametrize("kind", [SLIDING, FULL, replace(FULL, page=64), replace(SLIDING, page=16, sides=0)])
def test_decode_rows_at_the_models_shapes(kind: Kind, scratch_for: ScratchFor) -> None:
    """bf16 rows at the window's and the pages' edges, and padding, equal the house's own attention, pages included."""
    it = scene(kind, [1023, 1024, 1500, 0, -1, 31, 32], dtype=torch.bfloat16)
    scratch, kernel = scratch_for(it)
    other = it.copy()
    want, found = ours(it), attended(other, router_of(other, scratch))
    assert (found.float() - want.float()).abs().max() < TOLERANCE[torch.bfloat16]
    assert torch.equal(other.cache.pool, it.cache.pool)
    (given,) = kernel.calls
    assert given["window_left"] == (-1 if kind.window is None else kind.window - 1)
    assert (given["batch_size"], given["max_q_len"], given["bmm1_scale"], given["bmm2_scale"]) == (7, 1, 1.0, 1.0)
    assert given["max_kv_len"] == it.cache.read_width * kind.page
    assert given["key_cache"].data_ptr() == other.cache.pool[0].data_ptr()
    assert given["value_cache"].data_ptr() - given["key_cache"].data_ptr() == other.cache.pool[0, 0, 0].nbytes
    assert given["enable_pdl"] is False


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("kind", [SMALL, replace(SMALL, window=None, sides=1), replace(SMALL, page=64, window=65)])
def test_chunks_and_decode_rows(kind: Kind, scratch_for: ScratchFor) -> None:
    """fp32 chunks, fresh and continued, and decode rows of one step equal the house's own; a window off by one does not."""
    it = scene(kind, [700, 299, -1], [(0, 70), (600, 640), (299, 301), (1000, 1001)])
    scratch, kernel = scratch_for(it)
    other = it.copy()
    want, found = ours(it), attended(other, router_of(other, scratch))
    assert (found - want).abs().max() < TOLERANCE[torch.float32]
    assert torch.equal(other.cache.pool, it.cache.pool)
    assert len(kernel.calls) == 2
    if kind.window is not None:
        wide = it.copy()
        wide.cache.group = replace(wide.cache.group, window=kind.window + 1)
        assert (attended(wide, router_of(wide, scratch)) - want).abs().max() > FAULT


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("q_len", [2, 4, 8])
def test_rows_of_several_queries(q_len: int, scratch_for: ScratchFor) -> None:
    """Drafts that are verified: a row's queries are its last keys, each causal among them; equal to chunks of as many tokens."""
    it = scene(SMALL, [], [(start, start + q_len) for start in (5, 290, 511)])
    scratch, _ = scratch_for(it)
    want = ours(it).view(-1, SMALL.heads, SMALL.head_dim)
    q = torch.empty_like(want)
    rope = next(iter(it.batch.rope.values()))
    qkv_post(it.qkv, it.cache.pool[0], it.cache.table, it.batch.slots, it.batch.positions, rope, *it.norms, it.settings.eps, q)
    lengths = torch.tensor([chunk.end for chunk in it.batch.chunks], dtype=torch.int32)
    out = torch.empty_like(q)
    rows = TableRows(it.cache.table, lengths, it.cache.table.shape[1] * SMALL.page)
    call_decode(scratch, it.cache.group, q, it.cache.pool[0], rows, out, q_len)
    assert (out - want).abs().max() < TOLERANCE[torch.float32]
    call_decode(scratch, it.cache.group, q, it.cache.pool[0], replace(rows, lengths=lengths - 1), out, q_len)
    assert (out - want).abs().max() > FAULT


@pytest.mark.usefixtures("any_shape")
def test_a_step_after_a_longer_one() -> None:
    """What an earlier step with more and longer rows left in tables and lengths reaches no later one."""
    kernel = KernelStandIn()
    it = scene(SMALL, [900, 700, 800])
    scratch = TrtllmScratch(pinned(NEWEST, kernel), it.settings, WORKSPACE)
    router = router_of(it, scratch)
    attended(it, router)
    it.cache.table[0, 0], it.cache.table[0, 1:] = it.cache.table[1, 40], 10**6  # the tail of a row, which nobody may read
    batch = eager_batch(KVCache([it.cache]), {}, torch.zeros(2), torch.tensor([0, 2]), torch.tensor([5, -1]), ())
    rope = {key: table[:2] for key, table in it.batch.rope.items()}
    short = replace(it, qkv=it.qkv[:2], batch=replace(batch, rope=rope))
    assert (attended(short, router) - ours(short)).abs().max() < TOLERANCE[torch.float32]
    first, second = kernel.calls
    assert first["max_kv_len"] == second["max_kv_len"]
    assert first["block_tables"].data_ptr() == second["block_tables"].data_ptr()
    assert second["block_tables"].flatten().count_nonzero() == 1


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("sides", [2, 0])
def test_a_wrong_page_is_seen(sides: int) -> None:
    """An id of another row's page changes the answer by a hundred tolerances; one that the pool lacks is caught by the stand-in."""
    kernel = KernelStandIn()
    it = scene(replace(SMALL, sides=sides), [500, 600], [(100, 200)])
    router = router_of(it, TrtllmScratch(pinned(NEWEST, kernel), it.settings, WORKSPACE))
    want = attended(it, router)
    kept = it.cache.table.clone()
    for place in ((0, 3), (1, 20)):  # of the chunk's slot and of a decode row's, behind the positions that this step writes
        it.cache.table[place] = it.cache.table[2, 35]
        assert (attended(it, router) - want).abs().max() > FAULT
        it.cache.table[place] = it.cache.pool.shape[1]
        with pytest.raises(AssertionError, match="a page id that the pool does not have"):
            attended(it, router)
        it.cache.table.copy_(kept)


@pytest.mark.usefixtures("any_shape")
def test_garbage_that_is_no_number_is_seen() -> None:
    """The stand-in multiplies masked values by zero as FlashInfer does: NaN behind a row's end, in its own page, shows."""
    it = scene(SMALL, [500])
    router = router_of(it, TrtllmScratch(pinned(NEWEST, KernelStandIn()), it.settings, WORKSPACE))
    it.cache.pool[0, it.cache.table[0, 500 // 16], 1, :, 500 % 16 + 1 :] = torch.nan
    assert attended(it, router).isnan().all()
    assert not ours(it).isnan().any()


# ---- whole models


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("member", ["31b", "e2b"])
def test_whole_models(member: str, nano: Callable[[str], Path]) -> None:
    """Prompts in chunks, mixed steps and decode rows of a whole model, KV-shared layers too, over pages full of finite garbage: the
    house's own attention's logits; pages of one group in the other's table do not give them."""
    folder = nano(member)
    geometry = read_geometry(folder)
    model = Gemma4(geometry, Single(), torch.float32, CPU)
    load(model, folder, geometry, 0, 1)
    lengths = ((3 * geometry.window + 7, 5), (geometry.window // 2, 9))
    ids = [torch.arange(sum(each)) * 7 % geometry.vocab + 3 * slot for slot, each in enumerate(lengths)]
    steps = script(geometry, lengths, PAGES, seed=3, whole=False)
    kernel = KernelStandIn()

    def logits(backend: Backend, plant_fault: PlantFault | None = None) -> Tensor:
        cache = caches(geometry, 1, len(lengths), max(map(sum, lengths)), PAGES, poison=20.0)
        return torch.stack(list(run_steps(model, cache, steps, ids, plant_fault, 20.0, backend).values()))

    def theirs(_: None, geometry: Geometry, cache: KVCache, tp: int, buckets: tuple[int, ...], __: torch.device) -> AttentionRouter:
        settings = PartSettings(geometry.heads // tp, geometry.eps, buckets, CPU)
        scratch = TrtllmScratch(pinned(NEWEST, kernel), settings, WORKSPACE)
        return AttentionRouter(
            [TrtllmDecode(group, settings, scratch) for group in cache],
            [TrtllmExtend(group, settings, scratch) for group in cache],
            settings,
        )

    want, found = logits(attention_backend), logits(theirs)
    assert len(kernel.calls) > 4 * len(geometry.layers)
    assert (found - want).abs().max() < 1e-4
    if member == "31b":
        assert (logits(theirs, lambda _, cache: cache.groups[1].table.copy_(cache.groups[0].table)) - want).abs().max() > 1e-2


# ---- refusals


def rows_of(it: Scene) -> TableRows:
    lengths = it.batch.positions + 1
    return TableRows(it.cache.table.clone(), lengths, it.cache.table.shape[1] * it.cache.group.page)


TRAPS: dict[str, Callable[[TableRows], TableRows]] = {
    "int64 tables": lambda rows: replace(rows, tables=rows.tables.long()),
    "int64 lengths": lambda rows: replace(rows, lengths=rows.lengths.long()),
    "a slice of a wider table": lambda rows: replace(rows, tables=torch.cat([rows.tables] * 2, 1)[:, : rows.tables.shape[1]]),
    "every other length": lambda rows: replace(rows, lengths=rows.lengths.repeat_interleave(2)[::2]),
    "a row too few": lambda rows: replace(rows, tables=rows.tables[1:]),
    "a bound beyond the table": lambda rows: replace(rows, max_len=rows.max_len + 1),
    "no bound": lambda rows: replace(rows, max_len=0),
    "a width that ends inside a step of keys": lambda rows: replace(rows, tables=rows.tables[:, :-1].contiguous()),
}


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("trap", TRAPS)
def test_what_flashinfer_takes_on_trust_is_refused(trap: str) -> None:
    """Each misuse that FlashInfer's front end lets through stops before it; the same call without it passes."""
    it = scene(SMALL, [500, 40])
    kernel = KernelStandIn()
    scratch = TrtllmScratch(pinned(NEWEST, kernel), it.settings, WORKSPACE)
    q = torch.zeros(2, SMALL.heads, SMALL.head_dim)
    call = partial(call_decode, scratch, it.cache.group, q, it.cache.pool[0])
    call(rows_of(it), torch.empty_like(q))
    with pytest.raises(AssertionError):
        call(TRAPS[trap](rows_of(it)), torch.empty_like(q))
    assert len(kernel.calls) == 1


@pytest.mark.usefixtures("any_shape")
def test_wrong_tensors_are_refused() -> None:
    """A pool with its sides apart, an output of another dtype or layout, and tokens that no rows make up stop before FlashInfer."""
    it = scene(SMALL, [500, 40])
    kernel = KernelStandIn()
    scratch = TrtllmScratch(pinned(NEWEST, kernel), it.settings, WORKSPACE)
    q, pool, group = torch.zeros(2, SMALL.heads, SMALL.head_dim), it.cache.pool[0], it.cache.group
    apart = pool.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(AssertionError):
        call_decode(scratch, group, q, apart, rows_of(it), torch.empty_like(q))
    with pytest.raises(AssertionError):
        call_decode(scratch, group, q, pool, rows_of(it), torch.empty_like(q).bfloat16())
    with pytest.raises(AssertionError):
        call_decode(scratch, group, q, pool, rows_of(it), torch.empty(2, SMALL.head_dim, SMALL.heads).mT)
    with pytest.raises(AssertionError):
        call_decode(scratch, group, q, pool, rows_of(it), torch.empty_like(q), q_len=2)
    assert not kernel.calls


def test_what_has_no_kernel_is_refused() -> None:
    """Page, dtype, head dim, head ratio and queries a row that the kernels lack are ConfigErrors that name them."""
    group = KVGroup(0, "full", (0,), 1, 512, None, 32)
    check_group(group, 8, torch.bfloat16, "trtllm-gen", 8)
    refused = [
        (replace(group, page=128), 8, torch.bfloat16, "trtllm-gen", 1, "pages of 16, 32 or 64"),
        (group, 8, torch.float32, "trtllm-gen", 1, "runs bfloat16, not float32"),
        (replace(group, head_dim=192), 8, torch.bfloat16, "trtllm-gen", 1, "head dim 192"),
        (replace(group, kv_heads=3), 8, torch.bfloat16, "trtllm-gen", 1, "8 query heads on 3"),
        (group, 32, torch.bfloat16, "xqa", 1, "32 query heads on 1"),
        (group, 8, torch.bfloat16, "trtllm-gen", 9, "1 to 8 queries a row, not 9"),
        (group, 8, torch.bfloat16, "xqa", 2, "1 to 1 queries a row, not 2"),
    ]
    for bad, heads, dtype, kernels, q_len, said in refused:
        with pytest.raises(ConfigError, match=said):
            check_group(bad, heads, dtype, kernels, q_len)  # type: ignore[arg-type]


def test_xqa_has_no_prefill() -> None:
    """Chunks on a GPU that is none of the SM100 family are refused when the part is made, not when a prompt comes."""
    it = scene(FULL, [5], dtype=torch.bfloat16)
    scratch = TrtllmScratch(pinned(NEWEST, KernelStandIn(), "xqa"), it.settings, WORKSPACE)
    TrtllmDecode(it.cache, it.settings, scratch)
    with pytest.raises(ConfigError, match="attention_extend"):
        TrtllmExtend(it.cache, it.settings, scratch)


def test_a_cpu_is_refused() -> None:
    """trtllm_mha on the CPU is a ConfigError that says what runs there."""
    with pytest.raises(ConfigError, match="trtllm_mha needs a GPU; this engine runs on the CPU, where reference"):
        attention_backend("trtllm_mha", None, KVCache([]), 1, (1,), CPU)  # type: ignore[arg-type]


def test_spans_are_refused() -> None:
    """A chunk whose tokens see each other both ways raises: no backend may run it causally."""
    it = scene(SMALL, [], [(0, 20)])
    router = AttentionRouter([PagedDecode(it.cache, it.settings)], [PagedExtend(it.cache, it.settings)], it.settings)
    spans = replace(it.batch, chunks=(replace(it.batch.chunks[0], spans=((3, 9),)),))
    router.prepare(it.batch)
    with pytest.raises(NotImplementedError, match="see both ways"):
        router.prepare(spans)


def test_the_launchers_arguments_are_pinned() -> None:
    """The compiled launcher takes 36 arguments for decode rows and 35 for chunks; one more or less does not bind."""
    assert (len(DECODE_FFI), len(CONTEXT_FFI)) == (36, 35)
    with pytest.raises(ValueError, match="zip"):
        KernelStandIn().trtllm_paged_attention_decode(*range(35))
