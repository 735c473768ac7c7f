"""Marks on packets (DSCP), by which a network that heeds them takes the Anchor's before the Residual's."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache
from typing import Any

# RFC 4594: low-latency data, AF21. RFC 8622: less effort than any other traffic, LE. Each in the upper six bits of the
# byte that once was the type of service.
ANCHOR_TOS = 18 << 2
RESIDUAL_TOS = 1 << 2


@cache
def marked_sockets(tos: int) -> Callable[[Any], socket.socket]:
    """What aiohttp makes sockets with, whose packets carry `tos`; the same object for the same mark."""

    def make(address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
        else:
            made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        return made

    return make


@cache
def marked_client(tos: int) -> Callable[..., Any]:
    """What fsspec's HTTP makes its sessions with."""

    async def make(**settings: Any) -> Any:
        import aiohttp

        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=marked_sockets(tos)), **settings)

    return make
