"""What each API's body asks for: the same Ask for the same conversation, tools, form and thinking, whichever way it is written."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from deploy.edge.answers.response_format import JSON
from deploy.edge.anthropic.message_request import COUNT_READER, MESSAGES_READER
from deploy.edge.apis import GENERATION_APIS
from deploy.edge.openai.response_request import encrypted_content_of
from deploy.edge.requests.ask import AnswerForm, Ask, ChatMessage, ChatPrompt, PastCall, RawPrompts, Sampling, Text
from engine.errors import InvalidRequest
from engine.front.constraints import ToolChoice
from engine.front.grammar import json_answer
from tests.support.edge.api_client import user

pytestmark = pytest.mark.pure

READ = {api.path: api.reader.read for api in GENERATION_APIS if api.media_type == JSON}
CHAT, TEXT, MESSAGES, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ONE = ToolChoice("required", ("f",), one=True)
SOME = ToolChoice("auto", ("f",))
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [user("x")]},
    TEXT: {"model": "m", "prompt": "x"},
    MESSAGES: {"model": "m", "max_tokens": 5, "messages": [user("x")]},
    RESPONSES: {"model": "m", "input": "x"},
    GENERATE: {"text": "x"},
}


def ask_of(path: str, **more: Any) -> Ask:
    return READ[path](json.dumps(LEAST[path] | more).encode()).ask()


def chat_of(path: str, **more: Any) -> ChatPrompt:
    prompt = ask_of(path, **more).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def form_of(path: str, **more: Any) -> AnswerForm | None:
    form = ask_of(path, **more).form
    return None if form is None else form()


CALL = '{"days": 1e2}'
TALK: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "One."},
            user("Go"),
            {"role": "assistant", "content": "So.", "reasoning_content": "Hm",
             "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": CALL}}]},
            {"role": "tool", "tool_call_id": "a", "content": "18C"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "reasoning_effort": "low", "max_completion_tokens": 9,
    },
    MESSAGES: {
        "system": "One.",
        "messages": [
            user("Go"),
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "So."},
                                              {"type": "tool_use", "id": "a", "name": "f", "input": 0}]},
            user([{"type": "tool_result", "tool_use_id": "a", "content": "18C"}]),
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "adaptive"}, "max_tokens": 9,
    },
    RESPONSES: {
        "instructions": "One.",
        "input": [
            user("Go"),
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": CALL},
            {"type": "function_call_output", "call_id": "a", "output": "18C"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low"}, "max_output_tokens": 9,
    },
}  # fmt: skip


def test_one_conversation_in_three_apis() -> None:
    """Messages, tools, choice, thinking and limit are the same values; only the client's names of keys differ."""
    messages = [
        ChatMessage("system", "One."),
        ChatMessage("user", "Go"),
        ChatMessage("assistant", "So.", thought="Hm", calls=(PastCall("f", CALL, "a"),)),
        ChatMessage("tool", "18C", call_id="a"),
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    chat = ChatPrompt(messages, tools, ONE, thinks=True)
    wanted = Ask(model="m", prompt=chat, sampling=Sampling(max_tokens=9))
    names = {CHAT: ("messages", ()), MESSAGES: ("messages", [("tools[0]", "tools[0].input_schema")]),
             RESPONSES: ("input", [("tools[0]", "tools[0].parameters")])}  # fmt: skip
    for path, (key, tool_paths) in names.items():
        body = json.dumps(LEAST[path] | TALK[path]).replace('"input": 0', f'"input": {CALL}')
        own = replace(wanted, prompt=replace(chat, tool_paths=tool_paths), prompt_key=key)
        assert READ[path](body.encode()).ask() == own, path


def test_a_conversation_in_other_words() -> None:
    """System blocks, a developer's message after instructions, and a thought that only its seal has say the same.

    Planted: a seal of another server, and a number in other digits, do not.
    """
    talk, joined = TALK[RESPONSES], ChatMessage("system", "One.\n\nTwo.")
    blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("One.", "Two.")]
    assert chat_of(MESSAGES, **TALK[MESSAGES] | {"system": blocks}).messages[0] == joined
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Two."}]}
    assert chat_of(RESPONSES, **talk | {"input": [developer, *talk["input"]]}).messages[0] == joined

    def messages(place: int, item: dict[str, Any]) -> list[ChatMessage]:
        items = [*talk["input"][:place], item, *talk["input"][place + 1 :]]
        return chat_of(RESPONSES, **talk | {"input": items}).messages

    sealed = {"type": "reasoning", "summary": [], "encrypted_content": encrypted_content_of("Hm")}
    wanted = messages(1, talk["input"][1])
    assert messages(1, sealed) == messages(1, sealed | {"content": []}) == wanted
    assert messages(1, SEALED) != wanted
    assert messages(3, talk["input"][3] | {"arguments": '{"days": 100}'}) != wanted


