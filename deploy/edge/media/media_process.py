"""`python -m deploy.edge.media.media_process FD`: the side process that fetches and decodes."""

import importlib
import socket
from collections.abc import Callable

import numpy as np
from PIL import Image

from deploy.edge.media.audio_features import RATE, log_mels
from deploy.edge.media.base64_reader import unbase64
from deploy.edge.media.clips import prepare_audio
from deploy.edge.media.fetching import fetched
from deploy.edge.media.rasters import CELL, prepare_image, resized
from deploy.edge.media.tasks import CPU_S, FRAMES_TYPE, LENGTH, MEMORY_BYTES, DecodeTask, Prepared, decode_task, encode
from deploy.edge.media.videos import prepare_video
from deploy.edge.side_process import begin, fork_for_each
from engine.errors import InvalidRequest
from engine.protocol import MediaKind

_PREPARERS: dict[MediaKind, Callable[[DecodeTask, bytes], Prepared]] = {
    "image": prepare_image,
    "video": prepare_video,
    "audio": prepare_audio,
}


def _warm_up() -> Callable[[socket.socket], None]:
    """Load what would else be loaded in every process."""
    importlib.import_module("torch").set_num_threads(1)
    Image.init()
    resized(Image.new("RGBA", (9, 9)), (CELL, CELL))
    log_mels(np.zeros(RATE, np.float32))
    return _serve


def _serve(connection: socket.socket) -> None:
    with connection.makefile("rb") as stream:
        (length,) = LENGTH.unpack(stream.read(LENGTH.size))
        task = decode_task(stream.read(length))
        begin(connection, CPU_S[task.kind], MEMORY_BYTES)
        answer = _answer(task, stream.read())
    connection.sendall(encode(answer))


def _answer(task: DecodeTask, source: bytes) -> Prepared | str:
    try:
        if task.is_remote:
            source = fetched(source.decode(), task)
        elif task.media_type != FRAMES_TYPE:
            source = unbase64(source)
        return _PREPARERS[task.kind](task, source)
    except InvalidRequest as error:
        return str(error)
    except MemoryError:
        return "it takes too much memory to decode"
    except Exception as error:  # noqa: BLE001 - decoders raise anything at all at what is damaged
        return f"it cannot be decoded: {getattr(error, 'strerror', None) or error}"


if __name__ == "__main__":
    fork_for_each(_warm_up)
