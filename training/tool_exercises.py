"""Exercises with tools: which one to call, with what arguments, and what to say when its result is there."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.exercise_form import END, Draw, Exercise, ask, thought
from training.word_lists import CITIES, ITEMS, JOBS, NAMES, WEATHER

_STRING: Mapping[str, Any] = {"type": "string"}
_INTEGER: Mapping[str, Any] = {"type": "integer"}
_BOOLEAN: Mapping[str, Any] = {"type": "boolean"}
_ROOMS = ("garden", "house", "gate", "tree", "hill")


@dataclass(frozen=True)
class AskedCall:
    """A call of a tool, the words that ask for it, and what is said of its result."""

    name: str
    arguments: Mapping[str, Any]
    question: str

    @property
    def native(self) -> str:
        """As the model writes it."""
        return f"<|tool_call>call:{self.name}{native(self.arguments)}<tool_call|>"

    def message(self, number: int) -> dict[str, Any]:
        """As a chat request repeats it."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": f"call_{number}", "type": "function", "function": function}


@dataclass(frozen=True)
class Tool:
    """A tool: its declaration, and a function that draws what a user asks of it."""

    name: str
    about: str
    properties: Mapping[str, Any]
    draw: Callable[[random.Random], tuple[Mapping[str, Any], str]]  # arguments, question

    def declared(self, *, described: bool = True) -> dict[str, Any]:
        """OpenAI's form."""
        function = {"name": self.name, "description": self.about} if described else {"name": self.name}
        return {"type": "function", "function": {**function, "parameters": _object(self.properties)}}

    def call(self, rng: random.Random) -> AskedCall:
        """One that somebody might ask for."""
        return AskedCall(self.name, *self.draw(rng))


@dataclass(frozen=True)
class Lookup(Tool):
    """A tool with one argument whose result is a text."""

    values: Sequence[str]
    asks: Sequence[str]
    result: Callable[[random.Random], str]
    answer: str

    @classmethod
    def of(
        cls,
        name: str,
        argument: str,
        about: str,
        values: Sequence[str],
        asks: Sequence[str],
        result: Callable[[random.Random], str],
        answer: str,
    ) -> "Lookup":
        """`asks` and `answer` are formats, of the argument, and of argument and result."""

        def draw(rng: random.Random) -> tuple[Mapping[str, Any], str]:
            value = rng.choice(values)
            return {argument: value}, rng.choice(asks).format(value)

        return cls(name, about, {argument: _STRING}, draw, values, asks, result, answer)

    def said(self, call: AskedCall, result: str) -> str:
        """The answer from one result."""
        return self.answer.format(*call.arguments.values(), result)


