"""A server process: its socket, and how it stops."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from lynxkv.errors import InputError
from lynxkv.server.options import ServeOptions

# Open connections, idle ones included; more get 503 at once.
CONNECTIONS = 1024


def listen(options: ServeOptions) -> socket.socket:
    """A socket that listens where the options say.

    Raises:
        InputError: it cannot.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}",
            hint="give another --port, or --port 0 for a free one",
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves an application; calls `ready` once it answers."""

    def __init__(self, app: ASGIApp, options: ServeOptions, ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=max(1, round(options.drain_s)),
        )
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, and the call of `ready`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    def run_until_stopped(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT: then no connection is taken, and what runs is finished."""
        # uvicorn sends itself the signal again once it has stopped, with the handlers of before: it has had its effect.
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run([listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
