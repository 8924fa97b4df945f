"""Messages between the front (replica) and the core, and the sampling parameters that both and the ranks read.

`GenerateRequest`, `Abort`, `Control`, and media in pieces, go front -> core; `TokenBatch` comes back, at most one a turn of the
core's loop. They are msgspec structs, sent as length-prefixed msgpack over a unix socket pair. Prompts and replies are token ids;
nothing is pickled.
"""

import enum
import struct
from array import array
from collections.abc import Iterable
from typing import Any, Literal, dataclass_transform

import msgspec

from engine.logit_adjustments import LogitAdjustments

MAX_MESSAGE_BYTES = 64 << 20
PIECE_BYTES = 512 << 10  # of media's data in a message: neither end is kept from its other work for longer than a millisecond
MAX_ALTERNATIVES = 20  # logprobs of a token beside its own: OpenAI's bound
MAX_STOP_IDS = 1024  # of one request, its end-of-sequence ids among them: a rank's table has a fixed width
MAX_SPAN = 2048  # tokens of a media item that see each other both ways: a chunk has all of them
_LENGTH = struct.Struct("<I")

JsonObject = dict[str, Any]  # as it is decoded, or as it will be encoded
MediaKind = Literal["image", "video", "audio"]
Spans = tuple[tuple[int, int], ...]  # [begin, end) of each


@dataclass_transform(frozen_default=True)
class FrozenStruct(msgspec.Struct, frozen=True):
    """What is decoded and never changed; all that derive from it are frozen, too."""


# Why a request ended. `stop` and `length` are successes; the others are counted apart, never hidden.
FinishReason = enum.StrEnum("FinishReason", "stop length abort error")
# Why the front ended a request. A stop string is a success: the text is complete. queue_timeout: it had not begun in time;
# sibling_failed: another choice of the same request ended in error.
AbortReason = enum.StrEnum("AbortReason", "client_gone stop_string deadline slow_reader queue_timeout sibling_failed")


class Grammar(FrozenStruct, omit_defaults=True):
    """The grammar of a reply: `text` as `engine.matcher` reads it, checked at the edge.

    `trigger`: tokens are free until this id, and again once what follows it is complete; None: the grammar covers the whole reply.
    """

    text: str
    trigger: int | None = None


class ThoughtBudget(FrozenStruct):
    """The thinking budget: the most tokens of all thoughts of a reply; after the last of them only `end` may come.

    Counted are the tokens after `begin` and its `label` tokens, up to `end` or (with tools) `begin_call`. `open_label`: tokens of
    the label still to come, if the prompt leaves a thought open; None: it does not.
    """

    tokens: int
    begin: int
    end: int
    label: int
    begin_call: int | None
    open_label: int | None


class SamplingParams(FrozenStruct, kw_only=True, omit_defaults=True):
    """How one request samples; validated once at the edge, the seed resolved there.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. `logprobs` is the number of alternatives reported a token (0:
    the chosen one alone; None: nothing). `stop_ids` end the request; they are masked until `min_tokens` tokens are out. The
    edge puts the end ids among them unless the client ignores those. Stop strings are text and stay in `front/text`.
    `prompt_logprobs`: the same of the prompt's tokens, from the second on. `adjustments` None: there are none. `grammar` and
    `thought` stay in the core, which makes masks of them, and so does `drafts`: whether its rows may have any.
    """

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
    """An image, a video or a clip in a prompt: its tokens are those at [first, first + length).

    `digest`: sha256 of what the encoder gets. `spans`: each [begin, end) of positions that see each other both ways; a video's
    frames are spans of one item, a clip has none. `data`: what the encoder gets, of `shape`: of an image uint8 [height, width, 3],
    of a video uint8 [frames, height, width, 3], both resized to multiples of 48; of a clip float32 [frames, features].
    """

    first: int
    length: int
    digest: bytes
    spans: Spans
    kind: MediaKind
    shape: tuple[int, ...]
    data: bytes

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.first + self.length

    @property
    def runs(self) -> Spans:
        """Positions [begin, end) that the encoder's rows take, in order: of its spans, or all; between a video's frames is text."""
        return self.spans or ((self.first, self.end),)

    @property
    def soft_tokens(self) -> int:
        """Rows that the encoder gives, one a position of `runs`."""
        return sum(end - begin for begin, end in self.runs)


