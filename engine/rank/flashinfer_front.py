"""Whether FlashInfer takes our arguments."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from engine.errors import ConfigError


def check_arguments(setting: str, version: str, call: Callable[..., Any], names: Iterable[str]) -> None:
    """ConfigError names what `call` lacks."""
    missing = set(names) - set(inspect.signature(call).parameters)
    if missing:
        raise ConfigError(f"{setting}: FlashInfer {version}: {call.__name__} has no {', '.join(sorted(missing))}")
