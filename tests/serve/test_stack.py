"""The stack as `make serve` starts it, nano model, real ranks: answers, figures, deaths, end. One boot; the tests run in order."""

import asyncio
import json
import os
import random
import select
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion

from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from engine.vision_geometry import read_vision
from tests.serve.conftest import ADAPTERS, QUESTION, WORD
from tests.support.load.generator import Ledger, Lengths, Level, LoadRun, Prompts, Scale, connected
from tests.support.load.request import Endpoint
from tests.support.stack import serve_process
from tests.support.stack.death_probes import ANSWERED_S, probes_around, unanswered
from tests.support.stack.serve_process import LOOPBACK, Reader, Stack, command_line, figures, open_streams, serves_again, wait
from tests.support.stack.streamed_chat import StreamedChat, ask, same_without_drafts
from training.exercise_form import Exercise
from training.exercises import drawing, exam, right, skills
from training.pictures import drawn, look

pytestmark = pytest.mark.serve

MODEL = "nano-31b"
BURST = 64  # clients at once, at 16 slots: the others wait
SEED = random.SystemRandom().randrange(1 << 30)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SHORT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
LONG: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 1900}


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    return shared_stack


def api(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=60, max_retries=0)


def test_openais_client_is_answered(stack: Stack) -> None:
    """A streamed chat with usage, a text completion, the model list, health; greedy is the same streamed and whole."""
    with api(stack) as client:
        assert [model.id for model in client.models.list()] == [MODEL, *sorted(["polite", *ADAPTERS])]
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True, temperature=0, max_tokens=24, stream_options={"include_usage": True}
            )
        )
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=24)
        elsewhere = [{"role": "user", "content": "What is 2 + 2?"}]
        other = client.chat.completions.create(model=MODEL, messages=elsewhere, temperature=0, max_tokens=24)
        text = client.completions.create(model=MODEL, prompt="One two", max_tokens=5, temperature=0, logprobs=1)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert streamed != other.choices[0].message.content, "the comparison would pass for any prompt"
    used = [(usage.prompt_tokens, usage.completion_tokens) for usage in (chunks[-1].usage, whole.usage) if usage is not None]
    assert used[:1] * 2 == used  # how many drafts were right differs
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or []) == text.usage.completion_tokens  # type: ignore[union-attr]
    for path in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(f"{stack.url}{path}").status_code == 200


def test_the_template_and_the_default_of_thinking_are_the_settings(stack: Stack) -> None:
    """Prompts come of the template that the settings name, and do not think, as they say, though it would by itself."""
    own = TextProcessor.load(resolve("nano:31b"))
    for question, word in ((QUESTION, WORD), ("Hello", "")):
        messages = [{"role": "user", "content": question}]
        reply = httpx.post(f"{stack.url}/tokenize", json={"model": MODEL, "messages": messages}).raise_for_status()
        assert reply.json()["tokens"] == own.render_chat(messages) + own.encode(word, add_bos=False)


def test_a_changed_setting_is_deployed_and_no_request_is_lost(stack: Stack) -> None:
    """Another build, of two ranks, under open streams and a client that goes on asking: they end whole, it hears 200, a new replica
    answers. It is that of the tests below: their boots and steps take half as long."""
    (before,) = stack.find("ServeReplica")
    built = serve_process.build_info(stack)
    streams = [Reader(stack.url, LONG | {"max_tokens": 150}) for _ in range(3)]
    wait(lambda: all("data:" in stream.text for stream in streams), 40, stack.said)
    stack.redeploy(build="changed", tp=2)
    replies, began = [], time.monotonic()
    while before in stack.find("ServeReplica"):
        assert time.monotonic() - began < 150, stack.said()
        replies.append(stack.chat(SHORT, 90))
    for stream in streams:
        stream.join(60)
        assert stream.text.rstrip().endswith("[DONE]"), stream.text[-300:]
    longest = max(reply.elapsed.total_seconds() for reply in replies)
    print(f"\nredeployed in {time.monotonic() - began:.1f} s: {len(replies)} requests meanwhile, the longest took {longest:.1f} s")
    assert {reply.status_code for reply in replies} == {200}
    assert serve_process.build_info(stack) != built
    wait(lambda: len(stack.find("engine.rank.worker")) == 2, 30, stack.said)  # those before have ended


