"""The nano tokenizer: a byte-fallback BPE of 1024 pieces in the layout of Gemma's tokenizer.json, kept with the trained models.

Gemma 4's control tokens keep their names, and their true ids where those fit (0..107); the image, audio and video
tokens, whose true ids are near 256000, close the vocabulary in their true order:
    ids 0..107   control tokens at their true places, "\\n" at 107, ordinary pieces in the gaps
        108..    ordinary pieces;  238..493 the bytes <0x00>..<0xFF>;  1017..1023 media tokens
Any text round-trips exactly: a space is U+2581, nothing is prefixed, and characters outside the vocabulary become
bytes. (A U+2581 in the text itself comes back as a space, as with Gemma's own tokenizer.)
"""

VOCAB_SIZE = 1024
FIRST_BYTE_ID = 238
EOS_IDS = (1, 106, 50)

CONTROL_IDS: dict[str, int] = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<mask>": 4,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
}
_MEDIA = ("<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>")
MEDIA_IDS: dict[str, int] = {name: VOCAB_SIZE - len(_MEDIA) + place for place, name in enumerate(_MEDIA)}
SPECIAL_IDS: dict[str, int] = CONTROL_IDS | MEDIA_IDS
BYTE_IDS: dict[str, int] = {f"<0x{byte:02X}>": FIRST_BYTE_ID + byte for byte in range(256)}


def never_emitted_ids() -> list[int]:
    """Ids that a random model should rarely say: the bytes, and the control tokens that do not end a reply."""
    return sorted(set(BYTE_IDS.values()) | set(SPECIAL_IDS.values()) - set(EOS_IDS))
