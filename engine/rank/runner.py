"""One plan in, one result out.

    forward  upload the plan, run the model                              does not wait for the device
    sample   upload masks, sample, store the tokens, start the copy out  likewise; `launch` is both
    result   wait for the copy; the result's bytes                       in plan order
    fold     update the state hash

A plan of decode rows alone is padded to a bucket and runs as captured graphs on a GPU, elsewhere by the same functions called
eagerly. A plan with chunks runs eagerly. Two steps may be launched and not finished, so each has its own memory for the copy out.
The state hash after step n is a checksum of (plan n | its masks | tokens and flags of n | with debug_hash the bits of n's last
hidden rows), chained from step n - 1: ranks that ran the same plans and sampled the same tokens agree on it, and so does a replay.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.channel import checksum
from engine.config import EngineConfig
from engine.geometry import Geometry, vocab_share
from engine.memory import buckets
from engine.plan import (
    DEPTH,
    RESULT_WIDTH,
    ROW_EMPTY,
    ROW_NAN,
    PlanView,
    PrefillChunk,
    StepPlan,
    encode_plan,
    encode_rows,
    read_plan,
)
from engine.protocol import MAX_ALTERNATIVES, Logprobs, PromptLogprobs
from engine.rank.attention import AskedAttention, FailedChecks, attention_backend
from engine.rank.batch import ForwardBatch
from engine.rank.graphs import DecodeGraphs
from engine.rank.kv import KVCache
from engine.rank.models.architecture import Model
from engine.rank.page_check import PageCheck
from engine.rank.parallel import Inboxes
from engine.rank.prompt_logprobs import ScoredRows, WantedLogprobs, prompt_rows, scored_rows, token_logprobs
from engine.rank.sampler import Sampler, SpecialRows
from engine.rank.slots import ResultRows, SlotState
from engine.rank.step import StepBuffers
from engine.rank.step_clock import StepClock, mark
from engine.step_masks import decode_masks
from kernels.choose import ROW_ERROR, ROW_HAS_NAN, ROW_NO_TOKEN
from kernels.launch import disabled

SAMPLERS = ("argmax", "small_top_k", "adjusted_argmax", "adjusted_small_top_k")  # of captured steps


@dataclass(frozen=True)
class StepTokens:
    """What a step's rows sampled.

    chosen    int32 [>= R, 2]: each row's token, 0 where there is none, and its flags (`kernels.choose`)
    logprobs  int32 [n, 2 + 2 alternatives], of the rows that report them;   prompts  likewise, of the prompt rows `scored`
    """

    chosen: Tensor
    logprobs: Tensor | None = None
    scored: Sequence[ScoredRows] = ()
    prompts: Tensor | None = None


StepGraphs = DecodeGraphs[tuple[ForwardBatch, Tensor], StepTokens]


def warm_rows(most: int) -> tuple[int, ...]:
    """Powers of two and `most`: each range of rows that kernels have a tile for ends at twice its beginning, or later."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


class CopyOut:
    """An asynchronous copy of device tensors to the host; done at once on a CPU.

    It also marks the end of a step without outputs: a step is done when the device is done with it.
    """

    def __init__(self, pairs: dict[str, tuple[Tensor, Tensor | None]], device: torch.device) -> None:
        """pairs: a device tensor and pinned memory of its shape, made here where it is None."""
        self._host = {name: _copy_out(*pair) for name, pair in pairs.items()}
        self.end = mark(device)

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.end is None or self.end.query()

    def wait(self) -> dict[str, np.ndarray]:
        """The tensors on the host."""
        if self.end is not None:
            self.end.synchronize()
        return {name: tensor.numpy() for name, tensor in self._host.items()}


def _copy_out(tensor: Tensor, host: Tensor | None) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    if host is None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class FinalRows:
    """The output of a forward: hidden [rows, hidden] of the rows that sample, padded as the forward was.

    batch   slots and positions of those rows; None: the step has no rows
    graphs  if the forward was a captured one;   scored, prompts: as in StepTokens
    """

    hidden: Tensor
    batch: ForwardBatch | None = None
    graphs: StepGraphs | None = None
    scored: Sequence[ScoredRows] = ()
    prompts: Tensor | None = None


