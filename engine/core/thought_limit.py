"""The thinking budget of a reply: counts tokens of thoughts as they are committed.

    <|channel> thought \\n  So  the  sum  is  <channel|>
               label         1   2    3    4   the token that must come with a budget of 4
"""

from collections.abc import Iterable

from engine.protocol import ThoughtBudget


class ThoughtLimit:
    """Of one reply. Call `read` with each of its tokens, in order. `length`: tokens of its prompt, which do not count."""

    def __init__(self, budget: ThoughtBudget, length: int) -> None:
        self._budget = budget
        self._ends = {budget.end, budget.begin_call}
        self._left = budget.tokens
        self._label = budget.open_label  # tokens of the label that are still to come; None: no thought is open
        self._length = length

    @property
    def end(self) -> int:
        """The id that ends a thought."""
        return self._budget.end

    @property
    def ends_at(self) -> int | None:
        """Index in the sequence of the token that must end the thought, if none before it does; None: no thought is open."""
        return None if self._label is None else self._length + self._label + self._left

    def read(self, tokens: Iterable[int]) -> None:
        """These were committed."""
        for token in tokens:
            self._length += 1
            if self._label is None:
                self._label = self._budget.label if token == self._budget.begin else None
            elif token in self._ends:
                self._label = None
            elif self._label:
                self._label -= 1
            else:
                self._left = max(0, self._left - 1)
