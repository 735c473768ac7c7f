"""Around every request: an id, a line in the log, and its count."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lynxkv.server.metrics import Metrics

LOG = logging.getLogger("lynxkv.server")
_REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
NOTES = "lynxkv.notes"
"""Where in its scope a request's notes for the log are."""


class Observed:
    """An application whose requests are logged and counted."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        notes: dict[str, Any] = {}
        scope[NOTES] = notes
        began, status = time.perf_counter(), 499

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.request(route, status)
            seconds = round(time.perf_counter() - began, 6)
            head = {"request": request_id, "method": scope["method"], "path": scope["path"][:200], "status": status}
            level = logging.DEBUG if route in ("/health", "/ready", "/metrics") else logging.INFO
            LOG.log(level, "request", extra={"fields": {**head, "seconds": seconds, **notes}})


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level and message, with the fields of the record and a traceback if it has one."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(*, quiet: bool) -> None:
    """Send the server's log to stderr; only warnings and errors if `quiet`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("lynxkv.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if quiet or name != "lynxkv.server" else logging.INFO)
