"""`python -m deploy.edge.media.media_process FD`: the side process that fetches and decodes."""

import importlib
import os
import socket
import time
from collections.abc import Callable

import msgspec
import numpy as np
from PIL import Image

from deploy.edge.media.audio_features import RATE, log_mels
from deploy.edge.media.base64_reader import unbase64
from deploy.edge.media.clips import prepare_audio
from deploy.edge.media.fetching import fetched
from deploy.edge.media.rasters import CELL, prepare_image, resized
from deploy.edge.media.tasks import FRAMES_TYPE, LENGTH, MEMORY_BYTES, NICENESS, DecodeTask, Fetched, Prepared, decode_task, encode
from deploy.edge.media.videos import prepare_video
from deploy.edge.processes.side_process import begin, fork_for_each
from engine.errors import InvalidRequest
from engine.protocol import MediaKind

_PREPARERS: dict[MediaKind, Callable[[DecodeTask, bytes], Prepared]] = {
    "image": prepare_image,
    "video": prepare_video,
    "audio": prepare_audio,
}


def _warm_up() -> Callable[[socket.socket], None]:
    """Preload for all forks, at a lower priority than serving."""
    os.nice(NICENESS)
    importlib.import_module("torch").set_num_threads(1)
    Image.init()
    resized(Image.new("RGBA", (9, 9)), (CELL, CELL))
    log_mels(np.zeros(RATE, np.float32))
    return _serve


def _serve(connection: socket.socket) -> None:
    with connection.makefile("rb") as stream:
        (length,) = LENGTH.unpack(stream.read(LENGTH.size))
        task = decode_task(stream.read(length))
        begun_s = time.process_time()
        begin(connection, task.cpu_s, MEMORY_BYTES)
        answer = _answer(task, stream.read())
    if isinstance(answer, Prepared):
        answer = msgspec.structs.replace(answer, cpu_s=time.process_time() - begun_s)
    connection.sendall(encode(answer))


def _answer(task: DecodeTask, source: bytes) -> Prepared | Fetched | str:
    try:
        if task.is_remote:
            return Fetched(fetched(source.decode(), task))
        if task.media_type not in (None, FRAMES_TYPE):
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