class GenerateRequest(FrozenStruct, kw_only=True, tag="generate"):
    """Front -> core: generate from `prompt` (token ids, int32). `id` is the front's own and returns in every TokenBatch entry.

    `clip`: max_tokens was a default, so it may be lowered to what fits instead of refusing. `salt`: only requests of the same salt
    share cached prefixes. `priority`: lower ones are served first. `adapter`: its id, -1: none; those of the settings count from 0.
    `client`: whose request it is, as clients take turns.
    `media`: in the order of their positions; their data have come before, as `sent_media`, or (0) they have them.
    """

    id: int
    prompt: bytes
    params: SamplingParams
    clip: bool = False
    salt: str = ""
    priority: int = 0
    adapter: int = -1
    client: str = ""
    media: tuple[MediaItem, ...] = ()
    sent_media: int = 0

    @property
    def tokens(self) -> "array[int]":
        """The prompt's token ids; raises ValueError when its bytes are not whole int32 numbers."""
        return array("i", self.prompt)


class MediaPiece(FrozenStruct, tag="media_piece"):
    """Front -> core: more data of the media that are sent as `id`, item by item. `is_last`: of its item."""

    id: int
    data: bytes
    is_last: bool


class MediaEnd(FrozenStruct, tag="media_end"):
    """Front -> core: no further request has the media that were sent as `id`."""

    id: int


class Abort(FrozenStruct, tag="abort"):
    """Front -> core: end request `id`. Idempotent; an unknown id is no error (it may just have ended)."""

    id: int
    reason: AbortReason


class Control(FrozenStruct, tag="control"):
    """Front -> core: `stop` ends the core after the plan in flight; `report` asks for an empty TokenBatch with the load figures."""

    action: Literal["stop", "report"]


class AdapterChange(FrozenStruct, tag="adapter"):
    """Front -> core: what every rank has done with an adapter, or `remove`: no new request may have it. `id`: the adapter's own,
    never used again."""

    action: Literal["add", "placed", "remove"]
    id: int


class Logprobs(FrozenStruct, array_like=True):
    """The logprob of a token, and the `logprobs` most likely (id, logprob), best first; natural log, fp32."""

    chosen: float
    top: list[tuple[int, float]]


class PromptLogprobs(FrozenStruct, array_like=True):
    """Logprobs of the prompt's tokens at positions first, first + 1, ...: natural log, fp32, of the capped logits.

    words: little-endian, 2 + 2 * `alternatives` of four bytes a token: its logprob fp32; its rank int32, 1 for the likeliest; the
    most likely ids int32, best first; their logprobs fp32.
    """

    first: int
    alternatives: int
    words: bytes

    @property
    def count(self) -> int:
        return len(self.words) // token_bytes(self.alternatives)

    def entries(self) -> list[tuple[int, Logprobs]]:
        """Rank and logprobs of each token."""
        count = self.alternatives
        rows = struct.iter_unpack(f"<fi{count}i{count}f", self.words)
        return [(rank, Logprobs(chosen, list(zip(top[:count], top[count:], strict=True)))) for chosen, rank, *top in rows]

    def after(self, position: int) -> "PromptLogprobs":
        """The same without tokens up to `position`."""
        skipped = max(0, position + 1 - self.first)
        return PromptLogprobs(self.first + skipped, self.alternatives, self.words[skipped * token_bytes(self.alternatives) :])

    def cut(self, tokens: int) -> "list[PromptLogprobs]":
        """The same in pieces of at most so many tokens."""
        size = tokens * token_bytes(self.alternatives)
        pieces = [self.words[start : start + size] for start in range(0, len(self.words), size)]
        return [PromptLogprobs(self.first + tokens * index, self.alternatives, words) for index, words in enumerate(pieces)]


