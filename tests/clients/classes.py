"""Classes that clients of pydantic are asked for, and the tool that they call."""

from pydantic import BaseModel

from tests.clients.cases import RESULT


class Person(BaseModel):
    """A person."""

    name: str
    city: str


class City(BaseModel):
    """The weather in a city"""

    city: str


def get_weather(city: str) -> str:
    """The weather in a city"""
    return RESULT
