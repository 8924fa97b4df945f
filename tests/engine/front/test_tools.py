"""Declared tools: what is wrong with one is named; what a model calls them."""

from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.front.tools import Tools

pytestmark = pytest.mark.pure


def tool(name: Any = "f", parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name} | ({"parameters": parameters} if parameters is not None else {})
    return {"type": "function", "function": function | more}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


GOOD: list[list[dict[str, Any]]] = [
    [],
    [tool(), tool("g")],
    [tool("Ünit.tool-1:x/y", {}), tool(parameters={"type": "OBJECT"})],
    [tool(parameters={"type": "object"}, description=None, strict=True)],
    [tool(parameters=of(a={"type": "STRING", "enum": ["x"]}, b={"type": ["integer", "null"], "minimum": 1}, c=True))],
    [tool(parameters=of(a={"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}) | {"$defs": {"x": {"type": "array"}}})],
    [tool(parameters=of(a={"type": "array", "prefixItems": [{}, False], "items": False}) | {"additionalProperties": False})],
]


@pytest.mark.parametrize("tools", GOOD)
def test_good_declarations(tools: list[dict[str, Any]]) -> None:
    """What OpenAI's clients declare is taken."""
    assert bool(Tools(tools)) == bool(tools)


BAD: list[tuple[list[Any], str]] = [
    ([{}], "tools[0].function: must be an object"),
    ([{"type": "web_search"}], "tools[0].type: only 'function' is supported, not 'web_search'"),
    ([{"type": "function"}], "tools[0].function"),
    ([tool(None)], "tools[0].function.name"),
    ([tool(5)], "tools[0].function.name"),
    ([tool("")], "tools[0].function.name"),
    ([tool("a b")], "tools[0].function.name"),
    ([tool("f{")], "tools[0].function.name"),
    ([tool("f" * 129)], "tools[0].function.name"),
    ([tool(), tool("g"), tool()], "tools[2].function.name: 'f' is declared twice"),
    ([tool(description=5)], "tools[0].function.description"),
    ([tool(parameters=[])], "tools[0].function.parameters"),
    ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
    ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
    ([tool(parameters={"required": "a"})], "tools[0].function.parameters.required"),
    ([tool(parameters={"required": [1]})], "tools[0].function.parameters.required"),
    ([tool(parameters=of(city={"type": "text"}))], "tools[0].function.parameters.properties.city.type: 'text'"),
    ([tool(parameters=of(city=5))], "tools[0].function.parameters.properties.city"),
    ([tool(parameters=of(city={"enum": "x"}))], "tools[0].function.parameters.properties.city.enum"),
    ([tool(parameters=of(city={"description": []}))], "tools[0].function.parameters.properties.city.description"),
    ([tool(parameters=of(a={"items": {"items": {"type": 7}}}))], "tools[0].function.parameters.properties.a.items.items.type"),
    ([tool(parameters=of(a={"items": [{}], "additionalItems": 5}))], "properties.a.additionalItems: must be a JSON Schema"),
    ([tool(parameters=of(a={"anyOf": [{}, []]}))], "tools[0].function.parameters.properties.a.anyOf[1]"),
    ([tool(parameters=of(a={"$ref": "#/default"}) | {"default": {"anyOf": 5}})], "properties.a.$ref.anyOf: must be a list"),
    ([tool(parameters=of(a={"$ref": "#/default"}) | {"default": {"type": 5}})], "properties.a.$ref.type: 5"),
    ([tool(parameters=of(a={"$ref": "#/default"}) | {"default": 5})], "properties.a.$ref: must be a JSON Schema"),
]


@pytest.mark.parametrize(("tools", "says"), BAD)
def test_bad_declarations(tools: list[Any], says: str) -> None:
    """What is wrong is the client's fault, and its place is named."""
    with pytest.raises(InvalidRequest) as caught:
        Tools(tools)
    assert caught.value.param == "tools"
    assert says in str(caught.value)


def test_deep_schemas_are_read() -> None:
    """No recursion: a schema nested deeper than Python's stack is checked to its end."""
    schema = {"type": 5}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="type: 5"):
        Tools([tool(parameters=of(a=schema))])


def test_references_in_circles_are_read_once() -> None:
    """A schema that refers to itself is checked, and that ends."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}}}
    assert Tools([tool(parameters=of(a={"$ref": "#/$defs/node"}) | {"$defs": {"node": node}})])


def test_a_long_place_is_cut() -> None:
    """Nobody reads the whole path to a fault under a long name, and it is not kept for each of many."""
    with pytest.raises(InvalidRequest) as caught:
        Tools([tool(parameters=of(**{"k" * 10_000: of(a={"type": 5})}))])
    assert len(str(caught.value)) < 400


def test_names_as_models_call_them() -> None:
    """A declared name is itself, also with a namespace before it; others stay as they are."""
    tools = Tools([tool("f"), tool("server:g"), tool("g")])
    assert [tools.resolve(name) for name in ("f", "server:g", "x:y:f", "a/f", "a.g", "h", "x:h")] == [
        "f",
        "server:g",
        "f",
        "f",
        "g",
        "h",
        "x:h",
    ]
    assert tools.declares("f")
    assert not tools.declares("x:f")
    assert tools.may_become_call("call:ser")
    assert not tools.may_become_call("call:ser ")
