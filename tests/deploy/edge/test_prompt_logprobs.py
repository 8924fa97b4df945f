"""Echo, and logprobs of prompt tokens, in OpenAI's and vLLM's forms."""

import json
from typing import Any

import httpx
import pytest

from deploy.edge.answers.response_format import ServedModel
from deploy.edge.openai.forms import TextFormat
from engine.front.generation import Delta
from tests.support.edge.api_client import error_of, events, user, whole_and_streamed
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["One two three.", "Ein Haus"]


def post(edge: Edge, path: str, **body: Any) -> httpx.Response:
    return edge.post(path, {"model": "nano"} | body)


def answer(edge: Edge, path: str, **body: Any) -> dict[str, Any]:
    reply = post(edge, path, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_echoed(edge: Edge, prompt: str, choice: dict[str, Any], generated: str) -> None:
    """Text and logprobs of the prompt, then of what was generated; offsets point at each token's text."""
    ids, logprobs = edge.text.encode(prompt, add_bos=True), choice["logprobs"]
    shown = [edge.text.decode([token], skip_special_tokens=False) for token in ids]
    assert choice["text"] == prompt + generated
    assert logprobs["tokens"][: len(ids)] == shown
    assert logprobs["token_logprobs"][: len(ids)] == [None, *(-at / 8 for at in range(1, len(ids)))]
    assert logprobs["top_logprobs"][0] is None
    assert all(logprobs["top_logprobs"][at][shown[at]] == -at / 8 for at in range(1, len(ids)))
    starts = logprobs["text_offset"]
    assert starts[:2] == [0, 0], "the first token shows nothing"
    assert all(choice["text"][start:].startswith(token) for start, token in list(zip(starts, logprobs["tokens"], strict=True))[1:])


@pytest.mark.parametrize("kind", ["text", "ids"])
@whole_and_streamed
def test_an_echo_with_logprobs(edge: Edge, *, stream: bool, kind: str) -> None:
    """Of several prompts with two choices each, texts or ids, each choice begins with its own prompt, whole or streamed."""
    edge.script("one two")
    prompts = PROMPTS if kind == "text" else [edge.text.encode(prompt, add_bos=True) for prompt in PROMPTS]
    body = {"model": "nano", "prompt": prompts, "n": 2, "echo": True, "logprobs": 2, "max_tokens": 50}
    choices = [{"text": "", "logprobs": {}} for _ in range(4)]
    if stream:
        for chunk in (chunk["choices"][0] for chunk in events(edge, TEXT, body)):
            made = choices[chunk["index"]]
            made["text"] += chunk["text"]
            for name, entries in (chunk["logprobs"] or {}).items():
                made["logprobs"].setdefault(name, []).extend(entries)
    else:
        choices = answer(edge, TEXT, **body)["choices"]
    for index, choice in enumerate(choices):
        check_echoed(edge, PROMPTS[index // 2], choice, "one two")
    assert len(edge.core.requests) == 4
    assert all(request.params.prompt_logprobs == 2 for request in edge.core.requests)


def test_an_echo_of_the_wrong_prompt_is_noticed(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: logprobs that stand one token on."""
    edge.script("one")
    honest = TextFormat._reported

    def shifted(self: TextFormat, delta: Delta) -> Any:
        tokens, entries = honest(self, delta)
        return tokens, [*entries[1:], *entries[:1]]

    monkeypatch.setattr(TextFormat, "_reported", shifted)
    (choice,) = answer(edge, TEXT, prompt=PROMPTS[0], echo=True, logprobs=2, max_tokens=50)["choices"]
    with pytest.raises(AssertionError):
        check_echoed(edge, PROMPTS[0], choice, "one")


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_alone(edge: Edge, logprobs: int | None) -> None:
    """With max_tokens 0 the answer is the prompt, and nothing counts as generated."""
    found = answer(edge, TEXT, prompt=PROMPTS[0], echo=True, max_tokens=0, logprobs=logprobs)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPTS[0], "length")
    assert found["usage"]["completion_tokens"] == 0
    (request,) = edge.core.requests
    assert request.params.max_tokens == 1
    assert (choice["logprobs"] is None) == (logprobs is None)
    assert logprobs is None or len(choice["logprobs"]["tokens"]) == len(request.tokens)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_prompt_logprobs_in_vllms_form(edge: Edge, path: str) -> None:
    """A list, null first: by token id logprob, rank and text, the prompt's own token first; of a chat beside the choices."""
    said = {"prompt": PROMPTS[0]} if path == TEXT else {"messages": [user(PROMPTS[0])]}
    found = answer(edge, path, **said, n=2, prompt_logprobs=2)
    prompt = edge.core.requests[0].tokens
    asked = [request.params.prompt_logprobs for request in edge.core.requests]
    assert asked == ([2, 2] if path == TEXT else [2, None])
    lists = [choice["prompt_logprobs"] for choice in found["choices"]] if path == TEXT else [found["prompt_logprobs"]]
    for entries in lists:
        assert len(entries) == len(prompt)
        assert entries[0] is None
        for at, entry in enumerate(entries[1:], 1):
            own, first, second = (str(prompt[at] + place) for place in range(3))
            assert list(entry) == [own, first, second]
            text = ServedModel("", edge.text.pieces, "fp_0").text_of(prompt[at])
            assert entry[own] == {"logprob": -at / 8, "rank": 3, "decoded_token": text}
            assert (entry[first]["rank"], entry[second]["logprob"]) == (1, -0.0625)
    assert "prompt_logprobs" not in json.dumps(answer(edge, path, **said))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"messages": [user("a")], "prompt_logprobs": 21}, "prompt_logprobs"),
    (CHAT, {"messages": [user("a")], "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_what_is_refused(edge: Edge, path: str, body: dict[str, Any], param: str) -> None:
    """A 400 that names the key."""
    reply = post(edge, path, **body)
    assert error_of(reply, 400)["param"] == param


def test_more_logprobs_than_an_answer_may_have(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of all choices' prompts times one more than the alternatives: at the limit served, above it a 400 with the numbers."""
    prompt = [5] * 100
    monkeypatch.setattr("deploy.edge.jobs.job_builder.MAX_PROMPT_LOGPROBS", 600)
    answer(edge, TEXT, prompt=prompt, prompt_logprobs=2, n=2)
    reply = post(edge, TEXT, prompt=prompt, prompt_logprobs=3, n=2)
    assert "800 logprobs of prompt tokens, alternatives counted, exceed the limit of 600" in error_of(reply, 400)["message"]
