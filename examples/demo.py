"""What `make demo` shows: a real model answers from a cache that is still arriving.

A document of more than 2,000 tokens is prefilled and encoded once. Then the cache is read over a simulated link: in a
terminal, text drafted on the Anchor is dimmed and turns solid once the Residual has confirmed it. At the end the text
is compared, token for token, with that of plain decoding from the full cache.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

MODEL = "smollm2"
LINK = "25mbit"
QUESTION = "What does the with statement do?"
NEW_TOKENS = "64"


def lynxkv(*arguments: str, folder: Path, capture: bool = False) -> str:
    """Run a command as a person would, and show it; ends the demo if it fails."""
    print(f"\n$ lynxkv {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "lynxkv_cli", *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def generate(*options: str, folder: Path) -> dict[str, Any]:
    """The result of a `generate --json` run."""
    command = ("generate", "document.lynx", "--prompt", QUESTION, "--max-new-tokens", NEW_TOKENS)
    result: dict[str, Any] = json.loads(lynxkv(*command, *options, "--json", folder=folder, capture=True))
    return result


def main() -> int:
    """Run the demo; 0 if the two texts are the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        document = "\n\n".join(topics[topic] for topic in ("try", "with"))
        (folder / "document.txt").write_text(document, "utf-8")
        print(f"The document: {len(document.split()):,} words on exceptions and `with`, from Python's own help.")

        lynxkv("encode", "@document.txt", "--model", MODEL, "--out", "document.lynx", folder=folder)
        lynxkv("check", "document.lynx", folder=folder)
        question = ("--prompt", QUESTION, "--max-new-tokens", NEW_TOKENS)
        lynxkv("generate", "document.lynx", *question, "--link", LINK, folder=folder)

        print("\nThe same again, compared with waiting for the full cache:")
        progressive = generate("--link", LINK, folder=folder)
        waiting = generate("--link", LINK, "--speculate", "off", folder=folder)

    same = progressive["token_ids"] == waiting["token_ids"] and progressive["text"] == waiting["text"]
    first = progressive["first_draft_s"]
    print(
        f"""
Anchor {progressive["bytes_anchor"] / 1e6:.1f} MB, Residual {progressive["bytes_residual"] / 1e6:.1f} MB, over {LINK}
drafted {progressive["drafted"]} tokens on the Anchor, {progressive["accepted"]} of them verified
first draft token     {first:6.2f} s
first verified token  {progressive["first_verified_s"]:6.2f} s   without speculation {waiting["first_verified_s"]:.2f} s
the whole text        {progressive["total_s"]:6.2f} s   without speculation {waiting["total_s"]:.2f} s
text and tokens {"IDENTICAL to" if same else "DIFFERENT from"} decoding from the full cache"""
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
