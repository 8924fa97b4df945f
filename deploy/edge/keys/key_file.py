"""A file of API keys: one line each, with the key's hash.

    3c9b5f...e1  alice   rights=generate  models=large,small  requests=60  tokens=100000  expires=2027-01-01   # a comment

The SHA-256 of the key in hex, the name of its holder, and options in any order. A missing option means no limit. Two lines of one
name are two keys of one holder with one quota, so a key can be replaced. They may differ in `expires` only.

    rights       some of RIGHTS and ADMIN_RIGHTS; all RIGHTS without the option
    models       names that a request's `model` may be, of models and adapters; all without the option
    requests     a minute, at all replicas together; tokens: a minute, of prompts and answers; concurrent: open requests
    expires      a day or a time by ISO 8601, in UTC without a zone. From then on the key is refused
"""

import os
import re
import secrets
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from deploy.edge.edge_settings import KeySettings
from engine.errors import ConfigError
from engine.protocol import FrozenStruct

RIGHTS = ("generate", "tokenize", "models", "docs")
ADMIN_RIGHTS = ("adapters",)  # only of keys that name them
MAX_KEYS = 1024
MAX_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Quota(FrozenStruct):
    """Requests and tokens a minute, and open requests; None: no limit."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None


class ApiKey(FrozenStruct):
    digest: bytes
    name: str
    rights: frozenset[str]
    quota: Quota
    expires: datetime | None
    models: frozenset[str] | None = None

    def has_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


def new_key() -> str:
    return f"sk-quartet-{secrets.token_urlsafe(32)}"


def digest_of(key: bytes) -> bytes:
    return sha256(key).digest()


def read(settings: KeySettings) -> str:
    """The keys' text. ConfigError. Blocks."""
    if settings.variable:
        lines = os.environ.get(settings.variable)
        if lines is None:
            raise ConfigError(f"keys.variable: {settings.variable} is not set in the environment of this process")
        return lines
    assert settings.file is not None
    try:
        with Path(settings.file).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"keys.file: {settings.file}: more than {MAX_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"keys.file: {settings.file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"keys.file: {settings.file}: not UTF-8") from error


def parse(text: str) -> tuple[ApiKey, ...]:
    """ConfigError names line and fault, and quotes nothing: a line may hold a key by mistake."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            keys.append(_key(words))
            _check_holder(keys)
        except ConfigError as error:
            raise ConfigError(f"keys: line {number}: {error}") from error
    return tuple(keys)


def _key(words: list[str]) -> ApiKey:
    if not _DIGEST.fullmatch(words[0]):
        raise ConfigError("begins with no SHA-256 (64 digits of 0-9a-f); `quartet key new` makes a line")
    if len(words) < 2 or not NAME.fullmatch(words[1]):
        raise ConfigError("the second word is no name: 1 to 64 of A-Z a-z 0-9 . _ -")
    options = dict(word.partition("=")[::2] for word in words[2:])
    if len(options) < len(words) - 2:
        raise ConfigError("an option stands there twice")
    rights = frozenset(options.pop("rights", ",".join(RIGHTS)).split(","))
    if not rights.issubset(RIGHTS + ADMIN_RIGHTS):
        raise ConfigError(f"rights: only {', '.join(RIGHTS + ADMIN_RIGHTS)}")
    quota = Quota(**{name: _count(name, options.pop(name)) for name in Quota.__struct_fields__ if name in options})
    expires = time_of(options.pop("expires", None))
    models = _models(options.pop("models", None))
    if options:
        raise ConfigError(f"an option is not one of rights, models, {', '.join(Quota.__struct_fields__)}, expires")
    return ApiKey(bytes.fromhex(words[0]), words[1], rights, quota, expires, models)


def _models(value: str | None) -> frozenset[str] | None:
    """The names in a list with commas. ConfigError: one is empty."""
    if value is None:
        return None
    names = frozenset(value.split(","))
    if "" in names:
        raise ConfigError("models: expected names with commas between them")
    return names


def time_of(value: str | None) -> datetime | None:
    """ConfigError unless it is ISO 8601."""
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise ConfigError("expires: neither a day nor a time as in 2027-01-01 or 2027-01-01T12:00:00Z") from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 13 and 1 <= int(value) <= 10**12):
        raise ConfigError(f"{name}: no count from 1 to 10^12")
    return int(value)


def _check_holder(keys: list[ApiKey]) -> None:
    """ConfigError unless the last key agrees with its holder's earlier ones."""
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"more than {MAX_KEYS} keys")
    *before, last = keys
    for other in before:
        if other.digest == last.digest:
            raise ConfigError("the same key as on a line before")
        if other.name == last.name and (other.rights, other.models, other.quota) != (last.rights, last.models, last.quota):
            raise ConfigError(f"{last.name} has other rights, models or limits on a line before")
