"""instructor: TOOLS and JSON_SCHEMA, and a stream of partial objects."""

from typing import Any

import instructor
import openai
from pydantic import BaseModel

from tests.clients.cases import ABOUT_ANNA, ANSWER_S, WEATHER, Server, case, expect, main
from tests.clients.classes import City, Person

ANNA = {"name": "Anna", "city": "Paris"}


def api(server: Server, mode: instructor.Mode) -> Any:
    client = openai.OpenAI(base_url=server.base, timeout=ANSWER_S, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def asked(server: Server, question: str) -> dict[str, Any]:
    return {"model": server.model, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 160}


def create(server: Server, mode: instructor.Mode, kind: type[BaseModel], question: str) -> Any:
    """What was made, which is of a class of instructor's own."""
    return api(server, mode).create(response_model=kind, max_retries=1, **asked(server, question)).model_dump()


@case("TOOLS")
def tools(server: Server) -> None:
    expect(create(server, instructor.Mode.TOOLS, City, WEATHER), {"city": "Paris"})


@case("TOOLS_STRICT")
def strict(server: Server) -> None:
    expect(create(server, instructor.Mode.TOOLS_STRICT, City, WEATHER), {"city": "Paris"})


@case("JSON_SCHEMA")
def by_schema(server: Server) -> None:
    expect(create(server, instructor.Mode.JSON_SCHEMA, Person, ABOUT_ANNA), ANNA)


@case("JSON_SCHEMA, stream of partial objects")
def partial(server: Server) -> None:
    *_, last = api(server, instructor.Mode.JSON_SCHEMA).create_partial(response_model=Person, **asked(server, ABOUT_ANNA))
    expect(last.model_dump(), ANNA)


if __name__ == "__main__":
    main()