@dataclass(frozen=True)
class Forwarded:
    """A step whose forward was launched, for `Runner.sample`. `uploaded`: the plan on the device; `start`: its start event."""

    plan: PlanView
    data: bytes
    uploaded: Tensor
    final: FinalRows
    start: torch.cuda.Event | None


@dataclass(frozen=True)
class Launched:
    """A launched step: call `result`, then `fold`, each once and in plan order.

    rows  those that sample;   scored  those that give logprobs of prompt tokens
    """

    step: int
    rows: ResultRows | None
    scored: Sequence[ScoredRows]
    copy: CopyOut
    move_hash: Callable[[int, dict[str, np.ndarray]], None]
    pages: PageCheck | None
    clock: StepClock

    @property
    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self.copy.done

    def result(self) -> bytes:
        """Wait for the step; the bytes of its StepResult. RuntimeError: another rank's part of an all-reduce did not come.
        PageViolation: a page table was wrong (`debug_pages`)."""
        host = self.copy.wait()
        if self.pages is not None:
            self.pages.verify(self.step, host["violations"])
        if self.rows is None:
            return encode_rows(self.step, np.zeros((0, 4 + RESULT_WIDTH), np.int32), {})
        tokens, flags = host["chosen"].T
        if (flags & ROW_ERROR).any():
            raise RuntimeError(f"step {self.step}: another rank's part of an all-reduce did not come in time")
        table = np.empty((len(tokens), 4 + RESULT_WIDTH), np.int32)
        nan, empty = ((flags & flag) != 0 for flag in (ROW_HAS_NAN, ROW_NO_TOKEN))
        table[:, 0], table[:, 1], table[:, 2] = self.rows.slots, self.rows.numbers, ~(nan | empty)
        table[:, 3], table[:, 4] = np.where(nan, ROW_NAN, 0) + np.where(empty, ROW_EMPTY, 0), tokens
        prompts = prompt_rows(self.scored, host["prompts"]) if self.scored else ()
        return encode_rows(self.step, table, self._logprobs(self.rows, host, nan | empty), prompts)

    def fold(self) -> None:
        """Fold this step into the runner's state hash."""
        self.move_hash(self.step, self.copy.wait())

    def end(self) -> bytes:
        """`result`, then `fold`."""
        result = self.result()
        self.fold()
        return result

    def _logprobs(self, rows: ResultRows, host: dict[str, np.ndarray], silent: np.ndarray) -> dict[int, Logprobs]:
        """By row."""
        special = rows.special
        if not special.reported:
            return {}
        words = PromptLogprobs(0, special.alternatives, host["logprobs"].astype("<i4", copy=False).tobytes())
        pairs = zip(special.reported, words.entries(), strict=True)
        return {row: Logprobs(one.chosen, one.top[: rows.logprobs[row]]) for row, (_, one) in pairs if not silent[row]}