def test_it_answers_held_out_questions(stack: Stack) -> None:
    """One of every skill that it learnt, streamed six at a time by openai's client, thoughts and calls apart: right but for one."""
    text = TextProcessor.load(resolve("nano:31b"))
    draw = drawing(random.Random(SEED), 64, text)
    asked = [exercise for skill in skills("31b") for exercise in exam(skill, draw, 1)]
    with api(stack) as client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(partial(ask, client, MODEL), asked))
    wrong = [(each.content, said) for each, said in zip(asked, answers, strict=True) if not right(each, said + each.end)]
    print(f"over HTTP, seed {SEED}: {len(asked) - len(wrong)} of {len(asked)} right {wrong}")
    assert len(wrong) <= 1, wrong


@pytest.mark.skipif(read_vision(resolve("nano:31b")) is None, reason="the trained model has no tower yet")
def test_it_answers_questions_about_pictures(stack: Stack) -> None:
    """Thirty of colours, shapes and digits that nobody was trained on, six at a time by a client: right but for two; counted."""
    with api(stack) as client, ThreadPoolExecutor(6) as pool:
        wrong = [pair for pair in pool.map(partial(look, client), drawn(random.Random(SEED), 30)) if len(set(pair)) > 1]
    assert len(wrong) <= 2, (SEED, wrong)  # two in a thousand are: three of thirty once in 30 000 runs
    assert figures(stack)["quartet_encoded_images_total"] > 20


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_openais_client_drives_a_tool_loop(stack: Stack) -> None:
    """A question, the model's call, the tool's result, the model's answer from it; with another result the answer differs."""
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    with api(stack) as client:
        first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], temperature=0).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content is None
        (call,) = first.message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        answers = []
        for weather in ("sunny, 21 degrees", "rainy, 7 degrees"):
            result = {"role": "tool", "tool_call_id": call.id, "content": weather}
            loop = [*messages, first.message.model_dump(exclude_none=True), result]
            answers.append(client.chat.completions.create(model=MODEL, messages=loop, tools=[WEATHER], temperature=0).choices[0])
    assert [answer.message.content for answer in answers] == [
        "The weather in Paris is sunny, 21 degrees.",
        "The weather in Paris is rainy, 7 degrees.",
    ]
    assert [answer.finish_reason for answer in answers] == ["stop", "stop"]


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "sunny": {"type": "boolean"}, "degrees": {"type": "integer"}},
    "required": ["city", "sunny", "degrees"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking", [False, True])
def test_a_reply_keeps_its_schema(stack: Stack, thinking: bool) -> None:
    """response_format json_schema, greedy: valid, a thought before it where it was asked for, and the same streamed and whole."""
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "temperature": 0,
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}},
    }
    with api(stack) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content or ""), CITY)
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    assert bool(getattr(whole.message, "reasoning_content", "")) is thinking


def test_a_thought_has_a_budget(stack: Stack) -> None:
    """thinking_token_budget, without a form: the thought is so many tokens of the one without a budget, and an answer follows."""
    question = [{"role": "user", "content": "Add 472 and 389."}]

    def asked(client: openai.OpenAI, budget: int | None) -> ChatCompletion:
        extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget}
        return client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=80, extra_body=extra)

    with api(stack) as client, ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(partial(asked, client), (None, 5, 0)))
    free, bounded, none = (reply.usage.completion_tokens_details.reasoning_tokens for reply in replies)  # type: ignore[union-attr]
    assert free > bounded
    assert bounded == none + 5
    assert all(reply.choices[0].message.content for reply in replies)
    thoughts = [getattr(reply.choices[0].message, "reasoning_content", None) or "" for reply in replies]
    assert thoughts[2] == ""
    assert len(thoughts[0]) > len(thoughts[1]) > 0
    assert thoughts[0].startswith(thoughts[1])