def test_responses_sample_as_chats_do() -> None:
    """vLLM's keys beside OpenAI's mean what they mean in a chat, and are checked alike. Planted: another seed is another ask."""
    keys = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["S"]}
    keys |= {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    assert ask_of(RESPONSES, **keys).sampling == ask_of(CHAT, **keys).sampling != ask_of(CHAT, **keys | {"seed": 8}).sampling
    with pytest.raises(InvalidRequest, match="top_k"):
        ask_of(RESPONSES, top_k=-2)


def test_an_error_inside_a_result_says_where() -> None:
    """Of a block in a tool's result, by its turn and its place in it; `param` stays the request's key."""
    block = {"type": "text", "text": 5}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    turns = [user("x"), user([result])]
    items = [user("x"), {"type": "function_call_output", "call_id": "a", "output": [block]}]
    for path, key, value, where in (
        (MESSAGES, "messages", turns, "messages[1].content[0].content[0].text: "),
        (RESPONSES, "input", items, "input[1].output[0].text: "),
    ):
        with pytest.raises(InvalidRequest) as caught:
            ask_of(path, **{key: value})
        assert (str(caught.value)[: len(where)], caught.value.param) == (where, key)


NO_CALL: list[tuple[str, str, list[Any], list[Any], str]] = [
    (CHAT, "messages", [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}],
     [{"role": "tool", "tool_call_id": "a", "content": "18C"}], "tool_call_id"),
    (MESSAGES, "messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
     [user([{"type": "text", "text": "So"}, {"type": "tool_result", "tool_use_id": "a", "content": "18C"}])],
     "content[1].tool_use_id"),
    (RESPONSES, "input", [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}],
     [{"type": "function_call_output", "call_id": "a", "output": "18C"}], "call_id"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "key", "called", "result", "place"), NO_CALL, ids=[case[0] for case in NO_CALL])
def test_a_result_is_of_an_earlier_call(path: str, key: str, called: list[Any], result: list[Any], place: str) -> None:
    """One of no call, of another or of a later one is refused by its id and its path; a call may have several, and a long id."""
    good = {key: [user("x"), *called, *result, *result]}
    ask_of(path, **good)
    ask_of(path, **json.loads(json.dumps(good).replace('"a"', json.dumps("a" * 5000))))
    with pytest.raises(InvalidRequest, match=r"no call before it has the id 'a{100}'$"):
        ask_of(path, **json.loads(json.dumps({key: [user("x"), *result]}).replace('"a"', json.dumps("a" * 5000))))
    other = json.loads(json.dumps(called).replace('"a"', '"b"'))
    for before, after in ([], []), (other, []), ([], called):
        with pytest.raises(InvalidRequest) as caught:
            ask_of(path, **{key: [user("x"), *before, *result, *after, user("x")]})
        where = f"{key}[{1 + len(before)}].{place}"
        assert (str(caught.value), caught.value.param) == (f"{where}: no call before it has the id 'a'", key)


def test_a_result_without_an_id_has_the_name_of_its_tool() -> None:
    """Older clients send no ids."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    messages = chat_of(CHAT, messages=[user("x"), call, {"role": "tool", "name": "f", "content": "18C"}]).messages
    assert messages[-1] == ChatMessage("tool", "18C", name="f")


def test_a_url_may_be_a_text() -> None:
    """As Mistral's clients send it: the same ask as in an object; `original` is OpenAI's detail above `high`."""
    url = "data:image/png;base64,AAAA"
    bare, whole, large = (
        chat_of(CHAT, messages=[user([{"type": "image_url", "image_url": said}])])
        for said in (url, {"url": url}, {"url": url, "detail": "original"})
    )
    assert bare == whole != large


def test_parts_are_typed() -> None:
    """A user's parts stay parts in OpenAI's and Anthropic's APIs; an item of a response is one text."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for path in (CHAT, MESSAGES):
        assert chat_of(path, messages=[user(parts)]).messages[0].content == [Text("a"), Text("b")]
    items = [user([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}])]
    assert chat_of(RESPONSES, input=items).messages[0].content == "ab"


