"""Grammars are compiled in processes of their own: what takes too much is refused with its limits, and nothing of it goes on."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest

from deploy.edge.processes.grammar_process import complaint
from deploy.edge.processes.side_pool import SidePool
from engine.errors import Overloaded
from engine.front.grammar import Thought, choice_answer, grammar, json_answer
from engine.front.grammar_check import GrammarCheck
from engine.matcher import Vocabulary
from tests.conftest import Nano
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, until
from tests.support.engine.groups import children_of
from tests.support.stack.serve_process import process_mb

pytestmark = pytest.mark.pure

LIMITS = "compiling it takes more than 2 s of CPU, 64 MiB or 8 MiB of stack"
MULTIPLE = {"type": "integer", "multipleOf": 3999971}
MULTIPLES = {"anyOf": [{"type": "integer", "multipleOf": multiple} for multiple in range(9801, 9999, 2)]}
EXPRESSIONS = [f"(a|b)*a(a|b){{{count}}}" for count in range(10, 34)]
REFERRING = {f"d{at}": {"type": "string", "pattern": each, "$ref": f"#/$defs/d{at + 1}"} for at, each in enumerate(EXPRESSIONS)}
HOSTILE = {
    "multiple": "answer: %json " + json.dumps(MULTIPLE),
    "patterns": "answer: %json " + json.dumps({"type": "string", "allOf": [{"pattern": each} for each in EXPRESSIONS]}),
    "references": "answer: %json " + json.dumps({"$defs": REFERRING | {"d24": {"type": "string"}}, "$ref": "#/$defs/d0"}),
    "terminals": "answer: A\nA: " + " & ".join(f"/(.|\\n)*{each}(.|\\n)*/" for each in EXPRESSIONS),
}


def rules(answer: str) -> str:
    return grammar(None, answer, Thought.none)


@pytest.fixture(scope="module")
def pool(nano: Nano) -> Iterator[SidePool]:
    pool = SidePool("deploy.edge.processes.grammar_process", str(nano("31b")))
    yield pool
    pool.close()


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_takes_too_much_ends_alone(pool: SidePool, hostile: str) -> None:
    """Its process is gone with its answer, this one has not grown, and others are compiled beside it."""
    assert complaint(pool, rules(choice_answer([hostile]))) is None  # the side process has started
    memory, found = process_mb("self", "VmRSS"), []
    thread = threading.Thread(target=lambda: found.append(complaint(pool, rules(HOSTILE[hostile]))))
    thread.start()
    for at in range(5):
        assert complaint(pool, rules(choice_answer([f"{hostile} {at}"]))) is None
    thread.join(20)
    assert found == [LIMITS]
    assert process_mb("self", "VmRSS") - memory < 32
    assert pool._process is not None
    pid = pool._process.pid
    until(lambda: len(children_of(pid)) == 1, "the next task's process alone is left")


def test_without_limits_it_goes_on(pool: SidePool, nano: Nano, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above: a second after the limits would have ended it there is no answer, and a process."""
    free = "from deploy.edge.processes import grammar_process as one; one.begin = lambda *_: None; one.fork_for_each(one._load)"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start([command[0], "-c", free, *command[-2:]], **more))
    unbound, found = SidePool("", str(nano("31b"))), []
    began = time.monotonic()
    assert complaint(pool, rules(HOSTILE["multiple"])) == LIMITS
    took = time.monotonic() - began

    def run() -> None:
        with suppress(Overloaded):  # when it is killed
            found.append(unbound.run(rules(HOSTILE["multiple"]).encode()))

    thread = threading.Thread(target=run)
    unbound.start()
    assert unbound._process is not None
    thread.start()
    until(lambda: len(children_of(unbound._process.pid)) == 2, "the process that compiles, and the next task's")
    thread.join(took + 1)
    child = min(children_of(unbound._process.pid))
    assert not found
    os.kill(child, signal.SIGKILL)
    thread.join(20)
    unbound.close()


def test_its_verdicts_are_the_vocabularys(pool: SidePool, nano: Nano) -> None:
    """The sentence is the one that the same checkpoint's vocabulary gives here; of what is well, none."""
    vocabulary = Vocabulary.read(nano("31b"))
    found = []
    for answer in (json_answer({"type": "string"}), "answer: nothing", json_answer({"enum": []}), 'answer: "é"'):
        found.append(complaint(pool, rules(answer)))
        assert found[-1] == vocabulary.complaint(rules(answer))
    assert [each is None for each in found] == [True, False, False, True]


def test_over_http_it_is_a_400_and_its_neighbours_are_served(edge: Edge, pool: SidePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form's names its key and the limits; of a tool's schema, which was no form that was asked for, only names are kept."""
    edge.reset()
    monkeypatch.setattr(edge.service.jobs, "grammars", GrammarCheck(partial(complaint, pool)))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": MULTIPLES}}
    path, replies = "/v1/chat/completions", []
    bad = threading.Thread(target=lambda: replies.append(edge.post(path, chat_body(response_format=form))))
    bad.start()
    assert edge.post(path, chat_body(response_format={"type": "json_object"})).status_code == 200
    bad.join(60)
    assert error_of(replies[0], 400)["message"] == f"response_format: {LIMITS}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": MULTIPLE}}}}]
    assert edge.post(path, chat_body(tools=tools)).status_code == 200
