"""The fields of a JSON object, taken one by one; what is of another type, or left over, is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from lynxkv.server.problems import Refusal


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        Refusal: it is none.
    """
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise Refusal("the body is not a JSON object", code="invalid_json")
    return content


class Fields:
    """A JSON object being read. `null` counts as left out.

    All methods raise a Refusal that names the field.
    """

    def __init__(self, content: dict[str, Any], within: str = "") -> None:
        self._left, self._within = dict(content), within

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string of whole characters."""
        value = self.take(name)
        return default if value is None else self.check_text(name, value)

    def flag(self, name: str) -> bool:
        """true or false; false if it is left out."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "is not true or false")
        return bool(value)

    def integer(self, name: str, *, least: int, most: int) -> int | None:
        """A whole number in [least, most]."""
        value = self.take(name)
        if value is None:
            return None
        if not is_whole(value) or not least <= value <= most:
            self.refuse(name, f"is not a whole number from {least} to {most}")
        return int(value)

    def number(self, name: str, default: float, *, most: float) -> float:
        """A number in [0, most]."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            self.refuse(name, f"is not a number from 0 to {most:g}")
        return float(value)

    def object(self, name: str) -> Fields:
        """An object; an empty one if it is left out."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "is not an object")
        return Fields(value or {}, f"{self._within}{name}.")

    def take(self, name: str) -> Any:
        """A field as it is, None if it is left out."""
        return self._left.pop(name, None)

    def only(self, name: str, *allowed: Any) -> None:
        """A field that is known and has no effect, as long as it is left out or one of `allowed`."""
        value = self.take(name)
        if value is not None and value not in allowed:
            self.refuse(name, "is not supported", code="unsupported_value")

    def check_text(self, name: str, value: Any) -> str:
        """`value` if it is a string of whole characters."""
        if not isinstance(value, str):
            self.refuse(name, "is not a string")
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse(name, "has half of a surrogate pair")
        return str(value)

    def refuse(self, name: str, why: str, *, code: str = "invalid_value") -> NoReturn:
        """Say what is wrong with a field."""
        raise Refusal(f"{self._within}{name} {why}", code=code, param=f"{self._within}{name}")

    def done(self) -> None:
        """Refuse what has not been taken: it was meant to have an effect."""
        for name, value in self._left.items():
            if value is not None:
                self.refuse(name[:80], "is not known here", code="unknown_parameter")


def is_whole(value: Any) -> bool:
    """Whether a value of JSON is a whole number, however it is written."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
