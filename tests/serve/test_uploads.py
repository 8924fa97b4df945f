"""Large uploads and long films on a real stack, beside clients with little, who are served as in quiet."""

import asyncio
import base64
import fcntl
import json
import os
import signal
import struct
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.edge.api_client import chat_body
from tests.support.media_files import film, moving, saved
from tests.support.stack.serve_process import Stack

pytestmark = [pytest.mark.serve, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]

PICTURE = saved(Image.new("RGB", (64, 64), "blue"), "PNG")
PIECE = 64 << 10
TRIES = 40


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("uploads"), args={"tp": 1, "mtp": {}, "limits": {"upload_bytes": 256 << 20}})
    print(f"\nready after {stack.start():.1f} s")
    assert stack.chat(body([part("image", PICTURE)])).status_code == 200  # what is loaded with the first picture is there
    yield stack
    stack.clean_up()


def part(kind: str, data: bytes) -> dict[str, object]:
    """A content part with this file."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}


def body(content: object) -> dict[str, Any]:
    """Of a chat with one token to answer."""
    return chat_body(content, max_tokens=1, model="nano-31b")


def large_body(mebibytes: float) -> bytes:
    """Of about that size: a picture in a large file."""
    padding = bytes(int(mebibytes * (1 << 20)) * 3 // 4 - len(PICTURE) - 2048)
    return json.dumps(body([part("image", PICTURE + padding)])).encode()


def asked(stack: Stack, content: object, address: str, timeout_s: float = 60) -> tuple[int, float]:
    """Status and seconds of a chat that comes from this address of loopback."""
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=timeout_s) as client:
        began = time.monotonic()
        reply = client.post(f"{stack.url}/v1/chat/completions", json=body(content))
        if reply.is_error:
            print(f"\n{reply.status_code}: {reply.text[:300]}")
        return reply.status_code, time.monotonic() - began


@dataclass
class Sent:
    """What came of one try of an upload. `sent`: bytes that have left the client's kernel."""

    status: int
    sent: int
    retry_after: float


async def upload(port: int, address: str, data: bytes) -> Sent:
    """Send a body in pieces, and stop where the answer comes before its end, as an HTTP client does that looks."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), limit=1 << 20)
    try:
        writer.transport.set_write_buffer_limits(PIECE)
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode())
        first_line = asyncio.create_task(reader.readline())
        sent = 0
        await asyncio.wait({first_line}, timeout=0.02)  # the time that a 429 takes on this machine
        while sent < len(data) and not first_line.done():
            writer.write(data[sent : sent + PIECE])
            sent = min(len(data), sent + PIECE)
            await writer.drain()
        sent -= unsent(writer)
        status = int((await first_line).split()[1])
        retry_after = 1.0
        while line := (await reader.readline()).strip().lower():
            if line.startswith(b"retry-after:"):
                retry_after = float(line.partition(b":")[2])
    finally:
        writer.transport.abort()
    return Sent(status, sent, retry_after)


def unsent(writer: asyncio.StreamWriter) -> int:
    """Bytes of a connection that this machine still holds."""
    held = fcntl.ioctl(writer.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("i", held)[0]) + writer.transport.get_write_buffer_size()


async def persistent(port: int, address: str, data: bytes) -> list[Sent]:
    """All tries up to one that is not refused with 429."""
    tries = list[Sent]()
    while len(tries) < TRIES:
        tries.append(await upload(port, address, data))
        if tries[-1].status != 429:
            return tries
        await asyncio.sleep(tries[-1].retry_after)
    return tries


def go_on(stopped: list[int]) -> None:
    """Continue these processes, of which some may have ended."""
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_uploads_that_wait_for_a_decoder_refuse_no_text(stack: Stack) -> None:
    """Eight uploads of 31 MiB whose pictures nobody decodes: a text is answered at once, and once decoders go on all eight are."""
    data = large_body(31)
    assert 31 << 20 > len(data) > 30 << 20
    quiet = asked(stack, "Hello", "127.0.0.2")[1]
    decoders = stack.find("media_process")
    for pid in decoders:
        os.kill(pid, signal.SIGSTOP)

    async def both() -> tuple[list[Sent], list[tuple[int, float]]]:
        uploads = [asyncio.create_task(upload(stack.port, f"127.0.1.{number + 1}", data)) for number in range(8)]
        await asyncio.sleep(4)
        assert not any(task.done() for task in uploads)
        texts = [await asyncio.to_thread(asked, stack, "Hello", f"127.0.0.{number + 2}") for number in range(5)]
        go_on(decoders)
        return await asyncio.gather(*uploads), texts

    try:
        uploaded, texts = asyncio.run(both())
    finally:
        go_on(decoders)
    print(f"\nquiet {quiet:.3f} s, beside the uploads {[round(took, 3) for _, took in texts]}")
    assert [sent.status for sent in uploaded] == [200] * 8
    assert {status for status, _ in texts} == {200}
    assert sorted(took for _, took in texts)[2] < 2 * quiet + 0.5


def test_many_large_uploads_pass_or_are_refused_before_they_are_sent(stack: Stack) -> None:
    """24 clients with 30 MiB: every one passes, at once or after 429 with Retry-After; at most 5 % of all bytes are in vain."""
    data = large_body(30)

    async def everybody() -> list[list[Sent]]:
        return await asyncio.gather(*(persistent(stack.port, f"127.0.2.{number + 1}", data) for number in range(24)))

    tries = asyncio.run(everybody())
    refused = [sent for one in tries for sent in one[:-1]]
    wasted = sum(sent.sent for sent in refused)
    total = wasted + sum(one[-1].sent for one in tries)
    print(f"\n{len(refused)} tries were refused with 429; {wasted / total:.2%} of {total >> 20} MiB in vain")
    assert [one[-1].status for one in tries] == [200] * 24
    assert wasted <= 0.05 * total


def test_pictures_of_one_client_wait_for_room(stack: Stack) -> None:
    """A hundred bodies of 2.4 MiB at once, where one client has room for half of them: all are answered."""
    data = large_body(2.4)

    async def everybody() -> list[Sent]:
        return await asyncio.gather(*(upload(stack.port, "127.0.3.1", data) for _ in range(100)))

    assert [sent.status for sent in asyncio.run(everybody())] == [200] * 100


def test_a_body_of_films_holds_up_nobody(stack: Stack) -> None:
    """32 films in a body: another client's pictures, and 99 in 100 of its texts, take at most twice their quiet time."""
    films = [part("video", film(moving(96, 640, 480), "libx264", "mp4"))] * 32

    def times(content: object, count: int) -> list[float]:
        found = [asked(stack, content, "127.0.0.3") for _ in range(count)]
        assert {status for status, _ in found} == {200}
        return sorted(took for _, took in found)

    picture = [part("image", PICTURE)]
    quiet_pictures, quiet_texts = times(picture, 9), times("Hello", 100)
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(asked, stack, films, "127.0.3.1", 300)
        time.sleep(0.5)
        pictures, texts = times(picture, 9), times("Hello", 100)
        assert not busy.done(), "the films are too short to show anything"
        status = busy.result()[0]
    figures = [(quiet_pictures[4], pictures[4]), (quiet_texts[98], texts[98])]
    print(f"\nquiet and beside films: a picture {figures[0]}, text's p99 {figures[1]} s; the films got {status}")
    assert all(beside <= 2 * quiet for quiet, beside in figures)
