"""A file of API keys, a list in YAML, with a key's hash in each entry.

    - {sha256: 3c9b5f...e1, name: alice, rights: [generate], models: [large, small], requests: 60, expires: 2027-01-01}  # laptop

Entries of one name are keys of one holder with one quota, so a key can be replaced. They may differ
in `expires` only.
"""

import os
import re
import secrets
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from deploy.edge.bodies.unique_keys import UniqueKeys
from deploy.edge.edge_settings import KeySettings
from engine.errors import ConfigError
from engine.protocol import FrozenStruct

KeyRight = Literal["generate", "tokenize", "models", "docs", "adapters"]
RIGHTS: tuple[KeyRight, ...] = ("generate", "tokenize", "models", "docs")
ADMIN_RIGHTS: tuple[KeyRight, ...] = ("adapters",)  # only of keys that name them
MAX_KEYS = 1024
MAX_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_Count = Annotated[int, Meta(ge=1, le=10**12)] | None


class KeyEntry(FrozenStruct, forbid_unknown_fields=True):
    """`models`: allowed values of a request's `model`. `requests`, `tokens`: per minute, at all
    replicas together. `expires`: ISO 8601, in UTC without a zone."""

    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    name: Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]
    rights: Annotated[frozenset[KeyRight], Meta(min_length=1)] = frozenset(RIGHTS)
    models: Annotated[frozenset[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    requests: _Count = None
    tokens: _Count = None
    concurrent: _Count = None
    expires: str | None = None


class Quota(FrozenStruct):
    """Per minute, except `concurrent`. None: no limit."""

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
    """ConfigError. Blocks."""
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


class _Loader(UniqueKeys, yaml.BaseLoader):
    """Leaves scalars texts: a name may be 007."""


def parse(text: str) -> tuple[ApiKey, ...]:
    """ConfigError names entry and fault, and quotes nothing: an entry may hold a key by mistake."""
    try:
        entries = _Loader(text).get_single_data() or []
    except (yaml.YAMLError, RecursionError):
        raise ConfigError("keys: not YAML, or an option stands twice in an entry") from None
    if not isinstance(entries, list):
        raise ConfigError("keys: expected a list of entries; `quartet key new` makes one")
    keys = list[ApiKey]()
    for number, entry in enumerate(entries, 1):
        try:
            keys.append(_key(entry))
            _check_holder(keys)
        except ConfigError as error:
            raise ConfigError(f"keys: entry {number}: {error}") from None
    return tuple(keys)


def _key(value: Any) -> ApiKey:
    try:
        entry = msgspec.convert(value, KeyEntry, strict=False)
    except msgspec.ValidationError as error:
        if str(error).startswith(("Expected", "Object missing")):  # which quote nothing
            raise ConfigError(str(error)) from None
        options = ", ".join(KeyEntry.__struct_fields__)
        raise ConfigError(f"its options are {options}; its rights are of {', '.join(RIGHTS + ADMIN_RIGHTS)}") from None
    quota = Quota(entry.requests, entry.tokens, entry.concurrent)
    return ApiKey(bytes.fromhex(entry.sha256), entry.name, entry.rights, quota, time_of(entry.expires), entry.models)


def time_of(value: str | None) -> datetime | None:
    """ConfigError unless it is ISO 8601."""
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise ConfigError("expires: neither a day nor a time as in 2027-01-01 or 2027-01-01T12:00:00Z") from error
    if moment.tzinfo is not None:
        return moment
    return moment.replace(tzinfo=UTC)


def _check_holder(keys: list[ApiKey]) -> None:
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"more than {MAX_KEYS} keys")
    *before, last = keys
    for other in before:
        if other.digest == last.digest:
            raise ConfigError("the same key as in an entry before")
        if other.name == last.name and (other.rights, other.models, other.quota) != (last.rights, last.models, last.quota):
            raise ConfigError(f"{last.name} has other rights, models or limits in an entry before")
