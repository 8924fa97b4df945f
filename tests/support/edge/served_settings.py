"""Settings of a served model for tests that say only what they are about."""

from typing import Any

from deploy.edge.edge_settings import LimitSettings, LogSettings, MediaSettings
from deploy.edge.service_settings import Defaults, ServiceSettings


def service_settings(name: str, vocab: int, max_len: int, **changes: Any) -> ServiceSettings:
    """Those of a model that reads texts, without bounds on what is let in."""
    others = {
        "defaults": Defaults(),
        "limits": LimitSettings(),
        "media": MediaSettings(),
        "media_kinds": frozenset(),
        "row_samples": 0,
        "logs": LogSettings(),
        "max_tokens": None,
        "capacity": 1 << 20,
        "queue_tokens": 1 << 30,
        "fingerprint": "fp_0",
        "weight_format": "fp8",
        "tool_grammar": "strict",
        "thinking": "auto",
    }
    return ServiceSettings((name,), (), vocab, max_len, **others | changes)  # type: ignore[arg-type]
