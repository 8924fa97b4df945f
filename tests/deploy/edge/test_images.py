"""Images and videos over HTTP: what each API's part becomes in the engine's request, and what is refused."""

import base64
import gc
import re
import subprocess
import urllib.parse
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deploy.edge.admission_control import AdmissionControl, AdmissionTicket
from deploy.edge.edge_settings import MediaSettings
from deploy.edge.media.base64_reader import unbase64
from deploy.edge.media.tasks import DecodeTask, prepare
from deploy.edge.processes.side_pool import SidePool
from engine.errors import InvalidRequest
from engine.front.generation import Job
from engine.front.text import expanded
from engine.protocol import GenerateRequest
from tests.support.edge.api_client import chat_body, error_of, user
from tests.support.edge.http_edge import Edge, Edges, until
from tests.support.media_files import saved

pytestmark = pytest.mark.cpu

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def edge(edges: Edges) -> Edge:
    return edges(max_len=4096, media=frozenset({"image", "video"}))


def png(height: int, width: int, seed: int = 0) -> bytes:
    raster = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return saved(Image.fromarray(raster), "PNG")


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def asked(edge: Edge, parts: list[dict[str, Any]], **more: Any) -> GenerateRequest:
    body = chat_body(parts, **more)
    reply = edge.post(CHAT, body)
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
    body = chat_body(parts)
    usage = edge.post(CHAT, body).json()["usage"]
    request = edge.core.requests[-1]
    assert usage["prompt_tokens"] == len(request.tokens)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": sum(item.length for item in request.media)}


