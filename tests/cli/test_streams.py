"""Streams that are closed, full or not text, and interrupts at any time: a message, an exit code, no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

LYNXKV = f"{sys.executable} -m lynxkv_cli"
FULL = "No space left on device"


def shell(command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command with redirections; never a traceback."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    for word in ("Traceback", "Exception ignored", "unexpected"):
        assert word not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("--version >&-", 1, ["cannot write to stdout: it is closed", "hint: "]),
        ("--version --json >&- 2>&-", 1, []),
        ("--version >/dev/full", 1, [f"cannot write to stdout: {FULL}", "hint: "]),
        # An error that cannot be told as JSON is told in words.
        ("check --json >/dev/full", 2, ["error: Missing argument", "hint: "]),
        ("check --json >/dev/full 2>/dev/full", 2, []),
        ("check 2>/dev/full", 2, []),
        ("check 2>&-", 2, []),
        ("encode - --model m --out x.lynx <&-", 2, ["stdin is closed", "hint: "]),
        (r"encode $'gr\xfc\xdfe' --model m --out x.lynx", 2, ["the prompt on the command line is not UTF-8"]),
    ],
)
def test_streams_that_cannot_be_used(command: str, code: int, words: list[str]) -> None:
    returned, out, err = shell(f"{LYNXKV} {command}")
    assert (returned, out) == (code, "")
    assert bool(err) is bool(words)
    for word in words:
        assert word in err


def test_messages_that_cannot_be_shown_are_no_failure() -> None:
    assert shell(f"{LYNXKV} --version 2>&-")[0] == 0
    assert shell(f"{LYNXKV} --version 2>/dev/full")[0] == 0


def test_a_reader_that_leaves_early_is_no_error() -> None:
    _, out, err = shell(f"{LYNXKV} --help | true; echo ${{PIPESTATUS[0]}}")
    assert err == ""
    assert out.strip() in {"0", "1"}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers here")
def test_an_interrupt_that_somebody_swallows_comes_again() -> None:
    code = textwrap.dedent("""
        import os, signal, sys, time, types
        from lynxkv_cli import main

        def invoke(arguments):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except BaseException:
                pass
            time.sleep(60)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without
        main.INSIST_S = 0.1
        sys.modules["lynxkv_cli.app"] = types.SimpleNamespace(invoke=invoke)
        main.main()
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted\n"


@pytest.mark.parametrize(("times", "err"), [(1, "error: interrupted\n"), (2, "")])
def test_an_interrupt_during_imports(times: int, err: str) -> None:
    script = f"""
import sys
class Interrupt:
    left = {times}
    def find_spec(self, name, path, target=None):
        if name == "typer" and Interrupt.left:
            Interrupt.left -= 1
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["lynxkv", "--help"]
from lynxkv_cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", err)
