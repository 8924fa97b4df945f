"""litellm: completion and acompletion, streams, tools, structured output, text completion, the Anthropic way in."""

import json
from typing import Any

import litellm

from tests.clients.cases import ABOUT_ANNA, ANSWER_S, CALLED, SUM, SUMMED, TOOL, WEATHER, Server, case, expect, main
from tests.clients.classes import Person


def arguments(server: Server, text: str, **more: Any) -> dict[str, Any]:
    place = {"model": f"hosted_vllm/{server.model}", "api_base": server.base}
    asked = {"messages": [{"role": "user", "content": text}], "temperature": 0}
    return {**place, **asked, "api_key": server.key, "timeout": ANSWER_S, "num_retries": 0, **more}


@case("completion")
def whole(server: Server) -> None:
    expect(litellm.completion(**arguments(server, SUM)).choices[0].message.content, SUMMED)
    other = arguments(server, SUM) | {"model": f"openai/{server.model}"}
    expect(litellm.completion(**other).choices[0].message.content, SUMMED)


@case("acompletion, stream")
async def streamed(server: Server) -> None:
    stream = await litellm.acompletion(**arguments(server, SUM, stream=True))
    expect("".join([chunk.choices[0].delta.content or "" async for chunk in stream]), SUMMED)


@case("thought")
def thought(server: Server) -> None:
    message = litellm.completion(**arguments(server, SUM, reasoning_effort="low")).choices[0].message
    expect(message.content, SUMMED)
    assert message.reasoning_content, "no reasoning_content"


@case("tools")
def tools(server: Server) -> None:
    (call,) = litellm.completion(**arguments(server, WEATHER, tools=[TOOL])).choices[0].message.tool_calls
    expect((call.function.name, json.loads(call.function.arguments)), CALLED)


@case("tools: required")
def required(server: Server) -> None:
    answer = litellm.completion(**arguments(server, "Hello", tools=[TOOL], tool_choice="required"))
    expect({call.function.name for call in answer.choices[0].message.tool_calls}, {"get_weather"})


@case("response_format of a class")
def structured(server: Server) -> None:
    said = litellm.completion(**arguments(server, ABOUT_ANNA, response_format=Person)).choices[0].message.content
    expect(Person.model_validate_json(said), Person(name="Anna", city="Paris"))


@case("text_completion")
def text(server: Server) -> None:
    place = {"model": f"text-completion-openai/{server.model}", "api_base": server.base, "api_key": server.key}
    answer = litellm.text_completion(prompt="One two", max_tokens=3, temperature=0, **place)
    expect(answer.choices[0].finish_reason, "length")


@case("messages")
def messages(server: Server) -> None:
    asked = arguments(server, SUM) | {"model": f"anthropic/{server.model}", "api_base": server.url, "max_tokens": 60}
    answer = litellm.completion(**asked)
    expect(answer.choices[0].message.content, SUMMED)


if __name__ == "__main__":
    main()
