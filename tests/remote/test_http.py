"""Caches behind a real HTTP server, with ranges and without."""

from __future__ import annotations

import uuid

import pytest

import lynxkv
from lynxkv.choices import TransportName
from lynxkv.fetch import FetchOptions
from lynxkv.fetch.reader import CacheReader
from lynxkv.store.marks import ANCHOR_TOS, RESIDUAL_TOS, marked_client
from lynxkv.store.transport import HttpTransport
from lynxkv.testing.kv import random_kv
from lynxkv.testing.servers import Server

TRANSPORTS: tuple[TransportName, ...] = ("fsspec", "obstore")


@pytest.fixture
def name(http: Server) -> str:
    """A cache in the served folder."""
    name = f"{uuid.uuid4().hex}.lynx"
    lynxkv.encode(random_kv(layers=3, tokens=700), http.folder / name)
    return name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_transport_brings_the_same_bits(transport: TransportName, name: str, http: Server) -> None:
    pytest.importorskip(transport)
    plain = lynxkv.load(http.folder / name)
    loaded = lynxkv.load(f"{http.url}/{name}", options=FetchOptions(transport=transport))
    for mine, right in zip(loaded.layers, plain.layers, strict=True):
        assert all(mine.tensors[key].equal(tensor) for key, tensor in right.tensors.items())
    assert lynxkv.check(f"{http.url}/{name}").orphans == ()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranges_at_and_behind_the_end(transport: TransportName, name: str, http: Server) -> None:
    pytest.importorskip(transport)
    url = f"{http.url}/{name}"
    with CacheReader(url, options=FetchOptions(transport=transport), header_only=True) as reader:
        size = reader.bytes_anchor
        assert reader.size("anchor.safetensors") == size
        assert len(reader.read("anchor.safetensors", size - 10, size + 10)) == 10
        assert reader.read("anchor.safetensors", size, size + 10) == b""
        with pytest.raises(lynxkv.CacheNotFoundError):
            reader.read("absent", 0, 10)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_without_ranges_is_refused(transport: TransportName, name: str, http: Server) -> None:
    pytest.importorskip(transport)
    with pytest.raises(lynxkv.FetchError) as caught:
        CacheReader(f"{http.url_without_ranges}/{name}", options=FetchOptions(transport=transport, concurrency=1)).read(
            "anchor.safetensors", 10, 20
        )
    assert "ignores Range" in str(caught.value.hint), (str(caught.value), caught.value.hint)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_missing_caches_and_hosts_are_told_apart(transport: TransportName, http: Server) -> None:
    pytest.importorskip(transport)
    options = FetchOptions(transport=transport, attempts=2)
    with pytest.raises(lynxkv.CacheNotFoundError, match=r"there is no anchor\.safetensors"):
        lynxkv.open(f"{http.url}/absent.lynx", options=options)
    for host in ("127.0.0.1:9", "no-such-host.invalid"):
        with pytest.raises(lynxkv.FetchError) as caught:
            lynxkv.open(f"http://{host}/a.lynx", options=options)
        assert "host" in str(caught.value.hint), (str(caught.value), caught.value.hint)


def test_http_is_refused_as_a_target(http: Server) -> None:
    with pytest.raises(lynxkv.StoreError, match="cannot") as caught:
        lynxkv.encode(random_kv(), f"{http.url}/new.lynx")
    assert "can only be read" in str(caught.value.hint)


def test_packets_of_shards_are_marked_unlike(name: str, http: Server) -> None:
    plain = lynxkv.load(http.folder / name)
    options = FetchOptions(dscp=True)
    with CacheReader(f"{http.url}/{name}", options=options) as reader:
        (span,) = reader.spans
        for ranges, tos in ((span._ranges, ANCHOR_TOS), (span._residual_ranges, RESIDUAL_TOS)):
            assert isinstance(ranges.transport, HttpTransport)
            assert ranges.transport.fs.get_client is marked_client(tos)
    loaded = lynxkv.load(f"{http.url}/{name}", options=options)
    for mine, right in zip(loaded.layers, plain.layers, strict=True):
        assert all(mine.tensors[name].equal(tensor) for name, tensor in right.tensors.items())


def test_a_folder_without_caches_is_listed(http: Server) -> None:
    folder = http.folder / uuid.uuid4().hex
    (folder / "below").mkdir(parents=True)
    assert lynxkv.list_caches(f"{http.url}/{folder.name}/") == []
