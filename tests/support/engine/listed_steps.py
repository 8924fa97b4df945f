"""A rank's steps as their launches, listed for an H200 without one: of a group of four, on tensors that hold nothing."""

import tempfile
from functools import cache
from pathlib import Path

import torch

from engine.geometry import Geometry, kv_groups, read_geometry
from engine.quantisation import UNQUANTISED, Quantisation
from engine.rank.attention import attention_backend
from engine.rank.batch import ForwardBatch, frequencies_of
from engine.rank.kv import GroupCache, KVCache
from engine.rank.load.slices import allocate
from engine.rank.models.assistant import Assistant
from engine.rank.models.assistant_geometry import read_assistant
from engine.rank.models.assistant_weights import TENSORS as ASSISTANT_TENSORS
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import FirstOfGroup, make_inboxes
from engine.rank.sampler import ResultRows, Sampler
from engine.rank.slots import SlotState
from engine.rank.stages.draft_stage import DraftStage
from engine.rank.stages.sample_stage import SampleStage
from engine.rank.step import LAYOUT, StepBuffers
from engine.step_shapes import StepShapes, StepSizes
from kernels.chunks import ResultInputs, StepRows, chunk_inputs
from kernels.sampling_batch import SlotParameters
from kernels.slots import apply_plan, decode_inputs, rotary_table
from tests.nano.random_models import model_folder
from tests.support.engine import drafters
from tests.support.launches import Node, record

META = torch.device("meta")
SLOTS, MAX_LEN = 257, 8192
TP = 4


