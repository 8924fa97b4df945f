"""The model against transformers in fp32: prefilled whole, in chunks, decoded, at every TP, over shuffled and poisoned pages."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kernels.qkv
from engine.geometry import Geometry, read_geometry, shard_vocab
from engine.rank.kv import KVCache
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.paged import Logits, PlantFault, Step, caches, run_steps, script
from tests.support.engine.threads import SkippedReduce, ThreadParallel, run_ranks
from tests.support.judge.oracle import Verdict, judge, load_oracle, soft_cap

pytestmark = pytest.mark.cpu

MEMBERS = list(SHAPES)
TOLERANCE = 1e-4
FAULT = 100 * TOLERANCE
PAGES = 40
DECODED = 9

Nano = Callable[[str], Path]


@dataclass(frozen=True)
class Case:
    """A member, sequences for it that are several windows long (the last one is shorter than a window), and the verdict on each."""

    folder: Path
    geometry: Geometry
    lengths: tuple[tuple[int, int], ...]
    ids: tuple[Tensor, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def max_len(self) -> int:
        return max(map(sum, self.lengths))

    def steps(self, *, whole: bool, seed: int = 3) -> list[Step]:
        return script(self.geometry, self.lengths, PAGES, seed, whole=whole)

    def model(self, parallel: Parallel, dtype: torch.dtype = torch.float32) -> Gemma4:
        model = Gemma4(self.geometry, parallel, dtype, torch.device("cpu"))
        load(model, TENSORS, self.folder)
        return model

    def caches(self, size: int = 1, geometry: Geometry | None = None) -> KVCache:
        return caches(geometry or self.geometry, size, len(self.lengths), self.max_len, PAGES)

    def run(self, parallel: Parallel, steps: list[Step], plant_fault: PlantFault | None = None) -> dict[tuple[int, int], Tensor]:
        return run_steps(self.model(parallel), self.caches(parallel.size), steps, self.ids, plant_fault)

    def error(self, found: dict[tuple[int, int], Tensor]) -> float:
        """Largest difference of soft-capped logits over positions that no router's near tie has touched; NaN counts as infinite."""
        sure = {place: row for place, row in found.items() if place[1] < self.verdicts[place[0]].sure}
        print(f"{len(found)} positions compared but {len(found) - len(sure)}, which lie behind a router's near tie")
        assert len(sure) >= 0.5 * len(found)
        ours = soft_cap(torch.stack(list(sure.values())), self.geometry.softcap)
        theirs = torch.stack([self.verdicts[slot].logits[position] for slot, position in sure])
        return (ours - theirs).abs().nan_to_num(torch.inf).max().item()


@pytest.fixture(scope="module")
def case(nano: Nano) -> Callable[[str], Case]:
    @cache
    def make(member: str) -> Case:
        return case_of(nano(member))

    return make


