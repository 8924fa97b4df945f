"""What vLLM and SGLang speak beside OpenAI's API: /tokenize, /detokenize, /generate; and what a path says that nobody serves."""

from typing import Any

import httpx
import openai
import pytest

from deploy.edge.apis import ENDPOINTS
from tests.conftest import Nano
from tests.support.edge.api_client import client, error_of, events, user, whole_and_streamed
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure

GENERATE = "/generate"
MESSAGES = [user("Hello größer")]
TOOL = {"type": "function", "function": {"name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}}}


def post(edge: Edge, path: str, **body: Any) -> httpx.Response:
    return edge.post(path, body)


def test_a_text_and_its_tokens(edge: Edge) -> None:
    """Ids with and without <bos>, their texts, and back; the completion of the same text begins with them."""
    found = post(edge, "/tokenize", model="nano", prompt="größer <x", return_token_strs=True).json()
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), edge.service.settings.max_len)
    assert len(found["token_strs"]) == found["count"]
    bare = post(edge, "/tokenize", prompt="größer <x", add_special_tokens=False).json()
    assert (found["tokens"][1:], bare["token_strs"]) == (bare["tokens"], None)
    assert post(edge, "/detokenize", tokens=bare["tokens"]).json() == {"prompt": "größer <x"}
    assert post(edge, "/detokenize", model="nano", tokens=found["tokens"]).json() == {"prompt": "<bos>größer <x"}
    post(edge, "/v1/completions", model="nano", prompt="größer <x")
    assert list(edge.core.requests[0].tokens) == found["tokens"]


@pytest.mark.parametrize(
    "extra", [{}, {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}]
)
def test_a_conversation_has_the_tokens_of_its_chat(edge: Edge, extra: dict[str, Any]) -> None:
    """count is usage.prompt_tokens, tools and template's switches included."""
    found = post(edge, "/tokenize", messages=MESSAGES, **extra).json()
    chat = post(edge, "/v1/chat/completions", model="nano", messages=MESSAGES, **extra).json()
    assert found["tokens"] == list(edge.core.requests[0].tokens)
    assert found["count"] == chat["usage"]["prompt_tokens"]
    without = post(edge, "/tokenize", messages=MESSAGES, add_generation_prompt=False, **extra).json()
    assert without["count"] < found["count"]
    plain = post(edge, "/tokenize", messages=MESSAGES).json()
    assert (plain["tokens"] == found["tokens"]) is not bool(extra)


@whole_and_streamed
def test_what_sglangs_benchmark_sends(edge: Edge, *, stream: bool) -> None:
    """Its request, word for word: every event has all of the text so far, and the counts that it reads."""
    edge.script("one two three four")
    edge.core.cached = 2
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True},
        "lora_path": "",
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    text = edge.text.decode([token for [token] in edge.core.steps[:3]])
    if stream:
        chunks = events(edge, GENERATE, body)
        assert [text.startswith(chunk["text"]) for chunk in chunks] == [True] * len(chunks)
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(set(counts))
        assert chunks[0]["meta_info"]["finish_reason"] is None or len(chunks) == 1
        last = chunks[-1]
    else:
        last = post(edge, GENERATE, **body).json()
        assert last["output_ids"] == [token for [token] in edge.core.steps[:3]]
    meta = last["meta_info"]
    assert last["text"] == text
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 2)
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    params = edge.core.requests[0].params
    assert (params.temperature, params.max_tokens, params.stop_ids) == (0.0, 3, ())


def test_a_stop_string_is_what_matched(edge: Edge) -> None:
    """finish_reason names it; rid is the answer's id; a text is a prompt as a completion has it."""
    edge.script("all STOP here<turn|>")
    found = post(edge, GENERATE, text="a house", rid="mine", sampling_params={"stop": ["STOP"], "sampling_seed": 7}).json()
    assert (found["text"], found["meta_info"]["id"]) == ("all ", "mine")
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP"}
    assert edge.core.requests[0].params.seed == 7
    assert edge.core.requests[0].params.max_tokens == 128
    assert list(edge.core.requests[0].tokens) == edge.text.encode("a house", add_bos=True)


def test_a_stream_of_generate_that_fails_has_one_error(edge: Edge) -> None:
    """And no [DONE]."""
    edge.script("some words come")
    edge.core.fail_after = 2
    data = events(edge, GENERATE, {"text": "x"})
    assert ["error" in each for each in data].count(True) == 1
    assert data[-1]["error"]["code"] == "generation_failed"


BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/tokenize": [
        ({}, "prompt"),
        ({"prompt": "x", "messages": MESSAGES}, "prompt"),
        ({"prompt": "x", "model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "model": "other"}, "model"),
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a" * 1_000_000}, "prompt"),
    ],
    "/detokenize": [
        ({}, "tokens"),
        ({"tokens": [1024]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [5], "model": "other"}, "model"),
    ],
    GENERATE: [
        ({}, "text"),
        ({"text": "x", "input_ids": [5]}, "text"),
        ({"text": ["a", "b"]}, "text"),
        ({"input_ids": [[5], [6]]}, "input_ids"),
        ({"text": "x", "return_logprob": True}, "return_logprob"),
        ({"text": "x", "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": "x", "lora_path": "a"}, "lora_path"),
        ({"text": "x", "sampling_params": {"n": 2}}, "sampling_params"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "x", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "x", "sampling_params": {"stop_regex": "a+"}}, "stop_regex"),
    ],
}


@pytest.mark.parametrize(("path", "body", "param"), [(path, *case) for path, cases in BAD.items() for case in cases])
def test_a_bad_body_is_refused_by_its_own_name(edge: Edge, path: str, body: dict[str, Any], param: str) -> None:
    """In OpenAI's shape, 404 for another model; the engine hears nothing."""
    reply = post(edge, path, **body)
    assert error_of(reply, 404 if param == "model" else 400)["param"] == param
    assert not edge.core.requests


ABSENT = [
    ("/rerank", "no scores"), ("/v1/images/generations", "text only"), ("/v1/responses/resp_1", "stored"),
    ("/chat/completions", "begin with /v1"), ("/v1/v1/messages", "goes without it"), ("/metrics", "a port of their own"),
    ("/v1/responses/input_tokens", "/tokenize"), ("/v1/chat/completions/", "a slash"), ("/v1/responses/", "a slash"),
]  # fmt: skip


def test_what_a_generator_is_not(edge: Edge) -> None:
    """404 with a sentence, which OpenAI's client shows, or 405; none where nobody would expect a route, or no sentence fits."""
    with client(edge) as api, pytest.raises(openai.NotFoundError, match="no embeddings"):
        api.embeddings.create(model="nano", input="x")
    for path, words in ABSENT:
        assert words in post(edge, path).json()["error"]["message"]
    assert "stored" in edge.get("/v1/responses").json()["error"]["message"]
    for path in ("/v1/embeddingsx", "/v1/audio/translations"):
        assert post(edge, path).json()["error"]["message"] == f"Not Found: POST {path}."


def test_metrics_on_the_apis_port(nano: Nano) -> None:
    """Where a setting asks for them, and without a key, as a router of Kubernetes reads them."""
    assert ENDPOINTS["/metrics"].right == "open"
    with Edge(nano("31b"), metrics=("text/plain; version=0.0.4; charset=utf-8", lambda: b"vllm:num_requests_waiting 0\n")) as edge:
        page = edge.get("/metrics")
    assert (page.status_code, page.text) == (200, "vllm:num_requests_waiting 0\n")
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
