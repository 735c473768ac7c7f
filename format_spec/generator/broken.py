"""What the invalid vectors are made of: small caches, and hooks that break one rule of the SPEC in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from format_spec.generator.formulas import cache, coding, layer
from format_spec.generator.writer import (
    CacheDraft,
    Document,
    Files,
    Hooks,
    write,
)

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
    # Bytes of no meaning: a check must refuse them, a reader that only decodes need not look.
    unread: bool = False

    @property
    def kind(self) -> str:
        """The kind of refusal."""
        return self.name.split("-")[0]


def tiny() -> CacheDraft:
    """One raw value a tensor, no Residual."""
    return cache([coding("raw")], [layer(1, 1)], stop=1)


def small(radix: int = 1) -> CacheDraft:
    """Entropy-coded, sink token, three segments a tensor; a Residual only where the fault needs one."""
    return cache([coding("entropy", radix=radix, segment_tokens=4, sink_tokens=1)], [layer(1, 4)], stop=11)


def split() -> CacheDraft:
    """The same with a Residual."""
    return small(radix=5)


def small_fixed(**fields: Any) -> CacheDraft:
    """Fixed coding with pages, partial chunk and odd head dim, in two segments; f32 chunks unless told."""
    fields = {
        "residual_bits": 0,
        "chunk_dtype": "f32",
        "page_tokens": 4,
        "chunk_tokens": 2,
        "segment_tokens": 4,
    } | fields
    return cache([coding("fixed", **fields)], [layer(1, 3)], stop=7)


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
