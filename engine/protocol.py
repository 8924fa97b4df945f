"""Messages between front and core, as length-prefixed msgpack, and the sampling parameters."""

import enum
import math
import struct
from array import array
from collections.abc import Iterable
from typing import Any, Literal, dataclass_transform

import msgspec

from engine.logit_adjustments import LogitAdjustments

MAX_MESSAGE_BYTES = 64 << 20
MAX_MEDIA_BYTES = 56 << 20  # of the data of a request's media
MAX_ALTERNATIVES = 20  # logprobs of other tokens at a position: OpenAI's bound
MAX_STOP_IDS = 1024  # of one request, its end-of-sequence ids among them: a rank's table has a fixed width
MAX_SPAN = 2048  # tokens of a media item that see each other both ways: a chunk has all of them
_LENGTH = struct.Struct("<I")

JsonObject = dict[str, Any]  # as it is decoded, or as it will be encoded
MediaKind = Literal["image", "video", "audio"]
_ITEM_BYTES: dict[MediaKind, int] = {"image": 1, "video": 1, "audio": 4}  # of data: uint8, or float32
Spans = tuple[tuple[int, int], ...]  # [begin, end) of each


@dataclass_transform(frozen_default=True)
class FrozenStruct(msgspec.Struct, frozen=True):
    """Immutable, like all derived classes."""


# Why a request ended. `stop` and `length` are successes; the others are counted apart, never hidden.
FinishReason = enum.StrEnum("FinishReason", "stop length abort error")
# Why the front ended a request. A stop string is a success: the text is complete. queue_timeout: it had not begun in time;
# sibling_failed: another choice of the same request ended in error.
AbortReason = enum.StrEnum("AbortReason", "client_gone stop_string deadline slow_reader queue_timeout sibling_failed")


class Grammar(FrozenStruct, omit_defaults=True):
    """`text`: in `engine.matcher`'s form, checked at the edge.

    `trigger`: tokens are free until this id, and after what follows it is complete; None: the
    grammar covers the reply.
    """

    text: str
    trigger: int | None = None


class ThoughtBudget(FrozenStruct):
    """The most tokens of all thoughts of a reply, counted after `begin` and `label` tokens, up to
    `end` or `begin_call`."""

    tokens: int
    begin: int
    end: int
    label: int
    begin_call: int | None
    open_label: int | None


class SamplingParams(FrozenStruct, kw_only=True, omit_defaults=True):
    """Validated at the edge, with the seed resolved."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adjustments: LogitAdjustments | None = None
    grammar: Grammar | None = None
    thought: ThoughtBudget | None = None
    drafts: bool = True


class MediaItem(FrozenStruct):
    """A medium in a prompt, at tokens [first, first + length). `shape`: of its data."""

    first: int
    length: int
    digest: bytes
    spans: Spans
    kind: MediaKind
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + self.length

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _ITEM_BYTES[self.kind]

    @property
    def runs(self) -> Spans:
        """Positions [begin, end) of the encoder's rows; a video has text between frames."""
        return self.spans or ((self.first, self.end),)

    @property
    def soft_tokens(self) -> int:
        return sum(end - begin for begin, end in self.runs)


class DecodedItem(MediaItem):
    data: bytes


class PlacedItem(MediaItem):
    """Its data begin at `place` in the group's media memory."""

    place: int


class GenerateRequest(FrozenStruct, kw_only=True, tag="generate"):
    """Front -> core. `id` is the front's own and returns in every TokenBatch entry.

    `prompt`: token ids, int32. `clip`: max_tokens was a default and may be lowered to what fits. `salt`: only requests of the
    same salt share cached prefixes. `priority`: lower is served first. `client`: for turns. `media`: in the order of positions.
    """

    id: int
    prompt: bytes
    params: SamplingParams
    clip: bool = False
    salt: str = ""
    priority: int = 0
    adapter: int = -1
    client: str = ""
    media: tuple[PlacedItem, ...] = ()

    @property
    def tokens(self) -> "array[int]":
        """ValueError: the prompt's bytes are not whole int32 numbers."""
        return array("i", self.prompt)


class MediaEnd(FrozenStruct, tag="media_end"):
    """No further request has media with data in [begin, end), whole pages of the media memory."""

    begin: int
    end: int


class Abort(FrozenStruct, tag="abort"):
    """End request `id`. Idempotent; unknown ids are ignored."""

    id: int
    reason: AbortReason


class Control(FrozenStruct, tag="control"):
    """`stop` after the plan in flight; `report` asks for an empty TokenBatch with load figures."""

    action: Literal["stop", "report"]


class AdapterChange(FrozenStruct, tag="adapter"):
    """What every rank has done with an adapter, or `remove`: no new request may have it. `id` is never used twice."""

    action: Literal["add", "placed", "remove"]
    id: int


class Logprobs(FrozenStruct, array_like=True):
    """A token's logprob, and the most likely (id, logprob), best first; natural log, fp32."""

    chosen: float
    top: list[tuple[int, float]]


