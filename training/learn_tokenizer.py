"""Learns the nano tokenizer: `python -m training.learn_tokenizer` writes it where the trained models keep theirs.

The merges are learned by the plain algorithm from `corpus.py`. Another vocabulary needs all members trained again.
"""

import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from deploy.models.nano import TRAINED
from tests.nano.nano_tokenizer import BYTE_IDS, CONTROL_IDS, SPECIAL_IDS, VOCAB_SIZE
from training.corpus import COMMON_WEIGHT, EXERCISES, EXERCISES_WEIGHT, PROSE, WORDS

NEWLINE_ID = 107
SPACE = "\u2581"

_NAMED_TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "soc_token": "<|channel>",
    "eoc_token": "<channel|>",
    "stc_token": "<|tool_call>",
    "etc_token": "<tool_call|>",
    "std_token": "<|tool>",
    "etd_token": "<tool|>",
    "str_token": "<|tool_response>",
    "etr_token": "<tool_response|>",
    "escape_token": '<|"|>',
    "think_token": "<|think|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}

_Pair = tuple[str, str]


def write(out: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `out`."""
    _dump(out / "tokenizer.json", _tokenizer_json())
    settings = {"model_max_length": 1 << 30, "padding_side": "left", "tokenizer_class": "GemmaTokenizer"}
    _dump(out / "tokenizer_config.json", _NAMED_TOKENS | settings)


@cache
def vocabulary() -> tuple[dict[str, int], tuple[_Pair, ...]]:
    """Piece -> id for all 1024 ids, and the merges in order of rank."""
    vocab = SPECIAL_IDS | BYTE_IDS | {"\n": NEWLINE_ID}
    taken = set(vocab.values())
    free = [number for number in range(VOCAB_SIZE) if number not in taken]
    words = _words()
    alphabet = sorted({SPACE, *map(chr, range(33, 127))} | set().union(*words) - {"\n"})
    merges, pieces = _learn(words, alphabet, len(free))
    return vocab | dict(zip(pieces, free, strict=True)), tuple(merges)


def _words() -> Counter[tuple[str, ...]]:
    """Training words, a leading space included; a capital begins a word, and letters merge with letters only."""
    found = Counter()
    cut = re.compile(rf"{SPACE}?[A-Z]?[a-z]+|{SPACE}?[A-Z]|[0-9]|\n+|{SPACE}+|[^A-Za-z0-9{SPACE}\n]+")
    texts = ((PROSE, 1), (" ".join(EXERCISES.split()), EXERCISES_WEIGHT), (" " + " ".join(WORDS.split()), COMMON_WEIGHT))
    for text, weight in texts:
        for word in cut.findall(text.replace(" ", SPACE)):
            found[tuple(word)] += weight
    return found


def _learn(words: Counter[tuple[str, ...]], alphabet: list[str], room: int) -> tuple[list[_Pair], list[str]]:
    """Byte-pair merges, most frequent first (ties by the pair's own order), until `room` pieces exist."""
    merges = []
    pieces = dict.fromkeys(alphabet)
    while len(pieces) < room:
        counts = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        pieces["".join(best)] = None
        words = Counter({_merged(word, best): count for word, count in words.items()})
    return merges, list(pieces)


def _merged(word: tuple[str, ...], pair: _Pair) -> tuple[str, ...]:
    """`word` with each occurrence of `pair`, from the left, joined."""
    joined = []
    for piece in word:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return tuple(joined)


def _tokenizer_json() -> dict[str, Any]:
    vocab, merges = vocabulary()
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(name, SPECIAL_IDS[name]) for name in sorted(SPECIAL_IDS, key=SPECIAL_IDS.__getitem__)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [CONTROL_IDS["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": [list(pair) for pair in merges],
        },
    }


def _added(name: str, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": name, **flags}


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(TRAINED / "31b")
