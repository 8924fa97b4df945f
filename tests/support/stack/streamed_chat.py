"""A chat's reply as openai's client streams it: put together of its deltas, with and without drafts, or as the model wrote it."""

import json
from typing import Any, NamedTuple

import openai

from training.exercise_form import Exercise
from training.tool_exercises import native


class StreamedChat(NamedTuple):
    """`calls`: name and arguments; `tokens` of the whole reply."""

    thought: str
    content: str
    calls: list[tuple[str, str]]
    finish: str
    tokens: int


def streamed(client: openai.OpenAI, *, drafts: bool, thinking: bool = False, **asked: Any) -> tuple[StreamedChat, int]:
    """And how many of its tokens were drafts. A call's first delta names it, once; its arguments are JSON."""
    thought, content, names, arguments, finish = "", "", dict[str, str](), list[str](), ""
    extra = {"speculative": drafts, "chat_template_kwargs": {"enable_thinking": thinking}}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}, extra_body=extra):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert (call.index, call.id in names) == (len(names), False), call
                    names[call.id] = call.function.name
                    arguments.append("")
                assert call.index == len(names) - 1, call
                arguments[call.index] += call.function.arguments or ""
    for text in arguments:
        json.loads(text)
    usage, calls = chunk.usage, list(zip(names.values(), arguments, strict=True))
    reply = StreamedChat(thought, content, calls, finish, usage.completion_tokens)
    return reply, usage.completion_tokens_details.accepted_prediction_tokens


def same_without_drafts(client: openai.OpenAI, **asked: Any) -> tuple[StreamedChat, int]:
    """The reply, which is the same without drafts, and how many of its tokens were some."""
    reply, accepted = streamed(client, drafts=True, **asked)
    assert (reply, 0) == streamed(client, drafts=False, **asked), asked
    return reply, accepted


def ask(client: openai.OpenAI, model: str, exercise: Exercise) -> str:
    """The streamed answer as the model wrote it, made again of its parts; the token that ends it is not part of a message."""
    with client.chat.completions.stream(
        model=model,
        messages=exercise.messages,  # type: ignore[arg-type]
        tools=exercise.tools or openai.omit,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=160,
        extra_body={"chat_template_kwargs": {"enable_thinking": exercise.thinking}},
    ) as stream:
        thought = "".join(
            getattr(event.chunk.choices[0].delta, "reasoning_content", "") for event in stream if event.type == "chunk"
        )
        choice = stream.get_final_completion().choices[0]
    calls = [call.function for call in choice.message.tool_calls or ()]
    assert choice.finish_reason == ("tool_calls" if calls else "stop"), choice
    written = [f"call:{call.name}{native(json.loads(call.arguments))}" for call in calls]
    said = [f"<|channel>thought\n{thought}\n<channel|>" if thought else "", choice.message.content or ""]
    return "".join([*said, *(f"<|tool_call>{call}<tool_call|>" for call in written)])
