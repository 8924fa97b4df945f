"""LlamaIndex: chat, complete, streams, FunctionAgent, structured prediction."""

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.cases import ABOUT_ANNA, ANSWER, ANSWER_S, CALLED, SUM, SUMMED, WEATHER, Server, case, expect, main
from tests.clients.classes import City, Person, get_weather


def model(server: Server, **more: Any) -> OpenAILike:
    return OpenAILike(
        model=server.model,
        api_base=server.base,
        api_key=server.key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        temperature=0,
        timeout=ANSWER_S,
        max_retries=0,
        **more,
    )


@case("chat, complete")
def chat(server: Server) -> None:
    expect(model(server).chat([ChatMessage(role="user", content=SUM)]).message.content, SUMMED)
    expect(model(server).complete(SUM).text, SUMMED)


@case("stream")
def stream(server: Server) -> None:
    expect("".join(each.delta or "" for each in model(server).stream_chat([ChatMessage(role="user", content=SUM)])), SUMMED)


@case("chat_with_tools")
def tools(server: Server) -> None:
    llm = model(server)
    tool = FunctionTool.from_defaults(get_weather, name="get_weather", description="The weather in a city")
    answer = llm.chat_with_tools([tool], user_msg=WEATHER)
    calls = llm.get_tool_calls_from_response(answer)
    expect([(call.tool_name, call.tool_kwargs) for call in calls], [CALLED])


@case("FunctionAgent")
async def agent(server: Server) -> None:
    tool = FunctionTool.from_defaults(get_weather, name="get_weather", description="The weather in a city")
    expect(str(await FunctionAgent(tools=[tool], llm=model(server)).run(WEATHER)), ANSWER)


@case("structured_predict")
def structured(server: Server) -> None:
    expect(model(server).structured_predict(City, PromptTemplate("{text}"), text=WEATHER), City(city="Paris"))


@case("structured_predict by response_format")
def by_schema(server: Server) -> None:
    llm = model(server, should_use_structured_outputs=True)
    expect(llm.structured_predict(Person, PromptTemplate("{text}"), text=ABOUT_ANNA), Person(name="Anna", city="Paris"))


if __name__ == "__main__":
    main()
