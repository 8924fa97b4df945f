"""Sends our log lines to the replica's log file of Ray Serve, with their request's id. A line holds
nothing that a client wrote except a well-formed `x-request-id`."""

import logging
import re
from typing import Any

from deploy.edge.edge_settings import LogSettings
from deploy.edge.http.scope import REQUEST_ID

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PACKAGES = ("cluster", "dashboards", "deploy", "engine", "opentelemetry")


def serve_config(settings: LogSettings) -> dict[str, Any] | None:
    """Serve's `logging_config` for our deployment; None leaves it to the YAML."""
    if settings.format == "text" and settings.folder is None and settings.level == "info":
        return None
    config: dict[str, Any] = {"encoding": settings.format.upper(), "log_level": settings.level.upper()}
    if settings.format == "json":
        config["enable_access_log"] = not settings.access  # one line a request, not two
    if settings.folder is not None:
        config["logs_dir"] = settings.folder
    return config


def install(settings: LogSettings) -> None:
    """A second call changes the level."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(settings.level.upper())
        logger.propagate = False  # the root's handler would say it twice
        logger.addHandler(_FORWARD)  # which it has once


class ForwardHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        record.msg = one_line(record.getMessage())
        record.args = None
        known = REQUEST_ID.get()
        if known and not hasattr(record, "request_id"):
            record.request_id = known
        logging.getLogger("ray.serve").handle(record)


_FORWARD = ForwardHandler()


def one_line(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
