"""JSON is read strictly, and in linear time."""

from __future__ import annotations

import pytest

from lynxkv import HeaderError
from lynxkv.format.strict_json import loads


def test_plain_objects_are_read() -> None:
    assert loads('{"a": [1, {"b": "}]\\"{"}], "c": -2.5}', what="it", max_depth=3) == {
        "a": [1, {"b": '}]"{'}],
        "c": -2.5,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "occurs twice"),
        ('{"x": {"a": 1, "a": 1}}', "occurs twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 9007199254740992}', "out of range"),
        ('{"a": ' + "9" * 5000 + "}", "out of range"),
        ('{"a": [[[1]]]}', "deeper than 3"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "deeper than 3"),
        ("[1]", "not one JSON object"),
        ('{"a": 1} x', "not one JSON object"),
        ('{"a": 1}\n', "not one JSON object"),
        ('{"a": 1} {}', "not JSON"),
        ('{"a": "', "not one JSON object"),
        ('{"a": "}', "not JSON"),
        ("", "not one JSON object"),
        ('{"a": 1e999}', "out of range"),
        ('{"a": "\\ud800"}', "surrogate"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(HeaderError, match=message):
        loads(text, what="it", max_depth=3)


@pytest.mark.parametrize("text", ['{"a": "' + '\\"' * 300_000, '{"a": ' + '"' * 300_001, '{"' + "\\" * 300_001])
def test_hostile_strings_cost_linear_time(text: str) -> None:
    with pytest.raises(HeaderError):
        loads(text, what="it", max_depth=3)
