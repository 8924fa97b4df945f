"""`python -m deploy.edge.media.side_process FD`: forks a process for each task that comes, which is bounded and can do no harm.

    edge --a socket for each task--> this --fork--> a process: reads its task, answers, and is gone

What decodes was written by others, and reads what anybody sends. A process of its own has one task, CPU_S of its kind and
MEMORY_BYTES, and whatever it did ends with it. Libraries are loaded once, before any fork. It ends when the edge closes its end.
"""

import gc
import importlib
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from deploy.edge.media.base64_reader import unbase64
from deploy.edge.media.clips import prepare_audio
from deploy.edge.media.fetching import fetched
from deploy.edge.media.rasters import CELL, prepare_image, resized
from deploy.edge.media.tasks import BEGUN, CPU_S, FRAMES_TYPE, LENGTH, MEMORY_BYTES, DecodeTask, Prepared, decode_task, encode
from deploy.edge.media.videos import prepare_video
from engine.errors import InvalidRequest
from engine.front.audio_features import RATE, log_mels
from engine.protocol import MediaKind

_PREPARERS: dict[MediaKind, Callable[[DecodeTask, bytes], Prepared]] = {
    "image": prepare_image,
    "video": prepare_video,
    "audio": prepare_audio,
}


def main() -> None:
    """Serve until the edge closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the edge's to handle
    _warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                _serve(connection)
                os._exit(0)


def _warm_up() -> None:
    """What would else be loaded in every process."""
    importlib.import_module("torch").set_num_threads(1)
    Image.init()
    resized(Image.new("RGBA", (9, 9)), (CELL, CELL))
    log_mels(np.zeros(RATE, np.float32))
    gc.freeze()  # a collection in a child would write to every page that it shares


def _serve(connection: socket.socket) -> None:
    with connection.makefile("rb") as stream:
        (length,) = LENGTH.unpack(stream.read(LENGTH.size))
        task = decode_task(stream.read(length))
        line = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert line is not None, "the kernel says what a process has"
        cpu_s, most = CPU_S[task.kind], (int(line[1]) << 10) + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        connection.sendall(BEGUN)
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
    main()
