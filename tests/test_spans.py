"""Prompts into stores: what is there of them is continued, spans appear as they are computed, and readers follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import lynxkv
from lynxkv.codecs.uniform import Uniform
from lynxkv.encoder import EncodeReport
from lynxkv.events import Event, Note
from lynxkv.fetch import CacheReader, FetchOptions, SegmentStream, SpanReader
from lynxkv.integrations.hf import Model
from lynxkv.layout import Extent
from lynxkv.prefix_search import StoredPrefix, longest_prefix
from lynxkv.spans import PromptReport
from lynxkv.store import Store
from lynxkv.testing.filesystem import filesystem_of, simulated
from lynxkv.testing.tiny_models import tiny_model

COARSE = Uniform(key_step=0.7, value_step=0.9, radix=32)


def some_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 48, (count,), generator=generator).tolist()


IDS = some_ids(500)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("llama", max_position_embeddings=1024)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.follow.FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr("lynxkv.fetch.follow.LONGEST_PAUSE_S", 0.01)


def publish(model: Model, url: object, ids: list[int] = IDS, **options: Any) -> PromptReport:
    return lynxkv.encode_prompt(model, ids, str(url), **{"codec": COARSE, **options})


def text(model: Model, url: object, **options: Any) -> list[int]:
    with lynxkv.open(str(url), **options) as reader:
        return lynxkv.generate(reader, model, [5, 6], max_new_tokens=12).token_ids


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestContinuing:
    def test_only_the_rest_is_prefilled(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300])
        ran: list[int] = []
        report = publish(model, tmp_path / "b.lynx", progress=lambda stage, done, total: ran.append(done))
        assert report.continued_tokens == 300
        assert [span.name for span in report.continued] == ["a.lynx"]
        assert report.spans[0].tokens == 200
        assert min(ran) > 300 or ran[0] == 500
        assert lynxkv.load(tmp_path / "b.lynx").token_ids == IDS
        inspected = lynxkv.inspect(tmp_path / "b.lynx")
        assert inspected.parent is not None
        assert inspected.parent.precision == "full"
        lynxkv.check(tmp_path / "b.lynx")

    def test_its_keys_and_values_are_those_of_a_prefill_on_what_is_stored(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300], codec="raw", dtype="fp32")
        publish(model, tmp_path / "b.lynx", codec="raw", dtype="fp32")
        whole = lynxkv.prefill(model, IDS)
        for mine, right in zip(lynxkv.load(tmp_path / "b.lynx").layers, whole.layers, strict=True):
            for name, x in right.tensors.items():
                torch.testing.assert_close(mine.tensors[name], x, rtol=1e-4, atol=1e-4)

    def test_exact_values_are_continued_where_there_are_any(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300], exact=True)
        publish(model, tmp_path / "b.lynx", exact=True)
        parent = lynxkv.inspect(tmp_path / "b.lynx").parent
        assert parent is not None
        assert parent.precision == "exact"

    def test_the_last_tokens_of_what_is_stored_may_differ(self, model: Model, tmp_path: Path) -> None:
        """As they do where a text goes on and its last characters are cut into other tokens."""
        publish(model, tmp_path / "a.lynx", [*IDS[:299], 3 + (IDS[299] == 3)])
        report = publish(model, tmp_path / "b.lynx")
        assert report.continued_tokens == 299
        assert lynxkv.load(tmp_path / "b.lynx").token_ids == IDS

    def test_chains_grow(self, model: Model, tmp_path: Path) -> None:
        for stop in (300, 400, 500):
            report = publish(model, tmp_path / f"{stop}.lynx", IDS[:stop])
        assert [(span.name, span.stop) for span in report.continued] == [("300.lynx", 300), ("400.lynx", 400)]

    def test_saying_no(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300])
        assert publish(model, tmp_path / "b.lynx", continue_stored=False).continued == ()

    @pytest.mark.parametrize(
        ("stored", "wanted"),
        [
            ({"codec": "fast"}, {}),
            ({"dtype": "fp16"}, {}),
            ({}, {"exact": True}),
            ({"ids": IDS[:200]}, {}),  # less than a block
            ({"ids": IDS}, {}),  # all of it
            ({"ids": [*IDS[:300], *some_ids(150, seed=3)]}, {}),  # too much besides
            ({"ids": [7, *IDS[:300]]}, {}),
        ],
    )
    def test_what_is_not_continued(
        self, stored: dict[str, Any], wanted: dict[str, Any], model: Model, tmp_path: Path
    ) -> None:
        publish(model, tmp_path / "a.lynx", **{"ids": IDS[:300], **stored})
        assert publish(model, tmp_path / "b.lynx", **wanted).continued == ()

    def test_a_cache_of_another_model_is_not_continued(self, model: Model, tmp_path: Path) -> None:
        publish(tiny_model("llama", seed=1), tmp_path / "a.lynx", IDS[:300])
        assert publish(model, tmp_path / "b.lynx").continued == ()

    def test_what_cannot_be_loaded_is_prefilled(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300])
        (residual,) = (tmp_path / "a.lynx").glob("residual-*")
        residual.unlink()
        (tmp_path / "broken.lynx").mkdir()
        (tmp_path / "broken.lynx" / "anchor.safetensors").write_bytes(b"nothing")
        assert publish(model, tmp_path / "b.lynx").continued == ()

    def test_token_ids_need_not_be_stored(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300], store_token_ids=False)
        assert publish(model, tmp_path / "b.lynx", IDS[:450], store_token_ids=False).continued_tokens == 300
        assert publish(model, tmp_path / "c.lynx").continued_tokens == 450
        lynxkv.check(tmp_path / "c.lynx")

    def test_the_longest_is_found(self, model: Model, tmp_path: Path) -> None:
        for stop in (260, 400, 300):
            publish(model, tmp_path / f"{stop}.lynx", IDS[:stop], continue_stored=False)
        found = longest_prefix(Store(tmp_path / "x.lynx"), IDS, model.identity, codec=COARSE, dtype="bf16", exact=False)
        with lynxkv.open(tmp_path / "400.lynx") as reader:
            right = StoredPrefix(url=reader.url, tokens=400, header_sha256=reader.anchor_head.header_sha256)
        assert found == right
        elsewhere = Store(tmp_path / "deeper" / "x.lynx")
        assert longest_prefix(elsewhere, IDS, model.identity, codec=COARSE, dtype="bf16", exact=False) is None

    def test_of_many_caches_the_last_are_searched(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lynxkv.prefix_search.MOST_SEARCHED", 2)
        for name, ids in {"a": some_ids(300, 7), "b": some_ids(300, 8), "c": IDS[:300]}.items():
            publish(model, tmp_path / f"{name}.lynx", ids, continue_stored=False)
        report = publish(model, tmp_path / "d.lynx")
        assert [(span.name, span.stop) for span in report.continued] == [("c.lynx", 300)]
        assert lynxkv.load(tmp_path / "d.lynx").token_ids == IDS
        lynxkv.check(tmp_path / "d.lynx")

    @pytest.mark.parametrize("tokens", [300, 200])
    def test_what_is_replaced_after_it_was_found_is_not_continued(
        self, tokens: int, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300])

        def search(*args: Any, **options: Any) -> StoredPrefix | None:
            found = longest_prefix(*args, **options)
            lynxkv.encode(
                lynxkv.prefill(model, some_ids(tokens, seed=5)),
                tmp_path / "a.lynx",
                codec=COARSE,
                identity=model.identity,
                overwrite=True,
            )
            return found

        monkeypatch.setattr("lynxkv.spans.longest_prefix", search)
        told: list[str] = []
        assert publish(model, tmp_path / "b.lynx", report=told.append).continued == ()
        assert len(told) == 1
        assert "a.lynx has the first 300 tokens, but cannot be continued: " in told[0]
        assert lynxkv.load(tmp_path / "b.lynx").token_ids == IDS

    @pytest.mark.parametrize("span_tokens", [None, 150])
    def test_residuals_of_what_is_continued_are_where_the_new_ones_go(
        self, span_tokens: int | None, model: Model, tmp_path: Path
    ) -> None:
        hot, cold = tmp_path / "hot", tmp_path / "cold"
        publish(model, hot / "a.lynx", IDS[:300], residual_url=cold)
        assert publish(model, hot / "b.lynx", residual_url=cold, span_tokens=span_tokens).continued_tokens == 300
        kept = lynxkv.load(hot / "b.lynx", options=FetchOptions(residual_url=cold))
        assert kept.token_ids == IDS
        told: list[str] = []
        assert publish(model, hot / "c.lynx", report=told.append).continued == ()
        assert len(told) == 1
        assert "is missing" in told[0]

    def test_windows_are_not_continued(self, tmp_path: Path) -> None:
        sliding = tiny_model("mistral")
        publish(sliding, tmp_path / "a.lynx", IDS[:300])
        assert publish(sliding, tmp_path / "b.lynx").continued == ()
        with pytest.raises(lynxkv.UnsupportedModelError, match="layer 0 of the model has a sliding window of 8"):
            publish(sliding, tmp_path / "c.lynx", span_tokens=100)


class TestSpans:
    def test_a_chain_of_spans(self, model: Model, tmp_path: Path) -> None:
        published: list[EncodeReport] = []
        report = publish(model, tmp_path / "a.lynx", span_tokens=150, on_span=published.append)
        assert names(tmp_path) == ["a.0000.lynx", "a.0001.lynx", "a.0002.lynx", "a.lynx"]
        assert [span.tokens for span in report.spans] == [150, 150, 150, 50]
        assert published == list(report.spans)
        assert lynxkv.load(tmp_path / "a.lynx").token_ids == IDS
        parent = lynxkv.inspect(tmp_path / "a.lynx").parent
        assert parent is not None
        assert parent.precision == "computed"
        assert lynxkv.check(tmp_path / "a.lynx").tokens == 500
        listed = lynxkv.list_caches(tmp_path)
        assert [(entry.tokens, entry.own_tokens, entry.part_of) for entry in listed] == [
            (150, 150, "a.lynx"), (300, 150, "a.lynx"), (450, 150, "a.lynx"), (500, 50, None),
        ]  # fmt: skip
        assert listed[-1].continues == ("a.0000.lynx", "a.0001.lynx", "a.0002.lynx")

    def test_text_over_spans_is_that_over_one_cache(self, model: Model, tmp_path: Path) -> None:
        """At the same precision: their values are those of one prefill."""
        publish(model, tmp_path / "whole.lynx", codec="raw", dtype="fp32")
        publish(model, tmp_path / "a.lynx", codec="raw", dtype="fp32", span_tokens=200, continue_stored=False)
        assert text(model, tmp_path / "a.lynx") == text(model, tmp_path / "whole.lynx")

    def test_a_short_prompt_is_one_cache(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:100], span_tokens=100)
        assert names(tmp_path) == ["a.lynx"]
        assert lynxkv.inspect(tmp_path / "a.lynx").parent is None

    def test_what_a_writer_has_left_is_continued(self, model: Model, tmp_path: Path) -> None:
        stops: list[EncodeReport] = []

        def stop(report: EncodeReport) -> None:
            stops.append(report)
            if len(stops) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish(model, tmp_path / "a.lynx", span_tokens=150, on_span=stop)
        assert names(tmp_path) == ["a.0000.lynx", "a.0001.lynx"]
        assert lynxkv.load(tmp_path / "a.0001.lynx").token_ids == IDS[:300]
        report = publish(model, tmp_path / "a.lynx", span_tokens=150)
        assert report.continued_tokens == 300
        assert names(tmp_path) == ["a.0000.lynx", "a.0001.lynx", "a.0002.lynx", "a.lynx"]
        lynxkv.check(tmp_path / "a.lynx")

    def test_what_is_left_is_continued_with_residuals_elsewhere(self, model: Model, tmp_path: Path) -> None:
        hot, cold = tmp_path / "hot", tmp_path / "cold"

        def stop(report: EncodeReport) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish(model, hot / "a.lynx", span_tokens=200, residual_url=cold, on_span=stop)
        told: list[str] = []
        with pytest.raises(lynxkv.CacheExistsError, match=r"a\.0000\.lynx"):
            publish(model, hot / "a.lynx", span_tokens=200, report=told.append)
        assert len(told) == 1
        assert "a.0000.lynx has the first 200 tokens, but cannot be continued: " in told[0]
        report = publish(model, hot / "a.lynx", span_tokens=200, residual_url=cold)
        assert report.continued_tokens == 200
        assert names(hot) == ["a.0000.lynx", "a.0001.lynx", "a.lynx"]
        assert lynxkv.check(hot / "a.lynx", options=FetchOptions(residual_url=cold)).tokens == 500

    def test_what_is_left_counts_however_short(self, model: Model, tmp_path: Path) -> None:
        """Shorter than any cache that is continued otherwise."""

        def stop(report: EncodeReport) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish(model, tmp_path / "a.lynx", span_tokens=50, on_span=stop)
        assert publish(model, tmp_path / "a.lynx", span_tokens=50).continued_tokens >= 50
        assert lynxkv.load(tmp_path / "a.lynx").token_ids == IDS

    def test_spans_of_another_prompt_are_in_the_way(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", some_ids(500, seed=9), span_tokens=150)
        with pytest.raises(lynxkv.CacheExistsError):
            publish(model, tmp_path / "a.lynx", span_tokens=200)
        lynxkv.remove(tmp_path / "a.lynx")
        with pytest.raises(lynxkv.CacheExistsError, match=r"a\.0000\.lynx"):
            publish(model, tmp_path / "a.lynx", span_tokens=200)
        publish(model, tmp_path / "a.lynx", span_tokens=200, overwrite=True)
        assert names(tmp_path) == ["a.0000.lynx", "a.0001.lynx", "a.lynx"]
        assert lynxkv.load(tmp_path / "a.lynx").token_ids == IDS

    def test_a_cache_that_others_continue_is_not_replaced(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", IDS[:300])
        publish(model, tmp_path / "b.lynx")
        with pytest.raises(lynxkv.InputError, match=r"a\.lynx is continued by b\.lynx"):
            publish(model, tmp_path / "a.lynx", some_ids(300, seed=5), overwrite=True)
        publish(model, tmp_path / "b.lynx", overwrite=True)
        lynxkv.check(tmp_path / "b.lynx")

    @pytest.mark.parametrize("span_tokens", [0, -1])
    def test_spans_have_tokens(self, span_tokens: int, model: Model, tmp_path: Path) -> None:
        with pytest.raises(lynxkv.InputError, match="span_tokens"):
            publish(model, tmp_path / "a.lynx", span_tokens=span_tokens)

    def test_too_many_spans_are_refused_with_what_would_do(self, model: Model, tmp_path: Path) -> None:
        with pytest.raises(lynxkv.InputError, match="500 caches") as caught:
            publish(model, tmp_path / "a.lynx", span_tokens=1)
        assert str(caught.value.hint) == "make spans of 2 tokens or more"


@contextmanager
def writing(model: Model, url: str, *, ids: list[int] = IDS, **options: Any) -> Iterator[Callable[[], None]]:
    """A writer that publishes each span when it is told to, and all that are left in the end."""
    steps, failures = threading.Semaphore(0), []

    def on_span(report: EncodeReport) -> None:
        steps.acquire()

    def work() -> None:
        try:
            publish(model, url, ids, **{"span_tokens": 150, "on_span": on_span, **options})
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield steps.release
    finally:
        steps.release(100)
        thread.join(30)
    assert not failures


class TestFollowing:
    def test_text_is_that_of_the_whole_chain(self, model: Model, tmp_path: Path) -> None:
        url = str(tmp_path / "a.lynx")
        with writing(model, url) as step:
            step()
            with lynxkv.open(url, follow=True) as reader:
                assert reader.extent.stop == 500
                assert len(reader.spans) >= 1
                for _ in range(4):
                    step()
                followed = lynxkv.generate(reader, model, [5, 6], max_new_tokens=12, speculate=6)
                assert not reader.is_growing
        assert followed.token_ids == text(model, url)
        assert followed.drafted
        whole = lynxkv.check(url)
        assert followed.bytes_anchor + followed.bytes_residual == whole.bytes

    def test_spans_are_decoded_before_the_writer_is_done(self, model: Model, tmp_path: Path) -> None:
        url = str(tmp_path / "a.lynx")
        seen: list[int] = []
        with simulated(str(tmp_path)) as far, writing(model, url) as step:
            fs = filesystem_of(far)

            def read() -> set[str]:
                return {path.split("/")[-2] for path, _, _ in fs.reads if "residual" in path}

            with lynxkv.open(f"{far}/a.lynx", follow=True) as reader:
                done = threading.Event()
                result: list[Any] = []

                def run() -> None:
                    result.append(lynxkv.generate(reader, model, [5, 6], max_new_tokens=12))
                    done.set()

                thread = threading.Thread(target=run)
                thread.start()
                eventually(lambda: "a.0000.lynx" in read())  # even its Residual: the link is free
                assert reader.is_growing
                assert not done.is_set()
                seen.append(len(reader.spans))
                for _ in range(4):
                    step()
                thread.join(30)
        assert seen == [1] or seen == [2]
        assert result[0].token_ids == text(model, url)

    def test_what_is_followed_can_be_loaded_twice_while_it_grows(self, model: Model, tmp_path: Path) -> None:
        url = str(tmp_path / "a.lynx")
        with writing(model, url) as step, lynxkv.open(url, follow=True) as reader:
            first, second = reader.stream_anchor(), reader.stream_anchor()
            both: list[list[tuple[int, int]]] = [[], []]
            for got, stream in zip(both, (first, second), strict=True):
                got += [(payload.span, payload.segment.offset) for payload in stream.wait()]
            assert reader.is_growing
            for _ in range(4):
                step()
            for got, stream in zip(both, (first, second), strict=True):
                got += [(payload.span, payload.segment.offset) for payload in stream]
        assert both[0] == both[1]
        assert {span for span, _ in both[0]} == {0, 1, 2, 3}

    def test_a_store_that_opens_slowly_stops_no_check(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Even where one thread checks."""
        monkeypatch.setattr("os.cpu_count", lambda: 1)
        url, original = str(tmp_path / "a.lynx"), SpanReader.__init__
        asked, opened = threading.Event(), threading.Event()

        def slowly(span: SpanReader, url: str, *arguments: Any, **options: Any) -> None:
            if "a.0001" in url:
                asked.set()
                assert opened.wait(30)
            original(span, url, *arguments, **options)

        monkeypatch.setattr(SpanReader, "__init__", slowly)
        try:
            with (
                ThreadPoolExecutor(1) as taking,
                writing(model, url) as step,
                lynxkv.open(url, follow=True) as reader,
            ):
                assert asked.wait(30)
                assert taking.submit(reader.stream_anchor().wait).result(10)
                opened.set()
                for _ in range(4):
                    step()
                assert lynxkv.generate(reader, model, [5, 6], max_new_tokens=12).token_ids == text(model, url)
        finally:
            opened.set()

    def test_a_residual_that_is_not_to_be_had(self, model: Model, tmp_path: Path) -> None:
        """The text is begun again on the Anchors, while the writer is still at work."""
        hot, nowhere = tmp_path / "hot", tmp_path / "nowhere"
        nowhere.mkdir()
        options = FetchOptions(residual_url=nowhere, if_residual_unavailable="anchor-only")

        def tell(event: Event) -> None:
            if isinstance(event, Note):
                growing.append(reader.is_growing)
                for _ in range(4):
                    step()

        growing: list[bool] = []
        with (
            writing(model, str(hot / "a.lynx"), residual_url=tmp_path / "cold") as step,
            lynxkv.open(hot / "a.lynx", follow=True, options=options) as reader,
        ):
            followed = lynxkv.generate(reader, model, [5, 6], max_new_tokens=12, on_event=tell)
        assert growing == [True]
        assert followed.precision == "anchor"
        with lynxkv.open(hot / "a.lynx") as reader:
            right = lynxkv.generate(reader, model, [5, 6], max_new_tokens=12, verify="none")
        assert followed.token_ids == right.token_ids

    def test_a_batch_over_one_chain(self, model: Model, tmp_path: Path) -> None:
        url, suffixes = str(tmp_path / "a.lynx"), [[5, 6], [7, 8]]
        with writing(model, url) as step, lynxkv.open(url, follow=True) as reader:
            real = reader.stream_anchor

            def stream_anchor() -> SegmentStream:
                assert reader.is_growing
                for _ in range(4):
                    step()
                return real()

            reader.stream_anchor = stream_anchor  # type: ignore[method-assign]
            followed = lynxkv.generate_batch([(reader, suffix) for suffix in suffixes], model, max_new_tokens=12)
        for row, suffix in zip(followed.texts, suffixes, strict=True):
            with lynxkv.open(url) as reader:
                assert row.token_ids == lynxkv.generate(reader, model, suffix, max_new_tokens=12).token_ids

    def test_a_span_may_come_between_two_looks(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever asks for the extent, and then for the bases, finds more of these."""
        url = str(tmp_path / "a.lynx")
        with writing(model, url, span_tokens=25) as step, lynxkv.open(url, follow=True) as reader:
            spans, before = CacheReader.spans.fget, CacheReader.extent.fget  # type: ignore[attr-defined]

            def extent(self: CacheReader) -> Extent:
                found: Extent = before(self)
                if self.is_growing:
                    step()
                    eventually(lambda: len(spans(self)) > len(found.spans))
                return found

            monkeypatch.setattr(CacheReader, "extent", property(extent))
            followed = lynxkv.generate(reader, model, [5, 6], max_new_tokens=12)
            monkeypatch.undo()
        assert followed.token_ids == text(model, url)

    def test_a_chain_that_is_complete_is_followed_at_once(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx", span_tokens=150)
        with lynxkv.open(tmp_path / "a.lynx", follow=True) as reader:
            reader.wait_for_writer()
            assert [span.store.name for span in reader.spans] == ["a.0000.lynx", "a.0001.lynx", "a.0002.lynx", "a.lynx"]
            assert reader.token_ids().tolist() == IDS  # type: ignore[union-attr]
        assert text(model, tmp_path / "a.lynx", follow=True) == text(model, tmp_path / "a.lynx")

    def test_a_plain_cache_can_be_followed(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "a.lynx")
        assert text(model, tmp_path / "a.lynx", follow=True) == text(model, tmp_path / "a.lynx")

    def test_a_chain_that_continues_another_cache(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "first.lynx", IDS[:300])
        with (
            writing(model, str(tmp_path / "a.lynx"), span_tokens=80) as step,
            lynxkv.open(tmp_path / "a.lynx", follow=True) as reader,
        ):
            for _ in range(3):
                step()
            followed = lynxkv.generate(reader, model, [5, 6], max_new_tokens=12)
        assert [span.store.name for span in reader.spans][:2] == ["first.lynx", "a.0000.lynx"]
        assert followed.token_ids == text(model, tmp_path / "a.lynx")

    def test_without_a_question_the_tokens_are_waited_for(self, model: Model, tmp_path: Path) -> None:
        with (
            writing(model, str(tmp_path / "a.lynx")) as step,
            lynxkv.open(tmp_path / "a.lynx", follow=True) as reader,
        ):
            for _ in range(4):
                step()
            followed = lynxkv.generate(reader, model, [], max_new_tokens=12)
        with lynxkv.open(tmp_path / "a.lynx") as reader:
            assert lynxkv.generate(reader, model, [], max_new_tokens=12).token_ids == followed.token_ids

    def test_nobody_writes(self, tmp_path: Path) -> None:
        with pytest.raises(lynxkv.WriterStoppedError, match="nobody has begun"):
            lynxkv.open(tmp_path / "a.lynx", follow=True, options=FetchOptions(follow_s=0.05))

    def test_the_writer_stops(self, model: Model, tmp_path: Path) -> None:
        url = str(tmp_path / "a.lynx")

        def stop(report: EncodeReport) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish(model, url, span_tokens=150, on_span=stop)
        with lynxkv.open(url, follow=True, options=FetchOptions(follow_s=0.1)) as reader:
            with pytest.raises(lynxkv.WriterStoppedError, match="after position 150 of 500") as caught:
                lynxkv.generate(reader, model, [5, 6], max_new_tokens=12)
            assert "a.0000.lynx" in str(caught.value.hint)
            with pytest.raises(lynxkv.WriterStoppedError):
                reader.token_ids()

    def test_another_writer_begins_anew(self, model: Model, tmp_path: Path) -> None:
        url = str(tmp_path / "a.lynx")

        def stop(report: EncodeReport) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            publish(model, url, span_tokens=150, on_span=stop)
        with lynxkv.open(url, follow=True) as reader:
            publish(model, url, some_ids(500, seed=4), span_tokens=150, overwrite=True)
            with pytest.raises(lynxkv.BindingError):
                lynxkv.generate(reader, model, [5, 6], max_new_tokens=12)

    def test_a_part_of_another_chain_is_refused(self, model: Model, tmp_path: Path) -> None:
        publish(model, tmp_path / "b.lynx", IDS[:300], span_tokens=200)
        (tmp_path / "b.0000.lynx").rename(tmp_path / "a.0000.lynx")
        with pytest.raises(lynxkv.BindingError, match="part of another chain"):
            lynxkv.open(tmp_path / "a.lynx", follow=True)

    def test_closing_ends_the_wait(self, model: Model, tmp_path: Path) -> None:
        with writing(model, str(tmp_path / "a.lynx")):
            reader = lynxkv.open(tmp_path / "a.lynx", follow=True)
            stream = reader.stream_anchor()
            reader.close()
            with pytest.raises(lynxkv.StoreError):
                list(stream)

    def test_first_tokens_cannot_be_followed(self, tmp_path: Path) -> None:
        with pytest.raises(lynxkv.InputError):
            lynxkv.open(tmp_path / "a.lynx", follow=True, tokens=5)


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)
