"""What a request asks for, read from its JSON and checked."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from lynxkv.choices import OnFailure
from lynxkv.errors import InputError
from lynxkv.sampling import Sampling
from lynxkv.server.fields import Fields, is_whole
from lynxkv.server.problems import Refusal

Kind = Literal["chat", "completion"]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
# More than any vocabulary has.
MOST_TOKENS = 1 << 31
DEFAULT_COMPLETION_TOKENS = 16
# Fields of OpenAI's API that say nothing on the answer itself.
LABELS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
# Fields that would change the answer, with the values at which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request that has been checked.

    Attributes:
        messages: of a chat; empty for a completion.
        prompt: of a completion, as text or as token ids.
        cache: the name of the cache that the prompt follows, if one is named.
        on_failure: what to do when the cache cannot be loaded; None: what the server does.
        draft: the caller wants to be told of drafts, of what becomes of them, and of the run.
        max_new_tokens: None: as many as the server allows.
        top_logprobs: tell the log probability of each token, and of so many likeliest ones; None: of none.
    """

    kind: Kind
    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    cache: str | None
    on_failure: OnFailure | None
    draft: bool
    stream: bool
    include_usage: bool
    max_new_tokens: int | None
    stop: tuple[str, ...]
    sampling: Sampling
    top_logprobs: int | None


def read_request(kind: Kind, content: dict[str, Any], *, max_new_tokens: int) -> Ask:
    """The request in a JSON object.

    Raises:
        Refusal: a field is missing, of the wrong type, out of range, or asks for what this server cannot do.
    """
    fields = Fields(content)
    model = fields.text("model")
    if model is None:
        fields.refuse("model", "is missing")
    if kind == "chat":
        prompt: str | tuple[int, ...] = ""
        messages = _messages(fields)
    else:
        prompt, messages = _prompt(fields), ()
    lynx = fields.object("lynx")
    streaming = fields.object("stream_options")
    limit = fields.integer("max_tokens", least=1, most=max_new_tokens)
    if kind == "chat":
        later = fields.integer("max_completion_tokens", least=1, most=max_new_tokens)
        limit = later if later is not None else limit
    elif limit is None:
        limit = min(DEFAULT_COMPLETION_TOKENS, max_new_tokens)
    ask = Ask(
        kind=kind,
        model=model,
        messages=messages,
        prompt=prompt,
        cache=lynx.text("cache"),
        on_failure=_on_failure(lynx),
        draft=lynx.flag("draft"),
        stream=fields.flag("stream"),
        include_usage=streaming.flag("include_usage"),
        max_new_tokens=limit,
        stop=_stop(fields),
        sampling=_sampling(fields),
        top_logprobs=_top_logprobs(kind, fields),
    )
    for name, allowed in NEUTRAL.items():
        fields.only(name, *allowed)
    for name in LABELS:
        fields.take(name)
    streaming.only("include_obfuscation", False)
    for group in (fields, lynx, streaming):
        group.done()
    if ask.draft and not ask.stream:
        raise Refusal("lynx.draft is for streams", param="lynx.draft", hint="add stream: true", code="invalid_value")
    return ask


def _on_failure(lynx: Fields) -> OnFailure | None:
    value = lynx.text("on_failure")
    if value == "error" or value == "recompute":
        return "error" if value == "error" else "recompute"
    return None if value is None else lynx.refuse("on_failure", "is not error or recompute")


def _messages(fields: Fields) -> tuple[Message, ...]:
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        fields.refuse("messages", "is not a list of messages")
    out = []
    for number, item in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(item, dict):
            fields.refuse(where, "is not an object")
        message = Fields(item, f"{where}.")
        role = message.text("role")
        if role not in ROLES:
            message.refuse("role", f"is not one of {', '.join(ROLES)}")
        text = _content(message)
        for name in ("name", "refusal", "audio", "function_call", "annotations"):
            message.only(name, [])
        message.only("tool_calls", [])
        message.done()
        out.append(Message(role=ROLES[role], text=text))
    if out[-1].role != "user":
        fields.refuse("messages", "does not end with a message of the user")
    return tuple(out)


def _content(message: Fields) -> str:
    value = message.take("content")
    if isinstance(value, list):
        parts = []
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text":
                message.refuse("content", "has a part that is not text", code="unsupported_value")
            parts.append(message.check_text("content", part.get("text")))
        return "".join(parts)
    return message.check_text("content", value)


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    value = fields.take("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list):
        if not value or not all(map(is_whole, value)):
            fields.refuse("prompt", "is not one text or one list of token ids", code="unsupported_value")
        if not all(0 <= token < MOST_TOKENS for token in value):
            fields.refuse("prompt", "has a number that is no token's")
        return tuple(map(int, value))
    return "" if value is None else fields.check_text("prompt", value)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS:
        fields.refuse("stop", f"is not a text or a list of up to {MAX_STOPS}")
    if not all(texts):
        fields.refuse("stop", "has an empty text")
    return tuple(fields.check_text("stop", text) for text in texts)


def _top_logprobs(kind: Kind, fields: Fields) -> int | None:
    """A completion says how many it wants; a chat that it wants some, and then how many beside the token's own."""
    if kind == "completion":
        return fields.integer("logprobs", least=0, most=MAX_TOP_LOGPROBS)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", least=0, most=MAX_TOP_LOGPROBS)
    if top and not wanted:
        fields.refuse("top_logprobs", "needs logprobs: true")
    return (top or 0) if wanted else None


def _sampling(fields: Fields) -> Sampling:
    """As OpenAI's clients expect: temperature 1 if nothing is said, and another text each time without a seed."""
    seed = fields.integer("seed", least=-(1 << 63), most=(1 << 63) - 1)
    temperature, top_p = fields.number("temperature", 1.0, most=2.0), fields.number("top_p", 1.0, most=1.0)
    try:
        return Sampling(temperature=temperature, top_p=top_p, seed=secrets.randbits(63) if seed is None else seed)
    except InputError as error:
        raise Refusal(error.message, code="invalid_value", hint=error.hint) from error
