"""The HTTP application: its routes, and what is answered when a request gets no answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lynxkv.server.fields import parse
from lynxkv.server.hosts import OwnHosts, is_loopback
from lynxkv.server.keys import Caller
from lynxkv.server.observing import NOTES, Observed
from lynxkv.server.openapi import openapi
from lynxkv.server.outcome import Answer
from lynxkv.server.page import page_response
from lynxkv.server.problems import Refusal, refusal_of
from lynxkv.server.requests import Kind, read_request
from lynxkv.server.responses import json_response, refused
from lynxkv.server.service import Service
from lynxkv.server.streams import ClientGoneError, EventStream, Running, until_gone

LOG = logging.getLogger("lynxkv.server")
BODY_S = 30.0
# What nginx logs for a client that left; nobody gets to see it.
CLIENT_GONE = 499
# The name of the key that may read the metrics.
METRICS_KEY = "metrics"


def create_app(service: Service) -> ASGIApp:
    """The application that answers with `service`, and starts and closes it."""
    api = Api(service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.close()

    routes = routes_of(api)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(OwnHosts, loopback=is_loopback(service.options.host))],
        exception_handlers={Exception: _failed, HTTPException: _no_route},
        lifespan=lifespan,
    )
    return Observed(app, service.metrics, frozenset(route.path for route in routes))


def routes_of(api: Api) -> list[Route]:
    """What is answered, and by what."""
    return [
        Route("/", api.page),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/metrics", api.metrics),
        Route("/openapi.json", api.openapi),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/lynx/caches", api.caches),
    ]


class Api:
    """What the routes lead to."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def page(self, request: Request) -> Response:
        """`GET /`: ask, and watch."""
        return page_response()

    async def health(self, request: Request) -> Response:
        """`GET /health`: the process is there."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: requests will be taken."""
        service = self.service
        body = {"ready": service.ready, "caches": len(service.catalog.entries), "catalog_age_s": service.catalog.age_s}
        return json_response(body, 200 if service.ready else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for the key of that name where there are keys: totals tell what other keys do."""
        try:
            caller = self._caller(request)
            if self.service.keys.wanted and caller.name != METRICS_KEY:
                raise Refusal(f"metrics are for the key {METRICS_KEY}", status=403, code="forbidden")
        except Refusal as refusal:
            return refused(refusal)
        return Response(self.service.metrics.page(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return self._told(request, lambda caller: openapi(self.service.model_name, self.service.options))

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return self._told(request, lambda caller: {"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""

        def model(caller: Caller) -> dict[str, Any]:
            self.service.check_model(request.path_params["name"])
            return self._model()

        return self._told(request, model)

    async def caches(self, request: Request) -> Response:
        """`GET /v1/lynx/caches`: the caches that the caller may use, as they were when the store was last listed."""

        def caches(caller: Caller) -> dict[str, Any]:
            entries = self.service.caches(caller)
            return {"object": "list", "data": [{"name": entry.name, "tokens": entry.tokens} for entry in entries]}

        return self._told(request, caches)

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer("completion", request)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer("chat", request)

    async def _answer(self, kind: Kind, request: Request) -> Response:
        service, options = self.service, self.service.options
        settled, failed = partial(_note_answer, request), partial(self._failed, request)
        try:
            caller = self._caller(request)
            body = await read_body(request, options.max_body_bytes)
            ask = read_request(kind, parse(body), max_new_tokens=options.max_new_tokens)
            service.check_model(ask.model)
            if not ask.stream:
                answer = await until_gone(request.receive, service.answer(ask, caller, lambda event: None))
                settled(answer)
                return json_response(service.form(ask).whole(answer))
            running = Running(service, ask, caller, settled=settled, refused=failed)
            try:
                return EventStream(await until_gone(request.receive, running.first()), running)
            except BaseException:
                await running.stop()
                raise
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return refused(failed(error))

    def _told(self, request: Request, work: Callable[[Caller], dict[str, Any]]) -> Response:
        """A response that takes no time to find."""
        try:
            return json_response(work(self._caller(request)))
        except Refusal as refusal:
            return refused(refusal)

    def _caller(self, request: Request) -> Caller:
        caller = self.service.keys.caller(request.headers.get("authorization"))
        request.scope[NOTES]["key"] = caller.name
        return caller

    def _failed(self, request: Request, error: Exception) -> Refusal:
        """Why a request gets no answer; what nobody has foreseen is logged whole."""
        refusal = refusal_of(error)
        self.service.metrics.failure(refusal.code or "")
        request.scope[NOTES]["code"] = refusal.code
        if refusal.status == 500:
            LOG.error("a request failed", exc_info=error)
        return refusal

    def _model(self) -> dict[str, Any]:
        service = self.service
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "lynxkv",
            "lynx": {"max_new_tokens": service.options.max_new_tokens},
        }


def _note_answer(request: Request, answer: Answer) -> None:
    """Keep for the log where an answer came from, and its figures."""
    result = answer.result
    request.scope[NOTES].update(
        source=answer.source,
        cache=answer.cache,
        load_failure=answer.load_failure,
        together=answer.together,
        cached_tokens=answer.cached_tokens,
        prompt_tokens=answer.prompt_tokens,
        new_tokens=len(result.token_ids),
        drafted=result.drafted,
        accepted=result.accepted,
        first_draft_s=result.first_draft_s,
        first_verified_s=result.first_verified_s,
    )


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


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = refused(Refusal(message, status=error.status_code, code="not_found"))
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    return refused(refusal_of(error))
