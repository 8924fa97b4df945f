"""Random conversations, from the body of a request to token ids, against the checkpoint's template rendered by transformers."""

import json
import random
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from deploy.edge.openai.schemas import CHAT_READER
from deploy.edge.requests import ask
from deploy.edge.requests.ask import ChatPrompt
from engine.front import template
from engine.front.template import ChatTemplate, CutCalls
from engine.front.text import TextProcessor
from tests.nano.random_models import build
from tests.support.engine.schemas import members

pytestmark = pytest.mark.cpu

CASES = 200
WORDS = ("Weather ", "\n", "é", "👋🏽", '"', "'", "{", "}", ":", ",", "\\", "<", ">", "null", "日本", "\u2028", "call:f{", " x ")
NAMES = ("get_weather", "run-it", "mcp__files.read", "Ünit/x:y", "_")
KEYS = ("city", "a-b", "Z", "ünit", "$ref", "x y", "b", "a<b")
NUMBERS = (0, -7, 3.25, 12345678901234567890, True, False, None)


class Checkpoint:
    """A nano checkpoint's files, as we read them and as transformers does."""

    def __init__(self, folder: Path) -> None:
        self.text = TextProcessor.load(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.source = (folder / "chat_template.jinja").read_text()

    def ours(self, body: dict[str, Any]) -> list[int]:
        """The prompt of a request."""
        chat = CHAT_READER.read(json.dumps(body).encode()).ask().prompt
        assert isinstance(chat, ChatPrompt)
        messages = [message.plain() for message in chat.messages]
        return self.text.render_chat(messages, tools=chat.tools, enable_thinking=bool(chat.thinks))

    def theirs(self, body: dict[str, Any]) -> list[int]:
        """The same by transformers; there arguments have to be mappings, results stand in the order of their calls, and the role is
        system."""
        variables = {"bos_token": "<bos>", "add_generation_prompt": True, **body.get("chat_template_kwargs", {})}
        messages = list(map(_with_mappings, _in_order(body["messages"])))
        (text,), _ = render_jinja_template([messages], body.get("tools"), None, self.source, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every result behind the result of the call before its own, as long as they follow each other, whatever stands before them."""
    ids = [[call["id"] for call in message.get("tool_calls") or ()] for message in messages]
    ordered = [message | ({"role": "system"} if message["role"] == "developer" else {}) for message in messages]
    for _ in messages:
        for index in range(2, len(messages)):
            before, behind = ordered[index - 1 : index + 1]
            earlier = list(dropwhile(lambda at: ordered[at]["role"] == "tool", reversed(range(index))))
            turns = takewhile(lambda at: ordered[at]["role"] != "tool", earlier)
            calls = [call for at in sorted(turns) for call in ids[at]]
            places = [calls.index(each["tool_call_id"]) if each.get("tool_call_id") in calls else 0 for each in (before, behind)]
            if before["role"] == behind["role"] == "tool" and places[0] > places[1]:
                ordered[index - 1 : index + 1] = behind, before
    return ordered


def _with_mappings(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "function": {**call["function"], "arguments": _mapping(call)}} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls} if calls else message


def _mapping(call: dict[str, Any]) -> Any:
    arguments = call["function"].get("arguments") or "{}"
    return json.loads(arguments) if isinstance(arguments, str) else arguments


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """With an empty thought where thinking is off, and without."""
    folder = tmp_path_factory.mktemp("nano")
    return [Checkpoint(build(member, folder / member)) for member in ("31b", "e2b")]


def words(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randrange(7)))


def content(rng: random.Random) -> Any:
    """A text, parts, an empty one, or nothing."""
    parts = [{"type": "text", "text": words(rng), "cache_control": {"type": "ephemeral"}} for _ in range(rng.randrange(3))]
    return rng.choice((words(rng), words(rng), parts, "", None))


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(6 if depth else 3)
    if kind < 2:
        return words(rng)
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind == 3:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {key: value(rng, depth - 1) for key in rng.sample(KEYS, rng.randrange(4))}


def arguments(rng: random.Random) -> Any:
    """As clients send them: JSON in a string, an object, or nothing at all."""
    made = {key: value(rng) for key in rng.sample(KEYS, rng.randrange(4))}
    return rng.choice((json.dumps(made), json.dumps(made, ensure_ascii=False, indent=1), made, "", None, "{}"))


def turn(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """A user's question, an answer with thoughts and calls, results in any order, or what stands between them."""
    kind = rng.randrange(8)
    if kind < 3:
        return [{"role": "user", "content": content(rng) or "", "name": "somebody"}]
    if kind == 3:
        return [{"role": rng.choice(("system", "developer")), "content": content(rng)}]
    answer = {"role": "assistant", "content": content(rng)}
    if rng.random() < 0.5:
        answer[rng.choice(("reasoning", "reasoning_content"))] = rng.choice((words(rng), None))
    if kind < 6:
        return [answer]
    ids = [f"call_{number}{place}" for place in range(rng.randint(1, 3))]
    answer["tool_calls"] = [
        {"id": each, "type": "function", "function": {"name": rng.choice(NAMES), "arguments": arguments(rng)}} for each in ids
    ]
    between = [{"role": "user", "content": words(rng)}] * rng.randrange(2)
    known = rng.sample(ids, rng.randint(0, len(ids))) + rng.choices(ids, k=rng.randrange(2))
    return [answer, *between, *({"role": "tool", "tool_call_id": each, "content": content(rng)} for each in known)]


def request(rng: random.Random) -> dict[str, Any]:
    """A body."""
    messages = [message for number in range(rng.randint(1, 6)) for message in turn(rng, number)]
    body = {"model": "m", "messages": messages}
    if rng.random() < 0.5:
        body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.7, "preserve_thinking": rng.random() < 0.5}
    if rng.random() < 0.5:
        functions = [{"name": name, "description": words(rng), "parameters": members(rng, 2)} for name in rng.sample(NAMES, 2)]
        body["tools"] = [{"type": "function", "function": function} for function in [*functions, {"name": "bare"}]]
    return body


def differing(checkpoints: list[Checkpoint]) -> list[int]:
    """The seeds of conversations whose ids are not transformers'."""
    found = []
    for seed in range(CASES):
        rng = random.Random(seed)
        checkpoint, body = rng.choice(checkpoints), request(rng)
        if checkpoint.ours(body) != checkpoint.theirs(body):
            found.append(seed)
    return found


def test_conversations_are_rendered_as_transformers_does(checkpoints: list[Checkpoint]) -> None:
    """Calls, results out of order or twice, thoughts, empty and null contents, parts, odd names: the very same ids."""
    assert differing(checkpoints) == []


def _without_ids(message: dict[str, Any], cut: CutCalls) -> dict[str, Any]:
    ready = _prepared(message, cut)
    return {key: value for key, value in ready.items() if key != "tool_call_id"}


_prepared = template._prepared


@pytest.mark.parametrize("fault", ["results without names", "results as they came", "the guard stays", "arguments as text"])
def test_another_rendering_is_seen(checkpoints: list[Checkpoint], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The comparison fails at once where results lose their calls, or stand in another order, the guard's character stays, or
    arguments are not read."""
    match fault:
        case "results as they came":
            monkeypatch.setattr(ask, "_with_results_in_order", lambda messages: messages)
        case "results without names":
            monkeypatch.setattr(template, "_prepared", _without_ids)
        case "the guard stays":
            render = ChatTemplate.render
            monkeypatch.setattr(ChatTemplate, "render", lambda self, *said, **switches: (render(self, *said, **switches)[0], ""))
        case _:
            monkeypatch.setattr(template, "_parsed", lambda text, cut: {"": text})
    assert len(differing(checkpoints)) > CASES // 10
