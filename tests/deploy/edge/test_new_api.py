"""Another API is a module of its own and one entry of apis.py: a whole one, in 30 lines, served by the real edge."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import Struct

from deploy.edge import apis, routes
from deploy.edge.answers.response_format import JSON, ServedModel, Usage
from deploy.edge.bodies.body_reader import BodyReader
from deploy.edge.http.error_response import ErrorShape
from deploy.edge.requests.ask import Ask, ChatMessage, ChatPrompt, Sampling
from deploy.edge.serving.api import GenerationApi
from engine.errors import QuartetError
from engine.front.generation import Choice, Delta
from tests.conftest import Nano
from tests.support.edge.http_edge import Edge

pytestmark = pytest.mark.pure


class HaikuRequest(Struct, frozen=True):
    about: str
    words: int

    def ask(self) -> Ask:
        chat = ChatPrompt([ChatMessage("user", self.about)])
        return Ask(prompt=chat, sampling=Sampling(max_tokens=self.words), prompt_key="about")


class Haiku:
    media_type = JSON

    def __init__(self, model: ServedModel, request: HaikuRequest) -> None:
        self.id, self._choice, self._model = "haiku", Choice(), model

    def begin(self, usage: Usage) -> bytes:
        return b""

    def events(self, index: int, delta: Delta) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def failure(self, error: QuartetError) -> bytes:
        return b""

    def add(self, index: int, delta: Delta) -> None:
        self._choice.add(delta)

    def full(self, usage: Usage) -> bytes:
        return msgspec.json.encode({"haiku": self._choice.content, "by": self._model.name, "words": usage.completion})


def _oops(_status: int, message: str, param: str | None, _code: str | None) -> dict[str, Any]:
    return {"oops": message, "where": param}


READER = BodyReader(HaikuRequest, {"rhyme": (False,)})
HAIKU = GenerationApi(path="/haiku", operation="chat", error=ErrorShape("Oops", _oops), reader=READER, format=Haiku)


@pytest.fixture
def edge(nano: Nano, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edge]:
    """With one API more, where `apis.py` would have it."""
    more = (*apis.GENERATION_APIS, HAIKU)
    for module in (apis, routes):
        monkeypatch.setattr(module, "GENERATION_APIS", more)
    monkeypatch.setitem(apis.ENDPOINTS, HAIKU.path, HAIKU)
    routes._documentation.cache_clear()
    with Edge(nano("31b")) as edge:
        yield edge
    routes._documentation.cache_clear()


def test_a_new_api_is_served(edge: Edge) -> None:
    """Its answer, its errors in its own shape by its own keys, its place in the document; the engine has what it asked for."""
    edge.script("one two")
    url = f"{edge.url}/haiku"
    found = httpx.post(url, json={"about": "Rain", "words": 3}).json()
    assert found == {"haiku": edge.text.decode([token for [token] in edge.core.steps[:3]]), "by": "nano", "words": 3}
    prompt = edge.text.render_chat([{"role": "user", "content": "Rain"}])
    assert list(edge.core.requests[0].tokens) == prompt
    wrong = [({"about": "a " * 9999, "words": 3}, "about"), ({"about": "a", "words": "x"}, "words"),
             ({"about": "a", "words": 1, "rhyme": True}, "rhyme")]  # fmt: skip
    for body, key in wrong:
        reply = httpx.post(url, json=body)
        assert (reply.status_code, reply.json()["where"]) == (400, key)
    assert "/haiku" in edge.get("/openapi.json").json()["paths"]
