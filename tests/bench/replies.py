"""What taking replies apart costs, a token; and grammars: compiling and masks. `python -m tests.bench.replies --machine NAME`.

CPU time of one thread. Replies: the trained nano 31b's tokenizer, a token a call, the least of five rounds. Grammars: random
schemas, 64 of them, as JSON and as arguments of a call, over a vocabulary of 262 144 pieces (the nano's, and made-up words), walked
at random.
"""

import argparse
import random
import string
import time
from collections.abc import Callable, Iterable, Sequence

from deploy.models.resolve import resolve
from engine.front.call_grammar import CallGrammar
from engine.front.generation import PlainText
from engine.front.grammar import Thought, calls_answer, grammar, json_answer
from engine.front.reply import Markers, ReplyParser
from engine.front.text import Detokenizer, TextProcessor
from engine.front.tools import Tools
from engine.matcher import Vocabulary
from tests.bench.record import Row, append
from tests.support.engine.schemas import members

VOCABULARY = 262_144
SCHEMAS = 64
STEPS = 100
TOOLS = Tools([{"type": "function", "function": {"name": "get_weather"}}])
WORDS = "The little fox runs to the town and it is fine. " * 400
Reader = PlainText | ReplyParser


def microseconds(make: Callable[[], Reader], tokens: Sequence[int]) -> float:
    """A token, from its id to typed parts."""
    rounds = []
    for _ in range(5):
        reader, began = make(), time.process_time()
        for token in tokens:
            reader.push([token])
        reader.end(cut=False)
        rounds.append(time.process_time() - began)
    return min(rounds) / len(tokens) * 1e6


def replies(text: TextProcessor, markers: Markers) -> list[Row]:
    """Of every kind of text."""
    plain, call = WORDS, f'<|tool_call>call:get_weather{{text:<|"|>{WORDS}<|"|>}}<tool_call|>'
    cases: dict[str, tuple[str, Callable[[], Reader]]] = {
        "raw completion": (plain, lambda: PlainText(Detokenizer(text.pieces))),
        "chat": (plain, lambda: ReplyParser(text.pieces, markers)),
        "chat with tools": (plain, lambda: ReplyParser(text.pieces, markers, TOOLS)),
        "thought": (f"<|channel>thought\n{plain}<channel|>", lambda: ReplyParser(text.pieces, markers)),
        "arguments": (call, lambda: ReplyParser(text.pieces, markers, TOOLS)),
    }
    return [
        (case, "CPU a token", microseconds(make, text.encode(written, add_bos=False)), "us")
        for case, (written, make) in cases.items()
    ]


def made_up_words(known: Iterable[str], count: int) -> list[str]:
    """Words of letters that are not `known`, half of them behind a space."""
    rng, known, words = random.Random(1), set(known), []
    while len(words) < count:
        word = " " * rng.randint(0, 1) + "".join(rng.choices(string.ascii_letters, k=rng.randint(3, 10)))
        if word not in known:
            known.add(word)
            words.append(word)
    return words


def large(text: TextProcessor) -> Vocabulary:
    """The tokenizer's pieces, filled up with words."""
    pieces = [text.pieces.bytes_of(token) for token in range(text.vocab_size)]
    known = [piece.decode(errors="replace") for piece in pieces]
    pieces += [word.encode() for word in made_up_words(known, VOCABULARY - len(pieces))]
    return Vocabulary(pieces, text.pieces.special, text.eos_ids, lambda plain: text.encode(plain, add_bos=False))


def walked(vocabulary: Vocabulary, rules: str, rng: random.Random) -> tuple[float, list[float]]:
    """(seconds to compile, seconds of each mask)"""
    began = time.process_time()
    assert vocabulary.complaint(rules) is None
    matcher = vocabulary.matcher(rules)
    compiled, masks = time.process_time() - began, []
    for _ in range(STEPS):
        began = time.process_time()
        mask = matcher.mask().tobytes()
        masks.append(time.process_time() - began)
        places = [place for place, byte in enumerate(mask) if byte]
        byte = rng.choice(places)
        token = rng.choice([byte * 8 + bit for bit in range(8) if mask[byte] >> bit & 1])
        if matcher.complete:
            break
        matcher.consume([token])
    return compiled, masks


def grammars(text: TextProcessor, markers: Markers) -> list[Row]:
    """Quantiles over all schemas."""
    began = time.process_time()
    vocabulary = large(text)
    rows: list[Row] = [("vocabulary of 262144", "CPU once", time.process_time() - began, "s")]
    schemas = [members(random.Random(seed), 2) for seed in range(SCHEMAS)]
    for case, answers in (
        ("json_schema", [json_answer(schema) for schema in schemas]),
        ("tool call", [calls_answer(CallGrammar(markers, {"f": schema}, "f")) for schema in schemas]),
    ):
        found = [walked(vocabulary, grammar(markers, each, Thought.none), random.Random(at)) for at, each in enumerate(answers)]
        compiled, masks = sorted(each for each, _ in found), sorted(each for _, every in found for each in every)
        for name, values in (("compile", compiled), ("mask", masks)):
            at = {share: values[min(len(values) - 1, len(values) * share // 100)] for share in (50, 99)}
            rows += [(case, f"{name} p{share}", 1e3 * value, "ms") for share, value in at.items()]
    return rows


def main() -> None:
    """Print, and with --machine record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine")
    machine = parser.parse_args().machine
    text = TextProcessor.load(resolve("nano:31b"))
    markers = Markers.of(text)
    assert markers is not None
    rows = [*replies(text, markers), *grammars(text, markers)]
    for case, metric, value, unit in rows:
        print(f"{case:24} {metric:14} {value:8.3g} {unit}")
    if machine:
        append(rows, machine, "tests.bench.replies")


if __name__ == "__main__":
    main()
