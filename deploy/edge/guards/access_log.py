"""Writes one access line and one trace for each request, at its end."""

import asyncio
import json
import logging
import re
import time
from dataclasses import dataclass
from http import HTTPMethod

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.apis import PROBES, endpoint_of, error_shape_of
from deploy.edge.http.scope import BEGAN, RECORD, REQUEST_ID, SEND, only, request_id
from deploy.edge.observe.record import RequestRecord, access_fields
from deploy.edge.serving.service import Service

logger = logging.getLogger(__name__)

_METHODS = set(HTTPMethod)
_PLAIN = re.compile(r"[\w.:/@+,-]*", re.ASCII)


def _plain(value: object) -> str:
    """Quote a value that could be read as several fields."""
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return json.dumps(text)


@dataclass
class AccessLog:
    """Serve puts `x-request-id` on replies."""

    app: ASGIApp
    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = scope.get(BEGAN, time.monotonic())
        deadline = began + self.service.settings.limits.request_timeout_s
        endpoint = endpoint_of(scope)
        if scope["method"] in _METHODS:
            method = scope["method"]
        else:
            method = "OTHER"
        record = RequestRecord(request_id(scope["headers"]), method, endpoint.path, began, deadline, endpoint.operation)
        record.home = only(scope["headers"], b"x-quartet-home")
        record.traceparent = only(scope["headers"], b"traceparent")
        known = REQUEST_ID.set(record.id)
        try:
            await self.app({**scope, RECORD: record, SEND: send}, receive, self._stamped(record, scope, send))
        except (ClientDisconnect, asyncio.CancelledError):
            record.gone = True
            raise
        finally:
            self.service.settle(record)
            record.ended = time.monotonic()
            self._close(record)
            REQUEST_ID.reset(known)

    def _stamped(self, record: RequestRecord, scope: Scope, send: Send) -> Send:
        ids = [(name, record.id.encode()) for name in error_shape_of(scope).id_headers if name != b"x-request-id"]

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        return stamped

    def _close(self, record: RequestRecord) -> None:
        if self.service.tracer is not None and record.operation is not None:
            record.trace_id = self.service.tracer.trace(record)
        level = logging.ERROR if record.failed else logging.DEBUG if record.route in PROBES else logging.INFO
        logs = self.service.settings.logs
        if (logs.access or level >= logging.ERROR) and logger.isEnabledFor(level):
            fields = access_fields(record)
            if logs.format == "text":
                detail = "".join(f" {name}={_plain(value)}" for name, value in fields.items())
            else:
                detail = ""
            fields |= {"request_id": record.id, "http_method": record.method, "http_route": record.route}
            logger.log(level, "%s %s%s", record.method, record.route, detail, extra=fields)