def int32(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


@cache
def geometry(member: str) -> Geometry:
    """Of a public shape; with a prefix, of what that stands for."""
    return read_geometry(model_folder(member if ":" in member else f"dummy:{member}"))


def rank(shape: Geometry, weights: Quantisation = UNQUANTISED) -> tuple[Gemma4, KVCache]:
    """A model, and its pages."""
    model = Gemma4(shape, FirstOfGroup(TP), torch.bfloat16, META)
    allocate(model, TENSORS, weights)
    return model, KVCache([GroupCache(group, 100, SLOTS, MAX_LEN, META) for group in kv_groups(shape, TP)])


@cache
def step(member: str, rows: int, buckets: tuple[int, ...] = (), weights: Quantisation = UNQUANTISED) -> tuple[Node, ...]:
    """The launches of a decode step of `rows` rows on one rank of four: inputs, forward, sampling."""
    shape = geometry(member)
    model, cache = rank(shape, weights)
    shares_rows = not shape.residual_is_read
    shared = make_inboxes(FirstOfGroup(TP), 256, shape.summed_width, torch.bfloat16, shares_rows=shares_rows)
    parameters = SlotParameters(
        torch.empty((SLOTS, 3), dtype=torch.int64, device=META), torch.empty((SLOTS, 3), device=META), int32(SLOTS, 1024)
    )
    attention = attention_backend(None, shape, cache, TP, buckets or (rows,))
    sampler = Sampler(model.parallel, shape.vocab, shape.softcap, (), META)
    with record(target=(9, 0)) as nodes:
        plan, lengths, tokens = int32(4096), int32(SLOTS), int32(SLOTS, MAX_LEN + 1)
        ids, positions, slots = int32(rows), int32(rows), int32(rows)
        apply_plan(plan, LAYOUT, [group.table for group in cache], lengths)
        decode_inputs(plan, LAYOUT, tokens, lengths, SLOTS - 1, ids, positions, slots)
        pages = cache.gather(slots, positions, cache.page_rows(rows))
        rope = {key: torch.empty((rows, 2 * len(frequency)), device=META) for key, frequency in model.frequencies.items()}
        for key, table in rope.items():
            rotary_table(positions, model.frequencies[key], table)
        hidden = model.states(ForwardBatch(ids, positions, slots, rope, pages), attention, shared.allreduce)[1]
        sampler.sample(model.head.logits(hidden), sampler.batch(slots, positions, parameters, tokens), shared.argmax)
    return tuple(nodes)


@cache
def drafts(member: str, rows: int, count: int) -> tuple[Node, ...]:
    """The launches behind the sampling of `rows` sequences that verify `count` drafts, some of them adjusted: what stands, and as
    many new drafts."""
    shape = geometry(member)
    with tempfile.TemporaryDirectory() as folder:
        assistant = read_assistant(drafters.write(model_folder(f"dummy:{member}"), Path(folder)), shape)
    drafter, stage = Assistant(assistant, FirstOfGroup(TP), torch.bfloat16, META), sampling(shape, count)
    allocate(drafter, ASSISTANT_TENSORS)
    shapes = StepShapes((StepSizes.decoding(rows, 1 + count),), 512, 512)
    inputs = StepBuffers(stage.slots, frequencies_of(shape.layers, META), shapes)
    attention = attention_backend(None, assistant, stage.slots.cache, TP, (rows,))
    drafting, (batch, hidden) = DraftStage(drafter, count, attention, inputs, stage), final(shape, rows, 1 + count)
    with record(target=(9, 0)) as nodes:
        drafting.accept(batch, int32(len(hidden), 2), hidden, adjusted=True)
        drafting.draft(rows, count)
    return tuple(nodes)


def sampling(shape: Geometry, drafts: int) -> SampleStage:
    """Of a rank whose sequences have so many drafts."""
    model, cache = rank(shape)
    slots = SlotState(SLOTS - 1, MAX_LEN, cache, range(shape.vocab // TP), META, drafts)
    sampler = Sampler(model.parallel, shape.vocab, shape.softcap, (), META)
    inboxes = make_inboxes(FirstOfGroup(TP), 256, shape.hidden, model.dtype)
    return SampleStage(model, sampler, slots, inboxes)


def final(shape: Geometry, rows: int, width: int) -> tuple[ForwardBatch, torch.Tensor]:
    """What a forward of `rows` sequences gives."""
    ids, positions, slots = int32(3, rows * width).unbind()
    batch = ForwardBatch(ids, positions, slots, {}, (), width=width)
    return batch, torch.empty((rows * width, shape.hidden), dtype=torch.bfloat16, device=META)


def sampled(member: str, name: str, rows: int, width: int) -> tuple[Node, ...]:
    """The launches of a captured sampler."""
    shape = geometry(member)
    stage = sampling(shape, width - 1)
    with record(target=(9, 0)) as nodes:
        asked = ResultRows(small_top_k=name.endswith("small_top_k"), adjusted=name.startswith("adjusted"))
        stage.sample(int32(4096), *final(shape, rows, width), asked)
    return tuple(nodes)


@cache
def mixed(chunk: int, decodes: int, member: str = "31b", buckets: tuple[int, ...] = (8,)) -> tuple[Node, ...]:
    """The launches of a step with a prefill chunk, and decode rows behind it: inputs and forward."""
    shape, rows = geometry(member), chunk + decodes
    model, cache = rank(shape)
    attention = attention_backend(None, shape, cache, TP, buckets)
    with record(target=(9, 0)) as nodes:
        ids, positions, slots = int32(rows), int32(rows), int32(rows)
        plan, tokens, lengths = int32(4096), int32(SLOTS, MAX_LEN + 1), int32(SLOTS)
        pages = cache.page_rows(decodes)
        rope = {key: torch.empty((rows, 2 * len(frequency)), device=META) for key, frequency in model.frequencies.items()}
        if decodes:
            decode_inputs(plan, LAYOUT, tokens, lengths, SLOTS - 1, ids[chunk:], positions[chunk:], slots[chunk:])
            cache.gather(slots[chunk:], positions[chunk:], pages)
        chunks, results = int32(2, 4), 1 + decodes
        ends = ResultInputs(torch.empty(results, dtype=torch.int64, device=META), int32(results), int32(results))
        chunk_inputs(plan, LAYOUT, tokens, SLOTS - 1, StepRows(ids, positions, slots), chunk, chunks, ends)
        for key, table in rope.items():
            rotary_table(positions, model.frequencies[key], table)
        batch = ForwardBatch(ids, positions, slots, rope, pages, ends.rows, prompts=chunk, chunk_list=chunks)
        model.states(batch, attention)
    return tuple(nodes)
