"""No room of the product gets more banned words, docstring words, tuple assignments or conditional expressions."""

from collections import Counter

import pytest

from tests.support.prose import ALLOWED, MEASURES, ROOMS, breaches, counted, figures

pytestmark = pytest.mark.pure


def test_no_room_is_above_its_allowance() -> None:
    assert breaches(figures()) == []


def test_each_measure_of_each_room_is_held() -> None:
    """One more than the allowance is reported by its room and measure, and nothing else is."""
    assert set(ALLOWED) == set(ROOMS)
    for room in ROOMS:
        for at, measure in enumerate(MEASURES):
            found = {name: Counter(dict(zip(MEASURES, ALLOWED[name], strict=True))) for name in ROOMS}
            found[room][measure] += 1
            allowed = ALLOWED[room][at]
            assert breaches(found) == [f"{room}: {allowed + 1} {measure}, allowed {allowed}"]


def test_what_is_counted() -> None:
    """Banned words count over line ends, parts of words do not; a swap is a tuple assignment, unpacking a call is not."""
    source = '"""Behind it there is\nnone."""\n\n# besides, beside\na, b = b, a\nc, d = f()\ne = 1 if a else 2\n'
    expected = {"behind": 1, "beside": 1, "is none": 1, "docstring words": 5, "tuple assignments": 1, "conditional expressions": 1}
    assert counted(source) == Counter(expected)
    assert counted("y = x is None\n").total() == 0
