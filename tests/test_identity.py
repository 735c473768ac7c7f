from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lynxkv.errors import IdentityError
from lynxkv.identity import TensorEdges, check_identity, fingerprint
from lynxkv.layout import Identity

FULL = Identity(
    model_id="org/name",
    revision="abc",
    fingerprint="1" * 64,
    tokenizer_sha256="2" * 64,
    chat_template_sha256="3" * 64,
    turn="open",
    rope={"rope_theta": 1e4},
    adapter="none",
    salt_sha256="5" * 64,
)


def test_equal_and_unknown_fields_pass() -> None:
    check_identity(FULL, FULL)
    unknown = Identity(adapter=FULL.adapter, salt_sha256=FULL.salt_sha256)
    check_identity(unknown, FULL)
    check_identity(FULL, unknown)


@pytest.mark.parametrize("field", ["adapter", "salt_sha256"])
def test_an_adapter_or_salt_on_one_side_only_is_a_mismatch(field: str) -> None:
    change: dict[str, Any] = {field: None}
    without = dataclasses.replace(FULL, **change)
    for cache, model in ((FULL, without), (without, FULL)):
        with pytest.raises(IdentityError, match="not set") as caught:
            check_identity(cache, model)
        assert caught.value.field == field


@pytest.mark.parametrize("field", ["fingerprint", "tokenizer_sha256", "chat_template_sha256", "adapter", "salt_sha256"])
def test_a_mismatch_names_the_field_and_both_values(field: str) -> None:
    change: dict[str, Any] = {field: "9" * 64}
    with pytest.raises(IdentityError) as caught:
        check_identity(FULL, dataclasses.replace(FULL, **change))
    assert caught.value.field == field
    assert field in caught.value.message
    assert "9999999999999999..." in caught.value.message
    assert caught.value.hint


def test_rope_is_compared() -> None:
    with pytest.raises(IdentityError) as caught:
        check_identity(FULL, dataclasses.replace(FULL, rope={"rope_theta": 5e5}))
    assert caught.value.field == "rope"
    assert "500000" in caught.value.message


def test_names_count_only_where_a_fingerprint_is_missing() -> None:
    renamed = dataclasses.replace(FULL, model_id="other/name", revision="def", turn="none")
    check_identity(FULL, renamed)
    for field in ("model_id", "revision"):
        change: dict[str, Any] = {field: "something else"}
        with pytest.raises(IdentityError) as caught:
            check_identity(dataclasses.replace(FULL, fingerprint=None), dataclasses.replace(FULL, **change))
        assert caught.value.field == field


def edges(name: str, **change: object) -> TensorEdges:
    values: dict[str, object] = {"dtype": "F32", "shape": (2, 2), "first": b"a", "last": b"b"}
    return TensorEdges(name=name, **{**values, **change})  # type: ignore[arg-type]


def test_fingerprint_is_free_of_order_and_sensitive_to_everything_else() -> None:
    base = fingerprint({"a": 1, "b": {"c": 2}}, [edges("x"), edges("y")])
    assert fingerprint({"b": {"c": 2, "dtype": "f16"}, "a": 1, "_name_or_path": "p"}, [edges("y"), edges("x")]) == base
    others = [
        fingerprint({"a": 1, "b": {"c": 3}}, [edges("x"), edges("y")]),
        fingerprint({"a": 1, "b": {"c": 2}}, [edges("x")]),
        *(
            fingerprint({"a": 1, "b": {"c": 2}}, [edges("x", **change), edges("y")])
            for change in ({"dtype": "BF16"}, {"shape": (4,)}, {"first": b"z"}, {"last": b"z"})
        ),
    ]
    assert len({base, *others}) == 7
