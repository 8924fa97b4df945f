"""A loaded group, nano 31B at TP=4 with 64 streams: every request ends once, nothing stays held, and company changes no token.

Random requests: greedy and sampled, some with stop ids, some whose reader leaves (in the queue, in the prefill, in mid-stream),
some too long to be served. What a request gave in company is held to what it gives alone, by the rule of
`tests.support.judge.near_tie`.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from cluster.group import Group
from engine.config import engine_config
from engine.front.client import EngineClient
from engine.protocol import Load, SamplingParams
from tests.conftest import Nano
from tests.support.engine.drive import Answer, Request, ask, ask_all, attached, booted, hashes, still
from tests.support.engine.outcomes import Outcomes
from tests.support.judge.near_tie import Twins, twins

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.alone]

TP = 4
VOCAB = 1024
MAX_LEN = 512
REQUESTS = 500
STREAMS = 64
SAMPLE = 40
PLANTED = 4  # of each kind
TIES = 2
TOLERANCE = 1e-4  # of a logprob
SEED = random.SystemRandom().randrange(1 << 30)
SAMPLINGS: tuple[dict[str, Any], ...] = (  # greedy twice as often as each of the others
    {},
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01},
)


def random_request(rng: random.Random) -> Request:
    """Prompt and output of random lengths; one in 5 is left, one in 50 is too long, one in 4 has stop ids."""
    length = MAX_LEN + rng.randint(0, 50) if rng.random() < 0.02 else rng.randint(1, 200)
    params = SamplingParams(
        max_tokens=rng.randint(1, 48),
        seed=rng.randrange(1 << 62),
        stop_ids=tuple(rng.sample(range(VOCAB), 40)) if rng.random() < 0.25 else (),
        min_tokens=rng.randint(0, 4),
        logprobs=rng.choice([None, 0, 0, 3]),
        **rng.choice(SAMPLINGS),
    )
    leave = rng.choice([0, 1, rng.randint(2, 24)]) if rng.random() < 0.2 else None
    return Request([rng.randrange(3, VOCAB) for _ in range(length)], params, leave)


@dataclass(frozen=True)
class Served:
    """A run: each request with its answer in company and, for some, alone; the counters of both sides before anything ran alone."""

    requests: list[Request]
    answers: list[Answer]
    counters: Outcomes
    load: Load
    hashes: set[int]
    pairs: list[tuple[Request, Twins]] = field(default_factory=list)
    planted: list[tuple[str, Twins]] = field(default_factory=list)


async def alone(client: EngineClient, request: Request, company: Answer) -> Twins:
    """The same request with nobody beside it, twice where the tokens differ: then with as many logprobs as a rank has."""
    answer = await ask(client, request)
    if answer.tokens != company.tokens:
        whole = msgspec.structs.replace(request.params, logprobs=VOCAB // TP)
        again = await ask(client, Request(request.prompt, whole))
        assert again.tokens == answer.tokens
        answer = again
    return twins(len(request.prompt), request.params, company, answer)


def completed(requests: Sequence[Request], answers: Sequence[Answer]) -> list[tuple[Request, Answer]]:
    """Those that no reader left and nobody refused."""
    return [(r, a) for r, a in zip(requests, answers, strict=True) if r.leave_after is None and a.end != "refused"]


def other_seed(request: Request) -> Request:
    return Request(request.prompt, msgspec.structs.replace(request.params, seed=request.params.seed ^ 1))


def other_prompt(request: Request) -> Request:
    return Request([*request.prompt[:-1], (request.prompt[-1] + 1) % VOCAB], request.params)


def plantable(done: list[tuple[Request, Answer]], *, sampled: bool) -> list[tuple[Request, Answer]]:
    """The first few long answers with logprobs: of plainly sampled requests, or of greedy ones."""
    long = [(r, a) for r, a in done if len(a.tokens) >= 8 and a.logprobs and r.params.top_k == 0 and r.params.top_p == 1]
    return [(r, a) for r, a in long if (r.params.temperature > 0) == sampled][:PLANTED]


async def serve(group: Group, requests: list[Request], sample: int | None, rng: random.Random) -> Served:
    """All requests in company; then `sample` of the completed ones alone (None: all), and a few with a difference planted."""
    async with attached(group) as (client, figures), asyncio.timeout(800):
        began = time.monotonic()
        answers = await ask_all(client, requests, STREAMS)
        load = await still(client)
        served = Served(requests, answers, replace(figures.outcomes), load, hashes(group))
        loaded = time.monotonic()
        done = completed(requests, answers)
        for request, answer in done if sample is None else rng.sample(done, sample):
            served.pairs.append((request, await alone(client, request, answer)))
        for request, answer in plantable(done, sampled=True):
            served.planted.append(("seed", await alone(client, other_seed(request), answer)))
        for request, answer in plantable(done, sampled=False):
            served.planted.append(("prompt", await alone(client, other_prompt(request), answer)))
        print(f"in company {loaded - began:.1f} s, alone {time.monotonic() - loaded:.1f} s")
        return served


def as_asked(request: Request, answer: Answer) -> None:
    """Its end is one that it asked for."""
    params, count = request.params, len(answer.tokens)
    stopped = bool(answer.tokens) and answer.tokens[-1] in params.stop_ids and count > params.min_tokens
    match answer.end:
        case "refused":
            assert len(request.prompt) >= MAX_LEN
        case "left":
            assert request.leave_after is not None
        case "stop":
            assert stopped
        case "length":
            assert count == params.max_tokens
        case _:
            pytest.fail(f"ended by {answer.end!r}: {request}")
    if answer.end in ("stop", "length"):
        assert len(answer.logprobs) == (0 if params.logprobs is None else count)


@pytest.fixture(scope="module", params=[SAMPLE, pytest.param(None, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def loaded(request: pytest.FixtureRequest, nano: Nano) -> Served:
    rng = random.Random(SEED)
    requests = [random_request(rng) for _ in range(REQUESTS)]
    config = engine_config(
        model=str(nano("31b")), tp=TP, device="cpu", dtype="float32", max_len=MAX_LEN, max_seqs=STREAMS, debug_hash=True
    )
    with booted(config) as group:
        return asyncio.run(serve(group, requests, request.param, rng))


def test_every_request_ends_once_and_nothing_stays_held(loaded: Served) -> None:
    """Received = finished + refused + aborted with none failed, on both sides; every end is one asked for; no page is held."""
    load, counters = loaded.load, loaded.counters
    ends = Counter(answer.end for answer in loaded.answers)
    print(f"seed {SEED}: {dict(ends)}; {counters}; {load.step} steps, {load.preemptions} preemptions")
    for name in ("received", "finished", "refused", "aborted", "failed"):
        assert getattr(load, name) == getattr(counters, name), name
    assert load.received == len(loaded.requests) == load.finished + load.refused + load.aborted
    assert (load.failed, load.waiting, load.running) == (0, 0, 0)
    assert [pool.used for pool in load.pools] == [0, 0]
    assert len(loaded.hashes) == 1
    assert load.aborted <= ends["left"]  # the core may have finished what its reader was about to leave
    for request, answer in zip(loaded.requests, loaded.answers, strict=True):
        as_asked(request, answer)
    left = [answer for answer in loaded.answers if answer.end == "left"]
    assert load.refused == sum(len(request.prompt) >= MAX_LEN for request in loaded.requests) > 0
    assert load.aborted > 0.08 * REQUESTS
    assert any(not answer.tokens for answer in left)
    assert any(len(answer.tokens) > 1 for answer in left)
    assert any(answer.end == "stop" for answer in loaded.answers)


def test_company_changes_no_token(loaded: Served) -> None:
    """What a completed request gave beside 63 others is what it gives alone, greedy or sampled, but for exact ties, of which there
    are next to none; so are its logprobs."""
    differing = [(request, pair) for request, pair in loaded.pairs if pair.gap is not None]
    worst = max(pair.worst for _, pair in loaded.pairs)
    print(f"seed {SEED}: {len(loaded.pairs)} alone, {len(differing)} ties, largest logprob difference {worst:.1e}")
    assert all(pair.same for _, pair in loaded.pairs), [request for request, pair in loaded.pairs if not pair.same]
    assert len(differing) <= TIES
    assert worst < TOLERANCE
    assert {request.params.temperature > 0 for request, _ in loaded.pairs} == {True, False}


def test_a_planted_difference_is_seen(loaded: Served) -> None:
    """Another seed, or another last prompt token, fails the same comparison by a hundred tolerances.

    Greedily the nano model may go on as before in spite of such a token; then its logprobs tell.
    """
    print([(name, pair.gap, pair.worst) for name, pair in loaded.planted])
    assert Counter(name for name, _ in loaded.planted) == {"seed": PLANTED, "prompt": PLANTED}
    assert not any(pair.same for name, pair in loaded.planted if name == "seed")
    assert all(abs(pair.gap or 0.0) > 100 * TOLERANCE or pair.worst > 100 * TOLERANCE for _, pair in loaded.planted)
