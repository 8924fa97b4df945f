"""openai: chat, streams and the stream helper, tools, structured output, completions, responses."""

import json
from typing import Any

import openai

from tests.clients.cases import (
    ABOUT_ANNA,
    ANSWER,
    ANSWER_S,
    CALLED,
    RESULT,
    SUM,
    SUMMED,
    TOOL,
    WEATHER,
    Server,
    case,
    expect,
    main,
    raised,
)
from tests.clients.classes import City, Person

RESPONSES_TOOL: Any = {"type": "function", **TOOL["function"]}
QUESTION: list[Any] = [{"role": "user", "content": WEATHER}]
ADD: list[Any] = [{"role": "user", "content": SUM}]


def api(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base, timeout=ANSWER_S, max_retries=0)


def chat(server: Server, messages: list[Any], **more: Any) -> Any:
    return api(server).chat.completions.create(model=server.model, messages=messages, **({"temperature": 0} | more))


def read(call: Any) -> tuple[str, Any]:
    return call.name, json.loads(call.arguments)


@case("models")
def models(server: Server) -> None:
    expect([model.id for model in api(server).models.list()], [server.model])
    expect(api(server).models.retrieve(server.model).id, server.model)


@case("chat")
def whole(server: Server) -> None:
    answer = chat(server, ADD)
    expect((answer.choices[0].message.content, answer.choices[0].finish_reason), (SUMMED, "stop"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@case("chat, async")
async def whole_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.base, timeout=ANSWER_S, max_retries=0) as client:
        answer = await client.chat.completions.create(model=server.model, messages=ADD, temperature=0)
    expect(answer.choices[0].message.content, SUMMED)


@case("chat, stream")
def streamed(server: Server) -> None:
    chunks = list(chat(server, ADD, stream=True, stream_options={"include_usage": True}))
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), SUMMED)
    assert chunks[-1].usage.completion_tokens > 0


@case("chat, stream helper")
def helper(server: Server) -> None:
    with api(server).chat.completions.stream(model=server.model, messages=ADD, temperature=0) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        expect((said, stream.get_final_completion().choices[0].message.content), (SUMMED, SUMMED))


@case("chat, n and logprobs")
def choices(server: Server) -> None:
    answer = chat(server, ADD, n=2, logprobs=True, top_logprobs=3)
    expect([choice.message.content for choice in answer.choices], [SUMMED, SUMMED])
    assert all(len(token.top_logprobs) == 3 for token in answer.choices[0].logprobs.content)


@case("chat, thought")
def thought(server: Server) -> None:
    message = chat(server, ADD, reasoning_effort="high").choices[0].message
    expect(message.content, SUMMED)
    assert message.reasoning_content, "no reasoning_content"


@case("tools: call and result")
def tool_loop(server: Server) -> None:
    first = chat(server, QUESTION, tools=[TOOL]).choices[0]
    (call,) = first.message.tool_calls
    expect((first.finish_reason, read(call.function)), ("tool_calls", CALLED))
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    expect(chat(server, [*QUESTION, first.message, result], tools=[TOOL]).choices[0].message.content, ANSWER)


@case("tools: stream helper, strict")
def tool_helper(server: Server) -> None:
    tool = openai.pydantic_function_tool(City, name="get_weather", description="The weather in a city")
    with api(server).chat.completions.stream(model=server.model, messages=QUESTION, tools=[tool], temperature=0) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    expect([(event.name, event.parsed_arguments) for event in done], [("get_weather", City(city="Paris"))])


@case("tools: required")
def required(server: Server) -> None:
    message = chat(server, [{"role": "user", "content": "Hello"}], tools=[TOOL], tool_choice="required").choices[0].message
    (call, *_) = message.tool_calls
    expect((call.function.name, list(json.loads(call.function.arguments))), ("get_weather", ["city"]))


@case("tools: named")
def named(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    message = chat(server, [{"role": "user", "content": "Hello"}], tools=[TOOL], tool_choice=choice).choices[0].message
    expect([call.function.name for call in message.tool_calls], ["get_weather"])


@case("parse()")
def parse(server: Server) -> None:
    messages = [{"role": "user", "content": ABOUT_ANNA}]
    answer = api(server).chat.completions.parse(model=server.model, messages=messages, response_format=Person, temperature=0)
    expect(answer.choices[0].message.parsed, Person(name="Anna", city="Paris"))


@case("response_format json_object, stream")
def json_object(server: Server) -> None:
    chunks = chat(server, [{"role": "user", "content": ABOUT_ANNA}], response_format={"type": "json_object"}, stream=True)
    found = json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert isinstance(found, dict), found


@case("penalties and logit_bias")
def penalties(server: Server) -> None:
    answer = chat(server, ADD, frequency_penalty=0.1, presence_penalty=0.1, logit_bias={"1": -100})
    assert answer.choices[0].message.content


@case("completions: prompts, echo, logprobs")
def completions(server: Server) -> None:
    asked = {"model": server.model, "temperature": 0}
    answer = api(server).completions.create(prompt=["One two", "The old"], max_tokens=3, **asked)
    expect([choice.index for choice in answer.choices], [0, 1])
    echoed = api(server).completions.create(prompt="One two", max_tokens=1, echo=True, logprobs=1, **asked)
    assert echoed.choices[0].text.startswith("One two"), echoed.choices[0].text
    assert echoed.choices[0].logprobs.token_logprobs[0] is None


@case("responses")
def responses(server: Server) -> None:
    answer = api(server).responses.create(model=server.model, input=SUM, temperature=0, store=False)
    expect((answer.status, answer.output_text), ("completed", SUMMED))


@case("responses, stream helper")
def responses_stream(server: Server) -> None:
    with api(server).responses.stream(model=server.model, input=SUM, temperature=0) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        expect((said, stream.get_final_response().output_text), (SUMMED, SUMMED))


@case("responses: call and result")
def responses_tools(server: Server) -> None:
    client = api(server)
    asked = [{"role": "user", "content": WEATHER}]
    first = client.responses.create(model=server.model, input=asked, tools=[RESPONSES_TOOL], temperature=0)
    (call,) = (item for item in first.output if item.type == "function_call")
    expect(read(call), CALLED)
    asked += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    expect(client.responses.create(model=server.model, input=asked, tools=[RESPONSES_TOOL], temperature=0).output_text, ANSWER)


@case("responses.parse()")
def responses_parse(server: Server) -> None:
    answer = api(server).responses.parse(model=server.model, input=ABOUT_ANNA, text_format=Person, temperature=0)
    expect(answer.output_parsed, Person(name="Anna", city="Paris"))


@case("embeddings are a 404 that says so")
def embeddings(server: Server) -> None:
    error = raised(openai.NotFoundError, lambda: api(server).embeddings.create(model=server.model, input="x"))
    assert isinstance(error.body, dict), error.body
    assert error.body.get("message"), error.body


if __name__ == "__main__":
    main()
