"""Ranks whose model knows nothing of grammars: a masked row gives any token that its mask allows, every other any token at all."""

from engine.front.text import TextProcessor
from engine.plan import StepResult
from tests.support.engine.draws import mixed
from tests.support.engine.masked_ranks import MaskedRanks
from tests.support.engine.scheduling import two_groups
from tests.support.engine.walker import candidates

Known = dict[tuple[int, int], int]
GROUPS = two_groups()
HURRY = 120  # tokens after which a reply takes the shortest way out


class MaskedMachine(MaskedRanks):
    """One in ten of the tokens without a mask is one of `marks`. `known`: tokens behind prefixes, by these and the seed: guessed as
    drafts, and noted."""

    def __init__(
        self, text: TextProcessor, pages: tuple[int, ...], slots: int, max_len: int, marks: tuple[int, ...], known: Known
    ) -> None:
        super().__init__(GROUPS, pages, slots, max_len, mixed)
        self._text, self._marks, self._known = text, marks, known
        self._begun = [0] * slots

    def result(self) -> StepResult:
        """Run the oldest plan."""
        for admission in self.queue[0].admissions:
            self._begun[admission.slot] = admission.prompt
        return super().result()

    def _likely(self, slot: int, prefix: int, position: int) -> int:
        known = self._known.get((self.seed[slot], prefix))
        return self._free(slot, prefix, position) if known is None else known

    def _free(self, slot: int, prefix: int, position: int) -> int:
        drawn = self.model(prefix, position, self.seed[slot])
        return self._marks[drawn // 10 % len(self._marks)] if drawn % 10 == 0 else 200 + drawn % 700

    def _token(self, slot: int, prefix: int, position: int) -> int:
        token = self._known[self.seed[slot], prefix] = self._sampled(slot, prefix, position)
        return token

    def _sampled(self, slot: int, prefix: int, position: int) -> int:
        drawn, bits = super()._token(slot, prefix, position), self.mask(slot, position)
        if bits is None:
            return self._free(slot, prefix, position)
        hurry = position - self._begun[slot] > HURRY
        marks, others = candidates(self._text, bits, hurry=hurry)
        choices = marks if marks and (hurry or drawn % 10 < 3) else others
        return choices[drawn % len(choices)]
