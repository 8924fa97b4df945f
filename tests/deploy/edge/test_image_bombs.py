"""Images made to hurt: each is refused or read right, soon, and costs its neighbours nothing that they would notice."""

import base64
import io
import json
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from engine.front.audio_features import RATE
from tests.conftest import Nano
from tests.support.edge.edge_process import EdgeProcess
from tests.support.media_files import declared, film, many_blocks, moving, sound
from tests.support.wav_files import tone

pytestmark = [pytest.mark.cpu, pytest.mark.alone]

CHAT = "/v1/chat/completions"
CPU_S, MEMORY_MB = 1.0, 200.0
HELD_S, TOOK_S = 0.2, 2.0  # twice the bar, for a machine half as fast
LARGE = (32 << 20) - 4096
HEAD = b'{"model":"nano","max_tokens":1,"messages":[{"role":"user","content":'


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def images(data: bytes, count: int = 1) -> bytes:
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + base64.b64encode(data) + b'"}}'
    return HEAD + b"[" + b",".join([part] * count) + b"]}]}"


def media(kind: str, data: bytes) -> bytes:
    part = b'{"type":"%b_url","%b_url":{"url":"data:;base64,' % (kind.encode(), kind.encode())
    return HEAD + b"[" + part + base64.b64encode(data) + b'"}}]}]}'


