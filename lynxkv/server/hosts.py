"""Which hosts a server is asked for: a page whose name was made to lead to this machine shall not reach it."""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lynxkv.server.problems import Refusal
from lynxkv.server.responses import refused


def is_loopback(host: str) -> bool:
    """Whether this is a name or an address of this machine alone."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class OwnHosts:
    """An application that, listening on loopback, answers only who asks for loopback (DNS rebinding)."""

    def __init__(self, app: ASGIApp, *, loopback: bool) -> None:
        self._app, self._loopback = app, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with 421."""
        if scope["type"] == "http" and self._loopback and not is_loopback(_host(scope)):
            response = refused(Refusal("this server is asked for by another name", status=421, code="misdirected"))
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host(scope: Scope) -> str:
    """The host that a request asks for, without its port."""
    host = Headers(scope=scope).get("host", "")
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host
