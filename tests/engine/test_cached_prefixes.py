"""What a rank computes behind a cached prefix, against what it computes from nothing: every nano member, fp32.

One rank in this process, a real scheduler, one request at a time: each question is asked of an engine that has never heard of it
and of one that has its beginning, and the logprobs of every token must agree.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.config import engine_config
from engine.core.loop import make_scheduler
from engine.core.prefix import PrefixCache
from engine.geometry import read_geometry
from engine.plan import encode_plan
from engine.protocol import Logprobs, SamplingParams
from engine.rank.builder import Rank, build
from tests.conftest import Nano
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.ranks import finish, single
from tests.support.engine.scheduling import request_of

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4  # fp32 logprobs: other chunk edges, hence another order of additions
FAULT = 100 * TOLERANCE
PAGE = 16
LENGTH = 6
PAGES = (24, 40)


class Asked:
    """One engine of one rank, and what it was asked: each request alone, greedy, to its end."""

    def __init__(self, rank: Rank, pages: tuple[int, int] = PAGES, **settings: Any) -> None:
        self.config = settings_of(Path(rank.config.model), **settings)
        self._runner = build(rank, pages)
        self.scheduler = make_scheduler(self.config, pages)
        self._count = 0

    def ask(self, prompt: list[int], count: int = LENGTH) -> list[tuple[int, Logprobs]]:
        """Each token with its logprobs; `cached` is how many tokens of the prompt were found."""
        (given,) = self.ask_all([prompt], count)
        return given

    def ask_all(self, prompts: list[list[int]], count: int) -> list[list[tuple[int, Logprobs]]]:
        """The same of several at once."""
        before = self.scheduler.requests.counters.hit_tokens
        params = SamplingParams(max_tokens=count, logprobs=5)
        given = {}
        for prompt in prompts:
            self._count += 1
            given[self._count] = []
            self.scheduler.requests.add(request_of(self._count, prompt, params))
        while self.scheduler.requests.unfinished:
            plan = self.scheduler.schedule()
            assert plan is not None
            self.scheduler.commit(finish(self._runner.launch(encode_plan(plan))))
            for output in self.scheduler.requests.drain():
                assert output.error is None, output.error
                given[output.id] += zip(output.tokens, output.logprobs, strict=True)
        self.cached = self.scheduler.requests.counters.hit_tokens - before
        return list(given.values())


def settings_of(folder: Path, **changes: Any):  # noqa: ANN201
    usual = {"tp": 1, "device": "cpu", "dtype": "float32", "pages": PAGES, "max_seqs": 2, "max_len": 400}
    return engine_config(**{"model": str(folder), "page": PAGE, "prefill_budget": 48, **usual, **changes})


@pytest.fixture(scope="module")
def rank(nano: Nano) -> Callable[[str], Rank]:
    return cache(lambda member: single(settings_of(nano(member))))


def error(one: list[tuple[int, Logprobs]], other: list[tuple[int, Logprobs]]) -> float:
    """The largest difference of a reported logprob up to and with the first token that differs, whose own must be a near tie."""
    worst = 0.0
    for (token, first), (another, second) in zip(one, other, strict=True):
        known = dict(second.top)
        worst = max([worst, *(abs(value - known[key]) for key, value in first.top if key in known)])
        if token != another:
            return max(worst, abs(first.chosen - second.chosen))
    return worst


def prompt_of(member: str, length: int, start: int = 0) -> list[int]:
    vocab = SHAPES[member].vocab
    return [3 + (start + at * 31 + at * at * 7) % (vocab - 100) for at in range(length)]


SLOW = {"12b", "e4b"}  # their layers others have too
MEMBERS = [pytest.param(member, marks=pytest.mark.slow if member in SLOW else ()) for member in SHAPES]


@pytest.mark.parametrize("member", MEMBERS)
def test_logits_behind_a_hit_are_those_from_nothing(member: str, rank: Callable[[str], Rank]) -> None:
    """At page edges and off them, inside the window and beyond it, at a whole prompt asked again and at a next turn."""
    window = read_geometry(Path(rank(member).config.model)).window
    worst = 0.0
    for length in (PAGE + 1, window - 1, window, window + PAGE, 3 * window + 5):
        engine = Asked(rank(member))
        prompt = prompt_of(member, length)
        cold = engine.ask(prompt)
        warm = engine.ask(prompt)
        assert engine.cached == (length - 1) // PAGE * PAGE
        worst = max(worst, error(cold, warm))
        turn = prompt + [token for token, _ in warm] + prompt_of(member, 7, start=5)
        later = engine.ask(turn)
        assert engine.cached >= (length + LENGTH - 1) // PAGE * PAGE
        worst = max(worst, error(Asked(rank(member), prefix_cache=False).ask(turn), later))
    print(f"{member}: largest logprob difference behind a hit {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize("member", ["31b", pytest.param("26b-a4b", marks=pytest.mark.slow), "e2b"])
def test_logits_at_a_branch_point_and_after_evictions(member: str, rank: Callable[[str], Rank]) -> None:
    """A third visitor of a branch point, and those who come after much else in small pools, agree with an uncached run."""
    window = read_geometry(Path(rank(member).config.model)).window
    engine, plain = Asked(rank(member)), Asked(rank(member), prefix_cache=False)
    system = prompt_of(member, 2 * window)
    worst, hits = 0.0, 0
    for visit in range(8):
        prompt = system + prompt_of(member, 9 + visit, start=100 * visit)
        worst = max(worst, error(plain.ask(prompt), engine.ask(prompt)))
        hits += engine.cached
        other = prompt_of(member, window + 3 * visit, start=1000 + visit)
        worst = max(worst, error(plain.ask(other), engine.ask(other)))
    assert hits >= 5 * (len(system) - PAGE)
    assert engine.scheduler.allocator.cache.evicted_pages > 0
    assert worst <= TOLERANCE


@pytest.mark.parametrize("member", ["31b", "e2b"])
def test_logits_after_a_preemption(member: str, rank: Callable[[str], Rank]) -> None:
    """Two that outgrow the full pool: the one that is put back goes on from the cache, and both give what they give alone."""
    engine, plain = Asked(rank(member), (24, 19)), Asked(rank(member), prefix_cache=False)
    prompts = [prompt_of(member, 90), prompt_of(member, 85, start=500)]
    together = engine.ask_all(prompts, 60)
    counters = engine.scheduler.requests.counters
    assert counters.preemptions > 0
    assert counters.prefill_tokens < sum(map(len, prompts)) + 85, "the prompt of the one that was put back was found again"
    worst = max(error(plain.ask(prompt, 60), answer) for prompt, answer in zip(prompts, together, strict=True))
    print(f"{member}: {counters.preemptions} preemptions, largest logprob difference {worst:.1e}")
    assert worst <= TOLERANCE


def test_a_wrong_tail_is_noticed(rank: Callable[[str], Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the first page of a tail is another one of the same sequence; the logits say so by far."""
    honest = PrefixCache.insert

    def short(self: PrefixCache, keys: list[bytes], full: list[int], tail: list[int], **options: bool) -> tuple[int, bool]:
        return honest(self, keys, full, [*tail[-1:], *tail[1:]], **options)

    monkeypatch.setattr(PrefixCache, "insert", short)
    engine = Asked(rank("31b"))
    prompt = prompt_of("31b", 150)
    assert error(engine.ask(prompt), engine.ask(prompt)) > FAULT
