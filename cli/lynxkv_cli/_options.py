"""Options and arguments that several commands share, and how their values are read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lynxkv.errors import InputError
from lynxkv_cli._errors import UsageProblem

if TYPE_CHECKING:
    from lynxkv.store import Link

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="The cache: a folder or any fsspec URL (s3://, http://, memory://)."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; docs/json.md has its schema.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages, only data.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The alias smollm2, a Hugging Face folder or hub id, or a .gguf file.",
    ),
]

Dtype = Literal["bf16", "fp16", "fp32"]
Verify = Literal["none", "full", "exact"]
LINK_FORM = "write it like 200mbit or 1gbit/20ms"


def read_text(value: str, *, name: str) -> str:
    """The text that an argument stands for: itself, the file of `@path`, or stdin for `-`.

    Raises UsageProblem if the file cannot be read as UTF-8 text.
    """
    if value == "-":
        source, data = "stdin", sys.stdin.buffer.read()
    elif value.startswith("@"):
        source = value[1:]
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            hint = f"@ reads {name} from a file; quote the text and put a space before @ if it is not a path"
            raise UsageProblem(f"cannot read {source}: {error.strerror}", hint=hint) from error
    else:
        return value
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "convert it to UTF-8 first"
        raise UsageProblem(f"{source} is not UTF-8 text (byte {error.start})", hint=hint) from error


def parse_link(value: str | None) -> Link | None:
    """A simulated link from `RATE[/ROUND_TRIP]`, say `200mbit/20ms`."""
    if value is None:
        return None
    from lynxkv.store import Link

    try:
        return Link.parse(value)
    except InputError as error:
        raise UsageProblem(error.message, hint=error.hint or LINK_FORM) from error


def parse_speculate(value: str) -> Literal["auto", "off"] | int:
    """`auto`, `off`, or the number of draft tokens."""
    if value == "auto" or value == "off":
        return "auto" if value == "auto" else "off"
    if value.isascii() and value.isdigit() and 1 <= int(value) <= 4096:
        return int(value)
    hint = "use auto, off, or a number of draft tokens from 1 to 4096"
    raise UsageProblem(f"{value!r} is not a way to speculate", hint=hint)
