"""Traces: a run's spans as Chrome trace events and as a drawing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import encode
from lynxkv.errors import InputError
from lynxkv.events import GenerateResult, Span, Track
from lynxkv.models import prefill
from lynxkv.plotting import check_writable
from lynxkv.runner import generate
from lynxkv.testing.readers import ScriptedReader
from lynxkv.testing.tiny_models import tiny_model
from lynxkv.trace import Trace


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, GenerateResult, int]:
    model, url = tiny_model("llama"), str(tmp_path_factory.mktemp("trace") / "cache.lynx")
    codec = Uniform(key_step=0.7, value_step=0.9, radix=32)
    encode(prefill(model, list(range(3, 30))), url, codec=codec, identity=model.identity)
    trace = Trace()
    with ScriptedReader(url, arrivals=[0, 2]) as reader:
        result = generate(reader, model, [5, 6], max_new_tokens=8, speculate=4, on_event=trace.on_event)
        return trace, result, reader.bytes_residual


def test_spans_add_up_to_what_the_run_did(run: tuple[Trace, GenerateResult, int]) -> None:
    trace, result, bytes_residual = run
    amounts: dict[str, list[int]] = {}
    for span in trace.spans:
        assert 0 <= span.start_s <= span.stop_s <= result.total_s
        amounts.setdefault(span.track, []).append(span.amount)
    assert amounts["fetch"] == [result.bytes_anchor, bytes_residual]
    assert trace.bookkeeping is not None
    assert 0 < trace.bookkeeping < 1
    assert sum(amounts["draft"]) == 2 + result.drafted - 1
    assert amounts["verify"] == [2 + result.drafted]
    assert amounts.get("plain", []) == [1] * (len(result.token_ids) - result.accepted - 1)


def test_bookkeeping_is_what_goes_into_neither_steps_nor_refining() -> None:
    trace = Trace()
    assert trace.bookkeeping is None
    spans: list[tuple[Track, float, float]] = [
        ("fetch", 0.0, 9.0),
        ("refine", 0.0, 1.0),  # before the draft
        ("draft", 1.0, 2.0),
        ("refine", 2.25, 2.75),
        ("draft", 3.0, 4.5),  # half a second beside a step of one and a half
        ("draft", 5.0, 6.5),  # and again
        ("verify", 7.5, 8.0),
        ("draft", 8.25, 8.5),  # a second stage
        ("draft", 8.5, 9.5),  # nothing beside a step of one
        ("plain", 9.75, 9.875),
    ]
    for track, start_s, stop_s in spans:
        trace.on_event(Span(track, start_s, stop_s, 1))
    assert trace.bookkeeping == 1 / (1 + 4)


def test_a_chrome_trace_has_a_named_track_for_every_span(
    run: tuple[Trace, GenerateResult, int], tmp_path: Path
) -> None:
    trace, result, _ = run
    trace.write(tmp_path / "out.json", result)
    written = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert written["otherData"] == {"bookkeeping": trace.bookkeeping}
    events = written["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(trace.spans)
    assert all(names[span["tid"]] == span["name"] and span["dur"] >= 0 for span in spans)
    instants = {event["name"]: event["ts"] for event in events if event["ph"] == "i"}
    assert result.first_draft_s is not None
    assert instants == {
        "first draft token": result.first_draft_s * 1e6,
        "first verified token": result.first_verified_s * 1e6,
    }
    with pytest.raises(InputError, match="cannot write"):
        trace.write(tmp_path, result)
    for path in (tmp_path, tmp_path / "missing" / "out.json"):
        with pytest.raises(InputError, match="cannot write"):
            check_writable(path)


def test_a_time_line_is_drawn(run: tuple[Trace, GenerateResult, int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, result, _ = run
    trace.plot(tmp_path / "out.png", result)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="cannot draw"):
        trace.plot(tmp_path / "out.nothing", result)
