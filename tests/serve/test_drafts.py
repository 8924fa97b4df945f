"""Drafts through the whole stack: openai's client gets what it gets without. One boot, and a redeployment for each number."""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import eq

import openai
import pytest

from deploy.models.resolve import resolve
from engine.front.text import TextProcessor
from tests.support.stack.serve_process import Stack, figures, memory_mb, wait
from tests.support.stack.streamed_chat import same_without_drafts
from training.exercises import drawing, exam
from training.tool_exercises import LOOKUPS, native

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL, MAX_LEN = "nano-31b", 4096
CALLS, AT_ONCE, TURNS = 20, 4, 100
FULL = 12_000  # characters of a conversation
SEED = random.SystemRandom().randrange(1 << 30)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("drafts"), args={"tp": 1, "mtp": {}, "max_len": MAX_LEN})
    try:
        stack.start(timeout_s=300)
        yield stack
        stack.end()
    finally:
        stack.clean_up()


@contextmanager
def served(stack: Stack, drafts: int | str, tool_grammar: str = "off") -> Iterator[openai.OpenAI]:
    """A client of a new replica of four ranks with these settings; off: no grammar binds the model once it has begun a call."""
    before = set(stack.find("ServeReplica"))
    mtp = {"model": "nano:31b-assistant", "drafts": drafts}
    stack.redeploy(tp=4, mtp=mtp, tool_grammar=tool_grammar, build=f"{drafts} {tool_grammar}")
    wait(lambda: not before & set(stack.find("ServeReplica")), 300, stack.said)
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("tool_grammar", ["strict", "off"])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_two_calls_in_a_stream(stack: Stack, drafts: int, tool_grammar: str) -> None:
    """Twenty of twenty held-out questions that ask for two, four at a time: two calls each, whole, the same as without drafts. With
    the default grammar as without one, a third of the tokens at least are drafts."""
    draw = drawing(random.Random(SEED), 64, TextProcessor.load(resolve("nano:31b")))
    asked = [exercise for exercise in exam("parallel", draw, 3 * CALLS) if exercise.reply.count("<tool_call|>") == 2][:CALLS]
    with served(stack, drafts, tool_grammar) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        compared = partial(same_without_drafts, client, model=MODEL, max_tokens=200, temperature=0)
        replies = list(pool.map(lambda one: compared(messages=one.messages, tools=one.tools), asked))
    written = ["".join(f"{name}{native(json.loads(text))}" for name, text in reply.calls) for reply, _ in replies]
    expected = [re.sub(r"<\|tool_call>call:|<tool_call\|>|<\|tool_response>", "", one.reply) for one in asked]
    right = sum(map(eq, written, expected))
    accepted, tokens = sum(count for _, count in replies), sum(reply.tokens for reply, _ in replies)
    print(f"\nseed {SEED}: {right} of {CALLS} right; {accepted} of {tokens} tokens were drafts")
    assert [(len(reply.calls), reply.finish) for reply, _ in replies] == [(2, "tool_calls")] * CALLS
    assert accepted > tokens / 3


def test_a_hundred_turns(stack: Stack) -> None:
    """An agent's: a question, two calls or more, their results, the answer; begun anew when the context is full. Each reply is the
    same without drafts, every other one sampled; the replica's memory stays, and no page is held at the end."""
    rng, tools = random.Random(SEED), [tool.declared() for tool in LOOKUPS]
    messages = []
    accepted = tokens = conversations = 0
    with served(stack, "auto") as client:
        for turn in range(TURNS):
            if turn == TURNS // 5:
                memory = memory_mb(stack)
            wanted = [tool.call(rng) for tool in rng.sample(LOOKUPS, 2)]
            messages += [{"role": "user", "content": " And: ".join(call.question for call in wanted)}]
            for _ in range(2):
                asked = {"messages": messages, "tools": tools, "temperature": turn % 2 * 0.7, "seed": turn}
                reply, drafts = same_without_drafts(client, model=MODEL, max_tokens=200, **asked)
                accepted, tokens = accepted + drafts, tokens + reply.tokens
                calls = [
                    {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": text}}
                    for at, (name, text) in enumerate(reply.calls)
                ]
                messages += [{"role": "assistant", "content": reply.content, **({"tool_calls": calls} if calls else {})}]
                if not calls:
                    break
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"{turn} degrees"} for call in calls]
            if len(str(messages)) > FULL:
                messages, conversations = [], conversations + 1
        grown = memory_mb(stack) - memory
        print(f"\nseed {SEED}: {accepted} of {tokens} tokens were drafts; {conversations} full; {grown:+.0f} MB")
        assert accepted > 0
        assert grown < 50
        wait(lambda: all(value == 0 for name, value in figures(stack).items() if name.startswith("quartet_kv_usage_ratio")), 10)
