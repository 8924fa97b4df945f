"""Adapters by name over HTTP: a request's `model` says which, in each API; answers and the list of models say so too."""

from typing import Any

import pytest

from deploy.placement import configure
from deploy.settings import Settings
from engine.errors import ConfigError
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, Edges

pytestmark = pytest.mark.pure

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(max_tokens=1),
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
}
NAMES = {"nano": -1, "sql": 0, "org/poems": 1}


@pytest.fixture(scope="module")
def adapted(edges: Edges) -> Edge:
    return edges(adapters={"sql": "/adapters/a", "org/poems": "/adapters/b"})


@pytest.mark.parametrize("path", list(BODIES))
def test_a_model_names_an_adapter(adapted: Edge, path: str) -> None:
    """The core gets its index, and the answer has its name; of the model itself -1."""
    adapted.reset()
    for name in NAMES:
        answer = adapted.post(path, BODIES[path] | {"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
    assert [request.adapter for request in adapted.core.requests] == list(NAMES.values())


@pytest.mark.parametrize("path", list(BODIES))
def test_a_name_that_is_no_adapters_is_unknown(adapted: Edge, edge: Edge, path: str) -> None:
    """Neither a folder's, nor a part of a name; nor an adapter's where none is served."""
    for name in ("poems", "/adapters/a", "SQL", "sql "):
        assert adapted.post(path, BODIES[path] | {"model": name}).status_code == 404
    assert edge.post(path, BODIES[path] | {"model": "sql"}).status_code == 404


def test_models_are_listed_with_their_parent(adapted: Edge, edge: Edge) -> None:
    """The model first; each adapter is a model whose parent it is, and says nothing of its folder."""
    listed = adapted.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in listed] == [("nano", None), ("sql", "nano"), ("org/poems", "nano")]
    assert adapted.get("/v1/models/org/poems").json() == listed[2]
    assert "/adapters" not in str(listed)
    assert error_of(adapted.get("/v1/models/poems"), 404)["code"] == "model_not_found"
    assert [card["id"] for card in edge.get("/v1/models").json()["data"]] == ["nano"]


@pytest.mark.parametrize(
    ("adapters", "why"),
    [
        ({"a": "relative"}, "adapters"),
        ({"a": "./a/folder"}, "adapters"),
        ({"/a": "/x"}, "adapters"),
        ({"a b": "/x"}, "adapters"),
        ({"": "/x"}, "adapters"),
        ({f"a{at}": "/x" for at in range(65)}, "adapters"),
        (["/x"], "adapters"),
    ],
)
def test_settings_that_name_none(adapters: Any, why: str) -> None:
    """A name that no request can have, a folder by no absolute path, too many: the key is named."""
    Settings.read({"model": "nano:31b", "adapters": {"a": "/x"}})
    with pytest.raises(ConfigError, match=why):
        Settings.read({"model": "nano:31b", "adapters": adapters})


def test_an_adapter_is_not_called_as_the_model() -> None:
    """One name would be of two models."""
    settings = Settings.read({"model": "nano:31b", "served_model_name": "m", "adapters": {"m": "/x"}})
    with pytest.raises(ConfigError, match=r"adapters\.m: clients call the model itself so"):
        configure(settings, None, None, has_gpus=False)  # type: ignore[arg-type]
