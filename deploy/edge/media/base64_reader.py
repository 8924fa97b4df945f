"""Base64 as clients send it."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from engine.errors import InvalidRequest

_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def unbase64(source: bytes) -> bytes:
    """Either alphabet, padded or not, in lines or percent-encoded. InvalidRequest: damaged."""
    text = unquote_to_bytes(source) if b"%" in source else source
    text = text.translate(_URL_SAFE, b" \t\n\f\r").rstrip(b"=")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise InvalidRequest("its base64 is damaged") from None
