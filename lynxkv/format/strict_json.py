"""JSON as the SPEC reads it (4.2): no duplicate keys, bounded depth, no NaN or Infinity, nothing after the object."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from lynxkv.errors import HeaderError
from lynxkv.format.limits import MAX_INTEGER

# A string, closed or running to the end of the text, or a bracket. Possessive, so that hostile text costs linear time.
_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.|\\\Z)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)


def loads(text: str, *, what: str, max_depth: int, max_string: int | None = None) -> dict[str, Any]:
    """Parse one JSON object, followed by nothing but spaces.

    Raises:
        HeaderError: it is not that, nests deeper than `max_depth`, repeats a key, has a string or key longer than
            `max_string`, or holds NaN, Infinity, a lone surrogate or an integer of 2^53 and above.
    """
    if not text.startswith("{") or not text.rstrip(" ").endswith("}"):
        raise HeaderError(f"{what} is not one JSON object, padded with spaces")
    depth = 0
    for token in _STRUCTURE.finditer(text):
        if token.group() in ("[", "{"):
            depth += 1
            if depth > max_depth:
                raise HeaderError(f"{what} nests deeper than {max_depth}")
        elif token.group() in ("]", "}"):
            depth -= 1
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer, parse_float=_float
        )
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except HeaderError as error:
        raise HeaderError(f"{what}: {error.message}") from None
    except UnicodeEncodeError:
        raise HeaderError(f"{what} holds a lone surrogate") from None
    except ValueError as error:
        raise HeaderError(f"{what} is not JSON: {error}") from None
    if max_string is not None and _longest_string(value) > max_string:
        raise HeaderError(f"{what} has a string of more than {max_string} characters")
    out: dict[str, Any] = value
    return out


def _longest_string(value: Any) -> int:
    """Characters of the longest string in `value`, keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return max((max(len(key), _longest_string(item)) for key, item in value.items()), default=0)
    if isinstance(value, list):
        return max(map(_longest_string, value), default=0)
    return 0


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise HeaderError(f"the key {key[:80]!r} occurs twice")
        out[key] = value
    return out


def _constant(name: str) -> Any:
    raise HeaderError(f"{name} is not allowed")


def _integer(digits: str) -> int:
    if len(digits) > 17 or abs(int(digits)) >= MAX_INTEGER:
        raise HeaderError(f"the integer {digits[:20]} is out of range")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise HeaderError(f"the number {digits[:20]} is out of range")
    return value
