"""Exercises with tools and schemas: our own parser and template, and jsonschema, read them as they were meant."""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from deploy.models.nano import TRAINED
from engine.front.parts import Arguments, Content, Reasoning, ToolCallStart
from engine.front.reply import Markers, ReplyParser
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from training.exercise_form import END, LONGEST_REPLY, Exercise
from training.exercises import SKILLS, drawing, training
from training.tool_exercises import ACTIONS, LOOKUPS, AskedCall, Tool, native
from training.train import ROW

pytestmark = pytest.mark.pure

TEXTS = {member: TextProcessor.load(TRAINED / member) for member in ("31b", "e2b")}  # one of each chat template
WITH_TOOLS = ("call", "choose", "parallel", "nested", "call_after_thought")
Calls = list[tuple[str, dict[str, Any]]]


def drawn(skill: str, member: str, size: int) -> list[Exercise]:
    draw = drawing(random.Random(f"{skill} {member}"), 64, TEXTS[member])
    return [training(skill, draw) for _ in range(size)]


def parsed(text: TextProcessor, exercise: Exercise) -> tuple[str, str, Calls]:
    """(thought, answer, calls) as a client would get them."""
    markers = Markers.of(text)
    parser = ReplyParser(text.pieces, markers, Tools(exercise.tools), prompt=exercise.prompt(text))
    parts = [*parser.push(text.encode(exercise.reply, add_bos=False)[:-1]), *parser.end(cut=False)]
    names = {part.index: part.name for part in parts if isinstance(part, ToolCallStart)}
    arguments = dict.fromkeys(names, "")
    for part in parts:
        if isinstance(part, Arguments):
            arguments[part.index] += part.text
    said = ["".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Content)]
    return said[0], said[1], [(names[index], json.loads(arguments[index])) for index in names]


@pytest.mark.parametrize("tool", [*LOOKUPS, *ACTIONS], ids=lambda tool: tool.name)
def test_a_call_reads_as_it_was_drawn(tool: Tool) -> None:
    """A call comes out of the reply parser as it went in, and fits the declared schema; with a key renamed it does not."""
    text, rng = TEXTS["31b"], random.Random(tool.name)
    for _ in range(20):
        call = tool.call(rng)
        messages = [{"role": "user", "content": call.question}]
        exercise = Exercise("nested", "", messages, call.native + "<|tool_response>", [tool.declared()])
        ((name, arguments),) = parsed(text, exercise)[2]
        assert (name, arguments) == (call.name, call.arguments)
        schema = tool.declared()["function"]["parameters"]
        jsonschema.validate(arguments, schema)
        key = min(arguments)
        planted = replace(exercise, reply=exercise.reply.replace(f"{key}:", f"{key}s:", 1))
        ((_, wrong),) = parsed(text, planted)[2]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("member", TEXTS)
@pytest.mark.parametrize("skill", WITH_TOOLS)
def test_a_reply_sent_back_is_the_reply(skill: str, member: str) -> None:
    """Parsed, and rendered again as history, a reply with calls is the very tokens that were taught, thought included."""
    text = TEXTS[member]
    called = 0
    for exercise in drawn(skill, member, 30):
        thought, answer, calls = parsed(text, exercise)
        assert bool(thought) == exercise.thinking
        if not calls:
            assert (skill, answer) == ("choose", exercise.reply.removesuffix(END))
            continue
        called += 1
        assert not answer
        sent = [AskedCall(name, arguments, "").message(number) for number, (name, arguments) in enumerate(calls)]
        message = {"role": "assistant", "content": "", "tool_calls": sent}
        if thought:
            message["reasoning_content"] = thought
        result = {"role": "tool", "tool_call_id": "call_0", "content": "?"}
        history = replace(exercise, messages=[*exercise.messages, message, result]).prompt(text)
        taught = [*opened(text, exercise), *text.encode(exercise.reply, add_bos=False)]
        assert history[: len(taught)] == taught
    assert called >= 10


def opened(text: TextProcessor, exercise: Exercise) -> list[int]:
    """The prompt without the empty thought that some templates open a reply with, which no history repeats."""
    prompt, empty = exercise.prompt(text), text.encode("<|channel>thought\n<channel|>", add_bos=False)
    return prompt[: -len(empty)] if prompt[-len(empty) :] == empty else prompt


def test_what_is_called_was_asked_for() -> None:
    """Every text and number in a nested call's arguments stands in the question."""
    for exercise in drawn("nested", "31b", 60):
        for _, arguments in parsed(TEXTS["31b"], exercise)[2]:
            for value in leaves(arguments):
                assert str(value) in exercise.messages[-1]["content"], exercise


def leaves(value: Any) -> list[Any]:
    """The texts and numbers in it."""
    if isinstance(value, dict | list):
        return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in leaves(each)]
    return [] if isinstance(value, bool) else [value]


def test_the_notation_is_the_one_of_templates() -> None:
    """Keys in order, strings marked, truth values and numbers as in JSON."""
    value = {"b": [1, -2.5, True], "a": {"d": "x y", "c": False}}
    assert native(value) == '{a:{c:false,d:<|"|>x y<|"|>},b:[1,-2.5,true]}'


def test_json_fits_its_schema() -> None:
    """The reply has the schema's keys in their order, each of its type, and no white space; without a key it does not fit."""
    inner = 0
    for exercise in drawn("json_schema", "31b", 80):
        question = exercise.messages[-1]["content"]
        schema = required(json.loads(question[question.index("{") :]))
        reply = exercise.reply.removesuffix(END)
        answer = json.loads(reply)
        jsonschema.validate(answer, schema)
        assert list(answer) == list(schema["properties"])
        assert reply == json.dumps(answer, separators=(",", ":"))
        inner += any(isinstance(value, dict) for value in answer.values())
        answer.popitem()
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(answer, schema)
    assert 16 < inner < 56


def required(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, and nothing may be left out or added."""
    if schema["type"] != "object":
        return schema
    properties = {key: required(value) for key, value in schema["properties"].items()}
    return {**schema, "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.mark.parametrize("skill", SKILLS)
def test_lengths_are_bounded(skill: str) -> None:
    """No exercise is longer than a row of training data, and no reply longer than what the quality gate waits for."""
    for member, text in TEXTS.items():
        for exercise in drawn(skill, member, 25):
            reply = len(text.encode(exercise.reply, add_bos=False))
            assert len(exercise.prompt(text)) + reply <= ROW
            assert reply <= LONGEST_REPLY
