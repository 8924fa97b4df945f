"""pydantic-ai: text, streams, tools, ToolOutput, NativeOutput, the responses API."""

from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.cases import ABOUT_ANNA, ANSWER, ANSWER_S, SUM, SUMMED, WEATHER, Server, case, expect, main
from tests.clients.classes import City, Person, get_weather


def agent(server: Server, kind: type[Any] = OpenAIChatModel, **more: Any) -> Agent[None, Any]:
    model = kind(server.model, provider=OpenAIProvider(base_url=server.base, api_key=server.key))
    return Agent(model, model_settings={"temperature": 0, "timeout": ANSWER_S, "max_tokens": 160}, retries=0, **more)


@case("text")
async def text(server: Server) -> None:
    expect((await agent(server).run(SUM)).output, SUMMED)


@case("stream")
async def stream(server: Server) -> None:
    async with agent(server).run_stream(SUM) as result:
        expect("".join([piece async for piece in result.stream_text(delta=True)]), SUMMED)


@case("tools")
async def tools(server: Server) -> None:
    expect((await agent(server, tools=[get_weather]).run(WEATHER)).output, ANSWER)


@case("ToolOutput")
async def by_call(server: Server) -> None:
    expect((await agent(server, output_type=ToolOutput(City)).run(WEATHER)).output, City(city="Paris"))


@case("NativeOutput")
async def by_schema(server: Server) -> None:
    expect((await agent(server, output_type=NativeOutput(Person)).run(ABOUT_ANNA)).output, Person(name="Anna", city="Paris"))


@case("responses API, tools")
async def responses(server: Server) -> None:
    expect((await agent(server, OpenAIResponsesModel, tools=[get_weather]).run(WEATHER)).output, ANSWER)


if __name__ == "__main__":
    main()
