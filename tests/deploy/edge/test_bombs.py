"""Bodies made to hurt: each is answered for what it is, and costs its neighbours nothing that they would notice."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self

import httpx
import pytest

from tests.conftest import Nano
from tests.support.edge.api_client import chat_body
from tests.support.edge.edge_process import EdgeProcess
from tests.support.edge.http_edge import until

pytestmark = pytest.mark.cpu

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SIZE = (8 << 20) - 256  # of each body: what the limit lets through
MAX_LEN = 1 << 17  # a context as large as Gemma's: what is refused by its size alone at a small one is looked at
CPU_S, MEMORY_MB, HELD_S = 2.0, 100.0, 0.25  # of CPU time, and several times what it is: a machine may be a third as fast
USER = b'{"model":"nano","messages":[{"role":"user","content":'
CALL = USER + b'"x"},{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":'
ANTHROPIC = b'{"model":"nano","max_tokens":1,"messages":['
TOOL_USE = b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":'
ITEMS = b'{"model":"nano","input":['
REFERENCES = {"properties": {f"p{at}": {"$ref": f"#{at}/$defs/a"} for at in range(4000)}}
PLANE_15 = "".join(map(chr, range(0xF0000, 0xFFFFE)))  # private use, all of it


def repeated(head: bytes, element: bytes, tail: bytes) -> bytes:
    """`element` again and again, comma-separated, up to SIZE."""
    count = (SIZE - len(head) - len(tail)) // (len(element) + 1)
    return head + b",".join([element] * count) + tail


def filled(head: bytes, element: bytes, tail: bytes) -> bytes:
    """`element` again and again, up to SIZE."""
    return head + element * ((SIZE - len(head) - len(tail)) // len(element)) + tail


def prompts(element: bytes, tail: bytes = b"]}") -> bytes:
    return repeated(b'{"model":"nano","prompt":[', element, tail)


def chats(key: bytes, element: bytes, end: bytes = b"]}") -> bytes:
    return repeated(USER + b'"x"}],"max_tokens":1,"%b":[' % key, element, end)


def tool(parameters: dict[str, Any]) -> bytes:
    """A chat that declares one."""
    declared = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"} | parameters}}
    return USER + b'"x"}],"max_tokens":1,"tools":[%b]}' % json.dumps(declared).encode()


def form(key: str, value: str) -> bytes:
    """A completion whose answer is to have one."""
    return json.dumps({"model": "nano", "prompt": "x", "max_tokens": 1, key: value}).encode()


SERVED = {
    "a key that nobody knows",
    "keys as many as are read",
    "one schema by many references",
    "classes without an end",
}  # all others are refused
# path -> name -> body
BOMBS: dict[str, dict[str, Callable[[], bytes]]] = {
    TEXT: {
        "ids, the last is text": lambda: prompts(b"1", b',"x"]}'),
        "few enough ids, the last is text": lambda: b'{"model":"nano","prompt":[' + b"1," * 1_000_000 + b'"x"]}',
        "booleans for ids": lambda: prompts(b"true"),
        "too many ids": lambda: prompts(b"1"),
        "a million prompts": lambda: prompts(b'"a"'),
        "a million lists of ids": lambda: prompts(b"[1]"),
        "a list of many ids": lambda: repeated(b'{"model":"nano","prompt":[[', b"1", b"]]}"),
        "a prompt as long as the body": lambda: filled(b'{"model":"nano","prompt":"', b"a", b'"}'),
        "white space": lambda: filled(b'{"model":"nano","prompt":', b" ", b"7}"),
        "a number as long as the body": lambda: filled(b'{"model":"nano","prompt":"x","seed":', b"9", b"}"),
        "brackets": lambda: filled(b'{"model":"nano","prompt":', b"[", b"}"),
        "empty lines for a grammar": lambda: form("guided_grammar", "\n" * 30_000 + "x"),
        "rules of a grammar": lambda: form(
            "guided_grammar", "root ::= a0\n" + "".join(f"a{at} ::= a{at + 1}\n" for at in range(3500)) + 'a3500 ::= "x"'
        ),
        "a regex of a grammar without an end": lambda: form("guided_grammar", 'start: "a"\n/' + "a\\/" * 15_000),
        "a text of a grammar without an end": lambda: form("guided_grammar", 'start: "a"\n"' + 'a\\"' * 12_000),
        "comments of a grammar": lambda: form("guided_grammar", "#\n" * 16_000 + 'root ::= "x"'),
        "pictures for a prompt": lambda: filled(b'{"model":"nano","prompt":"', "\U0001f9ff".encode(), b'"}'),
        "control tokens for a prompt": lambda: filled(b'{"model":"nano","prompt":"', b"<bos>", b'"}'),
    },
    CHAT: {
        "objects in objects": lambda: filled(USER, b'{"a":', b"}"),
        "brackets in an unknown key": lambda: filled(USER + b'"x"}],"unknown":', b"[", b"}"),
        "stop strings": lambda: chats(b"stop", b'"a"'),
        "stop strings as many as are read": lambda: USER + b'"x"}],"stop":[' + b'"a",' * 260_000 + b'"a"]}',
        "biases as many as are read": lambda: (
            USER + b'"x"}],"logit_bias":{' + b",".join(b'"%d":0' % number for number in range(260_000)) + b"}}"
        ),
        "stop ids": lambda: chats(b"stop_token_ids", b"1"),
        "stop ids that are text": lambda: chats(b"stop_token_ids", b'"a"'),
        "modalities": lambda: chats(b"modalities", b'"a"'),
        "functions": lambda: chats(b"functions", b"{}"),
        "bias": lambda: repeated(USER + b'"x"}],"logit_bias":{', b'"1":0', b"}}"),
        "an effort": lambda: filled(USER + b'"x"}],"reasoning_effort":"', b"x", b'"}'),
        "template options": lambda: repeated(USER + b'"x"}],"chat_template_kwargs":{', b'"a":1', b"}}"),
        "a key that nobody knows": lambda: chats(b"unknown", b"{}"),
        "metadata": lambda: repeated(USER + b'"x"}],"max_tokens":1,"metadata":{', b'"a":"b"', b"}}"),
        "one key again and again": lambda: repeated(USER + b'"x"}],', b'"n":1', b',"max_tokens":1}'),
        "keys as many as are read": lambda: USER + b'"x"}],' + b'"n":1,' * 250_000 + b'"max_tokens":1}',
        "tools that are none": lambda: chats(b"tools", b"1"),
        "empty tools": lambda: chats(b"tools", b"{}"),
        "as many values in a tool as are read": lambda: USER + b'"x"}],"tools":[{"a":[' + b"{}," * 340_000 + b"{}]}]}",
        "content of numbers": lambda: repeated(USER + b"[", b"1", b"]}]}"),
        "content of empty parts": lambda: repeated(USER + b"[", b"{}", b"]}]}"),
        "too many parts": lambda: repeated(USER + b"[", b'{"type":"text","text":""}', b"]}]}"),
        "messages that are none": lambda: repeated(b'{"model":"nano","messages":[', b"1", b"]}"),
        "empty messages": lambda: repeated(b'{"model":"nano","messages":[', b"{}", b"]}"),
        "too many messages": lambda: repeated(b'{"model":"nano","messages":[', b'{"role":"user"}', b"]}"),
        "openers of control tokens": lambda: filled(USER + b'"', b"<", b'"}]}'),
        "escapes": lambda: filled(USER + b'"', b"\\u0001", b'"}]}'),
        "every private character": lambda: USER + json.dumps(PLANE_15).encode() + b"}]}",
        "every sentinel": lambda: USER + json.dumps("".join(map(chr, range(0x10FF00, 0x10FFFE)))).encode() + b"}]}",
        "reasoning": lambda: filled(USER + b'"x"},{"role":"assistant","reasoning_content":"', b"a ", b'"}]}'),
        "a name": lambda: filled(USER + b'"x","name":"', b"a", b'"}]}'),
        "arguments of a call": lambda: filled(CALL + b'"', b"a", b'"}}]}]}'),
        "as many values in arguments as are read": lambda: CALL + b'{"a":[' + b"[]," * 300_000 + b"[]]}}}]}]}",
        "arguments that were cut": lambda: CALL + json.dumps('{"a":["' + '","' * 150_000).encode() + b"}}]}]}",
        "one schema by many references": lambda: tool(REFERENCES | {"$defs": {"a": {"enum": ["x" * 10] * 10_000}}}),
        "references to what is no schema": lambda: tool(REFERENCES | {"$defs": {"a": {"anyOf": 5}}}),
        "references to what stands where no schema does": lambda: tool({"$ref": "#/default", "default": {"anyOf": 5}}),
        "classes without an end": lambda: tool(
            {"properties": {str(at): {"type": "string", "pattern": "[" * 4090} for at in range(15)}}
        ),
        "a long name around many": lambda: tool(
            {"properties": {"k" * 400_000: {"type": "object", "properties": {str(at): {} for at in range(5000)}}}}
        ),
        "a number out of range": lambda: USER + b'"x"}],"echo":1e999}',
        "bytes that are no text": lambda: USER + b'"x"}],"echo":"\xff"}',
        "a tool's text": lambda: filled(USER + b'"x"}],"tools":[{"type":"function","function":{"name":"', b"a", b'"}}]}'),
    },
    MESSAGES: {
        "turns of Anthropic's": lambda: repeated(ANTHROPIC, b'{"role":"user","content":""}', b"]}"),
        "blocks": lambda: repeated(ANTHROPIC + b'{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
        "blocks of results": lambda: repeated(
            ANTHROPIC + b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[', b"{}", b"]}]}]}"
        ),
        "blocks of a system prompt as many as are read": lambda: (
            ANTHROPIC + b'{"role":"user","content":"x"}],"system":[' + b",".join([b'{"type":"text"}'] * 130_000) + b"]}"
        ),
        "input of a call": lambda: repeated(ANTHROPIC + TOOL_USE + b'{"a":[', b"[]", b"]}}]}]}"),
        "a call that is no text": lambda: ANTHROPIC + TOOL_USE + b'"\xff"}]},{"role":"user","content":"x"}]}',
    },
    RESPONSES: {
        "items": lambda: repeated(ITEMS, b'{"role":"user","content":""}', b"]}"),
        "parts of what a call gave": lambda: repeated(
            ITEMS + b'{"type":"function_call_output","call_id":"a","output":[', b'{"type":"text","text":""}', b"]}]}"
        ),
    },
    "/detokenize": {
        "ids to be decoded": lambda: repeated(b'{"tokens":[', b"1", b"]}"),
    },
    "/generate": {
        "sampling_params": lambda: repeated(b'{"text":"x","sampling_params":{', b'"a":1', b"}}"),
    },
    "/tokenize": {
        "pieces of a long text": lambda: filled(b'{"return_token_strs":true,"prompt":"', b"q~", b'"}'),
    },
}


@pytest.fixture(scope="module")
def shared(nano: Nano) -> Iterator[EdgeProcess]:
    with EdgeProcess(nano("31b"), MAX_LEN) as edge:
        yield edge


def with_fault(shared: EdgeProcess, nano: Nano, fault: str) -> AbstractContextManager[EdgeProcess]:
    """One of its own, or the one that tests share where nothing is planted."""
    return nullcontext(shared) if fault == "none" else EdgeProcess(nano("31b"), MAX_LEN, fault=fault)


class Neighbour:
    """A stream beside it: the longest wait for its next chunk, by its own clock."""

    def __init__(self, edge: EdgeProcess) -> None:
        self.chunks, self.gap_s = 0, 0.0
        self._url = f"{edge.url}{CHAT}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        body = chat_body(stream=True, ignore_eos=True)
        while not self._over.is_set():
            with httpx.stream("POST", self._url, json=body | {"max_tokens": 1900}, timeout=30) as reply:
                assert reply.status_code == 200
                self._follow(reply)

    def _follow(self, reply: httpx.Response) -> None:
        last = None
        for _ in reply.iter_raw():
            now = time.perf_counter()
            self.gap_s = max(self.gap_s, now - (last or now))
            last = now
            self.chunks += 1
            if self._over.is_set():
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_no_body_costs_much_or_holds_up_a_neighbour(shared: EdgeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """8 MiB of anything: its proper status for little CPU time and under 100 MB, and the loop is never kept for long."""
    edge, lines, wrong = shared, [], []
    with Neighbour(edge) as neighbour:
        for path, name, build in ((path, *bomb) for path, bombs in BOMBS.items() for bomb in bombs.items()):
            body, status = build(), 200 if name in SERVED else 400
            before, neighbour.gap_s = neighbour.chunks, 0.0
            reply, cost = edge.post(path, body)
            ready = httpx.get(f"{edge.url}/health/ready", timeout=60).status_code
            keys = {"message", "type"} if path == MESSAGES else {"message", "type", "param", "code"}
            shape = status == 200 or keys == set(reply.json()["error"])
            good = (reply.status_code, ready) == (status, 200) and shape and len(reply.content) < 4096
            held = cost.cpu_s > CPU_S or cost.memory_mb > MEMORY_MB or cost.loop_held_s > HELD_S
            figures = f"{cost.cpu_s:.2f} s CPU, {cost.memory_mb:.0f} MB, loop kept {cost.loop_held_s * 1e3:.0f} ms"
            gap = f"longest gap of the neighbour {neighbour.gap_s * 1e3:.0f} ms"
            lines.append(f"{name} ({len(body) / 1e6:.1f} MB): {figures}, {gap}: {reply.status_code} {reply.text[:90]}")
            wrong += [] if good and not held else [lines[-1]]
        until(lambda: neighbour.chunks > before, "the neighbour goes on")
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("fault", "kept"), [("none", False), ("bodies", True)])
def test_nothing_of_a_body_stays(shared: EdgeProcess, nano: Nano, fault: str, *, kept: bool) -> None:
    """24 open streams, whose requests had 8 MiB each that nobody asks for: no memory holds them. Planted: one that does."""
    body = filled(USER + b'"x"}],"stream":true,"ignore_eos":true,"unknown":"', b"a", b'"}')
    with with_fault(shared, nano, fault) as edge, httpx.Client(timeout=60) as client, ExitStack() as open_streams:
        edge.mark()
        for path in (CHAT, RESPONSES) * 12:
            asked = body if path == CHAT else body.replace(b'"messages"', b'"input"', 1).replace(b'"ignore_eos":true,', b"", 1)
            request = client.build_request("POST", f"{edge.url}{path}", content=asked, headers={"content-type": "application/json"})
            reply = client.send(request, stream=True)
            open_streams.callback(reply.close)
            assert reply.status_code == 200
        cost = edge.cost()
    print(f"24 bodies of {len(body) / 1e6:.1f} MB, fault {fault}: {cost}")
    assert (cost.memory_mb > MEMORY_MB) == kept, cost


def test_a_costly_reader_would_show(nano: Nano) -> None:
    """The same measure of an ordinary request, with a reader that takes memory and keeps the lock planted in the edge."""
    with EdgeProcess(nano("31b"), MAX_LEN, fault="parse") as edge:
        reply, cost = edge.post(TEXT, {"model": "nano", "prompt": "x", "max_tokens": 1})
    assert reply.status_code == 200
    assert cost.memory_mb > 2 * MEMORY_MB
    assert cost.loop_held_s > HELD_S


@pytest.mark.parametrize(("fault", "held"), [("none", False), ("encode", True)])
def test_a_long_prompt_is_tokenized_beside_the_streams(nano: Nano, fault: str, *, held: bool) -> None:
    """A megabyte of words, which would fit: the loop goes on meanwhile; with the call that keeps the lock it would not."""
    prompt = "the quick brown fox jumps over the lazy dog and then sleeps, " * 16_000
    with EdgeProcess(nano("31b"), 1 << 20, fault=fault) as edge:
        reply, cost = edge.post(TEXT, {"model": "nano", "prompt": prompt, "max_tokens": 1})
    print(f"{len(prompt) / 1e6:.1f} MB of text, fault {fault}: {cost}")
    assert reply.status_code == 200, reply.text
    assert (cost.held_share > 0.15) == held, cost


@pytest.mark.parametrize(("fault", "held"), [("none", False), ("logprobs", True)])
def test_a_whole_answer_is_made_as_it_comes(shared: EdgeProcess, nano: Nano, fault: str, *, held: bool) -> None:
    """Four choices of 1900 tokens with 20 logprobs each, in one reply: made at the end they would keep the loop, and do not so."""
    body = chat_body(n=4, max_tokens=1900)
    with with_fault(shared, nano, fault) as edge:
        edge.hurry()
        answers = [edge.post(CHAT, body | {"logprobs": True, "top_logprobs": 20}) for _ in range(3)]
    reply, cost = min(answers, key=lambda answer: answer[1].held_share)  # a neighbour on the machine holds the loop, too
    print(f"{len(reply.content) / 1e6:.1f} MB of answer, fault {fault}: {cost}")
    assert [len(choice["logprobs"]["content"]) for choice in reply.json()["choices"]] == [1900] * 4
    assert (cost.held_share > 0.1) == held, cost


@pytest.mark.parametrize(("fault", "held"), [("none", False), ("streams", True)])
def test_a_stream_is_made_in_pieces(shared: EdgeProcess, nano: Nano, fault: str, *, held: bool) -> None:
    """An echo of 12 400 tokens with 20 alternatives each, all there with the first token: in one go it would keep the loop."""
    body = {"model": "nano", "prompt": [5] * 12_400, "echo": True, "logprobs": 20, "stream": True, "max_tokens": 1}
    with with_fault(shared, nano, fault) as edge:
        reply, cost = edge.post(TEXT, body)
    print(f"{len(reply.content) / 1e6:.1f} MB of stream, fault {fault}: {cost}")
    chunks = [json.loads(line[6:])["choices"][0]["logprobs"] for line in reply.text.split("\n\n")[:-2]]
    assert sum(len(chunk["tokens"]) for chunk in chunks if chunk) == 12_401
    assert (cost.held_share > 0.4) == held, cost
