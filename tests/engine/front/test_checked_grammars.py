"""What the check of a grammar accepts the core accepts: random schemas to their end, large grammars at any stack limit."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.errors import GenerationFailed, InvalidRequest
from engine.front import answer_schema
from engine.front.grammar import Thought, grammar, json_answer, lark_answer
from engine.front.text import TextProcessor
from engine.matcher import CHECK_STACK_BYTES, COMPILE_STACK_BYTES, Matcher, Vocabulary
from tests.conftest import Nano
from tests.support.engine.schemas import wide_members
from tests.support.engine.walker import Walker

pytestmark = pytest.mark.pure

COMPILES = """
import sys, threading
from pathlib import Path
from engine.matcher import Vocabulary, compile_stack
vocabulary, rules = Vocabulary.read(Path(sys.argv[1])), Path(sys.argv[2]).read_text()
with compile_stack(int(sys.argv[3])):
    thread = threading.Thread(target=lambda: print(vocabulary.complaint(rules) if sys.argv[4] == "check" else vocabulary.matcher(rules)))
    thread.start()
thread.join()
"""  # noqa: E501
EXTRA: tuple[dict[str, Any], ...] = (
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
    {"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.25},
    {"type": "integer", "multipleOf": 7, "maximum": 50, "minimum": -50},
    {"type": "integer", "multipleOf": 1000003},
    {"type": "string", "pattern": "^[a-d]{2}$", "format": "date-time"},
    {"type": "string", "pattern": "^2020", "format": "date"},
    {"$id": "#/properties/x", "type": "boolean"},
    {"$id": "https://a.example/x", "type": "null"},
    {"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {"^a$": {}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {"^x-": {"type": "null"}},
     "additionalProperties": False},
    {"type": "object", "patternProperties": {"^[a-c]{1,2}$": {"type": "null"}}, "additionalProperties": False},
)  # fmt: skip


@pytest.fixture(scope="module")
def walker(nano: Nano) -> Walker:
    return Walker(TextProcessor.load(nano("31b")))


def drawn(seed: int) -> dict[str, Any]:
    """A random schema in which one property is of EXTRA."""
    rng = random.Random(seed)
    schema = wide_members(rng, rng.randrange(3))
    schema["properties"]["extra"] = rng.choice(EXTRA)
    return schema | {"required": [*schema["required"], "extra"]}


def accepted(walker: Walker, schema: dict[str, Any], seed: int) -> bool:
    """Whether the check takes it; then a walk to the end meets no error, and jsonschema takes what was written."""
    try:
        rules = grammar(walker.markers, json_answer(schema), Thought.none)
    except InvalidRequest:
        return False
    if walker.vocabulary.complaint(rules) is not None:
        return False
    said = walker.said(rules, random.Random(seed))
    jsonschema.Draft202012Validator(valid(schema)).validate(json.loads(said.content))
    return True


def valid(schema: Any) -> Any:
    """The schema without what jsonschema reads otherwise: draft 4's exclusive bounds, and identifiers."""
    if isinstance(schema, list):
        return [valid(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: valid(value) for key, value in schema.items() if key != "$id" or not isinstance(value, str)}
    if kept.get("exclusiveMinimum") is True:
        kept["exclusiveMinimum"] = kept.pop("minimum")
    return kept


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(1000, 2000), marks=pytest.mark.slow)])
def test_what_is_accepted_is_written_to_its_end(walker: Walker, seeds: range) -> None:
    """Random schemas are refused before anything is generated, or valid replies come of them, whichever tokens are taken."""
    assert sum(accepted(walker, drawn(seed), seed) for seed in seeds) > len(seeds) / 2