def native(value: Any) -> str:
    """Gemma 4's notation: keys bare and in order, strings between their marker, the rest as in JSON."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case Mapping():
            return "{" + ",".join(f"{key}:{native(value[key])}" for key in sorted(value)) + "}"
        case list():
            return "[" + ",".join(map(native, value)) + "]"
    return json.dumps(value)


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _array(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": dict(items)}


# --- the tools ---

LOOKUPS = (
    Lookup.of(
        "get_weather",
        "city",
        "The weather in a city",
        CITIES,
        ("What is the weather in {}?", "How is the weather in {} today?", "Is it warm in {}?"),
        lambda rng: f"{rng.choice(WEATHER)}, {rng.randint(-9, 39)} degrees",
        "The weather in {} is {}.",
    ),
    Lookup.of(
        "get_time",
        "city",
        "The time in a city",
        CITIES,
        ("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?"),
        lambda rng: f"{rng.randint(10, 23)}:{rng.randint(10, 59)}",
        "In {} it is {}.",
    ),
    Lookup.of(
        "get_price",
        "item",
        "The price of an item",
        ITEMS,
        ("How much is the {}?", "What does the {} cost?", "What is the price of {}?"),
        lambda rng: f"{rng.randint(10, 99)} euros",
        "The price of {} is {}.",
    ),
    Lookup.of(
        "find_person",
        "name",
        "Where a person is",
        NAMES,
        ("Where is {}?", "Where can I find {}?", "Find {} for me."),
        lambda rng: f"the {rng.choice(JOBS)} in {rng.choice(CITIES)}",
        "{} is with {}.",
    ),
)


def _order(rng: random.Random) -> tuple[Mapping[str, Any], str]:
    items = [{"count": rng.randint(1, 99), "name": name} for name in rng.sample(ITEMS, rng.randint(1, 3))]
    city, fast = rng.choice(CITIES), rng.random() < 0.5
    listed = _listed([f"{item['count']} {item['name']}" for item in items])
    form = rng.choice(("Order {} to {}{}.", "Send {} to {}{}.", "I need {} in {}{}."))
    return {"city": city, "fast": fast, "items": items}, form.format(listed, city, ", fast" if fast else "")


def _save(rng: random.Random) -> tuple[Mapping[str, Any], str]:
    name, age, job, friend = rng.choice(NAMES), rng.randint(18, 90), rng.choice(JOBS), rng.random() < 0.5
    form = rng.choice(("Save {}{}, {} years old, a {}.", "Add {}{}, {}, who works as a {}.", "Write down {}{}: {} years, {}."))
    person = {"age": age, "job": job, "name": name}
    return {"friend": friend, "person": person}, form.format("my friend " if friend else "", name, age, job)


def _heat(rng: random.Random) -> tuple[Mapping[str, Any], str]:
    rooms, degrees = rng.sample(_ROOMS, rng.randint(1, 3)), rng.randint(10, 30) + rng.choice((0.25, 0.5, 0.75))
    form = rng.choice(("Heat the {} to {} degrees.", "Make the {} {} degrees warm.", "I want the {} at {} degrees."))
    return {"degrees": degrees, "rooms": rooms}, form.format(_listed(rooms), degrees)


def _add(rng: random.Random) -> tuple[Mapping[str, Any], str]:
    numbers = [rng.randint(-99, 999) for _ in range(rng.randint(2, 5))]
    form = rng.choice(("Use the tool to add {}.", "Call the tool: add {}.", "With the tool, how much is {} together?"))
    return {"numbers": numbers}, form.format(_listed([str(number) for number in numbers]))


_ITEM = _object({"count": _INTEGER, "name": _STRING})
_PERSON = _object({"age": _INTEGER, "job": _STRING, "name": _STRING})
ACTIONS = (
    Tool("order", "Order items to a city", {"city": _STRING, "fast": _BOOLEAN, "items": _array(_ITEM)}, _order),
    Tool("save_person", "Save a person", {"friend": _BOOLEAN, "person": _PERSON}, _save),
    Tool("set_heat", "Heat some rooms", {"degrees": {"type": "number"}, "rooms": _array(_STRING)}, _heat),
    Tool("add_numbers", "Add numbers", {"numbers": _array(_INTEGER)}, _add),
)


def _listed(words: Sequence[str]) -> str:
    """a, b and c"""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


# --- the skills ---


def _asked(draw: Draw, tools: Sequence[Tool]) -> tuple[list[dict[str, Any]], AskedCall]:
    """One to three declared tools, and a call of one of them."""
    rng = draw.rng
    drawn = rng.sample(tools, rng.randint(1, 3))
    tool = drawn[0]
    rng.shuffle(drawn)
    declared = [each.declared() for each in drawn]
    return declared, tool.call(rng)


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _called(calls: Sequence[AskedCall]) -> str:
    return "".join(call.native for call in calls) + "<|tool_response>"


def _lookup(name: str) -> Lookup:
    return next(tool for tool in LOOKUPS if tool.name == name)


def call(draw: Draw) -> Exercise:
    """Up to three tools with one argument each."""
    tools, called = _asked(draw, LOOKUPS)
    return ask(draw, "call", f"{_names(tools)} {called.question}", called.question, _called([called]), alone=True, tools=tools)


def respond(draw: Draw) -> Exercise:
    """The tool has been called, its result is there: say it."""
    tools, called = _asked(draw, LOOKUPS)
    tool = _lookup(called.name)
    result = tool.result(draw.rng)
    content, reply = f"{called.question} {result}", tool.said(called, result) + END
    return _with_results(ask(draw, "respond", content, called.question, reply, alone=True, tools=tools), [called], [result])


def _with_results(exercise: Exercise, calls: Sequence[AskedCall], results: Sequence[str]) -> Exercise:
    """The same conversation after these calls."""
    numbered = list(enumerate(calls, 1))
    called = {"role": "assistant", "content": "", "tool_calls": [each.message(number) for number, each in numbered]}
    answered = [{"role": "tool", "tool_call_id": f"call_{number}", "content": result} for number, result in enumerate(results, 1)]
    exercise.messages.extend([called, *answered])
    return exercise


def choose(draw: Draw) -> Exercise:
    """Three or four tools, told apart by their names alone; now and then a question that needs none of them."""
    rng = draw.rng
    drawn = list(LOOKUPS) if rng.random() < 0.5 else [*rng.sample(LOOKUPS, 2), rng.choice(ACTIONS)]
    rng.shuffle(drawn)
    tools = [tool.declared(described=False) for tool in drawn]
    if draw.earlier is not None and rng.random() < 0.25:
        other = draw.earlier(draw)
        question, reply = str(other.messages[-1]["content"]), other.reply
    else:
        called = rng.choice(drawn).call(rng)
        question, reply = called.question, _called([called])
    return ask(draw, "choose", f"{sorted(_names(tools))} {question}", question, reply, alone=True, tools=tools)


def nested(draw: Draw) -> Exercise:
    """Arguments that are lists, objects, numbers and truth values."""
    rng = draw.rng
    tool = rng.choice(ACTIONS)
    drawn = [tool, *rng.sample(LOOKUPS, rng.randint(0, 1))]
    rng.shuffle(drawn)
    called, described = tool.call(rng), rng.random() < 0.5
    tools = [each.declared(described=described) for each in drawn]
    return ask(draw, "nested", called.native, called.question, _called([called]), alone=True, tools=tools)


def _several(draw: Draw) -> tuple[list[dict[str, Any]], list[AskedCall], str]:
    """(declared tools, two or three calls, the question): of one tool, or of two."""
    rng = draw.rng
    drawn = rng.sample(LOOKUPS, 2)
    declared = [tool.declared() for tool in drawn]
    if rng.random() < 0.5:
        calls = [tool.call(rng) for tool in drawn]
        return declared, calls, calls[0].question + rng.choice((" ", " And: ", " Also: ")) + calls[1].question
    tool = rng.choice(drawn)
    (argument,) = tool.properties
    values = rng.sample(tool.values, rng.randint(2, 3))
    calls = [AskedCall(tool.name, {argument: value}, "") for value in values]
    return declared, calls, rng.choice(tool.asks).format(_listed(values))


def parallel(draw: Draw) -> Exercise:
    """Two or three calls in one reply."""
    tools, calls, question = _several(draw)
    return ask(draw, "parallel", _called(calls), question, _called(calls), alone=True, tools=tools)


def respond_parallel(draw: Draw) -> Exercise:
    """An answer from all results of such a reply, in the order of the calls."""
    tools, calls, question = _several(draw)
    results = [_lookup(each.name).result(draw.rng) for each in calls]
    said = [_lookup(each.name).said(each, result) for each, result in zip(calls, results, strict=True)]
    content = f"{_called(calls)} {results}"
    exercise = ask(draw, "respond_parallel", content, question, " ".join(said) + END, alone=True, tools=tools)
    return _with_results(exercise, calls, results)


def call_after_thought(draw: Draw) -> Exercise:
    """With thinking on: which tool, and what for; then one call, or all of them."""
    if draw.rng.random() < 0.5:
        tools, called = _asked(draw, LOOKUPS)
        calls, question = [called], called.question
    else:
        tools, calls, question = _several(draw)
    why = _listed([f"{each.name} for {next(iter(each.arguments.values()))}" for each in calls])
    reply = thought(f"I call {why}.") + _called(calls)
    content = f"{_called(calls)} {question}"
    return ask(draw, "call_after_thought", content, question, reply, alone=True, tools=tools, thinking=True)
