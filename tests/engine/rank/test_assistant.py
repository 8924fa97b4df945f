"""Our drafters against transformers' assistants, over the same K and V of the target."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.geometry import Layer, kv_groups, read_geometry
from engine.protocol import GenerateRequest, JsonObject
from engine.quantisation import UNQUANTISED
from engine.rank.attention import attention_backend
from engine.rank.batch import Chunk, ForwardBatch, eager_batch
from engine.rank.builder import build
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.loader import load
from engine.rank.models import assistant_weights, gemma4_weights
from engine.rank.models.assistant import Assistant, OrderedHead, load_assistant
from engine.rank.models.assistant_geometry import check_shards, read_assistant
from engine.rank.models.gemma4 import Gemma4, LayerStep
from engine.rank.parallel import Single
from engine.rank.products import Exchange
from engine.rank.sampler import Sampler
from engine.rank.step import StepBuffers
from kernels.sampling_batch import SlotParameters
from kernels.slots import rotary_table
from tests.conftest import Nano
from tests.engine.rank.test_drafts import guessing
from tests.nano.nano_shapes import SHAPES
from tests.nano.test_drafters import FAULTS, Plant
from tests.support.engine import drafters
from tests.support.engine.answers import answers, texts
from tests.support.engine.drafting_world import AnyDrafts
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES as RECORDED_PAGES
from tests.support.engine.recording import config_of, request
from tests.support.judge import assistants

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
PAGES = 40


@dataclass
class Pair:
    """A target behind its prompt, and its drafter in both implementations."""

    target: Gemma4
    drafter: Assistant
    judge: object
    cache: KVCache
    ids: Tensor
    hidden: Tensor  # [1, backbone], of the prompt's last token


def pair(folder: Path, member: str, out: Path, length: int) -> Pair:
    judge = assistants.write(SHAPES[member], out)
    geometry = read_geometry(folder)
    target = Gemma4(geometry, Single(), torch.float32, CPU)
    load(target, gemma4_weights.TENSORS, folder)
    drafter = Assistant(read_assistant(out, geometry), Single(), torch.float32, CPU)
    load_assistant(drafter, assistant_weights.TENSORS, out, UNQUANTISED)
    cache = KVCache([GroupCache(group, PAGES, 1, 512, CPU) for group in kv_groups(geometry, 1, dtype="float32")])
    for group in cache:
        order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(7)) + 1
        group.table[0, : 512 // 32] = order[: 512 // 32].int()
    ids = (torch.arange(length) * 37 + 11) % 900 + 100
    slots, positions = torch.zeros(length, dtype=torch.int32), torch.arange(length)
    batch = eager_batch(cache, target.frequencies, ids, slots, positions, (Chunk(0, 0, length, 0),))
    batch = replace(batch, logit_rows=torch.tensor([length - 1]))
    attention = attention_backend(None, geometry, cache, 1, (1,))
    with torch.inference_mode():
        _, hidden = target.states(batch, attention)
        first = target.head.logits(hidden).argmax(-1).int()
    return Pair(target, drafter, judge, cache, first, hidden.clone())


def own_drafts(it: Pair, count: int, length: int, rotary: int) -> Tensor:
    """Of a decode row that sees `length` keys; they are in the token table too, where the head writes them."""
    sampler = Sampler(Single(), it.target.geometry.vocab, None, (), CPU)
    greedy = SlotParameters(torch.zeros((1, 3), dtype=torch.int64), torch.zeros((1, 3)), torch.full((1, 1), -1, dtype=torch.int32))
    slots, tokens = torch.zeros(1, dtype=torch.int32), torch.zeros((1, length + count + 1), dtype=torch.int32)

    step, ids, hidden, drafts = step_of(it, length, rotary), it.ids, it.hidden, list[Tensor]()
    with torch.inference_mode():
        for at in range(count):
            final = it.drafter(it.target.embed(ids, step.exchange), hidden, step)
            ids = it.drafter.head(final, sampler, sampler.batch(slots, slots + length + at, greedy, tokens), None)[:, 0]
            drafts.append(ids)
            hidden = it.drafter.post.product(final)
    assert torch.equal(tokens[:, length + 1 :], torch.stack(drafts, dim=1))
    return torch.stack(drafts, dim=1)


def step_of(it: Pair, length: int, rotary: int) -> LayerStep:
    """A decode row that sees `length` keys, with its rotary embedding at a position of its own."""
    batch = eager_batch(it.cache, it.target.frequencies, it.ids, torch.zeros(1), torch.tensor([length - 1]), ())
    rope = {key: torch.empty_like(table) for key, table in batch.rope.items()}
    for key, table in rope.items():
        rotary_table(torch.tensor([rotary], dtype=torch.int32), it.target.frequencies[key], table)
    attention = attention_backend(None, it.drafter.geometry, it.cache, 1, (1,))
    batch = replace(batch, rope=rope)
    return LayerStep(batch, attention, attention.prepare(batch), exchange(it), None)


def exchange(it: Pair) -> Exchange:
    return Exchange(Single(), it.drafter.geometry.eps)


def visible(layers: Iterable[Layer], cache: KVCache, length: int, slot: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """K and V that a row behind `length` keys sees, by kind of layer, [1, heads, keys, head_dim]."""
    shared = {}
    for layer in layers:
        group = cache.of(layer)
        first = 0 if group.group.window is None else max(0, length - group.group.window)
        pool = group.layers[layer.kv_source][group.table[slot, : -(-length // 32)].long()]  # [pages, 2, heads, page, d]
        keys = pool.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, first:length]
        shared[f"{layer.kind}_attention"] = (keys[0], keys[1])
    return shared


@pytest.mark.parametrize("member", list(SHAPES))
@pytest.mark.parametrize("length", [5, 64, 96, 131])
def test_drafts_equal_transformers(nano: Nano, tmp_path: Path, member: str, length: int) -> None:
    """Eight drafts behind prompts shorter than the window, of its length and longer: ids and logits, of the same K and V. A rotary
    position, a key or a hidden row off by one changes the logits by a hundred tolerances."""
    it = pair(nano(member), member, tmp_path, length)
    embed = partial(it.target.embed, exchange=exchange(it))
    judged = partial(assistants.drafts, it.judge, 8, it.ids.long(), it.hidden.clone(), embed)
    ids, logits = judged(visible(it.drafter.geometry.layers, it.cache, length), length)
    assert own_drafts(it, 8, length, length).tolist() == [ids]
    assert logits_error(it, logits[0], length, length) < 1e-4
    assert logits_error(it, logits[0], length - 1, length) > 1e-2
    assert logits_error(it, logits[0], length, length + 1) > 1e-2
    it.hidden = it.hidden.roll(1, dims=1)
    assert logits_error(it, logits[0], length, length) > 1e-2


def logits_error(it: Pair, expected: Tensor, length: int, rotary: int) -> float:
    """The largest difference of the first pass's logits."""
    with torch.inference_mode():
        final = it.drafter(it.target.embed(it.ids, exchange(it)), it.hidden, step_of(it, length, rotary))
    return head_error(it.drafter, final, expected)


