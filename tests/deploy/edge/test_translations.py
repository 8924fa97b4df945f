"""What other APIs say of tools and of the answer's form, in the words of a chat completion: one place for each API."""

import json
from typing import Any

import pytest

from deploy.edge.anthropic.message_request import MessagesRequest, parse_message
from deploy.edge.openai.response_request import parse_response_request

pytestmark = pytest.mark.pure

NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def as_json(value: Any) -> Any:
    """With raw JSON inside it decoded."""
    return json.loads(json.dumps(value, default=lambda raw: json.loads(bytes(raw))))


def of_messages(**extra: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} | extra
    found: dict[str, Any] = as_json(parse_message(MessagesRequest, json.dumps(body).encode()).chat())
    return found


def of_responses(**extra: Any) -> dict[str, Any]:
    found: dict[str, Any] = as_json(parse_response_request(json.dumps({"model": "m", "input": "x"} | extra).encode()).chat())
    return found


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"), ({"type": "tool", "name": "f"}, NAMED)],
)
def test_anthropics_tool_choice(choice: dict[str, Any], wanted: Any) -> None:
    """Each of its words; without one there is none, and only disable_parallel_tool_use asks for one call."""
    assert of_messages(tool_choice=choice)["tool_choice"] == wanted
    assert "tool_choice" not in of_messages()
    assert "parallel_tool_calls" not in of_messages(tool_choice=choice)
    assert of_messages(tool_choice=choice | {"disable_parallel_tool_use": True})["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("required", "required"),
        ({"type": "function", "name": "f"}, NAMED),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        ),
    ],
)
def test_the_tool_choice_of_responses(choice: Any, wanted: Any) -> None:
    """Words as they are, a function and allowed tools as a chat nests them."""
    assert of_responses(tool_choice=choice)["tool_choice"] == wanted
    assert "tool_choice" not in of_responses(tool_choice=None)


def test_a_schema_for_the_answer() -> None:
    """Of both APIs it becomes a chat's response_format, the schema as it was written; without one there is none."""
    form = {"type": "json_schema", "schema": SCHEMA}
    found = of_messages(output_config={"effort": "low", "format": form})["response_format"]
    assert found == of_messages(output_format=form)["response_format"]
    assert found == of_messages(output_config={"effort": "low"}, output_format=form)["response_format"], "each key says one of them"
    assert found == {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA, "strict": True}}
    named = of_responses(text={"format": form | {"name": "n", "strict": False}})["response_format"]
    assert named == {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}
    assert of_responses(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in of_messages() | of_responses(text={"verbosity": "low"})


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False)])
def test_thinking(kind: str, *, thinks: bool) -> None:
    """Any type but disabled lets the model think; without one the chat's default holds."""
    assert of_messages(thinking={"type": kind})["chat_template_kwargs"] == {"enable_thinking": thinks}
    assert "chat_template_kwargs" not in of_messages()
