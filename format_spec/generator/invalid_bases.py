"""Must-reject vectors for SPEC 8.8: what a cache says of its basis, and bases that do not fit or are damaged."""

from __future__ import annotations

from collections.abc import Iterator

from format_spec.generator.bases import Basis
from format_spec.generator.broken import BARE, Vector, inside, put, vector
from format_spec.generator.caches import cache, coding, digest, layer
from format_spec.generator.writer import CacheDraft, write


def transformed(basis: Basis | None = None, *, stop: int = 5) -> CacheDraft:
    """K and V of four channels as components, with a Residual."""
    own = coding("entropy", sink_tokens=1)
    return cache([own], [layer(1, 4)], stop=stop, identity=BARE, basis=basis or Basis(pairs=2))


def bases() -> Iterator[Vector]:
    """Everything about bases."""
    clause = "8.8"
    yield vector(
        "header-transform-not-required", clause, "no required feature", transformed(), document=put(required=[])
    )
    yield vector("header-transform-null", clause, "required, and null", transformed(), document=put(transform=None))
    for path, value, why in (
        ("transform.name", "basis.safetensors", "another name"),
        ("transform.name", "../basis-0123456789abcdef.safetensors", "a path"),
        ("transform.sha256", digest(7), "a digest that its name does not begin with"),
        ("transform.bytes", 0, "no bytes"),
        ("transform", [], "a list"),
    ):
        slug = f"header-{path.replace('.', '-')}-{'-'.join(why.split())}"
        yield vector(slug, clause, f"{path}: {why}", transformed(), document=inside(path, value))
    for name, why, basis in (
        ("binding-basis-of-other-channels", "rows of another tensor", Basis(channels=8)),
        ("binding-basis-of-too-many-pairs", "more pairs than half a head", Basis(pairs=3)),
        ("header-basis-of-another-role", "an Anchor as basis", Basis(document={"role": "anchor"})),
        ("header-basis-without-layers", "no layers", Basis(document={"layers": None})),
        ("header-basis-of-a-rope-that-is-not-there", "an unknown rope", Basis(document={"layers": _roped("other")})),
        ("unsupported-basis-required", "an unknown feature", Basis(document={"required": ["deltas"]})),
        ("unsupported-basis-version", "version 9", Basis(document={"version": "9"})),
        ("content-basis-infinite-table", "an infinite cosine", Basis(pairs=2, table=float("inf"))),
    ):
        yield of(transformed(basis), name, clause, why)
    yield of(
        transformed(Basis(pairs=2, positions=64), stop=65), "binding-basis-of-fewer-positions", clause, "position 64"
    )
    damaged = of(transformed(Basis(pairs=1)), "checksum-basis", clause, "a changed byte")
    for name, data in damaged.files.items():
        if name.startswith("../"):
            damaged.files[name] = data[:-1] + bytes([data[-1] ^ 1])
    yield damaged


def of(draft: CacheDraft, name: str, clause: str, why: str) -> Vector:
    """A cache with nothing wrong but its basis."""
    return Vector(name=name, clause=clause, why=why, files=write(draft))


def _roped(name: str) -> list[dict[str, dict[str, str | None]]]:
    return [{"k": {"rope": name}, "v": {"rope": None}}]
