"""The adapter to FlashInfer's attention, by its pinned signatures and, where FlashInfer is installed, through its own front end.

Behind the front end stands `KernelStandIn`; what it must agree with is the house's own attention, over the same pages.
"""

import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.geometry import Geometry, KVGroup, read_geometry
from engine.rank.attention import attention_backend, trtllm
from engine.rank.attention.base import AttentionBackend, PartSettings
from engine.rank.attention.paged import PagedExtend
from engine.rank.attention.trtllm import TableRows, TrtllmDecode, TrtllmExtend, TrtllmScratch, call_decode, check_group
from engine.rank.batch import eager_batch
from engine.rank.kv import KVCache
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Single
from tests.support.engine.kv_scene import FULL, SLIDING, Kind, Scene, attended, ours, relative, routed, scene, theirs
from tests.support.engine.paged import Backend, PlantFault, caches, run_steps, script
from tests.support.flashinfer_calls import (
    CONTEXT_FFI,
    DECODE_FFI,
    PROCESSORS,
    SIGNATURES,
    XQA_SEMAPHORES,
    KernelStandIn,
    pinned,
    real,
    signature,
)

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
NEWEST = "0.7.2.post1"
FRONTS = [*SIGNATURES, "installed"]
TOLERANCE = 2e-5  # fp32: sums in another order
BF16 = 0.001  # of a row's norm: one rounding on either side
FAULT = 100 * TOLERANCE
WORKSPACE = 1 << 10
PAGES = 60
SMALL = Kind(4, 2, 32, 300, page=16)
ScratchFor = Callable[[Scene], tuple[TrtllmScratch, KernelStandIn]]


@pytest.fixture
def any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has kernels for every head dim, and for fp32."""
    monkeypatch.setattr(trtllm, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(trtllm, "check_group", lambda *_: None)


@pytest.fixture(params=FRONTS)
def scratch_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ScratchFor:
    """Scratch on a front end of each version, and the kernel behind it."""
    monkeypatch.setattr(trtllm, "processors", lambda _: PROCESSORS)

    def make(it: Scene) -> tuple[TrtllmScratch, KernelStandIn]:
        kernel = KernelStandIn()
        front = real(kernel, monkeypatch) if request.param == "installed" else pinned(request.param, kernel)
        return TrtllmScratch(front, it.settings, WORKSPACE), kernel

    return make


def newest(it: Scene) -> tuple[TrtllmScratch, KernelStandIn]:
    """Scratch on the newest version's front end, and the kernel behind it."""
    kernel = KernelStandIn()
    return TrtllmScratch(pinned(NEWEST, kernel), it.settings, WORKSPACE), kernel


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
    version = importlib.metadata.version("flashinfer-python")
    assert version in SIGNATURES, f"FlashInfer {version} is new here: read its front end, then pin it"
    for call, text in zip((found.decode, found.context), SIGNATURES[version], strict=True):
        theirs = [(name, each.default) for name, each in inspect.signature(call).parameters.items()]
        assert theirs == [(name, each.default) for name, each in signature(text).parameters.items()]


def test_a_version_that_lacks_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlashInfer without the counters' argument is a ConfigError that names it."""
    real(KernelStandIn(), monkeypatch)
    monkeypatch.setattr("flashinfer.decode.trtllm_batch_decode_with_kv_cache", lambda query, kv_cache: None)
    with pytest.raises(ConfigError, match="has no backend, block_tables"):
        trtllm.load_for("trtllm-gen", download=False)


# ---- answers


@pytest.mark.parametrize("kind", [SLIDING, FULL, replace(FULL, page=64), replace(SLIDING, page=16, kv_projections=0)])
def test_decode_rows_at_the_models_shapes(kind: Kind, scratch_for: ScratchFor) -> None:
    """bf16 rows at the window's and the pages' edges, and padding, equal the house's own attention, pages included."""
    it = scene(kind, [1023, 1024, 1500, 0, -1, 31, 32], dtype=torch.bfloat16)
    scratch, kernel = scratch_for(it)
    other = it.copy()
    want, found = ours(it), attended(other, theirs(other, scratch))
    assert relative(found, want) < BF16
    assert torch.equal(other.cache.pool, it.cache.pool)
    (given,) = kernel.calls
    assert given["window_left"] == (-1 if kind.window is None else kind.window - 1)
    assert (given["batch_size"], given["max_q_len"], given["bmm1_scale"], given["bmm2_scale"]) == (7, 1, 1.0, 1.0)
    assert given["max_kv_len"] == it.cache.read_width * kind.page
    assert given["key_cache"].data_ptr() == other.cache.pool[0].data_ptr()
    assert given["value_cache"].data_ptr() - given["key_cache"].data_ptr() == other.cache.pool[0, 0, 0].nbytes
    assert given["enable_pdl"] is False
    if kind.window is not None:  # a key of a thousand: as much as one of sixteen of a row's norm
        wide = it.copy()
        wide.cache.group = replace(wide.cache.group, window=kind.window + 1)
        assert relative(attended(wide, theirs(wide, scratch)), want) > 20 * BF16


