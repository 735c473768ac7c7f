from __future__ import annotations

from collections.abc import Sequence

import pytest

from lynxkv.errors import InputError
from lynxkv.text import GrowingText, TextStream

EOS = 999


def utf8(ids: Sequence[int]) -> str:
    """Ids are bytes, as in a byte-level vocabulary at its finest."""
    return bytes(token for token in ids if token != EOS).decode(errors="replace")


def words(ids: Sequence[int]) -> str:
    """Ids are words; a space stands between two, so a token's text depends on its neighbour."""
    return " ".join(f"w{token}" for token in ids)


def growing(text: str, *, stop: Sequence[str] = (), max_tokens: int = 1000) -> tuple[GrowingText, list[str]]:
    out = GrowingText(utf8, eos_token_ids=frozenset([EOS]), stop=stop, max_tokens=max_tokens)
    released = []
    for token in [*text.encode(), EOS]:
        if out.stopped:
            break
        released.append(out.add(token))
    return out, released


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 text", "emoji 🙂🙂", ""])
def test_increments_add_up_and_hold_whole_characters(text: str) -> None:
    stream = TextStream(utf8)
    parts = [stream.push(token) for token in text.encode()]
    assert "".join(parts) + stream.flush() == text
    assert not any("\ufffd" in part for part in parts)


def test_increments_keep_the_spaces_between_words() -> None:
    stream = TextStream(words)
    assert [stream.push(token) for token in (3, 4, 5)] == ["w3", " w4", " w5"]


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    stream = TextStream(utf8)
    assert stream.push(0xF0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_end_of_text_is_a_token_but_no_text() -> None:
    out, released = growing("abc")
    assert (out.stopped, out.text, out.token_ids) == ("eos", "abc", [*b"abc", EOS])
    assert "".join(released) == "abc"


def test_length_ends_the_text() -> None:
    out, _ = growing("abcdef", max_tokens=4)
    assert (out.stopped, out.text, len(out.token_ids)) == ("length", "abcd", 4)


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (["\n"], "one two"),
        (["two", "one two"], ""),
        (["o\nt"], "one tw"),
        (["xyz"], "one two\nthree"),
    ],
)
def test_stop_strings_end_the_text_and_are_not_part_of_it(stop: list[str], want: str) -> None:
    out, released = growing("one two\nthree", stop=stop)
    assert out.text == "".join(released) == want
    assert out.stopped == ("eos" if want.endswith("three") else "stop")


def test_what_may_become_a_stop_string_is_held_back() -> None:
    out, released = growing("ab##c###d", stop=["###"])
    assert released == ["a", "b", "", "", "##c", "", "", ""]
    assert out.text == "ab##c"


def test_a_held_start_of_a_stop_string_is_released_at_the_end() -> None:
    out, released = growing("ab##", stop=["###"])
    assert out.text == "ab##"
    assert released[-1] == "##"


@pytest.mark.parametrize("stop", ["ab", ["ab", ""]])
def test_what_is_no_list_of_texts_is_refused(stop: Sequence[str]) -> None:
    with pytest.raises(InputError, match="stop"):
        growing("abc", stop=stop)
