"""`kv_dtype: fp8` against transformers in fp32 with K and V rounded to e4m3 where attention takes them, at every TP.

A value close to the edge between two e4m3 numbers may fall either way between two exact implementations, and moves what follows.
So each number in the pages is held to be a rounding of transformers' own, give or take EDGE, and transformers goes on with it.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import kernels.qkv
from engine.errors import CheckpointError
from engine.geometry import read_geometry, shard_kv_heads
from engine.quantisation import read_quantisation
from engine.rank.checkpoints import Checkpoint
from engine.rank.kv import KVCache
from engine.rank.load.kv_scales import read_kv_scales
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from tests.support.engine.paged import Logits, caches, run_steps, script
from tests.support.engine.threads import run_ranks
from tests.support.judge.oracle import judge, load_oracle, soft_cap

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4
FAULT = 100 * TOLERANCE
EDGE = 1e-4  # fp32's own errors of K and V: a thousandth of a step between e4m3 numbers
PAGES = 40
LENGTHS = ((200, 9), (70, 9), (30, 9))
E4M3 = torch.float8_e4m3fn

Held = Mapping[int, Tensor]  # by layer that owns them: K and V [2, kv_heads, tokens, d] in e4m3
Scales = Mapping[int, Tensor]  # by layer: [2, kv_heads]


class Case:
    """A member, random sequences, and the judge: transformers with the weights of `judged`, by default the same."""

    def __init__(self, folder: Path, judged: Path | None = None) -> None:
        self.folder, self.geometry = folder, read_geometry(folder)
        generator = torch.Generator().manual_seed(5)
        self.ids = [torch.randint(3, self.geometry.vocab, (sum(length),), generator=generator) for length in LENGTHS]
        self.oracle = load_oracle(judged or folder)
        self.scales: Scales = {}

    def run(self, parallel: Parallel) -> tuple[Logits, list[dict[int, Tensor]]]:
        """Prompts in chunks beside decode rows; NaN where nothing may be read. Returns logits, and what the pages of this rank hold
        of each sequence: none is given back, as if windows were longer."""
        model = Gemma4(self.geometry, parallel, torch.float32, torch.device("cpu"))
        load(model, TENSORS, self.folder)
        most = max(map(sum, LENGTHS))
        pools = caches(self.geometry, parallel.size, len(LENGTHS), most, PAGES, "float8_e4m3fn")
        text = Checkpoint(self.folder, self.geometry, TENSORS, "", read_quantisation(self.folder))
        for layer, scales in read_kv_scales(text, parallel, model.device).items():
            pools.of(self.geometry.layers[layer]).scales[layer] = scales
        steps = script(replace(self.geometry, window=2 * most), LENGTHS, PAGES, 3, whole=False)
        found = run_steps(model, pools, steps, self.ids)
        return found, [held_of(pools, slot, sum(length)) for slot, length in enumerate(LENGTHS)]

    def of_ranks(self, tp: int) -> tuple[Logits, list[dict[int, Tensor]]]:
        """As `run`, of a group: the logits, which are the same bits on every rank, and the heads of all."""
        if tp == 1:
            return self.run(Single())
        ranks = run_ranks(tp, self.run)
        found, held = ranks[0]
        assert all(torch.equal(other[place], row) for other, _ in ranks for place, row in found.items())
        for slot, whole in enumerate(held):
            for layer, first in whole.items():
                heads = self.geometry.layers[layer].kv_heads
                every = first.new_empty((2, heads, *first.shape[2:]))
                for rank in range(tp):
                    own = shard_kv_heads(self.geometry.heads, heads, tp, rank)
                    every[:, own.start : own.stop] = ranks[rank][1][slot][layer]
                whole[layer] = every
        return found, held

    def error(self, found: Logits, held: list[dict[int, Tensor]] | None) -> float:
        """The largest difference of soft-capped logits before a router's near tie; NaN counts as infinite. held: what transformers
        reads in place of its own K and V; None: those are not rounded."""
        verdicts = []
        for slot, ids in enumerate(self.ids):
            with pages_read(self.oracle, self.geometry, held and held[slot], self.scales):
                verdicts.append(judge(self.oracle, ids))
        sure = {place: row for place, row in found.items() if place[1] < verdicts[place[0]].sure}
        assert len(sure) >= 0.3 * len(found)
        ours = soft_cap(torch.stack(list(sure.values())), self.geometry.softcap)
        theirs = torch.stack([verdicts[slot].logits[position] for slot, position in sure])
        return (ours - theirs).abs().nan_to_num(torch.inf).max().item()


def held_of(pools: KVCache, slot: int, tokens: int) -> dict[int, Tensor]:
    """K and V [2, kv_heads, tokens, d] that each layer of a rank has of a sequence."""
    held = {}
    for group in pools:
        pages = group.table[slot, : -(-tokens // group.group.page)].long()
        for layer, pool in group.layers.items():
            held[layer] = pool[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
    return held


@contextmanager
def pages_read(oracle: Any, geometry: Any, held: Held | None, scales: Scales) -> Iterator[None]:
    """transformers' eager attention reads what pages hold, which must be its own K and V, rounded and divided by scales."""
    code = sys.modules[type(oracle).__module__]
    eager = code.eager_attention_forward

    def from_pages(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        if held is not None:
            layer = geometry.layers[module.layer_idx].kv_source
            factors = scales.get(layer, torch.ones(2, key.shape[1]))[..., None, None]
            key, value = (as_held(*sides) for sides in zip((key, value), held[layer], factors, strict=True))
        return eager(module, query, key, value, *rest, **options)

    code.eager_attention_forward = from_pages
    try:
        yield
    finally:
        code.eager_attention_forward = eager


def as_held(exact: Tensor, stored: Tensor, scale: Tensor) -> Tensor:
    """exact [1, kv_heads, tokens, d] as it is stored, times scale [kv_heads, 1, 1]."""
    exact = exact / scale
    stored, off = stored.float(), EDGE * exact.abs() + 0.1 * EDGE / scale
    either = [(exact + sign * off).to(E4M3).float() for sign in (-1, 1)]
    wrong = (stored != either[0]) & (stored != either[1])
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} numbers are no rounding of K and V"
    return (stored * scale).expand_as(exact)


