"""Commits results of plans in flight to sequences. A row's result is dropped if its sequence was
preempted or ended since: rows belong to an admission."""

from collections import deque
from typing import NamedTuple

import msgspec

from engine.core.draft_policy import DraftPolicy
from engine.core.requests import Requests
from engine.core.sequence import Sequence
from engine.plan import NUMBER_MASK, ResultRow, StepPlan, StepResult, has_numbers, in_result_order
from engine.protocol import FinishReason, Output

_NOT_FINITE = "the model's logits were not finite"


class ChunkRow(NamedTuple):
    """A prefill chunk in flight. `number`: the admission; `samples`: it gives a token."""

    sequence: Sequence
    number: int
    end: int
    samples: bool


class InFlightStep(msgspec.Struct):
    plan: StepPlan
    chunks: list[ChunkRow] = []
    rows: list[tuple[Sequence, int, int]] = []  # (sequence, admission number, width) of each decode row
    size: int = 0  # as in DraftPolicy.choose
    drafting: int = 0  # number of sequences that may draft
    expected_ms: float = 0.0  # 0: no limit or target bounds the step
    crowded: bool = False  # prompts fill it, so its drafts are few
    waiting: int = 0  # sequences whose chunk was skipped or cut because they wait for transfers

    @property
    def result_rows(self) -> list[tuple[Sequence, int]]:
        """(sequence, admission number) of each row of the result."""
        chunks = ((chunk.sequence, chunk.number) for chunk in self.chunks if chunk.samples)
        return in_result_order(chunks, ((sequence, number) for sequence, number, _ in self.rows))


class Results:
    def __init__(self, requests: Requests, draft_policy: DraftPolicy) -> None:
        self._requests = requests
        self._draft_policy = draft_policy
        self.in_flight: deque[InFlightStep] = deque()

    def commit(self, result: StepResult) -> InFlightStep:
        step = self.in_flight.popleft()
        assert result.step == step.plan.step, (result.step, step.plan.step)
        self._requests.counters.prefill_tokens += step.plan.prompt_tokens
        self._commit_prompts(step.chunks, result)
        of_chunks, of_decodes = result.split(len(step.rows))
        self._commit_chunks(step.chunks, result, of_chunks)
        self._commit_rows(step.rows, result, of_decodes.start)
        if step.plan.masked:
            _note_drafts(step, result)
        return step

    def _commit_prompts(self, chunks: list[ChunkRow], result: StepResult) -> None:
        """Emit logprobs of prompt tokens, without those sent before a preemption."""
        rows = {(slot, number): logprobs for slot, number, logprobs in result.prompts}
        for sequence, number, _, _ in chunks if rows else ():
            logprobs = rows.get((sequence.slot, number & NUMBER_MASK))
            if sequence.number != number or logprobs is None:
                continue
            if not has_numbers(logprobs):
                self._requests.fail(sequence, _NOT_FINITE, not_finite=True)
                continue
            logprobs = logprobs.after(sequence.scored)
            if logprobs.count:
                sequence.scored += logprobs.count
                self._requests.outputs.append(Output(sequence.id, prompt_logprobs=[logprobs]))

    def _commit_chunks(self, chunks: list[ChunkRow], result: StepResult, indices: range) -> None:
        """`indices`: rows of the chunks that give a token."""
        left = iter(indices)
        for sequence, number, end, samples in chunks:
            row = result.row(next(left)) if samples else None
            if sequence.number != number:
                continue
            sequence.committed = end
            if sequence.media.items:
                self._requests.note_computed(sequence)
            if row is None or not row.nan:
                self._requests.allocator.cache_passed_points(sequence)
            if row is not None:
                self._take(sequence, row, *_cut(sequence, row.tokens))

    def _commit_rows(self, rows: list[tuple[Sequence, int, int]], result: StepResult, first: int) -> None:
        """`_fold` handles rows that have several tokens or end something."""
        slots, _, counts, _, tokens = result.table[first:, :5].T.tolist()
        outputs = self._requests.outputs
        plain = not result.logprobs
        for index, (row, slot, count, token) in enumerate(zip(rows, slots, counts, tokens, strict=True), first):
            sequence, number, width = row
            if sequence.number != number:
                continue
            if count == width == 1 and plain and token not in sequence.stop_ids and sequence.committed + 2 < sequence.limit:
                assert slot == sequence.slot, (slot, sequence)
                sequence.committed += 1
                sequence.tokens.append(token)
                outputs.append(Output(sequence.id, [token]))
            else:
                self._fold(sequence, width, result.row(index))
        self._requests.counters.decode_tokens += sum(counts)

    def _fold(self, sequence: Sequence, width: int, row: ResultRow) -> None:
        """Commit a row with several tokens, or one that ends its sequence. A cut sequence steps
        back."""
        given = len(row.tokens)
        assert given <= width, (row, width)
        taken, finish = _cut(sequence, row.tokens)
        self._draft_policy.verified(width - 1, max(0, given - 1))
        sequence.pages.dropped = max(sequence.pages.dropped, sequence.committed + width)
        sequence.committed += len(taken)
        sequence.planned -= width - given
        sequence.drafts.rejected += width - given
        self._take(sequence, row, taken, finish, width - 1)
        if len(taken) < given and not finish:
            sequence.step_back()

    def _take(self, sequence: Sequence, row: ResultRow, taken: list[int], finish: FinishReason | None, drafts: int = 0) -> None:
        assert (row.slot, row.number) == (sequence.slot, sequence.number & NUMBER_MASK), (row, sequence)
        if row.nan:
            self._requests.fail(sequence, _NOT_FINITE, not_finite=True)
            return
        if row.empty:
            self._requests.fail(sequence, "the request's constraints together forbid every token", invalid=True)
            return
        if len(sequence.tokens) == sequence.prompt:
            cached = sequence.pages.first_cached
        else:
            cached = 0
        sequence.tokens.extend(taken)
        accepted = min(len(taken), len(row.tokens) - 1)
        output = Output(
            sequence.id,
            taken,
            list(row.logprobs[: len(taken)]),
            finish,
            cached=cached,
            accepted=accepted,
            rejected=drafts - accepted,
        )
        if finish:
            self._requests.end(sequence, output)
        else:
            self._requests.outputs.append(output)


def _note_drafts(step: InFlightStep, result: StepResult) -> None:
    drafts = result.table[:, result.table.shape[1] - step.plan.drafts :].tolist()
    for (sequence, number), drafted in zip(step.result_rows, drafts, strict=True):
        if sequence.masked and sequence.number == number:
            sequence.drafts.tokens = drafted


def _cut(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the one that ends the sequence, with the reason, or up to where masks may
    begin."""
    length = len(sequence.tokens)
    may_stop = sequence.prompt + sequence.params.min_tokens
    for count, token in enumerate(tokens, 1):
        finish = None
        if token in sequence.stop_ids and length + count > may_stop:
            finish = FinishReason.stop
        elif length + count >= sequence.limit:
            finish = FinishReason.length
        if finish or token in sequence.cut_ids:
            return list(tokens[:count]), finish
    return list(tokens), None
