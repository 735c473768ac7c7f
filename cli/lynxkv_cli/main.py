"""The entry point, and the one place where errors end. Imports next to nothing: an import can be interrupted, too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from lynxkv_cli._streams import open_streams

# Long enough to tidy up after an interrupt that was not lost.
INSIST_S = 3.0


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
    insist_on_interrupts()
    try:
        code = run(arguments) if stdout_open else _guarded(_refuse_closed_stdout, arguments)
    except KeyboardInterrupt:  # a second one, while the first was being reported
        code = 130
    # From here on there is nothing to tidy: an interrupt ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def insist_on_interrupts() -> None:
    """Let an interrupt be raised again until it has ended the command.

    It can be raised where whoever called lets no exception through: a finalizer, a callback from compiled code, an
    import that tries something and takes any failure for a no.
    """

    def interrupt(number: int, frame: object) -> None:
        _set_alarm(INSIST_S)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in the background
        signal.signal(signal.SIGINT, interrupt)
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, interrupt)


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _guarded(command: Callable[[], int], arguments: Sequence[str]) -> int:
    """The exit code of `command`, or of the error that it ended with, after reporting it."""
    try:
        code = command()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        _set_alarm(0.0)
        from lynxkv_cli._errors import report
        from lynxkv_cli._output import Output

        as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
        return report(error, Output.of(as_json=as_json, quiet=False))
    return code


def _refuse_closed_stdout() -> int:
    from lynxkv_cli._streams import StdoutError

    raise StdoutError(OSError(0, "it is closed"))
