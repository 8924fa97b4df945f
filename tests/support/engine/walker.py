"""Random walks through a grammar: replies of a model that knows nothing, and takes any token that the mask allows."""

import random

from engine.front.generation import Choice, Delta
from engine.front.reply import Markers, ReplyParser
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from engine.matcher import Matcher, Vocabulary

LONG = 150  # tokens after which a walk takes the shortest way out
CLOSERS = frozenset(b'"}],:')


class Walker:
    """A model that knows nothing: it takes any token that the mask allows."""

    def __init__(self, text: TextProcessor) -> None:
        markers = Markers.of(text)
        assert markers is not None
        self.text, self.markers = text, markers
        pieces = [text.pieces.bytes_of(token) for token in range(text.vocab_size)]
        self.vocabulary = Vocabulary(pieces, text.pieces.special, text.eos_ids, lambda plain: text.encode(plain, add_bos=False))

    def walk(self, rules: str, rng: random.Random) -> list[int]:
        """Tokens up to an end that the grammar allows."""
        assert self.vocabulary.complaint(rules) is None
        matcher, tokens = self.vocabulary.matcher(rules), list[int]()
        while len(tokens) < 4 * LONG:
            token = self._next(matcher, rng, hurry=len(tokens) > LONG)
            if token in self.text.eos_ids:
                assert matcher.complete
                return tokens
            matcher.consume([token])
            tokens.append(token)
        raise AssertionError(f"no end: {self.text.decode(tokens, skip_special_tokens=False)[:500]}")

    def _next(self, matcher: Matcher, rng: random.Random, *, hurry: bool) -> int:
        mask = matcher.mask().tobytes()
        allowed = [token for token in range(self.text.vocab_size) if mask[token >> 3] >> (token & 7) & 1]
        ends = [token for token in allowed if token in self.text.eos_ids]
        marks = [token for token in allowed if token in self.text.pieces.special]
        if marks and (hurry or rng.random() < 0.3):
            return (ends or marks)[0] if hurry else rng.choice(marks)
        closers = [token for token in allowed if hurry and self.text.pieces.bytes_of(token)[0] in CLOSERS]
        return rng.choice(closers or allowed)

    def said(self, rules: str, rng: random.Random, tools: Tools | None = None) -> Choice:
        """What such a reply says."""
        tokens = self.walk(rules, rng)
        parser, choice = ReplyParser(self.text.pieces, self.markers, tools), Choice()
        choice.add(Delta((*parser.push(tokens), *parser.end(cut=False)), tokens, [], None))
        return choice
