"""Forms of replies through HTTP and a real group: random weights that know nothing of JSON, and the trained nano models (slow).

Of its own accord a model that knows nothing of a form seldom ends a text, a number or a list: what closes a value of JSON is made
likelier (`logit_bias`), and of calls' arguments everything is bounded by their schemas.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from cluster.group import Group
from deploy.edge.edge_settings import LimitSettings
from deploy.edge.routes import create_app
from deploy.edge.service import Service
from deploy.models.resolve import resolve
from engine.config import engine_config
from engine.front.grammar_check import GrammarCheck
from engine.front.text import TextProcessor
from engine.matcher import Vocabulary
from tests.conftest import Nano
from tests.support.edge.served_settings import service_settings
from tests.support.edge.summed import sse, sum_chat
from tests.support.engine.groups import running
from tests.support.engine.outcomes import no_sink
from tests.support.engine.schemas import members

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.alone]

SCHEMAS, CALLS = 100, 200
TOOL_SETS = 40  # each asked five times: long prompts of tools are most of the time, and their prefixes are cached
SLOTS = 64
BIAS = 6.0
NAMES = ("get_weather", "run-it")
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@pytest.mark.timeout(900)
def test_every_form_is_kept(nano: Nano) -> None:
    """100 random schemas at TP=4, thinking on and off, streamed and whole: every reply is valid by jsonschema, and none is cut;
    without its form none is."""
    assert served(nano("31b"), form, SCHEMAS, tp=4) == ["valid"] * SCHEMAS
    assert "valid" not in served(nano("31b"), free, 8)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["random:31b", "nano:31b", "nano:26b-a4b", "nano:e2b"])
def test_every_call_is_kept(nano: Nano, model: str) -> None:
    """200 required and named calls of 80 random tools, thinking on and off, streamed and whole: every one parses and is valid."""
    kind, _, member = model.partition(":")
    assert served(nano(member) if kind == "random" else resolve(model), call, CALLS) == ["valid"] * CALLS


def served(folder: Path, one: Callable[[Ask, int], Awaitable[str]], count: int, tp: int = 1) -> list[str]:
    """What came of so many requests, all at once."""
    config = engine_config(
        model=str(folder), tp=tp, device="cpu", dtype="float32", max_seqs=SLOTS, max_len=2048, boot_timeout_s=300.0,
        heartbeat_timeout_s=30.0, core_log="warning",
    )  # fmt: skip
    group = Group.boot(config)
    text = TextProcessor.load(folder)

    async def main() -> list[str]:
        async with running(group) as run:
            limits = LimitSettings(queue_timeout_s=3000, request_timeout_s=3000)  # they wait for each other
            grammars = GrammarCheck(Vocabulary.of(text.pieces, text.eos_ids, text.vocab_size).complaint)
            settings = service_settings("nano", text.vocab_size, 2048, limits=limits)
            service = Service(settings, text, run.client, grammars, None, no_sink, None, {})
            transport = httpx.ASGITransport(create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=3000) as client:
                ask = asker(client, closing(text) if one is form else {})
                found = await asyncio.gather(*(one(ask, seed) for seed in range(count)))
            load = run.client.load
            assert load is not None
            print(f"{found.count('valid')} of {count} valid, {load.decode_tokens} tokens in {load.step} steps")
            return found

    try:
        return asyncio.run(main())
    finally:
        group.kill()


def closing(text: TextProcessor) -> dict[str, float]:
    """A bias of the tokens that begin with what closes a value."""
    ends = {b'"', b"}", b"]", b","}
    return {str(token): BIAS for token in range(text.vocab_size) if text.pieces.bytes_of(token)[:1] in ends}


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, in which nothing can be written without end."""
    match schema.get("type"):
        case "string":
            return {"maxLength": 9} | schema
        case "integer":
            return {"minimum": -3, "maximum": 70} | schema
        case "number":
            return {"enum": [2.5, -1, 1000]}
        case "array":
            return {"maxItems": 3} | schema | {"items": bounded(schema["items"])}
        case "object":
            return schema | {"properties": {name: bounded(each) for name, each in schema["properties"].items()}}
    return schema | {"anyOf": [bounded(each) for each in schema["anyOf"]]} if "anyOf" in schema else schema


def asker(client: httpx.AsyncClient, bias: dict[str, float]) -> Ask:
    """Posts a chat; the choice, a stream's put together."""

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Hello"}]
        known = {"model": "nano", "messages": messages, "max_tokens": 1500, "temperature": 1.0, "logit_bias": bias}
        reply = await client.post("/v1/chat/completions", json=known | body)
        assert reply.status_code == 200, reply.text
        return whole(reply.text) if body.get("stream") else dict(reply.json()["choices"][0])

    return ask


def whole(stream: str) -> dict[str, Any]:
    """A streamed choice, put together."""
    found = sum_chat(sse(stream))
    calls = [{"function": {"name": name, "arguments": arguments}} for _, name, arguments in found["calls"]]
    return {"message": {"content": found["content"], "tool_calls": calls}, "finish_reason": found["finish"]}


def thinking(seed: int) -> dict[str, Any]:
    """On for every other pair of seeds."""
    return {"chat_template_kwargs": {"enable_thinking": seed % 4 < 2}, "thinking_token_budget": 16}


async def form(ask: Ask, seed: int) -> str:
    """One schema: "valid", or what is wrong."""
    schema = members(random.Random(seed), 2)
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = await ask({"seed": seed, "stream": seed % 2 == 0, "response_format": asked, **thinking(seed)})
    if choice["finish_reason"] != "stop":
        return f"seed {seed} ends by {choice['finish_reason']}"
    return verdict(choice["message"]["content"], schema, seed)


async def free(ask: Ask, seed: int) -> str:
    """The same without the form."""
    choice = await ask({"seed": seed, "max_tokens": 60, **thinking(seed)})
    return verdict(choice["message"]["content"], members(random.Random(seed), 2), seed)


async def call(ask: Ask, seed: int) -> str:
    """Calls of two random tools, required or one by its name: "valid", or what is wrong."""
    schemas = {name: bounded(members(random.Random(2 * (seed % TOOL_SETS) + at), 1)) for at, name in enumerate(NAMES)}
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in schemas.items()]
    named = {"type": "function", "function": {"name": NAMES[1]}}
    choice = await ask(
        {"seed": seed, "stream": seed % 2 == 0, "tools": tools, "tool_choice": named if seed % 3 else "required", **thinking(seed)}
    )
    calls = choice["message"].get("tool_calls") or []
    names = [each["function"]["name"] for each in calls]
    if choice["finish_reason"] != "tool_calls" or not names or (seed % 3 and names != [NAMES[1]]):
        return f"seed {seed} ends by {choice['finish_reason']} with calls of {names}"
    found = {verdict(each["function"]["arguments"], schemas[each["function"]["name"]], seed) for each in calls}
    return " ".join(sorted(found - {"valid"})) or "valid"


def verdict(text: str, schema: dict[str, Any], seed: int) -> str:
    """ "valid", or what is wrong with JSON by a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"seed {seed}: {str(error)[:200]} of {text[:200]!r}"
    return "valid"
