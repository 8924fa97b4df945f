"""Tasks and answers of a side process, over a socket for each task.

edge --> process    the length of a task (u32, little-endian), the task as msgpack, its source up to the end
process --> edge    an answer as msgpack: Fetched, Prepared, or a reason for the client
"""

import hashlib
import struct
from typing import TypeVar, get_args

import msgspec

from deploy.edge.edge_settings import MediaSettings, SoftTokens
from deploy.edge.processes.side_pool import SidePool
from engine.errors import InvalidRequest
from engine.protocol import FrozenStruct, MediaKind

FRAMES_TYPE = "video/jpeg"  # frames in base64, with commas between them
BUDGETS: tuple[int, ...] = get_args(SoftTokens)

T = TypeVar("T", bound=msgspec.Struct)


class DecodeTask(MediaSettings, kw_only=True):
    kind: MediaKind = "image"
    media_type: str | None = ""  # None: a fetched file
    is_remote: bool = False  # a URL
    cpu_s: int = 2
    budget: int | None = None  # most soft tokens of an image; None: as needed
    row_samples: int = 0  # of audio; 0: log-mel frames


class Fetched(FrozenStruct):
    data: bytes


class Prepared(FrozenStruct, kw_only=True):
    """`text`: in the prompt, with `runs` of soft tokens."""

    kind: MediaKind
    shape: tuple[int, ...]
    data: bytes
    digest: bytes
    text: str
    runs: int
    clips: tuple[int, ...]
    cpu_s: float = 0.0


def digest_of(kind: MediaKind, shape: tuple[int, ...], data: bytes) -> bytes:
    """Equal bytes of another kind or shape have another digest."""
    digest = hashlib.sha256(f"{kind}:{shape}:".encode())
    digest.update(data)
    return digest.digest()


CPU_S: dict[MediaKind, int] = {"image": 2, "video": 20, "audio": 10}  # that a process may take
REQUEST_CPU_S = 40  # that all media of a request may take
NICENESS = 10  # of the side process: ranks, core and streams go first
MEMORY_BYTES = 448 << 20  # that it may take on top of its libraries
LENGTH = struct.Struct("<I")

encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(DecodeTask).decode
_decode_file = msgspec.msgpack.Decoder(Fetched | str).decode
_decode_medium = msgspec.msgpack.Decoder(Prepared | str).decode


def fetch(pool: SidePool, task: DecodeTask, url: bytes) -> bytes:
    """Blocks. InvalidRequest; Overloaded: there is no process."""
    return _done(_decode_file(_answer(pool, task, url))).data


def prepare(pool: SidePool, task: DecodeTask, source: bytes) -> Prepared:
    """Blocks. InvalidRequest; Overloaded."""
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
