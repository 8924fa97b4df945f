"""anthropic: messages, streams, tools, thinking, count_tokens. Its newest versions take no temperature; it goes in the body."""

from typing import Any

import anthropic

from tests.clients.cases import ANSWER, ANSWER_S, RESULT, SUM, SUMMED, WEATHER, Server, case, expect, main, raised
from tests.clients.cases import TOOL as OPENAI_TOOL

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": OPENAI_TOOL["function"]["parameters"],
}
ADD: list[Any] = [{"role": "user", "content": SUM}]
QUESTION: Any = {"role": "user", "content": WEATHER}


def arguments(server: Server, messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": messages, "max_tokens": 160, "extra_body": {"temperature": 0}, **more}


def api(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, timeout=ANSWER_S, max_retries=0)


def create(server: Server, messages: list[Any], **more: Any) -> Any:
    return api(server).messages.create(**arguments(server, messages, **more))


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@case("messages")
def whole(server: Server) -> None:
    message = create(server, ADD, system=[{"type": "text", "text": "Answer briefly.", "cache_control": {"type": "ephemeral"}}])
    expect((said(message), message.stop_reason), (SUMMED, "end_turn"))
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


@case("messages, stream helper")
def streamed(server: Server) -> None:
    with api(server).messages.stream(**arguments(server, ADD)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect((text, said(final), final.stop_reason), (SUMMED, SUMMED, "end_turn"))


@case("messages, async stream of events")
async def events(server: Server) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, timeout=ANSWER_S, max_retries=0) as client:
        stream = await client.messages.create(**arguments(server, ADD, stream=True))
        kinds = [event.type async for event in stream]
    expect((kinds[0], kinds[1], kinds[-1]), ("message_start", "content_block_start", "message_stop"))


@case("tools: call and result")
def tool_loop(server: Server) -> None:
    first = create(server, [QUESTION], tools=[TOOL])
    (call,) = (block for block in first.content if block.type == "tool_use")
    expect((first.stop_reason, call.name, call.input), ("tool_use", "get_weather", {"city": "Paris"}))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}
    expect(said(create(server, [QUESTION, {"role": "assistant", "content": first.content}, result], tools=[TOOL])), ANSWER)


@case("tools: stream helper")
def tool_stream(server: Server) -> None:
    with api(server).messages.stream(**arguments(server, [QUESTION], tools=[TOOL])) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert pieces, "no input_json event"
    expect([block.input for block in final.content if block.type == "tool_use"], [{"city": "Paris"}])


@case("tools: runner")
def tool_runner(server: Server) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city"""
        asked_for.append(city)
        return RESULT

    asked_for = []
    *_, last = api(server).beta.messages.tool_runner(**arguments(server, [QUESTION], tools=[get_weather]))
    expect((asked_for, said(last)), (["Paris"], ANSWER))


@case("tools: any")
def any_tool(server: Server) -> None:
    message = create(server, [{"role": "user", "content": "Hello"}], tools=[TOOL], tool_choice={"type": "any"})
    expect({block.name for block in message.content if block.type == "tool_use"}, {"get_weather"})


@case("thinking")
def thinking(server: Server) -> None:
    message = create(server, ADD, max_tokens=1200, thinking={"type": "enabled", "budget_tokens": 1024})
    expect([block.type for block in message.content], ["thinking", "text"])
    expect(said(message), SUMMED)


@case("stop_sequences")
def stops(server: Server) -> None:
    message = create(server, ADD, stop_sequences=["= "])
    expect((message.stop_reason, message.stop_sequence, said(message)), ("stop_sequence", "= ", "472 + 389 "))


@case("count_tokens")
def count(server: Server) -> None:
    counted = api(server).messages.count_tokens(model=server.model, messages=ADD).input_tokens
    expect(counted, create(server, ADD).usage.input_tokens)


@case("a wrong request is its BadRequestError")
def wrong(server: Server) -> None:
    error = raised(anthropic.BadRequestError, lambda: create(server, [{"role": "nobody", "content": "x"}]))
    assert isinstance(error.body, dict), error.body
    expect((error.body["type"], error.body["error"]["type"]), ("error", "invalid_request_error"))


if __name__ == "__main__":
    main()
