"""The document at `/openapi.json`: what this server takes and answers, with its own limits."""

from __future__ import annotations

from typing import Any, get_args

from lynxkv._version import __version__
from lynxkv.choices import OnFailure
from lynxkv.sampling import SMALLEST
from lynxkv.server.answers import EVENT_NAMES, FIGURES, SUMMARY
from lynxkv.server.options import ServeOptions
from lynxkv.server.outcome import Source
from lynxkv.server.requests import LABELS, MAX_STOPS, MAX_TOP_LOGPROBS, MOST_TOKENS, NEUTRAL, ROLES

Schema = dict[str, Any]
REFUSALS = {
    400: "The request is wrong, or does not fit; the error's `code` and `param` say more.",
    401: "The API key is missing or wrong.",
    403: "The key may not do that.",
    404: "There is no such model or cache.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    421: "The server is asked for by a name that is not its own.",
    502: "The cache is damaged, or its store does not deliver it.",
    503: "Too much is going on; `Retry-After` says when to ask again.",
    504: "There was no answer within the deadline.",
}
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}


def openapi(model: str, options: ServeOptions) -> Schema:
    """The document of a server with this model and these options."""
    answers = {
        "/v1/completions": _asked("Complete a prompt", "CompletionRequest", "Completion"),
        "/v1/chat/completions": _asked("Answer a chat", "ChatRequest", "Chat"),
    }
    told = {
        "/": _told("The page to ask and watch with", {"text/html": {"schema": TEXT}}, open_to_all=True),
        "/health": _told("The process is there", _json(_object(status=TEXT)), open_to_all=True),
        "/ready": _told(
            "Requests are taken",
            _json(_ref("Ready")),
            {"503": _response("Not yet, or no more", "Ready")},
            open_to_all=True,
        ),
        "/metrics": _told("For Prometheus", {"text/plain": {"schema": TEXT}}, _refusals(403)),
        "/openapi.json": _told("This document", _json({"type": "object"})),
        "/v1/models": _told("The one model", _json(_list_of("Model"))),
        "/v1/models/{name}": _told("A model by name", _json(_ref("Model")), _refusals(404)),
        "/v1/lynx/caches": _told("The caches that the caller may use", _json(_list_of("Cache"))),
    }
    told["/v1/models/{name}"]["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lynxkv serve",
            "version": __version__,
            "description": "Answers from progressive KV caches, in the forms of OpenAI's API.",
        },
        "security": [{}, {"key": []}],
        "paths": {**told, **answers},
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**_requests(model, options), **_answers(), **_others()},
        },
    }


