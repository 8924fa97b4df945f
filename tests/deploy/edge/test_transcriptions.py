"""POST /v1/audio/transcriptions: by OpenAI's client, and forms of every kind."""

import re
import time
from typing import Any

import httpx
import pytest

from deploy.edge.media.audio_features import RATE
from deploy.edge.openai.transcriptions import TRANSCRIPTIONS
from engine.errors import InvalidRequest
from tests.support.edge.api_client import client
from tests.support.edge.http_edge import Edge, Edges
from tests.support.wav_files import tone, wav

pytestmark = pytest.mark.pure

PATH = "/v1/audio/transcriptions"
FILE = wav(tone(RATE, 440))
TEXT = "Hello there."


@pytest.fixture(scope="module")
def running(edges: Edges) -> Edge:
    return edges("e2b", max_len=2048, media=frozenset({"audio"}))


@pytest.fixture
def edge(running: Edge) -> Edge:
    running.reset()
    running.script(TEXT)
    return running


def post(edge: Edge, headers: dict[str, str] | None = None, **form: Any) -> httpx.Response:
    files = {"file": ("a.wav", form.pop("file", FILE), "audio/wav")}
    return edge.post(PATH, data={"model": "nano", **form}, files=files, headers=headers)


def test_a_file_is_transcribed(edge: Edge) -> None:
    """Greedily and without thoughts; the usage counts the clip's tokens."""
    made = client(edge).audio.transcriptions.create(file=("a.wav", FILE), model="nano", language="de", prompt="A greeting.")
    assert made.text == TEXT
    [request] = edge.core.requests
    prompt = edge.prompt_text()
    assert "Transcribe the following speech segment in the language de." in prompt
    assert "Context: A greeting." in prompt
    assert "<|think|>" not in prompt
    assert request.params.temperature == 0
    assert [item.kind for item in request.media] == ["audio"]
    usage = made.usage
    assert usage is not None
    assert usage.type == "tokens"
    assert usage.input_token_details is not None
    assert (usage.input_tokens, usage.input_token_details.audio_tokens) == (len(request.tokens), request.media[0].length)


def test_it_streams(edge: Edge) -> None:
    """Deltas that make up the text, and the text at the end."""
    stream = client(edge).audio.transcriptions.create(file=("a.wav", FILE), model="nano", stream=True, temperature=0.5)
    events = list(stream)
    assert "".join(event.delta for event in events[:-1] if event.type == "transcript.text.delta") == TEXT
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == TEXT
    assert edge.core.requests[-1].params.temperature == 0.5


def test_vllms_sampling_parameters_are_a_chats(edge: Edge) -> None:
    """By the same names, as texts of the form; what is out of range is refused by name."""
    form = {"seed": "7", "top_p": "0.5", "top_k": "3", "repetition_penalty": "1.5", "max_completion_tokens": "2", "stop": "ll"}
    assert post(edge, **form).json()["text"] == "He"
    params = edge.core.requests[0].params
    assert (params.seed, params.top_p, params.top_k, params.max_tokens, params.temperature) == (7, 0.5, 3, 2, 0)
    assert params.adjustments is not None
    assert post(edge, top_p="2").json()["error"]["param"] == "top_p"


def test_text_is_text(edge: Edge) -> None:
    """With response_format text the answer is the text, and says so."""
    reply = post(edge, response_format="text")
    assert (reply.text, reply.headers["content-type"]) == (TEXT, "text/plain; charset=utf-8")
    assert post(edge).headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response_format", "verbose_json"),
        ("response_format", "srt"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities", "word"),
        ("temperature", "3"),
        ("stream", "perhaps"),
        ("prompt", "x" * 5000),
        ("file", b"fLaC" + bytes(64)),
        ("file", b""),
        ("model", "whisper-1"),
    ],
)
def test_what_cannot_be_done_is_refused(edge: Edge, key: str, value: Any) -> None:
    """By the form's own key, and the engine hears nothing."""
    reply = post(edge, **{key: value})
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == key, reply.text
    assert edge.core.requests == []


