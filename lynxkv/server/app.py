"""The HTTP application: its routes, and what is answered when a request gets no answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lynxkv.server.answers import Form, to_json
from lynxkv.server.fields import parse
from lynxkv.server.problems import Refusal, refusal_of
from lynxkv.server.requests import Kind, read_request
from lynxkv.server.service import Service
from lynxkv.server.streams import ClientGoneError, EventStream, Running, until_gone

LOG = logging.getLogger("lynxkv.server")
BODY_S = 30.0
# What nginx logs for a client that left; nobody gets to see it.
CLIENT_GONE = 499


def create_app(service: Service) -> Starlette:
    """The application that answers with `service`, and closes it when it is shut down."""
    api = Api(service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    return Starlette(
        routes=[
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
        ],
        exception_handlers={Exception: _failed, HTTPException: _no_route},
        lifespan=lifespan,
    )


class Api:
    """What the routes lead to."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        try:
            self.service.check_model(request.path_params["name"])
        except Refusal as refusal:
            return refused(refusal)
        return json_response(self._model())

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer("completion", request)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer("chat", request)

    async def _answer(self, kind: Kind, request: Request) -> Response:
        options = self.service.options
        try:
            body = await read_body(request, options.max_body_bytes)
            ask = read_request(kind, parse(body), max_new_tokens=options.max_new_tokens)
            self.service.check_model(ask.model)
            if not ask.stream:
                work = self.service.answer(ask, "anybody", lambda event: None)
                answer = await until_gone(request.receive, work)
                return json_response(Form(kind=kind, model=ask.model).whole(answer))
            running = Running(self.service, ask, "anybody")
            try:
                return EventStream(await until_gone(request.receive, running.first()), running)
            except BaseException:
                await running.stop()
                raise
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == 500:
                LOG.exception("a request failed")
            return refused(refusal)

    def _model(self) -> dict[str, Any]:
        service = self.service
        return {"id": service.model_name, "object": "model", "created": service.started_s, "owned_by": "lynxkv"}


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request that says it is JSON.

    Raises:
        Refusal: it says something else, as a web page can without asking; it is too large, or does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal("the content type is not application/json", status=415, code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise Refusal(f"the body has more than {most} bytes", status=413, code="request_too_large")
    except TimeoutError as error:
        raise Refusal(f"the body did not come within {BODY_S:g} s", status=408, code="timeout") from error
    return bytes(body)


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response in JSON."""
    return Response(to_json(content), status_code=status, headers=headers, media_type="application/json")


def refused(refusal: Refusal) -> Response:
    """The response of a request that gets no answer."""
    return json_response(refusal.body, refusal.status, refusal.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = refused(Refusal(message, status=error.status_code, code="not_found"))
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return refused(refusal_of(error))