@pytest.mark.parametrize("schema", EXTRA[:4], ids=range(4))
def test_an_exclusive_bound_that_is_left_to_llguidance_is_seen(
    walker: Walker, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held; the planted fault is llguidance's own reading, which allows the bound of numbers."""
    judge = jsonschema.Draft202012Validator(valid(schema))

    def said() -> list[Any]:
        return [json.loads(walker.answer(json_answer(schema), seed).content) for seed in range(30)]

    assert all(map(judge.is_valid, said()))
    monkeypatch.setattr("engine.front.value_schema._with_held_bound", lambda schema, _: schema)
    if schema["type"] == "number":
        assert not all(map(judge.is_valid, said()))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [(EXTRA[5], "multipleOf"), ({"pattern": "a?" * 32_000}, "pattern"), (EXTRA[10], "patternProperties")],
)
def test_what_would_die_midway_is_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    """Beside them, smaller ones are let in."""
    with pytest.raises(InvalidRequest, match=f"the schema keyword '{keyword}'"):
        json_answer({"type": "object", "properties": {"it": schema}})
    json_answer({"type": "object", "properties": {"it": EXTRA[4]}, "patternProperties": {"^x": {}}})


def walks_of(walker: Walker, rules: str) -> None:
    for seed in range(20):
        walker.said(rules, random.Random(seed))


def test_the_check_walks(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no text ends is found by walking. Planted: a check of the first mask alone lets it in, and the walk dies."""
    monkeypatch.setattr(answer_schema._Keywords, "checked", lambda _, schema: schema)
    rules = grammar(walker.markers, json_answer(EXTRA[10]), Thought.none)
    assert walker.vocabulary.complaint(rules) == "the grammar: no text matches it"
    monkeypatch.setattr(Vocabulary, "_walk", lambda _, matcher, *__: matcher.mask().size)
    assert walker.vocabulary.complaint(rules) is None
    with pytest.raises(GenerationFailed):
        walks_of(walker, rules)


def test_a_check_is_bounded_in_time(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grammar whose masks take 50 ms each a check makes some, and lets it in. Planted: without a clock it makes all."""
    rules, made, mask = grammar(walker.markers, json_answer({"type": "array"}), Thought.none), list[float](), Matcher.mask

    def slow(matcher: Matcher) -> np.ndarray:
        made.append(0.05)
        return mask(matcher)

    monkeypatch.setattr(Matcher, "mask", slow)
    monkeypatch.setattr("engine.matcher.time.thread_time", lambda: sum(made))
    assert walker.vocabulary.complaint(rules) is None
    assert 20 <= len(made) <= 21
    made.clear()
    monkeypatch.setattr("engine.matcher._CHECK_S", 1000)
    assert walker.vocabulary.complaint(rules) is None
    assert len(made) > 200


def lark(terminals: int) -> str:
    """A grammar that is compiled by deep recursion."""
    rules = [f"r{at}: T{at} (r{(at + 1) % (terminals * 2 // 3)} | T{at * 7 % terminals})?" for at in range(terminals * 2 // 3)]
    return "\n".join(["start: r0", *(f"T{at}: /[a-z]{{1,3}}{at}x/" for at in range(terminals)), *rules])


@pytest.mark.parametrize("limit", ["8192", "unlimited"])
def test_the_core_has_more_stack_than_the_check(nano: Nano, tmp_path: Path, limit: str) -> None:
    """At any `ulimit -s`: 1200 terminals pass both. Planted: a core of 2 MiB dies of what the check accepts."""

    def ended(terminals: int, stack: int, what: str) -> int:
        rules = tmp_path / f"{terminals}.lark"
        rules.write_text(grammar(None, lark_answer(lark(terminals)), Thought.none))
        command = f'ulimit -s {limit}; exec "$@"'
        arguments = [sys.executable, "-c", COMPILES, str(nano("31b")), str(rules), str(stack), what]
        return subprocess.run(["bash", "-c", command, "bash", *arguments], timeout=120, capture_output=True, check=False).returncode

    assert CHECK_STACK_BYTES < COMPILE_STACK_BYTES
    assert ended(1200, CHECK_STACK_BYTES, "check") == 0
    assert ended(1200, COMPILE_STACK_BYTES, "core") == 0
    assert ended(1200, 2 << 20, "core") < 0


def test_a_walk_takes_only_what_the_mask_allows(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a check is one that the grammar takes; a mask of all tokens, the planted fault, ends in an error."""
    rules = grammar(walker.markers, json_answer({"type": "integer"}), Thought.none)
    assert walker.vocabulary.complaint(rules) is None
    everything = np.full_like(walker.vocabulary.matcher(rules).mask(), -1)
    monkeypatch.setattr(Matcher, "mask", lambda _: everything)
    assert walker.vocabulary.complaint(rules) is not None
