"""No room of the product gets more banned words, docstring words, tuple assignments or conditional expressions."""

from collections import Counter

import pytest

from tests.support.prose import (
    ALLOWED,
    BUDGETS,
    FUNCTION_MEAN,
    FUNCTION_WORDS,
    FUNCTIONS,
    MEASURES,
    ROOMS,
    WORDS,
    breaches,
    counted,
    figures,
    function_mean,
)

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def found() -> dict[str, Counter[str]]:
    """The product's figures."""
    return figures()


def test_no_room_is_above_its_allowance(found: dict[str, Counter[str]]) -> None:
    assert breaches(found) == []


def test_each_measure_of_each_room_is_held() -> None:
    """One more than the allowance is reported by its room and measure, and nothing else is."""
    assert set(ALLOWED) == set(BUDGETS) == set(ROOMS)
    bounds = {room: dict(zip((*MEASURES, WORDS), (*ALLOWED[room], BUDGETS[room]), strict=True)) for room in ROOMS}
    for room in ROOMS:
        for measure, allowed in bounds[room].items():
            found = {name: Counter(bounds[name]) for name in ROOMS}
            assert breaches(found) == []
            found[room][measure] += 1
            assert breaches(found) == [f"{room}: {allowed + 1} {measure}, allowed {allowed}"]


def test_functions_are_documented_in_few_words(found: dict[str, Counter[str]]) -> None:
    assert function_mean(found) <= FUNCTION_MEAN
    more = Counter({FUNCTION_WORDS: 14 * sum(counts[FUNCTIONS] for counts in found.values())})
    assert function_mean(found | {"kernels": found["kernels"] + more}) > FUNCTION_MEAN


def test_what_is_counted() -> None:
    """Banned words count over line ends, parts of words do not; a swap is a tuple assignment, unpacking a call is not."""
    source = '"""Behind it there is\nnone."""\n\n# besides, beside\na, b = b, a\nc, d = f()\ne = 1 if a else 2\n'
    expected = {"behind": 1, "beside": 1, "is none": 1, WORDS: 5, "tuple assignments": 1, "conditional expressions": 1}
    assert counted(source) == Counter(expected)
    assert counted("y = x is None\n").total() == 0
    assert counted("string_begins_behind = BESIDE_A\n") == Counter({"behind": 1, "beside": 1})
    function = counted('def f():\n    """Two words."""\n\n\ndef g():\n    pass\n')
    assert function == Counter({WORDS: 2, FUNCTION_WORDS: 2, FUNCTIONS: 1})