def token_bytes(alternatives: int) -> int:
    """Bytes that PromptLogprobs has of one token."""
    return 4 * (2 + 2 * alternatives)


OVERLOADED = "overloaded"  # the code of an error that is only of now


class Output(FrozenStruct, omit_defaults=True, gc=False):
    """What a step gave a request. With `finish`, the request has ended and this is its last entry.

    `cached`, with its first tokens: how many of its prompt's were found in the prefix cache when it was first scheduled.
    `accepted` of its tokens were drafts, and `rejected` drafts were not among them.
    `prompt_logprobs` come before the first tokens, in the prompt's order, none twice. `error` is a sentence for the client, with
    `invalid` set when the request itself was at fault, and then perhaps OpenAI's short `code`; OVERLOADED: it may come again.
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
    """Pages of one KV group: `total` without the null page, `used` by running sequences, `cached` by the prefix cache alone."""

    group: str
    total: int
    used: int
    cached: int

    @property
    def usage(self) -> float:
        """Share in use; 0 of a pool without pages."""
        return self.used / self.total if self.total else 0.0


class DraftPosition(FrozenStruct):
    """How many of the first drafts (or second ones, ...) were verified, and accepted with all before them."""

    position: int
    verified: int
    accepted: int


class DraftSwitches(FrozenStruct):
    """How often the number of drafts was changed for that reason."""

    cause: str
    count: int


class Counters(msgspec.Struct):
    """The core's counts of requests and tokens since boot.

    `queried_tokens` of first-time prompts were looked up in the prefix cache, and `hit_tokens` found. `encoder_wait_s`: how long
    sequences have waited for encoders, all of them together.
    """

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
    """The core's figures, for admission and metrics; `step` is the last whose result has come.

    `evicted_pages` of the prefix cache, since boot. `drafts`: of the last step behind each sequence; none of the others without a
    drafter. `encoder_waiting`: sequences that waited for encoders in the last plan.
    They come with each step's outputs, when a plan admits a sequence, and when asked for.
    """

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
        """Rows that verified drafts."""
        return self.draft_positions[0].verified if self.draft_positions else 0

    @property
    def draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(position.verified for position in self.draft_positions)

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(position.accepted for position in self.draft_positions)

    @property
    def kv_usage(self) -> float:
        """The fuller pool's share in use."""
        return max((pool.usage for pool in self.pools), default=0.0)


class AdapterOrders(msgspec.Struct):
    """What the ranks are to do: copy adapters to slots of the device, (id, slot) each; forget adapters."""

    places: list[tuple[int, int]] = []
    drops: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.places or self.drops)


class TokenBatch(FrozenStruct, kw_only=True):
    """Core -> front: the outputs since the last one, the requests that were scheduled for the first time, what ranks are to do with
    adapters, the load figures."""

    outputs: list[Output]
    started: list[int] = []
    adapters: AdapterOrders = msgspec.field(default_factory=AdapterOrders)
    load: Load


FrontMessage = GenerateRequest | MediaPiece | MediaEnd | Abort | Control | AdapterChange

encode_message = msgspec.msgpack.Encoder().encode
decode_front_message = msgspec.msgpack.Decoder(FrontMessage).decode
decode_token_batch = msgspec.msgpack.Decoder(TokenBatch).decode


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as they cross sockets and rings: int32, little-endian. Raises OverflowError or TypeError when one is no int32."""
    return array("i", tokens).tobytes()


def frame(message: bytes) -> bytes:
    """`message` behind its little-endian u32 length; raises ValueError above MAX_MESSAGE_BYTES."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(message)) + message


class FrameReader:
    """Cuts a byte stream back into messages; feed it whatever the socket gave."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """All messages completed by `data`; raises ValueError on a length above MAX_MESSAGE_BYTES (the stream is lost then)."""
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
