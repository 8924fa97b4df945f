"""Keys that other servers know and we do not have: neutral values pass, any other is refused by name."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from deploy.edge.bodies.body_reader import BodyReader
from deploy.edge.openai.absent_keys import CHAT, COMPLETION
from deploy.edge.openai.schemas import CHAT_READER, COMPLETION_READER, ChatRequest, CompletionKeys, CompletionRequest
from engine.errors import InvalidRequest
from tests.support.edge.api_client import chat_body

pytestmark = pytest.mark.pure

BODIES: dict[type[CompletionKeys], dict[str, Any]] = {
    ChatRequest: chat_body(),
    CompletionRequest: {"model": "nano", "prompt": "Hello"},
}
READERS: dict[type[CompletionKeys], BodyReader[Any]] = {ChatRequest: CHAT_READER, CompletionRequest: COMPLETION_READER}
TABLES: dict[type[CompletionKeys], Mapping[str, tuple[Any, ...]]] = {ChatRequest: CHAT, CompletionRequest: COMPLETION}
CASES = [(kind, key) for kind, table in TABLES.items() for key in table]


def asked(kind: type[CompletionKeys], **extra: Any) -> CompletionKeys:
    request = READERS[kind].read(json.dumps(BODIES[kind] | extra).encode())
    request.ask()
    return request


@pytest.mark.parametrize(("kind", "key"), CASES, ids=[f"{kind.__name__}-{key}" for kind, key in CASES])
def test_only_neutral_values_pass(kind: type[CompletionKeys], key: str) -> None:
    """null and each neutral value are served; a number, a text, a list and an object that ask for something name the key."""
    for value in (None, *TABLES[kind][key]):
        asked(kind, **{key: value})
    for value in (0.37, "ask", ["ask"], {"ask": 1}, [["x" * 1000]], "y" * 100_000):
        with pytest.raises(InvalidRequest) as caught:
            asked(kind, **{key: value})
        assert (caught.value.param, caught.value.code) == (key, "unsupported_parameter")


def test_what_nobody_knows_is_ignored() -> None:
    """A key of no table, and those that change no answer, in any value."""
    for key in ("nobody_knows", "user", "metadata", "store", "service_tier"):
        assert asked(ChatRequest, **{key: {"a": [1, 2]}}).model == "nano"


def test_a_switch_is_not_a_number() -> None:
    """true is not 1, and false not 0; 1 and 1.0 are the same."""
    asked(ChatRequest, length_penalty=1.0, echo=False)
    for wrong in ({"length_penalty": True}, {"echo": 0}):
        with pytest.raises(InvalidRequest):
            asked(ChatRequest, **wrong)
