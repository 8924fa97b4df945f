"""Stop strings in a stream: what may be emitted, when, and where the cut is."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.front.text import StopStrings

pytestmark = pytest.mark.pure

stops_of_ab = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(whole: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By brute force: the match that ends first, of those the longest."""
    ends = [(place + len(stop), place, stop) for stop in stops for place in range(len(whole)) if whole.startswith(stop, place)]
    if not ends:
        return whole, None
    _, start, stop = min(ends)
    return whole[:start], stop


def stopped(stream: StopStrings, chunks: Sequence[str]) -> tuple[str, str | None]:
    out = ""
    for chunk in chunks:
        emitted, matched = stream.push(chunk)
        out += emitted
        if matched is not None:
            assert stream.flush() == ""
            return out, matched
    return out + stream.flush(), None


@settings(max_examples=500, deadline=None)
@given(chunks=st.lists(st.text("abc", max_size=6), max_size=12), stops=stops_of_ab)
@example(chunks=["a"], stops=["ab"])
@example(chunks=["a", "b"], stops=["ab"])
@example(chunks=["ab", "ab", "c"], stops=["ababc", "bab"])
def test_stop_strings(chunks: list[str], stops: list[str]) -> None:
    """However the text is cut into chunks, what is emitted is the text up to the first match."""
    assert stopped(StopStrings(stops), chunks) == cut("".join(chunks), stops)


class KeepsNothingBack(StopStrings):
    """A planted fault: forgets what was held when a new chunk comes, so a match across chunks is missed."""

    def push(self, delta: str) -> tuple[str, str | None]:
        self.flush()
        return super().push(delta)


def test_a_cut_that_holds_nothing_back_is_seen() -> None:
    """The comparison above fails for a cut that does not look across chunks."""
    draw = random.Random(2)
    wrong = 0
    for _ in range(200):
        whole = "".join(draw.choice("ab") for _ in range(20))
        wrong += stopped(KeepsNothingBack(["abba", "bab"]), list(whole)) != cut(whole, ["abba", "bab"])
    assert wrong >= 190


@settings(max_examples=300, deadline=None)
@given(chunks=st.lists(st.text("abc", max_size=6), max_size=12), stops=stops_of_ab)
def test_nothing_is_held_without_need(chunks: list[str], stops: list[str]) -> None:
    """After each chunk, what is held back is exactly the longest tail that could still become a stop string."""
    stream, out, seen = StopStrings(stops), "", ""
    for chunk in chunks:
        emitted, matched = stream.push(chunk)
        if matched is not None:
            return
        out, seen = out + emitted, seen + chunk
        tails = [stop[:size] for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])]
        assert len(seen) - len(out) == max(map(len, tails), default=0)
