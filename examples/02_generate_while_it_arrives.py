"""Answer a question from a cache that is still arriving, and show what happens when.

    python examples/02_generate_while_it_arrives.py

The model is SmolLM2-135M-Instruct; the cache comes over a simulated link of 20 Mbit/s.
"""

from __future__ import annotations

import tempfile
import time
from pydoc_data.topics import topics

import lynxkv
from lynxkv.events import Drafted, Event, Phase, Rejected, Verified
from lynxkv.integrations.hf import open_turn, suffix


def main() -> None:
    """Prefill, encode, and generate on the same machine."""
    model = lynxkv.load_model("smollm2", report=print)
    kv = lynxkv.prefill(model, open_turn(model.tokenizer, topics["with"]))

    with tempfile.TemporaryDirectory() as folder:
        url = f"{folder}/with.lynx"
        lynxkv.encode(kv, url, identity=model.identity)

        started = time.perf_counter()

        def show(event: Event) -> None:
            """One line an event, with the seconds since the start."""
            at = f"{time.perf_counter() - started:6.2f} s"
            match event:
                case Phase():
                    print(f"{at}  -- {event.name}")
                case Drafted():
                    print(f"{at}  draft     {event.text!r}")
                case Verified():
                    print(f"{at}  verified  {event.text!r}")
                case Rejected():
                    print(f"{at}  rejected  {event.text!r}")

        with lynxkv.open(url, link=lynxkv.Link.parse("20mbit")) as reader:
            question = suffix(model.tokenizer, "What does the with statement do?")
            result = lynxkv.generate(reader, model, question, max_new_tokens=40, on_event=show)

    print(f"\n{result.text}\n\ndrafted {result.drafted}, accepted {result.accepted}")


if __name__ == "__main__":
    main()
