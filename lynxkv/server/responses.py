"""Responses in JSON."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from lynxkv.server.answers import to_json
from lynxkv.server.problems import Refusal


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response in JSON."""
    return Response(to_json(content), status_code=status, headers=headers, media_type="application/json")


def refused(refusal: Refusal) -> Response:
    """The response of a request that gets no answer."""
    return json_response(refusal.body, refusal.status, refusal.headers)
