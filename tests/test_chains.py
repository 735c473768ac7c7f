"""Chains load as one, and prefixes as far as they are wanted: the right values, from no more bytes than it takes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import lynxkv
from lynxkv.codecs.uniform import Uniform
from lynxkv.continuing import Continuation, continuation
from lynxkv.decoder import decode_into
from lynxkv.draft import Speculate
from lynxkv.fetch import CacheReader, FetchOptions
from lynxkv.integrations.hf import LynxCache, Model
from lynxkv.kernels import Paged
from lynxkv.kv import KV
from lynxkv.layout import Identity, Precision, TensorName
from lynxkv.store import Store
from lynxkv.store.transport import BlockingTransport, LocalTransport
from lynxkv.testing.filesystem import filesystem_of, simulated
from lynxkv.testing.kv import random_kv
from lynxkv.testing.tiny_models import tiny_model
from tests.test_fetch import Remote, idle_loop_tasks

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SPECULATE: tuple[Speculate, ...] = ("off", 6)
IDENTITY = Identity(model_id="example/model", fingerprint="1" * 64)


def continued(url: str, *, tokens: int | None = None) -> Continuation:
    """What continues the cache at `url`, or its first tokens."""
    with lynxkv.open(url, tokens=tokens) as reader:
        return continuation(reader, "full")


def assert_prefix(loaded: KV, whole: KV, tokens: int) -> None:
    """Bit by bit, the first tokens of `whole`."""
    assert (loaded.start, loaded.stop) == (0, tokens)
    for mine, right in zip(loaded.layers, whole.layers, strict=True):
        assert (mine.start, mine.stop) == (0, tokens)
        assert all(mine.tensors[name].equal(x[:, :tokens]) for name, x in right.tensors.items())


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 tokens, and ranges of few of them."""
    monkeypatch.setattr("lynxkv.codecs.base.SEGMENT_ELEMENTS", 1)
    monkeypatch.setattr("lynxkv.fetch.options.RANGE_BYTES", 4096)
    monkeypatch.setattr("lynxkv.fetch.options.LAST_RANGE_BYTES", 4096)
    monkeypatch.setattr("lynxkv.fetch.options.GAP_BYTES", 256)


@pytest.fixture
def kv() -> KV:
    return random_kv(layers=3, tokens=700)


@pytest.fixture
def chain(kv: KV, tmp_path: Path) -> str:
    """Three caches: [0, 300), [300, 500), and [450, 700) on part of the second; of different codecs, all exact."""
    for name, start, stop, codec in (("a", 0, 300, "default"), ("b", 300, 500, "fast"), ("c", 450, 700, "alg1")):
        parent = None if name == "a" else continued(str(tmp_path / f"{'a' if name == 'b' else 'b'}.lynx"), tokens=start)
        url = str(tmp_path / f"{name}.lynx")
        lynxkv.encode(kv.between(start, stop), url, codec=codec, identity=IDENTITY, exact=True, parent=parent)
    return str(tmp_path / "c.lynx")


@pytest.fixture
def far(chain: str) -> Iterator[str]:
    """The same behind a file system that counts."""
    with simulated(str(Path(chain).parent)) as url:
        yield f"{url}/c.lynx"


def test_a_chain_is_one_cache(chain: str, kv: KV) -> None:
    assert_prefix(lynxkv.load(chain, precision="exact"), _in_bf16(kv), 700)
    assert lynxkv.load(chain).token_ids == kv.token_ids
    folder = Path(chain).parent
    for precision in PRECISIONS:
        own = [lynxkv.load(folder / f"{name}.lynx", precision=precision).layers[1].tensors["k"] for name in "ab"]
        whole = lynxkv.load(chain, precision=precision).layers[1].tensors["k"]
        assert whole[:, :300].equal(own[0])
        assert whole[:, 300:450].equal(own[1][:, 300:450])
    report = lynxkv.check(chain)
    assert [Path(url).stem for url in report.spans] == ["a", "b", "c"]
    assert report.tokens == 700
    assert report.bytes == sum(path.stat().st_size for path in folder.glob("*/*"))