def anthropics(source: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image", "source": source}


BLUE = saved(Image.new("RGB", (60, 90), "blue"), "PNG")
BASE64 = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(BLUE).decode()}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESPONSES_CALL = [
    user("Go"),
    {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "a"},
]
ASKS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [user([image_url(BLUE)])]}),
    (CHAT, {"messages": [user("Go"), {"role": "assistant", "tool_calls": [CALL]},
                         {"role": "tool", "tool_call_id": "a", "content": [image_url(BLUE)]}]}),
    (CHAT, {"messages": [user([{"type": "image_url", "image_url": {"url": data_url(BLUE).replace(";", "; ")}}])]}),
    ("/v1/responses", {"input": [user([{"type": "input_image", "image_url": data_url(BLUE)}])]}),
    (CHAT, {"messages": [user([{"type": "input_image", "image_url": data_url(BLUE)}])]}),
    ("/v1/responses", {"input": [user([image_url(BLUE)])]}),
    ("/v1/responses", {"input": [*RESPONSES_CALL, {"type": "function_call_output", "call_id": "a",
                                                   "output": [{"type": "input_image", "image_url": data_url(BLUE)}]}]}),
    ("/v1/messages", {"max_tokens": 9, "messages": [user([anthropics(BASE64)])]}),
    ("/v1/messages", {"max_tokens": 9, "messages": [
        user([anthropics({"type": "url", "url": data_url(BLUE)})])]}),
    ("/v1/messages", {"max_tokens": 9, "messages": [
        user("Go"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        user([{"type": "tool_result", "tool_use_id": "a", "content": [anthropics(BASE64)]}])]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_every_api_sends_the_same_item(edge: Edge, path: str, body: dict[str, Any]) -> None:
    """Of a user's turn and of what a tool gave."""
    reply = edge.post(path, {"model": "nano", **body})
    assert reply.status_code == 200, reply.text
    [item] = edge.core.requests[-1].media
    assert np.unique(np.frombuffer(item.data, np.uint8).reshape(-1, 3), axis=0).tolist() == [[0, 0, 255]]
    assert item.shape == (480, 288, 3)


@pytest.mark.parametrize("length", [99, 100, 101])
def test_every_base64_is_the_same_bytes(length: int) -> None:
    """As web pages, mail and URLs write it. Planted: what is of no alphabet is left out, as Python does by itself."""
    data = b"\xfb\xff" * 9 + BLUE[:length]
    plain = base64.b64encode(data)
    url_safe, quoted = base64.urlsafe_b64encode(data), urllib.parse.quote(plain, safe="").encode()
    lines = base64.encodebytes(data).replace(b"\n", b"\r\n")
    for text in (plain, plain.rstrip(b"="), lines, url_safe, url_safe.rstrip(b"="), quoted):
        assert unbase64(text) == data
    for text in (url_safe, quoted):
        left = text.translate(None, b"-_%=")
        assert base64.b64decode(left[: len(left) // 4 * 4]) != data


@pytest.mark.parametrize(
    ("more", "keys", "tokens"),
    [({"detail": "low"}, {}, 64), ({"detail": "high"}, {}, 1089), ({"detail": "auto"}, {}, 121), ({}, {}, 121),
     ({"detail": "low"}, {"mm_processor_kwargs": {"max_soft_tokens": 560}}, 529)],
)  # fmt: skip
def test_detail_is_a_budget(edge: Edge, more: dict[str, Any], keys: dict[str, Any], tokens: int) -> None:
    """low: 70, high: 1120, auto: what does not shrink it; max_soft_tokens: exactly that, whatever the parts say."""
    [item] = asked(edge, [image_url(png(500, 500), **more)], **keys).media
    assert item.length == tokens


def test_the_setting_holds_budgets_down(edge: Edge) -> None:
    """detail: high gets no more than the server allows."""
    with edge.configured(media=MediaSettings(max_soft_tokens=280)):
        assert asked(edge, [image_url(png(500, 500), detail="high")]).media[0].length == 256


def test_ids_are_transformers(edge: Edge) -> None:
    """Its processor's texts for the template's placeholders, tokenized as a whole; a message that writes one itself has only its
    characters."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    words = [{"type": "text", "text": "A <|image|>? "}, {"type": "text", "text": "<|image>"}]
    request = asked(edge, [words[0], image_url(png(48, 96), detail="low"), image_url(png(96, 48), detail="low"), words[1]])
    folder = edge.folder
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    processor = Gemma4Processor.__new__(Gemma4Processor)
    processor.boi_token, processor.image_token, processor.eoi_token = "<|image>", "<|image|>", "<image|>"
    counts = {"num_soft_tokens_per_image": [item.length for item in request.media]}
    images = [processor.replace_image_token(counts, place) for place in range(2)]
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("<bos><|turn>user\n", "<turn|>\n<|turn>model\n"))
    plain = [edge.text._plain(word["text"], "messages", 1 << 20) for word in words]
    expected = [*before, *plain[0], *tokenizer.encode("".join(images), add_special_tokens=False), *plain[1], *after]
    assert list(request.tokens)[: len(expected)] == expected
    assert [item.first for item in request.media] == [len(before) + len(plain[0]) + 1, request.media[0].end + 2]


def test_choices_wait_with_the_bytes_of_their_media(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three choices count an image's bytes three times, where room is made and where the ticket is settled."""
    counted = []
    settle, make_room = AdmissionTicket.settle, AdmissionControl.make_room

    def settled(ticket: AdmissionTicket, choices: int, tokens: int, media: int) -> None:
        counted.append((choices, media))
        settle(ticket, choices, tokens, media)

    async def made(admission: AdmissionControl, client: str, choices: int, tokens: int, media: int) -> None:
        counted.append((choices, media))
        await make_room(admission, client, choices, tokens, media)

    monkeypatch.setattr(AdmissionTicket, "settle", settled)
    monkeypatch.setattr(AdmissionControl, "make_room", made)
    [item] = asked(edge, [image_url(png(96, 96))]).media
    asked(edge, [image_url(png(96, 96))], n=3)
    assert counted == [(1, len(item.data))] * 2 + [(3, 3 * len(item.data))] * 2


def test_tokens_are_counted_with_images(edge: Edge) -> None:
    """/tokenize and count_tokens say what a request would have."""
    parts = [image_url(png(100, 100))]
    for extra in ({}, {"mm_processor_kwargs": {"max_soft_tokens": 280}}):
        tokens = asked(edge, parts, **extra).tokens
        tokenized = edge.post("/tokenize", {"messages": [user(parts)], **extra}).json()
        assert tokenized["tokens"] == list(tokens)
    body = chat_body([anthropics(BASE64)])
    counted = edge.post("/v1/messages/count_tokens", body).json()
    edge.post("/v1/messages", {"max_tokens": 1, **body})
    assert counted == {"input_tokens": len(edge.core.requests[-1].tokens)}


REFUSED: list[tuple[str, list[dict[str, Any]], str]] = [
    ("no url", [{"type": "image_url"}], "needs its data, or a URL"),
    ("file", [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "or a URL (data:, http: or https:)"),
    ("not base64", [{"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}}], "base64"),
    ("detail", [image_url(BLUE, detail="medium")], "detail: Invalid enum value 'medium', not one of auto, high, low, original"),
    ("unknown", [{"type": "hologram_url"}], "not supported"),
    ("one too many", [{"type": "image_url", "image_url": {"url": data_url(BLUE[:99]) + "A"}}], "its base64 is damaged"),
    ("odd character", [{"type": "image_url", "image_url": {"url": data_url(BLUE).replace(",", ",!")}}], "its base64 is damaged"),
    ("truncated", [image_url(saved(Image.new("RGB", (99, 99)), "JPEG")[:500])], "image 1: it cannot be decoded"),
    ("second", [image_url(BLUE), image_url(b"<svg/>")], "image 2: it is not one of"),
    ("too many", [image_url(BLUE)] * 33, "at most 32"),
    ("ten thousand", [image_url(BLUE[:20])] * 10_000, "length <= 1024"),
]


@pytest.mark.parametrize(("parts", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_read_is_the_clients_error(edge: Edge, parts: list[dict[str, Any]], says: str) -> None:
    """400 with the reason and the key; the engine hears nothing."""
    edge.core.requests.clear()
    reply = edge.post(CHAT, chat_body(parts))
    assert says in error_of(reply, 400)["message"]
    assert reply.json()["error"]["param"] == "messages"
    assert not edge.core.requests


@pytest.mark.parametrize(("path", "key", "part"), [
    ("/v1/messages", "messages", anthropics({"type": "base64", "media_type": "image/png"})),
    ("/v1/messages", "messages", anthropics({"type": "file", "file_id": "a"})),
    ("/v1/responses", "input", {"type": "input_image", "file_id": "a"}),
    (CHAT, "messages", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
])  # fmt: skip
def test_what_holds_nothing_is_told_so(edge: Edge, path: str, key: str, part: dict[str, Any]) -> None:
    """By its place, and that no file is kept here to which it could refer."""
    limit = {"max_tokens": 9} if path == "/v1/messages" else {}
    reply = edge.post(path, {"model": "nano", key: [user([part])], **limit})
    says = rf"{key}\[0\]\.content\[0\]: the (image|audio) needs its data, or a URL .*; no files are kept here"
    assert re.fullmatch(says, error_of(reply, 400)["message"])


def test_a_model_without_a_tower_says_so(edge: Edge) -> None:
    """And one without audio."""
    with edge.configured(media_kinds=frozenset()):
        body = chat_body([image_url(BLUE)])
        assert "this model reads no images" in edge.post(CHAT, body).json()["error"]["message"]


def test_a_template_without_a_place_for_it_says_so(edge: Edge) -> None:
    """A system message's images, say, which Google's template leaves out: no image is lost in silence."""
    with pytest.raises(InvalidRequest, match="no place for media"):
        expanded("<|turn>user\n<|image|><turn|>", [("image", "x"), ("image", "y")])


def test_the_side_process_is_started_again(edge: Edge) -> None:
    """Whoever kills it costs others nothing."""
    asked(edge, [image_url(BLUE)])
    process = edge.service.media_preparer.pool._process
    assert process is not None
    process.kill()
    process.wait()
    assert asked(edge, [image_url(BLUE)]).media


def test_what_takes_too_long_is_ended(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that never comes back, after its time, with the limits; the next image is read."""
    slow = (
        "from deploy.edge.media import media_process as one; from itertools import repeat; "
        "one._PREPARERS['image'] = lambda task, data: all(repeat(1)) if task.budget == 70 else one.prepare_image(task, data); "
        "one.fork_for_each(one._warm_up)"
    )
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start([command[0], "-c", slow, command[-1]], **more))
    pool, blue = SidePool("deploy.edge.media.media_process"), base64.b64encode(BLUE)
    try:
        with pytest.raises(InvalidRequest, match="too much time or memory to fetch or decode: 1 s of CPU and 448 MiB"):
            prepare(pool, DecodeTask(budget=70, cpu_s=1), blue)
        assert prepare(pool, DecodeTask(budget=140), blue).shape
    finally:
        pool.close()


def test_media_of_a_request_fit_its_message(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine could not be sent is refused with advice."""
    monkeypatch.setattr("deploy.edge.media.media_preparer.MAX_MEDIA_BYTES", 500_000)
    assert asked(edge, [image_url(BLUE, detail="low")])
    body = chat_body([image_url(BLUE)] * 2)
    reply = edge.post(CHAT, body)
    assert "a lower detail" in error_of(reply, 400)["message"]


def test_an_answer_keeps_no_media(edge: Edge) -> None:
    """Once the engine has them, the edge lets go: while an answer streams, none of its rasters is left."""
    edge.reset()
    edge.core.answer_endlessly(0.02)
    body = chat_body([image_url(BLUE)], stream=True)
    with edge.stream(CHAT, body) as reply:
        next(reply.iter_raw())
        size = len(edge.core.requests[-1].media[0].data)
        edge.core.requests.clear()
        until(lambda: not [one for one in gc.get_objects() if type(one) is Job and one.media], "nothing is kept")
    edge.reset()
    assert size == 480 * 288 * 3


@pytest.mark.parametrize("kind", ["image/gif", "video/jpeg"])
def test_a_videos_frames_are_spans_of_one_item(edge: Edge, kind: str) -> None:
    """With its times as text between them; the usage counts its soft tokens alone."""
    frames = [Image.new("RGB", (160, 90), colour) for colour in ("red", "lime", "blue")]
    listed = ",".join(base64.b64encode(saved(frame, "JPEG")).decode() for frame in frames)
    url = f"data:{kind};base64,{listed}" if kind == "video/jpeg" else data_url(
        saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=1000), kind
    )
    body = chat_body([{"type": "video_url", "video_url": {"url": url}}])
    usage = edge.post(CHAT, body).json()["usage"]
    request = edge.core.requests[-1]
    [item] = request.media
    rows, columns = item.shape[1] // 48, item.shape[2] // 48
    assert (item.kind, item.shape[0], [end - begin for begin, end in item.spans]) == ("video", 3, [rows * columns] * 3)
    assert (item.first, item.end) == (item.spans[0][0], item.spans[-1][1])
    between = edge.text.decode(list(request.tokens[item.spans[0][1] : item.spans[1][0]]), skip_special_tokens=False)
    assert between == f"<image|> 00:0{1 if kind == 'image/gif' else 0} <|image>"
    assert usage["prompt_tokens_details"]["video_tokens"] == 3 * rows * columns