def _requests(model: str, options: ServeOptions) -> dict[str, Schema]:
    tokens = {"type": "integer", "minimum": 1, "maximum": options.max_new_tokens}
    shared = {
        "model": {"const": model},
        "lynx": _or_null(_ref("LynxOptions")),
        "stream": _or_null(FLAG),
        "stream_options": _or_null(
            _object((), include_usage=_or_null(FLAG), include_obfuscation={"enum": [False, None]})
        ),
        "stop": _or_null(
            {
                "anyOf": [
                    {**TEXT, "minLength": 1},
                    {"type": "array", "items": {**TEXT, "minLength": 1}, "maxItems": MAX_STOPS},
                ]
            }
        ),
        "max_tokens": _or_null(tokens),
        "temperature": _or_null({"anyOf": [{"const": 0}, {"type": "number", "minimum": SMALLEST, "maximum": 2}]}),
        "top_p": _or_null({"type": "number", "minimum": SMALLEST, "maximum": 1}),
        "seed": _or_null({"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}),
        **{name: {"enum": [None, *values]} for name, values in NEUTRAL.items()},
        **{name: {"description": "Has no effect."} for name in LABELS},
    }
    top = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}
    token = {**COUNT, "maximum": MOST_TOKENS - 1}
    prompt = {
        "anyOf": [
            {**TEXT, "description": "May be empty over a cache alone."},
            {"type": "array", "items": token, "minItems": 1},
            {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 1},
            {"type": "array", "items": {"type": "array", "items": token, "minItems": 1}, "minItems": 1, "maxItems": 1},
        ]
    }
    part = _object(type={"const": "text"}, text=TEXT)
    return {
        "CompletionRequest": _object(("model",), **shared, prompt=_or_null(prompt), logprobs=_or_null(top)),
        "ChatRequest": _object(
            ("model", "messages"),
            **shared,
            messages={
                "type": "array",
                "items": _ref("Message"),
                "minItems": 1,
                "description": "The last is the user's; over a cache the first, too: it follows the cached text.",
            },
            max_completion_tokens=_or_null(tokens),
            logprobs=_or_null(FLAG),
            top_logprobs=_or_null({**top, "description": "Needs logprobs."}),
        ),
        "Message": _object(
            ("role", "content"),
            role={"enum": list(ROLES)},
            content={"anyOf": [TEXT, {"type": "array", "items": part, "minItems": 1}]},
        ),
        "LynxOptions": _object(
            (),
            cache=_or_null({**TEXT, "description": "A cache by name, relative to the store."}),
            on_failure=_or_null({"enum": list(get_args(OnFailure))}),
            draft=_or_null({**FLAG, "description": "Tell of drafts and of what becomes of them; for streams."}),
        ),
    }


def _answers() -> dict[str, Schema]:
    usage = _object(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=_object(cached_tokens=COUNT),
    )
    token = {"token": TEXT, "logprob": {"type": "number"}, "bytes": {"type": "array", "items": COUNT}}
    chat_logprobs = _object(
        content={
            "type": "array",
            "items": _object(**token, top_logprobs={"type": "array", "items": _object(**token)}),
        }
    )
    logprobs = _object(
        tokens={"type": "array", "items": TEXT},
        token_logprobs={"type": "array", "items": {"type": "number"}},
        top_logprobs={"type": "array", "items": {"type": "object", "additionalProperties": {"type": "number"}}},
        text_offset={"type": "array", "items": COUNT},
    )
    finish = {"enum": ["stop", "length"]}
    message = _object(role={"const": "assistant"}, content=TEXT)

    def answer(name: str, **choice: Schema) -> Schema:
        one = _object(index=COUNT, **choice, finish_reason=finish)
        return _object(
            id=TEXT,
            object={"const": name},
            created=COUNT,
            model=TEXT,
            choices={"type": "array", "items": one, "minItems": 1, "maxItems": 1},
            usage=usage,
            lynx=_ref("Figures"),
        )

    return {
        "Completion": answer("text_completion", text=TEXT, logprobs=_or_null(logprobs)),
        "Chat": answer("chat.completion", message=message, logprobs=_or_null(chat_logprobs)),
        "Figures": {
            "type": "object",
            "description": "Where an answer came from, and the figures of its run.",
            "required": [*SUMMARY, *FIGURES],
            "properties": {"source": {"enum": list(get_args(Source))}, "cache": _or_null(TEXT), "cached_tokens": COUNT},
        },
    }


def _others() -> dict[str, Schema]:
    error = _object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))
    return {
        "Error": _object(error=error),
        "Ready": _object(ready=FLAG, caches=COUNT, catalog_age_s=_or_null({"type": "number"})),
        "Model": _object(
            id=TEXT,
            object={"const": "model"},
            created=COUNT,
            owned_by=TEXT,
            lynx=_object(max_new_tokens=COUNT),
        ),
        "Cache": _object(name=TEXT, tokens=COUNT),
    }


def _asked(summary: str, request: str, answer: str) -> Schema:
    events = ", ".join([*EVENT_NAMES.values(), "end"])
    lines = {**TEXT, "description": f"Server-sent events, with chunks of the answer. Those of lynx.draft: {events}."}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(_ref(request))},
            "responses": {
                "200": {
                    "description": "The answer",
                    "content": {**_json(_ref(answer)), "text/event-stream": {"schema": lines}},
                },
                **_refusals(*REFUSALS),
            },
        }
    }


def _told(
    summary: str, content: dict[str, Schema], others: Schema | None = None, *, open_to_all: bool = False
) -> Schema:
    refusals = _refusals(421) if open_to_all else _refusals(401, 421)
    responses = {"200": {"description": summary, "content": content}, **refusals, **(others or {})}
    get: Schema = {"summary": summary, "responses": responses}
    return {"get": {**get, "security": []} if open_to_all else get}


def _refusals(*statuses: int) -> Schema:
    return {str(status): _response(REFUSALS[status], "Error") for status in statuses}


def _response(description: str, schema: str) -> Schema:
    return {"description": description, "content": _json(_ref(schema))}


def _json(schema: Schema) -> dict[str, Schema]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list_of(name: str) -> Schema:
    return _object(object={"const": "list"}, data={"type": "array", "items": _ref(name)})


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: tuple[str, ...] | None = None, /, **properties: Schema) -> Schema:
    """An object of these properties and no others; all are there, unless it is said which are."""
    return {
        "type": "object",
        "required": list(properties if required is None else required),
        "properties": properties,
        "additionalProperties": False,
    }
