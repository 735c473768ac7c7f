"""The page at `/`: one file, which loads nothing and may run nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import Response

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets it run as it is."""
    text = files("lynxkv.server").joinpath("page.html").read_text("utf-8")
    allowed = {kind: _source(content) for kind, content in _INLINE.findall(text)}
    # Bars of the time line are placed by script, which a style policy does not forbid.
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _source(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def page_response() -> Response:
    """The page, for a browser."""
    body, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(body, headers=headers, media_type="text/html")
