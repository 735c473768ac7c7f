"""The `lynxkv` command: its commands and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from lynxkv import __version__
from lynxkv_cli import bench, calibrate, check, encode, export, generate, inspect, ls, plan, prune, rm, serve

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
app.command(help=calibrate.HELP, short_help="Find a model's basis, once, for smaller caches.")(calibrate.calibrate)
app.command(help=inspect.HELP, short_help="Say what a cache is and where its bytes go.")(inspect.inspect)
app.command(help=check.HELP, short_help="Read all of a cache and check every byte of it.")(check.check)
app.command(help=generate.HELP, short_help="Answer a question from a cache while it arrives.")(generate.generate)
app.command(help=serve.HELP, short_help="Serve answers from caches over HTTP.")(serve.serve)
app.command(help=plan.HELP, short_help="Say which codec suits a model, a prompt and a link.")(plan.plan)
app.command(help=ls.HELP, short_help="List the caches under a folder or prefix.")(ls.ls)
app.command(help=rm.HELP, short_help="Remove caches.")(rm.rm)
app.command(help=prune.HELP, short_help="Remove what is not needed any more, by age and by size.")(prune.prune)
app.command(help=export.HELP, short_help="Write a cache to a plain safetensors file.")(export.export)
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


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; all errors are raised.

    Typer's own way of running a command keeps some of them: end of file, interrupts and broken pipes.
    """
    command = get_command(app)
    try:
        with command.make_context("lynxkv", list(arguments) or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0