def form_of(*fields: tuple[str, bytes], boundary: bytes = b"x") -> bytes:
    head = b'Content-Disposition: form-data; filename="f"; name="%b"\r\n\r\n%b'
    parts = [head % (name.encode(), value) for name, value in fields]
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


GOOD = form_of(("model", b"nano"), ("file", FILE))


@pytest.mark.parametrize(
    "body", [b"", b"{}", GOOD[:-9], GOOD[: len(GOOD) // 2], GOOD.replace(b"name=", b"eman="), form_of(*[("a", b"")] * 40),
             form_of(("model", b"\xff"), ("file", FILE)), form_of(("model", b"m" * 70_000), ("file", FILE))]
)  # fmt: skip
def test_what_is_no_form_is_refused(edge: Edge, body: bytes) -> None:
    """Cut ones, ones of many fields, and bytes where there should be text; a whole one is not."""
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert edge.post(PATH, content=body, headers=headers).status_code == 400
    assert edge.core.requests == []
    assert edge.post(PATH, content=GOOD, headers=headers).json()["text"] == TEXT


@pytest.mark.parametrize(
    "body",
    [(b"\n--" + b"a" * 70) * 450_000, b"--x" + (b"\r\ncontent-disposition:" + b";a" * 490) * 32_000 + b"\r\n--x--"],
    ids=["boundaries", "names"],
)
def test_no_form_keeps_the_interpreter(body: bytes) -> None:
    """32 MB of what begins like a boundary, or like a field's name; the quicker of two, as the first may wait for memory."""
    taken = []
    for _ in range(2):
        begun = time.process_time()
        with pytest.raises(InvalidRequest):
            TRANSCRIPTIONS.reader.read(body)
        taken.append(time.process_time() - begun)
    assert min(taken) < 0.25


def test_a_recording_in_another_field_is_told_where_it_belongs(edge: Edge) -> None:
    """The error names the field that a recording is; no error repeats a field's name that a client made up."""
    for value in (b"\xff", b"m" * 70_000):
        body = form_of(("model", b"nano"), ("audio", value))
        error = edge.post(PATH, content=body, headers={"content-type": "multipart/form-data; boundary=x"}).json()["error"]
        assert (error["param"], error["message"]) == ("file", "file: is required")


@pytest.mark.parametrize(
    "body", [b"\r\n" + GOOD, b"It has several parts.\r\n" + GOOD, re.sub(rb'name="(\w+)"', rb"name=\1", GOOD),
             GOOD.replace(b'filename="f"', b'filename="f; name=g"')]
)  # fmt: skip
def test_forms_are_read_as_others_write_them(edge: Edge, body: bytes) -> None:
    """With something before the first boundary, names without quotes as .NET's, and a file's name that looks like one."""
    headers = {"content-type": "multipart/form-data; boundary=x"}
    reply = edge.post(PATH, content=body, headers=headers)
    assert reply.status_code == 200, reply.text


def test_a_file_may_hold_what_looks_like_a_form(edge: Edge) -> None:
    """Line ends, dashes and quotes are its own; only its boundary ends it."""
    sound = FILE[: FILE.index(b"data") + 8] + (b'\r\n--y\r\ncontent-disposition: form-data; name="model"\r\n\r\n' * 200)
    headers = {"content-type": "multipart/form-data; boundary=x"}
    reply = edge.post(PATH, content=form_of(("model", b"nano"), ("file", sound)), headers=headers)
    assert reply.status_code == 200, reply.text


def test_a_page_of_another_site_is_refused(edge: Edge) -> None:
    """A browser lets it send a form unasked; its Origin tells."""
    assert post(edge, {"origin": "https://page.example"}).json()["error"]["code"] == "origin_not_allowed"
    assert edge.core.requests == []
    assert post(edge, {"origin": edge.url}).status_code == 200
    assert edge.post(PATH, {"model": "nano"}).status_code == 415


def test_a_model_without_audio_says_so(edge: Edge) -> None:
    """Whatever the file holds."""
    edge.configure(media_kinds=frozenset())
    reply = post(edge)
    assert reply.status_code == 400
    assert re.fullmatch("file: this model reads no audio", reply.json()["error"]["message"])
