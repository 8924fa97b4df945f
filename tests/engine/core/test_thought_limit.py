"""Limits of thoughts: where a thought has to end, against a count over the whole reply."""

import random

import pytest

from engine.core.thought_limit import ThoughtLimit
from engine.protocol import ThoughtBudget

pytestmark = pytest.mark.pure

BEGIN, END, CALL, WORD = 100, 101, 48, 7


def counted(budget: ThoughtBudget, prompt: int, reply: list[int]) -> int | None:
    """Index at which the open thought has to end, by the whole reply: a thought's label and what is left of the budget."""
    thought: list[int] | None = None if budget.open_label is None else [WORD] * (budget.label - budget.open_label)
    spent, missing = 0, 0
    for token in reply:
        if thought is None:
            thought = [] if token == BEGIN else None
        elif token in (END, budget.begin_call):
            thought, spent = None, spent + max(0, len(thought) - budget.label)
        else:
            thought.append(token)
    if thought is None:
        return None
    missing = max(0, budget.label - len(thought)) + max(0, budget.tokens - spent - max(0, len(thought) - budget.label))
    return prompt + len(reply) + missing


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
            wrong += limit.ends_at != (None if (at := counted(budget, 5, reply)) is None else at + shift)
            piece = rng.choices((BEGIN, END, CALL, WORD), (2, 1, 1, 6), k=rng.randrange(4))
            limit.read(piece)
            reply += piece
    return wrong


def test_a_limit_is_the_count() -> None:
    """Labels do not count, all thoughts of a reply share the budget, and a call ends one where there are tools; off by one, nearly
    every open thought shows it."""
    assert differences(0) == 0
    assert differences(1) > 1000
