"""Prompts with images, video and audio in the core: their page keys; which chunks they are computed in, and when."""

import random
from array import array

import msgspec
import pytest

from engine.core import prefix
from engine.core.prefix import extend_keys, root_key
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.geometry import KVGroup
from engine.plan import ResultRow
from engine.protocol import FinishReason, GenerateRequest, MediaItem, Output, SamplingParams, pack_tokens
from tests.support.engine.plans import result_of

pytestmark = pytest.mark.pure

PAGE, PLACEHOLDER = 4, 9
GROUPS = (KVGroup(0, "sliding", (0,), 1, 256, 9, PAGE), KVGroup(1, "full", (1,), 1, 512, None, PAGE))


def picture(first: int, length: int, name: int) -> MediaItem:
    return MediaItem(first, length, bytes([name]) * 32, ((first, first + length),))


def prompt(rng: random.Random) -> tuple[list[int], list[MediaItem]]:
    """Text and pictures of few sizes and contents, so that many prompts are alike."""
    tokens: list[int] = []
    media = []
    while len(tokens) < 24:
        tokens += [5] * rng.randint(1, 2)
        length = rng.choice((1, 3, 6))
        media.append(picture(len(tokens), length, rng.randint(1, 2)))
        tokens += [PLACEHOLDER] * length
    return tokens, media


def keys_of(tokens: list[int], media: list[MediaItem]) -> list[bytes]:
    keys: list[bytes] = []
    for count in range(len(tokens) // PAGE + 1):
        extend_keys(keys, root_key(""), array("i", tokens), PAGE, count, media)
    return keys


def content(tokens: list[int], media: list[MediaItem], end: int) -> tuple[list[int], list[tuple[int, int, bytes]]]:
    """All that positions below `end` depend on."""
    return tokens[:end], [(item.first, item.length, item.digest) for item in media if item.first < end]


def wrong_keys(seeds: range) -> int:
    """Pages of pairs of random prompts whose keys are equal where their contents are not, or the other way round."""
    wrong = 0
    for seed in seeds:
        rng = random.Random(seed)
        (one, pictures), (other, others) = prompt(rng), prompt(rng)
        for page, (key, another) in enumerate(zip(keys_of(one, pictures), keys_of(other, others), strict=False)):
            end = (page + 1) * PAGE
            wrong += (key == another) != (content(one, pictures, end) == content(other, others, end))
    return wrong


def test_page_keys_are_equal_where_contents_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts, whatever pictures stand where in them; planted fault: keys of the tokens alone."""
    assert wrong_keys(range(500)) == 0
    monkeypatch.setattr(prefix, "_media_by_page", lambda media, page: {})
    assert wrong_keys(range(500)) > 50


def test_pages_without_media_have_the_keys_of_text() -> None:
    """A page before the first picture is shared with prompts without any."""
    tokens = [5] * 8 + [PLACEHOLDER] * 8
    with_picture, plain = keys_of(tokens, [picture(9, 3, 1)]), keys_of(tokens, [])
    assert [a == b for a, b in zip(with_picture, plain, strict=True)] == [True, True, False, False]


class Bench:
    """A scheduler whose ranks answer at once."""

    def __init__(self, pages: tuple[int, ...] = (60, 60), budget: int = 16) -> None:
        self.scheduler = Scheduler(SchedulerConfig(GROUPS, pages, 4, 100, budget, cache_share=1.0))
        self.outputs: list[Output] = []

    def ask(self, tokens: list[int], media: list[MediaItem], number: int = 1) -> int:
        """Serve a request to its end; how many tokens it found in the cache."""
        params = SamplingParams(max_tokens=1)
        request = GenerateRequest(id=number, prompt=pack_tokens(tokens), params=params, media=tuple(media))
        before = self.scheduler.counters.hit_tokens
        self.scheduler.add(0, request)
        while self.scheduler.unfinished:
            plan = self.scheduler.schedule()
            assert plan is not None
            numbers = {sequence.slot: sequence.number for sequence in self.scheduler.running}
            rows = [ResultRow(slot, numbers[slot], (7,)) for slot in plan.result_slots]
            self.scheduler.commit(result_of(plan.step, rows))
        self.outputs += [output for _, output in self.scheduler.drain()]
        return self.scheduler.counters.hit_tokens - before


def test_only_the_same_picture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question with the same picture finds all but its last page; with another of the same size, only the text before. Planted
    fault: keys of the tokens alone find another's picture."""
    tokens = [5] * 8 + [PLACEHOLDER] * 6 + [5] * 8

    def found(name: int, bench: Bench) -> int:
        return bench.ask(tokens, [picture(8, 6, name)])

    bench = Bench()
    assert [found(name, bench) for name in (1, 1, 2, 2, 1)] == [0, 20, 0, 20, 20]
    monkeypatch.setattr(prefix, "_media_by_page", lambda media, page: {})
    bench = Bench()
    assert [found(name, bench) for name in (1, 2)] == [0, 20]


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        (picture(7, 4, 1), "end of the prompt"),
        (picture(-1, 2, 1), "overlaps"),
        (picture(3, 0, 1), "overlaps"),
        (msgspec.structs.replace(picture(3, 2, 1), digest=b"short"), "digest"),
        (msgspec.structs.replace(picture(3, 2, 1), spans=((3, 4), (3, 5))), "span"),
        (msgspec.structs.replace(picture(3, 2, 1), spans=((4, 6),)), "span"),
    ],
)
def test_media_that_do_not_fit_their_prompt_are_refused(item: MediaItem, complaint: str) -> None:
    """Each is an error of its request that says what is wrong."""
    bench = Bench()
    bench.ask([5] * 10, [item])
    (output,) = bench.outputs
    assert (output.finish, output.invalid) == (FinishReason.error, True)
    assert complaint in (output.error or "")
