"""Prompts to token ids, token ids to text, and stop strings.

    messages --template--> guarded text --cut at control tokens--> pieces --tokenize--> ids
    ids --Detokenizer--> text --StopStrings--> client
"""

import codecs
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from engine.checkpoint import model_vocabulary, read_optional
from engine.errors import CheckpointError, InvalidRequest
from engine.front.template import ChatTemplate
from engine.pieces import Pieces, as_plain, control_ids, read_eos, read_tokenizer
from engine.protocol import JsonObject, MediaKind

_NO_CHARACTER = re.compile("[\udc80-\udcff]")  # bytes that are none, as `surrogateescape` shows them
_PLACEHOLDER = re.compile(r"<\|(image|video|audio)\|>")
NO_BOUND = 1 << 40
_WINDOW = 1 << 15  # characters that are searched or tokenized at once
_BYTES_A_TOKEN = 4  # of a text that is worth a look before it is tokenized: fewer than most texts have
_UNSEEN_BYTES = 512 << 10  # at most, of a text that is tokenized without that look: 140 bytes of memory a token
_SEAM = 64  # tokens at most that a text has fewer of than its pieces, where two of them meet


class Detokenizer:
    """Token ids to text for one stream, O(1) per token. Unlike the tokenizer's decode it holds back
    an unfinished UTF-8 character, and shows each invalid byte, not each run, as U+FFFD."""

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        if skip_special_tokens:
            self._skipped = pieces.special
        else:
            self._skipped = frozenset[int]()
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Unknown ids show as U+FFFD."""
        out = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            piece = self._pieces[token_id]
            if isinstance(piece, bytes):
                self._pending += piece
                out.append(self._decode(final=False))
            elif piece:
                out.append(self._decode(final=True) + piece)
        return "".join(out)

    def flush(self) -> str:
        return self._decode(final=True)

    def _decode(self, *, final: bool) -> str:
        if not self._pending:  # nearly always
            return ""
        text, used = codecs.utf_8_decode(self._pending, "surrogateescape", final)
        self._pending = self._pending[used:]
        return _NO_CHARACTER.sub("\ufffd", text)


class StopStrings:
    """Cuts a stream of text at the first stop string, whatever the chunking. The match that ends
    first wins, then the longest. Text that may begin a match is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=1)
        self._held = ""

    def push(self, delta: str) -> tuple[str, str | None]:
        """(text to emit, the matched stop string or None)."""
        text = self._held + delta
        self._held = ""
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, stop = min(matches)
            return text[:start], stop
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            held = text[start:]
            if any(stop.startswith(held) for stop in self._stops):
                self._held = held
                return text[:start], None
        return text, None

    def flush(self) -> str:
        held = self._held
        self._held = ""
        return held


