"""Audio over HTTP: what each API's part becomes in the engine's request."""

import asyncio
import base64
import time
from typing import Any

import httpx
import numpy as np
import pytest

from deploy.edge.media.audio_features import CLIP_SAMPLES, RATE, log_mels, raw_rows
from deploy.edge.media.media_preparer import MediaPreparer, _MediaRequest
from deploy.edge.media.tasks import DecodeTask, Prepared
from engine.errors import InvalidRequest
from engine.protocol import GenerateRequest
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, Edges
from tests.support.media_files import sound
from tests.support.wav_files import tone, wav

pytestmark = pytest.mark.pure

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def edge(edges: Edges) -> Edge:
    return edges("e2b", max_len=4096, media=frozenset({"image", "audio"}))


def input_audio(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


def audio_url(file: bytes) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(file).decode()}"}}


def post(edge: Edge, parts: list[dict[str, Any]]) -> httpx.Response:
    body = chat_body(parts)
    return edge.post(CHAT, body)


def asked(edge: Edge, parts: list[dict[str, Any]]) -> GenerateRequest:
    reply = post(edge, parts)
    assert reply.status_code == 200, reply.text
    return edge.core.requests[-1]


def soft_tokens(edge: Edge, request: GenerateRequest) -> list[int]:
    """Positions of what stands for audio, its markers apart."""
    return [place for place, token in enumerate(request.tokens) if token == edge.text.control_id("<|audio|>")]


@pytest.mark.parametrize(("codec", "form"), [("libmp3lame", "mp3"), ("flac", "flac"), ("libopus", "ogg"), ("aac", "ipod")])
def test_other_formats_reach_it_too(edge: Edge, codec: str, form: str) -> None:
    """What the part calls it decides nothing; of FLAC they are the WAV's frames to the bit."""
    [item] = asked(edge, [input_audio(sound(tone(48_000, 440), codec, form, 48_000))]).media
    [plain] = asked(edge, [input_audio(wav(tone(48_000, 440), rate=48_000))]).media
    assert abs(item.length - plain.length) <= 1
    assert (item.data == plain.data) == (codec == "flac")


@pytest.mark.parametrize("part", [input_audio, audio_url])
def test_a_clip_reaches_the_engine(edge: Edge, part: Any) -> None:
    """Its log-mels, and the positions of its soft tokens, which see no others both ways; markers stand around them."""
    sound = tone(RATE, 440)
    before, after = ({"type": "text", "text": text} for text in ("What is", "this?"))
    request = asked(edge, [before, part(wav(sound, 32, code=3)), after])
    [item] = request.media
    assert (item.kind, item.spans, item.shape, item.length) == ("audio", (), (99, 128), 25)
    assert np.array_equal(np.frombuffer(item.data, np.float32).reshape(item.shape), log_mels(sound))
    assert soft_tokens(edge, request) == list(range(item.first, item.end))
    around = [request.tokens[item.first - 1], request.tokens[item.end]]
    assert around == [edge.text.control_id("<|audio>"), edge.text.control_id("<audio|>")]


def test_a_responses_clip_is_a_chats(edge: Edge) -> None:
    """The same item by another protocol; of another sound another digest."""
    items = asked(edge, [input_audio(wav(tone(RATE, 440)))]).media
    content = [{"type": "input_audio", "input_audio": input_audio(wav(tone(RATE, 440)))["input_audio"]}]
    body = {"model": "nano", "input": [{"role": "user", "content": content}]}
    reply = edge.post(RESPONSES, body)
    assert reply.status_code == 200, reply.text
    assert edge.core.requests[-1].media == items
    assert reply.json()["usage"]["input_tokens_details"]["audio_tokens"] == 25
    assert asked(edge, [input_audio(wav(tone(RATE, 441)))]).media[0].digest != items[0].digest


def test_what_is_longer_than_30_s_becomes_several_clips(edge: Edge) -> None:
    """One behind the other, each between markers of its own, and the usage says how many; the 12B takes all of it as one."""
    sound = np.random.default_rng(0).standard_normal(70 * RATE, dtype=np.float32)
    file = wav(sound, 32, code=3, rate=RATE)
    reply = post(edge, [input_audio(file)])
    request = edge.core.requests[-1]
    assert len(request.media) == 3
    assert soft_tokens(edge, request) == [place for item in request.media for place in range(item.first, item.end)]
    assert all(item.length <= 750 for item in request.media)
    assert len({item.digest for item in request.media}) == 3, "a clip must not be taken for another one of its sound"
    assert np.array_equal(np.frombuffer(request.media[0].data, np.float32)[:128], log_mels(sound[:CLIP_SAMPLES])[0])
    assert reply.json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "audio_tokens": sum(item.length for item in request.media),
        "audio_clips": 3,
    }
    with edge.configured(row_samples=640):
        [item] = asked(edge, [input_audio(file)]).media
    assert item.length == 70 * 25
    assert np.array_equal(np.frombuffer(item.data, np.float32).reshape(item.shape), raw_rows(sound, 640))


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"MThd" + bytes(64), "audio 1: it is not WAV, MP3"),
        (b"ID3\x04" + bytes(64), "audio 1: it cannot be decoded: Invalid data found"),
        (wav(np.zeros(2 * 3600 * 600, np.float32), 8, rate=1000), "it has 4320 s of audio; at most 900 are read"),
        (wav(tone(RATE, 440)[:160]), "it has 160 samples"),
    ],
)
def test_what_cannot_be_read_is_refused(edge: Edge, file: bytes, why: str) -> None:
    """By name, within a second of CPU, and nothing reaches the engine."""
    before, began = len(edge.core.requests), time.process_time()
    reply = post(edge, [input_audio(file)])
    assert time.process_time() - began < 1
    assert why in error_of(reply, 400)["message"]
    assert len(edge.core.requests) == before


def test_a_model_without_audio_says_so(edge: Edge) -> None:
    """26B and 31B have no encoder for it."""
    with edge.configured(media_kinds=frozenset({"image", "video"})):
        reply = post(edge, [input_audio(wav(tone(RATE, 440)))])
    assert "this model reads no audio" in error_of(reply, 400)["message"]


@pytest.mark.parametrize("takes_s", [3.0, 3.1])
def test_media_of_a_request_share_its_time(takes_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 s the first clip takes 3: the next one may take the second that is left. Of less than a second none is begun."""
    allowed = []

    def prepare(_: object, task: DecodeTask, source: bytes) -> Prepared:
        allowed.append(task.cpu_s)
        return Prepared(kind="audio", shape=(1,), data=source, digest=b"", text="", runs=1, clips=(), cpu_s=takes_s)

    monkeypatch.setattr("deploy.edge.media.media_preparer.prepare", prepare)
    preparer, request = MediaPreparer(), _MediaRequest("client", left_s=4.0)

    async def decoded() -> None:
        await preparer._decoded(request, DecodeTask(kind="audio"), lambda: b"clip")

    asyncio.run(decoded())
    if takes_s == 3.0:
        asyncio.run(decoded())
    with pytest.raises(InvalidRequest, match="those before it took them"):
        asyncio.run(decoded())
    assert allowed == ([4, 1] if takes_s == 3.0 else [4])
