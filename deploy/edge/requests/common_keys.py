"""Keys that several APIs share."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, UnsetType

from deploy.edge.bodies import key_types as kt
from deploy.edge.bodies.raw_json import ANYTHING, Json, decode, invalid, not_null
from deploy.edge.requests.ask import Media, Part, Sampling, Text
from engine.front.template import MAX_VALUES
from engine.protocol import FrozenStruct, JsonObject, MediaKind

MESSAGES = 4096
PARTS = 1024
TOOLS = 512
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
StopTexts = Annotated[list[ShortText], Meta(max_length=16)]
RawTools = Annotated[Raw, kt.shown_as(kt.array(kt.OBJECT, maxItems=TOOLS))] | UnsetType
TOOL_BYTES = 1 << 20  # of a request's declared tools, and of the arguments of all its tool calls
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # the model knows two: none, and all others


class TextForm(FrozenStruct):
    format: kt.RawObject = UNSET


class CommonSamplingKeys(FrozenStruct):
    temperature: kt.Temperature | None = None
    top_p: kt.Share = None
    top_k: kt.TopK = None
    min_p: kt.Share = None
    presence_penalty: kt.AddedPenalty = None
    frequency_penalty: kt.AddedPenalty = None
    repetition_penalty: kt.RepetitionPenalty = None
    seed: kt.Seed = None
    stop: ShortText | StopTexts | None = None

    def sampling(self, **changes: Any) -> Sampling:
        names = set(self.__struct_fields__).intersection(Sampling.__struct_fields__)
        given = {name: value for name in names if not isinstance(value := getattr(self, name), Raw | UnsetType | None)}
        if given.get("seed") == -1:  # SGLang's and llama.cpp's word for a random one
            del given["seed"]
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return Sampling(**{**given, "stops": tuple(stops), **changes})


class ThinkingSwitch(FrozenStruct):
    """Whether the model thinks, in the form of Anthropic, DeepSeek and GLM."""

    type: kt.Kind | None = None


def said_thinking(enabled: bool | None, switch: ThinkingSwitch | None, effort: Effort | None) -> bool | None:
    if enabled is not None:
        return enabled
    if switch is not None and switch.type is not None:
        return switch.type != "disabled"
    if effort is None:
        return None
    return effort != "none"


def check_bounds(values: Iterable[Json | bytes], key: str, what: str) -> None:
    """InvalidRequest if the JSON of tools is too large or has too many brackets."""
    texts = [bytes(value) for value in values if not isinstance(value, UnsetType)]
    if (size := sum(map(len, texts))) > TOOL_BYTES:
        raise invalid(key, f"{what} have {size} bytes, more than {TOOL_BYTES}")
    if sum(text.count(b"[") + text.count(b"{") for text in texts) > MAX_VALUES:
        raise invalid(key, f"{what} have more than {MAX_VALUES} brackets")


def text_part(kind: str, text: str | None, where: str, kinds: tuple[str, ...] = ("text",)) -> Text:
    """InvalidRequest: wrong kind, or no text."""
    if kind not in kinds:
        raise invalid(where, f"parts of type {kind!r} are not supported here")
    if text is None:
        raise invalid(where, "a text part has a text")
    return Text(text)


def media_part(kind: MediaKind, url: str | None, where: str, budget: int | None = None) -> Media:
    """InvalidRequest: no readable URL."""
    if url is None or url[:6].partition(":")[0].lower() not in ("data", "http", "https"):
        raise invalid(where, f"the {kind} needs its data, or a URL (data:, http: or https:); no files are kept here")
    return Media(kind, url, budget)


def content_of(parts: list[Part]) -> str | list[Part]:
    texts = [part.text for part in parts if isinstance(part, Text)]
    if len(texts) == len(parts):
        return "".join(texts)
    return parts


def declared_function(name: str | None, tool: Any, parameters: Json) -> JsonObject:
    """A function as chat templates take it; engine.front.tools checks it."""
    schema = not_null(parameters)
    about = {
        "name": name,
        "description": tool.description,
        "parameters": None if schema is None else decode(schema, "tools", ANYTHING),
        "strict": tool.strict,
    }
    return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}
