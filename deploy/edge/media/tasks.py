"""What a side process is asked to do, and what it answers, over a socket for each task.

    edge --> process    the length of a task (u32, little-endian), the task as msgpack, its source up to the end
    process --> edge    an answer as msgpack (Fetched, Prepared, or why it cannot be done, for the client)
"""

import hashlib
import struct
from typing import TypeVar, get_args

import msgspec

from deploy.edge.edge_settings import MediaSettings, SoftTokens
from deploy.edge.side_pool import SidePool
from engine.errors import InvalidRequest
from engine.protocol import FrozenStruct, MediaKind

FRAMES_TYPE = "video/jpeg"  # frames in base64, with commas between them
BUDGETS: tuple[int, ...] = get_args(SoftTokens)

T = TypeVar("T", bound=msgspec.Struct)


class DecodeTask(MediaSettings, kw_only=True):
    """Fetch a source that `is_remote`, which is a URL; or decode one, and make of it what the encoder gets.

    A source is base64, but for a fetched file, whose `media_type` is None. `cpu_s`: that the process may take.
    `budget`: soft tokens of an image at most, None: as few as do not shrink it, up to `max_soft_tokens`. `row_samples`: of each row
    of audio, 0: it is log-mel frames.
    """

    kind: MediaKind = "image"
    media_type: str | None = ""
    is_remote: bool = False
    cpu_s: int = 2
    budget: int | None = None
    row_samples: int = 0


class Fetched(FrozenStruct):
    """The file at a URL."""

    data: bytes


class Prepared(FrozenStruct, kw_only=True):
    """A medium as MediaItem has it (`kind`, `shape`, `data`, `digest`), and `text`, which stands for it in the prompt.

    `runs`: of soft tokens in the text. Each is a span or, of audio, a clip: `clips` are their rows. `cpu_s`: that it took.
    """

    kind: MediaKind
    shape: tuple[int, ...]
    data: bytes
    digest: bytes
    text: str
    runs: int
    clips: tuple[int, ...]
    cpu_s: float = 0.0


def digest_of(kind: MediaKind, shape: tuple[int, ...], data: bytes) -> bytes:
    """The name of what an encoder gets: equal bytes of another kind or shape have another name."""
    digest = hashlib.sha256(f"{kind}:{shape}:".encode())
    digest.update(data)
    return digest.digest()


CPU_S: dict[MediaKind, int] = {"image": 2, "video": 20, "audio": 10}  # that a process may take
REQUEST_CPU_S = 40  # that all media of a request may take
NICENESS = 10  # of the side process: ranks, core and streams go first
MEMORY_BYTES = 448 << 20  # that it may take beside its libraries
LENGTH = struct.Struct("<I")

encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(DecodeTask).decode
_decode_file = msgspec.msgpack.Decoder(Fetched | str).decode
_decode_medium = msgspec.msgpack.Decoder(Prepared | str).decode


def fetch(pool: SidePool, task: DecodeTask, url: bytes) -> bytes:
    """The file at a URL. Blocks. InvalidRequest: it cannot be fetched; Overloaded: there is no process."""
    return _done(_decode_file(_answer(pool, task, url))).data


def prepare(pool: SidePool, task: DecodeTask, source: bytes) -> Prepared:
    """What a process makes of it. Blocks. InvalidRequest: it cannot, or takes too much; Overloaded: there is no process."""
    return _done(_decode_medium(_answer(pool, task, source)))


def _answer(pool: SidePool, task: DecodeTask, source: bytes) -> bytes:
    message = encode(task)
    answer = pool.run(LENGTH.pack(len(message)) + message, source)
    if answer is None:
        raise InvalidRequest(
            "it takes too much time or memory to fetch or decode: "
            f"{task.cpu_s} s of CPU and {MEMORY_BYTES >> 20} MiB at most"
        )
    return answer


def _done(answer: T | str) -> T:
    if isinstance(answer, str):
        raise InvalidRequest(answer)
    return answer
