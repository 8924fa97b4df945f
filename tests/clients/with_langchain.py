"""LangChain: invoke, stream, batch, bind_tools, with_structured_output, an agent."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients.cases import ABOUT_ANNA, ANSWER, ANSWER_S, CALLED, RESULT, SUM, SUMMED, WEATHER, Server, case, expect, main
from tests.clients.classes import City


class Person(BaseModel):
    """A person."""

    name: str = Field(description="The first name")
    city: str


@tool
def get_weather(city: str) -> str:
    """The weather in a city"""
    return RESULT


def model(server: Server, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=server.base, model=server.model, temperature=0, timeout=ANSWER_S, max_retries=0, **more)


@case("invoke, batch")
def invoke(server: Server) -> None:
    expect(model(server).invoke(SUM).content, SUMMED)
    expect([answer.content for answer in model(server).batch([SUM, SUM])], [SUMMED, SUMMED])


@case("stream")
def stream(server: Server) -> None:
    chunks = list(model(server, stream_usage=True).stream(SUM))
    expect("".join(str(chunk.content) for chunk in chunks), SUMMED)
    assert any(chunk.usage_metadata for chunk in chunks), "no usage"


@case("bind_tools: call and result")
def tools(server: Server) -> None:
    bound = model(server).bind_tools([get_weather])
    asked = [HumanMessage(WEATHER)]
    first = bound.invoke(asked)
    (call,) = first.tool_calls
    expect((call["name"], call["args"]), CALLED)
    expect(bound.invoke([*asked, first, ToolMessage(RESULT, tool_call_id=call["id"])]).content, ANSWER)


@case("bind_tools: stream")
def tool_stream(server: Server) -> None:
    first, *rest = model(server).bind_tools([get_weather]).stream(WEATHER)
    for chunk in rest:
        first += chunk
    expect([(call["name"], call["args"]) for call in first.tool_calls], [CALLED])


@case("bind_tools: tool_choice any")
def any_tool(server: Server) -> None:
    answer = model(server).bind_tools([get_weather], tool_choice="any").invoke("Hello")
    expect({call["name"] for call in answer.tool_calls}, {"get_weather"})


@case("with_structured_output json_schema")
def by_schema(server: Server) -> None:
    found = model(server).with_structured_output(Person, method="json_schema").invoke(ABOUT_ANNA)
    expect(found, Person(name="Anna", city="Paris"))


@case("with_structured_output function_calling")
def by_call(server: Server) -> None:
    expect(model(server).with_structured_output(City, method="function_calling").invoke(WEATHER), City(city="Paris"))


@case("with_structured_output json_mode")
def by_json(server: Server) -> None:
    found = model(server).with_structured_output(None, method="json_mode").invoke(ABOUT_ANNA)
    assert isinstance(found, dict), found


@case("agent")
def agent(server: Server) -> None:
    made = create_agent(model(server), [get_weather])
    answer = made.invoke({"messages": [{"role": "user", "content": WEATHER}]})
    expect(answer["messages"][-1].content, ANSWER)


@case("responses API")
def responses(server: Server) -> None:
    expect(model(server, use_responses_api=True).invoke(SUM).text, SUMMED)


if __name__ == "__main__":
    main()
