"""A checkpoint's vocabulary: the text of each token id, control tokens, and end ids."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import AddedToken, Tokenizer

from engine.checkpoint import generation_config, read_optional, token_ids
from engine.errors import CheckpointError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL_SHAPE = re.compile(r"<\|.+>|<.+\|>", re.DOTALL)
_DECODERS = ["Replace", "ByteFallback", "Fuse"]


@dataclass(frozen=True)
class Pieces:
    """Per id its text, or one byte. `special`: control tokens."""

    table: tuple[str | bytes, ...]
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """CheckpointError for a decoder chain other than Gemma's."""
        space = _space_symbol(tokenizer)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        table: list[str | bytes] = [""] * (max(vocab.values(), default=-1) + 1)
        for piece, number in vocab.items():
            byte = _BYTE_PIECE.fullmatch(piece)
            table[number] = bytes.fromhex(byte[1]) if byte else piece.replace(space, " ")
        return cls(tuple(table), frozenset(control_ids(tokenizer).values()))

    def bytes_of(self, token_id: int) -> bytes:
        """A byte piece need not be valid UTF-8."""
        piece = self[token_id]
        if isinstance(piece, bytes):
            return piece
        return piece.encode()

    def __getitem__(self, token_id: int) -> str | bytes:
        if 0 <= token_id < len(self.table):
            return self.table[token_id]
        return "\ufffd"


def read_tokenizer(folder: Path) -> Tokenizer:
    """CheckpointError: absent or unreadable."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; Quartet needs the fast tokenizer's tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise CheckpointError(f"{path}: {error}") from error


def control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Control tokens by name: added special tokens, and those of their form (<|x>, <x|>, <|x|>)."""
    added = tokenizer.get_added_tokens_decoder().items()
    control = {t.content: number for number, t in added if t.special or _CONTROL_SHAPE.fullmatch(t.content)}
    if not control or min(map(len, control)) == 1:
        raise CheckpointError("tokenizer.json: no special tokens, or one of a single character")
    return control


def as_plain(tokenizer: Tokenizer, control: Mapping[str, int]) -> Tokenizer:
    """Reads control tokens as plain text; texts must be cut at them before."""
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _space_symbol(tokenizer: Tokenizer) -> str:
    """Checks that `Detokenizer` implements the decoder chain."""
    if tokenizer.decoder:
        state = json.loads(tokenizer.decoder.__getstate__())
    else:
        state = {}
    chain = state.get("decoders", [])
    if [step.get("type") for step in chain] == _DECODERS:
        replace = chain[0]
    else:
        replace = {}
    if replace.get("content") != " ":
        raise CheckpointError(f"tokenizer.json: decoder is not Gemma's Replace, ByteFallback, Fuse: {state}")
    symbol: str = replace["pattern"]["String"]
    return symbol


def read_eos(folder: Path) -> tuple[int, ...]:
    """The ids that end a reply, perhaps none. CheckpointError: outside the vocabulary."""
    config = read_optional(folder / "config.json")
    for source in (generation_config(folder), config, config.get("text_config") or {}):
        if ids := token_ids(folder, "eos_token_id", source.get("eos_token_id")):
            return ids
    return ()
