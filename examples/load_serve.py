"""Put load on a running `lynxkv serve`: many clients, each answer compared with the one it gets alone.

    python examples/load_serve.py http://127.0.0.1:8000 --cache readme.lynx --clients 32 --seconds 300

Answers are greedy. What the server refuses is counted by its code. Exit code 1: an answer differs from the one that its
question got alone, a request hung, or there was no answer at all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

QUESTIONS = ["What is this?", "Who is it for?", "Which commands are there?", "What is the Anchor?", "Summarise it."]
HUNG_S = 600.0


def call(url: str, body: dict[str, Any] | None = None) -> tuple[str, bytes]:
    """A code, empty if all is well, and the body of a response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HUNG_S) as response:
            return "", response.read()
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["error"]["code"]), b""


def resident_bytes(url: str) -> float:
    """Memory of the server, as its metrics say."""
    lines = call(f"{url}/metrics")[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("process_resident_memory_bytes"))


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--cache", required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--question", action="append", help="may be given again; a few of any text by default")
    options = parser.parse_args()
    questions = options.question or QUESTIONS
    model = json.loads(call(f"{options.url}/v1/models")[1])["data"][0]["id"]

    def ask(question: str) -> tuple[str, str]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": options.tokens,
            "lynx": {"cache": options.cache},
        }
        code, answer = call(f"{options.url}/v1/chat/completions", body)
        return code, "" if code else json.loads(answer)["choices"][0]["message"]["content"]

    def alone(question: str) -> str:
        while (answer := ask(question))[0]:
            time.sleep(0.1)
        return answer[1]

    expected = {question: alone(question) for question in questions}
    before = resident_bytes(options.url)
    lock, outcomes, times = threading.Lock(), Counter[str](), list[float]()
    ends_at = time.monotonic() + options.seconds

    def client(number: int) -> None:
        turn = number
        while time.monotonic() < ends_at:
            question = questions[turn % len(questions)]
            began = time.monotonic()
            try:
                code, text = ask(question)
                outcome = code or ("right" if text == expected[question] else "wrong")
            except TimeoutError:
                outcome = "hung"
            except OSError as error:
                outcome = type(error).__name__
            with lock:
                outcomes[outcome] += 1
                if outcome == "right":
                    times.append(time.monotonic() - began)
            turn += 1
            if outcome == "overloaded":
                time.sleep(1)

    with ThreadPoolExecutor(options.clients) as pool:
        list(pool.map(client, range(options.clients)))
    after = resident_bytes(options.url)
    print(f"{options.clients} clients, {options.seconds:g} s: {dict(outcomes)}")
    if len(times) > 1:
        cuts = statistics.quantiles(times, n=100)
        print(f"answers: median {cuts[49]:.2f} s, 99 of 100 within {cuts[98]:.2f} s")
    print(f"memory of the server: {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after")
    return 1 if outcomes["wrong"] or outcomes["hung"] or not times else 0


if __name__ == "__main__":
    sys.exit(main())
