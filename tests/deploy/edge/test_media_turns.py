"""Clients with many media beside clients with few: what a picture waits for, and what many choices of one request cost."""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from PIL import Image

from deploy.edge.media import media_preparer
from engine.front.turns import Turns
from tests.conftest import Nano
from tests.support.edge.api_client import chat_body
from tests.support.edge.edge_process import Cost, EdgeProcess
from tests.support.edge.http_edge import Edge
from tests.support.media_files import film, moving, saved

pytestmark = [pytest.mark.cpu, pytest.mark.alone]

CHAT = "/v1/chat/completions"
PICTURE = saved(Image.new("RGB", (64, 64), "blue"), "PNG")


def part(kind: str, data: bytes) -> dict[str, object]:
    url = f"data:;base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@pytest.fixture
def edge(nano: Nano) -> Iterator[Edge]:
    with Edge(nano("31b"), max_len=1 << 15, media=frozenset({"image", "video"})) as edge:
        edge.service.media_preparer._decoders = Turns(2)
        yield edge


def asked(edge: Edge, content: object, address: str, status: int = 200) -> float:
    """Seconds until the answer to a chat of a client."""
    began = time.perf_counter()
    reply = edge.post(CHAT, chat_body(content, max_tokens=1), headers={"x-forwarded-for": address})
    assert reply.status_code == status, reply.text
    return time.perf_counter() - began


@pytest.mark.parametrize("fault", [False, True])
def test_films_of_one_client_stop_no_other(edge: Edge, fault: bool) -> None:
    """A body of 32 films: another client's pictures, and its texts, take at most twice as long as in quiet and 50 ms, half of the
    times. Planted: the films and the pictures are of one client."""
    films = [part("video", film(moving(64, 640, 480), "libx264", "mp4"))] * 32
    picture = [part("image", PICTURE)]
    quiet, quiet_text = (sorted(asked(edge, content, "10.0.0.2") for _ in range(9))[4] for content in (picture, "Hello"))
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(asked, edge, films, "10.0.0.1", 400)  # all of them are too many bytes
        time.sleep(0.3)
        address = "10.0.0.1" if fault else "10.0.0.2"
        times = sorted(asked(edge, picture, address) for _ in range(1 if fault else 5))
        texts = sorted(asked(edge, "Hello", address) for _ in range(5))
        assert fault or not busy.done(), "the films are too short to show anything"
        assert (times[len(times) // 2] <= 2 * quiet + 0.05) is not fault, (times, quiet)
        assert texts[2] <= 2 * quiet_text + 0.05, (texts, quiet_text)
        busy.result()


def test_the_media_of_a_request_have_one_time_of_cpu(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for which nothing is left are refused by name. Planted: with the usual time the same pictures are read."""
    content = [part("image", PICTURE)] * 8
    asked(edge, content, "10.0.0.1")
    short = partial(media_preparer._MediaRequest, left_s=1.0)
    monkeypatch.setattr(media_preparer, "_MediaRequest", short)
    reply = edge.post(CHAT, chat_body(content, max_tokens=1))
    assert reply.status_code == 400
    assert "s of CPU, and those before it took them" in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def process(nano: Nano) -> Iterator[EdgeProcess]:
    with EdgeProcess(nano("31b"), 1 << 15) as process:
        yield process


def cost(process: EdgeProcess, n: int) -> Cost:
    """Of 26 pictures, 48 MiB of pixels, for so many choices."""
    black = part("image", saved(Image.new("RGB", (816, 768)), "PNG"))
    body = chat_body([black] * 26, max_tokens=1, n=n)
    reply, found = process.post(CHAT, body)
    assert reply.status_code == 200, reply.text
    return found


def test_choices_share_pixels(process: EdgeProcess) -> None:
    """Eight choices with 48 MiB hold the loop for 20 ms at most, as one does, and need no more memory than one and a half of it."""
    cost(process, 1)
    one = min((cost(process, 1) for _ in range(3)), key=lambda found: found.memory_mb)
    eight = min((cost(process, 8) for _ in range(4)), key=lambda found: found.loop_held_s)
    print(one, eight)
    assert eight.loop_held_s <= 0.020, eight
    assert eight.memory_mb < 1.5 * one.memory_mb + 20, (one, eight)
