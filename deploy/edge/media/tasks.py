"""What a side process is asked to do, and what it answers, over a socket for each task.

    edge --> process    the length of a task (u32, little-endian), the task as msgpack, its source up to the end
    process --> edge    an answer as msgpack (Prepared, or why it cannot be done, for the client)
"""

import struct
from typing import get_args

import msgspec

from deploy.edge.edge_settings import MediaSettings, SoftTokens
from deploy.edge.side_pool import SidePool
from engine.errors import InvalidRequest
from engine.protocol import FrozenStruct, MediaKind

FRAMES_TYPE = "video/jpeg"  # frames in base64, with commas between them
BUDGETS: tuple[int, ...] = get_args(SoftTokens)


class DecodeTask(MediaSettings, kw_only=True):
    """Decode a source, base64 of a media type or where `is_remote` a URL, and make of it what the encoder gets.

    `budget`: soft tokens of an image at most, None: as few as do not shrink it, up to `max_soft_tokens`. `row_samples`: of each row
    of audio, 0: it is log-mel frames.
    """

    kind: MediaKind = "image"
    media_type: str = ""
    is_remote: bool = False
    budget: int | None = None
    row_samples: int = 0


class Prepared(FrozenStruct, kw_only=True):
    """A medium as MediaItem has it (`kind`, `shape`, `data`, `digest`), and `text`, which stands for it in the prompt.

    `runs`: of soft tokens in the text. Each is a span or, of audio, a clip: `clips` are their rows.
    """

    kind: MediaKind
    shape: tuple[int, ...]
    data: bytes
    digest: bytes
    text: str
    runs: int
    clips: tuple[int, ...]


CPU_S: dict[MediaKind, int] = {"image": 2, "video": 20, "audio": 10}  # that a process may take
MEMORY_BYTES = 448 << 20  # that it may take beside its libraries
LENGTH = struct.Struct("<I")

encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(DecodeTask).decode
decode_answer = msgspec.msgpack.Decoder(Prepared | str).decode


def prepare(pool: SidePool, task: DecodeTask, source: bytes) -> Prepared:
    """What a process makes of it. Blocks. InvalidRequest: it cannot, or takes too much; Overloaded: there is no process."""
    message = encode(task)
    answer = pool.run(LENGTH.pack(len(message)) + message, source)
    if answer is None:
        raise InvalidRequest(
            "it takes too much time or memory to fetch or decode: "
            f"{CPU_S[task.kind]} s of CPU and {MEMORY_BYTES >> 20} MiB at most"
        )
    decoded = decode_answer(answer)
    if isinstance(decoded, str):
        raise InvalidRequest(decoded)
    return decoded
