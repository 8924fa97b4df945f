"""Forms of replies through HTTP and a real group at TP=4, by a model of random weights that knows nothing of JSON (slow)."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import jsonschema
import pytest

from cluster.group import Group
from deploy.edge.routes import create_app
from deploy.edge.service import Service
from engine.config import engine_config
from engine.front.text import TextProcessor
from tests.conftest import Nano
from tests.support.engine.groups import running
from tests.support.engine.schemas import members

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.alone]

SCHEMAS, CALLS = 100, 200
NAMES = ("get_weather", "run-it")
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def test_every_reply_keeps_its_form(nano: Nano) -> None:
    """100 random schemas, thinking on and off, streamed and whole, and 200 required and named calls: every one that max_tokens did
    not cut parses and is valid by jsonschema, and hardly any is cut."""
    config = engine_config(
        model=str(nano("31b")), tp=4, device="cpu", dtype="float32", max_seqs=32, max_len=2048, boot_timeout_s=300.0,
        heartbeat_timeout_s=30.0, core_log="warning",
    )  # fmt: skip
    group = Group.boot(config)
    text = TextProcessor.load(nano("31b"))

    async def main() -> None:
        async with running(group) as run:
            service = Service(name="nano", text=text, engine=run.client, vocab=text.vocab_size, max_len=2048)
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=3000) as client:
                ask = asker(client)
                forms = await asyncio.gather(*(form(ask, seed) for seed in range(SCHEMAS)))
                calls = await asyncio.gather(*(call(ask, seed) for seed in range(CALLS)))
        print(f"{forms.count('valid')} of {SCHEMAS} forms, {calls.count('valid')} of {CALLS} calls; the others cut")
        assert {*forms, *calls} <= {"valid", "cut"}
        assert forms.count("valid") >= 0.9 * SCHEMAS
        assert calls.count("valid") >= 0.9 * CALLS

    try:
        asyncio.run(main())
    finally:
        group.kill()


def asker(client: httpx.AsyncClient) -> Ask:
    """Posts a chat; the choice, a stream's put together."""

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        known = {"model": "nano", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1500, "temperature": 1.0}
        reply = await client.post("/v1/chat/completions", json=known | body)
        assert reply.status_code == 200, reply.text
        return whole(reply.text) if body.get("stream") else dict(reply.json()["choices"][0])

    return ask


def whole(stream: str) -> dict[str, Any]:
    """A streamed choice, put together."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    finish = None
    for line in stream.split("\n\n"):
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    message["tool_calls"].append({"function": {"name": piece["function"]["name"], "arguments": ""}})
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return {"message": message, "finish_reason": finish}


def thinking(seed: int) -> dict[str, Any]:
    """On for every other pair of seeds."""
    return {"chat_template_kwargs": {"enable_thinking": seed % 4 < 2}, "thinking_token_budget": 16}


async def form(ask: Ask, seed: int) -> str:
    """One schema: valid or cut; raises where it is neither."""
    schema = members(random.Random(seed), 2)
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = await ask({"seed": seed, "stream": seed % 2 == 0, "response_format": asked, **thinking(seed)})
    if choice["finish_reason"] == "length":
        return "cut"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    return "valid"


async def call(ask: Ask, seed: int) -> str:
    """Calls of two random tools, required or one by its name."""
    schemas = {name: members(random.Random(2 * seed + at), 1) for at, name in enumerate(NAMES)}
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in schemas.items()]
    named = {"type": "function", "function": {"name": NAMES[1]}}
    choice = await ask(
        {"seed": seed, "stream": seed % 2 == 0, "tools": tools, "tool_choice": named if seed % 3 else "required", **thinking(seed)}
    )
    if choice["finish_reason"] == "length":
        return "cut"
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert calls
    assert seed % 3 == 0 or [each["function"]["name"] for each in calls] == [NAMES[1]]
    for each in calls:
        jsonschema.validate(json.loads(each["function"]["arguments"]), schemas[each["function"]["name"]])
    return "valid"
