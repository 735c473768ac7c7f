"""What the invalid vectors are made of: small caches, and hooks that break one rule of the SPEC in them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from format_spec.generator.caches import cache, coding, latent
from format_spec.generator.writer import (
    CacheDraft,
    Document,
    Draft,
    Files,
    Hooks,
    write,
)

# Vectors of faults are many: what they do not need is left out.
BARE: Document = {"model_id": None, "fingerprint": None, "turn": None, "rope": None}

# Changes what it is given in place, or returns what to write instead.
Hook = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A cache to refuse, at the lowest precision at which a reader meets the fault."""

    name: str
    clause: str
    why: str
    files: Files
    precision: str = "anchor"
    # In bytes that decoding has no use for: a check must refuse them, a decoder need not look.
    unread: bool = False
    # In what bytes decode to: a decoder must refuse it, a check, which need not decode, may pass it.
    decoded: bool = False
    # Whole caches beside it, that it continues or claims to.
    beside: dict[str, Files] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of refusal."""
        return self.name.split("-")[0]


def tiny() -> CacheDraft:
    """One raw value, no Residual."""
    return cache([coding("raw")], [latent(1, 1)], stop=1, identity=BARE)


def small(make: Callable[[int, int], Document] = latent, *, logits: int = 0, **fields: Any) -> CacheDraft:
    """Entropy-coded, sink token, three segments of four channels; a Residual only where the fault needs one."""
    own = coding("entropy", **{"radix": 1, "segment_tokens": 4, "sink_tokens": 1} | fields)
    return cache([own], [make(1, 4)], stop=11, logits=logits, identity=BARE)


def split(make: Callable[[int, int], Document] = latent, **fields: Any) -> CacheDraft:
    """The same with a Residual: `make` is `layer` where K and V are needed."""
    return small(make, **{"radix": 5} | fields)


def small_fixed(**fields: Any) -> CacheDraft:
    """Fixed coding with pages, partial chunk and odd head dim, in two segments; f32 chunks unless told."""
    fields = {
        "residual_bits": 0,
        "chunk_dtype": "f32",
        "page_tokens": 4,
        "chunk_tokens": 2,
        "segment_tokens": 4,
    } | fields
    return cache([coding("fixed", **fields)], [latent(1, 3)], stop=7, identity=BARE)


def vector(name: str, clause: str, why: str, draft: CacheDraft, *, role: str = "anchor", **hooks: Hook) -> Vector:
    """Write `draft` with hooks that act on the shard `role` only."""

    def only(hook: Hook) -> Callable[[str, Any], Any]:
        return lambda at, subject: hook(subject) if at == role else subject

    files = write(draft, Hooks(**{stage: only(hook) for stage, hook in hooks.items()}))
    return Vector(name=name, clause=clause, why=why, files=files, precision="full" if role == "residual" else "anchor")


def put(**fields: Any) -> Hook:
    """A document hook that sets top-level fields."""
    return lambda body: body.update(fields)


def inside(path: str, value: Any) -> Hook:
    """A document hook that sets one field by its dotted path."""

    def hook(body: Document) -> None:
        *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        at: Any = body
        for step in parents:
            at = at[step]
        at[last] = value

    return hook


def without(path: str) -> Hook:
    """A document hook that removes one field by its dotted path."""

    def hook(body: Document) -> None:
        *parents, last = path.split(".")
        at: Any = body
        for step in parents:
            at = at[int(step) if step.isdigit() else step]
        del at[last]

    return hook


def replaced(old: str, new: str) -> Hook:
    """A text hook that replaces the first `old`, which must be there."""

    def hook(text: str) -> str:
        if old not in text:
            raise ValueError(f"{old!r} is not in the text")
        return text.replace(old, new, 1)

    return hook


def names_of(body: Document) -> list[str]:
    """Arrays of a header in file order."""
    return [name for name in body if name != "__metadata__"]


# -- hooks on arrays, before their digests are taken; an array is found by the end of its name --


def position(drafts: list[Draft], ending: str) -> int:
    """The place of an array."""
    return next(i for i, draft in enumerate(drafts) if draft.name.endswith(ending))


def swap(first: str, second: str) -> Hook:
    """Two arrays change places."""

    def hook(drafts: list[Draft]) -> None:
        i, j = position(drafts, first), position(drafts, second)
        drafts[i], drafts[j] = drafts[j], drafts[i]

    return hook


def drop(ending: str) -> Hook:
    """An array is missing."""

    def hook(drafts: list[Draft]) -> None:
        del drafts[position(drafts, ending)]

    return hook


def change(ending: str, **fields: Any) -> Hook:
    """An array has another name, dtype or shape."""

    def hook(drafts: list[Draft]) -> None:
        draft = drafts[position(drafts, ending)]
        for name, value in fields.items():
            setattr(draft, name, value)

    return hook


def patch(ending: str, at: int, data: bytes, segment: int = 0) -> Hook:
    """Overwrite bytes of a segment; negative `at` counts from its end."""

    def hook(drafts: list[Draft]) -> None:
        stored = drafts[position(drafts, ending)].segments[segment]
        raw = bytearray(stored.data)
        start = at % len(raw)
        raw[start : start + len(data)] = data
        stored.data = bytes(raw)

    return hook


# -- hooks on the index, the data region and the name of the Residual --


def entry(number: int, **fields: int) -> Hook:
    """Add to fields of an index entry, with wrap-around."""
    places = {
        "offset": (0, "<Q"),
        "stored_bytes": (8, "<I"),
        "raw_bytes": (12, "<I"),
        "array": (16, "<I"),
        "first_token": (20, "<I"),
        "compression": (24, "<B"),
        "reserved": (31, "<B"),
    }

    def hook(index: bytearray) -> None:
        for name, more in fields.items():
            at, form = places[name]
            (value,) = struct.unpack_from(form, index, 64 * number + at)
            struct.pack_into(form, index, 64 * number + at, (value + more) % 256 ** struct.calcsize(form))

    return hook


def flip(at: int) -> Hook:
    """Flip a bit of the data region."""

    def hook(data: bytearray) -> None:
        data[at] ^= 1

    return hook


def array_start(name: str, offset: int = 0) -> Callable[[CacheDraft, str], int]:
    """Where an array starts in the data region, and so many bytes on."""

    def find(draft: CacheDraft, role: str) -> int:
        found: list[int] = []
        write(
            draft,
            Hooks(entries=lambda at, body: found.append(body[name]["data_offsets"][0]) if name in body else None),
        )
        return found[0] + offset

    return find


def named(path: str, resize: Callable[[Any], Any]) -> Hook:
    """Change a field of what the Anchor says of its Residual."""
    return lambda body: body["residual"].update({path: resize(body["residual"][path])})
