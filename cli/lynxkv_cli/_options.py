"""Options and arguments that several commands share, and how their values are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lynxkv.choices import ModelDtype, TransportName
from lynxkv.errors import InputError
from lynxkv_cli._errors import UsageProblem

if TYPE_CHECKING:
    from lynxkv.store import Link

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="The cache: a folder or any fsspec URL (s3://, https://, gs://)."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; docs/json.md has its schema.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages, only data.")]
ResidualUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where the Residual is, if it was written with encode --residual-out."),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", envvar="LYNXKV_CACHE_DIR", help="Keep what is fetched from other machines in this folder."
    ),
]
CacheMaxBytes = Annotated[
    str,
    typer.Option(
        metavar="SIZE", envvar="LYNXKV_CACHE_MAX_BYTES", help="What it may take; the least lately used is dropped."
    ),
]
CACHE_MAX_BYTES = "16GiB"
Tokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Load the first N tokens only, and fetch no more than these need."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The alias smollm2, a Hugging Face folder or hub id, or a .gguf file.",
    ),
]

ModelDtypeOption = Annotated[
    ModelDtype, typer.Option("--model-dtype", help="Of the model's weights and its live cache.")
]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", help="Where the model runs, as torch names it: cpu, cuda, cuda:1.")
]
Transport = Annotated[TransportName, typer.Option(help="What makes the requests.")]
Concurrency = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=256, help="Requests in flight; lynxkv bench fetch says what suits a store and a link."
    ),
]
Deadline = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Fetch no longer than this; without it for as long as it takes.")
]

BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LINK_FORM = "write it like 200mbit or 1gbit/20ms"
# More than any model's context holds, and little enough that an endless file or pipe does no harm.
MAX_TEXT_BYTES = 64 << 20


def read_text(value: str, *, name: str, note: Callable[[str], None]) -> str:
    """The text that an argument stands for: itself, the file of `@path`, or stdin for `-`.

    Args:
        name: what the text is: a prompt, a question.
        note: is told when a terminal is waited for.

    Raises:
        UsageProblem: there is no such file or stdin, or what it holds is not text.
        InputError: the text is empty or longer than any prompt.
    """
    if value == "-":
        source, data = "stdin", _read_stdin(name, note)
    elif value.startswith("@"):
        source, data = value[1:], _read_file(value[1:], name)
    else:
        # Python keeps the bytes of arguments that are not text as surrogates, which UTF-8 has no place for.
        source, data = f"the {name} on the command line", value.encode("utf-8", "surrogatepass")
    if len(data) > MAX_TEXT_BYTES:
        raise InputError(f"{source} is longer than {MAX_TEXT_BYTES >> 20} MiB", hint="no model takes as much text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "convert it to UTF-8 first"
        raise UsageProblem(f"{source} is not UTF-8 text (byte {error.start})", hint=hint) from error
    if not text.strip():
        raise InputError(f"the {name} is empty", hint="give some text, @FILE, or - for stdin")
    return text


def _read_stdin(name: str, note: Callable[[str], None]) -> bytes:
    if sys.stdin is None:
        raise UsageProblem("stdin is closed", hint=f"pipe the {name} into it, or give it as text or as @FILE")
    if sys.stdin.isatty():
        note(f"type the {name}, then Ctrl-D at the start of a line")
    try:
        return sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UsageProblem(f"cannot read stdin: {error.strerror}", hint=f"pipe the {name} into it") from error


def _read_file(path: str, name: str) -> bytes:
    if not path:
        raise UsageProblem("@ names no file", hint=f"write @FILE to read the {name} from one")
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        hint = f"@ reads the {name} from a file; quote the text and put a space before @ if it is not a path"
        raise UsageProblem(f"cannot read {path}: {error.strerror}", hint=hint) from error


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
    if value.isascii() and value.isdigit() and len(value) <= 4 and 1 <= int(value) <= 4096:
        return int(value)
    hint = "use auto, off, or a number of draft tokens from 1 to 4096"
    raise UsageProblem(f"{value!r} is not a way to speculate", hint=hint)


def parse_size(text: str) -> int:
    """Bytes from `500MB`, `100GB`, `1.5TB`; KiB, MiB, GiB, TiB count in powers of 1,024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise UsageProblem(f"cannot read the size {text!r}", hint="write it like 500MB, 100GB or 64GiB")
    return int(float(match[1]) * BYTES[match[2] or ""])