class TextProcessor:
    """Thread-safe, immutable. `eos_ids` end a reply; `pieces`: the vocabulary; `thinks_by_default`:
    the model thinks unless told."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, tokens: Mapping[str, str], eos: Sequence[int]
    ) -> None:
        self._control = control_ids(tokenizer)
        self._bos_id = self._control.get(tokens.get("bos_token", "<bos>"))
        longest_first = sorted(self._control, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first)))
        self._longest = len(longest_first[0])
        self._tokenizer = as_plain(tokenizer, self._control)
        self.template = template
        self._template = ChatTemplate(template, tokens, self._control) if template is not None else None
        self.thinks_by_default = self._template is not None and self._template.thinks_by_default()
        self.pieces = Pieces.of(tokenizer)
        self.eos_ids = tuple(eos)
        self.vocab_size = len(self.pieces.table)

    @classmethod
    def load(cls, folder: Path, template: Path | None = None) -> Self:
        """CheckpointError: unusable files, ids outside the model, or a control token made by plain
        text."""
        settings = read_optional(folder / "tokenizer_config.json")
        made = cls(read_tokenizer(folder), template_source(folder, template), _named_tokens(settings), read_eos(folder))
        rows = model_vocabulary(folder)
        last = made.vocab_size - 1
        if rows is not None and last >= rows:
            what = f"the tokenizer's highest id is {last} ({made.pieces[last]!r})"
            raise CheckpointError(f"{folder}: {what}, but the model has only {rows} tokens (vocab_size)")
        for (name, control), ids in zip(made._control.items(), made._encoded_all(list(made._control)), strict=True):
            if control in ids:
                raise CheckpointError(f"{folder}: the tokenizer makes the control token {name} of plain text: users could forge it")
        return made

    def render_chat(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] = (),
        add_generation_prompt: bool = True,
        most: int = NO_BOUND,
        media: Sequence[tuple[MediaKind, str]] = (),
        **switches: bool,
    ) -> list[int]:
        """Token ids of a conversation in OpenAI's form, with <bos>. `media`: the text for each.
        InvalidRequest names the field, also for more than `most` tokens."""
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template, only raw prompts", param="messages")
        text, sentinel = self._template.render(messages, tools, add_generation_prompt=add_generation_prompt, **switches)
        return self._tokenize(expanded(text, media) if media else text, "messages", most, sentinel)

    def control_id(self, name: str) -> int | None:
        return self._control.get(name)

    def encode(self, text: str, add_bos: bool, most: int = NO_BOUND) -> list[int]:
        """Token ids of a raw prompt, where control tokens count as such. `add_bos` adds no second
        <bos>."""
        ids = self._tokenize(text, "prompt", most)
        if not add_bos or self._bos_id is None or ids[:1] == [self._bos_id]:
            return ids
        return [self._bos_id, *ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a finished sequence, equal to its stream."""
        stream = Detokenizer(self.pieces, skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def _tokenize(self, text: str, param: str, most: int, sentinel: str = "") -> list[int]:
        ids = []
        for plain, control in self._pieces_of(text):
            if plain:
                ids += self._plain(plain.replace(sentinel, ""), param, most)
            if control:
                ids.append(self._control[control])
            if len(ids) > most:
                raise _too_many(param, most)
        return ids

    def _pieces_of(self, text: str) -> Iterator[tuple[str, str]]:
        """(plain text, the control token after it). Searches are short: each holds the
        interpreter's lock."""
        begun = position = 0
        while position < len(text):
            end = position + _WINDOW
            match = self._cut.search(text, position, end + self._longest)
            if match is None or match.start() >= end:
                position = end
                continue
            yield text[begun : match.start()], match[0]
            begun = position = match.end()
        yield text[begun:], ""

    def _plain(self, text: str, param: str, most: int) -> list[int]:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{param}: not valid Unicode (a lone surrogate)", param=param) from error
        if size > min(_BYTES_A_TOKEN * most, _UNSEEN_BYTES) and self._is_longer(text, most):
            raise _too_many(param, most)
        return self._encoded(text)

    def _is_longer(self, text: str, most: int) -> bool:
        """Judges by pieces, which share few tokens at their boundaries."""
        count = 0
        for begin in range(0, len(text), _WINDOW):
            count += len(self._encoded(text[begin : begin + _WINDOW])) - _SEAM
            if count > most:
                return True
        return False

    def _encoded(self, text: str) -> list[int]:
        return self._encoded_all([text])[0]

    def _encoded_all(self, texts: list[str]) -> list[list[int]]:
        # as a batch, even one text: `encode` holds the interpreter's lock from begin to end, and every stream would wait
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def expanded(text: str, media: Sequence[tuple[MediaKind, str]]) -> str:
    kinds = _PLACEHOLDER.findall(text)
    if kinds != [kind for kind, _ in media]:
        raise InvalidRequest("messages: the chat template has no place for media in one of them", param="messages")
    left = iter(media)
    return _PLACEHOLDER.sub(lambda _: next(left)[1], text)


def _too_many(param: str, most: int) -> InvalidRequest:
    message = f"prompt is too long: more than {most} tokens. This model's maximum context length is exceeded."
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def template_source(folder: Path, instead: Path | None) -> str | None:
    """The text of `instead`, or the checkpoint's template. CheckpointError: unreadable."""
    path = instead or folder / "chat_template.jinja"
    if instead is None and not os.path.lexists(path):
        source = read_optional(folder / "tokenizer_config.json").get("chat_template")
        if not isinstance(source, str | None):
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template is no text")
        return source
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"chat template {path}: {error}") from error


def _named_tokens(settings: JsonObject) -> dict[str, str]:
    """The `*_token` entries, strings or AddedTokens. CheckpointError: another object."""
    named = {}
    for name, value in settings.items():
        if not name.endswith("_token"):
            continue
        if isinstance(value, dict):
            token = value.get("content")
        else:
            token = value
        if isinstance(token, str):
            named[name] = token
        elif isinstance(value, dict):
            raise CheckpointError(f"tokenizer_config.json: {name} is an object without content")
    return named
