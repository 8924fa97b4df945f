"""Bad requests: each is a 400 in OpenAI's shape that names the key, small, and never reaches the engine."""

import json
import re
from typing import Any

import httpx
import pytest

from deploy.edge.openai.schemas import CHAT_READER
from deploy.edge.requests.ask import ChatMessage, ChatPrompt, Text
from engine.errors import InvalidRequest
from tests.support.edge.api_client import error_of, user
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES: list[Any] = [user("Hello")]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(**extra: Any) -> str:
    return json.dumps({"model": "nano", "messages": MESSAGES} | extra)


def text(**extra: Any) -> str:
    return json.dumps({"model": "nano", "prompt": "x"} | extra)


# Keys of a chat, and values of which each is refused by the key's name.
BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "model": (3,),
    "messages": (
        [],
        "Hello",
        ["Hello"],
        [{"content": "no role"}],
        [{"role": "wizard", "content": "x"}],
        [user(5)],
        [user([IMAGE])],
        [user([{"type": "text"}])],
        [user(None)],
        [user("word " * 400)],
        [user("a" * 1_000_000)],
        [*MESSAGES, {"role": "user"}],
        [*MESSAGES, {"role": "assistant", "content": None, "function_call": {"name": "f"}}],
        [*MESSAGES, {"role": "assistant", "refusal": {"text": "No."}}],
        [*MESSAGES, {"role": "assistant", "audio": {"id": "a"}}],
    ),
    "temperature": (-0.1, 2.1, "hot"),
    "top_p": (-0.1, 1.5),
    "top_k": (-2, 1.5),
    "min_p": (2,),
    "max_tokens": (0, "5"),
    "max_completion_tokens": (10**30,),
    "n": (0, 9, 5_000_000, True),
    "seed": (2**70,),
    "stop": (["a"] * 17, "x" * 257, [""], 7),
    "stop_token_ids": ([1024], [-1], list(range(129))),
    "top_logprobs": (2,),
    "logprobs": (3,),
    "stream": ("yes",),
    "stream_options": ({"include_usage": True},),
    "response_format": ({"type": "yaml"},),
    "presence_penalty": (2.1,),
    "frequency_penalty": ("1",),
    "repetition_penalty": (0,),
    "logit_bias": ({"5": 101}, {"1024": 3}, {"-1": 3}, {"five": 3}, [5], {str(token): 1 for token in range(1025)}),
    "allowed_token_ids": ([], [1024]),
    "bad_words": ("no", ["a", " "], ["a" * 257], ["a"] * 65, ["zqxj" * 60 + str(number) for number in range(64)]),
    "tool_choice": ("required",),
    "tools": (
        [{}], [{"type": "web_search"}], [{"type": "function", "function": {"name": "f"}}] * 2,
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
    ),
    "reasoning_effort": ("hard", 1),
    "parallel_tool_calls": ("no",),
    "functions": ([{"name": "f"}],),
    "modalities": (["audio"],),
    "chat_template": ("{{ 1 }}",),
    "chat_template_kwargs": ({"enable_thinking": "yes"},),
}
# The same of a text completion.
BAD_TEXT_VALUES: dict[str, tuple[Any, ...]] = {
    "prompt": ([], ["a"] * 33, ["a", 5], [[5], []], [1024], [-1], [1.5], [5] * 256),
    "max_tokens": (0,),
    "suffix": ("end",),
    "best_of": (4,),
    "messages": (MESSAGES,),
    "reasoning_effort": ("low",),
    "tools": ([{"type": "function", "function": {"name": "f"}}],),
    "logprobs": (21,),
    "guided_grammar": ('other ::= "x"', "root ::= other"),
}
# (path, body, the param that the error names, None: any)
BAD: list[tuple[str, str, str | None]] = [
    *((CHAT, chat(**{key: value}), key) for key, values in BAD_VALUES.items() for value in values),
    *((TEXT, text(**{key: value}), key) for key, values in BAD_TEXT_VALUES.items() for value in values),
    *((CHAT, body, None) for body in ("", "{", "null", "[]", '"text"', "1e999", "[" * 100_000, '{"model":' + '{"a":' * 5000)),
    (CHAT, chat()[:-1] + ',"seed":' + "9" * 5000 + "}", None),
    (CHAT, "\ufeff\ufeff" + chat(), None),
    (CHAT, chat()[:-1] + ',"temperature":NaN}', None),
    (CHAT, chat()[:-1] + ',"temperature":Infinity}', None),
    (CHAT, chat()[:-1] + ',"top_p":1e999}', "top_p"),
    (CHAT, chat()[:-1] + ',"echo":1e999}', "echo"),
    (CHAT, '{"model":"nano","messages":[{"role":"user","content":"\\ud800"}]}', None),
    (TEXT, '{"model":"nano","prompt":"\\udfff x"}', None),
    (CHAT, json.dumps({"model": "nano"}), "messages"),
    (CHAT, chat(min_tokens=5, max_tokens=4), "min_tokens"),
    (CHAT, chat(top_logprobs=21, logprobs=True), "top_logprobs"),
    (CHAT, chat(stream_options={"continuous_usage_stats": True}), "stream_options"),
    (CHAT, chat(allowed_token_ids=[5, 6], logit_bias={"5": -100, "6": -100}), "allowed_token_ids"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": 5}}], tool_choice="none"), "tools"),
    (TEXT, text(prompt=["a"] * 9, n=8), "n"),
]

GOOD: list[tuple[str, str]] = [
    (CHAT, chat()),
    (CHAT, "\ufeff" + chat()),
    (CHAT, json.dumps({"messages": MESSAGES, "tools": [{"function": {"name": "f"}}]})),
    (TEXT, json.dumps({"prompt": "x", "model": None})),
    ("/v1/responses", json.dumps({"input": "x"})),
    (CHAT, chat(unknown_key={"a": [1]}, user="u", store=False, metadata={}, service_tier="auto", parallel_tool_calls=True)),
    (CHAT, chat(chat_template_kwargs={"tokenize": True, "tools": []})),
    (TEXT, text(max_completion_tokens=4)),
    (CHAT, chat(temperature=0, top_p=1, top_k=0, min_p=0)),
    (CHAT, chat(presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, logit_bias={}, bad_words=[])),
    (CHAT, chat(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.3, logit_bias={"5": -100, "1023": 100})),
    (TEXT, text(bad_words=["one", "two words"], allowed_token_ids=[5, 5, 1023], presence_penalty=None)),
    (CHAT, chat(temperature=None, stop=None, n=None, stream=None, tools=None, logprobs=None, max_tokens=None, seed=None)),
    (CHAT, chat(response_format={"type": "text"}, stop=["x" * 256] * 16, seed=-5, max_tokens=10**9, modalities=["text"])),
    (CHAT, chat(messages=[user([{"type": "text", "text": "a"}]), {"role": "assistant", "content": "b"}])),
    (CHAT, chat(stop_token_ids=[1023], top_logprobs=20, logprobs=True)),
    (CHAT, chat(messages=[*MESSAGES, {"role": "assistant", "function_call": None, "refusal": None, "audio": None}])),
    (CHAT, chat(reasoning_effort="max")),
    (TEXT, text(prompt=["one"], suffix=None, echo=False, best_of=1)),
    (TEXT, text(prompt=[5] * 255)),
    (TEXT, text(prompt=[[5, 6]])),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=[f"{n}-{body[-40:]!r}"[:50] for n, (_, body, _) in enumerate(BAD)])
def test_a_bad_body_is_refused(edge: Edge, path: str, body: str, param: str | None) -> None:
    """400, OpenAI's shape, the key named, at most 2 kB, and the engine hears nothing."""
    reply = edge.post(path, body)
    assert reply.status_code == 400, reply.text[:500]
    error = reply.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    assert len(reply.content) <= 2048
    assert edge.core.requests == []


@pytest.mark.parametrize(("path", "body"), GOOD, ids=range(len(GOOD)))
def test_a_good_request_beside_it_is_served(edge: Edge, path: str, body: str) -> None:
    """The table refuses what it means to: the same keys with good values, unknown keys and nulls are served."""
    reply = edge.post(path, body)
    assert reply.status_code == 200, reply.text
    assert len(edge.core.requests) == 1


@pytest.mark.parametrize("count", [0, 4095, 4096])
@pytest.mark.parametrize("size", [1, 70_000])
def test_a_list_is_read_to_its_bound(count: int, size: int) -> None:
    """All turns of small bodies and of large ones, and not one too many; a wrong one is named, with what it may be."""

    def messages(turns: list[Any]) -> Any:
        prompt = CHAT_READER.read(chat(messages=turns).encode()).ask().prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt.messages

    turns = [*([user("c")] * count), user([{"type": "text", "text": "a" * size}, {"type": "text", "text": "b"}])]
    if count == 4096:
        with pytest.raises(InvalidRequest, match=r"^messages: Expected `array` of length <= 4096"):
            messages(turns)
        return
    asked = [*([ChatMessage("user", "c")] * count), ChatMessage("user", [Text("a" * size), Text("b")])]
    assert messages(turns) == asked != messages([*turns[:-1], user("x")])
    with pytest.raises(InvalidRequest, match=rf"^messages\[{count}\]\.role: .* not one of assistant, developer, system, tool"):
        messages([*turns[:-1], {"role": "wizard", "content": "a" * size}])


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("words", [1000, 100_000])
def test_agents_know_the_context_error(edge: Edge, path: str, words: int) -> None:
    """Claude Code, LiteLLM and opencode tell by these words that a chat must be compacted, however far it is beyond the context.
    Planted: a prompt that fits has none of them."""
    for count, status in ((1, 200), (words, 400)):
        said = " ".join(["salt"] * count)
        turns = [user(said)]
        prompt = {TEXT: {"prompt": said}, "/v1/responses": {"input": said, "max_tokens": None}}.get(path, {"messages": turns})
        reply = edge.post(path, {"model": "nano", "max_tokens": 1, **prompt})
        message = str(reply.json().get("error", {}) and reply.json()["error"]["message"])
        assert reply.status_code == status, reply.text
        tokens = re.search(r"prompt is too long: (?:at least )?(\d+) tokens > 255 maximum.* context length is 256 ", message)
        assert (tokens is not None and int(tokens[1]) > 255) is (status == 400), message


@pytest.mark.parametrize(("path", "key"), [(CHAT, "cache_salt"), (TEXT, "prompt"), ("/v1/responses", "input")])
@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00 and more"])
def test_half_a_character_is_called_that(edge: Edge, path: str, key: str, half: str) -> None:
    """As JavaScript cuts an emoji. A decoder that wants the other half finds the body too short for it."""
    error = error_of(edge.post(path, f'{{"model":"nano","messages":[],"{key}":"{half}"}}'), 400)
    assert (error["code"], "surrogate" in error["message"]) == ("invalid_json", True)


def test_an_unknown_model_is_404(edge: Edge) -> None:
    """code model_not_found, which clients tell apart by."""
    reply = edge.post(CHAT, chat(model="gpt-4"))
    assert error_of(reply, 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "//v1/models", 404), ("GET", "/v1/models/", 404)],
)
def test_unknown_paths_have_the_shape_too(edge: Edge, method: str, path: str, status: int) -> None:
    """404 and 405 as OpenAI's clients read them; 405 with Allow, as HTTP wants it. A slash at the end is named."""
    reply = httpx.request(method, f"{edge.url}{path}")
    error = error_of(reply, status)
    assert error["type"] == "invalid_request_error"
    assert ("ends in a slash" in error["message"]) is path.endswith("/")
    assert reply.headers.get("allow") == ("POST" if status == 405 else None)
