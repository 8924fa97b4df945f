"""The API as OpenAI's own client sees it: shapes, streams, usage, logprobs, stop strings, errors."""

import json
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deploy.edge.service_settings import Defaults
from engine.logit_adjustments import LogitAdjustments
from engine.protocol import FinishReason
from tests.support.edge.api_client import chat_body, client, error_of, events, user, whole_and_streamed
from tests.support.edge.http_edge import Edge, until

pytestmark = pytest.mark.pure

HELLO: list[Any] = [user("Hello")]


def test_a_chat_completion_has_every_field_that_clients_read(edge: Edge) -> None:
    """Content, role, refusal and annotations, logprobs null, finish_reason and usage."""
    edge.script("hi there<turn|>")
    with client(edge) as api:
        answer = api.chat.completions.create(model="nano", messages=HELLO)
    raw = answer.model_dump()
    assert raw["choices"][0]["message"]["content"] == "hi there"
    assert raw["object"] == "chat.completion"
    assert raw["choices"][0]["finish_reason"] == "stop"
    message = edge.post("/v1/chat/completions", chat_body()).json()["choices"][0]
    assert message["message"] == {"role": "assistant", "content": "hi there", "refusal": None, "annotations": []}
    assert message["logprobs"] is None
    prompt = len(edge.core.requests[0].tokens)
    assert raw["usage"]["prompt_tokens"] == prompt
    assert raw["usage"]["completion_tokens"] == len(edge.core.steps)
    assert raw["usage"]["total_tokens"] == prompt + len(edge.core.steps)
    assert raw["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_equals_the_whole_answer(edge: Edge) -> None:
    """Deltas add up to the text, the id never changes, the role comes first, usage last, then [DONE]."""
    edge.script("größer 日本 🎉 ok<turn|>")
    body = chat_body(stream_options={"include_usage": True})
    chunks = events(edge, "/v1/chat/completions", body)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == "größer 日本 🎉 ok"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(edge.core.steps)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("stop") == 1


@pytest.mark.parametrize("also", [{"include_usage": True}, {}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_each_chunk(edge: Edge, path: str, also: dict[str, bool]) -> None:
    """continuous_usage_stats, also without include_usage: it grows with the tokens of all choices up to what the last chunk says;
    without options there is none."""
    edge.script("hi there<turn|>")
    edge.core.delay_s = 0.002
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
    body = {"model": "nano", "n": 2, **asked, "stream_options": {"continuous_usage_stats": True, **also}}
    usages = [chunk["usage"] for chunk in events(edge, path, body)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 2 * len(edge.core.steps)
    assert all(usage["prompt_tokens"] == usages[-1]["prompt_tokens"] == len(edge.core.requests[0].tokens) for usage in usages)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert not any("usage" in chunk for chunk in events(edge, path, body | {"stream_options": None}))


@pytest.mark.parametrize("n", [1, 3])
def test_usage_says_how_much_of_the_prompt_was_cached(edge: Edge, n: int) -> None:
    """Whole and streamed, as the core says it with each first output; a prompt is counted once, however many choices share it: what
    the first of them computed was not cached."""
    edge.script("hi<turn|>")
    edge.core.cached = [32, 48, 64] * 2
    body = chat_body(n=n)
    whole = edge.post("/v1/chat/completions", body).json()
    edge.core.requests.clear()
    streamed = events(edge, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    for usage in (whole["usage"], streamed[-1]["usage"]):
        assert usage["prompt_tokens_details"] == {"cached_tokens": 32}


@pytest.mark.parametrize("at_once", [True, False])
def test_usage_says_what_became_of_drafts(edge: Edge, *, at_once: bool) -> None:
    """Accepted and rejected ones of all choices together, whole and streamed, however steps pile up; the core hears of
    `speculative: false`."""
    edge.core.steps, edge.core.drafts, edge.core.at_once = [[300, 301, 302], [303, 304], [305]], 3, at_once
    body = chat_body(n=2)
    whole = edge.post("/v1/chat/completions", body | {"speculative": False}).json()
    streamed = events(edge, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    for usage in (whole["usage"], streamed[-1]["usage"]):
        details = usage["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (6, 12)
    assert [request.params.drafts for request in edge.core.requests] == [False, False, True, True]
    refused = edge.post("/v1/chat/completions", body | {"speculative": "no"})
    assert (refused.status_code, "speculative" in refused.text) == (400, True)


def test_openai_streams_a_text_completion(edge: Edge) -> None:
    """Text deltas of /v1/completions with a token-id prompt, ended by length."""
    edge.script("one two three four")
    with client(edge) as api:
        chunks = list(api.completions.create(model="nano", prompt=[5, 6, 7], max_tokens=3, stream=True))
    assert list(edge.core.requests[0].tokens) == [5, 6, 7]
    assert "".join(chunk.choices[0].text for chunk in chunks) == edge.text.decode([t for [t] in edge.core.steps[:3]])
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_logprobs_name_each_token_and_its_rivals(edge: Edge) -> None:
    """content[i] has token, bytes, logprob and top_logprobs, streamed or whole alike."""
    edge.script("the house")
    with client(edge) as api:
        answer = api.chat.completions.create(model="nano", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=50)
        streamed = list(api.chat.completions.create(
            model="nano", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=50, stream=True
        ))  # fmt: skip
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == "the house"
    assert b"".join(bytes(entry.bytes or []) for entry in content) == b"the house"
    assert [entry.logprob for entry in content] == [-0.5] * len(content)
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-0.5, -1.5]] * len(content)
    pieces = [e for chunk in streamed for e in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or []]
    assert pieces == content


def test_completion_logprobs_have_the_old_shape(edge: Edge) -> None:
    """tokens, token_logprobs, top_logprobs and text_offset run in parallel; the offsets go on through a stream. Of a character of
    several tokens all are where it is, which a sum of what each shows as alone would miss."""
    said = "a small n\u00e9e \U0001f389 <bos> house"
    edge.script(said)
    body = {"model": "nano", "prompt": "x", "logprobs": 1, "max_tokens": 40, "skip_special_tokens": False}
    whole = edge.post("/v1/completions", body).json()["choices"][0]
    found = whole["logprobs"]
    assert whole["text"] == said
    pieces = list(map(edge.text.pieces.bytes_of, chain.from_iterable(edge.core.steps)))
    assert found["text_offset"] == [len(b"".join(pieces[:at]).decode(errors="ignore")) for at in range(len(pieces))]
    assert found["text_offset"] != list(accumulate(map(len, found["tokens"][:-1]), initial=0)), "planted"
    for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert whole["text"][offset:].startswith(token.strip("\ufffd"))
    assert all(len(top) == 1 for top in found["top_logprobs"])
    chunks = [chunk["choices"][0]["logprobs"] for chunk in events(edge, "/v1/completions", body)]
    assert [o for chunk in chunks if chunk for o in chunk["text_offset"]] == found["text_offset"]


@whole_and_streamed
@pytest.mark.parametrize("batched", [False, True])
def test_a_stop_string_ends_text_and_engine(edge: Edge, *, stream: bool, batched: bool) -> None:
    """Text stops before the match however the tokens were batched, and the engine is told why."""
    edge.script("one two STOPthree four five", 1000 if batched else 1)
    edge.core.forever = not batched
    body = chat_body(stop=["nowhere", "STOP"], max_tokens=200)
    if stream:
        chunks = events(edge, "/v1/chat/completions", body)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = edge.post("/v1/chat/completions", body).json()["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert (text, finish) == ("one two ", "stop")
    if not batched:
        until(lambda: edge.core.abort_reasons == ["stop_string"], "the abort")


def test_a_stop_token_id_is_not_text(edge: Edge) -> None:
    """The id that ended the text is counted, not shown."""
    word = edge.text.encode("house", add_bos=False)[0]
    edge.script("the ")
    edge.core.steps.append([word])
    body = chat_body(stop_token_ids=[word])
    answer = edge.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "the "
    assert word in edge.core.requests[0].params.stop_ids


@whole_and_streamed
def test_several_choices_have_seeds_of_their_own(edge: Edge, *, stream: bool) -> None:
    """n=3 gives three choices, each finished once, from three engine requests that differ in seed alone; a neighbouring seed's
    choices have none of theirs."""
    edge.script("hi<turn|>")
    body = chat_body(n=3, seed=7)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events(edge, "/v1/chat/completions", body)]
        texts = ["".join(c["delta"].get("content", "") for c in chunks if c["index"] == index) for index in range(3)]
        assert sorted(c["index"] for c in chunks if c["finish_reason"]) == [0, 1, 2]
    else:
        reply = edge.post("/v1/chat/completions", body).json()
        texts = [choice["message"]["content"] for choice in reply["choices"]]
        assert reply["usage"]["completion_tokens"] == 3 * len(edge.core.steps)
    assert texts == ["hi"] * 3
    edge.post("/v1/chat/completions", body | {"seed": 8})
    seeds = [request.params.seed for request in edge.core.requests]
    assert (seeds[0], seeds[3]) == (7, 8)
    assert len(set(seeds)) == 6


def test_sampling_parameters_reach_the_engine(edge: Edge) -> None:
    """What the request says, and what generation_config.json says where it is silent; seeds differ from request to request."""
    chat = chat_body()
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "min_tokens": 2, "max_completion_tokens": 9}
    for body in (chat | given, chat, chat, chat | {"ignore_eos": True, "stop_token_ids": [9], "top_k": -1, "top_p": 0}):
        edge.post("/v1/chat/completions", body).raise_for_status()
    first, second, third, last = edge.core.requests
    params = first.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 5, 0.1, 3)
    assert (params.min_tokens, params.max_tokens, first.clip) == (2, 9, False)
    assert (second.params.temperature, second.params.top_k, second.params.top_p) == (1.0, 64, 0.95)
    assert second.clip
    assert second.params.stop_ids == edge.text.eos_ids
    assert second.params.seed != third.params.seed
    assert last.params.stop_ids == (9,)
    assert (last.params.top_k, 0 < last.params.top_p < 1e-5) == (0, True)


@pytest.mark.parametrize(("config", "temperature"), [({"do_sample": False, "temperature": 0.7}, 0.0), ({"temperature": 0.7}, 0.7)])
def test_a_checkpoint_may_be_greedy(tmp_path: Path, config: dict[str, Any], temperature: float) -> None:
    """`do_sample: false` of generation_config.json means temperature 0, whatever stands beside it."""
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert Defaults.read(tmp_path).temperature == temperature


def test_adjustments_of_logits_reach_the_engine(edge: Edge) -> None:
    """Penalties, biases (-100 forbids), bad words in both spellings and allowed ids; what says nothing is none."""
    chat = chat_body()
    given = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "logit_bias": {"7": -100, "1023": 2.5}}
    given |= {"bad_words": ["house", " house", "two words"], "allowed_token_ids": [9, 8, 9]}
    neutral = {"presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "bad_words": [], "allowed_token_ids": None}
    for body in (chat | given, chat, chat | neutral):
        edge.post("/v1/chat/completions", body).raise_for_status()
    wanted, *others = [request.params.adjustments for request in edge.core.requests]
    spelled = [tuple(edge.text.encode(text, add_bos=False)) for text in ("house", " house", "two words", " two words")]
    assert wanted == LogitAdjustments(
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        repetition_penalty=1.2,
        bias=((7, -float("inf")), (1023, 2.5)),
        allowed_ids=(9, 8),
        bad_words=tuple(dict.fromkeys(spelled)),
    )
    assert others == [None, None]


def test_templates_options_and_tools_reach_the_prompt(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thinking and tools change the prompt; with tool_choice none tools stay in it, so that it stays cached, and what begins
    a call is forbidden, be its id 0, beside the request's own biases."""
    tool = {"type": "function", "function": {"name": "now", "description": "d", "parameters": {"type": "object", "properties": {}}}}
    variants = [
        {}, {"chat_template_kwargs": {"enable_thinking": True}}, {"tools": [tool]},
        {"tools": [tool], "tool_choice": "none", "logit_bias": {"7": 2}},
    ]  # fmt: skip
    for extra in variants:
        edge.post("/v1/chat/completions", chat_body() | extra).raise_for_status()
    plain, thinking, tools, none = [tuple(request.tokens) for request in edge.core.requests]
    assert len({plain, thinking, tools}) == 3
    assert none == tools
    *others, last = [request.params.adjustments for request in edge.core.requests]
    assert others == [None] * 3
    markers = [edge.text.control_id(name) for name in ("<|tool_call>", "<|tool_response>")]
    assert last is not None
    assert dict(last.bias) == {7: 2.0, **dict.fromkeys(markers, -float("inf"))}
    monkeypatch.setattr(edge.text, "control_id", {"<|tool_call>": 0}.get)
    edge.post("/v1/chat/completions", chat_body() | variants[-1]).raise_for_status()
    assert dict(edge.core.requests[-1].params.adjustments.bias) == {7: 2.0, 0: -float("inf")}  # type: ignore[union-attr]
    monkeypatch.undo()
    edge.configure(vocab=2048)
    full = {"tools": [tool], "tool_choice": "none", "logit_bias": {str(token): 1 for token in range(1024, 2047)}}
    error = error_of(edge.post("/v1/chat/completions", chat_body() | full), 400)
    assert (error["param"], "those that tool_choice none forbids" in error["message"]) == ("logit_bias", True)
    edge.post("/v1/chat/completions", chat_body() | full | {"tool_choice": "auto"}).raise_for_status()


def test_models(edge: Edge) -> None:
    """The list, one card by name, 404 for others."""
    with client(edge) as api:
        assert [model.id for model in api.models.list()] == ["nano"]
        assert api.models.retrieve("nano").id == "nano"
        assert api.models.retrieve("nano").model_dump()["weights"] == "fp8"
        with pytest.raises(openai.NotFoundError) as caught:
            api.models.retrieve("other/name")
    assert caught.value.code == "model_not_found"


def test_load_balancers_may_ask_for_health_with_head(edge: Edge) -> None:
    """200 without a body, at all three paths, as GET says it otherwise; other paths have no HEAD."""
    for path in ("/health", "/health/live", "/health/ready"):
        reply = httpx.head(f"{edge.url}{path}")
        assert (reply.status_code, reply.content) == (200, b"")
        assert reply.headers["content-length"] == edge.get(path).raise_for_status().headers["content-length"]
    assert httpx.head(f"{edge.url}/v1/models").status_code == 405

def test_an_engine_refusal_is_a_plain_400_even_for_a_stream(edge: Edge) -> None:
    """Headers wait for the engine's first word."""
    edge.core.refuse = "the request needs room for 9 tokens; the KV cache holds 8"
    with client(edge) as api, pytest.raises(openai.BadRequestError, match="holds 8"):
        api.chat.completions.create(model="nano", messages=HELLO, stream=True)


def test_a_request_that_fails_midway_ends_with_one_error_event(edge: Edge) -> None:
    """After the first token an error is the stream's last event, there is no [DONE], and OpenAI's client raises."""
    edge.script("some words come")
    edge.core.fail_after = 2
    data = events(edge, "/v1/chat/completions", chat_body())
    assert ["error" in event for event in data].count(True) == 1
    assert data[-1]["error"]["code"] == "generation_failed"
    with client(edge) as api, pytest.raises(openai.APIError, match="not finite"):
        for _ in api.chat.completions.create(model="nano", messages=HELLO, stream=True):
            pass


def test_a_failure_before_the_first_token_is_not_retried(edge: Edge) -> None:
    """500 with x-should-retry: false."""
    edge.core.fail_after = 0
    reply = edge.post("/v1/chat/completions", chat_body())
    assert reply.status_code == 500
    assert reply.headers["x-should-retry"] == "false"


def test_an_end_that_nobody_asked_for_is_no_success(edge: Edge) -> None:
    """Text that the engine broke off does not pass for complete."""
    edge.script("some words")
    edge.core.finish = FinishReason.abort
    data = events(edge, "/v1/chat/completions", chat_body())
    assert data[-1]["error"]["code"] == "generation_failed"
