"""The `lynxkv` command: its commands, and the one place where errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from lynxkv import __version__
from lynxkv_cli import bench, check, encode, generate, inspect
from lynxkv_cli._errors import FAILED, INTERRUPTED, report
from lynxkv_cli._output import Output

HELP = """Example: lynxkv encode @README.md --model smollm2 --out readme.lynx

Progressive KV caches: decode from the Anchor at once, verify with the Residual when it arrives.

Data goes to stdout, progress and messages to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 130
interrupted. LYNXKV_DEBUG=1 shows tracebacks; NO_COLOR turns styles off.
"""

app = typer.Typer(
    help=HELP,
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command(help=encode.HELP, short_help="Prefill a prompt and publish its KV cache.")(encode.encode)
app.command(help=inspect.HELP, short_help="Say what a cache is and where its bytes go.")(inspect.inspect)
app.command(help=check.HELP, short_help="Read all of a cache and check every byte of it.")(check.check)
app.command(help=generate.HELP, short_help="Answer a question from a cache while it arrives.")(generate.generate)
app.add_typer(bench.app, name="bench", short_help="Measure codecs on real caches, kernels on this machine.")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; whatever is raised has been reported."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that the locale cannot show must not end in a traceback
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="lynxkv", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        return report(error, Output.of(as_json=as_json, quiet=False))
    if code == INTERRUPTED:  # Typer has caught the KeyboardInterrupt.
        return report(KeyboardInterrupt(), Output.of(as_json=as_json, quiet=False))
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
