"""Keys that other servers know and we do not have: neutral values pass, any other is refused by name."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from deploy.edge.openai.absent_keys import CHAT, COMPLETION, is_neutral
from deploy.edge.openai.schemas import ChatRequest, CompletionRequest, Sampling, parse
from engine.errors import InvalidRequest

pytestmark = pytest.mark.pure

BODIES: dict[type[Sampling], dict[str, Any]] = {
    ChatRequest: {"model": "nano", "messages": [{"role": "user", "content": "Hello"}]},
    CompletionRequest: {"model": "nano", "prompt": "Hello"},
}
TABLES: dict[type[Sampling], Mapping[str, tuple[Any, ...]]] = {ChatRequest: CHAT, CompletionRequest: COMPLETION}
CASES = [(kind, key) for kind, table in TABLES.items() for key in table]


def asked(kind: type[Sampling], **extra: Any) -> Sampling:
    return parse(kind, json.dumps(BODIES[kind] | extra).encode())


@pytest.mark.parametrize(("kind", "key"), CASES, ids=[f"{kind.__name__}-{key}" for kind, key in CASES])
def test_only_neutral_values_pass(kind: type[Sampling], key: str) -> None:
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
    """true is not 1, and false not 0; 0 and 0.0 are the same."""
    assert is_neutral(0.0, (0,))
    assert is_neutral(False, (False,))
    assert not is_neutral(False, (0,))
    assert not is_neutral(1, (True,))
