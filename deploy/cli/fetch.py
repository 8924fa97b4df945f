"""HTTP for commands: where an address leads, and a client that goes there."""

import os
from urllib.parse import urlsplit

import httpx

from deploy.load.request import own
from engine.errors import ConfigError


def base_of(url: str) -> str:
    """`url` without a slash, `/v1` or a path of the API at its end. ConfigError: it is no http address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address: http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    for end in ("/chat/completions", "/completions", "/v1"):
        path = path.removesuffix(end)
    return f"{parts.scheme}://{parts.netloc}{path}"


def api_key(given: str | None = None) -> str | None:
    """The key for an API: as given, or where OpenAI's clients look for it."""
    return given or os.environ.get("OPENAI_API_KEY")


def get(url: str, timeout_s: float = 5.0, key: str | None = None) -> httpx.Response:
    """One GET. ConfigError of one line when nobody answers, or not with 200."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(timeout=timeout_s, trust_env=not own(url), headers=headers) as client:
            reply = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url} does not answer: {error or type(error).__name__}") from error
    if reply.status_code != httpx.codes.OK:
        raise ConfigError(f"{url} answers {reply.status_code}: {' '.join(reply.text.split())[:200]}")
    return reply
