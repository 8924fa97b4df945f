"""vLLM's benchmark client, which comes with vLLM only: the requests of its endpoint_request_func.py, sent and read as it does.

Its payloads for `--backend openai` and `openai-chat`, with --ignore-eos, the sampling options that it puts into the body, and the
structured-output benchmark's. It counts a request as failed when no chunk has choices; tokens are what the usage chunk says.
"""

import json
from typing import Any

import httpx

from tests.clients.cases import ABOUT_ANNA, ANSWER_S, SUM, Server, case, expect, main

TOKENS = 12
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def post(server: Server, path: str, body: dict[str, Any], text: Any) -> tuple[str, int]:
    """(what `text` finds in the choices, completion tokens of the usage chunk)"""
    said, tokens, done = "", 0, False
    headers = {"Authorization": f"Bearer {server.key}", "x-request-id": "bench-0"}
    with httpx.stream("POST", server.base + path, json=body, headers=headers, timeout=ANSWER_S) as response:
        assert response.status_code == 200, f"{response.status_code} {response.read().decode()}"
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data.startswith(":"):
                continue
            if data == "[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if chunk.get("choices"):
                said += text(chunk["choices"][0]) or ""
            elif chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    assert done, "no [DONE]"
    return said, tokens


@case("openai")
def completions(server: Server) -> None:
    options = {"repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None, "ignore_eos": True}
    body = {"model": server.model, "prompt": "One two", **options, **USAGE, **SAMPLING}
    said, tokens = post(server, "/completions", body, lambda choice: choice["text"])
    assert said
    expect(tokens, TOKENS)


@case("openai, token ids")
def token_ids(server: Server) -> None:
    options = {"repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": 1, "ignore_eos": True}
    body = {"model": server.model, "prompt": [2, 110, 111, 112], **options, **USAGE, **SAMPLING}
    expect(post(server, "/completions", body, lambda choice: choice["text"])[1], TOKENS)


@case("openai-chat")
def chat(server: Server) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": SUM}]}]
    body = {"model": server.model, "messages": messages, "max_completion_tokens": TOKENS, "ignore_eos": True, **USAGE, **SAMPLING}
    said, tokens = post(server, "/chat/completions", body, lambda choice: choice["delta"].get("content"))
    assert said
    expect(tokens, TOKENS)


@case("structured outputs")
def structured(server: Server) -> None:
    keys = ("name", "city")
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys}
    messages = [{"role": "user", "content": [{"type": "text", "text": ABOUT_ANNA}]}]
    body = {"model": server.model, "messages": messages, "max_completion_tokens": 100, "structured_outputs": {"json": schema}}
    said, _ = post(server, "/chat/completions", body | USAGE | SAMPLING, lambda choice: choice["delta"].get("content"))
    expect(json.loads(said), {"name": "Anna", "city": "Paris"})


if __name__ == "__main__":
    main()
