"""Logs of a replica: how our lines reach Ray Serve's log file, as text or JSON, with the id of their request.

    deploy.* cluster.* engine.* dashboards.* opentelemetry.* --Forward--> ray.serve  --Serve's handler-->  logs/serve/replica_*.log

Serve writes, rotates and, with `encoding: JSON`, encodes, so an operator has one file a replica and one schema. A line carries the
client's `x-request-id` if it is well-formed, else our own id. Nothing else that a client wrote is in a line: no prompt, answer,
header, path, or name of a model that is not served.
"""

import logging
import re
from typing import Any

from deploy.edge.edge_settings import LogSettings
from deploy.edge.scope import REQUEST_ID

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PACKAGES = ("cluster", "dashboards", "deploy", "engine", "opentelemetry")


def serve_config(settings: LogSettings) -> dict[str, Any] | None:
    """Serve's `logging_config` for our deployment; None leaves it to Serve and to the YAML."""
    if settings.format == "text" and settings.folder is None and settings.level == "info":
        return None
    config: dict[str, Any] = {"encoding": settings.format.upper(), "log_level": settings.level.upper()}
    if settings.format == "json":
        config["enable_access_log"] = not settings.access  # one line a request, not two
    if settings.folder is not None:
        config["logs_dir"] = settings.folder
    return config


def install(settings: LogSettings) -> None:
    """Sends the logs of our packages to Serve's logger. A second call changes the level."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(settings.level.upper())
        logger.propagate = False  # the root's handler would say it twice
        logger.addHandler(_FORWARD)  # which it has once


class ForwardHandler(logging.Handler):
    """Hands records to the handlers of Serve's logger, one line each, with the id of their request."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg = one_line(record.getMessage())
        record.args = None
        known = REQUEST_ID.get()
        if known and not hasattr(record, "request_id"):
            record.request_id = known
        logging.getLogger("ray.serve").handle(record)


_FORWARD = ForwardHandler()


def one_line(text: str) -> str:
    """`text` with every control character and line separator escaped, so that it stays on one line."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