@pytest.mark.parametrize("kind", [SLIDING, replace(FULL, page=64), Kind(8, 1, 256, 512, kv_projections=0)])
def test_decode_rows_by_xqa(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no trtllm-gen, the installed front end's way to xqa gives the house's own attention, pages included; a window
    of one key more does not."""
    it = scene(kind, [1023, 1024, 1500, 0, -1, 31, 32], dtype=torch.bfloat16)
    kernel = KernelStandIn()
    scratch = TrtllmScratch(real(kernel, monkeypatch, "xqa"), it.settings, XQA_SEMAPHORES + WORKSPACE)

    def decoded(one: Scene) -> Tensor:
        decode = TrtllmDecode(one.cache, one.settings, scratch)
        return attended(one, routed(one, decode, PagedExtend(one.cache, one.settings)))

    other, want = it.copy(), ours(it)
    assert relative(decoded(other), want) < BF16
    assert torch.equal(other.cache.pool, it.cache.pool)
    (given,) = kernel.calls
    assert given["window_left"] == (-1 if kind.window is None else kind.window - 1)
    assert given["key_cache"].data_ptr() == other.cache.pool[0].data_ptr()
    if kind.window is not None:
        other.cache.group = replace(other.cache.group, window=kind.window + 1)
        assert relative(decoded(other), want) > 20 * BF16


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("kind", [SMALL, replace(SMALL, window=None, kv_projections=1), replace(SMALL, page=64, window=65)])
def test_chunks_and_decode_rows(kind: Kind, scratch_for: ScratchFor) -> None:
    """fp32 chunks, fresh and continued, and decode rows of one step equal the house's own; a window off by one does not."""
    it = scene(kind, [700, 299, -1], [(0, 70), (600, 640), (299, 301), (1000, 1001)])
    scratch, kernel = scratch_for(it)
    other = it.copy()
    want, found = ours(it), attended(other, theirs(other, scratch))
    assert (found - want).abs().max() < TOLERANCE
    assert torch.equal(other.cache.pool, it.cache.pool)
    assert len(kernel.calls) == 2
    if kind.window is not None:
        wide = it.copy()
        wide.cache.group = replace(wide.cache.group, window=kind.window + 1)
        assert (attended(wide, theirs(wide, scratch)) - want).abs().max() > FAULT


@pytest.mark.usefixtures("any_shape")
def test_a_step_after_a_longer_one() -> None:
    """What an earlier step with more and longer rows left in tables and lengths reaches no later one."""
    it = scene(SMALL, [900, 700, 800])
    scratch, kernel = newest(it)
    router = theirs(it, scratch)
    attended(it, router)
    it.cache.table[0, 0], it.cache.table[0, 1:] = it.cache.table[1, 40], 10**6  # the tail of a row, which nobody may read
    batch = eager_batch(KVCache([it.cache]), {}, torch.zeros(2), torch.tensor([0, 2]), torch.tensor([5, -1]), ())
    rope = {key: table[:2] for key, table in it.batch.rope.items()}
    short = replace(it, qkv=it.qkv[:2], batch=replace(batch, rope=rope))
    assert (attended(short, router) - ours(short)).abs().max() < TOLERANCE
    first, second = kernel.calls
    assert first["max_kv_len"] == second["max_kv_len"]
    assert first["block_tables"].data_ptr() == second["block_tables"].data_ptr()
    assert second["block_tables"].flatten().count_nonzero() == 1


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("kind", [SMALL, replace(SMALL, window=None, kv_projections=1)])
def test_stale_tails(kind: Kind, scratch_for: ScratchFor) -> None:
    """Ids that no pool has, behind the end of every row of the table, change nothing for either backend; a page earlier they do."""
    it = scene(kind, [500, 31, -1], [(0, 70), (600, 640)])
    scratch, _ = scratch_for(it)
    want = ours(it)
    ends = [70, 640, 501, 32, 0]
    for slot, end in enumerate(ends):
        it.cache.table[slot, -(-end // kind.page) :] = 10**6
    other = it.copy()
    batch = eager_batch(KVCache([it.cache]), {}, it.batch.ids, it.batch.slots, it.batch.positions, it.batch.chunks)
    stale = replace(it, batch=replace(batch, rope=it.batch.rope))
    assert torch.equal(ours(stale), want)
    assert (attended(other, theirs(other, scratch)) - want).abs().max() < TOLERANCE
    other.cache.table[1, 600 // kind.page - 1] = 10**6
    with pytest.raises(AssertionError, match="a page id that the pool does not have"):
        attended(other, theirs(other, scratch))


@pytest.mark.usefixtures("any_shape")
@pytest.mark.parametrize("kv_projections", [2, 0])
def test_a_wrong_page_is_seen(kv_projections: int) -> None:
    """An id of another row's page changes the answer by a hundred tolerances; one that the pool lacks is caught by the stand-in."""
    it = scene(replace(SMALL, kv_projections=kv_projections), [500, 600], [(100, 200)])
    router = theirs(it, newest(it)[0])
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
    router = theirs(it, newest(it)[0])
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
    load(model, TENSORS, folder)
    lengths = ((3 * geometry.window + 7, 5), (geometry.window // 2, 9))
    ids = [torch.arange(sum(each)) * 7 % geometry.vocab + 3 * slot for slot, each in enumerate(lengths)]
    steps = script(geometry, lengths, PAGES, seed=3, whole=False)
    kernel = KernelStandIn()

    def logits(backend: Backend, plant_fault: PlantFault | None = None) -> Tensor:
        cache = caches(geometry, 1, len(lengths), max(map(sum, lengths)), PAGES, poison=20.0)
        return torch.stack(list(run_steps(model, cache, steps, ids, plant_fault, 20.0, backend).values()))

    def made(_: object, geometry: Geometry, cache: KVCache, tp: int, buckets: tuple[int, ...]) -> AttentionBackend:
        settings = PartSettings(geometry.heads // tp, geometry.eps, buckets, CPU)
        scratch = TrtllmScratch(pinned(NEWEST, kernel), settings, WORKSPACE)
        decodes = [TrtllmDecode(group, settings, scratch) for group in cache]
        extends = [TrtllmExtend(group, settings, scratch) for group in cache]
        return AttentionBackend(cache, settings, {"decode": decodes, "extend": extends})

    want, found = logits(attention_backend), logits(made)
    assert len(kernel.calls) > 4 * len(geometry.layers)
    assert (found - want).abs().max() < 1e-4
    if member == "31b":
        assert (logits(made, lambda _, cache: cache.groups[1].table.copy_(cache.groups[0].table)) - want).abs().max() > 1e-2


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
    """Each misuse that FlashInfer's front end lets through is refused by the stand-in, which every call of these tests passes."""
    it = scene(SMALL, [500, 40])
    scratch, _ = newest(it)
    q, out = torch.zeros(2, 2, SMALL.heads, SMALL.head_dim)
    call = partial(call_decode, scratch, it.cache.group, q, it.cache.pool[0])
    call(rows_of(it), out)
    with pytest.raises(AssertionError):
        call(TRAPS[trap](rows_of(it)), out)


@pytest.mark.usefixtures("any_shape")
def test_wrong_tensors_are_refused() -> None:
    """So are an output of another dtype or layout, and tokens that no rows make up."""
    it = scene(SMALL, [500, 40])
    scratch, _ = newest(it)
    q, pool, group = torch.zeros(2, SMALL.heads, SMALL.head_dim), it.cache.pool[0], it.cache.group
    turned = torch.empty(2, SMALL.head_dim, SMALL.heads).mT
    for query, out in ((q, torch.empty_like(q).bfloat16()), (q, turned), (q[:1], torch.empty_like(q[:1]))):
        with pytest.raises(AssertionError):
            call_decode(scratch, group, query, pool, rows_of(it), out)


def test_what_has_no_kernel_is_refused() -> None:
    """Head dim and head ratio that the kernels lack are ConfigErrors that name them."""
    group = KVGroup(0, "full", (0,), 1, 512, None, 32)
    check_group(group, 8, "trtllm-gen")
    refused = [
        (replace(group, head_dim=192), 8, "trtllm-gen", "head dim 192"),
        (replace(group, kv_heads=3), 8, "trtllm-gen", "8 query heads on 3"),
        (group, 32, "xqa", "32 query heads on 1"),
    ]
    for bad, heads, kernels, said in refused:
        with pytest.raises(ConfigError, match=said):
            check_group(bad, heads, kernels)  # type: ignore[arg-type]


def test_the_launchers_arguments_are_pinned() -> None:
    """The compiled launcher takes 36 arguments for decode rows and 35 for chunks; one more or less does not bind."""
    assert (len(DECODE_FFI), len(CONTEXT_FFI)) == (36, 35)
    with pytest.raises(ValueError, match="zip"):
        KernelStandIn().trtllm_paged_attention_decode(*range(35))
