"""Several prompts in one text completion, what ended a choice, and the fingerprint of the system."""

from pathlib import Path
from typing import Any

import pytest

from deploy.edge.answers.response_format import ServedModel
from deploy.models.fingerprint import fingerprint
from tests.support.edge.api_client import chat_body, client, events, whole_and_streamed
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def asked(edge: Edge, **extra: Any) -> dict[str, Any]:
    reply = edge.post(TEXT, {"model": "nano"} | extra)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("prompts", [["a house", "b"], [[5, 6, 7], [8]]], ids=["texts", "ids"])
def test_choices_come_in_the_order_of_their_prompts(edge: Edge, prompts: list[Any]) -> None:
    """n choices of each prompt, as its own request would have them: the same tokens and seeds; every prompt is counted once."""
    edge.core.cached = 1
    found = asked(edge, prompt=prompts, n=2, seed=7, max_tokens=2)
    together = {(tuple(request.tokens), request.params.seed) for request in edge.core.requests}
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    sizes = [len(request.tokens) for request in edge.core.requests]
    assert sizes == [sizes[0], sizes[0], sizes[2], sizes[2]]
    assert sizes[0] != sizes[2]
    assert found["usage"]["prompt_tokens"] == sizes[0] + sizes[2]
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    edge.reset()
    for prompt in prompts:
        asked(edge, prompt=prompt, n=2, seed=7, max_tokens=2)
    assert {(tuple(request.tokens), request.params.seed) for request in edge.core.requests} == together
    assert len(together) == 4


def test_a_stream_of_several_prompts(edge: Edge) -> None:
    """Every choice under its index, each with one end, then [DONE]: what the whole answer says."""
    edge.script("one two<turn|>")
    body = {"model": "nano", "prompt": ["a", "b", "c"], "max_tokens": 100}
    chunks = [chunk["choices"][0] for chunk in events(edge, TEXT, body)]
    texts = {index: "".join(chunk["text"] for chunk in chunks if chunk["index"] == index) for index in range(3)}
    whole = {choice["index"]: choice["text"] for choice in asked(edge, **body)["choices"]}
    assert texts == whole == dict.fromkeys(range(3), "one two")
    assert [chunk["finish_reason"] for chunk in chunks].count("stop") == 3


@whole_and_streamed
def test_what_ended_a_choice(edge: Edge, *, stream: bool) -> None:
    """The stop string or the id that was asked for; null for the model's own end and for a cut."""
    word = edge.text.encode("house", add_bos=False)[0]
    cases = [
        ({"stop": ["nowhere", "STOP"]}, "STOP"), ({"stop_token_ids": [word]}, word), ({}, None), ({"max_tokens": 2}, None),
    ]  # fmt: skip
    for extra, wanted in cases:
        edge.script("all STOP ")
        edge.core.steps.append([word] if "stop_token_ids" in extra else [106])
        body = chat_body(max_tokens=50) | extra
        if stream:
            last = events(edge, CHAT, body)[-1]["choices"][0]
        else:
            last = edge.post(CHAT, body).json()["choices"][0]
        assert last["stop_reason"] == wanted, extra
        assert last["finish_reason"] == ("length" if "max_tokens" in extra else "stop")


def test_the_fingerprint(edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every answer; another build, config or file of weights has another, and the same has the same."""
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(tmp_path, "build", "4")
    (tmp_path / "nowhere.safetensors").symlink_to("nothing")
    assert first == fingerprint(tmp_path, "build", "4")
    found = {first, fingerprint(tmp_path, "build", "2"), fingerprint(tmp_path, "build4")}
    (tmp_path / "model.safetensors").write_bytes(b"1")
    found.add(fingerprint(tmp_path, "build", "4"))
    (tmp_path / "config.json").write_text("{ }")
    found.add(fingerprint(tmp_path, "build", "4"))
    assert len(found) == 5
    monkeypatch.setattr(edge.service, "model", ServedModel("nano", edge.text.pieces, first))
    with client(edge) as api:
        assert api.completions.create(model="nano", prompt="x").system_fingerprint == first
        chunks = api.chat.completions.create(model="nano", messages=[{"role": "user", "content": "x"}], stream=True)
        assert {chunk.system_fingerprint for chunk in chunks} == {first}