@pytest.fixture(scope="module")
def case(nano: Callable[[str], Path]) -> Callable[[str], Case]:
    return cache(lambda member: Case(nano(member)))


@pytest.mark.parametrize(("member", "tp"), [("31b", 1), ("31b", 2), ("26b-a4b", 4), ("e2b", 1), ("e2b", 4)])
def test_logits_are_transformers_over_the_pages(case: Callable[[str], Case], member: str, tp: int) -> None:
    """In chunks and decoded, with windows, V from K's product, and layers that read another one's pages. Over K and V that are not
    rounded transformers strays by a hundred tolerances."""
    it = case(member)
    found, held = it.of_ranks(tp)
    error, unrounded = it.error(found, held), it.error(found, None)
    print(f"{member} TP={tp}: error {error:.1e}, over K and V that are not rounded {unrounded:.1e}")
    assert error < TOLERANCE
    assert unrounded > FAULT


def test_a_wrong_scale_is_seen(case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """K stored a tenth larger, as with the scale of another head, is no rounding of K, and moves the logits by a hundred
    tolerances."""
    it, write = case("31b"), kernels.qkv.store_kv
    _, held = it.of_ranks(1)
    larger: Callable[[Tensor], Tensor] = lambda k: (1.1 * k.float()).to(E4M3)  # noqa: E731 - beside the one that it changes
    monkeypatch.setattr(kernels.qkv, "store_kv", lambda pool, pages, at, k, v: write(pool, pages, at, larger(k), v))
    wrong, stored = it.of_ranks(1)
    with pytest.raises(AssertionError, match="are no rounding of K and V"):
        it.error(wrong, stored)
    assert FAULT < it.error(wrong, held) < torch.inf


# What follows `self_attn.` in a layer's name, the side, and whether each head has one.
SPELLINGS = (
    (("k_proj.k_scale", "v_proj.v_scale"), False),
    (("k_scale", "v_scale"), True),
    (("k_proj.output_scale", "v_proj.output_scale"), False),
    (("kv_scale",), False),
)


def scaled(folder: Path, to: Path, change: Callable[[Tensor], Tensor] = lambda scale: scale) -> tuple[Path, Scales]:
    """The folder with scales of K and V in all spellings, each layer in the next one, and the scales by layer that owns K and V."""
    shutil.copytree(folder, to)
    geometry, draw = read_geometry(folder), torch.Generator().manual_seed(8)
    tensors, scales = {}, {}
    for layer in geometry.layers:
        names, by_head = SPELLINGS[layer.index % len(SPELLINGS)]
        for side, name in enumerate(names):
            scale = torch.rand(layer.kv_heads if by_head else 1, generator=draw) + 0.02
            tensors[f"{geometry.prefix}layers.{layer.index}.self_attn.{name}"] = change(scale)[..., None, None]
            if layer.owns_kv:
                held = scales.setdefault(layer.index, torch.ones(2, layer.kv_heads))
                held[slice(side, side + 1) if len(names) == 2 else slice(2)] = scale
    shard = to / "model-kv.safetensors"
    save_file(tensors, shard)
    index = {name: path.name for path in to.glob("*.safetensors") for name in safe_open(path, "pt").keys()}  # noqa: SIM118
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return to, scales


@pytest.mark.parametrize(("member", "tp"), [("31b", 2), ("26b-a4b", 1), ("e2b", 4)])
def test_scales_of_the_folder(nano: Callable[[str], Path], tmp_path: Path, member: str, tp: int) -> None:
    """K and V are stored divided by the folder's scales, of a layer or of each head, and layers that read another's take its.
    Logits are transformers' over the products; K's scales for V are seen."""
    folder, scales = scaled(nano(member), tmp_path / "scaled")
    it = Case(folder, nano(member))
    it.scales = scales
    found, held = it.of_ranks(tp)
    error = it.error(found, held)
    print(f"{member} TP={tp}: error {error:.1e}")
    assert error < TOLERANCE
    it.scales = {layer: scale.flip(0) for layer, scale in scales.items()}
    with pytest.raises(AssertionError, match="are no rounding of K and V"):
        it.error(found, held)


@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.inf])
def test_wrong_scales_are_refused(nano: Callable[[str], Path], tmp_path: Path, wrong: float) -> None:
    folder, _ = scaled(nano("31b"), tmp_path / "scaled", lambda scale: scale * 0 + wrong if wrong < torch.inf else scale.repeat(3))
    with pytest.raises(CheckpointError, match="must be positive, one or one for each of"):
        Case(folder, nano("31b")).run(Single())


@pytest.mark.parametrize(
    ("said", "is_read", "note"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, True, "kv_dtype: fp8` serves it so"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True, "8-bit float tensor"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, False, "its scales are not used"),
    ],
)
def test_only_scales_of_fp8_are_read(
    nano: Callable[[str], Path], tmp_path: Path, said: dict[str, object], is_read: bool, note: str
) -> None:
    """The folder may quantise its KV cache alone; a log line says what becomes of that."""
    folder, _ = scaled(nano("31b"), tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    weights = read_quantisation(folder)
    found = read_kv_scales(Checkpoint(folder, read_geometry(folder), TENSORS, "", weights), Single(), torch.device("cpu"))
    assert bool(found) == is_read
    assert [each for each in weights.notes if note in each] == list(weights.notes) != []
    assert read_quantisation(folder, "fp8").name == "fp8"
