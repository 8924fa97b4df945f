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
from tests.support.edge.edge_process import EdgeProcess

pytestmark = pytest.mark.cpu

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SIZE = (8 << 20) - 256  # of each body: what the limit lets through
MAX_LEN = 1 << 17  # a context as large as Gemma's: what is refused by its size alone at a small one is looked at
CPU_S, MEMORY_MB, HELD_S = 1.0, 100.0, 0.12  # of CPU time: a busy machine shows in none of it
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


# name -> (path, body, status)
BOMBS: dict[str, Callable[[], tuple[str, bytes, int]]] = {
    "ids, the last is text": lambda: (TEXT, prompts(b"1", b',"x"]}'), 400),
    "few enough ids, the last is text": lambda: (TEXT, b'{"model":"nano","prompt":[' + b"1," * 1_000_000 + b'"x"]}', 400),
    "booleans for ids": lambda: (TEXT, prompts(b"true"), 400),
    "too many ids": lambda: (TEXT, prompts(b"1"), 400),
    "a million prompts": lambda: (TEXT, prompts(b'"a"'), 400),
    "a million lists of ids": lambda: (TEXT, prompts(b"[1]"), 400),
    "a list of many ids": lambda: (TEXT, repeated(b'{"model":"nano","prompt":[[', b"1", b"]]}"), 400),
    "a prompt as long as the body": lambda: (TEXT, filled(b'{"model":"nano","prompt":"', b"a", b'"}'), 400),
    "white space": lambda: (TEXT, filled(b'{"model":"nano","prompt":', b" ", b"7}"), 400),
    "a number as long as the body": lambda: (TEXT, filled(b'{"model":"nano","prompt":"x","seed":', b"9", b"}"), 400),
    "brackets": lambda: (TEXT, filled(b'{"model":"nano","prompt":', b"[", b"}"), 400),
    "objects in objects": lambda: (CHAT, filled(USER, b'{"a":', b"}"), 400),
    "brackets in an unknown key": lambda: (CHAT, filled(USER + b'"x"}],"unknown":', b"[", b"}"), 400),
    "stop strings": lambda: (CHAT, chats(b"stop", b'"a"'), 400),
    "stop ids": lambda: (CHAT, chats(b"stop_token_ids", b"1"), 400),
    "stop ids that are text": lambda: (CHAT, chats(b"stop_token_ids", b'"a"'), 400),
    "modalities": lambda: (CHAT, chats(b"modalities", b'"a"'), 400),
    "functions": lambda: (CHAT, chats(b"functions", b"{}"), 400),
    "bias": lambda: (CHAT, repeated(USER + b'"x"}],"logit_bias":{', b'"1":0', b"}}"), 400),
    "template options": lambda: (CHAT, repeated(USER + b'"x"}],"chat_template_kwargs":{', b'"a":1', b"}}"), 400),
    "a key that nobody knows": lambda: (CHAT, chats(b"unknown", b"{}"), 200),
    "metadata": lambda: (CHAT, repeated(USER + b'"x"}],"max_tokens":1,"metadata":{', b'"a":"b"', b"}}"), 400),
    "one key again and again": lambda: (CHAT, repeated(USER + b'"x"}],', b'"n":1', b',"max_tokens":1}'), 400),
    "keys as many as are read": lambda: (CHAT, USER + b'"x"}],' + b'"n":1,' * 250_000 + b'"max_tokens":1}', 200),
    "tools that are none": lambda: (CHAT, chats(b"tools", b"1"), 400),
    "empty tools": lambda: (CHAT, chats(b"tools", b"{}"), 400),
    "as many values in a tool as are read": lambda: (CHAT, USER + b'"x"}],"tools":[{"a":[' + b"{}," * 340_000 + b"{}]}]}", 400),
    "content of numbers": lambda: (CHAT, repeated(USER + b"[", b"1", b"]}]}"), 400),
    "content of empty parts": lambda: (CHAT, repeated(USER + b"[", b"{}", b"]}]}"), 400),
    "too many parts": lambda: (CHAT, repeated(USER + b"[", b'{"type":"text","text":""}', b"]}]}"), 400),
    "messages that are none": lambda: (CHAT, repeated(b'{"model":"nano","messages":[', b"1", b"]}"), 400),
    "empty messages": lambda: (CHAT, repeated(b'{"model":"nano","messages":[', b"{}", b"]}"), 400),
    "too many messages": lambda: (CHAT, repeated(b'{"model":"nano","messages":[', b'{"role":"user"}', b"]}"), 400),
    "openers of control tokens": lambda: (CHAT, filled(USER + b'"', b"<", b'"}]}'), 400),
    "escapes": lambda: (CHAT, filled(USER + b'"', b"\\u0001", b'"}]}'), 400),
    "every private character": lambda: (CHAT, USER + json.dumps(PLANE_15).encode() + b"}]}", 400),
    "every sentinel": lambda: (CHAT, USER + json.dumps("".join(map(chr, range(0x10FF00, 0x10FFFE)))).encode() + b"}]}", 400),
    "reasoning": lambda: (CHAT, filled(USER + b'"x"},{"role":"assistant","reasoning_content":"', b"a ", b'"}]}'), 400),
    "a name": lambda: (CHAT, filled(USER + b'"x","name":"', b"a", b'"}]}'), 400),
    "arguments of a call": lambda: (
        CHAT,
        filled(CALL + b'"', b"a", b'"}}]}]}'),
        400,
    ),
    "as many values in arguments as are read": lambda: (
        CHAT,
        CALL + b'{"a":[' + b"[]," * 300_000 + b"[]]}}}]}]}",
        400,
    ),
    "arguments that were cut": lambda: (CHAT, CALL + json.dumps('{"a":["' + '","' * 150_000).encode() + b"}}]}]}", 400),
    "turns of Anthropic's": lambda: (MESSAGES, repeated(ANTHROPIC, b'{"role":"user","content":""}', b"]}"), 400),
    "blocks": lambda: (MESSAGES, repeated(ANTHROPIC + b'{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"), 400),
    "blocks of results": lambda: (
        MESSAGES,
        repeated(ANTHROPIC + b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[', b"{}", b"]}]}]}"),
        400,
    ),
    "input of a call": lambda: (
        MESSAGES,
        repeated(ANTHROPIC + TOOL_USE + b'{"a":[', b"[]", b"]}}]}]}"),
        400,
    ),
    "items": lambda: (RESPONSES, repeated(ITEMS, b'{"role":"user","content":""}', b"]}"), 400),
    "parts of what a call gave": lambda: (
        RESPONSES,
        repeated(ITEMS + b'{"type":"function_call_output","call_id":"a","output":[', b'{"type":"text","text":""}', b"]}]}"),
        400,
    ),
    "ids to be decoded": lambda: ("/detokenize", repeated(b'{"tokens":[', b"1", b"]}"), 400),
    "sampling_params": lambda: ("/generate", repeated(b'{"text":"x","sampling_params":{', b'"a":1', b"}}"), 400),
    "one schema by many references": lambda: (CHAT, tool(REFERENCES | {"$defs": {"a": {"enum": ["x" * 10] * 10_000}}}), 200),
    "references to what is no schema": lambda: (CHAT, tool(REFERENCES | {"$defs": {"a": {"anyOf": 5}}}), 400),
    "references to what stands where no schema does": lambda: (CHAT, tool({"$ref": "#/default", "default": {"anyOf": 5}}), 400),
    "a long name around many": lambda: (
        CHAT,
        tool({"properties": {"k" * 400_000: {"type": "object", "properties": {str(at): {} for at in range(5000)}}}}),
        400,
    ),
    "empty lines for a grammar": lambda: (TEXT, form("guided_grammar", "\n" * 30_000 + "x"), 400),
    "rules of a grammar": lambda: (
        TEXT,
        form("guided_grammar", "root ::= a0\n" + "".join(f"a{at} ::= a{at + 1}\n" for at in range(3500)) + 'a3500 ::= "x"'),
        400,
    ),
    "comments of a grammar": lambda: (TEXT, form("guided_grammar", "#\n" * 16_000 + 'root ::= "x"'), 400),
    "a number out of range": lambda: (CHAT, USER + b'"x"}],"echo":1e999}', 400),
    "bytes that are no text": lambda: (CHAT, USER + b'"x"}],"echo":"\xff"}', 400),
    "a call that is no text": lambda: (MESSAGES, ANTHROPIC + TOOL_USE + b'"\xff"}]},{"role":"user","content":"x"}]}', 400),
    "pictures for a prompt": lambda: (TEXT, filled(b'{"model":"nano","prompt":"', "\U0001f9ff".encode(), b'"}'), 400),
    "control tokens for a prompt": lambda: (TEXT, filled(b'{"model":"nano","prompt":"', b"<bos>", b'"}'), 400),
    "pieces of a long text": lambda: ("/tokenize", filled(b'{"return_token_strs":true,"prompt":"', b"q~", b'"}'), 400),
    "a tool's text": lambda: (CHAT, filled(USER + b'"x"}],"tools":[{"type":"function","function":{"name":"', b"a", b'"}}]}'), 400),
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
        body = {"model": "nano", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True}
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
    """8 MiB of anything: its proper status for under 1 CPU second and 100 MB, and the loop is never kept for 120 ms of CPU."""
    edge, lines, wrong = shared, [], []
    with Neighbour(edge) as neighbour, httpx.Client(timeout=60) as client:
        for name, build in BOMBS.items():
            path, body, status = build()
            before, neighbour.gap_s = neighbour.chunks, 0.0
            edge.mark()
            reply = client.post(f"{edge.url}{path}", content=body, headers={"content-type": "application/json"})
            cost = edge.cost()
            ready = client.get(f"{edge.url}/health/ready").status_code
            wanted = {"message", "type"} if path == MESSAGES else {"message", "type", "param", "code"}
            shape = status == 200 or wanted == set(reply.json()["error"])
            good = (reply.status_code, ready) == (status, 200) and shape and len(reply.content) < 4096
            held = cost.cpu_s > CPU_S or cost.memory_mb > MEMORY_MB or cost.loop_held_s > HELD_S
            figures = f"{cost.cpu_s:.2f} s CPU, {cost.memory_mb:.0f} MB, loop kept {cost.loop_held_s * 1e3:.0f} ms"
            gap = f"longest gap of the neighbour {neighbour.gap_s * 1e3:.0f} ms"
            lines.append(f"{name} ({len(body) / 1e6:.1f} MB): {figures}, {gap}: {reply.status_code} {reply.text[:90]}")
            wrong += [] if good and not held else [lines[-1]]
        assert neighbour.chunks > before, "the neighbour stands still"
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
            asked = body if path == CHAT else b'{"input":"x",' + body[1:]
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
        edge.mark()
        reply = httpx.post(f"{edge.url}{TEXT}", json={"model": "nano", "prompt": "x", "max_tokens": 1}, timeout=60)
        cost = edge.cost()
    assert reply.status_code == 200
    assert cost.memory_mb > 2 * MEMORY_MB
    assert cost.loop_held_s > HELD_S


@pytest.mark.parametrize(("fault", "held"), [("none", False), ("encode", True)])
def test_a_long_prompt_is_tokenized_beside_the_streams(nano: Nano, fault: str, *, held: bool) -> None:
    """A megabyte of words, which would fit: the loop goes on meanwhile; with the call that keeps the lock it would not."""
    prompt = "the quick brown fox jumps over the lazy dog and then sleeps, " * 16_000
    with EdgeProcess(nano("31b"), 1 << 20, fault=fault) as edge:
        edge.mark()
        reply = httpx.post(f"{edge.url}{TEXT}", json={"model": "nano", "prompt": prompt, "max_tokens": 1}, timeout=60)
        cost = edge.cost()
    print(f"{len(prompt) / 1e6:.1f} MB of text, fault {fault}: {cost}")
    assert reply.status_code == 200, reply.text
    assert (cost.loop_held_s > HELD_S) == held, cost


@pytest.mark.parametrize(("fault", "held"), [("none", False), ("logprobs", True)])
def test_a_whole_answer_is_made_as_it_comes(shared: EdgeProcess, nano: Nano, fault: str, *, held: bool) -> None:
    """Four choices of 1900 tokens with 20 logprobs each, in one reply: made at the end they would keep the loop, and do not so."""
    body = {"model": "nano", "messages": [{"role": "user", "content": "Hello"}], "n": 4, "max_tokens": 1900}
    with with_fault(shared, nano, fault) as edge:
        edge.hurry()
        edge.mark()
        reply = httpx.post(f"{edge.url}{CHAT}", json=body | {"logprobs": True, "top_logprobs": 20}, timeout=60)
        cost = edge.cost()
    print(f"{len(reply.content) / 1e6:.1f} MB of answer, fault {fault}: {cost}")
    assert [len(choice["logprobs"]["content"]) for choice in reply.json()["choices"]] == [1900] * 4
    assert (cost.loop_held_s > HELD_S) == held, cost


@pytest.mark.parametrize(("fault", "held"), [("none", False), ("streams", True)])
def test_a_stream_is_made_in_pieces(shared: EdgeProcess, nano: Nano, fault: str, *, held: bool) -> None:
    """An echo of 12 400 tokens with 20 alternatives each, all there with the first token: in one go it would keep the loop."""
    body = {"model": "nano", "prompt": [5] * 12_400, "echo": True, "logprobs": 20, "stream": True, "max_tokens": 1}
    with with_fault(shared, nano, fault) as edge:
        edge.mark()
        reply = httpx.post(f"{edge.url}{TEXT}", json=body, timeout=60)
        cost = edge.cost()
    print(f"{len(reply.content) / 1e6:.1f} MB of stream, fault {fault}: {cost}")
    chunks = [json.loads(line[6:])["choices"][0]["logprobs"] for line in reply.text.split("\n\n")[:-2]]
    assert sum(len(chunk["tokens"]) for chunk in chunks if chunk) == 12_401
    assert (cost.loop_held_s > HELD_S) == held, cost
