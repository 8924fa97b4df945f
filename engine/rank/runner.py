"""One plan in, one result out: the stages of a step in order.

    forward  upload the plan, run the model                              does not wait for the device
    sample   upload masks, sample, store the tokens, start the copy out  likewise; `launch` is both
    encode   begin with the media items that the plan names, or before the forward if it reads them; then `EncodeStage.advance`
    result   wait for the copy; the result's bytes                       in plan order
    fold     update the state hash

Plans are padded to buckets and run as captured graphs on a GPU, elsewhere by the same functions called eagerly; those with many
prompt tokens, or that report logprobs of them, run as they are. Two steps may be launched and not finished, so each has its own
memory for the copy out.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, product

import torch
from torch import Tensor

from engine.attention import TRITON
from engine.config import EngineConfig
from engine.geometry import vocab_share
from engine.memory import buckets
from engine.plan import DEPTH, PlanView, StepPlan, encode_plan, read_plan
from engine.protocol import MAX_ALTERNATIVES, MAX_SPAN, MediaKind
from engine.rank.attention import FailedChecks, attention_backend
from engine.rank.batch import ForwardBatch
from engine.rank.graphs import StageGraphs
from engine.rank.kv import KVCache
from engine.rank.models.architecture import MediaEncoder, Model
from engine.rank.models.assistant import Assistant
from engine.rank.page_check import PageCheck
from engine.rank.parallel import Inboxes
from engine.rank.prompt_logprobs import PromptScoring, ScoredRows
from engine.rank.sampler import Sampler, SpecialRows
from engine.rank.slots import SlotState
from engine.rank.stages.draft_stage import DraftStage
from engine.rank.stages.encode_stage import EncodeStage, reaches_encodes
from engine.rank.stages.forward_stage import FinalRows, ForwardStage, MediaRows, ScoredBatch
from engine.rank.stages.report_stage import Launched, ReportStage
from engine.rank.stages.sample_stage import LARGEST_SAMPLERS, SAMPLERS, SampleStage, StepTokens, captured_sampler
from engine.rank.step import (
    DECODES_BESIDE_PROMPTS,
    LARGE_PROMPT_ROWS,
    MOST_PADDED_CHUNKS,
    PROMPT_ROWS,
    StepBuffers,
    StepSizes,
    chunks_of,
)
from engine.rank.step_clock import DeviceEvent, record_event
from engine.step_masks import decode_masks
from engine.step_media import MediaReader
from kernels.table_check import COPIED_ENTRY


def warm_rows(most: int) -> tuple[int, ...]:
    """Returns powers of two and `most`: each range of rows that kernels have a tile for ends at twice its beginning, or later."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


@dataclass(frozen=True)
class Forwarded:
    """A step whose forward was launched, for `Runner.sample`. data: the plan's bytes; start: the step's start event; media: has
    the items whose encode is still to begin, None if it has begun."""

    plan: PlanView
    data: bytes
    final: FinalRows
    start: DeviceEvent
    media: MediaReader | None


