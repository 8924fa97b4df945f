"""One plan in, one result out: the stages of a step.

    forward  upload the plan, run the model                              does not wait for the device
    sample   upload masks, sample, store the tokens, start the copy out  likewise; `launch` is both
    encode   begin with the plan's media items, before the forward if it reads them; then `EncodeStage.advance`
    result   wait for the copy; the result's bytes                       in plan order
    fold     update the state hash

On a GPU padded plans run as CUDA graphs. Plans with many prompt tokens, or prompt logprobs, run unpadded.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor

from engine.plan import DEPTH, PlanView, StepPlan, encode_plan, read_plan
from engine.protocol import MAX_ALTERNATIVES
from engine.rank.batch import ForwardBatch
from engine.rank.graphs import StageGraphs
from engine.rank.prompt_logprobs import PromptScoring, ScoredRows, scored_rows
from engine.rank.sampler import ResultRows
from engine.rank.slots import SlotState
from engine.rank.stages.draft_stage import DraftStage
from engine.rank.stages.encode_stage import EncodeStage, reaches_encodes
from engine.rank.stages.forward_stage import Forwarded, ForwardStage
from engine.rank.stages.report_stage import Launched, ReportStage
from engine.rank.stages.sample_stage import LARGEST_SAMPLERS, SAMPLERS, SampleStage, StepTokens, captured_sampler
from engine.rank.step import StepBuffers, chunks_of
from engine.rank.step_clock import record_event
from engine.step_masks import decode_masks
from engine.step_shapes import StepShapes, StepSizes


@dataclass(eq=False, repr=False)
class Runner:
    shapes: StepShapes
    slots: SlotState
    inputs: StepBuffers
    forward_stage: ForwardStage
    sample_stage: SampleStage
    draft_stage: DraftStage | None
    encode_stage: EncodeStage
    report_stage: ReportStage
    capturable: bool  # its steps can be captured as CUDA graphs
    adapted: bool  # its model has adapters: steps with adapted rows run as a second graph of the forward
    graphs: StageGraphs | None = None  # once they are captured

    @property
    def state_hash(self) -> int:
        return self.report_stage.state_hash

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture steps of every size; on a GPU, once, before the first plan, on every rank.

        RuntimeError: a peer's part of an all-reduce did not come; the inboxes are broken.
        """
        graphs = StageGraphs(self.slots.device)
        for sizes in self._captured():
            # A step each: ranks choose over one inbox, so sums must lie between (`kernels.choose`). With chunks one is enough:
            # `warm` has run all that samplers launch.
            for name in LARGEST_SAMPLERS[sizes.prompts > 0 :]:
                graphs.warm(partial(self.repeat, sizes, name))
            state = graphs.capture(partial(self.forward_stage.padded, sizes), "forward", sizes)
            if self.adapted:
                graphs.warm(partial(self.forward_stage.padded, sizes, adapted=True))
                graphs.capture(partial(self.forward_stage.padded_into, sizes, state), "adapted forward", sizes)
            for name in SAMPLERS:
                graphs.capture(partial(self._sampled_by, name, *state), name, sizes)
        if self.draft_stage is not None:  # last: outputs are copied after drafts, whose graphs must not have their memory
            for rows, width in product(reversed(self.shapes.sequences), self.shapes.widths[1:]):
                sizes = StepSizes.decoding(rows, width)
                graphs.capture(partial(self.draft_stage.draft, rows, width - 1), "draft", sizes)
        torch.cuda.synchronize(self.slots.device)
        self.graphs = graphs
        inboxes = self.forward_stage.inboxes
        if inboxes is not None and inboxes.allreduce.failed:
            raise RuntimeError("another rank's part of an all-reduce did not come in time while decode steps were captured")

    def _captured(self) -> Iterator[StepSizes]:
        """Largest first. The empty plan, uploaded here, fits all."""
        self.inputs.upload(read_plan(encode_plan(StepPlan(0))))
        yield from reversed(self.shapes.sizes)

    @torch.inference_mode()
    def list_launches(self, share: int, shares: int) -> None:
        """Every `shares`-th captured step once; the first share also runs `warm`."""
        if share == 0:
            self.warm()
        for sizes, name in product(islice(self._captured(), share, None, shares), LARGEST_SAMPLERS):
            self.repeat(sizes, name)

    @torch.inference_mode()
    def repeat(self, sizes: StepSizes, sampler: str) -> None:
        if self.adapted:
            self.forward_stage.padded(sizes, adapted=True)
        batch, hidden = self.forward_stage.padded(sizes)
        sampled = self._sampled_by(sampler, batch, hidden)
        if self.draft_stage is not None and not sizes.prompts:
            if sizes.width == 1:
                self.draft_stage.accept(batch, sampled.chosen, hidden, adjusted=False)
            else:
                self.draft_stage.draft(sizes.decodes, sizes.width - 1)

    def _sampled_by(self, name: str, batch: ForwardBatch, hidden: Tensor) -> StepTokens:
        asked = ResultRows(small_top_k=name.endswith("small_top_k"), adjusted=name.startswith("adjusted"))
        return self._sampled(batch, hidden, asked)

    def _sampled(self, batch: ForwardBatch, hidden: Tensor, asked: ResultRows) -> StepTokens:
        sampled = self.sample_stage.sample(self.inputs.plan, batch, hidden, asked)
        if self.draft_stage is None or batch.width == 1:
            return sampled
        return replace(sampled, accepted=self.draft_stage.accept(batch, sampled.chosen, hidden, adjusted=asked.adjusted))

    @torch.inference_mode()
    def warm(self) -> None:
        """Run prefills of `StepShapes.warm_rows` and all samplers; on a GPU, once, so that nothing compiles or runs out of memory
        later.

        They run in the padding slot, whose null page is zeroed again.
        """
        self.slots.warm()
        self.encode_stage.warm(graphs=self.capturable)
        shapes = self.shapes
        for rows in shapes.warm_rows:
            batch, hidden = self._prefilled(rows)
            assert batch.logit_rows is not None
            results = {1: shapes.sequences, shapes.prefill: shapes.sequences[1::-1]}  # row counts that have kernel variants
            for count in results.get(rows, ()):
                self.forward_stage.run(replace(batch, logit_rows=batch.logit_rows.repeat(count)))
            record_event(self.slots.device).synchronize()  # the plan's staging memory is used again
        self._warm_samplers(batch, hidden)
        scored = [ScoredRows(batch.chunks[0], PromptScoring(0, shapes.longest + 1, MAX_ALTERNATIVES), shapes.longest)]
        self.sample_stage.prompt_logprobs(scored, batch, hidden)
        self.slots.lengths[self.slots.padding] = 0
        for group in self.slots.cache:
            group.pool[:, 0] = 0

    def _prefilled(self, rows: int) -> tuple[ForwardBatch, Tensor]:
        """A prefill, the largest of an image if there may be any; returns batch and final hidden rows."""
        longest = self.shapes.longest
        image = self.shapes.images and rows == self.shapes.prefill
        first, *others = (min(longest, rows - begun) for begun in range(0, rows, longest))
        chunks = [(first, first - 1, 0, int(image)), *((end, end, 0, 0) for end in others)]
        made = StepPlan(1, chunks=[(self.slots.padding, 0, *chunk) for chunk in chunks], spans=[(0, first)] * image)
        plan = read_plan(encode_plan(made))
        self.inputs.upload(plan)
        self.inputs.apply()
        batch = replace(self.inputs.batch(StepSizes.of(plan))[0], chunks=chunks_of(plan))
        if self.adapted:
            self.forward_stage.run(replace(self.inputs.with_adapters(batch), logit_rows=None))
        return batch, self.forward_stage.run(replace(batch, logit_rows=None))

    def _warm_samplers(self, batch: ForwardBatch, hidden: Tensor) -> None:
        sizes = {rows * width for rows, width in product(self.shapes.sequences, self.shapes.widths)}
        for rows in sorted(sizes, reverse=True):  # smaller ones reuse the memory of the largest
            asked = ResultRows(small_top_k=True, filtered=range(rows), reported=range(rows), alternatives=MAX_ALTERNATIVES)
            ends = replace(batch, slots=batch.slots[-1:].repeat(rows), positions=batch.positions.new_full((rows,), -1))
            for adjusted in (False, True):
                asked = replace(asked, adjusted=adjusted)
                self.sample_stage.sample(self.inputs.plan, ends, hidden[-1:].repeat(rows, 1), asked)

    def launch(self, data: bytes, masks: bytes = b"") -> Launched:
        """Start a step and its encodes. At most two may be launched and not finished."""
        return self.sample(self.forward(data), masks)

    @torch.inference_mode()
    def forward(self, data: bytes) -> Forwarded:
        """`sample` must follow before the next forward."""
        plan = read_plan(data)
        if self.forward_stage.pages is not None:
            self.forward_stage.pages.expect(plan)
        step = Forwarded(plan, data, record_event(self.slots.device), reaches_encodes(plan), self.inputs.plan[:0])
        self.slots.admit(plan.admissions)
        self.encode_stage.admit(plan.admissions)
        if step.encodes_begun:
            self.encode_stage.encode(plan)
        for group, page in plan.zeros.tolist():
            self.slots.cache.groups[group].pool[:, page] = 0
        self.inputs.upload(plan)
        has = StepSizes.of(plan)
        scores = len(plan.chunks) and self.slots.prompt_scorings.keys() & plan.chunks[:, 0].tolist()
        sizes = None if scores else self.shapes.padded(has)
        if sizes is not None:
            self._forward_padded(step, sizes)
        elif has.chunks:
            self._forward_unpadded(step, self.shapes.unpadded(has))
        else:
            self.inputs.apply()
        return step

    def _is_adapted(self, plan: PlanView) -> bool:
        slots = (plan.rows[:, 0], plan.chunks[:, 0])
        return self.adapted and any(map(self.slots.have_adapters, slots))

    def _forward_padded(self, step: Forwarded, sizes: StepSizes) -> None:
        adapted = self._is_adapted(step.plan)
        if sizes.prompts and self.inputs.soft is not None:
            chunks = chunks_of(step.plan)
            self.inputs.set_media(self.encode_stage.soft_tokens(chunks), chunks)
        if self.graphs is None:
            step.batch, step.hidden = self.forward_stage.padded(sizes, adapted=adapted)
        else:
            step.captured = sizes
            step.batch, step.hidden = self.graphs.replay("adapted forward" if adapted else "forward", sizes)

    def _forward_unpadded(self, step: Forwarded, sizes: StepSizes) -> None:
        chunks = chunks_of(step.plan)
        soft = self.encode_stage.soft_tokens(chunks)
        step.scored = scored_rows(chunks, self.slots.prompt_scorings)
        adapted = self._is_adapted(step.plan)
        narrowed = not step.scored
        batch, step.batch, step.hidden = self.forward_stage.eager(sizes, chunks, soft, narrowed=narrowed, adapted=adapted)
        if step.scored:
            step.prompts = self.sample_stage.prompt_logprobs(step.scored, batch, step.hidden)
            step.hidden = step.hidden[batch.logit_rows]

    @torch.inference_mode()
    def sample(self, step: Forwarded, masks: bytes = b"") -> Launched:
        plan = step.plan
        if plan.masked:
            given = decode_masks(masks)
            assert given.step == plan.step, f"step {plan.step} has the masks of step {given.step}"
            self.slots.adjustments.set_masks(plan.step, given.slots, given.bits, after=self.report_stage.last_end)
        width = 1 if step.batch is None else step.batch.width
        rows = self.slots.result_rows(plan.result_slots, plan.step, width)
        sampled = StepTokens(torch.empty((0, 2), dtype=torch.int32))
        if step.batch is not None and len(rows.slots):
            name = captured_sampler(rows) if step.captured else None
            if self.graphs is not None and name:
                sampled = self.graphs.replay(name, step.captured)
            else:
                sampled = self._sampled(step.batch, step.hidden, rows)
            if plan.drafts and self.draft_stage is not None:
                sampled = self._drafted(step, step.batch, sampled, self.draft_stage)
        launched = self.report_stage.start(step, rows, sampled, masks)
        if plan.encodes and not step.encodes_begun:
            self.encode_stage.encode(plan)
        return launched

    def _drafted(self, step: Forwarded, batch: ForwardBatch, sampled: StepTokens, stage: DraftStage) -> StepTokens:
        plan = step.plan
        if batch.width == 1:
            stage.accept(batch, sampled.chosen, step.hidden, adjusted=False)
        sequences = len(plan.result_slots)
        padded = self.shapes.sequences_of(sequences)
        if self.graphs is not None:
            self.graphs.replay("draft", StepSizes.decoding(padded, 1 + plan.drafts))
        else:
            stage.draft(padded, plan.drafts)
        if plan.masked:
            return replace(sampled, drafts=stage.last_drafts(sequences, plan.drafts))
        return sampled

    def run(self, plans: Iterable[bytes]) -> list[bytes]:
        """DEPTH at a time."""
        out: deque[Launched] = deque()
        results = []
        for data in plans:
            out.append(self.launch(data))
            if len(out) == DEPTH:
                results.append(out.popleft().finish())
        return results + [launched.finish() for launched in out]