def test_a_refusal_is_what_the_assistant_said() -> None:
    """As OpenAI's answers have it, in a chat's message or as a part of it or of an item. Planted: other words are another turn."""
    part = {"type": "refusal", "refusal": "No."}
    told = [
        chat_of(CHAT, messages=[user("x"), {"role": "assistant", "content": None, "refusal": "No."}]),
        chat_of(CHAT, messages=[user("x"), {"role": "assistant", "content": [part]}]),
        chat_of(RESPONSES, input=[user("x"), {"type": "message", "role": "assistant", "content": [part]}]),
    ]
    assert [chat.messages[-1].content for chat in told] == ["No.", [Text("No.")], "No."]
    said = chat_of(CHAT, messages=[user("x"), {"role": "assistant", "content": "Yes.", "refusal": None}])
    assert said.messages[-1].content == "Yes."


def test_an_empty_system_prompt_is_none() -> None:
    """Clients that always send the key. Planted: one that says something is a turn."""
    for empty in ("", [], [{"type": "text", "text": ""}]):
        assert chat_of(MESSAGES, system=empty) == chat_of(MESSAGES)
    assert chat_of(RESPONSES, instructions="") == chat_of(RESPONSES)
    assert chat_of(MESSAGES, system="x") != chat_of(MESSAGES)


THOUGHT: dict[str, Any] = {"type": "thinking", "thinking": "Hm", "signature": "x"}
UNREADABLE: dict[str, Any] = {"type": "redacted_thinking", "data": "x"}
REASONING: dict[str, Any] = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
SEALED: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo"}
NOTHING: list[tuple[str, str, dict[str, Any]]] = [
    *((MESSAGES, "messages", {"role": "assistant", "content": content}) for content in ("", [], [THOUGHT], [UNREADABLE])),
    *((RESPONSES, "input", item) for item in (REASONING, SEALED, {"role": "assistant", "content": ""})),
]


@pytest.mark.parametrize(("path", "key", "turn"), NOTHING)
def test_turns_without_text_or_calls_are_left_out(path: str, key: str, turn: dict[str, Any]) -> None:
    """A thought that a user's turn follows, one that nobody can read, nothing at all; alone they are a 400. Planted: a text, and
    a thought with which the conversation ends, are turns."""
    wanted = chat_of(path, **{key: [user("Go"), user("On")]})
    assert chat_of(path, **{key: [user("Go"), turn, user("On")]}) == wanted
    assert chat_of(path, **{key: [user("Go"), {"role": "assistant", "content": "."}, user("On")]}) != wanted
    if turn is REASONING:
        assert chat_of(path, input=[user("Go"), turn]).messages[-1].thought == "Hm"
        assert chat_of(path, input=[turn]).messages[-1].thought == "Hm"
    elif "Hm" not in str(turn):
        assert chat_of(path, **{key: [user("Go"), turn]}) == chat_of(path, **{key: [user("Go")]})
        with pytest.raises(InvalidRequest, match=f"^{key}: must not be empty"):
            chat_of(path, **{key: [turn]})


def test_a_raw_prompt_in_two_apis() -> None:
    """Ids, limit, seed and stop are the same values in a completion and in SGLang's words; the prompt has the key it came by."""
    text = ask_of(TEXT, prompt=[5, 6], max_tokens=3, min_tokens=2, seed=7, stop="S", priority=4)
    params = {"max_new_tokens": 3, "min_new_tokens": 2, "sampling_seed": 7, "stop": ["S"]}
    generate = READ[GENERATE](json.dumps({"input_ids": [5, 6], "sampling_params": params, "priority": 4}).encode()).ask()
    assert text.prompt == generate.prompt == RawPrompts([[5, 6]])
    assert text.sampling == generate.sampling
    assert text.sampling != replace(generate.sampling, seed=8)
    assert (text.priority, text.model, generate.model) == (4, "m", None)
    assert generate.prompt_key == "input_ids"
    assert replace(generate, prompt_key=text.prompt_key, model="m") == text
    assert ask_of(GENERATE).sampling.max_tokens == 128


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "f"}, ONE),
    ],
)
def test_anthropics_tool_choice(choice: dict[str, Any] | None, wanted: ToolChoice) -> None:
    """Each of its words; only a named tool, and disable_parallel_tool_use, ask for one call."""
    assert chat_of(MESSAGES, tool_choice=choice).choice == wanted
    if choice is not None:
        assert chat_of(MESSAGES, tool_choice=choice | {"disable_parallel_tool_use": True}).choice == wanted._replace(one=True)


