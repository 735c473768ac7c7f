"""Put load on a running `lynxkv serve`: many clients, each answer compared with the one it gets alone.

    python examples/load_serve.py http://127.0.0.1:8000 --cache readme.lynx --clients 32 --seconds 300

OpenAI's client asks each question alone and streams one answer, and clients leave in the middle of theirs. Then all ask
at a time, every fourth request as a stream, some leaving. Answers are greedy. What the server refuses is counted by its
code. Exit code 1: an answer differs from the one that its question got alone, a request hung, or there was no answer at
all; with --strict also, if a place was not free within a second, or the server's memory has changed by more than 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from openai import OpenAI

QUESTIONS = ["What is this?", "Who is it for?", "Which commands are there?", "What is the Anchor?", "Summarise it."]
HUNG_S = 400.0
FREE_S = 1.0
MOST_GROWTH = 0.05
LEAVERS = 8


class Load:
    """The clients of one server, and what became of their requests."""

    def __init__(self, url: str, cache: str, tokens: int, questions: list[str]) -> None:
        self._url, self._cache, self._tokens, self._questions = url, cache, tokens, questions
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HUNG_S)
        self._model = self._client.models.list().data[0].id
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.times: list[float] = []
        self.expected: dict[str, str] = {}

    def metric(self, name: str) -> float:
        """A number of the server's."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=HUNG_S) as response:
            lines = response.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def stream(self, question: str, *, tokens: int | None = None, stop_after: int | None = None) -> str:
        """An answer that is streamed, or the beginning of it: the client then leaves after so many chunks."""
        with self._client.chat.completions.create(
            **self._body(question, tokens or self._tokens), stream=True
        ) as chunks:
            text = ""
            for number, chunk in enumerate(chunks):
                text += chunk.choices[0].delta.content or ""
                if number == stop_after:
                    break
            return text

    def ask(self, question: str) -> str:
        """An answer as a whole."""
        answer = self._client.chat.completions.create(**self._body(question, self._tokens))
        return answer.choices[0].message.content or ""

    def ask_alone(self) -> None:
        """Each question by itself, until it has an answer."""
        for question in self._questions:
            self.expected[question] = until_answered(self.ask, question)

    def seconds_until_free(self) -> float:
        """How long it takes until nobody has a place, once clients have left in the middle of their answers."""
        with ThreadPoolExecutor(LEAVERS) as pool:
            asked = [
                pool.submit(self._leave, self._questions[number % len(self._questions)]) for number in range(LEAVERS)
            ]
            for each in asked:
                each.result()
        left = time.monotonic()
        while self.metric("lynxkv_requests_in_place"):
            time.sleep(0.01)
        return time.monotonic() - left

    def resident_bytes(self) -> float:
        """Memory of the server, once no run holds any."""
        while self.metric("lynxkv_memory_held_bytes"):
            time.sleep(0.1)
        return self.metric("process_resident_memory_bytes")

    def run(self, clients: int, seconds: float) -> None:
        """All clients, for so long."""
        ends_at = time.monotonic() + seconds
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda number: self._client_of(number, ends_at), range(clients)))

    def _client_of(self, number: int, ends_at: float) -> None:
        turn = number
        while time.monotonic() < ends_at:
            question, began = self._questions[turn % len(self._questions)], time.monotonic()
            outcome = self._outcome(question, stream=turn % 4 == 0, leaves=turn % 16 == 1)
            with self._lock:
                self.outcomes[outcome] += 1
                if outcome == "right":
                    self.times.append(time.monotonic() - began)
            turn += 1
            if outcome == "overloaded":
                time.sleep(1)

    def _outcome(self, question: str, *, stream: bool, leaves: bool) -> str:
        try:
            if leaves:
                self._leave(question)
                return "left"
            text = self.stream(question) if stream else self.ask(question)
            return "right" if text == self.expected[question] else "wrong"
        except openai.APITimeoutError:
            return "hung"
        except openai.APIError as error:
            return str(error.code or type(error).__name__)

    def _leave(self, question: str) -> None:
        """Leave after the first text of a long answer."""
        try:
            self.stream(question, tokens=512, stop_after=1)
        except openai.APITimeoutError:
            raise
        except openai.APIError:
            return

    def _body(self, question: str, tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": tokens,
            "extra_body": {"lynx": {"cache": self._cache}},
        }


def until_answered(ask: Callable[[str], str], question: str) -> str:
    """The answer to a question, asked again when the server has none."""
    while True:
        try:
            return ask(question)
        except openai.APIError:
            time.sleep(0.1)


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--cache", required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--strict", action="store_true", help="fail for slow places and changed memory, too")
    parser.add_argument("--question", action="append", help="may be given again; a few of any text by default")
    options = parser.parse_args()
    load = Load(options.url, options.cache, options.tokens, options.question or QUESTIONS)

    load.ask_alone()
    question, expected = next(iter(load.expected.items()))
    streamed = until_answered(load.stream, question)
    print(f"streamed: {question} {streamed!r}")
    free_s = [load.seconds_until_free()]
    before = load.resident_bytes()
    load.run(options.clients, options.seconds)
    free_s.append(load.seconds_until_free())
    after = load.resident_bytes()

    growth = after / before - 1
    print(f"{options.clients} clients, {options.seconds:g} s: {dict(load.outcomes)}")
    if len(load.times) > 1:
        cuts = statistics.quantiles(load.times, n=100)
        print(
            f"answers: median {cuts[49]:.2f} s, 99 of 100 within {cuts[98]:.2f} s, all within {max(load.times):.2f} s"
        )
    print(f"places of {LEAVERS} clients that left: free within {max(free_s):.2f} s")
    print(f"memory of the server: {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after ({growth:+.1%})")
    wrong = load.outcomes["wrong"] or load.outcomes["hung"] or streamed != expected
    loose = options.strict and (max(free_s) > FREE_S or abs(growth) > MOST_GROWTH)
    return 1 if wrong or loose or not load.times else 0


if __name__ == "__main__":
    sys.exit(main())
