"""Types of JSON values."""

from typing import Annotated

from msgspec import Meta, Raw, UnsetType

from engine.protocol import MAX_ALTERNATIVES, JsonObject


def array(items: JsonObject, **bounds: int) -> JsonObject:
    return {"type": "array", "items": items, **bounds}


def component(kind: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{kind}"}


STRING = {"type": "string"}
STRINGS = array(STRING)
OBJECT = {"type": "object"}
ID = {"type": "integer", "minimum": 0}
IDS = array(ID)

INT32_MAX = 2**31 - 1

Kind = Annotated[str, Meta(max_length=64)]
Name = Annotated[str, Meta(max_length=256)]
ModelName = Annotated[str, Meta(max_length=1024)]
Natural = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
# Of these null says as much as nothing.
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None
Alternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None
Priority = Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None
Share = Annotated[float, Meta(ge=0, le=1)] | None
AddedPenalty = Annotated[float, Meta(ge=-2, le=2)] | None
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)] | None
Temperature = Annotated[float, Meta(ge=0, le=2)]


def shown_as(*shapes: JsonObject) -> Meta:
    return Meta(extra_json_schema={"anyOf": [*shapes, {"type": "null"}]})


def one_of(*values: str) -> Meta:
    return Meta(max_length=64, extra_json_schema={"enum": values})


RawText = Annotated[Raw, shown_as(STRING)] | UnsetType
RawTexts = Annotated[Raw, shown_as(STRINGS)] | UnsetType
RawIds = Annotated[Raw, shown_as(IDS)] | UnsetType
RawObject = Annotated[Raw, shown_as(OBJECT)] | UnsetType
RawTextOrObject = Annotated[Raw, shown_as(STRING, OBJECT)] | UnsetType
RawToolChoice = Annotated[Raw, shown_as({"enum": ["auto", "none", "required"]}, OBJECT)] | UnsetType