class Runner:
    """Runs plans on one rank; decides nothing. `state_hash` covers the finished steps.

    inboxes  the group's all-reduce buffers for decode rows; None: all-reduces are collectives
    pages    the check of the setting `debug_pages`, or None
    failed_checks  parts of attention that failed their check
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        config: EngineConfig,
        geometry: Geometry,
        inboxes: Inboxes | None = None,
        failed_checks: FailedChecks = (),
    ) -> None:
        self._device = next(iter(cache)).table.device
        on_gpu = self._device.type == "cuda"
        self._buckets = buckets(config.max_seqs) if on_gpu else tuple(range(1, config.max_seqs + 1))
        self.state_hash = 0
        self._share = vocab_share(geometry.vocab, model.parallel.size)
        ids = range(model.parallel.rank * self._share, (model.parallel.rank + 1) * self._share)
        self.slots = SlotState(config.max_seqs, config.max_len, cache, ids, self._device)
        self._step = StepBuffers(self.slots, model.frequencies, config.prefill_budget, self._buckets)
        self._model, self._cache, self._inboxes = model, cache, inboxes
        asked = AskedAttention.of(config, failed_checks)
        self.pages = PageCheck(config, model.parallel.rank, self.slots) if config.debug_pages != "off" else None
        check = self.pages.check_copies if self.pages is not None else None
        self._attention = attention_backend(asked, geometry, cache, config.tp, self._buckets, self._device, check)
        self._sampler = Sampler(model.parallel, geometry.vocab, geometry.softcap, config.suppress, self._device)
        self._prefill = min(config.prefill_budget, config.max_len)
        self.debug_hash = config.debug_hash
        self._plans: deque[tuple[int, bytes, bytes]] = deque()
        self._end: torch.cuda.Event | None = None  # of the last step
        self._host = [
            torch.zeros((self._buckets[-1] + config.prefill_budget, 2), dtype=torch.int32, pin_memory=on_gpu)
            for _ in range(DEPTH + 1)
        ]
        self.capturable = on_gpu and config.graphs and not disabled()  # plain torch synchronises with the host
        self.graphs: StepGraphs | None = None

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Capture the decode step of every bucket, or of `sizes`; on a GPU, once, before the first plan, on every rank.

        RuntimeError: another rank's part of an all-reduce did not come, and the inboxes are broken.
        """
        self.graphs = self.graphs_of(sizes or self._buckets)
        if self._inboxes is not None and self._inboxes.allreduce.failed:
            raise RuntimeError("another rank's part of an all-reduce did not come in time while decode steps were captured")

    @torch.inference_mode()
    def graphs_of(self, sizes: Sequence[int]) -> StepGraphs:
        """The captured decode steps of these buckets. Every rank must call it."""
        samplers = {name: lambda _, step, name=name: self._captured(name, *step) for name in SAMPLERS}
        return DecodeGraphs(lambda rows: self._forward(rows, self._step.plan), samplers, sizes, self._device)

    @torch.inference_mode()
    def repeat(self, rows: int) -> None:
        """Run the decode step of `rows` rows eagerly, of the plan uploaded last; on a GPU, for measuring."""
        self._captured("argmax", *self._forward(rows, self._step.plan))

    @torch.inference_mode()
    def warm(self) -> None:
        """Run prefills and samplers; on a GPU, once, before the first plan: nothing may be compiled, or found not to fit in memory,
        while requests wait. Prefills of `warm_rows`, and of each bucket of rows all that samplers do.

        They run in the padding slot, whose pages are the null page, which is zeroed again afterwards.
        """
        size, slot = self._prefill, self.slots.padding
        for rows in warm_rows(size):
            plan = read_plan(encode_plan(StepPlan(1, chunks=[PrefillChunk(slot, 0, rows, rows - 1)])))
            uploaded = self._step.upload(plan)
            self._step.apply(uploaded)
            batch = self._step.mixed(plan, uploaded)
            every = self._model.forward(replace(batch, logit_rows=None), self._cache, self._attention)
            if (end := mark(self._device)) is not None:
                end.synchronize()  # the plan's staging memory is used again
        hidden = self._model.forward(batch, self._cache, self._attention)
        for rows in reversed(self._buckets):  # memory that the largest took does for the others
            everything = SpecialRows(small_top_k=True, filtered=range(rows), reported=range(rows), alternatives=MAX_ALTERNATIVES)
            ends = replace(batch, slots=batch.slots[-1:].repeat(rows), positions=batch.positions.new_full((rows,), -1))
            for plan_of_masks in (None, uploaded):
                self._sample(plan_of_masks, ends, hidden[-1:].repeat(rows, 1), everything)
        self._prompt_logprobs([ScoredRows(slot, WantedLogprobs(0, 0, size + 1, MAX_ALTERNATIVES), 0, 0, size)], batch, every)
        self.slots.lengths[slot] = 0
        for group in self._cache:
            group.pool[:, 0] = 0

    def bucket(self, decodes: int) -> int:
        """The rows that `decodes` decode rows are padded to."""
        return self._step.bucket(decodes)

    def launch(self, data: bytes, masks: bytes = b"") -> Launched:
        """Start the step of the plan `data`, with `masks` if it has masked rows. At most two may be launched and not finished."""
        return self.sample(self.forward(data), masks)

    @torch.inference_mode()
    def forward(self, data: bytes) -> Forwarded:
        """Start the forward of the plan `data`; `sample` must follow before the next `forward`."""
        plan = read_plan(data)
        if self.pages is not None:
            self.pages.fold(plan, data)
        start = mark(self._device)
        self.slots.admit(plan.admissions)
        for group, page in plan.zeros.tolist():
            self._cache.groups[group].pool[:, page] = 0
        uploaded = self._step.upload(plan)
        run = self._decode if len(plan.decodes) and not len(plan.chunks) else self._mixed
        return Forwarded(plan, data, uploaded, run(plan, uploaded), start)

    @torch.inference_mode()
    def sample(self, step: Forwarded, masks: bytes = b"") -> Launched:
        """Start the sampling of a step, with `masks` if it has masked rows, and the copy of its outputs."""
        plan = step.plan
        self._plans.append((plan.step, step.data, masks))
        if plan.masked:
            self._set_masks(plan.step, masks)
        rows = self.slots.result_rows(plan.result_slots, plan.step)
        sampled = self._tokens(step, rows)
        if self.debug_hash:
            self.slots.check()
        copy = CopyOut(self._outputs(sampled, step.final.hidden, len(rows.slots)), self._device)
        clock = StepClock(self._end if len(plan.decodes) else None, step.start, copy.end)
        self._end = copy.end
        scored = sampled.scored if sampled is not None else ()
        sampling = None if sampled is None else rows
        return Launched(plan.step, sampling, scored, copy, self._move_hash, self.pages, clock)

    def _set_masks(self, step: int, data: bytes) -> None:
        masks = decode_masks(data)
        assert masks.step == step, f"step {step} has the masks of step {masks.step}"
        self.slots.set_masks(step, masks.slots, masks.bits, after=self._end)
        if self.pages is not None:
            self.pages.keep_masks(step, data)

    def run(self, plans: Iterable[bytes]) -> list[bytes]:
        """Run every plan, in order, DEPTH at a time; the results."""
        out: deque[Launched] = deque()
        results = []
        for data in plans:
            out.append(self.launch(data))
            if len(out) == DEPTH:
                results.append(out.popleft().end())
        return results + [launched.end() for launched in out]

    def _decode(self, plan: PlanView, uploaded: Tensor) -> FinalRows:
        """The forward of decode rows alone, padded to a bucket."""
        bucket = self._step.bucket(len(plan.decodes))
        graphs = self.graphs if uploaded is self._step.plan else None
        batch, hidden = graphs.forward(bucket) if graphs else self._forward(bucket, uploaded)
        return FinalRows(hidden, batch, graphs)

    def _mixed(self, plan: PlanView, uploaded: Tensor) -> FinalRows:
        """The forward of a step with chunks, or with no rows at all."""
        self._step.apply(uploaded)
        if not len(plan.chunks):
            return FinalRows(self._step.ids[:0])
        batch = self._step.mixed(plan, uploaded)
        self._check_pages(uploaded, batch)
        scored = scored_rows(batch.chunks, self.slots.prompts)
        ends = replace(batch, slots=batch.slots[batch.logit_rows], positions=batch.positions[batch.logit_rows])
        if not scored:
            return FinalRows(self._model.forward(batch, self._cache, self._attention), ends)
        every = self._model.forward(replace(batch, logit_rows=None), self._cache, self._attention)
        prompts = self._prompt_logprobs(scored, batch, every)
        return FinalRows(every[batch.logit_rows], ends, scored=scored, prompts=prompts)

    def _tokens(self, step: Forwarded, rows: ResultRows) -> StepTokens | None:
        """What `rows` of a forwarded step sample, and its logprobs of prompts; None: it has neither."""
        sampled = self._sampled(step, rows) if len(rows.slots) else None
        if not step.final.scored:
            return sampled
        sampled = sampled or StepTokens(torch.empty((0, 2), dtype=torch.int32))
        return replace(sampled, scored=step.final.scored, prompts=step.final.prompts)

    def _sampled(self, step: Forwarded, rows: ResultRows) -> StepTokens:
        """The tokens of one row or more."""
        graphs, batch, special = step.final.graphs, step.final.batch, rows.special
        assert batch is not None, step.plan
        if graphs and not special.filtered and not special.reported:
            name = "small_top_k" if special.small_top_k else "argmax"
            return graphs.sample(self._step.bucket(len(rows.slots)), f"adjusted_{name}" if rows.adjusted else name)
        return self._sample(step.uploaded if rows.adjusted else None, batch, step.final.hidden, special)

    def _prompt_logprobs(self, scored: Sequence[ScoredRows], batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """As `token_logprobs`, from the final hidden rows of all of the batch."""

        def report(rows: Tensor, ids: Tensor, alternatives: int) -> Tensor:
            return self._sampler.token_logprobs(self._model.logits(hidden[rows]), ids, alternatives)

        return token_logprobs(scored, batch, self.slots.tokens, report, self._share)

    def _forward(self, bucket: int, plan: Tensor) -> tuple[ForwardBatch, Tensor]:
        """Inputs and final hidden rows of the plan's decode rows, padded to `bucket`. The host decides nothing: capturable."""
        self._step.apply(plan)
        batch = self._step.decodes(plan, bucket)
        self._check_pages(plan, batch)
        peers = self._inboxes.allreduce if self._inboxes else None
        return batch, self._model.forward(batch, self._cache, self._attention, peers)

    def _check_pages(self, plan: Tensor, batch: ForwardBatch) -> None:
        """Check page tables before any kernel reads them. Capturable."""
        if self.pages is not None:
            self.pages.check(plan, batch)

    def _captured(self, sampler: str, batch: ForwardBatch, hidden: Tensor) -> StepTokens:
        """Tokens of the batch's rows by one of SAMPLERS. Capturable."""
        special = SpecialRows(small_top_k=sampler.endswith("small_top_k"))
        return self._sample(self._step.plan if sampler.startswith("adjusted") else None, batch, hidden, special)

    def _sample(self, plan: Tensor | None, batch: ForwardBatch, hidden: Tensor, special: SpecialRows) -> StepTokens:
        """Tokens of the batch's rows; with the step's `plan`, their logits are adjusted as their slots say."""
        choices = self._inboxes.argmax if self._inboxes else None
        rows = self._sampler.batch(batch.slots, batch.positions, self.slots.parameters, self.slots.tokens)
        if plan is not None:
            rows = replace(rows, adjustments=self.slots.adjustments.tables, plan=plan)
        return StepTokens(*self._sampler.sample(self._model.logits(hidden), rows, choices, special))

    def _outputs(self, sampled: StepTokens | None, hidden: Tensor, count: int) -> dict[str, tuple[Tensor, Tensor | None]]:
        """What to copy to the host, and into which memory."""
        outputs: dict[str, tuple[Tensor, Tensor | None]] = {}
        if self.pages is not None:
            outputs["violations"] = (self.pages.violations, None)
        if sampled is None:
            return outputs
        if sampled.prompts is not None:
            outputs["prompts"] = (sampled.prompts, None)
        self._host.append(self._host.pop(0))
        outputs["chosen"] = (sampled.chosen[:count], self._host[-1][:count])
        if sampled.logprobs is not None:
            outputs["logprobs"] = (sampled.logprobs, None)
        if self.debug_hash:
            outputs["hidden"] = (hidden[:count].contiguous().view(torch.uint8), None)
        return outputs

    def _move_hash(self, step: int, host: dict[str, np.ndarray]) -> None:
        """Chain one finished step into the state hash."""
        expected, data, masks = self._plans.popleft()
        assert step == expected, f"step {step} finished before step {expected}"
        state = checksum(masks, checksum(data, self.state_hash))
        for name in ("chosen", "hidden"):
            if name in host:
                state = zlib.crc32(host[name].tobytes(), state)
        self.state_hash = state
