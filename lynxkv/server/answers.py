"""Answers in the forms of OpenAI's API: whole, or in chunks. What is lynxkv's own stands in a field `lynx`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lynxkv.events import (
    AnchorProgress,
    Drafted,
    Event,
    Note,
    Phase,
    Provisional,
    Rejected,
    ResidualProgress,
    Span,
    TokenLogprobs,
    Verified,
)
from lynxkv.server.logprobs import Logprobs
from lynxkv.server.outcome import Answer
from lynxkv.server.requests import Kind

EVENT_NAMES: dict[type[Event], str] = {
    Phase: "phase",
    AnchorProgress: "anchor",
    ResidualProgress: "residual",
    Drafted: "draft",
    Provisional: "provisional",
    Verified: "accept",
    Rejected: "retract",
    Span: "span",
    Note: "note",
}
OBJECTS: dict[Kind, tuple[str, str]] = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "completion": ("text_completion", "text_completion"),
}
PREFIXES: dict[Kind, str] = {"chat": "chatcmpl", "completion": "cmpl"}
SUMMARY = ("source", "cache", "cached_tokens", "load_failure", "together")
FIGURES = (
    "precision", "drafted", "accepted", "anchor_s", "first_draft_s", "full_s", "first_verified_s", "total_s",
    "bytes_anchor", "bytes_residual", "notes",
)  # fmt: skip


def to_json(value: Mapping[str, Any]) -> bytes:
    """Compact JSON in ASCII, so that any text can be sent."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def as_event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all parts of one answer share."""

    kind: Kind
    model: str
    logprobs: Logprobs
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """An answer that is not streamed."""
        text = answer.result.text
        content = {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text}
        return {
            **self._head(OBJECTS[self.kind][0], [content], _finish(answer), answer.logprobs),
            "usage": usage(answer),
            "lynx": summary(answer),
        }

    def start(self) -> dict[str, Any] | None:
        """The first chunk of a stream, which a chat has."""
        return self._chunk({"role": "assistant", "content": ""}) if self.kind == "chat" else None

    def event(self, event: Event, *, draft: bool) -> dict[str, Any] | None:
        """The chunk that tells of an event: what it adds to the verified text, and all of it if `draft`."""
        text, logprobs = (event.text, event.logprobs) if isinstance(event, Verified) else ("", None)
        if not (text or logprobs or draft):
            return None
        chunk = self._chunk(({"content": text} if text else {}) if self.kind == "chat" else text, logprobs=logprobs)
        return {**chunk, "lynx": _told(event)} if draft else chunk

    def end(self, answer: Answer) -> dict[str, Any]:
        """The last chunk with a choice."""
        chunk = self._chunk({} if self.kind == "chat" else "", _finish(answer))
        return {**chunk, "lynx": {"event": "end", **summary(answer)}}

    def usage(self, answer: Answer) -> dict[str, Any]:
        """The chunk that tells the usage, if it is asked for."""
        return {**self._head(OBJECTS[self.kind][1], [], None), "usage": usage(answer)}

    def _chunk(
        self,
        content: dict[str, Any] | str,
        finish: str | None = None,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> dict[str, Any]:
        part = {"delta": content} if self.kind == "chat" else {"text": content}
        return self._head(OBJECTS[self.kind][1], [part], finish, logprobs)

    def _head(
        self,
        name: str,
        contents: list[dict[str, Any]],
        finish: str | None,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> dict[str, Any]:
        return {
            "id": f"{PREFIXES[self.kind]}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": [
                {"index": number, **content, "logprobs": self.logprobs.told(logprobs), "finish_reason": finish}
                for number, content in enumerate(contents)
            ],
        }


def usage(answer: Answer) -> dict[str, Any]:
    """Tokens, as OpenAI counts them."""
    new_tokens = len(answer.result.token_ids)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": answer.prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def summary(answer: Answer) -> dict[str, Any]:
    """Where an answer came from, and the figures of its run."""
    figures = {name: getattr(answer.result, name) for name in FIGURES}
    return {**{name: getattr(answer, name) for name in SUMMARY}, **figures}


def _told(event: Event) -> dict[str, Any]:
    """An event as it is; log probabilities have a place of their own."""
    fields = {name: value for name, value in asdict(event).items() if name != "logprobs"}
    return {"event": EVENT_NAMES[type(event)], **fields}


def _finish(answer: Answer) -> str:
    return "length" if answer.result.stopped == "length" else "stop"
