"""What the nano models learn: an exercise is right by its own measure, lies where its skill says, and is never taught and asked."""

import random
import re

import pytest

from deploy.models.nano import TRAINED
from engine.front.text import TextProcessor
from training.exercise_form import END, Draw
from training.exercises import SKILLS, drawing, exam, right, training

pytestmark = pytest.mark.pure

WINDOW = 64
TEXT = TextProcessor.load(TRAINED / "31b")


def seeded(seed: int) -> Draw:
    return drawing(random.Random(seed), WINDOW, TEXT)


@pytest.mark.parametrize("skill", SKILLS)
def test_exam_items_are_never_trained_on(skill: str) -> None:
    """Two hundred exercises of training and fifty of the exam share no item; both are reproducible from their seed."""
    taught = {each.content for each in (training(skill, seeded(seed)) for seed in range(200))}
    asked = exam(skill, seeded(1), 50)
    assert not taught & {each.content for each in asked}
    assert all(each.held_out for each in asked)
    assert asked == exam(skill, seeded(1), 50)
    assert asked != exam(skill, seeded(2), 50)


@pytest.mark.parametrize("skill", SKILLS)
def test_only_the_right_reply_is_right(skill: str) -> None:
    """The reply is right; one token less, one digit or word changed, or its end missing, is not."""
    for each in exam(skill, seeded(3), 30):
        assert right(each, each.reply)
        assert not right(each, each.reply.removesuffix(END)[:-1] + END)
        assert not right(each, each.reply[: each.reply.rindex("<")])
        assert not right(each, each.reply.replace("The ", "A ", 1) if skill == "story" else each.reply + "x")


def test_too_many_questions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skill with too few items says so instead of searching for ever."""
    only = exam("add", seeded(1), 1)[0]
    monkeypatch.setitem(SKILLS, "one", lambda _: only)
    with pytest.raises(ValueError, match="one: only 1 different held-out conversations of 2"):
        exam("one", seeded(1), 2)


@pytest.mark.parametrize(("skill", "nearest", "farthest"), [("recall", 4 * WINDOW, 10 * WINDOW), ("edge", WINDOW // 2, 3 * WINDOW)])
def test_facts_lie_where_their_skill_says(skill: str, nearest: int, farthest: int) -> None:
    """Tokens from the asked fact's last digit to the end of the prompt: four windows or more; or on both sides of the window."""
    distances = []
    for each in exam(skill, seeded(5), 60):
        prompt = TEXT.decode(each.prompt(TEXT), skip_special_tokens=False)
        fact = each.reply.removesuffix("." + END)
        assert prompt.count(fact) == 1
        distances.append(len(TEXT.encode(prompt.split(fact)[1], add_bos=False)))
    assert nearest <= min(distances)
    assert max(distances) <= farthest
    assert skill == "recall" or min(distances) < WINDOW < max(distances)


def test_sums_sorts_and_turns_are_true() -> None:
    """Recomputed from the question's own text."""
    for each in exam("add", seeded(7), 50):
        a, b = map(int, re.findall(r"\d+", each.messages[-1]["content"]))
        assert each.reply == f"{a} + {b} = {a + b}{END}"
    for each in exam("sort", seeded(7), 50):
        numbers = sorted(map(int, re.findall(r"\d+", each.messages[-1]["content"])))
        assert each.reply == ", ".join(map(str, numbers)) + END
        assert 5 <= len(numbers) <= 9
    for each in exam("reverse", seeded(7), 50):
        assert each.reply.removesuffix(END)[::-1] in each.messages[-1]["content"]
