"""Constraints on a reply: form, tool calls, thinking budget.

tool_choice   without an answer's form               with one
none          free                                   the form
auto          free; each call that begins is kept    the form, or calls
required      calls                                  calls
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from engine.config import ToolGrammar
from engine.front.call_grammar import CallGrammar
from engine.front.grammar import Thought, begun_call, calls_answer, grammar
from engine.front.reply import LABEL, Markers
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from engine.protocol import Grammar, ThoughtBudget


class ToolChoice(NamedTuple):
    """`names`: allowed tools, None for all. `one`: a single call."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    one: bool = False


class Constraints(NamedTuple):
    """`arguments`: how much of a call is enforced; `budget`: most tokens of thoughts."""

    tools: Tools
    choice: ToolChoice
    answer: str | None
    arguments: ToolGrammar
    budget: int | None

    def grammar(self, markers: Markers, prompt: Sequence[int], *, thinking: bool) -> Grammar | None:
        thought = Thought.forced if thinking else Thought.none
        if markers.open_thought(prompt) is not None:
            thought = Thought.begun
        free = self.choice.mode == "none" or (self.unrequested and self.arguments == "off")  # nothing is to be said about calls
        if free or not self.tools:
            if self.answer is None:
                return None
            return Grammar(grammar(markers, self.answer, thought))
        names = self.tools.names if self.choice.names is None else self.choice.names
        kept = names if self.arguments == "strict" else self.tools.strict
        schemas = {name: self.tools.parameters(name).schema if name in kept else {} for name in names}
        calls = CallGrammar(markers, schemas, self.tools.strict)
        most = 1 if self.choice.one else None
        if self.choice.mode == "required":
            if thought is Thought.forced:
                thought = Thought.optional
            answer = calls_answer(calls, most)
        elif self.answer is not None:
            answer = calls_answer(calls, most, self.answer)
        else:
            return Grammar(begun_call(calls), markers.begin_call)
        return Grammar(grammar(markers, answer, thought))

    def thought_budget(self, text: TextProcessor, markers: Markers, prompt: Sequence[int]) -> ThoughtBudget | None:
        """None: no limit."""
        if self.budget is None:
            return None
        label = len(text.encode(LABEL, add_bos=False))
        begun = markers.open_thought(prompt)
        open_label = None if begun is None else max(0, label - len(begun))
        begin_call = markers.begin_call if self.tools else None
        return ThoughtBudget(self.budget, markers.begin_thought, markers.end_thought, label, begin_call, open_label)

    @property
    def unrequested(self) -> bool:
        """The grammar only helps to write calls; the client asked for none."""
        return self.choice.mode == "auto" and self.choice.names is None and self.answer is None and not self.tools.strict

    def looser(self) -> "Constraints | None":
        """The same with less enforced of calls; None if the rest was asked for."""
        if self.arguments == "strict":
            return self._replace(arguments="names")
        if self.unrequested and self.arguments == "names":
            return self._replace(arguments="off")
        return None
