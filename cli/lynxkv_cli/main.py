"""The entry point, and the one place where errors end. Imports next to nothing: an import can be interrupted, too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from lynxkv_cli._streams import open_streams


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; whatever is raised has been reported."""

    def command() -> int:
        from lynxkv_cli.app import invoke

        return invoke(arguments)

    return _guarded(command, arguments)


def main() -> None:
    """The entry point of the console script."""
    arguments = sys.argv[1:]
    stdout_open = open_streams()
    try:
        code = run(arguments) if stdout_open else _guarded(_refuse_closed_stdout, arguments)
    except KeyboardInterrupt:  # a second one, while the first was being reported
        code = 130
    # From here on there is nothing to tidy: an interrupt ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def _guarded(command: Callable[[], int], arguments: Sequence[str]) -> int:
    """The exit code of `command`, or of the error that it ended with, after reporting it."""
    try:
        code = command()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        from lynxkv_cli._errors import report
        from lynxkv_cli._output import Output

        as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
        return report(error, Output.of(as_json=as_json, quiet=False))
    return code


def _refuse_closed_stdout() -> int:
    from lynxkv_cli._streams import StdoutError

    raise StdoutError(OSError(0, "it is closed"))
