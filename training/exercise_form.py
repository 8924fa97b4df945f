"""An exercise of the nano models: one conversation with one right reply, and what drawing one may ask for."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.front.text import TextProcessor

SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You are a tiny model. Be honest.")
END = "<turn|>"
LONGEST_REPLY = 160  # tokens
_EXAM_SHARE = 16  # one item in so many is kept for the exam


@dataclass(frozen=True)
class Exercise:
    """One conversation that ends with the model's turn.

    content  what makes it the item it is, however it is phrased; its hash decides between training and exam
    messages, tools, thinking  as in a chat request
    reply    the right continuation of the rendered prompt, control tokens included, up to the token that ends it; of a story,
             one of many right ones
    """

    skill: str
    content: str
    messages: list[dict[str, Any]]
    reply: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False

    @property
    def mark(self) -> int:
        """A hash of the item, 64 bits."""
        return int.from_bytes(hashlib.sha256(self.content.encode()).digest()[:8], "little", signed=True)

    @property
    def held_out(self) -> bool:
        """True: for the exam only."""
        return self.mark % _EXAM_SHARE == 0

    @property
    def end(self) -> str:
        """The token that ends the reply."""
        return self.reply[self.reply.rindex("<") :]

    def prompt(self, text: TextProcessor) -> list[int]:
        """Token ids up to the reply."""
        return text.render_chat(self.messages, tools=self.tools, enable_thinking=self.thinking)


@dataclass(frozen=True)
class Draw:
    """What a skill may ask for: randomness, the model's sliding window in tokens, and the length of a text in tokens."""

    rng: random.Random
    window: int
    length: Callable[[str], int]
    earlier: Callable[["Draw"], Exercise] | None = None  # what may have been asked before; None: nothing


def ask(draw: Draw, skill: str, content: str, question: str, reply: str, *, alone: bool = False, **more: Any) -> Exercise:
    """A conversation that ends with this question; sometimes with a system prompt or, unless `alone`, an earlier exchange."""
    system = [{"role": "system", "content": draw.rng.choice(SYSTEMS)}] if draw.rng.random() < 0.15 else []
    past = _past(draw.earlier(draw)) if draw.earlier is not None and not alone and draw.rng.random() < 0.15 else []
    return Exercise(skill, content, [*system, *past, {"role": "user", "content": question}], reply, **more)


def thought(text: str) -> str:
    """As the model writes one."""
    return f"<|channel>thought\n{text}\n<channel|>"


def _past(earlier: Exercise) -> list[dict[str, Any]]:
    """A question and its reply."""
    return [earlier.messages[-1], {"role": "assistant", "content": earlier.reply.removesuffix(END)}]