class Runner:
    """Runs plans on one rank, and decides nothing.

    inboxes        the group's memory for sums over ranks; None: they are collectives
    failed_checks  parts of attention that failed their check, and run on our own ops
    drafter        of the model, if steps are to draft;   encoders  of media, by kind
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        config: EngineConfig,
        inboxes: Inboxes | None,
        failed_checks: FailedChecks,
        drafter: Assistant | None,
        encoders: Mapping[MediaKind, MediaEncoder],
    ) -> None:
        device, geometry = model.device, model.geometry
        self._device = device
        on_gpu = config.device == "cuda"  # or, on the meta device, as if
        self._buckets = buckets(config.max_seqs) if on_gpu else tuple(range(1, config.max_seqs + 1))
        share, parallel = vocab_share(geometry.vocab, model.parallel.size), model.parallel
        ids = range(parallel.rank * share, (parallel.rank + 1) * share)
        self.slots = SlotState(config.max_seqs, config.max_len, cache, ids, device, config.widest - 1)
        widest, self._images = config.widest, geometry.bidirectional and bool(encoders)
        prefill = max(config.prefill_budget, min(MAX_SPAN, config.max_len) if self._images else 0)  # an image is computed at once
        self._widths = config.widths if on_gpu else tuple(range(1, widest + 1))
        self._mixed_widths = tuple(sorted({1, *self._widths[::-2]}))  # of decode rows beside chunks: every second one has graphs
        self._inputs = StepBuffers(self.slots, model.frequencies, prefill, self._buckets, widest)
        self._inboxes = inboxes
        self.pages = PageCheck(self.slots) if config.debug_pages else None
        check = partial(self.pages.compare, COPIED_ENTRY) if self.pages is not None else None
        attention = attention_backend(config, geometry, cache, config.tp, self._buckets, check, widest, failed_checks)
        sampler = Sampler(parallel, geometry.vocab, geometry.softcap, config.suppress, device)
        large = not all(layer.owns_kv for layer in geometry.layers) or (inboxes is not None and inboxes.sequence is not None)
        most = min(config.prefill_budget, (LARGE_PROMPT_ROWS if large else PROMPT_ROWS)[-1])
        self._prompt_rows = [*(rows for rows in PROMPT_ROWS + LARGE_PROMPT_ROWS if rows < most), most]
        media = None
        if encoders:
            none = torch.full((most,), -1, device=device)
            media = MediaRows(none, torch.zeros((most, geometry.hidden), dtype=model.dtype, device=device), none.int())
        self.forward_stage = ForwardStage(model, attention, self._inputs, inboxes, self.pages, media)
        self.sample_stage = SampleStage(model, sampler, self.slots, inboxes)
        self.encode_stage = EncodeStage(encoders, device, parallel, config.encoder_host_bytes)
        self.draft_stage: DraftStage | None = None
        if drafter is not None:
            reads = attention_backend(config, drafter.geometry, cache, config.tp, self._buckets, check, failed_checks=failed_checks)
            self.draft_stage = DraftStage(drafter, widest - 1, reads, self._inputs, self.sample_stage)
        rows = widest * (self._buckets[-1] + prefill)
        self.report_stage = ReportStage(rows, device, self.pages, self.encode_stage, debug_hash=config.debug_hash)
        self._prefill = min(prefill, config.max_len)
        self._pads_chunks = on_gpu and config.attention_of("extend") in (None, TRITON.name)
        self.capturable = device.type == "cuda" and config.graphs
        self.graphs: StageGraphs | None = None

    @property
    def state_hash(self) -> int:
        """The state hash after the last finished step (`Launched.fold`)."""
        return self.report_stage.state_hash

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture steps of every size; on a GPU, once, before the first plan, on every rank.

        RuntimeError: another rank's part of an all-reduce did not come, and the inboxes are broken.
        """
        graphs = StageGraphs(self._device)
        for sizes, width in self._steps():
            # A step each: ranks choose over one inbox, so sums must lie between (`kernels.choose`). With chunks one is enough:
            # `warm` has run all that samplers launch.
            for name in LARGEST_SAMPLERS[sizes.prompts > 0 :]:
                graphs.warm(partial(self.repeat, sizes, name, width))
            state = graphs.capture(partial(self.forward_stage.padded, sizes, width), "forward", sizes, width)
            for name in SAMPLERS:
                graphs.capture(partial(self._sampled_by, name, *state), name, sizes, width)
        if self.draft_stage is not None:  # last: outputs are copied behind drafts, whose graphs must not have their memory
            for rows, width in product(reversed(self._buckets), self._widths[1:]):
                graphs.capture(partial(self.draft_stage.draft, rows, width - 1), "draft", rows, width)
        torch.cuda.synchronize(self._device)
        self.graphs = graphs
        if self._inboxes is not None and self._inboxes.allreduce.failed:
            raise RuntimeError("another rank's part of an all-reduce did not come in time while decode steps were captured")

    def _steps(self) -> Iterator[tuple[StepSizes, int]]:
        """Yields sizes and widths of the steps that are captured, largest first. They run the empty plan uploaded here, which fits
        all."""
        self._inputs.upload(read_plan(encode_plan(StepPlan(0))))
        for sizes, width in product(self._mixed_sizes, reversed(self._mixed_widths)):
            if width == 1 or sizes.decodes:
                yield sizes, width
        yield from product(map(StepSizes.decoding, reversed(self._buckets)), reversed(self._widths))

    @torch.inference_mode()
    def list_launches(self, share: int, shares: int) -> None:
        """Launch on the meta device every `shares`-th step that `capture` records, once, and in the first share what `warm`
        runs."""
        if share == 0:
            self.warm()
        steps = self._steps()
        for (sizes, width), name in product(islice(steps, share, None, shares), LARGEST_SAMPLERS):
            self.repeat(sizes, name, width)

    @torch.inference_mode()
    def repeat(self, sizes: StepSizes, sampler: str, width: int) -> None:
        """Run the plan uploaded last eagerly, padded to `sizes` with decode rows of `width` tokens, and behind decode rows alone
        the drafts of the next step; on a GPU."""
        batch, hidden = self.forward_stage.padded(sizes, width)
        sampled = self._sampled_by(sampler, batch, hidden)
        if self.draft_stage is not None and not sizes.prompts:
            if width == 1:
                self.draft_stage.accept(batch, sampled.chosen, hidden, adjusted=False)
            else:
                self.draft_stage.draft(sizes.decodes, width - 1)

    @cached_property
    def _mixed_sizes(self) -> list[StepSizes]:
        """Lists the sizes that plans with chunks are padded to, largest first; none on a CPU, or where another backend has the
        chunks."""
        if not self._pads_chunks:
            return []
        most = self._buckets[-1]
        decodes = [rows for rows in DECODES_BESIDE_PROMPTS if rows < most] + [most]
        return [
            StepSizes(prompts, chunks := max(MOST_PADDED_CHUNKS, prompts // 128), rows, min(chunks + rows, most))
            for prompts in reversed(self._prompt_rows)
            for rows in reversed(decodes)
        ]

    def _padded_sizes(self, plan: PlanView) -> StepSizes | None:
        """Returns what a plan is padded to. None: it runs unpadded, as it has no rows, or too many, or reports logprobs of
        prompts."""
        if not len(plan.chunks):
            return StepSizes.decoding(self._inputs.bucket(len(plan.rows))) if len(plan.rows) else None
        has = StepSizes.of(plan)
        if self.slots.prompt_scorings.keys() & plan.chunks[:, 0].tolist():
            return None
        fitting = (sizes for sizes in self._mixed_sizes if sizes.prompts >= has.prompts and sizes.decodes >= has.decodes)
        least = min(fitting, default=None)
        return least if least and least.chunks >= has.chunks else None

    def _sampled_by(self, name: str, batch: ForwardBatch, hidden: Tensor) -> StepTokens:
        """Call `_sampled` for the sampler of that name. Capturable."""
        special = SpecialRows(small_top_k=name.endswith("small_top_k"))
        return self._sampled(batch, hidden, special, adjusted=name.startswith("adjusted"))

    def _sampled(self, batch: ForwardBatch, hidden: Tensor, special: SpecialRows, *, adjusted: bool) -> StepTokens:
        """Sample the uploaded plan's result rows, and accept their drafts."""
        sampled = self.sample_stage.sample(self._inputs.plan if adjusted else None, batch, hidden, special)
        if self.draft_stage is None or batch.width == 1:
            return sampled
        return replace(sampled, accepted=self.draft_stage.accept(batch, sampled.chosen, hidden, adjusted=adjusted))

    @torch.inference_mode()
    def warm(self) -> None:
        """Run prefills and samplers; on a GPU, once, before the first plan: nothing may be compiled, or found not to fit in memory,
        while requests wait. Prefills of `warm_rows`, and of each bucket of rows all that samplers do.

        They run in the padding slot, whose pages are the null page, which is zeroed again afterwards.
        """
        self.slots.warm()
        self.encode_stage.warm(graphs=self.capturable)
        size, slot = self._prefill, self.slots.padding
        for rows in warm_rows(size):
            image = self._images and rows == size
            chunk = (slot, 0, rows, rows - 1, 0, int(image))
            plan = read_plan(encode_plan(StepPlan(1, chunks=[chunk], spans=[(0, rows)] * image)))
            self._inputs.upload(plan)
            self._inputs.apply()
            batch = replace(self._inputs.batch(StepSizes.of(plan))[0], chunks=chunks_of(plan))
            hidden = self.forward_stage.run(replace(batch, logit_rows=None))
            assert batch.logit_rows is not None
            for results in {1: self._buckets, size: self._buckets[1::-1]}.get(rows, ()):  # those that have variants of kernels
                self.forward_stage.run(replace(batch, logit_rows=batch.logit_rows.repeat(results)))
            record_event(self._device).synchronize()  # the plan's staging memory is used again
        sizes = {rows * width for rows in self._buckets for width in self._widths}
        for rows in sorted(sizes, reverse=True):  # memory that the largest took does for the others
            everything = SpecialRows(small_top_k=True, filtered=range(rows), reported=range(rows), alternatives=MAX_ALTERNATIVES)
            ends = replace(batch, slots=batch.slots[-1:].repeat(rows), positions=batch.positions.new_full((rows,), -1))
            for plan_of_masks in (None, self._inputs.plan):
                self.sample_stage.sample(plan_of_masks, ends, hidden[-1:].repeat(rows, 1), everything)
        scored = [ScoredRows(batch.chunks[0], PromptScoring(0, size + 1, MAX_ALTERNATIVES), size)]
        self.sample_stage.prompt_logprobs(ScoredBatch(scored, batch, hidden))
        self.slots.lengths[slot] = 0
        for group in self.slots.cache:
            group.pool[:, 0] = 0

    def launch(self, data: bytes, masks: bytes = b"", media: MediaReader | None = None) -> Launched:
        """Start the step of the plan `data`, with `masks` if it has masked rows, and the encodes of `media` that it names. At most
        two may be launched and not finished."""
        return self.sample(self.forward(data, media), masks)

    @torch.inference_mode()
    def forward(self, data: bytes, media: MediaReader | None = None) -> Forwarded:
        """Start the forward of the plan `data`; `sample` must follow before the next `forward`."""
        plan = read_plan(data)
        if self.pages is not None:
            self.pages.expect(plan)
        start = record_event(self._device)
        self.slots.admit(plan.admissions)
        self.encode_stage.admit(plan.admissions)
        assert media or not len(plan.encodes), "a plan encodes media, and there are none"
        if reaches_encodes(plan):
            self._encode(plan, media)
            media = None
        for group, page in plan.zeros.tolist():
            self.slots.cache.groups[group].pool[:, page] = 0
        self._inputs.upload(plan)
        sizes = self._padded_sizes(plan)
        widths = self._mixed_widths if sizes and sizes.prompts else self._widths
        width = next(width for width in widths if width >= plan.width)
        if sizes:
            if sizes.prompts and self.forward_stage.media is not None:
                chunks = chunks_of(plan)
                self.forward_stage.set_media(self.encode_stage.soft_tokens(chunks), chunks)
            final = self._padded_forward(sizes, width)
        else:
            final = self.forward_stage.eager(plan, self.slots.prompt_scorings, width, self.encode_stage)
        if plan.masked:  # the core may make no masks before its media are read: the ring may be full
            self._encode(plan, media)
            media = None
        return Forwarded(plan, data, final, start, media)

    @torch.inference_mode()
    def sample(self, step: Forwarded, masks: bytes = b"") -> Launched:
        """Start the sampling of a step, with `masks` if it has masked rows, and the copy of its outputs."""
        plan, final = step.plan, step.final
        if plan.masked:
            given = decode_masks(masks)
            assert given.step == plan.step, f"step {plan.step} has the masks of step {given.step}"
            self.slots.adjustments.set_masks(plan.step, given.slots, given.bits, after=self.report_stage.last_end)
        width = 1 if final.batch is None else final.batch.width
        rows = self.slots.result_rows(plan.result_slots, plan.step, width)
        sampled = StepTokens(torch.empty((0, 2), dtype=torch.int32))
        if final.batch is not None and len(rows.slots):
            name = captured_sampler(rows) if final.captured else None
            if self.graphs and name:
                sampled = self.graphs.replay(name, final.captured, width)
            else:
                sampled = self._sampled(final.batch, final.hidden, rows.special, adjusted=rows.adjusted)
            if plan.drafts and self.draft_stage is not None:
                if width == 1:
                    self.draft_stage.accept(final.batch, sampled.chosen, final.hidden, adjusted=False)
                sequences = len(plan.result_slots)
                bucket = self._inputs.bucket(sequences)
                if self.graphs is not None:
                    self.graphs.replay("draft", bucket, 1 + plan.drafts)
                else:
                    self.draft_stage.draft(bucket, plan.drafts)
                if plan.masked:
                    sampled = replace(sampled, drafts=self.draft_stage.last_drafts(sequences, plan.drafts))
        if final.prompts is not None:
            sampled = replace(sampled, scored=final.prompts.scored, prompts=self.sample_stage.prompt_logprobs(final.prompts))
        launched = self.report_stage.start(plan, rows, sampled, final.hidden, step.start, (step.data, masks))
        self._encode(plan, step.media)
        return launched

    def run(self, plans: Iterable[bytes]) -> list[bytes]:
        """Run every plan, in order, DEPTH at a time; returns their results' bytes."""
        out: deque[Launched] = deque()
        results = []
        for data in plans:
            out.append(self.launch(data))
            if len(out) == DEPTH:
                results.append(out.popleft().finish())
        return results + [launched.finish() for launched in out]

    def _encode(self, plan: PlanView, media: MediaReader | None) -> None:
        if media and len(plan.encodes):
            self.encode_stage.encode(plan.encodes[:, 0].tolist(), media)

    def _padded_forward(self, sizes: StepSizes, width: int) -> FinalRows:
        """Run the forward of the uploaded plan padded to `sizes`, as a graph if there is one."""
        if self.graphs is not None and ("forward", sizes, width) in self.graphs:
            batch, hidden = self.graphs.replay("forward", sizes, width)
            return FinalRows(hidden, batch, captured=sizes)
        batch, hidden = self.forward_stage.padded(sizes, width)
        return FinalRows(hidden, batch)
