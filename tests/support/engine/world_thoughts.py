"""Budgets of thought in random worlds: which request has which, and by a count over its whole reply, where a thought has to end.

The model of a world gives tokens 100 to 104. What ends a thought is one of them, or one that comes by a mask alone.
"""

import random
from collections.abc import Sequence

import numpy as np

from engine.protocol import ThoughtBudget
from engine.step_masks import only
from tests.support.engine.draws import mixed

VOCABULARY = 128
FORCED_END = 105


def draw_budget(world: int, number: int, trigger: int | None) -> ThoughtBudget:
    """A request's; `trigger`: of its grammar, whose id begins calls then."""
    rng = random.Random(mixed(world, number, 8))
    begin, end, other = rng.sample([token for token in range(100, 105) if token != trigger], 3)
    label = rng.randint(0, 2)
    return ThoughtBudget(
        tokens=rng.choice((0, 0, 1, 2, 5)),
        begin=begin,
        end=rng.choice((end, FORCED_END)),
        label=label,
        begin_call=rng.choice((None, trigger or other)),
        open_label=rng.choice((None, rng.randint(0, label))),
    )


def thought_ends_at(budget: ThoughtBudget, prompt: int, reply: Sequence[int]) -> int | None:
    """Index at which the open thought of a reply has to end: behind its label and what others have left of the budget."""
    thought = None if budget.open_label is None else [-1] * (budget.label - budget.open_label)
    spent = 0
    for token in reply:
        if thought is None:
            thought = [] if token == budget.begin else None
        elif token in (budget.end, budget.begin_call):
            thought, spent = None, spent + max(0, len(thought) - budget.label)
        else:
            thought.append(token)
    if thought is None:
        return None
    used = max(0, len(thought) - budget.label)
    return prompt + len(reply) + max(0, budget.label - len(thought)) + max(0, budget.tokens - spent - used)


def end_mask(budget: ThoughtBudget | None, reply: Sequence[int], grammar: np.ndarray | None) -> np.ndarray | None:
    """int32 [words]: the mask of a reply's next token, by its grammar's, if there is one. A thought that has to end may only end,
    where the grammar lets it."""
    if budget is None or thought_ends_at(budget, 0, reply) != len(reply):
        return grammar
    words = None if grammar is None else grammar.view(np.uint32).tolist()
    return only(budget.end, VOCABULARY) if words is None or words[budget.end // 32] >> budget.end % 32 & 1 else grammar


def forced_token(mask: np.ndarray | None) -> int | None:
    """The one token that a mask lets come; None: the model chooses, as it does under grammars' masks, whose first word is not 0."""
    if mask is None or mask[0]:
        return None
    (token,) = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return int(token)