def test_its_header_says_what_it_continues(chain: str) -> None:
    parent = lynxkv.inspect(chain).parent
    assert parent is not None
    assert [(span.name, span.stop) for span in parent.spans] == [("a.lynx", 300), ("b.lynx", 450)]
    assert parent.precision == "full"
    with CacheReader(chain, alone=True) as reader:
        digests = reader.prefix_sha256()
        assert digests is not None
        assert len(digests) == 700 // 256
    with lynxkv.open(str(Path(chain).with_name("b.lynx"))) as reader:
        first = reader.prefix_sha256()
        assert first is not None
        assert first.tolist() == digests[:1].tolist()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 64, 68, 100, 299, 300, 301, 450, 451, 699, 700])
def test_its_first_tokens(tokens: int, precision: Precision, chain: str) -> None:
    loaded = lynxkv.load(chain, tokens=tokens, precision=precision)
    assert_prefix(loaded, lynxkv.load(chain, precision=precision), tokens)
    assert loaded.token_ids == (lynxkv.load(chain).token_ids or [])[:tokens]


@pytest.mark.parametrize("codec", ["default", "fixed", "alg1", "raw", "int8"])
def test_first_tokens_of_every_coding(codec: str, kv: KV, tmp_path: Path) -> None:
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url, codec=codec)
    for precision in ("anchor", "full"):
        for tokens in (2, 65, 513):
            assert_prefix(
                lynxkv.load(url, tokens=tokens, precision=precision), lynxkv.load(url, precision=precision), tokens
            )


def test_first_tokens_in_the_pages_of_an_engine(chain: str) -> None:
    tokens, whole = 460, lynxkv.load(chain, precision="exact")
    pages = torch.zeros(3, 2, 64, 8, 2, 16, dtype=torch.bfloat16)
    table = np.random.default_rng(0).permutation(64)[:58].astype(np.int64)

    class Engine:
        def target(self, layer: int, tensor: TensorName) -> Paged:
            return Paged(pages=pages[layer, "kv".index(tensor)].transpose(1, 2), table=table, tokens=tokens)

    with lynxkv.open(chain, tokens=tokens) as reader:
        decode_into(reader, Engine(), "exact")
    for number, layer in enumerate(whole.layers):
        for name, x in layer.tensors.items():
            assert Engine().target(number, name).read().equal(x[:, :tokens])