def test_drafts_change_no_call(stack: Stack) -> None:
    """Questions for two calls, some after a thought, four at a time by openai's client: every stream is the same without drafts,
    its calls have names and arguments whole, and two there are, but for one stream."""
    draw = drawing(random.Random(SEED), 64, TextProcessor.load(resolve("nano:31b")))
    asked = [exercise for skill in ("parallel", "call_after_thought") for exercise in exam(skill, draw, 12)]
    asked = [exercise for exercise in asked if exercise.reply.count("<tool_call|>") == 2][::2]

    def compared(client: openai.OpenAI, exercise: Exercise) -> tuple[StreamedChat, int]:
        more = {"messages": exercise.messages, "tools": exercise.tools, "thinking": exercise.thinking}
        return same_without_drafts(client, model=MODEL, temperature=0, max_tokens=160, **more)

    with api(stack) as client, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(partial(compared, client), asked))
    print(f"{len(replies)} streams, seed {SEED}: {sum(accepted for _, accepted in replies)} tokens were drafts")
    odd = [reply for reply, _ in replies if (len(reply.calls), reply.finish) != (2, "tool_calls")]
    assert len(odd) <= 1, (SEED, odd)


def test_the_exporter_counts_what_was_served(stack: Stack) -> None:
    """Requests by outcome, tokens, TTFT and TPOT move by exactly what one more request brings."""
    before = figures(stack)
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 7, "ignore_eos": True}
    usage = stack.chat(body).json()["usage"]
    after = figures(stack)
    moved = {name: after[name] - before[name] for name in after if name in before and after[name] != before[name]}
    assert moved['quartet_requests_total{outcome="length"}'] == 1
    assert moved["quartet_generation_tokens_total"] == usage["completion_tokens"] == 7
    assert moved["quartet_prompt_tokens_total"] == usage["prompt_tokens"]
    assert moved["quartet_time_to_first_token_seconds_count"] == 1
    assert moved["quartet_time_per_output_token_seconds_count"] == 1
    assert 'quartet_requests_total{outcome="dead"}' not in moved
    assert after["quartet_requests_running"] == 0


