"""Folds results back: plans in flight, and what their rows gave to whom."""

from collections import deque
from typing import NamedTuple

from engine.core.requests import Requests
from engine.core.sequence import Sequence
from engine.plan import ResultRow, StepResult
from engine.protocol import FinishReason, Output


class Row(NamedTuple):
    """A row of a plan in flight: whose it was when it was planned, and how far it computes."""

    sequence: Sequence
    number: int
    end: int
    samples: bool

    @property
    def stale(self) -> bool:
        return self.sequence.number != self.number


class Flight(NamedTuple):
    """A plan whose result has not come."""

    step: int
    rows: list[Row]
    prefill_tokens: int
    decode_tokens: int


class Results:
    """Plans in flight, oldest first. `done` is the step of the last result."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._in_flight: deque[Flight] = deque()
        self.done = 0

    @property
    def in_flight(self) -> int:
        """Plans sent and not yet committed."""
        return len(self._in_flight)

    def expect(self, flight: Flight) -> None:
        """A plan was sent."""
        self._in_flight.append(flight)

    def commit(self, result: StepResult) -> None:
        """Fold one result in. Rows of sequences that were preempted or ended since are dropped."""
        step, rows, prefill_tokens, decode_tokens = self._in_flight.popleft()
        assert result.step == step, (result.step, step)
        self.done = step
        self._requests.counters.prefill_tokens += prefill_tokens
        self._requests.counters.decode_tokens += decode_tokens
        results = iter(result.rows)
        for row in rows:
            outcome = next(results) if row.samples else None
            if row.stale:
                continue
            row.sequence.committed = row.end
            if outcome is not None:
                assert (outcome.slot, outcome.number) == (row.sequence.slot, row.number & 0x7FFFFFFF), (outcome, row)
                self._take(row.sequence, outcome)
        assert next(results, None) is None, f"step {step} gave more rows than it had"

    def _take(self, sequence: Sequence, row: ResultRow) -> None:
        """Append the row's tokens up to the first that ends the sequence, and tell its client."""
        request = sequence.key[1]
        if row.nan:
            error = "the model's logits were not finite"
            self._requests.end(sequence, Output(id=request, finish=FinishReason.error, error=error))
            return
        taken: list[int] = []
        finish: FinishReason | None = None
        for token in row.tokens:
            taken.append(token)
            sequence.tokens.append(token)
            finish = _finish(sequence, token)
            if finish:
                break
        logprobs = [] if row.logprobs is None else [row.logprobs]
        output = Output(id=request, tokens=taken, logprobs=logprobs, finish=finish)
        if finish:
            self._requests.end(sequence, output)
        else:
            self._requests.emit(sequence.key[0], output)


def _finish(sequence: Sequence, token: int) -> FinishReason | None:
    params = sequence.params
    generated = len(sequence.tokens) - sequence.prompt
    if token in params.stop_ids and generated > params.min_tokens:
        return FinishReason.stop
    return FinishReason.length if len(sequence.tokens) >= sequence.limit else None