ALLOWED = {"mode": "auto", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ToolChoice()),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "f"}, ONE),
        ({"type": "allowed_tools", **ALLOWED}, SOME),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, SOME),
    ],
)
def test_openais_tool_choice(choice: Any, wanted: ToolChoice) -> None:
    """Words, a function, allowed tools, as a chat nests them or as a response does not; parallel_tool_calls: false asks for one."""
    for path in (CHAT, RESPONSES):
        assert chat_of(path, tool_choice=choice).choice == wanted
        assert chat_of(path, tool_choice=choice, parallel_tool_calls=False).choice == wanted._replace(one=True)


def test_a_schema_for_the_answer() -> None:
    """Of every API it becomes the same rules, under the key that it came by; without one there is none."""
    form, rules = {"type": "json_schema", "schema": SCHEMA}, json_answer(SCHEMA)
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert form_of(CHAT, response_format=named) == AnswerForm(rules, "response_format")
    assert form_of(TEXT, guided_json=json.dumps(SCHEMA)) == AnswerForm(rules, "guided_json")
    assert form_of(GENERATE, sampling_params={"json_schema": SCHEMA}) == AnswerForm(rules, "json_schema")
    assert form_of(MESSAGES, output_config={"effort": "low", "format": form}) == AnswerForm(rules, "output_config.format")
    assert form_of(MESSAGES, output_config={"effort": "low"}, output_format=form) == AnswerForm(rules, "output_format")
    assert form_of(RESPONSES, text={"format": form | {"name": "n", "strict": False}}) == AnswerForm(rules, "text.format")
    any_object = AnswerForm(json_answer({"type": "object"}), "text.format")
    assert form_of(RESPONSES, text={"format": {"type": "json_object"}}) == any_object != rules
    for path in READ:
        assert ask_of(path, text={"verbosity": "low"} if path == RESPONSES else LEAST[path].get("text")).form is None


@pytest.mark.parametrize(
    ("path", "more", "key"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format"),
        (MESSAGES, {"output_format": {"type": "xml", "schema": {}}}, "output_format"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
def test_a_form_that_is_wrong_is_named_by_the_clients_key(path: str, more: dict[str, Any], key: str) -> None:
    """When the rules are made, which is not when the body is read."""
    form = ask_of(path, **more).form
    assert form is not None
    with pytest.raises(InvalidRequest) as caught:
        form()
    assert caught.value.param == key
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False)])
def test_thinking(kind: str, *, thinks: bool) -> None:
    """Any type but disabled lets the model think, within its budget; without one the server's default holds; a count is alike."""
    chat = chat_of(MESSAGES, thinking={"type": kind, "budget_tokens": 4})
    assert (chat.thinks, chat.thought_tokens) == (thinks, 4)
    assert chat_of(MESSAGES).thinks is chat_of(CHAT).thinks is chat_of(RESPONSES).thinks is None
    body = {"model": "m", "messages": LEAST[MESSAGES]["messages"], "thinking": {"type": kind, "budget_tokens": 4}}
    assert COUNT_READER.read(json.dumps(body).encode()).chat() == chat
    assert MESSAGES_READER.read(json.dumps(body | {"max_tokens": 5}).encode()).chat() == chat


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, lambda text: {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]}),
        (MESSAGES, lambda text: {"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": json.loads(text)}]}, user("x")]}),
        (RESPONSES, lambda text: {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": text}]}),
        (CHAT, lambda text: {"tools": [{"a": json.loads(text)}]}),
        (MESSAGES, lambda text: {"tools": [{"name": "f", "input_schema": json.loads(text)}]}),
        (RESPONSES, lambda text: {"tools": [{"type": "function", "name": "f", "parameters": json.loads(text)}]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", [json.dumps("x" * (1 << 20)), json.dumps([[]] * (1 << 16))], ids=["bytes", "brackets"])
def test_tools_and_arguments_are_bounded(path: str, more: Any, text: str) -> None:
    """In every API, by bytes and by brackets, before they are decoded; the key is the client's, and short ones pass."""
    with pytest.raises(InvalidRequest, match=r"more than (1048576|65536 brackets)") as caught:
        ask_of(path, **more(text))
    assert caught.value.param in more("0")
    ask_of(path, **more("{}"))
