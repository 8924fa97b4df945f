"""Images over HTTP: what each API's part becomes in the engine's request."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from engine.protocol import GenerateRequest
from tests.conftest import Nano
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def edge(nano: Nano) -> Iterator[Edge]:
    with Edge(nano("31b"), max_len=4096, media=frozenset({"image", "video"})) as running:
        yield running


def png(height: int, width: int, seed: int = 0) -> bytes:
    raster = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return saved(Image.fromarray(raster), "PNG")


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def asked(edge: Edge, parts: list[dict[str, Any]], **more: Any) -> GenerateRequest:
    body = {"model": "nano", "messages": [{"role": "user", "content": parts}], **more}
    reply = httpx.post(f"{edge.url}{CHAT}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return edge.core.requests[-1]


def test_an_image_url_reaches_the_engine(edge: Edge) -> None:
    """Its raster, the positions of its soft tokens and their span; begin and end markers stand around them."""
    request = asked(edge, [{"type": "text", "text": "What is"}, image_url(png(100, 150)), {"type": "text", "text": "this?"}])
    [item] = request.media
    assert (item.kind, item.spans, item.length) == ("image", ((item.first, item.end),), item.shape[0] * item.shape[1] // 48**2)
    assert len(item.data) == item.shape[0] * item.shape[1] * 3
    begin, soft, end = (edge.text.control_id(name) for name in ("<|image>", "<|image|>", "<image|>"))
    tokens = list(request.tokens)
    assert tokens[item.first - 1 : item.end + 1] == [begin, *[soft] * item.length, end]
    assert tokens.count(soft) == item.length


def test_soft_tokens_are_in_the_usage(edge: Edge) -> None:
    """prompt_tokens counts them, and prompt_tokens_details has them apart."""
    parts = [image_url(png(96, 96), detail="low"), image_url(png(48, 48))]
    body = {"model": "nano", "messages": [{"role": "user", "content": parts}]}
    usage = httpx.post(f"{edge.url}{CHAT}", json=body, timeout=60).json()["usage"]
    request = edge.core.requests[-1]
    assert usage["prompt_tokens"] == len(request.tokens)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": sum(item.length for item in request.media)}
