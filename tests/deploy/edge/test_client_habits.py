"""What clients of other servers send and expect: switches for thoughts, items of agents, and streams that proxies keep open."""

import base64
import json
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.guards.uploads import WAITS_S
from deploy.edge.openai.response_request import RESPONSES_READER
from deploy.edge.openai.schemas import CHAT_READER, COMPLETION_READER
from deploy.edge.serving import http_answer
from engine.errors import InvalidRequest
from engine.front.grammar_check import QUEUE_S
from tests.support.edge.api_client import error_of, user
from tests.support.edge.http_edge import Edge
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("keys", "thinks"),
    [
        ({"enable_thinking": False}, False), ({"enable_thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False), ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, True), ({"thinking": {}}, None), ({}, None),
    ],
)  # fmt: skip
def test_thoughts_are_switched_in_every_spelling(keys: dict[str, Any], thinks: bool | None) -> None:
    """At the top level, in chats and responses; a text completion has no thoughts, and reads past them."""
    body = {"messages": [user("Hi")]}
    assert CHAT_READER.read(json.dumps(body | keys).encode()).ask().prompt.thinks is thinks
    assert RESPONSES_READER.read(json.dumps({"input": "Hi"} | keys).encode()).ask().prompt.thinks is thinks
    assert COMPLETION_READER.read(json.dumps({"prompt": "Hi"} | keys).encode()).ask()


def test_template_switches_of_other_models_have_no_effect() -> None:
    """`thinking` is DeepSeek's name for what `enable_thinking` says; others are read past. Planted: a switch of ours acts."""

    def chat(**switches: Any) -> Any:
        body = {"messages": [user("Hi")], "chat_template_kwargs": switches}
        return CHAT_READER.read(json.dumps(body).encode()).ask().prompt

    assert chat(custom="x", add_vision_id=True) == chat()
    assert chat(thinking=False).thinks is False
    assert chat(preserve_thinking=True) != chat()


def test_a_seed_of_minus_one_is_random() -> None:
    """As SGLang and llama.cpp have it. Planted: another seed is kept."""
    for seed, kept in ((-1, None), (-2, -2), (0, 0)):
        ask = COMPLETION_READER.read(json.dumps({"prompt": "Hi", "seed": seed}).encode()).ask()
        assert ask.sampling.seed == kept


def test_a_completion_has_a_limit_by_either_name() -> None:
    """`max_completion_tokens` is `max_tokens`. Planted: without it there is another."""
    for keys, limit in (({"max_completion_tokens": 3}, 3), ({"max_tokens": 4}, 4), ({}, None)):
        ask = COMPLETION_READER.read(json.dumps({"prompt": "Hi", **keys}).encode()).ask()
        assert ask.sampling.max_tokens == limit


def test_a_clip_may_be_a_data_url() -> None:
    """Of input_audio. Planted: base64 alone becomes a URL by its format."""
    data = base64.b64encode(b"RIFF").decode()
    for given, url in ((f"data:audio/wav;base64,{data}", f"data:audio/wav;base64,{data}"), (data, f"data:audio/mp3;base64,{data}")):
        part = {"type": "input_audio", "input_audio": {"data": given, "format": "mp3"}}
        ask = CHAT_READER.read(json.dumps({"messages": [user([part])]}).encode()).ask()
        assert [medium.url for medium in ask.prompt.media] == [url]


CUSTOM = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"}
SHELL = {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"}
PAST = ("web_search_call", "tool_search_call", "tool_search_output", "image_generation_call", "ghost_snapshot", "compaction")


def test_items_of_agents_are_rendered_or_read_past(edge: Edge) -> None:
    """Codex' own calls are in the prompt with their results, what other servers have answered is not. Planted: a reference to what
    is not stored is a 400."""
    edge.reset()
    edge.configure(max_len=4096)
    edge.script("done")
    items = [
        user("Fix it"), CUSTOM, {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
        SHELL, {"type": "local_shell_call_output", "call_id": "c2", "output": "a.py"},
        *({"type": kind, "id": "x"} for kind in PAST),
    ]  # fmt: skip
    assert edge.post("/v1/responses", {"model": "nano", "input": items}).status_code == 200
    prompt = edge.prompt_text()
    assert 'call:apply_patch{input:<|"|>*** Begin<|"|>}' in prompt
    assert 'call:local_shell{command:[<|"|>ls<|"|>],type:<|"|>exec<|"|>}' in prompt
    assert prompt.count("response:apply_patch") == prompt.count("response:local_shell") == 1
    with pytest.raises(InvalidRequest, match="item_reference"):
        RESPONSES_READER.read(json.dumps({"input": [{"type": "item_reference", "id": "x"}]}).encode()).ask()
    reply = edge.post("/v1/responses", {"model": "nano", "input": [{"type": "item_reference", "id": "x"}]})
    assert error_of(reply, 400)["param"] == "input"


def test_events_have_no_line_ends_of_unicode(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are escaped, and the text is the same. Planted: raw, they cut events of clients that split by Unicode's lines."""
    text = "a\u2028b\u2029c\u0085d"
    for path, body in ((CHAT, {"messages": [user("x")]}), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
        edge.reset()
        edge.script(text, 99)
        with edge.stream(path, {"model": "nano", "stream": True, "max_tokens": 99, **body} if "input" not in body else
                         {"model": "nano", "stream": True, **body}) as reply:  # fmt: skip
            said = reply.read().decode()
        assert r"a\u2028b\u2029c\u0085d" in said, path
        assert len(said.splitlines()) == said.count("\n")
    monkeypatch.setattr(http_answer, "_LINE_ENDS", ())
    edge.reset()
    edge.script(text, 99)
    with edge.stream("/v1/completions", {"model": "nano", "stream": True, "prompt": "x", "max_tokens": 99}) as reply:
        said = reply.read().decode()
    assert len(said.splitlines()) > said.count("\n")


def test_the_queue_is_shorter_than_proxies_wait() -> None:
    """By default a refusal comes before the 60 s of proxies, the wait of a grammar's check or of a large upload counted."""
    assert LimitSettings().queue_timeout_s + QUEUE_S < 60
    assert LimitSettings().queue_timeout_s + sum(WAITS_S) < 60


def kept_s(config: str) -> float:
    return float(yaml.safe_load(config)["http_options"]["keep_alive_timeout_s"])


def test_connections_are_kept_longer_than_proxies_use_them() -> None:
    """For 75 s in every config; load balancers use one again for 60 s. Planted: 10 s, as once."""
    configs = [path.read_text() for path in (ROOT / "deploy").glob("*.yaml")]
    assert len(configs) > 5
    assert min(map(kept_s, configs)) >= 75
    assert kept_s(configs[0].replace("keep_alive_timeout_s: 75", "keep_alive_timeout_s: 10")) < 60


@pytest.mark.parametrize("comment_s", [0.1, 0.0])
def test_a_silent_stream_says_that_it_lives(edge: Edge, comment_s: float) -> None:
    """Headers and a comment come while the first token waits, and the events are what they are without. Planted: the setting is 0,
    and nothing comes before the first token."""
    edge.reset()
    edge.configure(limits=replace(edge.service.settings.limits, comment_s=comment_s))
    edge.script("done", 99)
    edge.core.prefill_s = 0.7
    with edge.stream(CHAT, {"model": "nano", "stream": True, "messages": [user("x")]}) as reply:
        said = reply.read()
    assert (said.count(b": waiting\n\n") >= 3) is (comment_s > 0)
    assert said.startswith(b": waiting\n\n") is (comment_s > 0)
    assert b"done" in said
    assert said.endswith(b"data: [DONE]\n\n")