class PromptLogprobs(FrozenStruct, array_like=True):
    """Logprobs of prompt tokens from position `first` on: natural log, fp32, of capped logits.

    words: little-endian, four bytes each, a token: logprob; rank, 1 for the likeliest; the most likely ids, best first; their
    logprobs.
    """

    first: int
    alternatives: int
    words: bytes

    @property
    def count(self) -> int:
        return len(self.words) // token_bytes(self.alternatives)

    def entries(self) -> list[tuple[int, Logprobs]]:
        count = self.alternatives
        rows = struct.iter_unpack(f"<fi{count}i{count}f", self.words)
        return [(rank, Logprobs(chosen, list(zip(top[:count], top[count:], strict=True)))) for chosen, rank, *top in rows]

    def after(self, position: int) -> "PromptLogprobs":
        skipped = max(0, position + 1 - self.first)
        return PromptLogprobs(self.first + skipped, self.alternatives, self.words[skipped * token_bytes(self.alternatives) :])

    def cut(self, tokens: int) -> "list[PromptLogprobs]":
        size = tokens * token_bytes(self.alternatives)
        pieces = [self.words[start : start + size] for start in range(0, len(self.words), size)]
        return [PromptLogprobs(self.first + tokens * index, self.alternatives, words) for index, words in enumerate(pieces)]


def token_bytes(alternatives: int) -> int:
    return 4 * (2 + 2 * alternatives)


OVERLOADED = "overloaded"  # the code of an error that is only of now


class Output(FrozenStruct, omit_defaults=True, gc=False):
    """What a step gave a request; with `finish`, the last.

    `cached`, with the first tokens: prompt tokens found in the prefix cache. `accepted`: tokens that were drafts; `rejected`:
    other drafts. `prompt_logprobs` come before the first tokens, in order. `error` is a sentence for the client; `invalid`: the
    request was at fault; `code`: OpenAI's, or OVERLOADED: it may come again.
    """

    id: int
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    finish: FinishReason | None = None
    error: str | None = None
    invalid: bool = False
    code: str | None = None
    cached: int = 0
    accepted: int = 0
    rejected: int = 0
    prompt_logprobs: list[PromptLogprobs] = []


class PoolLoad(FrozenStruct):
    group: str
    total: int
    used: int
    cached: int

    @property
    def usage(self) -> float:
        if self.total:
            return self.used / self.total
        return 0.0


class DraftPosition(FrozenStruct):
    position: int
    verified: int
    accepted: int


class DraftSwitches(FrozenStruct):
    cause: str
    count: int


class Counters(msgspec.Struct):
    """The core's counts since boot."""

    received: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    encoder_wait_s: float = 0.0


class Load(Counters, kw_only=True):
    """Sent with outputs, admissions, and on request; `step` is the last with a result."""

    step: int
    waiting: int
    running: int
    waiting_tokens: int
    evicted_pages: int
    encoder_waiting: int
    drafts: int
    draft_positions: list[DraftPosition]
    draft_switches: list[DraftSwitches]
    pools: list[PoolLoad]

    @property
    def draft_rows(self) -> int:
        if self.draft_positions:
            return self.draft_positions[0].verified
        return 0

    @property
    def draft_tokens(self) -> int:
        return sum(position.verified for position in self.draft_positions)

    @property
    def accepted_tokens(self) -> int:
        return sum(position.accepted for position in self.draft_positions)

    @property
    def kv_usage(self) -> float:
        """The fuller pool's share in use."""
        return max((pool.usage for pool in self.pools), default=0.0)


class AdapterOrders(msgspec.Struct):
    """What the ranks must do: copy adapters to device slots, (id, slot) each; forget adapters."""

    places: list[tuple[int, int]] = []
    drops: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.places or self.drops)


class TokenBatch(FrozenStruct, kw_only=True):
    """Core -> front, since the last batch. `started`: requests that were scheduled for the first time."""

    outputs: list[Output]
    started: list[int] = []
    adapters: AdapterOrders = msgspec.field(default_factory=AdapterOrders)
    load: Load


FrontMessage = GenerateRequest | MediaEnd | Abort | Control | AdapterChange

encode_message = msgspec.msgpack.Encoder().encode
decode_front_message = msgspec.msgpack.Decoder(FrontMessage).decode
decode_token_batch = msgspec.msgpack.Decoder(TokenBatch).decode


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """int32, little-endian. OverflowError or TypeError: not an int32."""
    return array("i", tokens).tobytes()


def frame(message: bytes) -> bytes:
    """`message` after its little-endian u32 length. ValueError above MAX_MESSAGE_BYTES."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(message)) + message


class FrameReader:
    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages completed by `data`. ValueError on a length above MAX_MESSAGE_BYTES, which
        loses the stream."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_MESSAGE_BYTES:
                raise ValueError(f"a frame announces {size} bytes, more than {MAX_MESSAGE_BYTES}")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(bytes(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages
