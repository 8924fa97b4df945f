"""instructor: TOOLS, JSON_SCHEMA, JSON and MD_JSON, and a stream of partial objects."""

from typing import Any

import instructor
import openai
from pydantic import BaseModel

from tests.clients.cases import ABOUT_ANNA, ANSWER_S, Server, case, expect, main


class Person(BaseModel):
    """A person."""

    name: str
    city: str


ANNA = Person(name="Anna", city="Paris")
MESSAGES: list[Any] = [{"role": "user", "content": ABOUT_ANNA}]


def api(server: Server, mode: instructor.Mode) -> Any:
    client = openai.OpenAI(base_url=server.base, timeout=ANSWER_S, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def create(server: Server, mode: instructor.Mode) -> Any:
    asked = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 160, "max_retries": 1}
    return api(server, mode).create(response_model=Person, **asked)


@case("TOOLS")
def tools(server: Server) -> None:
    found = create(server, instructor.Mode.TOOLS)
    assert isinstance(found, Person), found


@case("TOOLS_STRICT")
def strict(server: Server) -> None:
    found = create(server, instructor.Mode.TOOLS_STRICT)
    assert isinstance(found, Person), found


@case("JSON_SCHEMA")
def by_schema(server: Server) -> None:
    expect(create(server, instructor.Mode.JSON_SCHEMA), ANNA)


@case("JSON")
def by_json(server: Server) -> None:
    found = create(server, instructor.Mode.JSON)
    assert isinstance(found, Person), found


@case("JSON_SCHEMA, stream of partial objects")
def partial(server: Server) -> None:
    asked = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 160}
    *_, last = api(server, instructor.Mode.JSON_SCHEMA).create_partial(response_model=Person, **asked)
    expect((last.name, last.city), (ANNA.name, ANNA.city))


if __name__ == "__main__":
    main()