def case_of(folder: Path) -> Case:
    """Random sequences for a checkpoint."""
    geometry, oracle = read_geometry(folder), load_oracle(folder)
    window = geometry.window
    lengths = ((4 * window + 7, DECODED), (2 * window + 1, DECODED), (window // 2, DECODED))
    generator = torch.Generator().manual_seed(12)
    ids = tuple(torch.randint(3, geometry.vocab, (sum(length),), generator=generator) for length in lengths)
    return Case(folder, geometry, lengths, ids, tuple(judge(oracle, row) for row in ids))


def add_tokens(folder: Path, copy: Path, count: int) -> None:
    """`copy` becomes the checkpoint in `folder` with `count` more rows in each table of tokens."""
    tensors = {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}
    for name, table in tensors.items():
        if "embed_tokens" in name:
            tensors[name] = torch.cat([table, table[torch.randperm(len(table))[:count]] * 1.1])
    save_file(tensors, copy / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if name in config["text_config"]:
            config["text_config"][name] += count
    (copy / "config.json").write_text(json.dumps(config))


# ---- equal


def is_slow(member: str, tp: int, *, whole: bool) -> bool:
    """Prompts as one chunk over several ranks; and at all sizes the members whose layers others have too."""
    return (whole and tp > 1) or (member in {"12b", "e4b"} and (whole or tp == 2))


@pytest.mark.parametrize(
    ("member", "tp", "whole"),
    [
        pytest.param(member, tp, whole, marks=pytest.mark.slow if is_slow(member, tp, whole=whole) else ())
        for member, tp, whole in product(MEMBERS, (1, 2, 4), (True, False))
    ],
)
def test_logits_are_transformers(case: Callable[[str], Case], member: str, tp: int, whole: bool) -> None:
    """Logits of prompts and decoded tokens lie within 1e-4 of transformers', and are the same bits on every rank."""
    it = case(member)
    steps = it.steps(whole=whole)
    if tp == 1:
        found = it.run(Single(), steps)
    else:
        found, *others = run_ranks(tp, lambda parallel: it.run(parallel, steps))
        assert all(torch.equal(other[place], row) for other in others for place, row in found.items())
    error = it.error(found)
    mixed = sum(bool(step.chunks and step.decodes) for step in steps)
    print(f"{member} TP={tp} {'whole' if whole else 'chunks'}: max error {error:.1e}, {len(steps)} steps, {mixed} mixed")
    assert error < TOLERANCE
    assert whole or mixed > 0
    assert any(step.released for step in steps)


def test_a_vocabulary_that_ranks_do_not_divide(nano: Nano, tmp_path: Path) -> None:
    """With 37 more tokens, which four ranks cannot share evenly, logits are still transformers', and -inf behind the last token;
    with the last rank's rows one place further they are not."""
    add_tokens(nano("e2b"), tmp_path, 37)
    it = case_of(tmp_path)
    assert it.geometry.vocab % 4 == 1
    steps = it.steps(whole=False)

    def run(parallel: ThreadParallel, shift: int) -> Logits:
        model = it.model(parallel)
        table = model.embedding.tokens.head.weight
        filled = len(shard_vocab(it.geometry.vocab, 4, parallel.rank))
        assert not table[filled:].any()
        assert model.head.logits(torch.ones(2, it.geometry.hidden))[:, filled:].eq(-torch.inf).all()
        if parallel.rank == 3:
            assert 0 < filled < len(table)
            table[:filled] = table[:filled].roll(shift, 0)
        return run_steps(model, it.caches(4), steps, it.ids)

    assert it.error(run_ranks(4, lambda parallel: run(parallel, 0))[0]) < TOLERANCE
    assert it.error(run_ranks(4, lambda parallel: run(parallel, 1))[0]) > FAULT


def test_placeholders_embed_as_pad(case: Callable[[str], Case]) -> None:
    """An image id in plain text is read as pad, as transformers does; any other id in its place is not."""
    it = case("e2b")
    placeholder, *_ = it.geometry.placeholders
    steps = script(it.geometry, ((20, 0),), PAGES, 1, whole=True)

    def last(token: int) -> Tensor:
        ids = it.ids[0][:20].clone()
        ids[7] = token
        return run_steps(it.model(Single()), it.caches(), steps, [ids])[0, 19]

    assert torch.equal(last(placeholder), last(it.geometry.pad))
    assert (last(placeholder) - last(200)).abs().max() > FAULT


@pytest.mark.parametrize("member", ["e2b", "12b"])
def test_no_logits_wanted(case: Callable[[str], Case], member: str) -> None:
    """A chunk whose logits nobody wants yields none, and its pages are those that a chunk with logits writes."""
    it = case(member)
    steps = script(it.geometry, ((40, 0),), PAGES, 1, whole=True)
    quiet, loud = it.caches(), it.caches()
    assert run_steps(it.model(Single()), quiet, [replace(step, wanted=()) for step in steps], it.ids) == {}
    run_steps(it.model(Single()), loud, steps, it.ids)
    for ours, theirs in zip(quiet, loud, strict=True):
        assert torch.equal(ours.pool.nan_to_num(), theirs.pool.nan_to_num())
        assert ours.pool.nan_to_num().any()


def test_bfloat16_is_as_good_as_transformers(case: Callable[[str], Case]) -> None:
    """bf16 logprobs err no more than 1.25 times as much as transformers' own bf16 forward, both against its fp32 one."""
    it = case("31b")
    theirs = judge(load_oracle(it.folder, torch.bfloat16), it.ids[0]).logits.log_softmax(-1)
    exact = it.verdicts[0].logits.log_softmax(-1)
    steps = script(it.geometry, ((len(it.ids[0]), 0),), PAGES, 1, whole=True)
    model, pools = it.model(Single(), torch.bfloat16), caches(it.geometry, 1, 1, it.max_len, PAGES, "bfloat16")
    rows = torch.stack(list(run_steps(model, pools, steps, it.ids).values()))
    ours = soft_cap(rows, it.geometry.softcap).log_softmax(-1)
    mean_ours, mean_theirs = ((some - exact).abs().mean().item() for some in (ours, theirs))
    print(f"mean logprob error in bf16: {mean_ours:.2e}, transformers {mean_theirs:.2e}, ratio {mean_ours / mean_theirs:.2f}")
    assert 0 < mean_ours <= 1.25 * mean_theirs


# ---- planted faults: the same comparison must fail by a hundred tolerances


@pytest.mark.parametrize("kind", ["sliding", "full"])
@pytest.mark.parametrize("member", ["31b", "e2b"])
def test_a_wrong_page_is_seen(case: Callable[[str], Case], member: str, kind: str) -> None:
    """One entry of one page table that names another sequence's page moves the logits by at least 1e-2."""
    it = case(member)
    steps = it.steps(whole=True)
    last = next(number for number, step in reversed(list(enumerate(steps))) if any(row[0] == 0 for row in step.decodes))
    entry = it.lengths[0][0] // 32 - 1

    def plant_fault(number: int, cache: KVCache) -> None:
        table = next(group.table for group in cache if group.group.name == kind)
        if number == last:
            table[0, entry] = table[1, it.lengths[1][0] // 32 - 1]

    error = it.error(it.run(Single(), steps, plant_fault))
    print(f"{member}: a wrong {kind} page: error {error:.2g}")
    assert FAULT <= error < torch.inf


@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e4b"])
def test_a_missing_all_reduce_is_seen(case: Callable[[str], Case], member: str) -> None:
    """Any one all-reduce left out in the last step (embedding, attention, MLP, experts) moves the logits by at least 1e-2."""
    it = case(member)
    steps = script(it.geometry, ((40, 1),), PAGES, 1, whole=True)
    sums = 2 * len(it.geometry.layers) + 1

    for missing in (-1, sums, sums + 1, sums + 2, 2 * sums - 2, 2 * sums - 1):

        def body(parallel: ThreadParallel, missing: int = missing) -> float:
            assert isinstance(parallel, SkippedReduce)
            parallel.skipped = missing
            found = it.run(parallel, steps)
            assert parallel.reduces == 2 * sums
            return it.error(found)

        error = max(run_ranks(2, body, SkippedReduce))
        print(f"{member}: all-reduce {missing - sums} of the last step left out: error {error:.2g}")
        assert error < TOLERANCE if missing < 0 else FAULT <= error < torch.inf


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("member", ["31b", "e2b"])
def test_a_window_off_by_one_is_seen(case: Callable[[str], Case], member: str, off: int) -> None:
    """A window of one key more or less moves the logits by at least 1e-2."""
    it = case(member)
    wrong = replace(it.geometry, window=it.geometry.window + off)
    steps = script(wrong, it.lengths, PAGES, 3, whole=False)
    error = it.error(run_steps(it.model(Single()), it.caches(geometry=wrong), steps, it.ids))
    print(f"{member}: window off by {off}: error {error:.2g}")
    assert FAULT <= error < torch.inf


def test_k_as_v_is_seen(case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where V is K's raw product, storing the finished K in its place moves the logits by at least 1e-2."""
    it = case("31b")
    write = kernels.qkv.store_kv

    def alias(pool: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        write(pool, pages, offsets, k, k if k.shape[2] == it.geometry.layers[-1].head_dim else v)

    monkeypatch.setattr(kernels.qkv, "store_kv", alias)
    error = it.error(it.run(Single(), it.steps(whole=True)))
    print(f"K as V: error {error:.2g}")
    assert FAULT <= error < torch.inf