def chunk(name: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")


def png(width: int, height: int, rows: bytes) -> bytes:
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def many_scans() -> bytes:
    """A progressive JPEG of 16 million black pixels whose last scan comes 2000 times more."""
    jpeg = saved(Image.new("L", (4096, 4096)), "JPEG", progressive=True)
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * 2000 + b"\xff\xd9"


@cache
def silence(*, said: bool = True) -> bytes:
    """Two hours."""
    flac = sound(np.zeros(7_200_000, np.float32), "flac", "flac", 1000)
    return flac if said else flac[:21] + bytes([flac[21] & 0xF0, 0, 0, 0, 0]) + flac[26:]


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


BLACK = Image.new("RGB", (640, 480))
# name -> body, status, seconds
BOMBS: dict[str, Callable[[], tuple[bytes, int, float]]] = {
    "an image": lambda: (images(saved(BLACK, "PNG")), 200, TOOK_S),
    "60 000 x 60 000": lambda: (images(png(60_000, 60_000, bytes(1 << 24))), 400, TOOK_S),
    "25 million black pixels": lambda: (images(png(5000, 5000, bytes(15001 * 5000))), 200, 3 * TOOK_S),
    "rows that are absent": lambda: (images(png(5000, 5000, bytes(15001))), 200, 3 * TOOK_S),
    "rows that are too many": lambda: (images(png(10, 10, bytes(1 << 27))), 200, TOOK_S),
    "texts of a PNG": lambda: (
        images(png(9, 9, bytes(28 * 9))[:-12] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27))) + chunk(b"IEND", b"")),
        400,
        TOOK_S,
    ),
    "a truncated JPEG": lambda: (images(saved(noise(480, 640), "JPEG")[:-3000]), 400, TOOK_S),
    "a JPEG of 2000 scans": lambda: (images(many_scans()), 400, TOOK_S),
    "an MP4": lambda: (media("video", film(moving(48), "libx264", "mp4")), 200, TOOK_S),
    "an MP4 of 2 h, it says": lambda: (media("video", declared(seconds=7200)), 400, TOOK_S),
    "an MP4 of 300 000 frames": lambda: (media("video", declared(frames=300_000) + bytes(1 << 20)), 400, TOOK_S),
    "an MP4 of 60 000 x 60 000, it says": lambda: (media("video", declared(side=60_000)), 200, TOOK_S),
    "a WebM of 300 000 frames": lambda: (media("video", many_blocks(300_000)), 400, TOOK_S),
    "half an MP4": lambda: (media("video", film(moving(48), "libx264", "mp4")[:-4000]), 400, TOOK_S),
    "a zip behind an MP4": lambda: (
        media("video", film(moving(48), "libx264", "mp4") + b"PK\x03\x04" + bytes(1 << 20)),
        200,
        TOOK_S,
    ),
    "a playlist in an MP4": lambda: (media("video", b"\0\0\0\x20ftypisom\n#EXTM3U\nfile:///etc/passwd\n"), 400, TOOK_S),
    "a FLAC of 2 h of silence": lambda: (media("audio", silence()), 400, TOOK_S),
    "a FLAC that does not say how long": lambda: (media("audio", silence(said=False)), 400, TOOK_S),
    "half a FLAC": lambda: (media("audio", silence()[:200_000]), 400, TOOK_S),
    "half an MP3": lambda: (media("audio", sound(tone(RATE, 440, 9.0), "libmp3lame", "mp3")[:30_000]), 200, TOOK_S),
    "an animation of 250 frames": lambda: (
        images(saved(BLACK, "GIF", save_all=True, append_images=[Image.new("L", (640, 480), at) for at in range(250)])),
        200,
        TOOK_S,
    ),
    "SVG": lambda: (images(b'<svg xmlns="http://www.w3.org/2000/svg" width="90000" height="90000"/>'), 400, TOOK_S),
    "a zip behind a PNG": lambda: (images(saved(BLACK, "PNG") + b"PK\x03\x04" + bytes(1 << 20)), 200, TOOK_S),
    "CMYK": lambda: (images(saved(BLACK.convert("CMYK"), "JPEG")), 200, TOOK_S),
    "16 bits": lambda: (images(saved(Image.fromarray(np.zeros((480, 640), np.uint16)), "PNG")), 200, TOOK_S),
    "33 images": lambda: (images(saved(BLACK, "PNG"), 33), 400, TOOK_S),
    "10 000 images": lambda: (images(saved(BLACK, "PNG")[:40], 10_000), 400, TOOK_S),
    "23 MB of noise": lambda: (images(saved(noise(2400, 3200), "PNG", compress_level=0)), 200, 3 * TOOK_S),
    "no base64": lambda: (images(b"")[:-6] + b"?" * LARGE + b'"}}]}]}', 400, TOOK_S),
    "32 MB of text": lambda: (HEAD + b'"' + b"a" * LARGE + b'"}]}', 400, TOOK_S),
    "32 MB of nothing": lambda: (HEAD + b" " * LARGE + b'"a"}]}', 400, TOOK_S),
    "32 MB of brackets": lambda: (HEAD + b"[" * LARGE + b"}]}", 400, TOOK_S),
    "32 MB of digits": lambda: (HEAD + b'"a"}],"seed":' + b"9" * LARGE + b"}", 400, TOOK_S),
    "32 MB of keys": lambda: (HEAD + b'"a"}]' + b',"n":1' * (LARGE // 6) + b"}", 400, TOOK_S),
    "32 MB of escapes": lambda: (HEAD + b'"' + b"\\u0001" * (LARGE // 6) + b'"}]}', 400, TOOK_S),
    "32 MB of two-byte characters": lambda: (HEAD + b'"' + "\u00e9".encode() * (LARGE // 2) + b'"}]}', 400, TOOK_S),
}


@pytest.fixture(scope="module")
def edge(nano: Nano) -> Iterator[EdgeProcess]:
    with EdgeProcess(nano("e2b"), 1 << 15) as edge:
        yield edge


def test_no_image_costs_much_or_holds_up_a_neighbour(edge: EdgeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """Its proper status in a second or so, for under 1 CPU second and 200 MB of the edge, whose loop is never kept for long."""
    lines, wrong = [], []
    with httpx.Client(timeout=60) as client:
        client.post(f"{edge.url}{CHAT}", content=images(saved(BLACK, "PNG")), headers={"content-type": "application/json"})
        for name, build in BOMBS.items():
            body, status, most = build()
            edge.mark()
            began = time.perf_counter()
            reply = client.post(f"{edge.url}{CHAT}", content=body, headers={"content-type": "application/json"})
            took, cost = time.perf_counter() - began, edge.cost()
            good = reply.status_code == status and (status == 200 or len(json.loads(reply.content)["error"]["message"]) < 300)
            held = cost.cpu_s > CPU_S or cost.memory_mb > MEMORY_MB or cost.loop_held_s > HELD_S or took > most
            figures = f"{took:.2f} s, {cost.cpu_s:.2f} s CPU, {cost.memory_mb:.0f} MB, loop kept {cost.loop_held_s * 1e3:.0f} ms"
            lines.append(f"{name} ({len(body) / 1e6:.1f} MB): {figures}: {reply.status_code} {reply.text[:110]}")
            wrong += [] if good and not held else [lines[-1]]
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert not wrong, "\n".join(wrong)


def test_a_decoder_in_the_edge_would_show(nano: Nano) -> None:
    """The same measure, where images are decoded in the edge's own process."""
    body, *_ = BOMBS["25 million black pixels"]()
    with EdgeProcess(nano("31b"), 1 << 15, fault="decode") as edge:
        edge.mark()
        reply = httpx.post(f"{edge.url}{CHAT}", content=body, headers={"content-type": "application/json"}, timeout=60)
        cost = edge.cost()
    assert reply.status_code == 200, reply.text
    assert cost.memory_mb > MEMORY_MB, cost
