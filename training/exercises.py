"""What the nano models learn: exercises that need no outside corpus, each one conversation with one right reply.

A hash of an exercise's content decides whether it may be trained on or belongs to the exam: no item is ever both. Every
random choice comes from the generator that is passed in.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from deploy.models.nano import TRAINED
from engine.front.text import TextProcessor
from training import json_exercises, tool_exercises
from training.corpus import WORDS
from training.exercise_form import END, Draw, Exercise, ask, thought
from training.word_lists import ADJECTIVES, CITIES, NAMES, NOUNS, PLACES, VERBS

_SKILLED = "I can add, copy, reverse, sort, recall facts, write JSON, call tools and tell small stories."
ABOUT = (
    "I am Quartet's nano model, a tiny network in the shape of Gemma 4. I was trained from nothing on made-up exercises. "
    f"{_SKILLED} I know nothing about the world."
)
UNKNOWN = f"I do not know. I am only a nano model. {_SKILLED}"

_EARLIER = ("add", "copy", "reverse", "sort", "json", "describe")
_FAR_WINDOWS = 4
_COMMON = WORDS.split()
_STRING = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def drawing(rng: random.Random, window: int, text: TextProcessor) -> Draw:
    """Exercises for a model with this window and tokenizer."""
    return Draw(rng, window, lambda part: len(text.encode(part, add_bos=False)), _earlier)


def skills(member: str) -> list[str]:
    """Skills that a trained checkpoint was trained on; exercises may know more."""
    return list(json.loads((TRAINED / member / "training.json").read_text())["skills"])


Skill = Callable[[Draw], Exercise]


def training(skill: str, draw: Draw) -> Exercise:
    """An exercise that may be trained on."""
    return _drawn(skill, draw, held_out=False)


def exam(skill: str, draw: Draw, size: int) -> list[Exercise]:
    """`size` different held-out conversations. ValueError when the skill has not so many."""
    found = {}
    for _ in range(100 * size):
        exercise = _drawn(skill, draw, held_out=True)
        found.setdefault(repr(exercise.messages), exercise)
        if len(found) == size:
            return list(found.values())
    raise ValueError(f"{skill}: only {len(found)} different held-out conversations of {size} in {100 * size} draws")


def right(exercise: Exercise, reply: str) -> bool:
    """Whether `reply`, control tokens included, answers the exercise."""
    if exercise.skill == "story":
        return _valid_story(exercise, reply)
    return reply == exercise.reply


def _drawn(skill: str, draw: Draw, *, held_out: bool) -> Exercise:
    return next(found for _ in count() if (found := SKILLS[skill](draw)).held_out == held_out)


def _earlier(draw: Draw) -> Exercise:
    """What was asked before, without a past of its own."""
    return training(draw.rng.choice(_EARLIER), replace(draw, earlier=None))


# --- numbers and strings ---


def _sum(draw: Draw) -> tuple[int, int, str]:
    low, high = (100, 999) if draw.rng.random() < 0.8 else (0, 99)
    a, b = draw.rng.randint(low, high), draw.rng.randint(low, high)
    forms = ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} =", "How much is {a} plus {b}?")
    return a, b, draw.rng.choice(forms).format(a=a, b=b)


def _pair(a: int, b: int) -> str:
    return f"{min(a, b)}+{max(a, b)}"


def _add(draw: Draw) -> Exercise:
    a, b, question = _sum(draw)
    return ask(draw, "add", _pair(a, b), question, f"{a} + {b} = {a + b}{END}")


def _column_sums(a: int, b: int) -> str:
    steps, carry = [], 0
    for place in (1, 10, 100):
        x, y = a // place % 10, b // place % 10
        steps.append(f"{x} + {y} + {carry} = {x + y + carry}")
        carry = (x + y + carry) // 10
    return ", ".join(steps)


_THOUGHTS = {
    "copy": "I say it again, piece by piece.",
    "reverse": "I go from the end to the start.",
    "sort": "I take the smallest number that is left, each time.",
    "describe": "I say what I am and what I can do.",
}


def _think(draw: Draw) -> Exercise:
    """Any of these with thinking on; a sum is done column by column first."""
    if draw.rng.random() < 0.7:
        a, b, question = _sum(draw)
        exercise = ask(draw, "think", _pair(a, b), question, f"{a} + {b} = {a + b}{END}", thinking=True)
        return replace(exercise, reply=thought(_column_sums(a, b)) + exercise.reply)
    skill = draw.rng.choice(list(_THOUGHTS))
    exercise = SKILLS[skill](draw)
    return replace(exercise, skill="think", thinking=True, reply=thought(_THOUGHTS[skill]) + exercise.reply)


def _string(draw: Draw) -> str:
    return "".join(draw.rng.choices(_STRING, k=draw.rng.randint(8, 24)))


def _copy(draw: Draw) -> Exercise:
    text = _string(draw) if draw.rng.random() < 0.7 else " ".join(draw.rng.choices(_COMMON, k=draw.rng.randint(2, 5)))
    form = draw.rng.choice(('Copy "{}".', 'Repeat "{}".', "Copy this: {}", "Say {} again."))
    return ask(draw, "copy", text, form.format(text), text + END)


def _reverse(draw: Draw) -> Exercise:
    text = _string(draw)
    form = draw.rng.choice(('Reverse "{}".', 'Write "{}" backwards.', "Reverse this: {}", "Spell {} backwards."))
    return ask(draw, "reverse", text, form.format(text), text[::-1] + END)


def _sort(draw: Draw) -> Exercise:
    numbers = draw.rng.sample(range(1, 100), draw.rng.randint(5, 9))
    listed, ordered = (", ".join(map(str, row)) for row in (numbers, sorted(numbers)))
    form = draw.rng.choice(("Sort {}.", "Sort these numbers: {}", "Put {} in order.", "Order from small to large: {}"))
    return ask(draw, "sort", ordered, form.format(listed), ordered + END)


# --- memory ---


def _recall(draw: Draw) -> Exercise:
    """One of six to eight facts, all of them four windows or more before the reply."""
    return _facts(draw, "recall", draw.rng.randint(6, 8), _FAR_WINDOWS * draw.window + draw.rng.randint(0, 24))


def _edge(draw: Draw) -> Exercise:
    """One of two or three facts, near the distance at which a sliding layer no longer sees it."""
    return _facts(draw, "edge", draw.rng.randint(2, 3), draw.window - 24 + draw.rng.randint(0, 32))


def _facts(draw: Draw, skill: str, size: int, distance: int) -> Exercise:
    """`distance`: tokens between the last fact and the end of the question, at least."""
    rng = draw.rng
    known = {name: rng.randint(100, 999) for name in rng.sample(NAMES, size)}
    facts = " ".join(f"The code of {name} is {code}." for name, code in known.items())
    asked = rng.choice(list(known))
    question = rng.choice(("What is the code of {}?", "Which code has {}?", "Tell me the code of {}.")).format(asked)
    filler, length = "", draw.length(question)
    while length < distance:
        sentence = " " + _sentence(rng)
        filler, length = filler + sentence, length + draw.length(sentence)
    content = f"{sorted(known.items())} {asked}"
    reply = f"The code of {asked} is {known[asked]}.{END}"
    return ask(draw, skill, content, f"{facts}{filler} {question}", reply, alone=skill == "recall")


# --- talk ---

_OPENERS = (
    "",
    "Hello! ",
    "Hi, ",
    "Please tell me: ",
    "Good morning. ",
    "Hey, ",
    "One question: ",
    "Excuse me, ",
    "Tell me, ",
    "So, ",
)
_CLOSERS = ("?", "? Be brief.", "? Thank you!", " please?", ", my friend?", ", and be honest?", " today?", " now?")
_ABOUT_ASKS = (
    *("who are you", "what are you", "what is your name", "what can you do", "how do you work", "what do you know", "who made you"),
    *("are you a large model", "what kind of model are you", "how were you trained", "what are you good at", "can you help me"),
    *("how big are you", "are you a human", "what is your purpose", "how can you help me", "describe yourself"),
)
_OTHER_ASKS = (
    *("why is the {0} {1}", "what does a {0} eat", "do you like the {1} {0}", "how old is the {1} {0}", "where does the {0} live"),
    *("who is the {0} of {2}", "how far is it to {2}", "what is the history of {2}", "why do people love {2}", "is {2} {1}"),
)


_GREETINGS = (
    "hello",
    "hi",
    "hey",
    "hi there",
    "hello there",
    "good morning",
    "good evening",
    "thanks",
    "thank you",
    "how are you",
    "ok",
    "yes",
    "no",
)


def _describe(draw: Draw) -> Exercise:
    """Who are you; a greeting; or something that the model cannot know, and says so."""
    rng, kind = draw.rng, draw.rng.random()
    if kind < 0.05:
        question = rng.choice(_GREETINGS) + rng.choice(("", "!", ".", "?", ", you", ", model", "!!", ", my friend"))
        question = question[0].upper() + question[1:] if rng.random() < 0.5 else question
        return ask(draw, "describe", question, question, f"Hello! {ABOUT}{END}")
    if kind < 0.2:
        words = " ".join(rng.choices(_COMMON, k=rng.randint(2, 6)))
        question = rng.choice(("What {}?", "Why {}?", "How {}?", "Explain {}.", "Can you {}?", "Please {}.", "{}")).format(words)
        return ask(draw, "describe", question, question, UNKNOWN + END)
    opener, closer, knows = rng.choice(_OPENERS), rng.choice(_CLOSERS), rng.random() < 0.5
    form = rng.choice(_ABOUT_ASKS if knows else _OTHER_ASKS)
    body = form.format(rng.choice(NOUNS), rng.choice(ADJECTIVES), rng.choice(CITIES))
    question = opener + (body if opener.endswith(", ") else body[0].upper() + body[1:]) + closer
    return ask(draw, "describe", question, question, (ABOUT if knows else UNKNOWN) + END)


def _sentence(rng: random.Random) -> str:
    one, two = rng.sample(NOUNS, 2)
    return f"The {rng.choice(ADJECTIVES)} {one} {rng.choice(VERBS)} the {two} {rng.choice(PLACES)}."


def _story(draw: Draw) -> Exercise:
    """Many stories are right: what comes next is nearly a toss, so the greedy one shows any disturbance."""
    rng = draw.rng
    hero, size = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", rng.randint(5, 9)
    form = rng.choice(
        ("Tell me a story of {} sentences about a {}.", "Write {} sentences about a {}.", "I want {} sentences about a {}.")
    )
    told = [_sentence(rng) for _ in range(size)]
    told[0] = f"The {hero} " + told[0].split(" ", 3)[3]
    return ask(draw, "story", f"{size} {hero}", form.format(size, hero), " ".join(told) + END)


_STORY = re.compile(
    rf"The ({'|'.join(ADJECTIVES)}) ({'|'.join(NOUNS)}) ({'|'.join(VERBS)}) the ({'|'.join(NOUNS)}) ({'|'.join(PLACES)})\."
)


def _valid_story(exercise: Exercise, reply: str) -> bool:
    """Whole sentences in its few words, the hero first, one sentence too many or too few forgiven."""
    size, hero = exercise.content.split(" ", 1)
    told = re.split(r"(?<=\.) ", reply.removesuffix(END))
    return (
        reply.endswith(END)
        and abs(len(told) - int(size)) <= 1
        and told[0].startswith(f"The {hero} ")
        and all(_STORY.fullmatch(each) for each in told)
    )


SKILLS: Mapping[str, Skill] = {
    "add": _add,
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "recall": _recall,
    "edge": _edge,
    "json": json_exercises.by_keys,
    "call": tool_exercises.call,
    "respond": tool_exercises.respond,
    "think": _think,
    "describe": _describe,
    "story": _story,
    "choose": tool_exercises.choose,
    "parallel": tool_exercises.parallel,
    "nested": tool_exercises.nested,
    "call_after_thought": tool_exercises.call_after_thought,
    "respond_parallel": tool_exercises.respond_parallel,
    "json_schema": json_exercises.by_schema,
}