def head_error(drafter: Assistant, final: Tensor, expected: Tensor) -> float:
    """The largest difference of one row's logits; of an ordered head, of the clusters that were looked at."""
    head = drafter.head
    if isinstance(head, OrderedHead):
        logits = torch.empty_like(expected)
        logits[head.order] = (final @ head.weight.T)[0]
        seen = expected > expected.min()
        return float((logits - expected)[seen].abs().max())
    return float((head.table.logits(final)[0] - expected).abs().max())


def places(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Another last key's position, and another rotary one."""
    drafting = StepBuffers.drafting

    def faulty(self: StepBuffers, slots: Tensor, last: Tensor, turned: Tensor) -> ForwardBatch:
        return drafting(self, slots, *change(last, turned))

    return lambda patch: patch.setattr(StepBuffers, "drafting", faulty)


ROUND_FAULTS: dict[str, Plant] = FAULTS | {
    "position L-1": places(lambda last, turned: (last, turned - 1)),
    "one key fewer": places(lambda last, turned: (last - 1, turned)),
    "one key more": places(lambda last, turned: (last + 1, turned)),
}


@pytest.mark.parametrize("member", ["e2b", "31b"])
def test_rounds_equal_transformers(nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    """Every pass of every round of an engine that serves, drafts right and wrong: the logits of transformers' assistant over our K
    and V, cut to the sequence's length, and its choices. With any fault, also those that no acceptance shows (queries turned as at
    position L-1, a key fewer or one more), they are off by a hundred tolerances."""
    config, asked = config_of(nano(member), 1), [request(number, (12,) * 4) for number in (3, 0, 2, 4)]
    plain = texts(answers(partial(run, build(single(config), RECORDED_PAGES)), config, asked)[0])
    known = [[*memoryview(one.prompt).cast("i"), *plain[one.id][0]] for one in asked]
    assert round_error(nano(member), member, tmp_path, monkeypatch, known, asked) < 1e-4
    for name in ROUND_FAULTS if member == "31b" else ("a head of other rows", "one key more"):
        with monkeypatch.context() as patch:
            ROUND_FAULTS[name](patch)
            assert round_error(nano(member), member, tmp_path, patch, known, asked[:1]) > 1e-2, name


def round_error(
    folder: Path, member: str, out: Path, patch: pytest.MonkeyPatch, known: list[list[int]], asked: list[GenerateRequest]
) -> float:
    """The largest difference of logits of any pass, and the most that a draft's logit lies below the best one, of all rounds of
    these requests, whose texts are `known`: most drafts are made right behind the drafter's back."""
    judge = assistants.write(SHAPES[member], out)
    config = config_of(folder, 1, mtp={"model": str(out), "drafts": 3})
    runner = build(single(config), RECORDED_PAGES)
    stage, slots, errors, forward = runner.draft_stage, runner.slots, [0.0], Assistant.forward
    assert stage is not None
    draft, accept, drafter, target = stage.draft, stage.accept, stage._drafter, stage._target
    embed = partial(target.embed, exchange=Exchange(Single(), drafter.geometry.eps))
    passes = []
    rows_hidden = []
    stood = []

    def accepted(batch: ForwardBatch, chosen: Tensor, hidden: Tensor, **adjusted: bool) -> Tensor:
        counts = accept(batch, chosen, hidden, **adjusted)
        last = torch.arange(len(chosen) // batch.width) * batch.width + counts[: len(chosen) // batch.width].clamp(min=1) - 1
        rows_hidden[:] = hidden[last].clone().split(1)
        stood.extend(counts.tolist())
        return counts

    def kept(self: Assistant, *fed: Any) -> Tensor:
        passes.append(forward(self, *fed))
        return passes[-1]

    def judged(sequences: int, count: int) -> None:
        rows = stage._first_rows(sequences)
        lengths = slots.lengths.clone()
        passes.clear()
        draft(sequences, count)
        for row, slot in enumerate(rows.slots.tolist()):
            length = int(lengths[slot])
            if slot == slots.padding:
                continue
            ids, keys = slots.tokens[slot, length : length + 1].long(), visible(target.geometry.layers, slots.cache, length, slot)
            drafted, logits = assistants.drafts(judge, count, ids, rows_hidden[row], embed, keys, length)
            written = slots.tokens[slot, length + 1 : length + 1 + count].tolist()
            for final, expected, own, right in zip(passes, logits, written, drafted, strict=True):
                errors.append(max(head_error(drafter, final[row : row + 1], expected), float(expected.max() - expected[own])))
                if own != right:  # passes behind another draft have another input
                    break

    patch.setattr(Assistant, "forward", kept)
    patch.setattr(stage, "draft", judged)
    patch.setattr(stage, "accept", accepted)
    guessing(known, 0.7, runner)
    answers(partial(run, runner), config, asked, drafting=AnyDrafts((1, 3), (16,), 3))
    assert len(errors) > 5 * len(asked)
    assert max(stood) > 1
    return max(errors)


def test_a_drafter_of_another_model_is_refused(nano: Nano, tmp_path: Path) -> None:
    """By what differs; a checkpoint that is no assistant by its kind; heads that ranks cannot share."""
    assistants.write(SHAPES["31b"], tmp_path)
    with pytest.raises(CheckpointError, match="no drafter of this model: window 64, not 96; KV heads of layer 3 4, not 1"):
        read_assistant(tmp_path, read_geometry(nano("12b")))
    with pytest.raises(CheckpointError, match="model_type 'gemma4' is no Gemma 4 assistant"):
        read_assistant(nano("31b"), read_geometry(nano("31b")))
    target = read_geometry(nano("31b"))
    drafter = read_assistant(tmp_path, target, 4)
    with pytest.raises(CheckpointError, match="12 query heads cannot be cut for 8 ranks"):
        check_shards(replace(drafter, heads=12), target, 8)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"text_config": None}, "config.json: 'NoneType' object is not a mapping"),
        ({"num_centroids": "64"}, "config.json: Expected `int`, got `str` - at `\\$.centroids`"),
        ({"centroid_intermediate_top_k": None}, "config.json: Expected `int`, got `null` - at `\\$.centroid_top_k`"),
        ({"centroid_intermediate_top_k": 65}, "65 of 64 centroids cannot be looked at"),
        ({"centroid_intermediate_top_k": 0}, "0 of 64 centroids cannot be looked at"),
        ({"centroid_intermediate_top_k": 64}, None),
    ],
)
def test_a_drafter_whose_numbers_are_none_is_refused(nano: Nano, tmp_path: Path, changed: JsonObject, says: str | None) -> None:
    """When it is read, not by the first step that drafts. All centroids may be looked at."""
    target = read_geometry(nano("e2b"))
    path = drafters.write(nano("e2b"), tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    if says is None:
        assert read_assistant(tmp_path, target).centroid_top_k == 64
        return
    with pytest.raises(CheckpointError, match=says):
        read_assistant(tmp_path, target)


def test_an_order_that_is_no_permutation_is_refused(nano: Nano, tmp_path: Path) -> None:
    """Zeros are what a load that was left out leaves, and eight bits too few for the ids. One of whole numbers of fp32 is one."""
    assistants.write(SHAPES["e2b"], tmp_path)
    drafter = Assistant(read_assistant(tmp_path, read_geometry(nano("e2b"))), Single(), torch.float32, CPU)
    order = torch.randperm(1024)
    for wrong in (torch.zeros_like(order), order.to(torch.float8_e4m3fn), order[1:], order[None]):
        with pytest.raises(CheckpointError, match="no permutation"):
            drafter.head.sort(wrong)
    drafter.head.weight.copy_(torch.arange(1024)[:, None].expand_as(drafter.head.weight))
    drafter.head.sort(order.float())
    assert torch.equal(drafter.head.order, order)
    assert torch.equal(drafter.head.weight[:, 0], order.float())
