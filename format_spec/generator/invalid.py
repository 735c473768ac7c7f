"""Caches that every reader must refuse, one rule of the SPEC broken in each, all digests honest unless they are it.

The name begins with the kind of refusal: `truncated`, `header`, `checksum`, `unsupported`, `binding` or `content`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from format_spec.generator import (
    invalid_arrays,
    invalid_bases,
    invalid_contents,
    invalid_documents,
    invalid_exact,
    invalid_headers,
)
from format_spec.generator.broken import (
    Hook,
    Vector,
    names_of,
    tiny,
    vector,
)
from format_spec.generator.caches import cache, coding, layer
from format_spec.generator.writer import (
    Document,
)


def invalid() -> Iterator[Vector]:
    """All vectors that are kept in the repository."""
    yield from invalid_headers.containers()
    yield from invalid_headers.json_texts()
    yield from invalid_documents.documents()
    yield from invalid_documents.parents()
    yield from invalid_arrays.array_lists()
    yield from invalid_arrays.indexes()
    yield from invalid_arrays.digests()
    yield from invalid_arrays.bindings()
    yield from invalid_contents.contents()
    yield from invalid_contents.frames()
    yield from invalid_exact.exact_arrays()
    yield from invalid_exact.exact_contents()
    yield from invalid_exact.logits()
    yield from invalid_bases.bases()


def made_when_tested() -> Iterator[Vector]:
    """Vectors that are too many or too large to keep."""
    yield from invalid_documents.incomplete()
    yield from oversized()


def oversized() -> Iterator[Vector]:
    """Limits on counts and lengths."""
    layers = [layer(1, 1) for _ in range(1025)]
    yield vector("header-layers-1025", "10", "1,025 layers", cache([coding("raw")], layers, stop=1))

    def arrays(body: Document) -> None:
        stop = body[names_of(body)[-1]]["data_offsets"][1]
        for number in range(65_537):
            body[f"x{number}"] = {"dtype": "U8", "shape": [64], "data_offsets": [stop, stop + 64]}
            stop += 64

    grown = lambda data: data.extend(bytes(64 * 65_537))  # noqa: E731
    yield vector("header-arrays-over-limit", "10", "65,537 more arrays", tiny(), entries=arrays, data=grown)
    # Both are refused in well under a second by a reader that scans them once.
    keys = json.dumps(dict.fromkeys(range(500_000), 0))
    for name, why, text in (
        ("header-unclosed-string-8-mb", "a string without end", '{"' + '\\"' * 4_000_000 + "}"),
        ("header-many-keys", "one of 500,000 keys twice", keys[:-1] + ',"499999":0}'),
    ):
        yield vector(name, "4.2", why, tiny(), header_text=constant(text))


def constant(text: str) -> Hook:
    """This text, whatever it was."""
    return lambda _: text
