"""What is counted and measured, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from lynxkv.server.outcome import Answer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("lynxkv_requests", "Requests", ["route", "status"], registry=registry)
        self._failures = Counter("lynxkv_failures", "Requests without an answer", ["code"], registry=registry)
        self._answers = Counter("lynxkv_answers", "Answers by where they came from", ["source"], registry=registry)
        self._loads = Counter("lynxkv_load_failures", "Caches that could not be loaded", ["code"], registry=registry)
        self._first = Histogram(
            "lynxkv_first_token_seconds",
            "Until the first token, from opening the cache or from the prompt's arrival",
            ["kind"],
            buckets=SECONDS,
            registry=registry,
        )
        self._seconds = Histogram("lynxkv_answer_seconds", "Until the last token", buckets=SECONDS, registry=registry)
        self._accepted = Histogram(
            "lynxkv_accepted_tokens",
            "Draft tokens that passed, of runs that drafted",
            buckets=TOKENS,
            registry=registry,
        )
        self._together = Histogram(
            "lynxkv_decoded_together",
            "Requests decoded together, by answer from a cache",
            buckets=(1, 2, 4, 8, 16, 32),
            registry=registry,
        )
        self._drafted = Counter("lynxkv_drafted_tokens", "Draft tokens", registry=registry)
        self._bytes = Counter("lynxkv_read_bytes", "Bytes of caches that were read", ["shard"], registry=registry)
        self._prompt = Counter("lynxkv_prompt_tokens", "Tokens of prompts", ["kind"], registry=registry)
        self._new = Counter("lynxkv_new_tokens", "Tokens of answers", registry=registry)
        self._published = Counter("lynxkv_publish", "Prompts to be published", ["outcome"], registry=registry)

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Show a value that somebody else keeps, as it is when it is asked for."""
        Gauge(name, help_text, registry=self.registry).set_function(value)

    def request(self, route: str, status: int) -> None:
        """A response was sent, or its client left."""
        self._requests.labels(route, str(status)).inc()

    def failure(self, code: str) -> None:
        """A request got no answer, or only a part of it."""
        self._failures.labels(code).inc()

    def load_failure(self, code: str) -> None:
        """A cache could not be loaded, whatever was done about it."""
        self._loads.labels(code).inc()

    def published(self, outcome: str) -> None:
        """What became of a prompt that might have been published."""
        self._published.labels(outcome).inc()

    def answer(self, answer: Answer) -> None:
        """An answer is complete."""
        result = answer.result
        self._answers.labels(answer.source).inc()
        self._first.labels("verified").observe(result.first_verified_s)
        if result.first_draft_s is not None:
            self._first.labels("draft").observe(result.first_draft_s)
            self._accepted.observe(result.accepted)
        self._seconds.observe(result.total_s)
        if answer.source == "cache":
            self._together.observe(answer.together)
        self._drafted.inc(result.drafted)
        self._bytes.labels("anchor").inc(result.bytes_anchor)
        self._bytes.labels("residual").inc(result.bytes_residual)
        self._prompt.labels("cached").inc(answer.cached_tokens)
        self._prompt.labels("computed").inc(answer.prompt_tokens - answer.cached_tokens)
        self._new.inc(len(result.token_ids))

    def page(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
