"""Limits of thoughts: where a thought has to end, against a count over the whole reply."""

import random

import pytest

from engine.core.masks import ThoughtLimit
from engine.protocol import ThoughtBudget
from tests.support.engine.world_thoughts import thought_ends_at

pytestmark = pytest.mark.pure

BEGIN, END, CALL, WORD = 100, 101, 48, 7


def differences(shift: int) -> int:
    """How often a limit differs from the count, over random replies that come in random pieces; `shift`: a planted fault."""
    rng, wrong = random.Random(1), 0
    for _ in range(300):
        label = rng.randrange(4)
        budget = ThoughtBudget(
            rng.randrange(9), BEGIN, END, label, rng.choice((None, CALL)), rng.choice((None, rng.randint(0, label)))
        )  # fmt: skip
        limit, reply = ThoughtLimit(budget, 5), list[int]()
        for _ in range(12):
            wrong += limit.ends_at != (None if (at := thought_ends_at(budget, 5, reply)) is None else at + shift)
            piece = rng.choices((BEGIN, END, CALL, WORD), (2, 1, 1, 6), k=rng.randrange(4))
            limit.read(piece)
            reply += piece
    return wrong


def test_a_limit_is_the_count() -> None:
    """Labels do not count, all thoughts of a reply share the budget, and a call ends one where there are tools; off by one, nearly
    every open thought shows it."""
    assert differences(0) == 0
    assert differences(1) > 1000
