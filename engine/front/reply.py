r"""Parses a reply into content, thoughts and tool calls, by Gemma 4's markers, which are token ids.

    <|channel>thought\n ... \n<channel|>  Sure.  <|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>
              Reasoning                   Content             ToolCallStart, Arguments ...

    state           text is                                            left by
    content         content                                            <|channel>, and with tools <|tool_call>
    label           "thought\n", the channel's name                    its end, or anything else
    thought         reasoning                                          <channel|>, <|tool_call>
    gap             white space, or `call:NAME{` without its marker    other text
    head            a call's name                                      { or (, or text that is no name
    more_arguments  for ArgumentsParser                                the closing bracket, <tool_call|> outside of strings

A state is a method that reads text and returns the rest for the next state. Text that is no call
becomes content, with its markers.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from engine.errors import CheckpointError
from engine.front.arguments import ArgumentsParser
from engine.front.notation import MARK, QUOTE
from engine.front.parts import Arguments, Content, Part, Reasoning, ToolCallStart, joined
from engine.front.text import Detokenizer, TextProcessor
from engine.front.tools import Tools
from engine.pieces import Pieces

LABEL = "thought\n"
_NAME = r"[\w.:/-]{0,256}"
_HEAD = re.compile(rf"\s*(?P<prefix>call\s*:)?:?\s*(?P<name>{_NAME})\s*")
_OPENER = re.compile(r"[{(]")
_HEAD_CHARACTERS = 300


_MARKERS = {
    "<|channel>": "begin_thought",
    "<channel|>": "end_thought",
    "<|tool_call>": "begin_call",
    "<tool_call|>": "end_call",
    QUOTE: "quote",
}
_BOUNDARIES = ("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>")


class Markers(NamedTuple):
    begin_thought: int
    end_thought: int
    begin_call: int
    end_call: int
    quote: int
    boundaries: frozenset[int]  # where a thought, a call, a result or a turn begins or ends

    @classmethod
    def of(cls, text: TextProcessor) -> Self:
        """CheckpointError: the vocabulary lacks some."""
        names = (*_MARKERS, *_BOUNDARIES)
        known = {name: number for name in names if (number := text.control_id(name)) is not None}
        if absent := _MARKERS.keys() - known.keys():
            raise CheckpointError(f"the tokenizer lacks the markers of thoughts and tool calls {', '.join(sorted(absent))}")
        boundaries = frozenset(number for name, number in known.items() if name != QUOTE)
        return cls(**{field: known[name] for name, field in _MARKERS.items()}, boundaries=boundaries)

    def open_thought(self, prompt: Sequence[int]) -> Sequence[int] | None:
        for index in range(len(prompt) - 1, -1, -1):
            if prompt[index] in self.boundaries:
                if prompt[index] == self.begin_thought:
                    return prompt[index + 1 :]
                return None
        return None


def _head_of(text: str) -> re.Match[str] | None:
    if len(text) <= _HEAD_CHARACTERS:
        return _HEAD.fullmatch(text)
    return None


class ReplyParser:
    """Parses calls only with `tools`. `show_special`: content has other control tokens.
    `reasoning_tokens` include markers."""

    def __init__(
        self,
        pieces: Pieces,
        markers: Markers,
        tools: Tools,
        *,
        prompt: Sequence[int] = (),
        show_special: bool = False,
    ) -> None:
        self._pieces = pieces
        self._markers = markers
        self._tools = tools
        self._detokenizer = Detokenizer(pieces, skip_special_tokens=False)
        self._show_special = show_special
        self._parts: list[Part] = []
        self._held = ""  # text whose meaning is not known yet, by the rules of the state
        self._reasoned = self._new_block = False
        self._arguments: ArgumentsParser | None = None
        self._call_is_open = False  # <tool_call|> may still come
        self.reasoning_tokens = self.calls = self.ended_calls = 0
        self._state: Callable[[str], str] = self._gap if self._tools else self._content
        if (thought := markers.open_thought(prompt)) is not None:  # it goes on; the prompt's part is not put out
            self._begin_thought()
            self.push(thought)
            self.reasoning_tokens = 0
            self._reasoned = False
            self._held = self._held if self._state == self._label else ""

    def push(self, tokens: Sequence[int]) -> list[Part]:
        if self._pieces.special.isdisjoint(tokens):
            text = self._detokenizer.push(tokens)
            if self._state == self._content:  # nearly every token of a chat
                if text:
                    return [Content(text)]
                return []
            self._count(len(tokens))
            self._read(text)
        else:
            for token in tokens:
                if token not in self._pieces.special:
                    self._count(1)
                    self._read(self._detokenizer.push([token]))
                    continue
                self._read(self._detokenizer.flush())
                if self._arguments is None:
                    self._marker(token)
                else:
                    self._marker_in_arguments(token, self._arguments)
        return self._take()

    def end(self, *, cut: bool) -> list[Part]:
        """If `cut` by the token limit, drop half a name, and do not complete arguments."""
        if self._state != self._head or not cut:
            self._read(self._detokenizer.flush())
        if self._arguments is not None:
            self._held = ""
        self._end_open_call(complete=not cut)
        if self._thinking and not cut:
            self._end_thought()
        elif self._state == self._gap and (self._held.strip() or not self.calls):
            self._content(self._held)
        elif self._state == self._head and not cut:
            self._no_call()
        self._held = ""
        return self._take()

    @property
    def _thinking(self) -> bool:
        return self._state in (self._label, self._thought)

    # --- tokens ---

    def _marker(self, token: int) -> None:
        markers = self._markers
        thinking = self._thinking
        if token == markers.begin_thought:
            if not thinking:
                self._begin_thought()
            self._count(1)
        elif token == markers.end_thought and thinking:
            self._count(1)
            self._end_thought()
        elif token == markers.begin_call and self._tools:
            self._begin_head()
        elif token == markers.end_call and (self._call_is_open or self._state == self._head):
            self._end_call()
        else:
            self._count(1)
            of_call = token in (markers.begin_call, markers.end_call, markers.quote)
            if of_call or (self._show_special and not thinking):
                self._write_out(token)

    def _write_out(self, token: int) -> None:
        if not self._thinking:
            self._no_call()
        self._read(str(self._pieces[token]))

    def _marker_in_arguments(self, token: int, arguments: ArgumentsParser) -> None:
        arguments.push(self._held)
        self._held = ""
        if token == self._markers.end_call and arguments.in_string:
            self._held = str(self._pieces[token])  # text of the string, unless the reply ends here: then it ended the call
        elif token == self._markers.quote:
            arguments.push(MARK)
        elif arguments.in_string:
            arguments.push(str(self._pieces[token]))
        elif token == self._markers.begin_call:
            self._begin_head()
        elif token == self._markers.end_call:
            self._end_call()
        if self._arguments is arguments and arguments.ended:
            self._read(self._end_arguments(complete=True))

    def _count(self, tokens: int) -> None:
        if self._thinking:
            self.reasoning_tokens += tokens

    def _read(self, text: str) -> None:
        while text:
            text = self._held + text
            self._held = ""
            text = self._state(text)

    def _take(self) -> list[Part]:
        if self._arguments is not None:
            self._put_arguments(self._arguments)
        parts = self._parts
        self._parts = []
        if len(parts) > 1:
            return joined(parts)
        return parts

    # --- text of the answer, and of thoughts ---

    def _content(self, text: str) -> str:
        if text:
            self._parts.append(Content(text))
        return ""

    def _reason(self, text: str) -> None:
        """A newline joins thoughts of several blocks."""
        if text:
            if self._reasoned and self._new_block:
                between = "\n"
            else:
                between = ""
            self._parts.append(Reasoning(between + text))
            self._reasoned = True
            self._new_block = False

    def _begin_thought(self) -> None:
        if self._held.strip() or self._state == self._head:
            self._no_call()
        self._state = self._label
        self._held = ""
        self._new_block = True

    def _label(self, text: str) -> str:
        if LABEL.startswith(text) and text != LABEL:
            self._held = text
            return ""
        self._state = self._thought
        return text.removeprefix(LABEL)

    def _thought(self, text: str) -> str:
        self._held = "\n" if text.endswith("\n") else ""
        self._reason(text.removesuffix("\n"))
        return ""

    def _end_thought(self) -> None:
        """The newline before the marker, or a label without newline, belongs to the template."""
        if self._state == self._label and self._held != LABEL.rstrip():
            self._reason(self._held)
        self._held = ""
        self._state = self._gap if self._tools else self._content

    # --- calls ---

    def _gap(self, text: str) -> str:
        begun = text.lstrip()
        head, opener, arguments = begun.partition("{")
        name = head.removeprefix("call:")
        if opener and name != head and self._tools.declares(name):
            self._begin_call(name, opener)
            return arguments
        if len(text) <= _HEAD_CHARACTERS and (not begun or (not opener and self._tools.may_become_call(begun))):
            self._held = text
            return ""
        self._state = self._content
        return text

    def _begin_head(self) -> None:
        self._end_open_call(complete=True)
        if self._thinking:
            self._end_thought()
        elif self._state == self._head or self._held.strip():
            self._no_call()
        self._state = self._head
        self._held = ""

    def _head(self, text: str) -> str:
        opener = _OPENER.search(text)
        name = self._called(text[: opener.start()]) if opener else None
        if opener and name:
            self._begin_call(name, opener[0])
            return text[opener.end() :]
        self._held = text
        if opener or _head_of(text) is None:
            self._no_call()
        return ""

    def _called(self, head: str) -> str | None:
        """The tool named after <|tool_call>, or None; without `call:` only a declared one."""
        match = _head_of(head)
        if match is None or not match["name"]:
            return None
        name = match["name"]
        return self._tools.resolve(name) if match["prefix"] else name if self._tools.declares(name) else None

    def _begin_call(self, name: str, opener: str) -> None:
        self._parts.append(ToolCallStart(self.calls, f"call_{secrets.token_hex(12)}", name))
        self._arguments = ArgumentsParser(self._tools.parameters(name), opener)
        self.calls += 1
        self._held = ""
        self._state = self._more_arguments
        self._call_is_open = True

    def _no_call(self) -> None:
        if self._state == self._head:
            marker = str(self._pieces[self._markers.begin_call])
        else:
            marker = ""
        self._content(marker + self._held)
        self._held = ""
        self._state = self._content

    def _more_arguments(self, text: str) -> str:
        assert self._arguments is not None
        self._arguments.push(text)
        if self._arguments.ended:
            return self._end_arguments(complete=True)
        return ""

    def _end_open_call(self, *, complete: bool) -> None:
        """Also ends calls in its unread text."""
        while self._arguments is not None:
            self._read(self._end_arguments(complete=complete))

    def _end_arguments(self, *, complete: bool) -> str:
        arguments = self._arguments
        self._arguments = None
        assert arguments is not None
        if not arguments.ended:
            arguments.end(cut=not complete)
        self._put_arguments(arguments)
        self._state = self._gap
        self.ended_calls += complete
        return arguments.rest

    def _put_arguments(self, arguments: ArgumentsParser) -> None:
        if json_text := arguments.take():
            self._parts.append(Arguments(self.calls - 1, json_text))

    def _end_call(self) -> None:
        if self._state == self._head:
            name = self._called(self._held)
            if name is None:
                self._write_out(self._markers.end_call)
            else:
                self._begin_call(name, "{")
        self._end_open_call(complete=True)
        self._call_is_open = False
