"""Random walks through a grammar: replies of a model that knows nothing, and takes any token that the mask allows."""

import random

import numpy as np

from engine.front.generation import Choice, Delta
from engine.front.grammar import Thought, grammar
from engine.front.reply import Markers, ReplyParser
from engine.front.text import TextProcessor
from engine.front.tools import NO_TOOLS, Tools
from engine.matcher import Matcher, Vocabulary

LONG = 150  # tokens after which a walk takes the shortest way out
CLOSERS = frozenset(b'"}],:')


def candidates(text: TextProcessor, mask: np.ndarray, *, hurry: bool) -> tuple[list[int], list[int]]:
    """Markers that the mask allows, and tokens that may come where none does; in a hurry what ends something."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    marks = [token for token in allowed if token in text.pieces.special]
    if hurry:
        marks = ([token for token in marks if token in text.eos_ids] or marks)[:1]
    closers = [token for token in allowed if hurry and text.pieces.bytes_of(token)[0] in CLOSERS]
    return marks, closers or allowed


def choice_of(parser: ReplyParser, tokens: list[int], *, cut: bool = False) -> Choice:
    """What a whole reply says, or one that max_tokens `cut`."""
    choice = Choice()
    choice.add(Delta((*parser.push(tokens), *parser.end(cut=cut)), tokens, [], None))
    return choice


class Walker:
    """A model that knows nothing: it takes any token that the mask allows."""

    def __init__(self, text: TextProcessor) -> None:
        markers = Markers.of(text)
        self.text, self.markers = text, markers
        self.vocabulary = Vocabulary(text.pieces, text.eos_ids, text.vocab_size)

    def walk(self, rules: str, rng: random.Random) -> list[int]:
        """Tokens up to an end that the grammar allows."""
        assert self.vocabulary.complaint(rules) is None
        matcher, tokens = self.vocabulary.matcher(rules), list[int]()
        while len(tokens) < 4 * LONG:
            token = self._next(matcher, rng, hurry=len(tokens) > LONG)
            if token in self.text.eos_ids:
                assert matcher.complete
                return tokens
            matcher.consume(token)
            tokens.append(token)
        raise AssertionError(f"no end: {self.text.decode(tokens, skip_special_tokens=False)[:500]}")

    def _next(self, matcher: Matcher, rng: random.Random, *, hurry: bool) -> int:
        marks, others = candidates(self.text, matcher.mask(), hurry=hurry)
        return rng.choice(marks if marks and (hurry or rng.random() < 0.3) else others)

    def answer(self, form: str, seed: int, tools: Tools = NO_TOOLS) -> Choice:
        """What a reply of this form says that has no thought."""
        return self.said(grammar(self.markers, form, Thought.none), random.Random(seed), tools)

    def said(self, rules: str, rng: random.Random, tools: Tools = NO_TOOLS) -> Choice:
        """What such a reply says."""
        tokens = self.walk(rules, rng)
        return choice_of(ReplyParser(self.text.pieces, self.markers, tools), tokens)