def test_no_more_is_fetched_than_the_first_tokens_need(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.fetch.span.FIRST_READ_BYTES", 1024)
    monkeypatch.setattr("lynxkv.fetch.head.FIRST_READ_BYTES", 1024)
    monkeypatch.setattr("lynxkv.fetch.options.FRONT_EDGES", (0, 1024))
    monkeypatch.setattr("lynxkv.fetch.options.SPAN_EDGES", (0, 1024))
    fs = filesystem_of(far)

    def fetched(tokens: int | None) -> dict[str, int]:
        """Bytes read of each Anchor's arrays; of all arrays that are needed; and whether Residuals were read."""
        with lynxkv.open(far, tokens=tokens, options=FetchOptions(concurrency=1)) as reader:
            fs.reads.clear()
            list(reader.stream_anchor())
            sums = dict.fromkeys("abc", 0)
            for path, start, stop in fs.reads:
                sums[path.rpartition(".lynx")[0][-1]] += (stop or 0) - (start or 0)
            fs.reads.clear()
            list(reader.start_residual())
            for name in sums:
                assert any(f"{name}.lynx/residual" in path for path, _, _ in fs.reads) == (sums[name] > 0)
            return sums | {"needed": reader.bytes_anchor + reader.bytes_residual}

    whole, part = fetched(None), fetched(310)
    assert part["c"] == 0
    assert 0 < part["b"] < 0.6 * whole["b"]
    assert part["needed"] < 0.6 * whole["needed"]
    first = fetched(70)
    assert first["b"] == first["c"] == 0
    assert 0 < first["a"] < 0.6 * whole["a"]


def test_nothing_more_of_a_chain_is_asked_for_ahead_of_its_first_caches(
    chain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fetch.span", "fetch.head", "format.read"):
        monkeypatch.setattr(f"lynxkv.{module}.FIRST_READ_BYTES", 1024)
    monkeypatch.setattr("lynxkv.fetch.options.FRONT_EDGES", (0, 1024, 2048))
    monkeypatch.setattr("lynxkv.fetch.options.SPAN_EDGES", (0, 1024))
    made: dict[str, Remote] = {}

    def make(store: Store) -> Remote:
        made[store.name] = Remote(LocalTransport(store, workers), tells_size=True)
        return made[store.name]

    with ThreadPoolExecutor(4) as workers, lynxkv.open(chain, options=FetchOptions(transport=make)) as reader:
        while idle_loop_tasks():
            pass
        for span in reader.spans:
            head_bytes = span.anchor_head.header_bytes + span.anchor_head.segments[0].offset
            size = Path(span.url, "anchor.safetensors").stat().st_size
            assert max(stop for _, _, stop in made[span.store.name].asked) <= max(head_bytes, 2048) < size
        assert len(list(reader.stream_anchor())) > 3


def test_all_anchors_come_before_any_residual(far: str) -> None:
    fs = filesystem_of(far)
    fs.reads.clear()
    with lynxkv.open(far) as reader:
        anchor = reader.stream_anchor()
        residual = reader.start_residual()
        assert {payload.span for payload in anchor} == {0, 1, 2}
        names = [payload.segment.coded[0].name for payload in residual]
    order = ["residual" in path for path, _, _ in fs.reads]
    assert order == sorted(order)
    assert sum(order) > 3
    assert names == sorted(names)  # keys of all three, then their values


def test_shards_of_a_chain_are_kept_on_disk(far: str, tmp_path: Path) -> None:
    options = FetchOptions(cache_dir=tmp_path / "kept")
    part = lynxkv.load(far, tokens=400, options=options)
    whole = lynxkv.load(far, options=options)
    assert_prefix(part, whole, 400)
    fs = filesystem_of(far)
    fs.reads.clear()
    assert_prefix(lynxkv.load(far, options=options), whole, 700)
    assert all("anchor" in path and start == 0 for path, start, _ in fs.reads)


def test_one_transport_is_not_enough(far: str) -> None:
    with lynxkv.open(far) as reader:
        spans = [span.store for span in reader.spans]
    made = []

    def make(store: Store) -> BlockingTransport:
        made.append(store.name)
        return BlockingTransport(store, workers)

    with ThreadPoolExecutor(2) as workers:
        assert lynxkv.load(far, options=FetchOptions(transport=make)).tokens == 700
        assert made == ["c.lynx", "a.lynx", "b.lynx"]
        with pytest.raises(lynxkv.InputError, match="does not read"):
            lynxkv.open(far, options=FetchOptions(transport=BlockingTransport(spans[-1], workers)))


def test_a_missing_parent_is_named(chain: str) -> None:
    folder = Path(chain).parent
    shutil.rmtree(folder / "a.lynx")
    for call in (lynxkv.load, lynxkv.check):
        with pytest.raises(lynxkv.CacheNotFoundError, match=r"a\.lynx is not there"):
            call(chain)
    assert lynxkv.inspect(chain).tokens.start == 450  # which looks at this cache alone


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_replaced_parent_is_refused(name: str, chain: str) -> None:
    url = str(Path(chain).with_name(f"{name}.lynx"))
    old = lynxkv.load(url)
    start = 300 if name == "b" else 0
    parent = continued(str(Path(chain).with_name("a.lynx"))) if start else None
    again = random_kv(layers=3, tokens=old.stop, seed=1).between(start, old.stop)
    lynxkv.encode(again, url, identity=IDENTITY, parent=parent, overwrite=True)
    with pytest.raises(lynxkv.BindingError, match=rf"{name}\.lynx"):
        lynxkv.load(chain)


def test_a_parent_of_another_model_is_refused(kv: KV, tmp_path: Path) -> None:
    lynxkv.encode(kv.between(0, 300), tmp_path / "a.lynx", identity=IDENTITY)
    parent = continued(str(tmp_path / "a.lynx"))
    other = Identity(model_id="example/other", fingerprint="2" * 64)
    with pytest.raises(lynxkv.IdentityError):
        lynxkv.encode(kv.between(300, 400), tmp_path / "b.lynx", identity=other, parent=parent)
    lynxkv.encode(
        kv.between(300, 400), tmp_path / "b.lynx", identity=other, parent=replace(parent, identity=Identity())
    )
    with pytest.raises(lynxkv.IdentityError) as caught:
        lynxkv.load(tmp_path / "b.lynx")
    assert caught.value.field == "fingerprint"


def test_what_cannot_be_continued_is_refused(chain: str, kv: KV, tmp_path: Path) -> None:
    parent = continued(chain, tokens=600)
    with pytest.raises(lynxkv.InputError, match="another prefix"):
        lynxkv.encode(kv.between(600, 700), tmp_path / "elsewhere" / "d.lynx", identity=IDENTITY, parent=parent)
    with pytest.raises(lynxkv.InputError, match="itself"):
        lynxkv.encode(kv.between(600, 700), tmp_path / "b.lynx", identity=IDENTITY, parent=parent, overwrite=True)
    with pytest.raises(lynxkv.InputError, match="ends at 600"):
        lynxkv.encode(kv.between(601, 700), tmp_path / "d.lynx", identity=IDENTITY, parent=parent)
    with pytest.raises(lynxkv.InputError, match="fp16"):
        lynxkv.encode(kv.between(600, 700), tmp_path / "d.lynx", identity=IDENTITY, parent=parent, dtype="fp16")
    assert not (tmp_path / "d.lynx").exists()


def test_sliding_windows_are_refused_by_name(tmp_path: Path) -> None:
    kv = random_kv(layers=2, tokens=100, windows=(None, 16))
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url)
    with pytest.raises(lynxkv.UnsupportedModelError, match="layer 1 has a sliding window of 16"):
        continued(url)
    with pytest.raises(
        lynxkv.InputError, match=r"layer 1 has a sliding window of 16 and holds the positions \[84, 100\)"
    ):
        lynxkv.load(url, tokens=98)
    for tokens in (99, 100):  # whose last token sees no more than what is held
        assert lynxkv.load(url, tokens=tokens).tokens == tokens


def test_first_tokens_of_a_window_that_still_holds_them(tmp_path: Path) -> None:
    kv = random_kv(layers=2, tokens=100, windows=(None, 128))
    url = str(tmp_path / "a.lynx")
    lynxkv.encode(kv, url)
    assert_prefix(lynxkv.load(url, tokens=70), lynxkv.load(url), 70)


@pytest.mark.parametrize("tokens", [0, -1, 701])
def test_as_many_tokens_as_there_are(tokens: int, chain: str) -> None:
    with pytest.raises(lynxkv.InputError, match="the cache has 700"):
        lynxkv.open(chain, tokens=tokens)


def test_a_cache_that_starts_later_has_no_first_tokens(kv: KV, tmp_path: Path) -> None:
    lynxkv.encode(kv.between(100, 300), tmp_path / "a.lynx")
    assert lynxkv.load(tmp_path / "a.lynx").start == 100
    with pytest.raises(lynxkv.InputError, match="starts at position 100"):
        lynxkv.load(tmp_path / "a.lynx", tokens=50)
    with pytest.raises(lynxkv.InputError, match="starts at position 100"):
        continued(str(tmp_path / "a.lynx"))


def test_chains_have_an_end(kv: KV, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lynxkv.continuing.MAX_PARENT_SPANS", 2)
    for number in range(3):
        parent = continued(str(tmp_path / f"{number - 1}.lynx")) if number else None
        lynxkv.encode(kv.between(100 * number, 100 * number + 100), tmp_path / f"{number}.lynx", parent=parent)
    with pytest.raises(lynxkv.InputError, match="more than 3 caches"):
        continued(str(tmp_path / "2.lynx"))


def test_unknown_token_ids(kv: KV, tmp_path: Path) -> None:
    kv.token_ids = None
    lynxkv.encode(kv.between(0, 300), tmp_path / "a.lynx")
    parent = continued(str(tmp_path / "a.lynx"))
    assert parent.token_ids is None
    lynxkv.encode(kv.between(300, 700), tmp_path / "b.lynx", parent=parent)
    with lynxkv.open(tmp_path / "b.lynx") as reader:
        assert reader.token_ids() is None
        assert reader.prefix_sha256() is None
    lynxkv.check(tmp_path / "b.lynx")


def test_other_tokens_before_it_are_noticed(kv: KV, tmp_path: Path) -> None:
    lynxkv.encode(kv.between(0, 300), tmp_path / "a.lynx")
    with lynxkv.open(tmp_path / "a.lynx") as reader:
        parent = continuation(reader, "full", token_ids=[7] * 300)
    lynxkv.encode(kv.between(300, 700), tmp_path / "b.lynx", parent=parent)
    with pytest.raises(lynxkv.ChecksumError, match="not those it continues"):
        lynxkv.check(tmp_path / "b.lynx")


def test_exporting_a_chain(chain: str, tmp_path: Path) -> None:
    report = lynxkv.export(chain, tmp_path / "kv.safetensors", tokens=460, precision="exact")
    assert (report.tokens, report.precision) == (460, "exact")


def _in_bf16(kv: KV) -> KV:
    for layer in kv.layers:
        layer.tensors = {name: x.to(torch.bfloat16) for name, x in layer.tensors.items()}
    return kv


class TestDecoding:
    """Models of a few thousand weights, whose text over a chain or a prefix is that of plain decoding."""

    @pytest.fixture(scope="class")
    @staticmethod
    def model() -> Model:
        return tiny_model("llama")

    @pytest.fixture
    @staticmethod
    def kv(model: Model) -> KV:
        generator = torch.Generator().manual_seed(0)
        return lynxkv.prefill(model, torch.randint(3, 48, (300,), generator=generator).tolist())

    @pytest.fixture
    @staticmethod
    def urls(model: Model, kv: KV, tmp_path: Path) -> tuple[str, str]:
        """One cache, and a chain of three, at the same precision."""
        whole, codec = str(tmp_path / "whole.lynx"), "raw"
        lynxkv.encode(kv, whole, codec=codec, identity=model.identity)
        for number, (start, stop) in enumerate([(0, 100), (100, 130), (130, 300)]):
            parent = continued(str(tmp_path / f"{number - 1}.lynx")) if number else None
            url = str(tmp_path / f"{number}.lynx")
            lynxkv.encode(kv.between(start, stop), url, codec=codec, identity=model.identity, parent=parent)
        return whole, url

    def test_text_over_a_chain_is_that_over_one_cache(self, model: Model, urls: tuple[str, str]) -> None:
        texts = []
        for url in urls:
            with lynxkv.open(url) as reader:
                texts.append(lynxkv.generate(reader, model, [5, 6], max_new_tokens=16).token_ids)
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("suffix", [[], [5, 6]])
    @pytest.mark.parametrize("tokens", [90, 100, 120, 300])
    def test_progressive_text_is_that_of_plain_decoding(
        self, tokens: int, suffix: list[int], model: Model, kv: KV, tmp_path: Path
    ) -> None:
        codec = Uniform(key_step=0.7, value_step=0.9, radix=32)
        lynxkv.encode(kv.between(0, 110), tmp_path / "a.lynx", codec=codec, identity=model.identity)
        parent = continued(str(tmp_path / "a.lynx"))
        url = str(tmp_path / "b.lynx")
        lynxkv.encode(kv.between(110, 300), url, codec=codec, identity=model.identity, parent=parent)
        texts = []
        for speculate in SPECULATE:
            with lynxkv.open(url, tokens=tokens) as reader:
                texts.append(lynxkv.generate(reader, model, suffix, max_new_tokens=16, speculate=speculate))
        plain, progressive = texts
        assert progressive.token_ids == plain.token_ids
        assert progressive.drafted > 0
        cache = LynxCache.load(url, model, tokens=tokens, new_tokens=20)
        assert cache.tokens == tokens

    def test_batches_over_a_chain(self, model: Model, urls: tuple[str, str]) -> None:
        with lynxkv.open(urls[1]) as chain, lynxkv.open(urls[0], tokens=200) as part:
            prompts = [(chain, [5, 6]), (chain, [7]), (part, [8])]
            together = lynxkv.generate_batch(prompts, model, max_new_tokens=8)
        for (url, tokens, suffix), text in zip(
            [(urls[0], 300, [5, 6]), (urls[0], 300, [7]), (urls[0], 200, [8])], together.texts, strict=True
        ):
            with lynxkv.open(url, tokens=tokens) as reader:
                assert lynxkv.generate(reader, model, suffix, max_new_tokens=8).token_ids == text.token_ids
