"""The open requests: queue, slots, ends, and outputs for the front.

received = finished + refused + aborted + failed + (waiting + running), always.
"""

import bisect
from itertools import chain

from engine.adapter_slots import AdapterSlots
from engine.core.allocator import Allocator
from engine.core.pending import MediaUses, PendingTransfers
from engine.core.prefix import root_key
from engine.core.sequence import DraftState, MediaState, PageState, Sequence
from engine.errors import InvalidRequest
from engine.media_geometry import MediaGeometries
from engine.protocol import (
    MAX_SPAN,
    MAX_STOP_IDS,
    OVERLOADED,
    AbortReason,
    AdapterOrders,
    Counters,
    FinishReason,
    GenerateRequest,
    Output,
    PlacedItem,
)

KEPT_MEDIA_BYTES = 512 << 20  # of media whose rows are computed: 256 pictures of the usual size
MEDIA_LOST = "the request was preempted, and there was no room to keep its media; please try again shortly"


class Requests:
    """`waiting` and `running` are in order of precedence. `longest`: most tokens of one sequence in
    the pools."""

    def __init__(
        self,
        allocator: Allocator,
        slots: int,
        max_len: int,
        longest: int,
        encoders: MediaGeometries,
        adapters: AdapterSlots,
    ) -> None:
        self.encoders = encoders
        self.adapters = adapters
        self.allocator = allocator
        self.counters = Counters()
        self.pending = PendingTransfers()
        self.media = MediaUses(self.pending)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.unfinished: dict[int, Sequence] = {}
        self.free_slots = list(range(slots - 1, -1, -1))
        self.outputs: list[Output] = []
        self.started: list[int] = []
        self._max_len = max_len
        self._longest = longest
        self._admissions = 0

    # -- queue and slots

    def add(self, request: GenerateRequest) -> Sequence | None:
        """Queue a request; None if refused because it can never run here."""
        try:
            if len(request.prompt) % 4:
                raise InvalidRequest(f"the prompt could not be read: {len(request.prompt)} bytes are no int32 numbers")
            tokens = request.tokens
            limit = self._limit(request, len(tokens))
            if request.id in self.unfinished:
                raise InvalidRequest(f"request id {request.id} is already in use")
        except InvalidRequest as error:
            self.refuse(request.id, str(error), error.code)
            return None
        self.counters.received += 1
        sequence = Sequence(
            request.id,
            tokens,
            prompt=len(tokens),
            limit=limit,
            params=request.params,
            precedence=(request.priority, self.counters.received),
            pages=PageState(root_key(request.salt, request.adapter)),
            drafts=DraftState(request.params.drafts),
            media=MediaState(request.media, self._spans(request.media)),
            adapter=request.adapter,
            client=request.client,
        )
        self.unfinished[request.id] = sequence
        if request.media:
            self.media.add(request.media[0].place)
        self._enqueue(sequence)
        return sequence

    def _limit(self, request: GenerateRequest, prompt: int) -> int:
        """The length at which it ends. InvalidRequest if it can never run here."""
        params = request.params
        if not self.adapters.is_served(request.adapter):
            raise InvalidRequest("the adapter was unloaded", code="model_not_found")
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        if len(params.stop_ids) > MAX_STOP_IDS:
            raise InvalidRequest(f"{len(params.stop_ids)} stop ids, end ids included; at most {MAX_STOP_IDS} are possible")
        if request.media:
            self._check_media(request.media, prompt)
        if prompt + 1 > self._max_len:
            raise _too_long(f"the prompt has {prompt} tokens; with one to generate it exceeds the context of {self._max_len}")
        limit = min(prompt + params.max_tokens, self._max_len)
        if limit > self._longest and (prompt + 1 > self._longest or not request.clip):
            needs = f"the prompt has {prompt} tokens, and with those to generate the request needs room for {limit}"
            raise _too_long(f"{needs}; the KV cache holds at most {self._longest} of one request")
        return min(limit, self._longest)

    def _check_media(self, media: tuple[PlacedItem, ...], prompt: int) -> None:
        """InvalidRequest unless the model takes the items, in order, with their spans inside."""
        end = 0
        for item in media:
            if (encoder := self.encoders.get(item.kind)) is None:
                raise InvalidRequest(f"this model takes no {item.kind}")
            encoder.check(item)
            if not end <= item.first < item.end <= prompt:
                raise InvalidRequest(f"a media item at [{item.first}, {item.end}) overlaps another, or the end of the prompt")
            end = item.first
            for begin, span_end in item.spans:
                span = f"the span [{begin}, {span_end})"
                if not end <= begin < span_end <= item.end:
                    raise InvalidRequest(f"{span} is not one of the media item at [{item.first}, {item.end})")
                if span_end - begin > MAX_SPAN or not self.allocator.holds_span(span_end - begin):
                    raise InvalidRequest(f"{span} of a media item is longer than what can be computed at once")
                end = span_end
            end = item.end

    def _spans(self, media: tuple[PlacedItem, ...]) -> list[tuple[int, int]]:
        bidirectional = any(pool.group.bidirectional for pool in self.allocator.pools)
        if bidirectional:
            return [span for item in media for span in item.spans]
        return []

    def admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._admissions += 1
        sequence.admit(self.free_slots.pop(), self._admissions, self.allocator.pools)
        bisect.insort(self.running, sequence, key=lambda running: running.precedence)

    def readmit(self, sequence: Sequence) -> None:
        self._admissions += 1
        sequence.number = self._admissions

    def preempt(self, sequence: Sequence) -> None:
        """Requeue it for lack of pages. Tokens not in the prefix cache are recomputed."""
        self.counters.preemptions += 1
        self._vacate(sequence)
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        self.allocator.find(sequence)
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.precedence)

    def _vacate(self, sequence: Sequence) -> None:
        """Take slot and pages back; rows in flight become stale."""
        if not sequence.pages.not_finite:
            self.allocator.cache_computed(sequence)
        self.allocator.give_all(sequence)
        self.pending.forget(sequence)
        self.running.remove(sequence)
        self.free_slots.append(sequence.leave())

    # -- media

    def note_computed(self, sequence: Sequence) -> None:
        """Drop media whose rows are computed, beyond KEPT_MEDIA_BYTES kept in case of preemption:
        first of preempted sequences, then of the youngest. A sequence that lacks them fails at
        readmission."""
        sequence.media.note_computed(sequence.committed)
        kept = 0
        for other in chain(self.waiting, reversed(self.running)):
            kept += other.media.kept_bytes
            if kept > KEPT_MEDIA_BYTES:
                kept -= other.media.kept_bytes
                self._drop_media(other.media)

    def _drop_media(self, media: MediaState) -> None:
        if media.items and not media.dropped:
            media.dropped = True
            media.kept_bytes = 0
            self.media.drop(media.items[0].place)

    # -- outputs and ends

    def refuse(self, request: int, reason: str, code: str | None = None) -> None:
        self.counters.received += 1
        self.counters.refused += 1
        self.outputs.append(Output(request, finish=FinishReason.error, error=reason, invalid=True, code=code))

    def abort(self, request: int, reason: AbortReason) -> None:
        """Unknown ids are ignored; a stop string is a success."""
        sequence = self.unfinished.get(request)
        if sequence is not None:
            success = reason is AbortReason.stop_string
            self.end(sequence, Output(request, finish=FinishReason.stop if success else FinishReason.abort))

    def fail(self, sequence: Sequence, error: str, *, invalid: bool = False, not_finite: bool = False) -> None:
        sequence.pages.not_finite = not_finite
        self.end(sequence, Output(sequence.id, finish=FinishReason.error, error=error, invalid=invalid))

    def lose_media(self, sequence: Sequence) -> None:
        self.end(sequence, Output(sequence.id, finish=FinishReason.error, error=MEDIA_LOST, code=OVERLOADED))

    def end(self, sequence: Sequence, output: Output) -> None:
        """The only place where a request ends."""
        assert not sequence.ended, sequence
        sequence.ended = True
        if sequence.slot >= 0:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        del self.unfinished[sequence.id]
        self._drop_media(sequence.media)
        self.outputs.append(output)
        if output.finish is FinishReason.abort:
            self.counters.aborted += 1
        elif output.finish is FinishReason.error:
            self.counters.failed += 1
        else:
            self.counters.finished += 1

    def adapter_orders(self) -> AdapterOrders:
        if not self.adapters.has_orders:
            return AdapterOrders()
        return self.adapters.orders({sequence.adapter for sequence in self.unfinished.values()})

    def drain_started(self) -> list[int]:
        started = self.started
        self.started = []
        return started

    def drain(self) -> list[Output]:
        outputs = self.outputs
        self.outputs = []
        return outputs


def _too_long(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="context_length_exceeded")
