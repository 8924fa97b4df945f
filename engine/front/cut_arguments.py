"""Arguments of a call that was cut off in its JSON, for a history that shows the call as far as the model wrote it.

    {"path":"a.py","text":"print(1        ->        path:<|"|>a.py<|"|>,text:<|"|>print(1

A reply that max_tokens cuts inside a call has such arguments, and agents send it back. Nothing is closed, left out or added, except
that half a JSON escape is dropped.
"""

import re
from collections.abc import Callable
from typing import Any

from engine.errors import InvalidRequest
from engine.front.notation import HALF_LITERAL

MAX_PIECES = 1 << 15  # strings, words and marks in the cut arguments of a conversation: some 0.2 s of CPU
_PIECES_A_CALL = 32  # counted for each call besides its own
_PIECE = re.compile(
    r'"(?P<inside>(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*)(?P<end>"?)(?:\\(?:u[0-9a-fA-F]{0,3})?\Z)?'
    r"|(?P<mark>[{}\[\],:])|(?P<word>[^\s{}\[\],:\"]+)"
)
_CLOSER = {"{": "}", "[": "]"}

Parse = Callable[[str], Any]


class CutArguments(tuple[str, ...]):
    """Gemma 4's notation after the opening bracket, as the texts between its quote markers."""

    __slots__ = ()


class CutReader:
    """Reads the cut arguments of one conversation. `parse` reads JSON; ValueError: it is none."""

    def __init__(self, parse: Parse) -> None:
        self._parse = parse
        self._left = MAX_PIECES

    def read(self, json_text: str) -> CutArguments | None:
        """The notation of an object's first characters; None: they begin no object. InvalidRequest: they are too many."""
        draft = _Draft(self._parse)
        self._take(_PIECES_A_CALL)
        try:
            for piece in _PIECE.finditer(json_text):
                self._take(1)
                draft.add(piece)
            value = self._parse(json_text[: draft.end] + draft.ending + "".join(reversed(draft.closers)))
        except (ValueError, RecursionError):
            return None
        return draft.notation if isinstance(value, dict) else None

    def _take(self, pieces: int) -> None:
        self._left -= pieces
        if self._left < 0:
            raise InvalidRequest(f"messages: calls that were cut hold more than {MAX_PIECES} values and marks", param="messages")


class _Draft:
    """The notation of JSON that comes piece by piece, and what would complete the JSON, so that a parser can check it.

    end, ending    `end` characters of the JSON, then `ending`, then `closers` of open brackets from the last one on are complete
    """

    def __init__(self, parse: Parse) -> None:
        self.closers: list[str] = []
        self.end = 0
        self.ending = ""
        self._texts: list[list[str]] = [[]]
        self._parse = parse
        self._key_follows = False

    @property
    def notation(self) -> CutArguments:
        """The notation so far, of an object."""
        first, *others = map("".join, self._texts)
        return CutArguments([first[1:], *others])

    def add(self, piece: re.Match[str]) -> None:
        """One string, word or mark. ValueError: a string with a wrong escape."""
        self.end, self.ending = piece.end(), ""
        if piece["mark"]:
            self._mark(piece["mark"])
        elif piece["word"]:
            self._texts[-1].append(piece["word"])
            if HALF_LITERAL.fullmatch(piece["word"]):
                self.end, self.ending = piece.start(), "null"
        else:
            self.end = piece.end("end")
            self._string(self._parse(f'"{piece["inside"]}"'), '"' if not piece["end"] else "")

    def _mark(self, mark: str) -> None:
        self._texts[-1].append(mark)
        if mark in _CLOSER:
            self.closers.append(_CLOSER[mark])
        elif mark in "}]" and self.closers:
            self.closers.pop()
        self._key_follows = mark in "{," and self.closers[-1:] == ["}"]
        if mark in ",:":
            self.ending = '"":null' if self._key_follows else "null"

    def _string(self, text: str, missing: str) -> None:
        self.ending = missing
        if self._key_follows:
            self._texts[-1].append(text)
            self.ending += ":null"
            self._key_follows = False
        else:
            self._texts += [[text]] if missing else [[text], []]