def test_a_chat_computes_what_is_new(stack: Stack) -> None:
    """Prompt tokens computed are those that usage does not call cached, to the token, in the metrics; each turn finds the one
    before. Under another cache_salt the last prompt is computed whole."""
    before, used, messages = figures(stack), [], [{"role": "system", "content": 150 * "red house "}]
    for turn in range(6):
        if turn < 4:
            messages += [{"role": "assistant", "content": "So be it."}, {"role": "user", "content": f"{turn} + 2?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "cache_salt": f"{turn > 4}"}
        usage = stack.chat(body).json()["usage"]
        used.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    moved = {name: value - before[name] for name, value in figures(stack).items() if name in before}
    assert moved["quartet_prefix_cache_hit_tokens_total"] == sum(cached for _, cached in used)
    assert moved["quartet_engine_prefill_tokens_total"] == sum(prompt - cached for prompt, cached in used)
    assert all(cached >= (prompt - 8) // 32 * 32 for (prompt, _), (_, cached) in pairwise(used[:-1]))
    assert used[-1][1] == 0


def test_only_what_is_declared_listens_beyond_loopback(stack: Stack) -> None:
    """One gRPC port of the replica is all; HAProxy, Ray, our exporter and the replica's HTTP are on loopback."""
    found = serve_process.listeners(sorted(stack.grow()))
    assert any(port == stack.port for _, port, _ in found)
    beyond = [(port, command) for address, port, command in found if address not in LOOPBACK]
    assert all("ServeReplica" in command for _, command in beyond), beyond
    assert len(beyond) <= 1, beyond


def test_what_decodes_pictures_starts_before_the_engine(stack: Stack) -> None:
    """It loads torch, for which a replica's first picture would wait."""
    assert min(stack.find("media_process")) < min(stack.find("engine.core.loop"))


def test_a_burst_waits_its_turn(stack: Stack) -> None:
    """Four times as many requests in the same moment as there are slots: none is refused."""
    target = Endpoint(stack.url, MODEL, timeout_s=90)
    prompts = Prompts(Lengths(8, 16), Lengths(2, 2), Scale(), SEED)

    async def burst() -> Ledger:
        async with connected(target) as client:
            return await LoadRun(client, target, prompts).run(Level(concurrency=BURST, requests=BURST))

    balance = asyncio.run(burst()).balance()
    assert (balance["finished"], balance["conserved"]) == (BURST, True), balance


def test_a_newcomer_passes_a_crowd(stack: Stack) -> None:
    """Sixty streams of one address that nobody reads, at sixteen slots: another address' is answered with the second sixteen."""
    body = json.dumps(LONG | {"max_tokens": 60}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with ExitStack() as held, httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=60) as newcomer:
        crowd = [held.enter_context(socket.create_connection(("127.0.0.1", stack.port), timeout=60)) for _ in range(60)]
        for sock in crowd:
            sock.sendall(f"{head}\r\n\r\n".encode() + body)
        wait(lambda: len(select.select(crowd, [], [], 0)[0]) >= 16, 90, stack.said)
        assert newcomer.post(f"{stack.url}/v1/chat/completions", json=SHORT).status_code == 200
        begun = len(select.select(crowd, [], [], 0)[0])
    print(f"\n{begun} of {len(crowd)} had begun when the newcomer was answered")
    assert begun < 3 * 16
    wait(lambda: (told := figures(stack))["quartet_requests_running"] == told["quartet_requests_waiting"] == 0, 40, stack.said)


def test_slow_bodies_shut_nobody_out(stack: Stack) -> None:
    """Two hundred requests whose bodies do not come, through HAProxy and Serve: an honest one is served beside them."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    with ExitStack() as held:
        for _ in range(200):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", stack.port), timeout=5))
            sock.sendall(head.encode() + b'{"m')
        time.sleep(0.5)  # until all of them are where they wait
        begun = time.monotonic()
        reply = stack.chat(SHORT)
        assert reply.status_code == 200, reply.text
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize(("protocol", "status"), [("h2c", 200), ("websocket", 426)])
def test_an_upgrade_is_read_past_or_refused(stack: Stack, protocol: str, status: int) -> None:
    """Through HAProxy and Serve: h2c with a body is answered over HTTP/1.1, a WebSocket has an error of its API."""
    headers = {"connection": "Upgrade", "upgrade": protocol}
    if protocol == "h2c":
        headers |= {"http2-settings": "AAEAAEAA"}
        reply = httpx.post(f"{stack.url}/v1/chat/completions", json=SHORT, headers=headers, timeout=60)
    else:
        headers |= {"sec-websocket-version": "13", "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}
        reply = httpx.get(f"{stack.url}/v1/responses", headers=headers, timeout=60)
    assert reply.status_code == status, reply.text
    assert reply.http_version == "HTTP/1.1"
    assert ("choices" in reply.json()) is (status == 200)
    assert (reply.json().get("error", {}).get("code") == "upgrade_required") is (status == 426)


def test_a_client_that_leaves_frees_its_place(stack: Stack) -> None:
    """Through HAProxy and Serve: the engine counts client_gone and holds no page for it."""
    before = figures(stack)
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=LONG, timeout=30) as reply:
        next(reply.iter_text())
    name = 'quartet_requests_total{outcome="client_gone"}'
    wait(lambda: figures(stack)[name] == before[name] + 1, 30, stack.said)
    wait(lambda: figures(stack)['quartet_kv_usage_ratio{group="full"}'] == 0, 30, stack.said)


@pytest.mark.parametrize(
    ("victim", "blow", "bound_s"),
    [
        ("engine.rank.worker", signal.SIGKILL, 2.7),  # a heartbeat would tell after 3
        pytest.param("engine.core.loop", signal.SIGKILL, 2.7, marks=pytest.mark.slow),
        pytest.param("engine.rank.worker", signal.SIGSTOP, 6, marks=pytest.mark.slow),
        pytest.param("engine.core.loop", signal.SIGSTOP, 6, marks=pytest.mark.slow),
    ],
)
def test_a_lost_process_ends_every_stream_with_one_error_event(
    stack: Stack, victim: str, blow: signal.Signals, bound_s: float
) -> None:
    """A rank or the core killed or stopped under 8 streams, with a probe every 20 ms: each stream has one error event, no [DONE].

    Each probe has 200, or 503 with Retry-After, in time; the first 200 within 60 s. Planted, in test_deaths.py: a silent server.
    """
    readers = open_streams(stack, LONG)
    children = stack.find("engine.")
    struck, probes = asyncio.run(probes_around(stack, victim, blow, ANSWERED_S[blow]))
    for reader in readers:
        reader.join(30)
        assert reader.error is None
        assert reader.text.count('"error"') == 1
        assert "engine_restarting" in reader.text.rstrip().rpartition("\n\n")[2]
        assert "[DONE]" not in reader.text
    slowest = max(reader.ended or 0.0 for reader in readers) - struck
    assert slowest < bound_s
    wait(lambda: not any(command_line(pid) for pid in children), 30)
    assert unanswered(probes) == []
    refused = max(probe.sent for probe in probes if probe.status == 503)
    first = min((probe for probe in probes if probe.sent > refused), key=lambda probe: probe.sent)
    print(f"\n{victim} {blow.name}: streams ended after {slowest:.3f} s, served again after {first.sent:.1f} s")
    assert first.took < first.sent / 2, "others are refused with Retry-After: the one answered has not waited"
    assert first.sent + first.took < 60


def test_a_killed_replica_cuts_every_connection(stack: Stack) -> None:
    """kill -9 of the replica: closed within 4 s without the final chunk, the unanswered get 5xx, its children are gone, and
    waited for."""
    readers = open_streams(stack, LONG)
    waiting = Reader(stack.url, LONG | {"stream": False})
    time.sleep(0.3)
    children = stack.find("engine.rank.worker") + stack.find("engine.core.loop")
    assert len(children) == 3
    killed = time.monotonic()
    os.kill(stack.find("ServeReplica")[0], signal.SIGKILL)
    for reader in readers:
        reader.join(30)
        assert isinstance(reader.error, httpx.RemoteProtocolError)
        assert "[DONE]" not in reader.text
        assert (reader.ended or 0.0) - killed < 4
    wait(lambda: not any(command_line(pid) for pid in children), 30)
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 40)  # and no zombie of them
    waiting.join(30)
    assert (waiting.status, json.loads(waiting.text)["error"]["code"]) == (503, "engine_restarting"), waiting.text
    back = serves_again(stack, SHORT)
    print(f"\nreplica: served again after {back:.1f} s")
    assert back < 60
    wait(lambda: "quartet_requests_running" in figures(stack), 20)
    assert figures(stack)["quartet_requests_running"] == 0, "a request that had been dispatched was sent again"


def test_sigterm_drains_and_leaves_nothing(stack: Stack) -> None:
    """An open stream finishes, new requests are refused, and then no process, port, folder or shared memory is left."""
    folder = stack.folder
    assert (folder / "launcher.pid").read_text() == str(stack.process.pid)
    shared = set(Path("/dev/shm").iterdir())
    reader = Reader(stack.url, LONG | {"max_tokens": 60})
    wait(lambda: "data:" in reader.text, 40, stack.said)
    ports = [port for _, port, _ in serve_process.listeners(sorted(stack.grow()))]
    stack.process.send_signal(signal.SIGTERM)
    wait(lambda: httpx.get(f"{stack.url}/v1/models", timeout=10).status_code == 503, 30, stack.said)
    code = stack.process.wait(60)
    reader.join(10)
    assert reader.error is None
    assert reader.text.rstrip().endswith("[DONE]")
    assert code == 0, stack.said()
    assert "will be retried" not in stack.said(), "Ray takes the end of Serve's controller for a failure"
    assert [(pid, command_line(pid)) for pid in stack.tree if command_line(pid)] == []
    assert not folder.exists()
    assert set(Path("/dev/shm").iterdir()) <= shared
    assert len(ports) > 5
    assert [port for port in ports if not serve_process.is_free(port)] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{stack.url}/health", timeout=2)


def test_the_ready_line_can_be_pasted(stack: Stack) -> None:
    """The curl example names the port and a body that is JSON."""
    line = next(line for line in stack.lines if "quartet: ready." in line)
    assert f":{stack.port}/v1/chat/completions" in line
    assert json.loads(line[line.index("-d '") + 4 : line.rindex("'")])["model"] == MODEL
