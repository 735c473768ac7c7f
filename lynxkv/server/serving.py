"""A server process: its socket, and how it stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lynxkv.errors import InputError
from lynxkv.server.options import ServeOptions

# Open connections, idle ones included; more are closed at once.
CONNECTIONS = 512
# Threads that a store still holds up when running requests may take no longer, or have all ended, are left behind after
# this.
LEAVE_S = 2.0
# What a client may take to send the head of a request.
HEAD_S = 10.0


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


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, for a bounded number of connections, whose heads have to come in time.

    uvicorn bounds how large a head may be, and how long a connection may be idle between requests.
    """

    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a head."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.close()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, perhaps all of its head."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._too_late is None:
            self._too_late = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_watching(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
        self._too_late = None


class Server(uvicorn.Server):
    """Serves an application; calls `ready` once it answers."""

    def __init__(self, app: ASGIApp, options: ServeOptions, ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(options.drain_s)),
        )
        super().__init__(config)
        self._drain_s = max(options.drain_s, config.timeout_graceful_shutdown or 0)
        self._ready = ready
        self._owns_process = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, and the call of `ready`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own. A process that has nothing else to do ends soon after it, and soon after running requests may
        take no longer, whatever waits for a store.
        """
        self._leave_within(self._drain_s + LEAVE_S)
        await super().shutdown(sockets)
        self._leave_within(LEAVE_S)

    def _leave_within(self, seconds: float) -> None:
        if self._owns_process:
            leaving = threading.Timer(seconds, os._exit, (0,))
            leaving.daemon = True
            leaving.start()

    def run_until_stopped(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT: then no connection is taken, what runs is finished, and the process ends."""
        self._owns_process = True
        # uvicorn sends itself the signal again once it has stopped, with the handlers of before: it has had its effect.
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run([listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
